"""Ways to compute a weight from parameters, with each operator that reads weights: where the codes are kept.

    python -m benchmarks.computed_weights [--write]

Each model is one module with one operator, quantized by `int8_weight_only`. Cells compare the quantized graph with the
float model (the error of each output is that of the weight's rounding), and `eager()`, the stored model, the ONNX file,
and the checkpoint with the quantized graph. *codes*: the weight is in codes and the results are equal. *refused*: an
error that names the module. *float*: a row of the report says why the weight stays in float. `--write` updates
`results/computed_weights.md`.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

import quark_fx as qfx
from benchmarks.common import environment, judged, table
from benchmarks.experiment import Pages, experiment

old: Any = nn.utils
new: Any = nn.utils.parametrizations

FORMS = ("eager", "save", "onnx", "checkpoint")


@dataclass(frozen=True)
class Reader:
    """An operator that reads a weight.

    Attributes:
        shape: The shape of the weight.
        apply: The operator, of an input and a weight.
        inputs: Makes an input.
        module: A module of torch with the same operator, `None` if there is none.
    """

    shape: tuple[int, ...]
    apply: Callable[[Tensor, Tensor], Tensor]
    inputs: Callable[[], Tensor]
    module: Callable[[], nn.Module] | None = None


def _images(dims: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(2, 4, *[6] * dims)


def _tokens() -> Tensor:
    return torch.randn(3, 5, 4)


READERS = {
    "linear": Reader((8, 4), F.linear, _tokens, lambda: nn.Linear(4, 8, bias=False)),
    "conv1d": Reader((8, 4, 3), F.conv1d, _images(1), lambda: nn.Conv1d(4, 8, 3, bias=False)),
    "conv2d": Reader((8, 4, 3, 3), F.conv2d, _images(2), lambda: nn.Conv2d(4, 8, 3, bias=False)),
    "conv3d": Reader((8, 4, 2, 2, 2), F.conv3d, _images(3), lambda: nn.Conv3d(4, 8, 2, bias=False)),
    "depthwise": Reader(
        (4, 1, 3, 3),
        lambda x, w: F.conv2d(x, w, groups=4),
        _images(2),
        lambda: nn.Conv2d(4, 4, 3, groups=4, bias=False),
    ),
    "conv_transpose2d": Reader(
        (4, 6, 3, 3), F.conv_transpose2d, _images(2), lambda: nn.ConvTranspose2d(4, 6, 3, bias=False)
    ),
    "matmul": Reader((4, 8), torch.matmul, _tokens),
    "addmm": Reader((4, 8), lambda x, w: torch.addmm(x.new_ones(8), x[0], w), _tokens),
    "bmm": Reader((3, 4, 8), torch.bmm, _tokens),
    "einsum": Reader((4, 2, 3), lambda x, w: torch.einsum("btd,dhk->bhtk", x, w), _tokens),
    "embedding": Reader(
        (8, 4), lambda x, w: F.embedding(x, w), lambda: torch.randint(0, 8, (2, 5)), lambda: nn.Embedding(8, 4)
    ),
}


class Weight(nn.Module):
    """Computes a weight of a shape from its parameters, in one of `WAYS`.

    Args:
        way: Name of the way.
        shape: Of the weight.
    """

    def __init__(self, way: str, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.shape, (sizes, self.compute) = shape, WAYS[way]
        for name, size in sizes(shape).items():
            self.register_parameter(name, nn.Parameter(torch.randn(*size)))

    def forward(self, _: Tensor | None = None) -> Tensor:
        """Return the weight; a parametrization is given the parameter in whose place it is."""
        return self.compute(self)


Sizes = Callable[[tuple[int, ...]], dict[str, tuple[int, ...]]]


def _same(shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    return {"w": shape}


def _standardized(m: Any) -> Tensor:
    dims = list(range(1, m.w.dim()))
    return (m.w - m.w.mean(dims, keepdim=True)) / (m.w.std(dims, keepdim=True) + 1e-5)  # type: ignore[no-any-return]


def _by_batch_norm(m: Any) -> Tensor:
    rows = F.batch_norm(m.w.reshape(1, m.w.shape[0], -1), None, None, training=True, momentum=0.0)
    return rows.reshape_as(m.w)


WAYS: dict[str, tuple[Sizes, Callable[[Any], Tensor]]] = {
    "as stored": (_same, lambda m: m.w),
    "permuted": (lambda s: {"w": s[::-1]}, lambda m: m.w.permute(*reversed(range(m.w.dim())))),
    "reshaped": (lambda s: {"w": (torch.Size(s).numel(),)}, lambda m: m.w.reshape(m.shape)),
    "slice": (lambda s: {"w": (s[0] + 3, *s[1:])}, lambda m: m.w[1 : m.shape[0] + 1]),
    "chunk": (lambda s: {"w": (3 * s[0], *s[1:])}, lambda m: m.w.chunk(3)[1]),
    "all chunks": (lambda s: {"w": (2 * s[0], *s[1:])}, lambda m: m.w.chunk(2)[0] + m.w.chunk(2)[1]),
    "of a stack": (lambda s: {"w": (3, *s)}, lambda m: m.w[1]),
    "concatenation": (
        lambda s: {"v": (s[0] // 2, *s[1:]), "w": (s[0] - s[0] // 2, *s[1:])},
        lambda m: torch.cat([m.v, m.w]),
    ),
    "expanded": (lambda s: {"w": (1, *s[1:])}, lambda m: m.w.expand(m.shape)),
    "repeated": (lambda s: {"w": (1, *s[1:])}, lambda m: m.w.repeat(m.shape[0], *[1] * (len(m.shape) - 1))),
    "flipped": (_same, lambda m: m.w.flip(-1)),
    "scaled": (lambda s: {"w": s, "g": (s[0], *[1] * (len(s) - 1))}, lambda m: m.w * m.g.exp()),
    "standardized": (_same, _standardized),
    "by batch norm": (_same, _by_batch_norm),
    "product": (
        lambda s: {"a": (s[0], 2), "b": (2, torch.Size(s[1:]).numel())},
        lambda m: (m.a @ m.b).reshape(m.shape),
    ),
    "LoRA": (
        lambda s: {"w": s, "a": (s[0], 2), "b": (2, torch.Size(s[1:]).numel())},
        lambda m: m.w + (m.a @ m.b).reshape(m.shape) * 0.5,
    ),
}
"""By name, the sizes of the parameters for the shape of a weight, and the weight."""

NORMS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "of the module": lambda module: module,
    "weight norm": new.weight_norm,
    "weight norm, old": old.weight_norm,
    "spectral norm": new.spectral_norm,
    "spectral norm, old": old.spectral_norm,
    "orthogonal": lambda module: new.orthogonal(module, orthogonal_map="householder"),
}
"""A module of torch as it is, and under parametrizations of torch."""


class Reads(nn.Module):
    """An operator that reads a computed weight.

    Args:
        reader: The operator.
        way: How its weight is computed.
    """

    def __init__(self, reader: Reader, way: str) -> None:
        super().__init__()
        self.apply_to, self.computed = reader.apply, Weight(way, reader.shape)

    def forward(self, x: Tensor) -> Tensor:
        """Return the operator's result."""
        return self.apply_to(x, self.computed())


def cases() -> Iterator[tuple[str, str]]:
    """Yield each way with each operator that it fits."""
    yield from ((way, name) for way in WAYS for name in READERS)
    yield from ((norm, name) for norm in NORMS for name, reader in READERS.items() if reader.module is not None)


def model_of(way: str, name: str) -> nn.Module:
    """Return the model of a case, in eval mode."""
    torch.manual_seed(0)
    reader = READERS[name]
    if way in WAYS:
        return Reads(reader, way).eval()
    assert reader.module is not None
    return NORMS[way](reader.module()).eval()


def module_of(way: str, name: str) -> nn.Module | None:
    """Return a module of torch that computes its weight as a parametrization; `None` if none has the operator."""
    reader = READERS[name]
    if reader.module is None:
        return None
    torch.manual_seed(0)
    module = reader.module()
    if way in NORMS:
        return NORMS[way](module).eval()
    parametrize.register_parametrization(module, "weight", Weight(way, reader.shape))
    return module.eval()


def verdicts(way: str, name: str, forms: tuple[str, ...] = FORMS) -> dict[str, str]:
    """Return what becomes of the weight of a case, by form.

    Raises:
        AssertionError: If a result is wrong, or a weight in float has no row.
    """
    if "checkpoint" in forms and len(forms) > 1:
        others = tuple(form for form in forms if form != "checkpoint")
        return verdicts(way, name, others) | verdicts(way, name, ("checkpoint",))
    model = _as_transformers(way, name) if "checkpoint" in forms else nn.Sequential(model_of(way, name)).eval()
    torch.manual_seed(1)
    batches = [READERS[name].inputs() for _ in range(2)]
    before = {key: value.clone() for key, value in model.state_dict().items()}
    qmodel = qfx.quantize(model, "int8_weight_only", batches, progress=False)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items()), "the model changed"
    rows = list(qmodel.report())
    assert rows, "no row"
    with torch.no_grad():
        real, rounded = model(batches[0]), qmodel(batches[0])
    # A step of int8 is at most 1/127 of the largest weight of a channel; sums of few products are near that.
    assert float((real - rounded).abs().max()) <= 0.05 * float(real.abs().max()) + 1e-6, "the quantized graph is wrong"
    if left := next((row for row in rows if not row.weight), None):
        assert left.reason, "no reason"
        return dict.fromkeys(forms, f"float: {left.reason}")
    with tempfile.TemporaryDirectory() as folder:
        return {form: _checked(form, model, qmodel, batches[0], rounded, Path(folder)) for form in forms}


def _checked(form: str, model: nn.Module, qmodel: qfx.QuantizedModel, x: Tensor, expected: Tensor, folder: Path) -> str:
    try:
        if form == "eager":
            found = qmodel.eager()(x)
        elif form == "save":
            qmodel.save(folder / "saved")
            found = qfx.load(folder / "saved")(x)
        elif form == "onnx":
            file = qfx.export.onnx(qmodel, folder / "m.onnx")
            assert qfx.verify(qmodel, file, [x]).max_steps < 0.01, "the file is wrong"
            return "codes"
        else:
            qfx.export.huggingface(qmodel, folder / "hf")
            with torch.no_grad():
                found = type(model).from_pretrained(folder / "hf", dtype=torch.float32).eval()(x)  # type: ignore[attr-defined]
    except qfx.QuarkError as error:
        return f"refused: {error}"
    distance = float((found - expected).abs().max())
    assert distance <= 1e-4 * float(expected.abs().max()) + 1e-6, f"{form} is wrong by {distance}"
    return "codes"


def _as_transformers(way: str, name: str) -> nn.Module:
    """Return a model of transformers whose module was parametrized after it was made, or computes its weight itself."""
    import transformers

    class Wraps(transformers.PreTrainedModel):  # type: ignore[misc]
        config_class = transformers.PretrainedConfig
        main_input_name = "x"

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            module = READERS[name].module
            self.inner = model_of(way, name) if module is None else module()
            self.post_init()

        def _init_weights(self, module: nn.Module) -> None:
            pass

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.inner(x)
            return y

    model: Any = Wraps(transformers.PretrainedConfig())
    model.inner = module_of(way, name) or model.inner
    wrapped: nn.Module = model.eval()
    return wrapped


def _cell(found: dict[str, str]) -> str:
    kinds = [verdict.partition(":")[0] for verdict in found.values()]
    cells = zip(found, kinds, strict=True)
    others = [f"{form} {kind}" for form, kind in cells if kind != "codes" and form != "checkpoint"]
    return ", ".join(others) or "codes"


_LEGEND = (
    "A cell says *codes* if the weight is in codes and `eager()`, the stored model, and the ONNX file are right; "
    "otherwise it names the other forms. For checkpoints, the weight is a parametrization of a module of torch where "
    "one has the operator. A checkpoint holds the codes under the module's own name (`layer.weight_packed`), where "
    "transformers reads them into the class without the parametrization. It holds `nn.Linear` and `nn.Embedding` in "
    "every row, and refuses convolutions and operators that are no modules: no reader has a place for these."
)


@experiment(page="computed_weights.md", own_environment=True)
def main() -> Pages:
    """Measure, and yield the page; return 1 if a cell is wrong."""
    counts, lines = Counter[tuple[str, str]](), dict[str, dict[str, str]]()
    for way, name in cases():
        try:
            found = verdicts(way, name)
        except AssertionError as error:
            print(f"{way}, {name}: WRONG: {error}", flush=True)
            found = dict.fromkeys(FORMS, f"wrong: {error}")
        counts.update((form, verdict.partition(":")[0]) for form, verdict in found.items())
        lines.setdefault(way, {})[name] = _cell(found)
        print(f"{way}, {name}: {_cell(found)}", flush=True)
    kinds = ("codes", "refused", "float", "wrong")
    totals = [[form, *(str(counts[form, kind]) for kind in kinds)] for form in FORMS]
    overall = sum(counts[form, "codes"] for form in FORMS) / sum(counts.values())
    text = [
        table(["form", *kinds], totals),
        f"{overall:.0%} of the {sum(counts.values())} cells hold codes.",
        table(["weight", *READERS], [[way, *(line.get(name, "–") for name in READERS)] for way, line in lines.items()]),
    ]
    heading = (
        f"# Weights computed from parameters\n\nWritten by `python -m benchmarks.computed_weights --write`. {_LEGEND}"
    )
    yield "\n\n".join([heading, environment(), *text])
    outcomes = Counter[str]()
    for (_, kind), count in counts.items():
        outcomes["right" if kind == "codes" else kind] += count
    return judged(outcomes)


if __name__ == "__main__":
    main()
