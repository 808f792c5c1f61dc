"""The trained model out of a checkpoint, as the original class and in the original parametrisation.

The trainer calls it at the end of a run; `appliance export` starts it as a child, for it needs torch. Arguments of the
child: RUN (the run's folder) CHECKPOINT TARGET (the folder to make) REPORT (a folder whose events say what went wrong)
and, where only an adapter is asked for, ADAPTER_ONLY.
"""

from __future__ import annotations

import fnmatch
import json
import os.path
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
from appliance.quant.uaq import MARK_FILE, fold_back
from appliance.record.checkpoints import ADAPTER_FOLDER, PROFILE_FOLDER
from appliance.record.events import exit_code_of
from appliance.record.plan import ModelPlan, UaqPlan
from appliance.sync.precision import quantisation_at
from appliance.terms.settings import Quantisation

ADAPTER_ONLY = "adapter"
_CARD = """# {model}, trained in {scheme}

The policy that was trained is this model in {scheme} (one precision flow: trainer and rollouts computed in it). With
the appliance beside vLLM, in this folder,

    FLASHRL_CONFIG={config} vllm serve .

serves it so; on a CPU, APPLIANCE_EXACT_GEMMS=1 before it keeps the last bits. The weights are in BF16 and load
everywhere; without that line it is another policy.
"""
_ORIGIN = """
## Where it is from

It was trained from {provenance}.
"""


# What a model is read by beside its weights: configuration, tokenizer, templates, code; and its licence. No card, which
# would be none of what was trained. A folder may hold anything else: data, checkpoints and logs of what made it.
_READ_BESIDE_WEIGHTS = ("*.json", "*.jinja", "*.model", "*.model.v[0-9]*", "*.txt", "*.tiktoken", "*.py")
_THE_BASES = (*_READ_BESIDE_WEIGHTS, "LICENSE*", "LICENCE*", "NOTICE*")
_NOT_THE_BASES = (".*", "README*", "*.index.json", "trainer_state.json", "*_results.json", MARK_FILE)
_TEMPLATES_FOLDER = "additional_chat_templates"


def base_folder(model: ModelPlan) -> Path | None:
    """Where the files of the model lie that a run began with: its folder, or the hub's cache. None where they do not,
    by now."""
    if model.path.startswith("/"):
        return Path(model.path) if os.path.isfile(Path(model.path) / "config.json") else None
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(model.source, "config.json", revision=model.commit or None)
    return Path(config).parent if isinstance(config, str) else None


def put_base_files(folder: Path, *, base: Path) -> None:
    """Give a saved model the configuration, tokenizer, templates and code of its base, byte for byte.

    transformers writes them anew when it saves: keys go or are renamed, a template moves into another file. Training
    changes weights only. The type in config.json is the base's too: it says in which one the model runs, whatever the
    file holds.
    """
    names = [path.name for path in base.iterdir() if path.is_file() and _is_the_bases(path.name)]
    for path in folder.iterdir():
        if path.is_file() and _is_the_bases(path.name) and path.name not in names:
            path.unlink()  # transformers' own, of what the base has elsewhere or not at all
    for name in names:
        shutil.copyfile(base / name, folder / name)
    shutil.rmtree(folder / _TEMPLATES_FOLDER, ignore_errors=True)
    if (base / _TEMPLATES_FOLDER).is_dir():
        shutil.copytree(base / _TEMPLATES_FOLDER, folder / _TEMPLATES_FOLDER)


def _is_the_bases(name: str) -> bool:
    """Whether a file of this name is one that a saved model has from its base."""
    is_read, is_left = (
        any(fnmatch.fnmatch(name, pattern) for pattern in patterns) for patterns in (_THE_BASES, _NOT_THE_BASES)
    )
    return is_read and not is_left


def main() -> int:
    run_dir, checkpoint, target, report = (Path(argument) for argument in sys.argv[1:5])
    export = _export_adapter if sys.argv[5:] == [ADAPTER_ONLY] else _export
    return exit_code_of(lambda: export(run_dir, checkpoint=checkpoint, target=target), run_dir=report)


def export_checkpoint(
    checkpoint: Path,
    *,
    target: Path,
    uaq: UaqPlan | None,
    model: ModelPlan | None = None,
    flow: Quantisation | None = None,
    provenance: str = "",
) -> None:
    """checkpoint: `checkpoints/global_step_<n>`.  target: a new folder, there whole or not at all.

    uaq: what the run's model was scaled with.  model: that the run began with, to merge an adapter into.
    flow: what its rollouts were planned to be, where that is what was trained: the folder then says how to serve it.
    provenance: where the run's model is from, where that is to be said beside it.
    Raises TrainingError when the checkpoint has no model.
    """
    source = checkpoint / "actor" / "huggingface"
    if not (source / "config.json").is_file():
        raise TrainingError(f"the checkpoint has no model in {source}")
    with whole_folder(target) as partial:
        if (source.parent / ADAPTER_FOLDER).is_dir():
            from appliance.trainer.lora import merge  # torch and transformers, which nothing else here needs

            assert model is not None, "a run that trains an adapter says on which model"
            merge(
                model.path,
                commit=model.commit,
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
            _say_how_to_serve(partial, checkpoint=checkpoint, flow=flow, model=model.source or model.builtin)
        if provenance:
            _say_where_it_is_from(partial / "README.md", provenance=provenance)


def _say_where_it_is_from(card: Path, *, provenance: str) -> None:
    """After what the card says, where there is one."""
    before = card.read_text() if card.is_file() else "# A trained policy\n"
    card.write_text(before + _ORIGIN.format(provenance=provenance))


def _say_how_to_serve(folder: Path, *, checkpoint: Path, flow: Quantisation, model: str) -> None:
    """In what the step after the checkpoint would have sampled, which the guard may have changed."""
    from appliance.trainer.checkpoints import read_state  # torch and Ray, which nothing else here needs

    now, profile = quantisation_at(flow, read_state(checkpoint).precision.rollouts), folder / PROFILE_FOLDER
    profile.mkdir()
    if now.profile:
        shutil.copyfile(checkpoint / PROFILE_FOLDER / PROFILE_FILE, profile / PROFILE_FILE)
    write_config(profile / CONFIG_FILE, [engine_named(now, profile=profile)], model=model)
    said = f"{now.scheme}{', emulated' if now.emulated else ''}"
    (folder / "README.md").write_text(_CARD.format(model=model, scheme=said, config=f"{PROFILE_FOLDER}/{CONFIG_FILE}"))


def _export(run_dir: Path, *, checkpoint: Path, target: Path) -> None:
    """Raises PreflightError for a plan that cannot be read, and where the target cannot be written: what else is read
    was read before, for its hashes."""
    try:  # no more of the plan: the rest may be of another version
        raw: dict[str, Any] = json.loads((run_dir / "plan.json").read_bytes())
        uaq = None if raw["uaq"] is None else UaqPlan.model_validate(raw["uaq"])
        one_flow = raw.get("trainer", {}).get("one_flow")
        model = ModelPlan.model_validate(raw["model"]) if raw.get("lora") or one_flow else None
        provenance = raw.get("model", {}).get("provenance", "")  # plans of earlier versions say none
        flow = Quantisation.model_validate(raw["rollout"]["replicas"][0], strict=False) if one_flow else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        hint = "export it with the version that made the run"
        raise PreflightError(f"{run_dir / 'plan.json'}: {error}", hint=hint) from error
    with _writing(target):
        export_checkpoint(checkpoint, target=target, uaq=uaq, model=model, flow=flow, provenance=provenance)


def _export_adapter(run_dir: Path, *, checkpoint: Path, target: Path) -> None:
    """Raises PreflightError where the target cannot be written."""
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
