"""Rules that recognize heads, routers, draft layers, fused layers, and experts by the names and shapes of tensors."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from quark_fx.checkpoints.decoded import Within
from quark_fx.plan.roles import HEAD, ROUTER
from quark_fx.targets import SGLANG

EMBEDDING, DRAFT = "embedding", "draft"

_HEADS = frozenset({"lm_head", "score", "qa_outputs", "classifier", "embed_out"})
_EMBEDDINGS = re.compile(r"embed|^w[tp]e$|^shared$")
_GATES = frozenset({"gate", "wg", "shared_expert_gate"})
"""Last parts of the names of routers, if the same module contains experts; elsewhere, these are ordinary layers."""

_DRAFTS = re.compile(r"(mtp|nextn|draft|eagle|medusa)\w*")

_DRAFT_LAYERS = re.compile(r"nextn\w*layers")
"""Pattern of a configuration key that says that draft layers are numbered from `num_hidden_layers` on."""

_DEPTH = 4

_FUSED = (
    *SGLANG.checkpoints.fused.values(),
    *(("w1", "w3"), ("wq", "wk", "wv"), ("query", "key", "value"), ("to_q", "to_k", "to_v")),
    *(("q_a_proj", "kv_a_proj_with_mqa"), ("in_proj_qkvz", "in_proj_ba"), ("wi_0", "wi_1")),
)
"""Groups of layers that servers fuse, by the last parts of their names."""

NUMBERED_EXPERT = re.compile(r"[.]experts[.]\d+[.]")


def roles(shapes: Mapping[str, Sequence[int]], config: Mapping[str, Any]) -> dict[str, str]:
    """Return the role of each layer that servers compute in float; keys are names of modules.

    Args:
        shapes: Shapes of the weights; keys are names of modules.
        config: Content of `config.json`.
    """
    tables = list(_tables(config))
    rows = {table["vocab_size"] for table in tables if isinstance(table.get("vocab_size"), int)}
    depths = [table.get("num_hidden_layers") for table in tables if any(_DRAFT_LAYERS.search(key) for key in table)]
    depth = next((d for d in depths if isinstance(d, int)), 0)
    routed = {name.rpartition(".experts")[0] for name in shapes if ".experts" in name}
    role_of = {}
    for name, shape in shapes.items():
        parts = name.split(".")
        layer = re.match(r"(?:(?:language_)?model[.])*layers[.](\d+)[.]", name)
        if any(_DRAFTS.fullmatch(part) for part in parts) or (layer and 0 < depth <= int(layer[1])):
            role_of[name] = DRAFT
        elif _HEADS & {*parts}:
            role_of[name] = HEAD
        elif any(_EMBEDDINGS.search(part) for part in parts):
            role_of[name] = EMBEDDING
        elif "router" in name or (parts[-1] in _GATES and name.rpartition(".")[0] in routed):
            role_of[name] = ROUTER
        elif shape[0] in rows and not any(part.isdigit() for part in parts):
            role_of[name] = HEAD
    return role_of


def fused(shapes: Mapping[str, Sequence[int]]) -> dict[str, tuple[str, ...]]:
    """Return, for each layer that servers fuse, the names of all layers of its group.

    The layers of a group have the same parent module and the same input size.

    Args:
        shapes: Shapes of the weights; keys are names of modules.
    """
    groups: dict[str, tuple[str, ...]] = {}
    for name, shape in shapes.items():
        owner, dot, leaf = name.rpartition(".")
        for leaves in _FUSED:
            group = tuple(f"{owner}{dot}{other}" for other in leaves)
            group = tuple(n for n in group if n in shapes and shapes[n][1:] == shape[1:])
            if leaf in leaves and len(group) > 1:
                groups[name] = group
    return groups


def transposed(shapes: Mapping[str, Sequence[int]], biases: Mapping[str, int]) -> list[str]:
    """Return the names of the layers that store matrices as (inputs, outputs), like GPT-2's `Conv1D`.

    In such a layer, the length of the bias is the number of columns. The last part of a name, such as `c_fc`, decides
    for all layers with this name, including square matrices. At least two such names are needed, because a single name
    may have another kind of bias.

    Args:
        shapes: Shapes of the weights; keys are names of modules.
        biases: Lengths of the biases; keys are names of modules.
    """
    evidence: dict[str, set[bool]] = {}
    for name, (rows, columns) in shapes.items():
        if rows != columns and biases.get(name) in (rows, columns):
            evidence.setdefault(name.rpartition(".")[2], set()).add(biases[name] == columns)
    leaves = {leaf for leaf, orientations in evidence.items() if orientations == {True}}
    return [name for name in shapes if name.rpartition(".")[2] in leaves] if len(leaves) > 1 else []


def experts(shapes: Mapping[str, Sequence[int]]) -> dict[str, dict[str, Within]]:
    """Return the places of matrices in stacks of experts; keys are names of stacks, and within them, of matrices.

    The stacks of a module are `gate_up_proj`, with gate before up, and `down_proj`. Stacks are left out if their shapes
    leave the layout ambiguous, or if `gate_up_proj` has a bias, because such modules interleave gate and up.

    Args:
        shapes: Shapes of all tensors; keys are names.
    """
    stacks: dict[str, dict[str, Within]] = {}
    for name, shape in shapes.items():
        owner, _, leaf = name.rpartition(".")
        down, lengths = f"{owner}.down_proj", shapes.get(f"{owner}.down_proj", ())
        if leaf != "gate_up_proj" or (len(shape), len(lengths)) != (3, 3) or f"{name}_bias" in shapes:
            continue
        (count, a, b), (same, c, d) = shape, lengths
        layouts = [(2 * d, d, c, False)] * ((a, b) == (2 * d, c)) + [(2 * c, c, d, True)] * ((a, b) == (d, 2 * c))
        if count != same or len(layouts) != 1:
            continue
        (both, inner, outputs, transposed) = layouts[0]
        rows = {"gate_proj": (0, inner), "up_proj": (inner, both), "down_proj": (0, outputs)}
        for expert in range(count):
            for part, range_ in rows.items():
                matrices = stacks.setdefault(down if part == "down_proj" else name, {})
                matrices[f"{owner}.{expert}.{part}.weight"] = Within(expert, range_, transposed)
    return stacks


def _tables(config: Mapping[str, Any], depth: int = 0) -> Iterator[Mapping[str, Any]]:
    """Yield a configuration and the nested configurations in it."""
    yield config
    for value in config.values() if depth < _DEPTH else ():
        if isinstance(value, dict):
            yield from _tables(value, depth + 1)


__all__ = ["DRAFT", "EMBEDDING", "NUMBERED_EXPERT", "experts", "fused", "roles", "transposed"]
