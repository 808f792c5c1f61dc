"""Scales of the engines' FP8 KV caches in a run: measured after each weight update, written, and proven.

They are measured in the engines, by their own forward: with the weights as they are quantised and folded there, which
the trainer does not have. An update resets them, and on a GPU so does waking up, so this comes after the whole update.
The prompts are those of the step that the update ends; before the first step they are the first of the training data.

Each rank reports the ranges of its heads. The scales follow from the widest, the same for all ranks and engines; each
writes them, asks its kernels, and answers with a digest of what its layers have then. Before a step's rollouts each
engine reads its layers again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import ray
from ray.actor import ActorHandle

from appliance.errors import SyncError
from appliance.quant.kv_scales import LARGEST, Pairs, calibration_prompts, digest_of, drift, scales_of, widest
from appliance.record.events import append_line
from appliance.sync.records import SYNC_FOLDER

KV_SCALES_FILE = "kv-scales.jsonl"


class PromptSource(Protocol):
    """Rollouts, which know the prompts."""

    step_prompts: list[list[int]]
    """Token ids of the newest step's prompts, at least one."""

    def finish(self) -> None:
        """Wait until nothing is generated."""


class KvScaleUpdates:
    """The scales of all engines of an attempt: `begin` once, `after_update` after each update from then on, `check`
    before rollouts."""

    ranges: Pairs | None
    """Ranges that the scales of the engines follow from; None before `begin`."""

    def __init__(self, run_dir: Path, *, servers: Callable[[], list[ActorHandle]]) -> None:
        """servers: returns the handles of the engines that run now."""
        self._run_dir = run_dir
        self._servers = servers
        self._rollouts: PromptSource | None = None
        self.ranges = None
        self._drift = 0.0
        self._seconds = 0.0

    def begin(self, rollouts: PromptSource, *, sync: int, saved: Pairs | None) -> None:
        """Give the engines their first scales. sync: number of the newest weight update.  saved: ranges of the
        checkpoint that the run resumes from. Raises SyncError where an engine has not the scales that were sent."""
        self._rollouts = rollouts
        if saved is None:
            self.after_update(sync)
        else:
            self._give(saved, sync=sync, tokens=0, started=time.perf_counter())

    def after_update(self, sync: int) -> None:
        """Measure the scales for the weights of an update, and give them to the engines. Raises as `begin`."""
        if self._rollouts is None:
            return
        self._rollouts.finish()
        started = time.perf_counter()
        prompts = calibration_prompts(self._rollouts.step_prompts)
        ranges = self._measure(prompts, scales={})
        if any(largest > LARGEST for pair in ranges.values() for largest in pair):
            # with scales of 1 these values were cut, and what later layers wrote depends on them
            ranges = self._measure(prompts, scales=scales_of(ranges))
        self._give(ranges, sync=sync, tokens=sum(map(len, prompts)), started=started)

    def check(self, sync: int) -> None:
        """Check that each engine has the scales of the newest weight update. Raises SyncError."""
        assert self.ranges is not None, "the engines have been given scales before the first rollouts"
        digest = digest_of(scales_of(self.ranges), sync=sync)
        self._require(digest, ray.get([server.check_kv_scales.remote() for server in self._servers()]), sync=sync)

    def metrics(self) -> dict[str, float]:
        """Return what the line of a step says of the update at its end."""
        return {"kv_range_drift": self._drift, "kv_scales_s": round(self._seconds, 6)}

    def _measure(self, prompts: list[list[int]], *, scales: Pairs) -> Pairs:
        by_engine = ray.get([server.kv_ranges.remote(prompts, scales=scales) for server in self._servers()])
        return widest([ranges for ranks in by_engine for ranges in ranks])

    def _give(self, ranges: Pairs, *, sync: int, tokens: int, started: float) -> None:
        scales = scales_of(ranges)
        digest = digest_of(scales, sync=sync)
        answers = ray.get([server.take_kv_scales.remote(scales) for server in self._servers()])
        self._require(digest, answers, sync=sync)
        self._drift = 0.0 if self.ranges is None else drift(ranges, before=self.ranges)
        self.ranges, self._seconds = ranges, time.perf_counter() - started
        line = {"sync": sync, "digest": digest, "layers": len(scales), "tokens": tokens, "seconds": self._seconds}
        append_line(self._run_dir / SYNC_FOLDER / KV_SCALES_FILE, line)

    def _require(self, digest: str, answers: list[list[str]], *, sync: int) -> None:
        for replica, ranks in enumerate(answers):
            for rank, answer in enumerate(ranks):
                if answer != digest:
                    raise SyncError(
                        f"KV scales of weight update {sync}: rollout rank {rank} of replica {replica} has {answer}, "
                        f"it was sent {digest}"
                    )
