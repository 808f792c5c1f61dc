"""`appliance data`: a data set as files that recipes and verl read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def add_commands(app: typer.Typer) -> None:
    app.command()(data)


def data(
    name: Annotated[str, typer.Argument(metavar="NAME", help="dapo-math-17k, aime-2024 or gsm8k.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="Where the files go.")],
    source: Annotated[
        list[str] | None,
        typer.Option("--from", metavar="FILE", help="A file of this host instead of the hub; one per file made."),
    ] = None,
) -> None:
    """Make a data set's parquet files: verl's schema, each problem once. What is there already is left alone."""
    from appliance.data.command import make_data

    make_data(name, folder=output, sources=tuple(source or ()))
