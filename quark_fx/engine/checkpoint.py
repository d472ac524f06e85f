"""Store the finished blocks of a run in files, so that an interrupted run can continue."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.fx import GraphModule

from quark_fx.config.quant_config import QuantConfig
from quark_fx.engine.calibration_data import CalibrationData
from quark_fx.errors import CalibrationError, ConfigError
from quark_fx.graph.nodes import stored_tensors, target_name
from quark_fx.graph.pass_manager import Change
from quark_fx.system.writable import replace_synced

_OWNER = "run.json"
"""Name of the file with the fingerprint of the run that finished the blocks."""


class Checkpoint:
    """Directory with the finished blocks of one run; each block is a file, written atomically.

    Each file records the block, the run, the versions of the code, and a digest of the contents. A file that does not
    match is refused, because its contents would become part of the result.

    Args:
        directory: Path of the directory, which is created if it does not exist.
        fingerprint: Named digests that identify the run, see `fingerprint`. Blocks of another run are refused.
        output: Output directory that contains `directory`, for messages.

    Raises:
        ConfigError: If the directory holds blocks of another run or cannot be used.
    """

    @staticmethod
    def is_begun(directory: str | Path) -> bool:
        """Return whether a directory holds the checkpoint of a run that has begun."""
        return Path(directory, _OWNER).exists()

    def __init__(self, directory: str | Path, fingerprint: Mapping[str, str], output: Path | None = None) -> None:
        self.directory, self._run = Path(directory), hashlib.sha256(json.dumps(dict(fingerprint)).encode()).hexdigest()
        owner = self.directory / _OWNER
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            text = json.dumps({"fingerprint": dict(fingerprint)})
            if not owner.exists():
                _write_text(owner, text)
            record = json.loads(owner.read_text())["fingerprint"]
            differences = [what for what, digest in fingerprint.items() if record.get(what) != digest]
            if differences and not any(self.directory.glob("pass-*.safetensors")):  # no block is lost
                _write_text(owner, text)
                differences = []
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"checkpoint directory {directory} cannot be used: {error}; choose another") from error
        if differences:
            shuffled = " (a DataLoader that shuffles gives other batches every time)" if "data" in differences else ""
            what, folder = ("checkpoint directory", directory) if output is None else ("output_dir", output)
            rest = self.directory if output is None else self.directory.parent
            raise ConfigError(
                f"{what} {folder} contains finished blocks of a run with different "
                f"{' and '.join(differences)}{shuffled}; delete {rest} and with it those blocks, or choose another "
                "directory"
            )

    def load(self, walk: int, block: int) -> tuple[dict[str, Tensor], list[Change]] | None:
        """Return the tensors and the changes of a finished block, `None` if it is not finished.

        Raises:
            ConfigError: If the file is damaged, or was written for another block, run, or version.
        """
        file = self._file(walk, block)
        if not file.exists():
            return None
        try:
            with safe_open(file, "pt") as stored:
                metadata = stored.metadata() or {}
                tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
            expected = self._identity(walk, block) | {"digest": _digest(tensors, metadata["changes"])}
            if differences := [what for what, value in expected.items() if metadata[what] != value]:
                raise ValueError(f"another {', '.join(differences)}")
            changes = [Change(**row) for row in json.loads(metadata["changes"])]
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
            missing = f"its field {error.args[0]} is missing" if isinstance(error, KeyError) else str(error)
            raise ConfigError(
                f"checkpoint {file} cannot be read ({missing}): it is damaged, or belongs to another block, run, or "
                "version; delete this file, and the run will compute the block again"
            ) from error
        return tensors, changes

    def save(self, walk: int, block: int, tensors: Mapping[str, Tensor], changes: Sequence[Change]) -> None:
        """Write the tensors and the changes of a finished block atomically.

        Raises:
            CalibrationError: If the file cannot be written.
        """
        file = self._file(walk, block)
        partial = file.with_suffix(".partial")
        copies = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        noted = json.dumps([asdict(change) for change in changes])
        metadata = self._identity(walk, block) | {"changes": noted, "digest": _digest(copies, noted)}
        try:
            save_file(copies, partial, metadata)
            replace_synced(partial, file)
        except (OSError, SafetensorError) as error:
            raise CalibrationError(f"cannot write checkpoint {file}: {error}; free disk space and run again") from error

    def _identity(self, walk: int, block: int) -> dict[str, str]:
        """Return the metadata that identifies the block of a file."""
        return {"version": _version(), "block": f"{walk}-{block}", "run": self._run}

    def _file(self, walk: int, block: int) -> Path:
        return self.directory / f"pass-{walk}-block-{block}.safetensors"


def _write_text(file: Path, text: str) -> None:
    partial = file.with_suffix(".partial")
    partial.write_text(text)
    replace_synced(partial, file)


def _digest(tensors: Mapping[str, Tensor], changes: str) -> str:
    """Return a digest of the tensors and the changes of a block."""
    digest = hashlib.sha256(changes.encode())
    for name in sorted(tensors):
        _update(digest, name, tensors[name])
    return digest.hexdigest()


def fingerprint(gm: GraphModule, config: QuantConfig, data: CalibrationData) -> dict[str, str]:
    """Return values that identify a run: digests of model, configuration, and data; number of ranks; versions.

    A change in the code of a pass is not detected.
    """
    model, configuration, batches = (hashlib.sha256() for _ in range(3))
    configuration.update(json.dumps(config.to_dict(), sort_keys=True, default=str).encode())
    for node in gm.graph.nodes:
        model.update(f"{node.name} {target_name(node)} {node.args} {node.kwargs}".encode())
    for name, tensor in stored_tensors(gm).items():
        _update(model, name, tensor)
    for batch in range(len(data.batches)):
        for position, leaf in enumerate(data.inputs(batch)):
            _update(batches, f"batch {batch} {position}", leaf)
    digests = {"model": model, "configuration": configuration, "data": batches}
    environment = {"number of ranks": str(data.ranks.count), "version": _version()}
    return {what: digest.hexdigest()[:32] for what, digest in digests.items()} | environment


def _version() -> str:
    """Return the versions of quark_fx and torch that compute a block."""
    return f"quark_fx {sys.modules['quark_fx'].__version__}, torch {torch.__version__}"


def _update(digest: Any, name: str, value: Any) -> None:
    if not isinstance(value, Tensor):
        digest.update(f"{name} {value}".encode())
        return
    digest.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
    if value.numel():
        digest.update(value.detach().flatten().cpu().contiguous().view(torch.uint8).numpy())


__all__ = ["Checkpoint", "fingerprint"]
