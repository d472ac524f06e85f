"""Readers of the batches that `--data` and its options select."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import torch

from quark_fx.command_line.options import Reading
from quark_fx.command_line.subjects import Subject, has_tokenizer
from quark_fx.data import chat_windows, image_folder, labeled_images, read_arrays, read_text, text_lines, text_windows
from quark_fx.data.arrays import ARRAY_SUFFIXES
from quark_fx.data.images import MEAN, STD, image_files
from quark_fx.data.sources import is_installed_name
from quark_fx.errors import CalibrationError
from quark_fx.system.isolation import warn


def read_batches(reading: Reading, subject: Subject) -> list[Any]:
    """Return batches of inputs for a model.

    Raises:
        CalibrationError: If data is missing or cannot be read, or text comes without a tokenizer.
    """
    path = _existing(reading)
    if path.is_dir():
        return image_folder(path, count=reading.samples, batch_size=reading.batch_size, **_images(reading, subject))
    if path.suffix in ARRAY_SUFFIXES:
        batches = read_arrays(path, count=reading.samples, batch_size=reading.batch_size)
        return [_apart(batch)[0] for batch in batches]
    return _text(path, reading, subject)


def calibration(reading: Reading, subject: Subject, *, needed: bool) -> list[Any]:
    """Return calibration data; without `--data`, return the example batch of the model, or a generated batch.

    Args:
        reading: Options of the data.
        subject: Float model.
        needed: Whether the values of the batches matter, so that a generated batch is not enough.

    Raises:
        CalibrationError: If data is required and missing, or cannot be read (see `read_batches`).
    """
    if reading.data is not None:
        return read_batches(reading, subject)
    example = subject.example if subject.example is not None else subject.made_up()
    if example is None or (subject.example is None and needed):
        raise CalibrationError(
            f"{'this configuration needs' if needed else 'capturing the model needs'} data: pass --data with a text "
            "file, a folder of images, or a .npy, .npz or .safetensors file"
        )
    if needed:
        warn(f"no --data: calibrating only on the example batch of {subject.name}; pass real inputs with --data")
    return list(example) if isinstance(example, list) else [example]


def read_labeled(reading: Reading, subject: Subject) -> list[tuple[Any, torch.Tensor]]:
    """Return pairs of batches and labels, from images in one folder per class, or from arrays that include `labels`.

    Raises:
        CalibrationError: If labels are missing, or data cannot be read (see `read_batches`).
    """
    path = _existing(reading)
    if path.is_dir():
        return labeled_images(path, count=reading.samples, batch_size=reading.batch_size, **_images(reading, subject))
    if path.suffix not in ARRAY_SUFFIXES:
        raise CalibrationError(
            f"{path} has no labels; pass a folder of images with one subfolder per class, or a file of arrays with "
            "`labels`"
        )
    batches = [_apart(b) for b in read_arrays(path, count=reading.samples, batch_size=reading.batch_size)]
    pairs = [(inputs, labels) for inputs, labels in batches if labels is not None]
    if not pairs:
        raise CalibrationError(
            f"{path} contains no array called `labels`; store the class of each sample under that name"
        )
    return pairs


def has_labels(reading: Reading) -> bool:
    """Tell whether the data contains labels."""
    path = _existing(reading)
    if path.is_dir():
        return any(file.parent != path for file in image_files(path))
    if path.suffix not in ARRAY_SUFFIXES:
        return False
    return _apart(read_arrays(path, count=1)[0])[1] is not None


def is_text(reading: Reading) -> bool:
    """Tell whether the data is text."""
    path = _existing(reading)
    return not path.is_dir() and path.suffix not in ARRAY_SUFFIXES


def find_tokenizer(reading: Reading, subject: Subject) -> Any:
    """Return the tokenizer from the folder in the options, the model's folder, or the model's file; `None` without one.

    Raises:
        CalibrationError: If `--tokenizer` names a folder without a tokenizer, or a tokenizer cannot be read.
    """
    folder = reading.tokenizer or subject.folder
    if folder is None or not has_tokenizer(folder):
        if reading.tokenizer is not None:
            raise CalibrationError(f"{folder} contains no tokenizer; pass the directory that contains tokenizer.json")
        if subject.gguf is not None:
            return _pretrained("AutoTokenizer", subject.gguf.parent, gguf_file=subject.gguf.name)
        return None
    return _pretrained("AutoTokenizer", folder)


def _apart(batch: Any) -> tuple[Any, torch.Tensor | None]:
    """Return the inputs and the labels of a batch of arrays; labels are `None` if the batch does not contain them."""
    if not isinstance(batch, dict) or "labels" not in batch:
        return batch, None
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    return next(iter(inputs.values())) if len(inputs) == 1 else inputs, batch["labels"]


def _existing(reading: Reading) -> Path:
    if reading.data is None:
        raise CalibrationError(
            "data is missing; pass --data: a text, .json, .jsonl, or .csv file, text of an installed package "
            "(package:name), a folder of images, or a .npy, .npz or .safetensors file"
        )
    if not reading.data.exists() and not is_installed_name(reading.data):
        raise CalibrationError(f"the data {reading.data} does not exist")
    _require_used(reading, reading.data)
    return reading.data


_OF_IMAGES, _OF_TEXT = ("image_size", "mean", "std"), ("lines",)
"""Names of options that apply only to images, and only to text."""


def _require_used(reading: Reading, path: Path) -> None:
    """Raise `CalibrationError` if options are given that apply to another kind of data."""
    for what, names, fits in (
        ("a folder of images", _OF_IMAGES, path.is_dir()),
        ("text", _OF_TEXT, not path.is_dir() and path.suffix not in ARRAY_SUFFIXES),
    ):
        options = {name: value for name in names if (value := getattr(reading, name)) is not None}
        if options and not fits:
            wrong = (
                "--windows" if value is False else f"--{name.replace('_', '-')}" for name, value in options.items()
            )
            raise CalibrationError(f"{path} is not {what}; drop {', '.join(wrong)}")


def _text(path: Path, reading: Reading, subject: Subject) -> list[Any]:
    tokenizer = find_tokenizer(reading, subject)
    if tokenizer is None:
        raise CalibrationError(
            f"{path} is text, but no tokenizer was found{f' in {subject.folder}' if subject.folder else ''}; pass "
            "--tokenizer DIRECTORY, or token ids as an array `input_ids` in an .npz file"
        )
    text: Any
    try:
        text = read_text(path)
    except CalibrationError as error:
        error.add_note(
            f"Data that is not text must be a folder of images or a file that ends with {', '.join(ARRAY_SUFFIXES)}."
        )
        raise
    options: dict[str, Any] = {
        "length": min(reading.length, subject.longest or reading.length),
        "count": reading.samples,
        "batch_size": reading.batch_size,
    }
    lines = subject.reads_lines if reading.lines is None else reading.lines
    if not isinstance(text, str) and not isinstance(text[0], str):
        if lines:
            raise CalibrationError(f"{path} contains conversations, not lines of text; pass --windows")
        return chat_windows(text, tokenizer, **options)
    if not lines:
        return text_windows(text, tokenizer, **options)
    batches = text_lines(text, tokenizer, **options)
    if subject.inputs is None:
        return batches
    return [{name: value for name, value in batch.items() if name in subject.inputs} for batch in batches]


def _images(reading: Reading, subject: Subject) -> dict[str, Any]:
    """Return the options of `image_folder`: a checkpoint's own image processor, unless options replace it."""
    folder = subject.folder
    asked = reading.image_size or reading.mean or reading.std
    if folder is not None and (folder / "preprocessor_config.json").is_file() and not asked:
        processor = _pretrained("AutoImageProcessor", folder)
        return {"prepare": lambda images: dict(processor(images, return_tensors="pt"))}
    size = reading.image_size
    if size is None and isinstance(subject.example, torch.Tensor) and subject.example.dim() == 4:
        size = min(subject.example.shape[2:])
    return {"size": size, "mean": _numbers(reading.mean, MEAN), "std": _numbers(reading.std, STD)}


def _numbers(text: str | None, default: tuple[float, ...]) -> tuple[float, ...]:
    if text is None:
        return default
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise CalibrationError(f"{text!r} is not a list of numbers; write them as 0.485,0.456,0.406") from error


def _pretrained(kind: str, folder: Path, **options: Any) -> Any:
    try:
        transformers = importlib.import_module("transformers")
    except ImportError as error:
        raise CalibrationError("reading a tokenizer needs transformers: pip install 'quark_fx[hf]'") from error
    options |= {"local_files_only": True, "trust_remote_code": False}
    place = folder / options.get("gguf_file", "")
    try:
        return getattr(transformers, kind).from_pretrained(folder, **options)
    except Exception as error:  # transformers may raise any error for its files
        hint = "; pass --tokenizer DIRECTORY" if kind == "AutoTokenizer" else ""
        raise CalibrationError(
            f"transformers cannot read the tokenizer or processor in {place}: {error}{hint}"
        ) from error
