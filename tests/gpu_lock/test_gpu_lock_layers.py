"""vLLM's layers of a Hopper: which kernels they take, their first load, two syncs with proof, and the traced call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import layers
import pytest
import torch

from appliance.terms.schemes import Scheme
from appliance.terms.settings import Quantisation

pytestmark = pytest.mark.usefixtures("hopper")
KERNELS = {
    Scheme.BF16: "",
    Scheme.INT8: "CutlassInt8ScaledMMLinearKernel",
    Scheme.FP8: "CutlassFP8ScaledMMLinearKernel",
    Scheme.FP8_CHANNEL: "CutlassFP8ScaledMMLinearKernel",
}
QUANTISED = 4 * layers.LAYERS  # of each block: qkv, o, gate and up, down


@pytest.fixture(scope="module")
def one_rank(hopper: None) -> Iterator[None]:
    """vLLM's groups of processes, with one process in them."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel

    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, "tcp://127.0.0.1:0", 0, "gloo")
        ensure_model_parallel_initialized(1, 1, backend="gloo")
    yield
    destroy_model_parallel()
    destroy_distributed_environment()


@contextmanager
def settings(folder: Path, scheme: Scheme, *, tied: bool, **more: Any) -> Iterator[Any]:
    """Of vLLM for the small model, as current, with BF16 as torch's default. more: of EngineArgs."""
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.torch_utils import set_default_torch_dtype

    vllm_config = EngineArgs(
        model=str(layers.write_config(folder, tied=tied)),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=1024,
        enable_sleep_mode=True,
        **Quantisation(scheme=scheme).engine_arguments(),
        **more,
    ).create_engine_config()
    with set_current_vllm_config(vllm_config), set_default_torch_dtype(torch.bfloat16), torch.no_grad():
        yield vllm_config


@pytest.fixture
def codec_for_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's quantiser needs a GPU; the codec that it equals bit for bit (`make test-triton`) takes its place."""
    from appliance.quant import triton_int8
    from appliance.quant.codec_int8 import quantise_int8

    monkeypatch.setattr(triton_int8, "quantise_int8_triton", quantise_int8)


def stands(model: torch.nn.Module) -> dict[str, tuple[object, ...]]:
    """Where and how each parameter lies."""
    return {
        name: (each.data_ptr(), tuple(each.shape), each.stride(), each.dtype) for name, each in model.named_parameters()
    }


@pytest.mark.usefixtures("one_rank", "codec_for_triton")
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("scheme", KERNELS)
def test_two_syncs_are_proven_and_move_nothing(scheme: Scheme, tied: bool, tmp_path: Path) -> None:
    """What CUDA graphs hold on to: address, shape, stride and type of every parameter."""
    from appliance.engine.attest import live_scheme
    from appliance.engine.update import WeightUpdate

    with settings(tmp_path / "model", scheme, tied=tied) as vllm_config:
        model = layers.loaded(vllm_config, seed=1, tied=tied)
        live = live_scheme(model)
        assert (live.scheme, live.emulated) == (scheme, False)
        assert not KERNELS[scheme] or live.kernels[KERNELS[scheme]] == QUANTISED
        before, codes = stands(model), model.model.layers[0].mlp.down_proj.weight.clone()
        update = WeightUpdate(model, model_config=vllm_config.model_config)
        for number, seed in enumerate((2, 3), start=1):
            update.begin()
            update.load(list(layers.weights(seed, tied=tied)))
            acknowledged = update.finish()
            assert (acknowledged.sync, acknowledged.tensors) == (number, len(list(layers.weights(seed, tied=tied))))
            linear = QUANTISED if scheme is not Scheme.BF16 else 0
            assert acknowledged.layers_proven == acknowledged.layers >= linear and acknowledged.unproven == 0, (
                acknowledged
            )
            assert (acknowledged.telemetry is None) == (scheme is Scheme.BF16)
        assert stands(model) == before
        assert not torch.equal(model.model.layers[0].mlp.down_proj.weight, codes)


@pytest.mark.usefixtures("one_rank")
def test_fp8_in_blocks_takes_the_kernel_that_nvcc_compiles(tmp_path: Path) -> None:
    """At its first use. nvcc is on the PATH, as in the image."""
    with settings(tmp_path / "model", Scheme.FP8_BLOCK, tied=True) as vllm_config:
        from vllm.model_executor.model_loader.utils import initialize_model

        model = initialize_model(vllm_config=vllm_config, model_config=vllm_config.model_config)
        method = model.model.layers[0].mlp.down_proj.quant_method
        assert type(method.fp8_linear).__name__ == "FlashInferFp8DeepGEMMDynamicBlockScaledKernel"


@pytest.mark.usefixtures("one_rank", "codec_for_triton")
@pytest.mark.parametrize("scheme", [Scheme.INT8, Scheme.FP8, Scheme.FP8_CHANNEL])
def test_a_layer_is_traced_whole(scheme: Scheme, tmp_path: Path) -> None:
    """torch.compile, as in an engine, without a break of the graph; one token and four, with and without a bias.

    The same operations in the same order, so the same bits.
    """
    with settings(tmp_path / "model", scheme, tied=True) as made:
        model = layers.loaded(made, seed=1, tied=True)
        block = model.model.layers[0]
        for layer in (block.self_attn.qkv_proj, block.mlp.down_proj):
            columns = layers.H if layer is block.self_attn.qkv_proj else layers.WIDE
            bias = getattr(layer, "bias", None)

            def call(x: torch.Tensor, layer: Any = layer, bias: torch.Tensor | None = bias) -> torch.Tensor:
                return layer.quant_method.apply(layer, x, bias)

            traced = torch.compile(call, fullgraph=True, backend="aot_eager")
            for rows in (1, 4):
                x_MK = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)).to(torch.bfloat16)
                assert torch.equal(traced(x_MK), call(x_MK))
