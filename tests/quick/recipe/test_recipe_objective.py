"""What is maximised: presets, what goes with what, and that nothing is ignored."""

from __future__ import annotations

from pathlib import Path

import pytest
from pytest import approx
from test_recipe_rules import only

from appliance.corrections.objective import LOSSES, Advantage, Aggregate, Loss
from appliance.corrections.registry import METHODS
from appliance.errors import RecipeError
from appliance.recipe.load import load_recipe, to_yaml
from appliance.recipe.schema import Recipe
from appliance.settings.sections import Algorithm
from appliance.terms.settings import Schedule

PAGE = Path(__file__).parents[3] / "docs" / "algorithms.md"
NO_CAP = "correction.cap=null"
FP16 = ("trainer.dtype=fp16", "quantization.profile=none")
OWN = (
    "task.kind=own",
    "task.train_file=problems.jsonl",
    "task.truth=answer",
    "task.rewards=[{name: number}, {name: length, target: 9}]",
    "task.difficulty=2",
)


def loaded(*sets: str) -> Recipe:
    return load_recipe("arithmetic-tiny-int8", sets=sets)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("grpo", (Advantage.GRPO, Loss.PPO, "token-mean", (0.2, 0.2))),
        ("dapo", (Advantage.GRPO, Loss.PPO, "token-mean", (0.2, 0.2))),
        ("dr-grpo", (Advantage.DR_GRPO, Loss.PPO, "constant", (0.2, 0.2))),
        ("gspo", (Advantage.GRPO, Loss.GSPO, "sequence-mean", (3e-4, 4e-4))),
    ],
)
def test_a_preset_is_written_out_in_the_resolved_recipe(tmp_path: Path, kind: str, expected: tuple) -> None:
    file = tmp_path / "r.yaml"
    file.write_text(to_yaml(loaded(f"algorithm.kind={kind}")))
    found = load_recipe(str(file)).algorithm
    assert (found.advantage, found.loss, found.aggregate, (found.clip_low, found.clip_high)) == expected


@pytest.mark.parametrize("kind", ["[gspo]", "{a: 1}", "7"])
def test_a_kind_that_is_no_name_is_refused(kind: str) -> None:
    with pytest.raises(RecipeError) as caught:
        loaded(f"algorithm.kind={kind}")
    assert [problem for problem, _ in caught.value.problems if "algorithm.kind" in problem]


def test_what_is_given_beside_a_preset_holds() -> None:
    found = loaded("algorithm.kind=dr-grpo", "algorithm.aggregate=token-mean").algorithm
    assert (found.advantage, found.aggregate) == (Advantage.DR_GRPO, Aggregate.TOKEN_MEAN)


@pytest.mark.parametrize("loss", Loss)
@pytest.mark.parametrize("method", METHODS)
def test_each_correction_goes_with_a_loss_or_is_refused_with_the_reason(loss: Loss, method: str) -> None:
    sets = (f"algorithm.loss={loss}", f"correction.method={method}", NO_CAP)
    if why := METHODS[method].conflict(loss):
        message, hint = only(*sets)
        assert message == f"correction.method: {why}" and hint.startswith("use `")
    else:
        assert loaded(*sets).algorithm.loss is loss


def test_the_reasons_say_what_would_go_wrong() -> None:
    assert METHODS["calibrated-clipping"].conflict(Loss.GSPO) == (
        "`calibrated-clipping` moves the clip bounds of single tokens, and `gspo` has one ratio for a whole response"
    )
    assert METHODS["acr"].conflict(Loss.CISPO) == (
        "`acr` moves the clip bounds of single tokens, and `cispo` has a bound that is a weight and stops no gradient: "
        "a wider one gives back what the cap took"
    )
    assert METHODS["tis"].conflict(Loss.GEO_MEAN) == (
        "`tis` weights a response token by token, and `geo-mean` has one product for all of them"
    )


def table() -> list[str]:
    rows = ["| `correction.method` |" + "".join(f" `{loss}` |" for loss in Loss), "| --- |" + " --- |" * len(Loss)]
    for name, method in METHODS.items():
        rows.append(f"| `{name}` |" + "".join(" no |" if method.conflict(loss) else " yes |" for loss in Loss))
    return rows


def test_the_page_has_the_table_of_what_goes_with_what() -> None:
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("|")]
    wanted = table()
    start = lines.index(wanted[0]) if wanted[0] in lines else 0
    assert lines[start : start + len(wanted)] == wanted, "docs/algorithms.md is to have:\n" + "\n".join(wanted)


@pytest.mark.parametrize("loss", Loss)
def test_a_bound_that_a_loss_has_not_is_refused(loss: Loss) -> None:
    for key in ("clip_low", "clip_high", "dual_clip"):
        usual = min(Algorithm(loss=loss).bounds[key], 0.5) if key == "clip_low" else Algorithm(loss=loss).bounds[key]
        sets = (f"algorithm.loss={loss}", "correction.method=none", NO_CAP, f"algorithm.{key}={usual}")
        if key in LOSSES[loss].bounds:
            assert loaded(*sets).algorithm.bounds[key] == approx(usual)
        else:
            assert only(*sets) == (f"algorithm.{key}: `{loss}` has no such bound", "remove it, or set it to null")


@pytest.mark.parametrize("loss", [loss for loss in Loss if loss.spec.own_aggregate])
def test_a_mean_that_a_loss_has_not_is_refused(loss: Loss) -> None:
    sets = (f"algorithm.loss={loss}", "correction.method=none", NO_CAP)
    assert loaded(*sets, "algorithm.aggregate=sequence-mean").algorithm.aggregated is Aggregate.SEQUENCE_MEAN
    message = f"algorithm.aggregate: `{loss}` is aggregated as a mean over responses, and in no other way"
    assert only(*sets, "algorithm.aggregate=constant") == (message, "use `sequence-mean`, or null")


@pytest.mark.parametrize(
    ("sets", "problem"),
    [
        (
            ("algorithm.kl_estimator=k2",),
            ("algorithm.kl_estimator: there is no divergence without a weight", "remove it, or give algorithm.kl"),
        ),
        (
            ("algorithm.kl=0.1", "algorithm.kl_estimator=k1"),
            (
                "algorithm.kl_estimator: `k1` in the loss has a gradient of mean 0 wherever the policy is: it holds "
                "nothing back",
                "use `k3` or `k2`, or kl_in: reward",
            ),
        ),
        (
            ("algorithm.kl=0.1", "trainer.forward=rollout"),
            (
                "algorithm.kl: the reference computes in BF16: with `rollout` the divergence would be the "
                "quantisation's",
                "use trainer.forward: bf16, or algorithm.kl: 0",
            ),
        ),
        (
            ("algorithm.entropy_bonus=0.01", "trainer.forward=rollout"),
            (
                "algorithm.entropy_bonus: with `rollout` the entropy has no gradient, and a bonus for it would do "
                "nothing",
                "use trainer.forward: bf16, or algorithm.entropy_bonus: 0",
            ),
        ),
        (
            ("algorithm.advantage=gdpo",),
            (
                "algorithm.advantage: `gdpo` normalises each of several rewards, and this task has one",
                "use another advantage, such as `grpo`",
            ),
        ),
        (
            (*OWN, "algorithm.advantage=gdpo", "algorithm.kl=0.1", "algorithm.kl_in=reward"),
            (
                "algorithm.advantage: `gdpo` reads the task's rewards one by one, and would ignore the KL term",
                "set kl_in to `loss`, or use another advantage, such as `grpo`",
            ),
        ),
        (
            ("optimizer.min_lr_ratio=0.1",),
            ("optimizer.min_lr_ratio: a constant rate does not sink", "remove it, or use `cosine` or `linear`"),
        ),
        (
            ("trainer.dtype=fp16",),
            (
                "trainer.dtype: a profile scales weights, and FP16 has no numbers as small as some of them become",
                "use quantization.profile: none, or trainer.dtype: bf16",
            ),
        ),
        (
            (*FP16, "trainer.forward=rollout"),
            (
                "trainer.forward: the rollouts' forward has its kernels in BF16",
                "use trainer.forward: bf16, or trainer.dtype: bf16",
            ),
        ),
        (
            (*FP16, "trainer.forward=linears"),
            (
                "trainer.forward: the rollouts' forward has its kernels in BF16",
                "use trainer.forward: bf16, or trainer.dtype: bf16",
            ),
        ),
        (
            (*FP16, "model.lora.rank=8"),
            (
                "model.lora: with an adapter the model is kept and merged in BF16",
                "use model.lora: null, or trainer.dtype: bf16",
            ),
        ),
        (
            (*FP16, "correction.uaq_scale=2"),
            (
                "correction.uaq_scale: FP16 has no numbers as small as UAQ's weights",
                "use correction.uaq_scale: null, or trainer.dtype: bf16",
            ),
        ),
        (
            (*FP16, "rollout.scheme=fp8-channel", "quantization.emulate=true"),
            ("rollout.scheme: engines have `fp8-channel` in BF16 alone", "use `int8` or `bf16`"),
        ),
        (
            (*FP16, "rollout.scheme=auto", "rollout.replicas=[int8, fp8]", "cluster.gpus_per_node=2"),
            ("rollout.replicas: engines have `fp8` in BF16 alone", "use `int8` or `bf16`"),
        ),
    ],
)
def test_rule(sets: tuple[str, ...], problem: tuple[str, str]) -> None:
    assert only(*sets) == problem


def test_linear_goes_from_the_warm_up_down_to_what_is_left_at_the_end() -> None:
    rates = [Schedule.LINEAR.rate(step, steps=10, warmup_steps=2, least=0.1) for step in range(12)]
    assert rates == approx([0, 0.5, *(1 - 0.9 * done / 8 for done in range(8)), 0.1, 0.1])
