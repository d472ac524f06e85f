"""`transformers` models with `generate` that run exported prefill and decode graphs in ONNX Runtime."""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING, Any

import torch

from quark_fx.data.cache_names import CACHE_NAMES, cache_of, returned_cache
from quark_fx.errors import ExportError
from quark_fx.export.runtime.session import may_optimize, session_options

if TYPE_CHECKING:
    import onnx_ir as ir


def generator(exported: Any, *, threads: int | None = None) -> Any:
    """Return a model of the exported class, without weights, whose `forward` runs the graphs on the CPU.

        model = generator(ExportedModel.from_pretrained("folder"))
        model.generate(**tokenizer(prompt, return_tensors="pt"), max_new_tokens=64)

    The sessions preserve the arithmetic of the graphs: by default, ONNX Runtime would fuse block-quantized weights into
    kernels that round activations to int8.

    Args:
        exported: `ExportedModel` of `transformers` from `OnnxExporter().export_for_generation`.
        threads: Number of threads per session; default: one per core.

    Raises:
        ExportError: If the export lacks a prefill or decode graph, `transformers` does not have the exported class, or
            the graphs do not keep a cache or drop tokens from it.
    """
    import transformers

    if missing := {"prefill", "decode"} - exported.components.keys():
        raise ExportError(
            f"this export has no {' and '.join(sorted(missing))} graph, only {', '.join(exported.components)}; "
            "use export_for_generation with a model that reads tokens"
        )
    architecture = exported.components["decode"].metadata.architecture
    base: Any = getattr(transformers, architecture, None)
    if base is None:
        raise ExportError(f"transformers has no class {architecture}: run the graphs of `exported.runners` yourself")
    exported.to("cpu", session_options=_options(exported, threads))
    _require_whole_cache(exported)

    class Generator(base):  # type: ignore[misc]
        """A model with the interface of `base` that ONNX Runtime computes."""

        @property
        def device(self) -> torch.device:
            """The device on which `generate` creates tensors. The parameters are on `meta`; nothing reads them."""
            return torch.device("cpu")

        @functools.wraps(base.forward)  # `generate` prepares the arguments that the signature lists
        def forward(self, **inputs: Any) -> Any:
            return _run(exported, {name: value for name, value in inputs.items() if value is not None})

    Generator.__name__ = Generator.__qualname__ = f"{architecture}InOnnxRuntime"
    with torch.device("meta"):
        model = Generator(exported.config)
    if exported.generation_config is not None:
        model.generation_config = exported.generation_config
    return model.eval()


def _run(exported: Any, inputs: dict[str, Any]) -> Any:
    """Run `prefill` if the cache is empty, or else `decode`."""
    cache = next((inputs.pop(name) for name in CACHE_NAMES if name in inputs), None)
    past = cache.get_seq_length() if cache is not None else 0
    runner = exported.runners["decode" if past else "prefill"]
    shapes = {spec.name: spec.shape for spec in runner.session.get_inputs()}
    if cache is not None:  # pass it under every name that a graph may use
        inputs |= dict.fromkeys(CACHE_NAMES, cache)
    tokens, mask = inputs.get("input_ids"), inputs.get("attention_mask")
    if tokens is None:
        raise ExportError("these graphs read tokens; pass input_ids")
    if past and tokens.shape[1] > 1 and shapes["input_ids"][1] == 1:
        raise ExportError(
            f"this decode graph reads one token at a time, but got {tokens.shape[1]} after a cache; export with "
            "export_for_generation(..., multi_token_decode=True)"
        )
    if mask is not None and "attention_mask" not in shapes and not mask.all():
        raise ExportError(
            "these graphs do not read an attention mask, and this batch is padded; export with a padded example"
        )
    if mask is None:  # `generate` drops a mask of ones, but the graph may need it
        inputs["attention_mask"] = tokens.new_ones(len(tokens), past + tokens.shape[1])
    output = runner(**inputs)
    _count_tokens(returned_cache(output), past + tokens.shape[1])
    return output


def _require_whole_cache(exported: Any) -> None:
    """Raise `ExportError` if the graphs do not keep a cache, or truncate it, so that their masks are wrong."""
    graph, runner = exported.components["decode"].program.graph, exported.runners["decode"]
    if not cache_of(graph.inputs):
        raise ExportError(
            "these graphs keep no cache, because the model was exported with generation_config.use_cache = False; "
            "set model.generation_config.use_cache = True and export again"
        )
    output = runner.unflatten([torch.empty(0, dtype=torch.float32)] * len(runner.session.get_outputs()))
    sliding = {index for index, _ in _sliding_layers(returned_cache(output))}
    if cut := sliding & cut_layers(graph):
        raise ExportError(
            f"the decode graph cuts the cache of the sliding layers {', '.join(map(str, sorted(cut)))} to their "
            "window, and its mask counts from the first token; export again with transformers 5.24 or later"
        )


def cut_layers(graph: ir.Graph) -> set[int]:
    """Return the indices of the layers where a graph does more than append new keys and values to the cache."""
    taken = cache_of(graph.inputs)
    matches = [(_KEYS_OR_VALUES.fullmatch(name), value) for name, value in cache_of(graph.outputs).items()]
    return {int(match[1]) for match, value in matches if match and not _appends(taken.get(match[0]), value)}


def _appends(past: ir.Value | None, output: ir.Value) -> bool:
    node = output.producer()
    if node is None or past is None:
        return False
    if node.op_type == "GroupQueryAttention":  # cached keys and values are inputs 3 and 4, and outputs 1 and 2
        return node.inputs[2 + list(node.outputs).index(output)] is past
    return node.op_type == "Concat" and node.inputs[0] is past and node.attributes.get_int("axis", 0) in (2, -2)


_KEYS_OR_VALUES = re.compile(r"layers\.(\d+)\.(?:key|value)s")


def _sliding_layers(cache: Any) -> list[tuple[int, Any]]:
    """Return the index and the layer for each layer of a cache that counts its tokens in Python."""
    layers = enumerate(getattr(cache, "layers", ()))
    return [(index, layer) for index, layer in layers if isinstance(getattr(layer, "cumulative_length", None), int)]


def _count_tokens(cache: Any, length: int) -> None:
    """Set the token counters of the sliding-window layers in a cache that a graph returned.

    Graphs return only tensors, but sliding-window layers count tokens in Python, so their counters still have the
    values from the trace. The exporters trace these layers as layers that keep all tokens; the mask has the window.

    Args:
        cache: Cache that the graph returned.
        length: Number of tokens in it.
    """
    for _, layer in _sliding_layers(cache):
        layer.cumulative_length = length


def _options(exported: Any, threads: int | None) -> Any:
    programs = [component.program for component in exported.components.values()]
    options = session_options(optimize=all(may_optimize(program.graph) for program in programs))
    if threads is not None:
        options.intra_op_num_threads = threads
    return options


__all__ = ["cut_layers", "generator"]
