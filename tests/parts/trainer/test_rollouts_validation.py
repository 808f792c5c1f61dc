"""Several validations, and the means of the rewards of a step. Engine, pool and queue are fakes, the loop is real."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from appliance.record.samples import Group, SampleLog
from appliance.tasks.grading import Fault, Graded, Shaping
from appliance.tasks.task import Response
from appliance.trainer import rollouts as room
from appliance.trainer.engine_shares import Sampling
from appliance.trainer.prompt_seeds import PromptSeeds
from appliance.trainer.rollouts import Rollouts

GREEDY = Sampling(temperature=0.0, top_p=1.0, num_samples=1)
TRAINING = Sampling(temperature=1.0, top_p=1.0, num_samples=3)
SETS = {"hard": Sampling(temperature=0.5, top_p=0.9, num_samples=2, top_k=50), "held_out": GREEDY}
FAULT = Graded(0.0, Fault.RAISED, "it raised")


class Batch(dict):
    """What is used of verl's batch."""

    def __len__(self) -> int:
        return len(self["raw_prompt"])


def batch(*, step: int, validate: bool, splits: list[str]) -> Batch:
    """A prompt for each split, named by its place."""
    places = range(len(splits))
    rows = {
        "raw_prompt": [[place] for place in places],
        "global_steps": [step] * len(splits),
        "uid": [f"{'v' if validate else 't'}{step}-{place}" for place in places],
        "reward_model": [{"ground_truth": str(place)} for place in places],
        "extra_info": [{"split": split, "row": ""} for split in splits],
    }
    return Batch({**rows, **({"validate": True} if validate else {})})


class Engine:
    """Answers each prompt with as many samples as it is asked for; `asked` has what it was asked, `cleared` how much of
    that was before each time that its cache was emptied."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.cleared: list[int] = []
        self.generate_groups = self
        self.clear_kv_cache = SimpleNamespace(remote=self._clear)

    async def _clear(self) -> None:
        self.cleared.append(len(self.requests))

    def options(self, **_: object) -> Engine:
        return self

    async def remote(self, prompts: list[list[int]], **options: Any) -> AsyncIterator[Any]:
        self.requests.append({"prompts": prompts, **options})
        for place in range(len(prompts)):
            sample = SimpleNamespace(token_ids=[7], log_probs=[-1.0], finished=True, top=None, support=None)
            yield _answer((place, SimpleNamespace(samples=[sample] * options["num_samples"], weights_version=1)))


async def _answer(answer: object) -> object:
    return answer


Made = tuple[Rollouts, Engine, list[Group]]
Make = Callable[..., Made]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Make:
    """Rollouts, their engine, and what was put into the queue. grades: of the samples, by the truth, in turns."""

    def make_rollouts(grades: dict[str, list[Graded]], **changes: object) -> Made:
        engine, was_put = Engine(), []
        waiting = {truth: list(each) for truth, each in grades.items()}

        async def put(ready: list[Group], *, partition: str) -> None:
            was_put.extend(ready)

        async def grade(response: Response) -> Graded:
            waiting[response.truth] = [*waiting[response.truth][1:], (first := waiting[response.truth][0])]
            return first

        monkeypatch.setattr(room, "_put", put)
        return (
            Rollouts(
                [engine],
                tokenizer=SimpleNamespace(apply_chat_template=lambda messages, **_: [1, *messages]),
                reader=SimpleNamespace(text=lambda ids, finished: "said", begun=""),
                pool=SimpleNamespace(grade=grade),
                shaping=Shaping(),
                training=TRAINING,
                validation=GREEDY,
                max_prompt_tokens=8,
                seed=3,
                in_order=True,
                samples=SampleLog(Path("run"), steps=1, decode=str),
                **{"val_sets": SETS, "rewards": ("right", "short"), **changes},
            ),
            engine,
            was_put,
        )

    return make_rollouts


def graded(right: float, short: float | None = None) -> Graded:
    parts = (("right", right), *(() if short is None else (("short", short),)))
    return Graded(sum(value for _, value in parts), parts=parts)


def run(made: Rollouts, rows: Batch) -> None:
    made.generate_sequences(rows)
    made.finish()


GRADES = {"0": [FAULT, graded(1.0, 0.5)], "1": [graded(0.0, 1.0)], "2": [graded(1.0, 2.0), graded(0.25)]}
SPLITS = ["hard", "held_out", "hard"]


def test_each_set_is_sampled_as_it_is_to_be_and_told_by_its_name(make: Make) -> None:
    """A fault counts 0 in a validation: the other sample of its problem does not stand for it."""
    rollouts, engine, was_put = make(GRADES)
    run(rollouts, batch(step=4, validate=True, splits=SPLITS))
    assert [(each["prompts"], each["num_samples"], each["sampling"]) for each in engine.requests] == [
        ([[1, 0], [1, 2]], 2, {"temperature": 0.5, "top_p": 0.9, "top_k": 50, "logprobs": 0}),
        ([[1, 1]], 1, {"temperature": 0.0, "top_p": 1.0, "top_k": -1, "logprobs": 0}),
    ]
    assert rollouts.grades.set_metrics() == {
        "val/hard/avg@2": (1.5 + 0.0 + 3.0 + 0.25) / 4,
        "val/hard/pass@1": 0.5,
        "val/hard/pass@2": 1.0,
        "val/held_out/avg@1": 1.0,
        "val/held_out/pass@1": 0.0,
    }
    assert rollouts.grades.num_validated == 2  # problems of the first set
    assert [(uid, len(samples)) for uid, samples in was_put] == [("v4-0", 1), ("v4-2", 1), ("v4-1", 1)]
    assert was_put[0][1][0]["extra_fields"]["reward_extra_info"] == {"acc": 0.0}


def test_a_validation_has_its_seeds_however_often_it_is_made(make: Make) -> None:
    made, engine, _ = make(GRADES)
    for step in (4, 4, 5):
        run(made, batch(step=step, validate=True, splits=SPLITS))
    first, greedy, again, _, later, _ = (each["seeds"] for each in engine.requests)
    own = PromptSeeds(3, val_set="hard")
    assert first == again == [own.next([1, 0], step=4), own.next([1, 2], step=4)]
    assert greedy == [None]
    assert not {*first} & {*later}
    assert not {*first} & {PromptSeeds(3).next([1, 0], step=4), PromptSeeds(3, val_set="other").next([1, 0], step=4)}


def test_a_validation_does_not_move_the_seeds_of_training(make: Make) -> None:
    rollouts, engine, _ = make(GRADES)
    train = batch(step=4, validate=False, splits=["train"])
    run(rollouts, train)
    run(rollouts, batch(step=4, validate=True, splits=SPLITS))
    run(rollouts, batch(step=4, validate=False, splits=["train"]))
    before, *_, after = (each["seeds"] for each in engine.requests)
    alone = PromptSeeds(3)
    assert [*before, *after] == [alone.next([1, 0], step=4), alone.next([1, 0], step=4)]


def test_no_rollout_of_training_finds_what_a_validation_cached(make: Make) -> None:
    """Emptied once after each validation, of however many sets, so that a step's further rollouts share again."""
    rollouts, engine, _ = make(GRADES)
    train = batch(step=4, validate=False, splits=["train"])
    for validate in (False, True, False, False, True, True, False):
        run(rollouts, batch(step=4, validate=True, splits=SPLITS) if validate else Batch(train))
    assert engine.cleared == [3, 9]


def test_the_newest_validation_alone_is_told(make: Make) -> None:
    rollouts, _, _ = make(GRADES)
    for _ in range(2):
        run(rollouts, batch(step=4, validate=True, splits=SPLITS))
    assert len(rollouts.grades.set_metrics()) == 5 and rollouts.grades.num_validated == 4
    assert rollouts.grades.set_metrics()["val/hard/pass@2"] == 1.0


def test_without_sets_nothing_is_kept_and_a_fault_is_wrong(make: Make) -> None:
    made, _, was_put = make({"0": [FAULT]}, val_sets=None)
    run(made, batch(step=4, validate=True, splits=["val"]))
    assert made.grades.set_metrics() == {} and made.grades.num_validated == 1 and made.grades._by_prompt == {}
    assert was_put[0][1][0]["extra_fields"]["reward_extra_info"] == {"acc": 0.0}


@pytest.mark.parametrize("val_sets", [None, SETS])
def test_a_fault_in_a_validation_is_as_wrong_as_the_worst_of_its_set(
    make: Make, val_sets: dict[str, Sampling] | None
) -> None:
    """The fault comes before the worst is graded. Of another set none counts."""
    grades = {"0": [FAULT], "1": [graded(-9.0)], "2": [graded(-3.0)]}
    rollouts, _, was_put = make(grades, val_sets=val_sets)
    run(rollouts, batch(step=4, validate=True, splits=SPLITS))
    worst = -9.0 if val_sets is None else -3.0
    assert was_put[0][0] == "v4-0"
    assert was_put[0][1][0]["extra_fields"]["reward_extra_info"] == {"acc": worst}
    assert was_put[0][1][0]["rm_scores"].sum() == worst
    assert rollouts.grades.set_metrics().get("val/hard/avg@2", -3.0) == -3.0


def test_rewards_are_means_over_the_samples_that_are_trained_on(make: Make) -> None:
    """Two of three prompts: the first's fault has the means of its others, the third's second reward applies once."""
    grades = {
        "0": [graded(1.0, 0.5), FAULT, graded(0.0, 1.0)],
        "1": [graded(-9.0, -9.0)],
        "2": [graded(1.0), graded(0.0), graded(0.5, 4.0)],
    }
    rollouts, _, was_put = make(grades)
    run(rollouts, batch(step=4, validate=False, splits=["train"] * 3))
    keys = [f"{uid}_{session}_0" for uid, samples in was_put for session in range(len(samples))]
    trained = [key for key in keys if not key.startswith("t4-1_")]
    assert len(keys) == 9 and len(trained) == 6
    assert rollouts.grades.reward_means(trained, step=4) == {
        "reward/right": (1.0 + 0.5 + 0.0 + 1.0 + 0.0 + 0.5) / 6,
        "reward/short": (0.5 + 0.75 + 1.0 + 4.0) / 4,
    }
