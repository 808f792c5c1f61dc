"""The command `join`. It imports what it needs when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from appliance.plan.ports import DEFAULT_BASE, LARGEST_BASE


def add_commands(app: typer.Typer) -> None:
    """Register the commands of this room."""
    app.command("join")(_join)


def _join(
    head: Annotated[str, typer.Option(metavar="HOST[:PORT]", help="The host that runs `appliance train`.")],
    token_file: Annotated[
        Path, typer.Option(help="The head's secret; it lies in the folder of the runs, which all nodes share.")
    ] = Path("runs/.cluster-token"),
    gpus: Annotated[
        int | None, typer.Option(min=1, help="What this node offers; without a GPU, ranks. Else all, or 1.")
    ] = None,
    port: Annotated[
        int, typer.Option(min=1024, max=LARGEST_BASE, help="First of this node's ports, see docs/cluster.md.")
    ] = DEFAULT_BASE,
    node_address: Annotated[str | None, typer.Option(help="By which the others reach this node; else found.")] = None,
    wait_s: Annotated[float, typer.Option("--wait", min=1, help="Seconds that the head may take to appear.")] = 900.0,
) -> None:
    """Make this host a worker node of another host's training, until that ends."""
    from appliance.cluster.join import join_head

    raise typer.Exit(
        join_head(head, token_file=token_file, gpus=gpus, port=port, node_address=node_address, wait_s=wait_s)
    )
