"""A benchmark's result for people and for machines."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from appliance import console
from appliance.bench.job import GIB, EngineFacts, Job, Measurement, Verdict
from appliance.terms.devices import PAYS_FROM

_HEAD = ("scheme", "tokens/s", "weights", "KV cache", "at once")


def table(
    job: Job, *, verdicts: list[Verdict], facts: list[EngineFacts], measured: list[Measurement], kept: Path | None
) -> str:
    """One line per scheme, then one sentence per scheme but the base: whether it pays."""
    ratio = f"ratio to {job.schemes[0]} (median of {job.pairs} interleaved pairs, min-max)"
    rows = [
        (
            str(verdict.scheme),
            f"{verdict.tokens_per_s:.0f}",
            _size(held.weight_bytes),
            _size(held.kv_bytes),
            f"{min(held.sequences, job.workload.sequences)} of {job.workload.sequences}",
            f"{verdict.ratio:.2f} ({verdict.ratio_min:.2f}-{verdict.ratio_max:.2f})",
        )
        for verdict, held in zip(verdicts, facts, strict=True)
    ]
    lines = [console.table(rows, head=(*_HEAD, ratio), numbers=range(1, 5), columns=console.stdout_columns())]
    lines += [sentence(verdict, base=verdicts[0]) for verdict in verdicts[1:]]
    if job.memory_bytes:
        lines.append(f"each engine had {_size(job.memory_bytes)} a worker for weights and KV cache together")
    if kept:
        lines.append(f"kept: {kept}")
    return "\n".join(lines)


def sentence(verdict: Verdict, *, base: Verdict) -> str:
    """Whether the scheme pays, with the numbers."""
    pays = "pays" if verdict.ratio >= PAYS_FROM else "does not pay"
    speeds = f"{verdict.tokens_per_s:.0f} against {base.tokens_per_s:.0f} tokens/s"
    return (
        f"{verdict.scheme} {pays} here for these rollouts: {verdict.ratio:.2f} times {base.scheme} ({speeds}; "
        f"from {PAYS_FROM} on it does)"
    )


def as_json(
    job: Job, *, verdicts: list[Verdict], facts: list[EngineFacts], measured: list[Measurement], kept: Path | None
) -> str:
    return json.dumps(
        {
            "schema_version": 1,
            "workload": dataclasses.asdict(job.workload),
            "pairs": job.pairs,
            "base": str(job.schemes[0]),
            "memory_bytes": job.memory_bytes,
            "schemes": [{**dataclasses.asdict(verdict), "pays": verdict.ratio >= PAYS_FROM} for verdict in verdicts],
            "engines": [{**dataclasses.asdict(each), "kernels": dict(each.kernels)} for each in facts],
            "measurements": [dataclasses.asdict(each) for each in measured],
            "kept": str(kept) if kept else None,
        }
    )


def _size(size: int) -> str:
    return f"{size / GIB:.2f} GiB" if size >= GIB // 10 else f"{size / (1 << 20):.1f} MiB"
