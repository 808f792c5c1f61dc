"""Folding smoothing in leaves the function of a real model as it is, bit for bit, and refuses what it cannot."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from smoothings import random_smoothing
from tiny_models import FAMILIES, tiny, tokens

from appliance.errors import EngineError, NumericsError
from appliance.quant.files import HEADER_KEY, PROFILE_FILE, Origin, Settings
from appliance.quant.profile import (
    Profile,
    Smoothing,
    SmoothingGroup,
    fold,
    fold_columns,
    fold_rows,
    load_smoothing,
    power_of_two,
    require_all_folded,
    write_profile,
)
from appliance.terms.schemes import Scheme


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("seed", range(2))
def test_folding_leaves_every_logit_as_it_is(family: str, dtype: torch.dtype, seed: int) -> None:
    """Of Llama with a bias in each linear layer, of Qwen2 with those of q, k and v."""
    biases = {"attention_bias": True, "mlp_bias": True} if family == "llama" else {}
    model = tiny(family, seed=seed, dtype=dtype, **biases)
    smoothing = random_smoothing(model, seed=seed)
    with torch.no_grad():
        before = model(tokens(seed=seed)).logits
        changed = []
        for name, parameter in model.named_parameters():
            folded = fold(name, parameter, smoothing=smoothing)
            if not torch.equal(folded, parameter):
                changed.append(name)
            parameter.copy_(folded)
        after = model(tokens(seed=seed)).logits
    assert torch.equal(after, before)  # powers of two: no bound is needed
    weights, biased = 2 + 4 + 3, {"llama": 2, "qwen2": 1}.get(family, 0)  # biased: v_proj, and of Llama up_proj
    if family == "qwen3-moe":
        weights -= 1  # router and experts, whose down_proj is left
    assert len(changed) == 2 * (weights + biased), changed
    assert sum(name.endswith("bias") for name in changed) == 2 * biased
    require_all_folded({name for name, _ in model.named_parameters()}, smoothing=smoothing)


def test_float64_gives_the_same_whichever_scales_are_folded() -> None:
    """A factor that is no power of two, by the formula alone: W_o repeat(s) (values / s) is W_o values."""
    group = SmoothingGroup("v_proj.weight", ("o_proj.weight",), torch.tensor([2.0, 0.5, 4.0, 1.0]), 2, 3)
    smoothing, generator = Smoothing((group,)), torch.Generator().manual_seed(0)
    values_NJ, out_MK, x_J = (torch.randn(*shape, generator=generator).double() for shape in ((4, 5), (7, 12), (5,)))
    bias_N = torch.randn(4, generator=generator).double()

    def function(values_NJ: torch.Tensor, bias_N: torch.Tensor, out_MK: torch.Tensor) -> torch.Tensor:
        heads = (values_NJ @ x_J + bias_N).view(2, 2)
        queries = [heads[query // 3] for query in range(6)]  # query heads 0, 1, 2 read the first head of values
        return out_MK @ torch.cat(queries)

    names = ("v_proj.weight", "v_proj.bias", "o_proj.weight")
    tensors = (values_NJ, bias_N, out_MK)
    folded = [fold(name, tensor, smoothing=smoothing) for name, tensor in zip(names, tensors, strict=True)]
    assert not any(map(torch.equal, folded, tensors))
    assert torch.equal(function(*folded), function(*tensors))


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


def test_the_last_rows_of_a_fused_tensor_are_divided_and_its_bias_there() -> None:
    values = SmoothingGroup("l.self_attn.v_proj.weight", ("l.self_attn.o_proj.weight",), torch.tensor([2.0, 4.0]))
    up = SmoothingGroup("l.mlp.up_proj.weight", ("l.mlp.down_proj.weight",), torch.tensor([2.0, 8.0]))
    norm = SmoothingGroup("l.norm.weight", ("l.mlp.gate_proj.weight", "l.mlp.up_proj.weight"), torch.tensor([0.5]))
    smoothing = Smoothing((values, up, norm))
    qkv = fold("l.self_attn.qkv_proj.weight", torch.ones(5, 1), smoothing=smoothing)
    assert qkv.flatten().tolist() == [1, 1, 1, 0.5, 0.25]
    assert fold("l.self_attn.qkv_proj.bias", torch.ones(5), smoothing=smoothing).tolist() == [1, 1, 1, 0.5, 0.25]
    gate_up = fold("l.mlp.gate_up_proj.weight", torch.ones(4, 1), smoothing=smoothing)
    assert gate_up.flatten().tolist() == [0.5, 0.5, 0.25, 0.0625]  # rows and columns
    assert fold("l.mlp.up_proj.weight", torch.ones(2, 1), smoothing=smoothing).flatten().tolist() == [0.25, 0.0625]
    names = {"l.norm.weight", "l.mlp.gate_up_proj.weight", "l.mlp.down_proj.weight"}
    attention = {"l.self_attn.qkv_proj.weight", "l.self_attn.o_proj.weight"}
    require_all_folded(names | attention, smoothing=smoothing)
    with pytest.raises(EngineError, match=r"^the profile smooths l\.self_attn\.v_proj\.weight and 1 more, which"):
        require_all_folded(names, smoothing=smoothing)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_share_out_what_was_folded(ranks: int) -> None:
    """Each rank has rows of `up_proj` and the columns of `down_proj` that read them: their sum is the whole product."""
    generator = torch.Generator().manual_seed(ranks)
    exponent_K = torch.randint(-4, 5, (16,), generator=generator)
    group = SmoothingGroup("up_proj.weight", ("down_proj.weight",), torch.exp2(exponent_K.float()))
    up_KJ, down_NK, x_J = (torch.randn(*shape, generator=generator).double() for shape in ((16, 6), (5, 16), (6,)))
    given = (("up_proj.weight", up_KJ), ("down_proj.weight", down_NK))
    folded = [fold(name, tensor, smoothing=Smoothing((group,))) for name, tensor in given]
    both = [(up_KJ, down_NK), folded]
    parts = [
        [down_NR @ (up_RJ @ x_J) for up_RJ, down_NR in zip(up.chunk(ranks), down.chunk(ranks, dim=1), strict=True)]
        for up, down in both
    ]
    assert all(map(torch.equal, *parts))


@pytest.mark.parametrize("name", ["up_proj.weight", "up_proj.bias", "down_proj.weight"])
def test_rows_or_columns_of_another_number_are_refused(name: str) -> None:
    group = SmoothingGroup("up_proj.weight", ("down_proj.weight",), torch.ones(4))
    for shape in ((3,), (3, 3), (8, 8), ()):
        with pytest.raises(EngineError, match=rf"4 channels for {re.escape(name)}, which is \["):
            fold(name, torch.ones(shape), smoothing=Smoothing((group,)))


@pytest.mark.parametrize("source", ["q_proj", "k_proj", "gate_proj", "o_proj", "embed_tokens"])
def test_what_is_not_read_channel_by_channel_is_no_source(source: str) -> None:
    with pytest.raises(ValueError, match=rf"^l\.{source}\.weight: what it gives is not read channel by channel"):
        SmoothingGroup(f"l.{source}.weight", ("l.o_proj.weight",), torch.ones(4))


@pytest.mark.parametrize(
    ("sources", "readers", "layer_name"),
    [
        (("l.norm", "l.norm"), ("l.q_proj", "l.k_proj"), "l.norm"),
        (("l.norm", "l.other_norm"), ("l.q_proj", "l.q_proj"), "l.q_proj"),
    ],
)
def test_nothing_is_smoothed_by_two_groups(sources: tuple[str, ...], readers: tuple[str, ...], layer_name: str) -> None:
    groups = [
        SmoothingGroup(f"{source}.weight", (f"{reader}.weight",), torch.ones(4))
        for source, reader in zip(sources, readers, strict=True)
    ]
    with pytest.raises(ValueError, match=rf"^{layer_name}\.weight: two groups of smoothing have it$"):
        Smoothing(tuple(groups))


def test_heads_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="6 channels are no heads of 4"):
        SmoothingGroup("v_proj.weight", ("o_proj.weight",), torch.ones(6), head_dim=4, readers_of_head=2)


def test_a_profile_is_read_with_its_heads_and_one_of_the_first_version_without(tmp_path: Path) -> None:
    smoothing = random_smoothing(tiny("qwen3"), seed=3)
    profile = Profile(Origin("calibrated", "m"), Scheme.INT8, Settings(), smoothing)
    write_profile(profile, folder=tmp_path / "now")
    for group, read in zip(smoothing.groups, load_smoothing(tmp_path / "now").groups, strict=True):
        assert torch.equal(group.scale_K, read.scale_K)
        assert vars(dataclasses.replace(group, scale_K=read.scale_K)) == vars(read)
    header = profile.header() | {
        "schema_version": 1,
        "smoothing": [{"norm": "norm.weight", "linears": ["q_proj.weight"]}],
    }
    (tmp_path / "before").mkdir()
    save_file(
        {"smoothing.norm.weight": torch.tensor([2.0])},
        tmp_path / "before" / PROFILE_FILE,
        metadata={HEADER_KEY: json.dumps(header)},
    )
    (group,) = load_smoothing(tmp_path / "before").groups
    assert (group.source, group.linears, group.readers_of_head) == ("norm.weight", ("q_proj.weight",), 1)
    header["smoothing"][0]["readers_of_head"] = 2
    save_file(
        {"smoothing.norm.weight": torch.tensor([2.0])},
        tmp_path / "before" / PROFILE_FILE,
        metadata={HEADER_KEY: json.dumps(header)},
    )
    with pytest.raises(EngineError, match="heads are shared, and have no size"):
        load_smoothing(tmp_path / "before")


OUTSIDE = "a value times its smoothing scale does not fit bfloat16"


@pytest.mark.parametrize(
    ("value", "scale", "message"),
    [(3e38, 2.0, OUTSIDE), (1e-40, 0.25, OUTSIDE), (float("nan"), 2.0, "a value is not finite")],
)
def test_a_value_outside_the_format_is_refused(value: float, scale: float, message: str) -> None:
    group = SmoothingGroup("norm.weight", ("q_proj.weight",), torch.tensor([scale, 1.0]))
    weight = torch.tensor([[value, 1.0]], dtype=torch.bfloat16)
    with pytest.raises(NumericsError) as raised:
        fold("q_proj.weight", weight, smoothing=Smoothing((group,)))
    assert raised.value.message == f"q_proj.weight: {message}"


@pytest.mark.parametrize(("value", "message"), [(3e38, OUTSIDE), (float("nan"), "a value is not finite")])
def test_a_matrix_of_an_adapter_is_named_where_smoothing_cannot_be_folded_in(value: float, message: str) -> None:
    """And not the layer's weight, which is as it was."""
    norm = SmoothingGroup("norm.weight", ("v_proj.weight",), torch.tensor([2.0, 1.0]))
    values = SmoothingGroup("v_proj.weight", ("o_proj.weight",), torch.tensor([0.5]), head_dim=1)
    smoothing = Smoothing((norm, values))
    a_RK, b_NR = (torch.tensor(rows, dtype=torch.bfloat16) for rows in ([[value, 1.0]], [[value]]))
    for fold_matrix, matrix, name in ((fold_columns, a_RK, "v_proj.lora_A.weight"), (fold_rows, b_NR, "v_proj.lora_B")):
        with pytest.raises(NumericsError) as raised:
            fold_matrix(name, matrix, weight="v_proj.weight", smoothing=smoothing)
        assert raised.value.message == f"{name}: {message}"


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
