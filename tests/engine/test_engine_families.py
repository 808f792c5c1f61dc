"""The families of the list: their classes, and layers that the quantised engine does not know. Models without a row:
test_engine_structure.py."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from engines import Engine, free_engine, int8_kernel, read_checkpoint, start_engine
from families import FAMILIES, make_family, make_model

from appliance.errors import EngineError
from appliance.terms.families import FAMILIES as KNOWN_FAMILIES
from appliance.terms.families import why_unknown

pytestmark = pytest.mark.engine

KNOWN = "Qwen2ForCausalLM, Qwen3ForCausalLM, LlamaForCausalLM, MistralForCausalLM, Qwen3MoeForCausalLM"


def test_every_known_architecture_has_a_family_and_no_other() -> None:
    assert {family.architecture for family in FAMILIES.values()} == set(KNOWN_FAMILIES)


def test_families_differ_where_a_loader_can_go_wrong() -> None:
    """Biases, tied embeddings, group sizes, norms of queries, and dimensions that are no multiples of 64 or 128."""
    models = {name: make_model(name, seed=0) for name in FAMILIES}
    names = {name: dict(model.named_parameters()) for name, model in models.items()}
    configs = {name: model.config for name, model in models.items()}
    assert {name for name, found in names.items() if any("proj.bias" in one for one in found)} == {"qwen2", "qwen2.5"}
    assert {name for name, found in names.items() if any("q_norm" in one for one in found)} == {"qwen3", "qwen3-moe"}
    assert {name for name, config in configs.items() if config.tie_word_embeddings} == {"qwen2", "qwen3"}
    groups = {config.num_attention_heads // config.num_key_value_heads for config in configs.values()}
    assert groups == {2, 3, 4}
    assert sum(config.hidden_size % 128 != 0 for config in configs.values()) == 4
    assert all(config.intermediate_size % 64 != 0 for config in configs.values())
    for found in names.values():
        assert all(bool((tensor != tensor.flatten()[0]).any()) for tensor in found.values())  # nothing is all the same


def test_a_checkpoint_has_the_names_that_verl_sends(tmp_path: Path) -> None:
    """transformers 5 holds experts fused, in 3-D tensors; its checkpoints and verl's sender have one tensor each."""
    from verl.utils.model import convert_weight_keys
    from verl.workers.engine.fsdp.utils import unfuse_moe_params

    model = make_model("qwen3-moe", seed=1)
    assert any(tensor.ndim == 3 for tensor in model.state_dict().values())
    state = convert_weight_keys(model.state_dict(), model)
    sent = dict(unfuse_moe_params(state.items(), model.config.model_type))
    stored = dict(read_checkpoint(make_family(tmp_path, name="qwen3-moe", seed=1)))
    assert sent.keys() == stored.keys()
    assert all(bool((sent[name] == tensor).all()) for name, tensor in stored.items())


def test_a_configuration_without_an_architecture_is_refused() -> None:
    assert why_unknown(None) == f"the model's configuration names no architecture; the known ones are {KNOWN}"
    assert why_unknown(["Qwen2ForCausalLM"]) == ""
    assert why_unknown(["Qwen2ForCausalLM", "Other"]) == (
        f"Other is not in the list of model families ({KNOWN}): UAQ, experts, adapters that are sent alone and the "
        "rollouts' forward in the trainer are for families of the list"
    )


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory):
    engine = start_engine(make_family(tmp_path_factory.mktemp("moe"), name="qwen3-moe", seed=1), scheme="int8")
    yield engine
    free_engine(engine)


def test_a_layer_of_another_class_is_refused(moe: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under the name of a known architecture: when vLLM asks for its method, and when the model stands."""
    from torch.nn import Linear
    from vllm.model_executor.layers.linear import RowParallelLinear

    from appliance.engine.attest import live_scheme
    from appliance.terms.schemes import Scheme

    class OtherLinear(RowParallelLinear):
        pass

    layer = moe.model.model.layers[0].mlp
    monkeypatch.setattr(layer.down_proj, "__class__", OtherLinear)
    with pytest.raises(EngineError) as raised:
        moe.runner.vllm_config.quant_config.get_quant_method(layer.down_proj, "model.layers.0.mlp.down_proj")
    assert raised.value.message == (
        "model.layers.0.mlp.down_proj is a OtherLinear: the quantised engine does not know how it holds its weights"
    )
    monkeypatch.undo()
    assert live_scheme(moe.model).scheme == Scheme.INT8
    layer.extra = Linear(4, 4)
    try:
        with pytest.raises(EngineError) as raised:
            live_scheme(moe.model)
    finally:
        del layer.extra
    assert raised.value.message == (
        "model.layers.0.mlp.extra is a Linear: the quantised engine does not know how it holds its weights"
    )


def test_layers_of_a_mixture_run_as_the_scheme_says(moe: Engine) -> None:
    """Dense and expert layers in INT8, routers and head in BF16, and the attestation counts them."""
    from appliance.engine.attest import live_scheme

    whole, ragged = int8_kernel(), int8_kernel(64, 112)
    experts = dict.fromkeys((int8_kernel(96, 64), int8_kernel(64, 48)))  # gate and up, down
    assert live_scheme(moe.model).kernels == Counter({whole: 1 + 2 * 3}) + Counter({ragged: 1}) + Counter(
        {  # layer 0's MLP, attention of 3 layers
            f"{' and '.join(experts)}, expert by expert": 2,
            "KeptLinearMethod": 2,
            "UnquantizedEmbeddingMethod": 2,
        }
    )


SPARSE_STEP = {"mlp_only_layers": [], "decoder_sparse_step": 2}  # layers 0 and 2 are dense, layer 1 has experts


def test_dense_layers_of_a_mixture_by_sparse_step(tmp_path: Path) -> None:
    """vLLM's own list of fused layers has no gate and up for this model: neither `ignore` nor the proof may use it."""
    from appliance.engine.attest import live_scheme

    old, new = (make_family(tmp_path / str(seed), name="qwen3-moe", seed=seed, **SPARSE_STEP) for seed in (1, 2))
    ignore = ("model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj", "model.layers.1.mlp.experts")
    engine = start_engine(old, scheme="int8", ignore=ignore)
    # gate_up_proj of layer 2 and two of each attention, down_proj of layers 0 and 2
    assert live_scheme(engine.model).kernels == Counter({int8_kernel(): 1 + 2 * 3}) + Counter(
        {int8_kernel(64, 112): 2}
    ) + Counter(
        {
            "KeptLinearMethod": 2,  # layer 0's gate_up_proj and the router
            "KeptExpertsMethod": 1,
            "UnquantizedEmbeddingMethod": 2,
        }
    )
    before = engine.generate()
    engine.load(read_checkpoint(new))
    assert engine.generate() != before
    engine.load(read_checkpoint(old))
    assert engine.generate() == before
    free_engine(engine)
