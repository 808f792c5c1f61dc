"""How each system trains: ours, another commit of it, and what people would use instead. Every one is a fresh process
that does the same work, and returns a line of numbers for each of its steps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from appliance.control_groups import usable_cores
from appliance.errors import TrainingError
from appliance.plan.verl_args import ACTOR, MODEL, ROLLOUT, VLLM, Value, hydra_value
from appliance.tasks.built_in import word_problems

ROOT = Path(__file__).parents[2]
AS_AVX2 = ROOT / "benchmarks/as_avx2"  # in PYTHONPATH, it hides what a CPU has beyond AVX2
PROMPTS, SAMPLES, PROMPT_TOKENS, RESPONSE_TOKENS, LEARNING_RATE = 16, 8, 64, 24, 2e-5
SEQUENCES = PROMPTS * SAMPLES
PEER_LIMIT_S = 3600  # of a peer's training, which takes minutes: one that hangs is no reason to wait for ever
OURS = {
    "ours": (),
    "ours-bf16": ("rollout.scheme=bf16",),
    "one-flow": ("trainer.forward=rollout",),
    "one-flow-with-pass": ("trainer.forward=rollout", "trainer.old_log_probs=recompute"),
    "with-pass": ("trainer.old_log_probs=recompute",),
}
TRL = {"trl": (), "trl-vllm": ("--vllm",), "trl-vllm-uncorrected": ("--vllm", "--uncorrected")}
VERL: dict[str, dict[str, Value]] = {
    "verl": {f"{ROLLOUT}.calculate_log_probs": False},  # only verl's metrics would use them
    "verl-bypass": {"algorithm.rollout_correction.bypass_mode": True},  # the rollouts' log-probs are the old ones
}
OLD = "old"
PEERS = (*TRL, *VERL)
SYSTEMS = (*OURS, *PEERS)
USUAL = ("ours", "one-flow", "trl", "trl-vllm", "verl")
VLLM_ON_A_CPU = {  # in TRL's own process: examples/trl/README.md says why
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_USE_AOT_COMPILE": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "FLASHRL_CONFIG": "bf16",
}
VERL_ON_A_CPU = {
    "VERL_PLATFORM": "cpu",  # which benchmarks/step/verl_peer.py registers
    "VERL_USE_EXTERNAL_MODULES": "benchmarks.step.verl_peer",
    "VERL_ENGINE_DEVICE": "cuda",  # verl registers its FSDP engine for cuda and npu only; it runs on any device
    "TORCHDYNAMO_DISABLE": "1",  # as for every other system: no compiler is needed
    "VLLM_PLUGINS": "",  # nothing of ours
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_WAIT_POLICY": "PASSIVE",  # trainer and engine take turns: threads that spin take the other's core
    "RAY_USAGE_STATS_ENABLED": "0",
}
VERL_PHASES = {  # of verl's metrics, by the names of ours
    "step_s": "timing_s/step",
    "reward_mean": "critic/score/mean",
    "response_tokens_mean": "response_length/mean",
    "rollout_s": "timing_s/gen",
    "logprob_s": "timing_s/old_log_prob",
    "update_s": "timing_s/update_actor",
    "sync_s": "timing_s/update_weights",
}
Lines = list[dict[str, Any]]


@dataclass(frozen=True)
class Setting:
    """What a peer may choose for this host."""

    micro_batch: int
    """Sequences of a forward."""
    checkpointing: bool
    """Whether activations are computed again for the backward."""
    padded: bool = True
    """Whether sequences are padded to the longest of a forward. Otherwise they lie behind one another in one row; verl
    alone can do that."""
    by_tokens: bool = False
    """Whether a forward takes sequences up to the tokens that `micro_batch` of the longest ones may have. verl alone
    can do that."""

    def __str__(self) -> str:
        whole = ", a whole step" if self.micro_batch == SEQUENCES else ""
        size = f"tokens of {self.micro_batch} longest" if self.by_tokens else f"{self.micro_batch}"
        packed = "" if self.padded else ", without padding"
        checkpointing = f"{'with' if self.checkpointing else 'no'} checkpointing"
        return f"{size} sequences a forward{whole}, {checkpointing}{packed}"


def variants(peer: str, setting: Setting) -> list[Setting]:
    """Return what else a peer may choose with forwards of that size: each differs from the setting in one thing."""
    with_checkpointing = [replace(setting, checkpointing=not setting.checkpointing)]
    if peer not in VERL:
        return with_checkpointing
    return [*with_checkpointing, replace(setting, padded=False), replace(setting, by_tokens=True)]


@dataclass(frozen=True)
class Bench:
    """What all systems share."""

    folder: Path
    """Folder of runs, problems and peers, absolute."""
    model: Path
    problems: Path
    old: str | None
    """Another commit of this repository."""
    avx2: bool = False
    """Whether every process computes as on a CPU with AVX2 and without AVX-512."""

    def train(self, system: str, *, steps: int, setting: Setting | None) -> Lines:
        """Train in processes of its own. setting: of a peer.  Raises TrainingError with what it printed last."""
        if system in TRL:
            assert setting is not None, "a peer has a setting"
            return self._train_trl(system, steps=steps, setting=setting)
        if system in VERL:
            assert setting is not None, "a peer has a setting"
            return self._train_verl(system, steps=steps, setting=setting)
        root = self._commit() if system == OLD else ROOT
        recipe = write_recipe(self.folder / "recipe.json", model=self.model, problems=self.problems, steps=steps)
        name = f"{system}-{time.time_ns() // 1_000_000}"
        command = [str(root / ".venv/bin/appliance"), "train", str(recipe), "--name", name]
        sets = (f"cluster.run_dir={self.folder}", *OURS.get(system, ()))
        command += [part for value in sets for part in ("--set", value)]
        environment = {**os.environ, "PYTHONPATH": self._python_path()}  # without this checkout: each its own code
        run_command(command, folder=root, name=system, environment=environment)
        return [json.loads(line) for line in (self.folder / name / "metrics.jsonl").read_text().splitlines()]

    def _python_path(self, *folders: Path) -> str:
        """PYTHONPATH of a system's processes."""
        return os.pathsep.join(map(str, (*([AS_AVX2] if self.avx2 else []), *folders)))

    def _commit(self) -> Path:
        """A worktree of the other commit with its environment."""
        assert self.old is not None, "the other system is named by its commit"
        folder = self.folder / f"commit-{self.old}"
        if not folder.exists():
            run_command(["git", "worktree", "add", "--detach", str(folder), self.old], folder=ROOT, name=self.old)
        run_command(["make", "setup"], folder=folder, name=self.old)
        return folder

    def _train_trl(self, system: str, *, steps: int, setting: Setting) -> Lines:
        library = fetch_trl(self.folder / "trl")
        command = trl_command(model=self.model, problems=self.problems, steps=steps, setting=setting, more=TRL[system])
        environment = {**os.environ, **VLLM_ON_A_CPU, "PYTHONPATH": self._python_path(ROOT, library)}
        text = run_command(command, folder=self.folder, name=system, environment=environment, limit_s=PEER_LIMIT_S)
        return [json.loads(line) for line in text.splitlines() if line.startswith("{")]

    def _train_verl(self, system: str, *, steps: int, setting: Setting) -> Lines:
        data = write_verl_problems(self.problems, path=self.folder / "verl.jsonl")
        with tempfile.TemporaryDirectory(prefix="verl-") as folder:  # short: Ray's sockets lie in it
            metrics = Path(folder, "metrics.jsonl")
            values = verl_values(model=self.model, data=data, steps=steps, setting=setting, folder=Path(folder))
            environment = {
                **os.environ,
                **VERL_ON_A_CPU,
                "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(usable_cores())),  # Ray would set 1
                "VERL_FILE_LOGGER_PATH": str(metrics),
                "PYTHONPATH": self._python_path(ROOT),
            }
            command = verl_command({**values, **VERL[system]})
            # Not in the benchmark's folder: verl would take the folder `trl` there for the package of that name.
            run_command(command, folder=Path(folder), name=system, environment=environment, limit_s=PEER_LIMIT_S)
            return [verl_line(json.loads(line)["data"]) for line in metrics.read_text().splitlines()]


def write_problems(path: Path) -> Path:
    """The training problems of `word-problems` as a file that every system reads, one JSON object a line."""
    problems = word_problems.splits(difficulty=2, seed=0, train_size=0, val_size=8).train
    rows = [{"system": word_problems.SYSTEM, "question": one.prompt, "answer": one.truth} for one in problems]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def find_model() -> Path:
    """SmolLM2-135M as a folder, which any commit and any peer loads by its path. Made where it is missing."""
    run_command([sys.executable, "-m", "appliance", "profile", "smollm2-int8"], folder=ROOT, name="the model")
    plan = [sys.executable, "-m", "appliance", "plan", "smollm2-int8", "--json"]
    document = json.loads(run_command(plan, folder=ROOT, name="the model"))
    return Path(document["plan"]["weights"]["name_or_path"]).absolute()


def write_recipe(path: Path, *, model: Path, problems: Path, steps: int) -> Path:
    """Write a recipe with keys that older commits have, too: memory and speed are left to each commit's own
    defaults."""
    recipe = {
        "name": "step",
        "model": {"path": str(model)},
        "task": {
            "kind": "own",
            "train_file": str(problems),
            "val_size": 8,
            "prompt": "question",
            "truth": "answer",
            "system": word_problems.SYSTEM,
            "rewards": [{"name": "number"}],
            "max_prompt_tokens": PROMPT_TOKENS,
            "max_response_tokens": RESPONSE_TOKENS,
        },
        "rollout": {"scheme": "int8", "samples_per_prompt": SAMPLES},
        "correction": {"method": "tis"},
        "optimizer": {"learning_rate": LEARNING_RATE},
        "batch": {"prompts_per_step": PROMPTS},
        "trainer": {"steps": steps, "validate_before": False, "validate_every": 0},
        "checkpoint": {"every_steps": 0},
        "cluster": {"device": "cpu"},
        "guard": {"actions": ["warn"]},
    }
    path.write_text(json.dumps(recipe, indent=1) + "\n")  # YAML 1.2 holds JSON
    return path


def fetch_trl(folder: Path) -> Path:
    """TRL alone; this environment has all that it needs."""
    if not (folder / "trl").is_dir():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        lock = ["--require-hashes", "--requirement", str(ROOT / "requirements/trl.txt")]
        run_command([*pip, *lock, "--target", str(folder)], folder=ROOT, name="TRL")
    return folder


def trl_command(*, model: Path, problems: Path, steps: int, setting: Setting, more: tuple[str, ...]) -> list[str]:
    options = {
        "model": model,
        "problems": problems,
        "steps": steps,
        "prompts": PROMPTS,
        "samples": SAMPLES,
        "response-tokens": RESPONSE_TOKENS,
        "learning-rate": LEARNING_RATE,
        "micro-batch": setting.micro_batch,
    }
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    return [
        *(sys.executable, "-m", "benchmarks.step.trl_peer", *words, *more),
        *(["--checkpointing"] if setting.checkpointing else []),
    ]


def write_verl_problems(problems: Path, *, path: Path) -> Path:
    """Write the same problems in verl's schema."""
    rows = [
        {
            "data_source": "word-problems",
            "prompt": [{"role": "system", "content": row["system"]}, {"role": "user", "content": row["question"]}],
            "reward_model": {"style": "rule", "ground_truth": row["answer"]},
            "extra_info": {"index": number},
        }
        for number, row in enumerate(map(json.loads, problems.read_text().splitlines()))
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def verl_values(*, model: Path, data: Path, steps: int, setting: Setting, folder: Path) -> dict[str, Value]:
    """Return verl's settings for a small model on one device, by key; `+` before a key: verl's configuration has it
    not. folder: of Ray's files, with a short path."""
    ray = "ray_kwargs.ray_init"
    longest = PROMPT_TOKENS + RESPONSE_TOKENS
    return {
        "algorithm.adv_estimator": "grpo",
        "data.train_files": str(data),
        "data.val_files": str(data),
        "data.train_batch_size": PROMPTS,
        "data.max_prompt_length": PROMPT_TOKENS,
        "data.max_response_length": RESPONSE_TOKENS,
        "data.dataloader_num_workers": 0,
        f"{MODEL}.path": str(model),
        f"{MODEL}.use_remove_padding": not setting.padded,
        f"{MODEL}.enable_gradient_checkpointing": setting.checkpointing,
        f"+{MODEL}.override_config.attn_implementation": "sdpa",  # verl's default is a package for GPUs
        f"{ACTOR}.strategy": "fsdp2",
        f"{ACTOR}.use_torch_compile": False,
        f"{ACTOR}.fsdp_config.use_torch_compile": False,
        f"{ACTOR}.optim.lr": LEARNING_RATE,
        f"{ACTOR}.ppo_mini_batch_size": PROMPTS,
        f"{ACTOR}.ppo_micro_batch_size_per_gpu": setting.micro_batch,
        f"{ACTOR}.use_dynamic_bsz": setting.by_tokens,
        f"{ACTOR}.ppo_max_token_len_per_gpu": setting.micro_batch * longest,
        f"{ROLLOUT}.name": "vllm",
        f"{ROLLOUT}.n": SAMPLES,
        f"{ROLLOUT}.tensor_model_parallel_size": 1,
        f"{ROLLOUT}.enforce_eager": True,
        f"{ROLLOUT}.max_model_len": longest,
        f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": setting.micro_batch,
        f"{ROLLOUT}.agent.num_workers": 1,
        # A CPU's vLLM does not sleep, and its kernels take updates by this extension alone.
        f"{ROLLOUT}.free_cache_engine": False,
        f"+{ROLLOUT}.enable_sleep_mode": False,
        f"+{VLLM}.worker_extension_cls": "benchmarks.step.verl_weights.LayerwiseExtension",
        f"+{VLLM}.distributed_executor_backend": "uni",
        "reward.num_workers": 1,
        "reward.custom_reward_function.path": "pkg://benchmarks.step.verl_peer",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
        "trainer.device": "cpu",
        "trainer.n_gpus_per_node": 1,
        "trainer.logger": ["file"],
        "trainer.total_training_steps": steps,
        "trainer.total_epochs": steps,
        "trainer.val_before_train": False,
        "trainer.resume_mode": "disable",
        f"+{ray}.address": "local",
        f"{ray}.num_cpus": 16,  # of Ray's counting: one for each of verl's processes
        f"+{ray}.num_gpus": 1,
        f"+{ray}.include_dashboard": False,
        f"+{ray}._temp_dir": str(folder / "ray"),
        "hydra.run.dir": str(folder / "hydra"),
    }


def verl_command(values: dict[str, Value]) -> list[str]:
    return [
        sys.executable,
        "-m",
        "verl.trainer.main_ppo",
        *(f"{key}={hydra_value(one)}" for key, one in values.items()),
    ]


def verl_line(metrics: dict[str, float]) -> dict[str, float]:
    """Return a step of verl's metrics by the names that ours have."""
    return {name: metrics[theirs] for name, theirs in VERL_PHASES.items()}


def run_command(
    command: list[str],
    *,
    folder: Path,
    name: str,
    environment: dict[str, str] | None = None,
    limit_s: float | None = None,
) -> str:
    """Run a command and return its stdout. Raises TrainingError with the end of what it printed, also where it was
    ended at the limit."""
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=limit_s
        )
    except subprocess.TimeoutExpired as error:
        printed = b"".join((error.stdout or b"", error.stderr or b"")).decode(errors="replace")  # bytes in any case
        raise failure(f"{name} was ended after {limit_s} s", command=command, printed=printed) from error
    if done.returncode:
        raise failure(f"{name} ended with code {done.returncode}", command=command, printed=done.stdout + done.stderr)
    return done.stdout


def failure(what: str, *, command: list[str], printed: str) -> TrainingError:
    last_lines = "\n".join(printed.splitlines()[-20:])
    return TrainingError(f"{what}: {' '.join(command)}\n{last_lines}")
