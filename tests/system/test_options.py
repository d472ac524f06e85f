"""Every option of every configuration is checked against its annotation where it is given."""

from __future__ import annotations

import math
import typing
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from enum import StrEnum
from typing import Annotated, Any, Literal

import numpy as np
import pytest
import torch
from torch import nn

import quark_fx as qfx
import quark_fx.observers
import quark_fx.passes
from quark_fx.errors import ConfigError
from quark_fx.graph.pass_manager import PASSES, graph_pass
from quark_fx.numbers.formats import INT8, FloatFormat, IntFormat
from quark_fx.observers.base import OBSERVERS
from quark_fx.passes import AWQ, GPTQ, AdaRound, SmoothQuant
from quark_fx.system.options import Interval, checked, checked_call

OWN = [p for p in PASSES.values() if is_dataclass(p) and p.__module__.startswith("quark_fx.")]
OBSERVING = [cls for cls in OBSERVERS.values() if cls.__module__.startswith("quark_fx.")]
CONFIGURATIONS: list[Any] = [
    *(qfx.TensorSpec, qfx.Override, qfx.QuantConfig, qfx.CacheBudget, IntFormat, FloatFormat),
    *(*OWN, *OBSERVING),
]
"""What users make of options."""

GRAPH: Any = torch.fx.symbolic_trace(nn.Linear(2, 2))

NEEDED: dict[Any, dict[str, Any]] = {
    qfx.TensorSpec: {"format": INT8},
    qfx.Override: {"pattern": "*"},
    IntFormat: {"bits": 8},
    FloatFormat: {"exponent": 4, "mantissa": 3},
}
STRANGE = {"an object": object(), "a complex number": 1j, "bytes": b"int8", "a set": {1}, "a nested list": [[[]]]}
"""What no option takes."""

OPTIONS = [(cls, f.name) for cls in CONFIGURATIONS for f in fields(cls) if f.init and not f.metadata.get("state")]


def given(cls: Any, **options: Any) -> Any:
    return cls(**(NEEDED.get(cls, {}) | options))


def named(value: Any) -> str:
    return value.__name__ if isinstance(value, type) else str(value)


@pytest.mark.parametrize(("cls", "name"), OPTIONS, ids=named)
def test_no_option_takes_what_it_has_no_meaning_for(cls: Any, name: str) -> None:
    for value in STRANGE.values():
        with pytest.raises(ConfigError, match=f"^{name} of {cls.__name__} must be "):
            given(cls, **{name: value})


def scalars() -> Iterator[tuple[Any, str, Any]]:
    """Yield every option that is one number, truth or text, with the type of it."""
    for cls, name in OPTIONS:
        hint: Any = typing.get_type_hints(cls)[name]
        kinds = [kind for kind in typing.get_args(hint) or (hint,) if kind is not type(None)]
        if len(kinds) == 1 and (kinds[0] in (bool, int, float, str) or issubclass(kinds[0], StrEnum)):
            yield cls, name, kinds[0]


WRONG: dict[Any, tuple[Any, ...]] = {
    bool: (1, 3, "yes", 0.0),
    int: (1.5, "3", True, math.nan),
    float: ("0.5", False, math.nan, (0.5,)),
    str: (3, True, ("a",)),
}


@pytest.mark.parametrize(("cls", "name", "kind"), list(scalars()), ids=named)
def test_an_option_takes_its_own_type_alone(cls: Any, name: str, kind: Any) -> None:
    for value in WRONG.get(kind, (3, True, ("a",))):
        with pytest.raises(ConfigError, match=f"^{name} of {cls.__name__} must be .*, not "):
            given(cls, **{name: value})


@pytest.mark.parametrize("cls", CONFIGURATIONS, ids=named)
def test_an_unknown_option_is_answered_with_the_nearest(cls: Any) -> None:
    options = [name for owner, name in OPTIONS if owner is cls]
    for name in options:
        with pytest.raises(ConfigError, match=rf"{cls.__name__} has no field {name}x; .* did you mean '{name}'\?"):
            given(cls, **{f"{name}x": 1})
    with pytest.raises(ConfigError, match="has no field zzz; it has "):
        given(cls, zzz=1)


@pytest.mark.parametrize("cls", CONFIGURATIONS, ids=named)
def test_defaults_and_copies_pass_their_own_checks(cls: Any) -> None:
    made = given(cls)
    assert replace(made) == made
    assert all(
        f.default is not MISSING or f.default_factory is not MISSING or f.name in NEEDED[cls] for f in fields(cls)
    )


@pytest.mark.parametrize(
    ("text", "words", "inside", "outside"),
    [
        ("(0, 1]", "above 0 and at most 1", (1, 1e-300, 0.5), (0, -1, 1.5, math.nan)),
        ("[0, 1)", "of at least 0 and below 1", (0, 0.999), (1, -1e-9)),
        ("[2, 32]", "from 2 to 32", (2, 32), (1, 33)),
        ("[1, inf)", "of at least 1", (1, 10**9), (0, math.inf)),
        ("(0, inf)", "above 0", (1e-300,), (0, math.inf)),
    ],
)
def test_an_interval_holds_what_its_text_says(text: str, words: str, inside: Any, outside: Any) -> None:
    assert str(Interval(text)) == words
    assert all(value in Interval(text) for value in inside)
    assert not any(value in Interval(text) for value in outside)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: GPTQ(damping="x"), r"damping of GPTQ must be a number above 0 and at most 1, not 'x'"),  # type: ignore[arg-type]
        (lambda: AdaRound(iteration=3), r"has no field iteration; .*; did you mean 'iterations'\?"),  # type: ignore[call-arg]
        (lambda: SmoothQuant(alpha=0.5), r"did you mean 'alphas'\?"),  # type: ignore[call-arg]
        (lambda: SmoothQuant(alphas=0.5), r"write alphas=\(0.5,\)"),  # type: ignore[arg-type]
        (lambda: SmoothQuant(alphas=(0.5, 7)), r"items are each a number from 0 to 1, not \(0.5, 7\)"),
        (lambda: AWQ(20), r"AWQ takes keyword arguments: write AWQ\(only=...\)"),  # type: ignore[arg-type,call-arg]
        (lambda: qfx.TensorSpec(), r"TensorSpec needs format: write TensorSpec\(format=...\)"),  # type: ignore[call-arg]
        (lambda: qfx.TensorSpec(format="nt8"), r"unknown number format 'nt8'; .* did you mean 'int8'\?"),  # type: ignore[arg-type]
        (lambda: qfx.TensorSpec(format=5), "format of TensorSpec must be a number format or the name of one, not 5"),  # type: ignore[arg-type]
        (lambda: IntFormat(8, True, False, 3), "IntFormat has 3 field"),  # type: ignore[call-arg]
        (lambda: qfx.QuantConfig(exclude="head"), r"write exclude=\('head',\)"),  # type: ignore[arg-type]
        (lambda: qfx.QuantConfig.from_dict({"passes": [{"name": "GPTQ", "damp": 1}]}), "did you mean 'damping'"),
        (lambda: qfx.QuantConfig.from_dict({"passes": ["gptq"]}), "did you mean 'GPTQ'"),
        (lambda: qfx.TensorSpec(format=INT8, observer="minmax"), "did you mean 'min_max'"),  # type: ignore[arg-type]
    ],
)
def test_what_people_write_is_answered_with_what_to_write(build: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build()


def test_numbers_of_numpy_and_lists_become_what_configurations_hold() -> None:
    options: dict[str, Any] = {"iterations": np.int64(3), "drop": np.float32(0.5), "only": ["a"]}
    made = AdaRound(**options)
    assert made == AdaRound(iterations=3, drop=0.5, only=("a",))
    assert (type(made.iterations), type(made.drop), type(made.only)) == (int, float, tuple)
    assert qfx.QuantConfig.from_yaml(qfx.presets.INT8_STATIC.replace(passes=(made,)).to_yaml()).passes == (made,)


def test_a_spec_may_be_given_as_its_dict() -> None:
    weight: Any = {"format": "int8", "granularity": "channel"}
    assert qfx.QuantConfig(weight=weight).weight == qfx.TensorSpec.from_dict(weight)
    assert qfx.Override(pattern="*", weight=weight).weight == qfx.TensorSpec.from_dict(weight)


@graph_pass()
@dataclass(frozen=True)
class Repeated:
    """A pass of another package."""

    times: Annotated[int, Interval("[1, 9]")] = 1

    def __call__(self, gm: Any) -> int:
        return 0


def test_passes_of_others_are_checked_as_ours_are() -> None:
    assert Repeated(9).times == 9
    with pytest.raises(ConfigError, match="times of Repeated must be an integer from 1 to 9, not 10"):
        Repeated(10)


def test_a_class_whose_annotations_cannot_be_read_is_left_alone() -> None:
    @checked
    @dataclass(frozen=True)
    class Unread:
        value: NotThere = None  # type: ignore[name-defined]  # noqa: F821

    assert Unread(3).value == 3
    with pytest.raises(ConfigError, match="did you mean 'value'"):
        Unread(valu=3)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: qfx.load(None), "directory of load must be a string or a path, not None"),  # type: ignore[arg-type]
        (lambda: qfx.open_checkpoint(5), "path of open_checkpoint must be a string or a path, not 5"),  # type: ignore[arg-type]
        (lambda: qfx.presets.preset(5), "name of preset must be a string, not 5"),  # type: ignore[arg-type]
        (lambda: qfx.QuantConfig.from_yaml(5), "source of from_yaml must be a string or a path, not 5"),  # type: ignore[arg-type]
        (lambda: qfx.export.onnx(nn.Linear(2, 2), "a"), "qmodel of onnx must be a QuantizedModel, not "),  # type: ignore[arg-type]
        (lambda: qfx.export.gguf(nn.Linear(2, 2), "a"), "qmodel of gguf must be a QuantizedModel, not "),  # type: ignore[arg-type]
        (lambda: qfx.export.huggingface(nn.Linear(2, 2), "a"), "of huggingface must be a QuantizedModel, not "),  # type: ignore[arg-type]
        (lambda: qfx.verify(5, "a", []), "qmodel of verify must be a QuantizedModel or a Module, not 5"),  # type: ignore[arg-type]
        (lambda: qfx.run_passes(nn.Linear(2, 2), []), "gm of run_passes must be a GraphModule, not "),  # type: ignore[arg-type]
        (lambda: qfx.run_passes(GRAPH, [GPTQ]), r"passes: GPTQ is a class; write GPTQ\(\)"),  # type: ignore[list-item]
        (lambda: qfx.run_passes(GRAPH, ["GPTQ"]), "passes: 'GPTQ' is not a pass"),  # type: ignore[list-item]
        (lambda: qfx.quantize(nn.Linear(2, 2), "int8_statik"), r"did you mean 'int8_static'\?"),
        (lambda: qfx.quantize(nn.Linear(2, 2), 5), "config must be the name of a preset, .*, not int"),  # type: ignore[arg-type]
        (lambda: qfx.Resources(checkpoint=5), "checkpoint of Resources must be .*, not 5"),  # type: ignore[arg-type]
    ],
)
def test_arguments_of_another_type_are_refused_by_name(call: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        call()


def test_what_every_result_and_data_set_is_passes(tmp_path: Any) -> None:
    class Numbered:
        """A data set that has items by number and nothing else."""

        def __getitem__(self, index: int) -> Any:
            return (torch.ones(2, 2),)[index]

    qmodel = qfx.quantize(nn.Linear(2, 2).eval(), "int8_weight_only", [torch.ones(2, 2)], progress=False)
    qmodel.save(tmp_path / "model")
    assert isinstance(qfx.load(tmp_path / "model"), qfx.QuantizedModel)
    batches: Any = Numbered()
    pytest.importorskip("onnxruntime")
    qfx.export.onnx(qmodel, tmp_path / "model.onnx")
    assert qfx.verify(qmodel, tmp_path / "model.onnx", batches).max_steps <= 1


def test_one_of_several_words_is_taken_and_another_is_named_with_the_nearest() -> None:
    @checked_call
    def run(runtime: Literal["onnxruntime", "openvino"] = "onnxruntime") -> str:
        return runtime

    assert run(runtime="openvino") == "openvino"
    with pytest.raises(ConfigError) as error:
        run(runtime="open_vino")  # type: ignore[arg-type]
    message = "runtime of run must be 'onnxruntime' or 'openvino', not 'open_vino'; did you mean 'openvino'?"
    assert str(error.value) == message
    with pytest.raises(ConfigError, match=r"not None$"):
        run(runtime=None)  # type: ignore[arg-type]
