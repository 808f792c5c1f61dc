"""The program called in this process, as its entry point is: it spares a process its half second of imports."""

from __future__ import annotations

import subprocess
import sys

import pytest

from appliance import cli


def called(
    *argv: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> subprocess.CompletedProcess[str]:
    """Its exit code and what it printed.  argv: without the program's name."""
    monkeypatch.setattr(sys, "argv", ["appliance", *argv])
    capfd.readouterr()
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return subprocess.CompletedProcess(argv, ended.value.code or 0, *capfd.readouterr())
