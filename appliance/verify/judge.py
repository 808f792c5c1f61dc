"""Is the patch live? Judgements on what the engines showed. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from appliance.terms.schemes import Scheme
from appliance.terms.settings import Quantisation
from appliance.verify.job import CheckResult, EngineOutput, Worker


@dataclass(frozen=True)
class Row:
    """One worker of one engine, or an engine that failed (worker None). problems: what speaks against it, none: live.

    moved, from_bf16: mean absolute difference of log-probs, nats; None where there is nothing to compare.
    """

    scheme: Scheme
    emulated: bool
    worker: Worker | None
    moved: float | None
    returned: bool
    from_bf16: float | None
    problems: tuple[str, ...]


def judge(asked: Quantisation, *, seen: CheckResult, reference: EngineOutput | None) -> list[Row]:
    """One row per worker. reference: what the BF16 engine said, None for that engine itself or where it failed."""
    if seen.failed or seen.first is None:
        return [Row(asked.scheme, asked.emulated, None, None, False, None, (seen.failed or "it said nothing",))]
    from_bf16 = seen.first.distance(reference) if reference else None
    common = _of_the_engine(asked, seen=seen, reference=reference)
    return [
        Row(
            scheme=asked.scheme,
            emulated=asked.emulated,
            worker=worker,
            moved=seen.moved,
            returned=seen.returned,
            from_bf16=from_bf16,
            problems=(*_of_a_worker(asked, worker=worker), *common),
        )
        for worker in seen.workers
    ]


def _of_the_engine(asked: Quantisation, *, seen: CheckResult, reference: EngineOutput | None) -> tuple[str, ...]:
    found = []
    if not asked.profile and not seen.same_as_loaded:  # a profile is folded in at the first update
        found.append("the checkpoint's own weights, sent as an update, changed what it says")
    if not seen.moved > 0:
        found.append("the logits did not move with other weights")
    if not seen.returned:
        found.append("tokens or log-probs did not return with the old weights")
    if asked.scheme.quantised and reference is not None and seen.first == reference:
        found.append("it says to the last bit what bf16 says: nothing is quantised")
    return tuple(found)


def _of_a_worker(asked: Quantisation, *, worker: Worker) -> tuple[str, ...]:
    found = []
    runs, wanted = label(worker.scheme, emulated=worker.emulated), label(asked.scheme, emulated=asked.emulated)
    if runs != wanted:
        found.append(f"it runs {runs}, asked for {wanted}")
    if worker.lm_head_fp32 != asked.lm_head_fp32:
        found.append(f"lm_head is in {_width(worker.lm_head_fp32)}, asked for {_width(asked.lm_head_fp32)}")
    if worker.unmoved:
        found.append(f"{_layers(worker.unmoved)} the same with other weights")
    if worker.unreturned:
        found.append(f"{_layers(worker.unreturned)} something else with the old weights back")
    return tuple(found)


def _width(fp32: bool) -> str:
    return "FP32" if fp32 else "BF16"


def _layers(names: tuple[str, ...]) -> str:
    others = f" and {len(names) - 1} other layers give" if len(names) > 1 else " gives"
    return names[0] + others


def label(scheme: Scheme, *, emulated: bool) -> str:
    return f"{scheme} (emulated)" if emulated else str(scheme)
