"""The child of `verify` on an engine that is broken in one way, named by the variable BROKEN."""

from __future__ import annotations

import os
import sys

from appliance.engine.update import WeightUpdate
from appliance.terms.settings import Quantisation
from appliance.verify import child
from appliance.verify.child import VerifyWorker


class StaleRank(VerifyWorker):
    """The second worker says that it took an update, and keeps what it had."""

    def verify_update(self, perturb: bool) -> str:
        return "" if self.rank == 1 else super().verify_update(perturb)


class DeafNorm(VerifyWorker):
    """One small layer gets its old weights back at the end of every update."""

    def verify_update(self, perturb: bool) -> str:
        norm = self.model_runner.model.model.layers[1].input_layernorm
        before = norm.weight.data.clone()
        failed = super().verify_update(perturb)
        norm.weight.data.copy_(before)
        return failed


def swallow_updates() -> None:
    WeightUpdate.begin = lambda self: None
    WeightUpdate.load = lambda self, bucket: None
    WeightUpdate.finish = lambda self: None


def serve_bf16() -> None:
    Quantisation.engine_arguments = lambda self: {}


def lose_a_tensor() -> None:
    """As a checkpoint that lacks one, or a stream that drops it."""
    whole = WeightUpdate.load
    WeightUpdate.load = lambda self, bucket: "up_proj" in bucket[0][0] or whole(self, bucket)


def name_worker(worker: type) -> None:
    child.WORKER = f"{__spec__.name}.{worker.__name__}"


BREAK = {
    "swallowed": swallow_updates,
    "unquantised": serve_bf16,
    "lost": lose_a_tensor,
    "stale-rank": lambda: name_worker(StaleRank),
    "deaf-norm": lambda: name_worker(DeafNorm),
}

if __name__ == "__main__":
    BREAK[os.environ["BROKEN"]]()
    sys.exit(child.main())
