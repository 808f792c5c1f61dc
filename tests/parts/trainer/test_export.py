"""What `model/` of a run with one precision flow says of how to serve it, wherever it goes."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from appliance.quant.files import Origin, Settings
from appliance.quant.profile import Profile, Smoothing, write_profile
from appliance.record.lines import as_json
from appliance.record.plan import WeightsPlan
from appliance.settings.sections import Model
from appliance.terms.schemes import AS_PLANNED, Precision, Scheme
from appliance.terms.settings import Quantisation
from appliance.trainer.checkpoints import STATE_FILE, DriverState, take_random
from appliance.trainer.export import export_checkpoint
from appliance.trainer.precision import PrecisionState
from flashrl_compat.config_file import read_config

KEPT, RAISED = "model.layers.1.mlp.down_proj", "model.layers.0.mlp.down_proj"


def exported(folder: Path, precision: Precision, **planned: object) -> Path:
    """`model/` of a checkpoint after which rollouts were to be in `precision`, moved."""
    checkpoint = folder / "global_step_2"
    (checkpoint / "actor" / "huggingface").mkdir(parents=True)
    (checkpoint / "actor" / "huggingface" / "config.json").write_text("{}")
    kept = PrecisionState("int8", precision, precision, Scheme.INT8, 0.0)
    (checkpoint / STATE_FILE).write_text(as_json(DriverState(step=2, random=take_random(), line={}, precision=kept)))
    profile = Profile(Origin("calibrated", "m"), Scheme.INT8, Settings(ignore=(KEPT,)), Smoothing())
    write_profile(profile, folder=checkpoint / "profile")
    plan = Quantisation(**{"scheme": Scheme.INT8, "profile": str(folder / "gone" / "profile"), **planned})
    model, weights = Model(path="Qwen/Q"), WeightsPlan(name_or_path="/cache/1", hub_name="Qwen/Q")
    export_checkpoint(checkpoint, target=folder / "model", uaq=None, model=model, weights=weights, flow=plan)
    return (folder / "model").rename(folder / "elsewhere")


@pytest.mark.parametrize(
    ("precision", "scheme", "ignore"),
    [
        (AS_PLANNED, Scheme.INT8, (KEPT,)),
        (Precision(bf16_layers=(RAISED,)), Scheme.INT8, (RAISED, KEPT)),
        (Precision(scheme=Scheme.BF16), Scheme.BF16, ()),
    ],
)
def test_a_model_says_what_it_was_last_trained_in(
    tmp_path: Path, precision: Precision, scheme: Scheme, ignore: tuple[str, ...]
) -> None:
    model = exported(tmp_path, precision)
    (entry,) = read_config(model / "profile" / "quantization.yaml")
    profile = str(model / "profile") if scheme.quantised else ""
    assert entry.quantisation == Quantisation(scheme=scheme, ignore=ignore, profile=profile)
    assert (entry.model, entry.load_format) == ("Qwen/Q", "auto")
    card = (model / "README.md").read_text()
    assert card.startswith(f"# Qwen/Q, trained in {scheme}\n") and "/cache/1" not in card


def test_an_emulated_scheme_is_called_so(tmp_path: Path) -> None:
    model = exported(tmp_path, AS_PLANNED, scheme=Scheme.FP8_BLOCK, emulated=True, profile="")
    assert (model / "README.md").read_text().startswith("# Qwen/Q, trained in fp8-block, emulated\n")
    assert read_config(model / "profile" / "quantization.yaml")[0].quantisation.emulated
    assert not (model / "profile" / "profile.safetensors").exists()


def test_the_line_of_the_card_serves_it(tmp_path: Path) -> None:
    """A shell in the folder hands on the file, and the folder itself."""
    model = exported(tmp_path, AS_PLANNED)
    line = next(each.strip() for each in (model / "README.md").read_text().splitlines() if "vllm serve" in each)
    assert line.endswith(" --dtype bfloat16")  # a base in FP16 says so in its config.json
    (tmp_path / "vllm").write_text('#!/bin/sh\nrealpath "$FLASHRL_CONFIG" "$2"\n')
    (tmp_path / "vllm").chmod(0o755)
    path = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    shell = subprocess.run(line, shell=True, cwd=model, env=path, capture_output=True, text=True, check=True)
    assert shell.stdout.split() == [str(model / "profile" / "quantization.yaml"), str(model)]
