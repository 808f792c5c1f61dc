"""The commands. Each imports what it needs when it runs, so that `--help` starts in a blink.

`main` is the one place where an error becomes an exit code.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from appliance.cluster import cli as cluster_cli
from appliance.compare import cli as compare_cli
from appliance.container import cli as container_cli
from appliance.data import cli as data_cli
from appliance.errors import ApplianceError, PreflightError, RecipeError
from appliance.profile.cli import add_commands
from appliance.run import cli as run_cli

if TYPE_CHECKING:
    from appliance.plan.model import RunPlan
    from appliance.preflight.finding import Finding
    from appliance.quant.scheme import Scheme
    from appliance.recipe.schema import Recipe

app = typer.Typer(
    name="appliance",
    help="Reinforcement learning of language models with INT8 rollouts: one recipe, one command.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
recipes = typer.Typer(help="The shipped recipes.", no_args_is_help=True)
app.add_typer(recipes, name="recipes")

RecipeArgument = Annotated[str, typer.Argument(metavar="RECIPE", help="A file, or the name of a shipped recipe.")]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change one key, such as rollout.scheme=bf16.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="For machines: JSON on stdout.")]
NameOption = Annotated[str | None, typer.Option("--name", help="Name of the run; else the recipe's with a number.")]
ResumeOption = Annotated[
    str,
    typer.Option(metavar="auto|never|PATH", help="Go on with --name's run, or the recipe's newest; or a run's folder."),
]


@app.callback()
def _options(
    debug: Annotated[bool, typer.Option("--debug", help="Show a traceback with every error.")] = False,
) -> None:
    """Read by `main`, which sees every error."""


@app.command()
def train(
    recipe: RecipeArgument,
    sets: SetOption = None,
    name: NameOption = None,
    resume: ResumeOption = "never",
    force: Annotated[bool, typer.Option("--force", help="Resume although the recipe changed.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Stop after preflight and plan.")] = False,
    in_container: Annotated[bool, typer.Option("--in-container", help="Start the image and train in it.")] = False,
    image: Annotated[str | None, typer.Option(help="With --in-container: another image than the flavour's.")] = None,
    json_mode: JsonOption = False,
) -> None:
    """Everything, from recipe to trained model."""
    _refuse_idle(("--force", force, "--resume", resume != "never"), ("--image", image, "--in-container", in_container))
    loaded = _load(recipe, sets)
    if resume != "never" and not in_container:
        from appliance.profile.command import BEFORE_TRAINING
        from appliance.run.go_on import resume_training

        code = resume_training(
            loaded, resume=resume, name=name, force=force, dry_run=dry_run, json_mode=json_mode, steps=BEFORE_TRAINING
        )
        if code is not None:
            raise typer.Exit(code)
    if dry_run and not in_container:
        _check(recipe, sets=sets, name=name, json_mode=json_mode, show_plan=True)
        return
    from appliance import console
    from appliance.preflight.report import examine
    from appliance.profile.command import BEFORE_TRAINING
    from appliance.recipe.dump import to_yaml
    from appliance.run.go_on import most_restarts, through_faults
    from appliance.run.train import run_training
    from appliance.run.workspace import stop_on_errors

    if in_container:
        from appliance.container.launch import of_the_host, stop_without, train_in_container

        # The name of a run that is resumed is judged inside: it has its folder already.
        new_name = name if resume == "never" else None
        plan, _, findings = examine(loaded, run_dir=_run_dir(loaded, name=new_name), ask_hub=True)
        if dry_run and resume == "never":
            _print_plan(plan, loaded, findings=of_the_host(findings), json_mode=json_mode)
        elif dry_run:
            console.say("note: the plan of a run that is resumed is made in the container, and not shown by a dry run")
        stop_without(findings)
        if dry_run:
            return
        raise typer.Exit(train_in_container(plan, loaded, typed=recipe, arguments=sys.argv[1:], image=image))
    plan, _, findings = examine(loaded, run_dir=_run_dir(loaded, name=name), ask_hub=True)
    stop_on_errors(findings)
    code = run_training(
        plan,
        recipe_yaml=to_yaml(loaded),
        findings=findings,
        name=name,
        json_mode=json_mode,
        steps=BEFORE_TRAINING,
        may_restart=most_restarts(loaded) > 0,
    )
    raise typer.Exit(through_faults(code, loaded, Path(plan.run_dir), json_mode=json_mode, steps=BEFORE_TRAINING))


@app.command()
def plan(
    recipe: RecipeArgument, sets: SetOption = None, name: NameOption = None, json_mode: JsonOption = False
) -> None:
    """What would happen, on the hardware that the recipe names, and why. Starts nothing."""
    from appliance import console
    from appliance.recipe.text import full_path

    loaded = _load(recipe, sets)
    try:
        run_dir = _run_dir(loaded, name=name)
    except PreflightError as error:  # of this host, and the plan may be for another one
        console.say(f"warning: cluster.run_dir: {error.message}")
        run_dir = full_path(loaded.cluster.run_dir) / (name or f"{loaded.name}-1")
    _show_plan(loaded, run_dir=run_dir, json_mode=json_mode, ask_hub=False)


@app.command()
def check(recipe: RecipeArgument, sets: SetOption = None, json_mode: JsonOption = False) -> None:
    """Can this host do it (of several: its part)? All findings at once; exit code 3 when it cannot."""
    _check(recipe, sets=sets, name=None, json_mode=json_mode, show_plan=False)


@app.command()
def bench(
    recipe: RecipeArgument,
    sets: SetOption = None,
    schemes: Annotated[str, typer.Option(help="Compared with the first, comma-separated.")] = "bf16,int8",
    pairs: Annotated[int, typer.Option(min=5, help="Interleaved repetitions.")] = 5,
    shapes: Annotated[
        str | None, typer.Option(help="Random weights of these layer shapes, such as qwen2.5-7b.")
    ] = None,
    kv_memory: Annotated[
        float | None,
        typer.Option("--kv-memory", metavar="GB", min=0.001, help="Memory for weights and KV cache together, GiB."),
    ] = None,
    json_mode: JsonOption = False,
) -> None:
    """The same rollouts by several schemes, interleaved: does quantising pay here?"""
    chosen, loaded = _schemes(schemes), _load(recipe, sets)
    from appliance.bench.command import run_bench

    raise typer.Exit(
        run_bench(loaded, schemes=chosen, pairs=pairs, shapes=shapes, kv_memory_gb=kv_memory, json_mode=json_mode)
    )


@app.command()
def verify(
    recipe: RecipeArgument,
    sets: SetOption = None,
    schemes: Annotated[
        str | None, typer.Option(help="Instead of the recipe's, comma-separated; bf16 is always there.")
    ] = None,
    emulate: Annotated[
        bool, typer.Option("--emulate", help="FP8 by rounding in float, where it has no kernels.")
    ] = False,
    json_mode: JsonOption = False,
) -> None:
    """Is the patch live: change an engine's weights, see its logits move, put them back, see them return."""
    loaded = _load(recipe, sets)
    chosen = _schemes(schemes) if schemes else None
    from appliance.verify.command import run_verify

    raise typer.Exit(run_verify(loaded, schemes=chosen, emulate=emulate, json_mode=json_mode))


add_commands(app)  # profile, setup, convert-profile
compare_cli.add_commands(app)
container_cli.add_commands(app)  # health
cluster_cli.add_commands(app)  # join
data_cli.add_commands(app)  # data
run_cli.add_commands(app)  # status, logs, report, export


@recipes.command("ls")
def recipes_ls() -> None:
    """The shipped recipes, one a line, with what they do."""
    from appliance import console
    from appliance.recipe import library

    names = library.names()
    width = max(map(len, names), default=0)
    for name in names:
        console.out(f"{name:<{width}}  {library.summary(name)}")


@recipes.command("show")
def recipes_show(name: RecipeArgument) -> None:
    """The text of a recipe."""
    from appliance import console
    from appliance.recipe import library

    console.out(library.text(name).rstrip("\n"))


@recipes.command("cp")
def recipes_cp(name: RecipeArgument, target: Annotated[Path, typer.Argument(help="A new file, or a folder.")]) -> None:
    """Copy a recipe to start from. Overwrites nothing."""
    from appliance import console
    from appliance.recipe import library

    console.out(str(library.copy(name, target=target)))


@app.command()
def schema() -> None:
    """The JSON schema of a recipe, for editors."""
    import json

    from appliance import console
    from appliance.recipe.schema import Recipe

    console.out(json.dumps(Recipe.model_json_schema(), indent=2))


@app.command()
def version(json_mode: JsonOption = False) -> None:
    """This program's version and those of what it drives."""
    import json

    from appliance import console
    from appliance.plan.build import installed_versions
    from appliance.run.attest import fingerprint

    versions = installed_versions()
    if json_mode:
        console.out(json.dumps({"schema_version": 1, **versions, "fingerprint": fingerprint()}, indent=2))
    else:
        console.out("\n".join(f"{name} {found or 'not installed'}" for name, found in versions.items()))


def _refuse_idle(*options: tuple[str, object, str, bool]) -> None:
    """(option, its value, the option that it belongs to, whether that is given): raises where it would do nothing."""
    idle = [
        (f"{option}: does nothing without {of}", f"add {of}, or leave it out")
        for option, value, of, is_given in options
        if value and not is_given
    ]
    if idle:
        raise RecipeError(idle)


def _load(recipe: str, sets: list[str] | None) -> Recipe:
    from appliance.recipe.load import load_recipe

    return load_recipe(recipe, sets=sets or ())


def _run_dir(recipe: Recipe, *, name: str | None) -> Path:
    """Absolute. A name from the command line is one path component, or refused."""
    from appliance.recipe.schema import NAME_PATTERN
    from appliance.recipe.text import full_path
    from appliance.run.session import cannot_write, free_run_dir

    root = full_path(recipe.cluster.run_dir)
    if name is not None and not NAME_PATTERN.fullmatch(name):
        hint = "use letters, digits, `.`, `_` and `-`, at most 80, no space or slash"
        raise RecipeError([(f"--name: the text `{name}` is not a name", hint)])
    try:
        run_dir = free_run_dir(root, name=recipe.name) if name is None else root / name
        is_in_use = name is not None and run_dir.exists()
    except OSError as error:
        raise cannot_write(root, error) from error
    if is_in_use:
        raise RecipeError([(f"--name: `{name}` is in use: {run_dir}", "choose another one, or leave it out")])
    return run_dir


def _schemes(text: str) -> tuple[Scheme, ...]:
    from appliance.quant.scheme import Scheme

    names, legal = [each.strip() for each in text.split(",")], [str(scheme) for scheme in Scheme]
    unknown = [name for name in names if name not in legal]
    if unknown:
        hint = "use " + ", ".join(f"`{each}`" for each in legal)
        raise RecipeError([(f"--schemes: unknown value `{name}`", hint) for name in unknown])
    return tuple(Scheme(name) for name in names)


def _check(recipe: str, *, sets: list[str] | None, name: str | None, json_mode: bool, show_plan: bool) -> None:
    """Judge this host, with or without the plan before the findings."""
    import json

    from appliance import console
    from appliance.preflight.finding import has_error
    from appliance.preflight.report import as_json, examine, lines
    from appliance.run.workspace import raise_on_errors

    loaded = _load(recipe, sets)
    run_dir = _run_dir(loaded, name=name)
    if show_plan:
        findings = _show_plan(loaded, run_dir=run_dir, json_mode=json_mode, ask_hub=True)
    else:
        findings = examine(loaded, run_dir=run_dir, ask_hub=True)[2]
        if json_mode:
            console.out(json.dumps({"schema_version": 1, "findings": as_json(findings)}, indent=2))
        else:
            its = "it" if loaded.cluster.nodes == 1 else "its part; other hosts are judged when they join a training"
            can = [] if has_error(findings) else [f"{recipe}: this host can run {its}"]
            console.show("\n".join([*lines(findings), *can]))
    raise_on_errors(findings)


def _show_plan(loaded: Recipe, *, run_dir: Path, json_mode: bool, ask_hub: bool) -> list[Finding]:
    """Print the plan with the findings attached; returns them."""
    from appliance.preflight.report import examine

    made, _, findings = examine(loaded, run_dir=run_dir, ask_hub=ask_hub)
    _print_plan(made, loaded, findings=findings, json_mode=json_mode)
    return findings


def _print_plan(made: RunPlan, loaded: Recipe, *, findings: list[Finding], json_mode: bool) -> None:
    from appliance import console
    from appliance.preflight.report import plan_as

    write = console.out if json_mode else console.show
    write(plan_as(made, recipe=loaded, findings=findings, json_mode=json_mode))


def main() -> None:
    """The program: `appliance` and `python -m appliance`. Ends the process with the exit code of the contract."""
    from appliance.signals import told_interruptions

    try:
        with told_interruptions():
            app()
    except ApplianceError as error:
        _report(error)
        sys.exit(error.exit_code)
    except Exception as error:  # the boundary: our own fault, told as such, or a full disk behind stdout
        sys.exit(_report_other(error))


def _report(error: ApplianceError) -> None:
    from appliance import console

    if _wants_traceback():
        _say_traceback(error)
    problems = error.shown if isinstance(error, RecipeError) else [(error.message, error.hint)]
    for message, hint in problems:
        console.say(f"error: {message}")
        if hint:
            console.say(f"hint: {hint}")


def _report_other(error: Exception) -> int:
    import tempfile
    import traceback

    from appliance import console

    if _wants_traceback():
        _say_traceback(error)
    if isinstance(error, console.StdoutError):
        console.say(f"error: stdout: cannot be written: {error.strerror}")
        console.say("hint: free some space, or send it elsewhere")
        return error.exit_code
    with tempfile.NamedTemporaryFile("w", prefix="appliance-error-", suffix=".txt", delete=False) as file:
        traceback.print_exception(error, file=file)
    console.say(f"error: {type(error).__name__}: {error}")
    console.say(f"hint: this is our own fault, please report it with {file.name}")
    return ApplianceError.exit_code


def _say_traceback(error: Exception) -> None:
    import traceback

    from appliance import console

    console.say("".join(traceback.format_exception(error)).rstrip())


def _wants_traceback() -> bool:
    return "--debug" in sys.argv[1:]
