"""The profile that is bad on purpose: the same function, far coarser codes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from profiles import read_profile

from appliance.quant.codec import dequantise, quantise
from appliance.tasks.library import TINY_MODELS
from appliance.terms.schemes import Scheme
from benchmarks.degraded_profile import degraded_profile, main

SPEC = TINY_MODELS["tiny-arithmetic"]


def test_every_norm_that_feeds_layers_gets_powers_of_two_within_the_exponent() -> None:
    made = degraded_profile(SPEC, name="tiny-arithmetic", exponent=4, seed=1)
    assert len(made.smoothing.groups) == 2 * SPEC.num_layers
    for group in made.smoothing.groups:
        exponents = group.scale_K.log2()
        assert group.scale_K.shape == (SPEC.hidden_size,)
        assert torch.equal(exponents, exponents.round()) and set(exponents.tolist()) == set(range(-4, 5))


def test_the_seed_decides_and_layers_differ() -> None:
    first, same, other = (degraded_profile(SPEC, name="m", exponent=4, seed=seed) for seed in (1, 1, 2))
    scales = [[group.scale_K for group in made.smoothing.groups] for made in (first, same, other)]
    assert all(torch.equal(a, b) for a, b in zip(scales[0], scales[1], strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(scales[0], scales[2], strict=True))
    assert not torch.equal(scales[0][0], scales[0][1])


def test_weights_lose_bits() -> None:
    """Folded in and out again around INT8, a weight is off by at least ten times as much."""
    weight_NK = torch.randn(64, SPEC.hidden_size, generator=torch.Generator().manual_seed(0))
    scale_K = degraded_profile(SPEC, name="m", exponent=4, seed=1).smoothing.groups[0].scale_K

    def error(factor_K: torch.Tensor) -> float:
        there_NK = dequantise(quantise(weight_NK * factor_K, scheme=Scheme.INT8))
        return float((there_NK / factor_K - weight_NK).norm() / weight_NK.norm())

    assert error(scale_K) > 10 * error(torch.ones_like(scale_K))


@pytest.mark.parametrize(("arguments", "scheme"), [([], Scheme.INT8), (["--scheme", "fp8-block"], Scheme.FP8_BLOCK)])
def test_the_command_writes_a_profile_that_reads_back(arguments: list[str], scheme: Scheme, tmp_path: Path) -> None:
    assert main(["-o", str(tmp_path / "coarse"), "--exponent", "2", *arguments]) == 0
    read = read_profile(tmp_path / "coarse")
    made = degraded_profile(SPEC, name="tiny-arithmetic", exponent=2, seed=1)
    assert (read.scheme, read.origin.model) == (scheme, "tiny-arithmetic")
    for ours, theirs in zip(made.smoothing.groups, read.smoothing.groups, strict=True):
        assert ours.source == theirs.source and torch.equal(ours.scale_K, theirs.scale_K)


@pytest.mark.parametrize("exponent", [4, 8, 12])
def test_fp8_keeps_its_bits_where_the_exponent_of_a_code_makes_up_for_the_scale(exponent: float) -> None:
    weight_NK = torch.randn(64, SPEC.hidden_size, generator=torch.Generator().manual_seed(0))
    scale_K = degraded_profile(SPEC, name="m", exponent=exponent, seed=1).smoothing.groups[0].scale_K
    there_NK = dequantise(quantise(weight_NK * scale_K, scheme=Scheme.FP8_BLOCK)) / scale_K
    error = float((there_NK - weight_NK).norm() / weight_NK.norm())
    assert (error < 0.04) is (exponent <= 4) and (error < 0.1) is (exponent <= 8), error


@pytest.mark.parametrize("exponent", [-1, 13])
def test_an_exponent_that_cannot_be_folded_exactly_is_refused(exponent: float) -> None:
    with pytest.raises(ValueError) as raised:
        degraded_profile(SPEC, name="m", exponent=exponent, seed=1)
    assert str(raised.value) == f"the exponent is between 0 and 12, got {exponent}"
