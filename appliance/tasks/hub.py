"""Downloads from the hub. Each shows signs of life as bytes arrive: the launcher ends a child that shows none."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING

from appliance.run.heartbeat import Heartbeat

if TYPE_CHECKING:
    from huggingface_hub.utils import tqdm

MODEL_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")  # no pickles
REMOTE_CODE = "*.py"


def download_model(name: str, *, revision: str, with_code: bool = False) -> Path:
    """The folder of a model's snapshot in the hub's cache; what is there already is not fetched again.

    revision: commit, tag or branch, empty: the hub's `main`.  with_code: the Python files that come with it, too.
    Raises OSError (huggingface_hub's own errors are) when it is neither to be had nor whole in the cache.
    """
    import httpx
    from huggingface_hub import snapshot_download  # loads a network client: only when the hub is asked

    patterns = [*MODEL_FILES, *([REMOTE_CODE] if with_code else [])]
    ask = functools.partial(
        snapshot_download, name, revision=revision or None, allow_patterns=patterns, tqdm_class=_with_signs_of_life()
    )
    try:
        return Path(ask())
    except (OSError, httpx.HTTPError) as error:  # of a commit it wants to know the files, which a cache may not say
        try:
            return Path(ask(local_files_only=True))
        except OSError:
            raise OSError(str(error)) from error


def download_data(name: str, *, file: str) -> Path:
    """One file of a data set, in the hub's cache; a download that broke off goes on where it was. Raises OSError."""
    from huggingface_hub import hf_hub_download

    return Path(hf_hub_download(name, file, repo_type="dataset", tqdm_class=_with_signs_of_life()))


def _with_signs_of_life() -> type[tqdm]:
    """huggingface_hub's own progress bar, which beats whenever it moves."""
    from huggingface_hub.utils import tqdm

    heart = Heartbeat()

    class Beating(tqdm):
        def update(self, n: float | None = 1) -> bool | None:
            heart.beat()
            return super().update(n)

    return Beating
