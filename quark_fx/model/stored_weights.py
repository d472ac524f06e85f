"""Replace the parametrizations of modules with the weights that they compute.

A parametrization of `torch.nn.utils`, new or old, replaces a parameter with a computed value, which the forward of a
torch module reads like the parameter. So the module computes the same without the parametrization if the parameter
holds the value from the quantized graph. `eager()` stores codes in that parameter, and checkpoints contain the weights
of the plain class.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.fx import Node
from torch.nn.utils import parametrize

from quark_fx.graph.nodes import module_path
from quark_fx.graph.operators import argument, permutation, row_by_target
from quark_fx.model.constants import Constant
from quark_fx.model.float_view import FloatView
from quark_fx.model.parts import Part, whole_of


@dataclass(frozen=True)
class ComputedParameter:
    """A computed parameter that a module can store.

    Attributes:
        sources: Names of the tensors from which the parameter is computed.
        like: Tensor on the meta device with the shape and dtype of the parameter.
    """

    sources: tuple[str, ...]
    like: Tensor


def storable(model: nn.Module, view: FloatView) -> dict[str, ComputedParameter]:
    """Find the computed weights and biases that modules read as parameters; rename their constants in `view`.

    A module keeps its parametrization if other operators read the sources or the computed value.

    Returns:
        Computed parameters, keyed by the parameter's path.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    by_module: dict[str, dict[str, list[Node]]] = {}
    unstorable: set[str] = set()
    for node in view.constants:
        value = _transposed(node)
        places = {_place_of(modules, value, reader) for reader in value.users}
        place = places.pop() if len(places) == 1 else None
        if place is None:
            unstorable.update(_sources(node))
        else:
            by_module.setdefault(place[0], {}).setdefault(place[1], []).append(node)
    stored: dict[str, ComputedParameter] = {}
    for path, nodes in by_module.items():
        module = modules[path]
        tensors = {
            _joined(path, name) for name, _ in (*module.named_parameters(), *module.named_buffers())
        } - unstorable
        sources = {leaf: tuple(dict.fromkeys(n for node in nodes[leaf] for n in _sources(node))) for leaf in nodes}
        if nodes.keys() != computed_leaves(module) or not all(tensors.issuperset(names) for names in sources.values()):
            continue
        constants = {leaf: c for leaf, same in nodes.items() if (c := _common(view, same)) is not None}
        for leaf, constant in constants.items() if len(constants) == len(nodes) else ():
            name = _joined(path, leaf)
            like = torch.empty(constant.tensor.shape, dtype=constant.dtype, device="meta")
            stored[name] = ComputedParameter(sources[leaf], like)
            for node in nodes[leaf]:
                view.constants[node] = constant
                _drop_transpositions(view, node)
                node.meta = {key: note for key, note in node.meta.items() if key not in ("folded", "digest")}
                node.meta["parameter"] = name
    return stored


def _common(view: FloatView, nodes: Sequence[Node]) -> Constant | None:
    """Return the constant that several calls of a module read; `None` if they read different constants."""
    first, *rest = (_as_read(view.constants[node], node) for node in nodes)
    alike = all(c is not None and first is not None and torch.equal(c.value(), first.value()) for c in rest)
    return first if alike else None


def _drop_transpositions(view: FloatView, node: Node) -> None:
    value = _transposed(node)
    value.replace_all_uses_with(node)
    while value is not node:
        (before,) = value.all_input_nodes
        view.graph.erase_node(value)
        value = before


def _transposed(node: Node) -> Node:
    """Follow transpositions from a constant to the value that its consumers read."""
    while len(node.users) == 1 and permutation(reader := next(iter(node.users))) is not None:
        node = reader
    return node


def _as_read(constant: Constant, node: Node) -> Constant | None:
    """Transpose a constant to the layout that its consumers read; return `None` if its scales cannot be transposed."""
    shape, value = tuple(constant.tensor.shape), torch.empty(constant.tensor.shape, dtype=torch.float32, device="meta")
    steps = list[tuple[int, ...]]()
    last = _transposed(node)
    while last is not node:
        order = permutation(last)
        assert order is not None
        steps.append(order)
        (last,) = last.all_input_nodes
    if not steps:
        return constant
    for order in reversed(steps):
        value = value.permute(order)
    whole = torch.empty(value.shape, dtype=value.dtype, device="meta")
    for order in steps:
        whole = whole.permute([order.index(d) for d in range(len(order))])
    return whole_of(tuple(value.shape), [Part(constant, (shape, whole.stride(), 0))])


def with_stored_weights(model: nn.Module, stored: Mapping[str, ComputedParameter]) -> nn.Module:
    """Return a copy of a model whose modules have parameters for the stored weights, and share all other tensors.

    The new parameters are on the meta device. If `stored` is empty, the model itself is returned.
    """
    if not stored:
        return model
    shared = {id(t): t for t in (*model.parameters(), *model.buffers())}
    for module in model.modules():
        shared |= {id(t): t.detach() for t in vars(module).values() if isinstance(t, Tensor)}
    model = copy.deepcopy(model, shared)
    for path in dict.fromkeys(name.rpartition(".")[0] for name in stored):
        _store(model.get_submodule(path), path, stored)
    return model


def computed_leaves(module: nn.Module) -> set[str]:
    """Return the names of the parameters that parametrizations of `torch.nn.utils` compute."""
    names = set(module.parametrizations) if parametrize.is_parametrized(module) else set()  # type: ignore[arg-type]
    return names | {name for hook in module._forward_pre_hooks.values() if (name := _computed_by(hook))}


def drop_hooks(module: nn.Module) -> None:
    """Remove the hooks that compute parameters, which the older parametrizations register."""
    for key, hook in list(module._forward_pre_hooks.items()):
        if _computed_by(hook):
            del module._forward_pre_hooks[key]
    for hooks in (module._state_dict_hooks, module._load_state_dict_pre_hooks):
        for key, hook in list(hooks.items()):
            if type(getattr(hook, "hook", hook)).__module__.startswith("torch.nn.utils."):
                del hooks[key]


def _computed_by(hook: object) -> str:
    name = getattr(hook, "name", None) or getattr(hook, "_tensor_name", None)
    return name if isinstance(name, str) and type(hook).__module__.startswith("torch.nn.utils.") else ""


def _place_of(modules: Mapping[str, nn.Module], value: Node, reader: Node) -> tuple[str, str] | None:
    """Return the module path and name of a computed parameter that an operator reads; `None` for other operands."""
    row, path = row_by_target(reader), module_path(reader)
    module = modules.get(path)
    if row is None or module is None:
        return None
    if "forward" in vars(module) or not _reads_as_torch_does(module):
        return None
    places = {"weight": row.weight, "bias": row.bias}
    leaves = [leaf for leaf, at in places.items() if at is not None and argument(reader, at) is value]
    return (path, leaves[0]) if len(leaves) == 1 and leaves[0] in computed_leaves(module) else None


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _reads_as_torch_does(module: nn.Module) -> bool:
    """Return whether a class in `torch.nn` defines the code that reads a module's parameters."""
    kind = parametrize.type_before_parametrizations(module)
    code = next(c for c in kind.__mro__ if vars(c).keys() & {"forward", "_conv_forward", "weight", "bias"})
    return code.__module__.startswith("torch.nn.modules.")


def _sources(node: Node) -> tuple[str, ...]:
    folded = node.meta.get("folded")
    return folded.tensors if folded is not None else (str(node.meta.get("parameter", "")),)


def _store(module: nn.Module, path: str, stored: Mapping[str, ComputedParameter]) -> None:
    leaves = computed_leaves(module)
    if parametrize.is_parametrized(module):
        module.__class__ = parametrize.type_before_parametrizations(module)
        del module._modules["parametrizations"]
    drop_hooks(module)
    for leaf in leaves:
        weight = stored[_joined(path, leaf)]
        for owned in (module._parameters, module._buffers):
            for name in [n for n in owned if _joined(path, n) in weight.sources]:
                del owned[name]
        vars(module).pop(leaf, None)
        module.register_parameter(leaf, nn.Parameter(weight.like))


__all__ = ["ComputedParameter", "computed_leaves", "drop_hooks", "storable", "with_stored_weights"]
