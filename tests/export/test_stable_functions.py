"""Functions of exp, log, powers, and variance are as accurate in the file as in torch, also for extreme inputs."""

from __future__ import annotations

from collections.abc import Callable

import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from captured_once import quantize
from tiny import rand
from torch import Tensor, nn

import quark_fx as qfx
from quark_fx.presets import INT8_STATIC

GAIN, SHIFT = torch.linspace(0.5, 1.5, 4), torch.linspace(-1, 1, 4)

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "log_sigmoid": F.logsigmoid,
    "logaddexp": lambda x: torch.logaddexp(x, x.flip(0)),
    "logaddexp of equals": lambda x: torch.logaddexp(x, x),
    "logaddexp2": lambda x: torch.logaddexp2(x, x.flip(0)),
    "softplus": F.softplus,
    "softplus, steep": lambda x: F.softplus(x, beta=2.0, threshold=5),
    "logsumexp": lambda x: torch.logsumexp(x, (0, 2)),
    "logcumsumexp": lambda x: torch.logcumsumexp(x, -1),
    "logcumsumexp, first axis": lambda x: torch.logcumsumexp(x, 0),
    "softmax": lambda x: F.softmax(x, -1),
    "softmax, masked": lambda x: F.softmax(x.masked_fill(torch.eye(4, 6).bool(), -torch.inf), -1),
    "log_softmax": lambda x: F.log_softmax(x, 1),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "silu": F.silu,
    "mish": F.mish,
    "gelu": F.gelu,
    "gelu, tanh": lambda x: F.gelu(x, approximate="tanh"),
    "expm1": lambda x: torch.expm1(-x.abs()),
    "expm1, small": lambda x: torch.expm1(x * 1e-6),
    "log1p": lambda x: torch.log1p(x.abs()),
    "log1p, small": lambda x: torch.log1p(x.abs() * 1e-6),
    "rsqrt": lambda x: torch.rsqrt(x.abs()),
    "reciprocal": torch.reciprocal,
    "power": lambda x: x.abs().pow(-0.5),
    "division": lambda x: x / x.flip(0),
    "remainder": lambda x: torch.remainder(x, 3.7),
    "remainder, negative": lambda x: torch.remainder(x, -0.3),
    "group_norm": lambda x: F.group_norm(x, 2, GAIN.to(x), SHIFT.to(x)),
    "group_norm, one group": lambda x: F.group_norm(x[..., None], 1),
    "instance_norm": lambda x: F.instance_norm(x, weight=GAIN.to(x), bias=SHIFT.to(x)),
    "layer_norm": lambda x: F.layer_norm(x, (4, 6)),
    "rms_norm": lambda x: F.rms_norm(x, (6,), eps=1e-6),
    "batch_norm, training": lambda x: F.batch_norm(x, None, None, GAIN.to(x), SHIFT.to(x), training=True),
    "var": lambda x: x.var((0, 2), correction=0),
    "std": lambda x: x.std(-1),
    "std of all": lambda x: x.std(),
    "std_mean": lambda x: torch.std_mean(x, (1, 2), correction=0, keepdim=True)[0],
    "norm": lambda x: torch.linalg.vector_norm(x, dim=-1),
    "normalize": lambda x: F.normalize(x, dim=-1),
    "cosine_similarity": lambda x: F.cosine_similarity(x, x.flip(0), dim=-1),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x),
    "cross entropy of logits": lambda x: F.binary_cross_entropy_with_logits(x, 0.3 * torch.ones_like(x)),
    "cross entropy, weighted": lambda x: F.binary_cross_entropy_with_logits(
        x, torch.ones_like(x), GAIN.to(x)[:, None], pos_weight=torch.full((6,), 2.0).to(x), reduction="none"
    ),
}

DRAWN = rand(4, 4, 6)
INPUTS = {
    "normal": DRAWN,
    "1e4": DRAWN * 1e4,
    "above 88": DRAWN.abs() + 100,
    "below -88": -DRAWN.abs() - 100,
    "a mean of 1,000 deviations": DRAWN + 1000,
    "smallest normal numbers": DRAWN * 1.2e-38,
    "1e15": DRAWN * 1e15,
}


class Functions(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {name: function(x) for name, function in FUNCTIONS.items()}


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> onnxruntime.InferenceSession:
    qmodel = quantize(Functions().eval(), INT8_STATIC.replace(exclude=("*",)), [DRAWN])
    return onnxruntime.InferenceSession(qfx.export.onnx(qmodel, tmp_path_factory.mktemp("functions") / "model.onnx"))


@pytest.mark.parametrize("kind", INPUTS)
def test_a_file_is_as_accurate_as_torch(kind: str, session: onnxruntime.InferenceSession) -> None:
    x = INPUTS[kind]
    names = [output.name for output in session.get_outputs()]
    made = dict(zip(names, session.run(names, {session.get_inputs()[0].name: x.numpy()}), strict=True))
    exact, float32 = Functions()(x.double()), Functions()(x)
    wrong = {}
    for name in FUNCTIONS:
        file, torchs = torch.from_numpy(made[name]), float32[name]
        finite = torchs.isfinite()
        if not torch.equal(finite, file.isfinite()):
            wrong[name] = "infinite or NaN elsewhere than in torch"
            continue
        known = finite & exact[name].isfinite()
        error, allowed = ((value.double() - exact[name])[known].abs().amax() for value in (file, torchs))
        # Ten times torch's own rounding, and a few roundings of the largest value or of a subnormal number.
        allowed = 10 * allowed + 1e-5 * torchs[known].abs().amax() + torch.finfo(torch.float32).tiny / 1000
        if error > allowed:
            wrong[name] = f"off by {error:.3g} of at most {allowed:.3g}"
    assert not wrong
