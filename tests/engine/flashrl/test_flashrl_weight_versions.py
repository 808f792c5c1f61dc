"""Which version of the weights sampled each token, as vLLM 0.32 answers; over HTTP: test_flashrl_serve.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from engines import Engine, free_engine, read_checkpoint
from ways_and_faults import by_call, by_transfer, start

from flashrl_compat.weight_versions import WeightVersionSpan

pytestmark = [pytest.mark.engine, pytest.mark.slow]

PROMPT = {"prompt_token_ids": [1, 2, 3]}
NUM_TOKENS = 12


def one_span(label: str, *, end: int = NUM_TOKENS) -> list[WeightVersionSpan]:
    return [WeightVersionSpan(label, 0, end)]


def answers(engine: Engine, **params: object) -> list:
    """The completions of one prompt, greedy where nothing else is asked for."""
    from vllm import SamplingParams

    settings = {"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True, "detokenize": False} | params
    [output] = engine.llm.generate([PROMPT], SamplingParams(**settings), use_tqdm=False)
    return output.outputs


def test_tokens_before_a_kept_update_have_the_old_label_and_those_after_it_the_new_one(
    two_checkpoints: tuple[Path, Path], ways_in: pytest.MonkeyPatch
) -> None:
    """Two updates in one answer; one has a label of the trainer's, the other the number of the update."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    ways_in.setenv("FLASHRL_CONFIG", "int8")
    engine = start(two_checkpoints[0])
    llm, core = engine.llm.llm_engine, engine.llm.llm_engine.engine_core.engine_core
    first, second = map(read_checkpoint, two_checkpoints)
    [alone] = answers(engine)
    params = SamplingParams(
        temperature=0,
        max_tokens=NUM_TOKENS,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.CUMULATIVE,
    )
    llm.add_request("kept", PROMPT, params)
    seen, changes = [], {3: second, 8: first}
    while llm.has_unfinished_requests():
        [output] = llm.step()
        seen.append((len(output.outputs[0].token_ids), output.outputs[0].weight_versions))
        weights = changes.get(seen[-1][0])
        if weights:
            core.pause_scheduler("keep", False)
            by_transfer(engine, weights)
            if weights is first:
                engine.llm.update_weight_version("step-2")
            core.resume_scheduler()
    spans = [WeightVersionSpan("default", 0, 3), WeightVersionSpan("1", 3, 8), WeightVersionSpan("step-2", 8, 12)]
    assert seen == [*((count, None) for count in range(1, NUM_TOKENS)), (NUM_TOKENS, spans)]
    tokens = output.outputs[0].token_ids
    assert tokens[:3] == alone.token_ids[:3] and tokens[3:8] != alone.token_ids[3:8]
    assert output.kv_transfer_params is None
    free_engine(engine)


def test_an_answer_of_one_version_has_one_span(two_checkpoints: tuple[Path, Path], ways_in: pytest.MonkeyPatch) -> None:
    """Also each of several samples, and one that an update ends as aborted."""
    from vllm import SamplingParams

    ways_in.setenv("FLASHRL_CONFIG", "bf16")
    engine = start(two_checkpoints[0])
    assert [answer.weight_versions for answer in answers(engine)] == [one_span("default")]
    by_call(engine, read_checkpoint(two_checkpoints[1]))
    assert [answer.weight_versions for answer in answers(engine, n=3, temperature=1)] == [one_span("1")] * 3
    engine.llm.start_weight_update()
    by_call(engine, read_checkpoint(two_checkpoints[0]))
    engine.llm.finish_weight_update(weight_version="step-2")
    assert [answer.weight_versions for answer in answers(engine)] == [one_span("step-2")]

    llm = engine.llm.llm_engine
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False)
    llm.add_request("ended", PROMPT, params)
    assert [len(output.outputs[0].token_ids) for _ in range(2) for output in llm.step()] == [1, 2]
    by_call(engine, read_checkpoint(two_checkpoints[1]))
    [ended] = llm.step()
    assert (ended.outputs[0].finish_reason, ended.outputs[0].weight_versions) == ("abort", one_span("step-2", end=2))
    free_engine(engine)
