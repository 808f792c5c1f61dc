"""What benchmarks.one_flow asks of `appliance bench`'s child."""

from __future__ import annotations

from pathlib import Path

from appliance.bench.job import NAMED_SHAPES, BenchJob
from benchmarks.one_flow import SCHEMES, Mix, rollouts_job
from benchmarks.sync import engine_env


def test_its_engines_are_those_of_a_run_on_a_cpu(tmp_path: Path) -> None:
    mix = Mix(sequences=16, response_tokens=240, micro_batch=16)
    job = rollouts_job(NAMED_SHAPES["qwen2.5-7b"], mix=mix, turns=3, folder=tmp_path)
    assert BenchJob.model_validate_json(job.model_dump_json()) == job
    assert job.eager == tuple(each.scheme for each in job.engines) == SCHEMES
    assert engine_env(2)["OMP_NUM_THREADS"] == "2"
