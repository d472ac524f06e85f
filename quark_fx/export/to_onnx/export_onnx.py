"""Lower a quantized graph to an ONNX file."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from quark_fx.config.target import OnnxFiles
from quark_fx.errors import ExportError
from quark_fx.export.program import to_exported_program
from quark_fx.export.to_onnx.formats import FORMATS, FormatOptions, OnnxFormat, find_format, write_in_format
from quark_fx.export.to_onnx.respelling import respelled
from quark_fx.export.to_onnx.translation import LoweringError, translate, without_lowering
from quark_fx.graph.nodes import (
    DEQUANTIZE,
    QUANTIZE,
    code_format,
    describe,
    fake_mode,
    placeholders,
    results_of,
    static_size,
    target_name,
    tensor_names,
)
from quark_fx.graph.operators import measured_share, named_argument, row_by_target
from quark_fx.graph.signature import Signature
from quark_fx.model.quantized_model import QuantizedModel
from quark_fx.numbers.formats import (
    INT32,
    Format,
    parse_format,
)
from quark_fx.numbers.qparams import Scheme, Symmetry
from quark_fx.numbers.scales import FLOAT32
from quark_fx.system.isolation import isolated, warn
from quark_fx.system.options import checked_call
from quark_fx.system.writable import new_folder, require_file_place, require_possible, writing

if TYPE_CHECKING:
    import onnx_ir as ir

    from quark_fx.export.runtime.report import OnnxFile
    from quark_fx.export.runtime.trial import NotRun
    from quark_fx.export.to_onnx.edit import Kept

logger = logging.getLogger(__name__)

_EXTERNAL = 1_900_000_000
"""Size of the tensors in bytes above which they are stored in `<name>.data`: a protobuf file is limited to 2 GiB."""

CHOSEN_NAMES = "quark_fx.output_names"
"""Key of a file's metadata for the output names that the caller chose; `verify` compares them."""


@checked_call
@isolated
def onnx(
    qmodel: QuantizedModel,
    path: str | os.PathLike[str],
    *,
    format: str | None = None,
    opset: int | None = None,
    domain: str | None = None,
    accuracy_level: int | None = None,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    external_data: bool | None = None,
    rules: Sequence[Any] = (),
) -> OnnxFile:
    """Write `qmodel` as an ONNX model with integer weights.

    The file is written to a temporary folder first. There, `onnx.checker` must accept it, and ONNX Runtime and the
    target's runtime, where installed, must load it and run it on one sample of the calibration data. Only then does it
    replace an existing file of that name.

    Args:
        qmodel: Result of `quantize`.
        path: File to write.
        format: Format of the file; default: the first format of the target (`quark_fx.Target.onnx`), `"qdq"` for the
            built-in targets.
            `"qdq"`: pairs of `QuantizeLinear` and `DequantizeLinear` around float operators, which runtimes fuse.
            `"qoperator"`: integer operators (`QLinearConv`, `QGemm`, `MatMulInteger`, …).
            `"matmul_nbits"`: weights of 2, 4, or 8 bits for ONNX Runtime's `MatMulNBits` and `GatherBlockQuantized`.
            Vendors register further formats (`quark_fx.vendors`, docs/onnx.md).
        opset: Opset from 14 to 25. The default of the built-in targets, 21, is the first with 4- and 16-bit codes and
            scales per block; 25 adds 2-bit codes.
        domain: Domain of the quantizers and dequantizers: with `"qdq"`, `"com.microsoft"` allows 4- and 16-bit codes in
            any opset; with a vendor's format, one of the vendor's domains.
        accuracy_level: Option of `"matmul_nbits"`: 0 to 3 compute in float; 4 rounds activations to int8 and is faster.
        input_names: Names of the inputs; default: the names of the model's inputs.
        output_names: Names of the outputs; default: the keys of the model's result, or `output`, with `_out` appended
            if an input has that name.
        external_data: Whether to store tensors in a separate file, `<name>.data`; default: only above 1.9 GB.
        rules: Your own rewrites, which run last: functions decorated with `quark_fx.export.to_onnx.rules.onnx_rule`,
            or rules of `onnxscript.rewriter`.

    Returns:
        Path of the file, with links resolved. Its method `report()` tells which nodes ONNX Runtime runs in integers,
        and which runtimes did not run the file, and why. Its attribute `kept` lists the parts that the format left as
        `QuantizeLinear` / `DequantizeLinear` pairs, and the parts that `rules` declined.

    Raises:
        ExportError: If the format cannot represent the quantized model or does not have an option, the target does
            not support the format or the opset, a type needs a newer opset, operators lack a lowering (all are
            listed, with the user's source lines), the path cannot be written, or the file fails its check or its run.
    """
    try:
        import onnx_ir  # noqa: F401

        from quark_fx.export.runtime.report import OnnxFile
        from quark_fx.export.to_onnx.opset import require_known
    except ImportError as error:
        raise ExportError(f"ONNX export needs {error.name}: pip install 'quark_fx[onnx]'") from error
    if not isinstance(qmodel, QuantizedModel):
        raise ExportError(f"expected the result of quantize(), not {type(qmodel).__name__}")
    require_possible(path)
    if external_data is not None and not isinstance(external_data, bool):
        raise ExportError(f"external_data must be True, False or None, not {external_data!r}")
    target = qmodel.config.target
    format = next(iter(target.onnx.formats or FORMATS)) if format is None else format
    opset = _default_opset(qmodel.graph_module, target.onnx, domain) if opset is None else opset
    chosen, options = find_format(format, FormatOptions(domain=domain, accuracy_level=accuracy_level), target)
    require_known(opset, target)
    file = OnnxFile(path)
    if file.is_symlink():  # writing replaces the path: replace the file that the link points to, not the link
        file = OnnxFile(file.resolve())
    gm = qmodel.graph_module
    _require_values(gm)
    _require_names("input_names", input_names, qmodel.signature.input_names)
    _require_names("output_names", output_names, qmodel.signature.output_names)
    _require_onnx_types(gm, wide=chosen.wide)
    _require_fixed_groups(gm, qmodel.signature)
    if conditions := qmodel.signature.input_conditions:
        warn(
            "runtimes do not check input sizes: the file agrees with the model only where "
            f"{' and '.join(condition.text for condition in conditions)}, as in the calibration data"
        )
    _require_writable(file)
    inputs = input_names or qmodel.signature.input_names
    names = inputs, output_names or named_apart(qmodel.signature.output_names, inputs)
    _require_apart([*names[0], *names[1]])
    model, file.kept = _lowered(gm, *names, chosen, options, opset, target.onnx, rules)
    if list(names[1]) != named_apart(qmodel.signature.output_names, qmodel.signature.input_names):
        model.metadata_props[CHOSEN_NAMES] = json.dumps([value.name for value in model.graph.outputs])
    if target.onnx.check is not None:
        target.onnx.check(model)
    file.not_run = _write(model, file, external_data, qmodel)
    return file


def _default_opset(gm: GraphModule, files: OnnxFiles, domain: str | None) -> int:
    """Return the target's default opset, or the first opset with the graph's types of codes if newer and supported."""
    from quark_fx.export.to_onnx.lowering import onnx_type
    from quark_fx.export.to_onnx.opset import DEFAULT, first_with

    if files.opset >= DEFAULT or domain is not None:
        return files.opset
    formats = {fmt for node in gm.graph.nodes if (fmt := code_format(node)) is not None}
    # Blocks of 8-bit codes need a newer opset, too: `require_types` raises an error that names it.
    needed = first_with(onnx_type(str(fmt)) for fmt in formats if fmt.onnx_container.has_onnx_type)
    return max(files.opset, needed) if needed <= files.opsets[1] else files.opset


def _lowered(
    gm: GraphModule,
    input_names: Sequence[str],
    output_names: Sequence[str],
    chosen: OnnxFormat,
    options: FormatOptions,
    opset: int,
    files: OnnxFiles,
    rules: Sequence[Any] = (),
) -> tuple[ir.Model, tuple[Kept, ...]]:
    """Return the ONNX model of a graph in a format and opset, and the parts that the format or a rule left as is."""
    import onnxscript.optimizer

    from quark_fx.export.to_onnx.opset import convert, ir_version, require_types, translated

    model = _translate(respelled(gm), input_names, output_names, translated(opset))
    if any(node.graph is not model.graph for node in model.graph.all_nodes()):
        # torch lowers a few operators (such as embedding_bag) to loops that ONNX Runtime accepts only once simplified.
        onnxscript.optimizer.optimize(model)
    left_alone = write_in_format(model, chosen, options, files, rules)
    require_types(model, opset)
    model = convert(model, opset)
    model.ir_version = ir_version(opset)
    model.graph.name = type(gm).__name__
    return model, left_alone


def _write(model: ir.Model, path: Path, external_data: bool | None, qmodel: QuantizedModel) -> tuple[NotRun, ...]:
    """Write, check, and run the file in a temporary folder, then rename it; return the runtimes that did not run it."""
    import onnx_ir as ir

    from quark_fx.export.runtime.trial import run_once
    from quark_fx.export.to_onnx.edit import stored_bytes
    from quark_fx.export.whole_files import put_in_place

    external = stored_bytes(model) > _EXTERNAL if external_data is None else external_data
    data = f"{path.name}.data" if external else None
    with writing(path), new_folder(path.parent, f".{path.name}-") as folder:
        written = folder / path.name
        ir.save(model, written, external_data=data)
        _check_file(written)
        not_run = run_once(written, model, qmodel)
        put_in_place(written, path)
    return not_run


def _translate(gm: GraphModule, input_names: Sequence[str], output_names: Sequence[str], opset: int) -> ir.Model:
    places = [node for node in gm.graph.nodes if node.op == "placeholder"]
    results = results_of(gm)
    names = [name for name, node in zip(input_names, places, strict=True) if _is_tensor(node)]
    result_names = [name for name, node in zip(output_names, results, strict=True) if _is_tensor(node)]
    result_types = [node.meta["val"].dtype for node in results if _is_tensor(node)]
    errors: list[Exception] = []
    for decompose in (False, True):
        program = to_exported_program(gm)
        try:
            # The exporter traces again on this graph's fake values. The symbols that it creates must not stay pending
            # in the graph's shape environment, or `compile` fails.
            sizes = fake_mode(gm).shape_env
            with _quiet_exporter(), nullcontext() if sizes is None else sizes.ignore_fresh_unbacked_symbols():
                model = translate(program, names, result_names, opset=opset, decompose=decompose)
        except torch.onnx.OnnxExporterError as error:
            # Some operator lacks a lowering: let torch decompose the graph and try again.
            errors.append(error)
            logger.debug("decomposing, since %s", _causes(error)[-1])
            continue
        _name_codes(gm, model)
        _name_tensors(gm, model)
        _separate_outputs(model, result_names, result_types)
        return model
    raise ExportError(_untranslated(gm, errors[-1], opset)) from errors[-1]


def _is_tensor(node: object) -> bool:
    return isinstance(node, Node) and isinstance(node.meta.get("val"), torch.Tensor)


def _name_codes(gm: GraphModule, model: ir.Model) -> None:
    """Rename quantized values in the file to their names in the graph, for `verify`; a decomposition may change names.

    Codes with a scale measured at run time get a name that is not in the graph, so that `verify` does not compare them:
    a runtime's zero point may differ from torch's by one.
    """
    from quark_fx.export.to_onnx.edit import made_by
    from quark_fx.export.to_onnx.lowering import QUANTIZED

    ours = [node.name for node in gm.graph.nodes if target_name(node) == QUANTIZE]
    theirs = [value for node in model.graph for value in node.outputs if value.meta.get(QUANTIZED)]
    if len(ours) == len(theirs):
        for name, value in zip(ours, theirs, strict=True):
            value.name = name
    for value in theirs:
        if made_by(value, "DynamicQuantizeLinear"):
            value.name = f"{value.name}_measured"


def _name_tensors(gm: GraphModule, model: ir.Model) -> None:
    """Rename the tensors of a loaded graph to their names from when the model was captured."""
    taken = {value.name for node in model.graph.all_nodes() for value in node.outputs}
    taken |= {value.name for value in (*model.graph.inputs, *model.graph.initializers.values())}
    for stored_name, name in tensor_names(gm).items():
        value = model.graph.initializers.get(stored_name)
        if value is not None and name and name not in taken:
            value.name = name
            taken.add(name)


def _separate_outputs(model: ir.Model, names: Sequence[str], types: Sequence[torch.dtype]) -> None:
    """Give each output a separate value and name, even if two outputs are one value or an output is an input.

    torch computes some functions of 16-bit floats in float32 and casts the result for its consumers, but not for an
    output; such outputs get a cast here.
    """
    import onnx_ir as ir
    from onnx_ir.passes.common import OutputFixPass
    from onnx_ir.tensor_adapters import from_torch_dtype

    OutputFixPass()(model)
    for place, (value, name, dtype) in enumerate(zip(model.graph.outputs, names, types, strict=True)):
        if dtype.is_floating_point and value.dtype not in (None, from_torch_dtype(dtype)):
            cast = ir.node("Cast", [value], {"to": from_torch_dtype(dtype)})
            cast.outputs[0].shape, cast.outputs[0].dtype = value.shape, from_torch_dtype(dtype)
            model.graph.append(cast)
            model.graph.outputs[place] = value = cast.outputs[0]
        value.name = name


@contextmanager
def _quiet_exporter() -> Iterator[None]:
    log = logging.getLogger("torch.onnx")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


def _causes(error: BaseException) -> list[BaseException]:
    """Return an error and its causes, the root last."""
    return [error, *_causes(error.__cause__)] if error.__cause__ is not None else [error]


def _untranslated(gm: GraphModule, error: Exception, opset: int) -> str:
    """Return the message of an error of torch's exporter: the operators without a lowering, or the one that failed."""
    causes = _causes(error)
    failed = next((cause for cause in causes if isinstance(cause, LoweringError)), None)
    program = to_exported_program(gm)
    if failed is None and (missing := without_lowering(program, opset)):
        where = "\n".join(
            f"  {describe(node)}" + f", which torch decomposes into {operator}" * (target_name(node) != operator)
            for node, operator in missing
        )
        remedy = "Register one with `quark_fx.export.lowers`, or replace the operator in the model."
        return f"{len(missing)} node(s) have no ONNX lowering:\n{where}\n{remedy}"
    text = " ".join(map(str, causes))
    nodes = [node for node in program.graph.nodes if failed is None or target_name(node) == failed.name]
    nodes = [node for node in nodes if f"node %{node.name} " in text] or nodes[:1] * (failed is not None)
    where = "".join(f"  {describe(node)}\n" for node in nodes)
    cause = causes[-1] if failed is None else causes[causes.index(failed) + 1]
    why = f"{type(cause).__name__}: {cause}"
    remedy = "Replace the operator in the model."
    if failed is not None and not failed.built_in:
        remedy = "Correct the function, which `quark_fx.export.lowers` describes, or replace the operator in the model."
    return f"{failed or 'torch does not translate the model to ONNX'}:\n{where}  {why}\n{remedy}"


def _require_fixed_groups(gm: GraphModule, signature: Signature) -> None:
    """Raise `ExportError` for convolutions whose number of groups varies with the inputs; ONNX needs a constant."""
    nodes = [
        node
        for node in gm.graph.nodes
        if (row := row_by_target(node)) is not None
        and row.kind in ("conv", "conv_transpose")
        and isinstance(named_argument(node, "groups"), Node)
    ]
    if not nodes:
        return
    values = [named_argument(node, "groups").meta["val"] for node in nodes]
    symbols = {symbol for value in values for symbol in value.node.expr.free_symbols}
    shapes: dict[str, Any] = {
        str(n.target): v.shape for n in placeholders(gm) if isinstance(v := n.meta["val"], Tensor)
    }
    free = {
        name: [
            i
            for i, size in enumerate(shape)
            if static_size(size) is None and symbols.isdisjoint(size.node.expr.free_symbols)
        ]
        for name, shape in shapes.items()
    }
    listed = "\n".join(f"  {describe(node)}" for node in nodes)
    raise ExportError(
        f"the number of groups of {len(nodes)} convolution(s) varies with the inputs; ONNX needs it fixed:\n{listed}"
        "\nFix these sizes when you quantize the model: pass quantize() dynamic_shapes=" + signature.literal_of(free)
    )


def _require_onnx_types(gm: GraphModule, *, wide: bool) -> None:
    bad = []
    having = " and ".join(f"format={name!r}" for name, row in FORMATS.items() if row.wide)
    for node in gm.graph.nodes:
        fmt = code_format(node)
        if fmt == INT32 and not wide and target_name(node) == QUANTIZE:
            bad.append(f"  {fmt}, which only {having} supports: {describe(node)}")
            continue
        if fmt is not None and not fmt.has_onnx_type and not _is_built(node, fmt):
            bad.append(f"  {fmt}: {describe(node)}")
        elif target_name(node) == DEQUANTIZE and node.args[2].meta["val"].is_floating_point():
            bad.append(f"  {fmt} with offsets (symmetry='offset'): {describe(node)}")
        elif target_name(node) == "quark_fx.dynamic_qparams.default" and (what := _unmeasured(node)):
            bad.append(f"  {node.args[1]} {what} at run time: {describe(node)}")
    if bad:
        raise ExportError(
            "format(s) without an ONNX type:\n"
            + "\n".join(bad)
            + "\nUse an integer or float format with 2 to 8 or 16 bits instead."
        )


def _is_built(node: Node, fmt: Format) -> bool:
    """Tell whether a file can store codes without an ONNX type in another type.

    Narrow integers are stored in a wider integer type, which must have 8 bits for activations. Other codes can be
    stored if they belong to a weight, or to an activation in groups.
    """
    if (container := fmt.onnx_container) != fmt and container.bits <= 16:
        return fmt.activation_container.bits == 8 or target_name(node) == DEQUANTIZE
    grouped = target_name(node) == QUANTIZE and len(node.args) > 5 and node.args[5]
    constant = target_name(node) == DEQUANTIZE
    return bool(grouped or constant) and container == fmt and fmt.vector == 1


def _unmeasured(node: Node) -> str:
    """Return the property of a `dynamic_qparams` node that prevents its lowering; empty if it can be lowered."""
    fmt, symmetry, _, block, scale_type = node.args[1:6]
    if block in (0, -1):
        return "" if scale_type == str(FLOAT32) else "with 8-bit scales"
    if measured_share(node) != 1:
        return "with part of the range of groups (drop the observer)"
    symmetric = Scheme(format=parse_format(str(fmt)), symmetry=Symmetry(str(symmetry))).symmetric
    return "" if symmetric else "in groups with zero points"


def _require_values(gm: GraphModule) -> None:
    if any("val" not in node.meta for node in gm.graph.nodes if node.op in ("placeholder", "call_function")):
        raise ExportError(
            "the export needs the shapes of this loaded model, but they could not be restored: "
            f"{gm.meta.get('no_shapes', 'an operator has none')}; quantize the model again and export it before saving"
        )


def _require_names(option: str, given: Sequence[str] | None, own: Sequence[str]) -> None:
    if given is None:
        return
    if isinstance(given, str) or any(not isinstance(name, str) or not name for name in given):
        raise ExportError(f"{option} must be a list of names, not {given!r}")
    if len(given) != len(own):
        raise ExportError(f"{option} has {len(given)} name(s), but the model has {len(own)}: {', '.join(own)}")


def named_apart(names: Sequence[str], taken: Sequence[str]) -> list[str]:
    """Return `names`, with `_out` appended to each name that is in `taken` or occurs earlier in `names`."""
    result: list[str] = []
    for name in names:
        while name in (*taken, *result):
            name += "_out"
        result.append(name)
    return result


def _require_apart(names: Sequence[str]) -> None:
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ExportError(
            f"two inputs or outputs are called {', '.join(sorted(twice))}; set input_names or output_names"
        )


def _require_writable(path: Path) -> None:
    from quark_fx.export.whole_files import require_regular

    require_regular(path)
    require_file_place(path)


def _check_file(path: Path) -> None:
    import onnx as onnx_package

    try:
        onnx_package.checker.check_model(str(path))
    except onnx_package.checker.ValidationError as error:
        raise ExportError(f"{path.name} fails onnx.checker: {error}") from error
