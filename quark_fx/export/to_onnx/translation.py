"""Translate a program to ONNX with torch's exporter and the lowerings of this package, which `lowers` registers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any, TypeVar

import torch
from torch.export import ExportedProgram
from torch.fx import Interpreter, Node

from quark_fx.errors import ExportError
from quark_fx.system.names import nearest
from quark_fx.system.registry import Registry

LOWERINGS: Registry[Callable[..., Any], Callable[..., Any]] = Registry(
    "ONNX lowering", error=ExportError, names_of="operators"
)
"""Lowering functions by qualified operator name. The table is the support list: tests iterate over it."""

F = TypeVar("F", bound=Callable[..., Any])


class LoweringError(Exception):
    """Failure of a function in `LOWERINGS`; its cause is the error of the function.

    Attributes:
        name: Name of the operator.
        built_in: Whether the function is part of this package.
    """

    def __init__(self, name: str) -> None:
        super().__init__(f"the ONNX lowering {LOWERINGS.owner(name)} fails")
        self.name, self.built_in = name, LOWERINGS.owner(name).startswith("quark_fx.")


def lowers(name: str) -> Callable[[F], F]:
    """Register the ONNX lowering of an operator, `"namespace.name.overload"`.

    The function gets the operator's arguments, with tensors as ONNX values and all other arguments as Python constants,
    and returns the ONNX value or values that it builds with `onnxscript.opset21`.

    Raises:
        ExportError: If the name has another form, the operator does not have the overload, a library of that namespace
            is loaded but does not define the operator, or another module has registered a lowering of the operator.
    """
    overload = _overload(name)

    def register(function: F) -> F:
        if not function.__module__.startswith("quark_fx."):
            if overload is None:
                _require_other_namespace(name)
            if find_spec("onnxscript"):
                _fill()
        LOWERINGS.add(function, name)
        return function

    return register


def _require_other_namespace(name: str) -> None:
    """Raise `ExportError` if operators of the namespace of `name`, an unknown operator, are loaded."""
    namespace = name.partition(".")[0]
    loaded = [full for full in torch._C._dispatch_get_all_op_names() if full.startswith(f"{namespace}::")]
    if loaded:
        spelled = [full.replace("::", ".") + ".default" * ("." not in full) for full in loaded]
        raise ExportError(
            f"torch has no operator {name}; check the name, or import the library that defines it first"
            f"{nearest(name, spelled)}"
        )


def translation_table() -> dict[Any, Callable[..., Any]]:
    """Return the table for `torch.onnx.export(custom_translation_table=...)`, without operators that are not loaded."""
    _fill()
    rows = {_overload(name): _checked(name, function) for name, function in LOWERINGS.items()}
    return {overload: function for overload, function in rows.items() if overload is not None}


@functools.cache
def _checked(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls a lowering; it raises `LoweringError` if the lowering or its result is wrong."""

    @functools.wraps(function)
    def lowering(*args: Any, **kwargs: Any) -> Any:
        try:
            result = function(*args, **kwargs)
            _require_outputs(result, _overload(name)._schema.returns)
        except Exception as error:
            raise LoweringError(name) from error
        return result

    return lowering


def _require_outputs(result: Any, returns: Sequence[Any]) -> None:
    """Raise `TypeError` unless the result of a lowering has one ONNX value for each output of the operator."""
    import onnx_ir as ir

    if not returns or any(isinstance(output.type, torch.ListType) for output in returns):
        return
    values = result if isinstance(result, Sequence) and len(returns) > 1 else (result,)
    if len(values) != len(returns) or not all(isinstance(value, ir.Value) for value in values):
        kind = f"{len(result)} values" if isinstance(result, Sequence) else type(result).__name__
        raise TypeError(
            f"it returns {kind}, but the operator has {len(returns)} output(s); return an ONNX value for each"
        )


def without_lowering(program: ExportedProgram, opset: int) -> list[tuple[Node, str]]:
    """Return the operators that cannot be translated, even after torch decomposes them.

    Args:
        program: Program to translate.
        opset: Version of the ONNX operator set.

    Returns:
        Nodes of the program, each with the name of the first operator in its decomposition that has no lowering. Empty
        if this version of torch lacks an internal function for the search.
    """
    try:
        internal = "torch.onnx._internal.exporter"
        passes, dispatching = (import_module(f"{internal}.{name}") for name in ("_fx_passes", "_dispatching"))
        decompose, dispatch = passes.decompose_with_registry, dispatching.dispatch
    except (ImportError, AttributeError):
        return []
    registry = _registry(opset, tuple(translation_table().items()))
    nodes = {node.name: node for node in program.graph.nodes}
    missing: dict[Node, str] = {}
    try:
        decomposed = decompose(program, registry)
    except Exception:  # torch may fail on the operator that the caller is about to name
        return []
    for node in decomposed.graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload) and dispatch(node, registry)[0] is None:
            sources = node.meta.get("from_node") or ()  # one source: the node of `program`
            source = next((nodes[source.name] for source in sources if source.name in nodes), node)
            missing.setdefault(source, str(node.target))
    return list(missing.items())


def _fill() -> None:
    import quark_fx.export.to_onnx.lowering
    import quark_fx.export.to_onnx.stable_functions  # noqa: F401 (all fill the table; they need the `onnx` extra)


def _overload(name: str) -> Any:
    """Return the operator called `name`; `None` if no library in this process defines it.

    Raises:
        ExportError: If the name has another form, or the operator does not have the overload.
    """
    if name.count(".") != 2 or not all(name.split(".")):
        raise ExportError(f"{name!r} is not an operator; write 'namespace.name.overload', like 'aten.relu.default'")
    namespace, operator, overload = name.split(".")
    packet = getattr(getattr(torch.ops, namespace), operator, None)
    if packet is not None and not hasattr(packet, overload):
        raise ExportError(f"{namespace}.{operator} has no overload {overload}; it has {', '.join(packet.overloads())}")
    return getattr(packet, overload, None)


def translate(
    program: ExportedProgram, input_names: Sequence[str], output_names: Sequence[str], *, opset: int, decompose: bool
) -> Any:
    """Translate `program` to an `onnx_ir.Model`, without optimizing it.

    Args:
        program: Program with flat inputs and outputs.
        input_names: Names of the inputs in the file.
        output_names: Names of the outputs in the file.
        opset: Version of the ONNX operator set.
        decompose: Whether torch first decomposes operators without a lowering, for which it traces the graph again.

    Raises:
        torch.onnx.OnnxExporterError: If an operator does not have a lowering.
    """
    exporter = None if decompose else _exporter()
    if exporter is not None:
        return exporter(program, list(input_names), list(output_names), opset)
    exported = torch.onnx.export(
        program,
        (),
        dynamo=True,
        custom_translation_table=translation_table(),
        input_names=list(input_names),
        output_names=list(output_names),
        opset_version=opset,
        optimize=False,
        verbose=False,
    )
    assert exported is not None
    return exported.model


@functools.cache
def _exporter() -> Callable[[ExportedProgram, list[str], list[str], int], Any] | None:
    """Return a function that runs the steps of `torch.onnx.export` except decomposition.

    `torch.onnx.export` builds two tables in every call: some 500 lowerings, and the decompositions of all other
    operators. Building both takes longer than translating a ResNet.

    Returns:
        Function of a program, the names of its inputs and outputs, and an opset; `None` if this version of torch lacks
        an internal function that it needs.
    """
    try:
        internal = "torch.onnx._internal"
        names = ("_core", "_errors", "_fx_passes", "_ir_passes")
        core, errors, passes, names_of = (import_module(f"{internal}.exporter.{name}") for name in names)
        sizes: Any = import_module("torch.fx.experimental._config")
        promote, clean = _promotion(), passes.remove_assertion_nodes
        to_model, failure = core._exported_program_to_onnx_program, errors.ConversionError
        convert = import_module(f"{internal}._lazy_import").onnxscript_apis.convert_version
        rename_inputs, rename_outputs = names_of.rename_inputs, names_of.rename_outputs
    except (ImportError, AttributeError):
        return None

    def export(program: ExportedProgram, input_names: list[str], output_names: list[str], opset: int) -> Any:
        try:
            with sizes.patch(backed_size_oblivious=True):  # as in torch: sizes of 0 and 1 are not special
                for module in program.graph_module.modules():
                    promote(module)
                clean(program.graph_module)
            model = to_model(program, registry=_registry(opset, tuple(translation_table().items()))).model
        except Exception as error:
            raise failure(str(error)) from error
        model = convert(model, opset)
        rename_inputs(model, input_names)
        rename_outputs(model, output_names)
        return model

    return export


def _promotion() -> Callable[[Any], None]:
    """Return a function that inserts the casts of type promotion into a graph.

    torch's pass computes every fake value of the graph again, which takes longer than the translation. This function
    uses the values that the nodes have from capture.
    """
    promotion = import_module("torch.onnx._internal.fx.passes.type_promotion")
    interpreter: Any = promotion._TypePromotionInterpreter
    rule_of, table = promotion.get_type_promotion_rule, promotion.TypePromotionTable()

    class Known(interpreter):  # type: ignore[misc]
        def run_node(self, n: Node) -> Any:
            rule = rule_of(n, self.type_promotion_table)
            if rule:
                with self._set_current_node(n):
                    self._maybe_promote_node(n, rule)
            return n.meta["val"] if "val" in n.meta else Interpreter.run_node(self, n)

    def promote(module: Any) -> None:
        run = promotion.InsertTypePromotion(module, table)
        run.interpreter = Known(module, table)
        run.run()

    return promote


@functools.cache
def _registry(opset: int, table: tuple[tuple[Any, Callable[..., Any]], ...]) -> Any:
    from torch.onnx._internal.exporter import _registration

    registry = _registration.ONNXRegistry.from_torchlib(opset_version=opset)
    for target, function in table:
        registry.register_op(target, function, is_complex=False)
    return registry
