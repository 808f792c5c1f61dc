"""The trainer's forward against a real engine: log-probs of sampled tokens, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
from engines import Engine, free_engine, start_engine
from families import FAMILIES, make_family

FP8 = ("fp8", "fp8-channel", "fp8-block")
DENSE = [name for name in FAMILIES if "moe" not in name]
PROMPTS = [[(7 * place + step * step) % 490 for step in range(3 + 5 * place)] for place in range(12)]


def sampled(engine: Engine, *, temperature: float) -> list[tuple[list[int], list[int], list[float]]]:
    """(prompt, response, log-probs)"""
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=temperature, max_tokens=40, ignore_eos=True, logprobs=0, detokenize=False, seed=3
    )
    outputs = engine.llm.generate([{"prompt_token_ids": each} for each in PROMPTS], params, use_tqdm=False)
    return [
        (
            list(each.prompt_token_ids),
            list(each.outputs[0].token_ids),
            [
                step[token].logprob
                for step, token in zip(each.outputs[0].logprobs, each.outputs[0].token_ids, strict=True)
            ],
        )
        for each in outputs
    ]


def recomputed(folder: Path, rows: list, *, temperature: float, scheme: str = "int8") -> list[list[float]]:
    """The same log-probs by the trainer's forward, all sequences in one row."""
    import torch
    from transformers import AutoModelForCausalLM

    from appliance.terms.schemes import Scheme
    from appliance.terms.settings import Quantisation
    from appliance.trainer.rollout_forward import RolloutForward

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    quantisation = Quantisation(scheme=Scheme(scheme), emulated=scheme in FP8)
    RolloutForward(model, quantisation=quantisation, num_tokens=model.config.vocab_size)
    texts = [prompt + response for prompt, response, _ in rows]
    ids = torch.tensor([[token for text in texts for token in text]])
    positions = torch.cat([torch.arange(len(text)) for text in texts])[None]
    with torch.no_grad():
        out = model(input_ids=ids, position_ids=positions, temperature=temperature, shift_labels=ids.roll(-1, 1))
    found, start = [], 0
    for prompt, response, _ in rows:
        first = start + len(prompt) - 1
        found.append(out.log_probs[0, first : first + len(response)].tolist())
        start += len(prompt) + len(response)
    return found


@pytest.mark.engine
@pytest.mark.parametrize("family", DENSE)
def test_log_probs_are_the_engines(family: str, tmp_path: Path) -> None:
    folder = make_family(tmp_path, name=family, seed=1)
    engine = start_engine(folder, scheme="int8")
    rows = {temperature: sampled(engine, temperature=temperature) for temperature in (1.0, 0.7)}
    free_engine(engine)
    for temperature, each in rows.items():
        found = recomputed(folder, each, temperature=temperature)
        assert found == [log_probs for _, _, log_probs in each]
        assert sum(map(len, found)) == 480


@pytest.mark.engine
@pytest.mark.parametrize("scheme", FP8)
def test_log_probs_are_those_of_engines_that_emulate_fp8(scheme: str, tmp_path: Path) -> None:
    """Weights of q, k and v share blocks and, per tensor, a scale: the layers are fused here as they are there."""
    folder = make_family(tmp_path, name="qwen2", seed=1)
    engine = start_engine(folder, scheme=scheme, emulated=True)
    rows = sampled(engine, temperature=0.7)
    free_engine(engine)
    found = recomputed(folder, rows, temperature=0.7, scheme=scheme)
    assert found == [log_probs for _, _, log_probs in rows]
    assert sum(map(len, found)) == 480
