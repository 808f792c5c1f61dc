"""vLLM's worker with what `verify` mixes into it: a class of its own, for vLLM would change the worker of every engine
that a test starts later in the same process."""

from __future__ import annotations

from vllm.v1.worker.cpu_worker import CPUWorker

from appliance.verify.child import VerifyWorker


class VerifyingWorker(CPUWorker, VerifyWorker):
    pass
