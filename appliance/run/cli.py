"""The commands about a run: `status`, `logs`, `report`, `export`. Each imports what it needs when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

_RUN_ROOT = Path("runs")
_Run = Annotated[str, typer.Argument(metavar="RUN", help="A run's folder, or its name in ./runs.")]
_Json = Annotated[bool, typer.Option("--json", help="For machines: JSON on stdout.")]


def add_commands(app: typer.Typer) -> None:
    """Register the commands of this room."""
    app.command("status")(_status)
    app.command("logs")(_logs)
    app.command("report")(_report)
    app.command("export")(_export)


def _status(run: _Run, json_mode: _Json = False) -> None:
    """Where a run is."""
    from appliance.run.status import print_status

    print_status(run, run_root=_RUN_ROOT, json_mode=json_mode)


def _logs(
    run: _Run,
    which: Annotated[
        str | None, typer.Option(help="One of them: prepare, profile, train, or stacks after a stall.")
    ] = None,
    attempt: Annotated[int | None, typer.Option(min=1, help="Number of the attempt; else the newest.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="As they come, until the run ends.")] = False,
) -> None:
    """The logs of a run's last attempt."""
    from appliance.run.logs import print_logs

    print_logs(run, run_root=_RUN_ROOT, which=which, attempt=attempt, follow=follow)


def _report(
    run: _Run,
    output: Annotated[Path | None, typer.Option("-o", metavar="FILE", help="Instead of RUN/report.html.")] = None,
) -> None:
    """A run's page: one HTML file that needs nothing else. Prints its path."""
    from appliance.run.report.write import print_report

    print_report(run, run_root=_RUN_ROOT, output=output)


def _export(
    run: _Run,
    output: Annotated[Path, typer.Option("-o", metavar="DIR", help="A new folder for the model.")],
    step: Annotated[int | None, typer.Option(min=1, help="Of the checkpoint; left out: the newest.")] = None,
) -> None:
    """The trained model of a checkpoint, for plain transformers and plain vLLM."""
    from appliance.run.export import run_export

    raise typer.Exit(run_export(run, run_root=_RUN_ROOT, step=step, output=output))
