"""Lower a quantized graph to an ONNX file in QDQ form."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.fx import GraphModule, Node

from quark_fx.errors import ExportError
from quark_fx.export.program import to_exported_program
from quark_fx.export.runtime import runtime_options
from quark_fx.export.table import translation_table
from quark_fx.export.translation import translate
from quark_fx.formats import FloatFormat, IntFormat
from quark_fx.graph import code_format, describe, results_of, target_name
from quark_fx.model import QuantizedModel
from quark_fx.qparams import ScaleType

logger = logging.getLogger(__name__)

OPSET = 21
"""The first opset with 4- and 16-bit codes and blocks; every ONNX Runtime since 1.20 loads it."""
IR_VERSION = 10

_EXTERNAL = 1_900_000_000
"""Bytes of tensors above which they go to `<name>.data`: a protobuf file ends at 2 GiB."""


def onnx(
    qmodel: QuantizedModel,
    path: str | os.PathLike[str],
    *,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    external_data: bool | None = None,
) -> Path:
    """Write `qmodel` as an ONNX model of `QuantizeLinear` / `DequantizeLinear` pairs and integer weights.

    The file is checked: it passes `onnx.checker`, and ONNX Runtime, where installed, loads and optimises it.

    Args:
        qmodel: from `quantize`.
        path: the file to write.
        input_names: default: the names of the model's inputs.
        output_names: default: the keys of the model's result, or `output`.
        external_data: store tensors beside the file as `<name>.data`; default: only above 1.9 GB.

    Returns:
        The path written.

    Raises:
        ExportError: if a format has no ONNX type, an operator has no lowering (all are listed, with the
            user's source lines), the path cannot be written, or the file fails its check.
    """
    try:
        import onnx_ir as ir
        import onnxscript.optimizer

        from quark_fx.export.onnx_passes import PASSES
    except ImportError as error:
        raise ExportError(f"ONNX export needs {error.name}: pip install 'quark_fx[onnx]'") from error
    if not isinstance(qmodel, QuantizedModel):
        raise ExportError(f"expected what quantize() returned, not {type(qmodel).__name__}")
    path = Path(path)
    gm = qmodel.graph_module
    _require_values(gm)
    _require_names("input_names", input_names, qmodel.signature.input_names)
    _require_names("output_names", output_names, qmodel.signature.output_names)
    _require_onnx_types(gm)
    _require_writable(path)
    model = _translate(gm, input_names or qmodel.signature.input_names, output_names or qmodel.signature.output_names)
    if any(node.graph is not model.graph for node in model.graph.all_nodes()):
        # torch lowers a few operators (a bag of embeddings) to loops that ONNX Runtime takes only once simplified.
        onnxscript.optimizer.optimize(model)
    for p in PASSES:
        p(model)
    model.ir_version = IR_VERSION
    model.graph.name = type(gm).__name__
    size = sum(v.const_value.nbytes for v in model.graph.initializers.values() if v.const_value is not None)
    external = size > _EXTERNAL if external_data is None else external_data
    try:
        ir.save(model, path, external_data=f"{path.name}.data" if external else None)
    except OSError as error:
        raise ExportError(f"{path} could not be written: {error}") from error
    try:
        _check_file(path, gm)
    except ExportError:
        for file in (path, path.with_name(f"{path.name}.data")):
            file.unlink(missing_ok=True)
        raise
    return path


def _translate(gm: GraphModule, input_names: Sequence[str], output_names: Sequence[str]):  # type: ignore[no-untyped-def]
    places = [node for node in gm.graph.nodes if node.op == "placeholder"]
    results = results_of(gm)
    names = [name for name, node in zip(input_names, places, strict=True) if _is_tensor(node)]
    result_names = [name for name, node in zip(output_names, results, strict=True) if _is_tensor(node)]
    errors: list[Exception] = []
    for decomposed in (True, False):
        program = to_exported_program(gm, decomposed=decomposed)
        try:
            with _quiet_exporter():
                model = translate(program, names, result_names, opset=OPSET)
        except torch.onnx.OnnxExporterError as error:
            # Some operator has no lowering as it stands: let torch decompose the graph and try again.
            errors.append(error)
            logger.debug("decomposing, since %s", _root(error))
            continue
        _name_codes(gm, model)
        return model
    raise ExportError(_missing_lowerings(gm, errors[-1])) from errors[-1]


def _is_tensor(node: object) -> bool:
    return isinstance(node, Node) and isinstance(node.meta.get("val"), torch.Tensor)


def _name_codes(gm: GraphModule, model) -> None:  # type: ignore[no-untyped-def]
    """Name every quantized value in the file as in the graph (a decomposition renames), for `verify`."""
    ours = [node.name for node in gm.graph.nodes if target_name(node) == "quark_fx.quantize.default"]
    theirs = [node.outputs[0] for node in model.graph if node.op_type == "QuantizeLinear"]
    if len(ours) == len(theirs):
        for name, value in zip(ours, theirs, strict=True):
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


def _root(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error


_TORCH = ("aten", "prims", "torchvision")
"""Namespaces of operators that torch may lower."""


def _missing_lowerings(gm: GraphModule, error: Exception) -> str:
    cause = _root(error)
    text = f"{error} {cause}"
    calls = [n for n in gm.graph.nodes if isinstance(n.target, torch._ops.OpOverload)]
    missing = {n.target for n in calls if f"%{n.name} " in text or f"'{n.target}'" in text}
    # torch names the first it meets; what no library of torch's has, it cannot lower either.
    missing |= {n.target for n in calls if n.target.namespace not in _TORCH} - translation_table().keys()
    nodes = [n for n in calls if n.target in missing]
    where = "\n".join(f"  {describe(node)}" for node in nodes) or f"  {cause}"
    return (
        f"{len(nodes) or 1} node(s) have no ONNX lowering:\n{where}\n"
        "Register one with `quark_fx.export.lowers`, or replace the operator in the model."
    )


def _require_onnx_types(gm: GraphModule) -> None:
    bad = []
    for node in gm.graph.nodes:
        fmt = code_format(node)
        signed = isinstance(fmt, IntFormat) and fmt.sign_magnitude
        narrow = isinstance(fmt, FloatFormat) and fmt.bits < 8
        if fmt is not None and (fmt.bits not in (4, 8, 16, 32) or signed or narrow):
            bad.append(f"  {fmt}: {describe(node)}")
        elif target_name(node) == "quark_fx.dynamic_qparams.default" and not _measures_floats(node):
            bad.append(f"  {node.args[1]} in groups: {describe(node)}")
    if bad:
        raise ExportError("format(s) without an ONNX type:\n" + "\n".join(bad) + "\nUse 4, 8 or 16 bits instead.")


def _measures_floats(node: Node) -> bool:
    """Tell whether a `dynamic_qparams` measures float32 scales per tensor or token."""
    *_, block, scale_type, _ = node.args
    return bool(block in (0, -1) and scale_type == ScaleType.FLOAT32)


def _require_values(gm: GraphModule) -> None:
    if any("val" not in node.meta for node in gm.graph.nodes if node.op in ("placeholder", "call_function")):
        raise ExportError(
            "the shapes of this loaded model could not be restored, which its export needs; quantize the model again "
            "and export it before saving"
        )


def _require_names(option: str, given: Sequence[str] | None, own: Sequence[str]) -> None:
    if given is not None and len(given) != len(own):
        raise ExportError(f"{option} has {len(given)} name(s), the model {len(own)}: {', '.join(own)}")


def _require_writable(path: Path) -> None:
    directory = path.parent
    if not directory.is_dir():
        raise ExportError(f"{path} cannot be written: the directory {directory} does not exist; create it first")
    if path.is_dir() or not os.access(path if path.exists() else directory, os.W_OK):
        raise ExportError(f"{path} cannot be written: it is a directory or not writable; choose another path")


def _check_file(path: Path, gm: GraphModule) -> None:
    import onnx as onnx_package

    try:
        onnx_package.checker.check_model(str(path))
    except onnx_package.checker.ValidationError as error:
        raise ExportError(f"{path} fails onnx.checker: {error}") from error
    try:
        import onnxruntime
    except ImportError:
        return
    options = runtime_options(gm)
    options.log_severity_level = 4
    try:
        onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise ExportError(
            f"{path.name} does not load in ONNX Runtime {onnxruntime.__version__}: {error}{_dtype_hint(gm)}"
        ) from error


def _dtype_hint(gm: GraphModule) -> str:
    values = (node.meta.get("val") for node in gm.graph.nodes)
    dtypes = {value.dtype for value in values if isinstance(value, torch.Tensor)}
    rare = dtypes & {torch.bfloat16, torch.float64}
    return f"\nThe model computes in {', '.join(map(str, rare))}; quantize model.float() instead" if rare else ""
