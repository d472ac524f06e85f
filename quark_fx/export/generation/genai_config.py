"""`genai_config.json`, which describes a graph with a KV cache to ONNX Runtime GenAI.

Source: https://onnxruntime.ai/docs/genai/reference/config.html, and `src/config.cpp` of onnxruntime-genai for
undocumented fields.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from quark_fx.data.cache_names import CACHE_NAMES
from quark_fx.data.context import context_length
from quark_fx.errors import ExportError
from quark_fx.export.generation.generator import cut_layers
from quark_fx.export.runtime.session import may_optimize

if TYPE_CHECKING:
    import onnx_ir as ir

_TRACED = re.compile(rf"(input|output)\.(?:{'|'.join(CACHE_NAMES)})\.layers\.(\d+)\.(key|value)s")
"""Pattern of the names that `transformers` gives to the inputs and outputs of a layer's cache."""

_CACHE = {"input": "past_key_values.%d.", "output": "present.%d."}
"""Prefixes of the names of the same inputs and outputs in GenAI; `%d` stands for the layer."""

_FED = ("input_ids", "attention_mask", "position_ids")
"""Inputs, in addition to the cache, that GenAI feeds to a graph that has them."""

_SAMPLING = ("do_sample", "temperature", "top_k", "top_p", "repetition_penalty")
"""Options of a `GenerationConfig` that have the same names in GenAI."""


def name_cache(graph: ir.Graph) -> int:
    """Rename the inputs and outputs of the cache to their names in GenAI, and return the number of layers.

    Raises:
        ExportError: If the graph has inputs that GenAI does not feed, or if its cache is anything but keys and values
            of the same shape for each layer.
    """
    _drop_windows(graph)
    cut = cut_layers(graph)
    pairs: dict[tuple[str, int], dict[str, ir.Value]] = {}
    unknown = []
    for value in (*graph.inputs, *graph.outputs):
        match = _TRACED.fullmatch(value.name or "")
        if match is not None:
            side, layer, kind = match.groups()
            pairs.setdefault((side, int(layer)), {})[kind] = value
        elif value.name not in (*_FED, "logits"):
            unknown.append(value.name)
    layers = sorted({layer for _, layer in pairs})
    halves = [("input", layer) for layer in layers] + [("output", layer) for layer in layers]
    odd = [
        f"keys and values of other sizes in layer {n}"
        for side, n in halves
        if n in cut or not _one_size(pairs.get((side, n), {}))
    ]
    if unknown or odd or not layers:
        what = ", ".join([*map(str, unknown), *dict.fromkeys(odd)]) or "no cache"
        raise ExportError(
            f"GenAI needs tokens and, in each layer, keys and values of one size; this model has {what}; "
            "use export.GenerationQuantizer and export.generator"
        )
    for (side, layer), pair in pairs.items():
        for kind, value in pair.items():
            value.name = _CACHE[side] % layer + kind
            value.shape = _with_sizes(value)
    return len(layers)


def _drop_windows(graph: ir.Graph) -> None:
    """Remove the sizes of attention windows: scalar inputs that the graph returns unchanged."""
    for output in list(graph.outputs):
        node = output.producer()
        source = node.inputs[0] if node is not None and node.op_type == "Identity" else None
        if node is None or source is None or not source.is_graph_input() or source.shape is None or source.shape.rank():
            continue
        graph.outputs.remove(output)
        graph.remove(node, safe=True)
        if not source.uses():
            graph.inputs.remove(source)


def _with_sizes(value: ir.Value) -> ir.Shape:
    """Return the shape of a value, with symbols such as "64" as integers: torch writes some fixed sizes as symbols."""
    import onnx_ir as ir

    from quark_fx.export.to_onnx.edit import shape_of

    names = [dim if isinstance(dim, int) else dim.value for dim in shape_of(value)]
    return ir.Shape([int(str(name)) if str(name).isdigit() else name for name in names])


def _one_size(pair: dict[str, ir.Value]) -> bool:
    """Tell whether keys and values exist and have the same shape `(batch, heads, tokens, channels)`."""
    shapes = [value.shape for value in pair.values()]
    return len(shapes) == 2 and shapes[0] is not None and len(shapes[0]) == 4 and shapes[0] == shapes[1]


def genai_config(graph: ir.Graph, filename: str, model: Any) -> dict[str, Any]:
    """Return the content of `genai_config.json`.

    Args:
        graph: Graph for one sequence, after `name_cache`.
        filename: Name of the graph's file.
        model: Model of `transformers`; its configurations contain the generation options.
    """
    from quark_fx.export.to_onnx.edit import shape_of

    text = model.config.get_text_config(decoder=True)
    asked, names = model.generation_config, [value.name or "" for value in graph.inputs]
    keys = next(value for value in graph.inputs if (value.name or "").startswith(_CACHE["input"].partition("%")[0]))
    logits = next(value for value in graph.outputs if value.name == "logits")
    tokens = {name: token_of(model, name) for name in ("bos_token_id", "eos_token_id")}
    context = require_context_length(model)
    return {
        "model": {
            # GenAI's only type that is not specific to an architecture; some other types have special rules.
            "type": "decoder",
            "context_length": context,
            "vocab_size": shape_of(logits)[2],
            **{name: token for name, token in tokens.items() if token is not None},
            # GenAI drops tokens with this id from the end of a prompt. A single sequence has only real tokens, but the
            # last one may have the id of the padding token, which is often the end token.
            "pad_token_id": -1,
            "decoder": {
                "filename": filename,
                "hidden_size": text.hidden_size,
                "num_attention_heads": text.num_attention_heads,
                "num_hidden_layers": sum(name.endswith(".key") for name in names),
                "num_key_value_heads": shape_of(keys)[1],
                "head_size": shape_of(keys)[3],
                "session_options": _session_options(graph),
                "inputs": {name: name for name in _FED if name in names} | _templates("past", "input"),
                "outputs": {"logits": "logits"} | _templates("present", "output"),
            },
        },
        "search": {
            # With a shared buffer, GenAI would allocate the cache at full length and treat it as full.
            "past_present_share_buffer": False,
            "max_length": context,
            **{name: value for name in _SAMPLING if (value := getattr(asked, name, None)) is not None},
        },
    }


def token_of(model: Any, name: str) -> Any:
    """Return the id, or the ids, of a special token of a model; `None` if the model does not have it.

    Args:
        model: Model of `transformers`.
        name: Name of the entry in the configuration, such as `eos_token_id`.
    """
    token = getattr(model.generation_config, name, None)
    return getattr(model.config.get_text_config(decoder=True), name, None) if token is None else token


def require_context_length(model: Any) -> int:
    """Return the largest number of tokens that a model reads.

    Raises:
        ExportError: If the model's configuration does not contain this number.
    """
    length = context_length(model.config)
    if length is None:
        raise ExportError(
            f"the configuration of {type(model).__name__} does not give a context length; set "
            "model.config.max_position_embeddings"
        )
    return length


def _templates(prefix: str, side: str) -> dict[str, str]:
    return {f"{prefix}_{kind}_names": f"{_CACHE[side]}{kind}" for kind in ("key", "value")}


def _session_options(graph: ir.Graph) -> dict[str, Any]:
    """Return options that preserve the graph's arithmetic in ONNX Runtime; see `runtime.session.session_options`."""
    options: dict[str, Any] = {"provider_options": [], "session.qdq_matmulnbits_accuracy_level": "0"}
    if not may_optimize(graph):
        options["graph_optimization_level"] = "ORT_DISABLE_ALL"
    return options


__all__ = ["genai_config", "name_cache"]
