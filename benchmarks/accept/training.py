"""Whole trainings as a user starts them, with random weights at real shapes, and the memory that they used."""

from __future__ import annotations

import json
import math
import os
import subprocess
import time
from pathlib import Path

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


def train(ground: Ground, *, by: str, size: str, layers: int, lora: bool = False, flow: bool = False) -> None:
    """Two steps of the recipe, on rewards of its own. Every step has its figures and a gradient, the engines got other
    weights than the first ones, the result is there, memory is within the estimate.

    lora: an adapter is trained, and what the engines get is the merged model.  flow: the trainer's forward is theirs.
    """
    wanted = TINY if ground.rehearsal else SIZES[size]
    if not ground.rehearsal:
        wanted = Size(**{**vars(wanted), "layers": layers})
    folder = make_model(wanted, folder=ground.folder / "model")
    problems = ground.folder / "problems.jsonl"
    problems.write_text("".join(json.dumps(_problem(number)) + "\n" for number in range(64)))
    rewards = ground.folder / "rewards.py"
    rewards.write_text(REWARDS)
    emulated = ground.rehearsal and by.startswith("fp8")
    sets = (
        *SETS,
        *(TINY_BATCH if ground.rehearsal else (*BATCH, "cluster.device=auto")),
        f"rollout.scheme={by}",
        f"quantization.emulate={str(emulated).lower()}",
        f"model.path={folder.absolute()}",
        f"task.train_file={problems.absolute()}",
        f"task.rewards=[{{name: '{rewards.absolute()}:drawn'}}, {{name: length, target: 2, weight: 0.1}}]",
        *((f"model.lora={{rank: {LORA_RANK}}}",) if lora else ()),
        *(("trainer.forward=rollout",) if flow else ()),
        f"cluster.run_dir={(ground.folder / 'runs').absolute()}",
    )
    code, samples = _run(ground, sets)
    run_dir = ground.folder / "runs" / "accept"
    ground.hold(code == 0, f"`appliance train` ended with {code}")
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["step"] > 0]
    ground.hold([line["step"] for line in steps] == [1, 2], f"there are steps {[line['step'] for line in steps]}")
    for line in steps:
        said = (line["scheme"], line["emulated"])
        ground.hold(said == (by, emulated), f"step {line['step']} was rolled out by {said}")
        finite = all(math.isfinite(line[key]) for key in ("grad_norm", "mismatch_k3_kl", "entropy"))
        ground.hold(finite, f"step {line['step']} has a gradient, mismatch or entropy that is not finite")
        ground.hold(line["grad_norm"] > 0, f"step {line['step']} has no gradient")
        if flow:  # on a CPU they are the same bits
            ground.figure(f"step {line['step']}, k3 of one flow", line["mismatch_k3_kl"], "nats")
            near = line["mismatch_k3_kl"] <= (0.0 if ground.rehearsal else FLOW_K3)
            ground.hold(near, f"step {line['step']}: {line['mismatch_k3_kl']} nats between the flow's sides")
    ground.hold((run_dir / "model" / "config.json").is_file(), "there is no model at the end")
    sent = [json.loads(line)["manifest"] for line in (run_dir / "sync" / "trainer-0-0.jsonl").read_text().splitlines()]
    ground.hold(sent[-1] != sent[0], "the weights that were sent at the end are the first ones")
    if lora:
        _hold_adapter(ground, run_dir, layers=json.loads((folder / "config.json").read_text())["num_hidden_layers"])
    _hold_proofs(ground, run_dir, tied=json.loads((folder / "config.json").read_text())["tie_word_embeddings"])
    last = steps[-1]
    for name in TIMES:
        ground.figure(f"step 2, {name}", last[name], "s")
    ground.figure("step 2, rollouts", last["rollout_tokens_per_s"], "tokens/s")
    _hold_memory(ground, read_plan(run_dir / "plan.json"), folder=folder, samples=samples, run_dir=run_dir)


def _hold_adapter(ground: Ground, run_dir: Path, *, layers: int) -> None:
    """All that was trained is an A and a B beside each linear, and it is there alone, too."""
    attested = json.loads((run_dir / "attest" / "trainer-0.json").read_text())["detail"]["trained"]
    ground.hold(attested == 2 * layers * len(Linear), f"{attested} tensors were trained")
    ground.hold((run_dir / "model" / "adapter" / "adapter_model.safetensors").is_file(), "there is no adapter")


def _problem(number: int) -> dict[str, str]:
    return {"question": f"Ann has {number} apples and buys 3. How many has she?"}


def _run(ground: Ground, sets: tuple[str, ...]) -> tuple[int, list[tuple[float, dict[Role, int]]]]:
    """Exit code, and what was held at each moment: by roles on a CPU, on a GPU all of its memory."""
    arguments = [part for each in sets for part in ("--set", each)]
    started = time.monotonic()
    process = subprocess.Popen(module_argv("appliance", "train", RECIPE, "--name", "accept", *arguments))
    run_dir, samples = ground.folder.absolute() / "runs" / "accept", []
    while process.poll() is None:
        held = held_by_role(run_dir, launcher=process.pid) if ground.rehearsal else {Role.TRAINER: _gpu_bytes()}
        samples.append((time.time(), held))
        time.sleep(SAMPLE_EVERY_S)
    ground.figure("from the command to its end", time.monotonic() - started, "s")
    return process.returncode, samples


def _hold_proofs(ground: Ground, run_dir: Path, *, tied: bool) -> None:
    """Of every sync. tied: one tensor, the head, has no layer of its own, and is held against the embedding."""
    file = run_dir / "sync" / "rollout-0-0.jsonl"
    taken = [parse(line, Acknowledgement, place=file.name) for line in file.read_text().splitlines()]
    ground.hold(len(taken) >= STEPS, f"the engine took {len(taken)} updates")
    first = taken[0]
    ground.hold(
        first.layers_proven == first.layers > 0, f"{first.layers_proven} of {first.layers} layers were proven first"
    )
    unproven = max(each.unproven for each in taken) - tied
    ground.hold(unproven <= 0, f"of {unproven} tensors nothing but their digest is known")


def _gpu_bytes() -> int:
    """That are taken on the first GPU that the training sees."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "").partition(",")[0] or "0"
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", f"--id={first}"]
    return int(subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]) << 20


def _hold_memory(
    ground: Ground, plan: RunPlan, *, folder: Path, samples: list[tuple[float, dict[Role, int]]], run_dir: Path
) -> None:
    shape = read_shape(folder / "config.json")
    assert shape is not None
    ground.figure("weights", shape.weights / 1e9, "billion")
    used = 0
    for phase, held in by_phase(samples, run_dir=run_dir):
        size = sum(each for _, each in held)
        used = max(used, size)
        ground.figure(f"memory while in {phase}", size / GIB, "GiB")
    estimated = peak(plan, shape) if ground.rehearsal else max(each.size for each in moments(plan, shape))
    ground.figure("memory, estimated", estimated / GIB, "GiB")
    ground.figure("memory, used of the estimate", used / estimated, "times")
    said = f"{used / GIB:.1f} GiB were used, {estimated / GIB:.1f} estimated"
    ground.hold(0 < used <= OVER * estimated, said)
