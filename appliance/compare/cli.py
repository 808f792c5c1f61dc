"""The command `compare`. It imports what it needs when it runs."""

from __future__ import annotations

from typing import Annotated

import typer


def add_commands(app: typer.Typer) -> None:
    """Register the commands of this room."""
    app.command("compare")(_compare)


def _compare(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A comparison: a file, or the name of a shipped one.")],
    json_mode: Annotated[bool, typer.Option("--json", help="For machines: JSON on stdout.")] = False,
) -> None:
    """One recipe under several settings and seeds, with a table and a page. Started again, it goes on."""
    from appliance.compare.command import run_compare

    raise typer.Exit(run_compare(file, json_mode=json_mode))
