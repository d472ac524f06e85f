"""The parts of a model that the names and shapes of its tensors tell: heads, routers, draft layers, fused layers."""

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
"""Names of routers next to experts; elsewhere, a gate is a layer like others."""

_DRAFTS = re.compile(r"(mtp|nextn|draft|eagle|medusa)\w*")

_DRAFT_LAYERS = re.compile(r"nextn\w*layers")
"""Entry of a configuration whose draft layers follow the others, with numbers from `num_hidden_layers` on."""

_DEPTH = 4

_FUSED = (
    *SGLANG.checkpoints.fused.values(),
    *(("w1", "w3"), ("wq", "wk", "wv"), ("query", "key", "value"), ("to_q", "to_k", "to_v")),
    *(("q_a_proj", "kv_a_proj_with_mqa"), ("in_proj_qkvz", "in_proj_ba"), ("wi_0", "wi_1")),
)
"""Names of layers that servers fuse."""

NUMBERED_EXPERT = re.compile(r"[.]experts[.]\d+[.]")


def roles(shapes: Mapping[str, Sequence[int]], config: Mapping[str, Any]) -> dict[str, str]:
    """Return the roles of layers that servers compute in float, by the names of their modules.

    Args:
        shapes: Shapes of the weights, by the names of their modules.
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
    """Return the layers of each group that servers fuse, by the name of each: they have one owner, and equal inputs."""
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
    """Return the layers that store matrices as (inputs, outputs), as GPT-2's `Conv1D` does.

    Their biases are as long as the matrices have columns. One name, such as `c_fc`, has one orientation in all layers,
    also where a matrix is square. A single name may have another kind of bias; two names are evidence.

    Args:
        shapes: Shapes of the weights, by the names of their modules.
        biases: Lengths of the biases, by the names of their modules.
    """
    evidence: dict[str, set[bool]] = {}
    for name, (rows, columns) in shapes.items():
        if rows != columns and biases.get(name) in (rows, columns):
            evidence.setdefault(name.rpartition(".")[2], set()).add(biases[name] == columns)
    leaves = {leaf for leaf, orientations in evidence.items() if orientations == {True}}
    return [name for name in shapes if name.rpartition(".")[2] in leaves] if len(leaves) > 1 else []


def experts(shapes: Mapping[str, Sequence[int]]) -> dict[str, dict[str, Within]]:
    """Return the matrices in stacks of experts, by the names of the stacks, where shapes tell the layout.

    The stacks of one module are `gate_up_proj` and `down_proj`, gate before up. A module with biases interleaves them.
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
    """Yield a configuration and those it contains."""
    yield config
    for value in config.values() if depth < _DEPTH else ():
        if isinstance(value, dict):
            yield from _tables(value, depth + 1)


__all__ = ["DRAFT", "EMBEDDING", "NUMBERED_EXPERT", "experts", "fused", "roles", "transposed"]
