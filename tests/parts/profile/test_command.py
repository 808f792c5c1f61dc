"""The commands on a recipe: a profile is made once and found again, and goes where it is wanted."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from hub_variables import set_hub
from plans import with_model
from typer.testing import CliRunner
from unlisted_models import make_unlisted

from appliance.cli import app
from appliance.errors import EngineError, RecipeError
from appliance.plan.build import build_plan
from appliance.preflight.inputs import read_inputs
from appliance.preflight.probes import read_host
from appliance.profile import command
from appliance.profile.child import ends_of_responses, make_profile, own_samples, read_prompts
from appliance.profile.command import table
from appliance.profile.job import ProfileJob, file_hash, find_known_profile, find_profile, job_of_plan, job_of_run
from appliance.quant.files import made_of_another_class, read_file_header
from appliance.quant.profile import load_smoothing
from appliance.recipe.load import load_recipe
from appliance.recipe.schema import Recipe
from appliance.record.events import EVENTS_FILE, parse_event
from appliance.record.plan import RunPlan
from appliance.tasks.prepare import prepare
from appliance.terms.schemes import Scheme
from appliance.trainer.checkpoints import profile_identity
from flashrl_compat.config_file import read_config


@pytest.fixture
def recipe(file: str) -> Recipe:
    return load_recipe(file, sets=())


def planned(recipe: Recipe, *, run: str = "one") -> RunPlan:
    """The plan of a run whose folder and data are there."""
    run_dir = Path(recipe.cluster.run_dir) / run
    run_dir.mkdir(parents=True)
    plan = build_plan(recipe, run_dir=run_dir, host=read_host(run_dir))
    prepare(plan)
    plan.write(run_dir / "plan.json")
    return plan


@pytest.mark.slow
def test_the_command_makes_a_profile_once_and_finds_it_again(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.run_profile(recipe, output=tmp_path / "out") == 0
    shown = capsys.readouterr()
    assert "layer 2 of 2" in shown.err
    assert "layers with the largest error" in shown.out and "mismatch" in shown.out
    (config,) = yaml.safe_load((tmp_path / "out" / "quantization.yaml").read_text())["configs"]
    assert (config["fn"], config["profile"], config["model"]) == ("int8", ".", recipe.model.path)
    monkeypatch.setattr(command, "run_child", lambda *args, **kwargs: pytest.fail("a child was started"))
    assert command.run_profile(recipe, output=None) == 0
    assert command.run_setup(recipe, output=tmp_path / "q.yaml") == 0
    (config,) = yaml.safe_load((tmp_path / "q.yaml").read_text())["configs"]
    assert load_smoothing(tmp_path / config["profile"]).groups


def test_a_run_gets_its_profile_by_a_child_and_the_next_run_from_the_cache(recipe: Recipe) -> None:
    plan = planned(recipe)
    child = command.profile_child(plan)
    assert child is not None and child.argv[-2:] == ("--plan", str(Path(plan.run_dir) / "plan.json"))
    assert not command.is_profiled(plan)
    make_profile(job_of_plan(plan))  # what the child does
    command.finish_profile(plan)
    assert command.is_profiled(plan) and command.profile_child(plan) is None
    assert (Path(plan.run_dir) / "profile" / "quantization.yaml").is_file()
    events = [parse_event(line) for line in (Path(plan.run_dir) / EVENTS_FILE).read_text().splitlines()]
    assert [(each.done, each.total) for each in events if each.kind == "progress" and each.what == "profile"] == [
        *((float(token), 6.0) for token in range(1, 7)),
        (1.0, 2.0),
        (2.0, 2.0),
    ]
    second = planned(recipe, run="two")
    assert command.profile_child(second) is None
    assert command.is_profiled(second)


def notes(plan: RunPlan) -> list[tuple[str, str]]:
    """(what, why) of the run's notes."""
    events = map(parse_event, (Path(plan.run_dir) / EVENTS_FILE).read_text().splitlines())
    return [(event.what, event.why) for event in events if event.kind == "note"]


def test_a_run_says_before_its_first_step_what_its_profile_predicts_and_check_knows_it(file: str) -> None:
    recipe = load_recipe(file, sets=("guard.k3_kl=1e-7",))
    plan = planned(recipe)
    assert command.made_before(plan) is None
    make_profile(job_of_plan(plan))
    command.finish_profile(plan)
    ((warning, why),) = notes(plan)
    kl = read_file_header(Path(plan.profile.folder))["predicted"]["kl"]
    tokens = read_file_header(Path(plan.profile.folder))["predicted"]["tokens"]
    assert why == "mismatch"
    assert warning.startswith(
        f"the profile predicts a mismatch of {kl:.2g} nats per token, measured on {tokens} tokens; above 1e-07 a step "
        "is bad (guard.k3_kl): `quantization.mismatch_budget: 5e-08` would keep "
    )
    assert "% of the multiplications in BF16; `trainer.forward: rollout`" in warning
    assert "or `rollout.scheme: bf16`" in warning
    command.finish_profile(plan)  # of a run that is resumed, of which preflight says it
    assert len(notes(plan)) == 1
    second = planned(recipe, run="two")
    found = command.made_before(second)
    facts = read_inputs(second, ask_hub=False, run_code=False, read_weights=False, made_profile=found)
    assert facts.expected is not None and facts.expected.kl == kl
    assert read_inputs(second, ask_hub=False, run_code=False, read_weights=False).expected is None


def test_a_run_and_a_plan_of_the_next_say_which_layers_the_budget_keeps_and_why(file: str) -> None:
    free = planned(load_recipe(file, sets=()), run="free")
    make_profile(job_of_plan(free))
    kl = read_file_header(Path(free.profile.folder))["predicted"]["kl"]
    plan = planned(load_recipe(file, sets=(f"quantization.mismatch_budget={kl / 2}",)))
    make_profile(job_of_plan(plan))
    command.finish_profile(plan)
    header = read_file_header(Path(plan.profile.folder))
    bf16_layers = [layer for layer in header["layers"] if layer["stays_in_bf16"]]
    total = sum(layer["multiplications"] for layer in header["layers"])
    part = sum(layer["multiplications"] for layer in bf16_layers) / total
    ((choice, why),) = notes(plan)
    assert why == "quantization.mismatch_budget"
    assert choice.startswith(
        f"{len(bf16_layers)} layers stay in BF16, {part:.1%} of the multiplications (`appliance bench` measures what "
        f"they cost in time): predicted mismatch {header['predicted']['kl']:.2g} nats per token, measured on "
        f"{header['predicted']['tokens']} tokens, instead of {kl:.2g}, for "
        f"a budget of {kl / 2:g}: "
    )
    assert choice.endswith("; `appliance profile` and the run's profile/quantization.yaml name them")
    assert "model.layers" not in choice
    shown = CliRunner().invoke(app, ["plan", file, "--set", f"quantization.mismatch_budget={kl / 2}"])
    assert choice in " ".join(shown.output.split())


def test_a_profile_that_the_recipe_names_is_taken_and_another_model_is_noted(recipe: Recipe, tmp_path: Path) -> None:
    plan = planned(recipe)
    make_profile(job_of_plan(plan).replace(target=str(tmp_path / "given")))
    assert plan.profile is not None
    with_profile = plan.replace(
        profile=plan.profile.replace(source=str(tmp_path / "given")),
        weights=plan.weights.replace(name_or_path="other/model"),
    )
    assert command.profile_child(with_profile) is None
    assert command.is_profiled(with_profile)
    lines = (Path(plan.run_dir) / EVENTS_FILE).read_text().splitlines()
    assert parse_event(lines[-1]).what == f"the profile {tmp_path / 'given'} was made of {recipe.model.path}"


def test_a_named_folder_without_a_profile_is_an_error(recipe: Recipe, tmp_path: Path) -> None:
    plan = planned(recipe)
    assert plan.profile is not None
    named = plan.replace(profile=plan.profile.replace(source=str(tmp_path)))
    with pytest.raises(EngineError, match="no profile"):
        command.profile_child(named)


def test_the_budgets_layers_are_in_the_configuration(recipe: Recipe, tmp_path: Path) -> None:
    plan = planned(recipe)
    make_profile(job_of_plan(plan).replace(mismatch_budget=1e-12))
    command.finish_profile(plan)
    (config,) = yaml.safe_load((Path(plan.run_dir) / "profile" / "quantization.yaml").read_text())["configs"]
    assert len(config["ignore"]) == 2 * 7
    assert "model.layers.1.mlp.down_proj" in config["ignore"]


@pytest.mark.parametrize(
    "sets",
    [
        ("rollout.scheme=bf16",),
        ("rollout.scheme=fp8", "quantization.emulate=true", "quantization.ignore=[model.layers.0.mlp.down_proj]"),
        ("rollout.scheme=fp8-block", "quantization.emulate=true", "rollout.lm_head_fp32=true"),
        ("quantization.profile=none",),
        ("rollout.scheme=auto", "rollout.replicas=[fp8, bf16]", "quantization.emulate=true", "cluster.gpus_per_node=2"),
    ],
)
def test_a_run_without_a_profile_has_its_engines_in_a_file_too(file: str, sets: tuple[str, ...]) -> None:
    plan = planned(load_recipe(file, sets=sets))
    assert plan.profile is None and command.profile_child(plan) is None
    command.finish_profile(plan)
    command.finish_profile(plan)  # of a run that is resumed
    entries = read_config(Path(plan.run_dir) / "profile" / "quantization.yaml")
    assert tuple(entry.quantisation for entry in entries) == plan.engines
    assert {entry.model for entry in entries} == {plan.weights.name_or_path}
    assert profile_identity(Path(plan.run_dir)) == ()  # nothing that a resumed run needs again


@pytest.mark.parametrize("change", ["weights", "settings", "data", "scheme"])
def test_another_input_is_another_profile(recipe: Recipe, change: str) -> None:
    plan = planned(recipe)
    job = job_of_plan(plan)
    make_profile(job)
    assert find_profile(job) == find_known_profile(job) is not None
    if change == "weights":
        file = Path(job.model) / "model.safetensors"
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    elif change == "data":
        Path(job.parquet).write_bytes(Path(plan.task_files.val_parquet).read_bytes())
    else:
        changes = {"settings": {"strength": 0.25}, "scheme": {"scheme": Scheme.FP8_CHANNEL}}[change]
        job = job.replace(**changes)
    assert find_known_profile(job) is None
    assert find_profile(job) is None


def test_no_file_of_a_model_is_read_for_a_profile_that_may_be_known(recipe: Recipe) -> None:
    """A plan says what a profile predicts, and does not read a large model for it."""
    job = job_of_plan(planned(recipe))
    make_profile(job)
    (memory := Path(job.cache_dir) / "hashes.json").unlink()
    assert find_known_profile(job) is None and not memory.exists()
    assert find_profile(job) == find_known_profile(job) is not None


def test_a_profile_of_a_model_in_the_hubs_cache_is_known(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its name, as `check` asks for it; that of another commit is not."""
    set_hub(monkeypatch, HF_HUB_CACHE=str(tmp_path / "hub"), HF_HUB_OFFLINE="1")
    repository, plan = tmp_path / "hub" / "models--owner--model", planned(recipe)
    snapshots = [repository / "snapshots" / (digit * 40) for digit in "ab"]
    for snapshot in snapshots:
        shutil.copytree(recipe.model.path, snapshot)
    (snapshots[1] / "generation_config.json").write_text("{}")
    (repository / "refs").mkdir()
    of_the_hub = with_model(plan, "owner/model")
    for commit, is_made in (("a", False), ("a", True), ("b", False)):
        (repository / "refs" / "main").write_text(commit * 40)
        if is_made:
            made = make_profile(job_of_run(of_the_hub).replace(target=""))
        assert command.made_before(of_the_hub) == (made if is_made else None)


def test_a_profile_is_made_with_the_recipes_strength_budget_and_ignored_layers(file: str) -> None:
    ignore = "model.layers.0.mlp.down_proj"
    sets = ("quantization.smoothing=0.75", "quantization.mismatch_budget=0.02", f"quantization.ignore=[{ignore}]")
    plan = planned(load_recipe(file, sets=sets))
    assert plan.profile is not None
    make_profile(job_of_run(plan))
    settings = read_file_header(Path(plan.profile.folder))["settings"]
    assert (settings["strength"], settings["mismatch_budget"], settings["ignore"]) == (0.75, 0.02, [ignore])


def test_a_files_hash_is_remembered_until_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (file := tmp_path / "a").write_bytes(b"one")
    first = file_hash(file, cache_dir=tmp_path / "cache")
    with monkeypatch.context() as patched:
        patched.setattr("hashlib.file_digest", lambda *args: pytest.fail("the file was read again"))
        assert file_hash(file, cache_dir=tmp_path / "cache") == first
    file.write_bytes(b"other")
    assert file_hash(file, cache_dir=tmp_path / "cache") != first


def test_a_model_whose_layers_cannot_be_run_one_by_one_gets_a_profile_that_smooths_nothing_and_says_why(
    recipe: Recipe, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer, PhiConfig, PhiForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_hidden_layers": 1}
    PhiForCausalLM(PhiConfig(vocab_size=64, **sizes)).save_pretrained(tmp_path / "phi")
    tiny = job_of_plan(planned(recipe))
    AutoTokenizer.from_pretrained(tiny.model).save_pretrained(tmp_path / "phi")
    job = tiny.replace(model=str(tmp_path / "phi"), cache_dir=str(tmp_path / "cache"))
    header = read_file_header(make_profile(job))
    assert (header["smoothing"], header["layers"], header["suggested_ignore"]) == ([], [], [])
    assert made_of_another_class(header, architectures=["PhiForCausalLM"]) == ""
    why = "PhiForCausalLM: transformers' PhiForCausalLM has no `model.norm`"
    assert any(line.startswith("not smoothed") and line.endswith(why) for line in table(header, folder="f"))
    with pytest.raises(EngineError, match=r"a profile of `phi` cannot be made: .* has no `model.norm`"):
        make_profile(job.replace(mismatch_budget=0.01))


GEMMA_3N = {  # small; the last layer has the keys and values of an earlier one
    "vocab_size": 64,
    "vocab_size_per_layer_input": 64,
    "hidden_size": 64,
    "hidden_size_per_layer_input": 8,
    "intermediate_size": 96,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "num_hidden_layers": 3,
    "num_kv_shared_layers": 1,
    "layer_types": ["full_attention"] * 3,
    "activation_sparsity_pattern": [0.0] * 3,
    "laurel_rank": 4,
}


def test_a_model_whose_layers_are_called_in_another_way_gets_one_too(recipe: Recipe, tmp_path: Path) -> None:
    """Gemma 3n has inputs for each layer beside the residual stream, and four streams of that."""
    from transformers import Gemma3nForCausalLM, Gemma3nTextConfig

    Gemma3nForCausalLM(Gemma3nTextConfig(**GEMMA_3N)).bfloat16().save_pretrained(tmp_path / "model")
    job = job_of_plan(planned(recipe)).replace(model=str(tmp_path / "model"), cache_dir=str(tmp_path / "cache"))
    header = read_file_header(make_profile(job))
    assert (header["architecture"], header["smoothing"], header["layers"]) == ("Gemma3nForCausalLM", [], [])
    ((reason,),) = ([each["why"] for each in header["not_smoothed"]],)
    assert reason.startswith("its layers cannot be run one by one: ")
    refused = r"a profile of `gemma3n_text` cannot be made: its layers cannot be run one by one: "
    with pytest.raises(EngineError, match=refused) as raised:
        make_profile(job.replace(mismatch_budget=0.01))
    assert raised.value.hint == "set quantization.profile: none"


OWN_CODE = """
from pathlib import Path
from transformers import GraniteConfig, GraniteForCausalLM
Path({marker!r}).touch()
class OwnConfig(GraniteConfig):
    model_type = "own"
class OwnForCausalLM(GraniteForCausalLM):
    config_class = OwnConfig
"""


def test_code_of_a_model_runs_for_its_profile_only_where_the_recipe_says_so(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoTokenizer, dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder, marker = make_unlisted(tmp_path / "model", "granite", seed=1), tmp_path / "marker"
    (folder / "own.py").write_text(OWN_CODE.format(marker=str(marker)))
    config = json.loads((folder / "config.json").read_text())
    classes = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    config |= {"model_type": "own", "architectures": ["OwnForCausalLM"], "auto_map": classes}
    (folder / "config.json").write_text(json.dumps(config))
    tiny = job_of_plan(planned(recipe))
    AutoTokenizer.from_pretrained(tiny.model).save_pretrained(folder)
    job = tiny.replace(model=str(folder), cache_dir=str(tmp_path / "cache"))
    with pytest.raises(EngineError, match="contains custom code which must be executed") as raised:
        make_profile(job)
    assert not marker.exists()
    assert raised.value.hint.endswith("and you have read it, model.trust_remote_code: true")
    header = read_file_header(make_profile(job.replace(trust_remote_code=True)))
    assert marker.exists() and header["architecture"] == "OwnForCausalLM"
    assert len(header["layers"]) == 2 * 4


def test_the_text_is_the_models_own_answers_to_prompts_of_the_task(recipe: Recipe) -> None:
    from transformers import AutoTokenizer

    job = job_of_plan(planned(recipe)).replace(prompts=40, max_tokens=240)
    tokenizer = AutoTokenizer.from_pretrained(job.model)
    prompts = read_prompts(job, tokenizer=tokenizer)
    samples = own_samples(job, folder=Path(job.model))
    assert 16 < len(prompts) < 40  # so many that they have 240 tokens at most, with responses of 6
    assert [list(sample.tokens[: sample.prompt_tokens]) for sample in samples] == prompts
    assert sum(len(sample.tokens) for sample in samples) <= 240
    for prompt in prompts:
        a, b = tokenizer.decode(prompt).removesuffix("=").split("+")
        assert a.isdigit() and b.isdigit()
    for sample in samples:
        response = sample.tokens[sample.prompt_tokens :]
        assert 1 <= len(response) <= 6
        assert tokenizer.eos_token_id not in response[:-1]
    assert own_samples(job, folder=Path(job.model)) == samples
    greedy = own_samples(job.replace(temperature=0.01), folder=Path(job.model))
    assert greedy != samples
    hot, cold = (own_samples(job.replace(temperature=t, top_k=1), folder=Path(job.model)) for t in (5.0, 1.0))
    assert hot == cold != samples  # of one word there is nothing to draw


def test_long_prompts_leave_sixteen_answers_to_compare(recipe: Recipe) -> None:
    from transformers import AutoTokenizer

    job = job_of_plan(planned(recipe)).replace(prompts=20, max_tokens=40)
    tokenizer = AutoTokenizer.from_pretrained(job.model)
    assert len(read_prompts(job, tokenizer=tokenizer)) == 16
    assert len(read_prompts(job.replace(prompts=5), tokenizer=tokenizer)) == 5


def test_prompts_that_are_too_long_are_left_out_or_cut_as_in_a_run(recipe: Recipe) -> None:
    from transformers import AutoTokenizer

    job = job_of_plan(planned(recipe)).replace(prompts=8)
    tokenizer = AutoTokenizer.from_pretrained(job.model)
    tokenizer.chat_template = "{{ messages[0].content }}{{ '=' if '9' in messages[0].content }}"
    prompts = read_prompts(job, tokenizer=tokenizer)
    longest = max(map(len, prompts))
    fitting = [prompt for prompt in prompts if len(prompt) < longest]
    assert 0 < len(fitting) < len(prompts)
    short = job.replace(max_prompt_tokens=longest - 1)
    assert read_prompts(short, tokenizer=tokenizer) == fitting
    cut = read_prompts(short.replace(truncate_prompts=True), tokenizer=tokenizer)
    assert cut == [prompt[-(longest - 1) :] for prompt in prompts]


@pytest.mark.parametrize(
    ("files", "ends"),
    [
        ({"generation_config.json": '{"eos_token_id": [5, 6]}', "config.json": '{"eos_token_id": 7}'}, {2, 5, 6}),
        ({"config.json": '{"eos_token_id": 7}'}, {2, 7}),
        ({"generation_config.json": "{}", "config.json": '{"eos_token_id": 7}'}, {2}),
        ({}, {2}),
    ],
)
def test_responses_end_where_an_engine_ends_them(tmp_path: Path, files: dict[str, str], ends: set[int]) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    assert ends_of_responses(tmp_path, tokenizer=SimpleNamespace(eos_token_id=2)) == ends


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b'{"eos_token_id"', "not JSON that can be read: "),
        (b"\xff\xfe", "not JSON that can be read: "),
        (b"[1]", "not a mapping"),
        (b'{"eos_token_id": "</s>"}', "eos_token_id: '</s>' is neither a token's number nor a list of them"),
        (b'{"eos_token_id": [1, true]}', "eos_token_id: [1, True] is neither"),
    ],
)
def test_a_damaged_generation_config_is_named(tmp_path: Path, content: bytes, reason: str) -> None:
    (file := tmp_path / "generation_config.json").write_bytes(content)
    with pytest.raises(EngineError, match=re.escape(f"{file}: {reason}")):
        ends_of_responses(tmp_path, tokenizer=SimpleNamespace(eos_token_id=2))


def test_the_text_of_a_profile_is_of_no_day(recipe: Recipe) -> None:
    """A profile is kept for runs of other days, by what it was made of."""
    from transformers import AutoTokenizer

    job = job_of_plan(planned(recipe)).replace(prompts=2, max_prompt_tokens=100)
    tokenizer = AutoTokenizer.from_pretrained(job.model)
    tokenizer.chat_template = "{{ strftime_now('%d %b %Y %f') }}: {{ messages[0].content }}"
    first, second = (read_prompts(job, tokenizer=tokenizer) for _ in range(2))
    assert first == second
    assert tokenizer.decode(first[0]).startswith("01 Jan 2026 00")


def test_a_scheme_without_a_profile_is_refused(recipe: Recipe, tmp_path: Path) -> None:
    plain = load_recipe(str(tmp_path / "recipe.yaml"), sets=("rollout.scheme=bf16",))
    with pytest.raises(RecipeError, match=r"rollout\.scheme: `bf16` has no profile"):
        command.run_profile(plain, output=None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "profile: give a recipe, or --model, --quantized and -o"),
        (["--model", "m", "-o", "o"], "profile: give a recipe, or --model, --quantized and -o"),
        (["r.yaml", "--model", "m", "--quantized", "q", "-o", "o"], "profile: give a recipe, or --model"),
        (["--model", "m", "--quantized", "q", "--scheme", "int2", "-o", "o"], "--scheme: unknown value `int2`"),
        (["--model", "m", "--quantized", "q", "-o", "o"], "--model m: not a folder with config.json"),
    ],
)
def test_a_wrong_use_of_the_command_is_refused(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["profile", *arguments])
    assert isinstance(result.exception, RecipeError)
    assert result.exception.message.startswith(message)


def test_a_job_is_read_as_it_was_written(recipe: Recipe) -> None:
    job = job_of_plan(planned(recipe)).replace(ignore=("a", "re:b"), mismatch_budget=0.02)
    assert ProfileJob.model_validate_json(job.model_dump_json()) == job
    assert isinstance(job, ProfileJob)


def test_the_table_names_worst_layers_kept_layers_smoothing_mismatch_and_place(recipe: Recipe) -> None:
    plan = planned(recipe)
    free = read_file_header(make_profile(job_of_plan(plan).replace(measure_above=0.0)))
    job = job_of_plan(plan).replace(mismatch_budget=free["predicted"]["kl"] / 2)
    header = read_file_header(make_profile(job))
    text = "\n".join(lines := table(header, folder="runs/x/profile"))
    bf16_layers = [each for each in header["layers"] if each["stays_in_bf16"]]
    assert bf16_layers and len(bf16_layers) < len(header["layers"])
    worst = next(line for line in lines if line.startswith("model.layers"))
    assert "mlp.down_proj" in worst
    assert "model.layers.0.self_attn.{q,k,v}_proj" in text
    assert re.search(
        r"smoothing     strength 0\.5: 4 norms(, \d up_proj)?(, \d v_proj)?, each with every layer that reads it;",
        text,
    )
    assert f"(for a mismatch of {job.mismatch_budget:g} nats, or by `ignore`)" in text
    assert f"{bf16_layers[0]['contribution']:.1e}" in text
    assert f"{free['predicted']['kl']:.1e} with all layers quantised" in text
    assert lines[-1] == "files         runs/x/profile"
