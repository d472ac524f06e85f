"""One tool quantizes one language model in a process of its own; started by `benchmarks.language_peers`.

    peer/bin/python -m benchmarks.peers.language job.json

A peer's environment needs transformers, safetensors and the peer, not quark_fx, which is one of the tools itself. A job
is a JSON object; paths in it are relative to its own folder.

    model     folder of a `transformers` checkpoint with a tokenizer
    tokens    safetensors file of `calibration`, token ids `(windows, length)`; perhaps of `held_out`, likewise
    output    folder to write to, made if missing
    batch     windows in a calibration batch
    weights   `bits`, `group` and `symmetric` of integer weights; null: the tool's options say what they are
    tool      a key of `TOOLS`
    options   of that tool
    written   whether the tool writes a checkpoint, and nothing else is taken from it

In the output folder a worker writes

    weights.safetensors  the checkpoint's tensors under the same names, float32: weights `scale * code`; not where there
                         are held-out windows
    checkpoint           what the tool writes, instead of the files above and below, where the job says so
    logits.safetensors   `quantized`: of the first window, by the model as the tool leaves it; where there are held-out
                         windows, `held_out`: of these, in float16
    result.json          `peak_mib` of resident memory until it had quantized, and `versions`
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from benchmarks.peers.worker import work

Found = tuple[Mapping[str, Tensor], nn.Module]
"""The tensors of the checkpoint after quantization, and what computes with them."""


@dataclass(frozen=True)
class Job:
    """A job, its tokens read.

    Attributes:
        folder: of the checkpoint.
        batches: of token ids, `(windows, length)`.
        weights: `bits`, `group` and `symmetric` of integer weights; None if the options say what they are.
        options: of the tool.
        reads_weights: whether the tensors that the tool leaves are read; otherwise its model predicts.
        checkpoint: folder that the tool writes its checkpoint to; None if it writes none.
        peak: MiB of resident memory, the most until the tool had quantized; taken by `quantized`.
    """

    folder: Path
    batches: list[Tensor]
    weights: Mapping[str, Any] | None
    options: Mapping[str, Any]
    reads_weights: bool = True
    checkpoint: Path | None = None
    peak: list[float] = field(default_factory=list)

    def quantized(self) -> None:
        """Note the peak of memory before weights are taken out of what the tool left."""
        self.peak.append(peak_mib())

    def keywords(self) -> list[dict[str, Tensor]]:
        """Return the batches as keywords of a model, with masks of ones."""
        return [{"input_ids": batch, "attention_mask": torch.ones_like(batch)} for batch in self.batches]

    def model(self) -> nn.Module:
        """Load the checkpoint."""
        from transformers import AutoModelForCausalLM

        model: nn.Module = AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32).eval()
        return model

    def kept(self) -> dict[str, Tensor]:
        """Return the tensors of the checkpoint that are to stay in float."""
        return {name: t for name, t in self.model().state_dict().items() if not name.endswith("_proj.weight")}

    def tokenizer(self) -> Any:
        """Load the tokenizer."""
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.folder)


def quark_fx(job: Job) -> Found:
    """Quantize with a `preset`, by default `w4a16_rtn`, `passes` (names and options) after its own, and `symmetry`.

    `instead` maps the name of a pass of the preset to the passes that replace it; `"same"` keeps it. `windows` are the
    first ones that it calibrates on; default: all. `blocks` is the size of groups of channels and rows of weights.
    With `convert`, the checkpoint is converted without a model.
    """
    import quark_fx as qfx
    from quark_fx.graph.pass_manager import pass_from_dict

    base = qfx.presets.PRESETS[job.options.get("preset", "w4a16_rtn")]
    assert base.weight is not None
    fields: dict[str, Any] = {name: job.options[name] for name in ("symmetry",) if name in job.options}
    if job.weights is not None:
        fields |= {"format": f"int{job.weights['bits']}", "group_size": job.weights["group"]}
        fields |= {} if job.weights["symmetric"] else {"symmetry": "asymmetric"}
    config = base.replace(weight=base.weight.replace(**fields))
    if "blocks" in job.options:
        size = job.options["blocks"]
        assert config.input is not None
        weight = base.weight.replace(group_size=size, group_rows=size)
        config = config.replace(weight=weight, input=config.input.replace(group_size=size))
    if job.options.get("convert"):
        assert job.checkpoint is not None
        qfx.convert(job.folder, config, job.checkpoint, progress=False)
        job.quantized()
        return {}, nn.Module()
    instead = job.options.get("instead", {})
    if unknown := instead.keys() - {type(one).__name__ for one in base.passes}:
        raise ValueError(f"the preset has no {', '.join(sorted(unknown))}")
    kept = (
        own if one == "same" else pass_from_dict(one)
        for own in base.passes
        for one in instead.get(type(own).__name__, ("same",))
    )
    passes = (*kept, *map(pass_from_dict, job.options.get("passes", ())))
    config = config.replace(passes=passes)
    model = job.model()
    text = torch.cat(list(job.batches))[: job.options.get("windows")]
    batches = [{"input_ids": batch} for batch in text.split(len(job.batches[0]))]
    qmodel = qfx.quantize(model, config, batches, progress=False)
    job.quantized()
    if job.checkpoint is not None:
        qfx.export.huggingface(qmodel, job.checkpoint)
    if not job.reads_weights:
        return {}, qmodel
    eager = qmodel.eager()
    return {name: _attribute(eager, name) for name in model.state_dict()}, qmodel


def _attribute(model: nn.Module, name: str) -> Tensor:
    owner, _, leaf = name.rpartition(".")
    found: Tensor = getattr(model.get_submodule(owner), leaf)
    return found


def llm_compressor(job: Job) -> Found:
    """Run `oneshot` with a recipe of `awq` and `smoothquant` or not, then `gptq` or not; `arguments` go to `oneshot`.

    `spinquant` lists rotations before these. `scheme` names one of its own; without it weights are those of the job,
    and `activations` the arguments of activations that are measured per token at run time. `blocks` are FP8 weights and
    activations in blocks of another size than 128. Without calibration data, `data_free` runs `oneshot` without a
    dataset, and `model_free` rounds the checkpoint without a model.
    """
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from llmcompressor import oneshot  # type: ignore[import-not-found]
    from llmcompressor.modifiers.gptq import GPTQModifier  # type: ignore[import-not-found]
    from llmcompressor.modifiers.quantization import QuantizationModifier  # type: ignore[import-not-found]
    from llmcompressor.modifiers.transform.awq import AWQModifier  # type: ignore[import-not-found]
    from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier  # type: ignore[import-not-found]
    from llmcompressor.modifiers.transform.spinquant import SpinQuantModifier  # type: ignore[import-not-found]
    from llmcompressor.pipelines.cache import IntermediatesCache  # type: ignore[import-not-found]

    # Pinned memory needs an accelerator, and its search pins without asking whether there is one.
    IntermediatesCache.pin_memory = lambda *_, **__: None
    target: dict[str, Any] = {"ignore": ["lm_head"]}
    if "blocks" in job.options:
        size, eight = job.options["blocks"], {"num_bits": 8, "type": "float"}
        weights = QuantizationArgs(**eight, strategy="block", block_structure=[size, size])
        inputs = QuantizationArgs(**eight, strategy="group", group_size=size, dynamic=True)
        scheme = QuantizationScheme(targets=["Linear"], weights=weights, input_activations=inputs)
        target |= {"config_groups": {"group_0": scheme}}
    elif job.weights is None:
        target |= {"targets": "Linear", "scheme": job.options["scheme"]}
    else:
        grid = {"num_bits": job.weights["bits"], "symmetric": job.weights["symmetric"]}
        weights = QuantizationArgs(**grid, strategy="group", group_size=job.weights["group"])
        inputs = None
        if "activations" in job.options:
            inputs = QuantizationArgs(**job.options["activations"], strategy="token", dynamic=True)
        scheme = QuantizationScheme(targets=["Linear"], weights=weights, input_activations=inputs)
        target |= {"config_groups": {"group_0": scheme}}
    if job.options.get("model_free"):
        from llmcompressor import model_free_ptq

        # It goes by names alone, and an embedding is called `*.weight`, too.
        ignore = ["lm_head", "model.embed_tokens"]
        model_free_ptq(job.folder, job.checkpoint, scheme=scheme, ignore=ignore, device="cpu")
        job.quantized()
        return {}, nn.Module()
    rotations = job.options.get("spinquant")
    recipe = [SpinQuantModifier(rotations=rotations, transform_type="random-hadamard")] if rotations else []
    recipe += [AWQModifier()] if job.options.get("awq") else []
    recipe += [SmoothQuantModifier()] if job.options.get("smoothquant") else []
    recipe.append(GPTQModifier(**target) if job.options.get("gptq") else QuantizationModifier(**target))
    model, batches = job.model(), job.keywords()
    data: dict[str, Any] = {
        "dataset": torch.utils.data.DataLoader(batches, batch_size=None),  # type: ignore[arg-type]
        "num_calibration_samples": len(batches),
    }
    data = {} if job.options.get("data_free") else data
    oneshot(model=model, tokenizer=job.tokenizer(), recipe=recipe, **data, **job.options.get("arguments", {}))
    job.quantized()
    if job.checkpoint is not None:
        model.save_pretrained(job.checkpoint, save_compressed=True)  # type: ignore[operator]
        return {}, model
    tensors = {name: tensor for name, tensor in model.state_dict().items() if "_proj.weight_" not in name}
    for name, module in model.named_modules():
        scheme = getattr(module, "quantization_scheme", None)
        if scheme is not None:
            scales = module.weight_scale, module.weight_zero_point
            unit = getattr(module, "weight_global_scale", None)
            tensors[f"{name}.weight"] = fake_quantize(module.weight, *scales, scheme.weights, global_scale=unit)
    return tensors, model


def gptqmodel(job: Job) -> Found:
    """Quantize with the fields of `QuantizeConfig` among the options, `gptaq` for a strength of its own."""
    # It divides the cores among its pools, and two or less leave none for one of them.
    os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")
    from gptqmodel import BACKEND, GPTQModel, QuantizeConfig  # type: ignore[import-not-found]
    from gptqmodel.quantization.config import GPTAQConfig  # type: ignore[import-not-found]
    from gptqmodel.utils.model import convert_gptq_v1_to_v2_format_module  # type: ignore[import-not-found]

    options = dict(job.options)
    if "gptaq" in options:
        options["gptaq"] = GPTAQConfig(alpha=options["gptaq"], device="cpu")
    assert job.weights is not None
    bits, group, symmetric = (job.weights[name] for name in ("bits", "group", "symmetric"))
    kept = {"device": "cpu", "offload_to_disk": False}
    config = QuantizeConfig(bits=bits, group_size=group, sym=symmetric, **kept, **options)
    model = GPTQModel.load(str(job.folder), config, dtype=torch.float32, backend=BACKEND.TORCH)
    rows = [{"input_ids": row, "attention_mask": torch.ones_like(row)} for batch in job.batches for row in batch]
    model.quantize(rows, batch_size=len(job.batches[0]), backend=BACKEND.TORCH)
    job.quantized()
    found: nn.Module = model.model
    tensors = {}
    for name, module in found.named_modules():
        if hasattr(module, "dequantize_weight"):
            # Zero points are still those of the checkpoint, less one. Not `post_init`, which compiles the kernels.
            if module.qzero_format() == 1:
                convert_gptq_v1_to_v2_format_module(module, bits=bits, pack_dtype=torch.int32)
            module._init_wf_unsqueeze_buffers()
            module.scales = module.scales.float()
            tensors[f"{name}.weight"] = module.dequantize_weight().T
        else:
            tensors |= {f"{name}.{leaf}": tensor for leaf, tensor in module.named_parameters(recurse=False)}
    return tensors, found


def auto_round(job: Job) -> Found:
    """Learn the rounding in `iters` steps for each block; where the job has no weights, of a `scheme` of its own."""
    from auto_round import AutoRound  # type: ignore[import-not-found]

    model, batches = job.model(), job.keywords()
    windows, length = sum(map(len, job.batches)), job.batches[0].shape[1]
    if job.weights is None:
        scheme = {"scheme": job.options["scheme"]}
    else:
        bits, group, symmetric = (job.weights[name] for name in ("bits", "group", "symmetric"))
        scheme = {"scheme": f"W{bits}A16", "bits": bits, "group_size": group, "sym": symmetric}
    learner = AutoRound(
        model,
        job.tokenizer(),
        **scheme,
        dataset=batches,
        nsamples=windows,
        seqlen=length,
        batch_size=len(job.batches[0]),
        device_map="cpu",
        iters=job.options["iters"],
    )
    quantized, _ = learner.quantize()
    job.quantized()
    # What it does not quantize comes back in bfloat16, which its checkpoints need not have.
    return {**quantized.state_dict(), **job.kept()}, quantized


def modelopt(job: Job) -> Found:
    """Calibrate with `algorithm`; scales of inputs, if it leaves any, go into the layers before."""
    import modelopt.torch.quantization as mtq  # type: ignore[import-not-found]
    from modelopt.torch.export.quant_utils import fuse_prequant_to_linear  # type: ignore[import-not-found]
    from modelopt.torch.export.unified_export_hf import (  # type: ignore[import-not-found]
        requantize_resmooth_fused_llm_layers,
    )

    def calibrate(model: nn.Module) -> None:
        for batch in job.keywords():
            model(**batch)

    assert job.weights == {"bits": 4, "group": 128, "symmetric": True}, "its configuration of int4"
    model = job.model()
    mtq.quantize(model, {**mtq.INT4_BLOCKWISE_WEIGHT_ONLY_CFG, "algorithm": job.options["algorithm"]}, calibrate)
    # Its export of int4 would leave those of `o_proj` and `down_proj` in the checkpoint, beside the weights.
    fuse_prequant_to_linear(model, fuse_grouped_heads=True)
    requantize_resmooth_fused_llm_layers(model)
    job.quantized()
    tensors = {name: tensor for name, tensor in model.state_dict().items() if "_quantizer." not in name}
    for name, module in model.named_modules():
        quantizer = getattr(module, "weight_quantizer", None)
        if quantizer is not None and quantizer.is_enabled:
            tensors[f"{name}.weight"] = quantizer(module.weight)
    return tensors, model


def amd_quark(job: Job) -> Found:
    """Run `algorithm`, one or several, as its template for Llama sets them up; the job has weights or a `scheme`."""
    from quark.torch import LLMTemplate, ModelQuantizer  # type: ignore[import-not-found]

    if job.weights is None:
        scheme = job.options["scheme"]
    else:
        assert job.weights["bits"] == 4, "its templates have no others"
        scheme = f"{'' if job.weights['symmetric'] else 'u'}int4_wo_{job.weights['group']}"
    config = LLMTemplate.get("llama").get_config(scheme=scheme, algorithm=job.options["algorithm"])
    windows: Any = torch.cat(job.batches)
    batches = torch.utils.data.DataLoader(windows, batch_size=len(job.batches[0]))
    quantizer = ModelQuantizer(config)
    model: nn.Module = quantizer.freeze(quantizer.quantize_model(job.model(), batches))
    job.quantized()
    return {name: tensor for name, tensor in model.state_dict().items() if "_quantizer." not in name}, model


def neural_compressor(job: Job) -> Found:
    """Run GPTQ with the fields of `GPTQConfig` among the options; of a checkpoint on disk, as it asks for."""
    from neural_compressor.torch.algorithms.weight_only.modules import (  # type: ignore[import-not-found]
        INCWeightOnlyLinear,
    )
    from neural_compressor.torch.quantization import (  # type: ignore[import-not-found]
        GPTQConfig,
        convert,
        prepare,
    )

    assert job.weights is not None
    bits, group, symmetric = (job.weights[name] for name in ("bits", "group", "symmetric"))
    grid = {"bits": bits, "group_size": group, "use_sym": symmetric}
    config = GPTQConfig(**grid, model_path=str(job.folder), **job.options)
    prepared = prepare(job.model(), config)
    for batch in job.batches:
        prepared(input_ids=batch)
    model: nn.Module = convert(prepared)
    job.quantized()
    coded = {n: module for n, module in model.named_modules() if isinstance(module, INCWeightOnlyLinear)}
    return {**job.kept(), **{f"{name}.weight": module.recover() for name, module in coded.items()}}, model


TOOLS: dict[str, tuple[str, Callable[[Job], Found]]] = {
    "quark_fx": ("quark_fx", quark_fx),
    "llm-compressor": ("llmcompressor", llm_compressor),
    "GPTQModel": ("GPTQModel", gptqmodel),
    "auto-round": ("auto-round", auto_round),
    "ModelOpt": ("nvidia-modelopt", modelopt),
    "AMD Quark": ("amd-quark", amd_quark),
    "Neural Compressor": ("neural-compressor-pt", neural_compressor),
}
"""Distribution and worker of each tool."""


def peak_mib() -> float:
    """Return the peak of this process's resident memory; that of `getrusage` begins with its parent's."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def run(path: Path) -> None:
    """Do the job of the JSON file at `path`."""
    options = json.loads(path.read_text(encoding="utf-8"))
    output = path.parent / options["output"]
    output.mkdir(parents=True, exist_ok=True)
    texts = load_file(path.parent / options["tokens"])
    tokens = texts["calibration"]
    distribution, quantize = TOOLS[options["tool"]]
    torch.manual_seed(0)
    batches, weights = list(tokens.split(options["batch"])), options["weights"]
    written = options["written"]
    checkpoint = output / "checkpoint" if written else None
    if checkpoint is not None:
        shutil.rmtree(checkpoint, ignore_errors=True)
    reads_weights = "held_out" not in texts and not written
    job = Job(path.parent / options["model"], batches, weights, options["options"], reads_weights, checkpoint)
    tensors, model = quantize(job)
    if not written:
        _write(job, tensors, model, texts, options["batch"], output)
    versions = {name: version(name) for name in (distribution, "torch", "transformers")}
    result = {"peak_mib": job.peak[0], "versions": versions}
    (output / "result.json").write_text(json.dumps(result, indent=2), encoding="utf-8")


def _write(
    job: Job, tensors: Mapping[str, Tensor], model: nn.Module, texts: Mapping[str, Tensor], batch: int, output: Path
) -> None:
    """Write weights and predictions."""
    with torch.no_grad():
        logits = {"quantized": model(input_ids=texts["calibration"][:1]).logits.detach().float()}
        if not job.reads_weights:
            parts = texts["held_out"].split(batch)
            logits["held_out"] = torch.cat([model(input_ids=part).logits.half() for part in parts])
    if job.reads_weights:
        # Copies: an embedding that is the head as well is not saved.
        copies = {name: tensor.detach().float().contiguous().clone() for name, tensor in tensors.items()}
        save_file(copies, output / "weights.safetensors")
    save_file(logits, output / "logits.safetensors")


if __name__ == "__main__":
    work(__doc__, run)
