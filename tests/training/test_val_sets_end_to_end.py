"""A task of one's own with two validations, one of which draws samples, in the form of each trainer. Real vLLM, verl
and Ray."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from killable import SMALL, Run
from three_forms import EXAMPLE, REWARDS, data_of

from appliance.files import digest_of

pytestmark = [pytest.mark.e2e(minutes=3), pytest.mark.long]


def task(*, rewards: Path, train_file: Path, unseen: Path, prompt: str, truth: str) -> dict[str, str]:
    """rewards: the file of the first reward."""
    weighed = [
        {"name": f"{rewards}:right_sum"},
        {"name": f"{EXAMPLE / 'rewards.py'}:only_digits", "weight": 0.1},
    ]
    sets = {"unseen": {"file": str(unseen), "size": 16, "samples": 4}, "held_out": {"size": 24}}
    return {
        "task.train_file": str(train_file),
        "task.prompt": prompt,
        "task.truth": truth,
        "task.rewards": json.dumps(weighed),
        "task.val_sets": json.dumps(sets),
    }


RECIPE = {
    "task.kind": "own",
    **task(
        rewards=EXAMPLE / "rewards.py",
        train_file=EXAMPLE / "problems.jsonl",
        unseen=EXAMPLE / "unseen.jsonl",
        prompt="question",
        truth="answer",
    ),
    "task.val_size": "512",
    "task.train_size": "0",
    "trainer.steps": "2",
    "trainer.validate_before": "true",
    "trainer.validate_every": "1",
    "optimizer.learning_rate": "2e-4",
    "quantization.smoothing": "0",  # which is by prompts with their answers: TRL's form has none
}
NAMES = {
    *(f"val/unseen/{metric}" for metric in ("avg@4", "pass@1", "pass@2", "pass@4")),
    *(f"val/held_out/{metric}" for metric in ("avg@1", "pass@1")),
}


def in_form(form: str, folder: Path) -> dict[str, str]:
    """What the recipe says of the same task as users of that trainer have it. Writes their files into the folder."""
    code = folder / f"{form}.py"
    code.write_text(REWARDS[form])
    usual = {"prompt": "prompt", "truth": "null"}
    settings = usual | data_of(form, folder)
    unseen = folder / data_of(form, folder, name="unseen")["train_file"]
    return task(
        rewards=code,
        train_file=folder / settings["train_file"],
        unseen=unseen,
        prompt=settings["prompt"],
        truth=settings["truth"],
    )


@pytest.fixture(scope="module")
def runs(run_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Run]]:
    """One task in each form, run to its end."""
    folder = tmp_path_factory.mktemp("forms")
    sets = {"ours": {}, **{form: in_form(form, folder) for form in ("trls", "verls")}}
    trainings = {form: Run(run_root, form, {**SMALL, **RECIPE, **own}) for form, own in sets.items()}
    try:
        for run in trainings.values():
            run.start()
            assert run.end() == 0, run.log_text[-3000:]
        yield trainings
    finally:
        for run in trainings.values():
            run.clean_up()


def of_validation(run: Run) -> list[dict[str, float]]:
    """What each line says of its validation and its rewards, but how long it took."""
    starts = ("val_", "val/", "reward")
    return [{key: line[key] for key in line if key.startswith(starts)} for line in run.lines("metrics.jsonl")]


def test_two_validations_are_told_by_name(runs: dict[str, Run]) -> None:
    """That a resumed run says the same: test_torture_resume.py."""
    whole = runs["ours"]
    before, *steps = of_validation(whole)
    assert {key for key in before if key.startswith("val/")} == NAMES and len(steps) == 2
    for line in steps:
        assert {key for key in line if key.startswith("val/")} == NAMES
        assert line["reward_mean"] == pytest.approx(line["reward/right_sum"] + 0.1 * line["reward/only_digits"])
        assert (line["val_reward_mean"], line["val_samples"]) == (line["val/unseen/avg@4"], 16)
        assert line["val/unseen/pass@1"] < line["val/unseen/pass@2"] < line["val/unseen/pass@4"] <= 1
        assert (line["val/held_out/pass@1"] * 24) % 1 == pytest.approx(0)  # one sample each
    assert len({line["val/unseen/avg@4"] for line in (before, *steps)}) > 1
    page = (whole.run_dir / "report.html").read_text()
    assert "unseen avg@4" in page and "unseen pass@4" in page and "right_sum" in page


def test_three_forms_of_one_task_are_the_same_run(runs: dict[str, Run]) -> None:
    """Every metric of every step and validation, every sample shown, and the weights."""
    seen = {form: left_by(run) for form, run in runs.items()}
    metrics, samples, weights = seen["ours"]
    assert [line["step"] for line in metrics] == [0, 1, 2] and samples and weights
    assert all(line["grad_norm"] > 0 for line in metrics[1:])
    assert seen["trls"] == seen["ours"]
    assert seen["verls"] == seen["ours"]


def left_by(run: Run) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[str]]:
    """Metrics, samples, digests of the model's files: but for what is of the host, and another one each time."""
    metrics = [{key: value for key, value in line.items() if not is_time(key)} for line in run.lines("metrics.jsonl")]
    samples = [without_truth(line) for line in run.lines("samples.jsonl")]
    return metrics, samples, [digest_of(file) for file in sorted((run.run_dir / "model").glob("*.safetensors"))]


def is_time(key: str) -> bool:
    """Or something else of the host that is another one each time."""
    return key.endswith(("_s", "_bytes", "_gb", "_gib")) or "memory" in key


def without_truth(line: dict[str, Any]) -> dict[str, Any]:
    """TRL's rows have none: their columns go to the function."""
    return line | {
        kind: [{key: value for key, value in each.items() if key != "truth"} for each in line.get(kind, ())]
        for kind in ("validation", "training")
    }
