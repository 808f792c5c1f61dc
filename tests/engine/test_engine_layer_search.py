"""The layer whose output is not the engine's, found with a real one: the trainer's model is changed in one place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from engines import Engine, free_engine, start_engine
from families import ONE_FLOW, make_family

pytestmark = pytest.mark.engine

IDS = [(7 + 13 * step * step) % 490 for step in range(23)]
TOKEN, TEMPERATURE = 11, 0.7
EXTENSION = "appliance.engine.sync.SyncWorkerExtension"
MEANING = "all before it is equal: its weights or their codes differ, or what it computes"


def by_engine(engine: Engine) -> Callable[..., Any]:
    """As the rollout server's `traced`, of an engine in this process."""
    from vllm import SamplingParams

    from appliance.quant.mismatch import LayerTrace

    params = SamplingParams(
        temperature=TEMPERATURE,
        max_tokens=1,
        logprob_token_ids=[TOKEN],
        skip_reading_prefix_cache=True,
        detokenize=False,
    )

    def traced(ids: list[int], *, names: list[str], values_at: object = None) -> Any:
        engine.llm.collective_rpc("begin_trace", args=(names, values_at))
        (output,) = engine.llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
        ((digests, values),) = engine.llm.collective_rpc("end_trace")
        return LayerTrace(values_at, digests, values, output.outputs[0].logprobs[0][TOKEN].logprob)

    return traced


def trainers_model(folder: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    from appliance.terms.schemes import Scheme
    from appliance.terms.settings import Quantisation
    from appliance.trainer.rollout_forward import RolloutForward

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    RolloutForward(model, quantisation=Quantisation(scheme=Scheme.INT8), num_tokens=model.config.vocab_size)
    return model


def by_trainer(model: Any) -> Callable[..., Any]:
    """As ApplianceEngine.traced, without FSDP."""
    import torch

    from appliance.quant.mismatch import LayerTrace

    def traced(ids: list[int], *, values_at: object = None) -> Any:
        trace = LayerTrace(values_at)
        with torch.no_grad():
            out = model(
                input_ids=torch.tensor([ids]),
                position_ids=torch.arange(len(ids))[None],
                shift_labels=torch.tensor([[*ids[1:], TOKEN]]),
                temperature=TEMPERATURE,
                trace=trace.note,
            )
        trace.log_prob = float(out.log_probs[0, -1])
        return trace

    return traced


def search_of(engine: Engine, model: Any, **changed: float) -> tuple[str, str]:
    """changed: log-probs `trainer` and `rollout` of the batch that are not what is read again."""
    from appliance.trainer.attest import find_difference

    ours, theirs = by_trainer(model), by_engine(engine)
    now = ours(IDS)
    then = (now.log_prob, theirs(IDS, names=list(now.digests)).log_prob)
    then = (changed.get("trainer", then[0]), changed.get("rollout", then[1]))
    return find_difference(IDS, by_trainer=ours, by_engines=[theirs], then=then)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family(tmp_path_factory.mktemp("qwen3"), name="qwen3", seed=1, tie_word_embeddings=False)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    started = start_engine(folder, scheme="int8", worker_extension_cls=EXTENSION, block_size=32)
    yield started
    free_engine(started)


NOTHING = "no layer differs where both read the sequence of 23 tokens again"


@pytest.mark.parametrize("family", ONE_FLOW)
def test_no_layer_of_an_equal_forward_differs(family: str, tmp_path: Path) -> None:
    folder = make_family(tmp_path, name=family, seed=1)
    engine = start_engine(folder, scheme="int8", worker_extension_cls=EXTENSION)
    finding, why = search_of(engine, trainers_model(folder))
    model = engine.model
    assert not any(module._forward_hooks for module in model.modules())
    free_engine(engine)
    assert finding == NOTHING
    assert why == "what follows the layers differs: the temperature, the tokens that are masked, the softmax"


def change_embedding(model: Any) -> None:
    model.model.embed_tokens.weight.data[IDS[4], 5] += 1


def change_norm(model: Any) -> None:
    model.model.layers[1].input_layernorm.variance_epsilon = 0.01


def change_weight(model: Any) -> None:
    model.model.layers[1].mlp.up_proj.weight.data[3, 5] += 1


def change_norm_of_heads(model: Any) -> None:
    model.model.layers[0].self_attn.k_norm.weight.data += 1


def change_head(model: Any) -> None:
    model.lm_head.weight.data[17] *= 2


def keep_in_bf16(model: Any) -> None:
    from appliance.terms.schemes import Scheme

    down, *_ = [each for each in model.forward.func.linears() if each.name == "model.layers.0.mlp.down_proj"]
    down.scheme = Scheme.BF16


# In one token only where it is named: of an attention each token reads those before it.
CHANGED = {
    change_embedding: ("model.embed_tokens", f"token {4} of 23, 1 of 96 values by up to "),
    change_norm: ("model.layers.1.input_layernorm", "token 0 of 23, "),
    change_weight: ("model.layers.1.mlp.gate_up_proj", "token 0 of 23, 1 of 288 values by up to "),
    change_norm_of_heads: ("model.layers.0.self_attn.attn", "token 1 of 23, "),
    keep_in_bf16: ("model.layers.0.mlp.down_proj", "token 0 of 23, "),
    change_head: ("lm_head", "token 22 of 23, 1 of 512 values by up to "),
}


@pytest.mark.parametrize("change", CHANGED, ids=lambda change: change.__name__)
def test_the_layer_that_was_changed_is_named(change: Callable[[Any], None], engine: Engine, folder: Path) -> None:
    model = trainers_model(folder)
    change(model)
    finding, why = search_of(engine, model)
    layer, place = CHANGED[change]
    assert finding.startswith(f"{layer} is the first layer that differs from the engine's: {place}")
    assert float(finding.rpartition(" ")[2]) > 0
    assert why == MEANING + (" (rotary embedding and norms of heads are part of it)" if "attn" in layer else "")


def test_a_difference_that_does_not_come_again_names_no_layer(engine: Engine, folder: Path) -> None:
    """Neither what a batch did to the engine, nor to the trainer."""
    model = trainers_model(folder)
    now = by_trainer(model)(IDS).log_prob
    finding, why = search_of(engine, model, rollout=-1.5)
    assert finding == NOTHING
    assert why == f"the engine does not repeat its log-prob: -1.5 in the batch, {now:.9g} alone"
    assert search_of(engine, model, trainer=-1.25, rollout=-1.5)[1] == (
        f"the trainer does not repeat its log-prob: -1.25 in the batch, {now:.9g} alone; "
        f"the engine does not repeat its log-prob: -1.5 in the batch, {now:.9g} alone"
    )
    change_norm(model)
    finding, why = search_of(engine, model, rollout=-1.5)
    assert finding.startswith("model.layers.1.input_layernorm is the first layer that differs")
    assert why == f"{MEANING}; the engine does not repeat its log-prob: -1.5 in the batch, {now:.9g} alone"


def test_a_prompt_that_the_engine_knows_is_read_whole(engine: Engine, folder: Path) -> None:
    """Its cache would leave out whole blocks of 32 tokens, and with them rows to compare."""
    traced = by_engine(engine)
    trace = by_trainer(trainers_model(folder))(IDS * 3)
    first, second = (traced(IDS * 3, names=list(trace.digests)) for _ in range(2))
    assert first == second
    assert {name: len(rows) for name, rows in second.digests.items()} == {
        name: 1 if name == "lm_head" else 69 for name in trace.digests
    }
