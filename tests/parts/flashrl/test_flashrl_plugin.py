"""What our entry point does in a vLLM process because of FlashRL's variables, and where its lines go."""

from __future__ import annotations

import ast
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from plugin_patches import put_back_at_end

from appliance import patch
from appliance.errors import RecipeError
from appliance.plan.build import build_plan
from appliance.preflight.probes import read_host
from appliance.recipe.load import load_recipe
from flashrl_compat.plugin import register
from flashrl_compat.variables import LOGGER, VARIABLES, Variables, start_logging

PATCHES = {
    "flashrl-engine-arguments",
    "flashrl-first-load",
    "flashrl-core-follows-updates",
    "flashrl-core-settles-updates",
    "flashrl-core-refuses-requests",
    "flashrl-core-refuses-to-resume",
    "flashrl-server-says-why",
    "flashrl-engine-says-why",
    "flashrl-engine-forgets-refused-requests",
    "flashrl-core-labels-tokens",
    "flashrl-labels-of-tokens-arrive",
    "flashrl-outputs-have-versions",
    "flashrl-merged-outputs-have-versions",
}


@pytest.fixture(autouse=True)
def silent_logger() -> Iterator[None]:
    """FlashRL's logger as a new process has it."""
    handlers, level, propagate = list(LOGGER.handlers), LOGGER.level, LOGGER.propagate
    LOGGER.handlers.clear()
    LOGGER.propagate = True
    yield
    for handler in set(LOGGER.handlers) - set(handlers):
        handler.close()
    LOGGER.handlers[:] = handlers
    LOGGER.setLevel(level)
    LOGGER.propagate = propagate


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A vLLM process in which nothing but the engine's own plugin was called and no variable is set."""
    from vllm import envs
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    envs.disable_envs_cache()  # of an engine that was started in this process
    for name in [*VARIABLES, "APPLIANCE_PLAN"]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(patch, "_APPLIED", {})
    for owner, name in ((EngineArgs, "create_engine_config"), (DefaultModelLoader, "load_weights")):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    put_back_at_end(monkeypatch)
    monkeypatch.setattr("appliance.engine.plugin.register", lambda: None)
    return monkeypatch


def applied() -> set[str]:
    """But for the two of the reload, which a process has for good, and which do nothing to models of others."""
    return set(patch.applied_patches()) - {"flashrl-reload-begins", "flashrl-reload-ends"}


@pytest.mark.engine
def test_the_patch_is_on_where_the_variable_is(process: pytest.MonkeyPatch) -> None:
    register()
    assert patch.applied_patches() == ()
    process.setenv("FLASHRL_CONFIG", "bf16")
    register()
    assert applied() == PATCHES


@pytest.mark.engine
@pytest.mark.parametrize("name", ["arithmetic-tiny-int8", "dapo-32b-fp8"])
def test_a_child_of_ours_never_loads_it(process: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    """Of `train` and, by the same variables, of `bench` and `verify`: with FLASHRL_CONFIG=int8 in the shell a benchmark
    would measure INT8 twice, once under the name of BF16."""
    from vllm.plugins import load_plugins_by_group

    process.delenv("VLLM_PLUGINS", raising=False)
    assert set(load_plugins_by_group("vllm.general_plugins")) >= {"flashrl_appliance", "flashrl_compat"}
    recipe = load_recipe(name)
    environment = dict(build_plan(recipe, run_dir=tmp_path / "run", host=read_host(tmp_path)).env)
    process.setenv("VLLM_PLUGINS", environment["VLLM_PLUGINS"])
    assert set(load_plugins_by_group("vllm.general_plugins")) == {"flashrl_appliance"}


@pytest.mark.engine
def test_the_engine_s_own_plugin_comes_first_whatever_vllm_s_order(process: pytest.MonkeyPatch) -> None:
    """vLLM may also be told to load this one alone."""
    from appliance.engine import plugin

    configs: list[str] = []
    process.setattr(plugin, "register", lambda: configs.append(os.environ["FLASHRL_CONFIG"]))
    process.setenv("FLASHRL_CONFIG", "int8")
    register()
    assert (configs, applied()) == (["int8"], PATCHES)


def test_the_core_does_without(root: Path) -> None:
    """No file of it imports this package or names a variable of FlashRL's, but in words for people."""
    wrong = []
    for file in sorted((root / "appliance").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [getattr(node, "module", None) or "", *(each.name for each in node.names)]
                wrong += [f"{file.name}: {name}" for name in names if name.startswith("flashrl_compat")]
            elif isinstance(node, ast.Constant) and re.fullmatch(r"FLASHRL_\w*", str(node.value)):
                wrong.append(f"{file.name}: {node.value}")
    assert wrong == []


@pytest.mark.engine
def test_a_variable_that_does_nothing_is_named(process: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    process.setenv("FLASHRL_LMHEAD_FP32", "1")
    register()
    assert patch.applied_patches() == ()
    assert caplog.messages == ["FLASHRL_LMHEAD_FP32 does nothing without FLASHRL_CONFIG; FLASHRL_CONFIG=bf16 is enough"]


@pytest.mark.engine
def test_an_unknown_value_stops_the_process_with_its_hint(process: pytest.MonkeyPatch) -> None:
    process.setenv("FLASHRL_CONFIG", "w4a16")
    with pytest.raises(RecipeError) as raised:
        register()
    assert str(raised.value) == "FLASHRL_CONFIG: unknown value `w4a16`"
    assert raised.value.__notes__ == [f"hint: {raised.value.hint}"]


@pytest.mark.engine
def test_a_log_file_that_cannot_be_opened_stops_the_process_with_its_hint(process: pytest.MonkeyPatch) -> None:
    process.setenv("FLASHRL_CONFIG", "bf16")
    process.setenv("FLASHRL_LOGGING_FILE", "/proc/flash.log")
    with pytest.raises(RecipeError) as raised:
        register()
    assert str(raised.value) == "FLASHRL_LOGGING_FILE: /proc/flash.log cannot be written: No such file or directory"
    assert raised.value.__notes__ == ["hint: name a file in a folder that you can write to"]
    assert (patch.applied_patches(), LOGGER.handlers) == ((), [])


@pytest.mark.engine
def test_the_plugin_needs_neither_verl_nor_ray() -> None:
    """Nor does the worker, the core, or the sender of a trainer: an import of either is an error here."""
    code = (
        "import sys; sys.modules['verl'] = sys.modules['ray'] = None; "
        "import flashrl_compat.plugin as plugin; plugin.register(); "
        "import flashrl_compat.worker, flashrl_compat.sender; print('imported')"
    )
    environ = {**os.environ, "FLASHRL_CONFIG": "int8"}
    child = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True)
    assert child.returncode == 0, child.stderr[-2000:]
    assert child.stdout.splitlines()[-1] == "imported"


def test_lines_have_flashrls_format_and_go_into_the_file(tmp_path: Path) -> None:
    log = tmp_path / "flashrl.log"
    log.write_text("before\n")
    start_logging(Variables(config=None, log_level=logging.WARNING, log_file=log))
    start_logging(Variables(config=None, log_level=logging.WARNING, log_file=log))
    LOGGER.info("too quiet")
    LOGGER.warning("heard")
    before, line = log.read_text().splitlines()
    assert before == "before"
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} - flashrl - WARNING - heard", line)


def test_info_is_the_level_that_nobody_asked_for(tmp_path: Path) -> None:
    start_logging(Variables(config=None, log_file=tmp_path / "log"))
    LOGGER.debug("too quiet")
    LOGGER.info("heard")
    assert len((tmp_path / "log").read_text().splitlines()) == 1
