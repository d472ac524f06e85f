"""Runners that load checkpoints in a separate process, with transformers or llama.cpp."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import tempfile
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from signal import SIGABRT, SIGILL, SIGKILL, Signals
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.utils._pytree import tree_leaves

from quark_fx.checkpoints.configuration import read_configuration, require_unrotated
from quark_fx.checkpoints.files import GRAPH_FILE, is_float
from quark_fx.checkpoints.gguf_file import is_gguf, open_gguf
from quark_fx.errors import CheckpointError, ExportError
from quark_fx.export.runtime import checkpoint_process
from quark_fx.export.runtime.rounding_noise import Run, runs_with_noise, runs_with_rounded_inputs
from quark_fx.export.runtime.runners import Runner
from quark_fx.graph.signature import split_batch

_LAST_LINES = 5


def is_checkpoint(path: Path) -> bool:
    """Tell whether transformers can read the path, which must be a directory or a GGUF file."""
    return os.path.isdir(path) or is_gguf(path)  # os.path: False for names that no file can have


class CheckpointRunner(Runner):
    """A runner that loads and runs a checkpoint in a separate process, whose memory is freed, and which may crash.

    Attributes:
        path: Path of the checkpoint.
        outputs: Names of the outputs that the runtime returns; `None` if it returns all outputs of the model.
    """

    path: Path
    outputs: ClassVar[tuple[str, ...] | None] = None

    def __call__(self, batch: Any) -> dict[str, Tensor]:
        """Return the named outputs for a batch; each call loads the checkpoint again.

        Raises:
            ExportError: If the runtime does not load or run the checkpoint.
        """
        return next(self.results([batch]))

    def results(self, batches: Iterable[Any]) -> Iterator[dict[str, Tensor]]:
        """Yield the named outputs of each batch. One process runs all batches.

        Raises:
            ExportError: If the runtime does not load or run the checkpoint.
        """
        with tempfile.TemporaryDirectory() as folder:
            batches_file, results_file = Path(folder) / "given.pt", Path(folder) / "made.pt"
            torch.save([self.arguments(batch) for batch in batches], batches_file)
            files = map(str, (self.path.absolute(), batches_file, results_file))
            # -P: modules in the folder of the script must not shadow packages.
            command = [sys.executable, "-P", checkpoint_process.__file__, self.runtime, *files]
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
            if done.returncode:
                lines = [line for line in done.stderr.splitlines() if line.strip()][-_LAST_LINES:]
                hints = self.hints(lines)
                if done.returncode < 0:
                    number = -done.returncode
                    hints = [f"The process was ended by signal {number}{self.cause_of(number)}."]
                raise ExportError("\n".join([f"{self.runtime} does not load or run {self.path}:", *lines, *hints]))
            results: list[dict[str, Tensor]] = torch.load(results_file, weights_only=True)
        yield from results

    def arguments(self, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the positional and keyword arguments that the process passes to the model for a batch.

        Raises:
            ExportError: If the runtime cannot run the batch.
        """
        return split_batch(batch)

    def cause_of(self, signal: int) -> str:
        """Return the usual cause of a signal that ends the process, after a comma; empty if it is unknown."""
        causes = {SIGKILL: "often because memory ran out", SIGABRT: "after a failed check, which the lines above name"}
        return f", {causes[Signals(signal)]}" if signal in causes else ""

    @abstractmethod
    def hints(self, lines: list[str]) -> list[str]:
        """Return next steps for an error, from the last lines that the process printed."""

    def runs(self, gm: GraphModule, batches: Sequence[list[Any]]) -> Iterator[Run]:
        """Yield runs of a graph in torch with the rounding that a correct runtime may add.

        Args:
            gm: Graph to run.
            batches: Flat inputs of each batch.
        """
        return runs_with_noise(gm, batches)


class TransformersRunner(CheckpointRunner):
    """A runner of a checkpoint in transformers.

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
        if path.is_file() and not is_gguf(path):
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

    def hints(self, lines: list[str]) -> list[str]:
        if lines and lines[-1].startswith(("ImportError", "ModuleNotFoundError")):
            return ["Install the package named above; compressed-tensors and GGUF do not need a package for kernels."]
        if "GGUF model with architecture" in "".join(lines[-1:]):
            return [
                "transformers does not support GGUF files of this architecture, so it cannot check the file: pass "
                "runtime='llama.cpp'. On the command line, --no-verify skips the comparison."
            ]
        if is_gguf(self.path):
            return [
                "If the file is for llama.cpp, pass runtime='llama.cpp': transformers replaces some sizes by its "
                "defaults, such as the size of Qwen3's heads."
            ]
        return []


class LlamaCppRunner(CheckpointRunner):
    """A runner of a GGUF file in llama.cpp (the package llama-cpp-python), which returns the logits of token ids.

    llama.cpp loads only files with a tokenizer. It rounds the inputs of quantized matrices to 8 bits, in blocks of 256
    channels for types with such blocks (K-quants) and of 32 for others.

    Args:
        path: File that `quark_fx.export.gguf` or another tool wrote.

    Raises:
        ExportError: If `path` is not a GGUF file.
    """

    runtime = "llama.cpp"
    outputs = ("logits",)

    def __init__(self, path: Path) -> None:
        if not path.exists():
            raise ExportError(f"{path} does not exist; write it with qfx.export.gguf first")
        if not is_gguf(path) or not path.is_file():
            raise ExportError(f"{path} is not a .gguf file, so llama.cpp cannot read it; write it with qfx.export.gguf")
        self.path = path

    def arguments(self, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args, kwargs = split_batch(batch)
        named = dict(zip(("input_ids", "attention_mask"), args, strict=False)) | kwargs
        ids, mask = named.pop("input_ids", None), named.pop("attention_mask", None)
        if len(args) > 2 or any(isinstance(leaf, Tensor) for leaf in tree_leaves(named)):
            raise ExportError(
                f"llama.cpp runs token ids only, but the batch has {', '.join(named) or f'{len(args)} arguments'}; "
                "pass batches of input_ids"
            )
        if not isinstance(ids, Tensor) or ids.dim() != 2 or is_float(ids.dtype):
            raise ExportError("llama.cpp runs token ids; pass batches of input_ids of shape (batch, length)")
        if mask is not None and not bool(mask.bool().all()):
            raise ExportError(
                "llama.cpp does not run padded batches; pass sequences of equal length without padding in a batch"
            )
        return (), {"input_ids": ids}

    def cause_of(self, signal: int) -> str:
        if signal == SIGILL:
            return (
                ", an illegal instruction: llama-cpp-python was built for another processor; build it again with "
                "CMAKE_ARGS=-DGGML_NATIVE=OFF pip install --force-reinstall --no-cache-dir llama-cpp-python"
            )
        return super().cause_of(signal)

    def hints(self, lines: list[str]) -> list[str]:
        if lines and lines[-1].startswith(("ImportError", "ModuleNotFoundError")):
            return ["Install llama.cpp: pip install llama-cpp-python"]
        if "Failed to load model" in "".join(lines[-1:]):
            return ["llama.cpp loads only files with a tokenizer: pass tokenizer= to qfx.export.gguf."]
        return []

    def runs(self, gm: GraphModule, batches: Sequence[list[Any]]) -> Iterator[Run]:
        return runs_with_rounded_inputs(gm, batches, self.block_size)

    @property
    def block_size(self) -> int:
        """Largest number of input channels that llama.cpp rounds with one scale: 256 for K-quants, otherwise 32."""
        sizes = importlib.import_module("gguf").GGML_QUANT_SIZES
        return 256 if any(sizes[tensor.tensor_type][0] == 256 for tensor in open_gguf(self.path).tensors) else 32


CHECKPOINT_RUNNERS: dict[str, type[TransformersRunner | LlamaCppRunner]] = {
    cls.runtime: cls for cls in (TransformersRunner, LlamaCppRunner)
}
"""Classes that run checkpoints, by the name of their runtime."""


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


__all__ = ["CHECKPOINT_RUNNERS", "CheckpointRunner", "LlamaCppRunner", "TransformersRunner", "is_checkpoint"]
