"""Keys of the cache, rewards by the task's name, and no torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from plans import make_files, make_plan

from appliance.settings.sections import TaskKind
from appliance.tasks import built_in
from appliance.tasks.library import TASKS, TINY_MODELS, builtin_model_key, data_key


def key(kind: str, *, model: str = "m", **changes: object) -> str:
    return data_key(make_plan(Path("/runs/a-1")).task.replace(kind=kind, **changes), files=make_files(), model=model)


MAKES_ARITHMETIC = [("difficulty", 3), ("seed", 1), ("train_size", 9), ("val_size", 9), ("max_prompt_tokens", 9)]


@pytest.mark.parametrize(("field", "value"), [*MAKES_ARITHMETIC, ("model", "n"), ("long_prompts", "truncate")])
def test_data_key_changes_with_what_makes_arithmetic(field: str, value: int | str) -> None:
    assert key("arithmetic", **{field: value}) != key("arithmetic")


def test_data_key_of_arithmetic_ignores_data_files() -> None:
    assert key("arithmetic", train_file="x") == key("arithmetic")


def test_data_key_follows_the_content_of_a_file(tmp_path: Path) -> None:
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    first.write_text("{}")
    second.write_text("{}")
    same = {key("gsm8k", train_file=str(path)) for path in (first, second)}
    second.write_text("{ }")
    other = key("gsm8k", train_file=str(second))
    missing = key("gsm8k", train_file=str(tmp_path / "none"))
    assert len(same) == 1
    assert len({*same, other, missing, key("gsm8k")}) == 4


@pytest.mark.parametrize(("field", "value"), [("model", "n"), ("max_prompt_tokens", 9), ("val_file", "x"), ("seed", 1)])
def test_data_key_changes_with_what_makes_gsm8k(field: str, value: int | str) -> None:
    assert key("gsm8k", **{field: value}) != key("gsm8k")


def test_builtin_model_key_depends_on_difficulty() -> None:
    assert tuple(TINY_MODELS) == ("tiny-arithmetic", "tiny-calculator")
    assert builtin_model_key("tiny-arithmetic", difficulty=2) != builtin_model_key("tiny-arithmetic", difficulty=3)


def test_builtin_gemms_fit_int8_kernels() -> None:
    """N a multiple of 16, K a multiple of 32, for every linear layer as the engine fuses them."""
    spec = TINY_MODELS["tiny-arithmetic"]
    head_size = spec.hidden_size // spec.num_heads
    qkv = (spec.num_heads + 2 * spec.num_kv_heads) * head_size
    shapes = [(qkv, spec.hidden_size), (spec.hidden_size, spec.hidden_size)]
    shapes += [(2 * spec.intermediate_size, spec.hidden_size), (spec.hidden_size, spec.intermediate_size)]
    shapes += [(spec.vocab_size, spec.hidden_size)]
    assert all(n % 16 == 0 and k % 32 == 0 for n, k in shapes)


def test_score_finds_the_reward_by_the_kind() -> None:
    assert tuple(TASKS) == ("arithmetic", "gsm8k", "dapo-math", "word-problems")
    files = {path.stem.replace("_", "-") for path in Path(built_in.__path__[0]).glob("[!_]*.py")}
    assert files == set(TASKS)
    assert tuple(TaskKind) == (*TASKS, "own")
    assert TASKS["arithmetic"].score(response="12", truth="12") == 1.0
    assert TASKS["gsm8k"].score(response="12", truth="12") == 0.0
    assert TASKS["gsm8k"].score(response="#### 12", truth="12") == 1.0


def test_tasks_import_without_torch() -> None:
    heavy = "torch transformers pyarrow datasets numpy"
    program = f"""
import sys
import appliance.tasks.library, appliance.tasks.prepare, appliance.trainer.rewards
found = [name for name in {heavy!r}.split() if name in sys.modules]
sys.exit(f"imported {{found}}" if found else 0)
"""
    subprocess.run([sys.executable, "-c", program], check=True)
