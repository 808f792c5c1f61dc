"""What the rollouts of a run need again: lost, it comes back from the checkpoint; another one is refused."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from stopped_runs import events, misfits, resumed, save, stopped

from appliance.errors import EngineError
from appliance.launch.resume import begin_attempt, find_misfits
from appliance.profile.uaq import is_scaled
from appliance.record.plan import RunPlan, UaqPlan
from appliance.settings.sections import Lora
from appliance.terms.settings import Dtype

SCALES = b"scales"
SEALED = (("profile.safetensors", hashlib.sha256(SCALES).hexdigest()),)


def fits(*steps: int) -> bytes:
    return "".join(json.dumps({"step": step, "low": 0.2, "high": 0.3}) + "\n" for step in steps).encode()


def mark(scale: float = 1.5, model: str = "aa") -> bytes:
    return json.dumps({"scale": scale, "model": "/m", "model_hash": model, "norms": 9, "schema_version": 1}).encode()


def resume_run(run_dir: Path, plan: RunPlan) -> None:
    resume = resumed(run_dir)
    assert find_misfits(resume, plan=plan) == []
    begin_attempt(plan, resume=resume, recipe_yaml="").release()


def test_a_profile_and_fits_that_were_lost_come_back(tmp_path: Path, small_plan: Callable) -> None:
    plan = small_plan(tmp_path, steps=9)
    run_dir = stopped(plan)
    save(run_dir, 3, files={"profile/profile.safetensors": SCALES, "clipping.jsonl": fits(1, 3)}, profile=SEALED)
    resume_run(run_dir, plan)
    assert (run_dir / "profile" / "profile.safetensors").read_bytes() == SCALES
    assert (run_dir / "clipping.jsonl").read_bytes() == fits(1, 3)
    restored = [each for each in events(run_dir, "note") if "is restored" in each[0]]
    assert sorted(restored) == [
        ("clipping.jsonl is restored", "from global_step_3"),
        ("profile/profile.safetensors is restored", "from global_step_3"),
    ]


def test_what_is_there_is_left_alone_and_later_fits_are_cut(tmp_path: Path, small_plan: Callable) -> None:
    plan = small_plan(tmp_path, steps=9)
    run_dir = stopped(plan)
    (run_dir / "profile").mkdir()
    (run_dir / "profile" / "profile.safetensors").write_bytes(SCALES)
    (run_dir / "clipping.jsonl").write_bytes(fits(1, 3, 5))
    save(run_dir, 3, files={"profile/profile.safetensors": SCALES, "clipping.jsonl": fits(1, 3)}, profile=SEALED)
    resume_run(run_dir, plan)
    assert (run_dir / "clipping.jsonl").read_bytes() == fits(1, 3)
    assert (run_dir / "clipping.cut-1.jsonl").read_bytes() == fits(5)
    assert [what for what, _ in events(run_dir, "note") if "restored" in what] == []


@pytest.mark.parametrize(
    ("copies", "remedy"),
    [
        ({"profile/profile.safetensors": SCALES}, "remove it, and the checkpoint's copy is taken, or start a new run"),
        ({}, "put it back, or start a new run"),
    ],
)
def test_another_profile_is_refused(
    tmp_path: Path, small_plan: Callable, copies: dict[str, bytes], remedy: str
) -> None:
    plan = small_plan(tmp_path, steps=9)
    run_dir = stopped(plan)
    save(run_dir, 3, files=copies, profile=SEALED)
    (run_dir / "profile").mkdir()
    (run_dir / "profile" / "profile.safetensors").write_bytes(b"others")
    path = run_dir / "profile" / "profile.safetensors"
    assert misfits(run_dir, plan) == [(f"{path}: it is not the file that global_step_3 was trained with", remedy)]


def test_a_profile_that_is_gone_and_was_not_copied_is_refused(tmp_path: Path, small_plan: Callable) -> None:
    plan = small_plan(tmp_path, steps=9)
    run_dir = stopped(plan)
    save(run_dir, 3, profile=SEALED)
    ((fact, _),) = misfits(run_dir, plan)
    assert fact.endswith(": it is not the file that global_step_3 was trained with")


# UAQ: `here` is the mark of the run's scaled model, None: the folder is gone.


@pytest.mark.parametrize(
    ("saved", "here", "scale", "why"),
    [
        (mark(), mark(), 1.5, ""),
        (mark(), None, 1.5, ""),  # made again
        (None, mark(), 1.5, "the weights of global_step_3 are scaled by 1 (UAQ), and the plan says 1.5"),
        (None, None, None, ""),
        (mark(), mark(), 2.0, "the weights of global_step_3 are scaled by 1.5 (UAQ), and the plan says 2"),
        (mark(), None, 2.0, "the weights of global_step_3 are scaled by 1.5 (UAQ), and the plan says 2"),
        (mark(), mark(), None, "the weights of global_step_3 are scaled by 1.5 (UAQ), and the plan says 1"),
        (None, None, 1.5, "the weights of global_step_3 are scaled by 1 (UAQ), and the plan says 1.5"),
        (mark(), mark(model="bb"), 1.5, "uaq.json: it is of another model than global_step_3 was trained with"),
        (mark(), b"[]", 1.5, "uaq.json: not a mark of UAQ: Input should be an object"),
    ],
)
def test_the_scale_of_the_weights_is_the_checkpoints(
    tmp_path: Path, small_plan: Callable, saved: bytes | None, here: bytes | None, scale: float | None, why: str
) -> None:
    plan = small_plan(tmp_path, steps=9)
    run_dir = stopped(plan)
    save(run_dir, 3, files={"uaq.json": saved} if saved else {})
    folder = run_dir / "scaled"
    plan = plan.replace(uaq=UaqPlan(scale=scale, folder=str(folder)) if scale else None)
    if here:
        folder.mkdir()
        (folder / "uaq.json").write_bytes(here)
    facts = [fact for fact, _ in misfits(run_dir, plan)]
    assert len(facts) == bool(why) and all(fact.endswith(why) for fact in facts)


def adapter(*, alpha: int = 16) -> bytes:
    return json.dumps({"r": 8, "lora_alpha": alpha, "target_modules": ["v_proj", "q_proj"]}).encode()


LORA = Lora(rank=8, alpha=16, targets=("q_proj", "v_proj"), dropout=0.1)
OTHER = "model.lora: it differs from global_step_3, which was trained with "


@pytest.mark.parametrize(
    ("saved", "lora", "why"),
    [
        (None, None, ""),
        (adapter(), LORA, ""),
        (adapter(alpha=32), LORA, OTHER + "rank 8, alpha 32, q_proj, v_proj"),
        (adapter(), None, OTHER + "rank 8, alpha 16, q_proj, v_proj"),
        (None, LORA, OTHER + "no LoRA"),
    ],
)
def test_the_adapter_is_the_checkpoints(
    tmp_path: Path, small_plan: Callable, saved: bytes | None, lora: Lora | None, why: str
) -> None:
    plan = small_plan(tmp_path, steps=9)
    run_dir = stopped(plan)
    files = {"actor/data.pt": b"1"} | ({"actor/adapter/adapter_config.json": saved} if saved else {})
    save(run_dir, 3, files=files)
    plan = plan.replace(model=plan.model.replace(lora=lora))
    assert misfits(run_dir, plan) == ([(why, "put it back, or start a new run")] if why else [])


@pytest.mark.parametrize(("saved", "now"), [(a, b) for a in Dtype for b in Dtype])
def test_the_dtype_is_the_checkpoints(tmp_path: Path, small_plan: Callable, saved: Dtype, now: Dtype) -> None:
    """In FP16 it has the state of what scales gradients."""
    plan = small_plan(tmp_path, steps=9)
    run_dir = stopped(plan)
    save(run_dir, 3, files={"actor/data.pt": b"1"} | ({"actor/scaler.json": b"{}"} if saved is Dtype.FP16 else {}))
    plan = plan.replace(trainer=plan.trainer.replace(dtype=now))
    fact = f"trainer.dtype: global_step_3 was trained in {saved}, and the plan says {now}"
    assert misfits(run_dir, plan) == ([] if saved is now else [(fact, "put it back, or start a new run")])


def test_a_scaled_model_that_is_made_again_is_of_the_same_model(tmp_path: Path, small_plan: Callable) -> None:
    plan = small_plan(tmp_path, steps=9)
    run_dir = stopped(plan)
    checkpoint = save(run_dir, 3, files={"uaq.json": mark()})
    folder = run_dir / "scaled"
    plan = plan.replace(uaq=UaqPlan(scale=1.5, folder=str(folder)), resume_from=str(checkpoint))
    assert not is_scaled(plan)
    for model, is_the_one in (("aa", True), ("bb", False)):
        folder.mkdir()
        (folder / "uaq.json").write_bytes(mark(model=model))
        if is_the_one:
            assert is_scaled(plan)
        else:
            with pytest.raises(EngineError, match="made from another model than global_step_3 was trained with"):
                is_scaled(plan)
        shutil.rmtree(folder)
