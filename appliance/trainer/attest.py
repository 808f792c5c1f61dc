"""What the trainer's process says of itself."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

from appliance import patch
from appliance.plan.model import RunPlan
from appliance.quant.scheme import Scheme
from appliance.run.attest import fingerprint, write_attestation


def attest_trainer(plan: RunPlan) -> None:
    """Write `attest/trainer-0.json`. The trainer computes in BF16 with FP32 weights whatever the rollouts do."""
    write_attestation(
        Path(plan.run_dir),
        process="trainer-0",
        role="trainer",
        rank=0,
        scheme=Scheme.BF16,
        emulated=False,
        patches=patch.applied(),
        versions={name: importlib.metadata.version(name) for name, _ in plan.pins},
        fingerprint=fingerprint(),
        detail={"correction": plan.correction.method, "cap": plan.correction.cap},
    )
