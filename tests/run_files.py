"""Run ONNX files on stored inputs and store the outputs: `run_files.py RUNTIME FOLDER FILE ...` (`processors.py`)."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np


def _onnxruntime(file: Path, feeds: Mapping[str, Any]) -> list[Any]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 3, 1
    return list(onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"]).run(None, feeds))


def _openvino(file: Path, feeds: Mapping[str, Any]) -> list[Any]:
    import openvino

    options = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1}
    compiled = openvino.Core().compile_model(file, "CPU", options)
    return [np.asarray(value) for value in compiled(dict(feeds)).values()]


if __name__ == "__main__":
    run = {"onnxruntime": _onnxruntime, "openvino": _openvino}[sys.argv[1]]
    folder, *files = map(Path, sys.argv[2:])
    for index, file in enumerate(files):
        with np.load(folder / f"{index}.npz") as feeds:
            outputs = run(file, dict(feeds))
        np.savez(folder / f"{index}.out.npz", *outputs)
