"""What each rollout engine is told, and how it may change its scheme while the run lasts. Pure but for config.json
and a profile's file."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from appliance.corrections.registry import METHODS
from appliance.errors import PreflightError
from appliance.files import digest_of
from appliance.gguf.source import gguf_facts
from appliance.guard.policy import Action
from appliance.plan.derive import Book
from appliance.recipe.schema import Forward, Recipe, SchemeChoice
from appliance.recipe.text import full_path
from appliance.record.plan import ModelPlan, ProfilePlan, RolloutPlan, RunPlan
from appliance.settings.sections import Guard, SchemeChange
from appliance.tasks.library import TINY_MODELS
from appliance.terms.families import EXPERTS
from appliance.terms.schemes import Scheme
from appliance.terms.settings import OldLogProbs, Quantisation
from appliance.terms.shapes import read_shape

PROFILE_FOLDER = "profile"
_AUTO, _NONE = "auto", "none"
_PROVE_EVERY = 16
USUAL_TOP_LOG_PROBS = 20
_MOST_LAYERS = 1024  # that are asked for; what is larger is not a model's number of layers

USUAL_ACTIONS = (Action.WARN, Action.TIGHTEN, Action.BF16, Action.STOP)
CHANGES_ENGINES = (Action.RAISE_PRECISION, Action.BF16)


def plan_rollout(
    recipe: Recipe, *, automatic: Scheme, run_dir: Path, capability: tuple[int, int] | None, experts: bool, book: Book
) -> RolloutPlan:
    """automatic: the scheme that `auto` means on this device.  experts: whether a quantised engine has some in it.
    capability: of the GPUs, None on a CPU."""
    rollout, is_cpu, one_flow = recipe.rollout, capability is None, recipe.trainer.forward is Forward.ROLLOUT
    schemes = [automatic if each is SchemeChoice.AUTO else Scheme(each.value) for each in rollout.schemes]
    engines = [schemes[rank % len(schemes)] for rank in range(recipe.topology.engines)]
    profile = str(run_dir / PROFILE_FOLDER) if recipe.quantization.profile != _NONE else ""
    eager = any(is_eager(each, is_cpu=is_cpu, one_flow=one_flow, experts=experts) for each in engines)
    planned = RolloutPlan(
        scheme=next((each for each in engines if each.quantised), engines[0]),
        replicas=tuple(_quantisation(recipe, scheme=each, profile=profile) for each in engines),
        tensor_parallel=rollout.tensor_parallel,
        samples_per_prompt=rollout.samples_per_prompt,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        prove_every=recipe.quantization.prove_every or (1 if recipe.model.builtin in TINY_MODELS else _PROVE_EVERY),
        eager=eager,
        top_log_probs=_top_log_probs(recipe, book=book),
    )
    if planned.scheme.quantised:
        book.note("quantization.prove_every", planned.prove_every, _why_so_often(recipe))
    if any(replica.profile for replica in planned.replicas):
        asked, made = recipe.quantization.profile, "made from the model and prompts of the task"
        found = f"{made}, or found in the cache from an earlier run"
        book.note("quantization.profile", asked, found if asked == _AUTO else "as given")
    if rollout.replicas:
        listed = ", ".join(str(each) for each in engines)
        book.note("rollout.replicas", listed, "one scheme per engine, the list repeated in order")
    if eager and not is_cpu:
        why = "quantised experts run one by one, which no graph holds"
        if one_flow:
            why = "the trainer calls the same kernels, one by one, in vLLM's batch-invariant mode: rollouts take longer"
        book.note("rollout.enforce_eager", True, why)
    return planned


def _top_log_probs(recipe: Recipe, *, book: Book) -> int:
    asked, method = recipe.rollout.top_log_probs, METHODS[recipe.correction.method]
    if asked is not None:
        return asked
    if method.centers:
        return book.note("rollout.top_log_probs", USUAL_TOP_LOG_PROBS, f"`{method.name}` needs them; the source has 20")
    return 0


def is_eager(scheme: Scheme, *, is_cpu: bool, one_flow: bool, experts: bool) -> bool:
    """Whether an engine runs without CUDA graphs and torch.compile. experts: whether a quantised one has some in it."""
    return is_cpu or one_flow or (experts and scheme.quantised)


def _why_so_often(recipe: Recipe) -> str:
    if recipe.quantization.prove_every:
        return "as given"
    if recipe.model.builtin in TINY_MODELS:
        return "every quantised layer is proven at every sync: the model is tiny"
    return f"1/{_PROVE_EVERY} of the quantised layers is proven at each sync, all of them at the first"


def _quantisation(recipe: Recipe, *, scheme: Scheme, profile: str) -> Quantisation:
    """profile: the run's own folder, for the one that is made, or given."""
    quantization = recipe.quantization
    uses = scheme.quantised and (scheme.spec.takes_profile or quantization.profile != _AUTO)
    return Quantisation(
        scheme=scheme,
        emulated=quantization.emulate and scheme.spec.can_emulate,
        ignore=quantization.ignore if scheme.quantised else (),
        profile=profile if uses else "",
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
        mismatch_budget=quantization.mismatch_budget,
        ignore=quantization.ignore,
    )


def refuse_other_profile(now: ProfilePlan | None, *, before: ProfilePlan | None, made: Path) -> None:
    """A run's profile is made, or copied, once: another one would stand in the plan, and the rollouts would have the
    first one's scales. before: as planned when it was made.  made: the file, which may not be there yet.  Raises
    PreflightError."""
    if now is None or before is None or not made.is_file():
        return
    if before.error_budget is not None and not now.source:
        message = "the run's profile was made with quantization.error_budget, which this version does not have"
        raise PreflightError(message, hint="finish it with the version that began it, or start a new run")
    differ = {
        "rollout.scheme": now.scheme is not before.scheme,
        "quantization.profile": _is_other_profile(now.source, before=before.source, made=made),
    }
    if not now.source:  # one that is named was made without this recipe
        differ |= {
            "quantization.smoothing": now.smoothing != before.smoothing,
            "quantization.mismatch_budget": now.mismatch_budget != before.mismatch_budget,
            "quantization.ignore": now.ignore != before.ignore,
        }
    if keys := [key for key, is_other in differ.items() if is_other]:
        message = f"the run's profile was made with another {', '.join(keys)}, and is made once"
        raise PreflightError(message, hint="put back what the run has, or start a new run")


def _is_other_profile(source: str, *, before: str, made: Path) -> bool:
    """A path may be another and name the same: of a run that was moved, or from another folder."""
    if source == before or not (source and before):
        return source != before
    file = Path(source) / made.name if Path(source).is_dir() else Path(source)
    return digest_of(file) not in ("", digest_of(made))


def layers_with_experts(model: ModelPlan) -> int:
    """Number of layers of a model with experts, by its config.json; 0 without experts, and where none is at hand."""
    shape = None if model.builtin else read_shape(Path(model.path) / "config.json")
    if model.gguf:
        shape = gguf_facts(Path(model.gguf)).shape
    return max(1, shape.layers) if shape and shape.experts else 0


def quantises_experts(ignore: Sequence[str], *, layers: int) -> bool:
    """Whether a quantised engine has experts among what it quantises. layers: as layers_with_experts."""
    return layers > 0 and not keeps_experts(ignore, layers=layers)


def keeps_experts(ignore: Sequence[str], *, layers: int) -> bool:
    """Whether `quantization.ignore` names the experts of every layer, as vLLM matches names. layers: >= 1."""
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
    recipe: Recipe, *, rollout: RolloutPlan, old_log_probs: OldLogProbs, is_cpu: bool, experts: bool, book: Book
) -> Guard:
    """experts: whether a quantised engine has some in it, False where that is not known yet."""
    usual, why_usual = USUAL_ACTIONS, "the usual ladder"
    if old_log_probs is OldLogProbs.ROLLOUT:
        usual = tuple(each for each in usual if each is not Action.TIGHTEN)
        why_usual = "without `tighten`: a correction has nothing to act on"
    actions = usual if recipe.guard.actions is None else recipe.guard.actions
    if recipe.guard.scheme_change is not SchemeChange.AUTO:
        switching, why = recipe.guard.scheme_change, "as given"
    elif prevents := why_not_live(rollout, actions=actions, is_cpu=is_cpu, experts=experts):
        switching, why = SchemeChange.RESTART, f"{prevents}: new rollout engines take over, the trainer stays"
    else:
        why = "engines run eagerly: a layer changes with a weight update, proven like any"
        switching = SchemeChange.LIVE
    if rollout.scheme.quantised:
        book.note("rollout.scheme_changes", switching, why)
    if recipe.guard.actions is None:
        book.note("guard.actions", ", ".join(actions), why_usual)
    return recipe.guard.replace(actions=actions, scheme_change=switching)


def why_not_live(rollout: RolloutPlan, *, actions: tuple[Action, ...], is_cpu: bool, experts: bool) -> str:
    """What prevents a change of scheme with a weight update, or nothing. On a GPU the new tensors of a layer would lie
    outside the memory that vLLM's sleep mode frees, and its own FP8 layers cannot change."""
    if not rollout.eager:
        return "the engines hold CUDA graphs and compiled layers, which know one scheme"
    if experts:
        return "quantised experts cannot change their scheme while the engine runs"
    if not is_cpu:
        return "on a GPU a layer that changed would keep memory while the engine sleeps"
    if rollout.emulated and rollout.tensor_parallel > 1 and Action.RAISE_PRECISION in actions:
        return "an engine of several ranks cannot change from one emulated scheme to another while it runs"
    return ""


def finer_schemes(plan: RunPlan) -> tuple[Scheme, ...]:
    """What the rollouts may be raised to and still be quantised."""
    return plan.rollout.scheme.spec.finer if plan.guard.ranks_layers else ()


def plan_validation(recipe: Recipe, *, rollout: RolloutPlan, switching: SchemeChange, steps: int) -> tuple[int, str]:
    """(steps between validations in BF16 beside the run's scheme, 0 for none; why)."""
    asked = recipe.trainer.validate_bf16_every
    if not rollout.scheme.quantised:
        return 0, "rollouts are in BF16 already: one validation is both"
    costs = "every validation in BF16 starts the engines twice" if switching is SchemeChange.RESTART else ""
    if asked is not None:
        how = f"as given, and at the end{costs and ': '}{costs}"
        return asked, how if asked else "off"
    if costs:
        return 0, f"off: {costs}"
    return steps, "only at the end: it costs a validation and two weight updates"
