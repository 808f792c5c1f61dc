"""`trainer.forward: rollout` on a GPU: the trainer's forward against vLLM's own layers of a Hopper, token by token.

Torch is in the place of every kernel: this shows which are called, in which order and with what, and no kernel's
rounding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hopper as stand_ins
import layers
import pytest
import test_gpu_lock_layers
import torch
from test_gpu_lock_layers import settings
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from appliance.terms.schemes import Scheme
from appliance.terms.settings import Quantisation

pytestmark = pytest.mark.usefixtures("hopper")
one_rank, codec_for_triton = test_gpu_lock_layers.one_rank, test_gpu_lock_layers.codec_for_triton

PROMPTS, RESPONSE, HEAD = (5, 18), 4, 64
TEMPERATURE = 0.7
REGISTERED = ("add_norm", "silu_and_mul", "rotate", "scaled_mm", "quantise_tokens_int8", "quantise_tokens_fp8")


@pytest.fixture
def called(hopper: None, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """vLLM's batch-invariant mode, as a plan sets it; how often each kernel was called."""
    from vllm.model_executor.layers import rotary_embedding
    from vllm.v1.attention.backends import fa_utils

    from appliance.quant.codec_int8 import quantise_int8
    from appliance.trainer import rollout_kernels, rollout_ops

    calls: Counter[str] = Counter()
    batch_invariant = rollout_kernels.batch_invariant_kernels()

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            calls[name] += 1
            return function(*args, **more)

        return call

    for name in REGISTERED:
        monkeypatch.setattr(stand_ins, name, counted(name, getattr(stand_ins, name)))
    norm, softmax = (stand_ins.Launch(each) for each in (counted("norm", stand_ins.norm_rows), stand_ins.softmax_rows))
    monkeypatch.setattr(batch_invariant, "_rms_norm_kernel", norm)
    monkeypatch.setattr(batch_invariant, "_log_softmax_kernel", softmax)
    monkeypatch.setattr(batch_invariant, "matmul_batch_invariant", counted("linear", stand_ins.matmul))
    monkeypatch.setattr(fa_utils, "flash_attn_varlen_func", counted("attention", stand_ins.attend))
    monkeypatch.setitem(rollout_kernels.KERNELS, "cpu", rollout_kernels.CudaKernels())
    monkeypatch.setattr(rollout_ops, "quantise_weight", quantise_int8)  # of a weight on CUDA
    monkeypatch.setattr(rotary_embedding, "_ROPE_DICT", {})  # what an engine without the kernel made is kept there
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    return calls


def texts() -> list[Tensor]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randint(0, layers.V, (each + RESPONSE,), generator=generator) for each in PROMPTS]


class Rolled:
    """vLLM's modules with what each sequence has had, in the place of an engine's cache. lengths: of that, tokens."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model, self._new = model, [0] * len(PROMPTS)
        for layer in model.model.layers:
            layer.self_attn.attn.forward = self._attention([[], []])

    def _attention(self, cache: list[list[Tensor]]) -> Callable[..., Tensor]:
        """Of a layer: vLLM's call of FlashAttention, with a block for each sequence. cache: keys and values of each."""
        from vllm.v1.attention.backends import fa_utils

        def attend(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
            q, *new = (each.unflatten(-1, (-1, HEAD)) for each in (query, key, value))
            for kept, rows in zip(cache, new, strict=True):
                parts = rows.split(self._new)
                kept[:] = [torch.cat(pair) for pair in zip(kept, parts, strict=True)] if kept else parts
            used = torch.tensor([len(each) for each in cache[0]]).int()
            k, v = (pad_sequence(each, batch_first=True) for each in cache)
            return fa_utils.flash_attn_varlen_func(
                q=q,
                k=k,
                v=v,
                out=torch.empty_like(q),
                cu_seqlens_q=torch.tensor([0, *self._new]).cumsum(0).int(),
                max_seqlen_q=max(self._new),
                seqused_k=used,
                max_seqlen_k=int(used.max()),
                softmax_scale=HEAD**-0.5,
                causal=True,
                window_size=[-1, -1],
                block_table=torch.arange(len(used))[:, None].int(),
                softcap=0.0,
                fa_version=3,
                num_splits=1,
            ).flatten(1)

        return attend

    def log_probs(self) -> Tensor:
        """[sequences, RESPONSE]: of each sequence's last tokens; the prompts in one pass, then a token of each."""
        from appliance.trainer.rollout_kernels import batch_invariant_kernels

        before, by_turn = [0] * len(PROMPTS), []
        for step in range(RESPONSE):
            until = [each + step for each in PROMPTS]
            spans = [slice(*each) for each in zip(before, until, strict=True)]
            self._new, before = [each.stop - each.start for each in spans], until
            ids = torch.cat([text[each] for text, each in zip(texts(), spans, strict=True)])
            positions = torch.cat([torch.arange(each.start, each.stop) for each in spans])
            hidden = self._model.model(ids, positions, None)[torch.tensor(self._new).cumsum(0) - 1]
            logits = self._model.compute_logits(hidden).float().div_(TEMPERATURE)
            log_probs = batch_invariant_kernels()._log_softmax_batch_invariant(logits, -1, False)
            said = torch.stack([text[each.stop] for text, each in zip(texts(), spans, strict=True)])
            by_turn.append(log_probs.gather(1, said[:, None])[:, 0])
        return torch.stack(by_turn, dim=1)


def recomputed(folder: Path, quantisation: Quantisation, *, tied: bool) -> Tensor:
    """The same log-probs by the trainer's forward, both sequences in one row."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from appliance.trainer.rollout_forward import RolloutForward

    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
    model.load_state_dict(dict(layers.weights(1, tied=tied)), strict=False)
    model.tie_weights()
    RolloutForward(model, quantisation=quantisation, num_tokens=layers.V)
    ids, positions = torch.cat(texts())[None], torch.cat([torch.arange(len(each)) for each in texts()])[None]
    out = model(input_ids=ids, position_ids=positions, temperature=TEMPERATURE, shift_labels=ids.roll(-1, 1))
    ends = torch.tensor([len(each) for each in texts()]).cumsum(0)
    return torch.stack([out.log_probs[0, end - RESPONSE - 1 : end - 1] for end in ends.tolist()])


@pytest.mark.usefixtures("one_rank", "codec_for_triton")
@pytest.mark.parametrize(
    ("scheme", "tied"), [(Scheme.BF16, False), (Scheme.INT8, True), (Scheme.FP8_CHANNEL, False), (Scheme.FP8, True)]
)
def test_log_probs_are_those_of_vllms_layers(scheme: Scheme, tied: bool, tmp_path: Path, called: Counter[str]) -> None:
    """And each kernel is called as often in a pass: what vLLM does in another way would be missing."""
    with settings(tmp_path / "model", scheme, tied=tied, enforce_eager=True) as made:
        model = layers.loaded(made, seed=1, tied=tied)
        called.clear()
        expected = Rolled(model).log_probs()
    of_engine = {name: count / RESPONSE for name, count in called.items()}
    called.clear()
    with torch.no_grad():
        found = recomputed(tmp_path / "model", Quantisation(scheme=scheme), tied=tied)
    assert torch.equal(found, expected)
    assert dict(called) == of_engine and of_engine["norm"] == 1 and of_engine["linear"] > 0
