"""Of the trainer's forward and backward: log-probs, packed attention, and attention over several ranks.

Legend: T tokens of all sequences, one after the other; H heads, G heads of keys, D their size; V words.
"""

from __future__ import annotations

import functools
import os
import socket
from collections.abc import Callable

import torch
from torch import Tensor

from appliance.record.liveness import keep_stacks
from benchmarks.accept.ground import Ground
from benchmarks.accept.kernels import BF16_U, U, seconds_of, seeded

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
GRADIENT_ROUNDINGS = 8  # of BF16, on the way to one gradient: P, dP, dS, the sum, and those of the forward again


def log_probs(ground: Ground) -> None:
    """Check log-probs by chunks, with their gradient, against float64: a sum of V exponentials in float32 is within V u
    of itself."""
    from appliance.trainer.worker import CHUNK_ROWS, LogProbs

    tokens, words = ground.size((2 * CHUNK_ROWS + 5, 151936), tiny=(CHUNK_ROWS + 5, 1003))
    x_TV = (4 * torch.randn(tokens, words, generator=seeded(1))).to(torch.bfloat16)
    label_T = torch.randint(0, words, (tokens,), generator=seeded(2))
    grad_T = torch.randn(tokens, generator=seeded(3))
    there_TV = x_TV.to(ground.device, copy=True).requires_grad_()
    base = 0 if ground.rehearsal else torch.cuda.memory_allocated()
    if not ground.rehearsal:
        torch.cuda.reset_peak_memory_stats()
    label_T1 = label_T[:, None].to(ground.device)
    found_T = LogProbs.apply(there_TV, label_T1)[:, 0]
    found_T.backward(grad_T.to(ground.device))
    peak = 0 if ground.rehearsal else torch.cuda.max_memory_allocated() - base
    few = slice(0, None, max(1, tokens // 200))  # float64 of all would take minutes
    wide_RV = x_TV[few].double()
    wanted_R = (wide_RV.log_softmax(dim=-1)).gather(1, label_T[few, None])[:, 0]
    error = float((found_T.detach()[few].double().cpu() - wanted_R).abs().max())
    bound = 16 * U * float(wanted_R.abs().max() + wide_RV.abs().max()) + words * U
    ground.hold(error <= bound, f"a log-prob is {error:.3g} from float64's, {bound:.3g} is allowed")
    onehot_RV = torch.zeros_like(wide_RV).scatter_(1, label_T[few, None], 1.0)
    wanted_RV = grad_T[few, None].double() * (onehot_RV - wide_RV.softmax(dim=-1))
    summed_RV = words * U * grad_T[few, None].double().abs() * wide_RV.softmax(dim=-1)
    excess_RV = (there_TV.grad[few].double().cpu() - wanted_RV).abs() - (2 * BF16_U * wanted_RV.abs() + summed_RV)
    ground.hold(float(excess_RV.max()) <= 0, f"a gradient is {float(excess_RV.max()):.3g} beyond BF16's rounding")
    if not ground.rehearsal:
        gradient, chunk = x_TV.nbytes, 4 * CHUNK_ROWS * words
        ground.figure("memory beside the logits", peak / 2**20, "MiB")
        room = gradient + 4 * chunk
        ground.hold(
            peak <= room, f"{peak >> 20} MiB beside the logits: their gradient and four chunks are {room >> 20}"
        )
    ground.figure("forward", 1e3 * seconds_of(ground, lambda: LogProbs.apply(there_TV, label_T1)), "ms")


def packed(ground: Ground) -> None:
    """The trainer's attention of packed sequences against each sequence by itself in float64, forward and backward.

    In norm: an answer sums values (BF16, exact) by P, whose rounding to BF16 is one of 2^-8, as is that of the sum; a
    gradient goes through GRADIENT_ROUNDINGS of them. Twice as many are allowed for an answer.
    """
    lengths = ground.size((1, 17, 512, 63, 1024, 128, 300), tiny=(1, 17, 5, 40))
    if ground.rehearsal:
        ground.stand_in("torch's varlen_attn: its scaled_dot_product_attention, sequence by sequence")
    near = ground.size(256, tiny=8)
    sizes = ground.size(
        ((14, 2, 64, None), (28, 4, 128, None), (40, 8, 128, None), (28, 4, 128, near)),
        tiny=((4, 2, 16, None), (6, 6, 32, None), (4, 2, 16, near)),
    )
    cases = {
        f"{heads} heads of {size}, {groups} of keys{f', window {window}' if window else ''}": (
            heads,
            groups,
            size,
            window,
        )
        for heads, groups, size, window in sizes
    }
    ground.run_parts(cases, lambda name: _packed(ground, name, *cases[name], lengths=lengths))


def _packed(
    ground: Ground, name: str, heads: int, groups: int, size: int, window: int | None, *, lengths: tuple[int, ...]
) -> None:
    attend = functools.partial(_in_a_row, positions_1T=_positions(lengths, ground.device), window=window)
    alone = functools.partial(_alone, lengths=lengths, window=window)
    shapes = [(sum(lengths), count, size) for count in (heads, groups, groups)]
    inputs = [
        torch.randn(shape, generator=seeded(seed)).to(ground.device, torch.bfloat16).requires_grad_()
        for seed, shape in enumerate(shapes)
    ]
    grad_THD = torch.randn(shapes[0], generator=seeded(4)).to(ground.device, torch.bfloat16)
    results = _with_gradients(attend, inputs, grad_THD)
    wide = [each.detach().double().requires_grad_() for each in inputs]
    exact_results = _with_gradients(alone, wide, grad_THD.double())
    for quantity, computed, exact in zip(("answers", "queries", "keys", "values"), results, exact_results, strict=True):
        error = float((computed.double() - exact).norm() / exact.norm())
        bound = (4 if quantity == "answers" else GRADIENT_ROUNDINGS) * BF16_U
        ground.hold(error <= bound, f"{quantity}: {error:.3g} from float64's, {bound:.3g} is allowed")
    seconds = seconds_of(ground, functools.partial(_with_gradients, attend, inputs, grad_THD))
    ground.figure(f"forward and backward, {name}, {sum(lengths)} tokens", 1e3 * seconds, "ms")


def _with_gradients(attend: Attention, given: list[Tensor], grad_THD: Tensor) -> list[Tensor]:
    out_THD = attend(*given)
    return [out_THD.detach(), *torch.autograd.grad(out_THD, given, grad_THD)]


def _alone(q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, *, lengths: tuple[int, ...], window: int | None) -> Tensor:
    """Each sequence by itself, causal, in plain arithmetic. window: tokens that one sees at most; None: all before."""
    repeat = q_THD.shape[1] // k_TGD.shape[1]
    parts = []
    for q, k, v in zip(*(each.split(list(lengths)) for each in (q_THD, k_TGD, v_TGD)), strict=True):
        k, v = (each.repeat_interleave(repeat, dim=1) for each in (k, v))
        score_HTS = torch.einsum("thd,shd->hts", q, k) / q.shape[-1] ** 0.5
        ones_TS = torch.ones(len(q), len(q), device=q.device)
        unseen_TS = (ones_TS.triu(1) + (0 if window is None else ones_TS.tril(-window))).bool()
        parts.append(torch.einsum("hts,shd->thd", score_HTS.masked_fill(unseen_TS, -torch.inf).softmax(-1), v))
    return torch.cat(parts)


def _in_a_row(
    q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, *, positions_1T: Tensor, window: int | None = None
) -> Tensor:
    """Attend as the trainer's layers do; with several ranks each has a part of the tokens and of positions_1T."""
    from appliance.trainer.attention import attend_row

    heads_first = [each.transpose(0, 1)[None] for each in (q_THD, k_TGD, v_TGD)]
    settings = {"scaling": q_THD.shape[-1] ** -0.5, "sliding_window": window}
    return attend_row(torch.nn.Module(), *heads_first, None, position_ids=positions_1T, **settings)[0][0]


def _positions(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.cat([torch.arange(length, device=device) for length in lengths])[None]


def sequence_parallel(ground: Ground, *, ranks: int) -> None:
    """Each rank has a part of the tokens; before attention they change to all tokens of some heads, and back. What
    a head computes is the same, but for the order in which CUDA's backward adds: one rounding to BF16 is allowed, in
    norm.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    if ground.rehearsal:
        ground.stand_in("NCCL: gloo")
    errors = ground.folder / "errors"
    errors.mkdir()
    arguments = (ranks, port, ground.rehearsal, str(errors))
    torch.multiprocessing.spawn(_rank, args=arguments, nprocs=ranks, join=True)
    said = [file.read_text() for file in sorted(errors.iterdir())]
    ground.hold(len(said) == ranks, f"{ranks - len(said)} of {ranks} ranks said nothing")
    for rank, problem in enumerate(said):
        ground.hold(not problem, f"rank {rank}: {problem}")


def _rank(rank: int, ranks: int, port: int, is_cpu: bool, errors: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(ranks))
    import torch.distributed as dist

    keep_stacks(f"rank{rank}")
    device = torch.device("cpu" if is_cpu else f"cuda:{rank}")
    if not is_cpu:
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if is_cpu else "nccl", rank=rank, world_size=ranks)
    try:
        problem = _difference(rank, ranks, device=device, is_cpu=is_cpu)
    finally:
        dist.destroy_process_group()
    with open(os.path.join(errors, str(rank)), "w") as file:
        file.write(problem)


def _difference(rank: int, ranks: int, *, device: torch.device, is_cpu: bool) -> str:
    import torch.distributed as dist
    from verl.utils import ulysses

    lengths = (3, 9, 4) if is_cpu else (300, 513, 211)
    tokens, heads, size = sum(lengths), 2 * ranks, 32 if is_cpu else 128
    whole = [
        torch.randn(tokens, heads, size, generator=seeded(seed)).to(device, torch.bfloat16).requires_grad_()
        for seed in range(3)
    ]
    grad_THD = torch.randn(tokens, heads, size, generator=seeded(4)).to(device, torch.bfloat16)
    positions_1T = _positions(lengths, device)
    expected = _with_gradients(functools.partial(_in_a_row, positions_1T=positions_1T), whole, grad_THD)
    ulysses.set_ulysses_sequence_parallel_group(dist.group.WORLD)
    attend = functools.partial(_in_a_row, positions_1T=positions_1T.chunk(ranks, dim=1)[rank])
    rank_inputs = [each.detach().chunk(ranks)[rank].clone().requires_grad_() for each in whole]
    results = _with_gradients(attend, rank_inputs, grad_THD.chunk(ranks)[rank])
    names = ("answers", "gradients of queries", "gradients of keys", "gradients of values")
    parts = [exact.chunk(ranks)[rank].double() for exact in expected]
    errors = [float((one.double() - part).norm() / part.norm()) for one, part in zip(results, parts, strict=True)]
    differ = [f"{name} {error:.3g}" for name, error in zip(names, errors, strict=True) if not error <= BF16_U]
    return f"{', '.join(differ)} from those of one rank, {BF16_U:.3g} is allowed" if differ else ""
