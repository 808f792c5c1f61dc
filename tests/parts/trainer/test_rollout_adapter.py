"""An adapter beside a frozen model in the rollouts' forward: its gradients, and the weights that are not kept.

Legend and U as in test_rollout_forward.py; R the rank of an adapter.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_rollout_forward import (
    SLACK,
    U,
    assert_within,
    float64_log_probs,
    packed,
    random,
    record_inputs,
    tiny,
    wide,
)
from torch import Tensor, nn
from torch.nn import functional

from appliance.errors import EngineError, NumericsError, SyncError
from appliance.quant.codec import dequantise
from appliance.settings.sections import Lora
from appliance.sync.manifest import Manifest, record_tensor
from appliance.terms.schemes import AS_PLANNED, Precision, Scheme
from appliance.terms.settings import Quantisation
from appliance.trainer.lora import adapter_weights, base_weights, put_adapter_in
from appliance.trainer.rollout_forward import RolloutForward
from appliance.trainer.rollout_ops import AdapterPart, EngineWeight, adapter_product, silu_and_mul
from appliance.trainer.weights_on_disk import WeightsOnDisk

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LORA = Lora(rank=4, alpha=6, targets=LINEARS, dropout=0.0)
ENGINE_RANK = 8


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


# --- one layer


def test_gradients_of_an_adapters_product() -> None:
    """u, dY B and what is made of them are rounded once each: 2 U of the magnitudes they are made of. The second part
    has no adapter and adds nothing."""
    parts = [(random(4, 96), random(64, 4)), (random(8, 96), random(40, 8))]
    x_TK, grad_TN = random(41, 96), random(41, 64 + 24 + 40).detach()
    (a, b), (a2, b2) = parts
    y_TN = adapter_product(x_TK, [AdapterPart(a, b), 24, AdapterPart(a2, b2)], gated=False)
    y_TN.backward(grad_TN)
    assert not y_TN[:, 64:88].any()
    expected_TK, bound_TK = torch.zeros(41, 96).double(), torch.zeros(41, 96).double()
    x, grads = x_TK.detach().double(), grad_TN.double().split([64, 24, 40], dim=1)
    for (a_RK, b_NR), grad, y in zip(parts, (grads[0], grads[2]), y_TN.split([64, 24, 40], dim=1)[::2], strict=True):
        a_, b_ = a_RK.detach().double(), b_NR.detach().double()
        of_u, size_u = grad @ b_, grad.abs() @ b_.abs()
        u, magnitude = x @ a_.t(), x.abs() @ a_.abs().t()
        assert_within(y, u @ b_.t(), 2 * U * (magnitude @ b_.abs().t()))
        assert_within(b_NR.grad, grad.t() @ u, 2 * U * (grad.abs().t() @ magnitude))
        assert_within(a_RK.grad, of_u.t() @ x, 2 * U * (size_u.t() @ x.abs()))
        expected_TK, bound_TK = expected_TK + of_u @ a_, bound_TK + 2 * U * (size_u @ a_.abs())
    assert_within(x_TK.grad, expected_TK, bound_TK)


def test_gradients_through_silu_and_mul() -> None:
    """The bits of the product after it: x is made again from what it was made of."""
    gate_up, a_RK, b_NR = random(30, 192), random(4, 96), random(64, 4)
    grad_TN, results = random(30, 64).detach(), []
    for gated in (True, False):
        leaves = [each.detach().clone().requires_grad_() for each in (gate_up, a_RK, b_NR)]
        x = leaves[0] if gated else silu_and_mul(leaves[0])
        y_TN = adapter_product(x, [AdapterPart(*leaves[1:])], gated=gated)
        y_TN.backward(grad_TN)
        results.append([y_TN, *(each.grad for each in leaves)])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@pytest.mark.parametrize("scheme", [Scheme.INT8, Scheme.INT4, Scheme.FP8, Scheme.FP8_CHANNEL, Scheme.FP8_BLOCK])
@pytest.mark.parametrize("gated", [False, True])
def test_a_frozen_layer_passes_gradients_through_its_codes(
    scheme: Scheme, monkeypatch: pytest.MonkeyPatch, *, gated: bool
) -> None:
    """dX = dY W^ with and without the weights beside it, bit for bit, and no activations are quantised for it."""
    weight_NK, x, grad_TN = random(64, 96), random(41, 192 if gated else 96), random(41, 64).detach()
    layer = EngineWeight.from_linears([weight_NK.detach()], scheme=scheme, factor_K=None)
    trained = layer(x, [weight_NK], None, gated=gated)
    trained.backward(grad_TN)
    of_trained, x.grad = x.grad, None
    monkeypatch.setattr(EngineWeight, "codes_of", None)
    frozen = layer(x, [], None, gated=gated)
    frozen.backward(grad_TN)
    assert torch.equal(frozen, trained) and torch.equal(x.grad, of_trained)
    if not gated:
        w, grad = dequantise(layer.quantised).double(), grad_TN.double()
        assert_within(x.grad, grad @ w, 2 * U * (grad.abs() @ w.abs()))


@pytest.mark.parametrize("gated", [False, True])
def test_an_activation_of_a_frozen_layer_that_is_not_finite_is_named(*, gated: bool) -> None:
    layer = EngineWeight.from_linears([random(64, 96).detach()], scheme=Scheme.INT8, factor_K=None, name="down_proj")
    x = random(5, 192 if gated else 96).detach()
    x[3, 7] = torch.inf
    with pytest.raises(NumericsError) as raised:
        layer(x.requires_grad_(), [], None, gated=gated).sum().backward()
    assert raised.value.message == "down_proj in training: an activation has a value that is not finite"


# --- whole models


def saved(folder: Path, *, name: str = "qwen2") -> nn.Module:
    model = tiny(name)
    model.save_pretrained(folder)
    return model


def adapted(folder: Path, model: nn.Module) -> tuple[nn.Module, RolloutForward, WeightsOnDisk]:
    flow = RolloutForward(model, quantisation=Quantisation(scheme=Scheme.INT8), num_tokens=model.config.vocab_size)
    peft, on_disk = put_adapter_in(model, lora=LORA, seed=1), WeightsOnDisk(folder)
    for name, parameter in peft.named_parameters():
        if ".lora_" in name:
            parameter.data = (0.1 * torch.randn(parameter.shape)).bfloat16()
    flow.add_adapters(peft, engine_rank=ENGINE_RANK, files=on_disk)
    return peft, flow, on_disk


def manifest(*parts: dict[str, Tensor]) -> Manifest:
    return Manifest(sync=1, records=tuple(record_tensor(name, each) for part in parts for name, each in part.items()))


@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_gradients_of_a_whole_model(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tolerance is that of test_rollout_forward.py, with two roundings of operands more in each layer: 2 x
    sqrt(64) U / sqrt(3) of the norm."""
    model, passed = saved(tmp_path, name=name), []
    parameters = {key: each.detach().double() for key, each in model.state_dict().items()}

    record_inputs(passed, monkeypatch)
    peft, _, _ = adapted(tmp_path, model)
    inputs, weights_T = packed(model), torch.randn(81)
    (peft(**inputs, temperature=0.8).log_probs[0] * weights_T).sum().backward()
    assert len(passed) == 8
    leaves = {key: each for key, each in peft.named_parameters() if each.requires_grad}
    copies = dict(zip(leaves, wide(*leaves.values()), strict=True))
    pairs = {}
    for key, copy in copies.items():
        layer, _, part = key.removeprefix("base_model.model.").partition(".lora_")
        pairs.setdefault(layer, {})[part[0]] = copy
    scaled = {layer: (pair["A"], pair["B"] * LORA.alpha / LORA.rank) for layer, pair in pairs.items()}
    expected = float64_log_probs(model, parameters, inputs, passed, scaled)
    (expected * weights_T).sum().backward()
    gaps = {}
    for key, leaf in leaves.items():
        mine, other = leaf.grad.double(), copies[key].grad
        gaps[key] = float((mine - other).norm() / other.norm())
        assert float(functional.cosine_similarity(mine.flatten(), other.flatten(), dim=0)) > 0.999
    assert len(gaps) == 2 * 2 * len(LINEARS)
    assert 1e-4 < max(gaps.values()) <= 2 * 8 * U / 3**0.5 * SLACK, gaps
    assert all(each.grad is None for each in peft.parameters() if not each.requires_grad)


def test_codes_are_made_once_and_weights_are_in_files_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = saved(tmp_path)
    weights = {name: each.clone() for name, each in model.state_dict().items()}
    peft, flow, on_disk = adapted(tmp_path, model)
    quantised, from_linears = [], EngineWeight.from_linears
    monkeypatch.setattr(EngineWeight, "from_linears", lambda *a, **k: quantised.append(1) or from_linears(*a, **k))
    inputs = packed(model)

    def log_probs() -> Tensor:
        with torch.no_grad():
            return peft(**inputs, temperature=1.0).log_probs

    first = log_probs()
    for _ in range(2):  # an update of weights, an optimizer's step
        flow.follow(AS_PLANNED)
        flow.forget()
        assert torch.equal(log_probs(), first)
    assert len(quantised) == 8
    kept = {name: each for name, each in base_weights(peft)}
    assert not any(name.endswith("_proj.weight") for name in kept)
    together = kept | dict(on_disk.weights())
    assert sorted(together) == sorted(weights)
    assert all(torch.equal(together[name], weights[name]) for name in weights)
    flow.follow(Precision(Scheme.BF16))
    in_bf16 = log_probs()
    assert not torch.equal(in_bf16, first) and len(quantised) == 8
    flow.follow(AS_PLANNED)
    assert torch.equal(log_probs(), first) and len(quantised) == 16


def test_rollouts_in_bf16_have_the_gradients_of_the_weights_in_files(tmp_path: Path) -> None:
    """The same as with layers that the recipe keeps in BF16, whose weights stay in the model."""
    model = saved(tmp_path)
    peft, flow, _ = adapted(tmp_path, model)
    inputs = packed(model)
    flow.follow(Precision(Scheme.BF16))
    peft(**inputs, temperature=1.0).log_probs.sum().backward()
    gradients = {name: each.grad for name, each in peft.named_parameters() if each.requires_grad}
    values = {name: each.detach().clone() for name, each in peft.named_parameters() if each.requires_grad}
    torch.manual_seed(0)
    other = tiny("qwen2")
    quantisation = Quantisation(scheme=Scheme.INT8, ignore=("re:.*",))
    kept = RolloutForward(other, quantisation=quantisation, num_tokens=other.config.vocab_size)
    beside, on_disk = put_adapter_in(other, lora=LORA, seed=1), WeightsOnDisk(tmp_path)
    kept.add_adapters(beside, engine_rank=ENGINE_RANK, files=on_disk)
    assert list(on_disk.weights()) == []
    for name, parameter in beside.named_parameters():
        if name in values:
            parameter.data = values[name]
    beside(**inputs, temperature=1.0).log_probs.sum().backward()
    for name, parameter in beside.named_parameters():
        assert (name in gradients) is parameter.requires_grad
        assert name not in gradients or torch.equal(parameter.grad, gradients[name])


def test_what_the_engines_got_is_what_is_computed_with(tmp_path: Path) -> None:
    model = saved(tmp_path)
    peft, flow, on_disk = adapted(tmp_path, model)
    inputs, matrices = packed(model), adapter_weights(peft)
    base = dict(base_weights(peft)) | dict(on_disk.weights())
    with torch.no_grad():
        for parts in ((base, matrices), (matrices,)):
            flow.note_sent(manifest(*parts))
            peft(**inputs, temperature=1.0)
            assert not any(layer.sent for layer in flow.linears())
        wrong = next(name for name in matrices if "layers.1.mlp.up_proj.lora_B" in name)
        flow.note_sent(manifest(matrices | {wrong: matrices[wrong] + 1}))
        with pytest.raises(SyncError, match=rf"^{wrong}: the trainer computes with digest \w+, the engines got \w+$"):
            peft(**inputs, temperature=1.0)
        del matrices[wrong]
        flow.note_sent(manifest(matrices))
        with pytest.raises(SyncError, match="the engines got none"):
            peft(**inputs, temperature=1.0)


@pytest.mark.parametrize("matrix", ["layers.1.mlp.down_proj.lora_A", "layers.0.self_attn.o_proj.lora_B"])
def test_a_matrix_of_an_adapter_that_is_not_finite_is_named(matrix: str, tmp_path: Path) -> None:
    """Also of the last layer, behind which no activation is looked at."""
    model = saved(tmp_path)
    peft, _, _ = adapted(tmp_path, model)
    parameters = {name.replace(".default", ""): each for name, each in peft.named_parameters()}
    name = f"base_model.model.model.{matrix}.weight"
    parameters[name].data[0, 1] = torch.nan
    with pytest.raises(NumericsError) as raised:
        peft(**packed(model), temperature=1.0)
    assert raised.value.message == f"{name} in training: a value is not finite"


def test_other_files_than_were_loaded_end_the_run(tmp_path: Path) -> None:
    model = saved(tmp_path)
    file, name = tmp_path / "model.safetensors", "model.layers.1.self_attn.o_proj.weight"
    tensors = load_file(file)
    save_file(tensors | {name: tensors[name] + 1}, file)
    on_disk = WeightsOnDisk(tmp_path)
    on_disk.take_out(name.removesuffix(".weight"), model.model.layers[1].self_attn.o_proj)
    with pytest.raises(SyncError) as raised:
        on_disk.read(name)
    assert raised.value.message.startswith(f"{name} has digest ")
    assert raised.value.hint == "put the files back that the run began with, and resume; or use trainer.forward: bf16"


def test_a_model_whose_files_have_other_names_is_refused(tmp_path: Path) -> None:
    saved(tmp_path)
    with pytest.raises(EngineError) as raised:
        WeightsOnDisk(tmp_path).take_out("model.layers.9.mlp.up_proj", nn.Linear(2, 2))
    assert raised.value.message == f"{tmp_path}: the checkpoint has no model.layers.9.mlp.up_proj.weight"
