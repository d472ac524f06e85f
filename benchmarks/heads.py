"""Which layers are heads in each `*For*` class of ten families of transformers: all of them stay in float.

    python -m benchmarks.heads [--only bert,LlamaForTokenClassification] [--write]

Each class is constructed with a tiny configuration and seeded weights, and quantized by `w4a16_rtn`, whose `op:head`
leaves heads in float. Heads are read from the graph that autograd records, without quark_fx: the weights of products
that are outputs of the model, or that outputs are selected from. A class is right if its heads stay in float, with a
reason in the report, and other layers are in codes. `--write` updates `results/heads.md`.
"""

from __future__ import annotations

import importlib
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import quark_fx as qfx
from benchmarks.common import environment, judged, table
from benchmarks.experiment import Pages, experiment

_SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
}
_SPECIFIC: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 1},
    "mistral": {"num_key_value_heads": 1},
    "qwen2": {"num_key_value_heads": 1},
    "gpt2": {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 32, "n_inner": 64},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "distilbert": {"dim": 32, "hidden_dim": 64, "n_layers": 1, "n_heads": 2},
    "electra": {"embedding_size": 32},
    "albert": {"embedding_size": 32},
    "vit": {"image_size": 16, "patch_size": 8, "encoder_stride": 8},
}
FAMILIES = ("llama", "mistral", "qwen2", "gpt2", "opt", "bert", "roberta", "distilbert", "electra", "albert", "vit")
"""Names of modules in `transformers.models`."""

_MOVING = (
    *("View", "UnsafeView", "ReshapeAlias", "Alias", "Clone", "ToCopy", "Squeeze", "Unsqueeze", "Transpose", "Permute"),
    *(
        "T",
        "Slice",
        "Select",
        "Index",
        "IndexSelect",
        "Gather",
        "Split",
        "SplitWithSizes",
        "Unbind",
        "Expand",
        "Cat",
        "PixelShuffle",
    ),
)
"""Operators of autograd that select and move values."""


@dataclass(frozen=True)
class Heads:
    """The heads of a class.

    Attributes:
        names: Names of the weights of its heads.
        quantized: Those among them that are not in float.
        others: Number of layers in codes.
    """

    names: tuple[str, ...]
    quantized: tuple[str, ...]
    others: int


def classes(family: str) -> dict[str, type[nn.Module]]:
    """Return the classes of a family named `*For*`, by name."""
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    return {name: getattr(module, name) for name in module.__all__ if "For" in name.removesuffix("Former")}


def model_of(family: str, kind: type[nn.Module]) -> nn.Module:
    """Return a tiny model of a class, in eval mode."""
    torch.manual_seed(0)
    config_class: Any = kind.config_class  # type: ignore[attr-defined]
    labels = {"num_labels": 2} if kind.__name__.endswith("QuestionAnswering") else {"num_labels": 3}
    return kind(config_class(**_SIZES, **_SPECIFIC.get(family, {}), **labels)).eval()


def inputs_of(family: str, name: str) -> dict[str, Tensor]:
    """Return one batch for a class."""
    torch.manual_seed(1)
    if family == "vit":
        return {"pixel_values": torch.randn(2, 3, 16, 16)}
    shape = (2, 3, 6) if "MultipleChoice" in name else (2, 6)
    return {"input_ids": torch.randint(1, 64, shape), "attention_mask": torch.ones(shape, dtype=torch.int64)}


def heads_of(model: nn.Module, inputs: dict[str, Tensor]) -> tuple[str, ...]:
    """Return the names of the weights of products that outputs are selected from."""
    names = {id(p): name for name, p in model.named_parameters()}
    results = [value for value in model(**inputs).values() if isinstance(value, Tensor | tuple)]  # no cache
    outputs = [value for value in pytree.tree_leaves(results) if _is_float(value)]
    pending, found, seen = [value.grad_fn for value in outputs], dict[str, None](), set[Any]()
    while pending:
        function = pending.pop()
        if function is None or function in seen:
            continue
        seen.add(function)
        kind = function.name().partition("Backward")[0]
        before = [f for f, _ in function.next_functions]
        if kind in _MOVING:
            pending += before
        elif kind in ("Addmm", "Mm", "Bmm", "Linear", "Convolution"):
            found |= {names[id(p)]: None for f in before if (p := _parameter(f)) is not None and p.dim() > 1}
        elif kind == "Add":  # a bias apart from its product
            pending += [f for f in before if _parameter(f) is None] if any(map(_is_bias, before)) else []
    return tuple(found)


def _parameter(function: Any) -> nn.Parameter | None:
    while function is not None and function.name().partition("Backward")[0] in ("T", "Transpose", "View", "Permute"):
        function = function.next_functions[0][0]
    found: nn.Parameter | None = getattr(function, "variable", None)
    return found


def _is_bias(function: Any) -> bool:
    found = _parameter(function)
    return found is not None and found.dim() == 1


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.grad_fn is not None


def measured(family: str, name: str) -> Heads:
    """Quantize a class, and return what became of its heads."""
    kind = classes(family)[name]
    model, inputs = model_of(family, kind), inputs_of(family, name)
    names = heads_of(model, inputs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        qmodel = qfx.quantize(model, "w4a16_rtn", [inputs], progress=False)
    rows = list(qmodel.report())
    parameters = dict(model.named_parameters(remove_duplicate=False))
    heads = {id(parameters[n]) for n in names}
    owners = {n.removesuffix(".weight") for n, p in parameters.items() if id(p) in heads}
    quantized = tuple(row.name for row in rows if row.name.removesuffix(".weight") in owners and not row.reason)
    return Heads(names, quantized, sum(bool(row.weight) for row in rows))


def cases() -> Iterator[tuple[str, str]]:
    """Yield every family with each of its classes."""
    yield from ((family, name) for family in FAMILIES for name in classes(family))


@experiment(page="heads.md", own_environment=True)
def main(only: Annotated[str, "families or classes, separated by commas"] = "") -> Pages:
    """Measure, and yield the page; return 1 if a cell is wrong."""
    torch.set_num_threads(1)
    words = [word for word in only.split(",") if word]
    rows, counts = list[tuple[str, ...]](), Counter[str]()
    for family, name in cases():
        if words and family not in words and name not in words:
            continue
        found = measured(family, name)
        right = not found.quantized and bool(found.others)
        counts["right" if right else "wrong"] += 1
        shown = ", ".join(found.names) or "none: products follow it"
        rows.append((family, name, shown, str(found.others), "float" if right else f"in codes: {found.quantized}"))
        print(*rows[-1], sep=" | ", flush=True)
    columns = ["family", "class", "weights of heads", "layers in codes", "heads"]
    text = table(columns, [list(row) for row in rows])
    heading = "# Heads of transformers' classes\n\nWritten by `python -m benchmarks.heads --write`. " + _LEGEND
    yield "\n\n".join([heading, environment(), text])
    return judged(counts)


_LEGEND = (
    "Every class is quantized by `w4a16_rtn`, whose `op:head` leaves heads in float. Heads are found in the graph that "
    "autograd records: weights of products that are outputs, or that outputs are selected from."
)


if __name__ == "__main__":
    main()
