import re
from pathlib import Path

import pytest
from plans import HOST

from appliance.corrections.registry import CorrectionMethod
from appliance.plan.build import resolve
from appliance.plan.rules import RULES
from appliance.recipe.load import in_order, load_recipe, read_recipe
from appliance.recipe.rules import judge

ICEPOP = ("correction.method=icepop", "correction.cap=null")
REUSES = ("trainer.forward=rollout", "trainer.old_log_probs=rollout")
GPU = ("cluster.device=h100", "cluster.gpus_per_node=8")
EMULATED, TWO_ENGINES = "quantization.emulate=true", "cluster.gpus_per_node=2"


def problems_of(*sets: str) -> list[tuple[str, str]]:
    """The faults of the recipe and of its plan, each of them once."""
    typed = read_recipe("arithmetic-tiny-int8", sets=sets)
    plan = resolve(typed.recipe, run_dir=Path("/runs/a-1"), host=HOST)
    faults = [*typed.faults, *judge(RULES, typed.recipe, plan, HOST, unreadable=typed.unreadable)]
    return [(finding.fact, finding.remedy) for finding in in_order(faults, file=typed.file)]


def without_place(message: str) -> str:
    """From the dotted key on."""
    return re.search(r"(?:^|: )([a-z]+\.[a-z0-9_]+(?:\.[0-9]+)?: .*)", message)[1]


def only(*sets: str) -> tuple[str, str]:
    """The one problem, without its place."""
    (message, hint), *more = problems_of(*sets)
    assert more == []
    return without_place(message), hint


@pytest.mark.parametrize(
    ("sets", "number"),
    [
        (("model.builtin=nope", "model.path=/x"), 2),
        (("task.kind=own", "task.data=bad name", "task.train_file=/nothing.jsonl"), 3),
        (("cluster.device=k80", "trainer.forward=linears", "rollout.lm_head_fp32=true"), 2),
    ],
)
def test_a_value_of_which_nothing_can_be_made_hides_no_other_fault_of_the_recipe(sets: tuple[str, ...], number: int):
    problems = [message for message, _ in problems_of(*sets)]
    assert len(problems) >= number, problems


OF_DAPO = "remove it, or set algorithm.kind to `dapo`"


@pytest.mark.parametrize(
    ("sets", "problem"),
    [
        (
            ("model.path=x",),
            ("model.path: `path` and `builtin` exclude each other", "set one of them to null"),
        ),
        (
            ("task.max_response_tokens=2048",),
            (
                "task.max_response_tokens: prompt and response are up to 2056 tokens, `tiny-arithmetic` takes 2048",
                "lower one of them",
            ),
        ),
        (
            ("model.builtin=tiny",),
            ("model.builtin: unknown value `tiny`", "use `tiny-arithmetic`, `tiny-calculator`, `smollm2-135m`"),
        ),
        (
            ("algorithm.kind=ppo",),
            ("algorithm.kind: unknown value `ppo`", "use one of `grpo`, `dapo`, `dr-grpo`, `gspo`"),
        ),
        (
            ("correction.method=none", "correction.cap=2.5"),
            ("correction.cap: `none` has no cap", "remove it, or set it to null"),
        ),
        (
            ("correction.method=icepop",),  # the recipe has the cap of `tis`
            ("correction.cap: `icepop` has no cap", "remove it, or set it to null"),
        ),
        (
            ("correction.method=geometric-mask", "correction.cap=2"),
            ("correction.cap: `geometric-mask` has no cap", "remove it, or set it to null"),
        ),
        (
            ("correction.bounds=[0.5, 5.0]",),
            ("correction.bounds: `tis` has no bounds", "remove it, or set it to null"),
        ),
        (
            ("correction.method=k3-reject",),  # 2.0 again, as nats
            (
                "correction.cap: the cap of `k3-reject` is a sequence's k3-KL in nats, and 2 rejects next to nothing",
                "give one such as 0.01, or null",
            ),
        ),
        (
            (*ICEPOP, "correction.bounds=[5.0, 0.5]"),
            (
                "correction.bounds: the lower bound 5 is not below the upper bound 0.5",
                "give [low, high] such as [0.5, 5], or null",
            ),
        ),
        (
            (*ICEPOP, "correction.bounds=[2, 2]"),
            (
                "correction.bounds: the lower bound 2 is not below the upper bound 2",
                "give [low, high] such as [0.5, 5], or null",
            ),
        ),
        (
            (*ICEPOP, "correction.bounds=[1.5, 2]"),
            (
                "correction.bounds: [1.5, 2] leaves out 1, the weight where rollout and trainer agree",
                "give [low, high] such as [0.5, 5], or null",
            ),
        ),
        (
            (*ICEPOP, "correction.bounds=[0.5]"),
            (
                "correction.bounds: expected [low, high], got 1 value",
                "give [low, high] such as [0.5, 5], or null",
            ),
        ),
        ((*ICEPOP, "correction.bounds=[0, 5]"), ("correction.bounds.0: must be greater than 0, got `0`", "")),
        (
            (*ICEPOP, "correction.bounds=0.5"),
            ("correction.bounds: expected a list, got `0.5`", "give numbers in brackets, with commas between them"),
        ),
        (
            ("task.train_file=x.jsonl",),
            ("task.train_file: `arithmetic` makes its own problems", "remove it"),
        ),
        (
            ("task.kind=gsm8k", "task.val_file=x.jsonl"),
            ("task.val_file: there is no `train_file` beside it", "give task.train_file too"),
        ),
        (
            ("task.train_size=16",),
            ("task.train_size: 16 problems do not fill one step of 32 prompts", "raise it"),
        ),
        (
            ("batch.mini_batch_prompts=5",),
            ("batch.mini_batch_prompts: 5 does not divide the 32 prompts of a step", "use a divisor"),
        ),
        (
            ("batch.mini_batch_prompts=64",),
            ("batch.mini_batch_prompts: 64 is more than the 32 prompts of a step", "lower it"),
        ),
        (
            ("cluster.gpus_per_node=3",),
            (
                "batch.prompts_per_step: 32 prompts x 8 samples do not divide over 3 GPUs",
                "each GPU takes the same number of sequences",
            ),
        ),
        (
            ("batch.micro_batch_sequences=7",),
            (
                "batch.micro_batch_sequences: 7 does not divide the 256 sequences of a rank",
                "it is the sequences of one forward on one GPU",
            ),
        ),
        (
            ("batch.max_tokens_per_gpu=13",),
            ("batch.max_tokens_per_gpu: 13 tokens do not hold one sequence of 14 (prompt and response)", "raise it"),
        ),
        (
            ("batch.max_tokens_per_gpu=400", "batch.micro_batch_sequences=8"),
            (
                "batch.max_tokens_per_gpu: `max_tokens_per_gpu` and `micro_batch_sequences` exclude each other",
                "remove one of them",
            ),
        ),
        (
            ("trainer.epochs=2", "task.train_size=640"),
            ("trainer.steps: `steps` and `epochs` exclude each other", "set one of them to null"),
        ),
        (
            ("trainer.steps=null",),
            ("trainer.steps: the length of the training is not given", "give `steps` or `epochs`"),
        ),
        (
            ("trainer.steps=null", "trainer.epochs=2"),
            ("trainer.epochs: `epochs` needs task.train_size", "give it, or `steps`"),
        ),
        (
            ("cluster.nodes=2",),
            (
                "cluster.run_dir: 2 nodes need a shared folder for the run",
                "set it to a folder on a file system that all nodes share",
            ),
        ),
        (
            ("cluster.address=10.0.0.1:6379",),
            (
                "cluster.token_file: cluster.address names a cluster that runs already",
                "give the file that holds its token",
            ),
        ),
        (
            ("algorithm.overlong_tokens=3",),
            ("algorithm.overlong_tokens: `grpo` does not have this key: it is for `dapo`", OF_DAPO),
        ),
        (
            ("algorithm.max_generation_batches=3",),
            ("algorithm.max_generation_batches: `grpo` does not have this key: it is for `dapo`", OF_DAPO),
        ),
        (
            ("batch.generation_prompts=64",),
            ("batch.generation_prompts: `grpo` does not have this key: it is for `dapo`", OF_DAPO),
        ),
        (
            ("algorithm.kind=dapo", "algorithm.overlong_tokens=7"),
            ("algorithm.overlong_tokens: 7 is more than the 6 tokens of a response", "lower it"),
        ),
        (
            ("algorithm.kind=dapo", "batch.generation_prompts=48"),
            (
                "batch.generation_prompts: 48 is no multiple of the 32 prompts of a step",
                "use a multiple of 32: verl 0.9.1 generates for whole steps (max_inflight_gen_batches)",
            ),
        ),
        (
            ("trainer.offload_parameters=true",),
            (
                "trainer.offload_parameters: on a CPU everything is in the host's memory already",
                "remove it, or set it to false",
            ),
        ),
        (
            (*GPU, "cluster.nodes=3", "cluster.run_dir=/shared"),
            (
                "batch.prompts_per_step: 32 prompts x 8 samples do not divide over 24 GPUs",
                "each GPU takes the same number of sequences",
            ),
        ),
        (
            ("cluster.run_dir=a/../../b",),
            (
                "cluster.run_dir: `..` is not allowed here",
                "give an absolute path, or one below the folder where the program is started",
            ),
        ),
        (
            ("rollout.replicas=[int8, bf16]", "cluster.gpus_per_node=2"),
            (
                "rollout.replicas: `scheme` and `replicas` exclude each other",
                "remove `scheme`, or set it to `auto`",
            ),
        ),
        (
            ("rollout.replicas=[int8, bf16]", "rollout.scheme=auto"),
            (
                "rollout.replicas: 2 schemes for 1 engine",
                "an engine takes tensor_parallel GPUs; raise cluster.gpus_per_node, or list fewer",
            ),
        ),
        (
            ("quantization.emulate=true",),
            ("quantization.emulate: only an FP8 scheme can be emulated", "remove it, or set rollout.scheme"),
        ),
        (
            ("quantization.ignore=['re:*']",),
            (
                "quantization.ignore: `re:*` is not a regular expression: nothing to repeat at position 0",
                "correct it",
            ),
        ),
        (
            ("quantization.profile=/p", "quantization.smoothing=0"),
            (
                "quantization.smoothing: it comes from the profile, and `profile` is made already: /p",
                "remove one of them",
            ),
        ),
        (
            ("quantization.profile=/p", "quantization.mismatch_budget=0.1"),
            (
                "quantization.mismatch_budget: it comes from the profile, and `profile` is made already: /p",
                "remove one of them",
            ),
        ),
        (
            ("quantization.profile=none", "quantization.smoothing=0.5"),
            ("quantization.smoothing: it comes from the profile, and `profile` is `none`", "remove one of them"),
        ),
        (
            ("rollout.scheme=fp8", EMULATED, "quantization.mismatch_budget=0.1"),
            (
                "quantization.mismatch_budget: it is a setting of profiles, and none is made for `fp8`",
                "remove it, or use `int8`, `fp8-channel`",
            ),
        ),
        (
            ("rollout.scheme=fp8-block", EMULATED, "quantization.smoothing=0.7"),
            (
                "quantization.smoothing: it is a setting of profiles, and none is made for `fp8-block`",
                "remove it, or use `int8`, `fp8-channel`",
            ),
        ),
        (
            ("cluster.device=b200",),
            ("rollout.scheme: vLLM has no INT8 kernels for b200 (Blackwell)", "use `fp8`, or `bf16`"),
        ),
        (
            ("trainer.attention=flash_attention_2",),
            ("trainer.attention: `flash_attention_2` needs a GPU", "use `auto`"),
        ),
        (
            (*GPU, "rollout.tensor_parallel=3"),
            ("rollout.tensor_parallel: 3 does not divide the 8 GPUs of a node", "an engine lives on one node"),
        ),
        (
            (*GPU, "trainer.sequence_parallel=3"),
            ("trainer.sequence_parallel: 3 does not divide the GPUs of the cluster", ""),
        ),
        (
            ("trainer.forward=rollout", "rollout.scheme=bf16"),
            ("trainer.forward: `rollout` does not know `bf16`", "use rollout.scheme: int8"),
        ),
        (
            ("trainer.forward=linears", "rollout.scheme=fp8-block", EMULATED),
            ("trainer.forward: `linears` does not know `fp8-block`", "use rollout.scheme: int8"),
        ),
        (
            ("trainer.forward=rollout", "rollout.scheme=auto", "rollout.replicas=[int8, fp8]", TWO_ENGINES),
            ("trainer.forward: `rollout` computes in one scheme, not in several", "name one scheme"),
        ),
        (
            ("trainer.backward=fp8-block", "rollout.scheme=fp8-block", EMULATED),
            ("trainer.backward: `fp8-block` needs the rollouts' forward", "use trainer.forward: rollout"),
        ),
        (
            ("trainer.backward=fp8-block", "trainer.forward=rollout", "rollout.scheme=fp8", EMULATED),
            (
                "trainer.backward: `fp8-block` needs rollouts in `fp8-block`",
                "use rollout.scheme: fp8-block, or backward: bf16",
            ),
        ),
        (
            ("trainer.forward=rollout", "rollout.tensor_parallel=2", "cluster.gpus_per_node=2"),
            (
                "rollout.tensor_parallel: a layer in parts rounds in another way",
                "use 1, or trainer.forward: bf16",
            ),
        ),
        (
            ("trainer.forward=rollout", "rollout.lm_head_fp32=true"),
            (
                "rollout.lm_head_fp32: the last projection of `rollout` is in BF16",
                "use false, or trainer.forward: bf16",
            ),
        ),
        (
            ("trainer.forward=rollout", "rollout.kv_cache=fp8"),
            (
                "rollout.kv_cache: `rollout` computes with keys and values of 16 bits",
                "use `auto`, or trainer.forward: bf16",
            ),
        ),
        (
            ("rollout.kv_cache=fp8", "trainer.dtype=fp16", "rollout.scheme=bf16"),
            ("rollout.kv_cache: `fp8` is rounded from BF16 alone", "use `auto`, or trainer.dtype: bf16"),
        ),
        (
            ("rollout.kv_cache=fp8", "cluster.device=a100"),
            ("rollout.kv_cache: `fp8` needs a GPU that computes in FP8, and a100 does not", "use `auto`"),
        ),
        (
            ("rollout.top_p=0.9", "trainer.sequence_parallel=2", *GPU),
            (
                "rollout.top_p: log-probs over a part of the words are not computed where GPUs share a sequence",
                "use 1.0, or sequence_parallel: 1",
            ),
        ),
        (
            ("rollout.top_k=50", "trainer.sequence_parallel=2", *GPU),
            (
                "rollout.top_k: log-probs over a part of the words are not computed where GPUs share a sequence",
                "use 0, or sequence_parallel: 1",
            ),
        ),
        (
            ("trainer.forward=rollout", "trainer.sequence_parallel=2", *GPU),
            (
                "trainer.sequence_parallel: `rollout` does not share sequences",
                "use 1, or trainer.forward: bf16",
            ),
        ),
        (
            ("trainer.forward=rollout", "trainer.attention=flash_attention_2", *GPU),
            (
                "trainer.attention: only the forward in BF16 has a choice of attention",
                "use auto, or trainer.forward: bf16",
            ),
        ),
        (
            ("trainer.old_log_probs=rollout",),
            (
                "trainer.old_log_probs: `rollout` takes the engines' log-probs for the trainer's, and a BF16 forward "
                "has others",
                "use trainer.forward: rollout, or trainer.old_log_probs: recompute",
            ),
        ),
        (
            (*REUSES, "correction.method=calibrated-clipping", "correction.cap=null"),
            (
                "trainer.old_log_probs: `calibrated-clipping` fits bounds to how log-probs differ from the engines', "
                "and here they do not",
                "use another method, or trainer.old_log_probs: recompute",
            ),
        ),
        (
            (*REUSES, "guard.actions=[warn, tighten]"),
            (
                "guard.actions: `tighten` is for a correction, which has nothing to act on where old log-probs are the "
                "engines'",
                "remove `tighten`, or trainer.old_log_probs: recompute",
            ),
        ),
    ],
)
def test_rule(sets, problem):
    assert only(*sets) == problem


@pytest.mark.parametrize("method", CorrectionMethod)
def test_every_method_is_available_with_its_usual_limits(method):
    correction = load_recipe(
        "arithmetic-tiny-int8", sets=[f"correction.method={method}", "correction.cap=null"]
    ).correction
    assert (correction.method, correction.cap, correction.bounds) == (method, None, None)


def test_limits_of_a_method_are_read_as_numbers():
    sets = ["correction.method=icepop", "correction.cap=null", "correction.bounds=[1, 5]"]
    assert load_recipe("arithmetic-tiny-int8", sets=sets).correction.bounds == (1.0, 5.0)
    sets = ["correction.method=k3-reject", "correction.cap=1e-3"]
    assert load_recipe("arithmetic-tiny-int8", sets=sets).correction.cap == 1e-3


def test_unknown_device_lists_the_known():
    message, hint = only("cluster.device=H100-80GB")
    assert message == "cluster.device: unknown value `H100-80GB`"
    assert hint.startswith("did you mean `h100`? use one of `auto`, `cpu`, `a100`")


def test_batch_arithmetic_is_told_all_at_once():
    sets = ("cluster.gpus_per_node=3", "batch.mini_batch_prompts=5", "batch.max_tokens_per_gpu=8", "task.train_size=9")
    assert sorted(without_place(message) for message, _ in problems_of(*sets)) == [
        "batch.max_tokens_per_gpu: 8 tokens do not hold one sequence of 14 (prompt and response)",
        "batch.mini_batch_prompts: 5 does not divide the 32 prompts of a step",
        "batch.mini_batch_prompts: 5 prompts x 8 samples do not divide over 3 data-parallel ranks",
        "batch.prompts_per_step: 32 prompts x 8 samples do not divide over 3 GPUs",
        "task.train_size: 9 problems do not fill one step of 32 prompts",
    ]


def test_a_rule_stands_where_the_user_wrote_the_key():
    message, _ = problems_of("batch.mini_batch_prompts=5")[0]
    assert message.startswith("--set batch.mini_batch_prompts=5: batch.mini_batch_prompts: ")
    message, _ = problems_of("trainer.epochs=1", "task.train_size=64")[0]
    assert re.search(r"arithmetic-tiny-int8\.yaml:\d+: trainer\.steps: ", message)


def test_pool_sizes_of_arithmetic():
    message, hint = only("task.val_size=5000")
    assert message.startswith("task.val_size: 5000 is more than the ")
    assert hint == "lower it, or lower task.train_size to leave more for validation; or raise task.difficulty"


def test_rules_wait_for_keys_that_are_wrong_themselves():
    assert [message for message, _ in problems_of("batch.prompts_per_step=x", "batch.mini_batch_prompts=5")] == [
        "--set batch.prompts_per_step=x: batch.prompts_per_step: expected a whole number, got the text `x`",
    ]
