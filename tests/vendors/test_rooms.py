"""What rooms of vendors and peers register is found where built-in entries are, without an import of the rooms."""

from __future__ import annotations

import pytest
from forked import run_program

import quark_fx as qfx
from quark_fx import observers, passes, presets, targets
from quark_fx.graph.pass_manager import PASSES


@pytest.mark.parametrize("name", ["DPU", "TENSORRT", "OPENVINO", "EXECUTORCH"])
def test_a_target_is_an_attribute_in_upper_case(name: str) -> None:
    target = targets.find_target(name.lower())
    assert getattr(targets, name) is target
    assert getattr(qfx.Target, name) is target


@pytest.mark.parametrize("name", ["AlignShifts", "SplitLargePools", "harden_sigmoids", "use_dpu_clips"])
def test_a_pass_is_an_attribute(name: str) -> None:
    assert getattr(passes, name) is PASSES[name]
    assert PASSES.name_of(getattr(passes, name)) == name


def test_presets_and_grids_are_attributes_and_unknown_names_are_named() -> None:
    assert presets.XINT8 is presets.PRESETS["xint8"]
    assert set(vars(observers)["SPANS"]) == {"onnxruntime", "onnxruntime_absolute", "modelopt", "quark"}
    for owner, name in ((presets, "XINT9"), (passes, "AlignShift"), (targets, "DPUS"), (qfx.Target, "DPUS")):
        with pytest.raises(AttributeError, match=f"unknown .*{name}.*did you mean"):
            getattr(owner, name)


def test_registering_loads_nothing_that_files_need() -> None:
    program = (
        "import sys, quark_fx; from quark_fx.export.to_onnx.formats import FORMATS;"
        "assert [*FORMATS] == ['qdq', 'qoperator', 'matmul_nbits', 'vitis'], [*FORMATS];"
        "sys.exit('onnx_ir' in sys.modules or 'quark_fx.vendors.intel.workarounds' in sys.modules)"
    )
    assert run_program(program).returncode == 0
