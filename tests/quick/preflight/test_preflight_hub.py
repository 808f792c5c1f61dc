"""Which revision of a model this host would load: asked of a hub that answers here, else found in its cache."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from hub_variables import set_hub

from appliance import hub

NAME = "owner/model"
ON_THE_HUB, IN_THE_CACHE = "1" * 40, "2" * 40
NO_TOKEN = dict.fromkeys(("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"))


class Hub(BaseHTTPRequestHandler):
    """Answers for one model and one data set, as the hub's API does."""

    def do_GET(self) -> None:
        known = self.path in (f"/api/models/{NAME}", f"/api/datasets/{NAME}")
        body = json.dumps({"id": NAME, "sha": ON_THE_HUB} if known else {"error": "Repository not found"}).encode()
        self.send_response(200 if known else 404)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Quiet."""


@pytest.fixture
def answering(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    set_hub(monkeypatch, HF_HUB_OFFLINE=None, HF_ENDPOINT=f"http://127.0.0.1:{server.server_port}")
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_the_commit_of_a_data_set_is_the_hubs(answering: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert hub.data_commit(NAME) == ON_THE_HUB
    assert hub.data_commit("owner/other") == ""
    set_hub(monkeypatch, HF_HUB_OFFLINE="1")
    assert hub.data_commit(NAME) == ""


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A snapshot of the model in the cache, complete."""
    set_hub(monkeypatch, HF_HUB_CACHE=str(tmp_path))
    folder = tmp_path / "models--owner--model"
    snapshot = folder / "snapshots" / IN_THE_CACHE
    snapshot.mkdir(parents=True)
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (snapshot / name).write_text("{}")
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(IN_THE_CACHE)
    return snapshot


def test_the_hub_comes_before_the_cache(answering: str, cached: Path) -> None:
    assert hub.revision(NAME) == (ON_THE_HUB, "")


def test_without_the_hub_the_cache_counts(cached: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_hub(monkeypatch, HF_HUB_OFFLINE="1")
    assert hub.revision(NAME) == (IN_THE_CACHE, "")


def test_half_a_snapshot_is_none(cached: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_hub(monkeypatch, HF_HUB_OFFLINE="1")
    (cached / "model.safetensors").unlink()
    assert hub.revision(NAME) == ("", "HF_HUB_OFFLINE is set")


def test_a_hub_that_refuses_is_quoted(answering: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_hub(monkeypatch, HF_HUB_CACHE=str(tmp_path))
    assert hub.revision("owner/other") == ("", f"{answering} answers 404")


def test_a_hub_out_of_reach_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_hub(monkeypatch, HF_HUB_OFFLINE=None, HF_HUB_CACHE=str(tmp_path), HF_ENDPOINT="http://127.0.0.1:1")
    commit, why = hub.revision(NAME)
    assert commit == "" and why.startswith("http://127.0.0.1:1 cannot be reached (")


def test_the_file_of_the_token_is_found_where_huggingface_hub_looks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "token").write_text("hf_file")
    for named in ("~/token", "$WHERE/token", str(tmp_path / "token")):
        set_hub(monkeypatch, **NO_TOKEN, HOME=str(tmp_path), WHERE=str(tmp_path), HF_TOKEN_PATH=named)
        assert (hub.token_file(), hub.get_token()) == (str(tmp_path / "token"), "hf_file")


def test_a_token_in_two_lines_is_sent_as_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As huggingface_hub does."""
    set_hub(monkeypatch, **NO_TOKEN, HF_TOKEN_PATH=str(tmp_path / "token"))
    assert hub.get_token() == ""
    (tmp_path / "token").write_text(" hf_file\r\n")
    assert hub.get_token() == "hf_file"
    (tmp_path / "token").write_bytes(b"\xff")
    assert hub.get_token() == ""
    monkeypatch.setenv("HUGGING_FACE_HUB_TOKEN", "hf_old\n")
    assert hub.get_token() == "hf_old"
    monkeypatch.setenv("HF_TOKEN", "hf_SECRET\nsecond")
    assert hub.get_token() == "hf_SECRETsecond"


@pytest.mark.parametrize("token", ["hf_SECRET\tsecond", "hf_SECRET\x7f", "hf_SECRET\u2019"])
def test_a_token_that_no_header_can_carry_is_not_quoted(
    answering: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, token: str
) -> None:
    set_hub(monkeypatch, HF_HUB_CACHE=str(tmp_path), HF_TOKEN=token)
    why = "the hub's token (HF_TOKEN, or the file of `hf auth login`) has characters that no header can carry"
    assert hub.problem() == hub.model_refusal(NAME) == why
    assert hub.revision(NAME) == ("", why)


def test_the_text_of_a_value_error_is_not_shown(answering: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may quote a header: also where the look at the token let one through."""

    def quoting(*_: object, **__: object) -> None:
        raise ValueError("illegal header value b'Bearer hf_SECRET'")

    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", quoting)
    assert hub.model_refusal(NAME) == f"{answering} cannot be asked (ValueError)"
