"""The part of `appliance export` that needs torch. Arguments: RUN CHECKPOINT TARGET REPORT.

RUN: the run's folder.  TARGET: the folder to make.  REPORT: a folder whose events say what went wrong.
"""

from __future__ import annotations

import sys
from pathlib import Path

from appliance.plan.model import read_plan
from appliance.run.boundary import told
from appliance.trainer.export import export_checkpoint


def main() -> int:
    run_dir, checkpoint, target, report = (Path(argument) for argument in sys.argv[1:])
    uaq = read_plan(run_dir / "plan.json").uaq
    return told(report, lambda: export_checkpoint(checkpoint, target=target, uaq=uaq))


if __name__ == "__main__":
    sys.exit(main())
