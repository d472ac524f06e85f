"""Run ONNX files with the operator library of AMD Quark, in an interpreter that has `amd-quark`.

    PYTHON -m benchmarks.peers.vitis_session FOLDER

Every `NAME.onnx` of the folder is run on `NAME.x.npy`; what it makes goes to `NAME.y.npy`, and a refusal, in its own
words, to `NAME.txt`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnxruntime


def main() -> None:
    """Run all files of the folder."""
    from quark.onnx.operators.custom_ops import get_library_path  # type: ignore[import-not-found]

    library = get_library_path("CPU")
    for file in sorted(Path(sys.argv[1]).glob("*.onnx")):
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        options.register_custom_ops_library(library)
        try:
            session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
            feed = {session.get_inputs()[0].name: np.load(file.with_suffix(".x.npy"))}
            np.save(file.with_suffix(".y.npy"), session.run(None, feed)[0])
        except Exception as error:  # ONNX Runtime's own
            file.with_suffix(".txt").write_text(str(error), encoding="utf-8")


if __name__ == "__main__":
    main()
