"""FLASHRL_CONFIG with models that have no row in the list of families: updated, or refused by name. In INT8 those of
tests/unlisted_models.py, in BF16 what no scheme of ours takes, and more."""

from __future__ import annotations

from pathlib import Path

import pytest
from engines import free_engine, read_checkpoint, start_engine
from unlisted_models import UNLISTED, make_unlisted

from appliance.errors import EngineError

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.long]

HEAD = {"head_dim": 32}
EXPERTS = {"num_experts_per_tok": 2}
# By model_type of transformers, in its order of fields: what its configuration needs beside SIZES.
TAKEN: dict[str, dict[str, object]] = {
    **{model_type: {} for model_type in UNLISTED},
    "glm": HEAD,
    "exaone4": {"sliding_window": 64},
    "stablelm": {},
    "cohere": {},
    "ernie4_5": HEAD,
    "seed_oss": HEAD,
    "nemotron": {},
    "opt": {"ffn_dim": 160, "word_embed_proj_dim": 96},
    "mixtral": EXPERTS | {"num_local_experts": 4},
    "olmoe": EXPERTS | {"num_experts": 4},
    "qwen2_moe": EXPERTS | {"num_experts": 4, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64},
    "qwen3_moe": EXPERTS | HEAD | {"num_experts": 4, "moe_intermediate_size": 64},
}
UNPROVEN = r"^\S+ holds 3 layers, in an order that no proof knows: no weight update of this model is proven$"
AT_THE_START = ("gpt2", "gpt_neox", "gpt_bigcode", "falcon", "bloom")  # queries, keys and values in orders of their own


def updated(tmp_path: Path, model_type: str, **fields: object) -> tuple[object, object, object, object]:
    """What an engine says before an update, after it and after one more that takes it back, and a fresh one of the new
    weights."""
    first, second = (make_unlisted(tmp_path / str(seed), model_type, seed=seed, **fields) for seed in (1, 2))
    engine = start_engine(first, scheme="bf16")
    old = engine.generate()
    answers, lines = [], []
    engine.worker.appliance_ways_in._tell = lines.append
    for folder in (second, first):
        for each in read_checkpoint(folder):
            engine.model.load_weights([each])
        answers.append(engine.generate())
    assert len(lines) == 2 and all(line.endswith(" layers proven") for line in lines), lines  # and no tensor was not
    known = engine.worker.appliance_ways_in.update._routes._known  # of the families whose models do no more alone
    assert bool(known) == (model_type == "qwen3_moe")
    free_engine(engine)
    other = start_engine(second, scheme="bf16")
    fresh = other.generate()
    free_engine(other)
    return old, *answers, fresh


@pytest.mark.parametrize("model_type", TAKEN)
def test_an_update_ends_in_the_engine_of_the_new_weights(
    tmp_path: Path, ways_in: pytest.MonkeyPatch, model_type: str
) -> None:
    ways_in.setenv("FLASHRL_CONFIG", "int8" if model_type in UNLISTED else "bf16")
    old, new, back, fresh = updated(tmp_path, model_type, **TAKEN[model_type])
    assert back == old != new == fresh


@pytest.mark.parametrize("model_type", AT_THE_START)
def test_what_no_proof_knows_is_refused_at_the_start(
    tmp_path: Path, ways_in: pytest.MonkeyPatch, model_type: str
) -> None:
    ways_in.setenv("FLASHRL_CONFIG", "bf16")
    with pytest.raises(EngineError, match=UNPROVEN):
        start_engine(make_unlisted(tmp_path, model_type, seed=1), scheme="bf16")


def test_an_encoder_that_no_proof_knows_is_refused_at_the_start(tmp_path: Path, ways_in: pytest.MonkeyPatch) -> None:
    ways_in.setenv("FLASHRL_CONFIG", "bf16")
    fields = {"cls_token_id": 1, "sep_token_id": 2, "global_attn_every_n_layers": 2}
    folder = make_unlisted(tmp_path, "modernbert", seed=1, made_by="AutoModel", **fields)
    with pytest.raises(EngineError, match=UNPROVEN):
        start_engine(folder, scheme="bf16", runner="pooling", convert="embed", enable_chunked_prefill=False)
