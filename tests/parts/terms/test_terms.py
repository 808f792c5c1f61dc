"""One row for each scheme and each family, and what reads them: nothing else names a scheme or a family."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import appliance
from appliance.quant.codec import codec_of
from appliance.terms.families import FAMILIES, FUSED_LAYERS, norm_fed
from appliance.terms.schemes import SPECS, Scheme

ROOM = Path(appliance.__file__).parent
QUANTISED = [scheme for scheme in Scheme if scheme.quantised]
# What is of one scheme by its nature: its codec, its method and proof; what `auto` prefers; a
# trainer's INT8 kernels, and gradients in `fp8-block`.
OF_ONE_SCHEME = {
    "engine/fp8.py",
    "engine/fp8_proof.py",
    "plan/rules.py",
    "quant/codec_int4.py",
    "quant/codec_int8.py",
    "report/summary.py",
    "terms/devices.py",
    "terms/schemes.py",
    "trainer/rollout_forward.py",
    "trainer/rollout_ops.py",
}


def test_every_scheme_has_a_row() -> None:
    assert list(SPECS) == list(Scheme)


@pytest.mark.parametrize("scheme", QUANTISED)
def test_a_quantised_scheme_has_a_codec_and_a_method(scheme: Scheme) -> None:
    assert codec_of(scheme).largest > 0
    assert (
        scheme.spec.method and scheme.spec.scales and scheme.spec.bytes_per_weight < SPECS[Scheme.BF16].bytes_per_weight
    )


def test_bf16_has_no_codec() -> None:
    with pytest.raises(ValueError, match="`bf16` does not quantise"):
        codec_of(Scheme.BF16)


@pytest.mark.parametrize("scheme", QUANTISED)
def test_a_finer_scheme_runs_where_the_scheme_does(scheme: Scheme) -> None:
    """The guard raises rollouts to it in the same engine, or another one on the same device."""
    spec = scheme.spec
    assert spec.emulation or not spec.finer, "an engine that runs changes between schemes that it emulates"
    for finer in (each.spec for each in spec.finer):
        assert (finer.emulation, finer.not_on_cpu, finer.experts) == (spec.emulation, spec.not_on_cpu, spec.experts)
        assert finer.since <= spec.since and finer.until == spec.until


def names_of_schemes(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "Scheme":
            yield node.attr


def test_only_what_is_of_one_scheme_names_one() -> None:
    others = {scheme.name for scheme in QUANTISED}
    naming = {
        str(file.relative_to(ROOM))
        for file in ROOM.rglob("*.py")
        if others.intersection(names_of_schemes(ast.parse(file.read_text())))
    }
    assert naming == OF_ONE_SCHEME


def test_fused_layers_are_as_vllm_fuses_them() -> None:
    assert FUSED_LAYERS == {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}


def test_families_that_fuse_a_layer_agree_on_its_parts() -> None:
    units = [unit for each in FAMILIES.values() for unit in (*each.dense, *each.mixture) if unit.fused]
    for unit in units:
        leaf = unit.fused.rpartition(".")[2]
        assert FUSED_LAYERS[leaf] == [member.rpartition(".")[2] for member in unit.members]


def test_a_layer_is_read_by_the_pattern_that_fits_best() -> None:
    """A mixture may have dense layers between the others."""
    attention = [f"self_attn.{each}_proj.weight" for each in "qkvo"]
    common = ["input_layernorm.weight", "post_attention_layernorm.weight", *attention]
    dense = [*common, "mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight"]
    mixture = [*common, "mlp.gate.weight", "mlp.experts.0.gate_proj.weight", "mlp.experts.0.up_proj.weight"]
    names = [f"model.layers.0.{name}" for name in dense] + [f"model.layers.1.{name}" for name in mixture]
    found = norm_fed(names)
    assert len(found.norms) == 4
    assert found.linears == {
        *(f"model.layers.{layer}.{name}" for layer in (0, 1) for name in attention[:3]),
        "model.layers.0.mlp.gate_proj.weight",
        "model.layers.0.mlp.up_proj.weight",
        *(f"model.layers.1.{name}" for name in mixture[-3:]),
    }
