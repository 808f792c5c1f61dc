"""Shared prompts: a row in which each prompt stands once gives every response token what its whole sequence gives it.

Models are in float64, and so is what they are compared with: transformers' forward of each sequence by itself, with
torch's attention. As in test_attention.py, where the bound is derived: both round 2^-53 of a value in each of at most
80 operations in sums of at most 288 terms, and norms multiply by at most 24: 1.2e-10 of the largest value, for
log-probs and, of each parameter, for gradients. A token that sees another response is off by 1e-3.

Legend: T tokens of verl's row, U tokens of ours, R response tokens.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from plans import make_plan
from tensordict import TensorDict
from tiny_models import FAMILIES, tiny
from torch import Tensor
from transformers import PreTrainedModel
from verl.utils.tensordict_utils import assign_non_tensor
from verl.utils.torch_functional import entropy_from_logits_with_chunking
from verl.workers.utils.padding import response_from_nested

import appliance.trainer.worker  # noqa: F401  our log-probs and our attention
from appliance.errors import TrainingError
from appliance.settings.sections import Attention, Cluster, Forward, Lora, Model
from appliance.terms.schemes import Scheme
from appliance.terms.settings import ATTENTION_NAME, Quantisation
from appliance.trainer.attention import Sequences, attend_each
from appliance.trainer.rollout_forward import RolloutForward
from appliance.trainer.shared_prompts import SharedPromptsEngine, SharedRow

BOUND = 1.2e-10
ROUTER_BOUND = 2.0**-23  # a router's softmax rounds its gradient to float32 (2^-24), in each of two layers
TEMPERATURE = 0.75  # float32 has it
# (prompt, response lengths): a prompt that begins as another one, responses of one token first, last and alone, a
# prompt of one token
GROUPS = ((5, (4, 1, 9)), (3, (2,)), (7, (1, 1, 6)), (2, (1,)), (1, (3, 2)))
WINDOWS = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}  # Qwen: of the second layer
ALL_WINDOWS = WINDOWS | {"max_window_layers": 0}
CASES = [*((name, {}) for name in FAMILIES), ("qwen2", WINDOWS)]


def sequences(groups: tuple[tuple[int, tuple[int, ...]], ...] = GROUPS) -> list[tuple[list[int], list[int]]]:
    """(prompt, response), the samples of a prompt not always behind one another."""
    generator = torch.Generator().manual_seed(3)
    longest = torch.randint(2, 288, (max(prompt for prompt, _ in groups),), generator=generator).tolist()
    pairs = [
        (longest[:prompt], torch.randint(2, 288, (response,), generator=generator).tolist())
        for prompt, responses in groups
        for response in responses
    ]
    return [pairs[0], pairs[3], *pairs[1:3], *pairs[4:]]


def micro_batch(pairs: list[tuple[list[int], list[int]]], *, entropy: bool = False) -> TensorDict:
    def nested(rows: list[list[int]]) -> Tensor:
        return torch.nested.as_nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)

    data = TensorDict(
        {
            "input_ids": nested([prompt + response for prompt, response in pairs]),
            "position_ids": nested([[*range(len(prompt + response))] for prompt, response in pairs]),
            "response_mask": nested([[1] * len(response) for _, response in pairs]),
        },
        batch_size=len(pairs),
    )
    assign_non_tensor(data, use_remove_padding=True, temperature=TEMPERATURE, calculate_entropy=entropy)
    return data


def engine_of(model: PreTrainedModel, *, shares: bool = True) -> SharedPromptsEngine:
    """With what its inputs and outputs need and nothing else."""
    engine = SharedPromptsEngine.__new__(SharedPromptsEngine)
    engine.module, engine.use_ulysses_sp, engine.pad_to_length, engine.shares_prompts = model, False, None, shares
    engine.engine_config = SimpleNamespace(
        entropy_checkpointing=False, entropy_from_logits_with_chunking=True, entropy_from_logits_chunk_size=8
    )
    engine.compute_entropy_from_logits = entropy_from_logits_with_chunking
    engine._autocast_dtype = torch.float32  # none, so that float64 stays
    return engine


def outputs_of(engine: SharedPromptsEngine, data: TensorDict) -> dict[str, Tensor]:
    inputs, arguments = engine.prepare_model_inputs(data)
    return engine.prepare_model_outputs(engine.module(**inputs, use_cache=False), arguments, data, None)


def model_of(family: str, *, attention: str = ATTENTION_NAME, checkpointing: bool = False, **changes: Any) -> Any:
    model = tiny(family, dtype=torch.float64, attn_implementation=attention, **changes).train()
    model.set_experts_implementation("eager")  # torch's grouped GEMM takes no float64
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.forward = partial(exact_norm, module)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def exact_norm(module: Any, x: Tensor) -> Tensor:
    """In float64: transformers rounds a norm's gradients to float32, and ours are sums over a prompt's responses."""
    return module.weight * (x * torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + module.variance_epsilon))


def weighed(log_probs_R: Tensor) -> Tensor:
    """A loss in which each response token weighs otherwise."""
    return (log_probs_R * torch.linspace(-1, 2, len(log_probs_R), dtype=log_probs_R.dtype)).sum()


def one_by_one(family: str, **changes: Any) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """(log-probs [R], entropies [R], gradients) of each whole sequence by itself."""
    model = model_of(family, attention="sdpa", **changes)
    log_probs, entropies = [], []
    for prompt, response in sequences():
        logits = model(input_ids=torch.tensor([prompt + response]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        of_words = (logits / TEMPERATURE).log_softmax(dim=-1)
        log_probs.append(of_words.gather(1, torch.tensor(response)[:, None])[:, 0])
        entropies.append(-(of_words.exp() * of_words).sum(dim=-1).detach())
    weighed(torch.cat(log_probs)).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return torch.cat(log_probs).detach(), torch.cat(entropies), gradients


def assert_close(found: Tensor, wanted: Tensor, what: str, *, bound: float = BOUND) -> None:
    off = ((found - wanted).abs().max() / wanted.abs().max().clamp(min=1e-30)).item()
    assert off <= bound, f"{what}: off by {off:.2g} of the largest value"


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(("family", "changes"), CASES)
def test_log_probs_and_gradients_are_those_of_whole_sequences(
    family: str, changes: dict[str, Any], checkpointing: bool
) -> None:
    model = model_of(family, checkpointing=checkpointing, **changes)
    data = micro_batch(sequences())
    log_probs_R = response_from_nested(outputs_of(engine_of(model), data)["log_probs"], data["response_mask"]).values()
    weighed(log_probs_R).backward()
    wanted_R, _, expected = one_by_one(family, **changes)
    assert_close(log_probs_R.detach(), wanted_R, "log-probs")
    for name, parameter in model.named_parameters():
        assert_close(parameter.grad, expected[name], name, bound=ROUTER_BOUND if "moe" in family else BOUND)


def test_outputs_lie_as_verls_and_are_zero_elsewhere() -> None:
    """Entropies are verl's own function in float32: 288 words, each term and their sums rounded: 288 x 2^-22."""
    model, data = model_of("llama"), micro_batch(sequences(), entropy=True)
    with torch.no_grad():
        ours, verls = (outputs_of(engine_of(model, shares=shares), data) for shares in (True, False))
    assert set(ours) == set(verls) == {"log_probs", "entropy"}
    _, wanted_R, _ = one_by_one("llama")
    responses = [response_from_nested(each["entropy"], data["response_mask"]).values() for each in (ours, verls)]
    for entropies_R in responses:
        assert_close(entropies_R.double(), wanted_R, "entropy", bound=288 * 2.0**-22)
    row = SharedRow.from_micro_batch(data)
    for name, value in ours.items():
        assert torch.equal(value.offsets(), data["input_ids"].offsets()) and value.dtype == verls[name].dtype
        elsewhere = torch.ones(len(value.values()), dtype=torch.bool)
        elsewhere[row.predicted_R] = False
        assert bool((value.values()[elsewhere] == 0).all()) and bool((value.values()[row.predicted_R] != 0).all())


def test_a_prompt_is_computed_once_and_logits_of_responses_alone() -> None:
    model, shapes = model_of("llama"), []
    model.model.norm.register_forward_hook(lambda module, inputs, output: shapes.append(output.shape[1]))
    model.lm_head.register_forward_hook(lambda module, inputs, output: shapes.append(output.shape[1]))
    outputs_of(engine_of(model), micro_batch(sequences()))
    prompts = sum(prompt - 1 for prompt, _ in GROUPS)  # its last token begins each response
    responses = [response for _, lengths in GROUPS for response in lengths]
    assert shapes == [prompts + sum(responses), sum(responses)]


def test_positions_alone_say_what_continues_what() -> None:
    pairs = [([1, 2, 3], [4, 5, 6]), ([1, 2, 3], [7, 8]), ([9, 9], [1, 2, 3])]
    data = micro_batch(pairs)
    row = SharedRow.from_micro_batch(data)
    places = row.places_U
    assert data["input_ids"].values()[places].tolist() == [1, 2, 3, 4, 5, 3, 7, 9, 9, 1, 2]
    found = Sequences.from_positions(data["position_ids"].values()[places])
    assert (found.lengths, found.prefixes) == ([5, 2, 4], [range(0), range(2), range(7, 7)])
    assert row.predicting_R.tolist() == [2, 3, 4, 5, 6, 8, 9, 10]
    assert row.predicted_R.tolist() == [2, 3, 4, 8, 9, 12, 13, 14]


def test_a_prefix_gets_its_gradients_rounded_once() -> None:
    """Of 128 responses, in BF16: sums in float32 of numbers of one sign are off by 128 x 2^-24, their rounding by 2^-8.
    A sum in BF16 would be off by percents."""
    responses, prefix, heads, channels = 128, 4, 2, 16
    generator = torch.Generator().manual_seed(1)
    positions_T = torch.cat([torch.arange(prefix), *[torch.arange(prefix, prefix + 3)] * responses])
    sequences, shape_T = Sequences.from_positions(positions_T), (len(positions_T), heads, channels)
    q, k = (0.01 * torch.randn(shape_T, generator=generator) for _ in range(2))
    v, grad = torch.randn(shape_T, generator=generator), torch.rand(shape_T, generator=generator)

    def gradient(dtype: torch.dtype) -> Tensor:
        value = v.bfloat16().to(dtype).requires_grad_()
        out = attend_each(q.bfloat16().to(dtype), k.bfloat16().to(dtype), value, sequences=sequences, scale=0.25)
        out.backward(grad.bfloat16().to(dtype))
        return value.grad[:prefix]

    found, wanted = gradient(torch.bfloat16), gradient(torch.float64)
    assert float(((found.double() - wanted) / wanted).abs().max()) <= 2.0**-8 + 2.0**-16


def test_a_sequence_without_a_prompt_is_refused() -> None:
    with pytest.raises(TrainingError) as raised:
        SharedRow.from_micro_batch(micro_batch([([1], [2]), ([], [3, 4])]))
    assert raised.value.message == "a sequence of 2 tokens has a response of 2 and no prompt"


def test_a_prefix_that_is_not_there_is_refused() -> None:
    with pytest.raises(TrainingError) as raised:
        Sequences.from_positions(torch.tensor([0, 1, 3, 4]))
    assert raised.value.message == "attention: a segment at position 3 continues a sequence of 2 tokens"


# around an attention block of 32 tokens, and a prompt whose responses reach into the third one
LONG_GROUPS = ((70, (4, 1, 9)), (31, (2, 40)), (32, (1, 1, 6)), (33, (5,)), (1, (3, 2)))


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("scheme", [Scheme.INT8, Scheme.BF16])
@pytest.mark.parametrize(("family", "changes"), [("llama", {}), ("qwen3", {}), ("qwen2", ALL_WINDOWS)])
def test_the_rollouts_forward_gives_each_response_token_the_same_bits(
    family: str, changes: dict[str, Any], scheme: Scheme, checkpointing: bool
) -> None:
    """Log-probs and entropies of one flow. Gradients are other sums of the same numbers in BF16: 24 roundings of a
    path through two layers, here and there, each of 2^-8 uniform, so sqrt(48) 2^-8 / sqrt(3) = 0.016 of the norm as in
    test_rollout_forward.py; twice that is allowed."""
    results, kept_tokens = {}, {}
    for shares in (True, False):
        model = tiny(family, dtype=torch.bfloat16, head_dim=32, **changes).train()  # the kernel has no 16
        RolloutForward(model, quantisation=Quantisation(scheme=scheme), num_tokens=model.config.vocab_size)
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        data = micro_batch(sequences(LONG_GROUPS), entropy=True)
        assign_non_tensor(data, use_fused_kernels=True)
        engine, mask = engine_of(model, shares=shares), data["response_mask"]
        inputs, _ = engine.prepare_model_inputs(data)
        kept_tokens[shares] = (inputs["input_ids"].numel(), inputs["shift_labels"].numel())
        with torch.no_grad():
            passed = outputs_of(engine, data)
        assign_non_tensor(data, calculate_entropy=False)
        log_probs_R = response_from_nested(outputs_of(engine, data)["log_probs"], mask).values()
        weighed(log_probs_R).backward()
        values = [log_probs_R.detach(), *(response_from_nested(passed[name], mask).values() for name in passed)]
        results[shares] = values, {name: parameter.grad.double() for name, parameter in model.named_parameters()}
    responses = sum(sum(lengths) for _, lengths in LONG_GROUPS)
    prompts = sum(prompt - 1 for prompt, _ in LONG_GROUPS)
    whole = sum(prompt + response for prompt, lengths in LONG_GROUPS for response in lengths)
    assert kept_tokens == {True: (prompts + responses, responses), False: (whole, whole)}
    assert all(map(torch.equal, results[True][0], results[False][0]))
    for name, gradient in results[True][1].items():
        wanted = results[False][1][name]
        if not name.endswith("k_proj.bias"):  # moves all scores of a query alike: next to nothing remains
            assert float((gradient - wanted).norm() / wanted.norm()) < 0.032, name


def with_lora(*, dropout: float) -> Model:
    return Model(builtin="tiny-arithmetic", lora=Lora(rank=4, alpha=8, targets=("q_proj",), dropout=dropout))


@pytest.mark.parametrize(
    ("changes", "shares"),
    [
        ({}, True),
        ({"model": with_lora(dropout=0.0)}, True),
        ({"model": with_lora(dropout=0.1)}, False),
        ({"cluster": Cluster(device="h100", token_file="a-file")}, False),
        ({"forward": Forward.ROLLOUT}, True),
        ({"sequence_parallel": 2}, False),
        ({"attention": Attention.FLASH_ATTENTION_2}, False),
    ],
)
def test_the_plan_shares_prompts_where_it_may(changes: dict[str, Any], shares: bool, tmp_path: Path) -> None:
    plan = make_plan(tmp_path / "run")
    of_trainer = {name: value for name, value in changes.items() if name in type(plan.trainer).model_fields}
    of_plan = {name: value for name, value in changes.items() if name not in of_trainer}
    changed = plan.replace(**of_plan, trainer=plan.trainer.replace(**of_trainer))
    assert changed.shares_prompts is shares
