"""The estimate of a CPU run's memory, compared with real runs: `python -m benchmarks.memory -o FOLDER`.

Trains models of three sizes with random weights, the built-in model, and SmolLM2-135M in four ways, as a user would,
and samples what every process holds: proportional set size, in which a shared page counts in parts. What other programs
on the host map too, such as the libraries of another training, counts less then: run it alone, or from a copy of the
environment. Measures as well what weights, gradients and optimizer of a trainer take, by processes that hold nothing
else.

Writes `memory.json` (every number, which a test compares with the estimate) and `memory.md` (the tables). What
`memory.json` in FOLDER has of other cases stays, and so does what stands in `memory.md` from its first `##` on.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from appliance import console
from appliance.errors import TrainingError
from appliance.plan.build import build_plan
from appliance.plan.host import HostFacts
from appliance.plan.memory import Role, peak, shape_on_cpu, state_bytes
from appliance.plan.memory import memory_by_role as estimated
from appliance.preflight.probes import read_host
from appliance.processes import find_processes, return_free_memory
from appliance.recipe.load import load_recipe
from appliance.record.plan import RunPlan, TrainerMemory, read_plan
from appliance.settings.sections import Batch
from appliance.tasks.prepare import prepare
from appliance.terms.environment import RUN_VARIABLE
from appliance.terms.shapes import ModelShape, read_shape
from benchmarks.demo import here, pss_bytes

TINY, SMOLLM2 = "arithmetic-tiny-int8", "smollm2-int8"
SCHEMA_VERSION = 2
SAMPLE_EVERY_S = 0.5
LONGEST = 64  # tokens of a sequence of random weights, which rarely end one sooner
NO_VALIDATION = ("trainer.validate_before=false", "trainer.validate_every=0", "trainer.validate_bf16_every=0")
RANDOM = (
    *NO_VALIDATION,
    "model.builtin=null",
    "trainer.steps=10",
    f"task.max_response_tokens={LONGEST - 8}",
    "task.val_size=32",
    "batch.prompts_per_step=8",
    "rollout.samples_per_prompt=4",
)
OF_SMOLLM2 = (*NO_VALIDATION, "trainer.steps=2", "task.val_size=16", "batch.prompts_per_step=8")
ADAPTER = ("model.lora.rank=16", "model.lora.sync=adapter", "trainer.forward=rollout")


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
CASES = {  # by name: the recipe, and what is set in it
    **{size: (TINY, (*RANDOM, f"rollout.kv_cache_gb={SIZES[size].kv_cache_gb}")) for size in SIZES},
    "built-in": (TINY, (*NO_VALIDATION, "trainer.steps=10")),
    "SmolLM2, all weights, BF16": (SMOLLM2, (*OF_SMOLLM2, "rollout.scheme=bf16")),
    "SmolLM2, LoRA merged, INT8": (SMOLLM2, (*OF_SMOLLM2, "model.lora.rank=16")),
    "SmolLM2, adapter alone, INT8 base": (SMOLLM2, (*OF_SMOLLM2, *ADAPTER)),
    "SmolLM2, adapter alone, INT4 base": (SMOLLM2, (*OF_SMOLLM2, *ADAPTER, "rollout.scheme=int4")),
}
OF_SMOLLM2_CASES = tuple(case for case in CASES if case.startswith("SmolLM2"))
WORKLOADS = (  # cases, and what their runs do
    (
        tuple(SIZES),
        f"Qwen2 with random weights: 10 steps with INT8 rollouts of 32 sequences of up to {LONGEST} tokens.",
    ),
    (("built-in",), "The built-in model: 10 steps with INT8 rollouts, as the demo's recipe has them."),
    (OF_SMOLLM2_CASES, "SmolLM2-135M: 2 steps of 48 sequences of up to 80 tokens, adapters of rank 16."),
)
FULL, WITH_INT4_BASE = "SmolLM2, all weights, BF16", "SmolLM2, adapter alone, INT4 base"

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
    case: str
    shape: ModelShape
    steps: int
    seconds: float
    peaks: tuple[tuple[str, tuple[tuple[str, int], ...]], ...]
    """(phase, (role, bytes)...) at the moment of the phase when all roles together held most."""

    @property
    def fullest(self) -> tuple[str, dict[str, int]]:
        """Phase of the moment when all roles together held most, and the bytes of each role then."""
        phase, sizes = max(self.peaks, key=lambda peak: sum(size for _, size in peak[1]))
        return phase, dict(sizes)

    @property
    def total(self) -> int:
        """Bytes of all roles at that moment."""
        return sum(self.fullest[1].values())


@dataclass(frozen=True)
class Run:
    """A training: its plan, and what was measured of it."""

    plan: RunPlan
    measured: Measured


@dataclass(frozen=True)
class State:
    """Weights, gradients and optimizer of a case: bytes in a process that holds nothing else."""

    case: str
    estimated: int
    """Bytes by the plan on the host that measured."""
    measured: int


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, help="folder for memory.json and memory.md")
    parser.add_argument(
        "--cases", default=";".join(CASES), help="cases to measure, some of: " + ";".join(CASES) + "; empty: none"
    )
    parser.add_argument("--run-root", type=Path, default=Path("runs"))
    parser.add_argument("--state", choices=CASES, help="measure the state of this case in this process, and print it")
    arguments = parser.parse_args()
    root = arguments.run_root.absolute()
    if arguments.state:
        console.out(json.dumps(asdict(measured_state(arguments.state, root=root))))
        return 0
    arguments.output.mkdir(parents=True, exist_ok=True)
    runs = read(arguments.output, host=read_host(arguments.output))
    for case in filter(None, arguments.cases.split(";")):
        runs[case] = train(case, root=root)
        measured = runs[case].measured
        console.say(f"{case}: {measured.total / 1e9:.2f} GB in {measured.seconds:.0f} s")
        write(arguments.output, runs, states=read_states(arguments.output))
    write(arguments.output, runs, states=[state_of(case, root=root) for case in (FULL, WITH_INT4_BASE)])
    return 0


def train(case: str, *, root: Path) -> Run:
    """Raises TrainingError when the run does not end well."""
    recipe, sets = CASES[case]
    folder = make_model(SIZES[case], folder=root / ".cache" / "memory" / case) if case in SIZES else None
    run = f"memory-{time.time_ns() // 1_000_000}"
    run_dir = root / run
    sets = (*sets, *([f"model.path={folder}"] if folder else []), f"cluster.run_dir={root}")
    arguments = [part for each in sets for part in ("--set", each)]
    command = [sys.executable, "-m", "appliance", "train", recipe, "--name", run, *arguments]
    started = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    samples = []
    while process.poll() is None:
        samples.append((time.time(), held_by_role(run_dir, launcher=process.pid)))
        time.sleep(SAMPLE_EVERY_S)
    seconds = time.monotonic() - started
    if process.returncode:
        raise TrainingError(f"{case}: ended with code {process.returncode}", hint=f"see {run_dir}")
    plan = read_plan(run_dir / "plan.json")
    shape = shape_on_cpu(plan, read_shape(folder / "config.json") if folder else None)
    assert shape is not None
    measured = Measured(case, shape, plan.trainer.steps, seconds, by_phase(samples, run_dir=run_dir))
    return Run(plan, measured)


def state_of(case: str, *, root: Path) -> State:
    """Measure a case's state in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.memory", "--state", case, "--run-root", str(root)]
    answer = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout.splitlines()[-1]
    return State(**json.loads(answer))


def measured_state(case: str, *, root: Path) -> State:
    """Measure the bytes that weights, gradients and optimizer take between two updates, in this process: memory that is
    no file's, above what it takes with all libraries loaded. With codes in place of weights these are the codes, what
    multiplies by them, and what the gradients are computed with where the plan keeps that. root: of the run's folder,
    whose cache has the model or gets it."""
    import torch
    from transformers import AutoModelForCausalLM

    from appliance.sync.manifest import digest
    from appliance.trainer.lora import put_adapter_in
    from appliance.trainer.rollout_forward import RolloutForward
    from appliance.trainer.weights_on_disk import WeightsOnDisk

    recipe, sets = CASES[case]
    run_dir = root / f"state-{time.time_ns() // 1_000_000}"
    run_dir.mkdir(parents=True)
    recipe_of_case = load_recipe(recipe, sets=(*sets, f"cluster.run_dir={root}"))
    plan = build_plan(recipe_of_case, run_dir=run_dir, host=read_host(root))
    prepare(plan)
    folder = Path(plan.trained_model)
    torch.nn.functional.linear(torch.ones(256, 256).bfloat16(), torch.ones(256, 256).bfloat16())
    digest(torch.ones(4))
    before = _anonymous_bytes()
    dtype = torch.bfloat16 if plan.model.lora else torch.float32
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    flow = None
    if plan.model.lora:
        words = model.config.vocab_size
        keeps = plan.trainer_memory.keeps_copies
        flow = RolloutForward(model, quantisation=plan.engines[0], num_tokens=words, keeps_dequantised=keeps)
        model = put_adapter_in(model, lora=plan.model.lora, seed=0)
        flow.add_adapters(model, engine_rank=plan.model.lora.rank, files=WeightsOnDisk(folder))
    for parameter in model.parameters():  # what is loaded may be memory of a file
        parameter.data = parameter.data.clone()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if flow is not None:  # a forward and its backward, in the format in which FSDP gives an adapter to it
        for parameter in trained:
            parameter.data = parameter.data.bfloat16()
        ids = torch.arange(16)[None]
        model(input_ids=ids, position_ids=ids, shift_labels=ids, temperature=1.0).log_probs.sum().backward()
        for parameter in trained:
            parameter.grad = None
            parameter.data = parameter.data.float()
    optimizer = torch.optim.AdamW(trained)
    for parameter in trained:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    gc.collect()
    return_free_memory()
    taken = _anonymous_bytes() - before
    shape = shape_on_cpu(plan, None)
    assert shape is not None
    return State(case, estimated=state_bytes(plan, shape), measured=taken)


def _anonymous_bytes() -> int:
    status = Path(f"/proc/{os.getpid()}/status").read_text()
    (kibibytes,) = (int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon:"))
    return kibibytes << 10


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


def read(folder: Path, *, host: HostFacts) -> dict[str, Run]:
    """Read what an earlier call measured, by case; empty where there was none. host: any that the plans are for."""
    file = folder / "memory.json"
    document = json.loads(file.read_text()) if file.is_file() else {}
    runs = document["runs"] if document.get("schema_version") == SCHEMA_VERSION else []
    return {run["measured"]["case"]: run_of(run, host=host) for run in runs}


def run_of(document: dict[str, Any], *, host: HostFacts) -> Run:
    """Read one run of `memory.json`. Its plan is made again, with what memory decided then."""
    shape = {**document["measured"]["shape"], "architectures": tuple(document["measured"]["shape"]["architectures"])}
    measured = Measured(**{**document["measured"], "shape": ModelShape(**shape)})
    recipe, sets = CASES[measured.case]
    sets = (*sets, *(["model.path=/model"] if measured.case in SIZES else []))
    run_dir = Path("/runs/memory")
    plan = build_plan(load_recipe(recipe, sets=sets), run_dir=run_dir, host=host)
    batch, memory = Batch.model_validate(document["batch"]), TrainerMemory.model_validate(document["trainer_memory"])
    return Run(plan.replace(batch=batch, trainer_memory=memory), measured)


def read_states(folder: Path) -> list[State]:
    """Read the states that an earlier call measured."""
    file = folder / "memory.json"
    document = json.loads(file.read_text()) if file.is_file() else {}
    return [State(**each) for each in document.get("states", ())]


def write(folder: Path, runs: dict[str, Run], *, states: list[State]) -> None:
    where = here()
    ordered = [runs[case] for case in CASES if case in runs]
    documents = [
        {
            "measured": asdict(run.measured),
            "batch": run.plan.batch.model_dump(mode="json"),
            "trainer_memory": run.plan.trainer_memory.model_dump(mode="json"),
        }
        for run in ordered
    ]
    kept_states = [asdict(state) for state in states]
    document = {"schema_version": SCHEMA_VERSION, **where, "runs": documents, "states": kept_states}
    (folder / "memory.json").write_text(json.dumps(document, indent=1) + "\n")
    page_file = folder / "memory.md"
    _, heading, notes = (page_file.read_text() if page_file.is_file() else "").partition("\n## ")
    page_file.write_text("\n".join(page(ordered, states=states, where=where)) + "\n" + heading + notes)


def page(runs: list[Run], *, states: list[State], where: dict[str, object]) -> Iterator[str]:
    yield "# Memory of a run without a GPU, estimated and measured"
    yield ""
    yield "How near does the estimate of `appliance plan` come to the memory that a run without a GPU holds? Each"
    yield "model is trained as a user would train it. What else is known of the estimate is below the tables."
    yield ""
    yield "Made by `python -m benchmarks.memory -o docs/results`; every number is in [memory.json](memory.json)."
    yield f"Last taken on {where['date']}: {where['processor']}, {where['cores']} cores, CPython {where['python']}."
    yield ""
    measured_cases = {run.measured.case for run in runs}
    yield from (text for cases, text in WORKLOADS if not measured_cases.isdisjoint(cases))
    yield "A save is at the end of each. A role has one or more processes; its size, in GB, is the sum of their"
    yield "proportional set sizes (a page that two processes share counts half in each) at the moment when all roles"
    yield "together held most. The last column names the phase of that moment. The estimate takes each role at its own"
    yield "largest moment. *ratio* is the estimate divided by what was measured."
    yield ""
    yield "| model | " + " | ".join(f"{role}: estimated, measured" for role in Role) + " | all | ratio | held most in |"
    yield "| --- |" + " --- |" * (len(Role) + 3)
    for run in runs:
        measured = run.measured
        phase, sizes = measured.fullest
        roles = " | ".join(
            f"{size / 1e9:.2f}, {sizes[role] / 1e9:.2f}" for role, size in estimated(run.plan, measured.shape).items()
        )
        estimate = peak(run.plan, measured.shape)
        yield (
            f"| {measured.case} | {roles} | {estimate / 1e9:.2f}, {measured.total / 1e9:.2f} "
            f"| {estimate / measured.total:.2f} | `{phase}` |"
        )
    if states:
        full, codes = states
        yield ""
        yield "**Weights, gradients and optimizer** of the trainer of SmolLM2-135M between two updates, in a process"
        yield "that holds nothing else, MB. Beside an INT4 base these are its codes, what multiplies by them, and the"
        yield "dequantised weights that gradients are computed with, where the plan keeps those (here it does)."
        yield ""
        yield "| | estimated | measured |"
        yield "| --- | --- | --- |"
        for state in states:
            yield f"| {state.case} | {state.estimated / 1e6:.0f} | {state.measured / 1e6:.0f} |"
        yield f"| ratio | {codes.estimated / full.estimated:.2f} | {codes.measured / full.measured:.2f} |"


if __name__ == "__main__":
    sys.exit(main())
