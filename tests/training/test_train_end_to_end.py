"""One real training of a few steps with INT8 rollouts: real vLLM, verl and Ray, started as a user starts it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from statistics import median

import pytest
from trainings import SECRETS, STEPS, VALIDATION_PROBLEMS, Finished, holding, ray_dir, train

from appliance.guard.policy import MismatchBounds
from appliance.launch.outcome import Child, failed_outcome
from appliance.plan import build
from appliance.quant.cpu_gemm import kernel_of
from appliance.quant.files import tensor_names
from appliance.record.state import RunState
from appliance.terms.environment import IN_ONE_PROCESS

pytestmark = pytest.mark.e2e(minutes=6)

KEYS_OF_EACH_STEP = {  # of docs/metrics.md: those that every step of such a run has
    "step",
    "time_s",
    "reward_mean",
    "response_tokens_mean",
    "unfinished_fraction",
    "rollout_tokens_per_s",
    "rollout_s",
    "logprob_s",
    "update_s",
    "sync_s",
    "proof_s",
    "codes_changed_fraction",
    "saturated_fraction",
    "scale_drift",
    "layer_error_max",
    "step_s",
    "scheme",
    "emulated",
    "mismatch_k3_kl",
    "mismatch_kl",
    "mismatch_equal_fraction",
    "probs_diff_mean",
    "probs_diff_max",
    "is_weight_mean",
    "is_weight_std",
    "is_weight_max",
    "is_ess",
    "is_truncated_fraction",
    "clip_fraction",
    "clipped_negative_fraction",
    "grad_norm",
    "entropy",
}


def test_every_step_has_its_metrics(short: Finished) -> None:
    lines = short.json_lines("metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(STEPS + 1))
    for line in lines[1:]:
        assert KEYS_OF_EACH_STEP - line.keys() == set()
        assert {key for key in KEYS_OF_EACH_STEP if line[key] is None} == set()
        assert 0 < line["proof_s"] < line["sync_s"] and 0 < line["layer_error_max"] < 0.02
        assert (line["scheme"], line["emulated"]) == ("int8", False)
        assert 0 <= line["reward_mean"] <= 1 and 0 <= line["unfinished_fraction"] <= 1
        assert 0 <= line["mismatch_k3_kl"] < 0.015
        assert 0.9 < line["is_weight_mean"] < 1.1 and line["is_ess"] > 0.9
    assert lines[0].keys() >= {"val_reward_mean", "val_samples", "scheme", "time_s"}
    assert lines[0]["val_samples"] == lines[STEPS]["val_samples"] == VALIDATION_PROBLEMS
    assert lines[0]["val_reward_bf16_mean"] is None  # by default only at the end
    assert abs(lines[STEPS]["val_reward_bf16_mean"] - lines[STEPS]["val_reward_mean"]) < 0.05
    shares = [line["telemetry_s"] / line["step_s"] for line in lines[1:]]
    assert min(shares) > 0 and median(shares) < 0.01


def test_what_the_libraries_print_of_a_run_that_ended_well_explains_no_failure(short: Finished) -> None:
    """Their logs mention optional parts that are not there. Whoever is killed later has these lines, too."""
    state, looked_at = RunState(STEPS, MismatchBounds()), 0
    for log in short.run_dir.glob("logs/*/*.log"):
        child = Child(log.stem, "training", (), default_code=5)
        for code, reason in ((-9, "ended by signal 9 (SIGKILL)"), (1, "exit code 1, and no word in the log")):
            ended = failed_outcome(child, returncode=code, state=state, log_tail=log.read_text(), log="", run="")
            assert ended.reason.startswith(reason), log
            looked_at += 1
    assert looked_at >= 2


def test_every_sync_is_proven_and_acknowledged(short: Finished) -> None:
    """One before training, one after each step and two for the last validation in BF16, all layers each time, with
    what the trainer sent."""
    sent = short.json_lines("sync/trainer-0-0.jsonl")
    taken = short.json_lines("sync/rollout-0-0.jsonl")
    assert [line["sync"] for line in sent] == [line["sync"] for line in taken] == list(range(1, STEPS + 4))
    assert [line["manifest"] for line in sent] == [line["manifest"] for line in taken]
    assert len({line["manifest"] for line in sent}) == STEPS + 3
    assert [line["scheme"] for line in taken] == [*["int8"] * (STEPS + 1), "bf16", "int8"]
    assert all(line["layers"] == 17 and line["parameters_proven"] == 22 for line in taken)


def test_every_worker_attests_int8(short: Finished) -> None:
    attested = {path.stem: json.loads(path.read_text()) for path in (short.run_dir / "attest").iterdir()}
    assert sorted(attested) == ["driver-0", "rollout-0-0", "trainer-0"]
    rollout, trainer = attested["rollout-0-0"], attested["trainer-0"]
    assert (rollout["scheme"], rollout["emulated"], rollout["role"]) == ("int8", False, "rollout")
    assert rollout["patches"] == sorted({*build.VERL_PATCHES, *build.CPU_ROLLOUT_PATCHES})
    kernel = f"CPUInt8ScaledMMLinearKernel[{kernel_of(256, 256).name}]"  # with AMX another, were a patch late
    kernels = rollout["detail"]["kernels"]
    assert {name: count for name, count in kernels.items() if "Int8" in name} == {kernel: 4 * 4}  # 4 linears, 4 layers
    assert (trainer["scheme"], trainer["detail"]["parameters"]) == ("bf16", "torch.float32")
    tensors = len(tensor_names(short.run_dir / "model" / "model.safetensors")) + 1  # its head is the embedding
    assert trainer["detail"]["loaded"] == tensors
    assert rollout["detail"]["threads"] == trainer["detail"]["threads"] == 1
    of_trainers = {*build.VERL_PATCHES, *build.CPU_TRAINER_PATCHES}
    assert trainer["patches"] == sorted(of_trainers)
    assert attested["driver-0"]["patches"] == sorted({*of_trainers, *build.DRIVER_PATCHES})
    assert len({one["fingerprint"] for one in attested.values()}) == 1


def test_a_start_is_told_phase_by_phase(short: Finished) -> None:
    """Imports have one of their own: they take more than half of it."""
    told = [event["what"] for event in short.json_lines("events.jsonl") if event["kind"] == "phase"]
    began = told.index("load-model")
    assert told[began - 2 : began] == ["import", "start"]


def test_the_run_folder_is_complete(short: Finished) -> None:
    record = json.loads((short.run_dir / "run.json").read_text())
    assert (record["state"], record["exit_code"]) == ("done", 0)
    names = {path.name for path in short.run_dir.iterdir()}
    assert names >= {
        "recipe.yaml",
        "plan.json",
        "versions.json",
        "run.json",
        "metrics.jsonl",
        "events.jsonl",
        "model",
    }
    assert (short.run_dir / "logs" / "1" / "train.log").stat().st_size > 0
    assert "Traceback" not in short.stderr and "killed by signal" not in short.stderr


def test_no_secret_of_the_environment_is_in_what_a_run_leaves(short: Finished) -> None:
    """Logs and databases included. The files are read as bytes, so none is passed over."""
    assert holding(short.run_dir, *SECRETS) == [] == holding(short.run_dir.parent / ".trackio", *SECRETS)
    assert not any(secret in short.stdout + short.stderr for secret in SECRETS)


def test_the_page_shows_the_run(short: Finished) -> None:
    page = (short.run_dir / "report.html").read_text()
    assert "<title>short: done</title>" in page and "nothing to show yet" not in page
    samples = short.json_lines("samples.jsonl")
    assert [(line["step"], len(line["validation"]), len(line["training"])) for line in samples] == [
        (0, 4, 0),
        *((step, 0, 2) for step in range(1, STEPS)),
        (STEPS, 4, 2),
    ]
    first, last = samples[0]["validation"], samples[-1]["validation"]
    assert [each["prompt"] for each in first] == [each["prompt"] for each in last]
    for each in (*first, *last):
        assert each["accuracy"] == float(each["response"].strip() == each["truth"]) and 0 < each["tokens"] <= 8
    assert max(line["pss_bytes"] for line in short.json_lines("memory.jsonl")) > 1 << 28  # of the children, too


def test_tensorboard_has_every_step_by_our_names(short: Finished) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(short.run_dir / "tensorboard"))
    events.Reload()
    rewards = {event.step: event.value for event in events.Scalars("appliance/reward_mean")}
    assert rewards == pytest.approx(
        {line["step"]: line["reward_mean"] for line in short.json_lines("metrics.jsonl") if line["step"]}
    )


def test_trackio_has_every_step_by_our_names(short: Finished) -> None:
    """Read by its own command, as the documentation says it."""
    run, metric = short.run_dir.name, ("--metric", "appliance/reward_mean", "--json")
    done = subprocess.run(
        [Path(sys.executable).with_name("trackio"), "get", "metric", "--project", "appliance", "--run", run, *metric],
        env={**os.environ, "TRACKIO_DIR": str(short.run_dir.parent / ".trackio")},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    rewards = {value["step"]: value["value"] for value in json.loads(done.stdout)["values"]}
    assert rewards == pytest.approx(
        {line["step"]: line["reward_mean"] for line in short.json_lines("metrics.jsonl") if line["step"]}
    )


def test_workers_and_engine_are_forks_of_one_process_that_has_imported(short: Finished) -> None:
    """verl says at its import what it does not find."""
    assert (short.run_dir / "logs" / "1" / "train.log").read_text().count("UserWarning: torchtitan engine") == 1


def test_every_process_of_ours_could_say_what_it_is_doing(short: Finished) -> None:
    """Its file is there from its start: the actors of the TransferQueue, which load nothing else of ours, are `ray`."""
    logs = short.run_dir / "logs" / "1"
    roles_and_ids = [path.stem.partition("-")[::2] for path in (logs / "stacks").iterdir()]
    assert {role for role, _ in roles_and_ids} >= {"driver", "engine", "ray", "reward"}
    in_the_log = set(re.findall(r"\((?:\w+ )?pid=(\d+)\)", (logs / "train.log").read_text()))
    assert in_the_log and in_the_log - {pid for _, pid in roles_and_ids} == set()


def test_nothing_is_left_running_and_nothing_in_the_temporary_folder(short: Finished) -> None:
    """But torch's folder for what it compiles."""
    assert short.left == ()
    assert not ray_dir(short.run_dir).exists()
    names = (short.run_dir.parent / "left").read_text().split()
    assert [name for name in names if not name.startswith("torchinductor_")] == []


def test_the_weights_changed_and_the_model_is_of_the_original_class(short: Finished) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    plan = json.loads((short.run_dir / "plan.json").read_text())
    before = AutoModelForCausalLM.from_pretrained(plan["weights"]["name_or_path"]).state_dict()
    model = AutoModelForCausalLM.from_pretrained(short.run_dir / "model")
    after = model.state_dict()
    assert type(model).__name__ == "Qwen2ForCausalLM" and before.keys() == after.keys()
    assert any(not torch.equal(before[name].float(), after[name].float()) for name in before)
    assert AutoTokenizer.from_pretrained(short.run_dir / "model").encode("1+2=")


def test_all_files_of_the_model_but_its_weights_are_those_it_began_with(short: Finished) -> None:
    base = Path(json.loads((short.run_dir / "plan.json").read_text())["weights"]["name_or_path"])
    before, after = (
        {file.name: file.read_bytes() for file in folder.iterdir()} for folder in (base, short.run_dir / "model")
    )
    assert {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"} <= before.keys()
    assert before.keys() == after.keys()
    assert [name for name in before if before[name] != after[name]] == ["model.safetensors"]


def test_plain_transformers_reaches_the_last_validation(short: Finished) -> None:
    import pyarrow.parquet as parquet
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    plan = json.loads((short.run_dir / "plan.json").read_text())
    rows = parquet.read_table(plan["task_files"]["val_parquet"]).to_pylist()
    tokenizer = AutoTokenizer.from_pretrained(short.run_dir / "model", padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(short.run_dir / "model", dtype=torch.bfloat16)
    chat = {"add_generation_prompt": True, "return_dict": True, "return_tensors": "pt", "padding": True}
    prompts = tokenizer.apply_chat_template([row["prompt"] for row in rows], tokenize=True, **chat)
    with torch.no_grad():
        answers = model.generate(**prompts, do_sample=False, max_new_tokens=8)[:, prompts["input_ids"].shape[1] :]
    said = tokenizer.batch_decode(answers, skip_special_tokens=True)
    right = [text.strip() == row["reward_model"]["ground_truth"] for text, row in zip(said, rows, strict=True)]
    reward, last = sum(right) / len(right), short.json_lines("metrics.jsonl")[-1]["val_reward_mean"]
    assert abs(reward - last) <= 0.02, f"plain transformers {reward}, last validation {last}"


def test_plain_vllm_reaches_the_last_validation(short: Finished, tmp_path: Path) -> None:
    """The exported model in a vLLM without us: no plugin, no quantisation, its own process."""
    script = tmp_path / "plain.py"
    script.write_text(PLAIN_VLLM)
    env = {key: value for key, value in os.environ.items() if not key.startswith(("APPLIANCE_", "VERL_"))}
    env |= {"VLLM_PLUGINS": "", "TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"} | IN_ONE_PROCESS
    plan = json.loads((short.run_dir / "plan.json").read_text())
    done = subprocess.run(
        [sys.executable, str(script), str(short.run_dir / "model"), plan["task_files"]["val_parquet"]],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=env,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answers = [line for line in done.stdout.splitlines() if line.startswith('{"reward"')]  # vLLM prints there too
    assert len(answers) == 1, done.stdout[-3000:]
    reward = json.loads(answers[0])["reward"]
    last = short.json_lines("metrics.jsonl")[-1]["val_reward_mean"]
    assert abs(reward - last) <= 0.02, f"plain vLLM {reward}, last validation {last}"


# Without AMX: vLLM's own kernels for it end a process at times with an illegal instruction (`cpu-no-amx-tiles`).
PLAIN_VLLM = """
import json, sys, torch
torch.cpu._is_amx_tile_supported = lambda: False
import pyarrow.parquet as parquet
from transformers import AutoTokenizer
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    model, rows = sys.argv[1], parquet.read_table(sys.argv[2]).to_pylist()
    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = [
        tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, tokenize=True, return_dict=False)
        for row in rows
    ]
    llm = LLM(model, enforce_eager=True, max_model_len=64, kv_cache_memory_bytes=1 << 28)
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], SamplingParams(temperature=0, max_tokens=8))
    right = [out.outputs[0].text.strip() == row["reward_model"]["ground_truth"] for out, row in zip(outputs, rows)]
    print(json.dumps({"reward": sum(right) / len(right)}))
"""


@pytest.fixture(scope="module")
def guarded(short_root: Path, short: Finished) -> Finished:
    """A bound that every step breaks: a warning, a stop one step later. And DAPO, with a penalty that responses of
    more than two tokens pay, which is all that are right."""
    sets = ("trainer.steps=50", "trainer.validate_before=false", "guard.k3_kl=1e-12", "guard.bad_steps=1")
    sets += ("guard.actions=[warn, stop]",)
    ours = ("correction.uaq_scale=1.5", "correction.method=calibrated-clipping", "correction.shadow_every=1")
    dapo = ("algorithm.kind=dapo", "algorithm.overlong_tokens=4", "algorithm.overlong_penalty=0.5")
    more = ("batch.generation_prompts=64", "guard.cooling_steps=0")
    return train(short_root, *sets, *ours, *dapo, *more, name="guarded", timeout_s=600)


def test_the_guard_saves_and_stops_a_run_with_code_6(guarded: Finished, short_root: Path) -> None:
    """The state of the last step is on disk."""
    assert guarded.code == 6, guarded.stderr[-3000:]
    finished = guarded
    guard_events = [event for event in finished.json_lines("events.jsonl") if event["kind"] == "guard"]
    assert [(event["step"], event["action"]) for event in guard_events] == [(1, "warn"), (2, "stop")]
    lines = finished.json_lines("metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2]
    assert [event["numbers"][0]["value"] for event in guard_events] == [line["mismatch_k3_kl"] for line in lines]
    assert lines[1]["mismatch_by_length"][0]["num_tokens"] > 0
    saved = finished.run_dir / "checkpoints" / "global_step_2" / "actor" / "huggingface"
    assert (saved / "config.json").is_file()
    record = json.loads((finished.run_dir / "run.json").read_text())
    assert (record["state"], record["exit_code"]) == ("stopped", 6)
    assert record["reason"].startswith("stopped by the guard: step 2: warn -> stop: k3_kl ")
    assert finished.left == ()
    clip_bounds_were_refitted(finished)
    the_checkpoint_is_scaled_and_folds_back(finished, short_root=short_root)


def clip_bounds_were_refitted(run: Finished) -> None:
    fits, lines = run.json_lines("clipping.jsonl"), run.json_lines("metrics.jsonl")
    assert [fit["step"] for fit in fits] == [1, 2] and all(fit["tokens"] > 64 for fit in fits)
    assert [line["clip_fitted_step"] for line in lines] == [None, 1]
    assert (lines[0]["clip_bound_low"], lines[0]["clip_bound_high"]) == (0.8, 1.2)
    assert 0.5 <= lines[1]["clip_bound_low"] <= 0.8 and 1.2 <= lines[1]["clip_bound_high"] <= 2


def the_checkpoint_is_scaled_and_folds_back(run: Finished, *, short_root: Path) -> None:
    """Two updates at a rate of 2e-4 move a norm by a thousandth; UAQ moved it by half, and the way back undoes that."""
    from safetensors.torch import load_file

    from appliance.record.plan import read_plan
    from appliance.trainer.export import export_checkpoint

    plan = read_plan(run.run_dir / "plan.json")
    checkpoint = run.run_dir / "checkpoints" / "global_step_2"
    export_checkpoint(checkpoint, target=short_root / "folded", uaq=plan.uaq)
    folders = (Path(plan.weights.name_or_path), checkpoint / "actor" / "huggingface", short_root / "folded")
    name = "model.layers.0.input_layernorm.weight"
    before, saved, folded = (load_file(folder / "model.safetensors")[name].double().norm() for folder in folders)
    assert saved / before == pytest.approx(1.5, rel=0.01) and folded / before == pytest.approx(1, rel=0.01)


def test_dapo_trains_on_full_steps_of_prompts_that_say_something(guarded: Finished) -> None:
    """What the filter leaves out is replaced. Rewards are 1 and -1, less the penalty, which the filter does not see."""
    lines = guarded.json_lines("metrics.jsonl")
    assert sum(line["filtered_prompts"] for line in lines) > 0  # of 64 prompts, of which each is one with 8 %
    for line in lines:
        assert line["generated_prompts"] == 32 + line["filtered_prompts"] + line["discarded_prompts"]
        assert -1.5 <= line["reward_mean"] < 1
        assert line["equal_group_fraction"] == 0  # samples that are all the same are all right or all wrong
        assert line["rollout_tokens_per_s"] > 0
