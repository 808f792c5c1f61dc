"""Folding smoothing in leaves the function of a real model as it is, bit for bit, and refuses what it cannot."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from tiny_models import tiny, tokens

from appliance.errors import EngineError, NumericsError
from appliance.quant.profile import (
    Smoothing,
    SmoothingGroup,
    fold,
    load_smoothing,
    power_of_two,
    require_all_folded,
)


def random_groups(model: torch.nn.Module, *, seed: int) -> Smoothing:
    """Every norm of a decoder layer with all that it feeds, and random scales between 2^-4 and 2^4."""
    generator = torch.Generator().manual_seed(seed)
    names = dict(model.named_parameters())
    groups = []
    for name in (each for each in names if each.endswith("layernorm.weight")):
        layer = name[: name.index(".", len("model.layers.")) + 1]
        feeds = r"self_attn\.[qkv]_proj" if "input" in name else r"mlp\.(?:(?:gate|up)_proj|gate|experts\.gate_up_proj)"
        linears = [each for each in names if re.fullmatch(re.escape(layer) + feeds + r"(?:\.weight)?", each)]
        exponents = torch.randint(-4, 5, (names[name].shape[0],), generator=generator)
        groups.append(SmoothingGroup(name, tuple(linears), torch.exp2(exponents.float())))
    return Smoothing(tuple(groups))


@pytest.mark.parametrize("family", ["qwen2", "qwen3-moe"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("seed", range(3))
def test_folding_leaves_every_logit_as_it_is(family: str, dtype: torch.dtype, seed: int) -> None:
    model = tiny(family, seed=seed, dtype=dtype)
    smoothing = random_groups(model, seed=seed)
    with torch.no_grad():
        before = model(tokens(seed=seed)).logits
        changed = 0
        for name, parameter in model.named_parameters():
            folded = fold(name, parameter, smoothing=smoothing)
            changed += not torch.equal(folded, parameter)
            parameter.copy_(folded)
        after = model(tokens(seed=seed)).logits
    per_layer = 2 + (5 if family == "qwen2" else 3 + 2)  # norms, q, k, v, then gate and up, or router and experts
    assert changed == 2 * per_layer
    assert torch.equal(after, before)  # powers of two: no bound is needed


def test_one_expert_of_a_checkpoint_gets_the_scales_of_the_fused_experts() -> None:
    scale_K = torch.tensor([2.0, 0.5])
    group = SmoothingGroup("l.post_attention_layernorm.weight", ("l.mlp.experts.gate_up_proj",), scale_K)
    weight = torch.randn(3, 2)
    smoothing = Smoothing((group,))
    for name in ("l.mlp.experts.7.gate_proj.weight", "l.mlp.experts.7.up_proj.weight"):
        assert torch.equal(fold(name, weight, smoothing=smoothing), weight * scale_K)
    assert fold("l.mlp.experts.7.down_proj.weight", weight, smoothing=smoothing) is weight


def test_a_fused_tensor_is_folded_as_its_parts() -> None:
    linears = tuple(f"l.self_attn.{part}_proj.weight" for part in "qkv")
    scale_K = torch.tensor([0.5, 2.0])
    smoothing = Smoothing((SmoothingGroup("l.input_layernorm.weight", linears, scale_K),))
    fused, weight = "l.self_attn.qkv_proj.weight", torch.randn(6, 2)
    assert torch.equal(fold(fused, weight, smoothing=smoothing), weight * scale_K)
    assert fold("l.self_attn.qkv_proj.bias", weight, smoothing=smoothing) is weight
    require_all_folded({"l.input_layernorm.weight", fused}, smoothing=smoothing)


@pytest.mark.parametrize(("value", "scale"), [(3e38, 2.0), (1e-40, 0.25), (float("nan"), 2.0)])
def test_a_value_outside_the_format_is_refused(value: float, scale: float) -> None:
    group = SmoothingGroup("norm.weight", ("q_proj.weight",), torch.tensor([scale, 1.0]))
    weight = torch.tensor([[value, 1.0]], dtype=torch.bfloat16)
    with pytest.raises(NumericsError, match=r"q_proj\.weight: a value times its smoothing scale does not fit bfloat16"):
        fold("q_proj.weight", weight, smoothing=Smoothing((group,)))


def test_a_profile_of_another_width_is_refused() -> None:
    group = SmoothingGroup("norm.weight", ("q_proj.weight",), torch.ones(4))
    with pytest.raises(EngineError, match=r"4 channels for q_proj\.weight, which is \[2, 3\]"):
        fold("q_proj.weight", torch.ones(2, 3), smoothing=Smoothing((group,)))


@pytest.mark.parametrize("scale", [3.0, 0.0, -2.0, 2.0**13, float("inf")])
def test_a_scale_that_is_not_a_power_of_two_is_refused(scale: float) -> None:
    with pytest.raises(ValueError, match="not a power of two"):
        SmoothingGroup("norm.weight", (), torch.tensor([1.0, scale]))


def test_the_nearest_power_of_two_is_nearest_in_the_exponent() -> None:
    given = torch.tensor([0.7, 0.71, 1.0, 1.42, 5.0, 1e9, 1e-9])  # sqrt(2) / 2 = 0.7071 lies between the first two
    assert power_of_two(given).tolist() == [0.5, 1.0, 1.0, 2.0, 4.0, 4096.0, 1 / 4096]


def test_a_missing_profile_is_named(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=re.escape(f"{tmp_path / 'profile.safetensors'}: no profile: ")):
        load_smoothing(tmp_path)


def test_every_part_of_a_group_must_have_been_folded() -> None:
    """One expert stands for all; a norm or a layer that is missing means another model."""
    linears = ("l.mlp.gate.weight", "l.mlp.experts.gate_up_proj")
    smoothing = Smoothing((SmoothingGroup("l.post_attention_layernorm.weight", linears, torch.ones(2)),))
    names = {"l.post_attention_layernorm.weight", "l.mlp.gate.weight", "l.mlp.experts.7.up_proj.weight", "other"}
    require_all_folded(names, smoothing=smoothing)
    require_all_folded(set(), smoothing=Smoothing())
    for missing in names - {"other"}:
        with pytest.raises(EngineError, match=r"^the profile smooths l\..*, which this model does not have$"):
            require_all_folded(names - {missing}, smoothing=smoothing)
    with pytest.raises(EngineError, match=r"post_attention_layernorm\.weight and 2 more"):
        require_all_folded({"other"}, smoothing=smoothing)
