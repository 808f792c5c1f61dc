"""One precision flow against BF16 training, at layer shapes: `python -m benchmarks.one_flow [-o docs/results]`.

The parts of a step, each side in turns with the other, composed into a step of three settings: all in BF16, INT8
rollouts with BF16 training, one flow. One decoder layer with random weights and a small vocabulary, so that layers
are what is measured; the head of a full vocabulary apart. Training is as verl has it: FSDP2 of one rank over float32
masters, computing in BF16 under autocast; activations are recomputed, which is the default of a model that is not tiny.
Both sides take their sequences in one row, BF16 with the attention that a plan without one flow has.
Rollouts are real engines of two layers, halved. A ratio is the median of those of single turns, and their range.
"""

from __future__ import annotations

import argparse
import datetime
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from textwrap import fill
from typing import TYPE_CHECKING, Any

from appliance import console
from appliance.bench.job import GIB, NAMED_SHAPES, PROMPT_TOKENS, BenchJob, Measurement, Shapes, read_lines
from appliance.compare.results import busy_share
from appliance.control_groups import usable_cores
from appliance.terms.environment import EXACT_ON_CPU
from appliance.terms.schemes import Scheme
from appliance.terms.settings import ATTENTION_NAME, Quantisation
from appliance.terms.shapes import KNOWN
from benchmarks.demo import processor
from benchmarks.sync import engine_env

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module
    from transformers import PreTrainedModel

    from appliance.sync.manifest import Manifest
    from appliance.trainer.rollout_forward import RolloutForward

SCHEMES = (Scheme.BF16, Scheme.INT8)
BF16, FLOW = "BF16", "one flow"
ENGINE_LAYERS = 2
PAGE_WIDTH = 120
HEAD_TOKENS = 512
SAVED_TOKENS = 2048
EQUAL_LAYERS = 4
EQUAL_PROMPTS = [[(7 * place + step * step) % 1000 for step in range(3 + 5 * place)] for place in range(16)]
EQUAL_TOKENS = 96
VOCABULARY = KNOWN["Qwen/Qwen2.5-7B-Instruct"].vocab

Times = dict[str, list[float]]
"""Seconds by side, turn by turn."""


@dataclass(frozen=True)
class Mix:
    """What a step makes: one update of `sequences` in micro-batches."""

    sequences: int
    response_tokens: int
    micro_batch: int

    @property
    def length(self) -> int:
        return PROMPT_TOKENS + self.response_tokens

    @property
    def tokens(self) -> int:
        return self.sequences * self.length

    def __str__(self) -> str:
        return (
            f"{self.sequences} sequences of {PROMPT_TOKENS} prompt and {self.response_tokens} response tokens, all "
            f"generated at once, micro-batches of {self.micro_batch * self.length} tokens, one update a step"
        )


# --- rollouts and engines


def rollouts(shapes: Shapes, *, mix: Mix, turns: int, threads: int) -> Times:
    """Time rollouts of one layer, by scheme: `appliance bench`'s child."""
    with tempfile.TemporaryDirectory() as folder:
        job = rollouts_job(shapes, mix=mix, turns=turns, folder=Path(folder))
        file, log = Path(folder, "job.json"), Path(folder, "log")
        file.write_text(job.model_dump_json())
        with log.open("w") as output:
            command = [sys.executable, "-m", "appliance.bench.child", str(file)]
            done = subprocess.run(
                command, env=os.environ | engine_env(threads), stdout=output, stderr=output, check=False
            )
        if done.returncode:
            console.say(log.read_text()[-4000:])
            raise SystemExit(done.returncode)
        measured = read_lines(job.results, Measurement)
    return {scheme: [one.seconds / ENGINE_LAYERS for one in measured if one.scheme == scheme] for scheme in SCHEMES}


def rollouts_job(shapes: Shapes, *, mix: Mix, turns: int, folder: Path) -> BenchJob:
    return BenchJob(
        workload=shapes.replace(layers=ENGINE_LAYERS, batch=mix.sequences, new_tokens=mix.response_tokens).workload,
        engines=tuple(Quantisation(scheme=scheme) for scheme in SCHEMES),
        eager=SCHEMES,
        tensor_parallel=1,
        pairs=turns,
        kv_bytes=GIB // 4,
        memory_bytes=None,
        seed=0,
        results=str(folder / "results.jsonl"),
        facts=str(folder / "facts.jsonl"),
    )


@dataclass(frozen=True)
class Sampled:
    prompt: list[int]
    response: list[int]
    log_probs: list[float]


def sample(folder: Path, scheme: Scheme, env: dict[str, str]) -> list[Sampled]:
    """Sample with a real engine, in its own process."""
    os.environ.update(env)
    from vllm import LLM, SamplingParams

    llm = LLM(
        str(folder),
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=256,
        kv_cache_memory_bytes=GIB // 4,
        logprobs_mode="processed_logprobs",
        **Quantisation(scheme=scheme).engine_arguments(),
    )
    params = SamplingParams(max_tokens=EQUAL_TOKENS, ignore_eos=True, logprobs=0, detokenize=False, seed=3)
    outputs = llm.generate([{"prompt_token_ids": each} for each in EQUAL_PROMPTS], params, use_tqdm=False)
    sampled = []
    for output in outputs:
        ids = list(output.outputs[0].token_ids)
        steps = zip(output.outputs[0].logprobs, ids, strict=True)
        sampled.append(Sampled(list(output.prompt_token_ids), ids, [step[token].logprob for step, token in steps]))
    return sampled


def equal_tokens(*, threads: int) -> list[str]:
    """Rows: tokens whose log-prob in the trainer's forward is the engine's, at 0.5B layer shapes. In a process that was
    started with EXACT_ON_CPU, as all of a run with one flow are."""
    import torch
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        random_model(NAMED_SHAPES["qwen2.5-0.5b"].replace(layers=EQUAL_LAYERS)).bfloat16().save_pretrained(folder)
        rows: dict[Scheme, list[Sampled]] = {}
        for scheme in SCHEMES:
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
                rows[scheme] = pool.submit(sample, Path(folder), scheme, engine_env(threads)).result()
        lines = ["| rollouts | training | tokens equal | mean difference, nats |", "| --- | --- | --- | --- |"]
        for scheme, training in ((Scheme.INT8, FLOW), (Scheme.INT8, BF16), (Scheme.BF16, FLOW), (Scheme.BF16, BF16)):
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="sdpa")
            ours = again(model, rows[scheme], scheme=scheme if training == FLOW else None)
            theirs = [each for one in rows[scheme] for each in one.log_probs]
            gaps = [abs(a - b) for a, b in zip(ours, theirs, strict=True)]
            equal = sum(gap == 0 for gap in gaps)
            lines.append(f"| {scheme} | {training} | {equal} of {len(gaps)} | {sum(gaps) / len(gaps):.1e} |")
    return lines


def again(model: Module, rows: list[Sampled], *, scheme: Scheme | None) -> list[float]:
    """Log-probs of the responses. scheme: of one flow, all sequences in a row; None: BF16, each sequence by itself."""
    import torch
    from verl.utils.torch_functional import logprobs_from_logits

    texts = [torch.tensor([one.prompt + one.response]) for one in rows]
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        if scheme is None:
            by_text = [logprobs_from_logits(model(each).logits[0], each[0].roll(-1)) for each in texts]
        else:
            put_in(model, scheme=scheme)
            ids, positions = torch.cat(texts, dim=1), torch.cat([torch.arange(each.shape[1]) for each in texts])
            out = model(input_ids=ids, position_ids=positions[None], shift_labels=ids.roll(-1, 1), temperature=1.0)
            by_text = out.log_probs[0].split([each.shape[1] for each in texts])
    return [
        value
        for one, log_probs in zip(rows, by_text, strict=True)
        for value in log_probs[len(one.prompt) - 1 : -1].float().tolist()
    ]


def put_in(model: Module, *, scheme: Scheme = Scheme.INT8) -> RolloutForward:
    from appliance.trainer.rollout_forward import RolloutForward

    return RolloutForward(model, quantisation=Quantisation(scheme=scheme), num_tokens=model.config.vocab_size)


# --- training


def random_model(shapes: Shapes) -> PreTrainedModel:
    """Make a model in float32: verl's masters."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    import appliance.trainer.attention  # noqa: F401 - transformers knows it then

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=shapes.vocabulary,
        hidden_size=shapes.hidden,
        intermediate_size=shapes.intermediate,
        num_hidden_layers=shapes.layers,
        num_attention_heads=shapes.heads,
        num_key_value_heads=shapes.kv_heads,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        attn_implementation=ATTENTION_NAME,
    )
    model = Qwen2ForCausalLM(config)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data += 0.05 * torch.randn_like(parameter)
    return model


def on_one_rank(model: Module) -> None:
    """Wrap the model in FSDP2 of this process, as verl does."""
    import torch
    from torch.distributed import HashStore, init_process_group
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy
    from verl.utils.fsdp_utils import apply_fsdp2

    init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=True)
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("fsdp",))
    apply_fsdp2(model, {"mesh": mesh, "mp_policy": policy, "offload_policy": None, "reshard_after_forward": True}, {})


class Trainer:
    """One model, whose forward is of either side: `use`."""

    def __init__(self, shapes: Shapes) -> None:
        import torch

        self.model = random_model(shapes).train()
        self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        own = self._forwards()
        self.flow = put_in(self.model)
        self._sides = {BF16: own, FLOW: self._forwards()}
        on_one_rank(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6, weight_decay=0.01)

    def _forwards(self) -> list[Callable[..., Any]]:
        return [module.forward for module in (self.model, *self.model.model.layers)]

    def use(self, side: str) -> None:
        for module, forward in zip((self.model, *self.model.model.layers), self._sides[side], strict=True):
            module.forward = forward

    def log_probs(self, side: str, ids_SL: Tensor) -> Tensor:
        """[S * L]. As verl asks for them: with the entropy where no gradient is wanted."""
        import torch
        from verl.utils.torch_functional import entropy_from_logits, logprobs_from_logits

        sequences, length = ids_SL.shape
        labels, positions_SL = ids_SL.reshape(-1).roll(-1), torch.arange(length).repeat(sequences, 1)
        row = {"input_ids": ids_SL.reshape(1, -1), "position_ids": positions_SL.reshape(1, -1), "use_cache": False}
        with torch.autocast("cpu", torch.bfloat16):
            if side == FLOW:
                return self.model(**row, shift_labels=labels[None], temperature=1.0).log_probs[0]
            logits = self.model(**row, attention_mask=None).logits[0]
            if not torch.is_grad_enabled():
                entropy_from_logits(logits)
            return logprobs_from_logits(logits, labels)

    def pass_without_gradients(self, side: str, ids_SL: Tensor, *, micro_batch: int) -> None:
        import torch

        self.use(side)
        with torch.no_grad():
            for part in ids_SL.split(micro_batch):
                self.log_probs(side, part)

    def forward_and_backward(self, side: str, ids_SL: Tensor, *, micro_batch: int) -> None:
        """A policy gradient with made-up advantages, summed over the micro-batches."""
        import torch

        self.use(side)
        for part in ids_SL.split(micro_batch):
            (self.log_probs(side, part).float() * torch.linspace(-1, 1, part.numel())).mean().backward()

    def step(self) -> None:
        """Clip, and step; then what is quantised is so no more."""
        from torch.nn.utils import clip_grad_norm_

        clip_grad_norm_(self.model.parameters(), max_norm=1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.flow.forget()

    def sync(self, scheme: Scheme) -> Manifest:
        """What both ends of a weight update compute, in one process: cast, digest, copy; copy, digest, pack."""
        import torch

        from appliance.quant.cpu_gemm import load_kernels, packed, quantise_weight
        from appliance.sync.manifest import Manifest, record_tensor

        load_kernels()
        records, received = [], {}
        for name, parameter in self.model.named_parameters():
            sent = parameter.detach().full_tensor().to(torch.bfloat16)
            records.append(record_tensor(name, sent))
            received[name] = sent.clone().clone()
            record_tensor(name, received[name])
        for linear in self.flow.linears():
            weight_NK = torch.cat([received[f"{name}.weight"] for name in linear.part_names])
            if scheme is Scheme.INT8:
                quantised = quantise_weight(weight_NK)
                packed(quantised.codes_NK, scale_N1=quantised.scale, dtype=torch.bfloat16)
            else:
                handle = torch.ops._C.create_onednn_mm_handler(weight_NK.t(), 32)
                torch.ops._C.release_dnnl_matmul_handler(handle)
        return Manifest(sync=1, records=tuple(records))


@dataclass
class Parts:
    """Of a step, of one layer."""

    log_probs: Times = field(default_factory=lambda: {BF16: [], FLOW: []})
    update: Times = field(default_factory=lambda: {BF16: [], FLOW: []})
    optimizer: Times = field(default_factory=lambda: {BF16: [], FLOW: []})
    sync: Times = field(default_factory=lambda: {scheme: [] for scheme in SCHEMES})
    quantising: list[float] = field(default_factory=list)
    """Seconds of quantising in the trainer, checks of digests and a pass of a few tokens with it."""
    of_tokens: dict[int, Times] = field(default_factory=dict)
    """Passes without gradients by their tokens."""


def train(shapes: Shapes, *, mix: Mix, turns: int, of_tokens: Sequence[int]) -> Parts:
    import torch

    trainer, parts = Trainer(shapes), Parts()
    ids_SL = torch.randint(0, shapes.vocabulary, (mix.sequences, mix.length))
    for turn in range(-1, turns):
        timings = Parts() if turn < 0 else parts  # the first turn warms up
        batch = ids_SL[: mix.micro_batch] if turn < 0 else ids_SL
        settings = {"micro_batch": mix.micro_batch}
        for side in (BF16, FLOW):
            if side == FLOW:
                for scheme in SCHEMES:
                    manifest = timed(timings.sync[scheme], trainer.sync, scheme)
                trainer.flow.note_sent(manifest)
                timed(
                    timings.quantising, trainer.pass_without_gradients, side, batch[:1, :PROMPT_TOKENS], micro_batch=1
                )
            timed(timings.log_probs[side], trainer.pass_without_gradients, side, batch, **settings)
            timed(timings.update[side], trainer.forward_and_backward, side, batch, **settings)
            timed(timings.optimizer[side], trainer.step)
        for tokens in of_tokens:
            few = ids_SL[: max(1, tokens // mix.length)]
            trainer.pass_without_gradients(FLOW, few[:1], micro_batch=1)  # quantised before the clock starts
            for side in (BF16, FLOW):
                times = timings.of_tokens.setdefault(tokens, {BF16: [], FLOW: []})[side]
                timed(times, trainer.pass_without_gradients, side, few, micro_batch=len(few))
    torch.distributed.destroy_process_group()
    return parts


def timed(times: list[float], work: Callable[..., Any], *arguments: Any, **settings: Any) -> Any:
    started = time.perf_counter()
    result = work(*arguments, **settings)
    times.append(time.perf_counter() - started)
    return result


def head(*, hidden: int, turns: int) -> tuple[Times, Times]:
    """(without gradients, forward and backward), of HEAD_TOKENS and a full vocabulary."""
    import torch
    from torch.nn.functional import linear
    from verl.utils.torch_functional import entropy_from_logits, logprobs_from_logits

    from appliance.trainer.rollout_ops import log_probs_of

    weight_VH = torch.empty(VOCABULARY, hidden, dtype=torch.bfloat16).normal_(std=0.02).requires_grad_()
    x_TH = torch.randn(HEAD_TOKENS, hidden).to(torch.bfloat16).requires_grad_()
    labels_T = torch.randint(0, VOCABULARY, (HEAD_TOKENS,))

    def log_probs(side: str, *, with_entropy: bool) -> Tensor:
        logits_TV = linear(x_TH, weight_VH)
        if side == FLOW:
            settings = {"num_tokens": VOCABULARY, "temperature": 1.0, "with_entropy": with_entropy}
            return log_probs_of(logits_TV, labels_T, **settings)[0]
        if with_entropy:
            entropy_from_logits(logits_TV)
        return logprobs_from_logits(logits_TV, labels_T)

    def update(side: str) -> None:
        log_probs(side, with_entropy=False).float().mean().backward()
        weight_VH.grad = x_TH.grad = None

    without, whole = Parts().log_probs, Parts().update
    for turn in range(-1, turns):
        for side in (BF16, FLOW):
            with torch.no_grad():
                timed(without[side] if turn >= 0 else [], log_probs, side, with_entropy=True)
            timed(whole[side] if turn >= 0 else [], update, side)
    return without, whole


def saved_bytes(shapes: Shapes, *, length: int) -> dict[str, int]:
    """What a layer keeps for backward of SAVED_TOKENS, without recomputing: each storage once, weights not at all."""
    import torch

    model = random_model(shapes).to(torch.bfloat16)
    layer = model.model.layers[0]
    ids_SL = torch.randint(0, shapes.vocabulary, (SAVED_TOKENS // length, length))
    positions_SL = torch.arange(length).expand_as(ids_SL)
    bytes_by_side = {}
    for side in (BF16, FLOW):
        storages = {each.untyped_storage().data_ptr(): each for each in model.parameters()}
        of_parameters = set(storages)

        def pack(tensor: Tensor, held: dict[int, Tensor] = storages) -> Tensor:
            held[tensor.untyped_storage().data_ptr()] = tensor  # kept, so that no other one gets its address
            return tensor

        hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
        ends = [
            layer.register_forward_pre_hook(lambda *_, hooks=hooks: hooks.__enter__()),
            layer.register_forward_hook(lambda *_, hooks=hooks: hooks.__exit__()),
        ]
        row = {"input_ids": ids_SL.reshape(1, -1), "position_ids": positions_SL.reshape(1, -1), "use_cache": False}
        if side == FLOW:
            put_in(model)
            model(**row, shift_labels=row["input_ids"], temperature=1.0)
        else:
            model(**row, attention_mask=None)
        for each in ends:
            each.remove()
        bytes_by_side[side] = sum(
            each.untyped_storage().nbytes() for address, each in storages.items() if address not in of_parameters
        )
    return bytes_by_side


# --- the page


def ratios(base: Sequence[float], other: Sequence[float]) -> str:
    """Format how many times as fast `other` is."""
    found = [a / b for a, b in zip(base, other, strict=True)]
    return f"{median(found):.2f} ({min(found):.2f}-{max(found):.2f})"


def row(name: str, times: Times) -> str:
    base, other = times.values()
    return f"| {name} | {median(base):.2f} | {median(other):.2f} | {ratios(base, other)} |"


def step_rows(of_rollouts: Times, parts: Parts) -> Iterator[str]:
    """Sums of the parts, turn by turn."""
    int8, flow = parts.sync[Scheme.INT8], plus(parts.sync[Scheme.INT8], parts.quantising)
    none = [0.0] * len(int8)
    settings = (
        ("all BF16", Scheme.BF16, parts.sync[Scheme.BF16], BF16, parts.log_probs[BF16]),
        ("INT8 rollouts", Scheme.INT8, int8, BF16, parts.log_probs[BF16]),
        (FLOW, Scheme.INT8, flow, FLOW, parts.log_probs[FLOW]),
        (f"{FLOW}, without that pass", Scheme.INT8, flow, FLOW, none),
    )
    base: list[float] = []
    for name, scheme, sync, side, log_probs in settings:
        columns = (of_rollouts[scheme], sync, log_probs, parts.update[side], parts.optimizer[side])
        total = plus(*columns)
        base = base or total
        seconds = " | ".join(f"{median(each):.2f}" for each in (*columns, total))
        yield f"| {name} | {seconds} | {ratios(base, total)} |"


def plus(*columns: list[float]) -> list[float]:
    return [sum(each) for each in zip(*columns, strict=True)]


def page(options: argparse.Namespace, *, mix: Mix) -> Iterator[str]:
    import torch

    torch.set_num_threads(options.threads)
    shapes = NAMED_SHAPES[options.shapes].replace(layers=1)
    busy = busy_share()
    of_rollouts = rollouts(shapes, mix=mix, turns=options.turns, threads=options.threads)
    console.say("rollouts measured")
    parts = train(shapes, mix=mix, turns=options.turns, of_tokens=options.tokens)
    console.say("training measured")
    of_head = head(hidden=shapes.hidden, turns=options.turns)
    saved = saved_bytes(shapes, length=mix.length)
    console.say("head and memory measured")
    today = datetime.date.today().isoformat()
    yield "# One precision flow, measured"
    yield ""
    yield fill(
        "How long does a training step take when all of it is in BF16, when rollouts are in INT8, and in one flow, "
        "where the trainer computes in INT8, too? Not whole trainings are measured, but their parts, at the width of "
        "a large model.",
        PAGE_WIDTH,
    )
    yield ""
    yield fill(
        f"`python -m benchmarks.one_flow`, {today}: {processor()}, {options.threads} threads of {os.cpu_count()} "
        f"cores, of which others used {busy:.0%} just before; torch {torch.__version__}. One decoder layer of "
        f"`{options.shapes}`, random weights, a vocabulary of {shapes.vocabulary}. Times are seconds, medians of "
        f"{options.turns} turns. *to all BF16* and *ratio* say how many times as fast, as the median of the turns' "
        "ratios and their range.",
        PAGE_WIDTH,
    )
    yield ""
    yield fill(
        f"A step: {mix}. Training is FSDP2 of one rank, activations recomputed; BF16 trains packed rows with the "
        f"trainer's attention. Rollouts are real engines of {ENGINE_LAYERS} layers, halved. `sync` is what both ends "
        "compute, without transport; in one flow the trainer checks, quantises and packs, too. Its log-probs are "
        "those of the rollouts, so that the pass for them can be left out, as in the last row.",
        PAGE_WIDTH,
    )
    yield ""
    yield "| | rollouts | sync | log-probs | update | optimizer | step | to all BF16 |"
    yield "| --- |" + " --- |" * 7
    yield from step_rows(of_rollouts, parts)
    yield ""
    yield "The parts of a step:"
    yield ""
    yield f"| of a step, {mix.tokens} tokens | BF16 | {FLOW} | ratio |"
    yield "| --- |" + " --- |" * 3
    yield row("rollouts", of_rollouts)
    yield row("log-probs", parts.log_probs)
    with_quantising = plus(parts.log_probs[FLOW], parts.quantising)
    yield row("log-probs, with the trainer's quantising", {BF16: parts.log_probs[BF16], FLOW: with_quantising})
    yield row("update: forward twice, backward", parts.update)
    yield ""
    yield "The pass for log-probs by the number of tokens:"
    yield ""
    yield f"| log-prob pass, sequences of {mix.length} | BF16 | {FLOW} | ratio |"
    yield "| --- |" + " --- |" * 3
    for tokens, times in parts.of_tokens.items():
        yield row(f"{tokens} tokens", times)
    yield ""
    yield "The head, which has the model's whole vocabulary here and is in BF16 on both sides:"
    yield ""
    yield f"| head, {HEAD_TOKENS} tokens, {VOCABULARY} words, BF16 on both sides | BF16 | {FLOW} | ratio |"
    yield "| --- |" + " --- |" * 3
    yield row("log-probs", of_head[0])
    yield row("forward and backward", of_head[1])
    yield ""
    sizes = ", ".join(f"{side} {size / 2**20:.0f} MiB" for side, size in saved.items())
    share = saved[FLOW] / saved[BF16]
    yield f"A layer keeps for backward, of {SAVED_TOKENS} tokens, nothing recomputed: {sizes}, {share:.2f} of it."
    yield ""
    yield from equal_page(threads=options.threads)


def equal_page(*, threads: int) -> Iterator[str]:
    today = datetime.date.today().isoformat()
    yield fill(
        "**Equal tokens.** How many tokens have the engine's log-prob in training, bit for bit: "
        f"{EQUAL_LAYERS} layers of `qwen2.5-0.5b`, random weights; `--equal`, {today}: {processor()}, "
        f"{threads} threads:",
        PAGE_WIDTH,
    )
    yield ""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=be_exact) as pool:
        yield from pool.submit(equal_tokens, threads=threads).result()


def be_exact() -> None:
    os.environ.update(EXACT_ON_CPU)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.one_flow", description=__doc__)
    parser.add_argument("--shapes", choices=sorted(NAMED_SHAPES), default="qwen2.5-7b")
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--response-tokens", type=int, default=240)
    parser.add_argument("--micro-batch", type=int, default=16, help="sequences of one forward in training")
    parser.add_argument("--tokens", type=int, nargs="+", default=(512, 1024, 2048), help="tokens of each log-prob pass")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("-o", "--output", type=Path, help="folder for one-flow-speed.md")
    parser.add_argument("--equal", action="store_true", help="only count tokens whose log-probs are equal")
    options = parser.parse_args()
    if options.equal:
        console.out("\n".join(equal_page(threads=options.threads)))
        return 0
    import torch

    if torch.cpu.get_capabilities().get("amx_tile", False):
        parser.error("one flow leaves out AMX, and BF16 training does not: in one process they cannot be compared")
    mix = Mix(options.sequences, response_tokens=options.response_tokens, micro_batch=options.micro_batch)
    if options.output is not None:
        options.output.mkdir(parents=True, exist_ok=True)
    text = "\n".join(page(options, mix=mix))
    console.out(text)
    if options.output is not None:
        (options.output / "one-flow-speed.md").write_text(text + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
