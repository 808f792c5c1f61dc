"""Results of runs in one file of a line each, from which a comparison continues without the folders of the runs: on
another machine, or years later from a repository."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from appliance.compare.arms import PlannedRun
from appliance.compare.results import RunResult
from appliance.errors import RecipeError
from appliance.files import write_whole
from appliance.finding import fault
from appliance.recipe.load import is_written, to_plain
from appliance.record.code import code_of
from appliance.record.lines import as_json, parse

SUFFIX = ".results.jsonl"  # after the comparison's name


@dataclass(frozen=True)
class StoredRun:
    """A line of the file: the result of one run, and everything by which the run is recognised."""

    recipe: dict[str, Any]
    """Recipe with every key, as the run's `recipe.yaml` has it."""
    problems: str
    """Hash of all that makes the problems, in the name of their folder."""
    code: dict[str, str]
    """SHA-256 of each file of the user's code, by its name in the run."""
    date: str
    """Day that the prompts were given, ISO; empty where the chat template does not ask for it."""
    commit: str
    """Commit of the model on the hub, empty where the model is not from the hub or the commit was not known."""
    result: RunResult
    schema_version: Literal[1] = 1


def write_results(file: Path, *, runs: list[tuple[PlannedRun, RunResult]]) -> None:
    """Write the lines of runs that have a result. Raises OSError."""
    write_whole(file, "".join(f"{as_json(_stored(run, result))}\n" for run, result in runs))


def _stored(run: PlannedRun, result: RunResult) -> StoredRun:
    return StoredRun(
        recipe=to_plain(run.recipe),
        problems=_problems(run),
        code={copy.copy_name: copy.sha256 for copy in code_of(run.plan)},
        date=run.plan.task_files.date,
        commit=run.plan.weights.commit,
        result=result,
    )


def _problems(run: PlannedRun) -> str:
    return Path(run.plan.task_files.train_parquet).parent.name


def read_results(file: Path) -> list[StoredRun]:
    """Read stored results. Raises RecipeError where the file cannot be read, or a line of it is not one that this
    program writes."""
    try:
        lines = file.read_text().splitlines()
        return [parse(line, StoredRun, place=f"{file}:{number}") for number, line in enumerate(lines, start=1)]
    except (OSError, ValueError) as error:
        hint = f"give the NAME{SUFFIX} that `appliance compare` wrote"
        raise RecipeError([fault((f"--results {file}",), str(error), hint)]) from error


def date_of(stored: list[StoredRun]) -> str | None:
    """Return the day that prompts were given in the stored runs; None where no chat template asks for it."""
    return next((line.date for line in stored if line.date), None)


def result_of(run: PlannedRun, *, stored: list[StoredRun]) -> tuple[RunResult | None, str]:
    """Return the stored result of this very run; where its arm and seed have only the result of another run, None and
    what differs."""
    differs = ""
    for line in stored:
        if (line.result.arm, line.result.seed) == (run.arm, run.seed):
            differs = _difference(run, line)
            if not differs:
                return line.result, ""
    return None, differs


def _difference(run: PlannedRun, line: StoredRun) -> str:
    """Return the reason why the line is not a result of this run, empty where it is one."""
    if not is_written(run.recipe, plain=line.recipe):
        return "its recipe is another one"
    if line.problems != _problems(run):
        return "it has other problems"
    if line.code != {copy.copy_name: copy.sha256 for copy in code_of(run.plan)}:
        return "its Python files are others"
    if line.commit and run.plan.weights.commit and line.commit != run.plan.weights.commit:
        return f"its model is commit {line.commit}, now it is {run.plan.weights.commit}"
    if not line.result.rewards and line.result.state == "done":
        return "its model was not validated, and is not here"
    return ""
