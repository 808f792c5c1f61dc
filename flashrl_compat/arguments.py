"""The patch of vLLM's engine arguments: FlashRL's variables choose the scheme of every engine of this process.

vLLM resolves `quantization` in `EngineArgs.__post_init__`, before it loads plugins, and its plugins get no arguments;
`create_engine_config` is where every way in (LLM, `vllm serve`, verl) makes the engine's settings.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from vllm.platforms import current_platform

from appliance.engine.attest import REPLICA_VARIABLE
from appliance.errors import ApplianceError, RecipeError
from appliance.finding import Finding, fault
from appliance.patch import Patch, apply_patch
from appliance.terms.devices import CPU, gpu_of_product, why_not
from appliance.terms.settings import Quantisation
from flashrl_compat.config_file import EngineSettings, engine_settings
from flashrl_compat.loader import LOAD_FORMAT
from flashrl_compat.variables import CONFIG_VARIABLE, LOGGER, RELOAD_VARIABLE, Variables, read_variables, tell_hints
from flashrl_compat.worker import RELOAD_KEY, WORKER_CLASS

ENGINE_ARGUMENTS = Patch(
    name="flashrl-engine-arguments",
    target="vllm.engine.arg_utils:EngineArgs.create_engine_config",
    why=(
        "FLASHRL_CONFIG chooses the scheme of an engine that somebody else starts; vLLM's plugins get no arguments, "
        "and quantization is resolved before they are loaded"
    ),
    upstream="https://github.com/vllm-project/vllm/blob/v0.28.0/vllm/engine/arg_utils.py",
    distribution="vllm",
    sources={
        "0.28.0": "8d7f29b97d577e5dffe6c45a5e851260290e52afe9b16c5ef3b18b0f60bf7572",
        "0.29.0": "ceee1a6b3f7380a779480f0adc71541397d2fec3606c4b3b4a38bf949f14b8fc",
        "0.30.0": "200fbc529224d87c35d5262c2dbf327a6f2ce1bc474c95917f0d930f9e7e096f",
        "0.31.0": "cea46b85694f44fbef503412edf2fa83a3347420459ca9ef86654231420f15d4",
    },
    remove_when="a vLLM plugin can set engine arguments, or nobody comes from FlashRL any more",
)

RANK_VARIABLE = "RANK"  # torchrun's, which FlashRL reads
# verl's own extension loads weights into layers that are processed already, and processes them again.
VERL_EXTENSION = "verl.workers.rollout.vllm_rollout.utils.vLLMColocateWorkerExtension"
SYNC_EXTENSION = "appliance.engine.sync.SyncWorkerExtension"
LOGPROBS_MODE = "processed_logprobs"  # of the distribution that was sampled from: what FlashRL patches the sampler for

# vLLM renames what a checkpoint of theirs calls a layer, or one expert's part, so that no tensor of it would be found.
_NAMES_OF_THEIR_OWN = frozenset(
    {"GptOssForCausalLM", *(f"GraniteMoe{kind}ForCausalLM" for kind in ("", "Hybrid", "Shared"))}
)


# Backends of vLLM's weight transfer that write into a model's tensors past `load_weights`. 0.28 has the first alone.
_PAST_THE_LOADERS = frozenset({"sparse_nccl", "sharded_rdt", "nccl_m2n"})


def patch_engine_arguments() -> None:
    """Patch vLLM's engine arguments. Raises PatchError."""
    apply_patch(ENGINE_ARGUMENTS, _with_flashrl)


def _with_flashrl(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            variables = read_variables(os.environ)
            if variables.config is None:
                return original(self, *args, **kwargs)
            _apply(self, variables)
            config = original(self, *args, **kwargs)
            _require_provable(config)
            return config
        except ApplianceError as error:
            tell_hints(error)
            raise

    return create_engine_config


def _apply(arguments: Any, variables: Variables) -> None:
    rank = replica_rank(arguments, os.environ)
    settings = engine_settings(variables, rank=rank)
    applied = set_arguments(arguments, settings)
    LOGGER.info("%s: replica %d gets the scheme %s: %s", variables.shown, rank, settings.quantisation.scheme, applied)
    for note in settings.notes:
        LOGGER.info(note)


def _require_provable(config: Any) -> None:
    """config: vLLM's, resolved.  Raises RecipeError for engines whose weight updates cannot be proven."""
    parallel, transfer = config.parallel_config, config.weight_transfer_config
    parts = {}
    if parallel.pipeline_parallel_size > 1:
        parts[f"--pipeline-parallel-size {parallel.pipeline_parallel_size}"] = "a rank has some of the layers"
    if config.model_config.is_moe and parallel.data_parallel_size > 1:
        parts[f"--data-parallel-size {parallel.data_parallel_size}"] = "an engine has a part of each expert"
    if config.model_config.is_moe and parallel.enable_expert_parallel:
        parts["--enable-expert-parallel"] = "a rank has some of the experts"
    hint = "use --tensor-parallel-size, and an engine of its own for each replica"
    faults = [fault((option,), f"{why}, and no weight update of it is proven", hint) for option, why in parts.items()]
    if config.model_config.runner_type == "pooling" and config.model_config.quantization:
        fact = "a pooling model, and quantised schemes are for those that generate"
        hint = f"use {CONFIG_VARIABLE}=bf16, or start it without {CONFIG_VARIABLE}"
        faults.append(fault(("--model",), fact, hint))
    for name in _NAMES_OF_THEIR_OWN.intersection(config.model_config.architectures):
        fact = f"{name} has checkpoints whose names no proof knows, and no weight update of it is proven"
        faults.append(fault(("--model",), fact, f"use a model of another type, or unset {CONFIG_VARIABLE}"))
    if config.model_config.is_multimodal_model:
        name = config.model_config.architecture
        fact = f"{name} takes more than text, by names that no proof knows: no weight update of it is proven"
        faults.append(fault(("--model",), fact, f"use a model of text alone, or unset {CONFIG_VARIABLE}"))
    if config.lora_config is not None:
        fact = "adapters stand beside the weights, and no weight update of such an engine is proven"
        faults.append(fault(("--enable-lora",), fact, "merge the adapters in the trainer"))
    if config.model_config.dtype not in (torch.bfloat16, torch.float16):
        option = f"--dtype {str(config.model_config.dtype).removeprefix('torch.')}"
        faults.append(fault((option,), "no weight update of it is proven", "use bfloat16 or float16"))
    if transfer is not None and transfer.backend in _PAST_THE_LOADERS:
        fact = f"`{transfer.backend}` writes into the kernels' tensors, where nothing is proven"
        faults.append(fault(("--weight-transfer-config",), fact, "use `nccl` or `ipc`; without a GPU `shm`"))
    if faults:
        raise RecipeError(faults)


def replica_rank(arguments: Any, environ: Mapping[str, str]) -> int:
    """Return which engine of several this is: verl's replica, vLLM's data-parallel rank, or FlashRL's `RANK //
    workers`.

    Raises RecipeError for a variable that is no such number.
    """
    if REPLICA_VARIABLE in environ:
        return _rank(REPLICA_VARIABLE, environ[REPLICA_VARIABLE])
    if arguments.data_parallel_rank is not None:
        return arguments.data_parallel_rank
    workers = arguments.tensor_parallel_size * arguments.pipeline_parallel_size
    return _rank(RANK_VARIABLE, environ.get(RANK_VARIABLE, "0")) // workers


def _rank(name: str, text: str) -> int:
    if not text.strip().isdecimal():
        hint = "it chooses this engine's entry in FLASHRL_CONFIG: 0 for the first, or unset it"
        raise RecipeError([fault((name,), f"`{text[:60]}` is not a rank", hint)])
    return int(text)


def set_arguments(arguments: Any, settings: EngineSettings) -> str:
    """Change vLLM's `EngineArgs` to what the settings say; a second time changes nothing.

    Returns what was set, as text.  Raises RecipeError with everything that contradicts what the engine was given.
    """
    arguments_needed = _arguments_for(arguments, settings)
    faults = [finding for name, value in arguments_needed.items() if (finding := _conflict(arguments, name, value))]
    faults += _unfit(arguments, settings)
    if faults:
        raise RecipeError(faults)
    for name, value in arguments_needed.items():
        given = getattr(arguments, name)
        setattr(arguments, name, {**given, **value} if isinstance(value, dict) else value)
    return ", ".join(f"{name}={_shown(value)}" for name, value in arguments_needed.items())


def _arguments_for(arguments: Any, settings: EngineSettings) -> dict[str, Any]:
    """Names of `EngineArgs` and their values; of a dictionary only the keys that are ours."""
    arguments_needed: dict[str, Any] = {**settings.quantisation.engine_arguments(), "logprobs_mode": LOGPROBS_MODE}
    if settings.load_format:
        arguments_needed["load_format"] = settings.load_format
    elif arguments.load_format == "auto" or (settings.quantisation.profile and arguments.load_format != "dummy"):
        arguments_needed["load_format"] = LOAD_FORMAT  # `dummy` needs no smoothing: the first sync brings it
    if arguments.worker_extension_cls == VERL_EXTENSION:
        arguments_needed["worker_extension_cls"] = SYNC_EXTENSION
    if settings.backend:
        arguments_needed["distributed_executor_backend"] = settings.backend
    arguments_needed["worker_cls"] = WORKER_CLASS
    if settings.reload:
        arguments_needed["additional_config"] = {RELOAD_KEY: list(settings.reload)}
    return arguments_needed


def _shown(value: Any) -> str:
    return json.dumps(value) if isinstance(value, dict) else str(value)


# What an argument is when nobody gave it.
_UNSET: dict[str, Any] = {
    "quantization": None,
    "logprobs_mode": "raw_logprobs",
    "load_format": "auto",
    "distributed_executor_backend": None,
    "worker_cls": "auto",
    "worker_extension_cls": VERL_EXTENSION,
}


def _conflict(arguments: Any, name: str, value: Any) -> Finding | None:
    present, option = getattr(arguments, name), f"--{name.replace('_', '-')}"
    hint = f"leave {option} out, or unset {_asked_by(name)}"
    if not isinstance(value, dict):
        fact = f"`{present}` is given, and {_asked_by(name)} wants `{value}`"
        return None if present in (_UNSET[name], value) else fault((option,), fact, hint)
    if not isinstance(present, dict):
        return fault((option,), f"a function is given, and {_asked_by(name)} wants a mapping", hint)
    taken = [key for key, each in value.items() if present.get(key, each) != each]
    return fault((option,), f"`{taken[0]}` is given, and {_asked_by(name)} sets it", hint) if taken else None


def _asked_by(name: str) -> str:
    return RELOAD_VARIABLE if name == "additional_config" else CONFIG_VARIABLE


def _unfit(arguments: Any, settings: EngineSettings) -> list[Finding]:
    quantisation = settings.quantisation
    faults: list[Finding] = []
    hint = f"out, or unset {CONFIG_VARIABLE}"
    if quantisation.is_plain and arguments.quantization is not None:
        fact = f"`{arguments.quantization}` is given, and {CONFIG_VARIABLE} wants `{quantisation.scheme}`"
        faults.append(fault(("--quantization",), fact, f"leave --quantization {hint}"))
    if arguments.quantization is None and arguments.quantization_config is not None:
        fact = f"vLLM's own method is given, and {CONFIG_VARIABLE} wants its own"
        faults.append(fault(("--quantization-config",), fact, f"leave --quantization-config {hint}"))
    if arguments.data_parallel_size > 1 and arguments.data_parallel_rank is None and not settings.same_for_all:
        option = f"--data-parallel-size {arguments.data_parallel_size}"
        fact = f"the engines of one command get one scheme, and {CONFIG_VARIABLE} lists several"
        faults.append(fault((option,), fact, "start each engine by a command of its own"))
    if reason := _no_kernels(quantisation):
        hint = "FP8 is emulated, for numerics and not for speed, with `emulated: true` in a YAML file"
        faults.append(fault((CONFIG_VARIABLE,), reason, hint if quantisation.scheme.spec.can_emulate else ""))
    if method := _method_of_checkpoint(arguments):
        fact = f"{arguments.model} is quantised already ({method})"
        hint = "" if quantisation.is_plain else ": it is quantised when it is loaded"
        faults.append(fault(("--model",), fact, f"serve the BF16 checkpoint{hint}"))
    return faults


def _no_kernels(quantisation: Quantisation) -> str:
    """Return the reason why this host cannot run the scheme, or an empty text, also for a GPU that we do not know."""
    if quantisation.emulated:
        return ""
    if current_platform.is_cpu():
        return why_not(quantisation.scheme, device=CPU, cpu_flags=_cpu_flags())
    gpu = gpu_of_product(current_platform.get_device_name())
    return why_not(quantisation.scheme, device=gpu.name, cpu_flags=frozenset()) if gpu else ""


def _cpu_flags() -> frozenset[str]:
    """Read the flags of the first processor, as Linux names them."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    flags = next((line for line in lines if line.startswith("flags")), "")
    return frozenset(flags.partition(":")[2].split())


def _method_of_checkpoint(arguments: Any) -> str:
    """The quantisation method that the checkpoint itself names, or nothing. Ours would take its place silently, and no
    update in BF16 fits a layer that keeps it."""
    from vllm.transformers_utils.config import get_config

    config = get_config(
        arguments.hf_config_path or arguments.model,
        arguments.trust_remote_code,
        arguments.revision,
        arguments.code_revision,
        arguments.config_format,
        token=arguments.hf_token,
    )
    found = getattr(config, "quantization_config", None) or {}
    return found.get("quant_method", "unknown method") if found else ""
