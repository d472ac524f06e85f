"""llama.cpp's quantizer, in a process of its own; started by `benchmarks.in_llama_cpp`.

    llamacpp/bin/python -m benchmarks.peers.llama_cpp_quantizer job.json

Its environment needs llama-cpp-python and safetensors, not quark_fx. A job is a JSON object; paths in it are relative
to its own folder.

    source      GGUF file in float32
    mixture     name of the types, as Q4_K_M
    matrix      safetensors file of mean squares by the names of tensors; without it there is no importance matrix
    output      GGUF file to write
"""

from __future__ import annotations

import ctypes
import json
from pathlib import Path

from safetensors.numpy import load_file

from benchmarks.peers.worker import work


def run(path: Path) -> None:
    """Do the job of the JSON file at `path`."""
    import llama_cpp

    options = json.loads(path.read_text(encoding="utf-8"))
    params = llama_cpp.llama_model_quantize_default_params()
    params.nthread = 1
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{options['mixture']}")
    matrix = load_file(path.parent / options["matrix"]) if "matrix" in options else {}
    entries = (llama_cpp.llama_model_imatrix_data * (len(matrix) + 1))()  # the last one has no name
    for entry, (name, values) in zip(entries, matrix.items(), strict=False):
        entry.name, entry.size = name.encode(), len(values)
        entry.data = values.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
    if matrix:
        params.imatrix = entries
    files = (str(path.parent / options[key]).encode() for key in ("source", "output"))
    if code := llama_cpp.llama_model_quantize(*files, ctypes.byref(params)):
        raise RuntimeError(f"llama_model_quantize returned {code}")


if __name__ == "__main__":
    work(__doc__, run)
