"""Errors of models and batches that cannot be captured: the cause, the place, and the next step."""

from __future__ import annotations

import inspect
import itertools
import keyword
import re
import sys
import traceback
from collections import Counter
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.nn.parameter import is_lazy
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from quark_fx.capture.model_state import ModelState, untouched
from quark_fx.errors import CaptureError
from quark_fx.graph.nodes import static_size
from quark_fx.graph.signature import path_name
from quark_fx.system.isolation import warn
from quark_fx.system.memory import is_shortage

_DEEPEST = 190
"""Maximum nesting depth of modules that have numbers as names."""

_HERE = str(Path(__file__).parent)

_TORCH_EXPORT = tuple(Path(torch.__file__).parent / name for name in ("export", "_export"))


def require_capturable(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise CaptureError(f"expected an nn.Module or an ExportedProgram, not {type(model).__name__}")
    _require_python(model)
    training = [name or "(the model)" for name, module in model.named_modules() if module.training]
    if training:
        raise CaptureError(
            f"{len(training)} module(s) are in training mode, first {training[0]} ({type(model).__name__}): dropout "
            "and batch norm would be captured in their training form; call model.eval() first"
        )
    tensors = dict(itertools.chain(model.named_parameters(), model.named_buffers()))
    if unset := [name for name, t in tensors.items() if is_lazy(t)]:
        raise CaptureError(
            f"{len(unset)} parameter(s) or buffer(s), first {unset[0]}, of lazy modules have no shape yet; run the "
            "model on a batch, or load its weights, before quantizing"
        )
    if inference := [name for name, t in tensors.items() if t.is_inference()]:
        raise CaptureError(
            f"{len(inference)} parameter(s) or buffer(s), first {inference[0]}, were created under "
            "torch.inference_mode, and torch.export cannot trace them; create or load the model outside of "
            "inference_mode"
        )
    if meta := [name for name, t in tensors.items() if t.is_meta]:
        raise CaptureError(
            f"{len(meta)} parameter(s) or buffer(s), first {meta[0]}, are on the meta device, without values: "
            "accelerate offloaded them, or they were never loaded. Load the model with device_map='cpu', undo "
            "offloading with accelerate.hooks.remove_hook_from_module(model, recurse=True), or pass the directory of "
            "the checkpoint to quantize, which reads weights as it needs them"
        )
    _require_names(model)
    devices = Counter(str(t.device) for t in tensors.values())
    if len(devices) > 1:
        rare = min(devices, key=lambda d: devices[d])
        first = next(name for name, t in tensors.items() if str(t.device) == rare)
        raise CaptureError(
            f"the model is on several devices: {', '.join(f'{d} ({n} tensors)' for d, n in devices.items())}; the "
            f"first tensor on {rare} is {first}; move the model to one device with model.to(device)"
        )


def _require_python(model: nn.Module) -> None:
    """Reject TorchScript modules, and hooks that are registered for all modules of the process."""
    scripted = [name or "the model" for name, m in model.named_modules() if isinstance(m, torch.jit.ScriptModule)]
    if scripted:
        raise CaptureError(
            f"{scripted[0]} is a TorchScript module (torch.jit.trace or torch.jit.script), which torch.export cannot "
            "trace; pass the original nn.Module"
        )
    hooks = vars(torch.nn.modules.module)
    if any(hooks.get(f"_global_forward_{kind}") for kind in ("hooks", "pre_hooks")):
        raise CaptureError(
            "a forward hook is registered for all modules of this process (register_module_forward_hook or "
            "register_module_forward_pre_hook); call remove() on its handle before quantizing"
        )


def _require_names(model: nn.Module) -> None:
    """Reject parameters and buffers with names that torch.fx cannot write into code, or that graphs already use."""
    taken = set(dir(torch.fx.GraphModule)) - set(dir(nn.Module)) | {"graph", "meta"}
    tensors = itertools.chain(model.named_parameters(), model.named_buffers())
    paths = {name: name.split(".") for name, _ in tensors}
    if bad := [name for name, path in paths.items() if path[0] in taken or not all(map(_is_writable, path))]:
        raise CaptureError(
            f"{len(bad)} tensor(s) have names that torch.fx cannot write into the code of a graph, first {bad[0]!r}: a "
            "Python keyword, an attribute that every graph has, or quotes; rename such tensors in the model's __init__ "
            "and in its checkpoint"
        )
    # torch.fx writes `getattr(..., "0")` for each numeric name, and Python nests at most 200 parentheses.
    levels = {name: sum(not part.isidentifier() for part in path) for name, path in paths.items()}
    if deep := [name for name, count in levels.items() if count > _DEEPEST]:
        raise CaptureError(
            f"{deep[0][:60]}… is nested in {levels[deep[0]]} numbered modules, as in nn.Sequential, and torch.fx can "
            f"generate code for at most {_DEEPEST}; put the inner modules into one nn.Sequential, or assign them to "
            "attributes with names"
        )


def _is_writable(name: str) -> bool:
    return not keyword.iskeyword(name) and not re.search(r"[\"\\\r\n]", name)


def require_inputs_fit(model: nn.Module, batch: Any) -> None:
    leaves = pytree.tree_leaves(batch)
    if leaves and all(isinstance(leaf, str) for leaf in leaves):
        raise CaptureError(f"the batch is text ({leaves[0]!r}); pass the output of the model's tokenizer or processor")
    if leaves and not any(isinstance(leaf, Tensor) or hasattr(leaf, "__array__") for leaf in leaves):
        # A Hugging Face model's batch has `use_cache=False`, which the caller did not pass.
        others = [leaf for leaf in leaves if leaf is not False]
        only = f", only {others[0]!r}" if others else ""
        raise CaptureError(f"the batch contains no tensor{only}; pass tensors whose first dimension counts samples")
    device = next((p.device for p in itertools.chain(model.parameters(), model.buffers())), None)
    for path, leaf in pytree.tree_flatten_with_path(batch)[0]:
        if not isinstance(leaf, Tensor):
            if hasattr(leaf, "__array__"):
                raise CaptureError(
                    f"input {pytree.keystr(path[1:])} is a {type(leaf).__name__}; convert it with torch.from_numpy"
                )
            continue
        if device is not None and leaf.device != device:
            raise CaptureError(
                f"input {pytree.keystr(path[1:])} is on {leaf.device}, the model on {device}; move one to the other"
            )
        if 0 in leaf.shape:
            raise CaptureError(
                f"input {pytree.keystr(path[1:])} is empty, shape {tuple(leaf.shape)}; every dimension of "
                "a batch needs at least one value"
            )
    _require_dtypes_fit(model, batch)


def _require_dtypes_fit(model: nn.Module, batch: Any) -> None:
    """Check that a model runs on inputs in another floating-point dtype, because capture would not notice an error."""
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    leaves = [(path, x) for path, x in pytree.tree_flatten_with_path(batch)[0] if isinstance(x, Tensor)]
    mismatches = [
        (pytree.keystr(path[1:]), x.dtype) for path, x in leaves if x.is_floating_point() and x.dtype not in dtypes
    ]
    if not dtypes or not mismatches:
        return
    try:
        with torch.no_grad(), untouched(model) as state, state.writes:
            model(*batch[0], **batch[1])
    except (RuntimeError, ValueError) as error:
        if is_shortage(error):
            raise
        raise CaptureError(
            f"input {', '.join(f'{name} is {dtype}' for name, dtype in mismatches)}, the model "
            f"{', '.join(sorted(map(str, dtypes)))}, and the model fails on that dtype ({error}); convert the batch "
            "first"
        ) from error


def _where(error: Exception, model: nn.Module) -> str:
    """Return the user's line and the module in which an error occurred."""
    module_name, where = _module(error, model)[0], ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        code = frame.f_code
        library = code.co_filename.startswith(_HERE) or any(part in code.co_filename for part in ("/torch/", "<"))
        if not library and code.co_name != "_export":
            where = f"{code.co_filename}:{line} in {code.co_name}"
    return f"{where or 'an unknown line'}{f', module {module_name[:200]}' if module_name else ''}"


def _module(error: Exception, model: nn.Module) -> tuple[str, nn.Module]:
    """Return the innermost module in which an error occurred, and its name; the name is empty if there is none."""
    names = {id(module): name for name, module in model.named_modules()}
    innermost = "", model
    for frame, _ in traceback.walk_tb(error.__traceback__):
        code = frame.f_code
        receiver = code.co_argcount and frame.f_locals.get(code.co_varnames[0])
        if isinstance(receiver, nn.Module) and id(receiver) in names:
            innermost = names[id(receiver)] or type(model).__name__, receiver
    return innermost


def explain(error: Exception, model: nn.Module) -> str:
    advice = _packed(error) or _too_deep(error)
    return (
        f"{type(model).__name__} could not be captured: {type(error).__name__}: {_reason(error)}\n"
        f"  at {_where(error, model)}\n"
        f"{advice or _advice(type(error).__name__ + str(error), model, _module(error, model)[1])}"
    )


def _packed(error: Exception) -> str:
    """Return advice if a packed sequence made capture fail, else an empty string."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    if not any(isinstance(value, PackedSequence) for frame in frames for value in frame.f_locals.values()):
        return ""
    return (
        "the sizes of a packed sequence depend on the lengths, which a single graph cannot represent: pass the padded "
        "batch to the recurrent layer (later steps do not change earlier ones), and read each sequence's state at its "
        "last step"
    )


def _too_deep(error: Exception) -> str:
    """Return advice if nested modules or inputs exceed Python's limit of nested calls, else an empty string."""
    if not isinstance(error, RecursionError):
        return ""
    return (
        f"its modules or inputs are nested too deeply for Python's recursion limit of {sys.getrecursionlimit()}: call "
        f"sys.setrecursionlimit({20 * sys.getrecursionlimit()}) first, or use fewer levels of nesting"
    )


def require_runs(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], state: ModelState
) -> list[Any] | None:
    """Return the outputs of a model for copies of a batch, or `None` if memory is short.

    The states of torch's random number generators are restored. Writes of the run to the model stay until the caller
    restores `state`.

    Raises:
        CaptureError: If the model itself does not run on the batch.
    """
    devices = {p.device for p in model.parameters() if p.is_cuda}
    try:
        positional, named = pytree.tree_map(
            lambda x: x.clone() if isinstance(x, Tensor) else deepcopy(x), (args, kwargs)
        )
        with torch.no_grad(), torch.random.fork_rng(devices), state.writes:
            return pytree.tree_leaves(model(*positional, **named))
    except Exception as error:  # the model's own code may raise any error
        if is_shortage(error):
            return None
        raise CaptureError(
            f"{type(model).__name__} itself does not run on the first batch ({_shapes(args, kwargs)}): "
            f"{type(error).__name__}: {_reason(error)}\n  at {_where(error, model)}\n"
            + (_too_deep(error) or "pass batches that model(...) accepts; check their rank, sizes, and dtypes")
        ) from error


def require_repeats(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    traced: nn.Module | None = None,
    earlier: list[Any] | None = None,
) -> None:
    """Raise `CaptureError` if a model returns other values for the same batch because an earlier call changed it.

    The model runs on the batch three times, and again after a run on the flipped batch if the model accepts that. Later
    calls must return equal values; the first call may round differently, because some models fuse weights in it. A
    model that returns other values even without earlier calls draws random numbers, which a graph may do.

    Args:
        model: Model to run.
        args: Positional inputs of the batch.
        kwargs: Keyword inputs of the batch.
        traced: Graph of the first call, if tracing took values from an iterator, which no later call gets.
        earlier: Outputs of a call before tracing, which replace the outputs of the first call.
    """

    def outputs(args: Any, kwargs: Any, run: nn.Module = model) -> list[Any] | CaptureError | None:
        try:
            return require_runs(run, args, kwargs, state)
        except CaptureError as error:
            return error

    with untouched(model) as state:
        first = earlier or outputs(args, kwargs, model if traced is None else traced)
        since_first = ModelState(model)
        later = [outputs(args, kwargs)]
        at_each, at_first = since_first.changed(), state.changed()
        advances = state.has_advanced()
        later.append(outputs(args, kwargs))
        if isinstance(outputs(*pytree.tree_map(_flipped, (args, kwargs))), list):
            later.append(outputs(args, kwargs))
    if not isinstance(first, list) or None in later:
        return  # memory was short, so there is nothing to compare
    runs = [one for one in later if isinstance(one, list)]
    failed = next((one for one in later if isinstance(one, CaptureError)), None)
    if failed is None and _is_rounded(first, runs[0], _spacing(model)) and all(_is_same(runs[0], one) for one in runs):
        return
    with untouched(model) as state:
        again = outputs(args, kwargs)
    if not advances and not (isinstance(again, list) and _is_same(first, again)):
        return
    effect = "returns different values for the same batch"
    if failed is not None:
        effect = f"does not run twice on the same batch ({type(failed.__cause__).__name__}: {failed.__cause__})"
    cause = "it keeps state between calls"
    if changed := at_each or at_first:
        cause = f"its forward changes {', '.join(changed)} at {'each' if at_each else 'its first'} call"
    raise CaptureError(
        f"{type(model).__name__} {effect}, because {cause}, and the captured graph would always use the state from the "
        "first call. Make the state a tensor that the model takes as an input and returns as an output, or keep it "
        "fixed in eval mode"
    )


def _flipped(x: Any) -> Any:
    """Return a tensor in reverse order; other values, and tensors that torch cannot flip, are returned as they are."""
    try:
        return x.flip([*range(x.dim())]) if isinstance(x, Tensor) else x
    except (NotImplementedError, RuntimeError):  # 8-bit floats and sparse tensors
        return x


def _is_same(one: list[Any], other: list[Any]) -> bool:
    """Tell whether outputs have the same bits."""
    return len(one) == len(other) and all(map(_has_same_bits, one, other))


def _has_same_bits(a: Any, b: Any) -> bool:
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return not isinstance(a, bool | int | float) or bool(a == b) or (a != a and b != b)  # NaN
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    a, b = (x.to_dense().contiguous().flatten().view(torch.uint8) for x in (a, b))
    return torch.equal(a, b)


def _spacing(model: nn.Module) -> float:
    """Return the relative spacing of the coarsest float type of 16 bits or more in which a model computes."""
    tensors = itertools.chain(model.parameters(), model.buffers())
    return max((torch.finfo(x.dtype).eps for x in tensors if x.is_floating_point() and x.itemsize > 1), default=0.0)


def returns_the_same(model: nn.Module, expected: list[Any], outputs: list[Any]) -> bool:
    """Tell whether flat outputs equal the expected outputs, up to rounding errors in the dtypes of a model."""
    return _is_rounded(expected, outputs, _spacing(model))


def _is_rounded(one: list[Any], other: list[Any], spacing: float) -> bool:
    """Tell whether outputs agree up to rounding, in at least half of their digits; integers must be equal."""
    return len(one) == len(other) and all(
        _is_near(a, b, spacing) if isinstance(a, Tensor) and isinstance(b, Tensor) else _has_same_bits(a, b)
        for a, b in zip(one, other, strict=True)
    )


_PIECE = 1 << 20
"""Number of values that are compared at a time in float64."""


def _is_near(a: Tensor, b: Tensor, spacing: float) -> bool:
    if _has_same_bits(a, b):
        return True
    if a.shape != b.shape or a.dtype != b.dtype or not (a.is_floating_point() or a.is_complex()):
        return False
    digits = max(spacing, torch.finfo(a.dtype).eps) ** 0.5
    wide = torch.complex128 if a.is_complex() else torch.float64
    a, b = (x.cpu().to_dense().flatten() for x in (a, b))
    sizes = a.to(torch.float32 if a.is_floating_point() and a.itemsize < 8 else wide).abs()
    sizes = sizes[sizes.isfinite()]
    usual = float(sizes.median()) if sizes.numel() else 0.0  # not the maximum, which a mask may contain
    return all(
        torch.allclose(x.to(wide), y.to(wide), rtol=digits, atol=digits * usual, equal_nan=True)
        for x, y in zip(a.split(_PIECE), b.split(_PIECE), strict=True)
    )


def _reason(error: Exception) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _shapes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Describe the inputs of a batch."""
    leaves = pytree.tree_flatten_with_path((list(args), kwargs))[0]
    named = ((path_name(path[1:]), leaf) for path, leaf in leaves if isinstance(leaf, Tensor))
    return ", ".join(f"{name}: {tuple(x.shape)} {str(x.dtype).removeprefix('torch.')}" for name, x in named)


def _first_varies(tree: Any) -> str:
    """Return text for `dynamic_shapes` that makes the first dimension of every tensor in `tree` dynamic."""
    if isinstance(tree, Tensor):
        return "{0: Dim.AUTO}" if tree.dim() else "{}"
    if isinstance(tree, Mapping):
        return f"{{{', '.join(f'{name!r}: {_first_varies(part)}' for name, part in tree.items())}}}"
    if isinstance(tree, list):
        return f"[{', '.join(map(_first_varies, tree))}]"
    if isinstance(tree, tuple):  # torch.export requires the type of the input
        return f"({''.join(f'{_first_varies(part)}, ' for part in tree).strip()})"
    return "None"


def explain_dynamic_shapes(error: Exception, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Describe the error in the requested `dynamic_shapes`; return "" if capture failed for another reason."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = " ".join(lines)
    last = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)][-1]
    about = ("dynamic_shapes", "Constraints violated", "not in range", "dynamic dimension")
    checked = any(map(Path(last).is_relative_to, _TORCH_EXPORT)) or last == pytree.__file__
    if not checked and not any(words in text for words in about):
        return ""
    details = [line for line in lines if line.startswith("- ") or re.match(r"\w+ = ", line)]
    arguments = inspect.signature(model.forward).bind(*args, **kwargs).arguments  # keyed by parameter for torch.export
    inputs, written = _shapes(args, kwargs), _first_varies(arguments)
    ones = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor) and 1 in x.shape]
    single = "a dimension of size 1 in the example is always fixed: capture with 2 or more there; " if ones else ""
    return (
        f"dynamic_shapes does not fit {type(model).__name__}, whose inputs are {inputs}: "
        f"{' '.join(details[:4] or lines[:1]) or type(error).__name__}\n{single}write one entry for every input, as "
        f"{written}, with None for a fixed dimension; Dim.AUTO allows every size that the model's code supports. "
        "Without dynamic_shapes, the batch and sequence sizes vary as far as the code allows"
    )


def dtype_hint(model: nn.Module, batch: Any) -> str:
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    inputs = {x.dtype for x in pytree.tree_leaves(batch) if isinstance(x, Tensor)}
    if dtypes and (inputs & {torch.float64, torch.float32, torch.float16, torch.bfloat16}) - dtypes:
        names = ", ".join(map(str, sorted(inputs, key=str)))
        return f"\nThe batch is {names}, the model {', '.join(map(str, dtypes))}: convert the batch first"
    return ""


def _advice(message: str, model: nn.Module, inside: nn.Module) -> str:
    if "data-dependent" in message or "DataDependent" in message:
        one_by_one = getattr(getattr(model, "config", None), "_experts_implementation", None) == "eager"
        if one_by_one and any(p.dim() == 3 for p in inside.parameters(recurse=False)):
            if getattr(model, "_can_set_experts_implementation", lambda: True)():
                way = ": model.set_experts_implementation('grouped_mm')"
            else:
                way = (
                    ", and transformers has no other implementation for this class: replace the experts with a module "
                    "that multiplies all of them at once, or quantize the submodules on either side"
                )
            return f"experts are called one by one, depending on the data, which a single graph cannot represent{way}"
        return (
            "Python control flow depends on the values of a tensor, which a single graph cannot represent: use "
            "torch.where there, or quantize the submodules before and after that code"
        )
    if "dynamic" in message and ("constraint" in message.lower() or "specializ" in message):
        return "a dimension cannot vary as requested: pass `dynamic_shapes` that leave it fixed (see torch.export)"
    if "unhashable type" in message and "SymInt" in message:
        return (
            "a dictionary is indexed by a size, which varies in the graph: index it by int(size), or pass "
            "`dynamic_shapes` that leave the size fixed (see torch.export)"
        )
    return (
        "torch.export must be able to trace the model: fix that line, quantize a submodule, or pass an "
        "ExportedProgram of your own"
    )


def warn_of_fixed_batch(program: ExportedProgram) -> None:
    """Warn about inputs whose first dimension should be dynamic but is fixed by the model's code."""
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    inputs = [nodes[str(name)] for name in program.graph_signature.user_inputs if str(name) in nodes]
    values = [(node, node.meta.get("val")) for node in inputs]
    shaped = [(node, value) for node, value in values if isinstance(value, Tensor) and value.dim()]
    if not shaped:
        return
    batch = static_size(shaped[0][1].shape[0])
    for node, value in shaped:
        # Inputs without a batch, such as a vector of features or a mask, usually have another size.
        if batch is None or static_size(value.shape[0]) != batch:
            continue
        if where := _fixed_at(value, str(node.target)):
            warn_of_fixed(str(node.target), batch, where)


def warn_of_fixed(name: str, size: int, where: str = "", dim: int = 0) -> None:
    """Warn that the model's code fixes a dimension of an input; `where` names the line."""
    cause = (
        "Likely causes: the code compares the size with a number, uses it to index a table, or the example has "
        "size 1 there"
    )
    if not dim:
        cause = (
            "Likely causes: the code loops over the samples, or compares the size with a number; to run batches of "
            "other sizes, compute all samples at once"
        )
    warn(
        f"the model fixes dimension {dim} of input {name} at {size}, the size in the example{where}; other sizes will "
        f"raise an error. {cause}"
    )


def _fixed_at(value: Tensor, name: str) -> str:
    """Return the place where the model's code fixed dimension 0 of an input, or an empty string."""
    env = getattr(getattr(value, "fake_mode", None), "shape_env", None)
    lines, sources = getattr(env, "replacements_slocs", {}), getattr(env, "var_to_sources", {})
    for symbol, line in lines.items():
        names = {str(getattr(source, "name", "")) for source in sources.get(symbol, ())}
        if not any(source.endswith(".size()[0]") and f"['{name}']" in source for source in names):
            continue
        frames = [getattr(line, which, None) for which in ("maybe_user_loc", "framework_loc")]
        model_frames = [frame for frame in frames if frame is not None and "/torch/" not in str(frame)]
        return (
            f", at {model_frames[0].filename}:{model_frames[0].lineno}"
            if model_frames and hasattr(model_frames[0], "filename")
            else ", in its code"
        )
    return ""
