"""The input of one check of an engine and what it measured, as values that go through files, and what that says: is the
patch live? Imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pydantic import ConfigDict

from appliance.files import Frozen
from appliance.terms.counts import counted
from appliance.terms.schemes import Scheme
from appliance.terms.settings import Dtype, Quantisation


class VerifyJob(Frozen):
    """One engine to check."""

    model: str
    """Folder or hub name."""
    trust_remote_code: bool
    quantisation: Quantisation
    dtype: Dtype = Dtype.BF16
    tensor_parallel: int
    enforce_eager: bool
    prompt_tokens: int
    """Prompt tokens of each of the few sequences."""
    new_tokens: int
    """New tokens of each of the few sequences."""
    seed: int
    result: str
    """File for the CheckResult."""


class _Live(Frozen):
    """Settings that are live in one worker."""

    scheme: Scheme
    emulated: bool
    lm_head_fp32: bool
    kernels: tuple[tuple[str, int], ...]
    """Kernels: name and number of layers."""


class LayerProbe(_Live):
    """One worker at one moment: what is live, and what each of its layers gives for a fixed input."""

    layers: tuple[tuple[str, str], ...]
    """Layers that hold weights: name and digest of the output."""


class EngineOutput(Frozen):
    """Output that an engine generated greedily."""

    # An engine that is broken may say what is no number: it is judged, not refused.
    model_config = ConfigDict(allow_inf_nan=True, ser_json_inf_nan="constants")

    tokens: tuple[tuple[int, ...], ...]
    """Tokens of each prompt's response."""
    log_probs: tuple[tuple[float, ...], ...]
    """Log-probs of those tokens, nats."""
    prompt_log_probs: tuple[tuple[float, ...], ...]
    """Log-probs of the prompts' own tokens but the first, nats: the tokens are the same whatever the weights are."""

    def distance(self, other: EngineOutput) -> float:
        """Compute the mean absolute difference of the prompts' log-probs, nats."""
        pairs = [
            (mine, theirs)
            for row, other_row in zip(self.prompt_log_probs, other.prompt_log_probs, strict=True)
            for mine, theirs in zip(row, other_row, strict=True)
        ]
        return sum(abs(mine - theirs) for mine, theirs in pairs) / len(pairs)


class Worker(_Live):
    """One rank of an engine."""

    rank: int
    layers: int
    unmoved: tuple[str, ...]
    """Layers that gave the same with other weights."""
    unreturned: tuple[str, ...]
    """Layers that did not give the same again with the old ones."""


class CheckResult(Frozen):
    """One engine through three weight updates: the checkpoint's weights, perturbed ones, the checkpoint's again."""

    model_config = ConfigDict(allow_inf_nan=True, ser_json_inf_nan="constants")

    failed: str
    """Error that ended the check, or empty."""
    first: EngineOutput | None = None
    """Output after the first update."""
    same_as_loaded: bool = False
    """Whether the output after the first update is the one before any update."""
    moved: float = 0.0
    """Distance of the outputs after the first and the second update, nats."""
    returned: bool = False
    """Whether the output after the third update is that after the first, to the last bit."""
    workers: tuple[Worker, ...] = ()


@dataclass(frozen=True)
class Row:
    """One worker of one engine, or an engine that failed (worker None)."""

    scheme: Scheme
    emulated: bool
    worker: Worker | None
    moved: float | None
    """Mean absolute difference of log-probs, nats; None where there is nothing to compare."""
    returned: bool
    from_bf16: float | None
    """Mean absolute difference of log-probs, nats; None where there is nothing to compare."""
    problems: tuple[str, ...]
    """Problems of the worker; none: the patch is live."""


def judge_engine(planned: Quantisation, *, seen: CheckResult, reference: EngineOutput | None) -> list[Row]:
    """Judge an engine: one row per worker. reference: the output of the BF16 engine; None for that engine itself or
    where it failed."""
    if seen.failed or seen.first is None:
        return [
            Row(planned.scheme, planned.emulated, None, None, False, None, (seen.failed or "the check gave no result",))
        ]
    common = _of_the_engine(planned, seen=seen, reference=reference)
    return [
        Row(
            scheme=planned.scheme,
            emulated=planned.emulated,
            worker=worker,
            moved=seen.moved,
            returned=seen.returned,
            from_bf16=seen.first.distance(reference) if reference else None,
            problems=(*_of_a_worker(planned, worker=worker), *common),
        )
        for worker in seen.workers
    ]


def _of_the_engine(planned: Quantisation, *, seen: CheckResult, reference: EngineOutput | None) -> tuple[str, ...]:
    problems = []
    if not planned.profile and not seen.same_as_loaded:  # a profile is folded in at the first update
        problems.append("the checkpoint's own weights, sent as an update, changed its output")
    if not math.isfinite(seen.moved):
        problems.append("its log-probs are not finite")
    elif not seen.moved:
        problems.append("the logits did not move with other weights")
    if not seen.returned:
        problems.append("tokens or log-probs did not return with the old weights")
    if planned.scheme.quantised and reference is not None and seen.first == reference:
        problems.append("its output is bf16's to the last bit: nothing is quantised")
    return tuple(problems)


def _of_a_worker(planned: Quantisation, *, worker: Worker) -> tuple[str, ...]:
    problems = []
    if label(worker) != label(planned):
        problems.append(f"it runs {label(worker)}, asked for {label(planned)}")
    if worker.lm_head_fp32 != planned.lm_head_fp32:
        runs, wanted = ("FP32", "BF16") if worker.lm_head_fp32 else ("BF16", "FP32")
        problems.append(f"lm_head is in {runs}, asked for {wanted}")
    if worker.unmoved:
        problems.append(f"{_layers(worker.unmoved)} the same with other weights")
    if worker.unreturned:
        problems.append(f"{_layers(worker.unreturned)} another output once the old weights are back")
    return tuple(problems)


def _layers(names: tuple[str, ...]) -> str:
    others = f" and {counted(len(names) - 1, 'other layer')} give" if len(names) > 1 else " gives"
    return names[0] + others


def label(of: Quantisation | Worker | Row) -> str:
    return f"{of.scheme} (emulated)" if of.emulated else str(of.scheme)
