"""A rollout engine that takes weight updates without weights: it runs what it is asked for, or was started in, and
writes down that all of it is proven. Its other side is real: what is asked, and who reads it."""

from __future__ import annotations

from pathlib import Path

from appliance.settings.sections import SchemeChange
from appliance.sync.precision import read_generation, read_wanted
from appliance.sync.records import Acknowledgement, Sent, append_acknowledgement, append_sent
from appliance.terms.schemes import AS_PLANNED, Precision, Scheme
from appliance.trainer.precision import BF16

LAYERS = ("a", "b", "c", "d")
PROVEN = {"tensors": 3, "bytes": 12, "layers_proven": 4, "parameters_proven": 1, "unproven": 0, "waiting_bytes": 4}
TOOK = {"digest_s": 0.1, "proof_s": 0.1, "seconds": 1.0, "telemetry": None}


class ProvingEngine:
    """log: gets `update int8` for each update.  brought: by the last one."""

    def __init__(self, run_dir: Path, *, way: SchemeChange, log: list[str]) -> None:
        self.brought: Precision = AS_PLANNED
        self._run_dir = run_dir
        self._way = way
        self._log = log
        self._syncs = 0

    def update(self, step: int) -> None:
        """In place of verl's `update_weights`."""
        self._syncs += 1
        live = self._way is SchemeChange.LIVE
        before = self.brought
        self.brought = read_wanted(self._run_dir) if live else read_generation(self._run_dir).precision
        scheme = str(self.brought.scheme or Scheme.INT8)
        self._log.append(f"update {scheme}")
        raised = len(LAYERS) if self.brought == BF16 else len(self.brought.bf16_layers)
        place = {"sync": self._syncs, "replica": 0, "rank": 0, "manifest": "ab"}
        append_sent(self._run_dir, Sent(**place, digest_s=0.1))
        switched = len(LAYERS) if live and self.brought != before else 0
        runs = {"scheme": scheme, "layers": len(LAYERS), "bf16_layers": raised, "switched": switched}
        append_acknowledgement(self._run_dir, Acknowledgement(**place, **runs, **PROVEN, **TOOK))
