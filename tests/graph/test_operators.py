"""The operator table: each row of an operator that moves or limits data says what torch computes."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, Node

from quark_fx.graph.operators import CLAMPS, KEEPS_ORDER, MOTIONS, Motion, given_bounds, motion, moved_inputs, moves

X = torch.randn(2, 4, 4, 6, generator=torch.Generator().manual_seed(0))
OTHER = X + 10
ROWS, SOME = torch.tensor([1, 0, 1]), torch.arange(X.numel()).view_as(X) % 3 == 0
SHAPE = [4, 2, 24]

ARGUMENTS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("contiguous.default", "clone.default", "alias.default", "detach.default"), (X,)),
    **dict.fromkeys(("view.default", "reshape.default", "_unsafe_view.default"), (X, SHAPE)),
    **dict.fromkeys(("view_as.default", "reshape_as.default"), (X, OTHER.reshape(SHAPE))),
    "flatten.using_ints": (X, 1),
    "unflatten.int": (X, 1, [2, 2]),
    "unsqueeze.default": (X, 1),
    "squeeze.default": (X[:1],),
    "squeeze.dim": (X[:1], 0),
    "squeeze.dims": (X[:1], [0]),
    "permute.default": (X, [2, 0, 3, 1]),
    "t.default": (X[0, 0],),
    "numpy_T.default": (X,),
    **dict.fromkeys(("transpose.int", "swapaxes.default", "swapdims.default"), (X, 1, 3)),
    **dict.fromkeys(("movedim.int", "moveaxis.int"), (X, 0, 2)),
    **dict.fromkeys(("movedim.intlist", "moveaxis.intlist"), (X, [0, 1], [2, 0])),
    **dict.fromkeys(("mT.default", "mH.default", "adjoint.default"), (X,)),
    "matrix_H.default": (X[0, 0],),
    **dict.fromkeys(("expand.default", "broadcast_to.default"), (X[:, :, :1], [3, 2, 4, 5, 6])),
    "expand_as.default": (X[:, :, :1], OTHER),
    **dict.fromkeys(("repeat.default", "tile.default"), (X, [1, 2, 1, 1])),
    "repeat_interleave.self_int": (X, 2, 1),
    **{
        f"{kind}{d}d.{how}": (
            X.flatten(0, 2 - d) if d < 3 else X[None],
            [8] * d,
            *(() if how == "default" else (None,)),
        )
        for kind in ("upsample_nearest", "_upsample_nearest_exact")
        for d in (1, 2, 3)
        for how in ("vec", "default")
    },
    "slice.Tensor": (X, 2, 1, 3),
    "narrow.default": (X, 3, 1, 2),
    "select.int": (X, 2, 1),
    **dict.fromkeys(("split.Tensor", "unsafe_split.Tensor", "chunk.default", "unsafe_chunk.default"), (X, 3, 3)),
    **dict.fromkeys(("split.sizes", "split_with_sizes.default", "unsafe_split_with_sizes.default"), (X, [4, 2], 3)),
    "unbind.int": (X, 1),
    "tensor_split.sections": (X, 4, 3),
    "tensor_split.indices": (X, [1, 2], 3),
    **{f"{d}split.{how}": (X, 2 if how == "int" else [1]) for d in "hvd" for how in ("int", "array")},
    "flip.default": (X, [1, 3]),
    "roll.default": (X, [1], [2]),
    "rot90.default": (X, 1, [1, 2]),
    "fliplr.default": (X,),
    "flipud.default": (X,),
    "diagonal.default": (X, 1, 2, 3),
    "pixel_shuffle.default": (X, 2),
    "pixel_unshuffle.default": (X, 2),
    "channel_shuffle.default": (X, 2),
    "unfold.default": (X, 3, 2, 1),
    **{
        f"{kind}_pad{d}d.default": (X.flatten(0, 2 - d) if d < 3 else X, [1] * (2 * d))
        for kind in ("reflection", "replication")
        for d in (1, 2, 3)
    },
    **{f"{kind}.default": ([X, OTHER],) for kind in ("cat", "stack", "hstack", "vstack", "dstack", "column_stack")},
    **{f"max_pool{d}d.default": (X.flatten(0, 3 - d), [2] * d) for d in (1, 2, 3)},
    **{f"max_pool{d}d_with_indices.default": (X.flatten(0, 3 - d), [2] * d) for d in (1, 2, 3)},
    **{f"adaptive_max_pool{d}d.default": (X.flatten(0, 3 - d), [2] * d) for d in (1, 2, 3)},
    "index.Tensor": (X, [None, ROWS]),
    "index_select.default": (X, 1, ROWS),
    "take.default": (X, ROWS),
    "gather.default": (X, 1, ROWS.view(1, 3, 1, 1)),
    "take_along_dim.default": (X, ROWS.view(1, 3, 1, 1), 1),
    "masked_select.default": (X, SOME),
    "slice_scatter.default": (X, OTHER[:, :2], 1, 0, 2),
    "select_scatter.default": (X, OTHER[:, 0], 1, 1),
}
"""Arguments for each operator that moves data."""


def call_of(name: str, arguments: tuple[Any, ...]) -> tuple[Node, list[Tensor]]:
    """Return a call in a graph, and what torch returns for it."""
    _, packet, overload = name.split(".")
    target = getattr(getattr(torch.ops.aten, packet), overload)
    graph, tensors = Graph(), dict[int, Node]()

    def node_of(value: Any) -> Any:
        if isinstance(value, Tensor):
            return tensors.setdefault(id(value), graph.placeholder(f"x{len(tensors)}"))
        return [node_of(entry) for entry in value] if isinstance(value, list) else value

    node = graph.call_function(target, tuple(map(node_of, arguments)))
    result = target(*arguments)
    return node, [result] if isinstance(result, Tensor) else [y for y in result if y.is_floating_point()]


def test_every_operator_that_moves_data_returns_input_values() -> None:
    names = {name.removeprefix("aten.") for name in MOTIONS} - {"python.getitem"}
    assert names == ARGUMENTS.keys()
    for name, arguments in ARGUMENTS.items():
        node, results = call_of(f"aten.{name}", arguments)
        how, y = motion(node), torch.cat([part.flatten() for part in results])
        entries = [n for entry in arguments for n in (entry if isinstance(entry, list) else [entry])]
        floats = [x for x in entries if isinstance(x, Tensor) and x.is_floating_point()]
        sources = floats[: len(moved_inputs(node))]
        values = torch.cat([x.flatten() for x in sources])
        assert bool(torch.isin(y, values).all()), name
        assert moves(node) is (how is not Motion.SCATTER), name
        if how in KEEPS_ORDER | {Motion.COPY}:
            assert torch.equal(y, values), name
        if how is Motion.COPY:
            assert results[0].shape == sources[0].shape, name
        if how in (Motion.PERMUTE, Motion.SPLIT, Motion.JOIN):
            assert torch.equal(y.sort()[0], values.sort()[0]), name
        if how is Motion.EXPAND:
            assert torch.equal(results[0], sources[0].broadcast_to(results[0].shape)), name
        if how in (Motion.EXPAND, Motion.REPEAT):
            assert bool(torch.isin(values, y).all()), name
            assert y.numel() > values.numel(), name


def test_padding_moves_data_unless_it_adds_a_constant() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    pads = [graph.call_function(torch.ops.aten.pad.default, (x, [1, 1], *mode)) for mode in ((), ("reflect",))]
    assert [moves(node) for node in pads] == [False, True]
    assert moves(graph.call_function(operator.getitem, (x, 0)))


BOUNDS: dict[str, tuple[Any, ...]] = {
    "relu.default": (),
    "relu6.default": (),
    "hardtanh.default": (-0.5, 0.7),
    "clamp.default": (None, 0.3),
    "clamp_min.default": (0.1,),
    "clamp_max.default": (0.2,),
    "clamp.Tensor": (torch.tensor(-0.5), torch.tensor(0.7)),
    "clamp_min.Tensor": (torch.tensor(0.1),),
    "clamp_max.Tensor": (torch.tensor(0.2),),
}


@pytest.mark.parametrize("name", CLAMPS)
def test_the_bounds_of_a_clamp_are_those_that_torch_applies(name: str) -> None:
    arguments = BOUNDS[name.removeprefix("aten.")]
    x = 10 * X
    node, (result,) = call_of(name, (x, *arguments))
    bounds = given_bounds(node)
    assert bounds is not None
    inputs = [n for n in node.graph.nodes if n.op == "placeholder"]
    tensors = dict(zip(inputs, (x, *(a for a in arguments if isinstance(a, Tensor))), strict=True))
    low, high = (float(tensors[b]) if isinstance(b, Node) else b for b in bounds)
    assert torch.equal(result, x.clamp(low, high))
