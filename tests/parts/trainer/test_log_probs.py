"""The trainer's log-probs without flash-attn: verl's call, our chunks.

Legend: T tokens, V words. u = 2^-24, half a unit of float32, relative; of BF16 2^-8.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from verl.utils.torch_functional import logprobs_from_logits

from appliance.trainer.worker import CHUNK_ROWS

T, V = 2 * CHUNK_ROWS + 100, 512
U, BF16_U = 2.0**-24, 2.0**-8
# Relative error of S, the sum of V terms exp(x - m), each at most 1, the largest 1 and exact: a term's own is |x - m| u
# (the difference is rounded) + 2 u (exp), and y exp(-y) is below 1 / e; a sum in any order adds V u. S is at least 1.
SUM = U * (V / 2.7 + 2 + V)


def case(dtype: torch.dtype, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Logits of both signs, with words that are certain and words that are hopeless."""
    generator = torch.Generator().manual_seed(seed)
    x_TV = torch.randn(T, V, generator=generator) * torch.linspace(0.1, 12, T)[:, None]
    return x_TV.to(dtype), torch.randint(0, V, (T,), generator=generator)


def reference(x_TV: Tensor, label_T: Tensor, grad_T: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(log p, its gradient, softmax) in float64."""
    x_TV = x_TV.detach().double().requires_grad_()
    all_TV = x_TV.log_softmax(dim=-1)
    log_p_T = all_TV.gather(1, label_T[:, None])[:, 0]
    log_p_T.backward(grad_T.double())
    return log_p_T.detach(), x_TV.grad, all_TV.detach().exp()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("autocast", [False, True])
def test_log_probs_and_gradients_are_those_of_float64(dtype: torch.dtype, autocast: bool) -> None:
    x_TV, label_T = case(dtype)
    grad_T = torch.randn(T, generator=torch.Generator().manual_seed(1))
    x_TV.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        log_p_T = logprobs_from_logits(x_TV, label_T)
    log_p_T.backward(grad_T)
    exact_T, exact_TV, softmax_TV = reference(x_TV, label_T, grad_T)
    assert log_p_T.dtype == torch.float32 and log_p_T.shape == (T,)
    # log p = (x - m) - log S: the difference and the result are rounded, log S has u of its own and S's error.
    far_TV = x_TV.detach().double().amax(dim=-1, keepdim=True) - x_TV.detach().double()
    below_T = far_TV.gather(1, label_T[:, None])[:, 0]
    log_s_T = (-exact_T - below_T).abs()
    assert bool(((log_p_T.double() - exact_T).abs() <= SUM + U * (below_T + log_s_T + exact_T.abs())).all())
    # p = exp(x - m) / S: |x - m| u + 2 u of exp, S's error, u of the division; then the product with g and the sum at
    # the label, u each; and what is rounded to the logits' type. Below 1e-35 float32 may flush.
    relative_TV = SUM + U * (far_TV + 4)
    bound_TV = (softmax_TV * relative_TV).mul_(1 + 1e-3) * grad_T.double().abs()[:, None] + U * exact_TV.abs()
    bound_TV += (BF16_U * exact_TV.abs() * (1 + 1e-3) if dtype == torch.bfloat16 else 0) + 1e-35
    assert bool(((x_TV.grad.double() - exact_TV).abs() <= bound_TV).all())
    assert x_TV.grad.dtype == dtype


def test_any_shape_and_no_token_at_all() -> None:
    x_TV, label_T = case(torch.bfloat16)
    whole = logprobs_from_logits(x_TV, label_T)
    assert torch.equal(logprobs_from_logits(x_TV.view(4, -1, V), label_T.view(4, -1)), whole.view(4, -1))
    assert logprobs_from_logits(x_TV[:0], label_T[:0]).shape == (0,)


class Sizes(TorchDispatchMode):
    """Calls, and the most elements that one of them made anew in float32, and in any type."""

    calls = 0
    wide = whole = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.calls += 1
        if isinstance(result, Tensor) and not result._is_view():
            self.whole = max(self.whole, result.numel())
            if result.dtype == torch.float32:
                self.wide = max(self.wide, result.numel())
        return result


def test_memory_is_that_of_a_chunk_and_calls_are_by_chunks() -> None:
    """Beside the gradient itself: verl's own kept a row of all words for each token, by one call or more for each."""
    x_TV, label_T = case(torch.bfloat16)
    x_TV.requires_grad_()
    with Sizes() as forward:
        log_p_T = logprobs_from_logits(x_TV, label_T)
    assert forward.whole == CHUNK_ROWS * V and forward.calls < 60
    with Sizes() as backward:
        log_p_T.sum().backward()
    assert (backward.wide, backward.whole) == (CHUNK_ROWS * V, T * V) and backward.calls < 90
