"""Calibration against real models held whole: the streams, the errors, the scales, the prediction, the memory."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from profiles import read_profile
from tiny_models import FAMILIES, ONE_FLOW, tiny, tokens
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForCausalLM

from appliance.errors import EngineError
from appliance.quant.calibrate import calibrate
from appliance.quant.checkpoint import Ledger, ModelTensors, StreamedModel
from appliance.quant.codec import dequantise, quantise, quantise_tokens
from appliance.quant.layer_view import Errors, LayerView
from appliance.quant.mismatch_budget import MismatchBudget
from appliance.quant.own_samples import ProfileSampling, draw_samples
from appliance.quant.prediction import batches_of
from appliance.quant.profile import Origin, Profile, Settings, fold, write_profile
from appliance.quant.smoothing_factors import refine
from appliance.terms.schemes import Scheme

ORIGIN = Origin(kind="calibrated", model="tiny")


def profile_of(folder: Path, *, scheme: Scheme = Scheme.INT8, **settings: object) -> Profile:
    return calibrate(folder, sequences=tokens().tolist(), scheme=scheme, settings=Settings(**settings), origin=ORIGIN)


def loaded(folder: Path) -> nn.Module:
    """The model as users load it. Casting a made one to BF16 would also cast the buffers of its rotary embedding."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    if hasattr(model.config, "num_experts"):
        model.model.config._experts_implementation = "eager"  # a grouped GEMM rounds elsewhere
    return model


@pytest.fixture(scope="module", params=FAMILIES)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Path]:
    """A tiny model of each family and the folder of its checkpoint."""
    folder = tmp_path_factory.mktemp(request.param)
    tiny(request.param).save_pretrained(folder)
    return loaded(folder), folder


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Path]:
    folder = tmp_path_factory.mktemp("qwen2-alone")
    tiny("qwen2").save_pretrained(folder)
    return loaded(folder), folder


def exact_stream(streamed: StreamedModel, batch: Tensor) -> Tensor:
    """The exact stream after the last norm, layer by layer."""
    hidden, calls = streamed.layer_calls(streamed.embed(batch))
    for index in range(streamed.num_layers):
        with streamed.layer(index) as layer:
            view = LayerView(
                layer,
                units=streamed.units(index, layer),
                prefix=f"model.layers.{index}.",
                scheme=Scheme.INT8,
                ignore=(),
                ledger=streamed.checkpoint.ledger,
                calls=[calls[index]],
                valid=[torch.ones_like(batch, dtype=torch.bool)],
            )
            (hidden,), _ = view.exact([hidden], errors=Errors(), ranges={})
    return streamed.final_norm(hidden)


def test_the_exact_stream_is_the_models_own_forward(saved: tuple[nn.Module, Path]) -> None:
    model, folder = saved
    batch = tokens()
    with torch.no_grad():
        expected = model.model(input_ids=batch, use_cache=False).last_hidden_state
    assert torch.equal(exact_stream(StreamedModel(ModelTensors(folder)), batch), expected)


@pytest.mark.parametrize("scheme", [Scheme.INT8, Scheme.FP8, Scheme.FP8_CHANNEL, Scheme.FP8_BLOCK])
def test_the_errors_are_those_of_the_codec_on_the_models_own_inputs(
    qwen2: tuple[nn.Module, Path], scheme: Scheme
) -> None:
    model, folder = qwen2
    profile = profile_of(folder, scheme=scheme, strength=0.0)
    seen: dict[str, Tensor] = {}
    hooks = [
        module.register_forward_pre_hook(lambda _, args, name=name: seen.__setitem__(name, args[0]))
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
    ]
    with torch.no_grad():
        model(tokens())
    for hook in hooks:
        hook.remove()
    for layer in profile.layers:
        name = layer.linears[0]
        x_MK = seen[name].flatten(0, 1)
        weight_NK = torch.cat([model.get_submodule(each).weight.detach() for each in layer.linears])  # as vLLM fuses
        made_NK = dequantise(quantise(weight_NK, scheme=scheme)).double()
        exact_MN = x_MK.double() @ weight_NK.double().t()
        made_MN = dequantise(quantise_tokens(x_MK, scheme=scheme)).double() @ made_NK.t()
        # float32 GEMMs over K <= 96: each element off by 96 * 2^-24 of sum |x w|, and so is the difference; the error
        # is about 1e-2 of the output and sum |x w| about 10 of it, so the error is off by 6e-3 of itself at the most.
        assert layer.output_error == pytest.approx(float((made_MN - exact_MN).norm() / exact_MN.norm()), rel=6e-3)
        assert layer.weight_error == pytest.approx(
            float((made_NK - weight_NK.double()).norm() / weight_NK.double().norm()), rel=1e-5
        )
        assert torch.equal(profile.activations[name], x_MK.abs().amax(dim=0).float())


def test_the_predicted_mismatch_is_that_of_a_model_quantised_whole(qwen2: tuple[nn.Module, Path]) -> None:
    _, folder = qwen2
    profile = profile_of(folder)
    exact, quantised = loaded(folder), loaded(folder)
    with torch.no_grad():
        for name, parameter in quantised.named_parameters():
            parameter.copy_(fold(name, parameter, smoothing=profile.smoothing))
    for module in quantised.model.modules():
        if isinstance(module, nn.Linear):
            module.forward = by_codec(module)
    with torch.no_grad():
        hidden = [model.model(input_ids=tokens(), use_cache=False).last_hidden_state for model in (exact, quantised)]
    head_NK = exact.lm_head.weight.detach().double()
    exact_lp, made_lp = (torch.log_softmax(each[:, :-1].double() @ head_NK.t(), dim=-1) for each in hidden)
    kl = (made_lp.exp() * (made_lp - exact_lp)).sum(dim=-1).mean()
    ratio = (exact_lp - made_lp).gather(-1, tokens()[:, 1:, None])
    assert profile.predicted is not None
    # Logits by a float32 GEMM are off by 64 * 2^-24 of sum |h w|, about 4e-6; the two streams differ by about 3e-3, and
    # both the KL and k3 are half the square of such differences: off by 2 * 4e-6 / 3e-3 of themselves, 3e-3.
    assert profile.predicted.kl == pytest.approx(float(kl), rel=1e-2)
    assert profile.predicted.k3_kl == pytest.approx(float((ratio.exp() - 1 - ratio).mean()), rel=1e-2)
    assert profile.predicted.tokens == 3 * 23


def by_codec(linear: nn.Linear):
    weight_NK = dequantise(quantise(linear.weight.detach(), scheme=Scheme.INT8))

    def forward(x: Tensor) -> Tensor:
        made = functional.linear(dequantise(quantise_tokens(x.flatten(0, -2), scheme=Scheme.INT8)), weight_NK)
        made = made if linear.bias is None else made + linear.bias.float()
        return made.to(x.dtype).view(*x.shape[:-1], -1)

    return forward


def test_every_norm_is_smoothed_with_all_that_it_feeds(saved: tuple[nn.Module, Path]) -> None:
    model, folder = saved
    groups = profile_of(folder).smoothing.groups
    names = {name for name, _ in model.named_parameters()}
    prefix = "model.layers.0."
    inner = ("mlp.gate.weight", "mlp.experts.gate_up_proj")
    dense = ("mlp.gate_proj.weight", "mlp.up_proj.weight")
    experts = inner if f"{prefix}mlp.gate.weight" in names else dense
    found = {group.source: set(group.linears) for group in groups if re.match(rf"{prefix}\w+norm", group.source)}
    assert found == {
        f"{prefix}input_layernorm.weight": {f"{prefix}self_attn.{each}_proj.weight" for each in "qkv"},
        f"{prefix}post_attention_layernorm.weight": {prefix + each for each in experts},
    }


def test_smoothing_lowers_the_error_of_a_model_with_large_channels(saved: tuple[nn.Module, Path]) -> None:
    layers = [each for each in profile_of(saved[1]).layers if len(each.linears) > 1 or "gate_up" in each.linears[0]]
    assert len(layers) == 4
    assert all(each.output_error < 0.7 * each.output_error_plain for each in layers)


def with_large_rows(family: str, folder: Path) -> Path:
    """A checkpoint in which some rows of `up_proj` and `v_proj` are large, as in trained models."""
    model = tiny(family)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "up_proj" in name or "v_proj" in name:
                parameter[..., 5::7, :].mul_(16) if name.endswith("weight") else parameter[5::7].mul_(16)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("family", ONE_FLOW)
def test_values_and_up_proj_are_smoothed_for_what_reads_them(family: str, tmp_path: Path) -> None:
    profile = profile_of(with_large_rows(family, tmp_path))
    group_by_source = {group.source: group for group in profile.smoothing.groups if "norm" not in group.source}
    assert {name: group.linears for name, group in group_by_source.items()} == {
        f"model.layers.{layer}.{source}.weight": (f"model.layers.{layer}.{reader}.weight",)
        for layer in range(2)
        for source, reader in (("self_attn.v_proj", "self_attn.o_proj"), ("mlp.up_proj", "mlp.down_proj"))
    }
    values, up = (
        group_by_source["model.layers.0.self_attn.v_proj.weight"],
        group_by_source["model.layers.0.mlp.up_proj.weight"],
    )
    assert (len(values.scale_K), values.head_dim, values.readers_of_head) == (32, 16, 2)
    assert torch.equal(values.reader_scale_K.view(2, 2, 16), values.scale_K.view(2, 1, 16).expand(2, 2, 16))
    assert (len(up.scale_K), up.head_dim, up.readers_of_head) == (96, 0, 1)
    errors = {layer.linears[0]: layer for layer in profile.layers if "o_proj" in layer.linears[0]}
    errors |= {layer.linears[0]: layer for layer in profile.layers if "down_proj" in layer.linears[0]}
    assert len(errors) == 4
    assert all(layer.output_error < 0.7 * layer.output_error_plain for layer in errors.values())


def test_heads_of_values_that_are_shared_have_the_range_of_all_that_read_them(tmp_path: Path) -> None:
    """Query heads 2 and 3 read the second head of values: channel 3 of head 3 alone is large in `o_proj`."""
    model = tiny("llama")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[:, 3 * 16 + 3] *= 256
    model.save_pretrained(tmp_path)
    values = next(group for group in profile_of(tmp_path).smoothing.groups if "v_proj" in group.source)
    assert int(values.scale_K.argmin()) == 16 + 3


def test_smoothing_that_does_not_help_is_dropped(
    qwen2: tuple[nn.Module, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = profile_of(qwen2[1], strength=0.0)

    def harmful(activation_K: Tensor, **_: object) -> Tensor:
        scale_K = torch.ones_like(activation_K)
        scale_K[5] = 2.0**12  # all other channels of the weights are lost beside this one
        return scale_K

    monkeypatch.setattr("appliance.quant.calibrate.by_rule", harmful)
    monkeypatch.setattr("appliance.quant.calibrate.refine", lambda scale_K, **_: scale_K)
    profile = profile_of(qwen2[1], strength=0.5)
    assert profile.smoothing.groups == ()
    assert profile.layers == plain.layers
    assert profile.predicted == plain.predicted  # what was tried is out of the weights again


def test_factors_by_the_rule_are_tried_where_better_ones_do_not_help(
    qwen2: tuple[nn.Module, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def worse(scale_K: Tensor, **_: object) -> Tensor:
        return torch.where(torch.arange(len(scale_K)) % 2 == 0, 2.0**12, 2.0**-12)

    monkeypatch.setattr("appliance.quant.calibrate.refine", lambda scale_K, **_: scale_K)
    by_rule = profile_of(qwen2[1])
    monkeypatch.setattr("appliance.quant.calibrate.refine", worse)
    tried = profile_of(qwen2[1])
    assert by_rule.smoothing.groups and tried.layers == by_rule.layers
    for group, wanted in zip(tried.smoothing.groups, by_rule.smoothing.groups, strict=True):
        assert torch.equal(group.scale_K, wanted.scale_K)


@pytest.mark.parametrize("scheme", [Scheme.INT8, Scheme.FP8])
def test_factors_are_refined_behind_norms_and_in_int8_alone(
    saved: tuple[nn.Module, Path], monkeypatch: pytest.MonkeyPatch, scheme: Scheme
) -> None:
    """Of all rows that a norm feeds, one matrix after the other. The rule is made to give no factors at all."""
    refined: list[tuple[int, ...]] = []

    def noted(scale_K: Tensor, *, x_MK: Tensor, weight_NK: Tensor) -> Tensor:
        refined.append((*weight_NK.shape, x_MK.shape[1]))
        return refine(scale_K, x_MK=x_MK, weight_NK=weight_NK)

    monkeypatch.setattr("appliance.quant.calibrate.by_rule", lambda activation_K, **_: torch.ones_like(activation_K))
    monkeypatch.setattr("appliance.quant.calibrate.refine", noted)
    model, folder = saved
    groups = profile_of(folder, scheme=scheme).smoothing.groups
    config = model.config
    width = config.head_dim * (config.num_attention_heads + 2 * config.num_key_value_heads)
    fed = [(width, 64, 64)] if hasattr(config, "num_experts") else [(width, 64, 64), (2 * 96, 64, 64)]
    assert refined == (fed * config.num_hidden_layers if scheme is Scheme.INT8 else [])
    assert len(groups) == len(refined) and all("norm" in group.source for group in groups)


def test_strength_0_smooths_nothing(qwen2: tuple[nn.Module, Path]) -> None:
    assert profile_of(qwen2[1], strength=0.0).smoothing.groups == ()


def test_a_mismatch_budget_keeps_what_it_takes_and_the_prediction_is_of_that(qwen2: tuple[nn.Module, Path]) -> None:
    free = profile_of(qwen2[1], measure_above=0.0)
    assert free.predicted and free.predicted_all is None and free.suggested_ignore == ()
    budget = free.predicted.kl / 2
    within_budget = profile_of(qwen2[1], mismatch_budget=budget)
    assert within_budget.predicted and 0.5 * budget < within_budget.predicted.kl <= budget
    assert within_budget.predicted_all == free.predicted
    names = within_budget.suggested_ignore
    assert 0 < len(names) < 2 * 7
    assert names == tuple(name for layer in within_budget.layers if layer.stays_in_bf16 for name in layer.layer)
    assert profile_of(qwen2[1], mismatch_budget=budget).header() == within_budget.header()
    by_hand = profile_of(qwen2[1], ignore=names)  # with other smoothing: what is ignored is not smoothed
    assert by_hand.predicted and by_hand.predicted.kl == pytest.approx(within_budget.predicted.kl, rel=0.5)


def test_within_its_budget_a_model_keeps_nothing_and_measures_nothing_more(
    qwen2: tuple[nn.Module, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MismatchBudget, "contributions", lambda self: pytest.fail("the layers were measured"))
    profile = profile_of(qwen2[1], mismatch_budget=1.0, measure_above=1.0)
    assert profile.suggested_ignore == ()
    assert {layer.contribution for layer in profile.layers} == {None}


def test_only_the_tokens_of_responses_are_compared(qwen2: tuple[nn.Module, Path]) -> None:
    whole, responses = (
        calibrate(
            qwen2[1],
            sequences=tokens().tolist(),
            prompt_tokens=prompt_tokens,
            scheme=Scheme.INT8,
            settings=Settings(),
            origin=ORIGIN,
        ).predicted
        for prompt_tokens in ((), (20, 22, 24))
    )
    assert whole and responses
    assert (whole.tokens, responses.tokens) == (3 * 23, 4 + 2 + 0)


def test_a_temperature_divides_the_logits_that_are_compared(qwen2: tuple[nn.Module, Path]) -> None:
    at_1, at_2 = (profile_of(qwen2[1], temperature=temperature).predicted for temperature in (1.0, 2.0))
    assert at_1 and at_2
    # The KL is half the variance of the logits' errors, which the temperature divides by 4; p itself changes little.
    assert at_2.kl == pytest.approx(at_1.kl / 4, rel=0.2)


@pytest.mark.parametrize("family", ["qwen2", "qwen3-moe"])
def test_a_contribution_is_the_mismatch_of_that_layer_alone(family: str, tmp_path: Path) -> None:
    """Held against float32 models with one layer by the codec: in BF16 rounding would be as much as these errors. q, k
    and v are one layer, and all experts are."""
    tiny(family).save_pretrained(tmp_path)
    text = torch.randint(0, 150, (48, 24), generator=torch.Generator().manual_seed(5))
    made = Settings(strength=0.0, measure_above=0.0)
    profile = calibrate(tmp_path, sequences=text.tolist(), scheme=Scheme.INT8, settings=made, origin=ORIGIN)
    contributions = {layer.layer: layer.contribution for layer in profile.layers}
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    exact_BTV = log_probs(model, text)
    ratios = {}
    for names, contribution in contributions.items():
        modules = [model.get_submodule(name) for name in names]
        for module in modules:
            module.forward = by_codec(module) if isinstance(module, nn.Linear) else experts_by_codec(module)
        quantised_BTV = log_probs(model, text)
        for module in modules:
            del module.forward
        kl = (quantised_BTV.exp() * (quantised_BTV - exact_BTV)).sum(dim=-1).mean()
        ratios[names[0]] = float(contribution / kl)
    # 48 sequences by 2 draws are 96 squares: off by sqrt(2 / 96) = 14 %, by three of them at the most.
    # A router behind a layer may choose other experts, which no gradient knows: there the contribution is too low.
    smooth = ["model.layers.1.mlp.experts"] if family == "qwen3-moe" else list(ratios)
    assert all(0.58 < ratios[name] < 1.42 for name in smooth)
    assert all(0.3 < ratio < 1.42 for ratio in ratios.values())
    assert len(ratios) == {"qwen2": 8, "qwen3-moe": 6}[family]


def log_probs(model: nn.Module, text_BT: Tensor) -> Tensor:
    """Of every word after every token but the last; float64."""
    with torch.no_grad():
        return torch.log_softmax(model(text_BT, use_cache=False).logits[:, :-1].double(), dim=-1)


def experts_by_codec(experts: nn.Module):
    def product(x: Tensor, weight_NK: Tensor) -> Tensor:
        codes = quantise_tokens(x, scheme=Scheme.INT8)
        return functional.linear(dequantise(codes), dequantise(quantise(weight_NK, scheme=Scheme.INT8)))

    def forward(hidden_MK: Tensor, chosen_MS: Tensor, weights_MS: Tensor) -> Tensor:
        total_MK = torch.zeros_like(hidden_MK)
        for expert in range(len(experts.gate_up_proj)):
            token, slot = torch.where(chosen_MS == expert)
            gate, up = product(hidden_MK[token], experts.gate_up_proj[expert]).chunk(2, dim=-1)
            down = product(functional.silu(gate) * up, experts.down_proj[expert])
            total_MK.index_add_(0, token, down * weights_MS[token, slot, None])
        return total_MK

    return forward


def test_experts_are_kept_both_gemms_or_none(tmp_path: Path) -> None:
    tiny("qwen3-moe").save_pretrained(tmp_path)
    free = profile_of(tmp_path).predicted
    assert free is not None
    profile = profile_of(tmp_path, mismatch_budget=free.kl / 20)
    halves = [each.stays_in_bf16 for each in profile.layers if each.layer == ("model.layers.0.mlp.experts",)]
    assert halves == [True, True]
    assert profile.suggested_ignore.count("model.layers.0.mlp.experts") == 1


@pytest.mark.parametrize("ignore", ["model.layers.1.self_attn.qkv_proj", r"re:model\.layers\.1\.self_attn\.[qkv]_proj"])
def test_ignored_layers_are_neither_quantised_nor_smoothed(qwen2: tuple[nn.Module, Path], ignore: str) -> None:
    profile = profile_of(qwen2[1], ignore=(ignore,))
    assert "model.layers.1.self_attn.q_proj" not in {name for each in profile.layers for name in each.linears}
    assert "model.layers.1.input_layernorm.weight" not in {group.source for group in profile.smoothing.groups}
    assert profile.suggested_ignore == (ignore,)


@pytest.mark.parametrize("share", [None, 0.5], ids=["no budget", "half of the mismatch"])
def test_one_layer_at_a_time_is_in_memory(share: float | None, tmp_path: Path) -> None:
    """With a budget as well, whose passes are few: one back for the contributions, and one for each of three trials."""
    tiny("qwen2", num_hidden_layers=24).save_pretrained(tmp_path)
    budget = None
    if share is not None:
        mismatch = profile_of(tmp_path).predicted
        assert mismatch is not None
        budget = share * mismatch.kl
    ledger, passes, alive = Ledger(), [], []

    def look(name: str, done: int, total: int) -> None:
        if done == 1:
            passes.append(name)
        alive.append(ledger.alive_bytes)

    profile = calibrate(
        tmp_path,
        sequences=tokens().tolist(),
        scheme=Scheme.INT8,
        settings=Settings(mismatch_budget=budget),
        origin=ORIGIN,
        on_layer=look,
        ledger=ledger,
    )
    trials = [f"choice {number}, layer" for number in (1, 2, 3)]
    assert passes in (
        [["layer"]] if share is None else [["layer", "contributions, layer", *trials[:n]] for n in (1, 2, 3)]
    )
    assert bool(profile.suggested_ignore) == (share is not None)
    memory = profile.memory
    assert memory is not None
    last_norm = 64 * 2
    assert alive == [0] * 24 + [last_norm] * 24 * (len(passes) - 1)  # between layers no more is in memory
    # One layer in BF16, its codes in INT8 (half of that), and one tensor twice while smoothing is folded into it.
    largest_tensor = 96 * 64 * 2
    assert memory.largest_layer_bytes < memory.peak_bytes <= 1.5 * memory.largest_layer_bytes + largest_tensor
    assert memory.model_bytes > 24 * memory.largest_layer_bytes
    assert profile.layers[-1].linears == ("model.layers.23.mlp.down_proj",)


def test_every_layer_of_every_pass_is_reported(qwen2: tuple[nn.Module, Path]) -> None:
    """Else a run cuts the profiling of a large model as stalled."""
    reports: list[tuple[str, int, int]] = []
    profile = calibrate(
        qwen2[1],
        sequences=tokens().tolist(),
        scheme=Scheme.INT8,
        settings=Settings(mismatch_budget=1e-12),
        origin=ORIGIN,
        on_layer=lambda *report: reports.append(report),
    )
    assert profile.predicted_all is not None
    layers = len({layer.linears[0].split(".")[2] for layer in profile.layers})
    by_pass = [reports[first : first + layers] for first in range(0, len(reports), layers)]
    assert [[done for _, done, _ in passed] for passed in by_pass] == [list(range(1, layers + 1))] * len(by_pass)
    assert {total for _, _, total in reports} == {layers}
    names = [{name for name, _, _ in passed} for passed in by_pass]
    choices = [{f"choice {number}, layer"} for number in range(1, len(by_pass) - 1)]
    assert choices and names == [{"layer"}, {"contributions, layer"}, *choices]


def test_a_model_beats_at_every_layer_of_a_token(qwen2: tuple[nn.Module, Path]) -> None:
    beats: list[int] = []
    model = StreamedModel(ModelTensors(qwen2[1]), beat=lambda: beats.append(1))
    draw_samples(model, prompts=[[1, 2, 3]], sampling=ProfileSampling(max_tokens=4))
    assert len(beats) == 4 * model.num_layers


def test_prompts_of_like_lengths_are_answered_together_within_a_bound(
    qwen2: tuple[nn.Module, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One prompt of 4,000 tokens among 500 of 20 would have all of them padded to 4,000."""
    prompts = [[1] * 3, [2] * 20, [3] * 3, [4] * 5, [5] * 3]
    monkeypatch.setattr("appliance.quant.own_samples._PROMPT_TOKENS", 10)
    model, shapes, done = StreamedModel(ModelTensors(qwen2[1])), [], []
    run = model.run
    monkeypatch.setattr(
        model, "run", lambda hidden, **how: shapes.append(tuple(hidden.shape[:2])) or run(hidden, **how)
    )
    sampling = ProfileSampling(max_tokens=2)
    samples = draw_samples(model, prompts=prompts, sampling=sampling, on_token=lambda *counts: done.append(counts))
    assert [shape for shape in shapes if shape[1] > 1] == [(1, 20), (2, 5), (2, 3)]
    assert done == [(number, 6) for number in range(1, 7)]
    assert [list(sample.tokens[: sample.prompt_tokens]) for sample in samples] == prompts
    assert {len(sample.tokens) - sample.prompt_tokens for sample in samples} == {2}


def test_a_profile_is_read_as_it_was_written(qwen2: tuple[nn.Module, Path], tmp_path: Path) -> None:
    profile = profile_of(qwen2[1], mismatch_budget=0.01, ignore=("model.layers.0.mlp.down_proj",))
    write_profile(profile, folder=tmp_path)
    read = read_profile(tmp_path)
    assert read.header() == profile.header()
    assert [each.scale_K.tolist() for each in read.smoothing.groups] == [
        each.scale_K.tolist() for each in profile.smoothing.groups
    ]
    assert {name: each.tolist() for name, each in read.activations.items()} == {
        name: each.tolist() for name, each in profile.activations.items()
    }


def test_sequences_of_like_lengths_go_together() -> None:
    batches = batches_of([[1, 2], [3], [4, 5, 6], [], [6] * 2000])
    assert [tuple(each.tokens_BT.shape) for each in batches] == [(1, 2000), (3, 3)]
    assert batches[1].tokens_BT.tolist() == [[3, 0, 0], [1, 2, 0], [4, 5, 6]]
    assert batches[1].valid_BT.tolist() == [[True, False, False], [True, True, False], [True, True, True]]


def test_padding_changes_nothing(saved: tuple[nn.Module, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences of many lengths, in one batch with padding and each in a batch of its own."""
    sequences = [row[:length].tolist() for row, length in zip(tokens(sequences=6), (5, 9, 14, 14, 20, 24), strict=True)]

    def profiled() -> Profile:
        return calibrate(saved[1], sequences=sequences, scheme=Scheme.INT8, settings=Settings(), origin=ORIGIN)

    together = profiled()
    monkeypatch.setattr("appliance.quant.prediction._BATCH_TOKENS", 1)
    alone = profiled()
    # BF16 GEMMs and attention of other shapes may round the other way (2^-9 of a value), and the maximum with them.
    for name, range_K in alone.activations.items():
        torch.testing.assert_close(together.activations[name], range_K, rtol=0.02, atol=0.02)
    for one, other in zip(together.layers, alone.layers, strict=True):
        assert one.output_error == pytest.approx(other.output_error, rel=0.1)
    assert together.predicted is not None and alone.predicted is not None
    assert together.predicted.tokens == alone.predicted.tokens == sum(map(len, sequences)) - 6
    assert together.predicted.kl == pytest.approx(alone.predicted.kl, rel=0.3)


def test_a_model_of_another_structure_is_refused_by_name(tmp_path: Path) -> None:
    tiny("qwen2").save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"qwen2"', '"gpt2"'))
    with pytest.raises(EngineError) as raised:
        profile_of(tmp_path)
    why = "a profile of `gpt2` cannot be made: transformers' GPT2LMHeadModel has no `model.embed_tokens`"
    assert raised.value.message == f"{tmp_path}: {why}"
    assert raised.value.hint == "set quantization.profile: none"


def test_a_checkpoint_that_lacks_a_tensor_is_refused_by_name(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    tiny("qwen2").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, file)
    with pytest.raises(EngineError, match=r"the checkpoint has no model\.layers\.1\.mlp\.up_proj\.weight"):
        profile_of(tmp_path)


def test_a_checkpoint_in_many_files_gives_the_same_profile(qwen2: tuple[nn.Module, Path], tmp_path: Path) -> None:
    tiny("qwen2").save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    assert profile_of(tmp_path).header() == profile_of(qwen2[1]).header()


def test_a_tied_head_is_the_embedding(tmp_path: Path) -> None:
    tied = tiny("qwen2", tie_word_embeddings=True)
    tied.save_pretrained(tmp_path / "tied")
    untied = tiny("qwen2")
    untied.load_state_dict(tied.state_dict())
    untied.save_pretrained(tmp_path / "untied")
    predicted = profile_of(tmp_path / "tied").predicted
    assert predicted is not None and predicted == profile_of(tmp_path / "untied").predicted


def test_the_prediction_does_not_depend_on_the_bands_of_the_vocabulary(
    qwen2: tuple[nn.Module, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = profile_of(qwen2[1]).predicted
    monkeypatch.setattr("appliance.quant.checkpoint._ROWS", 50)
    bands = profile_of(qwen2[1]).predicted
    assert whole is not None and bands is not None
    # float64 sums of 288 terms of size 1 in another order, around float32 logits that a band may round differently.
    assert bands.kl == pytest.approx(whole.kl, rel=1e-2)
    assert bands.k3_kl == pytest.approx(whole.k3_kl, rel=1e-2)
