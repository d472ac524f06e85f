"""Architectures in small, and what graphs of them compute in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torchvision.models as tv
import transformers
from tiny import rand, seeded
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils import _pytree as pytree
from transformers.models.whisper.modeling_whisper import WhisperEncoder

import quark_fx as qfx
from quark_fx.graph.nodes import fake_mode, set_parameter, stored_tensors
from quark_fx.graph.pass_manager import copy_graph, run_passes
from quark_fx.passes import fold_batch_norm, fold_constants


def capture(model: nn.Module, batch: Any) -> GraphModule:
    return qfx.capture_graph(model.eval(), batch).module


def in_double(gm: GraphModule) -> GraphModule:
    """Return a copy that computes in float64 throughout."""
    gm = copy_graph(gm)
    for name, value in stored_tensors(gm).items():
        if value.dtype == torch.float32:
            set_parameter(gm, name, value.double())

    def widened(x: Any) -> Any:
        return torch.float64 if x is torch.float32 else x

    for node in gm.graph.nodes:
        node.args, node.kwargs = pytree.tree_map(widened, (node.args, dict(node.kwargs)))
        value = node.meta.get("val")
        if isinstance(value, Tensor) and value.dtype == torch.float32:
            with fake_mode(gm):
                node.meta["val"] = value.double()
    gm.recompile()
    return gm


def double_inputs(batch: Any) -> list[Tensor]:
    return [x.double() if x.is_floating_point() else x for x in pytree.tree_leaves(batch)]


def outputs(gm: GraphModule, inputs: Sequence[Tensor]) -> list[Tensor]:
    with torch.no_grad():
        return [x for x in gm(*inputs) if isinstance(x, Tensor) and x.is_floating_point()]


def difference(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    """Return the largest difference, relative to the largest value of its output."""
    assert all(x.isfinite().all() and x.any() for x in a)
    return max(float((x - y).abs().max() / x.abs().max()) for x, y in zip(a, b, strict=True))


class Net(nn.Module):
    """Layers, and how they are wired."""

    def __init__(self, forward: Callable[..., Any], **layers: Any) -> None:
        super().__init__()
        for name, layer in layers.items():
            setattr(self, name, layer)
        self.wiring = forward

    def forward(self, *inputs: Tensor) -> Any:
        return self.wiring(self, *inputs)


@dataclass(frozen=True)
class Case:
    """An architecture in small.

    Attributes:
        make: returns the model.
        batches: one to capture with and one of other sizes.
        scaled: how many of its weighted operators a scale site scales the input of.
        operators: how many have an input.
    """

    make: Callable[[], nn.Module]
    batches: tuple[Any, Any]
    scaled: int
    operators: int


def pictures(size: int = 32) -> tuple[Any, Any]:
    return rand(2, 3, size, size), rand(3, 3, size, size, seed=2)


def ids() -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(0)
    made = []
    for shape in ((2, 7), (3, 5)):
        x = torch.randint(3, 40, shape, generator=generator)
        made.append({"input_ids": x, "attention_mask": torch.ones_like(x)})
    return made[0], made[1]


def text(model: str, config: str, **options: Any) -> Callable[[], nn.Module]:
    common = {
        "vocab_size": 40,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 24,
        "max_position_embeddings": 32,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "use_cache": False,
    }

    def make() -> nn.Module:
        made: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**{**common, **options}))
        return made

    return make


def mobilenet_v2() -> Any:
    return tv.MobileNetV2(num_classes=5, inverted_residual_setting=[[1, 8, 1, 1], [4, 8, 2, 2], [4, 16, 1, 2]])


def mobilenet_v3() -> Any:
    settings = [(8, 3, 16, 8, True, "RE", 1, 1), (8, 3, 24, 8, True, "HS", 2, 1), (8, 3, 24, 8, False, "RE", 1, 1)]
    rows = [tv.mobilenetv3.InvertedResidualConfig(*row, width_mult=1.0) for row in settings]
    return tv.mobilenetv3.MobileNetV3(rows, last_channel=16, num_classes=5)


def efficientnet() -> Any:
    rows = [tv.efficientnet.MBConvConfig(*row) for row in ((1, 3, 1, 8, 8, 1), (4, 3, 2, 8, 16, 2))]
    return tv.EfficientNet(rows, dropout=0.0, num_classes=5, last_channel=16)


def convnext() -> Any:
    return tv.ConvNeXt([tv.convnext.CNBlockConfig(8, 16, 1), tv.convnext.CNBlockConfig(16, None, 1)], num_classes=5)


def vit() -> Any:
    options = {"image_size": 16, "patch_size": 8, "num_layers": 2, "num_heads": 2, "hidden_dim": 16, "mlp_dim": 24}
    return tv.VisionTransformer(**options, num_classes=5)


def swin() -> Any:
    return tv.SwinTransformer([4, 4], 8, [2, 2], [2, 4], [2, 2], num_classes=5)


def densenet() -> Any:
    return tv.DenseNet(growth_rate=4, block_config=(2, 2), num_init_features=8, bn_size=2, num_classes=5)


def shufflenet() -> Any:
    return tv.ShuffleNetV2([2, 2, 1], [8, 16, 32, 64, 32], num_classes=5)


def googlenet() -> Any:
    return tv.GoogLeNet(num_classes=5, aux_logits=False, init_weights=False)


def resnet() -> Any:
    return tv.ResNet(tv.resnet.Bottleneck, [2, 1, 1, 1], num_classes=5, groups=4, width_per_group=2)


def whisper() -> nn.Module:
    options = {"encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 24}
    config = transformers.WhisperConfig(d_model=16, num_mel_bins=8, max_source_positions=10, **options)
    encoder: nn.Module = WhisperEncoder(config)
    return encoder


def mels() -> tuple[Any, Any]:
    return {"input_features": rand(2, 8, 20)}, {"input_features": rand(3, 8, 20)}


_GROUPED = {"num_key_value_heads": 2}
_EXPERTS = {**_GROUPED, "num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2}
_T5 = {"d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4}

ZOO = {
    "ResNeXt": Case(resnet, pictures(), 20, 21),
    "MobileNetV2": Case(mobilenet_v2, pictures(), 13, 14),
    "MobileNetV3": Case(mobilenet_v3, pictures(), 9, 17),
    "EfficientNet": Case(efficientnet, pictures(), 2, 17),
    "DenseNet": Case(densenet, pictures(), 10, 11),
    "GoogLeNet": Case(googlenet, pictures(), 57, 58),
    "ShuffleNet": Case(shufflenet, pictures(), 23, 24),
    "ConvNeXt": Case(convnext, pictures(), 4, 9),
    "ViT": Case(vit, pictures(16), 7, 10),
    "Swin": Case(swin, pictures(), 14, 19),
    "BERT": Case(text("BertModel", "BertConfig"), ids(), 2, 13),
    "GPT-2": Case(text("GPT2LMHeadModel", "GPT2Config"), ids(), 6, 9),
    "BLOOM": Case(text("BloomForCausalLM", "BloomConfig"), ids(), 6, 9),
    "Llama": Case(text("LlamaForCausalLM", "LlamaConfig", **_GROUPED), ids(), 15, 15),
    "Phi-3": Case(text("Phi3ForCausalLM", "Phi3Config", **_GROUPED), ids(), 9, 9),
    "Mixtral": Case(text("MixtralForCausalLM", "MixtralConfig", **_EXPERTS), ids(), 15, 15),
    "Qwen2-MoE": Case(
        text("Qwen2MoeForCausalLM", "Qwen2MoeConfig", **_EXPERTS, moe_intermediate_size=8), ids(), 23, 23
    ),
    "T5 encoder": Case(text("T5EncoderModel", "T5Config", **_T5), ids(), 12, 12),
    "Whisper encoder": Case(whisper, mels(), 5, 8),
}


SIMILAR = ("MobileNetV2", "EfficientNet", "GoogLeNet", "Whisper encoder")
"""Architectures whose operators and connections also occur in MobileNetV3, ShuffleNet, and ViT."""


@cache
def folded(name: str) -> tuple[GraphModule, list[list[Tensor]]]:
    """Return an architecture in float64, batch norms and constants folded, with its outputs for both batches.

    It is captured once. Tests change copies; one that changed the graph itself would change it for the next.
    """
    case = ZOO[name]
    torch.manual_seed(0)
    gm, _ = run_passes(capture(seeded(case.make()), case.batches[0]), [fold_batch_norm, fold_constants])
    gm = in_double(gm)
    return gm, [outputs(gm, double_inputs(batch)) for batch in case.batches]
