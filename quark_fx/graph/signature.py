"""The call signature of a captured graph: structure and names of its inputs and outputs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from quark_fx.errors import CaptureError, QuarkError

BatchShape = tuple[tuple[int, ...], ...]
"""Shapes of a batch's flat inputs, `()` for an input that is not a tensor."""


def batch_shape(leaves: Iterable[Any]) -> BatchShape:
    """Return the shapes of a batch."""
    return tuple(tuple(leaf.shape) if isinstance(leaf, Tensor) else () for leaf in leaves)


@dataclass(frozen=True)
class Signature:
    """The call structure of a captured model.

    Attributes:
        in_spec: Structure of `(args, kwargs)` at capture.
        out_spec: Structure of the result.
        parameters: Names of `forward`'s parameters, in order.
        input_names: Name of each flat input.
        output_names: Name of each flat output.
        input_shapes: Shape of each flat input, with `None` for a dynamic dimension; `None` if it is not a tensor.
        input_dtypes: Dtype of each flat input; `None` if it is not a tensor.
        input_constants: Values of inputs that are not tensors, keyed by input name: the graph was captured with them.
        input_limits: Input name, dimension, and smallest and largest size of a dynamic dimension, if the model's code
            distinguishes sizes.
        input_multiples: Input name, dimension, and a number that must divide the size of a dynamic dimension.
        fixed_arguments: Keyword arguments at capture that are not inputs of the graph.
    """

    in_spec: pytree.TreeSpec
    out_spec: pytree.TreeSpec
    parameters: tuple[str, ...]
    input_names: tuple[str, ...]
    output_names: tuple[str, ...]
    input_shapes: tuple[tuple[int | None, ...] | None, ...]
    input_dtypes: tuple[torch.dtype | None, ...]
    input_constants: Mapping[str, Any] = field(default_factory=dict)
    input_limits: tuple[tuple[str, int, int, int | None], ...] = ()
    input_multiples: tuple[tuple[str, int, int], ...] = ()
    fixed_arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def keywords(self) -> list[str]:
        """Names of the inputs that were captured as keywords."""
        return list(_children(self.in_spec)[1].context or ())

    @property
    def positional_spec(self) -> pytree.TreeSpec:
        """`in_spec`, with keywords as positional arguments if they are the first parameters of `forward`."""
        names = self.keywords
        if not names or tuple(names) != self.parameters[: len(names)]:
            return self.in_spec
        args, kwargs = pytree.tree_unflatten([0] * self.in_spec.num_leaves, self.in_spec)
        return pytree.tree_structure(((*args, *(kwargs[name] for name in names)), {}))

    def leaves_of(self, batch: Any) -> list[Any]:
        """Return the flat inputs of a batch; raises the errors of `flatten`."""
        return self.flatten(*split_batch(batch))

    def flatten(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        """Return the flat inputs of a call with arguments in any spelling.

        Raises:
            QuarkError: If structure, rank, a fixed dimension, or a dtype differs from the captured one.
        """
        given = self._as_captured(args, self._without_fixed(kwargs))
        try:
            leaves = self.in_spec.flatten_up_to(given)
        except ValueError as error:
            hint = "; if the loader yields (input, label) pairs, pass `(x for x, _ in loader)`" if len(args) > 1 else ""
            raise QuarkError(
                f"the model was captured with inputs {', '.join(self.input_names)}; this call has another structure: "
                f"{error}{hint}"
            ) from error
        for name, leaf, shape, dtype in zip(
            self.input_names, leaves, self.input_shapes, self.input_dtypes, strict=True
        ):
            _check_leaf(name, leaf, shape, dtype, self._varying)
            if name in self.input_constants:
                _check_constant(name, leaf, self.input_constants[name])
        by_name = dict(zip(self.input_names, leaves, strict=True))
        for name, dim, low, high in self.input_limits:
            size = by_name[name].shape[dim]
            if size < low or (high is not None and size > high):
                raise QuarkError(
                    f"input {name} has size {size} in dimension {dim}; the graph holds from {low} to "
                    f"{high or 'any size'}: the model's code takes another path there, or a Dim of `dynamic_shapes` "
                    "ends there; capture a batch of that size, or widen the Dim"
                )
        for name, dim, multiple in self.input_multiples:
            size = by_name[name].shape[dim]
            if size % multiple:
                raise QuarkError(
                    f"input {name} has size {size} in dimension {dim}; the model's code takes another path there than "
                    f"the captured one, which holds for multiples of {multiple}; pad the batch, or capture a batch "
                    "whose size is none"
                )
        return leaves

    def _varying(self, name: str, dims: Sequence[int]) -> str:
        """Return the literal of `dynamic_shapes` that also makes `dims` of the input `name` dynamic."""
        if not self.names_inputs:
            return f"nested as the batch is, with Dim.AUTO for dimension {', '.join(map(str, dims))} of {name}"
        return self.literal_of(
            {
                one: [i for i, size in enumerate(shape) if size is None or (one == name and i in dims)]
                for one, shape in zip(self.input_names, self.input_shapes, strict=True)
                if shape is not None
            }
        )

    @property
    def names_inputs(self) -> bool:
        """True if the inputs are parameters of `forward`, not parts of them."""
        return {*self.input_names} <= {*self.parameters}

    def literal_of(self, free: Mapping[str, Sequence[int]]) -> str:
        """Return the literal of `dynamic_shapes` that makes some dimensions dynamic, by the names of inputs."""
        sizes = {name: f"{{{', '.join(f'{i}: Dim.AUTO' for i in dims)}}}" for name, dims in free.items()}
        if not self.names_inputs:
            listed = ", ".join(f"{size} for {name}" for name, size in sizes.items())
            return f"a mapping by the parameters of forward, nested as the batch is, with {listed}"
        return f"{{{', '.join(f'{name!r}: {sizes.get(name)}' for name in self.input_names)}}}"

    def _without_fixed(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        for name, captured in self.fixed_arguments.items():
            if name in kwargs:
                _check_constant(name, kwargs[name], captured)
        return {name: value for name, value in kwargs.items() if name not in self.fixed_arguments}

    def unflatten(self, outputs: Any) -> Any:
        """Return flat outputs in the structure of the model's result."""
        return pytree.tree_unflatten(list(outputs), self.out_spec)

    def _as_captured(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        captured_args, names = _children(self.in_spec)[0], self.keywords
        given = dict(zip(self.parameters, args, strict=False)) | dict(kwargs)
        if len(args) > len(self.parameters) or len(_children(captured_args)):
            return args, {name: kwargs[name] for name in names if name in kwargs}
        if set(given) != set(names):
            extra, missing = sorted(set(given) - set(names)), sorted(set(names) - set(given))
            raise QuarkError(
                f"the model was captured with inputs {', '.join(names)}; this call "
                + " and ".join(
                    part
                    for part in (
                        f"lacks {', '.join(missing)}" if missing else "",
                        f"adds {', '.join(extra)}" if extra else "",
                    )
                    if part
                )
                + "; pass the same inputs as the first calibration batch"
            )
        return (), {name: given[name] for name in names}


def _check_constant(name: str, leaf: Any, captured: Any) -> None:
    if isinstance(leaf, Tensor) or leaf != captured:
        given = "a tensor" if isinstance(leaf, Tensor) else repr(leaf)
        raise QuarkError(
            f"input {name} is {given}; the graph was captured with the constant {captured!r} there: quantize the model "
            "once for each value"
        )


def _check_leaf(
    name: str,
    leaf: Any,
    shape: tuple[int | None, ...] | None,
    dtype: torch.dtype | None,
    varying: Callable[[str, Sequence[int]], str],
) -> None:
    if shape is None:
        return
    if not isinstance(leaf, Tensor):
        convert = ": convert it with torch.from_numpy" if hasattr(leaf, "__array__") else ""
        raise QuarkError(
            f"input {name} is a {type(leaf).__name__}; the model was captured with a tensor there{convert}"
        )
    if leaf.dtype != dtype:
        raise QuarkError(f"input {name} has dtype {leaf.dtype}; the model was captured with {dtype}: convert it first")
    expected = "(" + ", ".join("any" if d is None else str(d) for d in shape) + ")"
    if leaf.dim() != len(shape):
        raise QuarkError(
            f"input {name} has shape {tuple(leaf.shape)}; the graph was captured for {expected}, {len(shape)} "
            f"dimension(s): give every batch as many as the first one"
        )
    wrong = [i for i, (d, n) in enumerate(zip(shape, leaf.shape, strict=True)) if d is not None and d != n]
    if wrong:
        raise QuarkError(
            f"input {name} has shape {tuple(leaf.shape)}; the graph was captured for {expected}: pad or cut dimension "
            f"{wrong[0]} to {shape[wrong[0]]}, or, if the model takes other sizes there, let it vary in "
            f"`dynamic_shapes` of quantize(), {varying(name, wrong)}. If you did, its code fixes that: pad or cut"
        )


def split_batch(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the `(args, kwargs)` of a batch: a mapping becomes keywords, a tuple or list positional arguments."""
    if isinstance(batch, Mapping) or hasattr(batch, "keys"):
        return (), {key: batch[key] for key in batch.keys()}  # noqa: SIM118 (a BatchEncoding iterates over keys too)
    if isinstance(batch, tuple | list):
        return tuple(batch), {}
    return (batch,), {}


def bind(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the arguments by parameter name, or `None` if `forward` takes some of them as `*args` or `**kwargs`.

    Raises:
        CaptureError: If they do not fit; the message shows the parameters and the usual cause.
    """
    signature = inspect.signature(forward)
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        hint = "; if the loader yields (input, label) pairs, pass `(x for x, _ in loader)`" if len(args) > 1 else ""
        if kwargs and not args:
            taken = [name for name in kwargs if name in signature.parameters]
            others = [name for name in kwargs if name not in signature.parameters]
            if "missing" not in str(error):
                fitting = f"leave out the others: {{key: batch[key] for key in {taken}}}"
            else:
                fitting = f"rename {', '.join(others)}" if others else "add what is missing"
            hint = f"; the batch has the keys {', '.join(kwargs)}: {fitting}"
        raise CaptureError(f"a batch does not fit `forward{signature}`: {error}{hint}") from error
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD, inspect.Parameter.POSITIONAL_ONLY)
    if any(signature.parameters[name].kind in variable for name in bound.arguments):
        return None
    return dict(bound.arguments)


def parameter_names(forward: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of the parameters that accept keyword arguments."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return tuple(name for name, p in inspect.signature(forward).parameters.items() if p.kind in kinds)


def leaf_names(spec: pytree.TreeSpec, prefix: str = "") -> list[str]:
    """Name the leaves of a structure by their keys and indices (`logits`, `past.0.1`)."""
    children = _children(spec)
    if spec.is_leaf():
        return [prefix or "output"]
    keys = spec.context if isinstance(spec.context, list) else []
    if keys and all(isinstance(part, list) for part in keys):  # a dataclass: fields with a value, then fields without
        keys = keys[0]
    named = len(keys) == len(children)
    names = [str(key) for key in keys] if named else [str(i) if prefix else f"output_{i}" for i in range(len(children))]
    return [
        leaf
        for name, child in zip(names, children, strict=True)
        for leaf in leaf_names(child, f"{prefix}.{name}" if prefix else name)
    ]


def _children(spec: pytree.TreeSpec) -> list[pytree.TreeSpec]:
    return spec.children() if hasattr(spec, "children") else spec.children_specs
