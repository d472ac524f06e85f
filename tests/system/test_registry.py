"""Every name of a configuration is found in one way, and an entry never takes the place of another module's."""

from __future__ import annotations

import copy
import importlib
import json
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tiny import quantize, rand, seeded
from torch import Tensor, nn

import quark_fx as qfx
import quark_fx.export.to_onnx.lowering  # fills LOWERINGS
from quark_fx.analysis.trials import metric_of
from quark_fx.config.target import register_target
from quark_fx.export.to_onnx.translation import LOWERINGS, translation_table
from quark_fx.graph.pass_manager import graph_pass, pass_from_dict, pass_to_dict
from quark_fx.mixed_precision.candidates import candidates_of
from quark_fx.numbers import formats
from quark_fx.numbers.formats import FORMATS, parse_format
from quark_fx.observers import MinMax, Observer, observer_from_dict, observer_to_dict
from quark_fx.observers.base import OBSERVERS, observer
from quark_fx.passes import AlignShifts, Rotate
from quark_fx.presets import preset
from quark_fx.system.names import Stored
from quark_fx.system.registry import Registry


def define(name: str, kind: str) -> Any:
    """Define an observer, a pass, a class of passes, a target, a preset, or a lowering, as a notebook cell does."""
    if kind == "observer":
        return observer(dataclass(frozen=True)(type(name, (MinMax,), {"__module__": __name__, "__qualname__": name})))
    if kind == "target":
        return register_target(qfx.Target(name=name))
    if kind == "preset":
        return qfx.presets.PRESETS.add(qfx.QuantConfig(), name)

    def cell(*_: Any) -> int:
        return 0

    cell.__name__ = cell.__qualname__ = name
    if kind == "lowering":
        return qfx.export.lowers(name)(cell)
    if kind == "class":
        options = {"__module__": __name__, "__qualname__": name, "__call__": cell}
        return graph_pass()(dataclass(frozen=True)(type(name, (), options)))
    return graph_pass(cell)


@pytest.mark.parametrize(
    ("kind", "taken", "owner", "free"),
    [
        ("observer", "MinMax", "quark_fx.observers.minmax.MinMax", "Mine"),
        ("pass", "fold_batch_norm", "quark_fx.passes.fold_batch_norm.fold_batch_norm", "mine"),
        ("class", "Rotate", "quark_fx.passes.rotate.Rotate", "Mine"),
        ("target", "onnx", "quark_fx.targets", "mine"),
        ("preset", "int8_static", "quark_fx.presets", "mine"),
        ("lowering", "quark_fx.quantize.default", "quark_fx.export.to_onnx.lowering.quantize", "aten.relu.default"),
    ],
)
def test_a_name_belongs_to_the_module_that_registered_it(kind: str, taken: str, owner: str, free: str) -> None:
    translation_table()  # imports the lowerings of the package
    before = [dict(registry) for registry in Registry.every]
    refusal = "does; .* operators, so only its module" if kind == "lowering" else "uses that name, .*another name"
    with pytest.raises(qfx.QuarkError, match=rf"{__name__}.* registers .*, but {owner} already {refusal}"):
        define(taken, kind)
    assert before == [dict(registry) for registry in Registry.every]
    define(free, kind)
    again = define(free, kind)
    assert sum(entry is again for registry in Registry.every for entry in registry.values()) == 1


def test_an_observer_of_a_cell_that_ran_twice_is_stored(tmp_path: Path) -> None:
    first, second = define("Mine", "observer"), define("Mine", "observer")
    for cls in (first, second):
        config = qfx.presets.INT8_STATIC.replace(input=qfx.TensorSpec(format=qfx.formats.INT8, observer=cls()))
        assert qfx.QuantConfig.from_yaml(config.to_yaml()).to_dict() == config.to_dict()
        quantize(seeded(nn.Linear(8, 8)), config, [rand(4, 8)]).save(tmp_path)
        loaded = qfx.load(tmp_path).config.input
        assert loaded is not None
        assert type(loaded.observer) is second


def test_a_module_replaces_its_lowering_by_another_function() -> None:
    """The name is that of an operator, so that the module cannot choose another."""

    def first(x: Any) -> Any: ...

    def second(x: Any) -> Any: ...

    for function in (first, second):
        qfx.export.lowers("aten.relu.default")(function)
    assert LOWERINGS["aten.relu.default"] is second


def test_another_definition_of_the_same_module_is_refused() -> None:
    """Two classes that share a name would be written and read as one."""
    define("MineToo", "observer")
    with pytest.raises(
        qfx.ConfigError, match=r"Mine_Too registers observer 'mine_too', but .*MineToo already uses that name"
    ):
        define("Mine_Too", "observer")


def test_what_is_not_registered_does_not_pass_for_what_is() -> None:
    """It would be written under the name of the other, and read back as the other."""

    def fold_batch_norm(gm: Any) -> int:
        return 0

    @dataclass(frozen=True)
    class Percentile(MinMax): ...

    with pytest.raises(
        qfx.ConfigError, match=r"fold_batch_norm is not registered, and quark_fx.passes.fold_batch_norm"
    ):
        qfx.QuantConfig(passes=(fold_batch_norm,))
    with pytest.raises(qfx.ConfigError, match=r"Percentile is not registered, and quark_fx.observers.percentile.Perc"):
        qfx.TensorSpec(format=qfx.formats.INT8, observer=Percentile())


UNKNOWN: dict[str, tuple[Callable[[], Any], str, str]] = {
    "preset": (lambda: preset("int8_sttic"), "preset 'int8_sttic'", "int8_static"),
    "format": (lambda: parse_format("itn8"), "number format 'itn8'", "int8"),
    "observer": (lambda: observer_from_dict("minmix"), "observer 'minmix'", "min_max"),
    "pass": (lambda: pass_from_dict("Rotat"), "pass 'Rotat'", "Rotate"),
    "target": (lambda: qfx.QuantConfig(target="onxn"), "target 'onxn'", "onnx"),  # type: ignore[arg-type]
    "metric": (lambda: metric_of("eror"), "metric 'eror'", "error"),
    "rule": (lambda: AlignShifts(rules=("concta",)), "rule 'concta'", "concat"),
    "stage": (lambda: graph_pass(stage="flot"), "stage 'flot'", "float"),
    "enumeration": (lambda: qfx.TensorSpec(format="int8", granularity="chanel"), "Granularity 'chanel'", "channel"),  # type: ignore[arg-type]
    "candidate": (lambda: candidates_of(["int8_sttic"]), "preset or number format 'int8_sttic'", "int8_static"),
    "mixture": (lambda: qfx.gguf_types.mixed(nn.Linear(1, 1), "Q4_K_N"), "mixture 'Q4_K_N'", "Q4_K_M"),  # type: ignore[arg-type]
    "entropy method": (lambda: qfx.observers.Entropy(method="modelopts"), "entropy method 'modelopts'", "modelopt"),
    "grid": (lambda: qfx.observers.Mse(grid="dyadik"), "grid 'dyadik'", "dyadic"),
    "mode": (lambda: qfx.observers.PowerOfTwoMinMse(mode="al"), "mode 'al'", "all"),
    "scenario": (lambda: qfx.observers.Distribution(scenario="sames"), "scenario 'sames'", "same"),
    "export": (lambda: qfx.check(nn.Linear(1, 1), "fp16", [], export="qdqq"), "export 'qdqq'", "qdq"),
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_an_unknown_name_has_one_message(case: str) -> None:
    build, name, meant = UNKNOWN[case]
    with pytest.raises(
        qfx.ConfigError, match=rf"^unknown {name}; choose one of .*; did you mean '{meant}'\?$"
    ) as error:
        build()
    assert f" {meant}" in str(error.value).partition("choose one of")[2]


@pytest.mark.parametrize("read", [observer_from_dict, pass_from_dict])
@pytest.mark.parametrize("data", [None, 3, [], {}, {"name": 3}, {"name": []}, "", "\ud800", {"name": "x", 3: 4}])
def test_data_of_another_form_are_refused(read: Callable[[Any], Any], data: Any) -> None:
    with pytest.raises(qfx.ConfigError):
        read(data)


@dataclass(frozen=True)
class Window:
    """An option of a pass that is a dataclass."""

    size: int = 3
    observer: Observer | None = None


@graph_pass()
@dataclass(frozen=True)
class Everything:
    """A pass with an option of each kind that is read from and written as plain data."""

    window: Window = field(default_factory=Window)
    observer: Observer | None = None
    spec: qfx.TensorSpec | None = None
    format: qfx.formats.IntFormat | None = None
    target: qfx.Target | None = None
    granularity: qfx.Granularity = qfx.Granularity.TENSOR
    names: frozenset[str] = frozenset()
    pairs: tuple[tuple[int, float], ...] = ()

    def __call__(self, gm: Any) -> int:
        return 0


def test_options_of_every_kind_survive_yaml() -> None:
    p = Everything(
        window=Window(size=5, observer=qfx.observers.Percentile(percentile=99.0)),
        observer=qfx.observers.Adjusted(ratio=0.5, observer=qfx.observers.Mse()),
        spec=qfx.TensorSpec(format=qfx.formats.INT8, granularity=qfx.Granularity.CHANNEL),
        format=qfx.formats.INT4,
        target=qfx.Target.VLLM,
        granularity=qfx.Granularity.GROUP,
        names=frozenset({"b", "a"}),
        pairs=((1, 0.5),),
    )
    data = pass_to_dict(p)
    assert json.loads(json.dumps(data)) == data == yaml.safe_load(yaml.safe_dump(data))
    assert data["window"] == {"size": 5, "observer": {"name": "percentile", "percentile": 99.0, **_HISTOGRAM}}
    assert (data["names"], data["target"], data["format"]) == (["a", "b"], "vllm", "int4")
    assert pass_from_dict(data) == p
    assert pass_from_dict(pass_to_dict(Everything())) == Everything()
    with pytest.raises(
        qfx.ConfigError, match=r"Window has no field sise; it has size, observer; did you mean 'size'\?"
    ):
        pass_from_dict({**data, "window": {"sise": 3}})


_HISTOGRAM = {
    name: value
    for name, value in observer_to_dict(qfx.observers.Percentile()).items()
    if name in ("bins", "grid", "skip_zeros")
}


def test_an_option_that_yaml_cannot_write_is_named() -> None:
    @graph_pass()
    @dataclass(frozen=True)
    class Typed:
        dtype: Any = torch.float16

        def __call__(self, gm: Any) -> int:
            return 0

    config = qfx.QuantConfig(passes=(Typed(),))
    with pytest.raises(qfx.ConfigError, match=r"torch.float16.*YAML"):
        config.to_yaml()


def test_a_stored_value_is_data_until_it_is_used() -> None:
    stored = [
        Stored("pass", "mine", {"times": 3}),
        Stored("observer", "mine", {"tail": 3}, {"weights_only": False}),
        Stored("target", "mine", None),
    ]
    for value in stored:
        assert copy.deepcopy(value) == pickle.loads(pickle.dumps(value)) == value == replace(value)
        assert len({value, copy.copy(value)}) == 1
        assert str(value) == "mine"
        message = f"{value.what} 'mine' is known only by its name, from a stored model; import"
        with pytest.raises(qfx.ConfigError, match=message):
            value(None)
        with pytest.raises(qfx.ConfigError, match=message):
            _ = value.placement
    assert stored[1].weights_only is False


def test_stored_entries_are_kept_while_a_stored_model_is_read_and_not_afterwards() -> None:
    data = {
        "weight": {"format": "int8", "observer": {"name": "nobody", "tail": 3}},
        "passes": ["nothing", {"name": "Rotate", "option_of_another_version": 3}],
        "overrides": [{"pattern": "a", "weight": {"format": "int8", "observer": "nobody"}}],
        "target": "nowhere",
    }
    config = qfx.QuantConfig.from_dict(data, stored=True)
    written = config.to_dict()
    assert written["target"] == "nowhere"
    assert written["passes"] == [{"name": "nothing"}, {"name": "Rotate", "option_of_another_version": 3}]
    assert written["weight"]["observer"] == {"name": "nobody", "tail": 3}
    assert qfx.QuantConfig.from_dict(written, stored=True) == config
    for key, value in data.items():
        with pytest.raises(qfx.ConfigError, match=r"unknown|no option"):
            qfx.QuantConfig.from_dict({key: value})
    assert Rotate() == pass_from_dict("Rotate")


def test_tests_leave_no_names_behind() -> None:
    """`conftest.py` restores every registry: the tests above registered observers, targets, presets, and lowerings."""
    assert {registry.what for registry in Registry.every} >= {"pass", "observer", "target", "preset", "number format"}
    for name in ("mine", "Mine", "mine_too", "aten.relu.default"):
        assert not any(name in registry for registry in Registry.every)
    assert OBSERVERS["min_max"] is MinMax
    assert LOWERINGS


def test_range_of_an_observer_that_was_defined_again_is_its_own() -> None:
    """The first definition keeps working: a configuration that was made before the cell ran again holds it."""

    def cell(factor: float) -> type[Observer]:
        @observer
        @dataclass(frozen=True)
        class Scaled(MinMax):
            def range(self, scheme: qfx.Scheme) -> tuple[Tensor, Tensor]:
                low, high = super().range(scheme)
                return low * factor, high * factor

        return Scaled

    first, second = cell(1.0), cell(2.0)
    scheme = qfx.Scheme(format=qfx.formats.INT8, symmetry=qfx.Symmetry.SYMMETRIC)
    x = rand(1, 8)
    assert torch.equal(first().observe(x).range(scheme)[1] * 2, second().observe(x).range(scheme)[1])
    assert first().name == second().name == "scaled"


def test_a_file_that_runs_and_is_imported_too_defines_each_name_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "import quark_fx as qfx\ndef twice_defined(gm): return 0\nqfx.graph_pass(twice_defined)\n"
    text += "TABLE = qfx.formats.register_format(qfx.formats.Codebook('twice_table', (-1.0, 0.0, 0.5, 1.0)))\n"
    for name in ("twice_run", "another_file"):
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(tmp_path / "twice_run.py"), raising=False)
    exec(compile(text, "twice_run.py", "exec"), {"__name__": "__main__"})
    importlib.import_module("twice_run")
    with pytest.raises(
        qfx.ConfigError, match=r"another_file.twice_defined registers .* but twice_run.twice_defined already uses"
    ):
        importlib.import_module("another_file")


def test_a_stored_model_names_the_format_that_nothing_registers(tmp_path: Path) -> None:
    formats.register_format(formats.Codebook("stored_table", (-1.0, 0.0, 0.5, 1.0)))
    spec = qfx.TensorSpec(format=FORMATS["stored_table"], granularity=qfx.Granularity.CHANNEL)
    quantize(seeded(nn.Linear(8, 4)), qfx.QuantConfig(weight=spec), [rand(2, 8)]).save(tmp_path / "model")
    del FORMATS["stored_table"]
    with pytest.raises(qfx.ConfigError, match=r"'stored_table'; .* or import the module that registers it") as error:
        qfx.load(tmp_path / "model")
    assert "executing" not in str(error.value)


def test_an_observer_without_its_decorator_is_accepted_and_told_when_it_is_read_back(tmp_path: Path) -> None:
    @dataclass(frozen=True)
    class Bare(MinMax):
        pass

    spec = qfx.TensorSpec(format=formats.UINT8, observer=Bare())
    config = preset("int8_static").replace(input=spec)
    message = (
        r"unknown observer 'bare'; choose one of .*; an observer of your own is not registered until you decorate it "
        "with @observer and import its module"
    )
    with pytest.raises(qfx.ConfigError, match=message):
        qfx.QuantConfig.from_dict(config.to_dict())
    quantize(seeded(nn.Linear(8, 8)), config, [rand(3, 8)]).save(tmp_path)
    with pytest.raises(
        qfx.QuarkError,
        match=r"'bare' is known only by its name, .* again; a class without @observer is not registered",
    ):
        quantize(seeded(nn.Linear(8, 8)), qfx.load(tmp_path).config, [rand(3, 8)])
