"""The commands around a profile: make one, write the configuration of an engine, take over a donor's or FlashRL's. The
launcher's side: it imports no torch, reads no pickle, finds what the cache has, and leaves the rest to children."""

from __future__ import annotations

import os
import os.path
import subprocess
import tempfile
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from rich.progress import Progress

from appliance import console
from appliance.errors import RecipeError
from appliance.finding import Severity, fault
from appliance.launch.outcome import Child
from appliance.launch.side_job import (
    OF_A_PROFILE,
    OF_THE_DATA,
    OF_THE_MODEL,
    examine_for,
    folder_elsewhere,
    make_inputs,
    new_folder,
    run_child,
    work_folder,
)
from appliance.launch.train import Stage
from appliance.plan.engines import PROFILE_FOLDER
from appliance.plan.model_shape import model_shape
from appliance.preflight.inputs import stored_result
from appliance.preflight.mismatch import expected_of, judge_mismatch, layer_name
from appliance.preflight.probes import read_host
from appliance.preflight.report import plan_in
from appliance.processes import module_argv
from appliance.profile.job import (
    PROFILES_FOLDER,
    ProfileJob,
    find_known_profile,
    find_profile,
    job_of_plan,
    job_of_run,
    model_hash,
)
from appliance.profile.uaq import SCALING
from appliance.quant.files import (
    CONFIG_FILE,
    PROFILE_FILE,
    engine_named,
    is_by_own_samples,
    place_profile,
    read_file_header,
    write_config,
)
from appliance.recipe.schema import Recipe
from appliance.recipe.text import path_problem
from appliance.record.events import EVENTS_FILE, Tail, append_event, parse_event
from appliance.record.plan import RunPlan
from appliance.terms.counts import counted
from appliance.terms.environment import THREADS_VARIABLE
from appliance.terms.schemes import PROFILED, Scheme
from appliance.terms.settings import Quantisation

CHILD_MODULE = "appliance.profile.child"
_COMMAND = "profile"
_WORST_LAYERS = 8
_DONOR = "flashrl_compat.donor"
_READER, _WRITER = "flashrl_compat.unpickle", "flashrl_compat.profile_file"  # of FlashRL's file, and of what was in it
_REFUSED = RecipeError.exit_code  # of a child that did not like the file
_READER_TIMEOUT_S = 300.0
_HINT = "nothing in the file was run; give the profile.pt that `flashrl profile --fn int8` wrote"


def run_profile(recipe: Recipe, *, output: Path | None) -> int:
    """Make the recipe's profile, or find it, and show it. output: a folder; None leaves it in the cache. Raises
    RecipeError for a scheme without a profile, PreflightError, EngineError and NumericsError as the child does."""
    with work_folder(recipe.cluster.run_dir, command=_COMMAND) as folder:
        plan, host = plan_in(folder, recipe)
        if plan.profile is None:
            message = f"`{plan.rollout.scheme}` has no profile"
            hint = f"use {' or '.join(f'`{each}`' for each in PROFILED)}, and quantization.profile `auto`"
            raise RecipeError([fault(("rollout.scheme",), message, hint)])
        examine_for((plan,), recipe=recipe, host=host, about=OF_THE_MODEL | OF_THE_DATA | OF_A_PROFILE)
        with new_folder(output, option="-o") if output else nullcontext():
            target = _make(plan, output=output)
            if output or not plan.profile.source:  # a folder of the user's is only read
                _write_config(plan, profile=target, path=target / CONFIG_FILE)
        _show(target, model="" if plan.profile.source else plan.weights.name_or_path)
    return 0


def run_setup(recipe: Recipe, *, output: Path) -> int:
    """Write the YAML file that `FLASHRL_CONFIG` takes, with a profile beside it where the scheme has one. Overwrites
    nothing: raises RecipeError for an output that is there, PreflightError for one that cannot be written."""
    beside = output.parent / f"{output.stem}-profile"  # unlike with_name it takes `.`, which is then there already
    with work_folder(recipe.cluster.run_dir, command="setup") as folder:
        plan, host = plan_in(folder, recipe)
        _refuse_existing(output, *((beside,) if plan.profile else ()))
        examine_for((plan,), recipe=recipe, host=host, about=OF_THE_MODEL | OF_THE_DATA | OF_A_PROFILE)
        of_its_own = new_folder(beside, option="-o") if plan.profile else nullcontext()
        with new_folder(output.absolute().parent, option="-o"), of_its_own:
            profile = None
            if plan.profile is not None:
                profile = _make(plan, output=beside)
            else:
                make_inputs(plan, command="setup")
            _write_config(plan, profile=profile, path=output)
    console.say(f"FLASHRL_CONFIG={output} serves `{plan.weights.name_or_path}` as the recipe's rollouts are served")
    console.out(str(output))
    return 0


def run_donor(*, model: str, quantized: Path, scheme: Scheme, output: Path) -> int:
    """Make a profile of the scales of a W8A8 checkpoint of the same model: FlashRL's form. Raises RecipeError when the
    two checkpoints are no pair."""
    faults = [
        fault((f"{option} {folder}",), "not a folder with config.json", "give a checkpoint's folder")
        for option, folder in (("--model", Path(model)), ("--quantized", quantized))
        if not os.path.isfile(folder / "config.json")
    ]
    if faults:
        raise RecipeError(faults)
    with new_folder(output, option="-o"), folder_elsewhere(command=_COMMAND) as folder:
        job = ProfileJob(
            model=str(Path(model).absolute()),
            scheme=scheme,
            cache_dir=str(folder / ".cache"),
            target=str(output.absolute()),
            report_dir=str(folder),
            donor=str(quantized.absolute()),
        )
        _run(job, env={})
    settings = Quantisation(scheme=scheme, profile=str(output.absolute()))
    write_config(output / CONFIG_FILE, [settings], model=job.model)
    _show(output)
    return 0


def run_convert(file: Path, *, output: Path) -> int:
    """Write `output/profile.safetensors`. Raises RecipeError for a file that is not FlashRL's, or that wants to run."""
    if not os.path.isfile(file):
        raise RecipeError([fault((str(file),), "no such file", "give FlashRL's profile.pt")])
    with new_folder(output, option="-o"), tempfile.TemporaryDirectory(prefix="appliance-convert-") as folder:
        scales = Path(folder) / "scales.safetensors"
        _read_apart(file, scales=scales, room=Path(folder) / "room")
        code, lines = _run_plain([_WRITER, str(scales), str(file), str(output)])
        if code:
            shown = lines if code == _REFUSED else lines[-1:]
            raise RecipeError([fault((str(file),), line.removeprefix(f"{file}: ")) for line in shown])
    _show(output)
    return 0


def _read_apart(file: Path, *, scales: Path, room: Path) -> None:
    """Write the pickle as safetensors; a process without rights reads it."""
    room.mkdir()
    try:
        command = [_READER, str(file), str(scales), str(room)]
        code, lines = _run_plain(command, env=reader_environment(room), timeout=_READER_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise RecipeError([fault((str(file),), f"not read within {_READER_TIMEOUT_S:.0f} s", _HINT)]) from error
    if code == _REFUSED and scales.is_file():
        raise RecipeError([fault((str(file),), f"refused: {scales.read_text(errors='replace')[:400]}", _HINT)])
    if code:
        raise RecipeError([fault((str(file),), f"refused: its reader ended: {lines[-1][:400]}", _HINT)])


def _run_plain(module: list[str], **how: Any) -> tuple[int, list[str]]:
    """Return (exit code, what the child printed)."""
    command = module_argv(*module)
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False, **how)
    return done.returncode, done.stderr.decode(errors="replace").strip().splitlines() or [f"code {done.returncode}"]


def reader_environment(room: Path) -> dict[str, str]:
    """Return the environment of the reader. One thread: Linux gives no user a network namespace for a process with
    more."""
    kept = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
    return {**kept, "TMPDIR": str(room), "HOME": str(room), THREADS_VARIABLE: "1"}


def profile_child(plan: RunPlan) -> Child | None:
    """Return the child of `train` that makes the plan's profile; None where none is needed or the run's folder has it.

    Call it when model and data are made, and `finish_profile` after the child. Raises EngineError for a folder named
    in the recipe that has no profile.
    """
    if plan.profile is None or is_profiled(plan):
        return None
    if plan.profile.source:
        _take(Path(plan.profile.source), plan=plan)
        return None
    cached = find_profile(job_of_run(plan))
    if cached is not None:
        place_profile(cached, target=Path(plan.profile.folder))
        append_event(
            Path(plan.run_dir), kind="note", what="the model's profile was found in the cache", why=str(cached)
        )
        return None
    argv = module_argv(CHILD_MODULE, "--plan", str(Path(plan.run_dir) / "plan.json"))
    return Child(_COMMAND, "profiling", argv, default_code=4)


def made_before(plan: RunPlan) -> Path | None:
    """Find the folder in the cache with the profile of an earlier run, which a run of this plan would use; else
    None."""
    if plan.profile is None or plan.profile.source or not os.path.isdir(Path(plan.cache_dir) / PROFILES_FOLDER):
        return None
    try:
        return find_known_profile(job_of_run(plan))
    except OSError:  # a file that cannot be read is a separate finding
        return None


def finish_profile(plan: RunPlan) -> None:
    """Write `profile/quantization.yaml` in the run's folder, whatever the scheme, and note what the profile predicts.
    Raises EngineError where the plan has a profile and the folder has none."""
    folder = Path(plan.run_dir) / PROFILE_FOLDER
    folder.mkdir(exist_ok=True)
    is_resumed = (folder / CONFIG_FILE).is_file()  # preflight has reported it for the run's own profile
    _write_config(plan, profile=folder if plan.profile else None, path=folder / CONFIG_FILE)
    if plan.profile is not None and not is_resumed:
        _note_prediction(plan, folder=folder)


def _note_prediction(plan: RunPlan, *, folder: Path) -> None:
    """Report what the profile has chosen and predicts, before the first step. Where preflight has reported it already,
    as for a profile that is named, it is not reported again."""
    run_dir = Path(plan.run_dir)
    stored = stored_result(plan, host=read_host(run_dir))
    if plan.profile is None or plan.profile.source:
        return
    for reason in _not_smoothed(read_file_header(folder)):
        append_event(run_dir, kind="note", what=f"not smoothed: {reason}", why="quantization.smoothing")
    shape = model_shape(plan.model, weights=plan.weights)
    for finding in judge_mismatch(plan, expected=expected_of(folder), shape=shape, stored=stored):
        if finding.severity is Severity.WARNING:
            append_event(run_dir, kind="note", what=f"{finding.message}: {finding.remedy}", why=finding.code)
        else:
            append_event(run_dir, kind="note", what=finding.message, why=finding.place)


def is_profiled(plan: RunPlan) -> bool:
    """Tell whether the run's folder has its profile, or needs none."""
    return plan.profile is None or (Path(plan.profile.folder) / PROFILE_FILE).is_file()


PROFILING = Stage(child=profile_child, is_done=is_profiled, finish=finish_profile)
BEFORE_TRAINING = (SCALING, PROFILING)  # of a run, in this order: the profile is of the model that is trained


def _take(source: Path, *, plan: RunPlan) -> None:
    """Copy the profile that the recipe names. Its smoothing leaves any model's function as it is, so that one of
    another checkpoint of the same shapes is taken, with a note."""
    assert plan.profile is not None
    header, model = read_file_header(source), Path(plan.weights.name_or_path)
    place_profile(source if source.is_dir() else source.parent, target=Path(plan.profile.folder))
    if header["model_hash"] and (model / "config.json").is_file():
        is_the_models = header["model_hash"] == model_hash(model, cache_dir=Path(plan.cache_dir))
    else:
        is_the_models = header["model"] == plan.weights.name_or_path
    if not is_the_models:
        what = f"the profile {source} was made of {header['model'] or 'an unnamed model'}"
        append_event(Path(plan.run_dir), kind="note", what=what, why="quantization.profile")


def _refuse_existing(*paths: Path) -> None:
    judged = {path: path_problem(str(path.absolute())) for path in paths}
    if any(judged.values()):
        raise RecipeError(
            [fault(("-o",), f"{path}: {why}", "give another name") for path, why in judged.items() if why]
        )
    existing = [path for path in paths if os.path.lexists(path)]  # unlike Path.exists it takes any text
    if existing:
        hint = "name a new file, or remove what is there"
        raise RecipeError(
            [fault(("-o",), f"{path} is there already and is not overwritten", hint) for path in existing]
        )


def _make(plan: RunPlan, *, output: Path | None) -> Path:
    """Return the folder with the plan's profile; output None: the cache's."""
    assert plan.profile is not None
    if plan.profile.source:
        source = Path(plan.profile.source)
        read_file_header(source)
        if output is not None:
            place_profile(source, target=output)
        return output or source
    make_inputs(plan, command=_COMMAND)
    job = job_of_plan(plan, target=str(output.absolute()) if output else "")
    folder = find_profile(job)
    if folder is None:
        folder = _run(job, env=dict(plan.env))
    else:
        console.say("found in the cache: nothing to do")
        if output is not None:
            place_profile(folder, target=output)
    return output or folder


def _write_config(plan: RunPlan, *, profile: Path | None, path: Path) -> None:
    """Write one entry for each replica; the layers that the profile keeps in BF16 are in `ignore`."""
    replicas = [engine_named(quantisation, profile=profile) for quantisation in plan.engines]
    write_config(path, replicas, model=plan.weights.name_or_path)


def _run(job: ProfileJob, *, env: dict[str, str]) -> Path:
    """Run the child, with a bar, and return the folder where it left the profile. Raises the error that it reported."""
    folder = Path(job.report_dir)
    left: list[Path] = []
    (folder / "job.json").write_text(job.model_dump_json(indent=2))
    tail = Tail(folder / EVENTS_FILE)
    with Progress(console=console.err_console(), disable=not console.is_live(console.err_console())) as bar:
        task = bar.add_task("profiling", total=None)

        def tick() -> None:
            for line in tail.read():
                event = parse_event(line)
                if event is not None and event.kind == "progress" and event.what == _COMMAND:
                    bar.update(task, completed=event.done, total=event.total)
                    if bar.disable:
                        console.say(f"profiling: {event.note}")
                elif event is not None and event.kind == _COMMAND:
                    left.append(Path(event.what))

        job_file = str(folder / "job.json")
        module = [_DONOR, job_file] if job.donor else [CHILD_MODULE, "--job", job_file]
        run_child(module, command=_COMMAND, folder=folder, env=env, tick=tick)
    return left[-1]


def _show(folder: Path, *, model: str = "") -> None:
    for line in table(read_file_header(folder), folder=str(folder), model=model):
        console.show(line)


def table(header: dict[str, Any], *, folder: str, model: str = "") -> list[str]:
    """Render a profile as lines. header: of `profile.safetensors`.  folder: where the files lie.  model: the model's
    name here; empty: the name that it had where the profile was made."""
    origin = f"{model or header['model'] or 'a model'}{'@' + header['revision'] if header['revision'] else ''}"
    rows = [("smoothing", _smoothing(header))]
    if reasons := _not_smoothed(header):
        rows.append(("not smoothed", "; ".join(reasons)))
    if header["layers"]:
        rows.append(("kept in BF16", _describe_bf16_layers(header)))
    if predicted := header["predicted"]:
        numbers = f"KL {predicted['kl']:.1e} nats per token"
        if before := header.get("predicted_all"):
            numbers += f"; {before['kl']:.1e} with all layers quantised"
        basis = f"{counted(predicted['tokens'], 'token')}{' of its own' if is_by_own_samples(header) else ''}"
        rows.append(("mismatch", f"predicted against BF16, over {basis}: {numbers}"))
    if memory := header["memory"]:
        parts = (memory["peak_bytes"], memory["largest_layer_bytes"], memory["model_bytes"])
        peak, layer, whole = (f"{each / 2**20:.1f} MiB" for each in parts)
        rows.append(("memory", f"{peak} of weights at the most; the largest layer has {layer}, the model {whole}"))
    return [
        f"profile of {origin} for {header['scheme']} ({header['kind']})",
        "",
        *([*_errors(header["layers"]), ""] if header["layers"] else []),
        *console.table([*rows, ("files", folder)]).splitlines(),
    ]


def _errors(layers: list[dict[str, Any]]) -> list[str]:
    worst = sorted(layers, key=lambda each: -each["output_error"])[:_WORST_LAYERS]
    rows = [
        (
            layer_name(layer["linears"]),
            *(f"{layer[error]:.2%}" for error in ("weight_error", "output_error", "output_error_plain")),
            "" if layer.get("contribution") is None else f"{layer['contribution']:.1e}",
            "kept in BF16" if layer["stays_in_bf16"] else "",
        )
        for layer in worst
    ]
    head = ("layers with the largest error", "weights", "outputs", "not smoothed", "mismatch", "")
    return console.table(rows, head=head, numbers=range(1, 5)).splitlines()


def _smoothing(header: dict[str, Any]) -> str:
    strength = header["settings"]["strength"]
    if header["kind"] != "calibrated":
        return f"{_sources(header)}, as the donor has it, to the nearest powers of two"
    if not strength:
        return "off"
    rest = "smoothing others would gain nothing"
    if header.get("not_smoothed"):
        rest = "smoothing others would gain nothing or change what the model computes"
    extent = f"each with every layer that reads it; {rest}"
    return f"strength {strength:g}: {_sources(header)}, {extent}"


def _not_smoothed(header: dict[str, Any]) -> list[str]:
    """List what smoothing cannot divide, as `q_norm, k_norm: why`, by the names that it has in a decoder layer."""
    names_by_reason: dict[str, dict[str, None]] = {}
    for layer in header.get("not_smoothed", ()):
        name = layer["source"].rpartition(".")[2]
        names_by_reason.setdefault(layer["why"], {})[name] = None
    return [f"{', '.join(names)}: {why}" for why, names in names_by_reason.items()]


def _sources(header: dict[str, Any]) -> str:
    """Count what is divided: `4 norms, 2 up_proj, 1 v_proj`."""
    leaves = (group["source"].removesuffix(".weight").rpartition(".")[2] for group in header["smoothing"])
    numbers = Counter("norm" if "norm" in leaf else leaf for leaf in leaves)
    norms = numbers.pop("norm", 0)
    others = (f"{number} {leaf}" for leaf, number in sorted(numbers.items()))
    return ", ".join([counted(norms, "norm"), *others])


def _describe_bf16_layers(header: dict[str, Any]) -> str:
    in_bf16, settings = header["suggested_ignore"], header["settings"]
    if settings["mismatch_budget"] is not None:
        why = f"for a mismatch of {settings['mismatch_budget']:g} nats, or by `ignore`"
    elif settings["error_budget"] is not None:  # of an earlier version
        why = f"for an error of at most {settings['error_budget']:g} in a layer's outputs, or by `ignore`"
    else:
        why = "by `ignore`; no mismatch budget is set"
    return f"{', '.join(in_bf16) if in_bf16 else 'none'} ({why})"
