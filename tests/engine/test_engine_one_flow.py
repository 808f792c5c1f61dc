"""The trainer's forward against a real engine: log-probs of sampled tokens, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from engines import Engine, free_engine, read_checkpoint, start_engine
from families import ONE_FLOW, make_family
from test_engine_precision import Switched

from appliance.terms.settings import CPU_KV_BLOCK

if TYPE_CHECKING:
    from appliance.trainer.rollout_forward import RolloutForward

FP8 = ("fp8", "fp8-channel", "fp8-block")
PROMPTS = [[(7 * place + step * step) % 490 for step in range(3 + 5 * place)] for place in range(12)]


def sampled(
    engine: Engine, *, temperature: float, prompts: list[list[int]] = PROMPTS
) -> list[tuple[list[int], list[int], list[float]]]:
    """(prompt, response, log-probs)"""
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=temperature, max_tokens=40, ignore_eos=True, logprobs=0, detokenize=False, seed=3
    )
    outputs = engine.llm.generate([{"prompt_token_ids": each} for each in prompts], params, use_tqdm=False)
    return [
        (
            list(output.prompt_token_ids),
            list(output.outputs[0].token_ids),
            [
                step[token].logprob
                for step, token in zip(output.outputs[0].logprobs, output.outputs[0].token_ids, strict=True)
            ],
        )
        for output in outputs
    ]


def recomputed(folder: Path, rows: list, *, temperature: float, scheme: str = "int8") -> list[list[float]]:
    """The same log-probs by the trainer's forward, all sequences in one row."""
    model, _ = trainers(folder, scheme=scheme)
    return recomputed_by(model, rows, temperature=temperature)


def trainers(
    folder: Path, *, scheme: str = "int8", num_tokens: int | None = None, **settings: Any
) -> tuple[Any, RolloutForward]:
    """The model, and what was put into it. num_tokens: None, all.  told: more of what engines are told."""
    import torch
    from transformers import AutoModelForCausalLM

    from appliance.terms.schemes import Scheme
    from appliance.terms.settings import Quantisation
    from appliance.trainer.rollout_forward import RolloutForward

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    quantisation = Quantisation(scheme=Scheme(scheme), emulated=scheme in FP8, **settings)
    return model, RolloutForward(model, quantisation=quantisation, num_tokens=num_tokens or model.config.vocab_size)


def recomputed_by(model: Any, rows: list, *, temperature: float) -> list[list[float]]:
    import torch

    texts = [prompt + response for prompt, response, _ in rows]
    ids = torch.tensor([[token for text in texts for token in text]])
    positions = torch.cat([torch.arange(len(text)) for text in texts])[None]
    with torch.no_grad():
        out = model(input_ids=ids, position_ids=positions, temperature=temperature, shift_labels=ids.roll(-1, 1))
    log_probs, start = [], 0
    for prompt, response, _ in rows:
        first = start + len(prompt) - 1
        log_probs.append(out.log_probs[0, first : first + len(response)].tolist())
        start += len(prompt) + len(response)
    return log_probs


@pytest.mark.engine
@pytest.mark.parametrize("family", ONE_FLOW)
def test_log_probs_are_the_engines(family: str, tmp_path: Path) -> None:
    """Also where a prompt's first block was computed for another sample, as in a run: the second temperature's."""
    from vllm import SamplingParams, envs

    folder = make_family(tmp_path, name=family, seed=1)
    engine = start_engine(folder, scheme="int8", block_size=CPU_KV_BLOCK)
    assert not envs.VLLM_CPU_ATTN_SPLIT_KV  # why: tests/parts/trainer/test_rollout_attention.py
    rows = {temperature: sampled(engine, temperature=temperature) for temperature in (1.0, 0.7)}
    again = engine.llm.generate(
        {"prompt_token_ids": PROMPTS[-1]}, SamplingParams(max_tokens=1, detokenize=False), use_tqdm=False
    )
    assert again[0].num_cached_tokens >= CPU_KV_BLOCK
    free_engine(engine)
    for temperature, sampled_rows in rows.items():
        again_log_probs = recomputed(folder, sampled_rows, temperature=temperature)
        assert again_log_probs == [log_probs for _, _, log_probs in sampled_rows]
        assert sum(map(len, again_log_probs)) == 480


@pytest.mark.engine
def test_samples_are_the_same_however_many_engines_share_the_prompts(tmp_path: Path) -> None:
    """Other batches, another order, and no prefix that is kept: the same tokens and log-probs, bit for bit."""
    folder = make_family(tmp_path, name="qwen2", seed=1)
    engines = [start_engine(folder, scheme="int8", block_size=CPU_KV_BLOCK) for _ in range(3)]
    alone = sampled(engines[0], temperature=1.0)
    shared = [sampled(engines[which], temperature=1.0, prompts=PROMPTS[which - 1 :: 2][::-1]) for which in (1, 2)]
    assert sorted(shared[0] + shared[1]) == sorted(alone)
    assert len({tuple(response) for _, response, _ in alone}) == len(PROMPTS)


@pytest.mark.engine
@pytest.mark.parametrize("scheme", [*FP8, "int4"])
def test_log_probs_are_those_of_engines_of_other_schemes(scheme: str, tmp_path: Path) -> None:
    """Weights of q, k and v share blocks and, per tensor, a scale: the layers are fused here as they are there."""
    folder = make_family(tmp_path, name="qwen2", seed=1)
    engine = start_engine(folder, scheme=scheme, emulated=scheme in FP8)
    rows = sampled(engine, temperature=0.7)
    free_engine(engine)
    found = recomputed(folder, rows, temperature=0.7, scheme=scheme)
    assert found == [log_probs for _, _, log_probs in rows]
    assert sum(map(len, found)) == 480


KEPT_BY_PROFILE, KEPT_BY_RECIPE = "model.layers.0.self_attn.qkv_proj", "model.layers.1.mlp.down_proj"
RAISED = "model.layers.1.mlp.gate_up_proj"
SAMPLED = 400  # of the 512 tokens of the model


def profile_of(folder: Path, *, model: Any) -> Path:
    """All that can be smoothed is, and a layer that reads is kept, whose rows are divided as well."""
    from smoothings import random_smoothing

    from appliance.quant.files import Origin, Settings
    from appliance.quant.profile import Profile, write_profile
    from appliance.terms.schemes import Scheme

    smoothing = random_smoothing(model, seed=2)
    assert len(smoothing.groups) == 4 * model.config.num_hidden_layers
    settings = Settings(ignore=(KEPT_BY_PROFILE,))
    profile = Profile(Origin("calibrated", "m"), Scheme.INT8, settings, smoothing)
    write_profile(profile, folder=folder)
    return folder


@pytest.mark.engine
def test_both_sides_smooth_and_keep_the_same_layers(tmp_path: Path) -> None:
    """By the profile, the recipe and, by a weight update, the governor; the lists that both attest are one. Neither
    side knows the tokens that verl masks in an engine."""
    from verl.workers.rollout.vllm_rollout.utils import monkey_patch_compute_logits

    from appliance.engine.attest import _quantised
    from appliance.quant.profile import load_smoothing
    from appliance.terms.schemes import AS_PLANNED, Precision, Scheme
    from appliance.terms.settings import Quantisation

    folder = make_family(tmp_path, name="qwen2", seed=1)
    plain, _ = trainers(folder)
    settings = {"profile": str(profile_of(tmp_path / "profile", model=plain)), "ignore": (r"re:.*\.1\.mlp\.down_proj",)}
    arguments = Quantisation(scheme=Scheme.INT8, **settings).engine_arguments()
    engine = start_engine(folder, scheme="int8", **(arguments | {"load_format": "appliance"}))
    monkey_patch_compute_logits(engine.model, SAMPLED)
    model, flow = trainers(folder, num_tokens=SAMPLED, **settings)
    switched = Switched(engine, smoothing=load_smoothing(Path(settings["profile"])))
    num_quantised = {}
    for precision in (AS_PLANNED, Precision(bf16_layers=(RAISED,)), Precision(Scheme.BF16), AS_PLANNED):
        switched.to(precision, read_checkpoint(folder))
        flow.follow(precision)
        rows = sampled(engine, temperature=0.7)
        assert recomputed_by(model, rows, temperature=0.7) == [log_probs for _, _, log_probs in rows]
        listed = sorted(_quantised(engine.model))
        assert listed == sorted(layer.name for layer in flow.linears() if layer.scheme.quantised)
        num_quantised[precision] = len(listed)
        assert max(max(response) for _, response, _ in rows) < SAMPLED
        assert not {KEPT_BY_PROFILE, KEPT_BY_RECIPE} & {*listed}
    free_engine(engine)
    assert [*num_quantised.values()] == [6, 5, 0]
    assert recomputed_by(plain, rows, temperature=0.7) != [log_probs for _, _, log_probs in rows]
