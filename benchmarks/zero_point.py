"""What a zero point per token gains and costs in INT8 rollouts on a CPU:
`python -m benchmarks.zero_point gemm [-o FILE]`, `python -m benchmarks.zero_point mismatch MODEL PROBLEMS [-o FILE]`.

Symmetric is what the engine does: a token's codes are round(x / s) with s = max |x| / 127. Asymmetric: round(x / s) + z
with s = (max x - min x) / 255 and a whole number z, the code of 0. vLLM's quantiser makes both. The product is

    y_mn = s_m t_n (sum_k c_mk q_nk  -  z_m sum_k q_nk)

and the second sum is known when a weight is packed. oneDNN takes s_m, z_m and t_n sum_k q_nk. The packed kernel `sgl`
quantises inside, symmetrically; the operator that takes codes is not registered by vLLM 0.28. So asymmetric is oneDNN
on every host.

`gemm`: the kernel that a rollout takes (quant/cpu_gemm.py) against oneDNN, symmetric and asymmetric. `mismatch`: an
engine of each kind on a smoothed copy of MODEL (a folder with a Llama), in turns, sampling answers to PROBLEMS (a JSON
line with a `question` for each); k3 of what each sampled against the BF16 forward, and tokens a second. Then, by the
forward of benchmarks/rotation.py on answers of the BF16 model, the KL over the whole vocabulary where only some
matrices are asymmetric.

Legend: M tokens, N output and K input channels, H width.
"""

from __future__ import annotations

import argparse
import datetime
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import combinations
from pathlib import Path
from shutil import copytree
from statistics import median
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from appliance import console
from appliance.bench.job import NAMED_SHAPES, Shapes
from appliance.quant.codec_int8 import quantise_int8
from appliance.quant.cpu_gemm import OneDnnGemm, kernel_of, load_kernels
from appliance.terms.environment import IN_ONE_PROCESS
from appliance.terms.schemes import Scheme
from appliance.terms.settings import LOAD_FORMAT, Quantisation
from benchmarks import rotation
from benchmarks.demo import processor
from benchmarks.gemm import weights_of

SHAPES = {
    "smollm2-135m": Shapes(hidden=576, intermediate=1536, heads=9, kv_heads=3, layers=30),
    "qwen2.5-7b": NAMED_SHAPES["qwen2.5-7b"],
}
TOKENS = (1, 16, 64, 256)
PACKING = 0  # in place of a number of tokens
KINDS = ("symmetric", "asymmetric")
SAMPLES = 2  # of a prompt
WARM_UP = 12  # prompts of the turn that does not count
AT_ONCE = 72  # sequences of an engine, as in recipes/smollm2-int8.yaml
ANSWER_TOKENS = 16


class AsymmetricGemm(OneDnnGemm):
    """As OneDnnGemm, with a zero point for each token of the activations."""

    name = "onednn, asymmetric"

    def __init__(self, codes_NK: Tensor, *, scale_N1: Tensor, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__(codes_NK, scale_N1=scale_N1, dtype=dtype)
        sum_N1 = codes_NK.sum(dim=1, keepdim=True, dtype=torch.int32)
        self._correction_1N = (sum_N1.float() * scale_N1).t().contiguous()

    def __call__(self, x_MK: Tensor, bias_N: Tensor | None) -> Tensor:
        codes_MK = torch.empty_like(x_MK, dtype=torch.int8)
        scale_M1 = torch.empty((len(x_MK), 1), dtype=torch.float32)
        zero_M1 = torch.empty((len(x_MK), 1), dtype=torch.int32)
        torch.ops._C.dynamic_scaled_int8_quant(codes_MK, x_MK.contiguous(), scale_M1, zero_M1)
        y_MN = torch.empty((len(x_MK), self._rows), dtype=x_MK.dtype)
        operands = (codes_MK, scale_M1, zero_M1, self._correction_1N, bias_N)
        torch.ops._C.onednn_scaled_mm(y_MN, *operands, self._handle)
        return y_MN


def gemm_table(*, turns: int) -> list[str]:
    """Milliseconds of the four GEMMs of a decoder layer together, quantising the activations included; the kernels
    take turns, and a ratio is the median of those of single turns."""
    lines = [
        "| model | tokens | taken today, ms | oneDNN, ms | asymmetric, ms | asymmetric / taken | asymmetric / oneDNN |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for model, shapes in SHAPES.items():
        times = _layer_times(shapes, turns=turns)
        for count in (PACKING, *TOKENS):
            taken, symmetric, asymmetric = (times[count, kind] for kind in ("taken", "onednn", "asymmetric"))
            medians = " | ".join(f"{1e3 * median(seconds):.2f}" for seconds in (taken, symmetric, asymmetric))
            ratios = " | ".join(f"{_ratio(asymmetric, base):.2f}" for base in (taken, symmetric))
            lines.append(f"| {model} | {count or 'packing'} | {medians} | {ratios} |")
    return lines


def _ratio(seconds: Sequence[float], base: Sequence[float]) -> float:
    return median(one / other for one, other in zip(seconds, base, strict=True))


def _layer_times(shapes: Shapes, *, turns: int) -> dict[tuple[int, str], list[float]]:
    """Seconds by (tokens, kind) and turn, summed over the layer's matrices."""
    times = {(count, kind): [0.0] * turns for count in (PACKING, *TOKENS) for kind in ("taken", "onednn", "asymmetric")}
    for rows, columns in weights_of(shapes).values():
        quantised = quantise_int8(torch.randn(rows, columns).bfloat16())
        kinds = {"taken": kernel_of(rows, columns), "onednn": OneDnnGemm, "asymmetric": AsymmetricGemm}
        packers = {
            kind: (lambda pack=pack, q=quantised: pack(q.codes_NK, scale_N1=q.scale)) for kind, pack in kinds.items()
        }
        gemms = {kind: pack() for kind, pack in packers.items()}
        for count in (PACKING, *TOKENS):
            x_MK = torch.randn(count, columns).bfloat16()
            calls: dict[str, Callable[[], object]] = {
                kind: packers[kind] if count == PACKING else (lambda gemm=gemms[kind], x=x_MK: gemm(x, None))
                for kind in kinds
            }
            for turn in range(-1, turns):  # the first one does not count
                for kind, call in calls.items():
                    started = time.perf_counter()
                    call()
                    if turn >= 0:
                        times[count, kind][turn] += time.perf_counter() - started
    return times


def save_as_checkpoint(model: rotation.Llama, folder: Path) -> None:
    """Overwrites the weights of the checkpoint in `folder`, of the same model, in BF16."""
    weights = {"model.embed_tokens.weight": model.embedding_VH, "model.norm.weight": model.final_norm_H}
    for number, layer in enumerate(model.layers):
        prefix = f"model.layers.{number}."
        weights |= {f"{prefix}{norm}_layernorm.weight": layer[norm] for norm in rotation.READ_BY}
        weights |= {f"{prefix}{place}.{name}_proj.weight": layer[name] for name, place in rotation.PLACES.items()}
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    tensors = {name: tensor.bfloat16().contiguous() for name, tensor in weights.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def start_engine(folder: Path, *, kind: str) -> Any:
    """An INT8 engine in this process. kind: of its activations, one of KINDS."""
    from vllm import LLM

    from appliance.engine import int8

    symmetric = int8.packed
    if kind == "asymmetric":
        int8.packed = AsymmetricGemm  # all that makes a layer's GEMM
    try:
        return LLM(
            str(folder),
            dtype="bfloat16",
            load_format=LOAD_FORMAT,
            enforce_eager=True,
            max_model_len=128,
            max_num_seqs=AT_ONCE,
            kv_cache_memory_bytes=512 << 20,
            logprobs_mode="processed_logprobs",
            enable_prefix_caching=False,
            **Quantisation(scheme=Scheme.INT8).engine_arguments(),
        )
    finally:
        int8.packed = symmetric


def k3_of(rollout_M: Tensor, trainer_M: Tensor) -> Tensor:
    """[M] float64, >= 0: exp(d) - 1 - d of d = log p_trainer - log p_rollout of the sampled tokens, nats."""
    difference_M = trainer_M.double() - rollout_M.double()
    return torch.expm1(difference_M) - difference_M


def sampled(engine: Any, prompts: Sequence[list[int]], *, seed: int) -> tuple[list[rotation.Answer], Tensor, float]:
    """(answers, the engine's log-prob of each of their tokens in the order of `rotation.batches_of`, seconds)."""
    from vllm import SamplingParams

    params = SamplingParams(n=SAMPLES, temperature=1.0, max_tokens=ANSWER_TOKENS, logprobs=0, seed=seed)
    started = time.perf_counter()
    outputs = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    seconds = time.perf_counter() - started
    rows = [
        (
            (prompt, list(answer.token_ids)),
            [by_token[token].logprob for token, by_token in zip(answer.token_ids, answer.logprobs, strict=True)],
        )
        for prompt, output in zip(prompts, outputs, strict=True)
        for answer in output.outputs
    ]
    rows.sort(key=lambda row: len(row[0][0]) + len(row[0][1]))
    log_probs_M = torch.tensor([log_prob for _, log_probs in rows for log_prob in log_probs], dtype=torch.float64)
    return [answer for answer, _ in rows], log_probs_M, seconds


def log_probs_of(forward: rotation.Forward, answers: Sequence[rotation.Answer], *, prefix: list[int]) -> Tensor:
    """[M] of the answers' tokens, by a BF16 forward."""
    batches = rotation.batches_of(answers, skip=len(prefix))
    states_MH = forward.states(batches, prefix=prefix)
    next_M1 = torch.cat([batch.next_M for batch in batches])[:, None]
    head_HV = forward.model.head_VH.to(states_MH.dtype).t()
    parts = zip(states_MH.split(rotation.POSITIONS), next_M1.split(rotation.POSITIONS), strict=True)
    return torch.cat([(part @ head_HV).float().log_softmax(-1).gather(1, chosen)[:, 0] for part, chosen in parts])


def engine_table(
    folder: Path, model: rotation.Llama, smoothed: rotation.Llama, prompts: list[list[int]], *, turns: int
) -> list[str]:
    """Two engines in turns, each on its own samples."""
    prefix = rotation.common_prefix(prompts)
    k3: dict[str, list[Tensor]] = {kind: [] for kind in KINDS}
    speed: dict[str, list[float]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory() as temporary:
        copy = copytree(folder, Path(temporary) / "model")
        save_as_checkpoint(smoothed, copy)
        engines = {kind: start_engine(copy, kind=kind) for kind in KINDS}
    forward = rotation.Forward(model, "bf16")
    for turn in range(-1, turns):
        for kind, engine in engines.items():
            answers, rollout_M, seconds = sampled(engine, prompts if turn >= 0 else prompts[:WARM_UP], seed=turn + 1)
            if turn >= 0:
                k3[kind].append(k3_of(rollout_M, log_probs_of(forward, answers, prefix=prefix)))
                speed[kind].append(len(rollout_M) / seconds)
    lines = ["| engine | k3 | k3 by turn | sampled tokens | tokens/s | to symmetric |", "|" + " --- |" * 6]
    for kind in KINDS:
        k3_M = torch.cat(k3[kind])
        error = float(k3_M.std()) / len(k3_M) ** 0.5
        by_turn = ", ".join(f"{float(one_M.mean()):.4f}" for one_M in k3[kind])
        ratios = sorted(one / base for one, base in zip(speed[kind], speed["symmetric"], strict=True))
        ratio = f"{median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f})"
        mean = f"{float(k3_M.mean()):.4f} ± {error:.4f}"
        lines.append(f"| {kind} | {mean} | {by_turn} | {len(k3_M)} | {median(speed[kind]):.0f} | {ratio} |")
    return lines


def matrix_table(table: rotation.Table, smoothed: rotation.Llama) -> list[str]:
    """The KL where these fused matrices have asymmetric activations and the others symmetric ones."""
    fused = tuple(rotation.FUSED)
    for names in [(), *((name,) for name in fused), *combinations(fused, 3), fused]:
        ways = {name: "asymmetric" if name in names else "int8" for name in fused}
        table.add(f"asymmetric: {', '.join(names) or 'none'}", smoothed, ways)
    return table.lines


def mismatch_tables(folder: Path, problems: Path, *, turns: int) -> list[str]:
    rotation.ANSWER_TOKENS = ANSWER_TOKENS
    pairs = rotation.answers(folder, problems)
    prompts = [prompt for prompt, _ in pairs]
    prefix = rotation.common_prefix(prompts)
    quarter = pairs[:: rotation.CALIBRATES]
    others = [pair for number, pair in enumerate(pairs) if number % rotation.CALIBRATES]
    calibration, measured = (rotation.batches_of(part, skip=len(prefix)) for part in (quarter, others))
    model = rotation.Llama.load(folder)
    ranges = rotation.ranges_of(model, calibration, prefix=prefix)
    smoothed = rotation.smooth_values(rotation.smooth_down(rotation.smooth_norms(model, ranges), ranges), ranges)
    table = rotation.Table(model, measured, prefix=prefix)
    matrices = matrix_table(table, smoothed)
    return [*engine_table(folder, model, smoothed, prompts, turns=turns), "", *matrices]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    gemm, mismatch = commands.add_parser("gemm"), commands.add_parser("mismatch")
    mismatch.add_argument("model", type=Path, help="folder with a Llama")
    mismatch.add_argument("problems", type=Path, help="file with a JSON line for each question")
    for command in (gemm, mismatch):
        command.add_argument("--turns", type=int, default=15 if command is gemm else 4)
        command.add_argument("--threads", type=int, default=2)
        command.add_argument("-o", "--output", type=Path, help="file for the tables")
    arguments = parser.parse_args()
    os.environ |= {**IN_ONE_PROCESS, "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_PLUGINS": "flashrl_appliance"}
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    load_kernels()
    if arguments.command == "gemm":
        lines = gemm_table(turns=arguments.turns)
    else:
        lines = mismatch_tables(arguments.model, arguments.problems, turns=arguments.turns)
    head = f"Made by `python -m benchmarks.zero_point {arguments.command}`. {datetime.date.today()}: {processor()}, "
    page = f"{head}{arguments.threads} threads.\n\n" + "\n".join(lines) + "\n"
    console.out(page)
    if arguments.output is not None:
        arguments.output.write_text(page)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
