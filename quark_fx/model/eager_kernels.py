"""Kernel modules for `eager()`: replacements for linear layers that compute one product each, and for embeddings."""

from __future__ import annotations

from collections import Counter
from typing import TypeGuard

from torch import nn
from torch.fx import GraphModule
from torch.nn.utils import parametrize

from quark_fx.graph.nodes import module_path
from quark_fx.model.correspondence import Correspondence
from quark_fx.model.hooks import hooks_of
from quark_fx.model.kernels.lowering import KernelReport, KernelRow, rows_of_lists
from quark_fx.model.kernels.modules import CodeEmbedding, KernelLinear, KernelModule
from quark_fx.model.kernels.product import Product
from quark_fx.model.kernels.row_graphs import RowGraphs


def kernel_modules(
    gm: GraphModule, model: nn.Module, changes: Correspondence
) -> tuple[dict[str, KernelModule], KernelReport]:
    """Return replacements for modules, keyed by path, and a report with a row per operator with a quantized weight.

    Args:
        gm: The quantized graph.
        model: The original model.
        changes: Correspondence between the two.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    names = Counter(map(id, modules.values()))
    products = [product for node in gm.graph.nodes if (product := Product.of(gm, node)) is not None]
    calls = Counter(module_path(product.node) for product in products)
    graphs, replacements = RowGraphs(), dict[str, KernelModule]()
    rows = [*rows_of_lists(gm).values()]
    for product in products:
        path = module_path(product.node)
        module = modules.get(path)
        reason = ""
        if not _is_linear(module):
            reason = f"a module of class {type(module).__name__} computes it among other things"
        elif calls[path] > 1 or names[id(module)] > 1:
            reason = "its module is called in several places"
        elif module is not None and hooks_of(module):
            reason = "hooks are registered on its module"
        elif path in changes.slices or product.name != path:
            reason = "its module computes something else by now"
        elif not changes.borrowed.isdisjoint((f"{path}.weight", f"{path}.bias")):
            reason = "its weight or bias is read outside of its module"
        row = KernelRow(product.name, product.row.kind, "", reason)
        if not reason:
            graph, row = graphs.of(product)
            if graph is not None and module is not None:
                replacements[path] = KernelLinear(product, graph, module)
        rows.append(row)
    for path, module in modules.items():
        name = f"{path}.weight"
        constant = changes.constants.get(name)
        table = None if constant is None else constant.quantized
        if constant is None or table is None or name in changes.borrowed or names[id(module)] > 1 or hooks_of(module):
            continue
        if _is_embedding(module) and CodeEmbedding.takes(table):
            replacements[path] = CodeEmbedding(table, constant.dtype, module)
    return replacements, KernelReport(tuple(rows))


def _is_linear(module: nn.Module | None) -> bool:
    """Tell whether a module only multiplies its input by its weight and adds its bias."""
    kind = type(module)
    if module is None or parametrize.is_parametrized(module):
        return False
    is_conv1d = kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"
    return is_conv1d or getattr(kind, "forward", None) is nn.Linear.forward


def _is_embedding(module: nn.Module) -> TypeGuard[nn.Embedding]:
    """Tell whether a module only looks up rows."""
    if not isinstance(module, nn.Embedding) or parametrize.is_parametrized(module):
        return False
    return module.max_norm is None and type(module).forward is nn.Embedding.forward


__all__ = ["kernel_modules"]
