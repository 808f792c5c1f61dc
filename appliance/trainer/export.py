"""The trained model out of a checkpoint, as the original class and in the original parametrisation.

The trainer calls it at the end of a run; `appliance export` starts it as a child, for it needs torch. Arguments of the
child: RUN (the run's folder) CHECKPOINT TARGET (the folder to make) REPORT (a folder whose events say what went wrong)
and, where only an adapter is asked for, ADAPTER_ONLY.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from appliance.errors import PreflightError, TrainingError
from appliance.files import is_full, whole_folder
from appliance.quant.files import CONFIG_FILE, PROFILE_FILE, engine_named, write_config
from appliance.quant.uaq import fold_back
from appliance.record.checkpoints import ADAPTER_FOLDER, PROFILE_FOLDER
from appliance.record.earlier_plans import with_keys_of_today
from appliance.record.events import exit_code_of
from appliance.record.plan import ProfilePlan, UaqPlan, WeightsPlan, engines_of
from appliance.settings.sections import Forward, Model, Quantization, Rollout
from appliance.sync.precision import quantisation_at
from appliance.terms.settings import Quantisation

ADAPTER_ONLY = "adapter"
_CARD = """# {model}, trained in {scheme}

What was trained is this model as {scheme} computes it (one precision flow: trainer and rollouts computed in it). To
serve that policy, install the appliance beside vLLM and run in this folder

    FLASHRL_CONFIG={config} vllm serve . --dtype bfloat16

On a CPU put APPLIANCE_EXACT_GEMMS=1 before it, so that log-probs are the trainer's to the last bit. The weights are in
BF16 and load everywhere; served without FLASHRL_CONFIG they are another policy.
"""
_ORIGIN = """
## Where it is from

It was trained from {provenance}.
"""


def main() -> int:
    run_dir, checkpoint, target, report = (Path(argument) for argument in sys.argv[1:5])
    export = _export_adapter if sys.argv[5:] == [ADAPTER_ONLY] else _export
    return exit_code_of(lambda: export(run_dir, checkpoint=checkpoint, target=target), run_dir=report)


def export_checkpoint(
    checkpoint: Path,
    *,
    target: Path,
    uaq: UaqPlan | None,
    model: Model | None = None,
    weights: WeightsPlan | None = None,
    flow: Quantisation | None = None,
    provenance: str = "",
) -> None:
    """Export a checkpoint's model. checkpoint: `checkpoints/global_step_<n>`.  target: a new folder, there whole or not
    at all.

    uaq: what the run's model was scaled with.  model, weights: that the run began with, to merge an adapter into.
    flow: what its rollouts were planned to be, where that is what was trained: the folder then says how to serve it.
    provenance: where the run's model is from, where that is to be written beside it.
    Raises TrainingError when the checkpoint has no model.
    """
    source = checkpoint / "actor" / "huggingface"
    if not (source / "config.json").is_file():
        raise TrainingError(f"the checkpoint has no model in {source}")
    with whole_folder(target) as partial:
        if (source.parent / ADAPTER_FOLDER).is_dir():
            from appliance.trainer.lora import merge  # torch and transformers, which nothing else here needs

            assert model is not None and weights is not None, "a run that trains an adapter says on which model"
            merge(
                weights.name_or_path,
                commit=weights.commit,
                trust_remote_code=model.trust_remote_code,
                actor=source.parent,
                target=partial,
            )
        elif uaq is None:
            shutil.copytree(source, partial, dirs_exist_ok=True)
        else:
            fold_back(source, target=partial, scale=uaq.scale)
        if flow is not None:
            assert model is not None, "a run with one flow says of which model"
            name = model.path or model.builtin or ""
            _say_how_to_serve(partial, checkpoint=checkpoint, flow=flow, model=name)
        if provenance:
            _say_where_it_is_from(partial / "README.md", provenance=provenance)


def _say_where_it_is_from(card: Path, *, provenance: str) -> None:
    """Append to the card where the model is from, or write one."""
    before = card.read_text() if card.is_file() else "# A trained policy\n"
    card.write_text(before + _ORIGIN.format(provenance=provenance))


def _say_how_to_serve(folder: Path, *, checkpoint: Path, flow: Quantisation, model: str) -> None:
    """Write the files with which vLLM serves the model as the step after the checkpoint would have sampled, which
    the guard may have changed."""
    from appliance.trainer.checkpoints import read_state  # torch and Ray, which nothing else here needs

    now, profile = quantisation_at(flow, read_state(checkpoint).precision.rollouts), folder / PROFILE_FOLDER
    profile.mkdir()
    if now.profile:
        shutil.copyfile(checkpoint / PROFILE_FOLDER / PROFILE_FILE, profile / PROFILE_FILE)
    write_config(profile / CONFIG_FILE, [engine_named(now, profile=profile)], model=model)
    said = f"{now.scheme}{', emulated' if now.emulated else ''}"
    (folder / "README.md").write_text(_CARD.format(model=model, scheme=said, config=f"{PROFILE_FOLDER}/{CONFIG_FILE}"))


def _export(run_dir: Path, *, checkpoint: Path, target: Path) -> None:
    """Export the model of a checkpoint. Raises PreflightError for a plan that cannot be read, and where the target
    cannot be written: what else is read was read before, for its hashes."""
    try:  # no more of the plan: the rest may be of another version
        raw: dict[str, Any] = json.loads(with_keys_of_today((run_dir / "plan.json").read_bytes()))
        uaq = None if raw["uaq"] is None else UaqPlan.model_validate(raw["uaq"])
        lora = raw.get("model", {}).get("lora")
        one_flow = raw.get("trainer", {}).get("forward") == Forward.ROLLOUT and not lora
        needs_model = one_flow or lora
        model = Model.model_validate(raw["model"]) if needs_model else None
        weights = WeightsPlan.model_validate(raw["weights"]) if needs_model else None
        provenance = raw.get("weights", {}).get("provenance", "")  # plans of earlier versions say none
        flow = _first_engine(raw) if one_flow else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        hint = "export it with the version that made the run"
        raise PreflightError(f"{run_dir / 'plan.json'}: {error}", hint=hint) from error
    with _writing(target):
        export_checkpoint(
            checkpoint, target=target, uaq=uaq, model=model, weights=weights, flow=flow, provenance=provenance
        )


def _first_engine(plan: dict[str, Any]) -> Quantisation:
    """Return what the first engine of a plan quantises. plan: as JSON. Raises ValueError, KeyError."""
    rollout, quantization = Rollout.model_validate(plan["rollout"]), Quantization.model_validate(plan["quantization"])
    profile = ProfilePlan.model_validate(plan["profile"], strict=False) if plan.get("profile") else None
    return engines_of(rollout, quantization=quantization, profile=profile)[0]


def _export_adapter(run_dir: Path, *, checkpoint: Path, target: Path) -> None:
    """Export the adapter. Raises PreflightError where the target cannot be written."""
    source = checkpoint / "actor" / ADAPTER_FOLDER
    with _writing(target), whole_folder(target) as partial:
        shutil.copytree(source, partial, dirs_exist_ok=True)


@contextmanager
def _writing(target: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        if not isinstance(error, OSError) and not is_full(error):
            raise
        why = "no space left" if is_full(error) else f"cannot be written: {getattr(error, 'strerror', None) or error}"
        raise PreflightError(f"{target}: {why}", hint="free some space, or set -o to another folder") from error


if __name__ == "__main__":
    sys.exit(main())
