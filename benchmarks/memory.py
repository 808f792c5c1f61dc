"""The estimate of a CPU run's memory, compared with real runs: `python -m benchmarks.memory -o FOLDER`.

Makes models of three sizes with random weights, trains each for two steps as a user would, and samples what every
process holds: proportional set size, in which a shared page counts in parts. Writes `memory.json` (every number, which
a test compares with the estimate) and `memory.md` (the table).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from appliance import console
from appliance.errors import TrainingError
from appliance.plan.memory import Role, peak
from appliance.plan.memory import memory_by_role as estimated
from appliance.processes import find_processes
from appliance.record.plan import RunPlan, read_plan
from appliance.terms.environment import RUN_VARIABLE
from appliance.terms.shapes import ModelShape, read_shape
from benchmarks.demo import here, pss_bytes

RECIPE = "arithmetic-tiny-int8"
SAMPLE_EVERY_S = 0.5
STEPS = 20
LONGEST = 64  # tokens of a sequence; random weights rarely end one sooner
SETS = (
    "model.builtin=null",
    f"trainer.steps={STEPS}",
    "trainer.validate_before=false",
    "trainer.validate_every=0",
    "trainer.validate_bf16_every=0",
    f"task.max_response_tokens={LONGEST - 8}",
    "task.val_size=32",
    "batch.prompts_per_step=8",
    "rollout.samples_per_prompt=4",
)


@dataclass(frozen=True)
class Size:
    kv_cache_gb: int
    """KV cache of the engine, GiB."""
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int


SIZES = {
    "1M": Size(kv_cache_gb=1, hidden=128, intermediate=352, layers=4, heads=2, kv_heads=1, vocab=2048),
    "30M": Size(kv_cache_gb=1, hidden=512, intermediate=1408, layers=8, heads=8, kv_heads=2, vocab=16384),
    "100M": Size(kv_cache_gb=2, hidden=768, intermediate=2048, layers=12, heads=12, kv_heads=4, vocab=32768),
}

# How a command line tells which role a process has; the first that fits counts. What fits none is Ray's.
_TITLES = (
    ("VLLM::EngineCor", Role.ENGINE),  # as the system keeps it: a fork has the command line of its parent
    ("ray::WorkerDict", Role.TRAINER),
    ("appliance-forks", Role.SERVICES),
    ("appliance.trainer.entry", Role.DRIVER),
    ("ray::", Role.SERVICES),
)


@dataclass(frozen=True)
class Measured:
    size: str
    shape: ModelShape
    steps: int
    seconds: float
    peaks: tuple[tuple[str, tuple[tuple[str, int], ...]], ...]
    """(phase, (role, bytes)...) at the moment of the phase when all roles together held most."""

    @property
    def most(self) -> dict[str, int]:
        """Per role, of whichever phase."""
        return {role: max(dict(held).get(role, 0) for _, held in self.peaks) for role in map(str, Role)}

    @property
    def total(self) -> int:
        """Bytes of all roles at the one moment when it was largest."""
        return max(sum(size for _, size in held) for _, held in self.peaks)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, required=True, help="folder for memory.json and memory.md")
    parser.add_argument("--sizes", default=",".join(SIZES), help="sizes to measure, some of: " + ", ".join(SIZES))
    parser.add_argument("--run-root", type=Path, default=Path("runs"))
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    measurements = []
    for name in arguments.sizes.split(","):
        plan, measured = train(name, root=arguments.run_root.absolute())
        measurements.append((plan, measured))
        console.say(f"{name}: {measured.total / 1e9:.2f} GB in {measured.seconds:.0f} s")
        write(arguments.output, measurements)
    return 0


def train(name: str, *, root: Path) -> tuple[RunPlan, Measured]:
    """Raises TrainingError when the run does not end well."""
    folder = make_model(SIZES[name], folder=root / ".cache" / "memory" / name)
    run = f"memory-{name}-{time.time_ns() // 1_000_000}"
    run_dir = root / run
    sets = (*SETS, f"rollout.kv_cache_gb={SIZES[name].kv_cache_gb}", f"model.path={folder}", f"cluster.run_dir={root}")
    arguments = [part for each in sets for part in ("--set", each)]
    command = [sys.executable, "-m", "appliance", "train", RECIPE, "--name", run, *arguments]
    started = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    samples = []
    while process.poll() is None:
        samples.append((time.time(), held_by_role(run_dir, launcher=process.pid)))
        time.sleep(SAMPLE_EVERY_S)
    if process.returncode:
        raise TrainingError(f"{name}: ended with code {process.returncode}", hint=f"see {run_dir}")
    shape = read_shape(folder / "config.json")
    assert shape is not None
    seconds = time.monotonic() - started
    return read_plan(run_dir / "plan.json"), Measured(name, shape, STEPS, seconds, by_phase(samples, run_dir=run_dir))


def make_model(size: Size, *, folder: Path) -> Path:
    """A Qwen2 with random weights and a tokenizer that has all its words: verl's engine never samples others, whose
    share of the trainer's probabilities would be a mismatch."""
    if (folder / "config.json").is_file():
        return folder
    import torch
    from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

    from appliance.tasks.tiny_model import save_tokenizer

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = save_tokenizer(folder, max_positions=2048, words=size.vocab)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=size.vocab,
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen2ForCausalLM(config).to(torch.bfloat16)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=False
    )
    model.save_pretrained(folder)
    return folder


def held_by_role(run_dir: Path, *, launcher: int) -> dict[Role, int]:
    """Bytes of proportional set size. launcher: the process id of `appliance train`."""
    bytes_by_role = dict.fromkeys(Role, 0)
    for pid in {launcher, *(one.pid for one in find_processes(f"{RUN_VARIABLE}={run_dir}", below=launcher))}:
        bytes_by_role[role_of(pid)] += pss_bytes(pid)
    return bytes_by_role


def role_of(pid: int) -> Role:
    try:
        comm_and_cmdline = [Path(f"/proc/{pid}/{file}").read_text(errors="replace") for file in ("comm", "cmdline")]
    except OSError:
        return Role.SERVICES
    called = " ".join(comm_and_cmdline).replace("\0", " ")
    return next((role for title, role in _TITLES if title in called), Role.SERVICES)


def by_phase(
    samples: list[tuple[float, dict[Role, int]]], *, run_dir: Path
) -> tuple[tuple[str, tuple[tuple[str, int], ...]], ...]:
    """samples: (unix time, held). What came before the first phase is of `start`."""
    events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    phases = [(event["time"], event["what"]) for event in events if event["kind"] == "phase"]
    largest: dict[str, dict[Role, int]] = {}
    for when, bytes_by_role in samples:
        phase = next((what for begun, what in reversed(phases) if begun <= when), "start")
        if sum(bytes_by_role.values()) > sum(largest.get(phase, {}).values()):
            largest[phase] = bytes_by_role
    return tuple((phase, tuple((str(role), size) for role, size in held.items())) for phase, held in largest.items())


def write(folder: Path, measurements: list[tuple[RunPlan, Measured]]) -> None:
    where = here()
    runs = [asdict(measured) for _, measured in measurements]
    document = {"schema_version": 1, **where, "recipe": RECIPE, "sets": SETS, "runs": runs}
    (folder / "memory.json").write_text(json.dumps(document, indent=1) + "\n")
    (folder / "memory.md").write_text("\n".join(page(measurements, where=where)) + "\n")


def page(measurements: list[tuple[RunPlan, Measured]], *, where: dict[str, object]) -> Iterator[str]:
    yield "# Memory of a run without a GPU, estimated and measured"
    yield ""
    yield "Made by `python -m benchmarks.memory -o docs/results`; every number is in `memory.json`."
    yield f"Taken on {where['date']}: {where['processor']}, {where['cores']} cores, CPython {where['python']}."
    yield ""
    yield f"Qwen2 with random weights, {STEPS} steps with INT8 rollouts, 32 sequences of up to {LONGEST} tokens, a save"
    yield "at the end. Proportional set size of all processes, GB. Each role is taken at its own largest moment, as the"
    yield "estimate does; `all` is the largest sum of one moment."
    yield ""
    yield (
        "| model | KV cache, GiB | " + " | ".join(f"{role}: estimated, measured" for role in Role) + " | all | ratio |"
    )
    yield "| --- | --- |" + " --- |" * (len(Role) + 2)
    for plan, measured in measurements:
        roles = " | ".join(
            f"{size / 1e9:.2f}, {measured.most[role] / 1e9:.2f}"
            for role, size in estimated(plan, measured.shape).items()
        )
        estimate = peak(plan, measured.shape)
        yield (
            f"| {measured.shape.weights / 1e6:.0f} M | {SIZES[measured.size].kv_cache_gb} | {roles} "
            f"| {estimate / 1e9:.2f}, {measured.total / 1e9:.2f} | {estimate / measured.total:.2f} |"
        )
    yield ""
    yield "When each run held most: " + "; ".join(
        f"{measured.size} while in `{largest_phase(measured)}`" for _, measured in measurements
    )


def largest_phase(measured: Measured) -> str:
    return max(measured.peaks, key=lambda each: sum(size for _, size in each[1]))[0]


if __name__ == "__main__":
    sys.exit(main())
