"""Run ONNX files on stored inputs and store the outputs: `run_files.py FOLDER FILE ...`, see `processors.py`."""

import sys
from pathlib import Path

import numpy as np
import onnxruntime

if __name__ == "__main__":
    folder, *files = map(Path, sys.argv[1:])
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 3, 1
    for index, file in enumerate(files):
        session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
        with np.load(folder / f"{index}.npz") as feeds:
            outputs = session.run(None, dict(feeds))
        np.savez(folder / f"{index}.out.npz", *outputs)
