"""How long capture takes for architectures of the last two years, whether other sizes are right, and what is quantized.

    python -m benchmarks.captured_shapes [NAME …] [--write]

Architectures of transformers, small, with seeded weights, each in a process of its own, on one thread. *Export* is the
share of `torch.export` in the CPU seconds of capture. The captured graph is then called with other batches and lengths:
*apart* is the largest difference from the model over the largest value, *refused* lists the sizes that the signature
names an error for, because the model's code takes another branch there or walks over the size. *Quantized* counts
operators after `quantize(model, "int8_dynamic")`, and *in float* says why the others are not, or why there is no graph.
`--write` updates `results/captured_shapes.md`.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import torch
import transformers as tf
from torch import Tensor, nn

import quark_fx as qfx
from benchmarks.common import apart_from_others, table
from benchmarks.experiment import HIDDEN, Option, experiment
from quark_fx.errors import QuarkError

Batch = dict[str, Tensor]

IMAGE = 500
"""The token that stands for a part of an image."""


def _generator(*size: int) -> torch.Generator:
    """Return another seed for every size."""
    return torch.Generator().manual_seed(size[0] * 1000 + size[1])


def tokens(batch: int, length: int) -> Batch:
    """Return token ids."""
    return {"input_ids": torch.randint(2, IMAGE, (batch, length), generator=_generator(batch, length))}


def pixels(batch: int, side: int) -> Batch:
    """Return square images."""
    return {"pixel_values": torch.randn(batch, 3, side, side, generator=_generator(batch, side))}


def clips(batch: int, frames: int) -> Batch:
    """Return videos of 32 by 32 pixels."""
    return {"pixel_values_videos": torch.randn(batch, frames, 3, 32, 32, generator=_generator(batch, frames))}


def patches(batch: int, count: int) -> Batch:
    """Return images as squares of patches of 8 by 8 pixels, all of them in use."""
    side = int(count**0.5)
    return {
        "pixel_values": torch.randn(batch, count, 3 * 8 * 8, generator=_generator(batch, count)),
        "pixel_attention_mask": torch.ones(batch, count, dtype=torch.int64),
        "spatial_shapes": torch.full((batch, 2), side, dtype=torch.int64),
    }


def spectra(batch: int, frames: int) -> Batch:
    """Return mel spectra of 80 bands."""
    return {"input_features": torch.randn(batch, frames, 80, generator=_generator(batch, frames))}


def speech(batch: int, samples: int) -> Batch:
    """Return sound, and the first 8 tokens of what was said."""
    generator = _generator(batch, samples)
    sound = torch.randn(batch, samples, generator=generator)
    return {"input_values": sound, "decoder_input_ids": torch.randint(2, 512, (batch, 8), generator=generator)}


def seen(batch: int, length: int) -> Batch:
    """Return token ids, 4 of which stand for an image of 32 by 32 pixels, and the images."""
    made = tokens(batch, length) | pixels(batch, 32)
    made["input_ids"][:, 1:5] = IMAGE
    return made


def seen_patches(batch: int, length: int) -> Batch:
    """Return the same with the patches of 8 by 8 pixels of two frames, and how many lie beside each other."""
    made = seen(batch, length)
    made["mm_token_type_ids"] = (made["input_ids"] == IMAGE).to(torch.int64)
    made["pixel_values"] = torch.randn(batch * 16, 3 * 2 * 8 * 8, generator=_generator(batch, length))
    made["image_grid_thw"] = torch.tensor([[1, 4, 4]] * batch, dtype=torch.int64)
    return made


TEXT = ((2, 32), (3, 32), (1, 32), (2, 48), (2, 30), (2, 17), (1, 5), (2, 64), (2, 100))
"""(batch, tokens) of the calls, the captured one first."""


class Architecture(NamedTuple):
    """How a model is made and called: `inputs(*size)` for each size, of which the first is captured."""

    kind: str
    build: Callable[[], nn.Module]
    inputs: Callable[[int, int], Batch] = tokens
    sizes: tuple[tuple[int, int], ...] = TEXT


_SMALL: dict[str, Any] = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4}
_HEADS: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 2}
_SPECIAL: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}


def _made(model: str, config: str, **options: Any) -> Callable[[], nn.Module]:
    return lambda: getattr(tf, model)(getattr(tf, config)(**options))


def _text(kind: str, name: str, config: str = "", **options: Any) -> Architecture:
    """Return a language model: options add to those of a small one."""
    given = {**_SMALL, **_HEADS, **_SPECIAL, **options}
    return Architecture(kind, _made(f"{name}ForCausalLM", config or f"{name}Config", **given))


_LATENT: dict[str, Any] = {
    "num_key_value_heads": 8,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
}
_DELTA: dict[str, Any] = {
    "head_dim": 32,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
}
_MAMBA: dict[str, Any] = {"mamba_n_heads": 16, "mamba_d_head": 16, "mamba_d_state": 32, "mamba_chunk_size": 16}
_SEEING: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
_WINDOWS: dict[str, Any] = {"sliding_window": 16}

MODELS: dict[str, Architecture] = {
    "Qwen3": _text("dense", "Qwen3", head_dim=32),
    "SmolLM3": _text("dense", "SmolLM3"),
    "OLMo 3": _text("dense", "Olmo3", **_WINDOWS),
    "EXAONE 4": _text("dense", "Exaone4", **_WINDOWS),
    "Apertus": _text("dense", "Apertus"),
    "Gemma 3n": _text(
        "dense",
        "Gemma3n",
        "Gemma3nTextConfig",
        vocab_size_per_layer_input=512,
        hidden_size_per_layer_input=32,
        num_hidden_layers=5,
        head_dim=32,
        num_kv_shared_layers=0,
        laurel_rank=16,
        sliding_window=32,
        layer_types=["sliding_attention"] * 4 + ["full_attention"],
        activation_sparsity_pattern=[0.95, 0.95, 0.0, 0.0, 0.0],
    ),
    "GPT-OSS": _text("mixture", "GptOss", head_dim=32, num_local_experts=16, num_experts_per_tok=4, **_WINDOWS),
    "Llama 4": _text(
        "mixture",
        "Llama4",
        "Llama4TextConfig",
        head_dim=32,
        intermediate_size_mlp=256,
        num_local_experts=16,
        attention_chunk_size=16,
    ),
    "GLM-4.5": _text(
        "mixture", "Glm4Moe", head_dim=32, moe_intermediate_size=32, n_routed_experts=32, num_experts_per_tok=4
    ),
    "ERNIE 4.5": _text("mixture", "Ernie4_5_Moe", moe_intermediate_size=32, moe_num_experts=32, moe_k=4),
    "MiniMax-M2": _text("mixture", "MiniMaxM2", head_dim=32, num_local_experts=16, num_experts_per_tok=4),
    "DeepSeek-V3": _text(
        "mixture, latent attention",
        "DeepseekV3",
        num_attention_heads=16,
        **_LATENT | {"num_key_value_heads": 16},
        moe_intermediate_size=32,
        first_k_dense_replace=1,
        n_routed_experts=64,
        num_experts_per_tok=8,
        n_group=8,
        topk_group=4,
    ),
    "DeepSeek-V3.2": _text(
        "mixture, sparse attention",
        "DeepseekV32",
        **_LATENT,
        head_dim=16,
        moe_intermediate_size=32,
        first_k_dense_replace=1,
        n_routed_experts=32,
        num_experts_per_tok=4,
        n_group=4,
        topk_group=2,
        index_topk=16,
        index_head_dim=32,
        index_n_heads=4,
    ),
    "LongCat-Flash": _text(
        "mixture, latent attention",
        "LongcatFlash",
        **_LATENT,
        num_layers=2,
        head_dim=16,
        ffn_hidden_size=256,
        expert_ffn_hidden_size=32,
        n_routed_experts=16,
        zero_expert_num=8,
        moe_topk=4,
    ),
    "MiMo-V2-Flash": _text(
        "mixture",
        "MiMoV2Flash",
        head_dim=32,
        v_head_dim=16,
        moe_intermediate_size=32,
        n_routed_experts=16,
        num_experts_per_tok=4,
        **_WINDOWS,
    ),
    "Mamba2": Architecture(
        "state space",
        _made(
            "Mamba2ForCausalLM",
            "Mamba2Config",
            vocab_size=512,
            hidden_size=128,
            num_heads=32,
            head_dim=8,
            state_size=32,
            n_groups=8,
            num_hidden_layers=4,
            chunk_size=16,
        ),
    ),
    "xLSTM": _text("recurrent", "xLSTM", num_heads=4, chunk_size=16),
    "Falcon-H1": _text("hybrid", "FalconH1", mamba_d_ssm=256, **_MAMBA),
    "Granite 4.0": _text(
        "hybrid mixture",
        "GraniteMoeHybrid",
        num_local_experts=8,
        num_experts_per_tok=2,
        shared_intermediate_size=64,
        layer_types=["mamba", "mamba", "mamba", "attention"],
        **_MAMBA,
    ),
    "Nemotron-H": _text(
        "hybrid mixture",
        "NemotronH",
        layers_block_type=["mamba", "moe", "attention", "mlp"],
        head_dim=16,
        mamba_num_heads=16,
        mamba_head_dim=16,
        ssm_state_size=32,
        n_groups=2,
        chunk_size=16,
        n_routed_experts=8,
        moe_intermediate_size=32,
        moe_shared_expert_intermediate_size=32,
    ),
    "LFM2-MoE": _text(
        "hybrid mixture",
        "Lfm2Moe",
        moe_intermediate_size=32,
        num_experts=16,
        layer_types=["conv", "conv", "full_attention", "conv"],
    ),
    "Qwen3-Next": _text(
        "hybrid mixture",
        "Qwen3Next",
        num_attention_heads=16,
        **_DELTA | {"linear_num_key_heads": 16, "linear_num_value_heads": 32},
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        num_experts=64,
        num_experts_per_tok=10,
    ),
    "Qwen3.5": _text("hybrid", "Qwen3_5", "Qwen3_5TextConfig", **_DELTA),
    "Kimi Linear": _text(
        "hybrid mixture",
        "KimiLinear",
        **_LATENT | {"q_lora_rank": None},
        moe_intermediate_size=32,
        num_local_experts=16,
        num_experts_per_tok=4,
        linear_head_dim=16,
        linear_num_heads=8,
    ),
    "EuroBERT": Architecture(
        "encoder", _made("EuroBertForMaskedLM", "EuroBertConfig", mask_token_id=3, **_SMALL, **_HEADS, **_SPECIAL)
    ),
    "ModernBERT decoder": _text("dense", "ModernBertDecoder", local_attention=16, cls_token_id=1, sep_token_id=1),
    "DINOv3": Architecture(
        "vision",
        _made(
            "DINOv3ViTModel",
            "DINOv3ViTConfig",
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=4,
            num_attention_heads=4,
            image_size=64,
            num_register_tokens=4,
            use_gated_mlp=True,
        ),
        pixels,
        ((2, 64), (3, 64), (1, 64)),
    ),
    "SigLIP 2": Architecture(
        "vision",
        _made(
            "Siglip2VisionModel",
            "Siglip2VisionConfig",
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=4,
            num_attention_heads=4,
            patch_size=8,
            num_patches=64,
        ),
        patches,
        ((2, 64), (3, 64), (1, 64), (2, 36)),
    ),
    "V-JEPA 2": Architecture(
        "video",
        _made(
            "VJEPA2Model",
            "VJEPA2Config",
            hidden_size=96,
            crop_size=32,
            patch_size=8,
            frames_per_clip=8,
            num_hidden_layers=3,
            num_attention_heads=4,
            pred_hidden_size=48,
            pred_num_attention_heads=4,
            pred_num_hidden_layers=2,
        ),
        clips,
        ((2, 8), (3, 8), (1, 8)),
    ),
    "Gemma 3": Architecture(
        "vision and language",
        _made(
            "Gemma3ForConditionalGeneration",
            "Gemma3Config",
            text_config={**_SMALL, **_HEADS, **_SPECIAL, **_WINDOWS, "head_dim": 32},
            vision_config={**_SEEING, "num_attention_heads": 4, "image_size": 32, "patch_size": 8},
            mm_tokens_per_image=4,
            image_token_index=IMAGE,
        ),
        seen,
    ),
    "InternVL 3": Architecture(
        "vision and language",
        _made(
            "InternVLForConditionalGeneration",
            "InternVLConfig",
            text_config={"model_type": "qwen3", **_SMALL, **_HEADS, **_SPECIAL, "head_dim": 32},
            vision_config={**_SEEING, "num_attention_heads": 4, "image_size": [32, 32], "patch_size": [8, 8]},
            image_token_id=IMAGE,
            image_seq_length=4,
        ),
        seen,
    ),
    "Qwen3-VL": Architecture(
        "vision and language",
        _made(
            "Qwen3VLForConditionalGeneration",
            "Qwen3VLConfig",
            text_config={**_SMALL, **_HEADS, **_SPECIAL, "head_dim": 32},
            vision_config={
                "depth": 2,
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_heads": 4,
                "patch_size": 8,
                "out_hidden_size": 128,
                "num_position_embeddings": 16,
                "deepstack_visual_indexes": [0, 1],
            },
            image_token_id=IMAGE,
            video_token_id=501,
            vision_start_token_id=502,
            vision_end_token_id=503,
        ),
        seen_patches,
    ),
    "Parakeet": Architecture(
        "speech",
        _made(
            "ParakeetForCTC",
            "ParakeetCTCConfig",
            vocab_size=128,
            pad_token_id=127,
            encoder_config={
                "hidden_size": 96,
                "num_hidden_layers": 3,
                "num_attention_heads": 4,
                "intermediate_size": 192,
                "subsampling_conv_channels": 32,
                "max_position_embeddings": 256,
            },
        ),
        spectra,
        ((2, 96), (3, 96), (1, 96), (2, 128), (2, 75)),
    ),
    "Moonshine": Architecture(
        "speech",
        _made(
            "MoonshineForConditionalGeneration",
            "MoonshineConfig",
            vocab_size=512,
            hidden_size=96,
            intermediate_size=192,
            encoder_num_hidden_layers=2,
            decoder_num_hidden_layers=2,
            encoder_num_attention_heads=4,
            decoder_num_attention_heads=4,
        ),
        speech,
        ((2, 8000), (3, 8000), (1, 8000), (2, 12345)),
    ),
}


def _apart(made: Any, want: Any) -> float:
    """Return the largest difference over the largest value of any result that both have, which may be all zeros."""
    found = [(made[key], value) for key, value in want.items() if isinstance(value, Tensor) and key in made]
    pairs = [((a - b).detach().abs().max(), b.abs().max()) for a, b in found]
    return float(torch.stack([gap if not gap else gap / largest for gap, largest in pairs]).max())


def _quantized(session: qfx.Session) -> tuple[str, str]:
    """Return how many operators are quantized, and why others are not."""
    try:
        report = qfx.quantize(session, "int8_dynamic", progress=False).report()
    except QuarkError as error:
        return "fails", str(error).partition("\n")[0][:120]
    totals = report.totals
    reasons = Counter(row.reason for row in report if row.reason)
    left = "; ".join(f"{count}: {reason}" for reason, count in reasons.items())
    return f"{totals['quantized']} of {totals['operators']}", left or "none"


def _child(name: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    of = MODELS[name]
    model: Any = of.build().eval()
    if getattr(model.config, "use_cache", False):
        model.config.use_cache = False
    first = of.inputs(*of.sizes[0])
    with torch.no_grad():
        model(**first)
    exported = 0.0
    export = torch.export.export

    def timed_export(*args: object, **options: object) -> object:
        nonlocal exported
        began = time.process_time()
        try:
            return export(*args, **options)  # type: ignore[arg-type]
        finally:
            exported += time.process_time() - began

    torch.export.export = timed_export  # type: ignore[assignment]
    parameters = sum(p.numel() for p in model.parameters())
    began = time.process_time()
    try:
        session = qfx.Session(model, [first])
    except QuarkError as error:
        print(json.dumps([parameters, None, str(error).partition("\n")[0]]))
        return
    seconds = time.process_time() - began
    captured = session.captured
    apart, refused = 0.0, []
    for size in of.sizes:
        batch = of.inputs(*size)
        with torch.no_grad():
            want = model(**batch)
        try:
            made = captured.signature.unflatten(captured.module(*captured.signature.flatten((), batch)))
        except QuarkError:
            refused.append(f"{size[0]}×{size[1]}")
            continue
        further = _apart(made, want)
        if math.isnan(further):
            raise RuntimeError(f"{name} computes no numbers at {size}")
        apart = max(apart, further)
    cells = parameters, len(captured.module.graph.nodes), seconds, exported, apart, ", ".join(refused)
    print(json.dumps([*cells, *_quantized(session)]))


@experiment(page="captured_shapes.md")
def main(
    *names: Annotated[str, Option("default: all", choices=MODELS)],
    child: Annotated[str | None, HIDDEN] = None,
) -> str | None:
    """Measure, and return the page."""
    if child:
        _child(child)
        return None
    rows = []
    for name in names or MODELS:
        parameters, nodes, *found = apart_from_others("benchmarks.captured_shapes", "--child", name)
        named = name, MODELS[name].kind, f"{parameters / 1e6:.1f} M"
        if nodes is None:
            rows.append((*named, *"––––", "not captured", "–", f"{found[0]}"))
        else:
            seconds, exported, apart, refused, quantized, left = found
            figures = f"{nodes:,}", f"{seconds:.1f}", f"{exported:.1f}", f"{apart:.0e}"
            rows.append((*named, *figures, refused or "none", quantized, left))
        print(*rows[-1], sep=" | ", file=sys.stderr)
    header = (
        *("architecture", "kind", "parameters", "nodes", "CPU s to capture", "of which export", "apart", "refused"),
        *("quantized", "in float"),
    )
    return f"""# Captured architectures

Written by `python -m benchmarks.captured_shapes --write`, whose docstring says what is measured.

{table(header, rows)}
"""


if __name__ == "__main__":
    main()
