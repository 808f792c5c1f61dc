"""Which samples are kept, and how they are read back."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from appliance.record.lines import cut_lines
from appliance.record.samples import SAMPLES_FILE, Sample, SampleLog, SampleReader, shortened
from appliance.report.page import ShownAnswer


def group(prompt: str, *rewards: float, step: int = 1) -> tuple[str, list[dict]]:
    """One prompt with a response per reward; token ids are the characters themselves."""
    return prompt, [
        {
            "global_steps": step,
            "prompts": prompt,
            "responses": f"r{reward:g}",
            "response_text": f"r{reward:g}",
            "response_mask": [1] * len(f"r{reward:g}"),
            "rm_scores": [0.0, reward],
            "reward_model": {"ground_truth": "46"},
            "extra_fields": {"reward_extra_info": {"acc": max(0.0, reward)}, "finished": True},
        }
        for reward in rewards
    ]


def log(run_dir: Path, *, steps: int = 10) -> SampleLog:
    return SampleLog(run_dir, steps=steps, decode=str)


def responses(samples: Sequence) -> list[str]:
    return [sample.response for sample in samples]


def test_the_best_and_the_worst_of_a_prompt_and_the_first_problems(tmp_path: Path) -> None:
    sample_log = log(tmp_path)
    sample_log.note([group("a", 0.0, 1.0, -1.0), group("b", 1.0)], validate=False)
    sample_log.note([group(f"v{number}", 1.0) for number in range(6)], validate=True)
    sample_log.note([group("v9", 0.0)], validate=True)  # the same problems again, in BF16
    sample_log.write(1, scheme="int8", val_scheme="int8")
    (samples,) = SampleReader(tmp_path).read()
    assert responses(samples.training) == ["r1", "r-1"] and [each.reward for each in samples.training] == [1.0, -1.0]
    assert [sample.prompt for sample in samples.validation] == ["v0", "v1", "v2", "v3"]
    assert samples.validation[0].reward is None and samples.scheme == "int8"


def test_a_validation_after_a_change_of_scheme_has_its_own(tmp_path: Path) -> None:
    sample_log = log(tmp_path)
    sample_log.note([group("a", 1.0)], validate=False)
    sample_log.note([group("v0", 1.0)], validate=True)
    sample_log.write(1, scheme="int8", val_scheme="bf16")
    (found,) = SampleReader(tmp_path).read()
    assert (found.scheme, found.val_scheme) == ("int8", "bf16")


def test_a_validation_in_a_line_of_older_code_is_in_its_scheme(tmp_path: Path) -> None:
    kept = log(tmp_path)
    kept.note([group("v0", 1.0)], validate=True)
    kept.write(1, scheme="int8", val_scheme="int8")
    file = tmp_path / SAMPLES_FILE
    line = {key: value for key, value in json.loads(file.read_text()).items() if key != "val_scheme"}
    file.write_text(json.dumps(line) + "\n")
    assert SampleReader(tmp_path).read()[0].val_scheme == "int8"


def test_a_second_validation_of_few_problems_adds_nothing(tmp_path: Path) -> None:
    sample_log = log(tmp_path)
    for reward in (1.0, 0.0):
        sample_log.note([group("v0", reward)], validate=True)
    sample_log.write(1, scheme="int8", val_scheme="int8")
    assert responses(SampleReader(tmp_path).read()[0].validation) == ["r1"]


def test_a_long_run_keeps_a_bounded_number_of_lines(tmp_path: Path) -> None:
    sample_log = log(tmp_path, steps=1000)
    for step in range(1, 1001):
        sample_log.note([group("a", 1.0, step=step)], validate=False)
        sample_log.write(step, scheme="int8", val_scheme="int8")
    assert [samples.step for samples in SampleReader(tmp_path).read()] == [1, *range(50, 1001, 50)]


def test_a_resume_cuts_the_samples_of_later_steps(tmp_path: Path) -> None:
    sample_log = log(tmp_path)
    for step in (1, 2, 3):
        sample_log.note([group("a", 1.0, step=step)], validate=False)
        sample_log.write(step, scheme="int8", val_scheme="int8")
    cut_lines(tmp_path / SAMPLES_FILE, after=2, attempt=1)
    assert [samples.step for samples in SampleReader(tmp_path).read()] == [1, 2]


def test_a_final_validation_made_again_leaves_the_step_its_training(tmp_path: Path) -> None:
    before, again = log(tmp_path), log(tmp_path)
    before.note([group("a", 1.0)], validate=False)
    before.write(1, scheme="int8", val_scheme="int8")
    again.note([group("v0", 1.0)], validate=True)
    again.write(1, scheme="bf16", val_scheme="bf16")
    for _ in range(2):
        (found,) = SampleReader(tmp_path).read()
        assert [each.prompt for each in (*found.training, *found.validation)] == ["a", "v0"]
        assert (found.scheme, found.val_scheme) == ("int8", "bf16")
        assert cut_lines(tmp_path / SAMPLES_FILE, after=1, attempt=1, may_repeat=True) is None


def test_lines_that_are_none_are_left_out_and_later_ones_hold(tmp_path: Path) -> None:
    line = {"step": 1, "scheme": "int8", "validation": [], "training": []}
    torn = ["[]", "null", '{"step": 1}', json.dumps({**line, "step": "x"}), json.dumps({**line, "training": [{}]}), "{"]
    torn += [json.dumps({**line, "step": float("inf")}), json.dumps({**line, "step": 10**400}), "[" * 100_000]
    (tmp_path / SAMPLES_FILE).write_text(
        "\n".join([json.dumps(line), *torn, json.dumps({**line, "scheme": "bf16"}), ""])
    )
    assert [(samples.step, samples.scheme) for samples in SampleReader(tmp_path).read()] == [(1, "bf16")]


def test_a_long_text_keeps_its_head_and_its_end() -> None:
    text = "a" * 5000 + "the answer is 46"
    assert len(shortened(text)) < 2100 and shortened(text).endswith("the answer is 46")
    assert shortened("short") == "short"


@pytest.mark.parametrize(
    ("accuracy", "reward", "expected"),
    [(1.0, 0.5, ("fine", "1", "0.5")), (0.25, None, ("warn", "0.25", "0.25")), (None, None, ("", "-", "-"))],
)
def test_an_accuracy_that_nobody_measured_is_told_as_none(
    accuracy: float | None, reward: float | None, expected: tuple[str, str, str]
) -> None:
    answer = ShownAnswer(1, Sample("p", "r", "t", accuracy=accuracy, reward=reward, tokens=1, finished=True))
    assert (answer.grade, answer.accuracy, answer.reward) == expected
