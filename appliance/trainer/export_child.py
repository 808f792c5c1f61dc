"""The part of `appliance export` that needs torch. Arguments: RUN CHECKPOINT TARGET REPORT.

RUN: the run's folder.  TARGET: the folder to make.  REPORT: a folder whose events say what went wrong.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from appliance.errors import PreflightError
from appliance.plan.model import UaqPlan
from appliance.run.events import exit_code_of
from appliance.trainer.export import export_checkpoint


def main() -> int:
    run_dir, checkpoint, target, report = (Path(argument) for argument in sys.argv[1:])
    return exit_code_of(lambda: _export(checkpoint, target=target, uaq=_uaq(run_dir)), run_dir=report)


def _export(checkpoint: Path, *, target: Path, uaq: UaqPlan | None) -> None:
    """Raises PreflightError where the target cannot be written: what is read was read before, for its hashes."""
    try:
        export_checkpoint(checkpoint, target=target, uaq=uaq)
    except OSError as error:
        message = f"{target}: cannot be written: {error.strerror or error}"
        raise PreflightError(message, hint="free some space, or set -o to another folder") from error


def _uaq(run_dir: Path) -> UaqPlan | None:
    """Of the run's plan, which may be of an older version otherwise."""
    raw = json.loads((run_dir / "plan.json").read_text()).get("uaq")
    return UaqPlan(**raw) if raw else None


if __name__ == "__main__":
    sys.exit(main())
