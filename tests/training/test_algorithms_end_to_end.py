"""Each value of each key of `algorithm`, `optimizer`, `model.lora` and `trainer.dtype` in a real training of three
steps with INT8 rollouts: several keys in each. In `make test-long`; that none is missing is in `make test`."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import fmean

import pytest
from trainings import FEW, HAS_FP8_CACHE, Finished, train

from appliance.corrections.objective import Advantage, Aggregate, Estimator, KlPlace, Loss
from appliance.corrections.registry import METHODS
from appliance.errors import RecipeError
from appliance.plan.verl_args import AGGREGATES, ESTIMATORS, LOSS_MODES
from appliance.recipe.load import load_recipe
from appliance.recipe.schema import Recipe
from appliance.record.checkpoints import checkpoint_folder
from appliance.settings.sections import Algorithm, AlgorithmKind, Forward, Lora, LoraSync, Optimizer
from appliance.terms.settings import Dtype, Schedule

pytestmark = pytest.mark.e2e(minutes=8)

STEPS = 3
COMMON = (
    FEW,
    f"trainer.steps={STEPS}",
    "trainer.validate_before=false",
    "trainer.validate_every=0",
    "trainer.validate_bf16_every=0",
    "batch.prompts_per_step=16",
    "batch.mini_batch_prompts=8",  # two updates a step: in the first every ratio is 1
    "correction.cap=null",
)
# Of a task of the user's own, for the advantage that reads several rewards.
OWN = (
    "task.kind=own",
    "task.train_file=problems.jsonl",
    "task.truth=answer",
    'task.rewards=[{name: regex, pattern: "^[3-6]"}, {name: regex, pattern: "[0-4]$", weight: 0.3}]',
)
TRAININGS: dict[str, tuple[str, ...]] = {
    "dr-grpo": (
        "algorithm.kind=dr-grpo",
        "algorithm.kl=0.1",
        "correction.method=score-centering-tis",  # whose words a reference is not asked for
        "rollout.top_p=0.9",  # but over which words its log-probs are
        "optimizer.schedule=linear",
        "optimizer.min_lr_ratio=0.1",
        "optimizer.warmup_steps=1",
        "optimizer.betas=[0.9, 0.95]",
        "optimizer.epsilon=1e-7",
    ),
    "gspo": (
        "algorithm.kind=gspo",
        "algorithm.advantage=rloo",
        "algorithm.kl=0.01",
        "algorithm.kl_estimator=k1",
        "algorithm.kl_in=reward",
        "algorithm.entropy_bonus=0.001",
        "optimizer.schedule=cosine",
        "optimizer.min_lr_ratio=0.2",
        "trainer.dtype=fp16",
        "quantization.profile=none",
    ),
    "cispo": (
        "algorithm.loss=cispo",
        "algorithm.advantage=reinforce++",
        "algorithm.kl=0.1",
        "algorithm.kl_estimator=k2",
        "correction.method=icepop",
        "optimizer.weight_decay=0.1",
        "optimizer.max_grad_norm=0.5",
        "model.lora={rank: 4, alpha: 8, targets: [v_proj, up_proj], sync: adapter}",
        f"rollout.kv_cache={'fp8' if HAS_FP8_CACHE else 'auto'}",  # whose scales are measured through the adapter
    ),
    "sapo": (
        "algorithm.kind=dapo",
        "algorithm.loss=sapo",
        "algorithm.advantage=opo",
        "algorithm.kl=0.01",
        "algorithm.kl_estimator=k2",
        "algorithm.kl_in=reward",
        "algorithm.max_generation_batches=0",
        "algorithm.overlong_tokens=2",
        "algorithm.overlong_penalty=0.5",
        "correction.method=adaptive",
        # its reference is the model without the adapter
        "model.lora={rank: 8, alpha: 16, targets: [q_proj, down_proj], dropout: 0.05}",
    ),
    "geo-mean": (
        "algorithm.loss=geo-mean",
        "algorithm.kl=0.01",
        "algorithm.kl_in=reward",
        "algorithm.clip_low=0.3",
        "algorithm.clip_high=0.3",
        "algorithm.entropy_bonus=0.001",
        "correction.method=tis-geometric",
        "optimizer.norm_fed_lr_scale=1.5",
    ),
    "gdpo": (
        *OWN,
        "algorithm.loss=tbpo",
        "algorithm.advantage=gdpo",
        "algorithm.dual_clip=1.001",
        "correction.method=tis-geometric",
        "trainer.forward=rollout",
        "rollout.top_log_probs=8",
        "rollout.top_k=5",
    ),
}
CLOSED: dict[str, set[str]] = {  # the values of what has few
    "advantage": set(Advantage),
    "aggregate": set(Aggregate),
    "dtype": set(Dtype),
    "kind": set(AlgorithmKind),
    "kl": {f"{each} in {place}" for each in Estimator for place in KlPlace} - {"k1 in loss"},
    "loss": set(Loss),
    "schedule": set(Schedule),
    "sync": set(LoraSync),
}
NUMBERS = {  # of which one other than the usual is tried
    f"{section}.{key}"
    for section, model in (("algorithm", Algorithm), ("optimizer", Optimizer), ("model.lora", Lora))
    for key in model.model_fields
} - {f"algorithm.{key}" for key in ("advantage", "aggregate", "kind", "kl_estimator", "kl_in", "loss")}
NUMBERS -= {"optimizer.schedule", "model.lora.sync"}


def values_of(recipe: Recipe) -> dict[str, str]:
    algorithm = recipe.algorithm
    return {
        "advantage": algorithm.advantage,
        "aggregate": algorithm.aggregated,
        "dtype": recipe.trainer.dtype,
        "kind": algorithm.kind,
        "kl": f"{algorithm.kl_estimator} in {algorithm.kl_in}" if algorithm.kl else "",
        "loss": algorithm.loss,
        "schedule": recipe.optimizer.schedule,
        "sync": recipe.model.lora.sync if recipe.model.lora else "",
    }


def numbers_of(recipe: Recipe) -> set[str]:
    """Those that are not the usual."""
    sections = {"algorithm": recipe.algorithm, "optimizer": recipe.optimizer, "model.lora": recipe.model.lora}
    return {
        f"{section}.{key}"
        for section, section_values in sections.items()
        if section_values is not None
        for key, field in type(section_values).model_fields.items()
        if getattr(section_values, key) != field.default
    }


def recipe_of(name: str) -> Recipe:
    return load_recipe("arithmetic-tiny-int8", sets=(*COMMON, *TRAININGS[name]))


def test_every_value_of_every_key_is_in_one_of_the_trainings() -> None:
    recipes = [recipe_of(name) for name in TRAININGS]
    covered = {key: {values_of(each)[key] for each in recipes} - {""} for key in CLOSED}
    numbers = NUMBERS.intersection(*[set().union(*map(numbers_of, recipes))])
    count = sum(map(len, covered.values()))
    counts = f"{count} values of {len(CLOSED)} keys and {len(numbers)} numbers in {len(TRAININGS)} trainings"
    sys.stdout.write(f"algorithms: {counts}\n")
    assert (covered, numbers) == (CLOSED, NUMBERS)
    assert counts == "31 values of 8 keys and 20 numbers in 6 trainings"


@pytest.mark.parametrize("refused", ["trainer.dtype=fp32", "algorithm.kind=ppo", "algorithm.kl_estimator=k1"])
def test_what_is_in_none_is_refused(refused: str) -> None:
    with pytest.raises(RecipeError):
        load_recipe("arithmetic-tiny-int8", sets=(*COMMON, "algorithm.kl=0.1", refused))


def problems(file: Path) -> None:
    pairs = [(a, b) for a in range(10, 40) for b in range(10, 30)]
    file.write_text("".join(json.dumps({"prompt": f"{a}+{b}=", "answer": str(a + b)}) + "\n" for a, b in pairs))


def rates(schedule: Schedule, *, peak: float, least: float, warmup: int) -> list[float]:
    """Of each step's updates."""
    rates_of_updates = []
    for before in range(STEPS):
        if before < warmup:
            rates_of_updates.append(peak * before / warmup)
            continue
        done = (before - warmup) / (STEPS - warmup)
        sunk = {
            Schedule.CONSTANT: 1.0,
            Schedule.LINEAR: 1 - (1 - least) * done,
            Schedule.COSINE: least + (1 - least) * (1 + math.cos(math.pi * done)) / 2,
        }[schedule]
        rates_of_updates.append(peak * sunk)
    return rates_of_updates


def trained(root: Path, name: str, *sets: str) -> Finished:
    file = root / "problems.jsonl"
    problems(file)
    sets = tuple(text.replace("problems.jsonl", str(file)) for text in (*TRAININGS[name], *sets))
    return train(root, *COMMON, *sets, name=name)


def lines_of(done: Finished) -> list[dict]:
    assert done.code == 0, done.stderr[-4000:]
    lines = done.json_lines("metrics.jsonl")
    assert [line["step"] for line in lines] == [*range(1, len(lines) + 1)]
    return lines


def optimizer_of(done: Finished) -> dict:
    """What AdamW had at the end."""
    import torch

    file = checkpoint_folder(done.run_dir, step=STEPS) / "actor" / "optim_world_size_1_rank_0.pt"
    first, *_ = torch.load(file, weights_only=False)["param_groups"]
    return first


@pytest.mark.long
@pytest.mark.parametrize("name", TRAININGS)
def test_three_steps_with_int8_rollouts(with_tiny_cache: Callable[[Path], Path], tmp_path: Path, name: str) -> None:
    """That the loss had the correction's weights in hand is held in every step, or the run ends; here: that it is the
    loss and the advantage which were asked for, that a reference was asked, and the rate of each step."""
    done = trained(with_tiny_cache(tmp_path), name)
    lines, recipe = lines_of(done), recipe_of(name)
    assert len(lines) == STEPS and {line["scheme"] for line in lines} == {"int8"}
    assert all(line["grad_norm"] > 0 and math.isfinite(line["grad_norm"]) for line in lines)
    driver, trainer, engine = (
        json.loads((done.run_dir / "attest" / f"{process}-0.json").read_text())["detail"]
        for process in ("driver", "trainer", "rollout-0")
    )
    assert engine["kv_cache"] == recipe.rollout.kv_cache
    algorithm = recipe.algorithm
    by_deviation = algorithm.advantage is not Advantage.DR_GRPO
    advantage = "gdpo" if algorithm.advantage is Advantage.GDPO else ESTIMATORS[algorithm.advantage]
    assert (driver["advantage"], driver["by_deviation"]) == (advantage, by_deviation)
    assert (trainer["loss"], trainer["aggregate"]) == (LOSS_MODES[algorithm.loss], AGGREGATES[algorithm.aggregated])
    assert [math.isfinite(line.get("reference_kl", math.nan)) for line in lines] == [bool(recipe.algorithm.kl)] * STEPS
    in_fp16 = recipe.trainer.dtype is Dtype.FP16
    if algorithm.kl and algorithm.kl_in is KlPlace.REWARD:  # of the policy before the update, at first the reference
        assert lines[0]["reference_kl"] == 0 != lines[-1]["reference_kl"]
    if recipe.trainer.forward is Forward.ROLLOUT:
        assert [line["mismatch_equal_fraction"] for line in lines] == [1] * STEPS
        assert [(line["mismatch_top_kl"], line["mismatch_top_equal_fraction"]) for line in lines] == [(0, 1)] * STEPS
    if METHODS[recipe.correction.method].centers:  # of the weights of this model none is cut
        assert all(0 < line["mismatch_top_kl"] < 1e-2 and line["score_centering"] >= 0 for line in lines)
    if lora := recipe.model.lora:
        adapter = json.loads((done.run_dir / "model" / "adapter" / "adapter_config.json").read_text())
        assert (adapter["r"], adapter["lora_alpha"], adapter["lora_dropout"]) == (lora.rank, lora.alpha, lora.dropout)
        assert sorted(adapter["target_modules"]) == sorted(lora.targets)
    assert [line.get("overflow_fraction", math.nan) < 1 for line in lines] == [in_fp16] * STEPS
    optimizer = recipe.optimizer
    expected = rates(
        optimizer.schedule,
        peak=optimizer.learning_rate,
        least=optimizer.min_lr_ratio,
        warmup=optimizer.warmup_steps,
    )
    assert [line["learning_rate"] for line in lines] == pytest.approx(expected)
    group = optimizer_of(done)
    assert (group["betas"], group["eps"]) == (optimizer.betas, optimizer.epsilon)
    assert (group["initial_lr"], group["weight_decay"]) == (optimizer.learning_rate, optimizer.weight_decay)
    clips = recipe.algorithm.loss.spec
    assert all(line["clipped_negative_fraction"] in (0, None) for line in lines) or not clips.keeps_gradient
    assert done.left == ()


@pytest.mark.long
def test_a_divergence_in_the_loss_keeps_the_model_nearer_to_the_start(
    with_tiny_cache: Callable[[Path], Path], tmp_path: Path
) -> None:
    """The same training with a weight that counts and with one of nothing, whose reference only measures. The mean of
    the last four steps: pulled back, a model swings around its start."""
    root = with_tiny_cache(tmp_path)
    sets = ("trainer.steps=8", "algorithm.kl_estimator=k3")
    ends = {}
    for name, weight in (("free", 1e-9), ("held", 10.0)):
        done = train(root, *COMMON, *sets, f"algorithm.kl={weight}", name=name)
        ends[name] = fmean(line["reference_kl"] for line in lines_of(done)[-4:])
    sys.stdout.write(f"k3 from the start in steps 5 to 8: {ends['free']:.4g} free, {ends['held']:.4g} held\n")
    assert ends["held"] < ends["free"] / 2
