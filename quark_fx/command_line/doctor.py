"""`quark-fx doctor`, which reports the features of this machine and environment."""

from __future__ import annotations

import importlib.util
import os
import platform
from importlib.metadata import PackageNotFoundError, version

import torch

import quark_fx
from quark_fx.command_line.options import Json
from quark_fx.command_line.printing import show
from quark_fx.plan.table import tuples
from quark_fx.system.processor import this_processor

EXTRAS = {
    "onnx": ("ONNX files: export, verify, inspect, evaluate", ("onnx", "onnxruntime", "onnxscript", "onnx_ir")),
    "hf": (
        "checkpoints of transformers, GGUF, tokenizers",
        ("transformers", "accelerate", "compressed-tensors", "gguf"),
    ),
    "openvino": ("verify(runtime='openvino')", ("openvino",)),
    "executorch": ("programs of export.pt2e in ExecuTorch", ("executorch",)),
    "genai": ("folders of export.genai in ONNX Runtime GenAI", ("onnxruntime-genai",)),
    "report": ("pages of charts: --html", ("matplotlib",)),
    "vision": ("folders of images, torchvision's models", ("torchvision", "pillow", "scikit-learn")),
    "cli": ("this command", ("typer", "rich")),
}
"""Purpose and packages of each extra."""

_INT8 = {
    "avx2": "8-bit products; sums of two saturate at 16 bits, which int8 files of quark_fx allow for",
    "avx512_vnni": "exact 8-bit products, 4 in one step",
    "avx_vnni": "exact 8-bit products, 4 in one step",
    "amx_int8": "exact 8-bit products of tiles",
    "asimddp": "exact 8-bit products, 4 in one step (ARM)",
    "i8mm": "exact 8-bit products of small matrices (ARM)",
}
"""Descriptions of the instructions for products of 8-bit integers; keys are their names in Linux."""


def doctor(json: Json = False) -> None:
    """Show the processor and its int8 instructions, versions of packages, and the installed extras."""
    name, flags = this_processor()
    saturates = _saturates()
    instructions = {flag: meaning for flag, meaning in _INT8.items() if flag in flags}
    devices = [f"{torch.cuda.get_device_name(i)} (cuda:{i})" for i in range(torch.cuda.device_count())]
    extras = {extra: {package: _version(package) for package in packages} for extra, (_, packages) in EXTRAS.items()}
    machine = [
        ("processor", name),
        ("cores", f"{os.cpu_count()}, torch uses {torch.get_num_threads()}"),
        *(
            ("int8 instructions" if i == 0 else "", f"{f}: {meaning}")
            for i, (f, meaning) in enumerate(instructions.items())
        ),
        *([("int8 instructions", "not known here")] if not instructions else []),
        *([("ONNX Runtime", _KERNELS[saturates])] if saturates is not None else []),
        ("accelerators", ", ".join(devices) or "none"),
        ("Python", platform.python_version()),
        ("quark_fx", quark_fx.__version__),
        ("torch", torch.__version__),
    ]
    rows = [
        (
            extra,
            EXTRAS[extra][0],
            ", ".join(f"{package} {release or 'missing'}" for package, release in packages.items()),
            "" if all(packages.values()) else f"pip install 'quark_fx[{extra}]'",
        )
        for extra, packages in extras.items()
    ]
    data = {
        "processor": name,
        "cores": os.cpu_count(),
        "int8_instructions": list(instructions),
        "onnxruntime_saturates": saturates,
        "accelerators": devices,
        "python": platform.python_version(),
        "quark_fx": quark_fx.__version__,
        "torch": torch.__version__,
        "extras": extras,
    }
    show(
        json,
        data,
        tuples("Machine", ("machine", ""), machine),
        tuples("Extras", ("extra", "gives", "packages", "to install"), rows),
    )


_KERNELS = {
    True: "adds 8-bit products in pairs in 16 bits here: keep target='onnx', whose files are exact",
    False: "adds 8-bit products exactly here: target='onnx_vnni' may use all codes",
}


def _saturates() -> bool | None:
    """Tell whether ONNX Runtime's int8 kernels saturate on this processor; `None` if ONNX Runtime is not installed."""
    if any(importlib.util.find_spec(package) is None for package in ("onnxruntime", "onnx_ir")):
        return None
    from quark_fx.export.runtime.session import adds_pairs_in_16_bits

    return adds_pairs_in_16_bits()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
