import json

import pytest

from appliance.corrections.registry import METHODS, CorrectionMethod
from appliance.errors import RecipeError
from appliance.finding import error
from appliance.recipe.load import load_recipe, to_yaml

WRITE = "close brackets and quotes, indent with spaces, put a text with `: ` or ` #` in quotes"
MINIMAL = "model:\n  builtin: tiny-arithmetic\ntrainer:\n  steps: 3\n"


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes `r.yaml` in a folder of its own, which is the current one."""
    monkeypatch.chdir(tmp_path)

    def write_recipe(text: str, name: str = "r.yaml") -> str:
        (tmp_path / name).write_text(text)
        return name

    return write_recipe


def problems_of(name: str, *sets: str) -> list[tuple[str, str]]:
    with pytest.raises(RecipeError) as raised:
        load_recipe(name, sets=sets)
    assert raised.value.exit_code == 2
    return raised.value.problems


def test_minimal_recipe_takes_defaults_and_the_name_of_its_file(write):
    recipe = load_recipe(write(MINIMAL))
    assert (recipe.name, recipe.rollout.scheme, recipe.correction.method) == ("r", "auto", "tis")


def test_everything_wrong_is_told_at_once_with_its_line(write):
    text = """\
name: my recipe
modle:
  builtin: tiny-arithmetic
model:
  builtin: tiny-arithmetic
rollout:
  scheme: fp8_fast
  samples_per_prompt: eight
  temperature: 0
  tensor_paralel: 2
  replicas: [int8, fp9]
optimizer:
  learning_rate: "1e-6"
correction:
  cap: -1
batch:
  prompts_per_step: 32
  mini_batch_prompts: 64
  learning_rate: 3
trainer:
  steps: 1.5
  validate_before: yes
guard:
  stall_s: 0
logging:
  backends: [tensorboard, wanbd]
"""
    use = "use one of `auto`, `bf16`, `int8`, `int4`, `fp8`, `fp8-channel`, `fp8-block`"
    assert problems_of(write(text)) == [
        (
            "r.yaml:1: name: the text `my recipe` is not a name",
            "use letters, digits, `.`, `_` and `-`, at most 80, no space or slash",
        ),
        ("r.yaml:2: modle: unknown key", "did you mean `model`?"),
        ("r.yaml:7: rollout.scheme: unknown value `fp8_fast`", use),
        ("r.yaml:8: rollout.samples_per_prompt: expected a whole number, got the text `eight`", ""),
        ("r.yaml:9: rollout.temperature: must be greater than 0, got `0`", ""),
        ("r.yaml:10: rollout.tensor_paralel: unknown key", "did you mean `rollout.tensor_parallel`?"),
        ("r.yaml:11: rollout.replicas.1: unknown value `fp9`", f"did you mean `fp8`? {use}"),
        ("r.yaml:13: optimizer.learning_rate: expected a number, got the text `1e-6`", "remove the quotes"),
        ("r.yaml:15: correction.cap: must be greater than 0, got `-1`", ""),
        ("r.yaml:18: batch.mini_batch_prompts: 64 is more than the 32 prompts of a step", "lower it"),
        ("r.yaml:19: batch.learning_rate: unknown key", "did you mean `optimizer.learning_rate`?"),
        ("r.yaml:21: trainer.steps: expected a whole number, got `1.5`", ""),
        ("r.yaml:22: trainer.validate_before: expected true or false, got the text `yes`", "write true"),
        ("r.yaml:24: guard.stall_s: must be greater than 0, got `0`", ""),
        (
            "r.yaml:26: logging.backends.1: unknown value `wanbd`",
            "did you mean `wandb`? use one of `tensorboard`, `trackio`, `wandb`",
        ),
    ]


def test_sections_that_are_no_mappings(write):
    text = MINIMAL + "task: 5\nrollout: [1]\nseed: '0'\nbatch:\n"
    assert problems_of(write(text)) == [
        ("r.yaml:5: task: expected a mapping of keys, got `5`", ""),
        ("r.yaml:6: rollout: expected a mapping of keys, got a list", ""),
        ("r.yaml:7: seed: expected a whole number, got the text `0`", "remove the quotes"),
    ]


@pytest.mark.parametrize("text", ["- 1\n", "word\n", "5\n"])
def test_a_recipe_is_a_mapping(write, text):
    problem = ("r.yaml:1: a recipe is a mapping of keys", "see `appliance recipes show reference`")
    assert problem in problems_of(write(text))


def test_a_broken_file_is_told_alone(write):
    assert problems_of(write("a: [1\n")) == [
        ("r.yaml:2: not YAML: expected ',' or ']', but got '<stream end>'", WRITE),
    ]


def test_an_empty_file_lacks_what_has_no_default(write):
    assert problems_of(write("")) == [
        ("r.yaml: model.path: no model is named", "give `path`, or `builtin: tiny-arithmetic`"),
        ("r.yaml: trainer.steps: the length of the training is not given", "give `steps` or `epochs`"),
    ]


def test_set_changes_one_key_by_the_rules_of_the_file(write):
    recipe = load_recipe(write(MINIMAL), sets=["optimizer.learning_rate=1e-6", "rollout.scheme=int8", "name=other"])
    assert (recipe.optimizer.learning_rate, recipe.rollout.scheme, recipe.name) == (1e-6, "int8", "other")


def test_set_takes_lists_null_and_text_with_an_equals_sign(write):
    sets = ["logging.backends=[wandb]", "correction.method=none", "correction.cap=null", "cluster.run_dir=a=b"]
    recipe = load_recipe(write(MINIMAL + "correction:\n  cap: 3\n"), sets=sets)
    assert (recipe.logging.backends, recipe.correction.cap, recipe.cluster.run_dir) == (("wandb",), None, "a=b")


def test_the_last_set_holds(write):
    assert load_recipe(write(MINIMAL), sets=["seed=1", "seed=2"]).seed == 2


def test_set_problems_name_the_option(write):
    name = write(MINIMAL)
    sets = ["correction.cap=abc", "rollout.top_p", "=5", "a..b=1", "extends=x", "task.seed=.nan", "seed=[1", "nme=x"]
    usage = "such as --set optimizer.learning_rate=1e-6"
    assert sorted(problems_of(name, *sets)) == sorted(
        [
            ("--set correction.cap=abc: correction.cap: expected a number, got the text `abc`", ""),
            ("--set rollout.top_p: expected KEY=VALUE", usage),
            ("--set =5: expected KEY=VALUE", usage),
            ("--set a..b=1: expected KEY=VALUE", usage),
            ("--set extends=x: `extends` cannot be set here", "write it into a recipe file"),
            ("--set task.seed=.nan: not a finite number: `.nan`", ""),
            ("--set seed=[1: not YAML: expected ',' or ']', but got '<stream end>'", WRITE),
            ("--set nme=x: nme: unknown key", "did you mean `name`?"),
        ]
    )


def test_a_key_of_an_earlier_version_names_what_replaces_it(write):
    name = write(MINIMAL)
    hint = (
        "use `quantization.mismatch_budget`, such as 0.01: a bound on the predicted mismatch, in nats per token, "
        "not on the error of a layer's outputs; finish a run that began with the old key with the version that began it"
    )
    message = "--set quantization.error_budget=0.02: quantization.error_budget: unknown key"
    assert problems_of(name, "quantization.error_budget=0.02") == [(message, hint)]
    without = load_recipe(name)
    assert load_recipe(name, sets=("quantization.error_budget=null",)) == without  # as a run's own recipe has it


def test_a_key_without_its_section_is_that_very_key_and_not_one_of_a_like_name(write):
    name = write(MINIMAL)
    assert problems_of(name, "scheme=int8", "path=/m") == [
        ("--set scheme=int8: scheme: unknown key", "did you mean `rollout.scheme`?"),
        ("--set path=/m: path: unknown key", "did you mean `model.path`?"),
    ]


def test_extends_merges_key_by_key_and_names_the_child(write):
    write(MINIMAL + "name: parent\nrollout:\n  temperature: 0.5\n  top_p: 0.9\n", name="parent.yaml")
    recipe = load_recipe(write("extends: parent.yaml\nrollout:\n  top_p: 1.0\nbatch:\n"))
    assert (recipe.name, recipe.rollout.temperature, recipe.rollout.top_p) == ("r", 0.5, 1.0)
    assert recipe.extends is None


def test_extends_a_shipped_recipe(write):
    recipe = load_recipe(write("extends: arithmetic-tiny-int8\nrollout:\n  scheme: bf16\n"))
    assert (recipe.model.builtin, recipe.rollout.scheme) == ("tiny-arithmetic", "bf16")


@pytest.mark.parametrize(
    ("text", "sets", "where", "source"),
    [
        ("extends: smollm2-int8\n", [], "r.yaml", "(`smollm2-int8` sets it"),
        ("extends: smollm2-int8\ntrainer:\n  steps: 2\ntask:\n  seed: 1\n", [], "r.yaml:4", "(`smollm2-int8` sets it"),
        ("extends: smollm2-int8\ntask:\n  train_size: 1700\n", [], "r.yaml:3", ""),
        ("extends: smollm2-int8\n", ["task.train_size=1700"], "--set task.train_size=1700", ""),
        ("extends: parent.yaml\n", [], "parent.yaml:2", ""),
    ],
)
def test_a_value_of_a_shipped_recipe_is_placed_where_the_user_would_write_it(write, text, sets, where, source):
    write("task:\n  train_size: 1200\nmodel: {builtin: tiny-arithmetic}\ntrainer: {steps: 2}\n", name="parent.yaml")
    recipe = load_recipe(write(text), sets=sets)
    placed = recipe.placed(error("data", "task.train_size", "1700 is more than there are"))
    assert placed.where == where
    assert placed.message.startswith("1700 is more than there are")
    assert placed.message.endswith(f"{source})" if source else "are")


def test_extends_is_relative_to_the_file(write, tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "parent.yaml").write_text(MINIMAL)
    (tmp_path / "sub" / "child.yaml").write_text("extends: parent.yaml\n")
    assert load_recipe("sub/child.yaml").trainer.steps == 3


def test_a_problem_in_the_parent_names_the_parent(write):
    write(MINIMAL + "seed: x\n", name="parent.yaml")
    assert problems_of(write("extends: parent.yaml\nbatch: 3\n")) == [
        ("r.yaml:2: batch: expected a mapping of keys, got `3`", ""),
        ("parent.yaml:5: seed: expected a whole number, got the text `x`", ""),
    ]


def test_extends_what_extends_another(write):
    write(MINIMAL + "rollout:\n  top_p: 0.5\n  temperature: 0.5\n", name="oldest.yaml")
    write("extends: oldest.yaml\nrollout:\n  top_p: 0.6\n", name="parent.yaml")
    recipe = load_recipe(write("extends: parent.yaml\n"))
    assert (recipe.rollout.top_p, recipe.rollout.temperature) == (0.6, 0.5)


def test_extends_never_in_a_circle(write):
    write("extends: r.yaml\n" + MINIMAL, name="parent.yaml")
    assert problems_of(write("extends: parent.yaml\n")) == [
        ("parent.yaml:1: extends: r.yaml extends this file", "one of them must not"),
    ]


def test_extends_four_at_most(write):
    write("", name="5.yaml")
    for number in range(1, 5):
        write(f"extends: {number + 1}.yaml\n", name=f"{number}.yaml")
    assert problems_of(write("extends: 1.yaml\n" + MINIMAL)) == [
        ("4.yaml:1: extends: more than 4 recipes, one below the other", "merge some of them"),
    ]


def test_extends_nothing_that_exists(write):
    assert problems_of(write(MINIMAL + "extends: arithmetic-tiny-int9\n")) == [
        (
            "r.yaml:5: extends: arithmetic-tiny-int9: no shipped recipe has this name, and no file",
            "did you mean `arithmetic-tiny-int8`?",
        )
    ]


def test_a_refused_value_is_told_once(write):
    assert problems_of(write("model:\n  builtin: tiny-arithmetic\ntrainer:\n  steps: .nan\n")) == [
        ("r.yaml:4: trainer.steps: not a finite number: `.nan`", ""),
    ]


def test_no_such_file():
    assert problems_of("nowhere/r.yaml") == [
        ("nowhere/r.yaml: no such file", "`appliance recipes ls` lists the shipped recipes")
    ]


def test_no_such_name():
    assert problems_of("arithmetic-tiny") == [
        ("arithmetic-tiny: no shipped recipe has this name, and no file", "did you mean `arithmetic-tiny-int8`?")
    ]


@pytest.mark.parametrize("method", CorrectionMethod)
def test_the_resolved_recipe_reads_back_the_same_with_its_limits(write, method):
    sets = ["optimizer.learning_rate=1e-6", f"correction.method={method}", "correction.cap=null"]
    recipe = load_recipe("arithmetic-tiny-int8", sets=sets)
    again = load_recipe(write(to_yaml(recipe)))
    given = {"correction": True, "algorithm": {"aggregate", *recipe.algorithm.bounds}}
    assert again.model_dump(exclude=given) == recipe.model_dump(exclude=given)
    usual = METHODS[method]
    wanted = (method, usual.usual_cap, usual.usual_bounds)
    assert (again.correction.method, again.correction.cap, again.correction.bounds) == wanted


@pytest.mark.parametrize(
    ("sets", "bounds"),
    [
        ((), (0.2, 0.2, 3.0)),
        (("algorithm.clip_high=0.28",), (0.2, 0.28, 3.0)),
        (("algorithm.loss=tbpo", "correction.method=none", "correction.cap=null"), (3e-4, 4e-4, 1.0007)),
    ],
)
def test_the_resolved_recipe_has_the_bounds_of_its_loss(write, sets, bounds):
    recipe = load_recipe("arithmetic-tiny-int8", sets=sets)
    again = load_recipe(write(to_yaml(recipe)))
    assert tuple(again.algorithm.bounds.values()) == tuple(recipe.algorithm.bounds.values()) == bounds
    assert (again.algorithm.clip_low, again.algorithm.clip_high, again.algorithm.dual_clip) == bounds


@pytest.mark.parametrize("text", ["08", "1e6", "1.5e3", "7", "null", "1_000"])
def test_a_text_that_looks_like_a_number_reads_back_as_text(write, text):
    recipe = load_recipe(write(f'name: "{text}"\n{MINIMAL}'))
    assert load_recipe(write(to_yaml(recipe))).name == recipe.name == text


def test_messages_do_not_carry_a_whole_value(write):
    problems = problems_of(write(MINIMAL + f"seed: {'x' * 5000}\n"))
    assert all(len(message) < 200 for message, _ in problems), json.dumps(problems)


@pytest.mark.parametrize("profile", ["none", "/some/profile"])
def test_a_recipe_without_a_profile_to_make_reads_back_the_same(tmp_path, profile):
    recipe = load_recipe("arithmetic-tiny-int8", sets=(f"quantization.profile={profile}",))
    (tmp_path / "again.yaml").write_text(to_yaml(recipe))
    assert load_recipe(str(tmp_path / "again.yaml"), sets=()).quantization == recipe.quantization


def test_nothing_after_the_equals_sign_is_null():
    assert load_recipe("arithmetic-tiny-int8", sets=("task.train_file= ",)).task.train_file is None
    with pytest.raises(RecipeError) as raised:
        load_recipe("arithmetic-tiny-int8", sets=("quantization.profile=",))
    assert raised.value.problems == [
        ("--set quantization.profile=: quantization.profile: expected text, got nothing", "its default is `auto`")
    ]


@pytest.mark.parametrize("value", ["it is #1", "#1", '"it" #1', "'it is' #1", "[it] #1", "{it: is} #1"])
def test_an_option_is_not_cut_at_what_would_be_a_comment(value):
    told = (f"--set task.system={value}: `#1` would be a comment, and left out", "put the value into quotes")
    assert told in problems_of("arithmetic-tiny-int8", f"task.system={value}")


@pytest.mark.parametrize("value", ["c#", '"c #1"', "  c", "'#1'", "é#é"])
def test_a_number_sign_within_a_value_stays(value):
    name = load_recipe("arithmetic-tiny-int8", sets=(f"model.path={value}", "model.builtin=null")).model.path
    assert name == value.strip("\"' ")


def test_an_empty_list_is_told_in_our_words():
    with pytest.raises(RecipeError) as raised:
        load_recipe("arithmetic-tiny-int8", sets=("rollout.replicas=[]",))
    fact = "--set rollout.replicas=[]: rollout.replicas: expected at least one value, got none"
    assert raised.value.problems == [(fact, "null leaves it out")]


@pytest.mark.parametrize(
    ("key", "value", "message", "hint"),
    [
        ("model.lora.r", "8", "unknown key", "use one of `rank`, `alpha`, `targets`, `dropout`, `sync`"),
        ("model.lora.targets", "[]", "expected at least one value, got none", "null leaves it out"),
        ("task.prompt", "null", "expected text, got nothing", "its default is `prompt`"),
        (
            "cluster.address",
            "head",
            "the text `head` is not an address",
            "give host and port, such as `10.0.0.7:6379`",
        ),
        ("logging.backends", "wandb", "expected a list, got the text `wandb`", "write `[wandb]`"),
        (
            "optimizer.betas",
            "0.9",
            "expected a list, got `0.9`",
            "give numbers in brackets, with commas between them",
        ),
    ],
)
def test_the_hint_fits_the_key(key, value, message, hint):
    with pytest.raises(RecipeError) as raised:
        load_recipe("arithmetic-tiny-lora-int8", sets=(f"{key}={value}",))
    assert raised.value.problems == [(f"--set {key}={value}: {key}: {message}", hint)]


def test_a_list_of_wrong_values_is_not_called_empty():
    with pytest.raises(RecipeError) as raised:
        load_recipe("arithmetic-tiny-lora-int8", sets=("model.lora.targets=[q]",))
    ((message, _),) = raised.value.problems
    assert message == "--set model.lora.targets=[q]: model.lora.targets.0: unknown value `q`"


def test_a_missing_key_is_told_where_its_mapping_stands():
    with pytest.raises(RecipeError) as raised:
        load_recipe("arithmetic-tiny-int8", sets=("task.rewards=[{nam: math}]",))
    place = "--set task.rewards=[{nam: math}]: task.rewards.0"
    assert raised.value.problems == [
        (f"{place}.name: it is missing", "write `[{name: math}]`"),
        (f"{place}.nam: unknown key", "did you mean `name`?"),
    ]


@pytest.mark.parametrize(
    ("key", "value", "hint", "taken"),
    [
        ("task.train_file", '""', "null leaves it out", "null"),
        ("cluster.token_file", '""', "null leaves it out", "null"),
        ("cluster.run_dir", '""', "its default is `runs`", "runs"),
        ("cluster.device", '""', "its default is `auto`", "auto"),
        ("quantization.profile", '""', "its default is `auto`", "auto"),
        ("quantization.ignore", '["a", ""]', "remove it from the list", '["a"]'),
    ],
)
def test_the_hint_for_an_empty_text_is_one_that_the_key_takes(key, value, hint, taken):
    with pytest.raises(RecipeError) as raised:
        load_recipe("arithmetic-tiny-int8", sets=(f"{key}={value}",))
    (problem,) = raised.value.problems
    assert problem[1] == hint
    load_recipe("arithmetic-tiny-int8", sets=(f"{key}={taken}",))


def test_a_parent_that_is_missing_is_the_one_problem(tmp_path):
    """What it might have given is not missed: no word of `model` or `trainer.steps`. A slip beside it is told."""
    child = tmp_path / "child.yaml"
    child.write_text("extends: nosuch\ntrainer:\n  validate_every: 3\ncheckpoint:\nrollout:\n  sheme: int8\n")
    with pytest.raises(RecipeError) as raised:
        load_recipe(str(child))
    assert raised.value.problems == [
        (
            f"{child}:1: extends: nosuch: no shipped recipe has this name, and no file",
            "`appliance recipes ls` lists the shipped recipes",
        ),
        (f"{child}:6: rollout.sheme: unknown key", "did you mean `rollout.scheme`?"),
    ]


@pytest.mark.parametrize(
    "text",
    [
        "trainer:\n  sequence_parallel: 2\n",
        "batch:\n  max_tokens_per_gpu: 6144\ntask:\n  max_response_tokens: 16384\n",
        "task:\n  kind: gsm8k\n  val_file: val.jsonl\n",
        "rollout:\n  replicas: [int8, bf16]\n  tensor_parallel: 1\ncluster:\n  gpus_per_node: 1\n",
    ],
)
def test_a_rule_waits_for_what_a_missing_parent_might_have_given(tmp_path, text):
    child = tmp_path / "child.yaml"
    child.write_text(f"extends: nosuch\n{text}")
    with pytest.raises(RecipeError) as raised:
        load_recipe(str(child))
    assert [message for message, _ in raised.value.problems if "nosuch" not in message] == []
