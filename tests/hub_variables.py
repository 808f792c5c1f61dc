"""The hub's variables for a test: huggingface_hub reads them once, when it is loaded."""

from __future__ import annotations

import importlib.util

import pytest
from huggingface_hub import constants

READ = ("HF_HOME", "HF_HUB_CACHE", "HF_TOKEN_PATH", "HF_HUB_OFFLINE", "ENDPOINT", "HUGGINGFACE_CO_URL_TEMPLATE")


def set_hub(monkeypatch: pytest.MonkeyPatch, **variables: str | None) -> None:
    """As if this process had begun with these variables. None: not set."""
    for name, value in variables.items():
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
    spec = importlib.util.find_spec(constants.__name__)
    assert spec is not None and spec.loader is not None
    fresh = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fresh)
    for name in READ:
        monkeypatch.setattr(constants, name, getattr(fresh, name))
