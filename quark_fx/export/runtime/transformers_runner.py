"""A runner that loads checkpoints with transformers in a separate process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quark_fx.checkpoints.configuration import read_configuration, require_unrotated
from quark_fx.checkpoints.files import GRAPH_FILE
from quark_fx.errors import CheckpointError, ExportError
from quark_fx.export.runtime import checkpoint_process
from quark_fx.export.runtime.runners import Runner
from quark_fx.graph.signature import split_batch

_LAST_LINES = 5


def is_checkpoint(path: Path) -> bool:
    """Tell whether transformers can read the path, which must be a directory or a GGUF file."""
    return os.path.isdir(path) or path.suffix == ".gguf"  # os.path: False for names that no file can have


class TransformersRunner(Runner):
    """A runner of a checkpoint, which transformers loads and runs in a separate process.

    Args:
        path: Checkpoint that `quark_fx.export.huggingface` or `gguf` wrote.

    Raises:
        ExportError: If `path` is not such a checkpoint, or transformers does not read it: rotations are missing, the
            layout is ModelOpt's, or a newer compressed-tensors is needed.
    """

    runtime = "transformers"

    def __init__(self, path: Path) -> None:
        if not path.exists():
            raise ExportError(f"{path} does not exist; write it with qfx.export.gguf or qfx.export.huggingface first")
        if path.is_file() and path.suffix != ".gguf":
            raise ExportError(
                f"{path} is neither a directory nor a .gguf file, so transformers cannot read it; drop runtime="
            )
        if (path / GRAPH_FILE).is_file():
            raise ExportError(f"{path} was written by qmodel.save, and transformers cannot read it; drop runtime=")
        if path.is_dir() and not (path / "config.json").is_file():
            raise ExportError(
                f"{path} has no config.json; pass a directory that qfx.export.huggingface wrote, or a .gguf file"
            )
        if path.is_dir():
            try:
                config = read_configuration(path)
                require_unrotated(config, path)
            except CheckpointError as error:
                raise ExportError(str(error)) from error
            _require_version(config, path)
        self.path = path

    def __call__(self, batch: Any) -> dict[str, Tensor]:
        """Return the named outputs for a batch; each call loads the checkpoint again.

        Raises:
            ExportError: If transformers does not load or run the checkpoint.
        """
        return next(self.results([batch]))

    def results(self, batches: Iterable[Any]) -> Iterator[dict[str, Tensor]]:
        """Yield the named outputs of each batch. One process runs all batches.

        Raises:
            ExportError: If transformers does not load or run the checkpoint.
        """
        yield from _results(self.path, [split_batch(batch) for batch in batches])


def _require_version(config: dict[str, Any], path: Path) -> None:
    """Raise `ExportError` if transformers does not read a checkpoint's layout, or needs a newer compressed-tensors."""
    told = config.get("quantization_config")
    if isinstance(told, dict) and told.get("quant_method") == "modelopt":
        raise ExportError(
            f"{path} has ModelOpt's layout, which vLLM reads and transformers does not; run it in vLLM, or export with "
            "format='compressed-tensors'"
        )
    with suppress(PackageNotFoundError):  # transformers says that it is missing
        if isinstance(told, dict) and told.get("quant_method") == "compressed-tensors":
            needed, installed = str(told.get("version") or "0"), version("compressed-tensors")
            if _numbers(installed) < _numbers(needed):
                raise ExportError(
                    f"{path} needs compressed-tensors {needed}, but {installed} is installed; run: "
                    f"pip install 'compressed-tensors>={needed}'"
                )


def _numbers(text: str) -> list[int]:
    return [int(part[:9]) for part in re.findall(r"\d+", text)[:3]]


def _results(path: Path, batches: list[tuple[tuple[Any, ...], dict[str, Any]]]) -> list[dict[str, Tensor]]:
    """Return the named outputs of a checkpoint, from a separate process, for each batch of arguments and keywords."""
    with tempfile.TemporaryDirectory() as folder:
        batches_file, results_file = Path(folder) / "given.pt", Path(folder) / "made.pt"
        torch.save(batches, batches_file)
        # -P: modules in the folder of the script must not shadow packages.
        command = [
            sys.executable,
            "-P",
            checkpoint_process.__file__,
            str(path.absolute()),
            str(batches_file),
            str(results_file),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            said = [line for line in done.stderr.splitlines() if line.strip()][-_LAST_LINES:]
            if done.returncode < 0:  # killed by a signal, so the process printed no reason
                said.append(f"the process was killed by signal {-done.returncode}, often because memory ran out")
            missing = bool(said) and said[-1].startswith(("ImportError", "ModuleNotFoundError"))
            hint = [
                "Install the package named above; compressed-tensors and GGUF do not need a package for kernels."
            ] * missing
            if "GGUF model with architecture" in "".join(said[-1:]):
                hint.append(
                    "transformers does not support GGUF files of this architecture, so it cannot check the file: try "
                    "it in llama.cpp. On the command line, --no-verify skips the comparison."
                )
            elif path.suffix == ".gguf" and not missing:
                hint.append(
                    "If the file is for llama.cpp, try it there: transformers replaces some sizes by its "
                    "defaults, such as the size of Qwen3's heads."
                )
            raise ExportError("\n".join([f"transformers does not load or run {path}:", *said, *hint]))
        results: list[dict[str, Tensor]] = torch.load(results_file, weights_only=True)
    return results


__all__ = ["TransformersRunner", "is_checkpoint"]
