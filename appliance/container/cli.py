"""The command `health`. What starts containers is an option of `train`."""

from __future__ import annotations

import typer


def add_commands(app: typer.Typer) -> None:
    """Register the commands of this room."""
    app.command("health", hidden=True)(_health)


def _health() -> None:
    """What a container's health check asks: one line, exit code 0 or 1."""
    from appliance import console
    from appliance.container.health import look

    found = look()
    console.show(f"{'healthy' if found.is_healthy else 'unhealthy'}: {found.what}")
    raise typer.Exit(0 if found.is_healthy else 1)
