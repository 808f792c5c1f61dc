"""The hub as this host sees it: its cache here, whether it answers, which revision of a model would be loaded."""

from __future__ import annotations

import http.client
import os
import urllib.error
import urllib.request
from pathlib import Path
from urllib.parse import quote

from appliance.plan.build import hub_name
from appliance.plan.env import HUB_TOKEN_VARIABLE
from appliance.plan.hub_cache import MAIN, cached_model, commit_in_cache, home, is_commit, path_of, snapshot
from appliance.recipe.schema import Recipe

_WEIGHTS = "*.safetensors"  # *.bin and *.pt are pickles
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")
_ANSWERS_WITHIN_S = 5


def is_offline() -> bool:
    """Whether the hub's own variable forbids to ask it."""
    return os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on")


def endpoint() -> str:
    return os.environ.get("HF_ENDPOINT", "https://huggingface.co")


def is_cached(name: str) -> bool:
    """Whether the hub's cache on this host has a snapshot with weights."""
    return any(not missing_parts(folder) for folder in snapshots(name))


def snapshots(name: str) -> list[Path]:
    """Folders of a model in the hub's cache on this host, one per revision, complete or not."""
    kept = cached_model(name) / "snapshots"
    return [folder for folder in kept.glob("*") if os.path.isdir(folder)] if os.path.isdir(kept) else []


def missing_parts(folder: Path) -> tuple[str, ...]:
    """Of a model's folder: `config.json`, `weights`, `tokenizer`; empty when it is complete."""
    missing = [] if os.path.isfile(folder / "config.json") else ["config.json"]
    if not weight_bytes(folder):
        missing.append("weights")
    if not any(os.path.isfile(folder / name) for name in _TOKENIZERS):
        missing.append("tokenizer")
    return tuple(missing)


def weight_bytes(folder: Path) -> int:
    """Size of the files of weights in a folder; 0 when there are none, or this user may not look."""
    found = folder.glob(_WEIGHTS) if os.path.isdir(folder) else ()  # Path.glob raises where this user may not look
    return sum(os.path.getsize(file) for file in found if os.path.isfile(file))


def problem() -> str:
    """Why the hub does not answer, or an empty text. Any answer of the host counts."""
    code, why = _head(endpoint())
    return why or (f"{endpoint()} answers {code}" if code in (403, 407) or code >= 500 else "")


def refusal(name: str, *, revision: str = "") -> str:
    """Why the hub, which answers, does not give a model's config.json to whoever asks from here, or an empty text."""
    code, why = _head(f"{endpoint().rstrip('/')}/{name}/resolve/{quote(revision or MAIN, safe='')}/config.json")
    if code == 404:
        none_of_it = f", or no revision `{revision}` of it" if revision else ""
        return f"the hub has no model `{name}`{none_of_it}, or none with a config.json"
    if code in (401, 403):
        has = "the token here is not allowed to" if _token() else "HF_TOKEN is not set, and without a token nobody may"
        return f"`{name}`: {has} read it"
    return why


class _Stay(urllib.request.HTTPRedirectHandler):
    """A redirection is an answer: followed, it would take the token to another host."""

    def redirect_request(self, *_: object) -> None:
        return None


def _head(url: str) -> tuple[int, str]:
    """(status, why there is none)."""
    if why := _token_problem():
        return 0, why
    headers = {"Authorization": f"Bearer {token}"} if (token := _token()) else {}
    request = urllib.request.Request(url, method="HEAD", headers=headers)
    try:
        with urllib.request.build_opener(_Stay).open(request, timeout=_ANSWERS_WITHIN_S) as answer:
            return answer.status, ""
    except urllib.error.HTTPError as error:
        return error.code, ""
    except ValueError as error:  # before OSError: its text may quote a header, and with it the token
        return 0, f"{endpoint()} cannot be asked ({type(error).__name__})"
    except (OSError, http.client.HTTPException) as error:
        return 0, f"{endpoint()} cannot be reached ({getattr(error, 'reason', None) or error})"


def _token() -> str:
    """As huggingface_hub finds it: a variable, else the file that `hf auth login` writes; without its line ends."""
    if token := _token_variable():
        return token
    try:
        return _clean(_token_file().read_text())
    except (OSError, UnicodeDecodeError):
        return ""


def _token_variable() -> str:
    return _clean(os.environ.get("HF_TOKEN") or os.environ.get("HUGGING_FACE_HUB_TOKEN") or "")


def is_token_in_a_variable() -> bool:
    return bool(_token_variable())


def _token_file() -> Path:
    named = os.environ.get(HUB_TOKEN_VARIABLE)
    return path_of(named) if named else home() / "token"


def token_file() -> str:
    """The file with the hub's token, absolute; empty where there is none."""
    file = _token_file().absolute()
    return str(file) if os.path.isfile(file) else ""


def _clean(token: str) -> str:
    return token.replace("\r", "").replace("\n", "").strip()


def _token_problem() -> str:
    """Why the token cannot be sent, without a part of it: libraries quote such a header in their errors."""
    token = _token()
    if token.isascii() and token.isprintable():
        return ""
    return "the hub's token (HF_TOKEN, or the file of `hf auth login`) has characters that no header can carry"


def revision(name: str, *, of: str = "") -> tuple[str, str]:
    """(commit, why there is none) of the model that loading `name` would take: the hub's, else the cache's.

    of: a commit, which is its own, a tag or a branch; empty: `main`.
    """
    if is_commit(of):
        return of, ""
    if is_offline():
        why = "HF_HUB_OFFLINE is set"
    else:
        commit, why = _asked(name, of)
        if commit:
            return commit, ""
    commit = commit_in_cache(name, revision=of)
    return (commit, "") if commit and not missing_parts(snapshot(name, commit=commit)) else ("", why)


def commit_for(recipe: Recipe) -> str:
    """The commit that the recipe's `model.revision` is; empty without one, and where that cannot be told."""
    name, wanted = hub_name(recipe), recipe.model.revision
    return revision(name, of=wanted)[0] if name and wanted else ""


def _asked(name: str, of: str) -> tuple[str, str]:
    import httpx
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    if why := _token_problem():
        return "", why
    try:
        return HfApi(endpoint=endpoint()).model_info(name, revision=of or None, timeout=_ANSWERS_WITHIN_S).sha or "", ""
    except HfHubHTTPError as error:  # no such model, or none for this token
        return "", f"{endpoint()} answers {error.response.status_code}"
    except (httpx.HTTPError, OSError) as error:
        return "", f"{endpoint()} cannot be reached ({error})"
    except HFValidationError as error:  # before anything was asked
        return "", str(error)
