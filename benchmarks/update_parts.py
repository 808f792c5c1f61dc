"""Where an update of the trainer spends its time, part by part: `python -m benchmarks.update_parts [-o FILE]`.

The update of `benchmarks.train_step` (our engine of one rank, random weights of SmolLM2-135M's shapes, prompts computed
once, log-probs and entropies collected for the driver as in a run without a pass for them), under torch's profiler,
which notes what each of torch's operations takes by itself. An operation belongs to the part whose Python code called
it; one of the backward to the part whose forward made its node. Matrix products are parts of their own wherever they
are called.

One thread by default: with several, an operation whose threads wait for each other on a busy host takes all of that
wait, and shares then say more about the host than about the work. The profiler itself costs some of each small
operation, so a share of many small ones is a little too large. On a CPU verl needs a variable: VERL_PLATFORM=cpu.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from appliance import console
from appliance.tasks.library import PACKAGED_MODELS
from appliance.terms.settings import ATTENTION_NAME
from benchmarks.demo import processor
from benchmarks.train_step import BF16, Engine, batch, loss

if TYPE_CHECKING:
    from tensordict import TensorDict

_MARK = "part: "  # before the name of a part, in the profiler's events
_NODE = "autograd::engine::evaluate_function: "
_PRODUCTS = frozenset({"aten::mm", "aten::addmm", "aten::bmm"})
_NODES = {  # of the backward of what no part's forward called
    "LogProbsBackward": "head: log-probs",
    "EmbeddingBackward0": "embedding",
    "RegisterPostBackwardFunctionBackward": "FSDP: gradients to float32",
}
REST = "rest: residuals, copies of weights, verl"


def part_of(event: Any, *, part_by_node: dict[int, str]) -> str:
    """Return the part of an event of torch's profiler. part_by_node: parts of what the forward called, by the number
    of the autograd node."""
    part, node = "", None
    above = event
    while above is not None:
        if not part and above.name.startswith(_MARK):
            part = above.name.removeprefix(_MARK)
        if above.name.startswith(_NODE):
            node = above
        above = above.cpu_parent
    if not part and node is not None:
        part = _NODES.get(node.name.removeprefix(_NODE), "") or part_by_node.get(node.sequence_nr, "")
    if event.name in _PRODUCTS and part != "attention":
        return "head: matrix products" if part.startswith("head") else "layers: matrix products"
    return part or REST


def seconds_by_part(events: Iterable[Any]) -> Counter[str]:
    """Add up the seconds that each part's operations took by themselves. events: of torch's profiler."""
    events = list(events)
    part_by_node: dict[int, str] = {}
    for event in events:
        if event.sequence_nr >= 0 and (part := part_of(event, part_by_node={})) != REST:
            part_by_node.setdefault(event.sequence_nr, part)
    seconds: Counter[str] = Counter()
    for event in events:
        seconds[part_of(event, part_by_node=part_by_node)] += event.self_cpu_time_total / 1e6
    return seconds


def mark(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function as a part of this name."""
    from torch.profiler import record_function

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        with record_function(f"{_MARK}{name}"):
            return function(*arguments, **named)

    return call


def mark_parts(trainer: Engine) -> None:
    """Mark the parts of this process's trainer."""
    from transformers import AttentionInterface
    from transformers.models.llama import modeling_llama
    from verl.utils.torch_functional import entropy_from_logits_with_chunking
    from verl.workers.engine.fsdp import transformer_impl

    from appliance.trainer.attention import attend_row

    engine: Any = trainer.engine
    engine.compute_entropy_from_logits = entropy_from_logits_with_chunking
    engine.engine_config.entropy_from_logits_with_chunking = True
    engine.engine_config.entropy_from_logits_chunk_size = 128  # as plan/verl_args.py has it
    engine._entropy = mark("head: entropies", engine._entropy)
    transformer_impl.logprobs_from_logits = mark("head: log-probs", transformer_impl.logprobs_from_logits)
    modeling_llama.apply_rotary_pos_emb = mark("rotary", modeling_llama.apply_rotary_pos_emb)
    AttentionInterface.register(ATTENTION_NAME, mark("attention", attend_row))
    parts = {"RMSNorm": "norms", "LlamaMLP": "activation", "Embedding": "embedding"}
    for module in engine.module.modules():
        for kind, part in parts.items():
            if type(module).__name__.endswith(kind):
                module.forward = mark(part, module.forward)
    engine.module.lm_head.forward = mark("head: log-probs", engine.module.lm_head.forward)


def update(trainer: Engine, data: TensorDict) -> float:
    """Make one update, and return its seconds."""
    from torch.profiler import record_function

    from appliance.trainer.update_log_probs import UPDATE_LOG_PROBS

    start = time.perf_counter()
    UPDATE_LOG_PROBS.begin()
    trainer.engine.optimizer_zero_grad()
    trainer.engine.forward_backward_batch(data, loss)
    with record_function(f"{_MARK}optimizer"):
        trainer.step()
    return time.perf_counter() - start


def table(seconds: Counter[str]) -> list[str]:
    total = sum(seconds.values())
    rows = [f"| {part} | {taken:.2f} | {100 * taken / total:.0f} % |" for part, taken in seconds.most_common()]
    return ["| part | s | share |", "| --- | --- | --- |", *rows, f"| all | {total:.2f} | |"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--samples", type=int, default=8, help="samples of each prompt")
    parser.add_argument("--micro-batch", type=int, default=16, help="sequences of one forward")
    parser.add_argument("--layers", type=int, default=PACKAGED_MODELS["smollm2-135m"].shape.layers)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("-o", "--output", type=Path, help="file for the page")
    options = parser.parse_args()
    import torch
    from tensordict import NonTensorStack
    from torch.profiler import ProfilerActivity, profile

    torch.set_num_threads(options.threads)
    count = options.prompts * options.samples
    data = batch(
        prompts=options.prompts,
        samples=options.samples,
        prompt_tokens=33,
        response_tokens=24,
        micro_batch=options.micro_batch,
    )
    data["uid"] = NonTensorStack(*(f"prompt-{place // options.samples}" for place in range(count)))
    data["session_id"] = NonTensorStack(*(place % options.samples for place in range(count)))
    trainer = Engine(layers=options.layers)
    trainer.use(BF16, data)
    mark_parts(trainer)
    update(trainer, data)  # buffers are allocated, the optimizer's state is made
    usual_s = update(trainer, data)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        update(trainer, data)
    about = f"{processor()}, {options.threads} threads; {count} samples, {int(data['input_ids'].offsets()[-1])} tokens."
    text = "\n".join(
        [about, f"An update without the profiler: {usual_s:.2f} s.", "", *table(seconds_by_part(profiled.events()))]
    )
    console.out(text)
    if options.output is not None:
        options.output.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
