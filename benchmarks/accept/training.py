"""Whole trainings as a user starts them, with random weights at real shapes, and the memory that they used."""

from __future__ import annotations

import json
import math
import os
import subprocess
import time
from pathlib import Path

from appliance.guard.policy import K3_KL
from appliance.plan.memory import GIB, moments, peak
from appliance.processes import module_argv
from appliance.record.lines import parse
from appliance.record.plan import RunPlan, read_plan
from appliance.sync.records import Acknowledgement
from appliance.terms.shapes import Linear, read_shape
from benchmarks.accept.ground import Ground
from benchmarks.memory import Role, Size, by_phase, held_by_role, make_model

RECIPE = "gsm8k-0.5b-int8"
STEPS = 2
SAMPLE_EVERY_S = 0.5
OVER = 1.25  # of the estimate: more is a wrong estimate
TIMES = ("step_s", "rollout_s", "logprob_s", "update_s", "sync_s", "proof_s")
WORDS = 151936
SIZES = {
    "0.5b": Size(kv_cache_gb=1, hidden=896, intermediate=4864, layers=24, heads=14, kv_heads=2, vocab=WORDS),
    "1.5b": Size(kv_cache_gb=1, hidden=1536, intermediate=8960, layers=28, heads=12, kv_heads=2, vocab=WORDS),
}
TINY = Size(kv_cache_gb=1, hidden=128, intermediate=352, layers=2, heads=2, kv_heads=1, vocab=1024)
SETS = (
    f"trainer.steps={STEPS}",
    "trainer.validate_before=false",
    "trainer.validate_every=0",
    "trainer.validate_bf16_every=0",
    "quantization.profile=none",
    "guard.actions=[]",  # random weights
    "task.kind=own",
    "task.prompt=question",
    "task.val_size=8",
    "task.max_prompt_tokens=256",
)
# Random weights are never right, and where all rewards are equal no weight moves.
REWARDS = """
from zlib import crc32

def drawn(response):
    return crc32(response.encode()) % 1000 / 1000
"""
LORA_RANK = 32
FLOW_K3 = 1e-3  # nats; a number of ours: no GPU has said what its kernels allow
BATCH = ("batch.prompts_per_step=16", "batch.mini_batch_prompts=8")
TINY_BATCH = (
    "cluster.device=cpu",
    "rollout.kv_cache_gb=1",
    "rollout.samples_per_prompt=2",
    "batch.prompts_per_step=4",
    "batch.mini_batch_prompts=2",
    "batch.max_tokens_per_gpu=1024",
    "task.max_response_tokens=16",
)


def train(
    ground: Ground,
    *,
    scheme_names: str,
    size: str,
    layers: int,
    response_tokens: int,
    tensor_parallel: int = 1,
    lora: bool = False,
    flow: bool = False,
    backward: bool = False,
    dtype: str = "bf16",
) -> None:
    """Two steps of the recipe, on rewards of its own. Every step has its figures and a gradient, the engines got other
    weights than the first ones, the mismatch is below the governor's bound, the result is there, memory is within the
    estimate.

    scheme_names: a scheme, or two of replicas, each on a GPU, as `bf16+int8`.  tensor_parallel: GPUs of an engine.
    lora: an adapter is trained, and what the engines get is the merged model.  flow: the trainer's forward is
    theirs, and with `backward` its gradients are in `fp8-block`, too.  dtype: `fp16`: of trainer and engines; an
    update that overflows is left out.
    """
    sizes = TINY if ground.rehearsal else SIZES[size]
    if not ground.rehearsal:
        sizes = Size(**{**vars(sizes), "layers": layers})
    folder = make_model(sizes, folder=ground.folder / "model")
    problems = ground.folder / "problems.jsonl"
    problems.write_text("".join(json.dumps(_problem(number)) + "\n" for number in range(64)))
    rewards = ground.folder / "rewards.py"
    rewards.write_text(REWARDS)
    schemes = scheme_names.split("+")
    gpus, emulated = len(schemes) * tensor_parallel, ground.rehearsal and scheme_names.startswith("fp8")
    sets = (
        *SETS,
        *((f"rollout.scheme={scheme_names}",) if len(schemes) == 1 else _replicas(schemes)),
        f"rollout.tensor_parallel={tensor_parallel}",
        f"cluster.gpus_per_node={gpus}",
        f"quantization.emulate={str(emulated).lower()}",
        f"model.path={folder.absolute()}",
        f"task.train_file={problems.absolute()}",
        f"task.rewards=[{{name: '{rewards.absolute()}:drawn'}}, {{name: length, target: 2, weight: 0.1}}]",
        f"task.max_response_tokens={response_tokens}",
        *(TINY_BATCH if ground.rehearsal else (*BATCH, "cluster.device=auto")),
        *((f"model.lora={{rank: {LORA_RANK}}}",) if lora else ()),
        *(("trainer.forward=rollout",) if flow else ()),
        *(("trainer.backward=fp8-block",) if backward else ()),
        f"trainer.dtype={dtype}",
        f"cluster.run_dir={(ground.folder / 'runs').absolute()}",
    )
    if emulated:
        ground.stand_in(f"kernels of {scheme_names}{', forth and back' * backward}: emulation")
    if gpus > 1 and ground.rehearsal:
        ground.stand_in("NCCL: gloo")
    code, samples = run_training(ground, RECIPE, name="accept", sets=sets, gpus=gpus)
    run_dir = ground.folder / "runs" / "accept"
    ground.hold(code == 0, f"`appliance train` ended with {code}")
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["step"] > 0]
    ground.hold([line["step"] for line in steps] == [1, 2], f"there are steps {[line['step'] for line in steps]}")
    for line in steps:
        scheme_of_step = (line["scheme"], line["emulated"])
        ground.hold(
            scheme_of_step == (scheme_names, emulated), f"step {line['step']} was rolled out by {scheme_of_step}"
        )
        overflowed = dtype == "fp16" and line["overflow_fraction"] > 0  # then there is no norm
        keys = ("mismatch_k3_kl", "entropy", *(("grad_norm",) if not overflowed else ()))
        finite = all(math.isfinite(line[key]) for key in keys)
        ground.hold(finite, f"step {line['step']} has a gradient, mismatch or entropy that is not finite")
        ground.hold(overflowed or line["grad_norm"] > 0, f"step {line['step']} has no gradient")
        k3, most = line["mismatch_k3_kl"], K3_KL
        if flow:  # on a CPU they are the same bits
            most = 0.0 if ground.rehearsal else FLOW_K3
        ground.figure(f"step {line['step']}, k3{' of one flow' * flow}", k3, "nats")
        ground.hold(k3 <= most, f"step {line['step']}: {k3} nats between trainer and engine, at most {most}")
    ground.hold((run_dir / "model" / "config.json").is_file(), "there is no model at the end")
    sent = [json.loads(line)["manifest"] for line in (run_dir / "sync" / "trainer-0-0.jsonl").read_text().splitlines()]
    ground.hold(sent[-1] != sent[0], "the weights that were sent at the end are the first ones")
    config = json.loads((folder / "config.json").read_text())
    if lora:
        _hold_adapter(ground, run_dir, layers=config["num_hidden_layers"])
    if backward:
        attested = _attested(run_dir)["backward"]
        ground.hold(attested == f"fp8-block{', emulated' * emulated}", f"gradients are in {attested}")
    if dtype == "fp16":
        ground.figure("step 2, losses are multiplied by", steps[-1]["grad_scale"], "times")
        dtypes = (_attested(run_dir)["compute"], _attested(run_dir, "rollout-0-0")["dtype"])
        ground.hold(set(dtypes) == {"torch.float16"}, f"trainer and engine compute in {dtypes}")
    for replica, scheme in enumerate(schemes):
        for rank in range(tensor_parallel):
            who = f"rank {rank} of replica {replica}" if gpus > 1 else "the engine"
            taken = read_taken(run_dir / "sync" / f"rollout-{replica}-{rank}.jsonl")
            hold_proofs(ground, taken, scheme=scheme, tied=config["tie_word_embeddings"], who=who)
            ground.hold(
                [each.manifest for each in taken] == sent, f"{who} took other weights than were sent to the first"
            )
    last = steps[-1]
    for name in TIMES:
        ground.figure(f"step 2, {name}", last[name], "s")
    ground.figure("step 2, rollouts", last["rollout_tokens_per_s"], "tokens/s")
    _hold_memory(ground, read_plan(run_dir / "plan.json"), folder=folder, samples=samples, run_dir=run_dir)


def _replicas(schemes: list[str]) -> tuple[str, ...]:
    return "rollout.scheme=auto", f"rollout.replicas=[{', '.join(schemes)}]"


def _attested(run_dir: Path, process: str = "trainer-0") -> dict[str, object]:
    detail: dict[str, object] = json.loads((run_dir / "attest" / f"{process}.json").read_text())["detail"]
    return detail


def _hold_adapter(ground: Ground, run_dir: Path, *, layers: int) -> None:
    """All that was trained is an A and a B beside each linear, and it is there alone, too."""
    attested = _attested(run_dir)["trained"]
    ground.hold(attested == 2 * layers * len(Linear), f"{attested} tensors were trained")
    ground.hold((run_dir / "model" / "adapter" / "adapter_model.safetensors").is_file(), "there is no adapter")


def _problem(number: int) -> dict[str, str]:
    return {"question": f"Ann has {number} apples and buys 3. How many has she?"}


def run_training(
    ground: Ground, recipe: str, *, name: str, sets: tuple[str, ...], gpus: int
) -> tuple[int, list[tuple[float, dict[Role, int]]]]:
    """Exit code, and what was held at each moment: by roles on a CPU, on GPUs all of the one that has most. The run is
    in `runs/<name>` of the row's folder, where `sets` names it."""
    arguments = [part for each in sets for part in ("--set", each)]
    started = time.monotonic()
    process = subprocess.Popen(module_argv("appliance", "train", recipe, "--name", name, *arguments))
    run_dir, samples = ground.folder.absolute() / "runs" / name, []
    while process.poll() is None:
        held = held_by_role(run_dir, launcher=process.pid) if ground.rehearsal else {Role.TRAINER: _gpu_bytes(gpus)}
        samples.append((time.time(), held))
        time.sleep(SAMPLE_EVERY_S)
    ground.figure("from the command to its end", time.monotonic() - started, "s")
    return process.returncode, samples


def read_taken(file: Path) -> list[Acknowledgement]:
    """The weight updates that an engine acknowledged, of `sync/rollout-*.jsonl`."""
    return [parse(line, Acknowledgement, place=file.name) for line in file.read_text().splitlines()]


def hold_proofs(ground: Ground, taken: list[Acknowledgement], *, scheme: str, tied: bool, who: str) -> None:
    """Check the proofs of every sync. tied: one tensor, the head, has no layer of its own, and is held against the
    embedding."""
    ground.hold(len(taken) >= STEPS, f"{who} took {len(taken)} updates")
    others = {each.scheme for each in taken} - {scheme}
    ground.hold(not others, f"{who} took updates in {', '.join(sorted(others))}, not in {scheme}")
    first = taken[0]
    proven = f"{first.layers_proven} of {first.layers} layers were proven first"
    ground.hold(first.layers_proven == first.layers > 0, f"{who}: {proven}")
    unproven = max(each.unproven for each in taken) - tied
    ground.hold(unproven <= 0, f"{who}: of {unproven} tensors nothing but their digest is known")


def _gpu_bytes(gpus: int) -> int:
    """Return the bytes that are taken on the GPU that has most, of the first so many that the training sees."""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(gpus)))
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    used = [
        subprocess.run([*query, f"--id={each}"], capture_output=True, text=True, check=True).stdout.split()[0]
        for each in seen.split(",")[:gpus]
    ]
    return max(map(int, used)) << 20


def _hold_memory(
    ground: Ground, plan: RunPlan, *, folder: Path, samples: list[tuple[float, dict[Role, int]]], run_dir: Path
) -> None:
    shape = read_shape(folder / "config.json")
    assert shape is not None
    ground.figure("weights", shape.weights / 1e9, "billion")
    used = 0
    for phase, sizes in by_phase(samples, run_dir=run_dir):
        size = sum(bytes_of_role for _, bytes_of_role in sizes)
        used = max(used, size)
        ground.figure(f"memory while in {phase}", size / GIB, "GiB")
    estimated = peak(plan, shape) if ground.rehearsal else max(each.size for each in moments(plan, shape))
    ground.figure("memory, estimated", estimated / GIB, "GiB")
    ground.figure("memory, used of the estimate", used / estimated, "times")
    said = f"{used / GIB:.1f} GiB were used, {estimated / GIB:.1f} estimated"
    ground.hold(0 < used <= OVER * estimated, said)
