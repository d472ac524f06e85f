"""Texts and conversations from files and from installed packages."""

from __future__ import annotations

import csv
import importlib
import importlib.util
import io
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from quark_fx.errors import CalibrationError
from quark_fx.system.options import checked_call
from quark_fx.system.untrusted import parse_json, require_regular

Conversation = list[dict[str, Any]]
"""List of the messages of a chat, each a dictionary `{"role": "user", "content": "..."}`."""

_INSTALLED = re.compile(r"([A-Za-z_][\w.]*):([\w./-]+)")

_JSON = (".json", ".jsonl", ".ndjson")
_DELIMITERS = {".csv": ",", ".tsv": "\t"}

_ROLES = {"human": "user", "gpt": "assistant"}
"""Roles in chat templates by their ShareGPT names."""


def is_installed_name(source: str | Path) -> bool:
    """Return True if a source names a file or variable of a package (`module:name`) and is not a file on disk.

    >>> is_installed_name("pydoc_data.topics:topics")
    True
    >>> is_installed_name("notes.txt")
    False
    """
    return _INSTALLED.fullmatch(str(source)) is not None and not Path(source).exists()


@checked_call
def read_text(source: str | Path) -> str | list[str] | list[Conversation]:
    """Read text from a file or an installed package: one text, documents, or conversations.

    >>> texts = read_text("pydoc_data.topics:topics")  # Python's language reference, which comes with Python

    Args:
        source: File, or `package.module:name`: a file in the folder of a package, or a variable of a module that holds
            a text, texts, or a mapping to texts. A JSON file (a list, or one value per line) holds strings, objects
            with a `text`, or objects with `messages` (`role`, `content`) or `conversations` (`from`, `value`). A `.csv`
            or `.tsv` file needs a column `text`. A byte order mark is ignored.

    Raises:
        CalibrationError: If the source does not exist, or does not have one of these forms.
    """
    if is_installed_name(source):
        content = _installed(str(source))
        if not isinstance(content, Path):
            return content
        source = content
    path = Path(source)
    try:
        require_regular(path)
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise CalibrationError(f"{path} cannot be read as text: {error}") from error
    if "\0" in text:
        raise CalibrationError(f"{path} is a binary file, because it contains zero bytes; pass a text file in UTF-8")
    records = _records(path, text)
    return text if records is None else _samples(path, records)


def _installed(name: str) -> Path | str | list[str]:
    package, part = name.split(":")
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        spec = None  # a parent package is missing, or the module lacks a spec
    if spec is None:
        raise CalibrationError(
            f"file {name} does not exist, and package {package} is not installed; install the package, or pass an "
            "existing file"
        )
    for folder in map(Path, spec.submodule_search_locations or ()):
        file = (folder / part).resolve()
        if file.is_file() and file.is_relative_to(folder.resolve()):
            return file
    try:
        value = getattr(importlib.import_module(package), part, None)
    except (Exception, SystemExit) as error:  # the code of the package can raise any error
        raise CalibrationError(f"importing {package} raised {type(error).__name__}: {error}") from error
    texts = list(value.values()) if isinstance(value, Mapping) else value
    if isinstance(texts, Iterable) and not isinstance(texts, str | bytes):
        texts = list(texts)
    if isinstance(texts, str) or (isinstance(texts, list) and texts and all(isinstance(text, str) for text in texts)):
        return texts
    raise CalibrationError(
        f"{package} has neither a file {part} nor a text variable of that name; name a file in the package's folder, "
        "or a variable that holds a string, a list of strings, or a dict of strings"
    )


def _records(path: Path, text: str) -> list[tuple[str, Any]] | None:
    """Return pairs of a place, for error messages, and a value of a JSON file or table; `None` for plain text."""
    suffix = path.suffix.lower()
    if suffix in _DELIMITERS:
        return _rows(path, text, _DELIMITERS[suffix])
    if suffix not in _JSON and text.lstrip()[:1] not in ("{", "["):
        return None
    try:
        whole = parse_json(text)
        return [(f"sample {n}", value) for n, value in enumerate(whole if isinstance(whole, list) else [whole], 1)]
    except ValueError:
        if suffix not in _JSON and not isinstance(_first_line(text), dict):
            return None  # plain text that begins with a bracket
    records: list[tuple[str, Any]] = []
    for number, line in enumerate(text.split("\n"), 1):  # a JSON string may contain other line separators
        try:
            records += [(f"line {number}", parse_json(line))] if line.strip() else []
        except ValueError as error:
            raise CalibrationError(f"line {number} of {path} is not valid JSON: {error}") from error
    return records


def _first_line(text: str) -> Any:
    try:
        return parse_json(text.lstrip().partition("\n")[0])
    except ValueError:
        return None


def _rows(path: Path, text: str, delimiter: str) -> list[tuple[str, Any]]:
    reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    try:
        columns = reader.fieldnames or ()
        if "text" not in columns:
            raise CalibrationError(
                f"{path} is a table without a column `text` (its columns: {', '.join(columns) or 'none'}); rename the "
                "column of the texts to `text`, or pass the texts themselves to qfx.data.text_windows or text_lines"
            )
        return [(f"row {number}", {"text": row["text"]}) for number, row in enumerate(reader, 1)]
    except csv.Error as error:
        raise CalibrationError(f"line {reader.line_num} of {path} is not valid CSV: {error}") from error


def _samples(path: Path, records: list[tuple[str, Any]]) -> list[str] | list[Conversation]:
    texts, conversations = list[str](), list[Conversation]()
    for place, sample in records:
        record = sample if isinstance(sample, dict) else {"text": sample}
        if isinstance(record.get("text"), str):
            texts.append(record["text"])
            continue
        messages = record.get("messages") or record.get("conversations")
        if not isinstance(messages, list) or not messages or not all(isinstance(one, dict) for one in messages):
            raise CalibrationError(
                f"{place} of {path} must have `text`, or `messages` as a list of objects, but has neither"
            )
        conversations.append([_message(one) for one in messages])
    if texts and conversations:
        raise CalibrationError(f"{path} contains both texts and conversations; split them into two files")
    if not texts and not conversations:
        raise CalibrationError(f"{path} is empty; write one JSON object per line")
    return conversations or texts


def _message(one: dict[str, Any]) -> dict[str, Any]:
    if "from" not in one:
        return one
    return {"role": _ROLES.get(str(one["from"]), one["from"]), "content": one.get("value")}


__all__ = ["Conversation", "is_installed_name", "read_text"]
