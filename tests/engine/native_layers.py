"""vLLM's own online FP8 methods on layers of vLLM's, outside of an engine: weights arrive through the reload of a real
update, and PyTorch's kernels, which vLLM takes on a CPU too, multiply.

On a CPU `fp8-channel` is whole. The quantiser of `fp8` is a CUDA kernel: the same operations in torch stand in for it.
Of `fp8-block` vLLM's quantiser runs, eagerly, and so does its Triton kernel's class; for the kernel itself torch stands
in.

Legend: M tokens, N output channels, K input channels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from faults import before_proof
from torch import Tensor
from torch.nn import Module

from appliance.engine.fp8 import native_fp8_method
from appliance.engine.update import WeightUpdate
from appliance.errors import SyncError
from appliance.quant.codec_fp8 import BLOCK, spread_scale
from appliance.sync.records import Acknowledgement
from appliance.terms.schemes import Scheme

GATE_UP, DOWN = "mlp.gate_up_proj", "mlp.down_proj"
# No multiples of 128, and the middle one of gate_up's three blocks of rows lies in both of its parts.
SHAPES = {"mlp.gate_proj.weight": (160, 100), "mlp.up_proj.weight": (160, 100), "mlp.down_proj.weight": (96, 160)}

Tensors = list[tuple[str, Tensor]]


class Mlp(Module):
    """The linear layers of a model's MLP, one of them fused of two."""

    def __init__(self, scheme: Scheme) -> None:
        from vllm.model_executor.layers.linear import MergedColumnParallelLinear, RowParallelLinear

        super().__init__()
        ours = SimpleNamespace(
            get_quant_method=lambda layer, prefix: native_fp8_method(scheme),
            online_quantization_config=None,
        )
        common = {"bias": False, "quant_config": ours, "disable_tp": True}
        self.mlp = Module()
        self.mlp.gate_up_proj = MergedColumnParallelLinear(100, [160, 160], prefix=GATE_UP, **common)
        self.mlp.down_proj = RowParallelLinear(160, 96, prefix=DOWN, **common)

    def load_weights(self, weights: Tensors) -> set[str]:
        for name, tensor in weights:
            if name == "mlp.down_proj.weight":
                self.mlp.down_proj.weight.weight_loader(self.mlp.down_proj.weight, tensor)
            else:
                part = ("mlp.gate_proj.weight", "mlp.up_proj.weight").index(name)
                self.mlp.gate_up_proj.weight.weight_loader(self.mlp.gate_up_proj.weight, tensor, part)
        return {name for name, _ in weights}


def tensors(seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return [(name, torch.randn(shape, generator=generator).to(torch.bfloat16)) for name, shape in SHAPES.items()]


def stand_in(weight_NK: Tensor, *, scale: Tensor) -> tuple[Tensor, Tensor]:
    """As vLLM 0.31's static_scaled_fp8_quant (csrc/quantization/fp8/common.cuh): the product with 1 / s."""
    scaled_NK = weight_NK.float() * scale.reciprocal()
    largest = torch.tensor(448.0)
    return torch.fmax(-largest, torch.fmin(scaled_NK, largest)).to(torch.float8_e4m3fn), scale  # NaN becomes 448


def block_stand_in(kernel: object, *, A: Tensor, B: Tensor, As: Tensor, Bs: Tensor) -> Tensor:
    """As DeepGEMM and vLLM's Triton kernel: each 128 products are summed, then multiplied by both scales and added."""
    out_MN = torch.zeros(len(A), len(B), dtype=torch.float32)
    scale_NB = spread_scale(Bs, block=(BLOCK, 1), shape=(len(B), Bs.shape[1]))
    for block, start in enumerate(range(0, A.shape[1], BLOCK)):
        part = slice(start, start + BLOCK)
        sums_MN = A[:, part].float() @ B[:, part].float().t()
        out_MN += sums_MN * (As[:, block, None] * scale_NB[:, block])
    return out_MN.to(torch.bfloat16)


@contextmanager
def vllm_settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What vLLM's layers ask for when they are made, on one rank, in BF16 and eager."""
    from vllm import _custom_ops, config
    from vllm.model_executor import parameter
    from vllm.model_executor.kernels import linear
    from vllm.model_executor.kernels.linear.scaled_mm.triton import TritonFp8BlockScaledMMKernel
    from vllm.platforms import PlatformEnum

    monkeypatch.setattr(parameter, "get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(parameter, "get_tensor_model_parallel_world_size", lambda: 1)
    monkeypatch.setattr(_custom_ops, "scaled_fp8_quant", stand_in)
    monkeypatch.setitem(linear._POSSIBLE_FP8_BLOCK_KERNELS, PlatformEnum.CPU, [TritonFp8BlockScaledMMKernel])
    monkeypatch.setattr(TritonFp8BlockScaledMMKernel, "is_supported", lambda capability: (True, None))
    monkeypatch.setattr(TritonFp8BlockScaledMMKernel, "apply_block_scaled_mm", block_stand_in)
    settings = config.VllmConfig(compilation_config=config.CompilationConfig(mode=config.CompilationMode.NONE))
    settings.model_config = SimpleNamespace(dtype=torch.bfloat16)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with (
            config.set_current_vllm_config(settings),
            torch.no_grad(),
            torch.compiler.set_stance("force_eager"),  # the quantiser of `fp8-block` is decorated with torch.compile
        ):
            yield
    finally:
        torch.set_default_dtype(default)


def served(scheme: Scheme, *, seed: int = 1) -> Mlp:
    """With its first weights, loaded as a checkpoint's."""
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    model = Mlp(scheme)
    record_metadata_for_reloading(model)
    model.load_weights(tensors(seed))
    return model


def new_update(model: Mlp, **settings: int) -> WeightUpdate:
    text = SimpleNamespace(tie_word_embeddings=False)
    untied = SimpleNamespace(
        hf_text_config=text, dtype=torch.bfloat16, architecture=type(model).__name__, enforce_eager=True
    )
    return WeightUpdate(model, model_config=untied, **settings)


def take(update: WeightUpdate, stream: Tensors) -> Acknowledgement:
    update.begin()
    update.load([(name, tensor.clone()) for name, tensor in stream])
    return update.finish()


def refusal(model: Mlp, *, inject: Callable[[], bool], update: WeightUpdate | None = None) -> str:
    """What an update to other weights ends with, where something happens between vLLM's end and the proof."""
    with before_proof(inject), pytest.raises(SyncError) as raised:
        take(update or new_update(model), tensors(2))
    return raised.value.message


def received(name: str, stream: Tensors) -> Tensor:
    by_name = dict(stream)
    if name == DOWN:
        return by_name["mlp.down_proj.weight"]
    return torch.cat([by_name["mlp.gate_proj.weight"], by_name["mlp.up_proj.weight"]])
