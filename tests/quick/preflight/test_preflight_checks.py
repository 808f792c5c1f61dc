import dataclasses
import json
from pathlib import Path

import pytest
from plans import DISK, HOST, INPUTS

from appliance.finding import Finding, Severity, fault, finding_lines, findings_as_json
from appliance.plan.build import build_plan
from appliance.plan.host import HostFacts, HostGpu
from appliance.plan.model_shape import model_shape
from appliance.preflight.checks import estimates, judge
from appliance.preflight.disk import Disk, Disks, Written
from appliance.preflight.inputs import InputFacts
from appliance.recipe.load import load_recipe
from appliance.record.plan import RunPlan
from appliance.tasks.library import TINY_MODELS
from appliance.terms.families import FAMILIES, Family
from appliance.terms.shapes import KNOWN, ModelShape, read_shape

GPU_HOST = dataclasses.replace(HOST, gpus=(HostGpu("NVIDIA A100-SXM4-80GB", 80 << 30),))


def planned(*sets: str, recipe: str = "arithmetic-tiny-int8") -> RunPlan:
    return build_plan(load_recipe(recipe, sets=sets), run_dir=Path("/runs/a-1"), host=HOST)


SMALL_SHM_REMEDY = "in a container: --shm-size=2g"
FP8_REMEDY = "use `int8` or `bf16`, or `auto`, or quantization.emulate for its numbers alone"


def findings(
    *sets: str,
    recipe: str = "arithmetic-tiny-int8",
    host: HostFacts = HOST,
    inputs: InputFacts | None = None,
    **facts: object,
) -> list[tuple[str, str]]:
    """(text, remedy); facts: changes of HOST.  inputs: None: INPUTS, with the sizes of the plan's model."""
    plan = planned(*sets, recipe=recipe)
    inputs = inputs or with_inputs(model_shape=model_shape(plan.model, weights=plan.weights))
    found = judge(plan, host=dataclasses.replace(host, **facts), inputs=inputs)
    return [(each.text, each.remedy) for each in found if each.severity is not Severity.INFO]


def with_inputs(**facts: object) -> InputFacts:
    return dataclasses.replace(INPUTS, **facts)


def test_shared_memory_is_asked_for_by_what_trains():
    """Docker's default is enough for a tiny model, and for nothing else."""
    docker = {"shm_free_bytes": 64 << 20}
    assert findings(**docker) == []
    cpu = findings("model.path=/nowhere/qwen", "model.builtin=null", recipe="gsm8k-tiny-int8", **docker)
    assert ("error: /dev/shm: 64 MiB free, Ray and the weight updates need about 256", SMALL_SHM_REMEDY) in cpu
    tiny = TINY_MODELS["tiny-arithmetic"].shape
    for layers, free, needed in ((5, 64, None), (5, 49, 50), (6, 64, 256)):
        inputs = with_inputs(model_shape=dataclasses.replace(tiny, layers=layers))
        message = f"error: /dev/shm: {free} MiB free, Ray and the weight updates need about {needed}"
        expected = [(message, SMALL_SHM_REMEDY)] if needed else []
        assert findings(inputs=inputs, shm_free_bytes=free << 20) == expected, (layers, free)
    gpu = findings(recipe="gsm8k-0.5b-int8", host=GPU_HOST, **docker)
    assert (
        "error: /dev/shm: 64 MiB free, Ray and the weight updates need about 1024",
        "in a container: --shm-size=32g",
    ) in gpu


def test_nothing_to_say():
    assert findings() == []


@pytest.mark.parametrize(
    ("facts", "finding"),
    [
        ({"python": (3, 12)}, ("error: python: version 3.12 is untested", "use CPython 3.11")),
        (
            {"missing_libraries": ("libnuma.so.1",)},
            (
                "error: libnuma.so.1: the shared library is missing, vLLM needs it",
                "apt-get install libnuma1 (or your distribution's package with it)",
            ),
        ),
        (
            {"run_root_problem": "/runs is on a read-only file system"},
            (
                "error: cluster.run_dir: /runs is on a read-only file system",
                "set cluster.run_dir to a folder that you can write to",
            ),
        ),
        (
            {"memory_free_bytes": 3 << 29},
            (
                "warning: memory: 0.6 GiB are missing: 1.5 GiB free, the run takes about 2.1 GiB",
                "close other programs; take a larger host",
            ),
        ),
        (
            {"shm_free_bytes": 8 << 20},
            (
                "error: /dev/shm: 8 MiB free, Ray and the weight updates need about 48",
                "in a container: --shm-size=2g",
            ),
        ),
        (
            {"cpu_flags": frozenset({"avx2"})},
            (
                "warning: rollout.scheme: this processor has none of amx_int8, avx512_vnni, avx_vnni: "
                "INT8 runs, no faster than BF16",
                "use `auto` or `bf16`",
            ),
        ),
    ],
)
def test_host(facts, finding):
    assert findings(**facts) == [finding]


def test_a_slow_scheme_is_said_once():
    kinds = ((("avx2",), ["scheme-slow"]), (("avx512_vnni",), []), (("amx_int8", "amx_bf16"), ["gain"]))
    for flags, codes in kinds:
        found = judge(planned(), host=dataclasses.replace(HOST, cpu_flags=frozenset(flags)), inputs=INPUTS)
        assert [each.code for each in found if each.place == "rollout.scheme"] == codes


@pytest.mark.parametrize(
    ("flags", "scheme", "reason"),
    [
        (
            {"avx512_vnni"},
            "fp8",
            "vLLM's FP8 kernels on a CPU need AMX, which this processor does not have, so `fp8` cannot run",
        ),
        (
            {"amx_bf16"},
            "fp8-block",
            "on a CPU vLLM widens FP8 weights and multiplies in BF16 (W8A16), which is not `fp8-block`",
        ),
    ],
)
def test_fp8_on_a_cpu(flags, scheme, reason):
    found = findings(f"rollout.scheme={scheme}", cpu_flags=frozenset(flags))
    assert found == [(f"error: rollout.scheme: {reason}", FP8_REMEDY)]


@pytest.mark.parametrize(
    ("device", "reason"),
    [
        ("a100", "FP8 needs compute capability 8.9, a100 has 8.0"),
        ("a10", "FP8 needs compute capability 8.9, a10 has 8.6"),
    ],
)
def test_fp8_on_a_gpu(device, reason):
    host = dataclasses.replace(HOST, gpus=(HostGpu(f"NVIDIA {device.upper()}", 80 << 30),))
    found = findings("rollout.scheme=fp8", f"cluster.device={device}", host=host)
    assert found == [(f"error: rollout.scheme: {reason}", FP8_REMEDY)]


def test_a_gpu_is_wanted_and_there_is_none():
    found = findings(recipe="gsm8k-0.5b-int8")
    remedy = "run it on a host with 1 x `a100`, or try `--set cluster.device=cpu`"
    assert found == [("error: cluster.device: `a100` is wanted, this host has no GPU", remedy)]


def test_too_few_or_other_gpus():
    found = findings("cluster.gpus_per_node=2", recipe="gsm8k-0.5b-int8", host=GPU_HOST)
    text = "error: cluster.device: 2 x `a100` wanted, this host has NVIDIA A100-SXM4-80GB"
    assert found == [(text, "run it on a host with 2 x `a100`")]


def test_the_right_gpu():
    assert findings(recipe="gsm8k-0.5b-int8", host=GPU_HOST) == []


def test_a_model_that_uaq_cannot_scale():
    found = findings("correction.uaq_scale=1.5", inputs=with_inputs(uaq_problem="/m: UAQ: no layers"))
    remedy = "leave out correction.uaq_scale, or use a model of the list of families"
    assert found == [("error: correction.uaq_scale: /m: UAQ: no layers", remedy)]


def test_a_model_folder_that_is_not_there():
    sets = ("model.builtin=null", "model.path=/no/model")
    found = findings(*sets, inputs=with_inputs(model_folder_exists=False))
    assert found == [("error: model.path: /no/model: no such folder", "correct the path")]


def test_a_model_whose_tokenizer_takes_no_messages():
    [(text, remedy)] = findings("model.builtin=null", "model.path=/m", inputs=with_inputs(has_chat_template=False))
    assert text.startswith("error: model.path: /m has no chat template: ")
    assert remedy == "take an instruct model, or add a chat_template.jinja to the model's folder"


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        (("weights",), "no weights"),
        (("tokenizer",), "no tokenizer"),
        (("config.json", "weights", "tokenizer"), "no config.json and no weights and no tokenizer"),
    ],
)
def test_a_model_folder_that_is_incomplete(missing, words):
    refusals = findings("model.builtin=null", "model.path=/m", inputs=with_inputs(model_missing=missing))
    text = f"error: model.path: /m: the folder has {words}"
    remedy = "point to a complete transformers model; *.bin and *.pt are pickles, which can run code: convert them"
    assert refusals == [(text, remedy)]


def test_heads_that_vllm_has_no_kernel_for_on_a_cpu():
    shape = ModelShape(heads=4, head_size=16, architectures=("Qwen2ForCausalLM",))
    sets = ("model.builtin=null", "model.path=/m")
    (found,) = findings(*sets, inputs=with_inputs(model_shape=shape))
    assert found == (
        "error: model.path: the attention heads of /m are 16 wide, and vLLM on a CPU cannot compute with them",
        "use a model with one of 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512",
    )
    assert findings(*sets, inputs=with_inputs(model_shape=dataclasses.replace(shape, head_size=32))) == []


def test_a_model_that_does_not_fit_the_recipe():
    inputs = with_inputs(model_shape=ModelShape(heads=14, max_positions=12, architectures=("Qwen2ForCausalLM",)))
    sets = ("model.builtin=null", "model.path=/m", "rollout.tensor_parallel=4", "cluster.gpus_per_node=4")
    assert findings(*sets, inputs=inputs) == [
        (
            "error: task.max_response_tokens: prompt and response are up to 14 tokens, /m takes 12",
            "lower it, or task.max_prompt_tokens",
        ),
        ("error: rollout.tensor_parallel: 4 does not divide the 14 attention heads of /m", "use a divisor"),
    ]


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        ({"hub_problem": "https://hub cannot be reached (no route)"}, "https://hub cannot be reached (no route)"),
        ({"is_offline": True}, "HF_HUB_OFFLINE is set"),
    ],
)
def test_hub_names_without_a_hub(facts, why):
    found = findings(recipe="gsm8k-0.5b-int8", host=GPU_HOST, inputs=with_inputs(**facts))
    assert found == [
        (
            f"error: model.path: `Qwen/Qwen2.5-0.5B-Instruct` is not a folder and not in the hub's cache, and {why}",
            "give a folder, or download it where there is a network",
        ),
        (
            f"error: task.train_file: none is given, so the data comes from the hub, and {why}",
            "give a JSON-lines or parquet file",
        ),
    ]


def test_what_is_cached_needs_no_hub():
    inputs = with_inputs(is_offline=True, model_is_cached=True, has_data=True)
    assert findings(recipe="gsm8k-0.5b-int8", host=GPU_HOST, inputs=inputs) == []


def test_faults_of_data_keep_their_place():
    row = fault(("d.jsonl:3",), "the field `answer` is missing", "each line is …")
    inputs = with_inputs(data_faults=(row,))
    found = findings("task.train_file=d.jsonl", recipe="gsm8k-tiny-int8", inputs=inputs)
    assert found == [("error: d.jsonl:3: the field `answer` is missing", "each line is …")]


def test_log_backend_that_is_not_installed():
    sets = ("logging.backends=[wandb, trackio]",)
    found = findings(*sets, packages=frozenset({"wandb"}))
    text = "error: logging.backends: the package `trackio` is not installed"
    assert found == [(text, "pip install trackio, or leave it out")]


def test_remote_code_is_said():
    sets = ("model.builtin=null", "model.path=/m", "model.trust_remote_code=true")
    assert [text for text, _ in findings(*sets)] == [
        "warning: model.trust_remote_code: Python code that comes with /m will run",
    ]


@pytest.mark.parametrize(
    ("sets", "needed", "hint"),
    [
        (
            ("rollout.top_p=0.9",),
            ("top_p", "429.2", "50,000"),
            "a trained model has a handful; rollout.top_k bounds them",
        ),
        (("rollout.top_p=0.9", "rollout.top_k=20000"), ("top_k", "171.7", "20,000"), "lower it"),
        (("rollout.top_k=1000",), None, ""),
        ((), None, ""),
    ],
)
def test_words_of_a_token_that_memory_could_not_hold_are_said(
    sets: tuple[str, ...], needed: tuple[str, str, str] | None, hint: str
) -> None:
    """12 bytes of each, of 32 * 8 * 3,000 tokens."""
    sets = (*sets, "batch.prompts_per_step=32", "rollout.samples_per_prompt=8", "task.max_response_tokens=3000")
    inputs = with_inputs(model_shape=ModelShape(vocab=50_000))
    findings_of_words = [
        each for each in findings(*sets, "model.builtin=null", "model.path=/m", inputs=inputs) if "drawn" in each[0]
    ]
    expected = []
    if needed is not None:
        key, size, words = needed
        text = (
            f"warning: rollout.{key}: the words that a step's tokens are drawn from take {size} GiB where the model is "
            f"so unsure that each token has {words} of them; 20.0 GiB are free"
        )
        expected = [(text, hint)]
    assert findings_of_words == expected


def test_checkpoints_of_a_large_model_need_disk():
    plan = planned("checkpoint.every_steps=10", "model.builtin=null", "model.path=/m")
    assert estimates(plan, model_bytes=1 << 30)[0] == ("disk", "about 26.2 GiB")
    assert estimates(planned(recipe="gsm8k-0.5b-int8"))[0] == ("disk", "unknown until downloaded")


@pytest.mark.parametrize(
    ("sets", "disk"),
    [
        ((), "about 10.2 GiB"),  # logs, `model/` of 2 GiB, one checkpoint of 8
        (("checkpoint.every_steps=10",), "about 26.2 GiB"),  # after 10, 20 and 30
        (("checkpoint.keep_best=true",), "about 26.2 GiB"),
        (("checkpoint.keep_best=true", "checkpoint.every_steps=15"), "about 34.2 GiB"),  # 10, 15, 20, 30
        (
            ("checkpoint.every_minutes=5",),
            "about 10.2 GiB, and 8.0 GiB more with each save by checkpoint.every_minutes: all of them stay",
        ),
    ],
)
def test_where_all_checkpoints_stay_each_is_counted(sets: tuple[str, ...], disk: str) -> None:
    plan = planned("model.builtin=null", "model.path=/m", "trainer.steps=30", "checkpoint.keep=null", *sets)
    assert estimates(plan, model_bytes=1 << 30)[0] == ("disk", disk)


def test_a_model_whose_files_are_in_fp32_needs_no_more_disk_than_in_bf16():
    """As the `model/` of a run, which another one may train on."""
    plan, shape = planned("model.builtin=null", "model.path=/m"), KNOWN["Qwen/Qwen2.5-0.5B-Instruct"]
    said = {estimates(plan, model_bytes=size * shape.weights, shape=shape)[0] for size in (0, 2, 4)}
    assert said == {estimates(plan, model_bytes=2 * shape.weights)[0]}
    disk = dataclasses.replace(DISK, free_bytes=12 << 30)  # by hand: 0.5e9 x 16 bytes at once, 0.5e9 x 4, logs
    inputs = with_inputs(model_bytes=4 * shape.weights, model_shape=shape, disks=Disks(disk, checkpoints=disk))
    assert not any("cluster.run_dir" in each for each, _ in findings("model.path=/m", "model.builtin=", inputs=inputs))


def test_a_save_that_takes_longer_than_a_stop_may_last_is_said():
    """32B, by hand: 64 GiB of weights in BF16 are checkpoints of 512 GiB, 550 s at 1 GB/s."""
    disk = dataclasses.replace(DISK, free_bytes=1 << 60)
    inputs = with_inputs(model_bytes=64 << 30, disks=Disks(disk, checkpoints=disk))
    sets = ("model.builtin=null", "model.path=/m")
    assert findings(*sets, inputs=inputs) == [
        (
            "warning: guard.save_budget_s: a run that is to stop has 300 s to end its step and save 512.0 GiB",
            "a disk that takes 1 GB/s needs 550 s for the save alone: raise it, and the grace period of the host",
        )
    ]
    assert findings(*sets, "guard.save_budget_s=600", inputs=inputs) == []


def test_a_resume_needs_no_room_for_what_is_written_already():
    """What a disk was sized for is enough: 3 checkpoints of 8 GiB at most, 2 of them there, and `model/`."""
    sets = ("checkpoint.every_steps=10", "model.builtin=null", "model.path=/m", "correction.uaq_scale=1.5")
    gib = 1 << 30

    def short(free: float, written: Written) -> list[str]:
        disk = dataclasses.replace(DISK, free_bytes=int(free * gib))
        inputs = with_inputs(model_bytes=gib, written=written, disks=Disks(disk, checkpoints=disk))
        return [text for text, _ in findings(*sets, inputs=inputs)]

    assert short(28.25, Written()) == []
    assert short(28.2, Written()) == [
        "error: cluster.run_dir: 28.2 GiB free at /runs/a-1, the run needs about 28.2 GiB"
    ]
    twice = Written(checkpoints=16 * gib, scaled=2 * gib)
    assert short(10.25, twice) == []
    assert short(10.1, twice) == [
        "error: cluster.run_dir: 10.1 GiB free at /runs/a-1, the run needs about 10.2 GiB more"
    ]
    assert short(2.25, Written(checkpoints=99 * gib, scaled=99 * gib)) == []  # one does not pay for the other


def test_each_disk_is_asked_for_what_goes_to_it():
    """4.2 GiB for `model/`, logs and the scaled model, and 24 GiB of checkpoints on a disk of their own."""
    sets = ("checkpoint.every_steps=10", "model.builtin=null", "model.path=/m", "correction.uaq_scale=1.5")
    gib = 1 << 30

    def short(run: float, checkpoints: float, written: Written = Written()) -> list[tuple[str, str]]:
        disks = Disks(
            Disk("/runs/a-1", free_bytes=int(run * gib), number=1),
            checkpoints=Disk("/large/a-1", free_bytes=int(checkpoints * gib), number=2),
        )
        return findings(*sets, inputs=with_inputs(model_bytes=gib, written=written, disks=disks))

    of_run = (
        "error: cluster.run_dir: 4.0 GiB free at /runs/a-1, the run needs about 4.2 GiB besides its checkpoints",
        "free some space there",
    )
    of_checkpoints = (
        "error: /runs/a-1/checkpoints: 23.5 GiB free at /large/a-1, the checkpoints need about 24.0 GiB",
        "free some space there, or move them to a roomier disk, with a link in their place",
    )
    assert short(4.5, 24) == []
    assert short(4, 24) == [of_run]
    assert short(100, 23.5) == [of_checkpoints]
    assert short(4, 23.5) == [of_run, of_checkpoints]
    assert short(4.5, 16, Written(checkpoints=8 * gib)) == []
    assert short(2.5, 15.5, Written(checkpoints=8 * gib, scaled=2 * gib)) == [
        (of_checkpoints[0].replace("23.5", "15.5").replace("24.0 GiB", "16.0 GiB more"), of_checkpoints[1])
    ]
    assert short(2, 24, Written(scaled=2 * gib)) == [
        (of_run[0].replace("4.0", "2.0").replace("4.2 GiB", "2.2 GiB more"), of_run[1])
    ]


def test_one_disk_is_asked_for_all_of_it():
    for free, texts in ((1 << 29, []), (1 << 27, ["0.1 GiB free at /runs/a-1, the run needs about 0.4 GiB"])):
        disk = dataclasses.replace(DISK, free_bytes=free)
        found = findings(inputs=with_inputs(disks=Disks(disk, checkpoints=disk)))
        remedy = "free some space, or set cluster.run_dir to a roomier place"
        assert found == [(f"error: cluster.run_dir: {text}", remedy) for text in texts]


def test_time_is_estimated_where_it_was_measured():
    assert estimates(planned())[-1] == ("time", "about 2 min: a start of 45 s and 30 steps of 2.2 s")
    many = planned("batch.prompts_per_step=128", "trainer.steps=10")
    assert estimates(many)[-1] == ("time", "about 2 min: a start of 45 s and 10 steps of 8.8 s")
    other = "known after the first step; each of 100 steps generates up to 524,288 tokens"
    assert estimates(planned(recipe="gsm8k-0.5b-int8"))[-1] == ("time", other)
    replaced = (
        "known after the first step; each of 300 steps learns from up to 41,943,040 tokens, and generates more where "
        "prompts are replaced"
    )
    assert estimates(planned(recipe="dapo-7b-int8"))[-1] == ("time", replaced)


def test_an_emulated_scheme_is_said_and_runs():
    assert findings("rollout.scheme=fp8", "quantization.emulate=true") == [
        (
            "warning: quantization.emulate: `fp8` is emulated by rounding in float: its numbers are right, its speed "
            "says nothing",
            "use `int8` where speed matters",
        )
    ]


def test_mixed_replicas_are_judged_one_by_one():
    found = findings("rollout.scheme=auto", "rollout.replicas=[int8, fp8]", "cluster.gpus_per_node=2")
    assert [text.split(":")[1].strip() for text, _ in found] == ["rollout.replicas"]


def test_a_profile_that_is_none_is_a_finding():
    problem = "/p: the folder has no profile.safetensors"
    found = findings(inputs=with_inputs(profile_problem=problem))
    remedy = "point to a folder made by `appliance profile`, or use `auto`"
    assert found == [(f"error: quantization.profile: {problem}", remedy)]


def test_a_model_that_is_quantised_already(tmp_path):
    config = {"architectures": ["Qwen2ForCausalLM"], "quantization_config": {"quant_method": "gptq", "bits": 4}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = read_shape(tmp_path / "config.json")
    message = f"error: model.path: {tmp_path}: its weights are quantised already (gptq)"
    found = findings("model.builtin=null", f"model.path={tmp_path}", inputs=with_inputs(model_shape=shape))
    assert found == [(message, "use the model that they were made from")]


QWENS_WINDOW = {"num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": 4096}


@pytest.mark.parametrize(
    ("asks", "why"),
    [
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_type yarn"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}, "layer_types": ["full_attention"] * 2}, ""),
        ({"rope_scaling": None, "partial_rotary_factor": None, "layer_types": None, "logit_scale": None}, ""),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}, "rope_type linear"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"partial_rotary_factor": 0.5, "logit_scale": 0.5}, "logit_scale, partial_rotary_factor"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "layers with and without a sliding window"),
        ({"layer_types": [{}, {}], "rope_scaling": "no", "head_dtype": "float32"}, "head_dtype"),
        (QWENS_WINDOW | {"max_window_layers": 2}, "layers with and without a sliding window"),
        (QWENS_WINDOW | {"max_window_layers": 4}, ""),
        (QWENS_WINDOW | {"max_window_layers": 2, "sliding_window": None}, ""),
        (QWENS_WINDOW | {"max_window_layers": 2, "use_sliding_window": False}, ""),
        ({"dual_chunk_attention_config": {"chunk_size": 262144}}, "dual_chunk_attention_config"),
    ],
)
def test_what_the_rollouts_forward_does_not_compute_is_refused_before_a_model_is_loaded(tmp_path, asks, why):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], **asks}))
    inputs = with_inputs(model_shape=read_shape(tmp_path / "config.json"))
    refusal = (f"error: trainer.forward: `rollout` does not know {why}, which {tmp_path} asks for", "use `bf16`")
    for forward, wanted in (("rollout", [refusal] if why else []), ("linears", []), ("bf16", [])):
        sets = ("model.builtin=null", f"model.path={tmp_path}", f"trainer.forward={forward}")
        assert findings(*sets, inputs=inputs) == wanted


def test_a_family_whose_forward_is_not_the_rollouts_is_refused_before_its_model_is_loaded(tmp_path, monkeypatch):
    row = FAMILIES["LlamaForCausalLM"]
    monkeypatch.setitem(FAMILIES, row.architecture, Family(row.architecture, row.model_type))
    shape = ModelShape(heads=0, max_positions=0, architectures=(row.architecture,))
    sets = ("model.builtin=null", f"model.path={tmp_path}", "trainer.forward=rollout")
    message = f"error: trainer.forward: `rollout` does not know {row.architecture}, which {tmp_path} asks for"
    assert findings(*sets, inputs=with_inputs(model_shape=shape)) == [(message, "use `bf16`")]


LIST = "Qwen2ForCausalLM, Qwen3ForCausalLM, LlamaForCausalLM, MistralForCausalLM, Qwen3MoeForCausalLM"


BESIDE_TEXT = (
    "its config.json has `vision_config`: the model takes more than text, and no proof knows the places of its weights"
)
OTHER_MIXER = (
    "some of its layers are `linear_attention`: among layers that mix tokens the engine knows plain attention alone"
)
LINEAR = {"layer_types": ["linear_attention", "full_attention"]}


def of_an_unlisted_model(folder, *sets, **sizes):
    """Findings of a plan for a model whose class has no row in the list of families."""
    (folder / "config.json").write_text(json.dumps({"architectures": ["GraniteForCausalLM"]} | sizes))
    inputs = with_inputs(model_shape=read_shape(folder / "config.json"))
    return findings("model.builtin=null", f"model.path={folder}", *sets, inputs=inputs)


@pytest.mark.parametrize("scheme", ["int8", "bf16"])
def test_a_dense_model_without_a_row_is_held_when_its_engine_starts(tmp_path, scheme):
    assert of_an_unlisted_model(tmp_path, f"rollout.scheme={scheme}") == []


@pytest.mark.parametrize(
    ("sets", "sizes", "place", "remedy"),
    [
        ((), {"num_experts": 4}, "model.path", "use a model of the list"),
        (("trainer.forward=linears",), {}, "trainer.forward", "use `bf16`"),
        (("optimizer.norm_fed_lr_scale=2",), {}, "optimizer.norm_fed_lr_scale", "leave it out"),
        (("model.lora={rank: 8, sync: adapter}",), {}, "model.lora.sync", "use `merge`"),
    ],
)
def test_what_needs_a_row_is_refused_without_one(tmp_path, sets, sizes, place, remedy):
    findings_of_model = of_an_unlisted_model(tmp_path, *sets, **sizes)
    message = (
        f"error: {place}: {tmp_path}: GraniteForCausalLM is not in the list of model families ({LIST}): UAQ, experts, "
        "adapters that are sent alone and the rollouts' forward in the trainer are for families of the list"
    )
    assert (message, remedy) in findings_of_model


@pytest.mark.parametrize(("architecture", "is_refused"), [("Gemma3ForCausalLM", False), ("Exaone4ForCausalLM", True)])
def test_a_window_in_a_part_of_the_layers_needs_a_class_that_was_tried(tmp_path, architecture, is_refused):
    windows = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
    found = of_an_unlisted_model(tmp_path, architectures=[architecture], **windows)
    assert any("some of its layers have a sliding window" in message for message, _ in found) == is_refused


@pytest.mark.parametrize(
    ("architecture", "config", "messages"),
    [
        ("Gemma3ForConditionalGeneration", {"vision_config": {}, "text_config": {}}, [BESIDE_TEXT]),
        ("LlavaForConditionalGeneration", {"text_config": {}}, [BESIDE_TEXT.replace("vision", "text")]),
        ("Qwen3_5ForConditionalGeneration", {"vision_config": {}, "text_config": LINEAR}, [BESIDE_TEXT, OTHER_MIXER]),
        ("Qwen3_5ForCausalLM", LINEAR | {"sliding_window": 8}, [OTHER_MIXER]),
        ("Lfm2ForCausalLM", {"layer_types": ["conv"]}, [OTHER_MIXER.replace("linear_attention", "conv")]),
    ],
)
def test_what_the_engine_would_refuse_is_said_before_it_starts(tmp_path, architecture, config, messages):
    """As published: Qwen3.5 and large Gemma 3 take images, too; Qwen3.5's text model alone has layers without
    attention."""
    attention_alone = "use a model whose layers all have plain attention"
    assert of_an_unlisted_model(tmp_path, architectures=[architecture], **config) == [
        (
            f"error: model.path: {tmp_path}: {message}",
            attention_alone if "layers" in message else "use a model of text alone",
        )
        for message in messages
    ]


def test_one_flow_is_refused_without_a_row(tmp_path):
    message = f"error: trainer.forward: `rollout` does not know GraniteForCausalLM, which {tmp_path} asks for"
    assert (message, "use `bf16`") in of_an_unlisted_model(tmp_path, "trainer.forward=rollout")


def test_a_model_without_a_class_is_refused(tmp_path):
    sets = ("model.builtin=null", f"model.path={tmp_path}")
    message = f"error: model.path: {tmp_path}: the model's configuration names no architecture; "
    message += f"the known ones are {LIST}"
    found = findings(*sets, inputs=with_inputs(model_shape=ModelShape()))
    assert found == [(message, "use a model of the list")]


def test_findings_as_lines_and_as_json():
    """The lines have the worst first; JSON keeps the order in which it was asked."""
    unordered = [
        Finding(Severity.ERROR, "a", ("x", "z"), "bad", "mend it", "r.yaml:3"),
        Finding(Severity.INFO, "b", ("y",), "so"),
    ]
    assert finding_lines(unordered[::-1]) == finding_lines(unordered)
    assert finding_lines(unordered) == ["error: r.yaml:3: x: bad", "hint: mend it", "info: y: so"]
    assert findings_as_json(unordered)[0] == {
        "severity": "error",
        "code": "a",
        "place": "x",
        "keys": ["x", "z"],
        "where": "r.yaml:3",
        "message": "bad",
        "remedy": "mend it",
    }
