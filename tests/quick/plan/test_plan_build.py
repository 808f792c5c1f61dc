import dataclasses
import json
import sys
from pathlib import Path

import pytest
from plans import HOST
from pydantic import ValidationError

from appliance.corrections.registry import CorrectionMethod
from appliance.errors import RecipeError
from appliance.plan.build import build_plan, planned_recipe, resolve
from appliance.plan.host import HostFacts, HostGpu
from appliance.plan.rules import judge_plan
from appliance.plan.verl_args import ROLLOUT, argv
from appliance.preflight.report import plan_text
from appliance.recipe import library
from appliance.recipe.load import load_recipe, read_recipe
from appliance.record.earlier_plans import with_keys_of_today
from appliance.record.plan import ExpectedAttestation, ProfilePlan, RunPlan, WeightsPlan, read_plan
from appliance.settings.sections import Guard, Lora, Model
from appliance.terms.schemes import Scheme
from appliance.terms.settings import OldLogProbs, Quantisation

RUN_DIR = Path("/runs/arithmetic-1")
EARLIER_PLANS = Path(__file__).parent / "earlier"
BY_RULE = "by rule, not measured: `appliance bench` measures it"
NO_INT8 = "b200 has FP8 tensor cores, and vLLM has no INT8 kernels for it; by rule, not measured"
AUTO = ("cluster.device=auto", "rollout.scheme=auto")


def planned(*sets: str, recipe: str = "arithmetic-tiny-int8", host: HostFacts = HOST) -> RunPlan:
    return build_plan(load_recipe(recipe, sets=sets), run_dir=RUN_DIR, host=host)


def with_gpu(product: str) -> HostFacts:
    return dataclasses.replace(HOST, gpus=(HostGpu(product, 80 << 30),))


def choice(plan: RunPlan, key: str) -> tuple[str, str]:
    return next((each.value, each.why) for each in plan.choices if each.key == key)


def test_the_plan_reads_back_the_same():
    plan = planned()
    assert RunPlan.model_validate_json(plan.to_json()) == plan


@pytest.mark.parametrize(
    ("sets", "why"),
    [
        ([], "only at the end"),
        (["every_steps=5"], "as given, and at the end"),
        (["every_minutes=15"], "at the end, every 15 minutes"),
        (["every_steps=5", "keep_best=true"], "as given, and at the end, at the best validation so far"),
        (["every_minutes=0.5", "keep_best=true"], "at the end, every 0.5 minutes, at the best validation so far"),
    ],
)
def test_when_the_run_is_saved_is_all_said(sets: list[str], why: str):
    plan = planned(*(f"checkpoint.{each}" for each in sets))
    assert choice(plan, "checkpoint.every_steps") == ("5" if "every_steps=5" in sets else "30", why)


def test_the_child_is_our_entry_under_this_python():
    assert planned().argv[:4] == (sys.executable, "-P", "-m", "appliance.trainer.entry")


def test_on_a_cpu_blocks_of_the_kv_cache_are_shorter_than_most_prompts():
    """vLLM's own would be 128 tokens there; verl leaves prefix caching on."""
    block = f"+{ROLLOUT}.engine_kwargs.vllm.block_size=32"
    assert block in planned().argv
    assert not [one for one in planned(*AUTO, host=with_gpu("NVIDIA H200")).argv if "block_size" in one]


def test_caches_lie_beside_the_runs():
    plan = planned()
    assert plan.cache_dir == "/runs/.cache"
    assert plan.weights.name_or_path.startswith("/runs/.cache/models/tiny-arithmetic-")
    assert plan.task_files.train_parquet.startswith("/runs/.cache/data/arithmetic-")
    assert Path(plan.task_files.val_parquet).parent == Path(plan.task_files.train_parquet).parent


def test_the_data_of_a_cache_is_found_where_it_is_moved():
    recipe = load_recipe("arithmetic-tiny-int8")
    plans = [build_plan(recipe, run_dir=Path(folder), host=HOST) for folder in ("/runs/a", "/mnt/runs/a")]
    here, there = (Path(plan.task_files.train_parquet).relative_to(plan.cache_dir) for plan in plans)
    assert here == there


def test_the_seed_of_the_run_leaves_model_and_data_alone():
    one, other = planned("seed=1"), planned("seed=2")
    assert (one.model, one.task) == (other.model, other.task)
    assert {f"data.seed={seed}" for seed in (1, 2)} == set(one.argv + other.argv) & {"data.seed=1", "data.seed=2"}


@pytest.mark.parametrize("flag", ["amx_int8", "avx512_vnni", "avx_vnni"])
def test_auto_on_a_cpu_with_int8_instructions(flag):
    plan = planned(*AUTO, host=dataclasses.replace(HOST, cpu_flags=frozenset({"avx2", flag})))
    assert (plan.cluster.device, plan.rollout.scheme) == ("cpu", Scheme.INT8)
    assert choice(plan, "rollout.scheme") == ("int8", f"the processor has {flag}")
    assert choice(plan, "cluster.device") == ("cpu", "this host has no GPU")


def test_auto_on_a_cpu_without():
    plan = planned(*AUTO, host=dataclasses.replace(HOST, cpu_flags=frozenset({"avx2"})))
    why = "the processor has none of amx_int8, avx512_vnni, avx_vnni"
    assert choice(plan, "rollout.scheme") == ("bf16", why)


@pytest.mark.parametrize(
    ("product", "device", "scheme", "why"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100", "int8", "a100 has INT8 tensor cores and none for FP8; by rule, not measured"),
        ("NVIDIA H200", "h200", "int8", f"h200 has INT8 tensor cores; {BY_RULE}"),
        ("NVIDIA L40S", "l40s", "int8", f"l40s has INT8 tensor cores; {BY_RULE}"),
        ("NVIDIA L4", "l4", "int8", f"l4 has INT8 tensor cores; {BY_RULE}"),
        ("NVIDIA B200", "b200", "fp8", NO_INT8),
    ],
)
def test_auto_on_a_gpu(product, device, scheme, why):
    plan = planned(*AUTO, host=with_gpu(product))
    assert choice(plan, "cluster.device") == (device, f"this host has 1 x {product}")
    assert choice(plan, "rollout.scheme") == (scheme, why)


def test_auto_on_an_unknown_gpu():
    with pytest.raises(RecipeError) as raised:
        planned(*AUTO, host=with_gpu("Tesla K80"))
    message = "--set cluster.device=auto: cluster.device: `auto` found `Tesla K80`, which this version does not know"
    assert raised.value.problems == [(message, "name the most similar GPU in cluster.device, or `cpu`")]


def test_nothing_is_said_of_the_gpu_that_stands_in_for_an_unknown_one():
    sets = ("rollout.scheme=fp8-block", "trainer.forward=rollout", "cluster.device=auto")
    with pytest.raises(RecipeError) as raised:
        planned(*sets, host=with_gpu("Tesla K80"))
    assert [hint for _, hint in raised.value.problems] == ["name the most similar GPU in cluster.device, or `cpu`"]


def test_an_unknown_gpu_counts_as_the_one_that_is_named():
    unknown = with_gpu("NVIDIA GH200 480GB")
    assert unknown.gpus_of("h200") == unknown.gpus_of("h100") == [*unknown.gpus]
    assert with_gpu("NVIDIA A100-SXM4-80GB").gpus_of("h200") == []


def test_auto_that_finds_a_cpu_judges_as_for_a_cpu():
    with pytest.raises(RecipeError) as raised:
        planned("cluster.device=auto", "trainer.attention=flash_attention_2")
    place = "--set trainer.attention=flash_attention_2: trainer.attention"
    assert raised.value.problems == [(f"{place}: `flash_attention_2` needs a GPU", "use `auto`")]


def test_linear_layers_alone_are_no_flow_and_take_the_trainer_that_has_them():
    plan = planned("trainer.forward=linears")
    assert (plan.trainer.one_flow, plan.trainer.quantises) == (False, True)
    on_gpu = planned("cluster.device=h100", "trainer.old_log_probs=recompute")
    assert "VERL_ENGINE_VENDOR" in dict(plan.env) and "VERL_ENGINE_VENDOR" not in dict(on_gpu.env)
    with pytest.raises(RecipeError) as raised:
        planned("trainer.forward=linears", "cluster.device=h100")
    place = "--set trainer.forward=linears: trainer.forward"
    assert raised.value.problems == [(f"{place}: `linears` runs on a CPU only", "use `bf16`")]


@pytest.mark.parametrize(
    ("sets", "ours"),
    [
        ((), False),
        (("trainer.old_log_probs=update",), True),
        (("model.lora.rank=8",), True),
        (("rollout.top_log_probs=8",), True),
        (("rollout.top_p=0.9",), True),
        (("trainer.dtype=fp16", "quantization.profile=none"), True),
        (("optimizer.norm_fed_lr_scale=1.5",), True),
        (("optimizer.schedule=linear",), True),
        (("optimizer.schedule=cosine",), False),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_on_a_gpu_our_engine_trains_only_what_verls_does_not(sets: tuple[str, ...], ours: bool) -> None:
    source = () if "trainer.old_log_probs=update" in sets else ("trainer.old_log_probs=recompute",)
    plan = planned("cluster.device=h100", *source, *sets)
    assert ("VERL_ENGINE_VENDOR" in dict(plan.env)) == ours


def test_one_update_a_step_gives_the_old_log_probs_without_a_pass():
    for method in ("none", "tis", "tis-sequence", "icepop", "sequence-mask", "geometric-mask", "k3-reject", "acr"):
        plan = planned(f"correction.method={method}", "correction.cap=null", "trainer.forward=linears")
        assert plan.trainer.old_log_probs is OldLogProbs.UPDATE
        assert dict(plan.env)["VERL_ENGINE_VENDOR"] == "appliance"
        assert "algorithm.rollout_correction.bypass_mode=true" in plan.argv
    why = (
        "a step's only update gives them: no pass over the batch before it; the loss corrects by them, and what it "
        "used is checked against the log-probs that the workers held"
    )
    assert choice(plan, "trainer.old_log_probs") == ("update", why)


@pytest.mark.parametrize(
    ("sets", "reason"),
    [
        (
            ("batch.mini_batch_prompts=16",),
            "a step has several updates, and only the first one's forward is of the policy before them",
        ),
        (
            ("model.lora={rank: 4, dropout: 0.1}",),
            "an update's forward has the dropout of `model.lora`, and the policy has none",
        ),
        (
            ("cluster.device=h100", "trainer.attention=flash_attention_2"),
            "flash-attn may apply dropout in an update, by the model's config.json, and the policy has none",
        ),
        (
            ("algorithm.kl=0.1", "algorithm.kl_in=reward"),
            "`algorithm.kl` is in the reward, which the advantages are made of",
        ),
        (("correction.method=adaptive",), "`adaptive` weights a sequence by the whole step"),
        (
            ("correction.method=calibrated-clipping",),
            "`calibrated-clipping` has a shadow pass that compares with them",
        ),
        (
            ("trainer.forward=rollout", "batch.mini_batch_prompts=16"),
            "a step has several updates, and only the first one's forward is of the policy before them",
        ),
        (
            ("trainer.forward=rollout", "correction.method=calibrated-clipping", "correction.cap=null"),
            "`calibrated-clipping` has a shadow pass that compares with them",
        ),
        (
            ("trainer.forward=rollout", "guard.actions=[warn, tighten]"),
            "`tighten` in `guard.actions` is for a correction, which the engines' leave nothing to act on",
        ),
        (
            ("trainer.forward=rollout", "cluster.device=h100"),
            "on a GPU nothing promises that the engines' are the trainer's to the last bit",
        ),
    ],
)
def test_what_needs_old_log_probs_before_the_update_keeps_the_pass(sets: tuple[str, ...], reason: str):
    plan = planned(*sets)
    assert choice(plan, "trainer.old_log_probs") == (
        "recompute",
        f"a pass over the batch before the update: {reason}",
    )
    assert plan.trainer.old_log_probs is OldLogProbs.RECOMPUTE
    assert "algorithm.rollout_correction.bypass_mode=false" in plan.argv


def test_a_pass_that_is_asked_for_is_made():
    plan = planned("trainer.old_log_probs=recompute")
    assert choice(plan, "trainer.old_log_probs") == ("recompute", "as given: a pass over the batch before the update")
    for harmless in ("algorithm.kl=0.1", "model.lora={rank: 4}", "batch.mini_batch_prompts=32"):
        assert planned(harmless).trainer.old_log_probs is OldLogProbs.UPDATE


def test_an_update_that_is_asked_for_the_old_log_probs_gives_them_or_is_refused():
    assert planned("trainer.old_log_probs=update").trainer.old_log_probs is OldLogProbs.UPDATE
    several = "a step has several updates, and only the first one's forward is of the policy before them"
    for other, reason in (
        ("batch.mini_batch_prompts=16", several),
        ("trainer.forward=rollout", "the engines' are the trainer's own in one flow"),
    ):
        with pytest.raises(RecipeError) as raised:
            planned("trainer.old_log_probs=update", other)
        place = "--set trainer.old_log_probs=update: trainer.old_log_probs"
        assert raised.value.problems == [(f"{place}: `update` cannot give them: {reason}", "use `auto`")]


def test_a_flow_on_a_gpu_has_eager_engines_in_the_batch_invariant_mode():
    plain, flow = planned("cluster.device=h100"), planned("cluster.device=h100", "trainer.forward=rollout")
    mode = {"VLLM_BATCH_INVARIANT": "1", "VLLM_USE_V2_MODEL_RUNNER": "0"}
    assert dict(flow.env) == dict(plain.env) | mode | {"VERL_ENGINE_VENDOR": "appliance"}
    assert (plain.engine.eager, flow.engine.eager) == (False, True)
    assert "rollouts take longer" in choice(flow, "rollout.enforce_eager")[1]
    on_cpu = planned("trainer.forward=rollout")
    assert not mode.keys() & dict(on_cpu.env).keys()


def test_gradients_in_fp8_are_emulated_and_said_to_be():
    flow = ("trainer.forward=rollout", "trainer.backward=fp8-block", "rollout.scheme=fp8-block")
    plan = planned(*flow, "quantization.emulate=true")
    assert plan.trainer.fp8_backward
    assert choice(plan, "trainer.backward") == ("fp8-block", "as given; emulated: for its numbers, not for speed")
    assert "; rollouts in fp8-block, emulated; gradients in fp8-block, emulated; " in plan_text(
        plan, needs=[("disk", "1 GiB")]
    )
    assert not planned("trainer.forward=rollout").trainer.fp8_backward
    with pytest.raises(RecipeError) as raised:
        planned(*flow, "cluster.device=l4")
    forward, backward = ("--set trainer.forward=rollout: trainer.forward", f"--set {flow[1]}: trainer.backward")
    assert raised.value.problems == [
        (f"{forward}: `rollout` has a kernel of `fp8-block` on Hopper only", "use `bf16`"),
        (f"{backward}: `fp8-block` has a kernel on Hopper only", "use `bf16`"),
    ]
    with pytest.raises(RecipeError) as raised:
        planned(*flow, "quantization.emulate=true", "cluster.device=h100")
    problem = (f"{forward}: `rollout` emulates FP8 on a CPU only", "remove quantization.emulate")
    assert raised.value.problems == [problem]
    on_hopper = planned(*flow, "cluster.device=h100")
    assert "; gradients in fp8-block; " in plan_text(on_hopper, needs=[("disk", "1 GiB")])
    assert choice(on_hopper, "trainer.backward") == ("fp8-block", "as given")
    with pytest.raises(RecipeError) as raised:
        planned(*flow[:2], "rollout.scheme=auto")
    message = f"{backward}: `fp8-block` needs rollouts in `fp8-block`"
    problem = (message, "use rollout.scheme: fp8-block, or backward: bf16")
    assert raised.value.problems == [problem]


@pytest.mark.parametrize(
    ("sets", "problem"),
    [
        (("trainer.forward=linears", "rollout.scheme=fp8-channel", "quantization.emulate=true"), "`linears`"),
        (("trainer.forward=rollout", "rollout.scheme=fp8-channel", "cluster.device=l4"), "`rollout`"),
    ],
)
def test_the_governor_leads_one_flow_to_no_scheme_that_it_cannot_compute(sets: tuple[str, ...], problem: str) -> None:
    assert planned(*sets).trainer.one_flow or problem == "`linears`"
    with pytest.raises(RecipeError) as raised:
        planned(*sets, "guard.actions=[raise-precision]")
    place = "--set guard.actions=[raise-precision]: guard.actions"
    message = f"{place}: `raise-precision` leads to `fp8-block`, which {problem} cannot compute here"
    assert raised.value.problems == [(message, "leave it out, or use trainer.forward: bf16")]


@pytest.mark.parametrize(
    ("profile", "users"),
    [
        ("auto", {Scheme.INT8, Scheme.FP8_CHANNEL}),
        ("none", set()),
        ("/profiles/x", set(Scheme) - {Scheme.BF16}),
    ],
)
def test_a_profile_is_used_by_the_schemes_that_it_helps_and_a_given_one_by_all_that_quantise(
    profile: str, users: set[Scheme]
) -> None:
    for scheme in Scheme:
        plan = planned("cluster.device=h100", f"rollout.scheme={scheme}", f"quantization.profile={profile}")
        folder, source = (f"{RUN_DIR}/profile", profile.replace("auto", "")) if scheme in users else ("", "")
        assert [engine.profile for engine in plan.engines] == [folder]
        wanted = ProfilePlan(folder=folder, source=source, scheme=scheme) if folder else None
        assert plan.profile == wanted


def test_the_recipe_decides_and_not_this_host():
    plan = planned(recipe="gsm8k-0.5b-int8")
    assert (plan.cluster.device, plan.rollout.scheme) == ("a100", Scheme.INT8)
    assert "trainer.device=cuda" in plan.argv
    assert "VERL_PLATFORM" not in dict(plan.env)


def test_every_worker_and_the_trainer_must_attest():
    plan = planned("cluster.gpus_per_node=4", "rollout.tensor_parallel=2")
    patches = (
        "chunked-log-probs",
        "cpu-no-amx-tiles",
        "cpu-process-group",
        "cpu-sampling-mask-setting",
        "cpu-sampling-masks",
        "cpu-seeded-requests",
        "cpu-seeded-sampling",
        "cpu-token-ranks",
        "whole-checkpoint",
    )
    rollout = tuple(
        ExpectedAttestation(role="rollout", rank=rank, scheme=Scheme.INT8, patches=patches) for rank in range(4)
    )
    trainers = tuple(
        ExpectedAttestation(
            role="trainer", rank=rank, scheme=Scheme.BF16, patches=(patches[0], patches[2], patches[-1])
        )
        for rank in range(4)
    )
    driver = ExpectedAttestation(
        role="driver",
        rank=0,
        scheme=Scheme.BF16,
        patches=("chunked-log-probs", "cpu-process-group", "no-load-balancer", "whole-checkpoint"),
    )
    assert plan.attestations == (*rollout, *trainers, driver)
    assert plan.rollout.replicas == (Scheme.INT8, Scheme.INT8)


def test_engines_and_their_profile_are_told_what_the_recipe_says():
    ignore = ("model.layers.0.mlp.down_proj", "re:.*o_proj")
    plan = planned(
        "cluster.gpus_per_node=4",
        "rollout.scheme=auto",
        "rollout.replicas=[int8, fp8, bf16]",
        "rollout.lm_head_fp32=true",
        f"quantization.ignore={json.dumps(ignore)}",
        "quantization.emulate=true",
        "quantization.smoothing=0.75",
        "quantization.mismatch_budget=0.02",
    )
    first = Quantisation(scheme=Scheme.INT8, ignore=ignore, profile=f"{RUN_DIR}/profile", lm_head_fp32=True)
    assert plan.engines == (
        first,
        Quantisation(scheme=Scheme.FP8, emulated=True, ignore=ignore, lm_head_fp32=True),
        Quantisation(scheme=Scheme.BF16, lm_head_fp32=True),
        first,
    )
    assert plan.profile == ProfilePlan(folder=f"{RUN_DIR}/profile", source="", scheme=Scheme.INT8)
    quantization = plan.quantization
    assert (quantization.smoothing, quantization.mismatch_budget, quantization.ignore) == (0.75, 0.02, ignore)
    assert not any(engine.lm_head_fp32 for engine in planned().engines)


def test_epochs_become_steps():
    plan = planned("trainer.steps=null", "trainer.epochs=3", "task.train_size=100")
    assert plan.trainer.steps == 9
    assert choice(plan, "trainer.steps") == ("9", "3 epochs x 100 problems // 32 prompts")


def test_validation_and_saving_only_at_the_end():
    plan = planned("trainer.validate_every=0", "trainer.steps=7")
    assert {"trainer.test_freq=7", "trainer.save_freq=-1"} <= set(plan.argv)


def test_micro_batch_divides_a_rank_and_fits_the_tokens():
    plan = planned("task.max_response_tokens=480", "rollout.samples_per_prompt=9", "task.max_prompt_tokens=32")
    why = "largest divisor of a rank's 288 sequences with at most 32 x 512 tokens"
    assert choice(plan, "batch.micro_batch_sequences") == ("32", why)


def test_a_sequence_longer_than_a_forward_goes_alone():
    plan = planned("task.max_response_tokens=20000", "model.builtin=null", "model.path=/m")
    assert choice(plan, "batch.micro_batch_sequences")[0] == "1"
    assert choice(plan, "engine.max_batched_tokens")[0] == "20008"


@pytest.mark.parametrize(
    ("device", "most"), [("cpu", 256), ("a100", 256), ("l40s", 256), ("h100", 1024), ("h200", 1024), ("b200", 1024)]
)
def test_an_engine_takes_as_many_sequences_at_once_as_vllm_would(device, most):
    sizes = ("batch.prompts_per_step=256", "rollout.samples_per_prompt=8")
    plan = planned(f"cluster.device={device}", "rollout.scheme=auto", *sizes)
    why = f"2048 sequences of a step on an engine, at most {most} at once"
    assert choice(plan, "engine.max_concurrent_sequences") == (str(most), why)
    assert f"{ROLLOUT}.max_num_seqs={most}" in plan.argv


def test_auto_may_not_mean_a_scheme_without_the_profile_that_a_setting_is_of():
    sets = ("rollout.scheme=auto", "quantization.mismatch_budget=0.02")
    with pytest.raises(RecipeError) as raised:
        planned(*sets, "cluster.device=b200")
    message = f"--set {sets[1]}: quantization.mismatch_budget: it is a setting of profiles, and none is made for `fp8`"
    assert raised.value.problems == [(message, "remove it, or use `int8`, `fp8-channel`")]
    assert planned(*sets, "cluster.device=h100").quantization.mismatch_budget == 0.02


def test_in_fp16_auto_may_not_mean_a_scheme_that_engines_have_in_bf16_alone():
    fp16 = ("rollout.scheme=auto", "trainer.dtype=fp16", "quantization.profile=none")
    with pytest.raises(RecipeError, match="`auto` is `fp8` on b200, which engines have in BF16 alone"):
        planned("cluster.device=b200", *fp16)
    assert planned("cluster.device=h100", *fp16).rollout.scheme is Scheme.INT8
    assert planned("cluster.device=b200", *fp16[:1]).rollout.scheme is Scheme.FP8


def test_prompts_are_read_in_parts_where_the_recipe_says_so():
    assert f"{ROLLOUT}.enable_chunked_prefill=true" in planned().argv
    assert f"{ROLLOUT}.enable_chunked_prefill=true" in planned(recipe="gsm8k-0.5b-int8").argv
    as_given = planned("rollout.chunked_prefill=false")
    assert all(each.key != "rollout.chunked_prefill" for each in as_given.choices)


def test_no_correction_says_so_to_verl():
    plan = planned("correction.method=none", "correction.cap=null")
    assert (plan.correction.method, plan.correction.cap) == ("none", None)
    assert "algorithm.rollout_correction.rollout_is=null" in plan.argv


def test_the_usual_limits_of_a_correction_are_choices_with_a_reason():
    plan = planned("correction.method=icepop", "correction.cap=null", "algorithm.clip_high=0.28")
    assert (plan.correction.method, plan.correction.bounds, plan.algorithm.clip_high) == ("icepop", (0.5, 5.0), 0.28)
    assert choice(plan, "correction.bounds") == ("[0.5, 5]", "the bounds of IcePop")
    assert "correction.cap" not in {each.key for each in plan.choices}
    plan = planned("correction.method=k3-reject", "correction.cap=null")
    assert (plan.correction.cap, choice(plan, "correction.cap")[0]) == (0.01, "0.01")


def test_a_limit_that_was_given_is_no_choice():
    plan = planned("correction.method=icepop", "correction.cap=null", "correction.bounds=[0.25, 4]")
    assert plan.correction.bounds == (0.25, 4.0)
    assert "correction.bounds" not in {each.key for each in plan.choices}


@pytest.mark.parametrize("method", CorrectionMethod)
def test_a_plan_with_any_correction_reads_back_the_same(method, tmp_path):
    plan = planned(f"correction.method={method}", "correction.cap=null")
    plan.write(tmp_path / "plan.json")
    assert read_plan(tmp_path / "plan.json") == plan


@pytest.mark.parametrize(
    ("source", "path"),
    [
        ("Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen2.5-0.5B-Instruct"),
        ("./here", "{cwd}/here"),
        ("/abs/model", "/abs/model"),
        ("owner/name", "{cwd}/owner/name"),
    ],
)
def test_a_model_is_a_folder_or_a_hub_name(source, path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "name").mkdir(parents=True)
    plan = planned("model.builtin=null", f"model.path={source}")
    assert plan.weights.name_or_path == path.format(cwd=tmp_path)
    assert ("HF_HUB_OFFLINE" in dict(plan.env)) == path.startswith(("/", "{"))


def test_the_text_of_a_plan_ends_with_a_command_a_shell_reads():
    plan = planned()
    text = plan_text(plan, recipe_yaml="name: x\n", needs=[("disk", "about 1 GiB")])
    command = text.partition("\nChild\n")[2]
    assert command.splitlines()[0] == "APPLIANCE_PLAN=/runs/arithmetic-1/plan.json \\"
    assert command.splitlines()[-1].strip() == plan.argv[-1]


def test_a_plan_has_nothing_open_that_a_recipe_may_leave_open() -> None:
    plan = planned()
    for key, changes in (
        ("Guard.actions", {"guard": Guard()}),
        ("Guard.scheme_change", {"guard": plan.guard.replace(scheme_change="auto")}),
        ("Model.lora.alpha", {"model": Model(path="a", lora=Lora())}),
        ("Cluster.device", {"cluster": plan.cluster.replace(device="auto")}),
        ("Rollout.scheme", {"rollout": plan.rollout.replace(scheme="auto")}),
        ("Rollout.replicas", {"rollout": plan.rollout.replace(replicas=("bf16", "auto"))}),
        ("Rollout.top_log_probs", {"rollout": plan.rollout.replace(top_log_probs=None)}),
    ):
        with pytest.raises(ValidationError, match=f"a plan leaves nothing open: {key}"):
            plan.replace(**changes)


EARLIER = {
    "one-node": (
        "arithmetic-tiny-int8",
        "model.lora={rank: 8}",
        "rollout.scheme=auto",
        "rollout.replicas=[bf16, int8]",
        "cluster.gpus_per_node=2",
        "correction.method=calibrated-clipping",
        "correction.cap=null",
        "algorithm.kl=0.01",
        "batch.max_tokens_per_gpu=8192",
        "logging.backends=[wandb]",
        "guard.scheme_change=restart",
        "trainer.validate_every=0",
    ),
    "several-nodes": (
        "dapo-32b-int8",
        "cluster.nodes=4",
        "cluster.address=10.0.0.7:6379",
        "cluster.token_file=/secret/token",
        "correction.uaq_scale=1.5",
        "model.revision=main",
        "algorithm.overlong_tokens=64",
        "quantization.profile=/profiles/x",
        "rollout.lm_head_fp32=true",
    ),
    "own-task": (
        "gsm8k-0.5b-int8",
        "task.kind=own",
        "task.train_file=/data/t.jsonl",
        "task.rewards=[{name: math}, {name: '/data/rewards.py:score', weight: 2.0}, "
        "{name: length, target: 100, weight: 0.5}]",
        "task.truth=answer",
        "task.system=Be brief.",
        "task.tools=/data/tools.py",
        "task.val_sets={a: {size: 64}, b: {file: /data/b.jsonl, samples: 4}}",
        "task.val_size=512",
    ),
}
"""Recipe and settings of the plans in `earlier/`, which the version of 29 November wrote."""


@pytest.mark.parametrize("name", EARLIER)
def test_a_plan_of_an_earlier_version_says_what_the_same_recipe_says_today(name: str) -> None:
    recipe, *sets = EARLIER[name]
    today = build_plan(load_recipe(recipe, sets=sets), run_dir=Path("/runs/earlier-1"), host=HOST)
    earlier = read_plan(EARLIER_PLANS / f"{name}.json")
    assert earlier == today.replace(argv=(), env=(), pins=earlier.pins)


def test_what_a_recipe_says_of_engines_is_read_from_an_earlier_plan(tmp_path: Path) -> None:
    """Two keys were elsewhere, and the first plans knew nothing of top log-probs."""
    earlier = json.loads((EARLIER_PLANS / "one-node.json").read_text())
    earlier["engine"]["chunked_prefill"] = False
    earlier["env"] = [["VLLM_CPU_KVCACHE_SPACE", "7"]]
    del earlier["rollout"]["top_log_probs"]
    (tmp_path / "plan.json").write_text(json.dumps(earlier))
    rollout = read_plan(tmp_path / "plan.json").rollout
    assert (rollout.chunked_prefill, rollout.kv_cache_gb, rollout.top_log_probs) == (False, 7, 0)


@pytest.mark.parametrize("missing", ["guard", "algorithm", "correction", "algorithm.generation_batches", "trainer"])
def test_what_an_earlier_plan_lacks_keeps_nothing_else_from_its_place(missing: str) -> None:
    """A plan is read in part, too: by a resume, of a version that knew less."""
    plan = json.loads((EARLIER_PLANS / "one-node.json").read_text())
    device, prompts, sequences = plan["device"], plan["prompts_per_step"], plan["trainer"]["micro_batch_sequences"]
    section, _, key = missing.partition(".")
    if key:
        del plan[section][key]
    else:
        del plan[section]
    today = json.loads(with_keys_of_today(json.dumps(plan).encode()))
    assert (today["cluster"]["device"], today["batch"]["prompts_per_step"]) == (device, prompts)
    assert missing == "trainer" or today["batch"]["micro_batch_sequences"] == sequences


@pytest.mark.parametrize(
    ("model", "weights", "identity"),
    [
        (
            {"path": "/c/models/gguf-1", "source": "x.gguf", "gguf": "/x.gguf", "provenance": "Llama, licence mit"},
            {"gguf": "/x.gguf", "is_cached": True, "provenance": "Llama, licence mit"},
            "gguf-1",
        ),
        (
            {"path": "/hub/snapshots/ab", "source": "owner/name", "revision": "v1", "commit": "ab"},
            {"hub_name": "owner/name", "commit": "ab"},
            "owner/name@ab",
        ),
        (
            {"path": "owner/name", "source": "owner/name", "commit": "ab"},
            {"hub_name": "owner/name", "commit": "ab"},
            "owner/name",
        ),
        ({"path": "/models/a", "source": "a"}, {}, "/models/a"),
    ],
)
def test_the_model_of_an_earlier_plan_is_where_it_was(
    tmp_path: Path, model: dict[str, str], weights: dict[str, object], identity: str
) -> None:
    empty = {"builtin": "", "revision": "", "trust_remote_code": False, "commit": "", "gguf": "", "provenance": ""}
    earlier = json.loads(planned().to_json()) | {"model": empty | model, "lora": None}
    del earlier["weights"]
    (tmp_path / "plan.json").write_text(json.dumps(earlier))
    plan = read_plan(tmp_path / "plan.json")
    assert plan.model == Model(path=model["source"], revision=model.get("revision"))
    assert plan.weights == WeightsPlan(name_or_path=model["path"], **weights)
    assert plan.weights.identity == identity


def test_keys_that_plans_had_before_are_read_where_they_are_today(tmp_path: Path) -> None:
    plan = planned("optimizer.norm_fed_lr_scale=1.5", "logging.backends=[wandb]", "guard.scheme_change=restart")
    earlier = json.loads(plan.to_json())
    earlier["norm_fed_lr_scale"] = earlier["optimizer"].pop("norm_fed_lr_scale")
    earlier["logging_backends"] = earlier.pop("logging")["backends"]
    earlier["guard"]["switching"] = earlier["guard"].pop("scheme_change")
    (tmp_path / "plan.json").write_text(json.dumps(earlier))
    assert read_plan(tmp_path / "plan.json") == plan


def test_a_plan_of_another_version_is_refused_in_one_sentence(tmp_path: Path) -> None:
    raw, file = json.loads(planned().to_json()), tmp_path / "plan.json"
    for change, why in (
        ({"schema_version": 2}, "plan has schema_version 2, this program reads 1"),
        ({"seed": "3"}, "not a plan that this version reads: seed: Input should be a valid integer"),
        ({"new": 1}, "not a plan that this version reads: new: Extra inputs are not permitted"),
    ):
        file.write_text(json.dumps({**raw, **change}))
        with pytest.raises(ValueError) as raised:
            read_plan(file)
        assert str(raised.value) == why
    file.write_text("{")
    with pytest.raises(ValueError, match=r"^not a plan that this version reads: the file: Invalid JSON: "):
        read_plan(file)


def test_a_plan_of_earlier_flags_has_the_forward_and_the_backward_that_they_meant(tmp_path: Path) -> None:
    for sets, flags in (
        ((), {"one_flow": False}),
        (("trainer.forward=linears",), {"one_flow": False, "linears": True}),
        (
            ("trainer.forward=rollout", "trainer.backward=fp8-block", "rollout.scheme=fp8-block"),
            {"one_flow": True, "linears": False, "fp8_backward": True},
        ),
    ):
        plan = planned("trainer.old_log_probs=recompute", "trainer.validate_every=5", *sets)
        earlier = json.loads(plan.to_json())
        moved = {key: earlier["trainer"].pop(key) for key in ("steps", "validate_every", "validate_bf16_every")}
        for key in ("forward", "backward", "old_log_probs", "max_restarts", "epochs"):
            del earlier["trainer"][key]
        earlier["trainer"] |= flags | earlier.pop("trainer_memory") | {"attention": "appliance_packed"}
        earlier["trainer"]["gpu_memory_utilization"] = earlier["rollout"].pop("gpu_memory_utilization")
        (tmp_path / "plan.json").write_text(json.dumps(earlier | moved))
        assert read_plan(tmp_path / "plan.json") == plan


def test_a_change_of_a_plan_is_checked() -> None:
    plan = planned()
    assert plan.replace(seed=plan.seed + 1).seed == plan.seed + 1
    with pytest.raises(ValueError, match="Extra inputs are not permitted"):
        plan.replace(step=1)
    with pytest.raises(ValueError, match="valid integer"):
        plan.replace(seed="1")
    with pytest.raises(ValueError, match="frozen"):
        plan.seed = 1


def test_what_verl_is_told_follows_from_the_plan_alone() -> None:
    plan = planned(recipe="gsm8k-0.5b-int8")
    assert argv(RunPlan.model_validate_json(plan.to_json())) == plan.argv
    changed = plan.replace(seed=9, resume_from="/runs/a/checkpoints/global_step_3")
    told = set(argv(changed)) - set(plan.argv)
    assert {"data.seed=9", "trainer.resume_mode=resume_path", "trainer.val_before_train=false"} <= told


@pytest.mark.parametrize(
    "sets",
    [
        ("cluster.device=h1000", "rollout.scheme=auto"),
        ("model.builtin=tiny-none",),
        ("model.builtin=null",),
        ("trainer.steps=null",),
        ("trainer.steps=null", "trainer.epochs=2"),
        ("trainer.steps=null", "trainer.epochs=2", "task.train_size=3"),
        ("correction.method=calibrated-clipping", "correction.cap=null", "correction.shadow_fraction=0.0001"),
        ("correction.method=icepop", "correction.cap=null", "correction.bounds=[1.5]"),
        ("rollout.tensor_parallel=1000000000",),
        (f"cluster.run_dir={'x' * 300}", f"task.train_file={'x' * 300}", "task.kind=gsm8k"),
    ],
)
def test_a_recipe_with_a_value_of_which_nothing_can_be_made_has_a_plan(sets: tuple[str, ...], tmp_path: Path) -> None:
    """So that everything else can be judged, too; the fault itself is reported, once."""
    typed = read_recipe("arithmetic-tiny-int8", sets=sets)
    plan = resolve(typed.recipe, run_dir=tmp_path / "a-1", host=HOST)
    keys = [finding.place for finding in judge_plan(typed.recipe, plan, host=HOST)]
    assert keys and len(keys) == len(set(keys)) and {finding.place for finding in typed.faults} == set(keys)


def test_a_recipe_that_has_a_plan_is_planned_as_it_is() -> None:
    for name in library.names():
        recipe = load_recipe(name)
        assert planned_recipe(recipe) == recipe
