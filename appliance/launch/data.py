"""Data sets as parquet files in verl's schema, beside each a JSON file that tells what it was made of; a recipe's
problems as the model will read them.

A file is renamed in when it is whole, so that one which is there is finished: a second run makes what is missing.
"""

from __future__ import annotations

import dataclasses
import json
import os
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from appliance import console
from appliance.errors import RecipeError
from appliance.files import digest_of, whole_file, write_whole
from appliance.finding import fault
from appliance.launch.side_job import folder_elsewhere, make_inputs, new_folder, run_child
from appliance.plan.build import CACHE_NAME
from appliance.preflight.report import plan_in
from appliance.recipe.schema import Recipe
from appliance.recipe.text import full_path
from appliance.record.plan import RunPlan
from appliance.record.session import cannot_write
from appliance.tasks.first_answers import FirstAnswer, give_rewards, in_parts, sum_up, why_not_imported
from appliance.tasks.library import TASKS, task_of
from appliance.tasks.preview import Preview
from appliance.tasks.rows import read_file, without_faults, write_parquet
from appliance.tasks.task import DataFile, TaskDefinition
from appliance.terms.counts import counted

SCHEMA_VERSION = 1
_SHOWN = 2000  # characters of a prompt, a truth, a row


@dataclass(frozen=True)
class DataInfo:
    """The JSON file beside a data file."""

    source: str
    source_sha256: str
    rows: int
    """Rows of the source."""
    problems: int
    repeated: int
    """Rows that repeat a problem and were left out."""
    conflicting: int
    """Rows that repeat a problem with another answer and were left out."""
    schema_version: int = SCHEMA_VERSION


DATA_SETS: dict[str, tuple[tuple[TaskDefinition, DataFile], ...]] = {
    name: tuple((task, file) for file in files) for task in TASKS.values() for name, files in task.data_sets.items()
}


def make_data(name: str, *, folder: Path, sources: tuple[str, ...] = ()) -> None:
    """Make what is missing of a data set in the folder, and print each file's path.

    sources: files of this host, one for each file that is made; none: the hub.
    A new folder into which nothing came goes again.
    Raises RecipeError for an unknown name, for bad rows and when the hub is away, PreflightError when nothing can be
    written.
    """
    files = DATA_SETS.get(name)
    if files is None:
        known = ", ".join(f"`{each}`" for each in DATA_SETS)
        raise RecipeError([fault((name,), "no data set has this name", f"use {known}")])
    if sources and len(sources) != len(files):
        names = ", ".join(f"{file.name}.parquet" for _, file in files)
        raise RecipeError(
            [
                fault(
                    ("--from",),
                    f"{len(sources)} given, `{name}` needs {len(files)}",
                    f"give a file for each of {names}",
                )
            ]
        )
    with nullcontext() if os.path.isdir(folder) else new_folder(folder, option="-o"):
        for (task, file), source in zip(files, sources or [""] * len(files), strict=True):
            try:
                path = _make_file(task, file, folder=folder, source=source)
            except OSError as error:
                raise cannot_write(folder, error, setting="-o") from error
            console.out(str(path))


def preview(recipe: Recipe, *, json_mode: bool, answers: int = 0) -> None:
    """Print what the model will read, and what was left out.

    answers: number of problems that the untrained model is to answer; it is made or fetched first if it is not here.
    Raises RecipeError for bad rows and, before anything is answered, for rewards that cannot be imported; EngineError
    without the model or its tokenizer, WeightsError for files of the model that are not whole.
    """
    if answers and recipe.task.tools:
        message = "a task with tools has several turns, and these answers have one"
        raise RecipeError([fault(("--answers",), message, "leave it out, or train a few steps and read their samples")])
    with folder_elsewhere(command="data-preview") as folder:
        plan, _ = plan_in(folder, recipe, cache_dir=full_path(recipe.cluster.run_dir) / CACHE_NAME)
        plan_file, result = folder / "plan.json", folder / "preview.json"
        if answers:
            if why := why_not_imported(plan):
                raise RecipeError([fault(("task.rewards",), why, "correct the file, or install what it imports")])
            make_inputs(plan, command="data-preview")
            length = counted(plan.task.max_response_tokens, "token")
            console.say(f"answering {counted(answers, 'problem')} on the CPU, in up to {length} each")
        plan.write(plan_file)
        module = ["appliance.tasks.preview", str(plan_file), str(result), str(answers)]
        run_child(module, command="data-preview", folder=folder, env=dict(plan.env))
        report = Preview.model_validate_json(result.read_bytes())
    if answers:
        for url in plan.task.judges:
            console.say(f"note: `judge` sends what it judges to {url}: the problems shown, their truths and answers")
        truths, rows = zip(*((problem.truth, problem.row) for problem in report.problems), strict=True)
        rewarded = give_rewards(plan, report.answers, truths=truths, rows=rows)
        pairs = zip(report.problems, rewarded, strict=True)
        report = report.replace(problems=tuple(problem.replace(answer=answer) for problem, answer in pairs))
    if json_mode:
        console.out(json.dumps({"schema_version": SCHEMA_VERSION, **report.model_dump()}, indent=2))
    else:
        task = task_of(plan.task, files=plan.task_files)
        console.show(_preview_text(report, plan=plan, about=f"{plan.task.kind}: {task.describe}"))


def _preview_text(report: Preview, *, plan: RunPlan, about: str) -> str:
    rows = [("task", about), ("problems", f"{report.train} to train on, {report.val} to validate")]
    notes = list(report.notes)
    if report.answers:
        about_answers, more_notes = sum_up(report.answers, plan=plan)
        rows.append(("answers", about_answers))
        notes += more_notes
    rows += [("note", note) for note in notes]
    for number, problem in enumerate(report.problems, start=1):
        rows += [("", ""), (f"problem {number}", f"{counted(problem.tokens, 'token')} of {report.max_prompt_tokens}")]
        row = json.dumps(json.loads(problem.row), ensure_ascii=False) if problem.row else ""
        parts = [("", problem.prompt), ("truth", problem.truth), ("row", row)]
        if problem.answer:
            parts += [("answer", problem.answer.text), ("", _how_answered(problem.answer))]
        rows += [(name if not line else "", text) for name, value in parts for line, text in enumerate(_lines(value))]
    return console.table(rows)


def _how_answered(answer: FirstAnswer) -> str:
    """Say what an answer earns, how long it is, and whether it was cut."""
    length = f"{counted(len(answer.token_ids), 'token')}{', cut' if answer.is_cut else ''}"
    if answer.reward is None:
        return f"-> no reward: {answer.why}; {length}"
    return f"-> reward {answer.reward:.3g}{in_parts(answer.rewards)}; {length}"


def _lines(text: str) -> list[str]:
    more = f" ... ({len(text)} characters)" if len(text) > _SHOWN else ""
    return (text[:_SHOWN] + more).splitlines() or (["(none)"])


def _make_file(task: TaskDefinition, file: DataFile, *, folder: Path, source: str) -> Path:
    target = folder / f"{file.name}.parquet"
    about, digest = target.with_suffix(".json"), digest_of(Path(source)) if source else ""
    if target.is_file() and _is_of(about, source=source or file.hub, digest=digest):
        console.say(f"{target.name}: is there already, made of {source or file.hub}")
        return target
    rows = task.source
    assert rows is not None, "only a task that reads rows has data sets"
    data = without_faults(read_file(source, source=rows))[0] if source else file.read(rows, keys=("--from",))
    about.unlink(missing_ok=True)  # what it says is of the file before
    with whole_file(target) as partial:
        write_parquet({file.split: data.problems}, path=partial, kind=task.kind)
    info = DataInfo(source or file.hub, digest, data.rows, len(data.problems), data.repeated, data.conflicting)
    write_whole(about, json.dumps(dataclasses.asdict(info), indent=2) + "\n")  # last: without it, it is made again
    again = f", {counted(info.repeated, 'row repeats', plural='rows repeat')} a problem" if info.repeated else ""
    other = f" ({info.conflicting} with another answer: the first one counts)" if info.conflicting else ""
    console.say(f"{target.name}: {counted(info.rows, 'row')}, {counted(info.problems, 'problem')}{again}{other}")
    return target


def _is_of(about: Path, *, source: str, digest: str) -> bool:
    try:
        info = json.loads(about.read_text())
        return (info["source"], info["source_sha256"], info["schema_version"]) == (source, digest, SCHEMA_VERSION)
    except (OSError, ValueError, TypeError, KeyError):
        return False  # it is made again
