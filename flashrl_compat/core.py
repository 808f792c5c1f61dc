"""The engine's core under FLASHRL_CONFIG: it follows the weight updates of its workers.

While an update is open or broken each request is answered with why, which refusals.py makes an error of, and those in
flight end as aborted, so none mixes two versions. When an update is proven, caches of the old weights go, and vLLM's
own weight version counts up (`GET /weight_info`).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason

from appliance.engine.update import WeightState
from appliance.engine.ways_in import FINAL, OPEN, WANTED, WeightReport
from appliance.errors import SyncError
from appliance.patch import Patch, apply_patch
from flashrl_compat.variables import LOGGER
from flashrl_compat.weight_versions import note_batches_in_flight
from flashrl_compat.worker import WORKER_CLASS

AFTER_CALLS = Patch(
    name="flashrl-core-follows-updates",
    target="vllm.v1.engine.core:EngineCore.collective_rpc",
    why="vLLM generates from weights that an update has half written, with the cache of the old ones",
    upstream="https://github.com/vllm-project/vllm/blob/v0.28.0/vllm/v1/engine/core.py",
    distribution="vllm",
    sources={
        "0.28.0": "f0d85bf03430af63d87552f56bef8f06bf490da92d09e50d3006ba2e1bf79e8b",
        "0.29.0": "f0d85bf03430af63d87552f56bef8f06bf490da92d09e50d3006ba2e1bf79e8b",
        "0.30.0": "f0d85bf03430af63d87552f56bef8f06bf490da92d09e50d3006ba2e1bf79e8b",
        "0.31.0": "f0d85bf03430af63d87552f56bef8f06bf490da92d09e50d3006ba2e1bf79e8b",
    },
    remove_when="vLLM's core refuses requests while weights are updated, and resets its caches with them",
)
BEFORE_RESETS = Patch(
    name="flashrl-core-settles-updates",
    target="vllm.v1.engine.core:EngineCore.reset_prefix_cache",
    why="trainers that load tensor by tensor mark the end of an update by nothing but this call",
    upstream="https://github.com/vllm-project/vllm/blob/v0.28.0/vllm/v1/engine/core.py",
    distribution="vllm",
    sources={
        "0.28.0": "cc6090fc8fd2c90cabb7a2272e6ffaea7a4d0765d8e906dc8a57bedaea6bef45",
        "0.29.0": "cc6090fc8fd2c90cabb7a2272e6ffaea7a4d0765d8e906dc8a57bedaea6bef45",
        "0.30.0": "cc6090fc8fd2c90cabb7a2272e6ffaea7a4d0765d8e906dc8a57bedaea6bef45",
        "0.31.0": "cc6090fc8fd2c90cabb7a2272e6ffaea7a4d0765d8e906dc8a57bedaea6bef45",
    },
    remove_when="toolkits that call load_weights say where an update ends",
)
BEFORE_RESUMING = Patch(
    name="flashrl-core-refuses-to-resume",
    target="vllm.v1.engine.core:EngineCore.resume_scheduler",
    why="vLLM generates from weights that an update has half written",
    upstream="https://github.com/vllm-project/vllm/blob/v0.28.0/vllm/v1/engine/core.py",
    distribution="vllm",
    sources={
        "0.28.0": "206f103ac66e1ee743bdfc16bb86740b866c6ba1ae2b329cbffff5dfaad44ade",
        "0.29.0": "206f103ac66e1ee743bdfc16bb86740b866c6ba1ae2b329cbffff5dfaad44ade",
        "0.30.0": "206f103ac66e1ee743bdfc16bb86740b866c6ba1ae2b329cbffff5dfaad44ade",
        "0.31.0": "206f103ac66e1ee743bdfc16bb86740b866c6ba1ae2b329cbffff5dfaad44ade",
    },
    remove_when="vLLM's core refuses requests while weights are updated",
)
BEFORE_REQUESTS = Patch(
    name="flashrl-core-refuses-requests",
    target="vllm.v1.engine.core:EngineCore.add_request",
    why="vLLM generates from weights that an update has half written, or lets a request wait for ever for whole ones",
    upstream="https://github.com/vllm-project/vllm/blob/v0.28.0/vllm/v1/engine/core.py",
    distribution="vllm",
    sources={
        "0.28.0": "e1292d26930e5b72f857934d9fc4039aa8a73226a3c4d6e891a3923c4c50618a",
        "0.29.0": "e1292d26930e5b72f857934d9fc4039aa8a73226a3c4d6e891a3923c4c50618a",
        "0.30.0": "e1292d26930e5b72f857934d9fc4039aa8a73226a3c4d6e891a3923c4c50618a",
        "0.31.0": "e1292d26930e5b72f857934d9fc4039aa8a73226a3c4d6e891a3923c4c50618a",
    },
    remove_when="vLLM's core refuses requests while weights are updated",
)


def patch_core() -> None:
    """Patch vLLM's core. Raises PatchError."""
    apply_patch(AFTER_CALLS, _follows)
    apply_patch(BEFORE_RESETS, _settles)
    apply_patch(BEFORE_REQUESTS, _refuses_requests)
    apply_patch(BEFORE_RESUMING, _refuses_to_resume)


@dataclass
class _Known:
    """What a core knows of its workers' weights."""

    version: int = 0
    closed: str = ""
    """Reason why nothing is generated, or empty."""
    broken: bool = False
    """Whether the weights are broken, for good."""
    dropped: bool = False
    """Whether the weights were dropped, by a deep sleep or a reset, and no update has come since."""
    paused: bool = False
    """Whether it was paused by us."""

    @property
    def hint(self) -> str:
        return FINAL if self.broken else WANTED if self.dropped else OPEN


def _known(core: Any) -> _Known:
    return core.__dict__.setdefault("_appliance_known", _Known())


def _follows(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def collective_rpc(self: Any, method: Any, timeout: float | None = None, args: tuple = (), kwargs: Any = None):
        try:
            result = original(self, method, timeout, args, kwargs)
        except BaseException as error:
            with contextlib.suppress(SyncError):  # it closes the engine, and the caller's own error says more
                _follow(self, settles=False, after=error)
            raise
        if _follow(self, settles=False):
            self._reset_caches()
        return result

    return collective_rpc


def _settles(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def reset_prefix_cache(self: Any, *args: Any, **kwargs: Any) -> bool:
        settle(self)  # more of the caches than the caller may have named
        return original(self, *args, **kwargs)

    return reset_prefix_cache


def _follow(core: Any, *, settles: bool, after: BaseException | None = None) -> bool:
    """Whether there are new weights. after: what a call of the workers raised just now.  Raises SyncError where a
    worker cannot say, or ends an update that is not whole: the engine is then closed for good, and nobody is asked
    again: of several ranks, one that raised leaves the answers of the others for the next who asks."""
    known = _known(core)
    is_ours = core.vllm_config.parallel_config.worker_cls == WORKER_CLASS  # else FLASHRL_CONFIG was unset before it
    if known.broken or not is_ours:
        return False
    try:
        answers = core.model_executor.collective_rpc("appliance_weights", args=(settles,))
        reports = read_reports(answers)
    except (SyncError, RuntimeError, TypeError, ValueError) as error:  # of a worker, or another call's answer
        _close(core, f"a worker's weights cannot be known: {after or error}", broken=True)
        raise SyncError(str(error), hint=FINAL) from error
    states = {report.state for report in reports}
    known.dropped = WeightState.DROPPED in states
    if closed := why_closed(reports):
        ranks_differ = states == {WeightState.WHOLE}
        _close(core, closed, broken=WeightState.BROKEN in states or ranks_differ)
        return False
    known.closed = ""
    newest = reports[0].version
    is_new = newest > known.version
    if is_new:
        if not core.is_scheduler_paused():  # it came whole in one call: what is in flight has met the old weights
            _end_what_is_in_flight(core)
        _tell_of_mixed(core, old=known.version, new=newest)
        _tell_of_stores(core)
        known.version = newest
        note_batches_in_flight(core)
        core.set_weight_version(str(known.version))
    if known.paused:
        known.paused = False
        if not core.model_executor.is_sleeping:  # else the call that wakes its cache resumes
            core.resume_scheduler()
    return is_new


def settle(core: Any) -> None:
    """Settle the updates of a core in the trainer's own process, which may have updated the model past it. Raises
    SyncError."""
    if _follow(core, settles=True):
        core._reset_caches()


def _tell_of_mixed(core: Any, *, old: int, new: int) -> None:
    """Requests that a user kept over a pause have tokens of the old weights and continue with the new ones."""
    mixed = [each.request_id for each in core.scheduler.requests.values() if each.num_output_tokens]
    if mixed:
        LOGGER.warning("%d requests mix weight versions %d and %d: %s", len(mixed), old, new, ", ".join(mixed))


def _tell_of_stores(core: Any) -> None:
    """vLLM takes a connector that has no reset for one that was reset."""
    connector = core.scheduler.connector
    if connector is not None and type(connector).reset_cache is KVConnectorBase_V1.reset_cache:
        name = type(connector).__name__
        LOGGER.warning("%s has no reset: what it keeps beyond a request is read with the new weights", name)


def _close(core: Any, why: str, *, broken: bool) -> None:
    """What is in flight ends as aborted; once more when an update turns out to be broken, for what came since."""
    known = _known(core)
    breaks, known.broken = broken and not known.broken, broken or known.broken
    known.closed = why
    if breaks or not core.is_scheduler_paused():
        _end_what_is_in_flight(core)


def _end_what_is_in_flight(core: Any) -> None:
    """End requests as aborted. The engine is paused then."""
    _known(core).paused = True
    core.pause_scheduler("abort", clear_cache=False)


def read_reports(answers: list[tuple[int, str, str]]) -> list[WeightReport]:
    """Read the answers of `appliance_weights`, one of each rank. Raises TypeError or ValueError for others."""
    return [WeightReport(version, WeightState(state), reason) for version, state, reason in answers]


def why_closed(ranks: list[WeightReport]) -> str:
    """Return the reason why an engine of these ranks must not generate, or an empty text."""
    for rank, report in enumerate(ranks):
        match report.state:
            case WeightState.BROKEN:
                return f"the weights of rank {rank} are half-updated: {report.reason}"
            case WeightState.DROPPED:
                return f"rank {rank} has had no weights since {report.reason}"
            case WeightState.OPEN:
                return f"a weight update is open on rank {rank}, begun by {report.reason}"
    versions = sorted({report.version for report in ranks})
    return f"ranks have taken different numbers of weight updates: {versions}" if len(versions) > 1 else ""


def _refuses_requests(original: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse requests in the order in which requests and updates came. Where somebody has paused the engine himself,
    requests wait as they would, but for broken weights."""

    @functools.wraps(original)
    def add_request(self: Any, request: Any, request_wave: int = 0) -> None:
        is_alone = hasattr(self, "output_queue")
        if not is_alone:
            settle(self)
        known = _known(self)
        if not known.closed or (self.is_scheduler_paused() and not known.paused):
            original(self, request, request_wave)
            return
        why, hint = f"request {request.request_id}: {known.closed}", known.hint
        if not is_alone:
            raise SyncError(why, hint=hint)
        answer = EngineCoreOutput(
            request.request_id, [], finish_reason=FinishReason.ERROR, stop_reason=f"{why}; {hint}"
        )
        outputs = EngineCoreOutputs(finished_requests={request.request_id}, outputs=[answer])
        self.output_queue.put_nowait((request.client_index, outputs))

    return add_request


def _refuses_to_resume(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def resume_scheduler(self: Any) -> Any:
        if _follow(self, settles=False):
            self._reset_caches()
        known = _known(self)
        if known.dropped and not known.broken:  # the update that resumes may come after the call that wakes all
            known.paused = True
            return None
        if closed := known.closed:
            raise SyncError(f"the engine stays paused: {closed}", hint=known.hint)
        return original(self)

    return resume_scheduler
