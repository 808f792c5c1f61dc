"""The last projection in FP32 on real engines, tied and untied, against float64 on the hidden states they had.

Legend: M positions, K hidden size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from engines import Engine, make_checkpoint, read_checkpoint, start_engine
from torch import Tensor

pytestmark = pytest.mark.engine

# A padded vocabulary, and one that is not.
SHAPES = {"tied": {"tied": True, "vocab_size": 500}, "untied": {"tied": False, "vocab_size": 512}}


@dataclass
class Seen:
    """What the head was given and gave, of every call: [M, K] BF16 and [M, V]."""

    hidden_MK: Tensor
    logits_MV: Tensor


def generate_and_watch(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> tuple[Seen, list[float]]:
    """Also the log-probs of the tokens that were chosen, in no order."""
    hidden, logits = [], []
    original = engine.model.compute_logits

    def record_logits(hidden_states: Tensor, *args: object, **kwargs: object) -> Tensor:
        output = original(hidden_states, *args, **kwargs)
        hidden.append(hidden_states.clone())
        logits.append(output.clone())
        return output

    with monkeypatch.context() as patched:
        patched.setattr(engine.model, "compute_logits", record_logits)
        outputs = engine.generate(max_tokens=8)
    return Seen(torch.cat(hidden), torch.cat(logits)), [one for _, each in outputs for one in each]


def head_weight(folder: Path) -> Tensor:
    tensors = dict(read_checkpoint(folder))
    return tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])


def reference(seen: Seen, *, folder: Path) -> tuple[Tensor, Tensor]:
    """([M, V] float64 logits, [M, V] bound of a float32 head): K products of exact terms, summed in float32."""
    weight_VK = head_weight(folder).double()
    logits_MV = seen.hidden_MK.double() @ weight_VK.t()
    terms_MV = seen.hidden_MK.double().abs() @ weight_VK.abs().t()
    return logits_MV, weight_VK.shape[1] * 2.0**-24 * terms_MV


def assert_is_float32_head(engine: Engine, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, log_probs = generate_and_watch(engine, monkeypatch)
    wanted_MV, bound_MV = reference(seen, folder=folder)
    assert seen.logits_MV.dtype == torch.float32
    assert bool(((seen.logits_MV.double() - wanted_MV).abs() <= bound_MV).all())
    # A logit moves a log-prob by at most twice its own error; exp, sum and log in float32 add a few 2^-24 of values
    # below 16: 2^-18 is ample. Generation is greedy, so each reported log-prob is a maximum of its row.
    tolerance = 2 * float(bound_MV.max()) + 2.0**-18
    best_M = wanted_MV.log_softmax(dim=1).amax(dim=1)
    for log_prob in log_probs:
        assert float((best_M - log_prob).abs().min()) <= tolerance


@pytest.mark.parametrize("scheme", ["bf16", "int8"])
@pytest.mark.parametrize("shape", SHAPES)
def test_log_probs_are_those_of_a_float32_head(
    shape: str, scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As loaded, and after an update with other weights."""
    from appliance.engine.attest import live_scheme

    first = make_checkpoint(tmp_path / "a", seed=21, num_hidden_layers=1, **SHAPES[shape])
    second = make_checkpoint(tmp_path / "b", seed=22, num_hidden_layers=1, **SHAPES[shape])
    engine = start_engine(first, scheme=scheme, lm_head_fp32=True)
    live = live_scheme(engine.model)
    assert (live.scheme, live.lm_head_fp32) == (scheme, True)
    assert live.kernels["Fp32HeadMethod"] == 2
    assert_is_float32_head(engine, first, monkeypatch)
    before = engine.generate()
    engine.load(read_checkpoint(second), bucket=3)
    assert_is_float32_head(engine, second, monkeypatch)
    engine.load(read_checkpoint(first), bucket=3)
    assert engine.generate() == before


@pytest.mark.parametrize("shape", SHAPES)
def test_the_bf16_head_is_another_one(shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its logits are rounded to BF16: the bound of the test above tells the two apart."""
    from appliance.engine.attest import live_scheme

    folder = make_checkpoint(tmp_path / "a", seed=21, num_hidden_layers=1, **SHAPES[shape])
    engine = start_engine(folder, scheme="int8")
    assert not live_scheme(engine.model).lm_head_fp32
    seen, _ = generate_and_watch(engine, monkeypatch)
    wanted_MV, bound_MV = reference(seen, folder=folder)
    assert float(((seen.logits_MV.double() - wanted_MV).abs() > bound_MV).double().mean()) > 0.9


@pytest.mark.parametrize("fp32", [False, True], ids=["bf16-head", "fp32-head"])
@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_not_finite_is_told_as_what_it_is(
    shape: str, fp32: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head of its own is not looked at: its kernel's answer shows a value. A tied one's tensor is, as it comes: an
    answer that is not finite is then the kernel's fault."""
    from appliance.errors import SyncError

    folder = make_checkpoint(tmp_path / "a", seed=21, num_hidden_layers=1, **SHAPES[shape])
    tensors = read_checkpoint(folder)
    engine = start_engine(folder, scheme="bf16", lm_head_fp32=fp32)
    method, name = engine.model.lm_head.quant_method, "lm_head.weight"
    if shape == "tied":
        apply = method.apply
        monkeypatch.setattr(method, "apply", lambda *given: apply(*given) * float("nan"))
        expected = "weight update 1: lm_head on rank 0 is not as received: probe, output channel 0: the engine has nan"
    else:
        held = dict(tensors)[name].clone()
        held[7, -1] = float("inf")
        tensors = [(each, held if each == name else tensor) for each, tensor in tensors]
        expected = "weight update: lm_head.weight has a value that is not finite"
    with pytest.raises(SyncError) as raised:
        engine.load(tensors)
    assert raised.value.message.startswith(expected), raised.value.message


def test_parts_of_the_vocabulary_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weight is widened some rows at a time: rows are independent, whatever their number."""
    from appliance.engine import config

    x_MK, weight_VK = torch.randn(5, 96), torch.randn(333, 96).to(torch.bfloat16)
    x_MK = x_MK.to(torch.bfloat16)
    wanted_MV = x_MK.double() @ weight_VK.double().t()
    bound_MV = 96 * 2.0**-24 * (x_MK.double().abs() @ weight_VK.double().abs().t())
    for elements in (1, 96, 1000, 10**6):
        monkeypatch.setattr(config, "_CHUNK_ELEMENTS", elements)
        found_MV = config._widened_product(x_MK, weight_VK)
        assert bool(((found_MV.double() - wanted_MV).abs() <= bound_MV).all())
