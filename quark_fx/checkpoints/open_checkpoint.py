"""`open_checkpoint`, which returns a model whose weights stay in the files of a checkpoint until they are used."""

from __future__ import annotations

import importlib
import json
import re
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from quark_fx.checkpoints.configuration import (
    CONFIG_LIMIT,
    METHOD,
    NO_CODES,
    class_of,
    limited_modules,
    quantized_by,
    read_configuration,
    without_codes,
)
from quark_fx.checkpoints.decoded import DecodedFiles
from quark_fx.checkpoints.files import CheckpointFiles, MappedFiles, is_float
from quark_fx.checkpoints.gguf_file import is_gguf
from quark_fx.checkpoints.gguf_source import GgufSource
from quark_fx.checkpoints.shelf import Shelf
from quark_fx.errors import CheckpointError, ConfigError
from quark_fx.system.isolation import isolated, quiet, warn
from quark_fx.system.options import checked_call
from quark_fx.system.untrusted import read_json

_CONVERTED = "converted"
"""Name of the folder for weights that transformers assembles from several tensors."""


@checked_call
@isolated
def open_checkpoint(
    path: str | Path,
    factory: Callable[[], nn.Module] | None = None,
    *,
    dtype: torch.dtype | None = None,
    scratch: str | Path | None = None,
) -> nn.Module:
    """Return a model in eval mode whose weights are memory-mapped: values are read from files when they are used.

    Codes of FP8 blocks, compressed-tensors, GPTQ, AWQ, MXFP4, ModelOpt, and GGUF are decoded to files in `scratch`,
    tensor by tensor; reports of the quantized model then say that the source was rounded before.

    Args:
        path: Safetensors file, which is read without its neighbors, or directory with safetensors files; without
            `factory`, a checkpoint of transformers with its `config.json`, or a GGUF file. Nothing is unpickled, and no
            code of the checkpoint runs.
        factory: Function without arguments that returns the model; parameters do not take memory while it runs.
        dtype: Dtype of floating-point weights; default: the dtype in the configuration, or of the factory's model, and
            float32 for GGUF.
        scratch: Directory on a disk with space for weights that the model stores in another form than the files (stacks
            of experts, another dtype); default: the system's temporary directory.

    Raises:
        CheckpointError: If the files are damaged, hold codes that quark_fx does not decode, or belong to another model,
            or if the factory does not return a model.
        ConfigError: If weights cannot have `dtype`.
    """
    if dtype is not None and not (isinstance(dtype, torch.dtype) and is_float(dtype)):
        raise ConfigError(f"dtype is {dtype!r}; pass torch.float32, torch.float16 or torch.bfloat16")
    coded: DecodedFiles | GgufSource | None = None
    if is_gguf(path):
        if factory is not None:
            raise ConfigError(f"{path} describes its model itself; omit factory")
        coded = GgufSource.of(path)
        files, config = CheckpointFiles(coded.path, {}), coded.config
        _warn_unused(files, coded.unused)
    else:
        files = CheckpointFiles.of(path)
        config = read_configuration(files.directory) if factory is None else _configuration_of_codes(files)
        if quantized_by(config):
            coded, config = DecodedFiles.of(files, config), without_codes(config)
    shelf = Shelf(scratch or tempfile.gettempdir())
    with ExitStack() as stack:
        stored = files
        if coded is not None:
            # The folder can be removed at the end, because the mappings of its files stay valid.
            folder = stack.enter_context(tempfile.TemporaryDirectory(dir=shelf.directory))
            stored = coded.stored(Path(folder), dtype)
        if factory is None:
            model = _pretrained(stored, config, shelf, dtype, files.tensor if coded is None else coded.tensor)
        else:
            model = _from_factory(stored, factory, shelf, dtype)
    if coded is not None and coded.method:
        setattr(model, ROUNDED_BY, coded.method)
    return model.eval().requires_grad_(False)


def require_readable(path: str | Path) -> None:
    """Check the headers of a checkpoint or GGUF file, but not its weights.

    Raises:
        CheckpointError: If `open_checkpoint` does not support the files, or they are damaged.
    """
    _ = GgufSource.of(path) if is_gguf(path) else CheckpointFiles.of(path)


ROUNDED_BY = "_quark_fx_rounded_by"
"""Name of an attribute of opened models with the method that quantized the checkpoint; float models do not have it."""


def _configuration_of_codes(files: CheckpointFiles) -> dict[str, Any]:
    """Return the content of `config.json` for a factory's model if the tensors may be codes, or else an empty mapping.

    Next to float tensors, the file may describe something else, so it is not read.
    """
    if all(dtype in NO_CODES for dtype, _ in files.headers.values()):
        return {}
    try:
        config = read_json(files.directory / "config.json", CONFIG_LIMIT)
    except (OSError, ValueError, RecursionError):
        return {}
    return config if isinstance(config, dict) else {}


def _from_factory(
    files: CheckpointFiles, factory: Callable[[], nn.Module], shelf: Shelf, dtype: torch.dtype | None
) -> nn.Module:
    model = _without_weights(factory)
    if dtype is not None:
        model._apply(lambda t: t.to(dtype) if t.is_floating_point() else t)  # `Module.to` casts complex, too
    stored = {name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if isinstance(tensor, Tensor)}
    tied = {id(stored[name]): name for name in reversed(stored) if name in files.files}
    tensors = {name: files.tensor(tied[id(t)]) for name, t in stored.items() if id(t) in tied}
    if missing := [name for name in stored if name not in tensors]:
        raise files.lacking(missing, len(stored), type(model).__name__)
    _warn_unused(files, sorted(files.files.keys() - stored.keys()))
    _assign(model, tensors, shelf)
    return model


def _without_weights(factory: Callable[[], nn.Module]) -> nn.Module:
    """Return the model that a factory creates, with its parameters on the meta device.

    Raises:
        CheckpointError: If the factory does not return a model, or reads the values of parameters.
    """
    if isinstance(factory, nn.Module):
        name = type(factory).__name__
        raise CheckpointError(f"factory is a {name}; pass a function that returns one, such as lambda: {name}(...)")
    try:
        with _parameters_on_meta():
            model = factory()
    except Exception as error:  # torch may raise any error for tensors without values
        if not re.search(r"\bmeta\b", str(error), re.IGNORECASE):
            raise
        raise CheckpointError(
            f"factory reads weights while it builds the model, before they have values ({error}); do that after "
            "open_checkpoint instead"
        ) from error
    if not isinstance(model, nn.Module):
        raise CheckpointError(f"factory returned {type(model).__name__}; it has to return an nn.Module")
    return model


class _MetaParameters:
    """Replacement of `nn.Module.register_parameter` that moves parameters to the meta device while a factory runs.

    Other threads are not affected.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.moved: dict[int, WeakIdKeyDictionary] = {}
        self.register: Callable[..., None] = nn.Module.register_parameter

    def begin(self) -> Any:
        """Start to move the parameters that this thread registers; return the earlier state, which `end` restores."""
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
        """Undo one call of `begin`; the last call in the process restores torch's method."""
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
            # Do not call the constructor, because subclasses may have another signature.
            new = Tensor._make_subclass(type(param), param.detach().to("meta"), param.requires_grad)
            vars(new).update(vars(param))
            moved[param] = new
        return moved[param]  # type: ignore[no-any-return]


_META_PARAMETERS = _MetaParameters()


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Move parameters to the meta device when modules of this thread register them; tied parameters stay tied."""
    outer = _META_PARAMETERS.begin()
    try:
        yield
    finally:
        _META_PARAMETERS.end(outer)


def _warn_unused(files: CheckpointFiles, names: list[str]) -> None:
    if names:
        warn(
            f"{files.path} holds {len(names)} tensors that the model does not have: {', '.join(names[:3])}; check that "
            "it is a checkpoint of this model"
        )


def _pretrained(
    files: CheckpointFiles,
    config: dict[str, Any],
    shelf: Shelf,
    dtype: torch.dtype | None,
    read: Callable[[str], Tensor],
) -> nn.Module:
    """Return the model that a checkpoint's configuration names, with weights that transformers converts one by one.

    Args:
        files: Files of the checkpoint, with values instead of codes.
        config: Content of `config.json`.
        shelf: Storage of converted weights.
        dtype: Dtype of weights; `None` for the dtype in the configuration.
        read: Function from the name of a tensor that the model lacks to its value.
    """
    transformers, accelerate = _library("transformers"), _library("accelerate")
    kind = class_of(config, files.directory, transformers)
    # The folder holds links to the files, and converted weights. It is temporary, because mappings stay valid.
    with tempfile.TemporaryDirectory(dir=shelf.directory) as folder, quiet():
        checked, converted = Path(folder, "checked"), Path(folder, _CONVERTED)
        stage(files, config, checked)
        try:
            with limited_modules(config, len(files.files)):
                model, loading = kind.from_pretrained(
                    checked,
                    dtype=dtype or "auto",
                    device_map={"": "disk"},
                    offload_folder=converted,
                    use_safetensors=True,
                    local_files_only=True,
                    trust_remote_code=False,
                    output_loading_info=True,
                )
        except Exception as error:  # transformers may raise any error for a checkpoint
            why = str(error).replace(str(checked), str(files.path))
            raise CheckpointError(f"{files.path} is not a checkpoint of {kind.__name__}: {why}") from error
        index = _offloaded(model)
        names = [name for name, p in model.named_parameters(remove_duplicate=False) if p.is_meta]
        if missing := [name for name in names if name not in index]:
            raise files.lacking(missing, len(names), kind.__name__)
        _refuse_converted_codes(model, files, index, loading["unexpected_keys"])
        accelerate.hooks.remove_hook_from_submodules(model)
        del model.hf_device_map  # it would say that weights are on disk
        _rename(model, str(checked), str(files.directory))
        files_of = MappedFiles()
        tensors = {place: files_of.tensor(*place) for place in {index[name] for name in names}}
        _assign(model, {name: tensors[index[name]] for name in names}, shelf)
    unknown = _sources(model, files, loading["unexpected_keys"])
    _warn_unused(files, sorted(unknown))
    setattr(model, _UNREAD, {name: partial(read, name) for name in sorted(unknown | _skipped(model, files))})
    return model  # type: ignore[no-any-return]


_UNREAD = "_quark_fx_unread"
"""Name of an attribute of opened models with functions that load the tensors that the model's class lacks."""


def _sources(model: Any, files: CheckpointFiles, names: set[str]) -> set[str]:
    """Return the names of the stored tensors that transformers did not find in the model under `names`.

    The names may differ: transformers renames tensors, and stacks experts of draft layers, before it looks them up.

    Args:
        model: Model that transformers loaded.
        files: Files of the checkpoint.
        names: Names after renaming and stacking.
    """
    loading = _library("transformers.core_model_loading")
    kinds = loading.WeightRenaming, loading.WeightConverter
    conversions = [[c for c in model._weight_conversions or () if isinstance(c, kind)] for kind in kinds]
    return {name for name in files.files if {name, loading.rename_source_key(name, *conversions)[0]} & names}


def _skipped(model: Any, files: CheckpointFiles) -> set[str]:
    """Return the names of tensors that the model's class skips without a warning, such as tensors of draft layers."""
    patterns = model._keys_to_ignore_on_load_unexpected or ()
    return {
        name for name in files.files.keys() - model.state_dict().keys() if any(re.search(p, name) for p in patterns)
    }


_FLOAT = frozenset({METHOD, "gguf"})
"""Values of `quant_method` for which a model that transformers has loaded holds float weights."""


def method_of(model: nn.Module) -> str:
    """Return the method that quantized the checkpoint from which transformers loaded a model; empty for floats."""
    for module in model.modules():
        settings = getattr(getattr(module, "config", None), "quantization_config", None)
        method = settings.get("quant_method") if isinstance(settings, dict) else getattr(settings, "quant_method", None)
        if method is not None:
            name = str(getattr(method, "value", method))
            return "" if name in _FLOAT else name
    return ""


def unread_tensors(model: nn.Module) -> Mapping[str, Callable[[], Tensor]] | None:
    """Return functions that load the tensors that an opened model's class lacks; keys are names.

    The result is `None` if `open_checkpoint` did not open the model.
    """
    unread: Mapping[str, Callable[[], Tensor]] | None = getattr(model, _UNREAD, None)
    return unread


def stage(files: CheckpointFiles, config: dict[str, Any], folder: Path) -> None:
    """Create a directory with links to the checked files, the configurations, and nothing else.

    In the original directory, transformers would also read other files: an index, an adapter, or files that
    `config.json` names.

    Args:
        files: Files of the checkpoint.
        config: Content of `config.json` to write.
        folder: Directory to create.

    Raises:
        CheckpointError: If `generation_config.json` cannot be read, or the directory cannot be written.
    """
    generation = files.directory / "generation_config.json"
    try:
        settings = read_json(generation, CONFIG_LIMIT) if generation.exists() else None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{generation} cannot be read: {error}; remove it, or fetch it again") from error
    try:
        folder.mkdir()
        files.link(folder)
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        if isinstance(settings, dict):
            (folder / generation.name).write_text(json.dumps(settings), encoding="utf-8")
    except OSError as error:
        raise CheckpointError(
            f"{folder.parent.parent} cannot hold links to {files.path}: {error}; pass another directory as scratch"
        ) from error


def _offloaded(model: Any) -> dict[str, tuple[Path, str]]:
    """Return the file of each tensor that transformers left on disk, and the tensor's name in this file."""
    index: dict[str, dict[str, str]] = {}
    for module in model.modules():
        weights = getattr(getattr(module, "_hf_hook", None), "weights_map", None)
        index |= weights.dataset.index if weights is not None else {}
    return {name: (Path(entry["safetensors_file"]), entry["weight_name"]) for name, entry in index.items()}


def _rename(model: Any, old: str, new: str) -> None:
    """Replace the name of the directory `old` in a model, its submodels, and their configurations by `new`."""
    for module in model.modules():
        for owner in (module, getattr(module, "config", module)):
            if getattr(owner, "name_or_path", None) == old:
                owner.name_or_path = new


def _assign(model: nn.Module, tensors: dict[str, Tensor], shelf: Shelf) -> None:
    """Assign tensors to the model's parameters and buffers; tied parameters stay tied.

    Raises:
        CheckpointError: If the shape of a tensor differs, or the tensor holds codes for a float parameter.
    """
    # Values are new and old tensors: the old ones must stay alive, so that their ids, the keys, are not reused.
    replaced: dict[int, tuple[Tensor, Tensor]] = {}
    for name, tensor in tensors.items():
        owner, _, leaf = name.rpartition(".")
        module = model.get_submodule(owner)
        old = module._parameters.get(leaf, module._buffers.get(leaf))
        assert old is not None
        if tensor.shape != old.shape:
            raise CheckpointError(
                f"the checkpoint holds {name} with shape {tuple(tensor.shape)}, and {type(model).__name__} expects "
                f"{tuple(old.shape)}; pass a checkpoint of this model"
            )
        if old.is_floating_point() and tensor.dtype != old.dtype and not is_float(tensor.dtype):
            raise _codes(name, str(tensor.dtype).removeprefix("torch."), model)
        if id(old) not in replaced:
            value = tensor if tensor.dtype == old.dtype else shelf.put(tensor.to(old.dtype))
            new = nn.Parameter(value, requires_grad=False) if leaf in module._parameters else value.clone()
            replaced[id(old)], replaced[id(new)] = (new, old), (new, new)
        (module._parameters if leaf in module._parameters else module._buffers)[leaf] = replaced[id(old)][0]  # type: ignore[assignment]


def _codes(name: str, dtype: str, model: nn.Module) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint holds {name} in {dtype}, but {type(model).__name__} computes with floats: codes without their "
        "scales are not weights; pass the original checkpoint in float32, float16 or bfloat16"
    )


def _refuse_converted_codes(
    model: nn.Module, files: CheckpointFiles, index: dict[str, tuple[Path, str]], unexpected: set[str]
) -> None:
    """Raise an error if transformers assembled weights from several tensors that hold codes, which it cast to floats.

    Raises:
        CheckpointError: If a tensor holds codes; the message names one of them.
    """
    if not any(file.parent.name == _CONVERTED for file, _ in index.values()):
        return  # without assembled weights, all unused tensors are masks and positions of earlier versions
    unconverted = {name for _, name in index.values()} | unexpected | {name for name, _ in model.named_buffers()}
    for name, dtype in files.dtypes(files.files.keys() - unconverted).items():
        if dtype not in NO_CODES:
            raise _codes(name, dtype, model)


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise CheckpointError(f"reading a checkpoint piece by piece needs {name}: pip install {name}") from error


__all__ = ["ROUNDED_BY", "method_of", "open_checkpoint", "require_readable", "stage", "unread_tensors"]
