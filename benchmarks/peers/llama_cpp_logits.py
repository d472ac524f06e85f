"""llama.cpp's logits, in a process of its own; started by `benchmarks.gguf_architectures`.

    llamacpp/bin/python -m benchmarks.peers.llama_cpp_logits job.json

Its environment needs xllamacpp, whose library has llama.cpp's C functions. A job is a JSON object: `files` are GGUF
files by name, `tokens` are the tokens of a text, `size` is the number of logits, `output` is the file to write.
Structures are opaque and longer than those of the library: all are passed as the last argument.
"""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path


class Parameters(ctypes.Structure):
    """Options of a model or a context, of unknown fields."""

    _fields_ = (("data", ctypes.c_char * 1024),)


class Batch(ctypes.Structure):
    """A batch: a number and six pointers."""

    _fields_ = (("data", ctypes.c_char * 56),)


def library() -> ctypes.CDLL:
    """Return llama.cpp with the types of its functions."""
    import xllamacpp  # type: ignore[import-not-found]

    (path,) = Path(xllamacpp.__file__).parent.glob("*.so")
    llama = ctypes.CDLL(str(path))
    types = {
        "llama_model_default_params": (Parameters, ()),
        "llama_context_default_params": (Parameters, ()),
        "llama_model_load_from_file": (ctypes.c_void_p, (ctypes.c_char_p, Parameters)),
        "llama_init_from_model": (ctypes.c_void_p, (ctypes.c_void_p, Parameters)),
        "llama_batch_get_one": (Batch, (ctypes.c_void_p, ctypes.c_int32)),
        "llama_decode": (ctypes.c_int32, (ctypes.c_void_p, Batch)),
        "llama_get_logits_ith": (ctypes.POINTER(ctypes.c_float), (ctypes.c_void_p, ctypes.c_int32)),
    }
    for name, (result, arguments) in types.items():
        function = getattr(llama, name)
        function.restype, function.argtypes = result, arguments
    return llama


def logits(llama: ctypes.CDLL, path: str, tokens: list[int], size: int) -> list[list[float]]:
    """Return the logits after each token."""
    model = llama.llama_model_load_from_file(path.encode(), llama.llama_model_default_params())
    context = llama.llama_init_from_model(model, llama.llama_context_default_params()) if model else None
    rows = []
    for token in tokens if context else ():
        word = (ctypes.c_int32 * 1)(token)
        if llama.llama_decode(context, llama.llama_batch_get_one(ctypes.cast(word, ctypes.c_void_p), 1)):
            raise RuntimeError(f"{path}: llama.cpp cannot decode")
        rows.append(llama.llama_get_logits_ith(context, -1)[:size])
    return rows


def main() -> None:
    """Do the job of a JSON file; a file that llama.cpp does not load has no logits."""
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    llama = library()
    rows = {name: logits(llama, path, job["tokens"], job["size"]) for name, path in job["files"].items()}
    Path(job["output"]).write_text(json.dumps(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
