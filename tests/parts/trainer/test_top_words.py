"""The trainer's log-probs of the engine's most likely words: where they lie, what the loss makes of them.

Models are in float64 and compared with transformers' forward of each sequence by itself: bounds as in
test_shared_prompts.py.  Legend: S sequences, T tokens of verl's row, N response positions, K words.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict
from test_corrected_loss import as_verl_has_it, jagged, make_batch, make_config
from test_shared_prompts import BOUND, TEMPERATURE, assert_close, micro_batch, model_of, sequences
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.utils.torch_functional import logprobs_from_logits
from verl.workers.utils.padding import response_from_nested

import appliance.trainer.worker  # noqa: F401  our log-probs and our attention
from appliance.corrections.base import LossCorrection
from appliance.corrections.distributions import divergence
from appliance.corrections.registry import correction_of
from appliance.errors import TrainingError
from appliance.trainer.correction import CENTERED, CENTERING, USED, centering_metrics, corrected_loss
from appliance.trainer.rollout_ops import log_probs_of
from appliance.trainer.top_words import (
    DIVERGENCE,
    TOP_IDS,
    TOP_ROLLOUT,
    TOP_TRAINER,
    TopWordsEngine,
    predicting_places,
    words_of,
)
from appliance.trainer.update_log_probs import UPDATE_LOG_PROBS

K = 5


def engine_of(model: torch.nn.Module, *, shares: bool, reference: bool = False) -> TopWordsEngine:
    engine = TopWordsEngine.__new__(TopWordsEngine)
    engine.module, engine.use_ulysses_sp, engine.pad_to_length, engine.shares_prompts = model, False, None, shares
    engine.engine_config = SimpleNamespace(entropy_checkpointing=False, forward_only=reference)
    engine._autocast_dtype = torch.float32
    return engine


def with_words(data: TensorDict, *, vocabulary: int = 288) -> TensorDict:
    """With words and the engine's log-probs of them, all different ones."""
    generator, offsets = torch.Generator().manual_seed(5), data["response_mask"].offsets()
    ids_NK = torch.stack([torch.randperm(vocabulary, generator=generator)[:K] for _ in range(int(offsets[-1]))])
    rollout_NK = torch.randn(len(ids_NK), 9, generator=generator).log_softmax(dim=-1)[:, :K]
    for name, rows in ((TOP_IDS, ids_NK.int()), (TOP_ROLLOUT, rollout_NK)):
        of_sequences = rows.split(offsets.diff().tolist())
        data[name] = torch.nested.as_nested_tensor([each.flatten() for each in of_sequences], layout=torch.jagged)
    return data


def one_by_one(model: torch.nn.Module, data: TensorDict) -> Tensor:
    """[N, 1 + K] log-probs of the sampled word and of these words, of each whole sequence by itself."""
    log_probs = []
    for (prompt, response), ids in zip(sequences(), data[TOP_IDS].unbind(), strict=True):
        logits = model(input_ids=torch.tensor([prompt + response]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        words = torch.cat([torch.tensor(response)[:, None], ids.long().view(-1, K)], dim=1)
        log_probs.append((logits / TEMPERATURE).log_softmax(dim=-1).gather(1, words))
    return torch.cat(log_probs)


def weighed(values: Tensor) -> Tensor:
    """A sum in which each weighs otherwise."""
    return (values.flatten() * torch.linspace(-1, 2, values.numel(), dtype=values.dtype)).sum()


@pytest.mark.parametrize("shares", [False, True])
def test_log_probs_of_the_words_and_their_gradients_are_those_of_whole_sequences(shares: bool) -> None:
    UPDATE_LOG_PROBS.end()
    model, data = model_of("qwen2"), with_words(micro_batch(sequences()))
    engine = engine_of(model, shares=shares)
    inputs, arguments = engine.prepare_model_inputs(data)
    outputs = engine.prepare_model_outputs(model(**inputs, use_cache=False), arguments, data, None)
    assert set(outputs) == {"log_probs", TOP_TRAINER}
    columns = (response_from_nested(outputs[name], data["response_mask"]) for name in ("log_probs", TOP_TRAINER))
    sampled_N, words_NK = (each.values() for each in columns)
    both_NL = torch.cat([sampled_N[:, None], words_NK], dim=1)
    weighed(both_NL).backward()
    other = model_of("qwen2", attention="sdpa")
    wanted_NL = one_by_one(other, data)
    weighed(wanted_NL).backward()
    assert_close(both_NL.detach(), wanted_NL.detach(), "log-probs")
    for (name, parameter), wanted in zip(model.named_parameters(), other.parameters(), strict=True):
        assert_close(parameter.grad, wanted.grad, name, bound=BOUND)


@pytest.mark.parametrize("shares", [False, True])
def test_the_policy_before_an_update_is_compared_and_a_reference_is_not(shares: bool) -> None:
    model, data = model_of("qwen2"), with_words(micro_batch(sequences()))

    def outputs_of(engine: TopWordsEngine) -> dict[str, Tensor]:
        inputs, arguments = engine.prepare_model_inputs(data)
        return engine.prepare_model_outputs(model(**inputs, use_cache=False), arguments, data, None)

    with torch.no_grad():
        outputs = outputs_of(engine_of(model, shares=shares))
        assert set(outputs_of(engine_of(model, shares=shares, reference=True))) == {"log_probs"}
        wanted_N = divergence(words_of(data, TOP_ROLLOUT), trainer_TK=one_by_one(model, data)[:, 1:])
    assert set(outputs) == {"log_probs", DIVERGENCE}
    assert torch.equal(outputs[DIVERGENCE].offsets(), data["response_mask"].offsets())
    assert torch.allclose(outputs[DIVERGENCE].values(), wanted_N, rtol=1e-6, atol=0)  # rounded to float32
    UPDATE_LOG_PROBS.begin()
    try:
        assert set(outputs_of(engine_of(model, shares=shares))) == {"log_probs", TOP_TRAINER, DIVERGENCE}
    finally:
        UPDATE_LOG_PROBS.end()


def test_the_token_before_each_response_token_predicts_it() -> None:
    data = micro_batch([([1, 2, 3], [4, 5, 6]), ([9], [7, 8])])
    assert predicting_places(data).tolist() == [2, 3, 4, 6, 7]


def test_one_softmax_gives_all_words_and_the_first_is_as_alone() -> None:
    """So that a run which only compares learns what it would without comparing, bit for bit."""
    generator = torch.Generator().manual_seed(2)
    x_TV = torch.randn(50, 40, generator=generator).bfloat16().requires_grad_()
    words_TL = torch.randint(0, 40, (50, 4), generator=generator)
    alone_T, grad_T = logprobs_from_logits(x_TV, words_TL[:, 0]), torch.randn(50, generator=generator)
    (alone_TV,) = torch.autograd.grad(alone_T, x_TV, grad_T)
    all_TL = logprobs_from_logits(x_TV, words_TL)
    (all_TV,) = torch.autograd.grad(all_TL[:, 0], x_TV, grad_T)
    assert torch.equal(all_TL[:, 0], alone_T) and torch.equal(all_TV, alone_TV)


def test_the_rollouts_forward_has_all_words_and_a_gradient_of_the_first_alone() -> None:
    generator, settings = torch.Generator().manual_seed(2), {"num_tokens": 36, "temperature": 0.7, "with_entropy": True}
    x_TV = torch.randn(50, 40, generator=generator).bfloat16().requires_grad_()
    words_TL = torch.randint(0, 36, (50, 4), generator=generator)
    all_TL, entropy_T = log_probs_of(x_TV, words_TL, **settings)
    columns = [log_probs_of(x_TV, words_T, **settings)[0] for words_T in words_TL.T]
    assert torch.equal(all_TL, torch.stack(columns, dim=1)) and entropy_T.shape == (50,)
    (all_TV,), (first_TV,) = (torch.autograd.grad(each.sum(), x_TV) for each in (all_TL, columns[0]))
    assert torch.equal(all_TV, first_TV)


# --- the loss


def centered(
    correction: LossCorrection, *, rows: slice = slice(None), mode: str = "token-mean", with_term: bool = True
) -> tuple[float, Tensor, Tensor, dict[str, float]]:
    """(loss, gradients of the sampled words' log-probs [S, N] and of the others' [S, N, K], metrics) of a batch of
    which some tokens are dropped."""
    whole = make_batch(3, highest=4.0)
    in_loss = whole.mask.clone()
    in_loss[4] = in_loss[:, 2] = False
    batch, words = whole.part(rows), whole_words(whole)
    output, data, leaf = as_verl_has_it(batch, weights=batch.raw, in_loss=in_loss[rows])
    lengths = batch.mask.sum(dim=-1).tolist()
    tu.assign_non_tensor(data, global_batch_size=len(whole.mask), batch_num_tokens=int(in_loss.sum()))
    data[TOP_ROLLOUT] = jagged(words[1][rows].flatten(1), [length * K for length in lengths])
    trainer = words[0][rows].clone().requires_grad_()
    whole_rows = [torch.cat([row[:length], row.new_zeros(1, K)]) for row, length in zip(trainer, lengths, strict=True)]
    output[TOP_TRAINER] = torch.nested.as_nested_tensor(whole_rows, layout=torch.jagged)
    if with_term:
        tu.assign_non_tensor(data, **{CENTERING: correction})
    loss, metrics = corrected_loss(make_config(loss_agg_mode=mode), output, data)
    loss.backward()
    grad = torch.zeros_like(trainer) if trainer.grad is None else trainer.grad
    return float(loss), leaf.grad, grad, {name: metric.aggregate() for name, metric in metrics.items()}


def whole_words(batch: object) -> tuple[Tensor, Tensor]:
    """Log-probs of K words [S, N, K] by trainer and engine, float32."""
    generator, shape = torch.Generator().manual_seed(9), (*batch.mask.shape, K + 3)
    logits = torch.randn(shape, generator=generator)
    others = logits + 0.7 * torch.randn(shape, generator=generator)
    return tuple(each.log_softmax(dim=-1)[..., :K] for each in (logits, others))


def by_definition(correction: LossCorrection, *, mode: str) -> tuple[float, Tensor, float]:
    """(the term, its gradient [S, N, K], the mean of what is taken out) token by token in float64."""
    batch = make_batch(3, highest=4.0)
    in_loss = batch.mask.clone()
    in_loss[4] = in_loss[:, 2] = False
    p, q = (each.double().exp() for each in whole_words(batch))
    rest_p, rest_q = 1 - p.sum(dim=-1), 1 - q.sum(dim=-1)
    m, alpha = q, rest_q / rest_p
    if correction.cap is not None:
        m, alpha = q * (p / q).clamp(max=correction.cap), alpha * (rest_p / rest_q).clamp(max=correction.cap)
    coefficient = m - alpha[..., None] * p
    # of each token: one of the batch's, or of its sequence's mean, which counts as one of the sequences
    share = in_loss / in_loss.sum()
    if mode == "seq-mean-token-mean":
        share = in_loss / in_loss.sum(dim=-1, keepdim=True).clamp(min=1) / len(in_loss)
    gradient = (batch.advantages.double() * share)[..., None] * coefficient
    whole = m.sum(dim=-1) + alpha * rest_p  # the mean score of a word: its mass less the whole one's share by p
    size = (m - whole[..., None] * p).abs().sum(dim=-1) + (alpha - whole).abs() * rest_p
    size = float(size[in_loss].mean())
    return float((gradient * p.log()).sum()), gradient, size


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
@pytest.mark.parametrize(("name", "cap"), [("score-centering", None), ("score-centering-tis", 1.5)])
def test_the_term_in_the_loss_is_the_formula(name: str, cap: float | None, mode: str) -> None:
    correction = correction_of(name, cap=cap)
    loss, sampled, gradient, metrics = centered(correction, mode=mode)
    plain, sampled_alone, nothing, _ = centered(correction, mode=mode, with_term=False)
    expected, wanted_gradient, size = by_definition(correction, mode=mode)
    assert torch.equal(sampled, sampled_alone) and not bool(nothing.any())
    # coefficients are rounded to float32 once, the advantage's product once: 2^-24 each, and the divisor
    assert torch.allclose(gradient.double(), wanted_gradient, rtol=2.0**-21, atol=1e-12)
    # sums of 16 * 20 * K float32 terms: 2^-24 of their absolute sum per level of a tree
    assert abs(loss - plain - expected) < 2.0**-18 * (abs(plain) + float(wanted_gradient.abs().sum()))
    assert centering_metrics(metrics) == {"score_centering": pytest.approx(size, rel=1e-6)}


def test_terms_of_micro_batches_add_up() -> None:
    correction = correction_of("score-centering-tis", cap=1.5)
    loss, _, gradient, metrics = centered(correction)
    parts = [centered(correction, rows=rows) for rows in (slice(0, 5), slice(5, 6), slice(6, None))]
    assert sum(part[0] for part in parts) == pytest.approx(loss, abs=1e-6)
    assert torch.allclose(torch.cat([part[2] for part in parts]), gradient, rtol=1e-6, atol=0)
    assert sum(part[3][USED + CENTERED] for part in parts) == metrics[USED + CENTERED]


def test_a_forward_without_the_words_raises() -> None:
    batch = make_batch(0, highest=2.0)
    output, data, _ = as_verl_has_it(batch, weights=batch.raw)
    tu.assign_non_tensor(data, **{CENTERING: correction_of("score-centering")})
    with pytest.raises(TrainingError) as raised:
        corrected_loss(make_config(), output, data)
    assert raised.value.message == "the forward gave no log-probs of the engine's most likely words"
