"""Importance matrices of llama.cpp: mean squares of the inputs of each weight, written and read as GGUF files."""

from __future__ import annotations

import importlib
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.fx import GraphModule

from quark_fx.capture.capture import unwrapped
from quark_fx.checkpoints.files import some_of
from quark_fx.checkpoints.gguf_file import open_gguf
from quark_fx.checkpoints.gguf_reader import Known
from quark_fx.config.quant_config import QuantConfig
from quark_fx.engine.block_walk import walk_float_blocks
from quark_fx.engine.blocks import Unit
from quark_fx.engine.context import Context
from quark_fx.errors import CalibrationError, CheckpointError, ConfigError, ExportError
from quark_fx.graph.linear import Linear
from quark_fx.graph.nodes import named_nodes
from quark_fx.solvers.hessian import Entrance, Hessian
from quark_fx.system import accelerator
from quark_fx.system.isolation import isolated
from quark_fx.system.options import checked_call
from quark_fx.system.untrusted import brief
from quark_fx.system.writable import new_file, replace_synced, require_possible, writing

if TYPE_CHECKING:
    from quark_fx.session import Session

_SUMS, _COUNTS, _WEIGHT = ".in_sum2", ".counts", ".weight"

Moments = tuple[Tensor, Tensor]
"""Sums of the squares of each input, for one group of inputs after another, and the number of rows of each group."""


@checked_call
@isolated
def imatrix(session: Session, path: str | Path) -> Path:
    """Write the importance matrix of a Hugging Face language model as a GGUF file.

    `llama-quantize --imatrix` and `FitScales(importance=...)` read the file. For each weight, it holds the sums of the
    squares of its inputs in the float model over all batches of the session, and the number of rows in the sums.
    A stack of experts has sums for each expert, over the rows that are routed to it. Padding does not count, except in
    such rows. This takes one forward pass over the data, and as much memory as `FitScales` without a file.

    Args:
        session: Session with the model and its calibration data.
        path: File to write.

    Returns:
        Path of the file.

    Raises:
        ConfigError: If the first argument is not a session.
        ExportError: If GGUF does not support the model's architecture, or the file cannot be written.
        CalibrationError: If an input is not finite.

    Source:
        `tools/imatrix/imatrix.cpp` of llama.cpp.
    """
    if not hasattr(session, "rewritten"):
        raise ConfigError(
            "export.imatrix measures the inputs of weights on the data of a Session; write "
            "imatrix(qfx.Session(model, calibration_data), path)"
        )
    path, names = Path(path), _names(session.model)
    require_possible(path)
    with session.run(QuantConfig(weight=None)) as context:
        graph, _ = session.rewritten(context)
        measured, batches = _moments(graph, context, set().union(*names.values())), len(context.data.batches)
        described = context.data.described
    moments = {ours: measured[name] for ours, both in names.items() for name in both if name in measured}
    if not moments:
        raise ExportError(f"no weight of {type(session.model).__name__} multiplies its inputs in a matrix product")
    if wrong := [name for name, (sums, _) in moments.items() if not sums.isfinite().all()]:
        raise CalibrationError(f"the inputs of {some_of(wrong)} are not finite on the data; check the data")
    package = importlib.import_module("gguf")
    keys, most = package.Keys.IMatrix, max(int(counts.max()) for _, counts in moments.values())
    with writing(path), new_file(path, f".{path.name}.quark_fx-") as (_, unfinished):
        writer = package.GGUFWriter(unfinished, "imatrix")
        try:
            writer.kv_data[0].clear()  # such files lack an architecture
            writer.add_type(package.GGUFType.IMATRIX)
            writer.add_array(keys.DATASETS, [described])
            writer.add_uint32(keys.CHUNK_COUNT, batches)
            writer.add_uint32(keys.CHUNK_SIZE, -(-most // batches))
            for name, (sums, counts) in moments.items():
                writer.add_tensor(f"{name}{_SUMS}", sums.numpy())
                writer.add_tensor(f"{name}{_COUNTS}", counts.float()[:, None].numpy())
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
        finally:
            writer.close()
        replace_synced(unfinished, path)
    return path


def moments_by_weight(model: Any, path: str | Path) -> dict[str, Moments]:
    """Return the moments in an importance matrix for the weights of a model, by the names of the weights.

    Raises:
        CheckpointError: If the file is damaged, is not an importance matrix, or lacks an entry for every weight.
        ExportError: If GGUF does not support the model's architecture.
    """
    names, entries = _names(model), read_imatrix(path)
    moments = dict[str, Moments]()
    for ours, both in names.items():
        for name in both if ours in entries else ():
            moments.setdefault(name, entries[ours])  # gate and up projections of experts have the same inputs
    if not moments:
        raise CheckpointError(
            f"{path} has entries for {some_of(list(entries))}, but for no weight of {type(model).__name__}, such as "
            f"{some_of(list(names)[-1:])}; pass the importance matrix of this model"
        )
    return moments


def read_imatrix(path: str | Path) -> dict[str, Moments]:
    """Return the moments in an importance matrix, by the names of tensors in GGUF files.

    The sums of a stack of matrices may be in one row. If no row was counted, all sums are 1.

    Raises:
        CheckpointError: If the file is damaged, or is not an importance matrix.
    """
    reader = open_gguf(Path(path))
    kind = reader.fields.get("general.type")
    if kind is None or kind.contents() != "imatrix":
        raise CheckpointError(
            f"{path} is not an importance matrix: its general.type is {kind and brief(kind.contents())}; pass a file "
            "of export.imatrix or llama-imatrix"
        )
    stored = {t.name: (t.tensor_type.name, np.array(t.data, np.float32)) for t in reader.tensors}
    stems = {name.removesuffix(end) for name in stored for end in (_SUMS, _COUNTS) if name.endswith(end)}
    moments, wrong = dict[str, Moments](), list[str]()
    for stem in sorted(stems):
        kinds, values = zip(*(stored.get(f"{stem}{end}", ("none", _NONE)) for end in (_SUMS, _COUNTS)), strict=True)
        sums, counts = (torch.from_numpy(array).reshape(-1) for array in values)
        both = torch.cat((sums, counts))
        if set(kinds) != {"F32"} or not len(counts) or len(sums) % len(counts):
            wrong.append(f"{stem} ({kinds[0]} sums of {len(sums)} values, {kinds[1]} counts of {len(counts)})")
        elif not both.isfinite().all() or (both < 0).any() or (counts > _MOST).any():
            wrong.append(f"{stem} (a value is negative or too large)")
        else:
            moments[stem] = (sums if counts.any() else torch.ones_like(sums)), counts.round().long()
    if wrong or not moments:
        raise CheckpointError(
            f"{path} holds an invalid importance matrix: {some_of(wrong) or 'it is empty'}; create it again"
        )
    return moments


_NONE, _MOST = np.empty(0, np.float32), 2.0**53


def _names(model: Any) -> dict[str, tuple[str, ...]]:
    """Return the names of the model's weights; keys are names in a GGUF file.

    Tied weights are one tensor in such a file, which has the name of the embedding.

    Raises:
        ExportError: If GGUF does not support the model's architecture, or the package `gguf` is missing.
    """
    try:
        package = importlib.import_module("gguf")
    except ImportError as error:
        raise ExportError("importance matrices need the package gguf: pip install 'quark_fx[hf]'") from error
    model = unwrapped(model)
    if not isinstance(model, importlib.import_module("transformers").PreTrainedModel):
        raise ExportError(f"{type(model).__name__} is not a Transformers model, so GGUF lacks names for its weights")
    _, read = Known.of_model(model, package).reading(model)
    names = {ours: theirs for ours, theirs in read.items() if not ours.endswith(".bias")}
    tied = dict(model._tied_weights_keys or {}) if model.config.tie_word_embeddings else {}
    return {
        ours if ours.endswith(_WEIGHT) else f"{ours}{_WEIGHT}": (
            theirs,
            *(name for name, first in tied.items() if first == theirs),
        )
        for ours, theirs in names.items()
        if theirs not in tied
    }


def _moments(graph: GraphModule, context: Context, names: Collection[str]) -> dict[str, Moments]:
    """Return the moments of the inputs of the weights `names` in one pass over the data, by the names of the weights.

    The sums have the bits of the Hessians' diagonals that `FitScales` measures on the same batches.
    """
    batches, moments = range(len(context.data.batches)), dict[str, Moments]()

    def measured(entrance: Entrance) -> Moments:
        hessian = Hessian.empty(*entrance.shape, context.device, shifted=False)
        for batch in batches:
            hessian.add(entrance.rows(batch, context))
        return hessian.h.diagonal(dim1=-2, dim2=-1).clone(), hessian.rows

    for run in walk_float_blocks(graph, context, unit=Unit.OPERATOR, label="imatrix"):
        nodes, by_input = named_nodes(run.module), dict[object, Moments]()
        for name in run.block.operators:
            linear = Linear.of(nodes[name])
            if linear is None or (mapping := linear.matrices) is None or mapping.kernel:
                continue
            if (weight := str(linear.stored.node.target)) not in names:
                continue
            if (key := linear.rows_key) not in by_input:
                entrance = Entrance(run.module, linear, mapping, run.inputs)
                with torch.no_grad():
                    by_input[key] = context.with_room(partial(measured, entrance))
            sums, rows = by_input[key]
            moments[weight] = (
                (moments[weight][0] + sums, moments[weight][1] + rows) if weight in moments else (sums, rows)
            )
    on_host = accelerator.moved([sums for sums, _ in moments.values()], torch.device("cpu"), copy=False)
    return {name: (sums, rows) for sums, (name, (_, rows)) in zip(on_host, moments.items(), strict=True)}


__all__ = ["Moments", "imatrix", "moments_by_weight", "read_imatrix"]
