"""The child of `verify`. Of two workers in INT8 the second says that it took an update, and keeps what it had."""

from __future__ import annotations

import sys
from pathlib import Path

from appliance.terms.schemes import Scheme
from appliance.verify import child
from appliance.verify.child import VerifyWorker
from appliance.verify.job import VerifyJob


class StaleRank(VerifyWorker):
    def verify_update(self, perturb: bool) -> str:
        return "" if self.rank == 1 else super().verify_update(perturb)


if __name__ == "__main__":
    if VerifyJob.model_validate_json(Path(sys.argv[1]).read_bytes()).quantisation.scheme is Scheme.INT8:
        child.WORKER = f"{__spec__.name}.StaleRank"
    sys.exit(child.main())
