"""The README keeps its word: its commands exist, and its first example prints what it shows."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


def test_every_command_installs_an_extra_that_exists_and_runs_a_file_that_exists() -> None:
    commands = [text for language, text in BLOCKS if language == "bash"]
    project = (ROOT / "pyproject.toml").read_text()
    extras = re.findall(r"-e \"\.\[(\w+)\]\"", "".join(commands))
    assert len(extras) == len(commands) == 2
    assert all(re.search(rf"^{extra} = \[", project, re.MULTILINE) for extra in extras)
    assert all((ROOT / file).is_file() for file in re.findall(r"python (\S+\.py)", "".join(commands)))


def test_the_quickstart_prints_what_the_readme_shows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / "examples" / "quickstart.py"))["main"](tmp_path)
    (shown,) = [text for language, text in BLOCKS if language == "text"]
    printed = capsys.readouterr().out
    require_same(printed, shown)
    accuracies = re.findall(r"(\d+\.\d+)%", printed)
    assert len(accuracies) == 4
    assert all(float(a) > 96 for a in accuracies)


@pytest.mark.parametrize(
    ("shown", "printed"),
    [
        ("difference: 0.12 quantization steps", "difference: 36.7 quantization steps"),
        ("int8, torch                98.22%", "int8, torch                88.22%"),
        ("int8, ONNX Runtime          98.22%      174.0", "int8, ONNX Runtime          98.22%      668.3"),
        (
            "head  linear  1.34e-03 … 1.78e-03     47.9         3.8        1.0",
            "head  linear  1.34e-02 … 1.78e-03     47.9    3.8   1.0",
        ),
        (
            "head  linear  1.34e-03 … 1.78e-03     47.9         3.8        1.0",
            "head  linear  1.34e-03 … 1.78e-03     41.9    3.8   1.0",
        ),
        ("4 of 4 weighted operators quantized", "3 of 4 weighted operators quantized"),
    ],
)
def test_another_number_is_another_text(shown: str, printed: str) -> None:
    require_same(shown, shown)
    with pytest.raises(AssertionError):
        require_same(printed, shown)


_DECIMAL = re.compile(r"(\d+\.\d+(?:e[+-]\d+)?)(%?)")


def require_same(printed: str, shown: str) -> None:
    """Raise unless two texts are the same but for what the order of a processor's additions makes of a training.

    Sizes follow from shapes, but for what compresses: 1 %. A training ends elsewhere: scales, which are ranges of
    weights, within a half, signal to noise within 2 dB, accuracies within a point, of which a sample is 0.11. A
    difference of outputs is that of roundings, which move a value by less than half a step more or less.
    """
    assert [_DECIMAL.sub("#", line).replace("─", "").split() for line in printed.strip().splitlines()] == [
        _DECIMAL.sub("#", line).replace("─", "").split() for line in shown.strip().splitlines()
    ]
    for line, other in zip(printed.strip().splitlines(), shown.strip().splitlines(), strict=True):
        noise = 2 if "…" in line else -1  # behind the ends of the scales
        for place, (a, b) in enumerate(zip(_DECIMAL.findall(line), _DECIMAL.findall(other), strict=True)):
            got, said = float(a[0]), float(b[0])
            if "e" in a[0]:
                assert said / 1.5 <= got <= said * 1.5, line
            elif "steps" in line:
                assert abs(got - said) <= 0.5, line
            elif a[1]:
                assert abs(got - said) <= 1, line
            elif place == noise:
                assert abs(got - said) <= 2, line
            else:
                assert abs(got - said) <= 0.01 * said + 0.05, line
