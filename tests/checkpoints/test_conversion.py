"""A checkpoint converted file to file has the tensors of the exported model, whatever its architecture."""

from __future__ import annotations

import filecmp
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from forked import FORKS, processes, run_program
from interruptions import convert_and_die, start_and_die
from safetensors.torch import load_file, save_file
from tiny import quantize, seeded
from torch import Tensor
from typer.testing import CliRunner

import quark_fx as qfx
from quark_fx.checkpoints.files import DTYPES
from quark_fx.command_line.app import app
from quark_fx.config.quant_config import Granularity, QuantConfig, TensorSpec
from quark_fx.conversion import convert as running
from quark_fx.conversion.names import experts, fused, roles
from quark_fx.errors import CheckpointError, ConfigError, ExportError, QuarkError
from quark_fx.numbers.formats import FP8_E4M3, INT8, UINT4
from quark_fx.plan.weights import quantize_tensor
from quark_fx.presets import FP8_DYNAMIC, MXFP8_E4M3, W4A16_RTN
from quark_fx.quantization import resolve

WIDTH = 64
_BLOCK = TensorSpec(format=FP8_E4M3, granularity=Granularity.GROUP, group_size=32)
BLOCKS = FP8_DYNAMIC.replace(weight=_BLOCK.replace(group_rows=32), input=_BLOCK.replace(dynamic=True), overrides=())
SCHEMES: dict[str, str | QuantConfig] = {
    "fp8_dynamic": "fp8_dynamic",
    "fp8 blocks": BLOCKS,
    "int8": "int8_weight_only",
    "int4": W4A16_RTN.replace(group_size=32),
    "int4, zero points": W4A16_RTN.replace(
        weight=TensorSpec(format=UINT4, granularity=Granularity.GROUP, group_size=32)
    ),
    "nvfp4a16": "nvfp4_weight_only",
    "mxfp4a16": "mxfp4_weight_only",
    "mxfp8a16": MXFP8_E4M3.replace(input=None),
}


def values(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def invented(folder: Path, *, shards: int = 1, **config: Any) -> dict[str, Tensor]:
    """Write a checkpoint of an architecture that nobody knows, and return its tensors."""
    folder.mkdir()
    tensors = {"trunk.embed_tokens.weight": values(96, WIDTH), "lm_head.weight": values(96, WIDTH, seed=1)}
    for layer in range(2):
        sizes = {"mix.wq": WIDTH, "mix.wk": 32, "mix.wv": 32, "mix.wo": WIDTH, "mlp.gate_proj": 96, "mlp.up_proj": 96}
        for seed, (name, rows) in enumerate(sizes.items()):
            tensors[f"trunk.layers.{layer}.{name}.weight"] = values(rows, WIDTH, seed=10 * layer + seed) * (seed + 1)
        tensors[f"trunk.layers.{layer}.mlp.router.weight"] = values(4, WIDTH)
        tensors[f"trunk.layers.{layer}.norm.weight"] = values(WIDTH)
        tensors[f"trunk.layers.{layer}.state.kernel"] = values(3, 5, 7)
    tensors |= {"mtp.fc.weight": values(WIDTH, 2 * WIDTH), "mtp.layers.0.wq.weight": values(WIDTH, WIDTH)}
    names = list(tensors)
    parts = [names[i::shards] for i in range(shards)]
    files = [f"part-{i}.safetensors" for i in range(shards)]
    for file, part in zip(files, parts, strict=True):
        save_file({name: tensors[name] for name in part}, folder / file)
    if shards > 1:
        index = {name: file for file, part in zip(files, parts, strict=True) for name in part}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    else:
        (folder / files[0]).rename(folder / "model.safetensors")
    model_config = {"model_type": "invented", "architectures": ["InventedForCausalLM"], "dtype": "bfloat16", **config}
    (folder / "config.json").write_text(json.dumps(model_config))
    texts = {"tokenizer.json": "{}", "chat_template.jinja": "{{ x }}", "generation_config.json": '{"top_p": 3}'}
    texts |= {"modeling_invented.py": "raise SystemExit('executed')", "preprocessor_config.json": "{}"}
    for name, text in texts.items():
        (folder / name).write_text(text)
    (folder / "extra").mkdir()
    (folder / "extra" / "template.jinja").write_text("extra")
    for name in ("pytorch_model.bin", "hf_quant_config.json"):
        (folder / name).write_text("not copied")
    return tensors


def stored(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint; its index must be exact."""
    files = sorted(folder.glob("*.safetensors"))
    parts = {file.name: load_file(file) for file in files}
    if len(files) > 1:
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        assert index["weight_map"] == {name: file for file, part in parts.items() for name in part}
        assert index["metadata"]["total_size"] == sum(t.nbytes for part in parts.values() for t in part.values())
    return {name: tensor for part in parts.values() for name, tensor in part.items()}


def description(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())["quantization_config"]  # type: ignore[no-any-return]


def decompressed(folder: Path, layer: str) -> Tensor:
    """Return the values that compressed-tensors reads for a layer."""
    package = pytest.importorskip("compressed_tensors.compressors.base")
    schema = pytest.importorskip("compressed_tensors.quantization")
    group = description(folder)["config_groups"]["group_0"]
    scheme = schema.QuantizationScheme.model_validate(group)
    tensors = {k.removeprefix(f"{layer}."): t for k, t in stored(folder).items() if k.startswith(f"{layer}.")}
    compressor = package.BaseCompressor.get_value_from_registry(group["format"])
    return compressor.decompress(tensors, scheme)["weight"]  # type: ignore[no-any-return]


def assert_equal_folders(one: Path, other: Path) -> None:
    comparison = filecmp.dircmp(one, other)
    assert not comparison.left_only + comparison.right_only + comparison.funny_files
    names = [str(file.relative_to(one)) for file in one.rglob("*") if file.is_file()]
    assert filecmp.cmpfiles(one, other, names, shallow=False)[0] == names


@pytest.mark.parametrize("name", SCHEMES)
def test_compressed_tensors_reads_the_values_of_quantize_tensor(name: str, tmp_path: Path) -> None:
    tensors = invented(tmp_path / "source")
    conversion = qfx.convert(tmp_path / "source", SCHEMES[name], tmp_path / "out", progress=False)
    written = stored(tmp_path / "out")
    assert {n: (t.dtype, tuple(t.shape)) for n, t in written.items()} == {
        n: (DTYPES[d], s) for t in conversion.tensors for n, (d, s) in t.outputs.items()
    }
    spec = resolve(SCHEMES[name]).weight
    assert spec is not None
    for layer in ("trunk.layers.0.mix.wk", "trunk.layers.1.mlp.gate_proj"):
        owner, _, leaf = layer.rpartition(".")
        group = {"wk": ("wq", "wk", "wv"), "gate_proj": ("gate_proj", "up_proj")}[leaf]
        amax = torch.stack([tensors[f"{owner}.{n}.weight"].abs().amax().float() for n in group]).amax()
        ours = quantize_tensor(tensors[f"{layer}.weight"], spec, amax=amax).dequantize()
        read = decompressed(tmp_path / "out", layer)
        torch.testing.assert_close(read, ours.to(read.dtype), rtol=0, atol=0)
        wholes = {float(written[f"{owner}.{n}.weight_global_scale"]) for n in group} if name == "nvfp4a16" else {0.0}
        assert len(wholes) == 1


def test_everything_else_is_kept(tmp_path: Path) -> None:
    tensors = invented(tmp_path / "source")
    conversion = qfx.convert(tmp_path / "source", "fp8_dynamic", tmp_path / "out", ignore=["*.wo"], progress=False)
    written = stored(tmp_path / "out")
    for name in ("mtp.fc", "mtp.layers.0.wq", "lm_head", "trunk.layers.1.mlp.router", "trunk.layers.0.mix.wo"):
        assert torch.equal(written[f"{name}.weight"], tensors[f"{name}.weight"])
        assert name in description(tmp_path / "out")["ignore"]
    assert torch.equal(written["trunk.layers.0.state.kernel"], tensors["trunk.layers.0.state.kernel"])
    assert "trunk.embed_tokens" not in description(tmp_path / "out")["ignore"]
    copied = ["tokenizer.json", "chat_template.jinja", "generation_config.json", "modeling_invented.py"]
    for name in (*copied, "preprocessor_config.json", "extra/template.jinja"):
        assert filecmp.cmp(tmp_path / "source" / name, tmp_path / "out" / name, shallow=False)
    assert conversion.left_out == ["hf_quant_config.json", "pytorch_model.bin"]
    assert not {*conversion.left_out} & {path.name for path in (tmp_path / "out").iterdir()}
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    del config["quantization_config"]
    assert config == json.loads((tmp_path / "source" / "config.json").read_text())
    assert not (tmp_path / "out.unfinished").exists()


def test_two_processes_and_a_killed_one_write_equal_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "source"
    invented(source, shards=3)
    monkeypatch.setattr(running, "_UNIT", 1)
    monkeypatch.setattr(running, "_SHARD", 1 << 15)
    qfx.convert(source, "mxfp4_weight_only", tmp_path / "one", progress=False)
    assert len(list((tmp_path / "one").glob("*.safetensors"))) > 2
    qfx.convert(source, "mxfp4_weight_only", tmp_path / "two", processes=2, progress=False)
    assert_equal_folders(tmp_path / "one", tmp_path / "two")
    context = processes()
    for count in (5, 3):
        process = context.Process(target=convert_and_die, args=(source, tmp_path / "three", count))
        process.start()
        process.join()
        assert process.exitcode == 9
    assert not (tmp_path / "three").exists()
    done = (tmp_path / "three.unfinished" / "done").read_text().split()
    assert len(set(done)) == len(done) == 8, "the second run continued"
    with (tmp_path / "three.unfinished" / "done").open("a") as log:
        log.write("1")  # half of a line
    with pytest.raises(ExportError, match="another source or scheme"):
        qfx.convert(source, "fp8_dynamic", tmp_path / "three", progress=False)
    monkeypatch.setattr(running, "_UNIT", 1 << 14)  # as in another version: finished units have other numbers
    with pytest.raises(ExportError, match="another source or scheme"):
        qfx.convert(source, "mxfp4_weight_only", tmp_path / "three", progress=False)
    monkeypatch.setattr(running, "_UNIT", 1)
    qfx.convert(source, "mxfp4_weight_only", tmp_path / "three", progress=False)
    assert_equal_folders(tmp_path / "one", tmp_path / "three")


@pytest.mark.skipif(not FORKS, reason="forks")
def test_processes_end_with_a_killed_parent() -> None:
    """One that waits for work never learned of it."""
    context = processes()
    reader, writer = context.Pipe(duplex=False)
    context.Process(target=start_and_die, args=(writer,)).start()
    writer.close()
    assert reader.poll(60), "the pipe closes when both have ended"


LLAMA = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
LLAMA |= {"num_key_value_heads": 2, "vocab_size": 80, "max_position_embeddings": 64}
IDS = torch.arange(12).reshape(2, 6)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, qfx.Session]:
    """A checkpoint that transformers reads, and its model."""
    folder = tmp_path_factory.mktemp("llama")
    model = seeded(transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA))).bfloat16()
    model.save_pretrained(folder)
    return folder, qfx.Session(model, [{"input_ids": IDS}])


@pytest.mark.parametrize("name", ["fp8_dynamic", "fp8 blocks", "int4", "nvfp4a16"])
def test_a_llama_is_what_the_export_writes(name: str, llama: tuple[Path, qfx.Session], tmp_path: Path) -> None:
    folder, session = llama
    qfx.export.huggingface(quantize(session, SCHEMES[name]), tmp_path / "exported")
    qfx.convert(folder, SCHEMES[name], tmp_path / "converted", progress=False)
    ours, theirs = stored(tmp_path / "converted"), stored(tmp_path / "exported")
    assert ours.keys() == theirs.keys()
    for key, tensor in ours.items():
        if name == "nvfp4a16" and key.endswith("scale"):  # the product counts
            pair = [f"{key.rpartition('.')[0]}.weight{end}" for end in ("_scale", "_global_scale")]
            products = [part[pair[0]].float() / part[pair[1]] for part in (ours, theirs)]
            assert torch.equal(*products), key
        else:
            assert tensor.dtype == theirs[key].dtype
            assert torch.equal(tensor.view(torch.uint8), theirs[key].view(torch.uint8)), key
    assert description(tmp_path / "converted") == description(tmp_path / "exported")
    if name == "int4":
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "converted", dtype=torch.bfloat16)
        with torch.no_grad():
            assert model(input_ids=IDS).logits.isfinite().all()


TIED: dict[str, tuple[str, dict[str, Any]]] = {
    "lm_head": ("LlamaForCausalLM", {"intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 2}),
    "proj_out": (
        "WhisperForConditionalGeneration",
        {
            "d_model": 64,
            **dict.fromkeys(("encoder_layers", "decoder_layers"), 1),
            **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2),
            **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 96),
            **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"), 1),
        },
    ),
    "cls.predictions.decoder": ("BertForMaskedLM", {"num_hidden_layers": 1, "num_attention_heads": 2}),
    "lm_head.decoder": ("RobertaForMaskedLM", {"num_hidden_layers": 1, "num_attention_heads": 2}),
}
"""Classes with a head that is the embedding, by its name."""


@pytest.mark.parametrize("head", TIED)
def test_a_head_that_is_the_embedding_stays_in_float(head: str, tmp_path: Path) -> None:
    kind, sizes = TIED[head]
    cls = getattr(transformers, kind)
    config = cls.config_class(**{"hidden_size": 64, **sizes}, vocab_size=96, tie_word_embeddings=True)
    seeded(cls(config)).save_pretrained(tmp_path / "source")
    assert f"{head}.weight" not in stored(tmp_path / "source")
    qfx.convert(tmp_path / "source", "int8_weight_only", tmp_path / "out", progress=False)
    loaded, told = cls.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not told["missing_keys"]
    layer = loaded.get_submodule(head)
    assert layer.weight is loaded.get_input_embeddings().weight
    assert not hasattr(layer, "quantization_scheme")


def test_a_dry_run_prints_the_plan_and_writes_nothing(tmp_path: Path) -> None:
    invented(tmp_path / "source")
    line = ["convert", str(tmp_path / "source"), "--scheme", "nvfp4_weight_only", "--output", str(tmp_path / "out")]
    result = CliRunner().invoke(app, [*line, "--ignore", "*.wo", "--dry-run", "--json"])
    assert result.exit_code == 0, result.output
    rows = {row["tensor"]: row for row in json.loads(result.stdout)["tensors"]}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]
    row = rows["trunk.layers.0.mix.wq.weight"]
    assert row["shared with"] == "trunk.layers.0.mix.wk.weight, trunk.layers.0.mix.wv.weight"
    assert row["bytes before"], row["bytes after"] == (8192, 4096 // 2 + 4096 // 16 + 4)
    assert rows["trunk.layers.0.mix.wo.weight"]["scheme"] == "stays: ignored by '*.wo'"
    assert rows["mtp.fc.weight"]["bytes after"] == 2 * WIDTH * 2 * WIDTH
    assert CliRunner().invoke(app, [*line, "--dry-run"]).exit_code == 0


def _truncated(source: Path) -> None:
    file = source / "part-0.safetensors"
    file.write_bytes(file.read_bytes()[:-8])


def _missing(source: Path) -> None:
    (source / "part-1.safetensors").unlink()


def _leaving(source: Path) -> None:
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../../a.safetensors"}}))


def _nothing(source: Path) -> None:
    (source / "config.json").unlink()


def _nested(source: Path) -> None:
    (source / "config.json").write_text("[" * 100 + "]" * 100)


def _aqlm(source: Path) -> None:
    (source / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "aqlm", "bits": 4}}))


def _stray_method(source: Path) -> None:
    (source / "config.json").write_text(json.dumps({"quantization_config": "fp8"}))


def _codes(source: Path) -> None:
    file = source / "part-0.safetensors"
    save_file({"a.weight": torch.zeros(4, 4, dtype=torch.float8_e4m3fn), **load_file(file)}, file)
    index = json.loads((source / "model.safetensors.index.json").read_text())
    index["weight_map"]["a.weight"] = file.name
    (source / "model.safetensors.index.json").write_text(json.dumps(index))


def _contradicting(source: Path) -> None:
    index = json.loads((source / "model.safetensors.index.json").read_text())
    index["weight_map"]["absent.weight"] = "part-0.safetensors"
    (source / "model.safetensors.index.json").write_text(json.dumps(index))


def _twice(source: Path) -> None:
    parts = [load_file(source / f"part-{i}.safetensors") for i in range(2)]
    save_file({**parts[0], **parts[1]}, source / "part-1.safetensors")


def _empty(source: Path) -> None:
    for file in source.glob("*.safetensors*"):
        file.unlink()
    save_file({}, source / "model.safetensors")


def _infinite(source: Path) -> None:
    file = source / "part-0.safetensors"
    tensors = load_file(file)
    next(t for n, t in tensors.items() if ".mlp.up" in n or ".mix." in n)[0, 0] = torch.nan
    save_file(tensors, file)


DAMAGE = {
    _truncated: "damaged or truncated.*fetch it again",
    _missing: "part-1.safetensors is missing; fetch it again",
    _leaving: "names the shard .* which is not a safetensors file next to it",
    _nothing: "config.json cannot be read.*pass the directory",
    _nested: "config.json cannot be read.*nested",
    _aqlm: "quantized by 'aqlm'.*pass the original float checkpoint",
    _stray_method: "quantized by .*pass the original float checkpoint",
    _codes: "holds codes without scales.*a.weight.*pass the float checkpoint",
    _contradicting: "part-0.safetensors lacks absent.weight, which the index lists for it; fetch the shard again",
    _twice: "part-1.safetensors and .*part-0.safetensors both hold .*; remove one of them",
    _empty: "holds 0 tensors, but none is a float matrix called .*weight; pass the directory",
    _infinite: "cannot be quantized.*not finite.*ignore",
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_source_that_cannot_be_read_is_refused(damage: Any, tmp_path: Path) -> None:
    invented(tmp_path / "source", shards=2)
    damage(tmp_path / "source")
    with pytest.raises(CheckpointError, match=DAMAGE[damage]):
        qfx.convert(tmp_path / "source", "fp8_dynamic", tmp_path / "out", progress=False)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_outputs_and_schemes_that_cannot_be_are_refused(tmp_path: Path) -> None:
    source = tmp_path / "source"
    invented(source)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    (tmp_path / "out.unfinished").mkdir()
    (tmp_path / "out.unfinished" / "mine").touch()
    refused: list[tuple[Any, Any, dict[str, Any], str]] = [
        ("fp8_dynamic", source, {}, "contain each other; choose another directory"),
        ("fp8_dynamic", source / "out", {}, "contain each other"),
        ("fp8_dynamic", tmp_path, {}, "contain each other"),
        ("fp8_dynamic", tmp_path / "full", {}, "exists already; remove it"),
        ("fp8_dynamic", tmp_path / "out", {}, "is in the way"),
        ("w4a16_gptq", tmp_path / "new", {}, "needs calibration data.*use quantize, or choose .*fp8_dynamic"),
        ("int8_static", tmp_path / "new", {}, "needs calibration data"),
        ("fp8_dynamik", tmp_path / "new", {}, "fp8_dynamic"),
        ("fp8_dynamic", tmp_path / "new", {"ignore": ["re:("]}, "not a regular expression"),
        ("fp8_dynamic", tmp_path / "new", {"ignore": ["*"]}, "nothing .* is left to quantize"),
        ("fp8_dynamic", tmp_path / "new", {"ignore": "*.wo"}, r"ignore must be a list of patterns.*not '\*[.]wo'"),
        ("fp8_dynamic", tmp_path / "new", {"processes": 0}, "processes"),
        (W4A16_RTN.replace(group_size=48), tmp_path / "new", {}, "not a multiple of the group size 48.*ignore="),
    ]
    for scheme, output, options, message in refused:
        with pytest.raises(QuarkError, match=f"(?s){message}") as caught:
            qfx.convert(source, scheme, output, progress=False, **options)
        assert isinstance(caught.value, ConfigError | ExportError)
    with pytest.warns(UserWarning, match=r"no layer matches '\*nothing\*' in ignore"):
        qfx.convert(source, "fp8_dynamic", tmp_path / "new", ignore=["*nothing*"], dry_run=True)
    (tmp_path / "empty").mkdir()
    qfx.convert(source, "fp8_dynamic", tmp_path / "empty", progress=False)
    assert (tmp_path / "empty" / "config.json").is_file()


def test_tensors_of_unusual_types_are_kept_or_rounded_by_their_type(tmp_path: Path) -> None:
    tensors = invented(tmp_path / "source")
    copies = {
        "masks.weight": torch.eye(4).bool(),
        "ids.weight": torch.ones(4, 4, dtype=torch.int64),
        "steps.weight": torch.ones(4, dtype=torch.int8),
    }
    copies |= {"none.weight": torch.zeros(0, 4), "scale.weight": torch.tensor(2.0).double()}
    rounded = {"wide.weight": values(32, WIDTH).double(), "narrow.weight": values(32, WIDTH).half()}
    save_file(tensors | copies | rounded, tmp_path / "source" / "model.safetensors")
    qfx.convert(tmp_path / "source", "fp8_dynamic", tmp_path / "out", progress=False)
    written = stored(tmp_path / "out")
    for name, tensor in copies.items():
        assert torch.equal(written[name], tensor)
    assert {written[name].dtype for name in rounded} == {torch.float8_e4m3fn}


def test_a_copy_of_a_directory_is_not_read_twice(tmp_path: Path) -> None:
    invented(tmp_path / "source")
    (tmp_path / "source" / "loop").symlink_to(tmp_path / "source", target_is_directory=True)
    os.mkfifo(tmp_path / "source" / "pipe")
    conversion = qfx.convert(tmp_path / "source", "fp8_dynamic", tmp_path / "out", progress=False)
    assert "pipe" in conversion.left_out
    assert not (tmp_path / "out" / "loop").exists()


def quantized_source(folder: Path, kind: str) -> dict[str, Tensor]:
    """Write a quantized checkpoint, and return the values of its layers."""
    if kind == "fp8":  # as DeepSeek-V3 stores its layers: the last blocks are smaller
        tensors = invented(folder)
        layers = {n: t for n, t in tensors.items() if "layers" in n and n.endswith(("wq.weight", "up_proj.weight"))}
        decoded = dict[str, Tensor]()
        for name, tensor in layers.items():
            rows, columns = (-(-n // 40) for n in tensor.shape)
            scale = torch.rand(rows, columns, generator=torch.Generator().manual_seed(rows)) + 0.5
            spread = scale.repeat_interleave(40, 0)[: len(tensor)].repeat_interleave(40, 1)[:, : tensor.shape[1]]
            codes = (tensor.float() / spread).to(torch.float8_e4m3fn)
            tensors |= {name: codes, f"{name}_scale_inv": scale}
            decoded[name] = codes.float() * spread
        save_file(tensors, folder / "model.safetensors")
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [40, 40]}
        (folder / "config.json").write_text(json.dumps(config))
        return decoded
    tensors = invented(folder.with_name("float"))
    conversion = qfx.convert(folder.with_name("float"), SCHEMES[kind], folder, progress=False)
    return {
        t.name: decompressed(folder, t.name.removesuffix(".weight")).float()
        for t in conversion.tensors
        if t.weight is not None
    }


@pytest.mark.parametrize(
    "kind", ["fp8", "int8", "int4", "int4, zero points", "fp8_dynamic", "fp8 blocks", "mxfp4a16", "nvfp4a16"]
)
def test_a_quantized_source_is_decoded(kind: str, tmp_path: Path) -> None:
    expected = quantized_source(tmp_path / "source", kind)
    spec = TensorSpec(format=INT8, granularity=Granularity.CHANNEL)
    conversion = qfx.convert(
        tmp_path / "source", QuantConfig(weight=spec), tmp_path / "out", ignore=["*.0.*up_proj"], progress=False
    )
    assert "was already rounded" in conversion.notes[0]
    written = stored(tmp_path / "out")
    assert not [name for name in written if name.endswith(("scale_inv", "zero_point"))]
    name = "trunk.layers.1.mix.wq"
    ours = quantize_tensor(expected[f"{name}.weight"], spec).dequantize()
    if kind != "nvfp4a16":  # compressed-tensors rounds its values to bfloat16
        assert torch.equal(decompressed(tmp_path / "out", name), ours)
    copy = written["trunk.layers.0.mlp.up_proj.weight"]
    assert torch.equal(copy, expected["trunk.layers.0.mlp.up_proj.weight"].bfloat16())
    for name, tensor in written.items():
        if name.startswith("mtp.") and kind == "fp8":
            assert tensor.dtype == torch.bfloat16


_PEAK = """
import sys
from pathlib import Path
import torch
from safetensors.torch import save_file
import quark_fx as qfx
from quark_fx.system.memory import short_memory

def status(name):
    return int(Path("/proc/self/status").read_text().split(f"{name}:")[1].split()[0]) << 10

folder = Path(sys.argv[1])
with short_memory():  # blocks that are free do not count
    for count in (1, 96):
        values = torch.randint(-99, 99, (count, 512, 1024), dtype=torch.int8).bfloat16()
        tensors = {f"layers.{i}.down_proj.weight": matrix.clone() for i, matrix in enumerate(values)}
        save_file(tensors, folder / "model.safetensors")
        del tensors, values
        before = status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")
        qfx.convert(folder, "fp8_dynamic", folder.with_name(f"out-{count}"), progress=False)
        peak = status("VmHWM") - before
print(peak)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_does_not_grow_with_the_checkpoint(tmp_path: Path) -> None:
    """The peak is a few times the largest tensor, 1 MiB, not the 96 MiB of all, nor the 48 MiB of their codes.

    The conversion of the first tensor, which loads code, does not count.
    """
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "config.json").write_text("{}")
    done = run_program(_PEAK, tmp_path / "source")
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < (tmp_path / "source" / "model.safetensors").stat().st_size // 3


@pytest.mark.parametrize("transposed", [False, True])
def test_stacks_of_experts_become_matrices(transposed: bool, tmp_path: Path) -> None:
    invented(tmp_path / "source")
    path = "trunk.layers.0.mlp.experts"
    gate, up, down = values(3, 96, WIDTH), values(3, 96, WIDTH, seed=1), values(3, WIDTH, 96, seed=2)
    stacks = {f"{path}.gate_up_proj": torch.cat([gate, up], 1), f"{path}.down_proj": down}
    stacks |= {name.replace("trunk", "mtp"): stack for name, stack in stacks.items()}
    stacks = {name: (stack.mT if transposed else stack).contiguous().clone() for name, stack in stacks.items()}
    save_file(load_file(tmp_path / "source" / "model.safetensors") | stacks, tmp_path / "source" / "model.safetensors")
    qfx.convert(tmp_path / "source", "nvfp4_weight_only", tmp_path / "out", progress=False)
    written, spec = stored(tmp_path / "out"), resolve("nvfp4_weight_only").weight
    assert spec is not None
    assert not [name for name in written if "trunk" in name and name in stacks]
    for index in range(3):
        amax = torch.stack([gate[index], up[index]]).abs().amax().float()
        for part, stack in (("gate_proj", gate), ("up_proj", up), ("down_proj", down)):
            magnitude = stack[index].abs().amax().float() if part == "down_proj" else amax
            ours = quantize_tensor(stack[index], spec, amax=magnitude).dequantize()
            read = decompressed(tmp_path / "out", f"{path}.{index}.{part}")
            assert torch.equal(read, ours.to(read.dtype))
    for name, stack in stacks.items():
        if name.startswith("mtp"):
            assert torch.equal(written[name], stack)
    qfx.convert(tmp_path / "source", "fp8_dynamic", tmp_path / "kept", ignore=["*.experts*"], progress=False)
    assert torch.equal(stored(tmp_path / "kept")[f"{path}.down_proj"], stacks[f"{path}.down_proj"])
    assert f"re:^{path.replace('.', '[.]')}[.]" in description(tmp_path / "kept")["ignore"]


def test_layouts_of_experts_are_told_from_shapes_or_not_at_all() -> None:
    def found(gate_up: tuple[int, ...], down: tuple[int, ...], **others: tuple[int, ...]) -> set[bool]:
        stacks = experts({"e.gate_up_proj": gate_up, "e.down_proj": down, **{f"e.{k}": v for k, v in others.items()}})
        return {place.transposed for matrices in stacks.values() for place in matrices.values()}

    assert found((2, 8, 6), (2, 6, 4)) == {False}
    assert found((2, 6, 8), (2, 4, 6)) == {True}
    assert found((2, 8, 8), (2, 8, 4)) == {False}
    assert not found((2, 8, 4), (2, 4, 4)) - {False}
    assert not found((2, 8, 6), (2, 6, 4), gate_up_proj_bias=(2, 8))
    assert not found((2, 8, 6), (3, 6, 4))
    assert not found((2, 8, 6), (2, 4, 6))
    assert not found((8, 6), (6, 4))


def test_a_source_of_transposed_matrices_is_refused(tmp_path: Path) -> None:
    """The square matrix of attn.c_proj counts, too: mlp.c_proj has its name."""
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 2, "vocab_size": 80, "n_positions": 16}
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).save_pretrained(tmp_path / "source")
    with pytest.raises(ExportError, match=r"\(inputs, outputs\)[^\n]*call quark_fx.quantize") as caught:
        qfx.convert(tmp_path / "source", "fp8_dynamic", tmp_path / "out", dry_run=True)
    for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"):
        assert f"transformer.h.1.{name}: " in str(caught.value)
    ignore = ["*.c_attn", "*.c_proj", "*.c_fc"]
    with pytest.raises(ConfigError, match=r"nothing .* is left to quantize"):
        qfx.convert(tmp_path / "source", "fp8_dynamic", tmp_path / "out", ignore=ignore, dry_run=True)


def test_biases_of_other_sources_tell_no_transposed_matrix(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(**LLAMA, attention_bias=True, mlp_bias=True)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "llama")
    assert qfx.convert(tmp_path / "llama", "fp8_dynamic", tmp_path / "out", dry_run=True).tensors
    tensors = invented(tmp_path / "source")
    # Every gate_proj has 96 rows, 64 columns, and a bias that is added to its input; wk has a bias of both lengths.
    tensors |= {f"trunk.layers.{i}.mlp.gate_proj.bias": values(WIDTH) for i in range(2)}
    tensors |= {"trunk.layers.0.mix.wk.bias": values(WIDTH), "trunk.layers.1.mix.wk.bias": values(32)}
    save_file(tensors, tmp_path / "source" / "model.safetensors")
    assert qfx.convert(tmp_path / "source", "fp8_dynamic", tmp_path / "out", dry_run=True).tensors


def test_names_tell_roles_and_fused_layers() -> None:
    shapes = {
        "model.layers.3.mlp.gate": (4, 8),
        "model.layers.3.mlp.experts.0.gate_proj": (8, 8),
        "model.layers.4.mlp.gate": (32, 8),
        "model.layers.4.mlp.up": (32, 8),
        "model.layers.5.mlp.up_proj": (8, 8),
        "visual.layers.5.mlp.up_proj": (8, 8),
        "model.layers.1.self_attn.q_a_proj": (8, 8),
        "model.layers.1.self_attn.kv_a_proj_with_mqa": (9, 8),
        "model.layers.1.self_attn.q_proj": (8, 8),
        "model.layers.1.self_attn.k_proj": (8, 4),
        "output": (99, 8),
        "score": (2, 8),
        "transformer.wte": (99, 8),
    }
    config = {"vision_config": {"num_hidden_layers": 2}}
    config |= {"text_config": {"num_hidden_layers": 5, "num_nextn_predict_layers": 1, "vocab_size": 99}}
    assert roles(shapes, config) == {
        "model.layers.3.mlp.gate": "router",
        "model.layers.5.mlp.up_proj": "draft",
        "output": "head",
        "score": "head",
        "transformer.wte": "embedding",
    }
    pair = ("model.layers.1.self_attn.q_a_proj", "model.layers.1.self_attn.kv_a_proj_with_mqa")
    assert fused(shapes) == dict.fromkeys(pair, pair)


def test_fused_layers_stay_in_float_together(tmp_path: Path) -> None:
    invented(tmp_path / "source")
    conversion = qfx.convert(tmp_path / "source", "fp8_dynamic", tmp_path / "out", ignore=["*.0.*.wk"], dry_run=True)
    reasons = {t.name: t.reason for t in conversion.tensors if "mix" in t.name and t.reason}
    assert reasons == {
        "trunk.layers.0.mix.wk.weight": "ignored by '*.0.*.wk'",
        "trunk.layers.0.mix.wq.weight": "fused with trunk.layers.0.mix.wk, which stays in float",
        "trunk.layers.0.mix.wv.weight": "fused with trunk.layers.0.mix.wk, which stays in float",
    }
