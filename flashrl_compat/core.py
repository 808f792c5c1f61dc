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

from appliance.engine.ways_in import FINAL, OPEN, SLEEP, WANTED, WeightState
from appliance.errors import SyncError
from appliance.patch import Patch
from flashrl_compat.patches import apply_here
from flashrl_compat.variables import LOGGER
from flashrl_compat.worker import WORKER_CLASS

AFTER_CALLS = Patch(
    name="flashrl-core-follows-updates",
    target="vllm.v1.engine.core:EngineCore.collective_rpc",
    why="vLLM generates from weights that an update has half written, with the cache of the old ones",
    upstream="https://github.com/vllm-project/vllm/blob/v0.28.0/vllm/v1/engine/core.py",
    distribution="vllm",
    version="0.28.0+cpu",
    source_sha256="f0d85bf03430af63d87552f56bef8f06bf490da92d09e50d3006ba2e1bf79e8b",
    remove_when="vLLM's core refuses requests while weights are updated, and resets its caches with them",
)
BEFORE_RESETS = Patch(
    name="flashrl-core-settles-updates",
    target="vllm.v1.engine.core:EngineCore.reset_prefix_cache",
    why="trainers that load tensor by tensor say no end but this one",
    upstream="https://github.com/vllm-project/vllm/blob/v0.28.0/vllm/v1/engine/core.py",
    distribution="vllm",
    version="0.28.0+cpu",
    source_sha256="cc6090fc8fd2c90cabb7a2272e6ffaea7a4d0765d8e906dc8a57bedaea6bef45",
    remove_when="toolkits that call load_weights say where an update ends",
)
BEFORE_RESUMING = Patch(
    name="flashrl-core-refuses-to-resume",
    target="vllm.v1.engine.core:EngineCore.resume_scheduler",
    why="vLLM generates from weights that an update has half written",
    upstream="https://github.com/vllm-project/vllm/blob/v0.28.0/vllm/v1/engine/core.py",
    distribution="vllm",
    version="0.28.0+cpu",
    source_sha256="206f103ac66e1ee743bdfc16bb86740b866c6ba1ae2b329cbffff5dfaad44ade",
    remove_when="vLLM's core refuses requests while weights are updated",
)
BEFORE_REQUESTS = Patch(
    name="flashrl-core-refuses-requests",
    target="vllm.v1.engine.core:EngineCore.add_request",
    why="vLLM generates from weights that an update has half written, or lets a request wait for ever for whole ones",
    upstream="https://github.com/vllm-project/vllm/blob/v0.28.0/vllm/v1/engine/core.py",
    distribution="vllm",
    version="0.28.0+cpu",
    source_sha256="e1292d26930e5b72f857934d9fc4039aa8a73226a3c4d6e891a3923c4c50618a",
    remove_when="vLLM's core refuses requests while weights are updated",
)


def patch_core() -> None:
    """Raises PatchError."""
    replacements = {
        AFTER_CALLS: _follows,
        BEFORE_RESETS: _settles,
        BEFORE_REQUESTS: _refuses_requests,
        BEFORE_RESUMING: _refuses_to_resume,
    }
    for patch, replacement in replacements.items():
        apply_here(patch, replacement)


@dataclass
class _Known:
    """What a core knows of its workers' weights."""

    version: int = 0
    closed: str = ""
    """Why nothing is generated, or nothing."""
    broken: bool = False
    """For good."""
    slept: bool = False
    """Deeply, and no update has come since."""
    paused: bool = False
    """By us."""

    @property
    def hint(self) -> str:
        return FINAL if self.broken else WANTED if self.slept else OPEN


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
        settle(self)  # more of the caches than the caller may have asked for
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
        told = core.model_executor.collective_rpc("appliance_weights", args=(settles,))
        states = [WeightState(*each) for each in told]
    except (SyncError, RuntimeError, TypeError) as error:  # of a worker's process, or an answer that another call left
        _close(core, f"a worker's weights cannot be known: {after or error}", broken=True)
        raise SyncError(str(error), hint=FINAL) from error
    known.slept = any(state.open == SLEEP for state in states)
    if closed := why_closed(states):
        _close(core, closed, broken=any(state.broken for state in states) or not any(state.open for state in states))
        return False
    known.closed = ""
    is_new = states[0].version > known.version
    if is_new:
        if not core.is_scheduler_paused():  # it came whole in one call: what is in flight has met the old weights
            _end_what_is_in_flight(core)
        _tell_of_mixed(core, old=known.version, new=states[0].version)
        _tell_of_stores(core)
        known.version = states[0].version
        core.set_weight_version(str(known.version))
    if known.paused:
        known.paused = False
        if not core.model_executor.is_sleeping:  # else the call that wakes its cache resumes
            core.resume_scheduler()
    return is_new


def settle(core: Any) -> None:
    """Of a core in the trainer's own process, which may have updated the model past it. Raises SyncError."""
    if _follow(core, settles=True):
        core._reset_caches()


def _tell_of_mixed(core: Any, *, old: int, new: int) -> None:
    """Requests that somebody kept in a pause of his own have tokens of the old weights and go on with the new ones."""
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
    """As aborted. The engine is paused then."""
    _known(core).paused = True
    core.pause_scheduler("abort", clear_cache=False)


def why_closed(ranks: list[WeightState]) -> str:
    """Why an engine of these ranks must not generate, or nothing."""
    for rank, state in enumerate(ranks):
        if state.broken:
            return f"the weights of rank {rank} are half-updated: {state.broken}"
        if state.open == SLEEP:
            return f"rank {rank} has had no weights since {SLEEP}"
        if state.open:
            return f"a weight update is open on rank {rank}, begun by {state.open}"
    versions = sorted({state.version for state in ranks})
    return f"ranks have taken different numbers of weight updates: {versions}" if len(versions) > 1 else ""


def _refuses_requests(original: Callable[..., Any]) -> Callable[..., Any]:
    """In the order in which requests and updates came. Where somebody has paused the engine himself, requests wait as
    they would, but for broken weights."""

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
        if known.slept and not known.broken:  # the update that resumes may come after the call that wakes all
            known.paused = True
            return None
        if closed := known.closed:
            raise SyncError(f"the engine stays paused: {closed}", hint=known.hint)
        return original(self)

    return resume_scheduler
