"""Run folders as a launcher and a trainer leave them, without either."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from plans import make_guard, make_plan

from appliance.record.attestations import Attestation, write_attestation
from appliance.record.plan import ExpectedAttestation
from appliance.record.samples import Sample, StepSamples, append_samples
from appliance.record.session import RunRecord, RunStatus, write_record
from appliance.sync.records import Acknowledgement, Sent, append_acknowledgement, append_sent
from appliance.terms.schemes import Scheme

HOSTILE = "</script></pre></td><img src=x onerror=document.title='owned'><script>document.title='owned'</script>"


def _line(step: int, **changes: object) -> dict[str, object]:
    line = {
        "step": step,
        "time_s": 60.0 + 4 * step,
        "reward_mean": 0.2 + 0.02 * step,
        "response_tokens_mean": 4.0,
        "unfinished_fraction": 0.25,
        "rollout_tokens_per_s": 2000.0,
        **{"rollout_s": 0.5, "logprob_s": 0.5, "update_s": 1.0, "sync_s": 0.1, "step_s": 2.4, "proof_s": 0.01},
        **{"scheme": "int8", "emulated": False, "mismatch_k3_kl": 1e-4, "is_ess": 0.99, "is_weight_mean": 1.0},
        **{"is_weight_max": 1.2, "is_truncated_fraction": 0.0, "entropy": 0.3, "grad_norm": 1.0},
        "clipped_negative_fraction": 0.007,
        **{
            "codes_changed_fraction": 0.1,
            "saturated_fraction": 0.003,
            "layer_error_max": 0.009,
            "reward_failures": 0,
            "scale_drift": 0.001 * step,
        },
    }
    return {**line, **changes}


def _sample(response: str, *, right: bool, validate: bool = True) -> Sample:
    reward = None if validate else float(right)
    return Sample("12+34=", response, "46", float(right), reward, tokens=3, finished=True)


def _attest(run_dir: Path, **changes: object) -> None:
    attestation = {
        **{"process": "rollout-0-0", "role": "rollout", "rank": 0, "scheme": "int8", "emulated": False},
        **{"patches": ("a",), "versions": {"torch": "2.13.0"}, "fingerprint": "f"},
        **{"detail": {"kernels": {"Int8Kernel": 16}}},
    }
    write_attestation(run_dir, Attestation(**{**attestation, **changes}))


def _taken(sync: int, **changes: object) -> Acknowledgement:
    """Of an engine whose 16 layers take four updates to be proven, after the first."""
    values = {
        **{"sync": sync, "replica": 0, "rank": 0, "manifest": f"of {sync}", "tensors": 51, "bytes": 6_000_000},
        **{"layers": 16, "layers_proven": 16 if sync == 1 else 4, "parameters_proven": 22, "unproven": 1},
        **{"waiting_bytes": 0, "digest_s": 0.01, "proof_s": 0.01, "seconds": 0.1, "telemetry": None, "scheme": "int8"},
    }
    return Acknowledgement(**{**values, **changes})


def _make_run(root: Path, *, name: str = "made", steps: int = 10, done: int = 10, **record: object) -> Path:
    """A run of `steps` steps of which so many are done, validated before and after every tenth."""
    run_dir = root / name
    (run_dir / "attest").mkdir(parents=True)
    plan = make_plan(run_dir, steps=steps).replace(
        guard=make_guard(),
        argv=("python", "-m", "train", "a<b"),
        pins=(("torch", "2.13.0"),),
        attestations=(
            ExpectedAttestation(role="rollout", rank=0, scheme=Scheme.INT8, patches=("a",)),
            ExpectedAttestation(role="driver", rank=0, scheme=Scheme.BF16, patches=("b",)),
        ),
    )
    plan.write(run_dir / "plan.json")
    (run_dir / "recipe.yaml").write_text("name: made  # <&>\n")
    (run_dir / "versions.json").write_text(
        '{"python": "3.11.7", "distributions": {"torch": "2.13.0"}, "fingerprint": "f"}'
    )
    _attest(run_dir)
    _attest(run_dir, process="driver-0", role="driver", scheme="bf16", patches=("b",), detail={})
    phases = {0: "prepare", 20: "load-model", 50: "rollout", 90: "save", 100: "done"}
    told = [{"time": float(time), "kind": "phase", "what": phase} for time, phase in phases.items()]
    told.append({"time": 95.0, "kind": "checkpoint", "what": f"step {done} is saved", "why": "the end", "step": done})
    (run_dir / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in told))
    lines = [{"step": 0, "time_s": 50.0, "scheme": "int8", "val_reward_mean": 0.1, "val_samples": 512}] if done else []
    for step in range(1, done + 1):
        validated = {"val_reward_mean": 0.9, "val_reward_bf16_mean": 0.91, "val_samples": 512} if step % 10 == 0 else {}
        lines.append(_line(step, **validated))
    for sync in range(1, done + 2 if done else 1):
        append_sent(run_dir, Sent(sync=sync, replica=0, rank=0, manifest=f"of {sync}", digest_s=0.1))
        append_acknowledgement(run_dir, _taken(sync))
    if done:
        (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        append_samples(run_dir, StepSamples(0, "int8", validation=(_sample("12", right=False),)))
        kept = (_sample("46", right=True), _sample(HOSTILE, right=False))
        append_samples(run_dir, StepSamples(done, "int8", validation=kept, training=kept))
        memory = [{"time": 30.0 * number, "pss_bytes": number << 30, "processes": 9} for number in (1, 3, 2)]
        (run_dir / "memory.jsonl").write_text("".join(json.dumps(each) + "\n" for each in memory))
    write_record(run_dir, replace(RunRecord(RunStatus.DONE, phase="done", exit_code=0), **record))
    return run_dir


@pytest.fixture(scope="session")
def make_run() -> Callable[..., Path]:
    return _make_run


@pytest.fixture(scope="session")
def metrics_line() -> Callable[..., dict[str, object]]:
    return _line


@pytest.fixture(scope="session")
def attest() -> Callable[..., None]:
    return _attest


@pytest.fixture(scope="session")
def taken() -> Callable[..., Acknowledgement]:
    return _taken


@pytest.fixture(scope="session")
def hostile() -> str:
    return HOSTILE
