"""`appliance data preview --answers`: what the model answers before any training, and what that earns."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from called import called
from plans import make_plan, make_reward, with_model, with_own_task
from tiny_models import tiny

from appliance import console
from appliance.files import digest_of
from appliance.launch import side_job
from appliance.record.plan import CodeFile, RunPlan
from appliance.tasks import prepare as prepare_child
from appliance.tasks import preview as preview_child
from appliance.tasks.first_answers import FirstAnswer, draw_answers, give_rewards, sum_up
from appliance.tasks.tiny_model import byte_tokenizer, save_tokenizer

Run = Callable[..., subprocess.CompletedProcess[str]]
WORDS = 259  # of the byte tokenizer
END = byte_tokenizer(max_positions=64).eos_token_id
REWARDS = """
import os

def has_e(response, truth):
    return float("e" in response)

def odd(response, truth):
    if response == "raise":
        raise ValueError("not this one")
    return {"none": None, "nan": float("nan")}.get(response, 1)

def ends(response, truth):
    return 1.0 if response == "fine" else os._exit(7)

def sleeps(response, truth):
    import time
    time.sleep(float(response))
    return 1.0
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    tiny("qwen2", vocab_size=WORDS).save_pretrained(folder)
    save_tokenizer(folder, max_positions=64)
    return folder


@pytest.fixture
def rewards(tmp_path: Path) -> Path:
    (tmp_path / "rewards.py").write_text(REWARDS)
    return tmp_path / "rewards.py"


def plan_with(model: Path | None = None, **sections: dict[str, object]) -> RunPlan:
    plan = make_plan(Path("/runs/a-1"))
    for name, values in sections.items():
        plan = plan.replace(**{name: getattr(plan, name).replace(**values)})
    return with_model(plan, model) if model else plan


def answer(text: str = "text", **values: object) -> FirstAnswer:
    return FirstAnswer(**{"text": text, "token_ids": (1, 2), "is_cut": False, **values})


def test_answers_are_drawn_from_the_models_own_distribution(model: Path) -> None:
    """At a temperature near 0 each answer is the most likely one, though prompts of other lengths are beside it."""
    plan = plan_with(model, rollout={"temperature": 1e-3}, task={"max_response_tokens": 5})
    prompts = [[5, 6, 7], [9], [11, 12, 13, 14, 15, 16, 17, 18]] * 6  # more than are answered together
    answers = draw_answers(plan, prompts=prompts, tokenizer=byte_tokenizer(max_positions=64))
    network = tiny("qwen2", vocab_size=WORDS, dtype=torch.float32)
    compared = 0
    for prompt, drawn in zip(prompts, answers, strict=True):
        ids = torch.tensor([[*prompt, *drawn.token_ids]])
        with torch.no_grad():
            logits_TV = network(ids).logits[0, len(prompt) - 1 : -1]
        best_T, chosen_T = logits_TV.amax(-1), logits_TV.gather(1, ids[0, len(prompt) :, None])[:, 0]
        assert torch.all(best_T - chosen_T < 0.05 * logits_TV.std())  # of two in BF16 as likely as each other either
        compared += len(drawn.token_ids)
    assert compared > 50


def test_another_seed_draws_other_answers_and_the_same_seed_the_same(model: Path) -> None:
    def texts(seed: int) -> list[str]:
        plan = plan_with(model, task={"max_response_tokens": 8}).replace(seed=seed)
        return [each.text for each in draw_answers(plan, prompts=[[5, 6, 7]] * 3, tokenizer=tokenizer)]

    tokenizer = byte_tokenizer(max_positions=64)
    assert texts(1) == texts(1) != texts(2)


def test_an_answer_ends_at_the_models_end_and_else_is_cut(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.qwen2 import Qwen2ForCausalLM

    def generate(self: Any, ids_BT: torch.Tensor, **_: object) -> torch.Tensor:
        config = self.generation_config.to_diff_dict()
        assert (config["eos_token_id"], config["max_new_tokens"]) == (sorted({END, 1}), 3)
        assert (config["temperature"], config["top_p"], config["top_k"]) == (0.7, 0.9, 5)
        assert "repetition_penalty" not in config and "min_p" not in config
        drawn_BT = torch.tensor([[65, END, 66], [65, 66, 67], [65, 66, 1]])
        return torch.cat([ids_BT, drawn_BT], dim=1)

    monkeypatch.setattr(Qwen2ForCausalLM, "generate", generate)
    given = {"repetition_penalty": 1.3, "min_p": 0.1, "temperature": 0.2, "do_sample": True, "eos_token_id": 1}
    (model / "generation_config.json").write_text(json.dumps(given))
    drawn_by = {"temperature": 0.7, "top_p": 0.9, "top_k": 5}
    plan = plan_with(model, task={"max_response_tokens": 3}, rollout=drawn_by)
    tokenizer = byte_tokenizer(max_positions=64)
    answers = draw_answers(plan, prompts=[[5], [5, 6], [7]], tokenizer=tokenizer)
    assert [each.is_cut for each in answers] == [False, True, False]
    assert [each.token_ids for each in answers] == [(65, END), (65, 66, 67), (65, 66, 1)]
    assert [each.text for each in answers] == [tokenizer.decode(ids) for ids in ([65], [65, 66, 67], [65, 66])]


def rewarded(rewards: Path, function: str, *texts: str) -> list[FirstAnswer]:
    of_task = (make_reward("length", target=4), make_reward(function, file=rewards))
    code = (CodeFile(path=str(rewards), copy_name=rewards.name, sha256=digest_of(rewards)),)
    plan = with_own_task(plan_with(), *of_task, code=code, reward_timeout_s=1.0)
    truths = ["7"] * len(texts)
    return give_rewards(plan, [answer(text) for text in texts], truths=truths, rows=["{}"] * len(texts))


def test_each_answer_gets_the_rewards_of_the_recipe(rewards: Path) -> None:
    answers = rewarded(rewards, "has_e", "text", "bad")
    assert [each.rewards["has_e"] for each in answers] == [1.0, 0.0]
    assert [each.reward for each in answers] == [sum(each.rewards.values()) for each in answers]
    assert [each.why for each in answers] == ["", ""]


def test_an_answer_whose_reward_fails_says_why_and_the_others_have_theirs(rewards: Path) -> None:
    fine, raised, nothing, not_finite = rewarded(rewards, "odd", "fine", "raise", "none", "nan")
    assert fine.rewards["odd"] == 1.0 and nothing.rewards.keys() == {"length"}
    assert (raised.reward, raised.why) == (None, "ValueError: not this one (rewards.py, line 9)")
    assert (not_finite.reward, not_finite.why) == (None, "the reward `odd` returned nan, not a finite number")


def test_a_reward_that_ends_its_process_is_told_where_it_did(rewards: Path) -> None:
    """The answers before it have their rewards; from it on all have the reason."""
    first, second, third = rewarded(rewards, "ends", "fine", "text", "fine")
    assert first.rewards["ends"] == 1.0
    assert {(each.reward, each.why) for each in (second, third)} == {
        (None, "the rewards of answer 2: the process ended with 7: no message")
    }


def test_a_reward_that_does_not_end_is_told(rewards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("appliance.tasks.first_answers._IMPORT_WITHIN_S", 8.0)
    (only,) = rewarded(rewards, "sleeps", "60")
    assert (only.reward, only.why) == (None, "the rewards of answer 1: no end after 9 s")


def test_a_reward_that_takes_longer_than_a_run_allows_is_told(rewards: Path) -> None:
    (only,) = rewarded(rewards, "sleeps", "1.6")
    assert (only.reward, only.why) == (None, "the rewards took 2 s, and task.reward_timeout_s is 1")


CUT = (
    "most answers were cut, and rewards judge what there is of them: raise task.max_response_tokens, or ask for "
    "shorter answers in task.system"
)


@pytest.mark.parametrize(("cut", "notes"), [(4, []), (5, [CUT])])
def test_most_answers_that_were_cut_are_told(cut: int, notes: list[str]) -> None:
    answers = [answer(is_cut=number < cut, reward=number / 8, rewards={"right": number / 8}) for number in range(8)]
    sentence, shown_notes = sum_up(answers, plan=plan_with(task={"max_response_tokens": 16}))
    assert shown_notes == notes
    assert sentence == (
        "8 answers before any training, in BF16, otherwise drawn as rollouts are; reward 0.438 on average; "
        f"{cut} cut at task.max_response_tokens, 16"
    )


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_a_reward_that_is_the_same_everywhere_is_told(value: float) -> None:
    answers = [answer(reward=n + value, rewards={"exact": value, "length": float(n), "format": 0.0}) for n in range(8)]
    of_task = (make_reward("exact"), make_reward("length", target=4), make_reward("format", weight=0.0))
    plan = with_own_task(plan_with(), *of_task)
    sentence, notes = sum_up([*answers, answer(why="it raised")], plan=plan)
    assert sentence == (
        "9 answers before any training, in BF16, otherwise drawn as rollouts are; "
        f"reward {3.5 + value:.3g} on average (exact {value:.3g}, length 3.5, format 0); 1 without a reward; none cut"
    )
    assert notes == [
        f"`exact` gives {value:g} to all 8 answers: where all samples of a prompt earn the same, nothing is learned "
        "from it. Look at more answers; if it stays so, and is no penalty that is rightly 0, take other problems, or a "
        "reward that tells such answers apart"
    ]
    assert sum_up(answers[:7], plan=plan)[1] == []  # too few to say so


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """`appliance data preview`, and its children but the one that gives the rewards, in this process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_COLOR", "1")
    console.err_console.cache_clear()  # it has read the variable
    children = {child.__name__: child for child in (prepare_child, preview_child)}

    def child(module: list[str], *, log: Path, **_: object) -> int:
        log.touch()
        return children[module[0]].main(module[1:])

    monkeypatch.setattr(side_job, "_run", child)

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return called("data", "preview", "recipe.yaml", *arguments, monkeypatch=monkeypatch, capfd=capfd)

    yield run
    console.err_console.cache_clear()


RECIPE = """
name: sums
model: {path: model}
task:
  {kind: own, train_file: rows.jsonl, prompt: q, truth: a, val_size: 1, max_prompt_tokens: 16, max_response_tokens: 4,
   rewards: [{name: exact}, {name: "rewards.py:has_e", weight: 0.5}]}
rollout: {scheme: int8, samples_per_prompt: 2}
batch: {prompts_per_step: 2}
trainer: {steps: 1}
cluster: {device: cpu}
"""


@pytest.fixture
def recipe(tmp_path: Path, model: Path, rewards: Path) -> Path:
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"q": "{n}+1", "a": {n + 1}}}\n' for n in range(12)))
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    return tmp_path / "recipe.yaml"


def test_problems_are_shown_with_their_answers(run: Run, recipe: Path) -> None:
    problems = json.loads(run("--answers", "9", "--json").stdout)["problems"]
    assert len(problems) == 9
    for problem in problems:
        answer_shown = problem["answer"]
        assert 1 <= len(answer_shown["token_ids"]) <= 4
        assert answer_shown["rewards"] == {
            "exact": float(answer_shown["text"].strip() == problem["truth"]),
            "has_e": float("e" in answer_shown["text"]),
        }
        assert answer_shown["reward"] == answer_shown["rewards"]["exact"] + 0.5 * answer_shown["rewards"]["has_e"]
    done = run("--answers", "9")
    lines = done.stdout.splitlines()
    assert done.returncode == 0
    assert lines[2].startswith("answers    9 answers before any training, in BF16, otherwise drawn as rollouts are; ")
    assert "answering 9 problems on the CPU, in up to 4 tokens each" in done.stderr
    assert sum(line.startswith("answer  ") for line in lines) == 9
    assert sum(line.startswith("           -> reward ") for line in lines) == 9


def test_rewards_that_cannot_be_imported_are_named_before_anything_is_answered(run: Run, recipe: Path) -> None:
    (recipe.parent / "rewards.py").write_text("import nowhere_to_be_found\n\ndef has_e(response):\n    return 1\n")
    done = run("--answers", "1")
    assert (done.returncode, done.stdout) == (2, "")
    assert "task.rewards: the import of the rewards: the process ended with 1: " in done.stderr
    assert "nowhere_to_be_found" in done.stderr and "answering" not in done.stderr


def test_more_answers_than_there_are_problems_are_as_many(run: Run, recipe: Path) -> None:
    assert len(json.loads(run("--answers", "99", "--json").stdout)["problems"]) == 11


def test_without_the_option_no_model_is_loaded(run: Run, recipe: Path, model: Path) -> None:
    (model / "model.safetensors").unlink()
    problems = json.loads(run("--json").stdout)["problems"]
    assert [problem["answer"] for problem in problems] == [None, None]


def test_a_model_that_is_not_whole_is_named(run: Run, recipe: Path, model: Path) -> None:
    (model / "model.safetensors").write_bytes((model / "model.safetensors").read_bytes()[:-100])
    done = run("--answers", "1")
    assert done.returncode == 4 and done.stdout == ""
    assert "model.safetensors" in done.stderr


def test_answers_to_problems_with_tools_are_refused(run: Run, recipe: Path) -> None:
    (recipe.parent / "tools.py").write_text("def add(a: int, b: int) -> int:\n    return a + b\n")
    done = run("--answers", "1", "--set", "task.tools=tools.py")
    assert done.returncode == 2
    assert done.stderr == (
        "error: --answers: a task with tools has several turns, and these answers have one\n"
        "hint: leave it out, or train a few steps and read their samples\n"
    )
