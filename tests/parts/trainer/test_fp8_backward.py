"""Gradients of quantised layers in E4M3 (`trainer.backward: fp8-block`) against float64, with derived bounds.

Legend: T tokens, N output and K input channels.
"""

from __future__ import annotations

import pytest
import torch
from fp8_bounds import CASES, U, odd, off
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.nn.functional import ScalingType, pad
from torch.nn.functional import scaled_mm as torch_scaled_mm
from transformers import Qwen2Config, Qwen2ForCausalLM

from appliance.quant.codec import dequantise
from appliance.quant.codec_fp8 import quantise_fp8_tokens
from appliance.terms.schemes import Scheme
from appliance.terms.settings import Quantisation
from appliance.trainer.rollout_forward import RolloutForward
from appliance.trainer.rollout_kernels import KERNELS, CudaKernels
from appliance.trainer.rollout_ops import EngineWeight, silu_and_mul

ROWS, COLUMNS = (128, 72), 300


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(params=["emulated", "on a hopper"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What multiplies: the emulation, or the call of torch's kernel for Hopper, with `scaled_mm` in its place."""
    if request.param != "emulated":
        monkeypatch.setattr(CudaKernels, "load", lambda _: None)
        monkeypatch.setitem(KERNELS, "cpu", CudaKernels())
        monkeypatch.setattr(functional, "scaled_mm", scaled_mm)


def scaled_mm(
    a_MK: Tensor,
    b_KN: Tensor,
    scale_a: Tensor,
    recipe_a: ScalingType,
    scale_b: Tensor,
    recipe_b: ScalingType,
    *,
    output_dtype: torch.dtype,
) -> Tensor:
    """As torch's, for which its own checks on CUDA are asked: sizes, types and how scales lie. Sums in float64."""
    with FakeTensorMode():
        fakes = [
            torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device="cuda")
            for each in (a_MK, b_KN, scale_a, scale_b)
        ]
        scales = fakes[2], recipe_a, fakes[3], recipe_b
        assert torch_scaled_mm(*fakes[:2], *scales, output_dtype=output_dtype).dtype is output_dtype
    assert recipe_a is ScalingType.BlockWise1x128
    if recipe_b is ScalingType.BlockWise128x128:
        scale_b = scale_b[: b_KN.shape[0] // 128].t().repeat_interleave(128, dim=0)
    left_MK = a_MK.double() * scale_a.double().repeat_interleave(128, dim=1)
    right_NK = b_KN.t().double() * scale_b.double().repeat_interleave(128, dim=1)
    return (left_MK @ right_NK.t()).to(output_dtype)


def bf16(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape) * scale).to(torch.bfloat16)


def in_blocks(values: Tensor) -> Tensor:
    """float64: quantised and dequantised in blocks of 1 x 128."""
    return dequantise(quantise_fp8_tokens(values.contiguous(), scheme=Scheme.FP8_BLOCK)).double()


class Passed:
    """One layer of two modules, forth and back."""

    def __init__(self, x: Tensor, grad_TN: Tensor, *, factor_K: Tensor | None = None, gated: bool = False) -> None:
        self.weights = [odd(bf16(each, COLUMNS, scale=0.05)).requires_grad_() for each in ROWS]
        self.weight_NK = torch.cat(self.weights).detach().double()
        scale_K = torch.ones(COLUMNS) if factor_K is None else factor_K
        folded = [(each.detach() * scale_K).to(x.dtype) for each in self.weights]
        self.layer = EngineWeight.from_linears(folded, scheme=Scheme.FP8_BLOCK, factor_K=factor_K, fp8_backward=True)
        x, self.bias_N = x.clone().requires_grad_(), torch.zeros(200, dtype=x.dtype, requires_grad=True)
        self.layer(x, self.weights, self.bias_N, gated=gated).backward(grad_TN)
        self.grad_x, self.grad_NK = x.grad, torch.cat([each.grad for each in self.weights])


def assert_rounded_once(rounded: Tensor | None, exact: Tensor, magnitudes: Tensor) -> None:
    """To BF16; and to float32 the operands (a code times its scale) and the sum, 3 of 2^-24."""
    assert rounded is not None and rounded.dtype is torch.bfloat16
    assert bool(((rounded.double() - exact).abs() <= U * exact.abs() + 2.0**-22 * magnitudes).all())


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("tokens", CASES)
def test_operands_are_those_of_the_table(tokens: int) -> None:
    """dX = Q(dY) W^ with the forward's codes, dW = Q(dY^T) Q(X^^T)^T with those that were kept, quantised again."""
    x_TK, grad_TN = odd(bf16(tokens, COLUMNS)), odd(bf16(tokens, 200, scale=1e-3))
    passed = Passed(x_TK, grad_TN)
    rows, weight = in_blocks(grad_TN), dequantise(passed.layer.quantised).double()
    assert_rounded_once(passed.grad_x, rows @ weight, rows.abs() @ weight.abs())
    left, right = in_blocks(grad_TN.t()), in_blocks(in_blocks(x_TK).float().t())
    assert_rounded_once(passed.grad_NK, left @ right.t(), left.abs() @ right.abs().t())
    sums_N = grad_TN.double().sum(0)
    assert_rounded_once(passed.bias_N.grad, sums_N, tokens * grad_TN.double().abs().sum(0))


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("tokens", CASES)
def test_gradients_are_as_near_to_the_exact_ones_as_their_codes(tokens: int) -> None:
    """|A B - Q(A) Q(B)| <= e(A) |B| + (|A| + e(A)) e(B), and one rounding. X is quantised twice: its bound e is that of
    the rows, and then that of the columns of what is at most |X| + e(X)."""
    x_TK, grad_TN = odd(bf16(tokens, COLUMNS)), odd(bf16(tokens, 200, scale=1e-3))
    passed = Passed(x_TK, grad_TN)
    grad, x, weight = grad_TN.double(), x_TK.double(), passed.weight_NK

    def assert_within(found: Tensor | None, wanted: Tensor, bound: Tensor) -> None:
        assert found is not None
        share = ((found.double() - wanted).abs() / (bound * (1 + U) + U * wanted.abs() + 1e-30)).max()
        assert 0.01 < share <= 1, f"{float(share):.3f} of the bound"

    of_grad, of_weight = off(grad, rows=1), off(weight, rows=128, floor=1e-4)
    bound = of_grad @ weight.abs() + (grad.abs() + of_grad) @ of_weight
    assert_within(passed.grad_x, grad @ weight, bound)
    of_grad, of_x = off(grad.t(), rows=1), off(x, rows=1).t()
    of_x = of_x + off(x.t().abs() + of_x, rows=1)
    bound = of_grad @ x.abs() + (grad.abs().t() + of_grad) @ of_x.t()
    assert_within(passed.grad_NK, grad.t() @ x, bound)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("tokens", CASES)
def test_tokens_padded_to_128_give_the_same_bits(tokens: int) -> None:
    x_TK, grad_TN = odd(bf16(tokens, COLUMNS)), odd(bf16(tokens, 200))
    torch.manual_seed(1)
    first = Passed(x_TK, grad_TN)
    torch.manual_seed(1)
    padded = Passed(*(pad(each, (0, 0, 0, -tokens % 128)) for each in (x_TK, grad_TN)))
    assert torch.equal(first.grad_NK, padded.grad_NK)
    assert torch.equal(first.grad_x, padded.grad_x[:tokens])
    assert not padded.grad_x[tokens:].any()


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [64, 200, 640])
def test_the_forward_rounds_once_after_the_bias(rows: int, bias: bool) -> None:
    """To BF16; and to float32 the operands and the sum."""
    x_TK, weight_NK = odd(bf16(33, COLUMNS)), odd(bf16(rows, COLUMNS))
    layer = EngineWeight.from_linears([weight_NK], scheme=Scheme.FP8_BLOCK, factor_K=None)
    bias_N = bf16(rows) if bias else None
    with torch.no_grad():
        output = layer(x_TK, [weight_NK], bias_N)
    x, weight = in_blocks(x_TK), dequantise(layer.quantised).double()
    added = torch.zeros(rows) if bias_N is None else bias_N.double()
    assert_rounded_once(output, x @ weight.t() + added, x.abs() @ weight.abs().t() + added.abs())


@pytest.mark.usefixtures("kernel")
def test_an_outlier_costs_the_tokens_of_its_block_and_no_others() -> None:
    """A gradient of 2^24 among some of 1: what shares its scale in dW is below half of the smallest step, 2^-10 / 448
    of it, and gone; the next 128 tokens are as without it. In dX it is its own token's."""
    x_TK, grad_TN = bf16(256, COLUMNS), bf16(256, 200)
    outlier_TN, alone_TN = grad_TN.clone(), grad_TN.clone()
    outlier_TN[9, 5] = alone_TN[9, 5] = 2.0**24
    alone_TN[:9, 5] = alone_TN[10:128, 5] = 0
    passes = []
    for each in (grad_TN, outlier_TN, alone_TN):
        torch.manual_seed(1)
        passes.append(Passed(x_TK, each))
    plain, outlier, alone = passes
    assert torch.equal(outlier.grad_NK[5], alone.grad_NK[5])
    differ_N = (plain.grad_NK != outlier.grad_NK).any(dim=1)
    differ_T = (plain.grad_x != outlier.grad_x).any(dim=1)
    assert (differ_N.nonzero().tolist(), differ_T.nonzero().tolist()) == ([[5]], [[9]])


def test_smoothing_and_a_gate_before_the_layer() -> None:
    """The engine's weights are s times the trainer's, and so is their gradient, exact. What the gate's product gets is
    in BF16, and its own gradient is the plain formula's."""
    factor_K = 2.0 ** torch.randint(-3, 4, (COLUMNS,))
    gate_up, grad_TN = bf16(130, 2 * COLUMNS), bf16(130, 200)
    torch.manual_seed(1)
    gated = Passed(gate_up, grad_TN, factor_K=factor_K, gated=True)
    wide = gate_up.clone().requires_grad_()
    x_TK = silu_and_mul(wide)
    torch.manual_seed(1)
    plain = Passed(x_TK.detach(), grad_TN, factor_K=factor_K)
    x_TK.backward(plain.grad_x)
    assert torch.equal(gated.grad_x, wide.grad)
    assert torch.equal(gated.grad_NK, plain.grad_NK)
    left, right = in_blocks(grad_TN.t()), in_blocks(in_blocks(x_TK.detach()).float().t())
    assert_rounded_once(gated.grad_NK, left @ right.t() * factor_K, left.abs() @ right.abs().t() * factor_K)


@pytest.mark.usefixtures("kernel")
def test_a_gradient_that_is_not_finite_stays_so() -> None:
    """So the optimizer's step is left out, as after a backward in BF16."""
    grad_TN = bf16(130, 200)
    grad_TN[129, 7] = torch.inf
    passed = Passed(bf16(130, COLUMNS), grad_TN)
    assert torch.isfinite(passed.grad_x).all(dim=1).tolist() == [True] * 129 + [False]
    assert torch.isfinite(passed.grad_NK).all(dim=1).nonzero().flatten().tolist() == [n for n in range(200) if n != 7]


def test_all_quantised_layers_of_a_model_have_it() -> None:
    """E4M3 moves a number by 0.026 of itself: half a step is 2^-4 to 2^-5 of it, uniform, so divided by sqrt(3). From
    the loss to a weight are at most 8 products of two such operands, and dW has a third one: sqrt(17) * 0.026 = 0.11
    of the norm; twice that is allowed. The forward's bits are the same."""
    sizes = {"hidden_size": 128, "intermediate_size": 160, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = Qwen2ForCausalLM(Qwen2Config(**sizes, vocab_size=64, num_hidden_layers=2)).to(torch.bfloat16)
    lengths = (1, 33, 7, 100)
    positions = torch.cat([torch.arange(each) for each in lengths])[None]
    ids, weights_T, results = torch.randint(64, (1, 141)), torch.randn(141), []
    for fp8_backward in (False, True):
        RolloutForward(
            model,
            quantisation=Quantisation(scheme=Scheme.FP8_BLOCK, emulated=True),
            num_tokens=64,
            fp8_backward=fp8_backward,
        )
        model.zero_grad()
        out = model(input_ids=ids, position_ids=positions, shift_labels=ids.roll(-1, 1), temperature=1.0).log_probs[0]
        (out * weights_T).sum().backward()
        results.append((out, {name: each.grad.flatten().double() for name, each in model.named_parameters()}))
    (plain, of_plain), (in_fp8, of_fp8) = results
    assert torch.equal(plain, in_fp8)
    gaps = {name: float((of_fp8[name] - wanted).norm() / wanted.norm()) for name, wanted in of_plain.items()}
    linears = [name for name in gaps if name.endswith("proj.weight")]
    assert len(linears) == 14
    assert all(0.02 < gaps[name] < 0.2 for name in linears), gaps
    assert all(functional.cosine_similarity(of_fp8[name], of_plain[name], dim=0) > 0.98 for name in linears)
