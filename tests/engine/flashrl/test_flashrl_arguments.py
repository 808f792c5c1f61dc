"""What FlashRL's variables do to vLLM's engine arguments, and what they refuse. Settings only: no model is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from families import make_family

from appliance.engine.vllm_versions import vllm_version
from appliance.errors import RecipeError
from appliance.terms.devices import CPU, why_not
from appliance.terms.schemes import Scheme
from appliance.terms.settings import Quantisation

pytestmark = pytest.mark.engine


def engine_config(model: Path, **arguments: Any):
    """vLLM's settings, as `vllm serve` and `LLM` make them."""
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(str(model), max_model_len=64, enforce_eager=True, **arguments).create_engine_config()


def problems_of(model: Path, **arguments: Any) -> list[tuple[str, str]]:
    with pytest.raises(RecipeError) as raised:
        engine_config(model, **arguments)
    return raised.value.problems


@pytest.fixture
def model(two_checkpoints: tuple[Path, Path]) -> Path:
    return two_checkpoints[0]


def test_without_the_variable_nothing_changes(model: Path, flashrl: pytest.MonkeyPatch) -> None:
    config = engine_config(model)
    assert (config.model_config.quantization, config.load_config.load_format) == (None, "auto")
    assert config.model_config.logprobs_mode == "raw_logprobs"


def test_int8_reaches_the_settings_of_the_model(model: Path, flashrl: pytest.MonkeyPatch) -> None:
    flashrl.setenv("FLASHRL_CONFIG", "int8")
    flashrl.setenv("FLASHRL_LMHEAD_FP32", "1")
    config = engine_config(model, hf_overrides={"rope_theta": 5000.0})
    assert config.quant_config.quantisation == Quantisation(scheme=Scheme.INT8, lm_head_fp32=True)
    assert config.model_config.quantization == "appliance"
    assert config.model_config.hf_config.rope_theta == 5000.0
    assert config.model_config.logprobs_mode == "processed_logprobs"
    assert config.load_config.load_format == "appliance"
    assert config.parallel_config.worker_cls == "flashrl_compat.worker.ProvenWorker"


def test_bf16_is_vllms_own_engine_with_exact_log_probs(model: Path, flashrl: pytest.MonkeyPatch) -> None:
    flashrl.setenv("FLASHRL_CONFIG", "bf16")
    config = engine_config(model)
    assert (config.quant_config, config.model_config.logprobs_mode) == (None, "processed_logprobs")


@pytest.mark.parametrize(
    ("name", "extension", "expected"),
    [
        ("int8", "VERL_EXTENSION", "SYNC_EXTENSION"),
        ("bf16", "VERL_EXTENSION", "SYNC_EXTENSION"),
        ("int8", "", ""),
    ],
)
def test_verls_worker_extension(
    model: Path, flashrl: pytest.MonkeyPatch, name: str, extension: str, expected: str
) -> None:
    from flashrl_compat import arguments

    flashrl.setenv("FLASHRL_CONFIG", name)
    config = engine_config(model, worker_extension_cls=getattr(arguments, extension, ""))
    assert config.parallel_config.worker_extension_cls == getattr(arguments, expected, "")


def test_the_same_arguments_twice(model: Path, flashrl: pytest.MonkeyPatch) -> None:
    """`vllm serve` with several API servers makes the engine's settings more than once."""
    from vllm.engine.arg_utils import EngineArgs

    flashrl.setenv("FLASHRL_CONFIG", "int8")
    flashrl.setenv("FLASHRL_TEST_RELOAD", str(model))
    arguments = EngineArgs(str(model), max_model_len=64, enforce_eager=True)
    first, second = arguments.create_engine_config(), arguments.create_engine_config()
    assert first.quant_config.quantisation == second.quant_config.quantisation == Quantisation(scheme=Scheme.INT8)
    assert first.additional_config == second.additional_config == {"flashrl_test_reload": [str(model)]}


def test_each_replica_gets_its_entry_of_the_list(model: Path, tmp_path: Path, flashrl: pytest.MonkeyPatch) -> None:
    (tmp_path / "mixed.yaml").write_text("configs: [{fn: bf16, lm_head_fp32: true}, {fn: int8}]")
    flashrl.setenv("FLASHRL_CONFIG", str(tmp_path / "mixed.yaml"))
    schemes = []
    for replica in range(3):
        flashrl.setenv("VERL_REPLICA_RANK", str(replica))
        schemes.append(engine_config(model).quant_config.quantisation.scheme)
    assert schemes == [Scheme.BF16, Scheme.INT8, Scheme.BF16]


@pytest.mark.parametrize(
    ("environ", "arguments", "rank"),
    [
        ({}, {}, 0),
        ({"RANK": "5"}, {}, 5),
        ({"RANK": "5"}, {"tensor_parallel_size": 2}, 2),
        ({"RANK": "5"}, {"data_parallel_rank": 1}, 1),
        ({"RANK": "5", "VERL_REPLICA_RANK": "3"}, {"data_parallel_rank": 1}, 3),
    ],
)
def test_which_replica_this_is(model: Path, environ: dict[str, str], arguments: dict[str, int], rank: int) -> None:
    from vllm.engine.arg_utils import EngineArgs

    from flashrl_compat.arguments import replica_rank

    assert replica_rank(EngineArgs(str(model), **arguments), environ) == rank


@pytest.mark.parametrize(
    ("name", "value"), [("VERL_REPLICA_RANK", "x"), ("VERL_REPLICA_RANK", ""), ("RANK", "-1"), ("RANK", "0.5")]
)
def test_a_rank_that_is_none_is_refused_by_its_name(model: Path, name: str, value: str) -> None:
    from vllm.engine.arg_utils import EngineArgs

    from flashrl_compat.arguments import replica_rank

    with pytest.raises(RecipeError) as raised:
        replica_rank(EngineArgs(str(model)), {name: value})
    hint = "it chooses this engine's entry in FLASHRL_CONFIG: 0 for the first, or unset it"
    assert raised.value.problems == [(f"{name}: `{value}` is not a rank", hint)]


def test_engines_of_one_command_cannot_differ(model: Path, tmp_path: Path, flashrl: pytest.MonkeyPatch) -> None:
    (tmp_path / "mixed.yaml").write_text("configs: [{fn: bf16}, {fn: int8}]")
    flashrl.setenv("FLASHRL_CONFIG", str(tmp_path / "mixed.yaml"))
    assert problems_of(model, data_parallel_size=2) == [
        (
            "--data-parallel-size 2: the engines of one command get one scheme, and FLASHRL_CONFIG lists several",
            "start each engine by a command of its own",
        )
    ]


def test_what_contradicts_the_variables_is_refused_at_once(model: Path, flashrl: pytest.MonkeyPatch) -> None:
    flashrl.setenv("FLASHRL_CONFIG", "int8")
    flashrl.setenv("FLASHRL_TEST_RELOAD", str(model))
    problems = problems_of(
        model,
        quantization="fp8",
        hf_overrides={"quantization_config": {"quant_method": "fp8"}},
        logprobs_mode="processed_logits",
        worker_cls="my.Worker",
    )
    assert problems == [
        (
            "--quantization: `fp8` is given, and FLASHRL_CONFIG wants `appliance`",
            "leave --quantization out, or unset FLASHRL_CONFIG",
        ),
        (
            "--hf-overrides: `quantization_config` is given, and FLASHRL_CONFIG sets it",
            "leave --hf-overrides out, or unset FLASHRL_CONFIG",
        ),
        (
            "--logprobs-mode: `processed_logits` is given, and FLASHRL_CONFIG wants `processed_logprobs`",
            "leave --logprobs-mode out, or unset FLASHRL_CONFIG",
        ),
        (
            "--worker-cls: `my.Worker` is given, and FLASHRL_CONFIG wants `flashrl_compat.worker.ProvenWorker`",
            "leave --worker-cls out, or unset FLASHRL_CONFIG",
        ),
    ]


def test_bf16_and_a_quantisation_of_vllms_contradict(model: Path, flashrl: pytest.MonkeyPatch) -> None:
    flashrl.setenv("FLASHRL_CONFIG", "bf16")
    assert problems_of(model, quantization="fp8") == [
        (
            "--quantization: `fp8` is given, and FLASHRL_CONFIG wants `bf16`",
            "leave --quantization out, or unset FLASHRL_CONFIG",
        )
    ]


def test_overrides_that_are_a_function_are_refused(model: Path, flashrl: pytest.MonkeyPatch) -> None:
    flashrl.setenv("FLASHRL_CONFIG", "int8")
    assert problems_of(model, hf_overrides=lambda config: config) == [
        (
            "--hf-overrides: a function is given, and FLASHRL_CONFIG wants a mapping",
            "leave --hf-overrides out, or unset FLASHRL_CONFIG",
        )
    ]


def test_vllms_own_online_method_is_refused(model: Path, flashrl: pytest.MonkeyPatch) -> None:
    flashrl.setenv("FLASHRL_CONFIG", "int8")
    assert problems_of(model, quantization_config={"linear": "fp8_per_channel"}) == [
        (
            "--quantization-config: vLLM's own method is given, and FLASHRL_CONFIG wants its own",
            "leave --quantization-config out, or unset FLASHRL_CONFIG",
        )
    ]


@pytest.mark.parametrize(("scheme", "hint"), [("int8", ": it is quantised when it is loaded"), ("bf16", "")])
def test_a_quantised_checkpoint_is_refused(
    model: Path, tmp_path: Path, flashrl: pytest.MonkeyPatch, scheme: str, hint: str
) -> None:
    """FlashRL serves a quantised donor; here the settings would silently take the place of the checkpoint's own."""
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "compressed-tensors", "format": "int-quantized"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    flashrl.setenv("FLASHRL_CONFIG", scheme)
    assert problems_of(tmp_path, skip_tokenizer_init=True) == [
        (
            f"--model: {tmp_path} is quantised already (compressed-tensors)",
            f"serve the BF16 checkpoint{hint}",
        )
    ]


@pytest.mark.parametrize("name", ["fp8", "fp8_vllm", "fp8_fast", "fp8_vllm_fast", "fp8_tensor", "fp8_channel"])
def test_fp8_on_a_cpu_stops_with_the_reason(model: Path, flashrl: pytest.MonkeyPatch, name: str) -> None:
    from flashrl_compat.arguments import _cpu_flags

    flashrl.setenv("FLASHRL_CONFIG", name)
    scheme = Scheme.FP8_CHANNEL if name == "fp8_channel" else Scheme.FP8
    reason = why_not(scheme, device=CPU, cpu_flags=_cpu_flags())
    assert reason
    assert problems_of(model) == [
        (
            f"FLASHRL_CONFIG: {reason}",
            "FP8 is emulated, for numerics and not for speed, with `emulated: true` in a YAML file",
        )
    ]


@pytest.mark.parametrize("name", ["fp8", "fp8_channel", "fp8_block"])
def test_fp8_on_a_cpu_with_amx_stops_with_the_reason_too(
    model: Path, tmp_path: Path, flashrl: pytest.MonkeyPatch, name: str
) -> None:
    """A stand-in for the processor's flags: with AMX vLLM 0.31 would keep activations in BF16 and call it FP8."""
    from flashrl_compat import arguments

    (tmp_path / "fp8.yaml").write_text(f"configs: [{{fn: {name}}}]")
    flashrl.setenv("FLASHRL_CONFIG", str(tmp_path / "fp8.yaml"))
    flashrl.setattr(arguments, "_cpu_flags", lambda: frozenset({"amx_tile", "amx_bf16", "amx_int8"}))
    assert problems_of(model) == [
        (
            "FLASHRL_CONFIG: on a CPU vLLM widens FP8 weights and multiplies in BF16 (W8A16), "
            f"which is not `{name.replace('_', '-')}`",
            "FP8 is emulated, for numerics and not for speed, with `emulated: true` in a YAML file",
        )
    ]


def test_what_vllm_takes_for_fp8_on_a_cpu_with_amx_is_known_and_never_proven(
    model: Path, flashrl: pytest.MonkeyPatch
) -> None:
    """Both kernels keep activations in BF16. That of weights with one scale is in 0.31 alone."""
    from vllm import _custom_ops
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.kernels.linear import init_fp8_linear_kernel
    from vllm.model_executor.kernels.linear.scaled_mm import cpu
    from vllm.model_executor.layers.quantization.online import fp8

    from appliance.engine.fp8 import _READ_ROWS

    methods = {"CPUFp8BlockScaledMMKernel": fp8.Fp8PerBlockOnlineLinearMethod}
    if vllm_version() == "0.31.0":
        methods["CPUFp8PerTensorScaledMMLinearKernel"] = fp8.Fp8PerTensorOnlineLinearMethod
    flashrl.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    flashrl.setattr(_custom_ops, "_supports_cpu_fp8_w8a16", True)
    with set_current_vllm_config(engine_config(model)):
        for kernel, method in methods.items():
            chosen = method()
            linear = init_fp8_linear_kernel(
                activation_quant_key=chosen.activation_quant_key,
                weight_quant_key=chosen.weight_quant_key,
                weight_shape=(128, 128),
                input_dtype=torch.bfloat16,
                out_dtype=torch.bfloat16,
                module_name=kernel,
            )
            assert type(linear) is getattr(cpu, kernel)
            assert type(linear) not in _READ_ROWS


@pytest.mark.parametrize("name", ["bf16", "int8"])
@pytest.mark.parametrize(
    ("arguments", "fact"),
    [
        ({"data_parallel_size": 2}, "--data-parallel-size 2: an engine has a part of each expert"),
        ({"enable_expert_parallel": True}, "--enable-expert-parallel: a rank has some of the experts"),
        ({"pipeline_parallel_size": 2}, "--pipeline-parallel-size 2: a rank has some of the layers"),
    ],
)
def test_an_engine_with_parts_of_layers_or_experts_is_refused(
    tmp_path: Path, flashrl: pytest.MonkeyPatch, name: str, arguments: dict[str, object], fact: str
) -> None:
    folder = make_family(tmp_path, name="qwen3-moe", seed=1)
    assert engine_config(folder, **arguments)
    flashrl.setenv("FLASHRL_CONFIG", name)
    hint = "use --tensor-parallel-size, and an engine of its own for each replica"
    assert problems_of(folder, **arguments) == [(f"{fact}, and no weight update of it is proven", hint)]


@pytest.mark.parametrize(
    ("model_type", "architecture"),
    [
        ("gpt_oss", "GptOssForCausalLM"),
        ("granitemoe", "GraniteMoeForCausalLM"),
        ("granitemoehybrid", "GraniteMoeHybridForCausalLM"),
        ("granitemoeshared", "GraniteMoeSharedForCausalLM"),
    ],
)
def test_a_model_with_names_of_its_own_is_refused(
    tmp_path: Path, flashrl: pytest.MonkeyPatch, model_type: str, architecture: str
) -> None:
    config = {"model_type": model_type, "architectures": [architecture], "hidden_size": 96}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "mamba_n_heads": 8}
    (tmp_path / "config.json").write_text(json.dumps({**config, **heads}))
    assert engine_config(tmp_path, skip_tokenizer_init=True)
    flashrl.setenv("FLASHRL_CONFIG", "bf16")
    fact = f"--model: {architecture} has checkpoints whose names no proof knows, and no weight update of it is proven"
    assert problems_of(tmp_path, skip_tokenizer_init=True) == [
        (fact, "use a model of another type, or unset FLASHRL_CONFIG")
    ]


def test_a_quantised_pooling_engine_is_refused(model: Path, flashrl: pytest.MonkeyPatch) -> None:
    pooling = {"runner": "pooling", "convert": "embed"}
    flashrl.setenv("FLASHRL_CONFIG", "bf16")
    assert engine_config(model, **pooling)
    flashrl.setenv("FLASHRL_CONFIG", "int8")
    (problem, hint), *others = problems_of(model, **pooling)
    assert not others
    assert problem == "--model: a pooling model, and quantised schemes are for those that generate"
    assert hint == "use FLASHRL_CONFIG=bf16, or start it without FLASHRL_CONFIG"


def test_an_engine_in_fp32_is_refused(model: Path, flashrl: pytest.MonkeyPatch) -> None:
    assert engine_config(model, dtype="float32")
    flashrl.setenv("FLASHRL_CONFIG", "bf16")
    message = "--dtype float32: no weight update of it is proven"
    assert problems_of(model, dtype="float32") == [(message, "use bfloat16 or float16")]


def test_engines_beside_each_other_are_no_parts(model: Path, flashrl: pytest.MonkeyPatch) -> None:
    flashrl.setenv("FLASHRL_CONFIG", "int8")
    assert engine_config(model, data_parallel_size=2).parallel_config.data_parallel_size == 2


def test_a_transfer_into_the_kernels_tensors_is_refused(model: Path, flashrl: pytest.MonkeyPatch) -> None:
    from vllm.config.weight_transfer import WeightTransferConfig
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    from flashrl_compat.shared_memory import BACKEND

    known = WeightTransferEngineFactory._registry
    others = {backend for backend in known if backend not in ("nccl", "ipc", BACKEND)}
    assert others == {"sparse_nccl", "sharded_rdt", "nccl_m2n"}.intersection(known)  # a new one: what does it write?
    for backend in sorted(others):
        transfer = {"weight_transfer_config": WeightTransferConfig(backend=backend)}
        flashrl.delenv("FLASHRL_CONFIG", raising=False)
        assert engine_config(model, **transfer)
        flashrl.setenv("FLASHRL_CONFIG", "bf16")
        fact = f"--weight-transfer-config: `{backend}` writes into the kernels' tensors, where nothing is proven"
        assert problems_of(model, **transfer) == [(fact, "use `nccl` or `ipc`; without a GPU `shm`")]


def test_adapters_are_refused(model: Path, flashrl: pytest.MonkeyPatch) -> None:
    assert engine_config(model, enable_lora=True)
    flashrl.setenv("FLASHRL_CONFIG", "bf16")
    assert problems_of(model, enable_lora=True) == [
        (
            "--enable-lora: adapters stand beside the weights, and no weight update of such an engine is proven",
            "merge the adapters in the trainer",
        )
    ]


def test_a_multimodal_model_is_refused_by_name(tmp_path: Path, flashrl: pytest.MonkeyPatch) -> None:
    """Some would break at the first update: vLLM renames their layers, and skips the towers that it leaves out."""
    from transformers import PaliGemmaConfig

    text = {"model_type": "gemma", "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = PaliGemmaConfig(text_config=text, architectures=["PaliGemmaForConditionalGeneration"])
    config.save_pretrained(tmp_path)
    flashrl.setenv("FLASHRL_CONFIG", "bf16")
    assert problems_of(tmp_path, skip_tokenizer_init=True) == [
        (
            "--model: PaliGemmaForConditionalGeneration takes more than text, by names that no proof knows: no weight "
            "update of it is proven",
            "use a model of text alone, or unset FLASHRL_CONFIG",
        )
    ]


def test_an_error_of_ours_shows_its_hints_below_it(model: Path, flashrl: pytest.MonkeyPatch) -> None:
    """No command of ours is there to print them; Python prints notes below a traceback."""
    flashrl.setenv("FLASHRL_CONFIG", "int3")
    with pytest.raises(RecipeError) as raised:
        engine_config(model)
    assert str(raised.value) == "FLASHRL_CONFIG: unknown value `int3`"
    assert raised.value.__notes__ == [f"hint: {raised.value.hint}"]
    assert raised.value.hint.startswith("use one of `bf16`, `fp8`, ")
