"""The root names `passes`, `observers` and `export` are links into the package: collect it once, nested."""

import gc
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

# Read when torch is imported: the pool of processes imports torch anew for kernels that are built one after the other.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# Torch stores results for each operator that it traces, which helps in deep models. In networks of two or three layers,
# storing takes longer: a fifth of a capture. Processes that tests start read this, too.
os.environ.setdefault("TORCH_FAKE_TENSOR_DISPATCH_CACHE", "0")

import torch

collect_ignore = ["passes", "observers", "export"]
collect_ignore += ["tests/extensions"]  # register formats and passes when they are imported
if "pretend_gpu" not in sys.modules:  # registers a device for the whole process: test_pretend_gpu.py starts others
    collect_ignore += ["tests/pretend_gpu.py", "tests/on_pretend_gpu.py"]

# A capture makes so many objects that Python walks all objects of torch and transformers repeatedly: 7 to 14 % of
# the processor time of the files that capture most.
gc.set_threshold(100_000, 20, 100)


def _list_torch_functions_once() -> None:
    """Keep the list of torch's ONNX functions, which torch translates anew for each table: half a second."""
    with suppress(ImportError, AttributeError):  # a version of torch without this private module takes longer
        apis: Any = import_module("torch.onnx._internal._lazy_import").onnxscript_apis
        if type(apis).__name__ == "_LazyModule":  # onnxscript is imported by the first call
            apis.get_torchlib_ops = cache(lambda: apis.__getattr__("get_torchlib_ops")())


_list_torch_functions_once()


def _share_processor(workers: int) -> None:
    """Limit this worker to its share of the cores: threads that spin while they wait slow the other workers down."""
    threads = max(1, (os.cpu_count() or 1) // workers)
    torch.set_num_threads(threads)
    if find_spec("onnxruntime") is None:
        return
    import onnxruntime

    class SessionOptions(onnxruntime.SessionOptions):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.intra_op_num_threads = threads

    class InferenceSession(onnxruntime.InferenceSession):  # type: ignore[misc]
        def __init__(self, model: Any, sess_options: Any = None, *args: Any, **kwargs: Any) -> None:
            super().__init__(model, sess_options or SessionOptions(), *args, **kwargs)

    onnxruntime.SessionOptions, onnxruntime.InferenceSession = SessionOptions, InferenceSession


if workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0")):
    _share_processor(workers)


_LONGEST = (
    "passes/test_learn_rotations.py",
    "passes/test_smooth_quant.py",
    "export/test_huggingface.py",
    "test_on_gpu.py",
    "export/test_generation.py",
    "test_pretend_gpu.py",
    "graph/test_operator_arguments.py",
    "test_docs.py",
    "export/test_decoding.py",
    "export/test_onnx_blocks.py",
    "export/test_onnx_formats.py",
    "checkpoints/test_streaming.py",
    "solvers/test_reconstruction.py",
    "rescale/test_rotation_sites.py",
    "test_command_line.py",
    "model/test_compile.py",
    "engine/test_ranks.py",
    "rescale/test_scale_sites.py",
    "export/test_gguf_architectures.py",
    "model/test_serialization.py",
    "analysis/test_analyze.py",
    "engine/test_resume.py",
    "model/test_eager.py",
    "mixed_precision/test_search.py",
    "export/test_gguf.py",
    "test_states.py",
    "passes/test_rotate.py",
    "engine/test_block_walk.py",
    "test_session.py",
    "passes/test_gptq.py",
    "test_check.py",
    "capture/test_capture.py",
    "vendors/test_openvino.py",
    "passes/test_low_rank.py",
    "passes/test_fold_affine.py",
    "test_trained.py",
    "export/test_onnx_structure.py",
    "model/test_qat.py",
    "export/test_stable_functions.py",
    "export/test_recurrent.py",
    "vendors/test_dpu.py",
    "test_examples.py",
    "model/test_mutations.py",
    "system/test_isolation.py",
    "engine/test_blocks.py",
    "vendors/test_vitis_blocks.py",
    "export/test_export.py",
    "observers/test_observer_fold.py",
    "export/test_pt2e.py",
    "model/test_provenance.py",
    "capture/test_state.py",
    "capture/test_guards.py",
    "export/test_verify.py",
    "plan/test_placement.py",
    "export/test_vllm.py",
    "plan/test_roles.py",
    "numbers/test_narrow_integers.py",
    "plan/test_pair_sums.py",
    "model/test_eager_kernels.py",
    "model/test_eager_kv_cache.py",
    "model/test_model_directory.py",
    "export/test_one_run.py",
    "export/test_genai.py",
    "test_layout.py",
    "solvers/test_error_feedback.py",
    "export/test_gguf_experts.py",
    "test_random_models.py",
    "checkpoints/test_quantized_sources.py",
)
"""Files of more than 10 seconds each: workers that start them last leave others waiting. The first file of `_KEEPING`
stands for all that share a worker with it."""


_KEEPING = re.compile(r"^from (zoo import|networks import .*\btrained$)", re.MULTILINE)
"""Imports of helpers that keep results that take seconds each: captured architectures, trained networks."""


@cache
def _worker_scope(path: str) -> str:
    """Return the helper whose results a file reads, which it shares a worker for; the path of any other file."""
    file = Path(__file__).parent / path
    match = _KEEPING.search(file.read_text(encoding="utf-8")) if file.is_file() else None
    return match[1].partition(" ")[0] if match else path


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Deal out files as `--dist loadfile` does, but files that read the same kept results to one worker."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _worker_scope(nodeid.partition("::")[0])

    return Scheduling(config, log)


def pytest_configure(config: pytest.Config) -> None:
    """Keep the order of `pytest_collection_modifyitems` where files are dealt out to workers."""
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the first fast test of each file `quick`; start the longest files first, then files with most tests."""
    has_quick: set[Path] = set()
    for item in items:
        slow = item.get_closest_marker("slow") or item.get_closest_marker("whole")
        if not slow and item.path not in has_quick:
            has_quick.add(item.path)
            item.add_marker("quick")
    tests = Counter(item.path for item in items)
    place = {Path(__file__).parent / "tests" / name: index for index, name in enumerate(_LONGEST)}
    items.sort(key=lambda item: (place.get(item.path, len(place)), -tests[item.path]))


def pytest_collection_finish() -> None:
    """Keep the garbage collector from walking imported modules and collected tests."""
    gc.freeze()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the reasons of skipped tests, such as a missing GPU, in one line: `-q` hides them."""
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in terminalreporter.getreports("skipped"))
    if reasons:
        listed = "; ".join(f"{reason} ({count})" for reason, count in reasons.most_common())
        terminalreporter.write_line(f"skipped {sum(reasons.values())} tests: {listed}")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Draw the same weights in every run, whatever ran before."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def only_the_known_names() -> Iterator[None]:
    """Unregister the passes, observers, targets, ... that a test registers, so that other tests can use the names.

    Names that the package registers when a part is first imported stay: the part is not imported again.
    """
    from quark_fx.system.registry import Registry

    before = [(registry, dict(registry)) for registry in Registry.every]
    yield
    for registry, entries in before:
        for name in set(registry) - set(entries):
            if not registry.owner(name).startswith("quark_fx."):
                del registry[name]
        registry.update(entries)


_CAPTURING = (
    "capture",
    "system",
    "test_layout.py",
    "test_ownership.py",
    "test_states.py",
    "test_wrapped_models.py",
)
"""Folders and files whose tests capture every model anew."""


@pytest.fixture(scope="module", autouse=True)
def captured_once(request: pytest.FixtureRequest) -> Iterator[None]:
    """Share captures among all sessions and tests of a process (`tests/captured_once.py`)."""
    parts = request.path.relative_to(Path(__file__).parent).parts
    if parts[0] != "tests" or parts[1] in _CAPTURING:
        yield
        return
    from captured_once import CAPTURES

    import quark_fx
    from quark_fx import session

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "capture_graph", CAPTURES)
        patch.setattr(quark_fx, "capture_graph", CAPTURES)
        yield
