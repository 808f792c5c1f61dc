"""Bare verl of the step benchmark: what it is told, against verl's own configuration files, and what it has of ours."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf
from plans import verl_config

from benchmarks.step.systems import ROOT, VERL, VERL_ON_A_CPU, Setting, variants, verl_command, verl_values

ACTOR, ROLLOUT, CORRECTION = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "algorithm.rollout_correction"


def composed(tmp_path: Path, *, system: str, setting: Setting) -> tuple[dict[str, object], DictConfig]:
    """Return what the benchmark says, by key, and what verl makes of it."""
    data = tmp_path / "verl.jsonl"
    values = verl_values(model=tmp_path, data=data, steps=3, setting=setting, folder=tmp_path) | VERL[system]
    words = [word for word in verl_command(values)[3:] if not word.startswith("hydra.")]
    return values, verl_config(words)


@pytest.mark.parametrize("system", VERL)
def test_verl_reads_every_setting_as_the_value_and_type_meant(tmp_path: Path, system: str) -> None:
    values, config = composed(tmp_path, system=system, setting=Setting(16, checkpointing=True, padded=False))
    for key, value in values.items():
        if not key.startswith("hydra."):
            read = OmegaConf.select(config, key.lstrip("+"), throw_on_missing=True)
            read = OmegaConf.to_container(read) if OmegaConf.is_config(read) else read
            assert (key, type(read), read) == (key, type(value), value)


def test_a_step_is_that_of_the_other_systems_and_nothing_is_quantised_or_corrected(tmp_path: Path) -> None:
    _, config = composed(tmp_path, system="verl", setting=Setting(16, checkpointing=False))
    select = lambda key: OmegaConf.select(config, key)  # noqa: E731
    assert (select("data.train_batch_size"), select(f"{ROLLOUT}.n"), select(f"{ACTOR}.ppo_mini_batch_size")) == (
        16,
        8,
        16,
    )
    assert (select(f"{ROLLOUT}.quantization"), select(f"{ROLLOUT}.dtype")) == (None, "bfloat16")
    assert (select(f"{CORRECTION}.rollout_is"), select(f"{CORRECTION}.bypass_mode")) == (None, False)
    assert (select(f"{ROLLOUT}.temperature"), select(f"{ROLLOUT}.top_p"), select(f"{ACTOR}.ppo_epochs")) == (1.0, 1, 1)


def test_each_setting_that_is_tried_is_told_to_verl(tmp_path: Path) -> None:
    keys = (
        f"{ACTOR}.ppo_micro_batch_size_per_gpu",
        "actor_rollout_ref.model.enable_gradient_checkpointing",
        "actor_rollout_ref.model.use_remove_padding",
        f"{ACTOR}.use_dynamic_bsz",
        f"{ROLLOUT}.log_prob_use_dynamic_bsz",
        f"{ROLLOUT}.log_prob_max_token_len_per_gpu",
    )
    read, without = [], Setting(8, checkpointing=False)
    for setting in (without, *variants("verl", without)):
        _, config = composed(tmp_path, system="verl", setting=setting)
        read.append(tuple(OmegaConf.select(config, key) for key in keys))
    assert read == [
        (8, False, False, False, False, 8 * 88),
        (8, True, False, False, False, 8 * 88),
        (8, False, True, False, False, 8 * 88),
        (8, False, False, True, True, 8 * 88),
    ]


def test_verls_processes_have_two_things_of_ours_and_no_more() -> None:
    """The platform and the process group: no log-probs, no attention, no sender, no engine. And the reward is that of
    the other systems."""
    look = (
        "import sys, verl; from appliance.patch import applied_patches; from verl.utils.device import get_device_name; "
        "from verl.workers.rollout.base import _ROLLOUT_REGISTRY as rollouts; "
        "mixed = [name for name in sys.modules if name.startswith(('appliance.trainer.', 'appliance.engine'))]; "
        "print(applied_patches(), get_device_name(), mixed, rollouts['vllm', 'async']); "
        "from benchmarks.step.verl_peer import compute_score; "
        "print([compute_score('', text, '7', {}) for text in ('7', 'It is 7.', '8')])"
    )
    environment = {**os.environ, **VERL_ON_A_CPU, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", look], env=environment, capture_output=True, text=True, check=True)
    adapter = "verl.workers.rollout.vllm_rollout.ServerAdapter"
    ours = "('cpu-process-group',) cpu ['appliance.trainer.cpu_platform']"
    assert done.stdout.splitlines()[-2:] == [f"{ours} {adapter}", "[1.0, 1.0, 0.0]"]
