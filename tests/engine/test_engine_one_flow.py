"""The trainer's forward against a real engine: log-probs of sampled tokens, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
from engines import free_engine, start_engine
from families import FAMILIES, make_family

DENSE = [name for name in FAMILIES if "moe" not in name]
PROMPTS = [[(7 * place + step * step) % 490 for step in range(3 + 5 * place)] for place in range(12)]


def sampled(folder: Path, *, temperature: float, **settings: object) -> list[tuple[list[int], list[int], list[float]]]:
    """(prompt, response, log-probs) of an INT8 engine."""
    from vllm import SamplingParams

    engine = start_engine(folder, scheme="int8", **settings)
    params = SamplingParams(
        temperature=temperature, max_tokens=40, ignore_eos=True, logprobs=0, detokenize=False, seed=3
    )
    outputs = engine.llm.generate([{"prompt_token_ids": each} for each in PROMPTS], params, use_tqdm=False)
    found = [
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
    free_engine(engine)
    return found


def recomputed(folder: Path, rows: list, *, temperature: float, ignore: tuple[str, ...] = ()) -> list[list[float]]:
    """The same log-probs by the trainer's forward, all sequences in one row."""
    import torch
    from transformers import AutoModelForCausalLM

    from appliance.terms.schemes import Scheme
    from appliance.terms.settings import Quantisation
    from appliance.trainer.rollout_forward import RolloutForward

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    RolloutForward(
        model, quantisation=Quantisation(scheme=Scheme.INT8, ignore=ignore), num_tokens=model.config.vocab_size
    )
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
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("family", DENSE)
def test_log_probs_are_the_engines(family: str, temperature: float, tmp_path: Path) -> None:
    folder = make_family(tmp_path, name=family, seed=1)
    rows = sampled(folder, temperature=temperature)
    found = recomputed(folder, rows, temperature=temperature)
    assert found == [log_probs for _, _, log_probs in rows]
    assert sum(map(len, found)) == 480
