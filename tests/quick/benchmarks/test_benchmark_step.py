"""The step benchmark: which systems it measures, what it leaves out, that it goes on where it was interrupted, and that
its recipe is one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from appliance.errors import TrainingError
from appliance.recipe.load import load_recipe
from benchmarks.step import __main__ as step
from benchmarks.step import systems
from benchmarks.step.measured import Trainings, document, page, summary
from benchmarks.step.systems import (
    OLD,
    SEQUENCES,
    USUAL,
    Bench,
    Setting,
    run_command,
    variants,
    verl_line,
    write_problems,
    write_recipe,
    write_verl_problems,
)

ABOUT = {
    "date": "2026-11-29",
    "processor": "a CPU",
    "cores": 2,
    "python": "3.11",
    "commit": "abc",
    "old": None,
    "avx2": False,
    "steps": 3,
    "model": "m",
}
SMALL, SMALL_AGAIN = Setting(8, False), Setting(8, True)
SIZES = [8, SEQUENCES]


@pytest.fixture(autouse=True)
def idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the machine is busy takes seconds to see."""
    monkeypatch.setattr(step, "busy_share", lambda: 0.0)


def line(seconds: float) -> dict[str, float]:
    return {"step_s": seconds, "response_tokens_mean": 10.0, "rollout_s": 5.0, "update_s": 14.0}


class Trained(Bench):
    """Trainings that take no time: seconds of a step by system and setting, and which of them were asked for."""

    def __init__(self, folder: Path, seconds: dict[tuple[str, Setting | None], float]) -> None:
        super().__init__(folder, folder, folder, None)
        object.__setattr__(self, "seconds", seconds)
        object.__setattr__(self, "asked", [])

    def train(self, system: str, *, steps: int, setting: Setting | None) -> list[dict[str, Any]]:
        self.asked.append((system, setting, steps))
        if (system, setting) not in self.seconds:
            raise TrainingError("out of memory")
        return [line(1000.0), *[line(self.seconds[system, setting] + number) for number in range(steps - 1)]]


def measured(bench: Bench, trainings: Trainings, *, rounds: int = 2) -> dict[str, Any]:
    setting = step.find_fastest("trl", bench, trainings, SIZES)
    for number in range(1, rounds + 1):
        for system, of_peer in (("ours", None), ("trl", setting)):
            step.measure(system, bench, trainings, round_number=number, steps=3, setting=of_peer)
    return document(trainings, systems=["ours", "trl"], rounds=rounds)


@pytest.mark.parametrize(
    ("asked", "old", "systems"),
    [(None, None, list(USUAL)), (None, "abc", [OLD, *USUAL]), ("trl, ours", None, ["trl", "ours"])],
)
def test_the_systems_are_those_asked_for(asked: str | None, old: str | None, systems: list[str]) -> None:
    assert step.chosen(asked, old=old) == systems


def test_a_page_has_each_system_beside_ours_a_peer_at_its_fastest_and_what_was_tried(tmp_path: Path) -> None:
    """The first step of each training, 1000 s, counts nowhere; a setting that fails ends nothing."""
    bench = Trained(tmp_path, {("ours", None): 20.0, ("trl", SMALL): 60.0, ("trl", SMALL_AGAIN): 50.0})
    text = page(measured(bench, Trainings.open(tmp_path / "trainings.jsonl", about=ABOUT)))
    assert "| ours | 20.5 | 20.0 to 21.0 | 4 | 1.00 | 10.0 | 5.0 | - | 14.0 | - |" in text
    assert "| trl | 50.5 | 50.0 to 51.0 | 4 | 2.46 | 10.0 | 5.0 | - | 14.0 | - |" in text
    assert "| trl | 8 sequences a forward, no checkpointing | 60.0 |" in text
    assert "| trl | 8 sequences a forward, with checkpointing | 50.0 |" in text
    assert "| trl | 128 sequences a forward, a whole step, no checkpointing | failed |" in text
    assert [system for system, _, steps in bench.asked if steps == 3] == ["ours", "trl"] * 2


def test_an_interrupted_benchmark_goes_on_with_what_is_missing(tmp_path: Path) -> None:
    """And measures what the one that was not interrupted has measured."""
    seconds = {("ours", None): 20.0, ("trl", SMALL): 60.0, ("trl", SMALL_AGAIN): 50.0}
    file, bench = tmp_path / "trainings.jsonl", Trained(tmp_path, seconds)
    whole = measured(bench, Trainings.open(file, about=ABOUT))
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:-2]))
    again = Trained(tmp_path, seconds)
    continued = measured(again, Trainings.open(file, about=ABOUT | {"date": "2026-11-30"}))
    assert again.asked == [("ours", None, 3), ("trl", SMALL_AGAIN, 3)]
    assert continued == whole


@pytest.mark.parametrize(
    ("key", "value"), [("commit", "def"), ("steps", 4), ("old", "123"), ("cores", 8), ("avx2", True)]
)
def test_trainings_of_something_else_are_not_continued(tmp_path: Path, key: str, value: object) -> None:
    file = tmp_path / "trainings.jsonl"
    Trainings.open(file, about=ABOUT)
    with pytest.raises(TrainingError) as refused:
        Trainings.open(file, about=ABOUT | {key: value})
    was = f"{key} {ABOUT[key]!r}, now {value!r}"
    assert refused.value.message == f"{file} has trainings that cannot stand beside new ones: {was}"


def test_a_peer_that_trains_with_no_setting_ends_the_benchmark(tmp_path: Path) -> None:
    trainings = Trainings.open(tmp_path / "trainings.jsonl", about=ABOUT)
    with pytest.raises(TrainingError, match="trl trained with none of its settings"):
        step.find_fastest("trl", Trained(tmp_path, {}), trainings, SIZES)
    assert [one.failure for one in trainings.measured] == ["out of memory"] * 4


def test_a_peer_that_hangs_is_ended_and_what_it_printed_last_is_shown(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"verl was ended after 2 s: .*\nan update$"):
        run_command(["sh", "-c", "echo an update; exec sleep 60"], folder=tmp_path, name="verl", limit_s=2)


def test_times_beside_other_work_are_marked() -> None:
    busy, idle = (
        summary(name, round_number=1, setting=None, lines=[line(20.0)], busy=load)
        for name, load in (("ours", 0.5), ("one-flow", 0.0))
    )
    content = {**ABOUT, "rounds": 1, "systems": ["ours", "one-flow"]}
    text = page({**content, "measured": [vars(one) for one in (busy, idle)]})
    assert "| ours | ~20.0 |" in text and "| one-flow | 20.0 |" in text


def tried(peer: str, folder: Path, seconds: dict[Setting, float]) -> tuple[Setting, list[Setting]]:
    """(the fastest one, all in their order) of a search among 8 and 16 sequences."""
    bench = Trained(folder, {(peer, setting): time for setting, time in seconds.items()})
    fastest = step.find_fastest(peer, bench, Trainings.open(folder / f"{peer}.jsonl", about=ABOUT), [8, 16])
    return fastest, [setting for _, setting, _ in bench.asked]


def test_sizes_are_tried_first_and_then_what_else_a_peer_can_choose_at_the_fastest(tmp_path: Path) -> None:
    sizes = [Setting(8, False), Setting(16, False)]
    seconds = {sizes[0]: 50.0, sizes[1]: 40.0, Setting(16, True): 60.0}
    assert tried("trl-vllm", tmp_path, seconds) == (sizes[1], [*sizes, Setting(16, True)])
    packed, by_tokens = Setting(16, False, padded=False), Setting(16, False, by_tokens=True)
    of_verl = tried("verl", tmp_path, {**seconds, packed: 30.0, by_tokens: 35.0})
    assert of_verl == (packed, [*sizes, Setting(16, True), packed, by_tokens])


def test_a_peer_that_lacks_memory_at_every_size_is_tried_with_checkpointing(tmp_path: Path) -> None:
    recomputed = [Setting(8, True), Setting(16, True)]
    fastest, order = tried("trl", tmp_path, {recomputed[0]: 50.0, recomputed[1]: 40.0})
    assert fastest == recomputed[1]
    assert order == [Setting(8, False), Setting(16, False), *recomputed]


def test_no_two_settings_read_the_same() -> None:
    """The file of trainings knows a setting by its words."""
    known = [
        one for size in (8, 16, SEQUENCES) for one in (Setting(size, False), *variants("verl", Setting(size, False)))
    ]
    assert len({str(setting) for setting in known}) == len(known)


def test_verl_starts_in_a_folder_without_trl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python looks for packages where it starts, and the benchmark's folder has one folder `trl` for TRL."""
    seconds = {"step": 60.0, "gen": 20.0, "old_log_prob": 10.0, "update_actor": 28.0, "update_weights": 1.5}
    data = {f"timing_s/{name}": value for name, value in seconds.items()}
    data |= {"critic/score/mean": 0.5, "response_length/mean": 12.0}
    started = []

    def run(command: list[str], *, folder: Path, environment: dict[str, str], **more: object) -> str:
        started.append((command[2], [path.name for path in folder.iterdir()]))
        Path(environment["VERL_FILE_LOGGER_PATH"]).write_text(json.dumps({"data": data}) + "\n")
        return ""

    monkeypatch.setattr(systems, "run_command", run)
    (tmp_path / "trl").mkdir()
    bench = Bench(tmp_path, tmp_path / "model", write_problems(tmp_path / "problems.jsonl"), None)
    (step_line,) = bench.train("verl", steps=1, setting=SMALL)
    assert (started, step_line["step_s"]) == ([("verl.trainer.main_ppo", [])], 60.0)


def test_verl_reads_the_same_problems_and_its_steps_have_our_names(tmp_path: Path) -> None:
    ours = [json.loads(line) for line in write_problems(tmp_path / "problems.jsonl").read_text().splitlines()]
    file = write_verl_problems(tmp_path / "problems.jsonl", path=tmp_path / "verl.jsonl")
    theirs = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(theirs) == len(ours) and [row["extra_info"]["index"] for row in theirs] == [*range(len(ours))]
    messages = [{"role": "system", "content": ours[5]["system"]}, {"role": "user", "content": ours[5]["question"]}]
    assert (theirs[5]["prompt"], theirs[5]["reward_model"]["ground_truth"]) == (messages, ours[5]["answer"])
    seconds = {"step": 60.0, "gen": 20.0, "old_log_prob": 10.0, "adv": 0.1, "update_actor": 28.0, "update_weights": 1.5}
    metrics = {f"timing_s/{name}": value for name, value in seconds.items()}
    assert verl_line(metrics | {"response_length/mean": 22.5, "critic/score/mean": 0.1}) == {
        "step_s": 60.0,
        "reward_mean": 0.1,
        "response_tokens_mean": 22.5,
        "rollout_s": 20.0,
        "logprob_s": 10.0,
        "update_s": 28.0,
        "sync_s": 1.5,
    }


@pytest.mark.parametrize(
    ("systems", "paragraphs"), [(["ours"], 0), (["ours", "verl"], 1), (["ours", "verl-bypass"], 2)]
)
def test_a_page_with_verl_says_what_was_added_to_it(systems: list[str], paragraphs: int) -> None:
    measured = [summary(name, round_number=1, setting=None, lines=[line(20.0)], busy=0.0) for name in systems]
    text = page({**ABOUT, "rounds": 1, "systems": systems, "measured": [vars(one) for one in measured]})
    assert text.count("\n*verl") == paragraphs


def test_a_page_says_what_an_uncorrected_peer_leaves_out() -> None:
    systems = ["trl-vllm", "trl-vllm-uncorrected"]
    measured = [summary(name, round_number=1, setting=None, lines=[line(20.0)], busy=0.0) for name in systems]
    pages = [
        page({**ABOUT, "rounds": 1, "systems": systems[:count], "measured": [vars(one) for one in measured[:count]]})
        for count in (1, 2)
    ]
    assert ["*trl-vllm-uncorrected* leaves out" in text for text in pages] == [False, True]


def test_its_recipe_is_read_and_its_problems_are_there(tmp_path: Path) -> None:
    problems = write_problems(tmp_path / "problems.jsonl")
    recipe = load_recipe(str(write_recipe(tmp_path / "recipe.json", model=tmp_path, problems=problems, steps=3)))
    assert len(problems.read_text().splitlines()) > 2000
    assert (recipe.trainer.steps, recipe.batch.prompts_per_step, recipe.rollout.samples_per_prompt) == (3, 16, 8)
