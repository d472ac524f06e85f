"""A call gives the bits it gives alone, wherever it is made from, and leaves the process as it found it."""

from __future__ import annotations

import ast
import logging
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from captured_once import CAPTURES
from safetensors.torch import save_file
from tiny import cnn, images, mlp, quantize, rand, tokens
from torch import Tensor, nn

import quark_fx as qfx
from quark_fx import session
from quark_fx.graph.nodes import stored_tensors
from quark_fx.passes import AdaRound, BiasCorrection, SmoothQuant
from quark_fx.system.isolation import as_called, isolated, quiet

INT8 = qfx.presets.INT8_STATIC
CONFIGURATIONS = {
    "int8_static": INT8,
    "gptq": qfx.presets.W4A16_BEST.replace(group_size=16),
    "mxfp4": qfx.presets.MXFP4,
    "learned": INT8.replace(passes=(AdaRound(iterations=8, drop=0.5, scale_rate=0.01),)),
    "smooth": INT8.replace(passes=(SmoothQuant(), BiasCorrection())),
}


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def default_device(device: str) -> Iterator[None]:
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def fewer_bits() -> Iterator[None]:
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision("highest")


SURROUNDINGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "inference mode": torch.inference_mode,
    "no grad": torch.no_grad,
    "float64 by default": lambda: default_dtype(torch.float64),
    "bfloat16 by default": lambda: default_dtype(torch.bfloat16),
    "meta by default": lambda: default_device("meta"),
    "deterministic": deterministic,
    "products in bfloat16": fewer_bits,
}


def tensors(model: nn.Module, config: qfx.QuantConfig, data: Any) -> dict[str, Tensor]:
    return stored_tensors(quantize(model, config, data).graph_module)


def assert_same_bits(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(got[name], tensor, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("config", CONFIGURATIONS)
def test_a_call_gives_the_same_bits_in_any_surroundings(config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if config not in ("int8_static", "gptq"):  # the first of each model, which is captured anew in all surroundings
        monkeypatch.setattr(session, "capture_graph", CAPTURES)
    model, data = (mlp(), tokens(4, 3)) if config in ("gptq", "smooth") else (cnn(), images(4, 3))
    expected = tensors(model, CONFIGURATIONS[config], data)
    for name, surroundings in SURROUNDINGS.items():
        with surroundings():
            got = tensors(model, CONFIGURATIONS[config], data)
        try:
            assert_same_bits(got, expected)
        except AssertionError as error:
            error.add_note(f"in {name}")
            raise


PLACES = (
    *(("generic", "all"), ("cuda", "all"), ("mkldnn", "all")),
    *((backend, operator) for backend in ("cuda", "mkldnn") for operator in ("conv", "rnn", "matmul")),
)


def new(backend: str, operator: str, precision: str) -> Callable[[], object]:
    return lambda: torch._C._set_fp32_precision_setter(backend, operator, precision)


def old_cudnn(on: bool) -> Callable[[], None]:
    return lambda: setattr(torch.backends.cudnn, "allow_tf32", on)


SETTINGS: dict[str, tuple[Callable[[], object], ...]] = {
    "default": (),
    "medium": (lambda: torch.set_float32_matmul_precision("medium"),),
    "high, no TF32 in cuDNN": (lambda: torch.set_float32_matmul_precision("high"), old_cudnn(False)),
    "older flag of cuBLAS": (lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", True),),
    **{f"{place} {bits}": (new(*place, bits),) for place in PLACES for bits in ("tf32", "ieee")},
    "bfloat16 everywhere": (new("generic", "all", "bf16"),),
    "older after newer": (new("mkldnn", "all", "bf16"), new("cuda", "rnn", "ieee"), old_cudnn(True)),
    "newer after older": (old_cudnn(False), new("cuda", "all", "tf32"), new("cuda", "conv", "ieee")),
    "high, then not": (lambda: torch.set_float32_matmul_precision("high"), new("cuda", "matmul", "ieee")),
}


def older() -> list[Any]:
    """Return what older getters return, `None` for one that raises."""
    values: list[Any] = []
    for getter in (
        lambda: torch.backends.cudnn.allow_tf32,
        lambda: torch.backends.cuda.matmul.allow_tf32,
        torch.get_float32_matmul_precision,
    ):
        try:
            values.append(getter())
        except RuntimeError:
            values.append(None)
    return values


def newer() -> list[str]:
    return [torch._C._get_fp32_precision_getter(*place) for place in PLACES]


def unwound() -> list[Any]:
    """Return what getters return while newer settings are unset one by one: what each is, and not what it inherits."""
    values: list[Any] = []
    for place in PLACES:
        values += [*older(), *newer()]
        new(*place, "none")()
    return [*values, *older(), *newer()]


@contextmanager
def set_anew(name: str) -> Iterator[None]:
    torch.set_float32_matmul_precision("highest")
    for place in PLACES:
        new(*place, "none")()
    old_cudnn(True)()  # as torch begins
    for setting in SETTINGS[name]:
        setting()
    try:
        yield
    finally:
        torch.set_float32_matmul_precision("highest")
        for place in PLACES:
            new(*place, "none")()
        old_cudnn(True)()


@pytest.mark.parametrize("name", SETTINGS)
def test_products_of_float32_have_all_bits_during_a_call_whatever_is_set(name: str) -> None:
    seen: list[Any] = []

    @isolated
    def call(batches: Iterator[Tensor]) -> None:
        seen.append([older(), newer()])
        for _ in as_called(batches):
            seen.append([older(), newer()])
        raise KeyError

    def batches() -> Iterator[Tensor]:
        seen.append([older(), newer()])
        yield rand(2, 4)

    with set_anew(name):
        before = [older(), newer()]
        with pytest.raises(KeyError):
            call(batches())
        found = unwound()
    whole = [[False, False, "highest"], ["ieee"] * len(PLACES)]
    assert seen == [whole, before, whole]
    with set_anew(name):
        assert found == unwound()


@pytest.mark.parametrize("name", ["('generic', 'all') tf32", "('cuda', 'conv') ieee", "high, then not"])
def test_a_model_is_quantized_with_any_precision_of_products(name: str) -> None:
    expected = tensors(cnn(), INT8, images(4, 3))
    with set_anew(name):
        assert_same_bits(tensors(cnn(), INT8, images(4, 3)), expected)


def test_a_call_that_waits_for_another_one_keeps_the_settings_of_the_process() -> None:
    waits, seen, others = threading.Event(), list[list[Any]](), list[threading.Thread]()

    @isolated
    def second() -> Any:
        def batches() -> Iterator[None]:
            seen.append([older(), newer()])
            yield None

        return list(as_called(batches()))

    def start() -> None:
        waits.set()
        second()

    @isolated
    def first() -> None:
        others.append(threading.Thread(target=start))
        others[0].start()
        waits.wait()
        others[0].join(0.1)
        assert others[0].is_alive()

    with fewer_bits():
        before = [older(), newer()]
        first()
        others[0].join()
        assert [older(), newer()] == before
    assert seen == [before]


@pytest.mark.parametrize("config", ["int8_static", "learned"])
def test_data_made_under_inference_mode_can_be_calibrated_with_and_learned_from(config: str) -> None:
    expected = tensors(cnn(), CONFIGURATIONS[config], images(4, 3))
    with torch.inference_mode():
        data = images(4, 3)
    assert_same_bits(tensors(cnn(), CONFIGURATIONS[config], data), expected)


def test_a_model_made_under_inference_mode_is_refused_by_name() -> None:
    with torch.inference_mode():
        model = nn.Sequential(nn.Linear(4, 4)).eval()
    with pytest.raises(qfx.CaptureError, match=r"first 0\.weight, were created under torch.inference_mode"):
        quantize(model, INT8, [rand(2, 4)])


@pytest.mark.parametrize("function", ["quantize", "verify"])
def test_a_generator_of_data_runs_in_the_surroundings_of_its_caller(function: str, tmp_path: Path) -> None:
    seen, model, data = [], cnn(), images(4, 3)
    qmodel = quantize(model, INT8, data)
    path = qfx.export.onnx(qmodel, tmp_path / "m.onnx")

    def batches() -> Iterator[Tensor]:
        for batch in data:
            modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")
            seen.append((*modes, torch.get_default_device().type))
            yield batch

    def run() -> tuple[bool, bool, bool, str]:
        seen.clear()
        if function == "quantize":
            quantize(model, INT8, batches())
        else:
            qfx.verify(qmodel, path, batches())
        assert len(set(seen)) == 1
        return seen[0]

    assert run() == (True, False, False, "cpu")
    with torch.no_grad():
        assert run() == (False, False, False, "cpu")
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert run() == (False, True, True, "cpu")
    with default_device("meta"):
        assert run() == (True, False, False, "meta")


def test_the_random_numbers_of_the_process_are_not_drawn_from() -> None:
    model, data = cnn(), images(4, 3)
    state = torch.random.get_rng_state()
    quantize(model, CONFIGURATIONS["learned"], data)
    assert torch.equal(torch.random.get_rng_state(), state)


def together(*calls: Callable[[], Any]) -> list[Any]:
    """Run each call in a thread of its own, all at once; return what they return."""
    results: list[Any] = [None] * len(calls)

    def run(index: int) -> None:
        try:
            results[index] = calls[index]()
        except BaseException as error:  # asserted about below
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_threads_that_quantize_at_once_get_the_bits_they_get_alone() -> None:
    def runs(model: nn.Module, name: str, data: list[Tensor]) -> Callable[[], dict[str, Tensor]]:
        return lambda: tensors(model, CONFIGURATIONS[name], data)

    calls = [
        runs(cnn(), "int8_static", images(4, 3)),
        runs(mlp(), "int8_static", tokens(4, 3)),
        runs(cnn(), "learned", images(4, 3)),
        runs(mlp(), "smooth", tokens(4, 3)),
    ]
    expected = [call() for call in calls]
    for _ in range(2):
        for got, alone in zip(together(*calls), expected, strict=True):
            assert not isinstance(got, BaseException), got
            assert_same_bits(got, alone)


def test_another_thread_makes_modules_while_a_checkpoint_is_opened(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file(nn.Linear(4, 4).state_dict(), file)
    register = nn.Module.register_parameter
    begun, made = threading.Barrier(2), threading.Event()

    def factory() -> nn.Module:
        model = nn.Linear(4, 4)
        assert model.weight.is_meta
        begun.wait(10)
        assert made.wait(10)
        return model

    def other() -> nn.Module:
        begun.wait(10)
        module = nn.Linear(4, 4)
        made.set()
        return module

    opened, module = together(lambda: qfx.open_checkpoint(file, factory), other)
    assert isinstance(opened, nn.Module), opened
    assert not module.weight.is_meta
    assert nn.Module.register_parameter is register


def test_checkpoints_opened_at_once_leave_torch_as_it_was(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file(nn.Linear(4, 4).state_dict(), file)
    register = nn.Module.register_parameter
    for model in together(*[lambda: qfx.open_checkpoint(file, lambda: nn.Linear(4, 4))] * 4):
        assert isinstance(model, nn.Module), model
    assert nn.Module.register_parameter is register
    assert not nn.Linear(2, 2).weight.is_meta


def test_only_the_own_thread_is_quiet(caplog: pytest.LogCaptureFixture) -> None:
    log = logging.getLogger("somebody")
    with quiet():
        log.error("mine")
        together(lambda: log.error("another's"))
        log.critical("beyond errors")
    log.error("later")
    assert [record.message for record in caplog.records] == ["another's", "beyond errors", "later"]
    assert logging.root.manager.disable == logging.NOTSET


def test_a_handler_that_waits_for_its_first_record_gets_it() -> None:
    """Torch's traces find out on it that nobody wants them, and stop composing records."""

    class Lazy(logging.StreamHandler):  # type: ignore[type-arg]
        def emit(self, record: logging.LogRecord) -> None:
            log.removeHandler(self)

    log, handler = logging.getLogger("traces"), Lazy()
    handler.stream = None
    log.addHandler(handler)
    with quiet():
        log.error("the first")
    assert handler not in log.handlers


class Loop(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([row * 2 for row in x])


def linear() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8)).eval()


NO_SUCH, NOTHING = INT8.replace(exclude=("zz",)), INT8.replace(exclude=("*",))
ONE_SAMPLE = INT8.replace(passes=(AdaRound(iterations=1),))

WARNINGS: dict[str, tuple[str, Callable[[], Any]]] = {
    "a pattern": (
        "selects no operator",
        lambda: qfx.quantize(linear(), NO_SUCH, [rand(4, 8)], progress=False),
    ),
    "nothing": (
        "nothing was quantized",
        lambda: qfx.quantize(linear(), NOTHING, [rand(4, 8)], progress=False),
    ),
    "zeros": ("is all zeros", lambda: qfx.quantize(linear(), INT8, [torch.zeros(4, 8)], progress=False)),
    "one sample": ("is a single sample", lambda: qfx.quantize(linear(), ONE_SAMPLE, [rand(1, 8)], progress=False)),
    "a fixed batch": ("fixes dimension 0", lambda: qfx.capture_graph(Loop().eval(), rand(4, 8))),
    "a fixed batch, deeper": (
        "fixes dimension 0",
        lambda: qfx.quantize(nn.Sequential(Loop(), linear()).eval(), INT8, [rand(4, 8)], progress=False),
    ),
    "a check": (
        "selects no operator",
        lambda: qfx.check(linear(), NO_SUCH, [rand(4, 8)], export="qdq"),
    ),
}


@pytest.mark.parametrize("name", WARNINGS)
def test_a_warning_names_the_line_of_the_caller(name: str) -> None:
    words, call = WARNINGS[name]
    with pytest.warns(UserWarning, match=words) as found:
        call()
    assert {w.filename for w in found if re.search(words, str(w.message))} == {__file__}


def test_every_warning_of_the_package_finds_that_line_in_one_way() -> None:
    package = Path(qfx.__file__).parent
    own = [file.name for file in package.rglob("*.py") if "warnings.warn(" in file.read_text()]
    assert own == ["isolation.py"]


FACTORIES = {"zeros", "ones", "empty", "eye", "linspace", "logspace", "rand", "randn", "tensor", "as_tensor"}


def test_no_tensor_is_made_in_the_default_dtype() -> None:
    """The default dtype belongs to the process: a caller may have set it, or another thread that reads a model."""
    found = []
    for file in Path(qfx.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            function = node.func if isinstance(node, ast.Call) else None
            if not isinstance(function, ast.Attribute) or ast.unparse(function.value) != "torch":
                continue
            assert isinstance(node, ast.Call)
            if function.attr in FACTORIES and not any(keyword.arg == "dtype" for keyword in node.keywords):
                found.append(f"{file.name}:{node.lineno} {ast.unparse(node)}")
    assert not found
