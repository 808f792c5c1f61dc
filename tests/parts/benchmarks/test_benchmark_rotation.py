"""That the variants which benchmarks/rotation.py compares are all the same function before anything is quantised."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

from appliance.terms.shapes import ModelShape
from benchmarks import rotation, rotation_sync

PREFIX = [1, 7]
PAIRS = [([1, 7, 5, 3], [9, 4, 2]), ([1, 7, 8], [6, 30])]


@pytest.fixture(scope="module", params=[LlamaConfig, Qwen2Config])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Width 128 is two blocks; four heads of 32 on two. Qwen2 has biases."""
    torch.manual_seed(0)
    config = request.param(
        vocab_size=64,
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    model = AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if "norm" in name or "bias" in name:
            parameter.data.uniform_(0.2, 2.0)
    folder = tmp_path_factory.mktemp(config.model_type)
    model.save_pretrained(folder)
    return folder


def logits(model: rotation.Llama, how: str = "float32", *, prefix: list[int] = PREFIX) -> Tensor:
    batches = rotation.batches_of(PAIRS, skip=len(prefix))
    states_MH = rotation.Forward(model, how).states(batches, prefix=prefix)
    return (states_MH @ model.head_VH.to(states_MH.dtype).t()).float()


def test_the_forward_is_that_of_transformers(folder: Path) -> None:
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected = []
    with torch.no_grad():
        for prompt, answer in sorted(PAIRS, key=lambda pair: len(pair[0]) + len(pair[1])):
            rows_TV = theirs(torch.tensor([prompt + answer])).logits[0]
            expected.append(rows_TV[len(prompt) - 1 : -1])
    for prefix in (PREFIX, []):
        logits_MV = logits(rotation.Llama.load(folder), prefix=prefix)
        torch.testing.assert_close(logits_MV, torch.cat(expected), rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", ["blocks", "full"])
def test_a_rotation_leaves_the_function_as_it_is(folder: Path, kind: str) -> None:
    model = rotation.Llama.load(folder)
    rotated = rotation.rotate_values(rotation.rotate_stream(model, kind, seed=3), seed=3)
    assert not torch.allclose(rotated.layers[0]["v"], model.layers[0]["v"], atol=0.01)
    torch.testing.assert_close(logits(rotated), logits(model), rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", ["blocks", "full"])
def test_the_rotation_whose_cost_is_measured_is_the_one_whose_gain_is(kind: str) -> None:
    shape = ModelShape(heads=2, kv_heads=1, head_size=64, hidden=128, intermediate=192, layers=1, vocab=64)
    turns, turn_HH = rotation_sync.Turns.for_model(shape, kind=kind), rotation.rotation(kind, width=128, seed=0).float()
    (layer,) = rotation_sync.layers_of(shape)
    norm_H = torch.rand(128)
    for matrix, expected in (
        (turns.of_reader(layer["q"], norm_H), (layer["q"].float() * norm_H) @ turn_HH),
        (turns.of_writer(layer["down"]), turn_HH.t() @ layer["down"].float()),
    ):
        torch.testing.assert_close(matrix, expected, rtol=0, atol=1e-5)


def test_smoothing_leaves_the_function_as_it_is(folder: Path) -> None:
    rotation.load_kernels()  # vLLM's norms and activations, for the ranges
    model = rotation.Llama.load(folder)
    ranges = rotation.ranges_of(model, rotation.batches_of(PAIRS, skip=len(PREFIX)), prefix=PREFIX)
    smoothed = rotation.smooth_values(rotation.smooth_down(rotation.smooth_norms(model, ranges), ranges), ranges)
    assert not torch.equal(smoothed.layers[0]["o"], model.layers[0]["o"])
    torch.testing.assert_close(logits(smoothed), logits(model), rtol=0, atol=1e-4)


def test_asymmetric_activations_have_half_the_step_of_one_sided_ones() -> None:
    """x in 0..1: symmetric codes have steps of 1 / 127, asymmetric ones of 1 / 255, and errors half as large."""
    rotation.load_kernels()
    torch.manual_seed(0)
    weight_NK, x_MK = torch.randn(64, 256), torch.rand(32, 256).bfloat16()
    kept_NK = rotation.dequantise_int8(rotation.quantise_int8(weight_NK.bfloat16()))
    exact_MN = x_MK.float() @ kept_NK.t()
    step, asymmetric = (
        float((rotation.Gemm(weight_NK, how)(x_MK).float() - exact_MN).std()) for how in ("int8", "asymmetric")
    )
    assert 0.3 < asymmetric / step < 0.8  # both also round their answer to BF16
