"""Settings of the rollout engines, and how they may change their scheme while the run lasts. Pure but for config.json
and a profile's file."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from appliance.corrections.registry import METHODS
from appliance.gguf.source import gguf_facts
from appliance.guard.policy import Action
from appliance.plan.derive import Book
from appliance.recipe.schema import Recipe
from appliance.recipe.text import full_path
from appliance.record.plan import ProfilePlan, RunPlan, WeightsPlan
from appliance.settings.sections import Guard, Quantization, Rollout, SchemeChange
from appliance.terms.devices import AUTO
from appliance.terms.families import EXPERTS
from appliance.terms.schemes import Scheme
from appliance.terms.settings import OldLogProbs
from appliance.terms.shapes import ModelShape, read_shape

PROFILE_FOLDER = "profile"
_PROVE_EVERY = 16
USUAL_TOP_LOG_PROBS = 20
_MOST_LAYERS = 1024  # that are asked for; what is larger is not a model's number of layers

USUAL_ACTIONS = (Action.WARN, Action.TIGHTEN, Action.BF16, Action.STOP)
CHANGES_ENGINES = (Action.RAISE_PRECISION, Action.BF16)


def plan_rollout(recipe: Recipe, *, automatic: Scheme, book: Book) -> Rollout:
    """Resolve the section: the scheme of each engine, and the number of top log-probs. automatic: the scheme that
    `auto` means on this device."""
    rollout = recipe.rollout
    schemes = [automatic if choice == AUTO else choice for choice in rollout.schemes]
    replicas = tuple(schemes[rank % len(schemes)] for rank in range(recipe.topology.engines))
    return rollout.replace(
        scheme=next((scheme for scheme in replicas if scheme.quantised), replicas[0]),
        replicas=replicas,
        top_log_probs=_top_log_probs(recipe, book=book),
    )


def _top_log_probs(recipe: Recipe, *, book: Book) -> int:
    top_log_probs, method = recipe.rollout.top_log_probs, METHODS[recipe.correction.method]
    if top_log_probs is not None:
        return top_log_probs
    if method.centers:
        return book.note("rollout.top_log_probs", USUAL_TOP_LOG_PROBS, f"`{method.name}` needs them; the source has 20")
    return 0


def plan_quantization(
    recipe: Recipe, *, rollout: Rollout, profile: ProfilePlan | None, shape: ModelShape | None, book: Book
) -> Quantization:
    """Resolve the section: how often layers are proven. rollout, profile: the plan's.  shape: of the model, None where
    it is not known."""
    profile_setting = recipe.quantization.profile
    prove_every, why = _prove_every(recipe, shape=shape)
    if rollout.scheme.quantised:
        book.note("quantization.prove_every", prove_every, why)
    if profile is not None:
        where_from = "made from the model and prompts of the task, or found in the cache from an earlier run"
        book.note("quantization.profile", profile_setting, where_from if profile_setting == AUTO else "as given")
    return recipe.quantization.replace(prove_every=prove_every)


def _prove_every(recipe: Recipe, *, shape: ModelShape | None) -> tuple[int, str]:
    """Return (syncs within which each layer is proven once, why)."""
    if recipe.quantization.prove_every:
        return recipe.quantization.prove_every, "as given"
    if shape is not None and shape.is_tiny:
        return 1, f"every quantised layer is proven at every sync: the model has only {shape.millions}"
    return _PROVE_EVERY, f"1/{_PROVE_EVERY} of the quantised layers is proven at each sync, all of them at the first"


def plan_profile(recipe: Recipe, *, rollout: Rollout, run_dir: Path) -> ProfilePlan | None:
    """Plan the run's profile; None where no engine uses one. rollout: the plan's."""
    quantization = recipe.quantization
    scheme = next((scheme for scheme in rollout.replicas if quantization.uses_profile(scheme)), None)
    if scheme is None:
        return None
    source = "" if quantization.profile == AUTO else str(full_path(quantization.profile))
    return ProfilePlan(folder=str(run_dir / PROFILE_FOLDER), source=source, scheme=scheme)


def plan_eager(rollout: Rollout, *, is_cpu: bool, one_flow: bool, experts: bool, book: Book) -> bool:
    """Decide whether the engines of a plan are eager: all of them where one has to be, as verl has one setting.
    experts: whether a quantised engine has experts among what it quantises."""
    eager = any(is_eager(scheme, is_cpu=is_cpu, one_flow=one_flow, experts=experts) for scheme in rollout.replicas)
    if eager and not is_cpu:
        why = "quantised experts run one by one, which no CUDA graph can hold"
        if one_flow:
            why = "the trainer calls the same kernels, one by one, in vLLM's batch-invariant mode: rollouts take longer"
        book.note("rollout.enforce_eager", True, why)
    return eager


def is_eager(scheme: Scheme, *, is_cpu: bool, one_flow: bool, experts: bool) -> bool:
    """Return whether an engine runs without CUDA graphs and torch.compile. experts: whether it quantises experts."""
    return is_cpu or one_flow or (experts and scheme.quantised)


def layers_with_experts(weights: WeightsPlan) -> int:
    """Count the layers of a model that have experts, by its config.json; 0 without experts, and where none is at
    hand."""
    shape = None if weights.is_cached else read_shape(Path(weights.name_or_path) / "config.json")
    if weights.gguf:
        shape = gguf_facts(Path(weights.gguf)).shape
    return max(1, shape.layers) if shape and shape.experts else 0


def quantises_experts(ignore: Sequence[str], *, layers: int) -> bool:
    """Return whether a quantised engine has experts among what it quantises. layers: as layers_with_experts."""
    return layers > 0 and not keeps_experts(ignore, layers=layers)


def keeps_experts(ignore: Sequence[str], *, layers: int) -> bool:
    """Return whether `quantization.ignore` names the experts of every layer, as vLLM matches names. layers: >= 1."""
    names = (f"model.layers.{layer}.{EXPERTS}" for layer in range(min(layers, _MOST_LAYERS)))
    return all(any(_names(entry, name) for entry in ignore) for name in names)


def _names(entry: str, name: str) -> bool:
    if not entry.startswith("re:"):
        return entry == name
    try:
        return re.match(entry.removeprefix("re:"), name) is not None
    except re.error:  # the engine says so
        return False


def plan_guard(
    recipe: Recipe,
    *,
    rollout: Rollout,
    eager: bool,
    old_log_probs: OldLogProbs,
    is_cpu: bool,
    experts: bool,
    book: Book,
) -> Guard:
    """Resolve the section: the actions, and how engines change their scheme. rollout, eager: the plan's.  experts:
    whether a quantised engine has experts among what it quantises, False where that is not known yet."""
    usual, why_usual = USUAL_ACTIONS, "the usual ladder"
    if old_log_probs is OldLogProbs.ROLLOUT:
        usual = tuple(action for action in usual if action is not Action.TIGHTEN)
        why_usual = "without `tighten`: a correction has nothing to act on"
    actions = usual if recipe.guard.actions is None else recipe.guard.actions
    if recipe.guard.scheme_change is not SchemeChange.AUTO:
        switching, why = recipe.guard.scheme_change, "as given"
    elif prevents := why_not_live(
        rollout, recipe.quantization, eager=eager, actions=actions, is_cpu=is_cpu, experts=experts
    ):
        switching, why = SchemeChange.RESTART, f"{prevents}: new rollout engines take over, the trainer stays"
    else:
        why = "engines run eagerly: a layer changes with a weight update, proven like any other"
        switching = SchemeChange.LIVE
    if rollout.scheme.quantised:
        book.note("rollout.scheme_changes", switching, why)
    if recipe.guard.actions is None:
        book.note("guard.actions", ", ".join(actions), why_usual)
    return recipe.guard.replace(actions=actions, scheme_change=switching)


def why_not_live(
    rollout: Rollout,
    quantization: Quantization,
    *,
    eager: bool,
    actions: tuple[Action, ...],
    is_cpu: bool,
    experts: bool,
) -> str:
    """Say what prevents a change of scheme with a weight update; empty where nothing does. On a GPU the new tensors of
    a layer would lie outside the memory that vLLM's sleep mode frees, and its own FP8 layers cannot change. rollout,
    eager: the plan's."""
    if not eager:
        return "the engines hold CUDA graphs and compiled layers, which know one scheme"
    if experts:
        return "quantised experts cannot change their scheme while the engine runs"
    if not is_cpu:
        return "on a GPU a layer that changed would keep memory while the engine sleeps"
    emulates = any(map(quantization.emulates, rollout.replicas))
    if emulates and rollout.tensor_parallel > 1 and Action.RAISE_PRECISION in actions:
        return "an engine of several ranks cannot change from one emulated scheme to another while it runs"
    return ""


def finer_schemes(plan: RunPlan) -> tuple[Scheme, ...]:
    """Return the schemes to which rollouts may be raised and still be quantised."""
    return plan.rollout.scheme.spec.finer if plan.guard.ranks_layers else ()


def plan_validation(recipe: Recipe, *, rollout: Rollout, switching: SchemeChange, steps: int) -> tuple[int, str]:
    """Return (steps between validations in BF16 beside the run's scheme, 0 for none; why)."""
    every_steps = recipe.trainer.validate_bf16_every
    if not rollout.scheme.quantised:
        return 0, "rollouts are in BF16 already: one validation is both"
    costs = "every validation in BF16 starts the engines twice" if switching is SchemeChange.RESTART else ""
    if every_steps is not None:
        how = f"as given, and at the end{costs and ': '}{costs}"
        return every_steps, how if every_steps else "off"
    if costs:
        return 0, f"off: {costs}"
    return steps, "only at the end: it costs a validation and two weight updates"
