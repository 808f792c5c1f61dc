"""`trainer.forward: linears`: a model of transformers whose quantised layers are the rollouts', and nothing else."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny_models import tiny
from torch import Tensor, nn
from transformers import PreTrainedModel

from appliance.errors import SyncError
from appliance.quant.codec import QuantisedWeight
from appliance.quant.codec_int8 import quantise_int8
from appliance.quant.files import Origin, Settings
from appliance.quant.profile import Profile, Smoothing, SmoothingGroup, write_profile
from appliance.terms.schemes import AS_PLANNED, Precision, Scheme
from appliance.terms.settings import Quantisation
from appliance.trainer.rollout_forward import RolloutForward

U = 2.0**-8  # of BF16
SMOOTHED = ("q_proj", "k_proj", "v_proj")  # of the first layer
KEPT = "model.layers.1.self_attn.qkv_proj"  # as the engine calls what it fuses


@pytest.fixture
def model() -> PreTrainedModel:
    torch.manual_seed(0)
    return tiny("qwen2").to(torch.bfloat16)


def put_in(model: PreTrainedModel, folder: Path) -> RolloutForward:
    """With a profile that smooths one norm's layers, and one fused layer left in BF16."""
    torch.manual_seed(1)
    scale_K = 2.0 ** torch.randint(-3, 4, (model.config.hidden_size,))
    names = [f"model.layers.0.self_attn.{name}.weight" for name in SMOOTHED]
    group = SmoothingGroup("model.layers.0.input_layernorm.weight", tuple(names), scale_K.float())
    write_profile(Profile(Origin("donor", "m"), Scheme.INT8, Settings(), Smoothing((group,))), folder=folder)
    told = Quantisation(scheme=Scheme.INT8, ignore=(KEPT,), profile=str(folder))
    return RolloutForward(model, quantisation=told, num_tokens=model.config.vocab_size, linears_alone=True)


def passed(model: PreTrainedModel) -> dict[str, tuple[Tensor, Tensor]]:
    """What each linear layer of the decoder got and gave, by its name."""
    passed_by_name: dict[str, tuple[Tensor, Tensor]] = {}
    linears = [(name, each) for name, each in model.named_modules() if isinstance(each, nn.Linear) and "layers" in name]
    for name, each in linears:
        each.register_forward_hook(lambda _, given, out, name=name: passed_by_name.update({name: (given[0], out)}))
    model(input_ids=torch.randint(0, model.config.vocab_size, (2, 9)))
    return passed_by_name


def exact(quantised: QuantisedWeight) -> Tensor:
    return quantised.codes_NK.double() * quantised.scale.double()


def test_a_layer_multiplies_the_codes_of_its_smoothed_weight_and_input(model: PreTrainedModel, tmp_path: Path) -> None:
    """Sums of products of codes are exact: one rounding to BF16, a few of float32 before it, and a code at a tie that
    sgl's kernel may take to the other side."""
    flow = put_in(model, tmp_path)
    factor_of = {one._parts[0][0]: one._factor_K for one in flow.linears()}
    assert sum(each is not None for each in factor_of.values()) == 3
    passed_by_name, quantised = passed(model), 0
    for name, (layer_input, out) in passed_by_name.items():
        linear, x_TK = model.get_submodule(name), layer_input.detach().flatten(0, 1)
        if "layers.1.self_attn" in name and name[-6] in "qkv":
            assert torch.equal(out, nn.functional.linear(layer_input, linear.weight, linear.bias))
            continue
        factor_K = torch.ones(x_TK.shape[-1])
        if "layers.0.self_attn" in name and name.endswith(SMOOTHED):
            factor_K = factor_of["model.layers.0.self_attn.q_proj"]
        weight_NK, x_TK = (
            (each * factor).to(torch.bfloat16)
            for each, factor in ((linear.weight.detach(), factor_K), (x_TK, 1 / factor_K))
        )
        codes_NK, codes_TK = (exact(quantise_int8(each)) for each in (weight_NK, x_TK))
        expected = codes_TK @ codes_NK.t() + (0 if linear.bias is None else linear.bias.detach().double())
        scale_T1 = quantise_int8(x_TK).scale.double()
        is_tie = ((x_TK.double() / scale_T1).abs() % 1 - 0.5).abs() < 127 * 2.0**-22
        bound = (
            U * expected.abs()
            + (is_tie * scale_T1) @ codes_NK.abs().t()
            + 2.0**-20 * codes_TK.abs() @ codes_NK.abs().t()
        )
        assert bool(((out.detach().flatten(0, 1) - expected).abs() <= bound).all()), name
        quantised += 1
    assert (quantised, len(passed_by_name)) == (11, 14)


def test_without_quantised_layers_it_is_the_model_itself(model: PreTrainedModel, tmp_path: Path) -> None:
    ids = torch.randint(0, model.config.vocab_size, (2, 9))
    before = model(input_ids=ids).logits
    flow = put_in(model, tmp_path)
    assert not torch.equal(model(input_ids=ids).logits, before)
    flow.follow(Precision(scheme=Scheme.BF16))
    assert torch.equal(model(input_ids=ids).logits, before)
    flow.follow(AS_PLANNED)
    assert not torch.equal(model(input_ids=ids).logits, before)


def test_every_parameter_learns_and_a_changed_weight_is_quantised_anew(model: PreTrainedModel, tmp_path: Path) -> None:
    flow, ids = put_in(model, tmp_path), torch.randint(0, model.config.vocab_size, (2, 9))
    before = model(input_ids=ids).logits
    before.float().square().mean().backward()
    assert all(bool(each.grad.any()) for each in model.parameters())
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.mul_(2)
    assert torch.equal(model(input_ids=ids).logits, before)
    flow.forget()
    assert not torch.equal(model(input_ids=ids).logits, before)


def test_a_weight_that_was_not_sent_is_told(model: PreTrainedModel, tmp_path: Path) -> None:
    flow = put_in(model, tmp_path)
    flow.note_sent(SimpleNamespace(records=()))
    with pytest.raises(SyncError, match=r"model\.layers\.0\.self_attn\.q_proj\.weight: the trainer computes with"):
        model(input_ids=torch.zeros(1, 3, dtype=torch.int64))
