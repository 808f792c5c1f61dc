"""An adapter beside a model under FSDP2, as verl wraps and merges it: what is sent, what stays, what PEFT reads."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import Tensor
from transformers import (
    LlamaForCausalLM,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
)

from appliance.errors import EngineError, SyncError
from appliance.settings.sections import Lora
from appliance.terms.shapes import Linear, ModelShape
from appliance.trainer.lora import (
    ExpectedMerge,
    FrozenWeights,
    check_merge,
    expected_merge,
    merge,
    put_adapter_in,
    save_adapter,
)

UPDATES, RANKS = 4, 2
LORA = Lora(rank=4, alpha=8, targets=tuple(map(str, Linear)), dropout=0.0)
BASE = "owner/name"
UNIT = 2.0**-8  # of a value that is rounded to BF16, half of its last bit


def tiny() -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = Qwen2Config(**sizes, vocab_size=64, num_hidden_layers=2, tie_word_embeddings=True)
    return Qwen2ForCausalLM(config).to(torch.bfloat16)


def under_fsdp(model: torch.nn.Module, *, ranks: int, dtype: torch.dtype = torch.bfloat16) -> torch.nn.Module:
    """As `_build_fsdp_module` does it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy
    from verl.utils.fsdp_utils import apply_fsdp2

    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=True)
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("fsdp",))
    apply_fsdp2(model, {"mesh": mesh, "mp_policy": policy, "offload_policy": None, "reshard_after_forward": True}, {})
    return model


def sent_by_verl(module: torch.nn.Module) -> dict[str, Tensor]:
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

    engine: Any = SimpleNamespace(module=module, _is_offload_param=False)
    return {name: tensor.clone() for name, tensor in FSDPEngine._merged_lora_per_tensor_param(engine)}


def one_rank(rank: int, folder: str, ranks: int) -> None:
    """A rank's process: it trains and sends, and leaves what it saw in `<folder>/<rank>.pt`, its adapter in `actor`."""
    os.environ["VERL_PLATFORM"] = "cpu"
    import appliance.trainer.worker  # noqa: F401  (verl's platform)

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=ranks)
    module = under_fsdp(put_adapter_in(tiny(), lora=LORA, seed=1), ranks=ranks)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.02)
    ids, frozen, seen = torch.arange(12)[None] + rank, FrozenWeights(), []
    for update in range(UPDATES):
        frozen.check(module)
        weights = whole(module)
        expected = expected_merge(module, lora=LORA, turn=3 * update)
        seen.append((sent_by_verl(module), weights))
        assert (expected.sum_NK is None) is (rank > 0)
        list(check_merge(seen[-1][0].items(), expected=expected))
        with torch.no_grad():
            module(input_ids=ids)  # log-probs before an update: what FSDP gathered for them must not be merged into
        module(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    save_adapter(module, folder=Path(folder) / "adapter", base=BASE, commit="")
    refusal, wrong = "", ""
    try:
        expected = expected_merge(module, lora=LORA, turn=0)
        list(check_merge((seen[0][0] | {expected.name: 2 * seen[-1][0][expected.name]}).items(), expected=expected))
    except SyncError as error:
        wrong = error.message
    with torch.no_grad():  # what an unfinished merge would leave
        layer = module.base_model.model.model.layers[1].mlp.up_proj
        layer.merge()
    try:
        frozen.check(module)
    except SyncError as error:
        refusal = error.message
    states = len(optimizer.state)
    torch.save({"seen": seen, "said": refusal, "wrong": wrong, "states": states}, f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


def test_an_expected_layer_that_is_not_sent_is_an_error() -> None:
    weight = torch.ones(2, 2)
    expected = ExpectedMerge("a.weight", sum_NK=weight, bound_NK=0 * weight)
    assert [name for name, _ in check_merge([("b.weight", weight), ("a.weight", weight)], expected=expected)] == [
        "b.weight",
        "a.weight",
    ]
    with pytest.raises(SyncError, match=r"a\.weight has an adapter and was not sent"):
        list(check_merge([("b.weight", weight)], expected=expected))
    with pytest.raises(SyncError, match=r"a\.weight is not the model's weight with its adapter: 4 of 4"):
        list(check_merge([("a.weight", 2 * weight)], expected=expected))


def whole(module: torch.nn.Module) -> dict[str, Tensor]:
    return {name: each.full_tensor().detach().clone() for name, each in module.named_parameters()}


@pytest.fixture(scope="module", params=[1, RANKS])
def left(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict]]:
    folder = tmp_path_factory.mktemp("ranks")
    torch.multiprocessing.spawn(one_rank, args=(str(folder), request.param), nprocs=request.param)
    return folder, [torch.load(folder / f"{rank}.pt") for rank in range(request.param)]


def is_adapters(name: str) -> bool:
    return ".lora_" in name


def test_what_does_not_move_is_the_same_bit_for_bit_after_every_merge(left: tuple[Path, list[dict]]) -> None:
    first = {name: each for name, each in put_adapter_in(tiny(), lora=LORA, seed=1).named_parameters()}
    _, by_rank = left
    for rank in by_rank:
        assert len(rank["seen"]) == UPDATES
        for _, weights in rank["seen"]:
            held = [name for name in weights if not is_adapters(name)]
            assert [name for name in held if not weights[name].equal(first[name])] == [] and len(held) == 26
        _, last = rank["seen"][-1]
        moved = [name for name in last if is_adapters(name) and not last[name].equal(first[name])]
        assert len(moved) == rank["states"] == 2 * 2 * len(LORA.targets)  # A and B, two layers


def test_what_is_sent_is_the_model_with_the_adapter_of_that_update(left: tuple[Path, list[dict]]) -> None:
    """Of W + s B A in float64: s B A is rounded to BF16, and the sum is. What is between them in FP32 has products of
    rank 4, at most 5 x 2^-24 of |B| |A| s."""
    _, by_rank = left
    names = {name for name, _ in tiny().named_parameters()} | {"lm_head.weight"}
    for sent, weights in by_rank[0]["seen"]:
        assert set(sent) == names
        for name, tensor in sent.items():
            assert tensor.dtype == torch.bfloat16
            base = f"base_model.model.{name.removesuffix('.weight')}"
            if f"{base}.lora_A.default.weight" not in weights:
                continue
            a, b = (weights[f"{base}.lora_{each}.default.weight"].double() for each in "AB")
            w, delta = weights[f"{base}.base_layer.weight"].double(), 2.0 * b @ a
            bound = UNIT * (1 + UNIT) * (w.abs() + 2 * delta.abs()) + 2.0 * 5 * 2.0**-24 * b.abs() @ a.abs()
            assert bool(((tensor.double() - (w + delta)).abs() <= bound + 1e-30).all()), name
    start, later = by_rank[0]["seen"][0][0], by_rank[0]["seen"][-1][0]
    assert all(start[name].equal(each) for name, each in tiny().named_parameters())
    assert sum(not start[name].equal(each) for name, each in later.items()) == 2 * len(LORA.targets)


def test_a_merge_that_stayed_in_the_weights_is_found_before_the_next_one(left: tuple[Path, list[dict]]) -> None:
    said = "weight update: 1 weight that LoRA leaves alone has changed, first model.layers.1.mlp.up_proj.weight"
    assert [rank["said"] for rank in left[1]] == [said] * len(left[1])


def test_every_rank_ends_with_what_the_first_one_finds(left: tuple[Path, list[dict]]) -> None:
    first, *others = (rank["wrong"] for rank in left[1])
    assert first.startswith("weight update: model.layers.0.self_attn.q_proj.weight is not the model's weight with its")
    assert set(others) <= {first}


def test_a_layer_that_counts_as_merged_is_found_before_the_next_merge() -> None:
    """PEFT would pass over it, and the model alone would be sent, digested and proven."""
    module, frozen = put_adapter_in(tiny(), lora=LORA, seed=1), FrozenWeights()
    frozen.check(module)
    layer = module.base_model.model.model.layers[1].mlp.up_proj
    layer.merged_adapters = ["default"]
    with pytest.raises(SyncError) as raised:
        frozen.check(module)
    said = "weight update: 1 layer counts as merged before the merge, first model.layers.1.mlp.up_proj"
    assert raised.value.message == said
    layer.merged_adapters = []
    frozen.check(module)


SLIPS: dict[str, Callable[[LoraLayer], None]] = {  # in a merge, before anything is digested
    "half the scale": lambda layer: layer.scaling.update(default=layer.scaling["default"] / 2),
    "another rank's scale": lambda layer: layer.scaling.update(default=1.0),
    "not merged": lambda layer: layer.lora_B["default"].weight.data.zero_(),
    "merged twice": lambda layer: layer.merge(),
    "the adapter of the update before": lambda layer: layer.lora_B["default"].weight.data.mul_(0.9),
    "another base": lambda layer: layer.base_layer.weight.data.mul_(1.05),
}


@pytest.mark.parametrize("slip", SLIPS)
@pytest.mark.parametrize("moved", [1e-4, 1e-2])
def test_a_wrong_merge_is_found_before_it_is_digested(slip: str, moved: float) -> None:
    """Of each layer, when it is its turn. moved: of B, per element: a step at the demo's rate, and many."""
    module = put_adapter_in(tiny(), lora=LORA, seed=1)
    layers = {name: each for name, each in module.named_modules() if isinstance(each, LoraLayer)}
    for layer in layers.values():
        torch.nn.init.uniform_(layer.lora_B["default"].weight, -moved, moved)
    expected = [expected_merge(module, lora=LORA, turn=turn) for turn in range(len(layers))]
    for layer in layers.values():
        SLIPS[slip](layer)
        layer.merged_adapters = []
        layer.merge()
    checked = 0
    for sent_merge, layer in zip(expected, layers.values(), strict=True):
        with pytest.raises(SyncError) as raised:
            sent_merge.check(layer.base_layer.weight)
        checked += 1
        said = f"weight update: {sent_merge.name} is not the model's weight with its adapter: "
        assert raised.value.message.startswith(said)
    assert checked == 2 * len(LORA.targets)


def test_model_and_adapter_are_the_same_for_peft(left: tuple[Path, list[dict]], tmp_path: Path) -> None:
    """In float64 the logits differ by what merging rounds: |W' - (W + s B A)| <= 2^-8 (|W| + 2 |s B A|) of each weight,
    by the test above, times how far the logit moves with it. Twice that, for what is not linear."""
    from peft import PeftModel

    base, actor = tmp_path / "base", tmp_path / "actor"
    tiny().save_pretrained(base)
    (actor / "huggingface").mkdir(parents=True)
    written = (base / "config.json").read_text().replace("  ", "   ")  # as no save of transformers' own spells it
    (actor / "huggingface" / "config.json").write_text(written)
    (left[0] / "adapter").replace(actor / "adapter") if not (actor / "adapter").exists() else None
    merge(str(base), commit="", trust_remote_code=False, actor=actor, target=tmp_path / "model")
    (actor / "adapter").replace(left[0] / "adapter")
    assert (tmp_path / "model" / "adapter" / "adapter_config.json").is_file()
    assert (tmp_path / "model" / "config.json").read_text() == written
    assert {file.name for file in (tmp_path / "model").iterdir()} == {"adapter", "config.json", "model.safetensors"}
    merged = Qwen2ForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float64)
    model = Qwen2ForCausalLM.from_pretrained(base, dtype=torch.float64)
    beside = PeftModel.from_pretrained(model, str(tmp_path / "model" / "adapter")).double()
    assert beside.peft_config["default"].base_model_name_or_path == "owner/name"
    ids = torch.arange(8)[None]
    logits = merged(input_ids=ids).logits
    apart = (logits - beside(input_ids=ids).logits).abs()
    worst = apart.argmax()
    logits.view(-1)[worst].backward()
    plain = tiny().state_dict()
    most = sum(
        (each.grad.abs() * UNIT * (2 * each.abs() + plain[name].abs())).sum()
        for name, each in merged.named_parameters()
        if name.rpartition(".")[0].rpartition(".")[2] in LORA.targets and name.endswith("weight")
    )
    assert 0 < apart.max() <= 2 * most
    bare = Qwen2ForCausalLM.from_pretrained(base, dtype=torch.float64)
    assert (bare(input_ids=ids).logits - logits).abs().max() > 2 * most  # the adapter says something


@pytest.mark.parametrize("model_class", [Qwen2ForCausalLM, Qwen3ForCausalLM, LlamaForCausalLM, MistralForCausalLM])
def test_pefts_all_linear_are_the_layers_of_a_plan(model_class: type[PreTrainedModel]) -> None:
    """All linear layers but the head, in each dense family."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = model_class.config_class(**sizes, head_dim=8, vocab_size=64, num_hidden_layers=2)
    planned = put_adapter_in(model_class(config), lora=LORA, seed=0)
    pefts = get_peft_model(model_class(config), LoraConfig(r=LORA.rank, target_modules="all-linear"))
    adapted = [
        {name for name, layer in model.named_modules() if isinstance(layer, LoraLayer)} for model in (planned, pefts)
    ]
    assert adapted[0] == adapted[1] and len(adapted[0]) == 14
    assert not any("lm_head" in name for name in adapted[0])


def test_a_target_that_the_model_lacks_is_refused() -> None:
    model = torch.nn.Sequential()
    model.add_module("q_proj", torch.nn.Linear(2, 2))
    with pytest.raises(EngineError) as raised:
        put_adapter_in(model, lora=LORA, seed=0)
    assert raised.value.message == "model.lora: the model has no linear layer down_proj"
    assert raised.value.hint == "name some of q_proj in model.lora.targets"


def test_the_adapters_weights_are_counted() -> None:
    sizes = {"heads": 4, "kv_heads": 2, "head_size": 8, "hidden": 32, "intermediate": 48, "layers": 2}
    model = put_adapter_in(tiny(), lora=LORA, seed=0)
    trained = sum(each.numel() for each in model.parameters() if each.requires_grad)
    assert ModelShape(**sizes).adapter_weights(LORA.rank, targets=LORA.targets) == trained > 0


def test_the_adapter_is_in_float32_the_same_for_a_seed_and_drops_what_enters_it() -> None:
    model, same, other = (put_adapter_in(tiny(), lora=LORA, seed=seed) for seed in (1, 1, 2))
    dropping = put_adapter_in(tiny(), lora=LORA.replace(dropout=0.25), seed=1)
    names = [name for name, each in model.named_parameters() if each.requires_grad]
    assert {dict(model.named_parameters())[name].dtype for name in names} == {torch.float32}
    a = next(name for name in names if "lora_A" in name)
    first, again, another = (dict(each.named_parameters())[a] for each in (model, same, other))
    assert first.equal(again) and not first.equal(another)
    assert {each.p for each in dropping.modules() if isinstance(each, torch.nn.Dropout)} == {0.25}
