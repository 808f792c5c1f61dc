"""How near INT8 rollouts of a Llama or Qwen2 come to its trainer by smoothing, rotation and asymmetric activations:
`python -m benchmarks.rotation MODEL PROBLEMS [--samples FILE] [-o docs/results]`.

MODEL is a folder with a dense Llama or Qwen2. PROBLEMS has a JSON line with a `question` for each problem; the model
answers at temperature 1. One answer in four calibrates, the others are measured. The forward has the formats of the
engine: a BF16 residual stream, vLLM's own norms and activations, its INT8 kernel, a head in BF16. The figure is the
mean KL(rollout || trainer) over the whole vocabulary at each token of the answers, which is what k3 estimates and far
less noisy; k3 of the sampled tokens is beside it.

Rotated: with R orthogonal and g a norm's weight, the residual stream h becomes h R. A norm without weights commutes
with R, so what reads the stream becomes W diag(g) R, what writes to it R^T W, embedding and head likewise. A head's
values v become v P, so rows of v_proj are P^T V and columns of o_proj O P. Qwen2's biases of q, k and v are what they
were, but for v's, which is a row of v_proj.

Asymmetric: a token's codes are round(x / s) + z with s = (max - min) / 255, and z is subtracted after the product, as
vLLM's kernels for a CPU (oneDNN) and for a GPU (CUTLASS) do it.

Legend: M tokens, T of one sequence, B sequences, N output and K input channels, H width, V words.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention, silu
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from appliance import console
from appliance.quant.codec_int8 import dequantise_int8, quantise_int8
from appliance.quant.cpu_gemm import OneDnnGemm, load_kernels
from appliance.quant.smoothing_factors import by_rule, refine
from benchmarks.demo import processor

PROBLEMS, ANSWER_TOKENS = 112, 40
CALIBRATES = 4  # one answer in so many
AT_ONCE, POSITIONS = 24, 256  # sequences of a forward, tokens whose logits are compared at a time
BLOCK = 64  # of Hadamard
FUSED = {"qkv": ("q", "k", "v"), "o": ("o",), "gate_up": ("gate", "up"), "down": ("down",)}
PLACES = {**dict.fromkeys("qkvo", "self_attn"), **dict.fromkeys(("gate", "up", "down"), "mlp")}
BIASES = {"q": "q_bias", "k": "k_bias", "v": "v_bias"}  # of what reads, by the matrix
READ_BY = {"input": ("q", "k", "v"), "post_attention": ("gate", "up")}  # norms, and what they feed


@dataclass(frozen=True)
class Llama:
    """Weights in float32; in the engine they are rounded to BF16 first."""

    config: object
    embedding_VH: Tensor
    head_VH: Tensor
    final_norm_H: Tensor
    layers: list[dict[str, Tensor]]
    """Norms by the names of READ_BY, matrices [N, K] by those of PLACES, biases [N] by those of BIASES."""

    @classmethod
    def load(cls, folder: Path) -> Llama:
        config = AutoConfig.from_pretrained(folder)
        weights = {
            name: tensor.float() for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()
        }
        layers = []
        for number in range(config.num_hidden_layers):
            prefix = f"model.layers.{number}."
            layer = {norm: weights[f"{prefix}{norm}_layernorm.weight"] for norm in READ_BY}
            layer |= {name: weights[f"{prefix}{at}.{name}_proj.weight"] for name, at in PLACES.items()}
            for name, bias in BIASES.items():
                layer[bias] = weights.get(f"{prefix}self_attn.{name}_proj.bias", torch.zeros(len(layer[name])))
            layers.append(layer)
        embedding_VH = weights["model.embed_tokens.weight"]
        return cls(
            config, embedding_VH, weights.get("lm_head.weight", embedding_VH), weights["model.norm.weight"], layers
        )

    @property
    def heads(self) -> tuple[int, int, int]:
        """Their number, that of the KV heads, and the width of one."""
        heads = self.config.num_attention_heads
        return heads, self.config.num_key_value_heads, self.config.hidden_size // heads

    def with_layers(self, change: Callable[[int, dict[str, Tensor]], dict[str, Tensor]]) -> Llama:
        return replace(self, layers=[layer | change(number, layer) for number, layer in enumerate(self.layers)])


Ranges = dict[tuple[int, str], Tensor]  # [K], the largest |x| at the input of a layer's fused matrix
Inputs = dict[tuple[int, str], list[Tensor]]  # [M, K] of each batch, there


def smooth_norms(model: Llama, ranges: Ranges, inputs: Inputs | None = None) -> Llama:
    """Smooth between a norm and what it feeds: by the rule, and with inputs, which then are of the same model, as the
    profile does it for INT8."""

    def change(number: int, layer: dict[str, Tensor]) -> dict[str, Tensor]:
        changed = {}
        for norm, fused in zip(READ_BY, ("qkv", "gate_up"), strict=True):
            weight_K = torch.stack([layer[name].abs().amax(0) for name in READ_BY[norm]]).amax(0)
            scale_K = by_rule(ranges[number, fused], weight_K=weight_K, strength=0.5)
            if inputs is not None:
                weight_NK = torch.cat([layer[name] for name in READ_BY[norm]])
                scale_K = refine(scale_K, x_MK=torch.cat(inputs[number, fused]), weight_NK=weight_NK)
            changed |= {norm: layer[norm] / scale_K} | {name: layer[name] * scale_K for name in READ_BY[norm]}
        return changed

    return model.with_layers(change)


def smooth_down(model: Llama, ranges: Ranges, inputs: Inputs | None = None) -> Llama:
    """Smooth by the rule; with inputs, of a model whose `up_proj` is as this one's, refined."""

    def change(number: int, layer: dict[str, Tensor]) -> dict[str, Tensor]:
        scale_K = by_rule(ranges[number, "down"], weight_K=layer["down"].abs().amax(0), strength=0.5)
        if inputs is not None:
            scale_K = refine(scale_K, x_MK=torch.cat(inputs[number, "down"]), weight_NK=layer["down"])
        return {"down": layer["down"] * scale_K, "up": layer["up"] / scale_K[:, None]}

    return model.with_layers(change)


def smooth_values(model: Llama, ranges: Ranges) -> Llama:
    """o_proj through v_proj: the heads that read one KV head share its factors."""
    heads, kv_heads, width = model.heads
    shape = (kv_heads, heads // kv_heads, width)

    def change(number: int, layer: dict[str, Tensor]) -> dict[str, Tensor]:
        range_K, weight_K = (
            each.view(shape).amax(1).flatten() for each in (ranges[number, "o"], layer["o"].abs().amax(0))
        )
        scale_K = by_rule(range_K, weight_K=weight_K, strength=0.5)
        wide_K = scale_K.view(kv_heads, 1, width).expand(shape).flatten()
        narrow = {"v": layer["v"] / scale_K[:, None], "v_bias": layer["v_bias"] / scale_K}
        return narrow | {"o": layer["o"] * wide_K}

    return model.with_layers(change)


def hadamard(size: int) -> Tensor:
    """[size, size] float64, orthogonal. size: a power of two."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / math.sqrt(size)


def signs(count: int, *, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2, (count,), generator=generator).double() * 2 - 1


def rotation(kind: str, *, width: int, seed: int) -> Tensor:
    """[width, width] float64. kind: `blocks` of Hadamard with random signs, or `full`: any orthogonal matrix."""
    if kind == "full":
        generator = torch.Generator().manual_seed(seed)
        return torch.linalg.qr(torch.randn(width, width, generator=generator, dtype=torch.float64))[0]
    return signs(width, seed=seed)[:, None] * torch.block_diag(*[hadamard(BLOCK)] * (width // BLOCK))


def rotate_stream(model: Llama, kind: str, *, seed: int) -> Llama:
    turn_HH = rotation(kind, width=len(model.final_norm_H), seed=seed)

    def change(_: int, layer: dict[str, Tensor]) -> dict[str, Tensor]:
        changed = {norm: torch.ones_like(layer[norm]) for norm in READ_BY}
        for norm, names in READ_BY.items():
            changed |= {name: ((layer[name] * layer[norm]).double() @ turn_HH).float() for name in names}
        return changed | {name: (turn_HH.t() @ layer[name].double()).float() for name in ("o", "down")}

    head_VH = ((model.head_VH * model.final_norm_H).double() @ turn_HH).float()
    embedding_VH = (model.embedding_VH.double() @ turn_HH).float()
    norm_H = torch.ones_like(model.final_norm_H)
    turned = replace(model, embedding_VH=embedding_VH, head_VH=head_VH, final_norm_H=norm_H)
    return turned.with_layers(change)


def rotate_values(model: Llama, *, seed: int) -> Llama:
    heads, kv_heads, width = model.heads

    def change(number: int, layer: dict[str, Tensor]) -> dict[str, Tensor]:
        turn = signs(width, seed=1000 * seed + number)[:, None] * hadamard(width)
        values, reading = layer["v"].double().view(kv_heads, width, -1), layer["o"].double().view(-1, heads, width)
        turned = {"v": (turn.t() @ values).flatten(0, 1).float(), "o": (reading @ turn).flatten(1).float()}
        return turned | {"v_bias": (layer["v_bias"].double().view(kv_heads, width) @ turn).flatten().float()}

    return model.with_layers(change)


class Gemm:
    """A fused matrix and how it is multiplied: exactly (`float32`, `bf16`), by vLLM's INT8 kernel (`int8`, and with
    `asymmetric` activations), or with its codes and all else in float32 (`codes`)."""

    def __init__(self, weight_NK: Tensor, how: str, *, bias_N: Tensor | None = None) -> None:
        self._how = how
        self._bias_N = None if bias_N is None else bias_N.to(formats_of(how))
        self._weight_NK = weight_NK = weight_NK.to(formats_of(how))
        if how in ("float32", "bf16"):
            return
        quantised = quantise_int8(weight_NK)
        self._scale_N1 = quantised.scale.contiguous()
        if how == "codes":
            self._weight_NK = dequantise_int8(quantised)
        elif how == "int8":
            self._gemm = OneDnnGemm(quantised.codes_NK, scale_N1=self._scale_N1)
        else:
            self._sums_1N = (quantised.codes_NK.float().sum(1) * self._scale_N1[:, 0])[None].contiguous()
            create = torch.ops._C.create_onednn_scaled_mm_handler
            handle = create(quantised.codes_NK.t(), self._scale_N1, torch.bfloat16, True, True, 32)
            self._handle = torch.tensor(handle, dtype=torch.int64)

    def __call__(self, x_MK: Tensor) -> Tensor:
        if self._how == "int8":
            return self._gemm(x_MK, self._bias_N)
        if self._how == "asymmetric":
            codes_MK, scale_M1 = torch.empty_like(x_MK, dtype=torch.int8), torch.empty(len(x_MK), 1)
            zero_M1 = torch.empty_like(scale_M1, dtype=torch.int32)
            torch.ops._C.dynamic_scaled_int8_quant(codes_MK, x_MK.contiguous(), scale_M1, zero_M1)
            y_MN = x_MK.new_empty(len(x_MK), len(self._scale_N1))
            operands = (codes_MK, scale_M1, zero_M1, self._sums_1N, self._bias_N)
            torch.ops._C.onednn_scaled_mm(y_MN, *operands, self._handle)
            return y_MN
        x_MK = dequantise_int8(quantise_int8(x_MK)) if self._how == "codes" else x_MK
        return linear(x_MK, self._weight_NK, self._bias_N)


def formats_of(how: str) -> torch.dtype:
    """Return the formats of weights, residual stream and everything else."""
    return torch.float32 if how in ("float32", "codes") else torch.bfloat16


class Forward:
    """A model as one engine has it."""

    def __init__(
        self,
        model: Llama,
        how: str | dict[str, str],
        *,
        ranges: Ranges | None = None,
        inputs: Inputs | None = None,
    ) -> None:
        """how: as Gemm's, of all fused matrices or by each."""
        ways = dict.fromkeys(FUSED, how) if isinstance(how, str) else how
        self.model, self._ranges, self._inputs = model, ranges, inputs
        self.dtype = formats_of(ways["qkv"])
        self._embedding_VH = model.embedding_VH.to(self.dtype)
        self._gemms = [
            {
                fused: Gemm(
                    torch.cat([layer[part] for part in parts]),
                    ways[fused],
                    bias_N=torch.cat([layer[bias] for bias in BIASES.values()]) if fused == "qkv" else None,
                )
                for fused, parts in FUSED.items()
            }
            for layer in model.layers
        ]
        self._norms = [{norm: layer[norm].to(self.dtype) for norm in READ_BY} for layer in model.layers]
        width = model.heads[2]
        theta = model.config.rope_parameters["rope_theta"]
        self._turns_D = theta ** -(torch.arange(0, width, 2).float() / width)
        self._prefix: list[tuple[Tensor, Tensor]] = []

    def states(self, batches: Sequence[Batch], *, prefix: Sequence[int]) -> Tensor:
        """[M, H] before the head, of the answers' tokens. prefix: with which all sequences begin, computed once."""
        self._prefix = []
        with torch.no_grad():
            if prefix:
                self._prefix = self._run(torch.tensor([prefix]), torch.ones(1, len(prefix), dtype=torch.bool))[1]
            return torch.cat([self._run(batch.tokens_BT, batch.valid_BT)[0][batch.answer_BT] for batch in batches])

    def _run(self, tokens_BT: Tensor, valid_BT: Tensor) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        (count, length), before = tokens_BT.shape, self._prefix[0][0].shape[2] if self._prefix else 0
        heads, kv_heads, width = self.model.heads
        angle_TD = torch.arange(before, before + length).float()[:, None] * self._turns_D
        turn = tuple(each.to(self.dtype).float() for each in (angle_TD.cos(), angle_TD.sin()))
        mask = torch.ones(length, before + length, dtype=torch.bool).tril(before)
        x_MH, stream_MH, cache = self._embedding_VH[tokens_BT.flatten()], None, []
        for number, gemms in enumerate(self._gemms):

            def multiply(fused: str, x_MK: Tensor, number: int = number, gemms: dict[str, Gemm] = gemms) -> Tensor:
                if self._ranges is not None:
                    range_K = x_MK[valid_BT.flatten()].abs().amax(0).float()
                    known_K = self._ranges.get((number, fused), range_K)
                    self._ranges[number, fused] = torch.maximum(known_K, range_K)
                if self._inputs is not None:
                    self._inputs.setdefault((number, fused), []).append(x_MK[valid_BT.flatten()])
                return gemms[fused](x_MK)

            normed_MH, stream_MH = self._norm(x_MH, stream_MH, self._norms[number]["input"])
            qkv = multiply("qkv", normed_MH).view(count, length, -1, width).transpose(1, 2)
            q, k, values = qkv.split((heads, kv_heads, kv_heads), dim=1)
            q, k = (_turned(each.float(), *turn).to(self.dtype) for each in (q, k))
            cache.append((k, values))
            if self._prefix:
                k, values = (
                    torch.cat([old.expand(count, -1, -1, -1), new], 2)
                    for old, new in zip(self._prefix[number], (k, values), strict=True)
                )
            attended = scaled_dot_product_attention(q, k, values, attn_mask=mask, enable_gqa=True)
            x_MH = multiply("o", attended.transpose(1, 2).reshape(count * length, -1))
            normed_MH, stream_MH = self._norm(x_MH, stream_MH, self._norms[number]["post_attention"])
            x_MH = multiply("down", self._activated(multiply("gate_up", normed_MH)))
        last_MH, _ = self._norm(x_MH, stream_MH, self.model.final_norm_H.to(self.dtype))
        return last_MH.view(count, length, -1), cache

    def _norm(self, x_MH: Tensor, stream_MH: Tensor | None, weight_H: Tensor) -> tuple[Tensor, Tensor]:
        """The normed sum, and the sum, which is the residual stream."""
        epsilon = self.model.config.rms_norm_eps
        if self.dtype is torch.float32:
            stream_MH = x_MH if stream_MH is None else stream_MH + x_MH
            return stream_MH * torch.rsqrt(stream_MH.square().mean(-1, keepdim=True) + epsilon) * weight_H, stream_MH
        if stream_MH is None:
            normed_MH = torch.empty_like(x_MH)
            torch.ops._C.rms_norm(normed_MH, x_MH, weight_H, epsilon)
            return normed_MH, x_MH
        normed_MH, stream_MH = x_MH.clone(), stream_MH.clone()
        torch.ops._C.fused_add_rms_norm(normed_MH, stream_MH, weight_H, epsilon)
        return normed_MH, stream_MH

    def _activated(self, gate_up_MN: Tensor) -> Tensor:
        gate_MK, up_MK = gate_up_MN.chunk(2, dim=1)
        if self.dtype is torch.float32:
            return silu(gate_MK) * up_MK
        torch.ops._C.silu_and_mul(out_MK := torch.empty_like(gate_MK), gate_up_MN.contiguous())
        return out_MK


def _turned(x: Tensor, cosine_TD: Tensor, sine_TD: Tensor) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    return torch.cat([left * cosine_TD - right * sine_TD, right * cosine_TD + left * sine_TD], -1)


def ranges_of(model: Llama, batches: Sequence[Batch], *, prefix: Sequence[int]) -> Ranges:
    ranges: Ranges = {}
    Forward(model, "bf16", ranges=ranges).states(batches, prefix=prefix)
    return ranges


def inputs_of(model: Llama, batches: Sequence[Batch], *, prefix: Sequence[int]) -> Inputs:
    inputs: Inputs = {}
    Forward(model, "bf16", inputs=inputs).states(batches, prefix=prefix)
    return inputs


Answer = tuple[list[int], list[int]]  # tokens of a prompt and of what was sampled


def answers(folder: Path, problems: Path) -> list[Answer]:
    """Sampled by the model in BF16 at temperature 1."""
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    end = model.config.eos_token_id
    tokenizer.pad_token_id = end
    questions = [json.loads(line)["question"] for line in problems.read_text().splitlines()[:PROBLEMS]]
    torch.manual_seed(0)
    answers: list[Answer] = []
    for start in range(0, len(questions), AT_ONCE):
        chats = [[{"role": "user", "content": question}] for question in questions[start : start + AT_ONCE]]
        texts = tokenizer.apply_chat_template(chats, tokenize=False, add_generation_prompt=True)
        prompts = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
        sampled = model.generate(**prompts, max_new_tokens=ANSWER_TOKENS, do_sample=True, top_k=0, pad_token_id=end)
        for row, mask in zip(sampled.tolist(), prompts["attention_mask"], strict=True):
            prompt, answer = row[len(mask) - int(mask.sum()) : len(mask)], row[len(mask) :]
            answers.append((prompt, answer[: answer.index(end) + 1] if end in answer else answer))
    return answers


@dataclass(frozen=True)
class Batch:
    tokens_BT: Tensor
    valid_BT: Tensor
    answer_BT: Tensor
    """Mask of the tokens whose next token was sampled."""

    @property
    def next_M(self) -> Tensor:
        return self.tokens_BT.roll(-1, dims=1)[self.answer_BT]


def batches_of(pairs: Iterable[Answer], *, skip: int) -> list[Batch]:
    """skip: tokens at the beginning of each, which are all equal."""
    ordered = sorted(
        ((prompt[skip:], answer) for prompt, answer in pairs), key=lambda pair: len(pair[0]) + len(pair[1])
    )
    batches = []
    for start in range(0, len(ordered), AT_ONCE):
        part = ordered[start : start + AT_ONCE]
        tokens_BT = torch.zeros(len(part), max(len(prompt) + len(answer) for prompt, answer in part), dtype=torch.int64)
        valid_BT, answer_BT = (torch.zeros_like(tokens_BT, dtype=torch.bool) for _ in range(2))
        for row, (prompt, answer) in enumerate(part):
            end = len(prompt) + len(answer)
            tokens_BT[row, :end] = torch.tensor(prompt + answer)
            valid_BT[row, :end] = answer_BT[row, len(prompt) - 1 : end - 1] = True
        batches.append(Batch(tokens_BT, valid_BT, answer_BT))
    return batches


def common_prefix(prompts: Sequence[Sequence[int]]) -> list[int]:
    columns = list(zip(*prompts, strict=False))
    return [column[0] for column in columns[: next(place for place, each in enumerate(columns) if len(set(each)) > 1)]]


class Table:
    """Rows, each a model by one way of multiplying, against the trainer's exact and BF16 forwards."""

    def __init__(self, model: Llama, batches: Sequence[Batch], *, prefix: Sequence[int]) -> None:
        self._batches, self._prefix = batches, prefix
        self._next_M1 = torch.cat([batch.next_M for batch in batches])[:, None]
        self._trainers = [torch.cat(list(self._log_probs(model, how))) for how in ("bf16", "float32")]
        self.lines = ["| | KL to the BF16 trainer | k3 | KL to float32 |", "| --- | --- | --- | --- |"]
        self.num_tokens = len(self._next_M1)

    def _log_probs(self, model: Llama, how: str | dict[str, str]) -> Iterable[Tensor]:
        """[POSITIONS, V], part by part."""
        states_MH = Forward(model, how).states(self._batches, prefix=self._prefix)
        head_HV = model.head_VH.to(states_MH.dtype).t()
        for part_MH in states_MH.split(POSITIONS):
            yield (part_MH @ head_HV).float().log_softmax(-1)

    def add(self, label: str, model: Llama, how: str | dict[str, str]) -> None:
        started, rows = time.perf_counter(), []
        for number, ours_MV in enumerate(self._log_probs(model, how)):
            part = slice(number * POSITIONS, number * POSITIONS + len(ours_MV))
            next_M1, columns = self._next_M1[part], []
            for trainer_MV in self._trainers:
                kl_M = (ours_MV.exp() * (ours_MV - trainer_MV[part])).sum(-1).double()
                x_M = (trainer_MV[part].gather(1, next_M1) - ours_MV.gather(1, next_M1))[:, 0].double()
                columns += [kl_M, torch.expm1(x_M) - x_M]
            rows.append(torch.stack(columns, dim=1))
        (kl, k3, kl_exact, _), error = (
            torch.cat(rows).mean(0).tolist(),
            torch.cat(rows)[:, 0].std() / len(self._next_M1) ** 0.5,
        )
        self.lines.append(f"| {label} | {kl:.3g} ± {error:.1g} | {k3:.3g} | {kl_exact:.3g} |")
        console.say(f"{self.lines[-1]}  {time.perf_counter() - started:.0f} s")


def fill(table: Table, model: Llama, calibration: Sequence[Batch], *, prefix: Sequence[int]) -> None:
    """Every row."""
    ranges = ranges_of(model, calibration, prefix=prefix)
    norms = smooth_norms(model, ranges)
    smoothed = smooth_values(smooth_down(norms, ranges), ranges)
    inputs = inputs_of(model, calibration, prefix=prefix)
    refined_norms = smooth_norms(model, ranges, inputs)
    refined = smooth_values(smooth_down(refined_norms, ranges), ranges)
    refined_down = smooth_values(smooth_down(refined_norms, ranges, inputs), ranges)
    down_kept = dict.fromkeys(FUSED, "int8") | {"down": "bf16"}

    def rotated(kind: str, seed: int) -> Llama:
        turned = rotate_stream(model, kind, seed=seed)
        return rotate_values(smooth_down(turned, ranges_of(turned, calibration, prefix=prefix)), seed=seed)

    blocks = rotated("blocks", 0)
    table.add("BF16", model, "bf16")
    table.add("*smoothed*: norms, `down_proj` through `up_proj`, `o_proj` through `v_proj`", smoothed, "int8")
    table.add("*refined*: the same with factors behind norms found by their error", refined, "int8")
    table.add("*refined*, and those before `down_proj`, too", refined_down, "int8")
    table.add("*rotated*: stream in blocks, values, `down_proj` smoothed; seed 0", blocks, "int8")
    table.add("*smoothed*, asymmetric", smoothed, "asymmetric")
    table.add("*refined*, asymmetric", refined, "asymmetric")
    table.add("*rotated*, asymmetric", blocks, "asymmetric")
    table.add("norms smoothed", norms, "int8")
    table.add("INT8, no smoothing", model, "int8")
    table.add("*rotated*, seed 1", rotated("blocks", 1), "int8")
    table.add("*rotated* by any orthogonal matrix", rotated("full", 0), "int8")
    table.add("*smoothed*, all but the codes in float32", smoothed, "codes")
    table.add("*rotated*, all but the codes in float32", blocks, "codes")
    table.add("*rotated*, nothing quantised, BF16", blocks, "bf16")
    table.add("*smoothed*, `down_proj` in BF16", smoothed, down_kept)
    table.add("*rotated*, `down_proj` in BF16", blocks, down_kept)
    table.add("norms smoothed, asymmetric", norms, "asymmetric")
    table.add("no smoothing, asymmetric", model, "asymmetric")


ABOUT = (
    "How near do INT8 rollouts come to their trainer when activations are smoothed, when they are rotated, and when",
    "they have a zero point (*asymmetric*)? *KL to the BF16 trainer* is the mean over the tokens of the answers, in",
    "nats, of the KL divergence over the whole vocabulary, with its standard error; *k3* its estimate by the sampled",
    "tokens alone; *KL to float32* is that to the same model in float32.",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("problems", type=Path)
    parser.add_argument("--samples", type=Path, help="file to keep the sampled answers in, or to read them from")
    parser.add_argument("-o", "--output", type=Path, help="folder for rotation.md")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    load_kernels()
    if arguments.samples is not None and arguments.samples.exists():
        pairs = json.loads(arguments.samples.read_text())
    else:
        pairs = answers(arguments.model, arguments.problems)
        if arguments.samples is not None:
            arguments.samples.write_text(json.dumps(pairs))
    prefix = common_prefix([prompt for prompt, _ in pairs])
    quarter = pairs[::CALIBRATES]
    others = [pair for number, pair in enumerate(pairs) if number % CALIBRATES]
    calibration, measured = (batches_of(part, skip=len(prefix)) for part in (quarter, others))
    model = Llama.load(arguments.model)
    table = Table(model, measured, prefix=prefix)
    fill(table, model, calibration, prefix=prefix)
    head = f"Made by `python -m benchmarks.rotation`. {datetime.date.today()}: {processor()}. {arguments.model.name}, "
    title = "# Smoothing, rotation, and activations with a zero point"
    page = "\n".join([title, "", *ABOUT, "", f"{head}{table.num_tokens} tokens.", "", *table.lines, ""])
    console.out(page)
    if arguments.output is not None:
        arguments.output.mkdir(parents=True, exist_ok=True)
        (arguments.output / "rotation.md").write_text(page)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
