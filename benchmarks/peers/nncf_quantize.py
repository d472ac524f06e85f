"""Quantize ONNX files to 8 bits with NNCF, in an interpreter that has `nncf` and `openvino`.

    PYTHON -m benchmarks.peers.nncf_quantize FOLDER

Every `NAME.float.onnx` of the folder is calibrated on the batches of `NAME.npz` (`BATCH.POSITION`) with NNCF's
defaults, and its own setting for transformers where `NAME.transformer` is there. The result goes to `NAME.nncf.xml`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np


def main() -> None:
    """Quantize all files of the folder."""
    import nncf
    import openvino

    for file in sorted(Path(sys.argv[1]).glob("*.float.onnx")):
        stem = file.name.removesuffix(".float.onnx")
        arrays = np.load(file.with_name(f"{stem}.npz"))
        batches: dict[int, list[np.ndarray]] = {}
        for name in arrays.files:
            batches.setdefault(int(name.split(".")[0]), []).append(arrays[name])
        kind = nncf.ModelType.TRANSFORMER if file.with_name(f"{stem}.transformer").exists() else None
        quantized = nncf.quantize(
            openvino.Core().read_model(file),
            nncf.Dataset(list(batches.values())),
            subset_size=len(batches),
            model_type=kind,
        )
        openvino.save_model(quantized, file.with_name(f"{stem}.nncf.xml"), compress_to_fp16=False)


if __name__ == "__main__":
    main()
