"""Sequences in one row against padded ones, in a step's two passes: `python -m benchmarks.packed [-o FOLDER]`.

Both sides are verl's: its engine makes a micro-batch's input and takes log-probs and entropy of the output. Padded is
`use_remove_padding: false` with transformers' `sdpa`, packed what a plan says, with our attention. The model is that of
the demo with random weights, in FSDP2 of one rank over float32 masters, computing in BF16 under autocast on one thread.
The sides take turns; a time is the median of TURNS and the ratio that of single turns, with its range. `packed.md` goes
into FOLDER.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from appliance import console
from appliance.tasks.library import TINY_MODELS
from appliance.terms.settings import ATTENTION_NAME
from benchmarks.demo import RECIPE
from benchmarks.one_flow import on_one_rank, ratios
from benchmarks.telemetry import Where

if TYPE_CHECKING:
    from tensordict import TensorDict
    from transformers import PreTrainedModel

TURNS = 5
SIDES = {"padded": "sdpa", "packed": ATTENTION_NAME}
PASSES = ("log-probs", "update")


@dataclass(frozen=True)
class Mix:
    name: str
    sequences: int
    """Sequences of a step."""
    micro_batch: int
    """Sequences of a forward."""
    shortest: int
    """Tokens; from here to `longest` equally often."""
    longest: int
    """Tokens."""

    def batches(self) -> list[TensorDict]:
        """Return batches as a worker has them: prompt and response behind one another, without padding."""
        import torch
        from tensordict import TensorDict

        draw, generator = random.Random(0), torch.Generator().manual_seed(0)
        lengths = [draw.randint(self.shortest, self.longest) for _ in range(self.sequences)]
        batches = []
        for start in range(0, self.sequences, self.micro_batch):
            part = lengths[start : start + self.micro_batch]
            rows = {
                "input_ids": [torch.randint(0, 256, (length,), generator=generator) for length in part],
                "position_ids": [torch.arange(length) for length in part],
            }
            nested = {name: torch.nested.as_nested_tensor(each, layout=torch.jagged) for name, each in rows.items()}
            batches.append(TensorDict(nested, batch_size=len(part)))
        return batches


MIXES = (
    Mix("the demo's", sequences=256, micro_batch=256, shortest=8, longest=12),
    Mix("1 to 512 tokens", sequences=32, micro_batch=32, shortest=1, longest=512),
)


ABOUT = (
    "How much faster does the trainer compute when the sequences of a micro-batch lie in one row (*packed*) than when",
    "each is padded to the longest (*padded*)? The model is the demo's with random weights, on one thread.",
    "*log-probs* is a forward pass, *update* a forward and a backward. Both sides take turns: milliseconds are",
    "medians of the turns, and *padded / packed*, how many times as fast packed rows are, is the median of the turns'",
    "ratios with its range.",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path)
    output = parser.parse_args().output
    page = "\n".join(lines(Where.now(RECIPE))) + "\n"
    console.out(page)
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        (output / "packed.md").write_text(page)
    return 0


def lines(where: Where) -> list[str]:
    import torch

    torch.set_num_threads(1)
    table_lines = [
        "# Sequences in one row, or padded",
        "",
        *ABOUT,
        "",
        f"Made by `python -m benchmarks.packed`. {where.text}.",
        "",
        "| batch | pass | padded, ms | packed, ms | padded / packed |",
        "| --- | --- | --- | --- | --- |",
    ]
    engine = engine_of(model())
    for mix in MIXES:
        times = timed(engine, mix)
        for pass_name in PASSES:
            padded, packed = (times[side, pass_name] for side in SIDES)
            ms = f"{median(padded) * 1e3:.0f} | {median(packed) * 1e3:.0f}"
            table_lines.append(f"| {mix.name} | {pass_name} | {ms} | {ratios(padded, packed)} |")
    return table_lines


def model() -> PreTrainedModel:
    import torch
    from transformers import Qwen2ForCausalLM

    from appliance.tasks.tiny_model import config_of

    torch.manual_seed(0)
    made = Qwen2ForCausalLM(config_of(TINY_MODELS["tiny-arithmetic"])).train()
    on_one_rank(made)
    return made


def engine_of(model: PreTrainedModel) -> Any:
    """verl's, with what its input and output need and nothing else."""
    from verl.utils.torch_functional import entropy_from_logits
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    import appliance.trainer.worker  # noqa: F401 - our attention and log-probs

    engine = FSDPEngineWithLMHead.__new__(FSDPEngineWithLMHead)
    engine.module, engine.use_ulysses_sp, engine.pad_to_length = model, False, None
    engine.engine_config = SimpleNamespace(entropy_checkpointing=False, entropy_from_logits_with_chunking=False)
    engine.compute_entropy_from_logits = entropy_from_logits
    return engine


def timed(engine: Any, mix: Mix) -> dict[tuple[str, str], list[float]]:
    """Seconds by side and pass, turn by turn; a turn before them is not counted."""
    times: dict[tuple[str, str], list[float]] = {(side, each): [] for side in SIDES for each in PASSES}
    batches = mix.batches()
    for turn in range(-1, TURNS):
        for side, attention in SIDES.items():
            engine.module.set_attn_implementation(attention)
            for pass_name in PASSES:
                start = time.perf_counter()
                one_pass(engine, batches, packed=side == "packed", updates=pass_name == "update")
                if turn >= 0:
                    times[side, pass_name].append(time.perf_counter() - start)
            engine.module.zero_grad()
    return times


def one_pass(engine: Any, batches: list[TensorDict], *, packed: bool, updates: bool) -> None:
    """Run one pass as verl's forward_step does. updates: with gradients of a made-up loss; else with the entropy and
    without them."""
    import torch
    from verl.utils.tensordict_utils import assign_non_tensor

    for batch in batches:
        data = batch.clone(recurse=False)
        assign_non_tensor(data, use_remove_padding=packed, temperature=1.0, calculate_entropy=not updates)
        with torch.set_grad_enabled(updates), torch.autocast("cpu", torch.bfloat16):
            inputs, arguments = engine.prepare_model_inputs(data)
            output = engine.module(**inputs, use_cache=False)
            found = engine.prepare_model_outputs(output, arguments, data, None)
            if updates:
                log_probs_T = found["log_probs"].values()
                (log_probs_T * torch.linspace(-1, 1, len(log_probs_T))).mean().backward()


if __name__ == "__main__":
    sys.exit(main())
