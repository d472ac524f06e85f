"""Each spelling of an affine map beside the same numbers in a batch norm: error, and kernels in integers.

    python -m benchmarks.affine_spellings [--only conv2d,frozen] [--models]

A cell is a network of an operator, a map of one factor and one offset per channel, a ReLU, and another operator; in
`before` the map is in front of the first operator. The batch norm of the same numbers is the reference: a cell is right
if the file has its kernels in integers, and the error is within half a decibel. With `--models`, the backbones and
heads of torchvision's detection and segmentation models, and whole detectors of transformers, are compared with frozen
batch norms and with ordinary ones.
"""

from __future__ import annotations

import copy
import itertools
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models import detection, segmentation

import quark_fx as qfx
from benchmarks.common import judged, sqnr, table
from benchmarks.experiment import experiment

CHANNELS = 8


class Map(nn.Module):
    """An affine map of dimension 1 in one spelling.

    Args:
        spelling: Function of this module, a value, and what gives parameters the shape to broadcast.
        uniform: Whether all channels have the same factor and offset.
    """

    variance: Tensor
    shift: Tensor

    def __init__(self, spelling: Callable[..., Any], *, uniform: bool, spread: float) -> None:
        super().__init__()
        factor = 10 ** torch.linspace(-spread, spread, CHANNELS) * torch.tensor([1.0, -1.0]).repeat(CHANNELS // 2)
        offset = torch.linspace(-0.5, 0.8, CHANNELS)
        if uniform:
            factor, offset = torch.full_like(factor, 0.5), torch.full_like(offset, 0.25)
        self.spelling = spelling
        self.factor, self.offset = nn.Parameter(factor), nn.Parameter(offset)
        self.divisor, self.mean, self.negated = (nn.Parameter(x) for x in (1 / factor, -offset / factor, -factor))
        self.gain = nn.Parameter(factor * 0.7)  # what a norm multiplies by, of a deviation of 0.7
        self.register_buffer("variance", torch.full_like(factor, 0.49 - 1e-5))
        self.register_buffer("shift", offset.clone())

    def forward(self, x: Tensor) -> Tensor:
        def shaped(parameter: Tensor) -> Tensor:
            return parameter.reshape(1, -1, *[1] * (x.dim() - 2))

        found: Tensor = self.spelling(self, x, shaped)
        return found


def _norm(m: Map, x: Tensor, shaped: Any) -> Any:
    return F.batch_norm(x, torch.zeros_like(m.shift), m.variance, m.gain, m.offset, eps=1e-5)


def _frozen(m: Map, x: Tensor, shaped: Any) -> Any:
    """As torchvision's FrozenBatchNorm2d and DETR's have it."""
    factor = shaped(m.gain) * (shaped(m.variance) + 1e-5).rsqrt()
    return x * factor + (shaped(m.offset) - shaped(0 * m.mean) * factor)


def _channels_last(m: Map, x: Tensor, shaped: Any) -> Any:
    return (x.movedim(1, -1) * m.factor + m.offset).movedim(-1, 1)


def _expanded(m: Map, x: Tensor, shaped: Any) -> Any:
    return x * shaped(m.factor).expand_as(x) + shaped(m.offset).expand_as(x)


def _chain(m: Map, x: Tensor, shaped: Any) -> Any:
    return ((x + shaped(m.mean) * 3) * 2 - shaped(m.mean) * 8) / 2 * shaped(m.factor)


def _chunks(m: Map, x: Tensor, shaped: Any) -> Any:
    each = zip(x.chunk(2, 1), m.factor.chunk(2), m.offset.chunk(2), strict=True)
    return torch.cat([part * shaped(factor) + shaped(offset) for part, factor, offset in each], 1)


def _slices(m: Map, x: Tensor, shaped: Any) -> Any:
    return torch.cat([x[:, :3] * shaped(m.factor[:3]), x[:, 3:] * shaped(m.factor[3:])], 1) + shaped(m.offset)


def _groups(m: Map, x: Tensor, shaped: Any) -> Any:
    grouped = x.reshape(x.shape[0], 2, x.shape[1] // 2, *x.shape[2:])
    return (grouped * shaped(m.factor).view(1, 2, -1, *[1] * (x.dim() - 2))).reshape(x.shape) + shaped(m.offset)


SPELLINGS: dict[str, Callable[[Map, Tensor, Any], Any]] = {
    "frozen": _frozen,
    "product and sum": lambda m, x, s: x * s(m.factor) + s(m.offset),
    "operands swapped": lambda m, x, s: s(m.offset) + s(m.factor) * x,
    "addcmul": lambda m, x, s: torch.addcmul(s(m.offset), x, s(m.factor)),
    "addcdiv": lambda m, x, s: torch.addcdiv(s(m.offset), x, s(m.divisor)),
    "mean and deviation": lambda m, x, s: (x - s(m.mean)) / s(m.divisor),
    "difference": lambda m, x, s: s(m.offset) - x * s(m.negated),
    "negation": lambda m, x, s: (-x) * s(m.negated) + s(m.shift),
    "rsub": lambda m, x, s: torch.rsub(x * s(m.negated), s(m.offset)),
    "alpha": lambda m, x, s: torch.add(x * s(m.factor), s(m.offset * 2), alpha=0.5),
    "buffer": lambda m, x, s: torch.add(s(m.shift), x.mul(s(m.factor))),
    "in place": lambda m, x, s: x.mul_(s(m.factor)).add_(s(m.offset)),
    "lerp": lambda m, x, s: torch.lerp(s(m.mean), x, 0.5) * s(2 * m.factor) + s(2 * m.offset),
    "einsum": lambda m, x, s: torch.einsum("bc...,c->bc...", x, m.factor) + s(m.offset),
    "unsqueezed": lambda m, x, s: x * m.factor[(..., *[None] * (x.dim() - 2))] + s(m.offset),
    "channels last": _channels_last,
    "expanded": _expanded,
    "chain": _chain,
    "two products": lambda m, x, s: x * s(m.factor * 0.25) + x * s(m.factor * 0.75) + s(m.offset),
    "sum with itself": lambda m, x, s: x + (x * s(m.factor - 1) + s(m.offset)),
    "addcmul of one value": lambda m, x, s: torch.addcmul(x, x, s(2 * m.factor - 2), value=0.5) + s(m.offset),
    "chunks": _chunks,
    "slices": _slices,
    "groups": _groups,
    "where": lambda m, x, s: torch.where(s(m.factor) > 0, x, -x) * s(m.factor.abs()) + s(m.offset),
    "mask": lambda m, x, s: (x * s(m.factor)).masked_fill(s(m.factor) > 0, 0) + x * s(m.factor).relu() + s(m.shift),
}
UNIFORM: dict[str, Callable[[Map, Tensor, Any], Any]] = {
    "numbers": lambda m, x, s: x * 0.5 + 0.25,
    "quotient of numbers": lambda m, x, s: (x + 0.5) / 2,
    "number less value": lambda m, x, s: 0.25 - x * -0.5,
    "tensors of one number": lambda m, x, s: x * torch.tensor(0.5) + torch.tensor(0.25),
}


class AddMm(nn.Linear):
    """`torch.addmm`."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x, self.weight.t())


PRODUCERS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "conv1d": (lambda: nn.Conv1d(CHANNELS, CHANNELS, 3), 1),
    "conv2d": (lambda: nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=False), 2),
    "conv3d": (lambda: nn.Conv3d(CHANNELS, CHANNELS, 2), 3),
    "depthwise": (lambda: nn.Conv2d(CHANNELS, CHANNELS, 3, groups=CHANNELS), 2),
    "grouped": (lambda: nn.Conv2d(CHANNELS, CHANNELS, 3, groups=2), 2),
    "transposed1d": (lambda: nn.ConvTranspose1d(CHANNELS, CHANNELS, 3), 1),
    "transposed2d": (lambda: nn.ConvTranspose2d(CHANNELS, CHANNELS, 2, groups=2), 2),
    "linear": (lambda: nn.Linear(CHANNELS, CHANNELS), 0),
    "addmm": (lambda: AddMm(CHANNELS, CHANNELS), 0),
    "none": (nn.Identity, 2),
}
CONSUMERS = ("operator", "residual", "output", "before")


@dataclass(frozen=True)
class Cell:
    """A network of the matrix."""

    spelling: str
    producer: str
    consumer: str


def cells() -> list[Cell]:
    """Return all networks. Without an operator in front, the map goes into the one after it."""
    found = itertools.product({**SPELLINGS, **UNIFORM}, PRODUCERS, CONSUMERS)
    return [Cell(*each) for each in found if (each[1] == "none") == (each[2] == "before")]


class Network(nn.Module):
    """An operator, a map, and what reads it; what the operator makes is undone by its weights beforehand."""

    def __init__(self, cell: Cell, spelling: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        make, _ = PRODUCERS[cell.producer]
        self.consumer = cell.consumer
        self.map = Map(spelling, uniform=cell.spelling in UNIFORM, spread=0.3 if cell.producer == "none" else 1.5)
        self.first, self.last = make(), make()
        if cell.producer == "none":
            self.last = nn.Conv2d(CHANNELS, CHANNELS, 3)
        else:
            weight: Any = self.first.weight
            outputs = 1 if cell.producer.startswith("transposed") else 0
            shape = [-1 if d == outputs else 1 for d in range(weight.dim())]
            weight.data *= self.map.divisor.detach()[: weight.shape[outputs]].abs().reshape(shape)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.map(self.first(x if self.consumer != "before" else x.relu()))
        if self.consumer == "residual":
            y = y + self.last(x)
        if self.consumer == "before":
            y = self.last(y)
        return self.last(y.relu()) if self.consumer == "operator" else y


def measured(model: nn.Module, batches: list[Any]) -> tuple[float, Counter[str], Counter[str]]:
    """Return the error of int8 in decibels, and the kernels of the file in integers and in float."""
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as directory, torch.no_grad():
        warnings.simplefilter("ignore")
        qmodel = qfx.quantize(model.eval(), "int8_static", batches, progress=False)
        report = qfx.export.onnx(qmodel, Path(directory) / "model.onnx").report()
        real, rounded = _joined(model(batches[0])), _joined(qmodel(batches[0]))
    integers, floats = (Counter(node.kernel for node in nodes) for nodes in (report.quantized, report.floating))
    return sqnr(real, rounded), integers, floats


def _joined(outputs: Any) -> Tensor:
    leaves = torch.utils._pytree.tree_leaves(outputs)
    return torch.cat([leaf.flatten() / leaf.square().mean().sqrt() for leaf in leaves])


@cache
def reference(producer: str, consumer: str, uniform: bool) -> tuple[float, Counter[str], Counter[str]]:
    """Return what a batch norm of the same numbers gives."""
    spelling = next(iter(UNIFORM if uniform else SPELLINGS))
    return measured(Network(Cell(spelling, producer, consumer), _norm), inputs(producer))


def inputs(producer: str) -> list[Tensor]:
    """Return calibration batches."""
    generator = torch.Generator().manual_seed(1)
    shape = (4, CHANNELS, *[7] * PRODUCERS[producer][1])
    return [torch.randn(shape, generator=generator) for _ in range(2)]


def fault(cell: Cell) -> str:
    """Return how a cell differs from a batch norm; empty if it is right."""
    expected = reference(cell.producer, cell.consumer, cell.spelling in UNIFORM)
    spelling = {**SPELLINGS, **UNIFORM}[cell.spelling]
    found = measured(Network(cell, spelling), inputs(cell.producer))
    faults = [] if abs(found[0] - expected[0]) <= 0.5 else [f"{found[0]:.1f} dB for {expected[0]:.1f}"]
    if found[1] != expected[1]:
        faults.append(f"in integers: {dict(found[1])} for {dict(expected[1])}")
    return ", ".join(faults)


def frozen(model: nn.Module) -> nn.Module:
    """Return a copy with torchvision's frozen batch norms in the place of ordinary ones."""
    model = copy.deepcopy(model)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.BatchNorm2d):
                norm = torchvision.ops.FrozenBatchNorm2d(child.num_features, child.eps)
                norm.load_state_dict({k: v for k, v in child.state_dict().items() if k != "num_batches_tracked"})
                setattr(module, name, norm)
    return model.eval()


class Raw(nn.Module):
    """Backbone and head of a detector: what it computes before boxes are decoded."""

    def __init__(self, detector: Any) -> None:
        super().__init__()
        self.backbone = detector.backbone
        self.head = detector.rpn.head if hasattr(detector, "rpn") else detector.head

    def forward(self, x: Tensor) -> Any:
        return self.head(list(self.backbone(x).values()))


def thawed(model: nn.Module) -> nn.Module:
    """Return a copy with ordinary batch norms in the place of frozen ones, of whatever class these are."""
    model = copy.deepcopy(model)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if "FrozenBatchNorm" in type(child).__name__:
                state = {**child.state_dict(), "num_batches_tracked": torch.tensor(0)}
                norm = nn.BatchNorm2d(len(state["weight"]))
                norm.load_state_dict(state)
                setattr(module, name, norm)
    return model.eval()


class Boxes(nn.Module):
    """A detector of transformers: scores and boxes of its queries."""

    def __init__(self, detector: nn.Module) -> None:
        super().__init__()
        self.detector = detector

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        found: Any = self.detector(pixel_values=x)
        return found.logits, found.pred_boxes


def detectors() -> Iterator[tuple[str, Callable[[], nn.Module]]]:
    """Yield detectors of transformers with frozen norms, and seeded weights and statistics, by name."""
    import transformers

    sizes = {"embedding_size": 8, "hidden_sizes": [8, 16, 24, 32], "depths": [1] * 4, "layer_type": "basic"}
    stages = ["stage2", "stage3", "stage4"]
    both = {"d_model": 32, "num_queries": 5, "num_labels": 3, "encoder_layers": 2, "decoder_layers": 2}
    sides = {
        f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in (("attention_heads", 2), ("ffn_dim", 32))
    }
    hybrid = {"encoder_hidden_dim": 32, "encoder_in_channels": [16, 24, 32], "decoder_in_channels": [32] * 3}
    plain = {"use_timm_backbone": False, "backbone": None, "use_pretrained_backbone": False}
    options: dict[str, dict[str, Any]] = {
        "Detr": plain,
        "ConditionalDetr": plain,
        "DeformableDetr": {**plain, "num_feature_levels": 3},
        "RTDetr": {**hybrid, "num_denoising": 0},
    }
    for name, special in options.items():

        def make(name: str = name, special: dict[str, Any] = special) -> nn.Module:
            torch.manual_seed(0)
            kind = "RTDetrResNetConfig" if name == "RTDetr" else "ResNetConfig"
            single = name in ("Detr", "ConditionalDetr")
            backbone = getattr(transformers, kind)(**sizes, out_features=stages[-1:] if single else stages)
            config = getattr(transformers, f"{name}Config")(backbone_config=backbone, **both, **sides, **special)
            model: nn.Module = getattr(transformers, f"{name}ForObjectDetection")(config)
            for key, value in model.state_dict().items():
                if key.endswith("running_var"):
                    value.uniform_(0.3, 3)
                elif key.endswith("running_mean"):
                    value.normal_(0, 0.3)
            return Boxes(model).eval()

        yield f"{name}ForObjectDetection", make


def real_models() -> Iterator[tuple[str, nn.Module]]:
    """Yield torchvision's networks with batch norms and seeded weights."""
    plain = {"weights": None, "weights_backbone": None}
    yield "resnet18", torchvision.models.resnet18()
    for name, options in {
        "fasterrcnn_resnet50_fpn": {"norm_layer": nn.BatchNorm2d},
        "retinanet_resnet50_fpn": {"norm_layer": nn.BatchNorm2d},
        "fcos_resnet50_fpn": {"norm_layer": nn.BatchNorm2d},
        "ssdlite320_mobilenet_v3_large": {},
        "fasterrcnn_mobilenet_v3_large_320_fpn": {"norm_layer": nn.BatchNorm2d},
    }.items():
        yield name, Raw(getattr(detection, name)(**plain, num_classes=5, **options))
    for name in ("deeplabv3_resnet50", "fcn_resnet50", "lraspp_mobilenet_v3_large"):
        yield name, getattr(segmentation, name)(**plain, num_classes=5)


def pairs(words: list[str]) -> Iterator[tuple[str, int, nn.Module, nn.Module]]:
    """Yield the name of each model that has one of some words, a batch size, and both versions of the model."""
    for name, model in real_models():
        if words and not any(word in name for word in words):
            continue
        with torch.no_grad():
            model.train()(torch.randn(4, 3, 64, 64))
        yield name, 1, model.eval(), frozen(model)
    for name, make in detectors():
        if not words or any(word in name for word in words):
            yield name, 2, thawed(make()), make()


@experiment()
def main(
    only: Annotated[str, "words of cells or models, separated by commas"] = "",
    models: Annotated[bool, "detectors and segmentation models"] = False,
) -> int:
    """Measure and print; return 1 if a cell is wrong."""
    torch.set_num_threads(1)
    words = [word for word in only.split(",") if word]
    rows: list[tuple[str, ...]] = []
    if models:
        for name, samples, plain, frozen_model in pairs(words):
            torch.manual_seed(0)
            batches = [torch.randn(samples, 3, 64, 64) for _ in range(2)]
            both = [measured(version, batches) for version in (plain, frozen_model)]
            counts = [f"{sum(found[1].values())} of {sum((found[1] + found[2]).values())}" for found in both]
            right = "right" if both[0][1] == both[1][1] else "WRONG"
            rows.append((name, counts[0], counts[1], *(f"{found[0]:.1f}" for found in both), right))
            print(*rows[-1], flush=True)
        print(table(("model", "batch norm: in integers", "frozen", "dB", "frozen dB", "kernels"), rows))
        return judged(Counter(row[-1].lower() for row in rows))
    chosen = [cell for cell in cells() if not words or all(word in vars(cell).values() for word in words)]
    for cell in chosen:
        if found := fault(cell):
            rows.append((cell.spelling, cell.producer, cell.consumer, found))
            print(*rows[-1], flush=True)
    return judged({"right": len(chosen) - len(rows), "wrong": len(rows)})


if __name__ == "__main__":
    main()
