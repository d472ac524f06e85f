"""The call signature of a captured graph: structure and names of its inputs and outputs."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from quark_fx.errors import CaptureError, QuarkError
from quark_fx.graph.size_condition import SizeCondition

_HOLDS_FOR_PARTS = re.compile(r"\w+\.shape\[0\] (== \w+\.shape\[0\]|!= 0|<=? \d+)")
"""Conditions on the number of samples that hold for a part of a batch if they hold for the batch."""

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
        input_constants: Values of inputs that are not tensors, keyed by input name; the graph holds only for them.
        input_limits: Limits on the sizes of dynamic dimensions, each as (input name, dimension, smallest size, largest
            size); the largest size is `None` for no limit.
        input_conditions: Comparisons of sizes in the model's code that chose the captured path.
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
    input_conditions: tuple[SizeCondition, ...] = ()
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
        """Return the flat inputs of a call with arguments given by position or by keyword.

        Raises:
            QuarkError: If structure, rank, a fixed dimension, or a dtype differs from the captured one, or if sizes
                violate limits or conditions.
        """
        arguments = self._as_captured(args, self._without_fixed(kwargs))
        try:
            leaves = self.in_spec.flatten_up_to(arguments)
        except ValueError as error:
            hint = "; if the loader yields (input, label) pairs, pass `(x for x, _ in loader)`" if len(args) > 1 else ""
            raise QuarkError(
                f"the model was captured with inputs {', '.join(self.input_names)}; this call has inputs of a "
                f"different structure: {error}{hint}"
            ) from error
        for name, leaf, shape, dtype in zip(
            self.input_names, leaves, self.input_shapes, self.input_dtypes, strict=True
        ):
            if problem := self._problem(name, leaf, shape, dtype):
                raise QuarkError(f"input {self.path_of(name)} {problem}")
        by_name = dict(zip(self.input_names, leaves, strict=True))
        for name, dim, low, high in self.input_limits:
            size = by_name[name].shape[dim]
            if size < low or (high is not None and size > high):
                raise QuarkError(
                    f"input {self.path_of(name)} has size {size} in dimension {dim}; the graph is valid from {low} to "
                    f"{high or 'any size'}: for other sizes the model's code takes another path, or `dynamic_shapes` "
                    "excludes them; capture a batch of that size, or widen the Dim"
                )
        if (condition := self.unmet(leaves)) is not None:
            raise QuarkError(
                f"the inputs have the shapes {', '.join(f'{tuple(x.shape)}' for x in leaves if isinstance(x, Tensor))},"
                f" but the captured path through the model's code requires {condition.text}"
                f"{condition.place and ' at '}{condition.place}; pad or resize the inputs, or capture a batch of these "
                "shapes"
            )
        return leaves

    @property
    def compares_batches(self) -> bool:
        """True if the captured path depends on the number of samples by a condition that is not a limit."""
        texts = [condition.text for condition in self.input_conditions]
        return any(".shape[0]" in text and not _HOLDS_FOR_PARTS.fullmatch(text) for text in texts)

    def unmet(self, leaves: Iterable[Any]) -> SizeCondition | None:
        """Return a condition that flat inputs of the right ranks do not meet, if there is one."""
        named = zip(self.input_names, leaves, strict=True)
        shapes = {name: tuple(leaf.shape) for name, leaf in named if isinstance(leaf, Tensor)}
        return next((condition for condition in self.input_conditions if not condition.holds(shapes)), None)

    def _problem(self, name: str, leaf: Any, shape: tuple[int | None, ...] | None, dtype: torch.dtype | None) -> str:
        """Return the problem with an input, empty if it fits."""
        if shape is not None and not isinstance(leaf, Tensor):
            convert = ": convert it with torch.from_numpy" if hasattr(leaf, "__array__") else ""
            return f"is a {type(leaf).__name__}; the model was captured with a tensor there{convert}"
        if shape is not None and leaf.dtype != dtype:
            return f"has dtype {leaf.dtype}; the model was captured with {dtype}: convert it first"
        actual = () if shape is None else tuple(leaf.shape)
        if shape is not None and (len(shape) != len(actual) or _differing(shape, actual)):
            return self._other_shape(name, actual, shape)
        return _other_constant(leaf, self.input_constants[name]) if name in self.input_constants else ""

    def _other_shape(self, name: str, actual: tuple[int, ...], shape: tuple[int | None, ...]) -> str:
        expected = f"({', '.join('any' if d is None else str(d) for d in shape)})"
        differs = f"has shape {actual}; the graph was captured for {expected}"
        if len(actual) != len(shape):
            return f"{differs}, {len(shape)} dimension(s): give every batch as many as the first batch"
        wrong = _differing(shape, actual)
        free = {
            one: [i for i, size in enumerate(sizes) if size is None or (one == name and i in wrong)]
            for one, sizes in zip(self.input_names, self.input_shapes, strict=True)
            if sizes is not None
        }
        return (
            f"{differs}: pad or cut dimension {wrong[0]} to {shape[wrong[0]]}, or, if the model accepts other sizes "
            f"there, make that dimension dynamic in `dynamic_shapes` of quantize(), {self.literal_of(free)}. If it is "
            "dynamic already, the model's code fixes the size: pad or cut"
        )

    def _nested(self, leaves: Iterable[Any]) -> dict[str, Any] | None:
        """Return one leaf for each input as named arguments; `None` if a container is not a dict, list, or tuple."""
        positional = _children(_children(self.in_spec)[0])
        if not _is_plain(self.in_spec) or len(positional) > len(self.parameters):
            return None
        placed, named = pytree.tree_unflatten(list(leaves), self.in_spec)
        by_name: dict[str, Any] = dict(zip(self.parameters, placed, strict=False)) | named
        return by_name

    def path_of(self, name: str) -> str:
        """Return the expression for an input in the user's batch: `cache['k'][1]` for `cache_k_1`."""
        nested = self._nested(self.input_names)
        paths = pytree.tree_flatten_with_path(nested)[0] if nested is not None else []
        return next((path_name(path) for path, leaf in paths if leaf == name), name)

    def literal_of(self, free: Mapping[str, Sequence[int]]) -> str:
        """Return text for `dynamic_shapes` that makes the dimensions `free`, keyed by input name, dynamic."""
        sizes = {name: f"{{{', '.join(f'{i}: Dim.AUTO' for i in dims)}}}" for name, dims in free.items()}
        nested = self._nested(_Code(sizes.get(name)) for name in self.input_names)
        if nested is not None:
            return repr(nested)
        listed = ", ".join(f"{size} for {name}" for name, size in sizes.items())
        return f"(a dict keyed by the parameter names of forward and nested like the batch, with {listed})"

    def _without_fixed(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        for name, captured in self.fixed_arguments.items():
            if name in kwargs and (problem := _other_constant(kwargs[name], captured)):
                raise QuarkError(f"input {name} {problem}")
        return {name: value for name, value in kwargs.items() if name not in self.fixed_arguments}

    def unflatten(self, outputs: Any) -> Any:
        """Return flat outputs in the structure of the model's result."""
        return pytree.tree_unflatten(list(outputs), self.out_spec)

    def _as_captured(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        captured_args, names = _children(self.in_spec)[0], self.keywords
        by_parameter = dict(zip(self.parameters, args, strict=False)) | dict(kwargs)
        if len(args) > len(self.parameters) or len(_children(captured_args)):
            return args, {name: kwargs[name] for name in names if name in kwargs}
        if set(by_parameter) != set(names):
            extra, missing = sorted(set(by_parameter) - set(names)), sorted(set(names) - set(by_parameter))
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
        return (), {name: by_parameter[name] for name in names}


class _Code(str):
    """Text that a container shows without quotes."""

    def __repr__(self) -> str:
        return str(self)


def path_name(path: pytree.KeyPath) -> str:
    """Return the spelling of an argument or a part of one, such as `cache['k'][1]`."""
    return pytree.keystr(path[:1]).strip("[]'") + pytree.keystr(path[1:])


def _differing(shape: tuple[int | None, ...], actual: tuple[int, ...]) -> list[int]:
    """Return the fixed dimensions whose actual size differs."""
    return [i for i, (size, other) in enumerate(zip(shape, actual, strict=True)) if size is not None and size != other]


def _is_plain(spec: pytree.TreeSpec) -> bool:
    return spec.is_leaf() or (spec.type in (dict, list, tuple) and all(map(_is_plain, _children(spec))))


def _other_constant(leaf: Any, captured: Any) -> str:
    """Describe how a value differs from the constant in the captured graph; empty if they are the same."""
    if not isinstance(leaf, Tensor) and leaf == captured:
        return ""
    text = "a tensor" if isinstance(leaf, Tensor) else repr(leaf)
    return (
        f"is {text}; the graph was captured with the constant {captured!r} there: quantize the model once for each "
        "value"
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
        CaptureError: If the arguments do not fit; the message shows the parameters and the usual cause.
    """
    signature = inspect.signature(forward)
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        hint = "; if the loader yields (input, label) pairs, pass `(x for x, _ in loader)`" if len(args) > 1 else ""
        if kwargs and not args:
            taken = [name for name in kwargs if name in signature.parameters]
            unknown = [name for name in kwargs if name not in signature.parameters]
            if "missing" not in str(error):
                fitting = f"pass only the keys that forward accepts: {{key: batch[key] for key in {taken}}}"
            else:
                fitting = f"rename {', '.join(unknown)}" if unknown else "add the missing ones"
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
