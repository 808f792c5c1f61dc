"""Makes what a run needs and the cache lacks: the built-in model, the data. `python -m appliance.tasks.prepare PLAN`.

An entry is made in a temporary sibling folder and renamed in: half an entry is never seen. Progress and failures are
events of the run; the exit code is that of the error.
"""

from __future__ import annotations

import functools
import os.path
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from appliance.errors import EngineError, PreflightError, RecipeError, first_line
from appliance.files import whole_folder
from appliance.finding import fault
from appliance.hub import download_model
from appliance.quant.headers import damage
from appliance.record.events import append_event, exit_code_of
from appliance.record.liveness import Heartbeat, keep_stacks
from appliance.record.plan import RunPlan, read_plan
from appliance.tasks.library import PACKAGED_MODELS, TINY_MODELS, splits_of, too_few_problems
from appliance.tasks.packaged_model import (
    convert_gguf,
    make_packaged,
)
from appliance.tasks.rows import Problem, write_parquet
from appliance.tasks.task import PromptLimit
from appliance.tasks.templates import OF_A_PROGRAM, missing_template, refusal, text_problem
from appliance.tasks.tokenizer import load_tokenizer
from appliance.tasks.tools import Schema, read_tools, tools_request, write_schemas
from appliance.terms.clock import clock_of
from appliance.terms.counts import counted
from appliance.terms.families import REMEDY_OF_OWN_ATTENTION, why_own_attention
from appliance.terms.phases import Phase

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PROGRESS_EVERY_S = 0.5


def is_prepared(plan: RunPlan) -> bool:
    """Tell whether the cache has all that the plan names. Imports no torch."""
    return has_data(plan) and _has_model(plan)


def has_data(plan: RunPlan) -> bool:
    """Tell whether the cache has the plan's problems."""
    files = plan.task_files
    return all(map(os.path.isfile, filter(None, (files.train_parquet, files.val_parquet, files.schemas_file))))


def _has_model(plan: RunPlan) -> bool:
    """Tell whether the model is there. A name on the hub without a revision is left to those who load it."""
    if not plan.weights.is_cached and not plan.weights.is_pinned:
        return True
    is_there = os.path.isfile(Path(plan.weights.name_or_path) / "config.json")
    return is_there and (not plan.weights.is_pinned or os.path.isfile(_fetched(plan)))


def _fetched(plan: RunPlan) -> Path:
    """Return the mark that the snapshot is whole: a download that broke off leaves some, one without code has no
    code."""
    with_code = "-with-code" if plan.model.trust_remote_code else ""
    return Path(plan.cache_dir) / "models" / f"{plan.weights.identity.replace('/', '--')}{with_code}.fetched"


def prepare(plan: RunPlan) -> None:
    """Make what is missing. Raises RecipeError for data that cannot be used, OSError when the cache is not writable,
    EngineError when the hub does not give the model, PreflightError when what it gives is not the model of its
    config.json."""
    run_dir = Path(plan.run_dir)
    append_event(run_dir, kind="phase", what=str(Phase.PREPARE))
    if not _has_model(plan):
        _make_model(plan) if plan.weights.is_cached else _fetch_model(plan)
    if not has_data(plan):
        _make_data(plan)


def _make_model(plan: RunPlan) -> None:
    weights = plan.weights
    target = Path(weights.name_or_path)
    if packaged := PACKAGED_MODELS.get(plan.model.builtin):
        make_packaged(packaged, target=target, cache_dir=Path(plan.cache_dir), beat=Heartbeat().beat)
    elif weights.gguf:
        convert_gguf(Path(weights.gguf), target=target, beat=Heartbeat().beat)
    else:
        _make_tiny_model(plan)
    if weights.provenance:
        place = "model.path" if weights.gguf else "model.builtin"
        append_event(Path(plan.run_dir), kind="note", what=f"the model is {weights.provenance}", why=place)


def _make_tiny_model(plan: RunPlan) -> None:
    from appliance.tasks.tiny_model import make_tiny_model  # loads torch

    spec = TINY_MODELS[plan.model.builtin]
    report = _reporter(Path(plan.run_dir), label="warm start", total=spec.steps)
    with whole_folder(Path(plan.weights.name_or_path), for_cache=True) as folder:
        make_tiny_model(spec, difficulty=plan.task.difficulty, folder=folder, on_step=report)


def _fetch_model(plan: RunPlan) -> None:
    weights = plan.weights
    try:
        folder = download_model(
            weights.hub_name,
            revision=weights.commit,
            beat=Heartbeat().beat,
            with_code=plan.model.trust_remote_code,
        )
    except OSError as error:
        hint = "download it where there is a network, or give another model.revision"
        raise EngineError(f"{weights.identity} cannot be had from the hub: {error}", hint=hint) from error
    if folder != Path(weights.name_or_path):
        places = f"{folder}, not to {weights.name_or_path}"
        hint = "give all processes one HF_HOME, or one HF_HUB_CACHE"
        raise EngineError(f"{weights.identity} was fetched to {places}", hint=hint)
    _check_weights(folder, plan=plan)
    mark = _fetched(plan)
    mark.parent.mkdir(parents=True, exist_ok=True)
    mark.touch()
    append_event(Path(plan.run_dir), kind="note", what=f"the model is {weights.identity}", why="model.revision")


def _check_weights(folder: Path, *, plan: RunPlan) -> None:
    """Check the files of weights as preflight does, which could not before they were here. Raises PreflightError."""
    if bad := damage(folder):
        message = f"model.path: {plan.weights.identity}: {'; '.join(bad.problems)}"
        raise PreflightError(message, hint=f"in a copy of its folder, given as model.path: {bad.remedy}")
    from appliance.quant.loading import ask_transformers  # loads torch

    loading = ask_transformers(folder, trust_remote_code=plan.model.trust_remote_code)
    if loading.problem:
        raise PreflightError(f"model.path: {plan.weights.identity}: {loading.problem}", hint=loading.remedy)
    if loading.own_attention:
        why = why_own_attention(loading.own_attention)
        raise PreflightError(f"model.path: {plan.weights.identity}: {why}", hint=REMEDY_OF_OWN_ATTENTION)


def _reporter(run_dir: Path, *, label: str, total: int) -> Callable[[int, float], None]:
    """Return a function that writes a progress event at most twice a second, and for the first and the last step."""
    last_s = 0.0

    def report(done: int, loss: float) -> None:
        nonlocal last_s
        now_s = time.monotonic()
        if done < total and now_s - last_s < _PROGRESS_EVERY_S:
            return
        last_s = now_s
        append_event(run_dir, kind="progress", what=label, done=done, total=total, note=f"loss {loss:.3f}")

    return report


def _make_data(plan: RunPlan) -> None:
    task, files, run_dir = plan.task, plan.task_files, Path(plan.run_dir)
    schemas = functools.cache(lambda: read_tools(tools_request(plan, model=plan.weights.name_or_path)))
    limit = prompt_limit(plan, tokenizer=functools.cache(lambda: load_tokenizer(plan)), tools=schemas)
    splits = splits_of(task, files=files, limit=limit)
    for note in splits.notes:
        append_event(run_dir, kind="note", what=note, why="task.train_file")
    for note in limit.notes if limit else ():
        append_event(run_dir, kind="note", what=note, why="task.max_prompt_tokens")
    if too_few := too_few_problems(len(splits.train), prompts_per_step=plan.batch.prompts_per_step):
        raise RecipeError(too_few)
    with whole_folder(Path(files.train_parquet).parent, for_cache=True) as folder:
        write_parquet({"train": splits.train}, path=folder / Path(files.train_parquet).name, kind=task.kind)
        write_parquet(splits.validations, path=folder / Path(files.val_parquet).name, kind=task.kind)
        if files.schemas_file:
            write_schemas(schemas(), folder / Path(files.schemas_file).name)
    to_validate = ", ".join(f"{len(splits.val_sets[name])} ({name})" for name in splits.val_sets) or str(
        len(splits.val)
    )
    sizes = f"{counted(len(splits.train), 'problem')} to train on, {to_validate} to validate"
    append_event(run_dir, kind="progress", what="data", done=1, total=1, note=sizes)


def prompt_limit(
    plan: RunPlan, *, tokenizer: Callable[[], PreTrainedTokenizerBase], tools: Callable[[], list[Schema]]
) -> PromptLimit | None:
    """Make the limit of prompts; None for a plan that truncates long prompts: all stay, and trainer/rollouts.py cuts
    the tokens.

    tokenizer, tools: the model's and the task's, asked for each prompt and not before: what is wrong with the data is
    reported first.
    """
    heart = Heartbeat()

    def count(problem: Problem) -> int:
        heart.beat()  # of millions of prompts this takes long
        return len(prompt_ids(problem, tokenizer=tokenizer(), tools=tools(), date=plan.task_files.date))

    return None if plan.task.truncates_prompts else PromptLimit(plan.task.max_prompt_tokens, count)


def prompt_ids(
    problem: Problem, *, tokenizer: PreTrainedTokenizerBase, tools: Sequence[Schema] = (), date: str = ""
) -> list[int]:
    """Return the tokens that the model gets, with the schemas of its tools. Raises RecipeError where its chat template
    does not take the messages, or loses one of them. date: the day that the template is given, see clock_of."""
    import jinja2

    if missing := missing_template(tokenizer):
        raise RecipeError([fault(("model.path",), *missing)])
    messages = [{"role": role, "content": content} for role, content in problem.messages]
    render = functools.partial(
        tokenizer.apply_chat_template,
        messages,
        tools=list(tools) or None,
        add_generation_prompt=True,
        **clock_of(tokenizer, date=date),
    )
    raised: BaseException | None = None
    try:
        rendered, why = render(), text_problem(problem.messages, render(tokenize=False))
    except (jinja2.TemplateError, *OF_A_PROGRAM) as error:
        raised, why = error, first_line(error)
    if why:
        roles = [role for role, _ in problem.messages]
        reason, remedy = refusal(raised, why, roles=roles)
        message = f"the model's chat template does not take `{problem.prompt[:60]}` ({', '.join(roles)}): {reason}"
        raise RecipeError([fault(("model.path",), message, remedy)])
    return list(rendered["input_ids"])


def main(arguments: list[str]) -> int:
    keep_stacks(str(Phase.PREPARE))
    plan = read_plan(Path(arguments[0]))
    signal.signal(signal.SIGTERM, _end_tidily)
    return exit_code_of(lambda: prepare(plan), run_dir=Path(plan.run_dir))


def _end_tidily(number: int, frame: FrameType | None) -> None:
    """End this process by an exception, so that what is half made in the cache is removed on the way out."""
    signal.signal(number, signal.SIG_IGN)  # a second one would break off the removal
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
