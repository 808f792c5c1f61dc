"""`appliance train --in-container`: start the image, follow it, stop it, through the `docker` package.

The current folder is mounted at its own path and is the container's own current folder, so that every relative path of
a recipe means the same inside, and the run's folder lies where it would without a container.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from types import FrameType

import docker
from docker.errors import APIError, DockerException, ImageNotFound
from docker.models.containers import Container
from docker.types import DeviceRequest, Mount, Ulimit

from appliance import console, hub
from appliance.errors import PreflightError, RecipeError, refuse_faults
from appliance.finding import Finding, Severity, fault
from appliance.launch.command import new_run_dir
from appliance.launch.side_job import stop_on_errors
from appliance.preflight.report import examine, print_plan
from appliance.recipe import library
from appliance.recipe.load import files_of
from appliance.recipe.rules import PATHS
from appliance.recipe.schema import Recipe
from appliance.recipe.text import full_path
from appliance.record.code import code_of
from appliance.record.plan import RunPlan
from appliance.record.session import RUN_FILE, cannot_write
from appliance.signals import handle_signals
from appliance.tasks.library import is_from_hub
from appliance.terms.environment import HUB_TOKEN_VARIABLE, RUNNER_VARIABLE

IMAGE_NAME = "flashrl-appliance"
GRACE_S = 900  # a run may save before it stops
_CACHE_VOLUME = "flashrl-cache"  # of one user: what one writes there, another may read and not change
_OF_THE_IMAGE = frozenset(  # findings of the program inside, which looks again
    {
        *("python-version", "missing-library", "log-backend", "flash-attention", "version", "patch", "model-package"),
        *("shared-memory", "open-files", "threads"),
    }
)
_OWN_FOLDERS = ("/opt/venv", "/opt/appliance", "/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc", "/cache")
_TOKEN = "/run/secrets/hf_token"  # of the hub, inside: as compose has it
_GPU_LIMITS = [  # NCCL pins memory and opens many files; a CPU run needs no more than an engine gives by itself
    Ulimit(name=name, soft=limit, hard=limit)
    for name, limit in (("memlock", -1), ("stack", 67108864), ("nofile", 65535))
]
_TEMPORARY = "/tmp"  # its own is in memory; a folder below it is taken


@dataclass(frozen=True)
class ContainerSpec:
    """Settings of a container, as `docker run` would get them."""

    image: str
    argv: tuple[str, ...]
    folder: str
    user: str
    gpus: bool
    shm_bytes: int
    folders: tuple[tuple[str, bool], ...] = ()
    """Mounts, each at its own path: (folder or file, whether it is read-only)."""
    network: str = ""  # empty: Docker's own
    token: str = ""
    """File with the hub's token, where the run asks the hub and there is such a file; or empty."""
    variables: tuple[tuple[str, str], ...] = ()
    """Variables of this process that the program inside gets."""

    def mounts(self) -> list[Mount]:
        binds = [Mount(path, path, type="bind", read_only=read_only) for path, read_only in self.folders]
        if self.token:
            binds.append(Mount(_TOKEN, self.token, type="bind", read_only=True))
        return [*binds, Mount("/cache", f"{_CACHE_VOLUME}-{self.user.partition(':')[0]}", type="volume")]


def container_spec(
    plan: RunPlan,
    argv: Sequence[str],
    *,
    typed: str,
    image: str | None,
    folder: Path,
    user: str,
    resume: str = "never",
) -> ContainerSpec:
    """Make the settings of the container of a training. argv: of the program inside.  typed: the recipe's name or file.
    image: None: the one that the device needs.  folder: the current one, absolute.  resume: as `train` has it. Raises
    RecipeError where the folder cannot be mounted: it would hide the image's own."""
    if _hides_the_images_own(folder):
        hint = "start it from another folder, such as the one with your recipe"
        raise RecipeError([fault(("--in-container",), f"the current folder {folder} would hide the image's own", hint)])
    profile = plan.profile.source if plan.profile else ""
    weights = plan.weights
    model = weights.gguf or ("" if weights.is_cached or weights.hub_name else weights.name_or_path)
    code = [Path(each.path) for each in code_of(plan)]
    read = [Path(each) for each in (model, *plan.task.data_files, profile) if each.startswith("/")]
    read += [*(each.parent for each in code), *code]  # it may import what lies beside it
    if Path(model).parent.name == "snapshots" and (blobs := Path(model).parent.with_name("blobs")).is_dir():
        read.append(blobs)  # of the hub's cache: a snapshot is a folder of links to them
    if (recipe := Path(typed)).is_file() and library.find(typed) == recipe:  # no shipped one, which the image has
        extended = [each for each in files_of(recipe) if each.parent != library.folder()]
        read += [recipe.absolute().parent, *(each.absolute() for each in extended)]
    written = [Path(plan.run_dir).parent, *_holds_the_run(resume)]
    if not plan.cluster.has_own_ray:
        token = Path(plan.cluster.token_file)
        if token.exists():
            read.append(token)  # and nothing that lies beside it
        else:
            written.append(token.parent)  # the head makes it
    wanted = [*((each, False) for each in written), *((each, True) for each in read)]
    folders = {str(folder): False}  # path: read-only
    for path, read_only in wanted:
        typed_as = Path("/" + os.path.normpath(path).lstrip("/"))  # to pathlib `//etc` lies elsewhere than `/etc`
        for place in (typed_as, Path(os.path.realpath(path))):  # what a mount has may be a link to elsewhere
            if any(place.is_relative_to(each) and (read_only or not only) for each, only in folders.items()):
                continue
            if _hides_the_images_own(place):
                hint = "use folders of their own for runs, models and data"
                raise RecipeError([fault(("--in-container",), f"{place} would hide the image's own files", hint)])
            folders[str(place)] = read_only
            break
    is_cpu = plan.is_cpu
    return ContainerSpec(
        image=image or f"{IMAGE_NAME}:{'cpu' if is_cpu else 'gpu'}",
        argv=tuple(argv),
        folder=str(folder),
        user=user,
        gpus=not is_cpu,
        shm_bytes=(2 if is_cpu else 32) << 30,
        folders=tuple(folders.items()),
        network="" if plan.cluster.has_own_ray else "host",  # other hosts reach Ray on its ports
        token=hub.token_file() if _asks_hub(plan) else "",
        variables=tuple(
            (name, value)
            for name, value in sorted(os.environ.items())
            if name == RUNNER_VARIABLE
            or (not plan.cluster.has_own_ray and name.startswith("NCCL_"))  # which names the host's own network
        ),
    )


def _holds_the_run(resume: str) -> list[Path]:
    """Return the folder of the run that `--resume` names, or one of whose checkpoints it names; nothing where it names
    none, which is said inside."""
    path = full_path(resume)
    found = (each for each in (path, *path.parents[:2]) if os.path.isfile(each / RUN_FILE))
    return [each.parent for each in itertools.islice(found, 1)] if resume not in ("auto", "never") else []


def _asks_hub(plan: RunPlan) -> bool:
    return bool(plan.weights.hub_name) or is_from_hub(plan.task)


def _hides_the_images_own(path: Path) -> bool:
    """Tell whether a mount at `path` would lie over the image's own files, or inside of them. path: absolute."""
    inside = any(path.is_relative_to(own) for own in _OWN_FOLDERS)
    return inside or any(Path(own).is_relative_to(path) for own in (*_OWN_FOLDERS, _TEMPORARY))


def run_in_container(spec: ContainerSpec) -> int:
    """Start one container, follow it to its end and return the program's exit code.

    The first SIGINT, SIGTERM or SIGHUP stops it as `docker stop` does, with the time that a save takes; the second
    kills it. Raises PreflightError where no engine answers, the image is missing, or the container cannot start.
    """
    client = _client()
    container = _start(client, spec)
    console.say(f"container {container.name} of {spec.image}")
    try:
        with _signals_stop(container) as heard:
            _follow(container, heard=heard)
            return int(container.wait()["StatusCode"])
    finally:
        container.remove(force=True, v=True)


def _client() -> docker.DockerClient:
    try:
        client = docker.from_env()
        client.ping()
    except DockerException as error:
        hint = "start Docker, or train without --in-container"
        raise PreflightError(f"no Docker engine answers: {error}", hint=hint) from error
    return client


def _start(client: docker.DockerClient, spec: ContainerSpec) -> Container:
    try:
        try:
            container = _created(client, spec)
        except ImageNotFound:
            if spec.image.startswith(f"{IMAGE_NAME}:"):
                flavour = "image-gpu" if spec.gpus else "image"
                hint = f"build it with `make {flavour}`"
                raise PreflightError(f"there is no image {spec.image}", hint=hint) from None
            console.say(f"fetching {spec.image}")
            client.images.pull(spec.image)
            container = _created(client, spec)
        try:
            container.start()
        except (APIError, SystemExit):  # the latter of a signal
            with suppress(APIError):
                container.remove(force=True, v=True)
            raise
    except APIError as error:
        raise PreflightError(f"the container does not start: {error.explanation or error}") from error
    return container


def _created(client: docker.DockerClient, spec: ContainerSpec) -> Container:
    return client.containers.create(
        spec.image,
        list(spec.argv),
        user=spec.user,
        working_dir=spec.folder,
        mounts=spec.mounts(),
        environment=dict(spec.variables) | ({HUB_TOKEN_VARIABLE: _TOKEN} if spec.token else {}),
        read_only=True,
        tmpfs={"/tmp": "exec,mode=1777"},
        shm_size=spec.shm_bytes,
        ulimits=_GPU_LIMITS if spec.gpus else [],
        cap_drop=["ALL"],
        security_opt=["no-new-privileges:true"],
        network_mode=spec.network or None,
        device_requests=[DeviceRequest(count=-1, capabilities=[["gpu"]])] if spec.gpus else None,
    )


def _follow(container: Container, *, heard: list[int]) -> None:
    """Print the container's stdout and stderr as ours, until it ends. A reader of stdout that goes away ends it, as it
    ends a run, but not after a signal; one of stderr never does."""
    for out, err in container.attach(stream=True, logs=True, demux=True):
        for stream, data in ((sys.stdout, out), (sys.stderr, err)):
            if data:
                try:
                    stream.buffer.write(data)
                    stream.flush()
                except OSError:
                    if stream is sys.stdout and not heard:
                        raise


@contextmanager
def _signals_stop(container: Container) -> Iterator[list[int]]:
    """Yield the list of the signals that came."""
    heard: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        heard.append(number)
        threading.Thread(target=end, args=(len(heard) > 1,), daemon=True).start()  # a handler must not wait

    def end(at_once: bool) -> None:
        with suppress(APIError):  # it ended by itself meanwhile
            container.kill() if at_once else container.stop(timeout=GRACE_S)

    with handle_signals(stop):
        yield heard


def findings_of_host(findings: Sequence[Finding]) -> list[Finding]:
    """Drop the findings about what the image brings."""
    return [each for each in findings if each.code not in _OF_THE_IMAGE]


def require_host(findings: Sequence[Finding]) -> None:
    """Say what this host itself lacks, leaving out what the image brings. Raises PreflightError."""
    stop_on_errors([each for each in findings_of_host(findings) if each.severity is Severity.ERROR])


def examine_and_train(
    recipe: Recipe, *, typed: str, name: str | None, resume: str, dry_run: bool, json_mode: bool, image: str | None
) -> int:
    """Examine a recipe on this host and train it in the image (`appliance train --in-container`). typed: the recipe's
    name or file.  Raises as the functions below and above. Rewards and tools are not asked here: the program inside
    asks them, the user's code runs in the container only."""
    # The name of a run that is resumed is judged inside: it has its folder already.
    run_dir = new_run_dir(recipe, name=name if resume == "never" else None)
    plan, _, findings = examine(recipe, run_dir=run_dir, ask_hub=True, run_code=False)
    refuse_faults(findings_of_host(findings))
    if dry_run and resume == "never":
        print_plan(plan, recipe=recipe, findings=findings_of_host(findings), json_mode=json_mode)
    elif dry_run:
        console.say("note: the plan of a run that is resumed is made in the container, and not shown by a dry run")
    require_host(findings)
    if dry_run:
        return 0
    return train_in_container(plan, recipe, typed=typed, arguments=sys.argv[1:], image=image, resume=resume)


def train_in_container(
    plan: RunPlan, recipe: Recipe, *, typed: str, arguments: Sequence[str], image: str | None, resume: str = "never"
) -> int:
    """Train in the image instead of here. typed: the recipe's name or file.  arguments: our own command line.  Raises
    as container_spec and run_in_container do, PreflightError where a folder for the run cannot be made."""
    folder, user = Path.cwd(), f"{os.getuid()}:0"  # files belong to who starts us; group 0 may write as the image lets
    argv = (*inner_argv(arguments), *expand_home(recipe))
    if resume.startswith("~"):
        argv += ("--resume", os.path.expanduser(resume))
    spec = container_spec(plan, argv, typed=typed, image=image, folder=folder, user=user, resume=resume)
    for written in (Path(each) for each, read_only in spec.folders if not read_only):
        try:
            written.mkdir(parents=True, exist_ok=True)  # Docker mounts what is there
        except OSError as error:
            raise cannot_write(written, error) from error
    if _asks_hub(plan) and hub.is_token_in_a_variable():
        to_file = "write it to a file (mode 0600), and set HF_TOKEN_PATH=FILE"
        instead = f"it uses the one in {spec.token}" if spec.token else to_file
        console.say(f"note: the container gets no token from a variable: {instead}")
    return run_in_container(spec)


def expand_home(recipe: Recipe) -> Iterator[str]:
    """Yield a `--set` for each path of the recipe that begins with `~`, written out as it is outside: inside `~` is
    another folder."""
    for key in PATHS:
        value = attrgetter(key)(recipe)
        if value and value.startswith("~"):
            yield from ("--set", f"{key}={json.dumps(os.path.expanduser(value))}")
    sets, rewards = recipe.task.val_sets, recipe.task.rewards
    if any((each.file or "").startswith("~") for each in sets.values()):
        files = {name: {"file": os.path.expanduser(each.file)} for name, each in sets.items() if each.file}
        yield from ("--set", f"task.val_sets={json.dumps(files)}")
    if any(each.name.startswith("~") for each in rewards):  # a list is replaced as a whole
        named = [each.model_dump(exclude_unset=True) | {"name": os.path.expanduser(each.name)} for each in rewards]
        yield from ("--set", f"task.rewards={json.dumps(named)}")


def inner_argv(arguments: Sequence[str]) -> tuple[str, ...]:
    """Return our own command line for the program inside, without the options that choose the container."""
    passed_on, skip = [], False
    for argument in arguments:
        if skip or argument == "--in-container" or argument.startswith("--image="):
            skip = False
        elif argument == "--image":
            skip = True
        else:
            passed_on.append(argument)
    return tuple(passed_on)
