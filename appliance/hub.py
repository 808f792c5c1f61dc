"""The hub: what its cache on this host has, whether it answers, which commit a revision is, downloads.

huggingface_hub does it, and is loaded only where a model or a data set of the hub is concerned: it brings a network
client. It reads its variables (HF_HOME, HF_HUB_CACHE, HF_ENDPOINT, HF_HUB_OFFLINE, HF_TOKEN_PATH, ...) once.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

MODEL_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")  # no pickles
REMOTE_CODE = "*.py"
_MAIN = "main"
_COMMIT = re.compile(r"[0-9a-f]{40}")
_CONFIG = "config.json"
_WEIGHTS = "*.safetensors"  # *.bin and *.pt are pickles
_MISTRALS = "consolidated"  # as in quant/headers.py
_CHAT_TEMPLATES = ("chat_template.jinja", "additional_chat_templates/default.jinja")
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")
_ANSWERS_WITHIN_S = 5


# The cache


def snapshot(name: str, *, commit: str) -> Path:
    """Return the folder of one commit of a model, whether it is there or not. Without links, as huggingface_hub gives
    paths."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    folder = repo_folder_name(repo_id=name, repo_type="model")
    return Path(constants.HF_HUB_CACHE).resolve() / folder / "snapshots" / commit


def cached_snapshot(name: str, *, revision: str = "") -> Path | None:
    """Find the folder of a branch, tag or commit as it was downloaded last, complete or not; None where there is none.
    revision: empty: `main`."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        config = try_to_load_from_cache(name, _CONFIG, revision=revision or _MAIN)
    except (HFValidationError, OSError, UnicodeDecodeError):  # no name on the hub can be this; not ours to read
        return None
    return snapshot(name, commit=Path(config).parent.name) if isinstance(config, str) else None


def is_commit(revision: str) -> bool:
    """Tell whether a revision is a whole commit, which never moves."""
    return _COMMIT.fullmatch(revision) is not None


def commit_in_cache(name: str, *, revision: str) -> str:
    """Return the commit that a branch or tag was when it was downloaded last; a commit is its own. Empty when there is
    none."""
    if is_commit(revision):
        return revision
    folder = cached_snapshot(name, revision=revision)
    return folder.name if folder is not None and is_commit(folder.name) else ""


def missing_parts(folder: Path) -> tuple[str, ...]:
    """List what a model's folder lacks: `config.json`, `weights`, `tokenizer`; empty when it is complete."""
    missing = [] if os.path.isfile(folder / _CONFIG) else [_CONFIG]
    if not weight_bytes(folder):
        missing.append("weights")
    if not any(os.path.isfile(folder / name) for name in _TOKENIZERS):
        missing.append("tokenizer")
    return tuple(missing)


def has_chat_template(folder: Path) -> bool:
    """Tell whether a model's tokenizer says how messages are put to it, in one of the places that transformers
    reads."""
    return any(os.path.isfile(folder / name) for name in _CHAT_TEMPLATES) or bool(_template_in_config(folder))


def chat_templates(folder: Path) -> list[str]:
    """Read the texts of a model's chat templates, wherever transformers reads them."""
    files = [folder / _CHAT_TEMPLATES[0], *folder.glob("additional_chat_templates/*.jinja")]
    texts = [file.read_text(encoding="utf-8", errors="replace") for file in files if os.path.isfile(file)]
    in_config = _template_in_config(folder)
    return [*texts, in_config if isinstance(in_config, str) else json.dumps(in_config)]


def _template_in_config(folder: Path) -> object:
    """Return the chat template in a tokenizer's configuration, or what it has in that place: old ones have a list of
    them."""
    try:
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return config.get("chat_template") if isinstance(config, dict) else None


def weight_bytes(folder: Path) -> int:
    """Compute the size of the files of weights in a folder; 0 when there are none, or this user may not look."""
    return sum(os.path.getsize(file) for file in weight_files(folder))


def weight_files(folder: Path) -> list[Path]:
    """List the files of weights in a folder, sorted; none where this user may not look."""
    found = folder.glob(_WEIGHTS) if os.path.isdir(folder) else ()  # Path.glob raises where this user may not look
    return sorted(file for file in found if os.path.isfile(file) and not file.name.startswith(_MISTRALS))


# Asking the hub


def is_offline() -> bool:
    """Tell whether the hub's own variable (HF_HUB_OFFLINE) forbids asking the hub."""
    from huggingface_hub import is_offline_mode

    return is_offline_mode()


def problem() -> str:
    """Return the reason why the hub does not answer, or an empty text. Any answer of the host counts."""
    from huggingface_hub import get_session

    code, why = _status(lambda: get_session().head(_endpoint(), timeout=_ANSWERS_WITHIN_S).status_code)
    return why or (f"{_endpoint()} answers {code}" if code in (403, 407) or code >= 500 else "")


def model_refusal(name: str, *, revision: str = "") -> str:
    """Return the reason why the hub, which answers, does not give a model's config.json to whoever asks from here, or
    an empty text."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    def ask() -> int:
        url = hf_hub_url(name, _CONFIG, revision=revision or _MAIN)
        get_hf_file_metadata(url, token=get_token() or False, timeout=_ANSWERS_WITHIN_S)
        return 200

    code, why = _status(ask)
    if code == 404:
        none_of_it = f", or no revision `{revision}` of it" if revision else ""
        return f"the hub has no model `{name}`{none_of_it}, or none with a config.json"
    if code in (401, 403):
        without = "HF_TOKEN is not set, and without a token nobody may"
        return f"`{name}`: {'the token here is not allowed to' if get_token() else without} read it"
    return why


def revision(name: str, *, requested: str = "") -> tuple[str, str]:
    """Return (commit, why there is none) of the model that loading `name` would take: the hub's, else the cache's.
    requested: a commit, which is its own, a tag or a branch; empty: `main`."""
    if is_commit(requested):
        return requested, ""
    commit, why = ("", "HF_HUB_OFFLINE is set") if is_offline() else _commit_on_hub(name, requested=requested)
    if commit:
        return commit, ""
    folder = cached_snapshot(name, revision=requested)
    return (folder.name, "") if folder is not None and not missing_parts(folder) else ("", why)


def data_commit(name: str) -> str:
    """Return the commit that `main` of a data set is on the hub now; empty where the hub does not say."""
    return "" if is_offline() else _commit_on_hub(name, kind="dataset")[0]


def _commit_on_hub(name: str, *, requested: str = "", kind: str = "model") -> tuple[str, str]:
    """Return (commit, why the hub gives none). kind: the hub's word for what it is."""
    from huggingface_hub import HfApi

    commits: list[str] = []

    def ask() -> int:
        info = HfApi().repo_info(name, repo_type=kind, revision=requested or None, timeout=_ANSWERS_WITHIN_S)
        commits.append(info.sha or "")
        return 200

    code, why = _status(ask)
    return (commits[0], "") if commits else ("", why or f"{_endpoint()} answers {code}")


def _status(ask: Callable[[], int]) -> tuple[int, str]:
    """Return (status of the hub's answer, why there is none). ask: asks it once, and may raise what huggingface_hub
    raises."""
    import httpx
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    if why := _token_problem():
        return 0, why
    try:
        return ask(), ""
    except HfHubHTTPError as error:
        return error.response.status_code, ""
    except HFValidationError as error:  # before any request
        return 0, str(error)
    except ValueError as error:  # its text may quote a header, and with it the token
        return 0, f"{_endpoint()} cannot be asked ({type(error).__name__})"
    except (OSError, httpx.HTTPError) as error:
        return 0, f"{_endpoint()} cannot be reached ({error})"


def _endpoint() -> str:
    from huggingface_hub import constants

    return constants.ENDPOINT


# The token


def get_token() -> str:
    """Return the token as huggingface_hub finds it: a variable, else the file that `hf auth login` writes. Empty where
    there is none."""
    import huggingface_hub

    try:
        return huggingface_hub.get_token() or ""
    except (OSError, UnicodeDecodeError):
        return ""


def is_token_in_a_variable() -> bool:
    return any(os.environ.get(name) for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"))


def token_file() -> str:
    """Return the file with the hub's token, absolute; empty where there is none."""
    from huggingface_hub import constants

    file = os.path.abspath(constants.HF_TOKEN_PATH)
    return file if os.path.isfile(file) else ""


def _token_problem() -> str:
    """Return the reason why the token cannot be sent, without a part of it: libraries quote such a header in their
    errors."""
    token = get_token()
    if token.isascii() and token.isprintable():
        return ""
    return "the hub's token (HF_TOKEN, or the file of `hf auth login`) has characters that no header can carry"


# Downloads


def download_model(name: str, *, revision: str, beat: Callable[[], None], with_code: bool = False) -> Path:
    """Download a model's snapshot into the cache and return its folder; what is there already is not fetched again.

    revision: commit, tag or branch, empty: the hub's `main`.  with_code: the Python files that come with it, too.
    beat: called as bytes arrive.
    Raises OSError (huggingface_hub's own errors are) when it is neither to be had nor whole in the cache.
    """
    import httpx
    from huggingface_hub import snapshot_download

    patterns = [*MODEL_FILES, *([REMOTE_CODE] if with_code else [])]
    ask = functools.partial(
        snapshot_download,
        name,
        revision=revision or None,
        allow_patterns=patterns,
        ignore_patterns=f"{_MISTRALS}*",
    )
    try:
        with beat_with_progress(beat):
            return Path(ask())
    except (OSError, httpx.HTTPError) as error:  # of a commit it wants to know the files, which a cache may not say
        try:
            return Path(ask(local_files_only=True))
        except OSError:
            raise OSError(str(error)) from error


def download_data(name: str, *, file: str, beat: Callable[[], None]) -> Path:
    """Download one file of a data set into the cache; a download that broke off resumes where it was. Raises OSError.
    beat: called as bytes arrive."""
    import httpx
    from huggingface_hub import hf_hub_download

    try:
        with beat_with_progress(beat):
            return Path(hf_hub_download(name, file, repo_type="dataset"))
    except httpx.HTTPError as error:  # a proxy's, or of a connection that broke
        raise OSError(str(error)) from error


@contextlib.contextmanager
def beat_with_progress(beat: Callable[[], None]) -> Iterator[None]:
    """Have every progress bar of this process call `beat` as it moves meanwhile: `datasets` takes no bar of ours."""
    from huggingface_hub.utils import tqdm

    bar = next(kind for kind in tqdm.__mro__ if "update" in vars(kind))  # of which all libraries' bars are made
    update = bar.update

    def moved(self: tqdm, n: float | None = 1) -> Any:
        beat()
        return update(self, n)

    bar.update = moved
    try:
        yield
    finally:
        bar.update = update
