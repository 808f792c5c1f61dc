"""Weights that are not whole, and models that the hub does not give."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from hub_variables import set_hub

from appliance import hub
from appliance.quant.headers import INDEX, damage

HEADER = json.dumps({"__metadata__": {"format": "pt"}, "a": {"dtype": "BF16", "shape": [4], "data_offsets": [0, 8]}})


def write_weights(file: Path, *, missing_bytes: int = 0) -> None:
    whole = len(HEADER).to_bytes(8, "little") + HEADER.encode() + bytes(8)
    file.write_bytes(whole[: len(whole) - missing_bytes])


def test_whole_weights(tmp_path: Path) -> None:
    write_weights(tmp_path / "model.safetensors")
    assert damage(tmp_path).problems == ()


def test_a_file_that_is_cut_short(tmp_path: Path) -> None:
    write_weights(tmp_path / "model.safetensors", missing_bytes=1)
    size = 8 + len(HEADER) + 8
    assert damage(tmp_path).problems == (f"model.safetensors has {size - 1} of {size} bytes",)


@pytest.mark.parametrize("content", [b"", b"\x01", b"<!doctype html>", b"version https://git-lfs.github.com/spec/v1"])
def test_a_file_that_is_something_else(tmp_path: Path, content: bytes) -> None:
    """An unfinished download, a page that says no, the pointer of a file that Git did not fetch."""
    (tmp_path / "model.safetensors").write_bytes(content)
    assert damage(tmp_path).problems == ("model.safetensors is not a safetensors file",)


def test_shards_that_are_missing(tmp_path: Path) -> None:
    names = [f"model-{number:05}-of-00005.safetensors" for number in range(1, 6)]
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": dict(zip("abcde", names, strict=True))}))
    write_weights(tmp_path / names[0])
    assert damage(tmp_path).problems == (
        *(f"{name} is missing, {INDEX} names it" for name in names[1:4]),
        "and 1 more",
    )
    (tmp_path / INDEX).write_text("[]")
    assert damage(tmp_path).problems == (f"{INDEX} cannot be read",)


@contextlib.contextmanager
def a_hub(codes: dict[str, int], *, heard: list[str | None]) -> Iterator[str]:
    """A server that answers HEAD with a code by path, else 404."""

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            heard.append(self.headers["Authorization"])
            code = codes.get(self.path, 404)
            self.send_response(code)
            if code == 307:
                self.send_header("Location", "http://elsewhere.invalid/")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize(
    ("code", "token", "problem"),
    [
        (200, "", ""),
        (307, "", ""),
        (404, "", "the hub has no model `owner/name`, or none with a config.json"),
        (401, "", "`owner/name`: HF_TOKEN is not set, and without a token nobody may read it"),
        (403, "hf_word", "`owner/name`: the token here is not allowed to read it"),
    ],
)
def test_what_the_hub_says_of_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, token: str, problem: str
) -> None:
    heard: list[str | None] = []
    set_hub(monkeypatch, HF_HOME=str(tmp_path), no_proxy="127.0.0.1", HF_TOKEN=None, HF_TOKEN_PATH=None)
    if token:
        (tmp_path / "token").write_text(token + "\n")
    with a_hub({"/": 200, "/owner/name/resolve/main/config.json": code}, heard=heard) as endpoint:
        set_hub(monkeypatch, HF_ENDPOINT=endpoint, HF_HUB_OFFLINE=None)
        assert hub.problem() == ""
        assert hub.model_refusal("owner/name") == problem
    assert len(heard) == 2  # a redirection is not followed: the token would go with it
    assert heard[-1] == (f"Bearer {token}" if token else None)
