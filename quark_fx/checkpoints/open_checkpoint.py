"""A model whose weights stay in the files of a checkpoint until they are used."""

from __future__ import annotations

import importlib
import json
import re
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.utils.weak import WeakIdKeyDictionary

from quark_fx.checkpoints.files import CheckpointFiles, MappedFiles, is_float
from quark_fx.checkpoints.shelf import Shelf
from quark_fx.errors import CheckpointError, ConfigError
from quark_fx.system.isolation import isolated, quiet, warn
from quark_fx.system.options import checked_call
from quark_fx.system.untrusted import brief, read_json

_CONFIG_LIMIT = 1 << 24
"""Bytes of the largest configuration that is read."""
_WEIGHTS = frozenset({".safetensors", ".bin"})
"""How files of weights of transformers end."""
_CONVERTED = "converted"
"""Folder of what transformers puts together from parts."""
_NO_CODES = frozenset({"F64", "F32", "F16", "BF16", "I64", "BOOL"})
"""Dtypes of weights, positions and masks, as safetensors names them."""


@checked_call
@isolated
def open_checkpoint(
    path: str | Path,
    factory: Callable[[], nn.Module] | None = None,
    *,
    dtype: torch.dtype | None = None,
    scratch: str | Path | None = None,
) -> nn.Module:
    """Return a model in eval mode whose weights are read from the files when they are used, and never kept.

    Args:
        path: a safetensors file, which is read alone, or a directory of them; without `factory` a checkpoint of
            transformers, with its `config.json`. Nothing is unpickled, and no code of the checkpoint is run.
        factory: makes the model; called without arguments, its parameters take no memory meanwhile.
        dtype: what floating-point weights are read in; default: what the configuration says, or the factory makes.
        scratch: a directory on a disk with room for weights that the files hold in another form than the model (experts
            that are stored one by one, another dtype); default: the system's temporary one.

    Raises:
        CheckpointError: if the files are damaged, hold codes instead of weights, or are not those of this model, or if
            the factory does not make one.
        ConfigError: if weights cannot have `dtype`.
    """
    if dtype is not None and not (isinstance(dtype, torch.dtype) and is_float(dtype)):
        raise ConfigError(f"dtype is {dtype!r}; pass torch.float32, torch.float16 or torch.bfloat16")
    files = CheckpointFiles.of(path)
    shelf = Shelf(scratch or tempfile.gettempdir())
    model = _pretrained(files, shelf, dtype) if factory is None else _made(files, factory, shelf, dtype)
    return model.eval().requires_grad_(False)


def _made(
    files: CheckpointFiles, factory: Callable[[], nn.Module], shelf: Shelf, dtype: torch.dtype | None
) -> nn.Module:
    model = _without_weights(factory)
    if dtype is not None:
        model._apply(lambda t: t.to(dtype) if t.is_floating_point() else t)  # `to` makes complex numbers real
    stored = {name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if isinstance(tensor, Tensor)}
    tied = {id(stored[name]): name for name in reversed(stored) if name in files.files}
    found = {name: files.tensor(tied[id(t)]) for name, t in stored.items() if id(t) in tied}
    if missing := [name for name in stored if name not in found]:
        raise files.lacking(missing, len(stored), type(model).__name__)
    _warn_unused(files, sorted(files.files.keys() - stored.keys()))
    _assign(model, found, shelf)
    return model


def _without_weights(factory: Callable[[], nn.Module]) -> nn.Module:
    """Return the model that a factory makes, with parameters on the meta device.

    Raises:
        CheckpointError: if it makes none, or reads parameters.
    """
    if isinstance(factory, nn.Module):
        name = type(factory).__name__
        raise CheckpointError(f"factory is a {name}; pass what makes one, as in lambda: {name}(...)")
    try:
        with _parameters_on_meta():
            model = factory()
    except Exception as error:  # whatever torch raises about tensors without values
        if not re.search(r"\bmeta\b", str(error), re.IGNORECASE):
            raise
        raise CheckpointError(
            f"factory reads weights while it makes the model, when they have no values yet ({error}); leave that "
            "out, and do it after open_checkpoint"
        ) from error
    if not isinstance(model, nn.Module):
        raise CheckpointError(f"factory returned {type(model).__name__}; it has to make an nn.Module")
    return model


class _MetaParameters:
    """Replaces `nn.Module.register_parameter` while a factory runs, for the threads whose factories run."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.moved: dict[int, WeakIdKeyDictionary] = {}
        self.register: Callable[..., None] = nn.Module.register_parameter

    def begin(self) -> Any:
        """Move this thread's parameters from now on; return what `end` has to put back."""
        thread = threading.get_ident()
        with self.lock:
            if not self.moved:
                self.register = register = nn.Module.register_parameter

                def register_moved(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
                    register(module, name, self._move(param))

                nn.Module.register_parameter = register_moved  # type: ignore[method-assign,assignment]
            outer = self.moved.get(thread)
            self.moved[thread] = WeakIdKeyDictionary()
        return outer

    def end(self, outer: Any) -> None:
        """Undo one `begin`; the last one of the process puts torch's own method back."""
        thread = threading.get_ident()
        with self.lock:
            if outer is not None:
                self.moved[thread] = outer
            else:
                del self.moved[thread]
            if not self.moved:
                nn.Module.register_parameter = self.register  # type: ignore[method-assign]

    def _move(self, param: nn.Parameter | None) -> nn.Parameter | None:
        moved = self.moved.get(threading.get_ident())
        if moved is None or not isinstance(param, nn.Parameter) or param.is_meta:
            return param
        if param not in moved:
            # Not by a constructor, which a subclass may have changed.
            new = Tensor._make_subclass(type(param), param.detach().to("meta"), param.requires_grad)
            vars(new).update(vars(param))
            moved[param] = new
        return moved[param]  # type: ignore[no-any-return]


_META_PARAMETERS = _MetaParameters()


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Move parameters to the meta device when modules register them; what is registered twice stays one.

    What other threads make meanwhile keeps its values.
    """
    outer = _META_PARAMETERS.begin()
    try:
        yield
    finally:
        _META_PARAMETERS.end(outer)


def _warn_unused(files: CheckpointFiles, names: list[str]) -> None:
    if names:
        warn(
            f"{files.path} holds {len(names)} tensors that the model does not have: {', '.join(names[:3])}; is it "
            "the checkpoint of this very model?"
        )


def _pretrained(files: CheckpointFiles, shelf: Shelf, dtype: torch.dtype | None) -> nn.Module:
    """Return the model that a checkpoint's configuration names, converted by transformers piece by piece."""
    transformers, accelerate = _library("transformers"), _library("accelerate")
    config = _configuration(files.directory)
    kind = class_of(config, files.directory, transformers)
    # The files are mapped: links to them, and what transformers has to convert, are not needed any longer than this.
    with tempfile.TemporaryDirectory(dir=shelf.directory) as folder, quiet():
        checked, converted = Path(folder, "checked"), Path(folder, _CONVERTED)
        stage(files, config, checked)
        try:
            with limited_modules(config, len(files.files)):
                model, found = kind.from_pretrained(
                    checked,
                    dtype=dtype or "auto",
                    device_map={"": "disk"},
                    offload_folder=converted,
                    use_safetensors=True,
                    local_files_only=True,
                    trust_remote_code=False,
                    output_loading_info=True,
                )
        except Exception as error:  # whatever transformers raises about a checkpoint
            why = str(error).replace(str(checked), str(files.path))
            raise CheckpointError(f"{files.path} is no checkpoint of {kind.__name__}: {why}") from error
        index = _offloaded(model)
        names = [name for name, p in model.named_parameters(remove_duplicate=False) if p.is_meta]
        if missing := [name for name in names if name not in index]:
            raise files.lacking(missing, len(names), kind.__name__)
        _refuse_converted_codes(model, files, index, found["unexpected_keys"])
        accelerate.hooks.remove_hook_from_submodules(model)
        del model.hf_device_map  # nothing is elsewhere any more
        _rename(model, str(checked), str(files.directory))
        files_of = MappedFiles()
        tensors = {place: files_of.tensor(*place) for place in {index[name] for name in names}}
        _assign(model, {name: tensors[index[name]] for name in names}, shelf)
    _warn_unused(files, sorted(found["unexpected_keys"]))
    unread = files.files.keys() & {*found["unexpected_keys"], *_skipped(model, files)}
    setattr(model, _UNREAD, CheckpointFiles(files.path, {name: files.files[name] for name in sorted(unread)}))
    return model  # type: ignore[no-any-return]


_UNREAD = "_quark_fx_unread"
"""Attribute of an opened model: the tensors in its checkpoint that its class does not have."""


def _skipped(model: Any, files: CheckpointFiles) -> set[str]:
    """Return the tensors that the class of a model skips without a warning, such as those of draft layers."""
    patterns = model._keys_to_ignore_on_load_unexpected or ()
    return {
        name for name in files.files.keys() - model.state_dict().keys() if any(re.search(p, name) for p in patterns)
    }


def unread_tensors(model: nn.Module) -> CheckpointFiles | None:
    """Return the tensors that `open_checkpoint` found and the class does not have, `None` for other models."""
    found: CheckpointFiles | None = getattr(model, _UNREAD, None)
    return found


@contextmanager
def limited_modules(config: dict[str, Any], tensors: int) -> Iterator[None]:
    """Stop this thread from making many more modules and parameters than a checkpoint has tensors for.

    A configuration can ask for any number of layers, and transformers makes them all before it misses their weights.

    Args:
        config: What `config.json` says; numbers of layers are compared before configurations make lists of them.
        tensors: Number of tensors in the checkpoint.

    Raises:
        CheckpointError: When the limit is reached.
    """
    most, made, thread = 64 * tensors + 4096, 0, threading.get_ident()
    for key, value in _entries(config):
        if "layer" in key.rpartition(".")[2] and isinstance(value, int) and value > most:
            raise CheckpointError(
                f"config.json asks for {key}={brief(value)}, and the checkpoint has {tensors} tensors; correct it there"
            )

    def count(*_: object) -> None:
        nonlocal made
        made += threading.get_ident() == thread
        if made > most:
            raise CheckpointError(
                f"config.json describes more than {most} modules and parameters, and the checkpoint has {tensors} "
                "tensors; correct the number of layers there"
            )

    hooks = [register_module_parameter_registration_hook(count), register_module_module_registration_hook(count)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def stage(files: CheckpointFiles, config: dict[str, Any], folder: Path) -> None:
    """Make a directory that holds what was checked and nothing else.

    transformers chooses by itself which files of a directory it reads: an index, an adapter, what `config.json` names.

    Raises:
        CheckpointError: if there is no room for it.
    """
    generation = files.directory / "generation_config.json"
    try:
        said = read_json(generation, _CONFIG_LIMIT) if generation.exists() else None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{generation} cannot be read: {error}; remove it, or fetch it again") from error
    try:
        folder.mkdir()
        files.link(folder)
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        if isinstance(said, dict):
            (folder / generation.name).write_text(json.dumps(said), encoding="utf-8")
    except OSError as error:
        raise CheckpointError(
            f"{folder.parent.parent} cannot hold links to {files.path}: {error}; pass another directory as scratch"
        ) from error


def _offloaded(model: Any) -> dict[str, tuple[Path, str]]:
    """Return the file, and the name in it, of each tensor that transformers left on disk."""
    index: dict[str, dict[str, str]] = {}
    for module in model.modules():
        weights = getattr(getattr(module, "_hf_hook", None), "weights_map", None)
        index |= weights.dataset.index if weights is not None else {}
    return {name: (Path(entry["safetensors_file"]), entry["weight_name"]) for name, entry in index.items()}


def _rename(model: Any, old: str, new: str) -> None:
    """Replace the directory a model says it comes from, in its configurations and in models within it."""
    for module in model.modules():
        for owner in (module, getattr(module, "config", module)):
            if getattr(owner, "name_or_path", None) == old:
                owner.name_or_path = new


def _assign(model: nn.Module, tensors: dict[str, Tensor], shelf: Shelf) -> None:
    """Make the tensors the model's parameters and buffers; what is tied stays so.

    Raises:
        CheckpointError: if one has another shape than the model's, or codes where that has floats.
    """
    made: dict[int, tuple[Tensor, Tensor]] = {}  # with the old one, whose identity would be another's otherwise
    for name, tensor in tensors.items():
        owner, _, leaf = name.rpartition(".")
        module = model.get_submodule(owner)
        old = module._parameters.get(leaf, module._buffers.get(leaf))
        assert old is not None
        if tensor.shape != old.shape:
            raise CheckpointError(
                f"the checkpoint holds {name} with shape {tuple(tensor.shape)}, and {type(model).__name__} expects "
                f"{tuple(old.shape)}; pass the checkpoint of this very model"
            )
        if old.is_floating_point() and tensor.dtype != old.dtype and not is_float(tensor.dtype):
            raise _codes(name, str(tensor.dtype).removeprefix("torch."), model)
        if id(old) not in made:
            value = tensor if tensor.dtype == old.dtype else shelf.put(tensor.to(old.dtype))
            new = nn.Parameter(value, requires_grad=False) if leaf in module._parameters else value.clone()
            made[id(old)], made[id(new)] = (new, old), (new, new)
        (module._parameters if leaf in module._parameters else module._buffers)[leaf] = made[id(old)][0]  # type: ignore[assignment]


def _codes(name: str, dtype: str, model: nn.Module) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint holds {name} in {dtype}, and {type(model).__name__} computes with floats: codes without their "
        "scales are not its weights; pass the checkpoint they were made from, in float32, float16 or bfloat16"
    )


def _refuse_converted_codes(
    model: nn.Module, files: CheckpointFiles, index: dict[str, tuple[Path, str]], unexpected: set[str]
) -> None:
    """Refuse codes that transformers made floats of, when it put together what is stored in parts.

    Raises:
        CheckpointError: naming one of them.
    """
    if not any(file.parent.name == _CONVERTED for file, _ in index.values()):
        return  # what else transformers leaves out are masks and positions of earlier versions
    known = {name for _, name in index.values()} | unexpected | {name for name, _ in model.named_buffers()}
    for name, dtype in files.dtypes(files.files.keys() - known).items():
        if dtype not in _NO_CODES:
            raise _codes(name, dtype, model)


def read_configuration(directory: Path) -> dict[str, Any]:
    """Return what `config.json` says, if it names a model, and nothing in it leads out of the directory.

    Raises:
        CheckpointError: if it cannot be read, or does.
    """
    file = directory / "config.json"
    try:
        config = read_json(file, _CONFIG_LIMIT)
        str(config["architectures"][0])
    except (OSError, ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
        raise CheckpointError(
            f"{file} does not say which model this is ({type(error).__name__}: {error}); pass "
            "open_checkpoint(path, factory) for a model that is none of transformers"
        ) from error
    for key, value in _entries(config):
        # transformers fetches kernels, which are code, for "owner/name".
        if "_implementation" in key and isinstance(value, str) and "/" in value:
            raise CheckpointError(f"{file} asks for code to be fetched: {value}; remove {key}")
    if others := config.get("configuration_files"):
        raise CheckpointError(
            f"{file} leaves the configuration to {others}; replace it by the one of your transformers"
        )
    config.pop("transformers_weights", None)  # which file to read; the files are chosen
    return config  # type: ignore[no-any-return]


def is_rotated(config: dict[str, Any]) -> bool:
    """Tell whether a configuration has matrices that rotate activations, which transformers leaves out."""
    return any(key.rpartition(".")[2] == "transform_config" and bool(value) for key, value in _entries(config))


def require_unrotated(config: dict[str, Any], path: Path) -> None:
    """Raise `CheckpointError` for a checkpoint with rotations, of which transformers computes something else."""
    if is_rotated(config):
        raise CheckpointError(
            f"{path} rotates activations, which transformers leaves out, so that it computes something else; run it in "
            "vLLM, or take the quantized model, saved or exported to ONNX"
        )


def quantized_by(config: dict[str, Any]) -> str:
    """Return the key under which a configuration says that its weights are quantized, empty if it does not."""
    names = ("quantization_config", "compression_config")
    return next((key for key, value in _entries(config) if key.rpartition(".")[2] in names and value), "")


def require_no_weights(directory: Path) -> None:
    """Refuse to write a quantized checkpoint over weights that may be the float ones it was made from.

    Raises:
        CheckpointError: if the directory holds such weights.
    """
    found = sorted(f.name for f in directory.iterdir() if f.suffix in _WEIGHTS) if directory.is_dir() else []
    if not found:
        return
    try:
        config = read_json(directory / "config.json", _CONFIG_LIMIT)
        earlier = isinstance(config, dict) and quantized_by(config)
    except (OSError, ValueError, RecursionError):
        earlier = ""
    if not earlier:
        raise CheckpointError(
            f"{directory} holds {found[0]}, which no config.json there calls quantized and which would be lost; choose "
            "another directory"
        )


def _configuration(directory: Path) -> dict[str, Any]:
    """Return the configuration of a checkpoint whose weights are floats."""
    config = read_configuration(directory)
    if key := quantized_by(config):
        raise CheckpointError(
            f"{directory / 'config.json'} says in {key} that the checkpoint is quantized already; pass the float one "
            "it was made from"
        )
    return config


def _entries(config: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield every entry of nested JSON, after the keys that lead to it."""
    rest: list[tuple[str, Any]] = list(config.items())
    while rest:
        key, value = rest.pop()
        yield key, value
        parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        rest += [(f"{key}.{part}", below) for part, below in parts]


def class_of(config: dict[str, Any], directory: Path, transformers: Any) -> Any:
    """Return the class of transformers that a configuration names.

    Raises:
        CheckpointError: if this version does not have it.
    """
    name = str(config["architectures"][0])
    kind = getattr(transformers, name, None)
    if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
        raise CheckpointError(
            f"{directory / 'config.json'} names {name!r}, which transformers {transformers.__version__} does not have; "
            "update transformers, or load the model yourself and pass it to quantize"
        )
    return kind


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise CheckpointError(f"reading a checkpoint piece by piece needs {name}: pip install {name}") from error


__all__ = [
    "class_of",
    "is_rotated",
    "limited_modules",
    "open_checkpoint",
    "quantized_by",
    "read_configuration",
    "require_no_weights",
    "require_unrotated",
    "stage",
    "unread_tensors",
]
