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
from appliance.hub import download_model
from appliance.quant.headers import damage
from appliance.record.events import append_event, exit_code_of
from appliance.record.liveness import Heartbeat, keep_stacks
from appliance.record.plan import RunPlan, read_plan
from appliance.tasks.library import PACKAGED_MODELS, TINY_MODELS, CalculatorSpec, splits_of, too_few_problems
from appliance.tasks.packaged_model import (
    convert_gguf,
    make_packaged,
    read_packaged_tokenizer,
    read_tokenizer,
)
from appliance.tasks.rows import Problem, write_parquet
from appliance.tasks.task import PromptLimit
from appliance.tasks.templates import OF_A_PROGRAM, missing_template, refusal, text_problem
from appliance.tasks.tools import Schema, asked_of, read_tools, write_schemas
from appliance.terms.clock import clock_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PHASE = "prepare"
_PROGRESS_EVERY_S = 0.5


def is_prepared(plan: RunPlan) -> bool:
    """Whether the cache has all that the plan names. Imports no torch."""
    return has_data(plan) and _has_model(plan)


def has_data(plan: RunPlan) -> bool:
    """Whether the cache has the plan's problems."""
    task = plan.task
    return all(map(os.path.isfile, filter(None, (task.train_parquet, task.val_parquet, task.schemas_file))))


def _has_model(plan: RunPlan) -> bool:
    """A name on the hub without a revision is left to those who load it."""
    if not plan.model.is_cached and not plan.model.is_pinned:
        return True
    is_there = os.path.isfile(Path(plan.model.path) / "config.json")
    return is_there and (not plan.model.is_pinned or os.path.isfile(_fetched(plan)))


def _fetched(plan: RunPlan) -> Path:
    """A mark that the snapshot is whole: a download that broke off leaves some, one without code has no code."""
    with_code = "-with-code" if plan.model.trust_remote_code else ""
    return Path(plan.cache_dir) / "models" / f"{plan.model.identity.replace('/', '--')}{with_code}.fetched"


def prepare(plan: RunPlan) -> None:
    """Make what is missing. Raises RecipeError for data that cannot be used, OSError when the cache is not writable,
    EngineError when the hub does not give the model, PreflightError when what it gives is not the model of its
    config.json."""
    run_dir = Path(plan.run_dir)
    append_event(run_dir, kind="phase", what=PHASE)
    if not _has_model(plan):
        _make_model(plan) if plan.model.is_cached else _fetch_model(plan)
    if not has_data(plan):
        _make_data(plan)


def _make_model(plan: RunPlan) -> None:
    model, target = plan.model, Path(plan.model.path)
    if packaged := PACKAGED_MODELS.get(model.builtin):
        make_packaged(packaged, target=target, cache_dir=Path(plan.cache_dir), beat=Heartbeat().beat)
    elif model.gguf:
        convert_gguf(Path(model.gguf), target=target, beat=Heartbeat().beat)
    else:
        _make_tiny_model(plan)
    if model.provenance:
        place = "model.path" if model.gguf else "model.builtin"
        append_event(Path(plan.run_dir), kind="note", what=f"the model is {model.provenance}", why=place)


def _make_tiny_model(plan: RunPlan) -> None:
    from appliance.tasks.tiny_model import make_tiny_model  # loads torch

    spec = TINY_MODELS[plan.model.builtin]
    report = _reporter(Path(plan.run_dir), label="warm start", total=spec.steps)
    with whole_folder(Path(plan.model.path), for_cache=True) as folder:
        make_tiny_model(spec, difficulty=plan.task.difficulty, folder=folder, on_step=report)


def _fetch_model(plan: RunPlan) -> None:
    model = plan.model
    try:
        folder = download_model(
            model.source, revision=model.commit, beat=Heartbeat().beat, with_code=model.trust_remote_code
        )
    except OSError as error:
        hint = "download it where there is a network, or give another model.revision"
        raise EngineError(f"{model.identity} cannot be had from the hub: {error}", hint=hint) from error
    if folder != Path(model.path):
        raise EngineError(f"{model.identity} came to {folder}, not to {model.path}: two settings of the hub's cache?")
    _check_weights(folder, plan=plan)
    mark = _fetched(plan)
    mark.parent.mkdir(parents=True, exist_ok=True)
    mark.touch()
    append_event(Path(plan.run_dir), kind="note", what=f"the model is {model.identity}", why="model.revision")


def _check_weights(folder: Path, *, plan: RunPlan) -> None:
    """Check the files of weights as preflight does, which could not before they were here. Raises PreflightError."""
    if bad := damage(folder):
        message = f"model.path: {plan.model.identity}: {'; '.join(bad.problems)}"
        raise PreflightError(message, hint=f"in a copy of its folder, given as model.path: {bad.remedy}")
    from appliance.quant.loading import ask_transformers  # loads torch

    loading = ask_transformers(folder, trust_remote_code=plan.model.trust_remote_code)
    if loading.problem:
        raise PreflightError(f"model.path: {plan.model.identity}: {loading.problem}", hint=loading.remedy)


def _reporter(run_dir: Path, *, label: str, total: int) -> Callable[[int, float], None]:
    """A progress event at most twice a second, and for the first and the last step."""
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
    task, run_dir = plan.task, Path(plan.run_dir)
    schemas = functools.cache(lambda: read_tools(asked_of(plan, model=plan.model.path)))
    limit = prompt_limit(plan, tokenizer=functools.cache(lambda: load_tokenizer(plan)), tools=schemas)
    splits = splits_of(task, limit=limit)
    for note in splits.notes:
        append_event(run_dir, kind="note", what=note, why="task.train_file")
    for note in limit.notes if limit else ():
        append_event(run_dir, kind="note", what=note, why="task.max_prompt_tokens")
    if too_few := too_few_problems(len(splits.train), prompts_per_step=plan.prompts_per_step):
        raise RecipeError(too_few)
    with whole_folder(Path(task.train_parquet).parent, for_cache=True) as folder:
        write_parquet({"train": splits.train}, path=folder / Path(task.train_parquet).name, kind=task.kind)
        write_parquet(splits.validations, path=folder / Path(task.val_parquet).name, kind=task.kind)
        if task.tools:
            write_schemas(schemas(), folder / Path(task.schemas_file).name)
    to_validate = ", ".join(f"{len(splits.val_sets[name])} ({name})" for name in splits.val_sets) or str(
        len(splits.val)
    )
    sizes = f"{len(splits.train)} problems to train on, {to_validate} to validate"
    append_event(run_dir, kind="progress", what="data", done=1, total=1, note=sizes)


def prompt_limit(
    plan: RunPlan, *, tokenizer: Callable[[], PreTrainedTokenizerBase], tools: Callable[[], list[Schema]]
) -> PromptLimit | None:
    """None for a plan that truncates long prompts: all stay, and trainer/rollouts.py cuts the tokens.

    tokenizer, tools: the model's and the task's, asked for each prompt and not before: what is wrong with the data is
    told first.
    """
    heart = Heartbeat()

    def count(problem: Problem) -> int:
        heart.beat()  # of millions of prompts this takes long
        return len(prompt_ids(problem, tokenizer=tokenizer(), tools=tools(), date=plan.task.date))

    return None if plan.task.truncate_prompts else PromptLimit(plan.task.max_prompt_tokens, count)


def load_tokenizer(plan: RunPlan) -> PreTrainedTokenizerBase:
    """The model's, whose weights need not be here yet. Raises OSError when the hub does not give it, and of a package
    or a GGUF file what make_packaged and convert_gguf raise."""
    from transformers import AutoTokenizer

    model = plan.model
    if os.path.isdir(model.path):
        return AutoTokenizer.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
    if model.gguf:
        return read_tokenizer(Path(model.gguf))
    if packaged := PACKAGED_MODELS.get(model.builtin):
        return read_packaged_tokenizer(packaged, cache_dir=Path(plan.cache_dir), beat=Heartbeat().beat)
    if model.builtin:
        from appliance.tasks.tiny_model import byte_tokenizer  # loads torch

        spec = TINY_MODELS[model.builtin]
        return byte_tokenizer(max_positions=spec.max_positions, calls_tools=isinstance(spec, CalculatorSpec))
    return AutoTokenizer.from_pretrained(
        model.source, revision=model.commit or None, trust_remote_code=model.trust_remote_code
    )


def prompt_ids(
    problem: Problem, *, tokenizer: PreTrainedTokenizerBase, tools: Sequence[Schema] = (), date: str = ""
) -> list[int]:
    """The tokens that the model gets, with the schemas of its tools. Raises RecipeError where its chat template does
    not take the messages, or loses one of them. date: the day that the template is given, see clock_of."""
    import jinja2

    if missing := missing_template(tokenizer):
        raise RecipeError([missing])
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
        raise RecipeError([(message, remedy)])
    return list(rendered["input_ids"])


def main(arguments: list[str]) -> int:
    keep_stacks(PHASE)
    plan = read_plan(Path(arguments[0]))
    signal.signal(signal.SIGTERM, _end_tidily)
    return exit_code_of(lambda: prepare(plan), run_dir=Path(plan.run_dir))


def _end_tidily(number: int, frame: FrameType | None) -> None:
    """Ends this process by an exception, so that what is half made in the cache is removed on the way out."""
    signal.signal(number, signal.SIG_IGN)  # a second one would break off the removal
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
