"""LoRA on the demo's task, by INT8 rollouts: it learns, and what is saved, exported and proven is the merged model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from trainings import FEW, Finished, train
from trainings import STEPS as FULL_STEPS

from appliance.corrections.centering import ScoreCenteringTis
from appliance.launch.command import run_export
from appliance.preflight.disk import BYTES_SAVED_PER_WEIGHT
from appliance.record.checkpoints import checkpoint_folder, read_manifest, read_saved
from appliance.record.plan import read_plan
from appliance.tasks.library import TINY_MODELS
from appliance.terms.shapes import Linear

pytestmark = [pytest.mark.e2e(minutes=3), pytest.mark.long]

STEPS = 20  # the recipe has 30
SHAPE = TINY_MODELS["tiny-arithmetic"].shape
ADAPTER = SHAPE.adapter_weights(32, targets=Linear)
OTHER_FILES = 250_000  # bytes of a checkpoint that are no weight: tokenizer, profile, state, names in pickles


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, with_tiny_cache: Callable[[Path], Path]) -> Finished:
    root = with_tiny_cache(tmp_path_factory.mktemp("runs"))
    sets = (f"trainer.steps={STEPS}", f"trainer.validate_every={STEPS}")
    finished = train(root, *sets, name="lora", recipe="arithmetic-tiny-lora-int8")
    assert finished.code == 0, finished.stderr[-4000:]
    return finished


def test_it_learns(run: Finished) -> None:
    """Greedy, 512 problems."""
    first, *_, last = run.json_lines("metrics.jsonl")
    assert (first["step"], last["step"], last["scheme"]) == (0, STEPS, "int8")
    assert first["val_reward_mean"] < 0.10
    assert last["val_reward_mean"] >= 0.90 and last["val_reward_bf16_mean"] >= 0.90
    assert last["val_samples"] == 512
    trained = json.loads((run.run_dir / "attest" / "trainer-0.json").read_text())["detail"]["trained"]
    assert trained == 2 * SHAPE.layers * len(Linear)
    assert run.left == ()


def test_the_exported_model_is_what_the_engines_proved_last(run: Finished) -> None:
    """Bit for bit, all tensors in one digest."""
    import torch
    from transformers import AutoModelForCausalLM

    from appliance.sync.manifest import Manifest, record_tensor

    sent = run.json_lines("sync/trainer-0-0.jsonl")
    proven = [line["sync"] for line in run.json_lines("sync/rollout-0-0.jsonl")]
    assert proven == [line["sync"] for line in sent] == list(range(1, len(sent) + 1))
    model = AutoModelForCausalLM.from_pretrained(run.run_dir / "model", dtype=torch.bfloat16)
    assert type(model).__name__ == "Qwen2ForCausalLM"
    held = tuple(record_tensor(name, tensor) for name, tensor in model.state_dict().items())
    assert Manifest(sync=sent[-1]["sync"], records=held).digest == sent[-1]["manifest"]
    assert Manifest(sync=sent[0]["sync"], records=held).digest != sent[0]["manifest"]


def test_a_checkpoint_has_the_adapter_and_its_optimizer_and_no_more(run: Finished, short: Finished) -> None:
    """short: full training of the same model."""
    folders = checkpoint_folder(run.run_dir, step=STEPS), checkpoint_folder(short.run_dir, step=FULL_STEPS)
    size, full = (read_manifest(folder).bytes for folder in folders)
    adam, full_adam = (sum(each.stat().st_size for each in folder.glob("actor/optim_*.pt")) for folder in folders)
    both = f"optimizer {adam / 1e6:.1f} and {full_adam / 1e6:.1f}"
    print(f"MB with LoRA and in full training: checkpoint {size / 1e6:.1f} and {full / 1e6:.1f}, {both}")  # noqa: T201
    assert 0 < size - ADAPTER * BYTES_SAVED_PER_WEIGHT < OTHER_FILES
    assert size < full / 4
    assert 0 < adam - 8 * ADAPTER < OTHER_FILES and 0 < full_adam - 8 * SHAPE.weights < OTHER_FILES  # two FP32 of each


def test_the_governor_and_the_best_checkpoint_go_with_an_adapter(
    with_tiny_cache: Callable[[Path], Path], tmp_path: Path
) -> None:
    """A bound that every step breaks takes rollouts to BF16, and of what was saved the newest and the best are left:
    the adapter alone in each, and a model for whoever asks. The loss is that of score centering, with and without
    weights: whole distributions of the merged policy are the engine's but for its INT8."""
    root, steps = with_tiny_cache(tmp_path), 6
    sets = (
        *("guard.k3_kl=1e-12", "guard.bad_steps=1", "guard.cooling_steps=0", "guard.actions=[warn, tighten, bf16]"),
        *("checkpoint.keep_best=true", "checkpoint.keep=1", "checkpoint.every_steps=1"),
        *("trainer.validate_every=1", "trainer.validate_before=false", f"trainer.steps={steps}", FEW),
        *("correction.method=score-centering", "correction.cap=null"),
    )
    done = train(root, *sets, name="governed", recipe="arithmetic-tiny-lora-int8")
    assert done.code == 0, done.stderr[-4000:]
    lines = done.json_lines("metrics.jsonl")
    assert [line["guard_level"] for line in lines] == ["observe", "warn", "tighten", "bf16", "bf16", "bf16"]
    assert [line["scheme"] for line in lines] == ["int8"] * 4 + ["bf16"] * 2
    assert [line["correction_cap"] for line in lines] == [None] * 2 + [ScoreCenteringTis.usual_cap] * 4
    assert all(0 < line["mismatch_top_kl"] < 1e-2 for line in lines)
    assert all(line["score_centering"] > 0 for line in lines if line["correction_cap"] is None)
    taken, sent = (done.json_lines(f"sync/{side}-0-0.jsonl") for side in ("rollout", "trainer"))
    assert [line["manifest"] for line in taken] == [line["manifest"] for line in sent]
    assert all(line["layers_proven"] == line["layers"] for line in taken)
    best = max(lines, key=lambda line: (line["val_reward_mean"], line["step"]))["step"]
    assert {each.step for each in read_saved(done.run_dir)} == {best, steps}
    for step in {best, steps}:
        saved = read_manifest(checkpoint_folder(done.run_dir, step=step)).bytes
        assert saved < SHAPE.weights * BYTES_SAVED_PER_WEIGHT / 4
        assert run_export(str(done.run_dir), run_root=root, step=step, output=tmp_path / f"step-{step}") == 0
    last = tmp_path / f"step-{steps}" / "model.safetensors"
    assert last.read_bytes() == (done.run_dir / "model" / "model.safetensors").read_bytes()


def test_the_adapter_alone_is_exported(run: Finished, tmp_path: Path) -> None:
    target = tmp_path / "adapter"
    assert run_export(str(run.run_dir), run_root=tmp_path, step=None, output=target, adapter=True) == 0
    names = {"adapter_config.json", "adapter_model.safetensors"}
    assert {each.name for each in target.iterdir()} == names
    for name in names:
        assert (target / name).read_bytes() == (run.run_dir / "model" / "adapter" / name).read_bytes()


def test_an_adapter_that_goes_alone_trains_and_its_model_comes_with_each_change_of_precision(
    with_tiny_cache: Callable[[Path], Path], tmp_path: Path
) -> None:
    """As the governor takes rollouts to BF16, and to a validation in BF16 and back; other updates have the adapter."""
    sets = (
        *("model.lora.sync=adapter", "guard.k3_kl=1e-12", "guard.bad_steps=1", "guard.cooling_steps=0"),
        *("guard.actions=[warn, bf16]", "trainer.validate_every=0", "trainer.validate_before=false"),
        *("trainer.steps=5", FEW),
    )
    done = train(with_tiny_cache(tmp_path), *sets, name="alone", recipe="arithmetic-tiny-lora-int8")
    assert done.code == 0, done.stderr[-4000:]
    lines = done.json_lines("metrics.jsonl")
    assert [line["scheme"] for line in lines] == ["int8"] * 3 + ["bf16"] * 2
    assert all(line["mismatch_k3_kl"] < 1e-2 for line in lines)
    taken, sent = (done.json_lines(f"sync/{side}-0-0.jsonl") for side in ("rollout", "trainer"))
    assert [line["manifest"] for line in taken] == [line["manifest"] for line in sent]
    alone = [line for line in taken if line["tensors"] == 2 * SHAPE.layers * len(Linear)]
    whole = [line for line in taken if line not in alone]
    assert {line["bytes"] for line in alone} == {2 * ADAPTER}  # in BF16
    assert all(line["bytes"] > 2 * SHAPE.weights for line in whole)
    assert [line["sync"] for line in whole][:2] == [1, 4] and len(alone) >= 3
    assert all(line["layers_proven"] == line["layers"] for line in taken)
    assert done.left == ()


def test_a_trainer_with_the_engines_codes_under_its_adapter_has_their_log_probs(
    with_tiny_cache: Callable[[Path], Path], tmp_path: Path
) -> None:
    """In whatever the guard makes of them: a cap below 1 cuts every weight, one level a step. The model that is left is
    the one in its files with the adapter merged in."""
    import torch
    from safetensors.torch import load_file

    climbing = ("correction.cap=0.9", "guard.bad_steps=1", "guard.cooling_steps=0")
    sets = (
        *("model.lora.sync=adapter", "trainer.forward=rollout", *climbing, "guard.actions=[raise-precision, bf16]"),
        *("trainer.validate_before=false", "trainer.validate_every=2", "trainer.validate_bf16_every=2"),
        *("trainer.steps=6", "rollout.temperature=0.8", FEW),
    )
    done = train(with_tiny_cache(tmp_path), *sets, name="codes", recipe="arithmetic-tiny-lora-int8")
    assert done.code == 0, done.stderr[-4000:]
    lines = done.json_lines("metrics.jsonl")
    layers = [("int8", 0)] * 2 + [("int8", 4), ("int8", 8)] + [("bf16", 16)] * 2
    assert [(line["scheme"], line["bf16_layers"]) for line in lines] == layers
    for line in lines:
        assert (line["mismatch_equal_fraction"], line["mismatch_k3_kl"]) == (1, 0)
        assert line["grad_norm"] > 0 and line["logprob_s"] == 0
    taken, sent = (done.json_lines(f"sync/{side}-0-0.jsonl") for side in ("rollout", "trainer"))
    assert [line["manifest"] for line in taken] == [line["manifest"] for line in sent]
    assert all(line["layers_proven"] == line["layers"] for line in taken)
    trainer = json.loads((done.run_dir / "attest" / "trainer-0.json").read_text())["detail"]
    assert (trainer["forward"], trainer["quantised"]) == ("rollout", [])
    model, base = done.run_dir / "model", read_plan(done.run_dir / "plan.json").weights.folder
    merged, weights = (load_file(folder / "model.safetensors") for folder in (model, base))
    adapter = load_file(model / "adapter" / "adapter_model.safetensors")
    for name, weight_NK in weights.items():
        a, b = (f"base_model.model.{name.removesuffix('weight')}lora_{part}.weight" for part in "AB")
        if a in adapter:
            assert bool(adapter[b].any())
            weight_NK = weight_NK + (adapter[b] @ adapter[a]).bfloat16()
        assert torch.allclose(merged[name].float(), weight_NK.float(), rtol=2.0**-7, atol=2.0**-10), name
    assert not (model / "profile").exists() and "FLASHRL_CONFIG" not in done.stderr  # served so it is another policy
    assert done.left == ()
