"""Rollouts whose engine fails in any way: the trainer that waits hears of it. The engine is a fake, the loop real."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError, RayError
from slow_rewards import slow_rewards

from appliance.engine.replica import standing_still
from appliance.errors import ApplianceError, EngineError, TrainingError
from appliance.record.samples import SampleLog
from appliance.tasks.grading import Fault, Graded, Shaping
from appliance.tasks.task import Response
from appliance.tasks.tiny_model import byte_tokenizer
from appliance.tasks.tools import ToolAnswer
from appliance.terms.clock import clock_of
from appliance.trainer import rollouts as module
from appliance.trainer.engine_shares import Sampling
from appliance.trainer.prompt_seeds import PromptSeeds
from appliance.trainer.rewards import RewardPool
from appliance.trainer.rollouts import Rollouts
from appliance.trainer.turns import Trajectory, TrajectoryGroup, Turns

GREEDY = Sampling(temperature=0.0, top_p=1.0, num_samples=1)
DONE = SimpleNamespace(samples=[], weights_version=0)
TOKENIZER = byte_tokenizer(max_positions=2048, calls_tools=True)
CALL = '<tool_call>{"name": "seven", "arguments": {}}</tool_call>'
ASKED = [{"role": "user", "content": "7"}]


class Engine:
    """Answers as it is told: (place, group) is an answer, an error is raised."""

    def __init__(self, *answers: object) -> None:
        self._answers = answers
        self.generate_groups = self

    def options(self, **_: object) -> Engine:
        return self

    async def remote(self, *_: object, **__: object) -> AsyncIterator[Any]:
        for answer in self._answers:
            yield _answer(answer)


async def _answer(answer: object) -> object:
    if isinstance(answer, BaseException):
        raise answer
    return answer


PARTS = {
    "reader": SimpleNamespace(text=lambda ids, finished: "said", begun=""),
    "pool": None,
    "shaping": Shaping(),
    "training": GREEDY,
    "validation": GREEDY,
    "max_prompt_tokens": 512,
    "seed": 0,
    "in_order": True,
    "samples": SampleLog(Path("run"), steps=1, decode=str),
}


def make_rollouts(*engines: Engine) -> Rollouts:
    tokenizer = SimpleNamespace(apply_chat_template=lambda messages, **_: [1, 2, 3])
    return Rollouts(list(engines), tokenizer=tokenizer, **PARTS | {"max_prompt_tokens": 8})


def test_a_chat_template_is_told_the_day_of_the_run() -> None:
    """Whatever day it is: the clock of the run goes on to the template, in prompts and in turns of tools."""
    tokenizer = byte_tokenizer(max_positions=2048, calls_tools=True)
    tokenizer.chat_template = "{{ strftime_now('%d %b %Y') }}\n" + tokenizer.chat_template
    clock, messages = clock_of(tokenizer, date="2020-02-03"), [{"role": "user", "content": "1+2"}]
    row = {"raw_prompt": messages, "global_steps": 1}
    made = Rollouts([], tokenizer=tokenizer, clock=clock, **PARTS)
    prompts = [made._make_prompt(row, sampling=GREEDY, seeds=PromptSeeds(0)).token_ids]
    settings = {"model_type": "qwen2", "schemas": [], "max_turns": 1, "max_tokens": 8, "call": lambda *_: None}
    prompts.append(Turns(tokenizer, clock=clock, **settings).prompt_ids(messages))
    assert [tokenizer.decode(ids[:11]) for ids in prompts] == ["03 Feb 2020"] * 2
    assert prompts[0] == prompts[1]


def test_the_prompts_of_the_newest_step_are_known_all_of_them() -> None:
    """Those of a validation are none, and dynamic sampling asks for more of them in the same step."""
    rollouts = make_rollouts(Engine(EngineError("gone")))
    rollouts._tokenizer = SimpleNamespace(apply_chat_template=lambda messages, **_: [messages[0], 7])

    def sample(*chats: int, step: int, validate: bool = False) -> list[list[int]]:
        rows = [{"raw_prompt": [chat], "global_steps": step, "uid": "u", "reward_model": None} for chat in chats]
        with pytest.raises(EngineError, match="gone"):
            asyncio.run_coroutine_threadsafe(
                rollouts._sample(rows, sampling=GREEDY, seeds=PromptSeeds(0), validate=validate), rollouts._loop
            ).result()
        return rollouts.step_prompts

    assert sample(1, 2, step=1) == [[1, 7], [2, 7]]
    assert sample(3, step=1) == [[1, 7], [2, 7], [3, 7]]
    assert sample(9, step=1, validate=True) == [[1, 7], [2, 7], [3, 7]]
    assert sample(4, step=2) == [[4, 7]]


def test_a_pause_is_never_ended_by_another_call() -> None:
    """vLLM answers a pause when the engine stands still; one that is resumed before that is not answered."""
    waiting: list[asyncio.Future[None]] = []

    class Stepping:
        async def pause_generation(self, **_: object) -> None:
            waiting.append(asyncio.get_running_loop().create_future())
            asyncio.get_running_loop().call_later(0.01, lambda: [one.done() or one.set_result(None) for one in waiting])
            await waiting[-1]

        async def resume_generation(self) -> None:
            waiting.clear()

    async def ask(engine: Stepping, one: asyncio.Lock, *, after_s: float) -> None:
        await asyncio.sleep(after_s)  # so that the next one waits for its pause when this one ends its own
        async with standing_still(engine, lock=one):
            await asyncio.sleep(0.004)

    async def all_of_them() -> None:
        engine, one = Stepping(), asyncio.Lock()
        await asyncio.wait_for(asyncio.gather(*(ask(engine, one, after_s=0.007 * n) for n in range(5))), timeout=5)

    asyncio.run(all_of_them())


def generate(rollouts: Rollouts, *, num_prompts: int) -> ApplianceError:
    """What a waiting trainer gets; fails when that is nothing, which would be for ever."""
    batch = {
        "raw_prompt": [ASKED] * num_prompts,
        "reward_model": [{"ground_truth": "7"}] * num_prompts,
        "extra_info": [{}] * num_prompts,
        "global_steps": [1] * num_prompts,
        "uid": ["u"] * num_prompts,
    }
    rollouts.generate_sequences(Batch(batch))
    with pytest.raises(ApplianceError) as caught:
        for _ in range(20):
            rollouts.wait(1.0)
    return caught.value


class EngineDeadError(RayError):
    """Named as Ray names an error of a task after the cause."""


class Batch(dict):
    """What is used of verl's batch."""

    def __len__(self) -> int:
        return len(self["raw_prompt"])


def test_an_engine_that_leaves_prompts_out_is_said() -> None:
    error = generate(make_rollouts(Engine((0, DONE)), Engine()), num_prompts=3)
    assert type(error) is EngineError and error.exit_code == 4
    assert error.message == "rollout engine 1 answered 0 of 1 prompt"


class Rounds(Engine):
    """Says each round's lines to its prompts, and nothing to those that have none."""

    def __init__(self, *rounds: list[str | None]) -> None:
        super().__init__()
        self._rounds = list(rounds)

    async def remote(self, *_: object, **__: object) -> AsyncIterator[Any]:
        for place, text in enumerate(self._rounds.pop(0)):
            if text is None:
                continue
            ids = TOKENIZER(text + "<|im_end|>")["input_ids"]
            sample = SimpleNamespace(token_ids=ids, log_probs=[0.0] * len(ids), finished=True, top=None, support=None)
            yield _answer((place, SimpleNamespace(samples=[sample], weights_version=0)))


@pytest.mark.parametrize("rounds", [[[CALL]], [[CALL, CALL], [None, "7"]]])
def test_an_engine_that_leaves_prompts_out_in_any_turn_is_said(rounds: list[list[str | None]]) -> None:
    rollouts = make_rollouts(Rounds(*rounds))

    async def call(*_: str) -> ToolAnswer:
        return ToolAnswer("7")

    rollouts._turns = Turns(TOKENIZER, model_type="qwen2", schemas=[], max_turns=2, max_tokens=256, call=call)
    rollouts.pool = SimpleNamespace(grade=lambda _: asyncio.sleep(60))
    error = generate(rollouts, num_prompts=2)
    assert type(error) is EngineError and error.message == "rollout engine 0 answered 1 of 2 prompts"


@pytest.mark.parametrize(
    ("answer", "kind", "message"),
    [
        (RayError("gone"), EngineError, "rollout engine 0 failed: RayError: gone"),
        (RayActorError(), EngineError, "rollout engine 0 died: its server's process is gone"),
        (EngineDeadError("the cause"), EngineError, "rollout engine 0 died: its core process is gone"),
        (ValueError("no group"), TrainingError, "rollouts failed: ValueError: no group"),
        ((7, DONE), TrainingError, "rollouts failed: IndexError: list index out of range"),
        (None, TrainingError, "rollouts failed: TypeError: cannot unpack non-iterable NoneType object"),
    ],
)
def test_whatever_an_engine_answers_nobody_waits_for_ever(answer: object, kind: type, message: str) -> None:
    error = generate(make_rollouts(Engine(answer)), num_prompts=2)
    assert type(error) is kind and error.message == message


def test_what_is_abandoned_is_no_failure() -> None:
    rollouts = make_rollouts()
    rollouts.generate_sequences(Batch({"raw_prompt": [], "global_steps": []}))
    rollouts.abandon()
    rollouts.wait(0.1)


PROMPTS = 6


class SlowEngine(Engine):
    """One sample of each prompt, which calls a tool in all turns but the last. There the last one comes when a group
    before it has got its rewards, or after a minute."""

    pool: RewardPool
    were_graded = 0

    def __init__(self, turns: int) -> None:
        super().__init__()
        self._left = turns

    async def remote(self, *_: object, **__: object) -> AsyncIterator[Any]:
        self._left -= 1
        ids = TOKENIZER((CALL if self._left else "7") + "<|im_end|>")["input_ids"]
        for place in range(PROMPTS):
            until = time.monotonic() + 60
            while not self._left and place == PROMPTS - 1 and not self.pool.graded and time.monotonic() < until:
                await asyncio.sleep(0.01)
            self.were_graded = self.pool.graded
            sample = SimpleNamespace(token_ids=ids, log_probs=[0.0] * len(ids), finished=True, top=None, support=None)
            yield _answer((place, SimpleNamespace(samples=[sample], weights_version=0)))


@pytest.mark.parametrize(("turns", "with_tools"), [(1, False), (1, True), (2, True)])
def test_a_slow_reward_overlaps_with_rollouts_that_still_run(
    turns: int, with_tools: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    engine, put = SlowEngine(turns), []
    rollouts = make_rollouts(engine)
    if with_tools:

        async def call(*_: str) -> ToolAnswer:
            return ToolAnswer("7")

        rollouts._turns = Turns(TOKENIZER, model_type="qwen2", schemas=[], max_turns=2, max_tokens=256, call=call)

    async def note(ready: list[Any], *, partition: str) -> None:
        put.append(len(ready))

    monkeypatch.setattr(module, "_put", note)
    rollouts._tokenizer.decode = lambda *_, **__: "7"
    rollouts.samples = SampleLog(tmp_path, steps=1, decode=str)
    rollouts.pool = engine.pool = RewardPool(load=slow_rewards, workers=1)
    try:
        row = {"reward_model": {"ground_truth": "7"}, "extra_info": {}, "data_source": "own"}
        batch = {"raw_prompt": [ASKED] * PROMPTS, "global_steps": [1] * PROMPTS, "uid": [*"abcdef"]}
        rollouts.generate_sequences(Batch(batch | {name: [value] * PROMPTS for name, value in row.items()}))
        while sum(put) < PROMPTS:
            rollouts.wait(1.0)
    finally:
        rollouts.pool.close()
    assert 0 < engine.were_graded < PROMPTS


def test_the_overlong_penalty_counts_what_the_model_said() -> None:
    """Of 8 tokens 5 are a tool's: the 3 of the model are 1 of 2 into the buffer, which costs half of the penalty."""
    spoken = Trajectory([7] * 8, [0.0] * 8, [1, 1, 0, 0, 0, 0, 0, 1], True, "7")
    prompt, group = SimpleNamespace(row={}, token_ids=[1]), TrajectoryGroup([spoken], 0)
    shaping = Shaping(max_tokens=4, buffer_tokens=2, penalty=1.0)
    (accuracy,), (reward,) = module._shape_rewards([Graded(1.0)], group=group, shaping=shaping, known=[True])
    fields = module._make_fields(prompt, group=group, session=0, accuracy=accuracy, reward=reward, trains=True)
    assert fields["rm_scores"].tolist() == [0.0] * 7 + [0.5]


def test_a_sample_without_a_grade_has_the_others_mean_reward_whatever_its_length() -> None:
    """Its advantage is then 0, also where the others are longer, or it is."""
    shaping = Shaping(wrong=-1.0, max_tokens=4, buffer_tokens=2, penalty=1.0)
    for lengths in ((4, 4, 4, 1), (1, 1, 1, 4)):
        group = TrajectoryGroup([Trajectory([7] * of, [0.0] * of, [1] * of, True, "7") for of in lengths], 0)
        graded = [Graded(1.0), Graded(1.0), Graded(0.0), Graded(0.0, Fault.TIMED_OUT)]
        known = [True, True, True, False]
        accuracies, rewards = module._shape_rewards(graded, group=group, shaping=shaping, known=known)
        assert accuracies[3] == pytest.approx(2 / 3, rel=1e-12)
        assert rewards[3] == pytest.approx(sum(rewards[:3]) / 3, rel=1e-12)
    assert module._shape_rewards(graded, group=group, shaping=shaping, known=[False] * 4) == ([0.0] * 4, [-1.0] * 4)


def test_rewards_and_the_page_get_the_text_after_what_the_prompt_had_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    graded: list[Response] = []

    async def grade(response: Response) -> Graded:
        graded.append(response)
        return Graded(1.0)

    def text(ids: list[int], *, finished: bool) -> str:
        return f"<think>{ids} {finished}"

    engine = Engine((0, SimpleNamespace(samples=[_sample([7, 8], finished=True)], weights_version=0)))
    rollouts = make_rollouts(engine)
    rollouts.pool, rollouts._reader = SimpleNamespace(grade=grade), SimpleNamespace(text=text, begun="<think>")
    put: list[Any] = []

    async def keep(ready: list[Any], *, partition: str) -> None:
        put.extend(ready)

    monkeypatch.setattr(module, "_put", keep)
    row = {"uid": "u", "global_steps": 1, "raw_prompt": ASKED, "extra_info": {}, "reward_model": {"ground_truth": "7"}}
    asyncio.run_coroutine_threadsafe(rollouts._generate([row], validate=False), rollouts._loop).result(timeout=30)
    assert [(each.text, each.begun, each.written) for each in graded] == [
        ("<think>[7, 8] True", "<think>", "[7, 8] True")
    ]
    ((_, (fields,)),) = put
    assert fields["response_text"] == "<think>[7, 8] True"


def _sample(ids: list[int], *, finished: bool) -> SimpleNamespace:
    return SimpleNamespace(token_ids=ids, log_probs=[0.0] * len(ids), finished=finished, top=None, support=None)


def test_rows_and_conversations_are_not_put(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verl reads neither, and each sample would carry its prompt's whole row."""
    put = []

    async def keep(**what: Any) -> None:
        put.append(what)

    monkeypatch.setattr(module.transfer_queue, "async_kv_batch_put", keep)
    row = {"uid": "u", "global_steps": 1, "raw_prompt": [], "extra_info": {"row": "{}"}}
    prompt = SimpleNamespace(row=row, token_ids=[1])
    spoken = Trajectory([7], [0.0], [1], True, "7", transcript=[("assistant", "7")])
    fields = module._make_fields(
        prompt, group=TrajectoryGroup([spoken], 0), session=0, accuracy=1.0, reward=1.0, trains=True
    )
    assert fields["turns"] == [("assistant", "7")] and row["extra_info"] == {"row": "{}"}
    asyncio.run(module._put([("u", [fields])], partition="train"))
    samples, finished = put
    assert sorted(samples["fields"].keys()) == sorted({*fields} - {"extra_info", "turns", "response_text"})
    assert samples["keys"] == ["u_0_0"] and "fields" not in finished
