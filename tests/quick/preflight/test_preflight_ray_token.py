"""The secret of a cluster: made once, readable by its owner only."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from appliance.errors import PreflightError
from appliance.preflight.access import check_token, make_token
from appliance.terms.environment import IMAGE_VARIABLE

WORD = "0123456789abcdef0123456789abcdef"


def refusal(file: Path) -> tuple[str, str]:
    with pytest.raises(PreflightError) as caught:
        check_token(file)
    return caught.value.message, caught.value.hint


def test_a_token_is_made_for_its_owner_only(tmp_path: Path) -> None:
    file = tmp_path / "runs" / "token"
    make_token(file)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert len(file.read_text().strip()) == 64
    check_token(file)


def test_two_tokens_differ_and_one_that_is_there_stays(tmp_path: Path) -> None:
    file, two = tmp_path / "one", tmp_path / "two"
    make_token(file)
    make_token(two)
    first = file.read_text()
    make_token(file)
    assert file.read_text() == first != two.read_text()


def test_a_token_that_others_may_read_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(WORD)
    file.chmod(0o640)
    assert refusal(file) == (f"{file}: others may read it (mode 0640)", f"chmod 600 {file}")


def test_no_token_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "token"
    assert refusal(file) == (
        f"{file}: No such file or directory",
        "copy the head's token file here, or give it with --token-file",
    )


@pytest.mark.parametrize("text", ["", "short", f"{WORD} {WORD}"])
def test_what_is_no_token_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "token"
    file.write_text(text)
    file.chmod(0o600)
    assert refusal(file) == (
        f"{file}: a token is one word of 16 characters or more",
        "remove the file: the head makes one",
    )


def test_a_token_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(PreflightError) as caught:
        make_token(tmp_path / "runs" / "token")
    assert caught.value.hint == "set cluster.token_file to a place that you can write to"


def test_a_token_below_run_secrets_is_taken_in_our_image_and_refused_on_a_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "token"
    file.write_text(WORD)
    file.chmod(0o644)
    monkeypatch.setattr("appliance.preflight.container._SECRETS", str(tmp_path))
    monkeypatch.setenv(IMAGE_VARIABLE, "cpu")
    check_token(file)
    monkeypatch.delenv(IMAGE_VARIABLE)
    assert refusal(file)[0] == f"{file}: others may read it (mode 0644)"
