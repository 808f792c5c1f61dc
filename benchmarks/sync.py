"""What a weight update costs, scheme for scheme: `python -m benchmarks.sync [--layers 12] [-o docs/results]`.

One engine per scheme in this process takes the same tensors in turn, again and again, as a worker of a run does: each
is copied out of the trainer's memory, digested, loaded, and everything is proven. Random weights of a Qwen2's shapes.
The times are of the worker's side from the first tensor to the last proof. The trainer's side (its own digests, one
copy into shared memory) is the same for every scheme and not in them: a run's `digest_s` has the digests of both ends.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import sys
import tempfile
import time
from bisect import bisect_left
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from appliance import console
from appliance.bench.job import NAMED_SHAPES, Shapes
from appliance.control_groups import usable_cores
from appliance.terms.environment import PLAN_VARIABLE, child_env
from appliance.terms.schemes import Scheme
from appliance.terms.settings import Quantisation

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

SCHEMES = tuple(Scheme)
MAX_RATIO = 1.3  # of a quantised update to BF16's
MAX_PROOF_SHARE = 0.05
ABOUT = """How much longer does an engine take to load new weights when it quantises and proves them, compared with
BF16? One engine of each scheme takes the same tensors, in turns."""
LEGEND = """* **update**: seconds of the worker, from the first tensor to the last proof.
* **to BF16**: the same as a multiple of BF16's.
* **digests**, **proof**, **telemetry** (changed codes, saturation, drift, errors): seconds of an update for each.
* **proof's share**: of the update without digests, mean over all updates.
* **extra memory**: the most that tensors took above what they took before, from PyTorch's record of its allocations,
  over one more round of proofs, which is not in the times.
* **waiting**: the most that layers held, as sent, while a part of them had not come.

FP8 is emulated. A whole round of proofs takes eight times as many updates as a layer waits for its turn: in it every
layer is asked eight times, and once, with all others, about everything that it holds."""


@dataclass(frozen=True)
class Update:
    """One measured update."""

    pair: int
    scheme: Scheme
    seconds: float
    digest_s: float
    proof_s: float
    telemetry_s: float
    layers_proven: int
    """Layers, of all with a kernel, that were proven."""
    waiting_bytes: int
    """Most that waited for a layer's rest."""


@dataclass(frozen=True)
class Measured:
    """All updates in their order; per scheme the most bytes that tensors took in one, above those before it."""

    updates: list[Update]
    extra_bytes: dict[Scheme, int]


@dataclass(frozen=True)
class Row:
    """Medians of one scheme."""

    scheme: Scheme
    seconds: float
    ratio: float
    """Ratio to BF16, over interleaved pairs."""
    digest_s: float
    proof_s: float
    proof_share: float
    """Share of the update, without digests, that the proof takes."""
    telemetry_s: float
    extra_mib: float
    waiting_mib: float


def started_runner(folder: Path, **arguments: Any) -> Any:
    """The model runner of an engine of vLLM's in this process, with random weights. arguments: more of the engine's."""
    from vllm import LLM

    llm = LLM(
        str(folder),
        skip_tokenizer_init=True,
        load_format="dummy",
        enforce_eager=True,
        max_model_len=128,
        kv_cache_memory_bytes=64 << 20,
        **arguments,
    )
    worker = llm.llm_engine.model_executor.driver_worker
    runner = getattr(worker, "worker", worker).model_runner
    runner.benchmarked = llm  # kept as long as its runner
    return runner


class Engine:
    """A vLLM engine of one scheme, updated in this process."""

    def __init__(self, folder: Path, *, scheme: Scheme, prove_every: int) -> None:
        from appliance.engine.update import WeightUpdate

        quantisation = Quantisation(scheme=scheme, emulated=scheme.spec.can_emulate)
        self._runner = started_runner(folder, **quantisation.engine_arguments())
        self.scheme = scheme
        config = self._runner.vllm_config
        self._update = WeightUpdate(
            self._runner.get_model(), model_config=config.model_config, prove_every=prove_every, needs_manifest=True
        )
        self._syncs = 0

    def update(self, tensors: dict[str, Tensor], *, records: tuple[Any, ...], pair: int) -> Update:
        import torch
        from vllm.config import set_current_vllm_config

        from appliance.sync.manifest import MANIFEST_NAME, Manifest

        self._syncs += 1
        manifest = Manifest(sync=self._syncs, records=records).to_tensor()
        with set_current_vllm_config(self._runner.vllm_config), torch.no_grad():
            started = time.perf_counter()
            self._update.begin()
            for name, tensor in tensors.items():
                self._update.load([(name, tensor.clone())])  # as the receiver copies it out of shared memory
            self._update.load([(MANIFEST_NAME, manifest)])
            report = self._update.finish()
            seconds = time.perf_counter() - started
        return Update(
            pair=pair,
            scheme=self.scheme,
            seconds=seconds,
            digest_s=report.digest_s,
            proof_s=report.proof_s - report.telemetry_s,
            telemetry_s=report.telemetry_s,
            layers_proven=report.layers_proven,
            waiting_bytes=report.waiting_bytes,
        )


def peak_of_tensors(work: Callable[[], object], *, times: int) -> int:
    """The most bytes that tensors on the CPU took during one of `times` calls of `work`, above those at its beginning.

    From the allocations and frees that PyTorch's profiler records. It knows of no free whose allocation it has not
    seen, so that one call more goes first. The resident set would say less: the allocator keeps freed pages, and an
    engine would be reported to need nothing where another had left some.
    """
    from torch.profiler import ProfilerActivity, profile

    starts = []
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
        for _ in range(times):
            starts.append(time.time_ns())  # the clock of the profiler's events
            work()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    allocated = sorted((event.start_ns(), event.nbytes()) for event in events)
    levels = list(accumulate(size for _, size in allocated))
    bounds = [bisect_left(allocated, (start,)) for start in [*starts, starts[-1] + 10**18]]
    return max(max(levels[a - 1 : b]) - levels[a - 1] for a, b in pairwise(bounds))


def measure(shapes: Shapes, *, schemes: tuple[Scheme, ...], pairs: int, prove_every: int) -> Measured:
    """`pairs` updates of each engine, in turns, after one that warms up; then `prove_every` of each for the memory."""
    from appliance.sync.manifest import record_tensor

    with tempfile.TemporaryDirectory() as folder:
        tensors = random_state(shapes, folder=Path(folder))
        records = tuple(record_tensor(name, tensor) for name, tensor in tensors.items())
        engines = [Engine(Path(folder), scheme=scheme, prove_every=prove_every) for scheme in schemes]
        timed_updates = []
        for pair in range(-1, pairs):
            for engine in engines:
                update = engine.update(tensors, records=records, pair=pair)
                timed_updates += [update] if pair >= 0 else []
        extra = {
            engine.scheme: peak_of_tensors(
                lambda engine=engine: engine.update(tensors, records=records, pair=pairs), times=prove_every
            )
            for engine in engines
        }
        return Measured(timed_updates, extra)


def random_state(shapes: Shapes, *, folder: Path) -> dict[str, Tensor]:
    """BF16 tensors of a Qwen2 by their names, in the order of its layers; its configuration into `folder`."""
    import torch
    from transformers import Qwen2ForCausalLM

    from appliance.bench.child import qwen2_config

    config = qwen2_config(shapes)
    config.save_pretrained(folder)
    generator = torch.Generator().manual_seed(0)
    with torch.device("meta"):
        model = Qwen2ForCausalLM(config)
    return {
        name: (torch.randn(tensor.shape, generator=generator) * 0.02).to(torch.bfloat16)
        for name, tensor in model.state_dict().items()
    }


def rows(measured: Measured) -> list[Row]:
    """Updates of every scheme and pair; the first scheme is what the others are compared with."""
    updates = measured.updates
    by_place = {(update.scheme, update.pair): update for update in updates}
    schemes = list(dict.fromkeys(update.scheme for update in updates))
    pairs = sorted({update.pair for update in updates})
    table_rows = []
    for scheme in schemes:
        of_scheme = [by_place[scheme, pair] for pair in pairs]
        table_rows.append(
            Row(
                scheme=scheme,
                seconds=median(update.seconds for update in of_scheme),
                ratio=median(by_place[scheme, pair].seconds / by_place[schemes[0], pair].seconds for pair in pairs),
                digest_s=median(update.digest_s for update in of_scheme),
                proof_s=median(update.proof_s for update in of_scheme),
                proof_share=sum(update.proof_s for update in of_scheme)
                / sum(update.seconds - update.digest_s for update in of_scheme),
                telemetry_s=median(update.telemetry_s for update in of_scheme),
                extra_mib=measured.extra_bytes[scheme] / 2**20,
                waiting_mib=max(update.waiting_bytes for update in of_scheme) / 2**20,
            )
        )
    return table_rows


def table(rows_of_table: list[Row]) -> str:
    lines = [
        "| scheme | update | to BF16 | digests | proof | proof's share | telemetry | extra memory | waiting |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows_of_table:
        emulated = " (emulated)" if row.scheme.spec.can_emulate else ""
        lines.append(
            f"| {row.scheme}{emulated} | {row.seconds:.3f} s | {row.ratio:.2f} | {row.digest_s:.3f} s "
            f"| {row.proof_s:.3f} s | {row.proof_share:.1%} | {row.telemetry_s:.3f} s "
            f"| {row.extra_mib:.0f} MiB | {row.waiting_mib:.1f} MiB |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sync", description=__doc__)
    parser.add_argument("--shapes", choices=sorted(NAMED_SHAPES), default="qwen2.5-0.5b")
    parser.add_argument("--layers", type=int, default=12)  # 178 million parameters
    parser.add_argument(
        "--pairs", type=int, help="updates of each scheme (default: a whole round of proofs, 8 times --prove-every)"
    )
    parser.add_argument("--prove-every", type=int, default=16)  # as runs of models that are not tiny have it
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--schemes", default=",".join(SCHEMES))
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    set_environment(options.threads)
    from appliance.engine.kernel_proof import ROTATION

    options.pairs = options.pairs or ROTATION * options.prove_every
    if options.output is not None:
        options.output.mkdir(parents=True, exist_ok=True)
    shapes = NAMED_SHAPES[options.shapes].replace(layers=options.layers)
    schemes = tuple(Scheme(name) for name in options.schemes.split(","))
    measured = measure(shapes, schemes=schemes, pairs=options.pairs, prove_every=options.prove_every)
    table_rows = rows(measured)
    text = f"{_heading(shapes, options)}\n\n{table(table_rows)}\n\n{LEGEND}\n"
    console.out(text)
    if options.output is not None:
        facts = {"shapes": shapes.model_dump(), "threads": options.threads, "prove_every": options.prove_every}
        value = {"schema_version": 1, **facts, **dataclasses.asdict(measured)}
        (options.output / "sync.json").write_text(json.dumps(value, indent=2) + "\n")
        (options.output / "sync.md").write_text(text)
    slow = [row.scheme for row in table_rows if row.ratio > MAX_RATIO or row.proof_share > MAX_PROOF_SHARE]
    if slow:
        console.say(f"above {MAX_RATIO} times BF16, or a proof of more than {MAX_PROOF_SHARE:.0%}: {', '.join(slow)}")
    return 0


def engine_env(threads: int) -> dict[str, str]:
    """Return the environment of a process with an engine; with no run's folder to attest in."""
    settings = {"is_cpu": True, "threads": threads, "kv_cache_gb": 1, "offline": True, "backends": ()}
    env = child_env(Path(tempfile.gettempdir()), **settings)
    return {name: value for name, value in env if name != PLAN_VARIABLE}


def set_environment(threads: int) -> None:
    """Set the environment before torch and vLLM are imported."""
    os.environ.update(engine_env(threads))


def _heading(shapes: Shapes, options: argparse.Namespace) -> str:
    import torch
    import vllm

    per_layer = 3 * shapes.hidden * shapes.intermediate + 2 * shapes.hidden**2 * (1 + shapes.kv_heads / shapes.heads)
    millions = (per_layer * shapes.layers + 2 * shapes.vocabulary * shapes.hidden) / 1e6
    proven = "all" if options.prove_every == 1 else f"1 of {options.prove_every}"
    return (
        f"# A weight update, scheme for scheme\n\n{ABOUT}\n\n"
        f"{options.shapes}, {shapes.layers} layers, {millions:.0f} million "
        f"parameters, a decoder layer {per_layer * 2 / 2**20:.0f} MiB in BF16; {options.pairs} updates of each in "
        f"turns, medians; layers proven at each update: {proven}; {options.threads} threads on {platform.machine()}, "
        f"torch {torch.__version__}, vLLM {vllm.__version__}."
    )


if __name__ == "__main__":
    sys.exit(main())
