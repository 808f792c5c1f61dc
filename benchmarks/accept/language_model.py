"""A real language model, trained as its recipe says, by BF16 and by INT8 rollouts: what it learns, how far trainer and
engine are apart, and how fast its rollouts are.

Where neither the package index nor a folder of packages has the model, its shapes are trained with random weights,
which learn nothing: the row says so.
"""

from __future__ import annotations

import json
import math
from statistics import mean, median
from typing import Any

from appliance.plan.build import CACHE_NAME
from appliance.tasks.library import PACKAGED_MODELS
from appliance.tasks.packaged_model import package_facts
from benchmarks.accept.ground import Ground
from benchmarks.accept.training import TINY, hold_proofs, read_taken, run_training
from benchmarks.memory import Size, make_model

RECIPE = "smollm2-int8"
MODEL = "smollm2-135m"
STEPS, TINY_STEPS = 20, 2
LAST = 5  # steps whose mean reward is held against that of the first as many
SETS = (
    "trainer.validate_before=false",
    "trainer.validate_every=0",
    "trainer.validate_bf16_every=0",
    "guard.actions=[]",
)
TINY_BATCH = (
    "cluster.device=cpu",
    "rollout.kv_cache_gb=1",
    "rollout.samples_per_prompt=2",
    "batch.prompts_per_step=4",
    "batch.mini_batch_prompts=4",
    "batch.micro_batch_sequences=8",
)


def train(ground: Ground, *, schemes: tuple[str, ...]) -> None:
    """A training by each scheme. Every step has finite figures and the scheme's rollouts, every update is proven, other
    weights than the first ones are sent, and the real model answers better at the end than at the beginning."""
    model, is_real = _model(ground)
    rollouts = {}
    for scheme in schemes:
        steps = _train(ground, scheme, model=model)
        rewards = [line["reward_mean"] for line in steps]
        ground.figure(f"{scheme}, reward of the first steps", mean(rewards[:LAST]))
        ground.figure(f"{scheme}, reward of the last steps", mean(rewards[-LAST:]))
        ground.figure(f"{scheme}, k3, median", median(line["mismatch_k3_kl"] for line in steps), "nats")
        ground.figure(f"{scheme}, k3, largest", max(line["mismatch_k3_kl"] for line in steps), "nats")
        for name in ("step_s", "rollout_s", "update_s", "sync_s"):
            ground.figure(f"{scheme}, {name}, median", median(line[name] for line in steps[1:]), "s")
        rollouts[scheme] = median(line["rollout_tokens_per_s"] for line in steps[1:])
        ground.figure(f"{scheme}, rollouts", rollouts[scheme], "tokens/s")
        if is_real:
            risen = mean(rewards[-LAST:]) > mean(rewards[:LAST])
            ground.hold(risen, f"{scheme}: the reward of the last {LAST} steps is not above that of the first {LAST}")
    for scheme in schemes[1:]:
        ground.figure(f"rollouts, {scheme} to {schemes[0]}", rollouts[scheme] / rollouts[schemes[0]], "times")


def _model(ground: Ground) -> tuple[tuple[str, ...], bool]:
    """Settings that name the model, and whether it is the real one."""
    packaged, cache_dir = PACKAGED_MODELS[MODEL], ground.folder.absolute() / "runs" / CACHE_NAME
    if ground.rehearsal:
        folder = make_model(TINY, folder=ground.folder / "model")
    elif problem := package_facts(packaged, cache_dir=cache_dir, ask_index=True).problem:
        ground.stand_in(f"{MODEL}: its shapes with random weights, which learn nothing: {problem}")
        shape = packaged.shape
        size = Size(
            kv_cache_gb=1,
            hidden=shape.hidden,
            intermediate=shape.intermediate,
            layers=shape.layers,
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            vocab=shape.vocab,
        )
        folder = make_model(size, folder=ground.folder / "model")
    else:
        return (f"model.builtin={MODEL}", "model.path=null"), True
    # Its tokenizer has a token for each byte: all prompts of the task stay.
    return ("model.builtin=null", f"model.path={folder.absolute()}", "task.max_prompt_tokens=128"), False


def _train(ground: Ground, scheme: str, *, model: tuple[str, ...]) -> list[dict[str, Any]]:
    """The metrics of its steps."""
    num_steps = TINY_STEPS if ground.rehearsal else STEPS
    sets = (
        *SETS,
        *model,
        *(TINY_BATCH if ground.rehearsal else ("cluster.device=auto",)),
        f"rollout.scheme={scheme}",
        f"trainer.steps={num_steps}",
        f"cluster.run_dir={(ground.folder / 'runs').absolute()}",
    )
    code, _ = run_training(ground, RECIPE, name=scheme, sets=sets, gpus=1)
    run_dir = ground.folder / "runs" / scheme
    ground.hold(code == 0, f"{scheme}: `appliance train` ended with {code}")
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["step"] > 0]
    ground.hold(
        [line["step"] for line in steps] == [*range(1, num_steps + 1)], f"{scheme}: there are {len(steps)} steps"
    )
    for line in steps:
        place = f"{scheme}, step {line['step']}"
        ground.hold(line["scheme"] == scheme, f"{place} was rolled out by {line['scheme']}")
        finite = all(math.isfinite(line[key]) for key in ("reward_mean", "grad_norm", "mismatch_k3_kl"))
        ground.hold(finite, f"{place} has a reward, gradient or mismatch that is not finite")
    sent = [json.loads(line)["manifest"] for line in (run_dir / "sync" / "trainer-0-0.jsonl").read_text().splitlines()]
    ground.hold(sent[-1] != sent[0], f"{scheme}: the weights that were sent at the end are the first ones")
    taken = read_taken(run_dir / "sync" / "rollout-0-0.jsonl")
    hold_proofs(ground, taken, scheme=scheme, tied=True, who=f"the engine of {scheme}")
    ground.hold([each.manifest for each in taken] == sent, f"{scheme}: the engine took other weights than were sent")
    return steps
