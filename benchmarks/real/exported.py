"""An exported file, called like the model that it was made of."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import quark_fx as qfx
from quark_fx.export.runtime.session import open_session
from quark_fx.model.quantized_model import QuantizedModel


def exported(qmodel: QuantizedModel, folder: Path) -> Callable[..., Any]:
    """Write a model to a folder and return what ONNX Runtime makes of the file, on one thread.

    Raises:
        QuarkError: if the model cannot be exported.
    """

    def one_thread(options: Any) -> None:
        options.intra_op_num_threads = 1

    file = qfx.export.onnx(qmodel, folder / "model.onnx")
    session = open_session(Path(file), configure=one_thread)
    names = [i.name for i in session.get_inputs()]

    def run(*args: Any, **kwargs: Any) -> Any:
        leaves = [leaf for leaf in qmodel.signature.flatten(args, kwargs) if isinstance(leaf, Tensor)]
        feed = {name: leaf.numpy(force=True) for name, leaf in zip(names, leaves, strict=True)}
        return qmodel.signature.unflatten([torch.from_numpy(y) for y in session.run(None, feed)])

    return run
