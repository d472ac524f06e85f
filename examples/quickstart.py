"""Train a small network, quantize it to int8, export it to ONNX and compare all of them on validation data.

    python examples/quickstart.py [directory]

The ONNX files are written to `directory` (default: a temporary one). Takes about half a minute on a CPU.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import quark_fx as qfx
from quark_fx.evaluation import Classification


class Network(nn.Module):
    """A convolutional network with batch norm and a residual addition."""

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.stem = convolution(1, width, stride=2)
        self.first = convolution(width, width)
        self.second = convolution(width, width)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + self.second(self.first(x))
        return self.head(x.mean((2, 3)))  # type: ignore[no-any-return]


def convolution(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.ReLU())


def train(images: Tensor, labels: Tensor, epochs: int = 12) -> Network:
    model = Network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    for _ in range(epochs):
        for batch in torch.randperm(len(images)).split(60):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
        schedule.step()
    return model.eval()


def main(directory: Path) -> None:
    torch.manual_seed(0)
    data, target = load_digits(return_X_y=True)
    images, labels = torch.from_numpy(data).float().reshape(-1, 1, 8, 8) / 16, torch.from_numpy(target)
    order = torch.randperm(len(images))
    training, held_out = order[:900], order[900:]
    model = train(images[training], labels[training])

    # Quantize: the calibration data is a few batches of what the model was trained on.
    qmodel = qfx.quantize(model, "int8_static", images[training].split(60))
    print(qmodel.report())

    float_file, int8_file = directory / "digits_float.onnx", directory / "digits_int8.onnx"
    any_batch = ({0: torch.export.Dim.DYNAMIC},)
    example = (images[:2],)
    torch.onnx.export(model, example, float_file, dynamic_shapes=any_batch, external_data=False, verbose=False)
    qfx.export.onnx(qmodel, int8_file)
    difference = qfx.verify(qmodel, int8_file, images[held_out].split(60))

    task = Classification([(images[held_out], labels[held_out])])

    def accuracy(model: nn.Module | Path) -> str:
        return f"{qfx.evaluate(model, task)['accuracy']:8.2%}"

    print(f"\n{len(held_out)} held-out digits        accuracy   file KiB")
    print(f"float, torch              {accuracy(model)}")
    print(f"float, ONNX Runtime       {accuracy(float_file)}   {float_file.stat().st_size / 1024:8.1f}")
    print(f"int8, torch               {accuracy(qmodel)}")
    print(f"int8, ONNX Runtime        {accuracy(int8_file)}   {int8_file.stat().st_size / 1024:8.1f}")
    print(f"largest difference of an output, torch to ONNX Runtime: {difference.max_steps:.2f} quantization steps")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        target_directory = Path(sys.argv[1])
        target_directory.mkdir(parents=True, exist_ok=True)
        main(target_directory)
    else:
        with tempfile.TemporaryDirectory() as temporary:
            main(Path(temporary))
