"""Batches from folders of images."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quark_fx.data.batches import in_batches, spread
from quark_fx.errors import CalibrationError
from quark_fx.system.options import PositiveInt, checked_call

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".gif", ".tif", ".tiff")
"""How the names of files end that count as images."""

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Of ImageNet's red, green and blue, from 0 to 1: what most networks were trained with."""

Prepare = Callable[[list[Any]], Any]
"""Makes a batch of images of Pillow."""


@checked_call
def image_folder(
    directory: str | Path,
    *,
    size: PositiveInt | None = None,
    mean: Sequence[float] = MEAN,
    std: Sequence[float] = STD,
    count: PositiveInt | None = None,
    batch_size: PositiveInt = 8,
    prepare: Prepare | None = None,
) -> list[Any]:
    """Return the images below a folder in batches, each color less its `mean`, divided by its `std`.

    Args:
        directory: it and the folders in it are searched.
        size: pixels of a side: the shorter side is scaled to it and the middle of the longer one cut out; default:
            images stay as large as they are, which has to be the same for all.
        mean: of each color from 0 to 1; one number for images in gray.
        std: likewise.
        count: images, spread evenly over all; default: all.
        batch_size: images of a batch.
        prepare: makes a batch of a list of Pillow's images instead, as an image processor of transformers does.

    Returns:
        Batches `(batch_size, colors, height, width)` in float32, or what `prepare` makes.

    Raises:
        CalibrationError: if there is no image, one cannot be read, their sizes differ, or Pillow is missing.
    """
    prepare = prepare or _Prepare(size, tuple(mean), tuple(std))
    return [prepare(_opened(part)) for part in in_batches(spread(_files(Path(directory)), count), batch_size)]


def labeled_images(
    directory: str | Path, *, count: PositiveInt | None = None, batch_size: PositiveInt = 8, **options: Any
) -> list[tuple[Any, Tensor]]:
    """Return the images of a folder that has one folder for each class, in batches with the numbers of their classes.

    Args:
        directory: its folders are the classes: by their names, if those are whole numbers, else in the order of names.
        count: images, spread evenly over all; default: all.
        batch_size: images of a batch.
        options: as for `image_folder`.

    Returns:
        Pairs of a batch and its labels, `(batch_size,)` in int64.

    Raises:
        CalibrationError: as `image_folder` does, and if an image lies in no folder.
    """
    directory = Path(directory)
    files = spread(_files(directory), count)
    if loose := [file for file in files if file.parent == directory]:
        raise CalibrationError(f"{loose[0]} lies in no folder of a class; put the images of each class into a folder")
    names = sorted(entry.name for entry in directory.iterdir() if entry.is_dir())  # those without images count, too
    numbered = all(name.isdecimal() for name in names)
    label = {name: int(name) if numbered else index for index, name in enumerate(names)}
    labels = torch.tensor([label[file.relative_to(directory).parts[0]] for file in files], dtype=torch.int64)
    batches = image_folder(directory, count=count, batch_size=batch_size, **options)
    return list(zip(batches, labels.split(batch_size), strict=True))


class _Prepare:
    """Makes a tensor of images, all of one size."""

    def __init__(self, size: int | None, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        if len(mean) != len(std) or len(mean) not in (1, 3) or not all(std):
            raise CalibrationError(
                f"mean has {len(mean)} numbers and std {len(std)}; give three each, for red, green and blue, or one "
                "for gray, none of std 0"
            )
        self.size, self.mode = size, "L" if len(mean) == 1 else "RGB"
        self.mean, self.std = (torch.tensor(values, dtype=torch.float32)[:, None, None] for values in (mean, std))
        self.first: tuple[int, ...] | None = None

    def __call__(self, images: list[Any]) -> Tensor:
        made = [self._tensor(image) for image in images]
        for tensor, image in zip(made, images, strict=True):
            self.first = self.first or tuple(tensor.shape)
            if tuple(tensor.shape) != self.first:
                height, width = self.first[1:]
                raise CalibrationError(
                    f"{image.filename} has {image.width} x {image.height} pixels, the images before it {width} x "
                    f"{height}; give the size that all are brought to (size=, on the command line --image-size)"
                )
        return torch.stack(made)

    def _tensor(self, image: Any) -> Tensor:
        if image.mode[0] in "IF":
            raise CalibrationError(
                f"{image.filename} has more than 8 bits per value ({image.mode}), which would be cut off; store the "
                "images as a .npy file of inputs as the model takes them"
            )
        picture = image.convert(self.mode)
        if self.size is not None:
            scale = self.size / min(picture.size)
            picture = picture.resize([max(self.size, round(scale * side)) for side in picture.size])
            left, top = ((side - self.size) // 2 for side in picture.size)
            picture = picture.crop((left, top, left + self.size, top + self.size))
        values = torch.from_numpy(np.asarray(picture, dtype=np.float32).copy()) / 255
        colors = values[None] if values.dim() == 2 else values.permute(2, 0, 1)
        return (colors - self.mean) / self.std


def _files(directory: Path) -> list[Path]:
    if not directory.is_dir():
        raise CalibrationError(f"{directory} is no folder of images")
    found = sorted(file for file in directory.rglob("*") if file.suffix.lower() in IMAGE_SUFFIXES)
    if not found:
        raise CalibrationError(f"{directory} holds no image; their names end with {', '.join(IMAGE_SUFFIXES)}")
    return found


def _opened(files: Sequence[Path]) -> list[Any]:
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError as error:
        raise CalibrationError("reading images needs Pillow: pip install 'quark_fx[vision]'") from error
    images = []
    for file in files:
        try:
            with Image.open(file) as image:
                image.load()
        except (OSError, UnidentifiedImageError, Image.DecompressionBombError) as error:
            raise CalibrationError(f"the image {file} cannot be read: {error}; remove it, or store it anew") from error
        images.append(image)
    return images


__all__ = ["IMAGE_SUFFIXES", "MEAN", "STD", "image_folder", "labeled_images"]
