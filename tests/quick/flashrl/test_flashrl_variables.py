"""FlashRL's environment variables: every legal value, and every other one refused with the legal ones."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from appliance.errors import RecipeError
from appliance.terms.schemes import Scheme
from flashrl_compat.names import NAMES
from flashrl_compat.variables import HubFile, Variables, idle_variables, read_variables

LEGAL = (
    "use one of `bf16`, `fp8`, `fp8_vllm`, `fp8_fast`, `fp8_vllm_fast`, `fp8_tensor`, `fp8_channel`, `int8`, "
    "`int8_fast`, `int8_prune`, `int8_wo_prune`, a YAML file in FlashRL's format, or `user/repo/file.yaml` on the hub"
)
ALL_VARIABLES = (
    "FlashRL's variables are `FLASHRL_CONFIG`, `FLASHRL_LMHEAD_FP32`, `FLASHRL_LOGGING_LEVEL`, "
    "`FLASHRL_LOGGING_FILE`, `FLASHRL_TEST_RELOAD`"
)


def problems_of(**environ: str) -> list[tuple[str, str]]:
    with pytest.raises(RecipeError) as raised:
        read_variables({f"FLASHRL_{name}": value for name, value in environ.items()})
    return raised.value.problems


def test_each_name_of_flashrl_has_a_scheme() -> None:
    schemes = {name.theirs: read_variables({"FLASHRL_CONFIG": name.theirs}).config.scheme for name in NAMES}
    assert schemes == {
        "bf16": Scheme.BF16,
        "fp8": Scheme.FP8,
        "fp8_vllm": Scheme.FP8,
        "fp8_fast": Scheme.FP8,
        "fp8_vllm_fast": Scheme.FP8,
        "fp8_tensor": Scheme.FP8,
        "fp8_channel": Scheme.FP8_CHANNEL,
        "int8": Scheme.INT8,
        "int8_fast": Scheme.INT8,
        "int8_prune": Scheme.INT8,
        "int8_wo_prune": Scheme.INT8,
    }


@pytest.mark.parametrize(
    ("value", "meant"),
    [
        ("int2", ""),
        ("int4", "`int4` is for `fn:` of a file; "),
        ("INT8", "did you mean `int8`? "),
        ("fp8-channel", "did you mean `fp8_channel`? "),
        ("fp8_block", "`fp8_block` is for `fn:` of a file; "),
        ("user/repo", ""),
        ("/nowhere/at/all", ""),
    ],
)
def test_another_value_is_refused_with_the_legal_ones(value: str, meant: str) -> None:
    assert problems_of(CONFIG=value) == [(f"FLASHRL_CONFIG: unknown value `{value}`", meant + LEGAL)]


def test_a_file_that_is_not_there_is_refused_as_a_file() -> None:
    assert problems_of(CONFIG="/nowhere/q.yaml") == [("FLASHRL_CONFIG: there is no file /nowhere/q.yaml", LEGAL)]


def test_a_file_wins_over_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert read_variables({"FLASHRL_CONFIG": "user/repo/q.yaml"}).config == HubFile("user/repo", "q.yaml")
    (tmp_path / "user" / "repo").mkdir(parents=True)
    (tmp_path / "user" / "repo" / "q.yaml").touch()
    assert read_variables({"FLASHRL_CONFIG": "user/repo/q.yaml"}).config == tmp_path / "user" / "repo" / "q.yaml"


def test_a_file_on_the_hub_may_lie_in_a_folder() -> None:
    found = read_variables({"FLASHRL_CONFIG": "user/repo.w8a8/configs/int8.yml"})
    assert found.config == HubFile("user/repo.w8a8", "configs/int8.yml")
    assert found.shown == "FLASHRL_CONFIG=user/repo.w8a8/configs/int8.yml"


def test_without_a_config_nothing_is_on() -> None:
    environ = {"FLASHRL_LMHEAD_FP32": "maybe", "FLASHRL_CONFIG": " ", "OTHER": "1"}
    assert read_variables(environ) == Variables(config=None)
    assert idle_variables({"FLASHRL_LMHEAD_FP32": "1"}) == ("FLASHRL_LMHEAD_FP32",)
    assert idle_variables({"FLASHRL_LMHEAD_FP32": "1", "FLASHRL_CONFIG": "bf16"}) == ()


def test_all_variables_together(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "config.json").touch()
    variables = read_variables(
        {
            "FLASHRL_CONFIG": " int8 ",
            "FLASHRL_LMHEAD_FP32": "1",
            "FLASHRL_LOGGING_LEVEL": "debug",
            "FLASHRL_LOGGING_FILE": str(tmp_path / "log"),
            "FLASHRL_TEST_RELOAD": f"{tmp_path / 'a'}, Qwen/Qwen2.5-0.5B",
        }
    )
    assert variables.config.theirs == "int8"
    assert (variables.lm_head_fp32, variables.log_level, variables.log_file) == (True, logging.DEBUG, tmp_path / "log")
    assert variables.reload == (str(tmp_path / "a"), "Qwen/Qwen2.5-0.5B")


def test_the_head_says_no_other_than_it_says_nothing() -> None:
    assert read_variables({"FLASHRL_CONFIG": "bf16"}).lm_head_fp32 is None
    assert read_variables({"FLASHRL_CONFIG": "bf16", "FLASHRL_LMHEAD_FP32": "0"}).lm_head_fp32 is False


def test_every_problem_is_told_at_once(tmp_path: Path) -> None:
    problems = problems_of(
        CONFIG="w4a16",
        LMHEAD_FP32="true",
        LOGGING_LEVEL="LOUD",
        LOGGING_FILE=str(tmp_path / "none" / "log"),
        TEST_RELOAD=f"{tmp_path},,{tmp_path}/gone",
        LM_HEAD_FP32="1",
    )
    reload_hint = "name folders or models on the hub (`user/repo`), with commas between them"
    assert problems == [
        ("FLASHRL_LM_HEAD_FP32: unknown variable", ALL_VARIABLES),
        ("FLASHRL_CONFIG: unknown value `w4a16`", LEGAL),
        ("FLASHRL_LMHEAD_FP32: unknown value `true`", "use one of `0`, `1`"),
        (
            "FLASHRL_LOGGING_LEVEL: unknown value `LOUD`",
            "use one of `DEBUG`, `INFO`, `WARNING`, `ERROR`, `CRITICAL`",
        ),
        (
            f"FLASHRL_LOGGING_FILE: {tmp_path}/none/log cannot be written",
            "name a file in a folder that exists",
        ),
        (
            f"FLASHRL_TEST_RELOAD: `{tmp_path}` has no config.json and no safetensors",
            "name a checkpoint's folder",
        ),
        ("FLASHRL_TEST_RELOAD: `` is no checkpoint", reload_hint),
        (f"FLASHRL_TEST_RELOAD: `{tmp_path}/gone` is no checkpoint", reload_hint),
    ]
