"""Scales of a KV cache in FP8, of what layers wrote."""

from __future__ import annotations

import pytest
import torch

from appliance.quant.kv_scales import (
    CALIBRATION_TOKENS,
    calibration_prompts,
    digest_of,
    drift,
    scales_of,
    usual_largest,
    widest,
)


def test_a_scale_is_the_power_of_two_by_which_the_range_just_fits() -> None:
    """With a margin of 5 %: 426.6 is the largest range that a scale of 1 holds."""
    scales = scales_of({"a": (426.0, 427.0), "b": (0.0, 3.0), "c": (448 / 1.05 / 4, 1e-40)})
    assert scales["a"] == (1.0, 2.0)
    assert scales["b"] == (1.0, 2.0**-7)  # of zeros alone there is no scale
    assert scales["c"] == (0.25, 2.0**-100)
    for largest in (1e-3, 0.7, 2.0, 19.0, 5000.0):
        ((scale, _),) = scales_of({"a": (largest, 1.0)}).values()
        assert 224 < 1.05 * largest / scale <= 448


def test_one_token_in_a_thousand_does_not_count() -> None:
    largest_T = torch.linspace(1.0, 2.0, 1001)
    largest_T[500] = 1e4
    assert usual_largest(largest_T) == pytest.approx(2.0, rel=1e-3)
    largest_T[501] = 1e4
    assert usual_largest(largest_T) > 10
    assert usual_largest(torch.tensor([3.0])) == 3.0


def test_a_value_in_range_is_kept_to_a_sixteenth() -> None:
    """Half of the distance of two FP8 numbers, relative to the smaller, over the 12 binades below the range."""
    scale = scales_of({"a": (20.0, 20.0)})["a"][0]
    x_N = torch.logspace(-12, 0, 4001, base=2, dtype=torch.float64) * 20.0
    read_N = (x_N / scale).float().to(torch.float8_e4m3fn).double() * scale
    assert float(((read_N - x_N).abs() / x_N).max()) <= 1 / 16


def test_the_widest_range_of_ranks_and_engines_counts() -> None:
    assert widest([{"a": (1.0, 5.0)}, {"a": (2.0, 4.0)}]) == {"a": (2.0, 5.0)}


def test_drift_is_the_largest_relative_change() -> None:
    assert drift({"a": (1.0, 2.0), "b": (3.0, 3.0)}, before={"a": (1.0, 2.5), "b": (2.0, 3.0)}) == pytest.approx(0.5)
    assert drift({"a": (1.0, 2.0)}, before={"a": (0.0, 2.0)}) == 0.0


def test_a_digest_knows_each_bit_each_name_and_the_update() -> None:
    scales = {"a": (0.5, 0.25), "b": (1.0, 2.0)}
    changed = [
        digest_of(scales, sync=2),
        digest_of({"a": (0.25, 0.5), "b": (1.0, 2.0)}, sync=1),
        digest_of({"b": (0.5, 0.25), "a": (1.0, 2.0)}, sync=1),
        digest_of({"a": (0.5, 0.25), "b": (1.0, 2.0000002384185791)}, sync=1),
        digest_of({"a": (0.5, 0.25)}, sync=1),
    ]
    same = digest_of({"b": (1.0, 2.0), "a": (0.5, 0.25)}, sync=1)
    assert same == digest_of(scales, sync=1) and len({same, *changed}) == 6


def test_prompts_are_taken_up_to_a_number_of_tokens() -> None:
    short = [[1] * 100] * 3
    assert calibration_prompts(short) == short
    assert len(calibration_prompts([[1] * 1000] * 40)) == CALIBRATION_TOKENS // 1000
    assert len(calibration_prompts([[1] * (CALIBRATION_TOKENS + 1), [1]])) == 1
