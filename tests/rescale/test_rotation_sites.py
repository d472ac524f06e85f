"""Every rotation that is found leaves the function as it is, and every operator without one says why."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tiny import all_but, rand, seeded
from torch import Tensor, nn
from torch.fx import GraphModule
from transformers import LlamaConfig, LlamaForCausalLM
from zoo import SIMILAR, ZOO, capture, difference, double_inputs, folded, in_double, outputs

from quark_fx.graph.linear import Linear
from quark_fx.graph.pass_manager import copy_graph
from quark_fx.numbers.rotation import Rotation, factors, hadamard
from quark_fx.rescale.rotation_sites import RotationSite, apply_rotation, find_rotation_sites

ROUNDING = 1e-11
"""Of the largest output, for float64."""


def rotate(gm: GraphModule, sites: Sequence[RotationSite], block: int | None = None) -> None:
    """Rotate sites of a graph by random matrices."""
    generator = torch.Generator().manual_seed(0)
    for found in sites:
        site = found if block is None else found.in_blocks(block)
        apply_rotation(gm, site, site.draw(generator))
    gm.graph.lint()
    gm.recompile()


def rotated(gm: GraphModule) -> GraphModule:
    """Return a copy with all of its sites rotated."""
    gm = copy_graph(gm)
    rotate(gm, find_rotation_sites(gm).sites)
    return gm


def sites_of(model: nn.Module, batch: Any) -> tuple[RotationSite, ...]:
    """Capture, require that rotating is exact, and return the sites."""
    gm = in_double(capture(seeded(model), batch))
    inputs = double_inputs(batch)
    assert difference(outputs(gm, inputs), outputs(rotated(gm), inputs)) < ROUNDING
    return find_rotation_sites(gm).sites


ROTATED = {
    "ResNeXt": ((0, 0), (0, 0)),
    "MobileNetV2": ((4, 0), (4, 0)),
    "MobileNetV3": ((3, 1), (3, 1)),
    "EfficientNet": ((2, 0), (2, 0)),
    "ConvNeXt": ((4, 4), (6, 6)),
    "ViT": ((9, 2), (9, 7)),
    "Swin": ((18, 5), (18, 14)),
    "BERT": ((13, 12), (13, 12)),
    "GPT-2": ((8, 4), (8, 6)),
    "BLOOM": ((8, 4), (8, 6)),
    "Llama": ((15, 2), (15, 7)),
    "Phi-3": ((9, 2), (9, 7)),
    "Mixtral": ((15, 2), (15, 7)),
    "Qwen2-MoE": ((23, 4), (23, 9)),
    "T5 encoder": ((12, 3), (12, 6)),
    "Whisper encoder": ((6, 3), (6, 3)),
}
"""How many operators read what is rotated, and how many values are rotated at run time, with the factors of norms
folded and without; of most CNNs as of ResNeXt."""


@pytest.mark.parametrize("streams", [True, False], ids=["whole streams", "inputs"])
@pytest.mark.parametrize("name", all_but(ROTATED, SIMILAR))
def test_an_architecture_keeps_its_function(name: str, streams: bool) -> None:
    original, made = folded(name)
    for block in (4, None):
        gm = copy_graph(original)
        analysis = find_rotation_sites(gm, streams=streams)
        readers = {node for node in gm.graph.nodes if Linear.of(node) is not None}
        found = {linear.node for site in analysis.sites for linear in site.readers}
        assert readers - found == set(analysis.reasons), "an operator is in a site or has a reason"
        assert (len(found), sum(len(site.at_run_time) for site in analysis.sites)) == ROTATED[name][not streams]
        rotate(gm, analysis.sites, block)
        for batch, expected in zip(ZOO[name].batches, made, strict=True):
            assert difference(expected, outputs(gm, double_inputs(batch))) < ROUNDING


def llama(**options: Any) -> nn.Module:
    sizes = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=32, use_cache=False, **options)
    model: nn.Module = LlamaForCausalLM(config)
    return model


TOKENS = {"input_ids": torch.tensor([[1, 5, 9, 2], [7, 3, 3, 0]])}


def test_a_decoder_has_the_rotations_of_quarot() -> None:
    residual, values, hidden = sites_of(llama(tie_word_embeddings=False), TOKENS)
    assert (residual.size, len(residual.readers), residual.at_run_time) == (24, 6, ())
    assert len(residual.norms) == 3
    assert (values.size, len(values.readers), values.at_run_time) == (6, 1, ())
    assert (hidden.size, len(hidden.readers), len(hidden.at_run_time)) == (40, 1, 1)


def test_tied_embeddings_stay_tied_and_the_stream_is_rotated_behind_and_before_them() -> None:
    residual, *_ = sites_of(llama(tie_word_embeddings=True), TOKENS)
    assert [value.name for value in residual.made] == ["embedding"]
    assert len(residual.read) == 1
    assert len(residual.readers) == 5


class Normed(nn.Module):
    """A residual branch behind LayerNorm."""

    def __init__(self, *, bias: bool) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(5, 12), nn.Linear(12, 3)
        self.norm, self.branch = nn.LayerNorm(12), nn.Linear(12, 12, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        y: Tensor = self.leave(x + self.branch(self.norm(x)[None].flatten(0, 1)))
        return y


def test_an_offset_goes_into_the_bias_behind_it() -> None:
    _, site = sites_of(Normed(bias=True), rand(3, 5))
    assert [folded.into_biases for folded in site.norms] == [True]
    assert site.keeps_mean
    assert not site.at_run_time


def test_an_offset_without_a_bias_behind_it_is_rotated() -> None:
    _, site = sites_of(Normed(bias=False), rand(3, 5))
    assert [folded.into_biases for folded in site.norms] == [False]
    assert not site.at_run_time


def test_a_norm_whose_offset_nothing_can_take_reads_what_it_read() -> None:
    model = Normed(bias=False)
    gm = capture(seeded(model), rand(3, 5))
    model.norm.weight.data[4] = 0
    found = find_rotation_sites(gm).sites
    assert {len(site.norms) for site in found} == {0}
    assert any(site.at_run_time for site in found)
    gm = in_double(gm)
    inputs = double_inputs(rand(3, 5))
    assert difference(outputs(gm, inputs), outputs(rotated(gm), inputs)) < ROUNDING


def test_heads_with_gates_of_their_own_are_not_mixed() -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.value, self.gate, self.out = nn.Linear(6, 12), nn.Linear(6, 3), nn.Linear(12, 2)

        def forward(self, x: Tensor) -> Tensor:
            heads = self.value(x).unflatten(-1, (3, 4)) * self.gate(x)[..., None]
            y: Tensor = self.out(heads.flatten(-2))
            return y

    sites = {site.readers[0].shape: site for site in sites_of(Gated(), rand(2, 5, 6))}
    assert sites[2, 12].size == 4
    assert not sites[2, 12].at_run_time


def test_an_activation_function_is_rotated_behind() -> None:
    _, site = sites_of(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), rand(3, 4))
    assert [value.name for value in site.made] == ["relu"]
    assert [reader.shape for reader in site.readers] == [(2, 8)]


@pytest.mark.parametrize("size", [1, 2, 4, 12, 20, 28, 36, 44, 60, 64, 76, 108, 128])
def test_hadamard_matrices(size: int) -> None:
    made = hadamard(size)
    assert made is not None
    assert bool((made.abs() == 1).all())
    assert torch.equal(made @ made.T, size * torch.eye(size))


@pytest.mark.parametrize("size", [3, 6, 52, 92])
def test_sizes_without_a_hadamard_matrix_that_is_known_here(size: int) -> None:
    assert hadamard(size) is None


@pytest.mark.parametrize("keeps_mean", [False, True])
@pytest.mark.parametrize("size", [1, 7, 36, 86, 576])
def test_a_random_matrix_is_orthogonal(size: int, keeps_mean: bool) -> None:
    rotation = Rotation.random(size, torch.Generator().manual_seed(1), keeps_mean=keeps_mean)
    whole = torch.kron(rotation.left, rotation.right)
    torch.testing.assert_close(whole @ whole.T, torch.eye(size, dtype=torch.float64), rtol=0, atol=1e-12)
    x = rand(3, size).double()
    torch.testing.assert_close(rotation.apply(x), x @ whole, rtol=0, atol=1e-12)
    torch.testing.assert_close(rotation.inverse.apply(rotation.apply(x)), x, rtol=0, atol=1e-12)
    if keeps_mean:
        torch.testing.assert_close(rotation.apply(x).mean(-1), x.mean(-1), rtol=0, atol=1e-12)
    elif all(hadamard(n) is not None for n in factors(size)):
        torch.testing.assert_close(whole.abs(), torch.full_like(whole, size**-0.5), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("size", "pair"), [(576, (24, 24)), (11008, (86, 128)), (14336, (112, 128)), (97, (1, 97))])
def test_factors_are_cheap_before_they_are_hadamard(size: int, pair: tuple[int, int]) -> None:
    """11,008 is 2 * 5,504, both Hadamard sizes: 26 times the multiplications of 86 * 128."""
    assert factors(size) == pair


def test_a_site_takes_a_matrix_of_its_size() -> None:
    gm = capture(seeded(llama()), TOKENS)
    site = find_rotation_sites(gm).sites[0]
    with pytest.raises(ValueError, match="size 24, not 12"):
        apply_rotation(gm, site, Rotation.random(12, torch.Generator()))
