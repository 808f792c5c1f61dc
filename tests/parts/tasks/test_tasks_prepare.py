"""What a run needs is made once, whole, and as transformers and verl read it."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from plans import FILES_OF_BUILTIN, make_batch, make_plan, make_rollout

from appliance.errors import RecipeError
from appliance.plan.verl_args import overrides
from appliance.record.plan import RunPlan, WeightsPlan
from appliance.settings.sections import Model, ValSet
from appliance.tasks import prepare as preparation
from appliance.tasks.library import TINY_MODELS
from appliance.tasks.prepare import is_prepared, main, prepare
from appliance.terms.schemes import Scheme

NO_FILE = "give the path of a {} file; a relative one begins in the folder where the program is started"

BUILTIN = "tiny-arithmetic"
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_layers": 1,
    "num_heads": 2,
    "num_kv_heads": 1,
    "steps": 3,
    "batch_size": 4,
}


def plan_of(root: Path, **task: object) -> RunPlan:
    run_dir = root / "run"
    run_dir.mkdir(exist_ok=True)
    data = root / "cache" / "data" / "made"
    plan = make_plan(run_dir, cache_dir=str(root / "cache"), batch=make_batch(prompts_per_step=4))
    parquets = {"train_parquet": str(data / "train.parquet"), "val_parquet": str(data / "val.parquet")}
    return plan.replace(
        model=Model(builtin=BUILTIN),
        weights=WeightsPlan(name_or_path=str(root / "cache" / "models" / "made"), is_cached=True),
        task=plan.task.replace(**({"train_size": 20, "val_size": 10} | task)),
        task_files=plan.task_files.replace(**parquets),
        rollout=make_rollout(Scheme.BF16),
    )


def events_of(plan: RunPlan) -> list[dict[str, object]]:
    lines = (Path(plan.run_dir) / "events.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if key != "time"} for line in lines]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> RunPlan:
    """A plan, prepared, whose built-in model has one small layer and three steps of warm start."""
    plan = plan_of(tmp_path_factory.mktemp("prepared"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(TINY_MODELS, BUILTIN, replace(TINY_MODELS[BUILTIN], **SMALL))
        assert not is_prepared(plan)
        prepare(plan)
    return plan


def test_prepare_makes_all_that_a_plan_names(small: RunPlan) -> None:
    assert is_prepared(small)
    assert {path.name for path in Path(small.weights.name_or_path).iterdir()} == FILES_OF_BUILTIN


def test_prepare_leaves_only_whole_entries(small: RunPlan) -> None:
    assert [path.name for path in Path(small.weights.name_or_path).parent.iterdir()] == ["made"]
    assert [path.name for path in Path(small.task_files.train_parquet).parent.parent.iterdir()] == ["made"]


def test_prepare_tells_its_progress(small: RunPlan) -> None:
    events = events_of(small)
    assert events[0] == {"kind": "phase", "what": "prepare", "why": ""}
    warm = [event for event in events if event["what"] == "warm start"]
    assert (warm[-1]["done"], warm[-1]["total"]) == (3, 3)
    assert str(warm[-1]["note"]).startswith("loss ")
    assert events[-1]["note"] == "20 problems to train on, 10 to validate"


def test_prepare_makes_nothing_twice(small: RunPlan) -> None:
    made = Path(small.weights.name_or_path, "model.safetensors").stat().st_mtime_ns
    prepare(small)
    assert Path(small.weights.name_or_path, "model.safetensors").stat().st_mtime_ns == made


def test_tiny_model_is_plain_for_transformers(small: RunPlan) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(small.weights.name_or_path)
    tokenizer = AutoTokenizer.from_pretrained(small.weights.name_or_path)
    message = [{"role": "user", "content": "47+85"}]
    prompt = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_tensors="pt")
    assert type(model).__name__ == "Qwen2ForCausalLM"
    assert model.dtype is torch.bfloat16
    assert tokenizer.decode(prompt["input_ids"][0]) == "47+85="
    assert prompt["input_ids"].shape == (1, 6)
    assert model.generation_config.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert model.generate(**prompt, max_new_tokens=2).shape[1] > 6


def test_tiny_model_is_the_same_each_time(tmp_path: Path) -> None:
    from appliance.tasks.tiny_model import make_tiny_model

    spec = replace(TINY_MODELS[BUILTIN], **SMALL)
    losses: list[list[float]] = [[], []]
    for number in (0, 1):
        seen = losses[number]
        make_tiny_model(
            spec, difficulty=2, folder=tmp_path / str(number), on_step=lambda _, loss, seen=seen: seen.append(loss)
        )
    assert len(losses[0]) == 3
    assert losses[0] == losses[1]
    assert len({(tmp_path / str(number) / "model.safetensors").read_bytes() for number in (0, 1)}) == 1


def test_tokenizer_renders_as_verl_builds_prompts(small: RunPlan) -> None:
    from verl.utils import hf_tokenizer
    from verl.utils.tokenizer.continuous_token_wiring import create_continuous_token_builder

    tokenizer = hf_tokenizer(small.weights.name_or_path)
    builder = create_continuous_token_builder(tokenizer, hf_model_type="qwen2")
    messages = [{"role": "user", "content": "1+2"}]
    tokens = builder.build_initial_tokens(messages)
    assert tokenizer.decode(tokens) == "1+2="
    answered = [*messages, {"role": "assistant", "content": "3"}]
    both = tokenizer.apply_chat_template(answered, tokenize=False)
    assert both == "1+2=3<|im_end|>"
    assert tokenizer.encode("\n", add_special_tokens=False) == [198]


@pytest.mark.parametrize("text", ["47+85=132", "\n\t é 漢 \x00", "<|im_start|>"])
def test_tokenizer_gives_back_every_text(small: RunPlan, text: str) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(small.weights.name_or_path)
    tokens = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(tokens) == text
    if not text.startswith("<"):
        assert len(tokens) == len(text.encode())


def test_parquet_is_what_verl_reads(small: RunPlan, tmp_path: Path) -> None:
    from omegaconf import OmegaConf
    from verl.utils import hf_tokenizer
    from verl.utils.dataset.rl_dataset import RLHFDataset

    config = OmegaConf.create(
        {"max_prompt_length": 6, "filter_overlong_prompts": True, "cache_dir": str(tmp_path), "prompt_key": "prompt"}
    )
    tokenizer = hf_tokenizer(small.weights.name_or_path)
    train = RLHFDataset([small.task_files.train_parquet], tokenizer=tokenizer, config=config)
    val = RLHFDataset([small.task_files.val_parquet], tokenizer=tokenizer, config=config)
    assert (len(train), len(val)) == (20, 10)
    row = val[3]
    (message,) = row["raw_prompt"]
    assert message["role"] == "user"
    assert sum(map(int, message["content"].split("+"))) == int(row["reward_model"]["ground_truth"])
    assert row["data_source"] == "arithmetic"
    assert row["extra_info"] == {"split": "val", "index": 3, "row": ""}
    assert not {row["raw_prompt"][0]["content"] for row in train} & {row["raw_prompt"][0]["content"] for row in val}


@pytest.mark.parametrize("name", ["run [1]", "a*"])
def test_verl_finds_the_data_in_a_folder_whose_name_reads_as_a_pattern(
    small: RunPlan, tmp_path: Path, name: str
) -> None:
    from omegaconf import OmegaConf
    from verl.utils.dataset.rl_dataset import RLHFDataset

    folders = [tmp_path / name, tmp_path / "another"]
    for folder in folders:
        folder.mkdir()
        shutil.copy(small.task_files.train_parquet, folder)
    plan = small.replace(task_files=small.task_files.replace(train_parquet=str(folders[0] / "train.parquet")))
    file = dict(overrides(plan))["data.train_files"]
    config = OmegaConf.create({"filter_overlong_prompts": False, "cache_dir": str(tmp_path)})
    assert len(RLHFDataset([file], tokenizer=None, config=config)) == 20


def gsm8k_plan(small: RunPlan, *, root: Path, max_prompt_tokens: int) -> RunPlan:
    """The prepared model, and a file of ten problems of which three are long."""
    rows = [{"question": f"{'Long. ' * 40 * (n < 3)}What is {n}?", "answer": f"#### {n}"} for n in range(10)]
    file = root / "rows.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in rows))
    plan = plan_of(
        root, kind="gsm8k", train_file=str(file), train_size=0, val_size=3, max_prompt_tokens=max_prompt_tokens
    )
    return plan.replace(model=small.model, weights=small.weights)


def test_prepare_leaves_out_long_gsm8k_prompts_and_says_so(small: RunPlan, tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    plan = gsm8k_plan(small, root=tmp_path, max_prompt_tokens=128)
    prepare(plan)
    what = "3 of 10 problems have prompts of more than 128 tokens and are left out"
    assert {"kind": "note", "what": what, "why": "task.max_prompt_tokens"} in events_of(plan)
    files = (plan.task_files.train_parquet, plan.task_files.val_parquet)
    rows = [row for path in files for row in pq.read_table(path).to_pylist()]
    assert sorted(row["reward_model"]["ground_truth"] for row in rows) == ["3", "4", "5", "6", "7", "8", "9"]
    assert {row["data_source"] for row in rows} == {"gsm8k"}
    assert events_of(plan)[-1]["note"] == "4 problems to train on, 3 to validate"


def test_prepare_refuses_a_limit_that_leaves_no_problem(small: RunPlan, tmp_path: Path) -> None:
    plan = gsm8k_plan(small, root=tmp_path, max_prompt_tokens=8)
    with pytest.raises(RecipeError) as caught:
        prepare(plan)
    message = "task.max_prompt_tokens: 8 leaves 0 training and 0 validation problems"
    assert caught.value.problems == [(message, "raise it")]
    assert not is_prepared(plan)


def test_prepare_writes_each_validation_by_its_name(small: RunPlan, tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    other = tmp_path / "other.jsonl"
    other.write_text("".join(f'{{"question": "What is {n}?", "answer": "#### {n}"}}\n' for n in (2, 3, 40)))
    plan = gsm8k_plan(small, root=tmp_path, max_prompt_tokens=128)
    sets = {"other": ValSet(file=str(other), temperature=0.0), "held": ValSet(size=2, temperature=0.0)}
    plan = plan.replace(task=plan.task.replace(val_sets=sets))
    prepare(plan)
    files = (plan.task_files.train_parquet, plan.task_files.val_parquet)
    train, val = (pq.read_table(path).to_pylist() for path in files)
    places = [(row["extra_info"]["split"], row["extra_info"]["index"]) for row in val]
    assert places[:4] == [("other", 0), ("other", 1), ("other", 2), ("held", 0)]
    assert {name for name, _ in places[3:]} == {"held"}
    prompts = [row["prompt"][0]["content"] for row in (*train, *val)]
    assert len(prompts) == len(set(prompts))
    sizes_said = events_of(plan)[-1]["note"]
    assert sizes_said == f"{len(train)} problems to train on, 3 (other), {len(places) - 3} (held) to validate"


def test_prepare_says_which_validation_a_limit_leaves_without_problems(small: RunPlan, tmp_path: Path) -> None:
    plan = gsm8k_plan(small, root=tmp_path, max_prompt_tokens=8)
    held = ValSet(size=4, temperature=0.0)
    with pytest.raises(RecipeError) as caught:
        prepare(plan.replace(task=plan.task.replace(val_sets={"held": held})))
    message = "task.max_prompt_tokens: 8 leaves 0 training and 0 validation (held) problems"
    assert caught.value.problems == [(message, "raise it")]


def test_prepare_refuses_operands_that_do_not_fit(small: RunPlan, tmp_path: Path) -> None:
    plan = plan_of(tmp_path, difficulty=4, max_prompt_tokens=9).replace(model=small.model, weights=small.weights)
    with pytest.raises(RecipeError) as caught:
        prepare(plan)
    message = "task.max_prompt_tokens: 9 leaves 0 training and 0 validation problems"
    assert caught.value.problems == [(message, "raise it")]


def test_main_reports_a_failure_with_its_exit_code(small: RunPlan, tmp_path: Path) -> None:
    missing = tmp_path / "none.jsonl"
    plan = plan_of(tmp_path, kind="gsm8k", train_file=str(missing)).replace(model=small.model, weights=small.weights)
    plan.write(tmp_path / "plan.json")
    assert main([str(tmp_path / "plan.json")]) == 2
    assert events_of(plan)[-1] == {
        "kind": "failure",
        "what": f"task.train_file: {missing}: no such file",
        "why": "",
        "error": "RecipeError",
        "hint": NO_FILE.format("JSON-lines or parquet"),
        "exit_code": 2,
    }
    assert not (tmp_path / "cache").exists()


def test_main_leaves_no_half_made_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(tmp_path)
    plan.write(tmp_path / "plan.json")
    small_spec = replace(TINY_MODELS[BUILTIN], **SMALL)
    monkeypatch.setitem(TINY_MODELS, BUILTIN, small_spec)

    append = preparation.append_event

    def full_disk(run_dir: Path, *, kind: str, **event: object) -> None:
        if kind == "progress":
            raise OSError(28, "No space left on device")
        append(run_dir, kind=kind, **event)

    monkeypatch.setattr(preparation, "append_event", full_disk)
    with pytest.raises(OSError, match="No space left on device"):
        main([str(tmp_path / "plan.json")])
    assert list((tmp_path / "cache" / "models").iterdir()) == []
    assert events_of(plan)[-1]["what"] == "OSError: [Errno 28] No space left on device"
