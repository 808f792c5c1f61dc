"""Profiles of classes without a row in the list: what a class does to embeddings and logits is in the streams, in the
samples and in the prediction; a norm in front of two blocks is smoothed for both."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from profiles import read_profile
from safetensors.torch import load_file, save_file
from test_calibrate import by_codec, exact_stream, log_probs, profile_of
from tiny_models import tiny, tokens
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.models.granite.modeling_granite import GraniteDecoderLayer
from unlisted_models import UNLISTED, build_unlisted, make_unlisted

from appliance.errors import EngineError
from appliance.profile.command import table
from appliance.quant.checkpoint import ModelTensors, StreamedModel, why_unprofiled
from appliance.quant.files import made_of_another_class, read_file_header
from appliance.quant.own_samples import ProfileSampling, draw_samples
from appliance.quant.prediction import head_gradients
from appliance.quant.profile import fold, write_profile
from appliance.terms.schemes import Scheme


def loaded(folder: Path, *, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()


def with_large_channels(folder: Path, model_type: str) -> Path:
    """Two channels of every norm are large, as in trained models; rows of values and of `up_proj`, too."""
    model = build_unlisted(model_type, seed=1, has_large_channels=True)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if re.search(r"(qkv|gate_up|v|up)_proj\.weight", name):
                parameter[-7:] *= 16
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("model_type", UNLISTED)
def test_the_exact_stream_and_its_logits_are_the_models_own(model_type: str, tmp_path: Path) -> None:
    """For Gemma 2 that needs its soft caps, for Granite and Cohere 2 their multipliers."""
    model, batch = loaded(make_unlisted(tmp_path, model_type, seed=1)), tokens()
    with torch.no_grad():
        expected = model(input_ids=batch, use_cache=False).logits
    streamed = StreamedModel(ModelTensors(tmp_path))
    head_VH = streamed.checkpoint.read(streamed.head_name)
    logits = streamed.logits((exact_stream(streamed, batch) @ head_VH.t()).flatten(0, 1))
    assert torch.equal(logits.view_as(expected), expected)


@pytest.mark.parametrize("model_type", ["granite", "cohere2", "gemma2", "phi3"])
def test_the_predicted_mismatch_is_that_of_a_model_quantised_whole(model_type: str, tmp_path: Path) -> None:
    folder = with_large_channels(tmp_path, model_type)
    profile = profile_of(folder)
    exact, quantised = loaded(folder), loaded(folder)
    with torch.no_grad():
        for name, parameter in quantised.named_parameters():
            parameter.copy_(fold(name, parameter, smoothing=profile.smoothing))
    for module in quantised.model.modules():
        if isinstance(module, nn.Linear):
            module.forward = by_codec(module)
    for model in (exact, quantised):  # logits in float32, as the prediction has them
        head_NK = model.lm_head.weight.detach().float()
        model.lm_head.forward = lambda x, head_NK=head_NK: x.float() @ head_NK.t()
    exact_lp, made_lp = (log_probs(model, tokens()) for model in (exact, quantised))
    kl = (made_lp.exp() * (made_lp - exact_lp)).sum(dim=-1).mean()
    ratio = (exact_lp - made_lp).gather(-1, tokens()[:, 1:, None])
    assert profile.predicted is not None
    # As for listed families: float32 logits are off by some 1e-6, and the streams differ by 1e-3 and more.
    assert profile.predicted.kl == pytest.approx(float(kl), rel=1e-2)
    assert profile.predicted.k3_kl == pytest.approx(float((ratio.exp() - 1 - ratio).mean()), rel=1e-2)


@pytest.mark.parametrize("model_type", ["granite", "cohere2", "gemma2"])
def test_a_gradient_is_through_the_logits_of_the_class(model_type: str, tmp_path: Path) -> None:
    """By multipliers, and by a soft cap, whose slope differs from word to word. Which word was drawn is not told: the
    gradient has to be that of some word."""
    streamed = StreamedModel(ModelTensors(make_unlisted(tmp_path, model_type, seed=1)))
    head_VH, generator = streamed.checkpoint.read(streamed.head_name).double(), torch.Generator().manual_seed(7)
    x_MH = 4 * torch.randn(6, head_VH.shape[1], generator=generator)
    made_DMH = head_gradients(streamed, exact_MH=x_MH, temperature=0.5, draws=3, generator=generator)

    def log_probs_of(x_H: Tensor) -> Tensor:
        return torch.log_softmax(streamed.logits((x_H @ head_VH.t())[None])[0] / 0.5, dim=-1)

    words = set()
    for place, x_H in enumerate(x_MH.double()):
        exact_VH = torch.autograd.functional.jacobian(log_probs_of, x_H)
        for made_H in made_DMH[:, place].double():
            apart_V = (exact_VH - made_H).norm(dim=-1) / exact_VH.norm(dim=-1)
            # Sums of 512 words in float32, of 2^-24 each: 512 * 2^-24 = 3e-5 of the largest at the most.
            assert float(apart_V.min()) < 1e-4
            words.add(int(apart_V.argmin()))
    assert len(words) > 3


@pytest.mark.parametrize("model_type", ["granite", "gemma3_text"])
def test_samples_are_the_models_own(model_type: str, tmp_path: Path) -> None:
    """With the likeliest word alone: what transformers generates. Word 500 is padding, and its row is not read."""
    model = loaded(make_unlisted(tmp_path, model_type, seed=1, pad_token_id=500))
    prompts = tokens(sequences=2, length=12)
    sampling = ProfileSampling(top_k=1, max_tokens=6)
    samples = draw_samples(StreamedModel(ModelTensors(tmp_path)), prompts=prompts.tolist(), sampling=sampling)
    expected = model.generate(prompts, max_new_tokens=6, do_sample=False, eos_token_id=None)
    assert [list(sample.tokens) for sample in samples] == expected.tolist()


@pytest.mark.parametrize("scheme", [Scheme.INT8, Scheme.FP8_CHANNEL])
def test_a_norm_in_front_of_two_blocks_is_smoothed_for_both(scheme: Scheme, tmp_path: Path) -> None:
    profile = profile_of(with_large_channels(tmp_path, "cohere2"), scheme=scheme)
    prefix = "model.layers.1."
    (group,) = (group for group in profile.smoothing.groups if group.source == f"{prefix}input_layernorm.weight")
    readers = [f"self_attn.{part}_proj" for part in "qkv"] + ["mlp.gate_proj", "mlp.up_proj"]
    assert group.linears == tuple(f"{prefix}{name}.weight" for name in readers)
    if scheme is Scheme.INT8:
        read = [layer for layer in profile.layers if len(layer.linears) > 1]
        assert len(read) == 4 and all(layer.output_error < layer.output_error_plain for layer in read)


def test_one_of_two_blocks_that_stays_in_bf16_is_smoothed_with_the_other(tmp_path: Path) -> None:
    """It reads what the norm gives, too."""
    ignore = tuple(f"model.layers.0.self_attn.{part}_proj" for part in "qkv")
    profile = profile_of(with_large_channels(tmp_path, "cohere2"), ignore=ignore)
    source = "model.layers.0.input_layernorm.weight"
    (group,) = (group for group in profile.smoothing.groups if group.source == source)
    assert {f"{name}.weight" for name in ignore} < set(group.linears)
    assert all(layer.linears != ignore for layer in profile.layers)


def test_parts_of_a_fused_checkpoint_are_named_as_an_engine_ignores_them(tmp_path: Path) -> None:
    profile = profile_of(with_large_channels(tmp_path, "phi3"))
    group_by_source = {group.source.partition("layers.0.")[2]: group for group in profile.smoothing.groups}
    assert [name.rpartition("0.")[2] for name in group_by_source["input_layernorm.weight"].linears] == [
        f"self_attn.{part}_proj.weight" for part in "qkv"
    ]
    assert {"self_attn.v_proj.weight", "mlp.up_proj.weight"} <= group_by_source.keys()
    attention = next(layer for layer in profile.layers if layer.linears[0].endswith("0.self_attn.qkv_proj"))
    assert attention.layer == tuple(f"model.layers.0.self_attn.{part}_proj" for part in "qkv")
    for ignore in (attention.layer, attention.linears):
        ignored = profile_of(tmp_path, ignore=ignore)
        assert all(layer.linears != attention.linears for layer in ignored.layers)


def test_a_profile_says_what_cannot_be_smoothed_and_why(tmp_path: Path) -> None:
    profile = profile_of(make_unlisted(tmp_path / "model", "gemma3_text", seed=1))
    write_profile(profile, folder=tmp_path)
    assert read_profile(tmp_path).header() == profile.header()
    header = read_file_header(tmp_path)
    assert header["architecture"] == "Gemma3ForCausalLM"
    assert not any("norm" in group["source"] for group in header["smoothing"])
    assert len(header["not_smoothed"]) == 2 * 6
    (line,) = (line for line in table(header, folder="f") if line.startswith("not smoothed"))
    assert line == (
        "not smoothed  q_norm, k_norm, input_layernorm, post_attention_layernorm, pre_feedforward_layernorm, "
        "post_feedforward_layernorm: the output is not in proportion to the stored weight, as of a norm that "
        "multiplies by 1 + w"
    )
    rest = "smoothing others would gain nothing or change what the model computes"
    assert any(rest in line for line in table(header, folder="f"))
    off = profile_of(tmp_path / "model", strength=0.0)
    assert off.not_smoothed == () and off.smoothing.groups == ()


def test_a_profile_is_for_the_class_that_it_was_made_of(tmp_path: Path) -> None:
    make_unlisted(tmp_path / "granite", "granite", seed=1)
    tiny("qwen2").save_pretrained(tmp_path / "qwen2")
    headers = {name: profile_of(tmp_path / name).header() for name in ("granite", "qwen2")}
    made_for = {
        (name, architecture): not made_of_another_class(headers[name], architectures=[architecture])
        for name in headers
        for architecture in ("GraniteForCausalLM", "Gemma2ForCausalLM", "Qwen2ForCausalLM", "LlamaForCausalLM")
    }
    assert [pair for pair, is_made in made_for.items() if is_made] == [
        ("granite", "GraniteForCausalLM"),
        ("qwen2", "Qwen2ForCausalLM"),
        ("qwen2", "LlamaForCausalLM"),
    ]
    assert made_of_another_class(headers["qwen2"], architectures=["Gemma2ForCausalLM"]) == (
        "it was made of a listed family and the model is Gemma2ForCausalLM, where other layers may read a norm"
    )


def test_a_model_without_the_parts_of_a_decoder_is_refused(tmp_path: Path) -> None:
    from transformers import PhiConfig, PhiForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_hidden_layers": 1}
    PhiForCausalLM(PhiConfig(vocab_size=64, **sizes)).save_pretrained(tmp_path)
    with pytest.raises(EngineError) as raised:
        StreamedModel(ModelTensors(tmp_path))
    missing = "transformers' PhiForCausalLM has no `model.norm`"
    assert raised.value.message == f"{tmp_path}: a profile of `phi` cannot be made: {missing}"
    assert raised.value.hint == "set quantization.profile: none"


def test_a_head_with_a_bias_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_unlisted(tmp_path, "granite", seed=1)
    from_config = AutoModelForCausalLM.from_config

    def with_bias(*arguments: object, **settings: object) -> nn.Module:
        model = from_config(*arguments, **settings)
        model.lm_head = nn.Linear(model.lm_head.in_features, model.lm_head.out_features)
        return model

    monkeypatch.setattr(AutoModelForCausalLM, "from_config", with_bias)
    with pytest.raises(
        EngineError, match="`lm_head` of transformers' GraniteForCausalLM is not a linear layer without"
    ):
        StreamedModel(ModelTensors(tmp_path))


def test_a_layer_that_fails_is_the_reason_and_a_missing_weight_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last layer may be of another kind than the first."""
    folder = make_unlisted(tmp_path, "granite", seed=1)
    assert why_unprofiled(folder, is_measured=True) == ("", "")
    forward = GraniteDecoderLayer.forward

    def fails(layer: nn.Module, *arguments: object, **settings: object) -> Tensor:
        if layer.self_attn.layer_idx == 1:
            raise KeyError("keys of an earlier layer")
        return forward(layer, *arguments, **settings)

    with monkeypatch.context() as patched:
        patched.setattr(GraniteDecoderLayer, "forward", fails)
        why = "its layers cannot be run one by one: KeyError: 'keys of an earlier layer'"
        assert why_unprofiled(folder, is_measured=False) == ("GraniteForCausalLM", why)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(EngineError, match=r"the checkpoint has no model.layers.1.mlp.up_proj.weight"):
        why_unprofiled(folder, is_measured=False)
