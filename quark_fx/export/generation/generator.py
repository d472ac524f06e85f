"""Run exported prefill and decode graphs in ONNX Runtime, as a model of `transformers` that can `generate`."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from quark_fx.data.cache_names import CACHE_NAMES
from quark_fx.errors import ExportError
from quark_fx.export.runtime.session import session_options

if TYPE_CHECKING:
    import onnx_ir as ir


def generator(exported: Any, *, threads: int | None = None) -> Any:
    """Return a model of the exported class without weights, whose forward runs the graphs on the CPU.

        model = generator(ExportedModel.from_pretrained("folder"))
        model.generate(**tokenizer(prompt, return_tensors="pt"), max_new_tokens=64)

    Its sessions keep to the arithmetic of the graphs: ONNX Runtime would fuse weights in blocks to kernels that round
    activations to int8.

    Args:
        exported: an `ExportedModel` of `transformers`, of `OnnxExporter().export_for_generation`.
        threads: of a session; default: one for each core.

    Raises:
        ExportError: if the graphs are not those two, or of a class that `transformers` does not have.
    """
    import transformers

    if missing := {"prefill", "decode"} - exported.components.keys():
        raise ExportError(
            f"this export has no {' and '.join(sorted(missing))} graph, only {', '.join(exported.components)}; "
            "use export_for_generation of a model that reads tokens"
        )
    architecture = exported.components["decode"].metadata.architecture
    base: Any = getattr(transformers, architecture, None)
    if base is None:
        raise ExportError(f"transformers has no {architecture}: run the graphs of `exported.runners` yourself")
    exported.to("cpu", session_options=_options(exported, threads))

    class Generator(base):  # type: ignore[misc]
        """`base`, computed by ONNX Runtime."""

        @property
        def device(self) -> torch.device:
            """Where `generate` makes its tensors; the parameters, never read, are nowhere."""
            return torch.device("cpu")

        @functools.wraps(base.forward)  # `generate` prepares what the signature names
        def forward(self, **inputs: Any) -> Any:
            return _run(exported, {name: value for name, value in inputs.items() if value is not None})

    Generator.__name__ = Generator.__qualname__ = f"{architecture}InOnnxRuntime"
    with torch.device("meta"):
        model = Generator(exported.config)
    if exported.generation_config is not None:
        model.generation_config = exported.generation_config
    return model.eval()


def _run(exported: Any, inputs: dict[str, Any]) -> Any:
    """Run `prefill` if the cache is empty, else `decode`."""
    cache = next((inputs.pop(name) for name in CACHE_NAMES if name in inputs), None)
    runner = exported.runners["decode" if cache is not None and cache.get_seq_length() else "prefill"]
    names = {spec.name for spec in runner.session.get_inputs()}
    if cache is not None:  # under the name that the graph took it by
        inputs |= dict.fromkeys(CACHE_NAMES, cache)
    mask = inputs.get("attention_mask")
    if mask is not None and "attention_mask" not in names and not mask.all():
        raise ExportError("these graphs read no attention mask, and this batch is padded; export with a padded example")
    return runner(**inputs)


def _options(exported: Any, threads: int | None) -> Any:
    programs = [component.program for component in exported.components.values()]
    options = session_options(optimize=not any(fuses_wrongly(node) for p in programs for node in p.graph))
    if threads is not None:
        options.intra_op_num_threads = threads
    return options


def fuses_wrongly(node: ir.Node) -> bool:
    """Tell whether ONNX Runtime fuses the node to kernels it does not implement: 8-bit floats, 4-bit activations."""
    if node.op_type not in ("QuantizeLinear", "DequantizeLinear"):
        return False
    codes = node.outputs[0] if node.op_type == "QuantizeLinear" else node.inputs[0]
    dtype = codes.dtype if codes is not None else None
    return dtype is not None and (dtype.is_floating_point() or (node.op_type[0] == "Q" and dtype.itemsize < 1))


__all__ = ["fuses_wrongly", "generator"]
