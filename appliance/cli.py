"""The commands. Each imports what it needs when it runs, so that `--help` starts in a blink.

`main` is the one place where an error becomes an exit code.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

container_cli.add_commands(app)  # health
