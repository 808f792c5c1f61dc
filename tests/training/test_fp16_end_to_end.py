"""FP16 on both sides in real trainings: what is attested and proven, an update that overflows, and the mismatch."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median

import pytest
from trainings import FEW, Finished, train

from appliance.record.checkpoints import checkpoint_folder

pytestmark = [pytest.mark.e2e(minutes=1), pytest.mark.torture]

STEPS = 4
COMMON = (
    FEW,
    f"trainer.steps={STEPS}",
    "trainer.validate_before=false",
    "trainer.validate_every=0",
    "quantization.profile=none",
    "batch.prompts_per_step=16",
)
FP16 = "trainer.dtype=fp16"
# Gradients of a bonus so large are beyond FP16's numbers as long as losses are multiplied by 2^16.
OVERFLOWING = {
    "trainer.dtype": "fp16",
    "quantization.profile": "none",
    "algorithm.entropy_bonus": "100",
    "guard.gradient_steps": "1",  # none of these is a bad step
}


def trained(root: Path, *sets: str, name: str) -> Finished:
    done = train(root, *COMMON, *sets, name=name)
    assert done.code == 0, done.stderr[-4000:]
    return done


def attested(done: Finished, process: str) -> dict:
    return json.loads((done.run_dir / "attest" / f"{process}.json").read_text())["detail"]


@pytest.mark.parametrize("scheme", ["bf16", "int8"])
def test_both_sides_are_in_fp16_and_nearer_to_each_other(
    with_tiny_cache: Callable[[Path], Path], tmp_path: Path, scheme: str
) -> None:
    """Not quantised, rounding is most of k3: a quarter of it is asked for at most. Under INT8 most is INT8's."""
    root, sets = with_tiny_cache(tmp_path), f"rollout.scheme={scheme}"
    fp16, bf16 = trained(root, sets, FP16, name="fp16"), trained(root, sets, name="bf16")
    assert (attested(fp16, "trainer-0")["compute"], attested(fp16, "rollout-0-0")["dtype"]) == ("torch.float16",) * 2
    taken, sent = (fp16.json_lines(f"sync/{side}-0-0.jsonl") for side in ("rollout", "trainer"))
    assert [line["manifest"] for line in taken] == [line["manifest"] for line in sent]
    assert all(line["layers_proven"] == line["layers"] > 0 for line in taken)
    kernels = attested(fp16, "rollout-0-0")["kernels"]
    assert any(name.startswith("CPUInt8ScaledMMLinearKernel[") for name in kernels) is (scheme == "int8")
    assert "CPUInt8ScaledMMLinearKernel[sgl]" not in kernels  # it knows BF16 alone
    lines = {name: done.json_lines("metrics.jsonl") for name, done in (("fp16", fp16), ("bf16", bf16))}
    assert [line["grad_scale"] for line in lines["fp16"]] == [65536.0] * STEPS
    k3 = {name: median(line["mismatch_k3_kl"] for line in found) for name, found in lines.items()}
    print(f"{scheme}: k3 {k3['bf16']:.1e} in BF16, {k3['fp16']:.1e} in FP16")  # noqa: T201
    assert k3["fp16"] < k3["bf16"] / (4 if scheme == "bf16" else 1)
    assert fp16.left == ()


def test_an_update_that_overflows_is_left_out_and_halves_the_scale(
    with_tiny_cache: Callable[[Path], Path], tmp_path: Path
) -> None:
    sets = {"trainer.steps": "6", "checkpoint.every_steps": "1", "checkpoint.keep": "null"} | OVERFLOWING
    done = trained(with_tiny_cache(tmp_path), *(f"{key}={value}" for key, value in sets.items()), name="over")
    folders = [checkpoint_folder(done.run_dir, step=step) / "actor" for step in range(1, 7)]
    weights = [(folder / "huggingface" / "model.safetensors").read_bytes() for folder in folders]
    scale, overflowed = 65536.0, []
    for line, folder in zip(done.json_lines("metrics.jsonl"), folders, strict=True):
        overflowed.append(line["grad_norm"] is None)
        scale *= 0.5 if overflowed[-1] else 1
        assert (line["overflow_fraction"], line["grad_scale"]) == (float(overflowed[-1]), scale)
        assert json.loads((folder / "scaler.json").read_text())["scale"] == scale
    assert overflowed[0] and not all(overflowed)
    assert [before == after for before, after in pairwise(weights)] == overflowed[1:]  # to the last bit
