"""Our attention in transformers: sequences in a row give what each gives by itself, on one rank or shared by several.

Models are in float64, and so is what they are held to: torch's attention of each sequence by itself. Both round 2^-53
of a value in each of at most 2 layers x 40 operations, in sums of at most 288 terms (words), and a tiny model's norms
multiply what comes in by at most 24 (their largest weight): twice 80 x 288 x 24 x 2^-53 = 1.2e-10 of the largest value.
(Norms and rotations, which transformers rounds to float32, are given the same.) A token of another sequence is off by
1e-3.

Legend: T tokens of all sequences in a row, H heads, G KV heads, D channels of a head.
"""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny_models import FAMILIES, tiny
from torch import Tensor
from torch._subclasses import FakeTensorMode
from transformers import PreTrainedModel
from unlisted_models import UNLISTED, build_unlisted

from appliance.errors import TrainingError
from appliance.terms.settings import ATTENTION_NAME
from appliance.trainer import attention
from appliance.trainer.attention import Sequences, attend, attend_each, attend_row

LENGTHS = (3, 1, 40, 8, 19)
BOUND = 1.2e-10
U = 2.0**-8  # of what is rounded to BF16, at most
WINDOWS = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}  # Qwen: of the second layer
CASES = [*((name, {}) for name in FAMILIES), ("qwen2", WINDOWS), ("qwen3", WINDOWS), ("qwen3-moe", WINDOWS)]


def tokens() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(2, 288, (length,), generator=generator) for length in LENGTHS]


def positions_T() -> Tensor:
    return torch.cat([torch.arange(length) for length in LENGTHS])


def model_of(family: str, *, implementation: str, checkpointing: bool = False, **changes: object) -> PreTrainedModel:
    model = tiny(family, dtype=torch.float64, attn_implementation=implementation, **changes).train()
    model.set_experts_implementation("eager")  # torch's grouped GEMM takes no float64
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def loss_of(logits_TV: Tensor) -> Tensor:
    """In which each word weighs otherwise."""
    weights = torch.linspace(-1, 1, logits_TV.shape[-1], dtype=logits_TV.dtype)
    return (logits_TV.log_softmax(dim=-1) * weights).sum()


def gradients(model: PreTrainedModel) -> dict[str, Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def of_each(family: str, **changes: object) -> tuple[Tensor, dict[str, Tensor]]:
    """(logits, gradients) of the sequences one by one, by transformers' use of torch's attention."""
    model = model_of(family, implementation="sdpa", **changes)
    logits = [model(input_ids=ids[None], use_cache=False).logits[0] for ids in tokens()]
    loss_of(torch.cat(logits)).backward()
    return torch.cat(logits).detach(), gradients(model)


def packed(model: PreTrainedModel) -> Tensor:
    """[T, V]: as verl calls a model with `use_remove_padding`."""
    ids = torch.cat(tokens())[None]
    found = model(input_ids=ids, attention_mask=None, position_ids=positions_T()[None], use_cache=False)
    return found.logits[0]


def assert_close(found: Tensor, wanted: Tensor, what: str, *, bound: float = BOUND) -> None:
    off = ((found - wanted).abs().max() / wanted.abs().max().clamp(min=1e-30)).item()
    assert off <= bound, f"{what}: off by {off:.2g} of the largest value"


@pytest.mark.parametrize(("family", "changes"), CASES)
def test_a_row_gives_what_each_sequence_gives(family: str, changes: dict[str, object]) -> None:
    model = model_of(family, implementation=ATTENTION_NAME, **changes)
    logits_TV = packed(model)
    loss_of(logits_TV).backward()
    wanted_TV, expected = of_each(family, **changes)
    assert_close(logits_TV.detach(), wanted_TV, "logits")
    for name, gradient in gradients(model).items():
        assert_close(gradient, expected[name], name)


@pytest.mark.parametrize("model_type", UNLISTED)
def test_a_row_gives_what_each_sequence_gives_in_other_classes(model_type: str) -> None:
    """Windows in a part of the layers, soft caps, layers without positions. Held to transformers' own attention, whose
    softmax is in float32: a rounding of 2^-24 in each of 2 layers, of which norms make at most some hundred."""
    logits = {}
    for implementation in ("eager", ATTENTION_NAME):
        model = build_unlisted(model_type, seed=1, dtype="float64", attention=implementation)
        rows = tokens() if implementation == "eager" else [torch.cat(tokens())]
        positions = [torch.arange(len(row)) for row in rows] if implementation == "eager" else [positions_T()]
        outputs = [
            model(input_ids=row[None], position_ids=place[None], use_cache=False).logits[0]
            for row, place in zip(rows, positions, strict=True)
        ]
        loss_of(torch.cat(outputs)).backward()
        logits[implementation] = torch.cat(outputs).detach(), gradients(model)
    (wanted_TV, expected), (logits_TV, ours) = logits.values()
    assert_close(logits_TV, wanted_TV, "logits", bound=1e-5)
    for name, gradient in ours.items():
        assert_close(gradient, expected[name], name, bound=1e-4)


def test_a_sliding_window_changes_the_answer() -> None:
    """So that the cases above see it."""
    near, far = (of_each("qwen2", **changes)[0] for changes in (WINDOWS, {}))
    assert (near - far).abs().max() > 1e-3


def test_starts_are_looked_for_once_in_a_forward_and_its_recomputation(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    original = Sequences.from_positions
    monkeypatch.setattr(Sequences, "from_positions", lambda positions: calls.append(1) or original(positions))
    model = model_of("qwen2", implementation=ATTENTION_NAME, checkpointing=True)
    for count in (1, 2):
        loss_of(packed(model)).backward()
        assert len(calls) == count


def test_where_sequences_lie() -> None:
    found = Sequences.from_positions(positions_T())
    assert found.lengths == list(LENGTHS)
    assert found.starts_S1.tolist() == [0, 3, 4, 44, 52, 71] and found.starts_S1.dtype is torch.int32


def test_a_shared_prefix_is_refused_on_cuda() -> None:
    q, k, v = (torch.zeros(4, 1, 16) for _ in range(3))
    with pytest.raises(TrainingError) as raised:
        attention._attend_on_cuda(
            q, k, v, sequences=Sequences.from_positions(torch.tensor([0, 1, 2, 1])), scale=1.0, window=None
        )
    assert raised.value.message == "attention on CUDA got sequences that share a prefix, which it does not know"


def test_more_than_one_row_is_refused() -> None:
    rows = torch.zeros(2, 1, 7, 4)
    with pytest.raises(TrainingError) as raised:
        attend_row(torch.nn.Module(), rows, rows, rows, None, position_ids=torch.arange(7)[None], scaling=1.0)
    assert raised.value.message == "attention got 2 rows of 7 tokens, and takes one with all sequences"


def test_attention_sinks_are_refused() -> None:
    row, ids = torch.zeros(1, 1, 7, 4), torch.arange(7)[None]
    attend_row(torch.nn.Module(), row, row, row, None, position_ids=ids, scaling=1.0, s_aux=None)
    with pytest.raises(TrainingError) as raised:
        attend_row(torch.nn.Module(), row, row, row, None, position_ids=ids, scaling=1.0, s_aux=torch.zeros(1))
    assert raised.value.message == "attention got `s_aux`, which it does not know"


@pytest.mark.parametrize("window", [None, 4])
def test_scores_with_a_soft_cap_have_whole_gradients(window: int | None) -> None:
    """Padding may see nothing at all behind a window and a prefix: it must reach no gradient."""
    torch.manual_seed(0)
    positions = torch.tensor([*range(12), *range(12, 14), *range(12, 15), *range(9)])
    q, k, v = (random(len(positions), heads, 16) for heads in (4, 2, 2))
    sequences = Sequences.from_positions(positions)
    for softcap, bound in ((1.5, None), (1e6, 1e-9)):
        capped = attend_each(q, k, v, sequences=sequences, scale=0.25, window=window, softcap=softcap)
        plain = attend_each(q, k, v, sequences=sequences, scale=0.25, window=window)
        off = float((capped - plain).detach().abs().max())
        assert off <= bound if bound else off > 1e-3, "a cap far beyond all scores changes nothing, a low one does"
    capped.sum().backward()
    assert all(bool(tensor.grad.isfinite().all()) for tensor in (q, k, v))


def random(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64).to(dtype).requires_grad_()


@pytest.mark.parametrize("window", [None, 8])
def test_attention_in_bf16_against_float64(window: int | None) -> None:
    """O = P V: only O is rounded, by U of P |V| at most; a tenth more for sums in float32. Under autocast, too."""
    torch.manual_seed(0)
    q, k, v = (random(71, heads, 16, dtype=torch.bfloat16) for heads in (4, 2, 2))
    settings = {"sequences": Sequences.from_positions(positions_T()), "scale": 0.25, "window": window}
    with torch.autocast("cpu", torch.bfloat16):
        attended = attend_each(q, k, v, **settings).double()
    expected, magnitude = (
        attend_each(q.double(), k.double(), each, **settings) for each in (v.double(), v.double().abs())
    )
    assert bool(((attended - expected).abs() <= 1.1 * U * magnitude).all())


@pytest.mark.parametrize("window", [None, 8])
@pytest.mark.parametrize("scores", [0, 500, 1 << 20])
def test_segments_that_are_attended_to_at_once_do_not_meet(
    monkeypatch: pytest.MonkeyPatch, scores: int, window: int | None
) -> None:
    """Each alone, some at once, or all of a kind; against every token's own sum over what it sees, in float64, and the
    gradients, too. Of the row only the segments' own tokens and those of their prefixes are read: sums of at most 20
    terms round 2^-53 each."""
    monkeypatch.setattr(attention, "_SCORES_AT_ONCE", scores)
    torch.manual_seed(0)
    segments = ((0, 9), (8, 4), (8, 1), (5, 12), (0, 20), (0, 3), (2, 7))  # (position of its first token, tokens)
    positions = torch.cat([torch.arange(first, first + length) for first, length in segments])
    q, k, v = (random(len(positions), heads, 16) for heads in (4, 2, 2))
    sequences = Sequences.from_positions(positions)
    assert {0: 7, 500: 4, 1 << 20: 2}[scores] == len(sequences.blocks.blocks)
    rows, start = [], 0
    for (_, length), prefix in zip(segments, sequences.prefixes, strict=True):
        for place in range(start, start + length):
            sees = [*prefix, *range(start, place + 1)]
            sees = sees if window is None else sees[-window:]
            keys, values = (each[sees].repeat_interleave(2, dim=1) for each in (k, v))
            weights = (torch.einsum("hd,jhd->hj", q[place], keys) * 0.25).softmax(dim=-1)
            rows.append(torch.einsum("hj,jhd->hd", weights, values))
        start += length
    expected = torch.stack(rows)
    attended = attend_each(q, k, v, sequences=sequences, scale=0.25, window=window)
    factor = torch.linspace(-1, 1, attended.numel(), dtype=torch.float64).view_as(attended)
    gradients = [torch.autograd.grad((each * factor).sum(), (q, k, v)) for each in (attended, expected)]
    assert_close(attended.detach(), expected.detach(), "attention", bound=1e-13)
    for name, one, other in zip("qkv", *gradients, strict=True):
        assert_close(one, other, name, bound=1e-13)


# --- CUDA: torch's kernel is stood in for by what its page says it does


def as_documented(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts_q: Tensor,
    starts_k: Tensor,
    longest_q: int,
    longest_k: int,
    *,
    enable_gqa: bool = False,
    **settings: object,
) -> Tensor:
    """torch.nn.attention.varlen.varlen_attn with grouped queries and a window (behind, 0), by a mask over the row."""
    assert starts_q.dtype is starts_k.dtype is torch.int32 and longest_q == longest_k == max(LENGTHS)
    behind, ahead = settings["window_size"]
    assert ahead == 0 and q.dtype is k.dtype is v.dtype
    assert enable_gqa or q.shape[1] == k.shape[1] == v.shape[1]
    places = torch.arange(len(q))
    sequence = torch.bucketize(places, starts_q[1:], right=True)
    seen = (sequence[:, None] == sequence) & (places[:, None] >= places)
    if behind >= 0:
        seen &= places[:, None] - places <= behind
    k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for each in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, k) * settings["scale"]
    return torch.einsum("hij,jhd->ihd", scores.masked_fill(~seen, -torch.inf).softmax(dim=-1), v)


def as_in_torch_2_11(*given: object, scale: float, window_size: tuple[int, int]) -> Tensor:
    return as_documented(*given, scale=scale, window_size=window_size)


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(attention, "varlen_attn", as_documented)


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("window", [None, 8])
@pytest.mark.parametrize("kernel", [as_documented, as_in_torch_2_11])
def test_cudas_attention_is_called_as_documented(
    kernel: Callable[..., Tensor], window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "varlen_attn", kernel)
    torch.manual_seed(0)
    q, k, v = (random(71, heads, 16) for heads in (4, 2, 2))
    settings = {"sequences": Sequences.from_positions(positions_T()), "scale": 0.25, "window": window}
    found, wanted = attention._attend_on_cuda(q, k, v, **settings), attend_each(q, k, v, **settings)
    assert_close(found.detach(), wanted.detach(), "output")
    attention._attend_on_cuda(q.float(), k.float(), v, **settings)  # the kernel takes one dtype


@pytest.mark.parametrize("window", [None, 8])
def test_torchs_own_varlen_attn_takes_the_call(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one of the lock, with shapes in the place of values: without CUDA nothing is computed, nor its gradient."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with FakeTensorMode():
        q, k, v = (torch.empty(71, heads, 64, device="cuda", dtype=torch.bfloat16) for heads in (4, 2, 2))
        starts_S1 = torch.empty(len(LENGTHS) + 1, device="cuda", dtype=torch.int32)
        prefixes = [range(0) for _ in LENGTHS]
        sequences = Sequences(list(LENGTHS), starts_S1, prefixes, torch.empty(71, device="cuda", dtype=torch.int64))
        found = attend(q, k, v, sequences=sequences, scale=0.25, window=window)
        assert (found.shape, found.dtype, found.device.type) == (q.shape, torch.bfloat16, "cuda")
        three = torch.empty(71, 3, 64, device="cuda", dtype=torch.bfloat16)
        with pytest.raises(ValueError, match="multiple of kv heads"):
            attend(q, three, three, sequences=sequences, scale=0.25, window=window)


@pytest.mark.parametrize(
    ("capability", "installed", "taken"),
    [
        (9, "flash_attn_interface", "FA3"),
        (10, "flash_attn.cute.interface", "FA4"),
        (10, "flash_attn", ""),  # FlashAttention 2, of which a part of that name is asked for
        (9, "", ""),
        (8, "flash_attn_interface", ""),
    ],
)
def test_a_newer_flash_attention_is_taken_where_it_is(
    capability: int,
    installed: str,
    taken: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    activated: list[str] = []
    folder = tmp_path.joinpath(*installed.split("."))
    folder.mkdir(parents=True, exist_ok=True)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(attention, "activate_flash_attention_impl", activated.append)
    attention._take_newer.__wrapped__(capability)
    said = f"attention: {taken} of {installed} in place of PyTorch's FlashAttention 2"
    assert (activated, caplog.messages) == (([taken], [said]) if taken else ([], []))
    for name in [each for each in sys.modules if each.partition(".")[0] == "flash_attn"]:
        del sys.modules[name]


def test_a_newer_flash_attention_that_is_broken_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One whose package cannot be imported, and one that has no kernels for torch."""
    (tmp_path / "flash_attn/cute").mkdir(parents=True)
    (tmp_path / "flash_attn/cute/__init__.py").write_text("import no_such_package")
    (tmp_path / "flash_attn_interface").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    attention._take_newer.__wrapped__(10)
    attention._take_newer.__wrapped__(9)
    cute, interface = caplog.messages
    assert cute == "attention: FA4 of flash_attn.cute.interface is not taken: No module named 'no_such_package'"
    assert interface.startswith("attention: FA3 of flash_attn_interface is not taken: ")
    for name in [each for each in sys.modules if each.partition(".")[0] in ("flash_attn", "flash_attn_interface")]:
        del sys.modules[name]


# --- a sequence shared by several ranks

SHARINGS = (2, 4)  # 71 tokens are padded for both, 2 KV heads are repeated for 4
SHARED = [("qwen2", {}, True), ("qwen3-moe", WINDOWS, False)]  # (family, changes, with checkpointing)


def one_rank(rank: int, meet: str) -> None:
    """A rank's process. It leaves what `shared` returns, by ranks that share and case, in `<meet>.<rank>`."""
    from torch.distributed import destroy_process_group, init_process_group, new_subgroups
    from verl.utils.ulysses import set_ulysses_sequence_parallel_group

    torch.set_num_threads(1)
    init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=max(SHARINGS))
    by_sharing = {}
    for ranks in SHARINGS:
        set_ulysses_sequence_parallel_group(new_subgroups(ranks)[0])
        by_sharing[ranks] = [shared(*case, ranks=ranks) for case in SHARED]
    torch.save(by_sharing, f"{meet}.{rank}")
    destroy_process_group()


def shared(
    family: str, changes: dict[str, object], checkpointing: bool, *, ranks: int
) -> tuple[Tensor, dict[str, Tensor]]:
    """(log-probs, gradients), as verl's FSDP engine takes them of a micro-batch; FSDP takes the mean over ranks."""
    from torch.distributed import all_reduce
    from verl.utils import ulysses

    model = model_of(family, implementation=ATTENTION_NAME, checkpointing=checkpointing, **changes)
    ids_1T = torch.cat(tokens())[None]
    ids, positions, padding = ulysses.ulysses_pad_and_slice_inputs(ids_1T, positions_T()[None], ranks)
    labels, _, _ = ulysses.ulysses_pad_and_slice_inputs(ids_1T.roll(-1, 1), None, ranks)
    logits = model(input_ids=ids, attention_mask=None, position_ids=positions, use_cache=False).logits[0]
    own_T = logits.log_softmax(dim=-1).gather(1, labels[0][:, None])[:, 0]
    log_probs_T = ulysses.gather_outputs_and_unpad(own_T, gather_dim=0, unpad_dim=0, padding_size=padding)
    weighed(log_probs_T).backward()
    for parameter in model.parameters():
        all_reduce(parameter.grad, group=ulysses.get_ulysses_sequence_parallel_group())
        parameter.grad /= ranks
    return log_probs_T.detach(), gradients(model)


def weighed(log_probs_T: Tensor) -> Tensor:
    return (log_probs_T * torch.linspace(-1, 1, len(log_probs_T), dtype=torch.float64)).sum()


def test_ranks_that_share_a_row_are_one(tmp_path: Path) -> None:
    meet, ranks = str(tmp_path / "meet"), max(SHARINGS)
    multiprocessing.get_context("forkserver").set_forkserver_preload(["appliance.trainer.attention"])  # once for all
    torch.multiprocessing.start_processes(one_rank, args=(meet,), nprocs=ranks, start_method="forkserver")
    by_rank = [torch.load(f"{meet}.{rank}") for rank in range(ranks)]
    for place, (family, changes, _) in enumerate(SHARED):
        model = model_of(family, implementation=ATTENTION_NAME, **changes)
        labels_T = torch.cat(tokens()).roll(-1)
        wanted_T = packed(model).log_softmax(dim=-1).gather(1, labels_T[:, None])[:, 0]
        weighed(wanted_T).backward()
        for sharing, results in ((sharing, found[sharing][place]) for found in by_rank for sharing in SHARINGS):
            assert_close(results[0], wanted_T.detach(), f"{family} on {sharing}: log-probs")
            for name, gradient in gradients(model).items():
                assert_close(results[1][name], gradient, f"{family} on {sharing}: {name}")
