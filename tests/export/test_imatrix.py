"""Importance matrices hold the sums of squares of the inputs of weights, and FitScales reads them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_gguf import spec, tied_model
from test_gguf_experts import qwen3
from test_huggingface import llama
from tiny import quantize, rand, record_of
from torch import Tensor, nn
from torch.nn import functional as F

import quark_fx as qfx
from quark_fx.config.quant_config import QuantConfig, Target
from quark_fx.engine.block_walk import Streams
from quark_fx.errors import CheckpointError, ConfigError, ExportError
from quark_fx.export.checkpoints.imatrix import read_imatrix
from quark_fx.numbers.formats import INT3
from quark_fx.passes import AWQ, FitScales
from quark_fx.solvers.hessian import Hessian

package = pytest.importorskip("gguf")
pytest.importorskip("accelerate")

types = qfx.gguf_types
IDS = torch.randint(1, 64, (1, 12), generator=torch.Generator().manual_seed(1))
"""One sample, all of which is calibration data."""

MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: llama(num_hidden_layers=1, intermediate_size=64),
    "experts": lambda: qwen3(num_experts=4, moe_intermediate_size=256),
    "tied": tied_model,
}


@cache
def session(name: str) -> qfx.Session:
    """Capture a model once."""
    return qfx.Session(MODELS[name](), [{"input_ids": IDS}])


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Write the importance matrix of a model once."""
    folder = tmp_path_factory.mktemp("imatrix")

    @cache
    def file(name: str) -> Path:
        return qfx.export.imatrix(session(name), folder / f"{name}.gguf")

    return file


Entries = dict[str, tuple[Tensor, Tensor]]


def hooked(model: Any, batches: list[dict[str, Tensor]]) -> Entries:
    """Return the sums of squares and the counts of rows of every linear layer and expert, from hooks, in float64."""
    sums = dict[str, list[Tensor]]()

    def add(name: str, rows: list[Tensor]) -> None:
        pairs = [torch.cat((x.double().square().sum(0), torch.tensor([len(x)], dtype=torch.float64))) for x in rows]
        sums.setdefault(name, []).append(torch.stack(pairs))

    def linear(name: str, _: nn.Module, read: tuple[Tensor, ...]) -> None:
        add(f"{name}.weight", [read[0].flatten(0, -2)])

    def experts(name: str, module: Any, read: tuple[Tensor, ...]) -> None:
        hidden, chosen = read[:2]
        rows = [hidden[(chosen == expert).any(-1)] for expert in range(len(module.gate_up_proj))]
        halves = [F.linear(x, w).chunk(2, -1) for x, w in zip(rows, module.gate_up_proj, strict=True)]
        add(f"{name}.gate_up_proj", rows)
        add(f"{name}.down_proj", [module.act_fn(gate) * up for gate, up in halves])

    hooks = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) or name.endswith(".gate"):
            hooks.append(module.register_forward_pre_hook(partial(linear, name)))
        if hasattr(module, "gate_up_proj"):
            hooks.append(module.register_forward_pre_hook(partial(experts, name)))
    with torch.no_grad():
        for batch in batches:
            model(**batch)
    for hook in hooks:
        hook.remove()
    totals = {name: torch.stack(parts).sum(0) for name, parts in sums.items()}
    return {name: (total[:, :-1], total[:, -1:]) for name, total in totals.items()}


IN_FILES = {
    "attn_q": "self_attn.q_proj.weight", "attn_k": "self_attn.k_proj.weight", "attn_v": "self_attn.v_proj.weight",
    "attn_output": "self_attn.o_proj.weight", "ffn_gate": "mlp.gate_proj.weight", "ffn_up": "mlp.up_proj.weight",
    "ffn_down": "mlp.down_proj.weight", "ffn_gate_inp": "mlp.gate.weight",
    "ffn_gate_exps": "mlp.experts.gate_up_proj", "ffn_up_exps": "mlp.experts.gate_up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}  # fmt: skip
HEADS = {"llama": "output.weight", "experts": "output.weight", "tied": "token_embd.weight"}


@pytest.mark.parametrize("name", MODELS)
def test_a_file_holds_what_hooks_sum(name: str, files: Callable[[str], Path]) -> None:
    """A tied head has the name of the embedding, the only one of the two in a file of the model."""
    expected = hooked(session(name).model, [{"input_ids": IDS}])
    names = {f"blk.0.{ours}.weight": f"model.layers.0.{theirs}" for ours, theirs in IN_FILES.items()}
    names |= {HEADS[name]: "lm_head.weight"}
    reader = package.GGUFReader(files(name))
    stored = {t.name: torch.from_numpy(np.array(t.data)) for t in reader.tensors}
    present = {ours: theirs for ours, theirs in names.items() if theirs in expected}
    assert set(present.values()) == set(expected)
    assert set(stored) == {f"{ours}.{part}" for ours in present for part in ("in_sum2", "counts")}
    for ours, theirs in present.items():
        sums, counts = expected[theirs]
        assert stored[f"{ours}.counts"].shape == counts.shape
        assert torch.equal(stored[f"{ours}.counts"].double(), counts)
        # 12 rows are summed in float32, of inputs that are themselves float32.
        torch.testing.assert_close(stored[f"{ours}.in_sum2"].double(), sums, rtol=1e-4, atol=1e-9)
    if name == "experts":
        assert stored["blk.0.ffn_up_exps.weight.counts"].sum() == 2 * IDS.numel()
        assert len(stored["blk.0.ffn_up_exps.weight.counts"].unique()) > 1


def test_a_file_has_the_keys_that_llama_cpp_requires(files: Callable[[str], Path]) -> None:
    """The loader of llama-quantize refuses a file without the three keys of imatrix."""
    fields = {k: v.contents() for k, v in package.GGUFReader(files("llama")).fields.items() if k[:4] != "GGUF"}
    assert fields == {
        "general.type": "imatrix",
        "imatrix.datasets": ["Batches: 1; the first holds input_ids of shape (1, 12)"],
        "imatrix.chunk_count": 1,
        "imatrix.chunk_size": 12,
    }


def test_all_batches_count_and_padding_does_not(tmp_path: Path) -> None:
    mask = torch.ones_like(IDS)
    mask[:, :5] = 0
    batches = [{"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}, {"input_ids": IDS, "attention_mask": mask}]
    path = qfx.export.imatrix(qfx.Session(MODELS["llama"](), batches), tmp_path / "two.gguf")
    assert {int(counts) for _, counts in read_imatrix(path).values()} == {12 + 7}
    fields = package.GGUFReader(path).fields
    assert [fields[f"imatrix.{key}"].contents() for key in ("chunk_count", "chunk_size")] == [2, 10]


def only(pattern: str, weight: Any, **options: Any) -> QuantConfig:
    """Quantize one operator, so that its input is the float model's."""
    return QuantConfig(
        weight=None, overrides=(qfx.Override(pattern=pattern, weight=weight),), target=Target.TORCH, **options
    )


ROUND_TRIPS = {
    ("llama", "*.q_proj"): types.Q5_1,
    ("llama", "*.o_proj"): types.Q4_1,
    ("experts", "*.gate_up_proj"): types.Q2_K,
    ("experts", "*.down_proj"): types.Q6_K,
    ("tied", "*.mlp.up_proj"): types.Q4_K,
    ("tied", "lm_head"): types.Q6_K,
}
ALL_OF_H = {
    ("llama", "*.k_proj"): types.Q4_0,
    ("llama", "*.down_proj"): spec(INT3),
}
"""Types for which the search uses more of the Hessian than its diagonal."""


def scales(name: str, pattern: str, weight: Any, *passes: Any) -> Tensor:
    """Return the scales of the only quantized operator of a model."""
    tensors = quantize(session(name), only(pattern, weight, passes=passes)).graph_module.state_dict()
    (scale,) = [tensor for key, tensor in tensors.items() if key.endswith("scale")]
    assert isinstance(scale, Tensor)
    return scale


@pytest.mark.filterwarnings("ignore:the calibration data is a single sample")
@pytest.mark.parametrize(("name", "pattern"), ROUND_TRIPS | ALL_OF_H)
def test_a_file_gives_the_scales_of_the_data_bit_for_bit(
    name: str, pattern: str, files: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The input of the weight is the float model's here, because no other operator is rounded."""
    weight = (ROUND_TRIPS | ALL_OF_H)[name, pattern]
    nearest = scales(name, pattern, weight)
    read = scales(name, pattern, weight, FitScales(importance=files(name)))
    measured = scales(name, pattern, weight, FitScales())
    if (name, pattern) in ALL_OF_H:
        assert not torch.equal(read, measured)
        finish = Hessian.finish

        def without_products(self: Hessian, *, routed: bool) -> None:
            finish(self, routed=routed)
            self.h = torch.diag_embed(self.h.diagonal(dim1=-2, dim2=-1))

        monkeypatch.setattr(Hessian, "finish", without_products)
        measured = scales(name, pattern, weight, FitScales())
    assert torch.equal(read, measured)
    assert not torch.equal(read, nearest)


def write(path: Path, entries: Mapping[str, tuple[Any, Any]], kind: str | None = "imatrix") -> Path:
    """Write sums and counts as a file."""
    writer = package.GGUFWriter(path, "any")
    if kind is not None:
        writer.add_type(kind)
    for name, parts in entries.items():
        for end, part in zip(("in_sum2", "counts"), parts, strict=True):
            if part is not None:
                writer.add_tensor(f"{name}.{end}", np.asarray(part))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def floats(*shape: int, fill: float = 1.0) -> Any:
    return np.full(shape, fill, np.float32)


FOURS = QuantConfig(weight=types.Q4_1, exclude=("op:embedding",), target=Target.TORCH)


def test_weights_without_an_entry_keep_their_scales_and_are_named(tmp_path: Path) -> None:
    """As in files of llama-imatrix, which lack an entry for the head unless it is asked for one."""
    q, down = floats(1, 64), floats(1, 64)
    q[0, ::7], down[0, ::5] = 100, 0
    entries = {"blk.0.attn_q.weight": (q, floats(1, 1, fill=4)), "blk.0.ffn_down.weight": (down, floats(1, 1))}
    path = write(tmp_path / "some.gguf", entries)
    with pytest.warns(
        UserWarning, match=r"some.gguf does not describe the inputs of 6 weights, .*: .*k_proj.* and 3 more"
    ):
        qmodel = qfx.quantize(session("llama"), FOURS.replace(passes=(FitScales(importance=path),)), progress=False)
    nearest = qfx.quantize(session("llama"), FOURS, progress=False).graph_module.state_dict()
    differ = {key for key, tensor in qmodel.graph_module.state_dict().items() if not torch.equal(tensor, nearest[key])}
    layers = {key.rpartition(".weight")[0] for key in differ}
    assert layers == {"model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj"}
    record = record_of(qmodel, "FitScales")
    reasons = {change.name: change.what for change in record.changes}
    assert reasons["lm_head"] == "skipped: the importance matrix lacks an entry for lm_head.weight"
    assert "on the data it was learned from" in record.summary
    assert record.rewrites == 2


WRONG: dict[str, tuple[dict[str, tuple[Any, Any]], str]] = {
    "another model": ({"blk.9.attn_q.weight": (floats(1, 64), floats(1, 1))}, "but for no weight of LlamaForCausalLM"),
    "no entries": ({}, "invalid importance matrix: it is empty"),
    "other sizes": ({"blk.0.attn_q.weight": (floats(1, 96), floats(1, 1))}, r"1 counts and 96 sums for 64 inputs"),
    "no counts": ({"blk.0.attn_q.weight": (floats(1, 64), None)}, "F32 sums of 64 values, none counts of 0"),
    "no sums": ({"blk.0.attn_q.weight": (None, floats(1, 1))}, r"attn_q.weight \(none sums of 0 values"),
    "counts that do not divide": ({"blk.0.attn_q.weight": (floats(1, 64), floats(3, 1))}, "counts of 3"),
    "float16": ({"blk.0.attn_q.weight": (floats(1, 64).astype(np.float16), floats(1, 1))}, "F16 sums"),
    "a negative sum": ({"blk.0.attn_q.weight": (floats(1, 64, fill=-1), floats(1, 1))}, "negative or too large"),
    "not a number": ({"blk.0.attn_q.weight": (floats(1, 64, fill=np.nan), floats(1, 1))}, "negative or too large"),
    "a huge count": ({"blk.0.attn_q.weight": (floats(1, 64), floats(1, 1, fill=1e30))}, "negative or too large"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_file_that_does_not_fit_is_refused(name: str, tmp_path: Path) -> None:
    entries, message = WRONG[name]
    path = write(tmp_path / "wrong.gguf", entries)
    config = FOURS.replace(passes=(FitScales(importance=path),))
    for reads in (quantize, qfx.check):
        with pytest.raises(CheckpointError, match=rf"wrong.gguf .*{message}"):
            reads(session("llama"), config)


def test_damaged_and_foreign_files_are_refused(files: Callable[[str], Path], tmp_path: Path) -> None:
    def refused(path: Path, message: str) -> None:
        with pytest.raises(CheckpointError, match=rf"{path.name} {message}"):
            quantize(session("llama"), FOURS.replace(passes=(FitScales(importance=path),)))

    refused(tmp_path / "none.gguf", "cannot be read as a GGUF file: .*No such file")
    whole, cut = files("llama").read_bytes(), tmp_path / "cut.gguf"
    for size in (10, 100, len(whole) // 2, len(whole) - 40):
        cut.write_bytes(whole[:size])
        refused(cut, "cannot be read as a GGUF file")
    refused(write(tmp_path / "kind.gguf", {}, "model"), "is not an importance matrix: its general.type is 'model'")
    refused(write(tmp_path / "old.gguf", {}, None), "is not an importance matrix: its general.type is None")


def test_one_count_for_all_experts_and_none_for_some(tmp_path: Path) -> None:
    """Older files have one row of sums for a stack. Without any row, sums are 1, like in llama.cpp."""
    sums = torch.rand(4, 256, generator=torch.Generator().manual_seed(0))
    counts = torch.tensor([4.0, 0, 3, 1])
    entries = {
        "one": (sums.reshape(1, -1), floats(1, 1, fill=2)),
        "each": (sums * (counts > 0)[:, None], counts[:, None]),
        "zero": (floats(1, 32, fill=0), floats(1, 1, fill=0)),
    }
    moments = read_imatrix(write(tmp_path / "stacks.gguf", entries))
    assert torch.equal(moments["one"][0], sums.flatten())
    assert moments["one"][1].tolist() == [2]
    assert moments["each"][1].tolist() == counts.tolist()
    assert moments["zero"][0].tolist() == [1] * 32
    stack = ("blk.0.ffn_up_exps.weight", "experts", "*.gate_up_proj", types.Q2_K)
    alike = {}
    for kind, entry in {"row": entries["one"], "rows": (sums, floats(4, 1, fill=2))}.items():
        path = write(tmp_path / f"{kind}.gguf", {stack[0]: entry})
        alike[kind] = scales(*stack[1:], FitScales(importance=path))
    assert torch.equal(alike["row"], alike["rows"])
    path = write(tmp_path / "each.gguf", {stack[0]: entries["each"]})
    averaged = scales(*stack[1:], FitScales(importance=path))
    assert not torch.equal(averaged[1], scales(*stack[1:])[1]), "the second expert gets the average of the others"


def test_weights_that_an_earlier_pass_changed_are_named(files: Callable[[str], Path]) -> None:
    batches = [
        {"input_ids": torch.randint(1, 64, (4, 16), generator=torch.Generator().manual_seed(2))} for _ in range(4)
    ]
    config = QuantConfig(
        weight=spec(INT3),
        exclude=("op:embedding", "lm_head"),
        passes=(AWQ(only=("*.q_proj", "*.k_proj", "*.v_proj")), FitScales(importance=files("llama"))),
        target=Target.TORCH,
    )
    qmodel = quantize(MODELS["llama"](), config, batches)
    reasons = {change.name.rpartition(".")[2]: change.what for change in record_of(qmodel, "FitScales").changes}
    changed = {name for name, what in reasons.items() if what.startswith("skipped: an earlier pass changed its weight")}
    assert changed == {"q_proj", "k_proj", "v_proj"}
    assert record_of(qmodel, "AWQ").rewrites == 1


def test_a_file_needs_no_calibration_data(
    files: Callable[[str], Path], recwarn: pytest.WarningsRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One batch, with which the model is captured, gives the bits of any other data; the model does not run on it."""
    config = FOURS.replace(passes=(FitScales(importance=files("llama")),))
    monkeypatch.setattr(Streams, "advance", lambda *_: pytest.fail("a block ran"))
    other = torch.randint(1, 64, (3, 20), generator=torch.Generator().manual_seed(3))
    one, more = (
        qfx.quantize(MODELS["llama"](), config, data, progress=False)
        for data in ([{"input_ids": IDS}], [{"input_ids": other}] * 2)
    )
    assert not recwarn.list, "no advice to pass more data"
    tensors = more.graph_module.state_dict()
    assert all(torch.equal(tensor, tensors[key]) for key, tensor in one.graph_module.state_dict().items())
    learned = qfx.predict(MODELS["llama"](), FOURS.replace(passes=(FitScales(),)), [{"input_ids": other}] * 64)
    predicted = qfx.predict(MODELS["llama"](), config, [{"input_ids": other}] * 64)
    assert predicted.seconds < learned.seconds


def test_the_path_is_an_option_like_others(tmp_path: Path) -> None:
    config = FOURS.replace(passes=(FitScales(importance=tmp_path / "m.gguf"),))
    assert QuantConfig.from_yaml(config.to_yaml()) == config
    assert FitScales(importance="m.gguf") == FitScales(importance=Path("m.gguf"))
    with pytest.raises(ConfigError, match="guided=True or importance, not both"):
        FitScales(importance="m.gguf", guided=True)


def test_what_has_no_names_in_gguf_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    with pytest.raises(ExportError, match="Sequential is not a Transformers model, so GGUF lacks names"):
        qfx.export.imatrix(qfx.Session(nn.Sequential(nn.Linear(8, 4)).eval(), [rand(2, 8)]), path)
    with pytest.raises(ConfigError, match=r"write imatrix\(qfx.Session\(model, calibration_data\), path\)"):
        qfx.export.imatrix(MODELS["llama"](), path)
    assert not path.exists()
    with pytest.raises(ExportError, match="Sequential is not a Transformers model"):
        quantize(
            nn.Sequential(nn.Linear(64, 4)).eval(), FOURS.replace(passes=(FitScales(importance=path),)), [rand(2, 64)]
        )
