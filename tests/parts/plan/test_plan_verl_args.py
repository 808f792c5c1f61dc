"""Every override against verl's own configuration files, composed by Hydra; verl itself is not imported."""

import ast
import dataclasses
import functools
import importlib.util
from pathlib import Path

import plans
import pytest
from hydra.errors import ConfigCompositionException
from omegaconf import DictConfig, OmegaConf
from plans import verl_config

from appliance.corrections.registry import CorrectionMethod
from appliance.plan.build import build_plan
from appliance.plan.host import HostGpu
from appliance.plan.verl_args import Value, hydra_value, overrides
from appliance.recipe.load import load_recipe

VERL = Path(importlib.util.find_spec("verl").submodule_search_locations[0])
HOST = dataclasses.replace(plans.HOST, gpus=(HostGpu("NVIDIA A100-SXM4-80GB", 80 << 30),))
NEEDS_A_PASS = ("adaptive", "calibrated-clipping")  # before the update; the others' old log-probs come from it
CASES = {
    "cpu-int8": ("arithmetic-tiny-int8", ()),
    "cpu-bf16": ("arithmetic-tiny-bf16", ()),
    **{
        f"{method}": ("arithmetic-tiny-int8", (f"correction.method={method}", "correction.cap=null"))
        for method in CorrectionMethod
    },
    "reuses": ("arithmetic-tiny-int8", ("trainer.forward=rollout", "trainer.old_log_probs=rollout")),
    "tbpo": ("arithmetic-tiny-int8", ("algorithm.loss=tbpo", "correction.method=tis-geometric")),
    "fp16": ("arithmetic-tiny-bf16", ("trainer.dtype=fp16", "algorithm.kl=0.1")),
    "lora": ("arithmetic-tiny-lora-int8", ("model.lora.targets=[q_proj, v_proj]",)),
    "dr-grpo": ("arithmetic-tiny-int8", ("algorithm.kind=dr-grpo", "algorithm.kl=0.1", "algorithm.entropy_bonus=0.01")),
    "gspo": ("arithmetic-tiny-int8", ("algorithm.kind=gspo", "algorithm.kl=0.1", "algorithm.kl_in=reward")),
    "cosine": (
        "arithmetic-tiny-int8",
        (
            "optimizer.schedule=cosine",
            "optimizer.min_lr_ratio=0.1",
            "optimizer.betas=[0.9, 0.95]",
            "optimizer.epsilon=1e-6",
        ),
    ),
    "logging": ("arithmetic-tiny-int8", ("logging.backends=[tensorboard, wandb]", "checkpoint.every_steps=5")),
    "odd-paths": ("arithmetic-tiny-int8", ("cluster.run_dir=/tmp/with space,=[${a}]'\\x/1e5",)),
    "gpu-packed": ("gsm8k-0.5b-int8", ()),
    "gpu-fp8": ("gsm8k-0.5b-int8", ("rollout.scheme=fp8-block", "cluster.device=h100")),
}


def text(key: str, value: Value) -> str:
    return f"{key}={hydra_value(value)}"


@functools.cache
def planned(case: str) -> tuple[tuple[str, Value], ...]:
    name, sets = CASES[case]
    recipe = load_recipe(name, sets=sets)
    run_dir = Path(recipe.cluster.run_dir).absolute() / "run-1"
    return tuple(overrides(build_plan(recipe, run_dir=run_dir, host=HOST)))


@functools.cache
def composed(case: str) -> DictConfig:
    """What verl makes of a case's overrides; Hydra takes half a second for it."""
    return verl_config([text(*override) for override in planned(case)])


@pytest.mark.parametrize("case", CASES)
def test_verl_reads_every_override_as_the_value_and_type_meant(case):
    config = composed(case)
    for key, value in planned(case):
        found = OmegaConf.select(config, key.lstrip("+"), throw_on_missing=True)
        found = OmegaConf.to_container(found) if OmegaConf.is_config(found) else found
        assert (key, type(found), found) == (key, type(value), value)


@pytest.mark.parametrize("method", CorrectionMethod)
def test_verl_corrects_nothing_by_itself(method):
    """trainer/correction.py does, whatever the method."""
    config = composed(str(method))
    found = config.algorithm.rollout_correction
    assert (found.rollout_is, found.rollout_is_threshold, found.rollout_rs, found.rollout_rs_threshold) == (None,) * 4
    assert (found.bypass_mode, found.rollout_is_batch_normalize) == (method not in NEEDS_A_PASS, False)
    assert config.actor_rollout_ref.actor.policy_loss.loss_mode == "vanilla"


def test_verls_own_correction_leaves_such_a_batch_alone():
    """No weights, and the mask as it was: by the very settings that it reads."""
    torch = pytest.importorskip("torch")
    from verl.protocol import DataProto
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch

    setting = composed("tis").algorithm.rollout_correction
    ones = torch.ones(2, 3)
    fields = {"old_log_probs": -ones, "rollout_log_probs": -5 * ones, "response_mask": ones.long()}
    batch, _ = compute_rollout_correction_and_add_to_batch(DataProto.from_single_dict(dict(fields)), setting)
    assert set(batch.batch.keys()) == set(fields)
    assert torch.equal(batch.batch["response_mask"], fields["response_mask"])


@pytest.mark.parametrize("method", CorrectionMethod)
def test_no_method_is_ever_without_the_rollouts_log_probs(method):
    """None can be asked for without them: every recipe's engine returns them, after temperature, as the trainer's."""
    overrides = dict(planned(str(method)))
    rollout = "actor_rollout_ref.rollout"
    assert overrides[f"{rollout}.calculate_log_probs"] is True
    assert overrides[f"{rollout}.logprobs_mode"] == "processed_logprobs"
    assert overrides["algorithm.rollout_correction.bypass_mode"] is (method not in NEEDS_A_PASS)


def test_with_the_engines_log_probs_as_the_old_ones_verl_computes_none():
    """And keeps its usual loss: another one belongs to the same mode."""
    config = composed("reuses")
    assert config.algorithm.rollout_correction.bypass_mode is True
    assert config.actor_rollout_ref.actor.policy_loss.loss_mode == "vanilla"


def test_fp16_is_said_to_trainer_reference_and_engine_and_bf16_to_none():
    overrides, usual = dict(planned("fp16")), dict(planned("cpu-bf16"))
    base, mixed = "actor_rollout_ref", {"param_dtype": "fp16"}
    expected = {f"+{base}.{role}.fsdp_config.mixed_precision": mixed for role in ("actor", "ref")}
    expected[f"{base}.rollout.dtype"] = "float16"
    assert {
        key: overrides.get(key) for key in overrides if "precision" in key or key.endswith("rollout.dtype")
    } == expected
    assert not expected.keys() & usual.keys()


def test_the_entropy_of_bf16_logits_is_taken_in_fp32_where_nothing_is_compiled():
    """The function is chosen as verl's engine does; of its two the usual one rounds each step to BF16."""
    import torch
    from verl.utils import torch_functional

    engine = composed("cpu-int8").actor_rollout_ref.actor.fsdp_config
    assert engine.use_torch_compile is False
    chunked = "_with_chunking" if engine.entropy_from_logits_with_chunking else ""
    torch.manual_seed(0)
    logits_TV = (4 * torch.randn(64, 272)).index_fill(1, torch.tensor([7]), 16.0).bfloat16()
    log_probs_TV = logits_TV.double().log_softmax(dim=-1)
    given = (engine.entropy_from_logits_chunk_size,) if chunked else ()
    found_T = getattr(torch_functional, f"entropy_from_logits{chunked}")(logits_TV, *given)
    assert torch.allclose(found_T.double(), -(log_probs_TV.exp() * log_probs_TV).sum(dim=-1), rtol=0, atol=1e-5)


def test_no_key_is_given_twice():
    keys = [key.lstrip("+") for key, _ in planned("cpu-int8")]
    assert sorted(keys) == sorted(set(keys))


def test_a_renamed_key_fails_here():
    with pytest.raises(ConfigCompositionException):
        verl_config(["actor_rollout_ref.rollout.max_num_sequences=8"])


def test_kinds_agree_with_verl_defaults():
    """A text where verl's default is a number, or a number where it is a truth value, is a slip of ours."""
    defaults = verl_config([])
    for key, value in planned("gpu-packed"):
        default = None if key.startswith("+") else OmegaConf.to_container(defaults, resolve=False)
        for part in key.split(".") if default else ():
            default = default[part]
        if default is None or value is None or (isinstance(default, str) and default.startswith(("${", "???"))):
            continue
        assert (key, kind(value)) == (key, kind(default))


def kind(value: object) -> str:
    return "number" if isinstance(value, int | float) and not isinstance(value, bool) else type(value).__name__


def test_added_keys_are_new_to_the_files_and_known_to_the_code():
    """`+` would hide that verl renamed a key: hold these to verl's code."""
    added = {key.lstrip("+") for key, _ in planned("cpu-int8") if key.startswith("+")}
    assert added == {
        "actor_rollout_ref.model.override_config.attn_implementation",
        "actor_rollout_ref.model.override_config.model_config",
        "actor_rollout_ref.rollout.enable_sleep_mode",
        "actor_rollout_ref.rollout.engine_kwargs.vllm.block_size",
        "actor_rollout_ref.rollout.engine_kwargs.vllm.config_format",
        "actor_rollout_ref.rollout.engine_kwargs.vllm.distributed_executor_backend",
        "actor_rollout_ref.rollout.engine_kwargs.vllm.num_gpu_blocks_override",
        "actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls",
    }
    assert "enable_sleep_mode" in fields_of(VERL / "workers" / "config" / "rollout.py", "RolloutConfig")
    server = (VERL / "workers" / "rollout" / "vllm_rollout" / "vllm_async_server.py").read_text()
    assert '"worker_extension_cls": self._get_worker_extension_cls()' in server
    assert "self._preprocess_engine_kwargs(engine_kwargs)" in server  # where engine/replica.py adds what is quantised
    assert '"distributed_executor_backend": "mp"' in server
    assert "**engine_kwargs," in server
    model = (VERL / "workers" / "config" / "model.py").read_text()
    assert 'override_config.get("attn_implementation"' in model
    assert 'override_config["model_config"] if "model_config" in self.override_config' in model


def fields_of(file: Path, class_name: str) -> set[str]:
    classes = [node for node in ast.parse(file.read_text()).body if isinstance(node, ast.ClassDef)]
    body = next(node for node in classes if node.name == class_name).body
    return {node.target.id for node in body if isinstance(node, ast.AnnAssign)}


TEXTS = [
    *("1e5", "null", "True", "inf", "", "a b", "it's", "a\\'b", "back\\slash\\", "${x}", "\\${x}", "\\\\${x}", "$x"),
    *("0.5_5.0", "{a:1}", "x,y", "[1]", " padded ", "tab\t", "ümlaut", "=", "a=b", "-1", "~", "on", "''", "\\\\'"),
]


def test_text_stays_text():
    assert (
        OmegaConf.to_container(verl_config([f"trainer.logger={hydra_value(TEXTS)}"]).trainer.logger, resolve=True)
        == TEXTS
    )


def test_numbers_stay_numbers():
    values = [0.0, 1e-30, 3e-4, 2.0, -1.5, 1e22, 1e300]
    text = ",".join(hydra_value(value) for value in values)
    found = OmegaConf.to_container(verl_config([f"trainer.logger=[{text}]"]).trainer.logger)
    assert [(type(each), each) for each in found] == [(float, value) for value in values]
