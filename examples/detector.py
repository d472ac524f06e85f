"""Quantize the backbone and the head of a torchvision detector to int8; decode boxes and suppress overlaps in float.

    python examples/detector.py [directory]

The ONNX file is written to `directory` (default: a temporary one). The network is small and has seeded random weights,
so its boxes mean nothing; what is compared is whether the quantized detector finds the same ones. Takes a few seconds.
"""

from __future__ import annotations

import sys
import tempfile
from collections import OrderedDict
from pathlib import Path

import torch
from torch import Tensor, nn
from torchvision.models.detection import RetinaNet
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.image_list import ImageList
from torchvision.ops import FrozenBatchNorm2d, box_iou

import quark_fx as qfx

SIZE = 96


def stage(inputs: int, outputs: int) -> nn.Sequential:
    """Return a convolution, the norm of torchvision's detectors, and a ReLU."""
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, 2, 1, bias=False), FrozenBatchNorm2d(outputs), nn.ReLU())


class Backbone(nn.Module):
    """Three stages, the last two of which the head reads."""

    out_channels = 32

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.low, self.high = stage(3, 16), stage(16, 32), stage(32, 32)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        low = self.low(self.stem(x))
        return OrderedDict([("0", low), ("1", self.high(low))])


class Network(nn.Module):
    """What is quantized: all convolutions of a detector, and nothing that depends on the boxes."""

    def __init__(self, detector: RetinaNet) -> None:
        super().__init__()
        self.backbone, self.head = detector.backbone, detector.head

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        features = list(self.backbone(images).values())
        return self.head(features)  # type: ignore[no-any-return]


def make() -> RetinaNet:
    """Return a detector with seeded weights and statistics."""
    torch.manual_seed(0)
    anchors = AnchorGenerator(((16,), (32,)), ((0.5, 1.0, 2.0),) * 2)
    detector = RetinaNet(Backbone(), num_classes=4, anchor_generator=anchors, score_thresh=0.0, detections_per_img=20)
    for module in detector.modules():
        if isinstance(module, FrozenBatchNorm2d):
            variance = module.get_buffer("running_var")
            variance.copy_(torch.rand_like(variance) + 0.1)
    for name in ("classification_head", "regression_head"):
        for parameter in detector.head.get_submodule(name).parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=(2 / parameter[0].numel()) ** 0.5)
    return detector.eval()


def detect(detector: RetinaNet, outputs: dict[str, Tensor], images: Tensor) -> list[dict[str, Tensor]]:
    """Return boxes, scores, and labels: anchors, decoding, and non-maximum suppression of torchvision, in float."""
    strides = [4, 8]
    features = [torch.empty(len(images), 1, SIZE // stride, SIZE // stride) for stride in strides]
    sizes = [(SIZE, SIZE)] * len(images)
    anchors = detector.anchor_generator(ImageList(images, sizes), features)
    counts = [3 * feature.shape[-2] * feature.shape[-1] for feature in features]
    per_level = {name: list(output.split(counts, 1)) for name, output in outputs.items()}
    found: list[dict[str, Tensor]] = detector.postprocess_detections(
        per_level, [list(entry.split(counts)) for entry in anchors], sizes
    )
    return found


def main(directory: Path) -> None:
    detector = make()
    generator = torch.Generator().manual_seed(1)
    blurred = nn.AvgPool2d(9, 1, 4)
    batches = [blurred(torch.randn(2, 3, SIZE, SIZE, generator=generator)) * 6 for _ in range(4)]
    *calibration, images = batches

    network = Network(detector).eval()
    qmodel = qfx.quantize(network, "int8_static", calibration, progress=False)
    file = qfx.export.onnx(qmodel, directory / "detector.onnx")
    print(str(file.report()).splitlines()[-3])
    largest = qfx.verify(qmodel, file, [images]).max_steps
    print(f"largest difference of an output, torch to ONNX Runtime: {largest:.2f} quantization steps")

    with torch.no_grad():
        real, rounded = network(images), qmodel(images)
    found = [detect(detector, outputs, images) for outputs in (real, rounded)]
    for number, (expected, got) in enumerate(zip(*found, strict=True)):
        overlap = box_iou(expected["boxes"], got["boxes"])
        same = expected["labels"][:, None] == got["labels"][None]
        matched = int(((overlap * same).amax(1) > 0.8).sum())
        print(f"image {number}: {len(expected['boxes'])} boxes in float, {matched} of them found in int8")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as temporary:
            main(Path(temporary))
