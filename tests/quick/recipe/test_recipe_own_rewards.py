"""Rules about the rewards and files of a task of the user's own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from called import called
from plans import HOST

from appliance import console
from appliance.plan.build import build_plan, resolve
from appliance.plan.rules import RULES
from appliance.recipe.load import load_recipe, read_recipe
from appliance.recipe.rules import judge
from appliance.record.code import with_copies
from appliance.tasks.rewards import BUILT_IN

RECIPE = """
name: own
model: {{builtin: {model}}}
task:
  kind: own
  train_file: d.jsonl
  max_prompt_tokens: 8
  max_response_tokens: 6
  rewards: {rewards}
  {more}
cluster: {{device: cpu}}
trainer: {{steps: 1}}
"""
ALL = ", ".join(f"`{each}`" for each in BUILT_IN)


def problems(folder: Path, rewards: str, more: str = "", *, model: str = "tiny-calculator") -> list[tuple[str, str]]:
    """(message, hint) of each fault. Whatever is wrong, the recipe has a plan, which shows no other fault."""
    file = folder / "r.yaml"
    file.write_text(RECIPE.format(rewards=rewards, more=more, model=model))
    typed = read_recipe(str(file))
    plan = resolve(typed.recipe, run_dir=folder / "runs" / "own-1", host=HOST)
    by_plan = judge(RULES, typed.recipe, plan, HOST, unreadable=typed.unreadable)
    assert {finding.fact for finding in by_plan} <= {finding.fact for finding in typed.faults}
    return [(finding.fact.partition(": ")[2], finding.remedy) for finding in typed.faults]


CODE = "it is code that the run executes: copy it here first, and read it"


@pytest.mark.parametrize(
    ("rewards", "problem"),
    [
        (
            "[{name: mathe}]",
            (
                "no reward is called `mathe`",
                f"did you mean `math`? use one of {ALL}, or a function of a file: `rewards.py:math`",
            ),
        ),
        (
            "[{name: zzz}]",
            ("no reward is called `zzz`", f"use one of {ALL}, or a function of a file: `rewards.py:name`"),
        ),
        ("[{name: exact, weight: 0}]", ("all weights are 0, so no response earns anything", "give one a weight")),
        ("[{name: exact, pattern: x}]", ("`exact` has no option `pattern`: it is for `regex`", "remove it")),
        ("[{name: 'a.py:f', target: 3}]", ("`f` has no option `target`: it is for `length`", "remove it")),
        ("[{name: length}]", ("`length` has no `target`", "give it: `{name: length, target: ...}`")),
        ("[{name: judge, url: 'http://x/v1'}]", ("`judge` has no `model`", "give it: `{name: judge, model: ...}`")),
        (
            "[{name: judge, model: m, url: 'http://me:word@x/v1'}]",
            (
                "`http://me:word@x/v1` is no address of an API",
                "give one such as `http://localhost:8000/v1`, without a password",
            ),
        ),
        (
            "[{name: regex, pattern: '('}]",
            ("`(` is not a regular expression: missing ), unterminated subpattern at position 0", "correct it"),
        ),
        ("[{name: 'https://x/a.py:f'}]", ("`https://x/a.py` is not the path of a Python file on this host", CODE)),
        (
            "[{name: 'rewards:f'}]",
            (
                "`rewards` is not the path of a Python file on this host",
                "give the path of a file that ends in .py, such as `rewards.py`",
            ),
        ),
        ("[{name: 'owner/name:f'}]", ("`owner/name` is not the path of a Python file on this host", CODE)),
        ("[{name: 'a.py:f-g'}]", ("`f-g` is not the name of a function", "give one of a.py: `a.py:name`")),
        ("[{name: 'a.py:'}]", ("`` is not the name of a function", "give one of a.py: `a.py:name`")),
    ],
)
def test_a_reward_that_cannot_be_is_refused(tmp_path: Path, rewards: str, problem: tuple[str, str]) -> None:
    (message, hint), *more = problems(tmp_path, rewards)
    assert more == [] and message.startswith("task.rewards: ")
    assert (message.removeprefix("task.rewards: "), hint) == problem


@pytest.mark.parametrize("command", [("check",), ("check", "--json"), ("plan",), ("train",), ("train", "--dry-run")])
@pytest.mark.parametrize("rewards", ["[{name: exct}]", "[{name: format}, {name: exct, weight: 0.5}]"])
def test_a_misspelt_reward_hides_no_other_fault(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    command: tuple[str, ...],
    rewards: str,
) -> None:
    """Faults of other keys, of the plan and of the rows are reported with it, each in its line."""
    monkeypatch.chdir(tmp_path)
    console.err_console.cache_clear()
    more = "max_turns: 3\n  val_file: v.jsonl"
    recipe = RECIPE.format(rewards=rewards, more=more, model="tiny-calculator")
    (tmp_path / "r.yaml").write_text(recipe.replace("cpu", "h1000").replace("steps: 1", "stpes: 1"))
    (tmp_path / "d.jsonl").write_text(json.dumps({"question": "1+1?", "answer": "2"}) + "\n")
    done = called(*command, "r.yaml", monkeypatch=monkeypatch, capfd=capfd)
    assert done.returncode == 2, done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    facts = {
        "error: r.yaml:9: task.rewards: no reward is called `exct`",
        "error: r.yaml:10: task.max_turns: there are no tools to take turns with",
        "error: r.yaml:12: cluster.device: unknown value `h1000`",
        "error: r.yaml:13: trainer.stpes: unknown key",
    }
    assert facts <= set(errors)
    assert sum("task.rewards" in error for error in errors) == 1
    assert "hint: did you mean `exact`? " in done.stderr
    of_this_host = {
        f"error: {tmp_path}/d.jsonl:1: the field `prompt` is missing: the row has `question`, `answer`",
        f"error: r.yaml:11: task.val_file: {tmp_path}/v.jsonl: no such file",
    }
    assert of_this_host & set(errors) == (set() if command == ("plan",) else of_this_host), errors


@pytest.mark.parametrize(
    ("rewards", "message", "hint"),
    [
        ("[math]", "task.rewards.0: expected a mapping of keys, got the text `math`", "write `[{name: math}]`"),
        ("math", "task.rewards: expected a list, got the text `math`", "write `[{name: math}]`"),
        ("{name: exact}", "task.rewards: expected a list, got a mapping", "write `[{name: math}]`"),
        ("r.py:f", "task.rewards: expected a list, got the text `r.py:f`", "write `[{name: r.py:f}]`"),
        ("[{name: 3}]", "task.rewards.0.name: expected text, got `3`", 'put it in quotes: "3"'),
    ],
)
def test_rewards_that_are_no_list_of_mappings_have_a_hint(
    tmp_path: Path, rewards: str, message: str, hint: str
) -> None:
    assert problems(tmp_path, rewards) == [(message, hint)]


def test_a_recipe_cannot_choose_which_variable_a_judge_gets(tmp_path: Path) -> None:
    """A recipe from elsewhere would have HF_TOKEN sent to an address of its own."""
    judge = "{name: judge, url: 'http://x/v1', model: m, key_variable: HF_TOKEN}"
    hint = "use one of `name`, `weight`, `pattern`, `target`, `url`, `model`, `prompt`"
    assert problems(tmp_path, f"[{judge}]") == [("task.rewards.0.key_variable: unknown key", hint)]


def test_a_response_has_more_time_than_its_rewards_may_take(tmp_path: Path) -> None:
    """Else the limit of the pool ends what a reward would have ended by itself, and the sample has no reward."""
    code, judge = "{name: code}", "{name: judge, url: 'http://x/v1', model: m}"
    for rewards, more in (([code], ""), ([judge], ""), ([code, judge], "reward_timeout_s: 36"), ([], "")):
        assert problems(tmp_path, f"[{', '.join([*rewards, '{name: exact}'])}]", more) == []
    hint = "give task.reward_timeout_s more than 35"
    message = "task.rewards: `code`, `judge` may take 35 s, and a response has 30 s"
    assert problems(tmp_path, f"[{code}, {judge}]") == [(message, hint)]
    message = "task.reward_timeout_s: `code` may take 10 s, and a response has 10 s"
    hint = "give task.reward_timeout_s more than 10"
    assert problems(tmp_path, f"[{code}]", "reward_timeout_s: 10") == [(message, hint)]


def test_tools_are_a_file_of_this_host(tmp_path: Path) -> None:
    message = "task.tools: `hf://owner/tools.py` is not the path of a Python file on this host"
    assert problems(tmp_path, "[{name: exact}]", "tools: hf://owner/tools.py") == [(message, CODE)]


def test_what_may_be_is_taken(tmp_path: Path) -> None:
    judge = "{name: judge, url: 'http://127.0.0.1:1/v1', model: m, prompt: '{response}'}"
    others = "{name: regex, pattern: a+}, {name: length, target: 9, weight: -0.5}, {name: 'a b/c.py:f'}, {name: math}"
    assert problems(tmp_path, f"[{judge}, {others}]") == []


def test_each_file_has_a_copy_of_its_own_name_which_is_no_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a/r.py", "b/r.py", "c/__init__.py"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(name)
    file = tmp_path / "r.yaml"
    file.write_text(
        RECIPE.format(
            rewards="[{name: 'a/r.py:f'}, {name: 'b/r.py:g'}, {name: 'a/r.py:h'}, {name: 'c/__init__.py:f'}]",
            more="",
            model="tiny-calculator",
        )
    )
    plan = build_plan(load_recipe(str(file)), run_dir=tmp_path / "runs" / "own-1", host=HOST)
    files = plan.task_files
    assert [(file.path, file.copy_name) for file in files.code] == [
        (str(tmp_path / "a" / "r.py"), "0-r.py"),
        (str(tmp_path / "b" / "r.py"), "1-r.py"),
        (str(tmp_path / "c" / "__init__.py"), "2-__init__.py"),
    ]
    copies = [reward.file for reward in with_copies(plan).rewards]
    assert copies == [f"{plan.run_dir}/code/{name}" for name in ("0-r.py", "1-r.py", "0-r.py", "2-__init__.py")]
    last = files.code[2]
    assert files.sha256_of(copies[3]) == last.sha256 == files.sha256_of(last.path) != files.sha256_of(copies[0])


def test_turns_are_of_tools(tmp_path: Path) -> None:
    problem = ("task.max_turns: there are no tools to take turns with", "remove it")
    assert problems(tmp_path, "[{name: exact}]", "max_turns: 3") == [problem]
    assert problems(tmp_path, "[{name: exact}]", "tools: t.py\n  max_turns: 3") == []


@pytest.mark.parametrize("model", ["tiny-arithmetic", "smollm2-135m"])
def test_a_built_in_model_without_tools_is_refused_with_them(tmp_path: Path, model: str) -> None:
    problem = (f"task.tools: the chat template of `{model}` has no tools", "use `tiny-calculator`")
    assert problems(tmp_path, "[{name: exact}]", "tools: t.py", model=model) == [problem]
