"""The commands, all in one form: what is typed, then one call that returns the exit code, or nothing.

Every command imports what it needs when it runs, so that `--help` is quick. `main` is the one place where an error
becomes an exit code.
"""

from __future__ import annotations

import os
import sys
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from appliance import console
from appliance.errors import ApplianceError, RecipeError
from appliance.finding import fault
from appliance.plan.host import DEFAULT_BASE, LARGEST_BASE

if TYPE_CHECKING:
    from appliance.recipe.schema import Recipe
    from appliance.terms.schemes import Scheme


def _end(code: int | None, **_: object) -> None:
    raise typer.Exit(code or 0)


class _Commands(TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # as behind `| head`: Typer would make it 1, our own fault
            raise typer.Exit(console.READER_GONE) from None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] not in self.commands:  # it suggests some of these, and none that is hidden
            self.commands = {name: each for name, each in self.commands.items() if not each.hidden}
        return super().resolve_command(ctx, args)


class _DataCommands(TyperGroup):
    """Commands below `data`: `preview`, and the name of a data set, which `NAME` stands for."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, *rest = args
        others = [command for command in self.commands if command != _ANY_DATA]
        if name in self.commands or get_close_matches(name, others):  # a mistyped one is refused, with a suggestion
            return super().resolve_command(ctx, args)
        _, command, rest = super().resolve_command(ctx, [_ANY_DATA, *rest])
        return name, command, rest


app = typer.Typer(
    cls=_Commands,
    name="appliance",
    help="Reinforcement learning of language models with INT8 rollouts: one recipe, one command.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    result_callback=_end,
)
recipes = typer.Typer(help="List, show or copy the shipped recipes.", no_args_is_help=True)
data = typer.Typer(help="Show what the model will really read, or make a data set's files.", no_args_is_help=True)

RUN_ROOT = Path("runs")
_ANY_DATA = "NAME"
RecipeArgument = Annotated[str, typer.Argument(metavar="RECIPE", help="A file, or the name of a shipped recipe.")]
RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="A run's folder, or its name in ./runs.")]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change one key, such as rollout.scheme=bf16.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="For machines: JSON on stdout.")]
NameOption = Annotated[
    str | None, typer.Option("--name", help="Name of the run (default: the recipe's name and a number).")
]
ResumeOption = Annotated[
    str,
    typer.Option(
        metavar="auto|never|PATH",
        help="Resume: `auto` the run of --name, or else the recipe's newest; PATH that run or checkpoint.",
    ),
]


@app.callback()
def _options(
    debug: Annotated[bool, typer.Option("--debug", help="Show a traceback with every error.")] = False,
) -> None:
    """Declare the options that `main` reads, which sees every error."""


@app.command()
def train(
    recipe: RecipeArgument,
    sets: SetOption = None,
    name: NameOption = None,
    resume: ResumeOption = "never",
    force: Annotated[bool, typer.Option("--force", help="Resume although the recipe changed.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Stop after preflight and plan.")] = False,
    in_container: Annotated[bool, typer.Option("--in-container", help="Start the image and train in it.")] = False,
    image: Annotated[
        str | None, typer.Option(help="With --in-container: use this image, not flashrl-appliance:cpu or :gpu.")
    ] = None,
    json_mode: JsonOption = False,
) -> int:
    """Train a model by a recipe: preflight, rollouts, training, export."""
    idle = [("--force", "--resume")] if force and resume == "never" else []
    idle += [("--image", "--in-container")] if image and not in_container else []
    if idle:
        raise RecipeError(
            [
                fault((option,), f"does nothing without {other}", f"add {other}, or leave it out")
                for option, other in idle
            ]
        )
    loaded = _load_judged(recipe, sets, for_this_host=not in_container)
    options = {"name": name, "resume": resume, "dry_run": dry_run, "json_mode": json_mode}
    if in_container:
        from appliance.container.launch import examine_and_train

        return examine_and_train(loaded, typed=recipe, image=image, **options)
    from appliance.launch.command import run_train
    from appliance.profile.command import BEFORE_TRAINING

    return run_train(loaded, force=force, stages=BEFORE_TRAINING, **options)


@app.command()
def plan(
    recipe: RecipeArgument,
    sets: SetOption = None,
    name: NameOption = None,
    full: Annotated[bool, typer.Option("--full", help="Show the resolved recipe and the exact child, too.")] = False,
    json_mode: JsonOption = False,
) -> None:
    """Show what would happen on the hardware that the recipe names, and why. Starts nothing."""
    from appliance.launch.command import run_plan
    from appliance.profile.command import made_before

    loaded = _load_judged(recipe, sets, for_this_host=False)
    run_plan(loaded, name=name, full=full, json_mode=json_mode, find_profile=made_before)


@app.command()
def check(recipe: RecipeArgument, sets: SetOption = None, json_mode: JsonOption = False) -> None:
    """Check whether this host can run the recipe (of several hosts: its part). Exit code 3 when it cannot.

    All findings are shown at once.
    """
    from appliance.launch.command import run_check
    from appliance.profile.command import made_before

    run_check(recipe, sets=sets or (), json_mode=json_mode, find_profile=made_before)


@app.command()
def bench(
    recipe: RecipeArgument,
    sets: SetOption = None,
    schemes: Annotated[
        str, typer.Option(help="Schemes to measure, comma-separated; the others are compared with the first.")
    ] = "bf16,int8",
    pairs: Annotated[int, typer.Option(min=5, help="Repetitions of each scheme, in turn.")] = 5,
    shapes: Annotated[
        str | None, typer.Option(help="Measure random weights in these layer shapes, such as qwen2.5-7b, instead.")
    ] = None,
    kv_memory: Annotated[
        float | None,
        typer.Option("--kv-memory", metavar="GB", min=0.001, help="Memory for weights and KV cache together, GiB."),
    ] = None,
    json_mode: JsonOption = False,
) -> int:
    """Measure the same rollouts in several schemes, in turn: does quantising pay here?"""
    chosen, loaded = _schemes("--schemes", schemes), _load(recipe, sets)
    from appliance.bench.command import run_bench

    return run_bench(loaded, schemes=chosen, pairs=pairs, shapes=shapes, kv_memory_gb=kv_memory, json_mode=json_mode)


@app.command()
def accept(
    only: Annotated[
        list[str] | None, typer.Option("--only", metavar="ROW", help="Run this row alone; given again, that one too.")
    ] = None,
    show: Annotated[bool, typer.Option("--list", help="List the rows and what each should take; run nothing.")] = False,
    output: Annotated[
        Path | None,
        typer.Option("-o", metavar="DIR", help="Folder for page and archive (on a GPU docs/results, else runs)."),
    ] = None,
    cpu: Annotated[bool, typer.Option("--cpu", help="Rehearse on the CPU, even where there is a GPU.")] = False,
    within: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="MIN",
            help="Stop after this many minutes even if rows are left "
            "(default: 24 on one GPU, 28 on several, no limit in a rehearsal).",
        ),
    ] = None,
) -> int:
    """Run on a host with a GPU, row by row, everything that was never run on one."""
    from benchmarks.accept.command import print_rows, run_accept

    if show:
        print_rows()
        return 0
    return run_accept(only=tuple(only or ()), output=output, run_root=RUN_ROOT, rehearse=cpu, within=within)


@app.command()
def verify(
    recipe: RecipeArgument,
    sets: SetOption = None,
    schemes: Annotated[
        str | None, typer.Option(help="Schemes to check, not the recipe's, comma-separated; bf16 is always checked.")
    ] = None,
    emulate: Annotated[
        bool, typer.Option("--emulate", help="Emulate FP8 by rounding in float, where it has no kernels.")
    ] = False,
    json_mode: JsonOption = False,
) -> int:
    """Check that the patch is live: change an engine's weights, see its logits move, put them back, see them return."""
    loaded = _load(recipe, sets)
    chosen = _schemes("--schemes", schemes) if schemes else None
    from appliance.verify.command import run_verify

    return run_verify(loaded, schemes=chosen, emulate=emulate, json_mode=json_mode)


@app.command()
def profile(
    recipe: Annotated[
        str | None, typer.Argument(metavar="[RECIPE]", help="A file, or the name of a shipped recipe.")
    ] = None,
    sets: SetOption = None,
    output: Annotated[Path | None, typer.Option("-o", metavar="DIR", help="Folder for it (else the cache).")] = None,
    model: Annotated[str | None, typer.Option(help="FlashRL's form: the BF16 checkpoint.")] = None,
    quantized: Annotated[Path | None, typer.Option(help="FlashRL's form: a W8A8 checkpoint of that model.")] = None,
    scheme: Annotated[
        str | None, typer.Option(help="FlashRL's form: the scheme of the W8A8 checkpoint, int8 by default.")
    ] = None,
) -> int:
    """Make a model's scales: those of a recipe's model, or those of a donor checkpoint."""
    from appliance.profile.command import run_donor, run_profile

    if recipe is not None and model is None and quantized is None:
        if scheme is not None:
            hint = f"use --set rollout.scheme={scheme}"
            raise RecipeError([fault((f"--scheme {scheme}",), "a recipe's scheme is its rollout.scheme", hint)])
        return run_profile(_load(recipe, sets), output=output)
    if recipe is not None or model is None or quantized is None or output is None:
        hint = "use `appliance profile RECIPE`, or `appliance profile --model M --quantized Q --scheme int8 -o DIR`"
        raise RecipeError([fault(("profile",), "give a recipe, or --model, --quantized and -o", hint)])
    if sets:
        raise RecipeError(
            [fault((f"--set {setting}",), "there is no recipe to set it in", "leave it out") for setting in sets]
        )
    (chosen,) = _schemes("--scheme", scheme or "int8", several=False)
    return run_donor(model=model, quantized=quantized, scheme=chosen, output=output)


@app.command()
def setup(
    recipe: RecipeArgument,
    sets: SetOption = None,
    output: Annotated[Path, typer.Option("-o", metavar="FILE", help="YAML file to write.")] = Path("quantization.yaml"),
) -> int:
    """Write quantization.yaml, which FLASHRL_CONFIG takes, with a profile of the recipe's model beside it."""
    from appliance.profile.command import run_setup

    return run_setup(_load(recipe, sets), output=output)


@app.command("convert-profile")
def convert_profile(
    file: Annotated[Path, typer.Argument(metavar="FILE.pt", help="What `flashrl profile --fn int8` wrote.")],
    output: Annotated[Path, typer.Option("-o", metavar="DIR", help="Folder for the profile.")],
) -> int:
    """Turn FlashRL's profile.pt, a pickle, into a profile. Nothing in the pickle is run."""
    from appliance.profile.command import run_convert

    return run_convert(file, output=output)


@app.command()
def compare(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A comparison: a file, or the name of a shipped one.")],
    results: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Results of another machine, NAME.results.jsonl: its runs are not repeated."),
    ] = None,
    json_mode: JsonOption = False,
) -> int:
    """Train one recipe under several settings and seeds, with a table and a page. Started again, it continues."""
    from appliance.compare.command import run_compare

    return run_compare(file, json_mode=json_mode, results_file=results)


@app.command(hidden=True)
def health() -> int:
    """Print what a container's health check asks for: one line, exit code 0 or 1."""
    from appliance.container.health import look_at_container

    found = look_at_container()
    console.show(f"{'healthy' if found.is_healthy else 'unhealthy'}: {found.text}")
    return 0 if found.is_healthy else 1


@app.command()
def join(
    head: Annotated[str, typer.Option(metavar="HOST[:PORT]", help="The host that runs `appliance train`.")],
    token_file: Annotated[
        Path, typer.Option(help="File with the head's token (default: in the folder of the runs, which all share).")
    ] = RUN_ROOT / ".cluster-token",
    gpus: Annotated[
        int | None, typer.Option(min=1, help="GPUs that this node offers (default: all); on a CPU ranks (default: 1).")
    ] = None,
    port: Annotated[
        int, typer.Option(min=1024, max=LARGEST_BASE, help="First of this node's ports, see docs/cluster.md.")
    ] = DEFAULT_BASE,
    node_address: Annotated[str | None, typer.Option(help="Address where other nodes reach this one.")] = None,
    wait_s: Annotated[float, typer.Option("--wait", min=1, help="Seconds that the head may take to appear.")] = 900.0,
) -> int:
    """Make this host a worker node of another host's training, until that ends."""
    from appliance.cluster.join import join_head

    return join_head(head, token_file=token_file, gpus=gpus, port=port, node_address=node_address, wait_s=wait_s)


@app.command()
def status(run: RunArgument, json_mode: JsonOption = False) -> None:
    """Show where a run is."""
    from appliance.report.summary import print_status

    print_status(run, run_root=RUN_ROOT, json_mode=json_mode)


@app.command()
def logs(
    run: RunArgument,
    which: Annotated[
        str | None, typer.Option(help="Show one log alone: prepare, profile, train, or stacks after a stall.")
    ] = None,
    attempt: Annotated[int | None, typer.Option(min=1, help="Number of the attempt (default: the newest).")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Show more as it comes, until the run ends.")] = False,
) -> None:
    """Show the logs of a run's newest attempt."""
    from appliance.report.logs import print_logs

    print_logs(run, run_root=RUN_ROOT, which=which, attempt=attempt, follow=follow)


@app.command()
def report(
    run: RunArgument,
    output: Annotated[
        Path | None, typer.Option("-o", metavar="FILE", help="File to write instead of RUN/report.html.")
    ] = None,
) -> None:
    """Write a run's page, one HTML file that needs nothing else, and print its path."""
    from appliance.report.page import print_report

    print_report(run, run_root=RUN_ROOT, output=output)


@app.command()
def export(
    run: RunArgument,
    output: Annotated[Path, typer.Option("-o", metavar="DIR", help="A new folder for the model.")],
    step: Annotated[int | None, typer.Option(min=1, help="Step of the checkpoint (default: the newest).")] = None,
    adapter: Annotated[bool, typer.Option("--adapter", help="Write LoRA's adapter alone, for PEFT.")] = False,
) -> int:
    """Write the trained model of a checkpoint, for plain transformers and plain vLLM."""
    from appliance.launch.command import run_export

    return run_export(run, run_root=RUN_ROOT, step=step, output=output, adapter=adapter)


@app.command()
def schema() -> None:
    """Print the JSON schema of a recipe, for editors."""
    import json

    from appliance.recipe.schema import Recipe

    console.out(json.dumps(Recipe.model_json_schema(), indent=2))


@app.command()
def version(json_mode: JsonOption = False) -> None:
    """Print the versions of this program and of what it drives."""
    import json

    from appliance.plan.build import installed_versions
    from appliance.record.attestations import fingerprint

    versions = installed_versions()
    if json_mode:
        console.out(json.dumps({"schema_version": 1, **versions, "fingerprint": fingerprint()}, indent=2))
    else:
        console.out("\n".join(f"{name} {found or 'not installed'}" for name, found in versions.items()))


app.add_typer(data, name="data", cls=_DataCommands)


@data.command("preview")
def data_preview(
    recipe: RecipeArgument,
    sets: SetOption = None,
    answers: Annotated[
        int,
        typer.Option(
            min=0, metavar="N", help="Number of problems that the untrained model answers, each shown with its rewards."
        ),
    ] = 0,
    json_mode: JsonOption = False,
) -> None:
    """Show two prompts as the model will really read them, and what was left out.

    With --answers N it shows N prompts, each with an answer of the model as it is before any training, and what your
    rewards give for it. The model is fetched or made first, if it is not here, and kept for `train`.
    """
    from appliance.launch.data import preview

    preview(_load(recipe, sets), json_mode=json_mode, answers=answers)


@data.command(_ANY_DATA)
def data_files(
    context: typer.Context,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="Folder for the files.")],
    source: Annotated[
        list[str] | None,
        typer.Option("--from", metavar="FILE", help="Read this file, not the hub; one for each file that is made."),
    ] = None,
) -> None:
    """Make the files of a data set: dapo-math-17k, aime-2024 or gsm8k.

    They are parquet in verl's schema, with each problem once. Files that are there already are left alone.
    """
    from appliance.launch.data import make_data

    make_data(context.info_name or "", folder=output, sources=tuple(source or ()))


app.add_typer(recipes, name="recipes")


@recipes.command("ls")
def recipes_ls() -> None:
    """List the shipped recipes, one a line, with what they do."""
    from appliance.recipe import library

    console.out(console.table((name, library.summary(name)) for name in library.names()))


@recipes.command("show")
def recipes_show(name: RecipeArgument) -> None:
    """Print the text of a recipe."""
    from appliance.recipe import library

    console.out(library.text(name).rstrip("\n"))


@recipes.command("cp")
def recipes_cp(name: RecipeArgument, target: Annotated[str, typer.Argument(help="A new file, or a folder.")]) -> None:
    """Copy a recipe to start from. Overwrites nothing."""
    from appliance.recipe import library

    if target.endswith(("/", "/.")) and not os.path.isdir(target):  # a Path has neither
        raise RecipeError([fault((target,), "no such folder", "name an existing folder, or a file")])
    console.out(str(library.copy(name, target=Path(target))))


def _load(recipe: str, sets: list[str] | None) -> Recipe:
    from appliance.recipe.load import load_recipe

    return load_recipe(recipe, sets=sets or ())


def _load_judged(recipe: str, sets: list[str] | None, *, for_this_host: bool = True) -> Recipe:
    from appliance.preflight.report import load_judged

    return load_judged(recipe, sets=sets or (), for_this_host=for_this_host)


def _schemes(option: str, text: str, *, several: bool = True) -> tuple[Scheme, ...]:
    from appliance.terms.schemes import Scheme

    names, legal = [each.strip() for each in text.split(",")] if several else [text], [str(each) for each in Scheme]
    hint = f"use {'' if several else 'one of '}{', '.join(f'`{each}`' for each in legal)}"
    unknown = [fault((option,), f"unknown value `{name}`", hint) for name in names if name not in legal]
    if unknown:
        raise RecipeError(unknown)
    return tuple(Scheme(name) for name in names)


def main() -> None:
    """Run the program, `appliance` or `python -m appliance`; end the process with an exit code of errors.py."""
    from appliance.signals import report_interruptions

    console.open_closed()
    try:
        with report_interruptions():
            app()
    except Exception as error:  # the boundary: an error of ours, a full disk behind stdout, or our own fault
        sys.exit(_report(error))
    finally:
        console.drop_unwritten()


def _is_of_library(error: Exception) -> bool:
    """Tell whether a library that draws help raised the error, because it could not write."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    return frame is not None and frame.tb_frame.f_globals["__name__"].partition(".")[0] in ("rich", "typer", "click")


def _report(error: Exception) -> int:
    """Print the error, with its traceback where --debug asks for one. Returns the exit code."""
    if "--debug" in sys.argv[1:]:
        import traceback

        console.say("".join(traceback.format_exception(error)).rstrip())
    code = ApplianceError.exit_code
    if isinstance(error, ApplianceError):
        code, problems = error.exit_code, [(error.message, error.hint)]
        if isinstance(error, RecipeError):
            problems = error.shown
    elif isinstance(error, console.StdoutError):
        code = error.exit_code
        problems = [(f"stdout: cannot be written: {error.strerror}", "free some space, or send it elsewhere")]
    elif isinstance(error, OSError) and _is_of_library(error):
        return _report(console.StdoutError(error.errno, error.strerror))
    else:
        import tempfile
        import traceback

        with tempfile.NamedTemporaryFile("w", prefix="appliance-error-", suffix=".txt", delete=False) as file:
            traceback.print_exception(error, file=file)
        hint = f"this is our own fault, please report it with {file.name}"
        problems = [(f"{type(error).__name__}: {error}", hint)]
    for message, hint in problems:
        console.say(f"error: {message}")
        if hint:
            console.say(f"hint: {hint}")
    return code
