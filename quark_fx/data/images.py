"""Batches from folders of images."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quark_fx.data.batches import in_batches, spread
from quark_fx.errors import CalibrationError
from quark_fx.system.isolation import warn
from quark_fx.system.options import PositiveInt, checked_call

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".gif", ".tif", ".tiff")
"""Suffixes of image files."""

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Mean and standard deviation of red, green, and blue in ImageNet, on a scale from 0 to 1, which most networks use."""

Prepare = Callable[[list[Any]], Any]
"""Function from a list of Pillow images to a batch."""


class LabeledImages(list[tuple[Any, Tensor]]):
    """Batches of images with their labels: the result of `labeled_images`.

    Attributes:
        class_to_idx: Label of each class by the name of its folder, as in torchvision's `ImageFolder`.
    """

    def __init__(self, pairs: Iterable[tuple[Any, Tensor]], class_to_idx: Mapping[str, int]) -> None:
        super().__init__(pairs)
        self.class_to_idx = dict(class_to_idx)


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
    """Read the images in a folder and its subfolders in batches, normalized with `mean` and `std` per color.

    Images are rotated by the orientation in their EXIF data. Hidden files and folders (`.ipynb_checkpoints`,
    `._a.png`) are skipped.

    Args:
        directory: Folder to search, including its subfolders.
        size: Side length in pixels. Images are scaled so that the shorter side has this length, then center-cropped.
            By default, images keep their size, which must be the same for all images.
        mean: Mean of each color, from 0 to 1; one number for grayscale images.
        std: Standard deviation of each color, in the same form as `mean`.
        count: Number of images, spread evenly over all images. Default: all.
        batch_size: Images per batch.
        prepare: Function from a list of Pillow images to a batch, such as an image processor of transformers; it
            replaces scaling and normalization.

    Returns:
        Batches `(batch_size, colors, height, width)` in float32, or the results of `prepare`.

    Raises:
        CalibrationError: If the folder is empty, an image cannot be read or has transparent pixels, sizes differ, or
            Pillow is missing.
    """
    prepare = prepare or _Prepare(size, tuple(mean), tuple(std))
    return [prepare(_opened(part)) for part in in_batches(spread(image_files(Path(directory)), count), batch_size)]


@checked_call
def labeled_images(
    directory: str | Path, *, count: PositiveInt | None = None, batch_size: PositiveInt = 8, **options: Any
) -> LabeledImages:
    """Read the images of a folder that has one subfolder per class, in batches with their labels.

    Every subfolder with at least one image is a class; hidden and empty folders are skipped. If the names of all
    classes are distinct integers, those integers are the labels. Otherwise, classes are numbered from 0 in the order of
    their names, as in torchvision's `ImageFolder`. `class_to_idx` of the result maps names to labels.

    Args:
        directory: Folder that contains the folders of the classes.
        count: Number of images, spread evenly over all images. Default: all.
        batch_size: Images per batch.
        options: Other arguments of `image_folder`.

    Returns:
        Pairs of a batch and its labels, `(batch_size,)` in int64.

    Raises:
        CalibrationError: If an image is not in the folder of a class, and for the errors of `image_folder`.
    """
    directory = Path(directory)
    files = image_files(directory)
    if loose := [file for file in files if file.parent == directory]:
        raise CalibrationError(
            f"{loose[0]} is not in a subfolder for a class; move the images of each class to a subfolder of their own"
        )
    classes = [file.relative_to(directory).parts[0] for file in files]
    names = sorted(set(classes))
    numbered = all(name.isdecimal() for name in names) and len(names) == len(set(map(int, names)))  # 1 equals 01
    label = {name: int(name) if numbered else index for index, name in enumerate(names)}
    visible = {entry.name for entry in directory.iterdir() if entry.is_dir() and not entry.name.startswith(".")}
    if (empty := sorted(visible - label.keys())) and not numbered:
        warn(
            f"{', '.join(empty[:3])} in {directory} contain no images and are skipped as classes, so the labels of "
            "later classes may differ from those in training: compare class_to_idx of the result"
        )
    labels = torch.tensor([label[name] for name in spread(classes, count)], dtype=torch.int64)
    batches = image_folder(directory, count=count, batch_size=batch_size, **options)
    return LabeledImages(zip(batches, labels.split(batch_size), strict=True), label)


class _Prepare:
    """Default `prepare` function: scales, crops, and normalizes Pillow images, and stacks them.

    It remembers the first image's size, and raises an error for images of another size.
    """

    def __init__(self, size: int | None, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        if len(mean) != len(std) or len(mean) not in (1, 3) or not all(std):
            raise CalibrationError(
                f"mean has {len(mean)} numbers and std {len(std)}; pass three numbers each, for red, green, and blue, "
                "or one for gray; std must not be 0"
            )
        self.size, self.mode = size, "L" if len(mean) == 1 else "RGB"
        self.mean, self.std = (torch.tensor(values, dtype=torch.float32)[:, None, None] for values in (mean, std))
        self.first: tuple[int, ...] | None = None

    def __call__(self, images: list[Any]) -> Tensor:
        tensors = [self._tensor(image) for image in images]
        for tensor, image in zip(tensors, images, strict=True):
            self.first = self.first or tuple(tensor.shape)
            if tuple(tensor.shape) != self.first:
                height, width = self.first[1:]
                raise CalibrationError(
                    f"{image.filename} has {image.width} x {image.height} pixels, but the images before it have "
                    f"{width} x {height}; set a common size (size=, or --image-size on the command line)"
                )
        return torch.stack(tensors)

    def _tensor(self, image: Any) -> Tensor:
        if image.mode[0] in "IF":
            raise CalibrationError(
                f"{image.filename} has more than 8 bits per value ({image.mode}), which conversion to 8 bits would "
                "lose; store the model's inputs in a .npy file instead"
            )
        if image.has_transparency_data:
            image = _opaque(image)
        picture = image.convert(self.mode)
        if self.size is not None:
            scale = self.size / min(picture.size)
            picture = picture.resize([max(self.size, round(scale * side)) for side in picture.size])
            x, y = ((side - self.size) // 2 for side in picture.size)
            picture = picture.crop((x, y, x + self.size, y + self.size))
        values = torch.from_numpy(np.asarray(picture, dtype=np.float32).copy()) / 255
        colors = values[None] if values.dim() == 2 else values.permute(2, 0, 1)
        return (colors - self.mean) / self.std


def image_files(directory: Path) -> list[Path]:
    """Return the image files in a folder and its subfolders, sorted; hidden files and folders are skipped."""
    if not directory.is_dir():
        raise CalibrationError(f"{directory} is not a folder; pass a folder of images")
    files: list[Path] = []
    for folder, subfolders, names in os.walk(directory, followlinks=True):
        place = Path(folder).resolve()  # do not follow links to parent folders, which would loop forever
        subfolders[:] = [
            name
            for name in subfolders
            if not name.startswith(".") and not place.is_relative_to(Path(folder, name).resolve())
        ]
        visible = (Path(folder, name) for name in names if not name.startswith("."))
        files += [file for file in visible if file.suffix.lower() in IMAGE_SUFFIXES]
    if not files:
        raise CalibrationError(f"{directory} holds no images; supported suffixes are {', '.join(IMAGE_SUFFIXES)}")
    return sorted(files)


def _opaque(image: Any) -> Any:
    """Return an image without its alpha channel; raise an error if it has transparent pixels."""
    whole = image.convert("RGBA")
    if whole.getchannel("A").getextrema()[0] < 255:
        raise CalibrationError(
            f"{image.filename} has transparent pixels, whose background is unknown; save the image without "
            "transparency, on the background that the model was trained with, or pass prepare="
        )
    return whole.convert("RGB")


def _opened(files: Sequence[Path]) -> list[Any]:
    try:
        from PIL import Image, ImageOps, UnidentifiedImageError
    except ImportError as error:
        raise CalibrationError("reading images needs Pillow: pip install 'quark_fx[vision]'") from error
    images = []
    for file in files:
        try:
            with Image.open(file) as image:
                image.load()
                ImageOps.exif_transpose(image, in_place=True)
        except (OSError, UnidentifiedImageError, Image.DecompressionBombError) as error:
            raise CalibrationError(f"the image {file} cannot be read: {error}; remove or replace it") from error
        images.append(image)
    return images


__all__ = ["IMAGE_SUFFIXES", "MEAN", "STD", "LabeledImages", "image_files", "image_folder", "labeled_images"]
