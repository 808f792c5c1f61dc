"""The donor form against FlashRL's own method, on pairs made as SmoothQuant makes them.

Compared with numbers that FlashRL 1.0.3's own `profiling_int8` made of a pair that lies here (flashrl_pair/, with how
it was made), and with its formulas written again, in its order and shapes, on a larger pair made by the test.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import tiny
from torch import Tensor

from appliance.errors import RecipeError
from appliance.quant.profile import Origin, Profile
from appliance.terms.schemes import Scheme
from flashrl_compat.donor import predicted_codes, recover

ORIGIN = Origin(kind="donor", model="tiny")
ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
MLP = ("mlp.gate_proj", "mlp.up_proj")
FLASHRL_PAIR = Path(__file__).parent / "flashrl_pair"
U = 2.0**-24
NORM_FEEDS = {"input_layernorm": ATTENTION, "post_attention_layernorm": MLP}
FEEDS = {**NORM_FEEDS, "up_proj": ("down_proj",)}


def make_pair(folder: Path) -> tuple[Path, Path, dict[str, Tensor]]:
    """(model, donor, true smoothing by source): norms divided, readers multiplied, up divided for down, then W8A8."""
    model, donor = folder / "model", folder / "donor"
    tiny("qwen2").save_pretrained(model)
    tensors = load_file(model / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    donor_tensors, truth = dict(tensors), {}
    for layer in ("model.layers.0.", "model.layers.1."):
        for norm, readers in NORM_FEEDS.items():
            name = f"{layer}{norm}.weight"
            scale_K = torch.exp(torch.randn(64, generator=generator))
            truth[name] = scale_K
            donor_tensors[name] = (tensors[name].float() / scale_K).bfloat16()
            for reader in readers:
                donor_tensors[f"{layer}{reader}.weight"] = tensors[f"{layer}{reader}.weight"].float() * scale_K
        inner_N = torch.exp(0.5 * torch.randn(96, generator=generator))
        truth[f"{layer}mlp.up_proj.weight"] = inner_N
        donor_tensors[f"{layer}mlp.up_proj.weight"] = donor_tensors[f"{layer}mlp.up_proj.weight"] / inner_N[:, None]
        donor_tensors[f"{layer}mlp.down_proj.weight"] = tensors[f"{layer}mlp.down_proj.weight"].float() * inner_N
        for linear in (*ATTENTION, "self_attn.o_proj", *MLP, "mlp.down_proj"):
            name = f"{layer}{linear}.weight"
            weight_NK = donor_tensors[name].float()
            scale_N1 = (weight_NK.abs().amax(dim=1, keepdim=True) / 127).bfloat16()
            donor_tensors[name] = (weight_NK / scale_N1.float()).round().clamp(-128, 127).to(torch.int8)
            donor_tensors[f"{name}_scale"] = scale_N1
    donor.mkdir()
    save_file(donor_tensors, donor / "model.safetensors")
    (donor / "config.json").write_text((model / "config.json").read_text())
    return model, donor, truth


def flashrl_scales(
    model: dict[str, Tensor], donor: dict[str, Tensor]
) -> dict[str, tuple[Tensor | float, Tensor | float]]:
    """name -> (input_scale, output_scale), by FlashRL 1.0.3's formulas, in the order and the shapes of its own."""
    scales: dict[str, tuple[Tensor | float, Tensor | float]] = {}
    ratio = {name: donor[name] / model[name].float() for name in model if "layernorm" in name}
    scales |= {name: (value, 1.0) for name, value in ratio.items()}
    fitted = {}
    for layer in ("model.layers.0.", "model.layers.1."):
        for norm, readers in NORM_FEEDS.items():
            r = ratio[f"{layer}{norm}.weight"].view(1, -1)
            for reader in readers:
                name = f"{layer}{reader}.weight"
                scale = donor[f"{name}_scale"].view(-1, 1)
                if reader == "mlp.up_proj":
                    base = model[name].float() / r / scale
                    beta = (donor[name].float() * base).sum(-1, keepdim=True) / (base**2).sum(-1, keepdim=True)
                    fitted[layer] = beta.view(-1, 1)
                    scale = scale.float() / fitted[layer]
                scales[name] = (1.0 / r, 1.0 / scale.float())
        name = f"{layer}self_attn.o_proj.weight"
        scales[name] = (1.0, 1.0 / donor[f"{name}_scale"].view(-1, 1).float())
        name = f"{layer}mlp.down_proj.weight"
        scales[name] = (1.0 / fitted[layer].view(1, -1), 1.0 / donor[f"{name}_scale"].view(-1, 1).float())
    return scales


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, dict[str, Tensor]]:
    return make_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def recovered(pair: tuple[Path, Path, dict[str, Tensor]]) -> Profile:
    return recover(pair[0], donor=pair[1], scheme=Scheme.INT8, origin=ORIGIN)


def same_scales(profile: Profile, *, name: str, input_scale: Tensor | None, output_scale: Tensor | None) -> None:
    """All are the same float32 operations, each rounded as IEEE has it: equal to the last bit. But for the two sums of
    the least squares, over K terms of one sign each (q f and f^2), which may be added in any order: each is off by
    K u at most, their quotient and what follows from it by 2 K u and a few roundings."""
    fitted = name.endswith("mlp.up_proj.weight") and "output"
    fitted = fitted or (name.endswith("mlp.down_proj.weight") and "input")
    columns = len(profile.input_scales[name.replace("down_proj", "up_proj")]) if fitted else 0
    for kind, expected, actual in (
        ("input", input_scale, profile.input_scales.get(name)),
        ("output", output_scale, profile.output_scales.get(name)),
    ):
        if expected is None:
            assert actual is None
            continue
        rtol = (2 * columns + 8) * U if kind == fitted else 0
        torch.testing.assert_close(actual, expected.view(-1), rtol=rtol, atol=0)


def test_the_numbers_are_those_that_flashrls_own_code_made() -> None:
    """It keeps 1 where it has no scale: a parameter's only entry, or the output scale of a norm."""
    theirs = load_file(FLASHRL_PAIR / "flashrl.safetensors")
    model, donor = FLASHRL_PAIR / "model", FLASHRL_PAIR / "donor"
    profile = recover(model, donor=donor, scheme=Scheme.INT8, origin=ORIGIN)
    names = {key.rpartition(".")[0] for key in theirs}
    assert names == set(load_file(model / "model.safetensors"))
    assert names == set(profile.input_scales) | set(profile.output_scales)
    for name in names:
        scales = {key: theirs[f"{name}.{key}"] for key in ("input_scale", "output_scale")}
        real = {key: None if len(scale) == 1 else scale for key, scale in scales.items()}
        assert all(scale.item() == 1 for key, scale in scales.items() if real[key] is None)
        same_scales(profile, name=name, **real)


def test_the_numbers_are_flashrls(pair: tuple[Path, Path, dict[str, Tensor]], recovered: Profile) -> None:
    model, donor = (load_file(folder / "model.safetensors") for folder in pair[:2])
    expected = flashrl_scales(model, donor)
    ones = {name for name, (input_scale, _) in expected.items() if isinstance(input_scale, float)}
    assert set(recovered.input_scales) == set(expected) - ones
    assert set(recovered.output_scales) == {name for name, (_, out) in expected.items() if isinstance(out, Tensor)}
    for name, scales in expected.items():
        input_scale, output_scale = (scale if isinstance(scale, Tensor) else None for scale in scales)
        same_scales(recovered, name=name, input_scale=input_scale, output_scale=output_scale)


def test_the_scales_make_the_donors_codes(pair: tuple[Path, Path, dict[str, Tensor]], recovered: Profile) -> None:
    model, donor = (load_file(folder / "model.safetensors") for folder in pair[:2])
    for name, output_scale_N in recovered.output_scales.items():
        codes = predicted_codes(
            model[name], output_scale_N=output_scale_N, input_scale_K=recovered.input_scales.get(name)
        )
        # The norm's ratio carries BF16's rounding (2^-8 of itself, and of codes up to 127: half a code).
        assert float((codes - donor[name].float()).abs().max()) <= 2.0
        assert float((codes - donor[name].float()).abs().mean()) < 0.2


def test_the_smoothing_is_the_truth_to_the_nearest_power_of_two(
    pair: tuple[Path, Path, dict[str, Tensor]], recovered: Profile
) -> None:
    truth = pair[2]
    assert {group.source for group in recovered.smoothing.groups} == set(truth)
    for group in recovered.smoothing.groups:
        off_K = (group.scale_K.log2() - truth[group.source].log2()).abs()
        # Two BF16 roundings of the norms: 2 * log2(1 + 2^-8). A row of up_proj: a fit over 64 codes, nearer than that.
        assert float(off_K.max()) <= 0.5 + 0.012
        layer = group.source.removesuffix(".weight").rpartition(".")
        assert group.linears == tuple(f"{layer[0]}.{each}.weight" for each in FEEDS[layer[2]])


def broken(pair: tuple[Path, Path, dict[str, Tensor]], folder: Path, **changes: Tensor | None) -> Path:
    """The donor with some tensors of layer 1 changed or gone; names without their dots."""
    tensors = load_file(pair[1] / "model.safetensors")
    for name, value in changes.items():
        key = "model.layers.1." + name.replace("__", ".")
        tensors.pop(key)
        if value is not None:
            tensors[key] = value
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"mlp__up_proj__weight": None}, "model.layers.1.mlp.up_proj.weight is missing in the donor"),
        ({"mlp__up_proj__weight_scale": None}, "model.layers.1.mlp.up_proj.weight_scale is missing in the donor"),
        (
            {"self_attn__o_proj__weight": torch.zeros(64, 32, dtype=torch.int8)},
            "model.layers.1.self_attn.o_proj.weight is [64, 64] in the model and [64, 32] in the donor",
        ),
        (
            {"self_attn__o_proj__weight": torch.zeros(64, 64)},
            "model.layers.1.self_attn.o_proj.weight is float32 in the donor, not int8",
        ),
        (
            {"self_attn__o_proj__weight_scale": torch.ones(1)},
            "model.layers.1.self_attn.o_proj.weight_scale is [1]: one for each of 64 channels is needed",
        ),
    ],
)
def test_a_donor_of_another_make_is_refused_with_what_is_different(
    pair: tuple[Path, Path, dict[str, Tensor]], tmp_path: Path, change: dict[str, Tensor | None], problem: str
) -> None:
    with pytest.raises(RecipeError) as error:
        recover(pair[0], donor=broken(pair, tmp_path, **change), scheme=Scheme.INT8, origin=ORIGIN)
    assert [message for message, _ in error.value.problems] == [f"--quantized: {problem}"]


def test_a_donor_of_other_weights_is_refused_by_the_layers_it_does_not_explain(
    pair: tuple[Path, Path, dict[str, Tensor]], tmp_path: Path
) -> None:
    tiny("qwen2", seed=9).save_pretrained(tmp_path)
    with pytest.raises(RecipeError, match="of the donor's codes unexplained"):
        recover(tmp_path, donor=pair[1], scheme=Scheme.INT8, origin=ORIGIN)


def test_a_donor_with_another_number_of_layers_is_refused(
    pair: tuple[Path, Path, dict[str, Tensor]], tmp_path: Path
) -> None:
    tiny("qwen2", num_hidden_layers=1).save_pretrained(tmp_path)
    with pytest.raises(RecipeError, match="the model has 1 layer, the donor 2"):
        recover(tmp_path, donor=pair[1], scheme=Scheme.INT8, origin=ORIGIN)


def test_a_donor_is_int8_only(pair: tuple[Path, Path, dict[str, Tensor]]) -> None:
    with pytest.raises(RecipeError, match="--scheme fp8: a donor's scales are those of `int8`"):
        recover(pair[0], donor=pair[1], scheme=Scheme.FP8, origin=ORIGIN)
