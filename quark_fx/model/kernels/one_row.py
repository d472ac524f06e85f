"""Computations of linear layers, shared by layers with equal code; calls with one row are compiled."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, MutableMapping
from functools import cache
from typing import Any, ClassVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from quark_fx.graph.nodes import parameter, placeholders, results_of
from quark_fx.system.isolation import isolated

logger = logging.getLogger(__name__)


class Computation:
    """A function of rows of activations and of constants.

    Calls with several rows run the function operator by operator. For one row, the product takes only the time to read
    the weight, and the operators around the product would take as long, so Inductor compiles all of them into a few
    loops, once per process for each shape of constants. Inside `torch.compile`, the function itself is traced.

    Args:
        graph_module: Graph with inputs `(rows, *constants)` that stores no tensors.
    """

    _known: ClassVar[MutableMapping[Any, Computation]] = WeakValueDictionary()

    def __init__(self, graph_module: GraphModule) -> None:
        self.graph_module = graph_module
        self._one_row = Compiled(graph_module)

    @classmethod
    def of(cls, graph_module: GraphModule, inputs: int) -> tuple[Computation, list[Tensor]]:
        """Return the function that a graph computes, and the constants that the graph stores.

        Args:
            graph_module: Graph with one input, `(rows, inputs)`, and one result.
            inputs: Number of values in a row.
        """
        graph = Graph()
        (rows,) = placeholders(graph_module)
        read = [node for node in graph_module.graph.nodes if node.op == "get_attr"]
        copies = {node: graph.placeholder(f"given{i}") for i, node in enumerate((rows, *read))}
        for node in graph_module.graph.nodes:
            if node.op == "call_function":
                copies[node] = graph.node_copy(node, copies.__getitem__)
                copies[node].meta = {}
        (result,) = results_of(graph_module)
        graph.output(copies[result])
        tensors = [parameter(graph_module, node).detach() for node in read]
        lifted = GraphModule(torch.nn.Module(), graph, class_name="Rows")
        key = (lifted.code, inputs, rows.meta["val"].dtype, *_layouts(tensors))
        computation = cls._known.get(key)
        if computation is None:
            computation = cls._known[key] = cls(lifted)
        return computation, tensors

    def __call__(self, rows: Tensor, *constants: Tensor) -> Tensor:
        """Return the result for contiguous rows, `(rows, inputs)`."""
        if torch.compiler.is_compiling() or not rows.is_cpu or rows.shape[0] != 1 or not finds_compiler():
            result: Tensor = self.graph_module(rows, *constants)
            return result
        return self._one_row(rows, *constants)


class Compiled:
    """A function that Inductor compiles at its first call, for tensors of equal layout.

    Compiled loops are for one number of threads: the function is compiled again after `torch.set_num_threads`.
    """

    def __init__(self, function: Callable[..., Tensor]) -> None:
        self._function = function
        self._by_threads: dict[int, Callable[..., Tensor]] = {}

    def __call__(self, *arguments: Tensor) -> Tensor:
        threads = torch.get_num_threads()
        return (self._by_threads.get(threads) or self._for_threads(threads, arguments))(*arguments)

    @isolated  # tracing patches torch for all threads
    def _for_threads(self, threads: int, arguments: tuple[Tensor, ...]) -> Callable[..., Tensor]:
        if threads not in self._by_threads:
            self._by_threads[threads] = _compile(self._function, arguments)
        return self._by_threads[threads]


def compiled(function: Callable[..., Tensor], *options: Any) -> Callable[..., Tensor]:
    """Return `function`, compiled once per process for each layout of its tensors; `options` are its last arguments."""

    def run(*arguments: Tensor) -> Tensor:
        key = (function, options, *_layouts(arguments))
        return _COMPILED.setdefault(key, Compiled(lambda *tensors: function(*tensors, *options)))(*arguments)

    return run


_COMPILED: dict[Any, Compiled] = {}
"""Cache of compiled functions, which hold no tensors."""


def _layouts(tensors: Iterable[Tensor]) -> list[Any]:
    """Return the properties of tensors on which compiled code depends."""
    return [(tuple(t.shape), t.stride(), t.dtype) for t in tensors]


def _compile(function: Callable[..., Tensor], arguments: tuple[Tensor, ...]) -> Callable[..., Tensor]:
    with torch.no_grad():
        run: Any = torch._inductor.compile(make_fx(lambda *tensors: (function(*tensors),))(*arguments), list(arguments))
    return lambda *tensors: run(*tensors)[0]


@cache
def finds_compiler() -> bool:
    """Tell whether Inductor finds a C++ compiler."""
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except Exception as error:  # the search may raise any error
        logger.debug("no C++ compiler: %s", error)
        return False
    return True


__all__ = ["Compiled", "Computation", "compiled", "finds_compiler"]
