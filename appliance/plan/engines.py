"""What each rollout engine is told, and the profile that they share. Pure."""

from __future__ import annotations

from pathlib import Path

from appliance.plan.derive import Book
from appliance.recipe.schema import Recipe, SchemeChoice
from appliance.recipe.text import full_path
from appliance.record.plan import ExpectedAttestation, ProfilePlan, RolloutPlan
from appliance.terms.schemes import Scheme
from appliance.terms.settings import Quantisation

PROFILE_FOLDER = "profile"
_AUTO, _NONE = "auto", "none"
_PROVE_EVERY = 16


def plan_rollout(
    recipe: Recipe, *, automatic: Scheme, run_dir: Path, is_cpu: bool, experts: bool, book: Book
) -> RolloutPlan:
    """automatic: the scheme that `auto` means on this device.  experts: whether a quantised engine has some in it."""
    rollout = recipe.rollout
    schemes = [automatic if each is SchemeChoice.AUTO else Scheme(each.value) for each in rollout.schemes]
    engines = [schemes[rank % len(schemes)] for rank in range(recipe.topology.engines)]
    profile = str(run_dir / PROFILE_FOLDER) if recipe.quantization.profile != _NONE else ""
    prove_every, why = _prove_every(recipe)
    planned = RolloutPlan(
        scheme=next((each for each in engines if each.quantised), engines[0]),
        replicas=tuple(_quantisation(recipe, scheme=each, profile=profile) for each in engines),
        tensor_parallel=rollout.tensor_parallel,
        samples_per_prompt=rollout.samples_per_prompt,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        prove_every=prove_every,
        eager=is_cpu or (experts and any(each.quantised for each in engines)),
    )
    if planned.scheme.quantised:
        book.note("quantization.prove_every", prove_every, why)
    if any(replica.profile for replica in planned.replicas):
        book.note("quantization.profile", *_profile_choice(recipe))
    if rollout.replicas:
        listed = ", ".join(str(each) for each in engines)
        book.note("rollout.replicas", listed, "one scheme per engine, the list repeated in order")
    if planned.eager and not is_cpu:
        book.note("rollout.enforce_eager", True, "quantised experts run one by one, which no graph holds")
    return planned


def _prove_every(recipe: Recipe) -> tuple[int, str]:
    if recipe.quantization.prove_every:
        return recipe.quantization.prove_every, "as given"
    if recipe.model.builtin:
        return 1, "every quantised layer is proven at every sync: the model is tiny"
    return _PROVE_EVERY, f"1/{_PROVE_EVERY} of the quantised layers is proven at each sync, all of them at the first"


def _profile_choice(recipe: Recipe) -> tuple[str, str]:
    if recipe.quantization.profile == _AUTO:
        return "auto", "made from the model and prompts of the task, or found in the cache from an earlier run"
    return recipe.quantization.profile, "as given"


def _quantisation(recipe: Recipe, *, scheme: Scheme, profile: str) -> Quantisation:
    quantization = recipe.quantization
    return Quantisation(
        scheme=scheme,
        emulated=quantization.emulate and scheme.spec.can_emulate,
        ignore=quantization.ignore if scheme.quantised else (),
        profile=profile if scheme.spec.takes_profile else "",
        lm_head_fp32=recipe.rollout.lm_head_fp32,
    )


def plan_profile(recipe: Recipe, *, rollout: RolloutPlan) -> ProfilePlan | None:
    """None where no engine uses one."""
    users = [replica for replica in rollout.replicas if replica.profile]
    if not users:
        return None
    quantization = recipe.quantization
    given = "" if quantization.profile == _AUTO else str(full_path(quantization.profile))
    return ProfilePlan(
        folder=users[0].profile,
        source=given,
        scheme=users[0].scheme,
        smoothing=quantization.smoothing,
        error_budget=quantization.error_budget,
        ignore=quantization.ignore,
    )


def rollout_attestations(rollout: RolloutPlan, *, patches: tuple[str, ...]) -> tuple[ExpectedAttestation, ...]:
    """One per worker of each engine; ranks count over the engines."""
    return tuple(
        ExpectedAttestation(
            role="rollout",
            rank=index * rollout.tensor_parallel + rank,
            scheme=each.scheme,
            patches=patches,
            emulated=each.emulated,
        )
        for index, each in enumerate(rollout.replicas)
        for rank in range(rollout.tensor_parallel)
    )
