"""Results of runs in one file of a line each, from which a comparison goes on without the folders of the runs: on
another machine, or years later from a repository."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from appliance.compare.arms import PlannedRun
from appliance.compare.results import RunResult
from appliance.errors import RecipeError
from appliance.files import write_whole
from appliance.recipe.load import is_written, to_plain
from appliance.record.code import code_of
from appliance.record.lines import as_json, parse

SUFFIX = ".results.jsonl"  # after the comparison's name


@dataclass(frozen=True)
class StoredResult:
    """A line of the file: one run, and all by which it is known as that run again."""

    recipe: dict[str, Any]
    """Every key, as the run's `recipe.yaml` has it."""
    problems: str
    """Hash of all that makes the problems, in the name of their folder."""
    code: dict[str, str]
    """SHA-256 of each file of the user's code, by its name in the run."""
    date: str
    """The day that the prompts were given, ISO."""
    result: RunResult
    schema_version: int = 1


def write_results(file: Path, *, runs: list[tuple[PlannedRun, RunResult]]) -> None:
    """Write the lines of runs that have a result. Raises OSError."""
    write_whole(file, "".join(f"{as_json(_stored(run, result))}\n" for run, result in runs))


def _stored(run: PlannedRun, result: RunResult) -> StoredResult:
    return StoredResult(
        recipe=to_plain(run.recipe),
        problems=_problems(run),
        code={copy.copy_name: copy.sha256 for copy in code_of(run.plan)},
        date=run.plan.task.date or "",
        result=result,
    )


def _problems(run: PlannedRun) -> str:
    return Path(run.plan.task.train_parquet).parent.name


def read_results(file: Path) -> list[StoredResult]:
    """Raises RecipeError where the file cannot be read, or a line of it is not one that this program writes."""
    try:
        lines = file.read_text().splitlines()
        return [parse(line, StoredResult, place=f"{file}:{number}") for number, line in enumerate(lines, start=1)]
    except (OSError, ValueError) as error:
        hint = f"give the NAME{SUFFIX} that `appliance compare` wrote"
        raise RecipeError([(f"--results {file}: {error}", hint)]) from error


def result_of(run: PlannedRun, *, stored: list[StoredResult]) -> RunResult | None:
    """The stored result of this very run: the same arm, seed, recipe, problems and code. One whose model was never
    validated is none: its model is elsewhere."""
    code = {copy.copy_name: copy.sha256 for copy in code_of(run.plan)}
    for line in stored:
        result = line.result
        is_of_the_run = (
            (result.arm, result.seed) == (run.arm, run.seed)
            and is_written(run.recipe, plain=line.recipe)
            and (line.problems, line.code) == (_problems(run), code)
        )
        if is_of_the_run and (result.rewards or result.state != "done"):
            return result
    return None
