"""`appliance verify` as users start it, on real engines of two workers; what it finds in one: tests/engine."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from appliance.errors import EngineError, PreflightError
from appliance.preflight.probes import read_host
from appliance.recipe.load import load_recipe
from appliance.terms.schemes import Scheme
from appliance.terms.settings import Quantisation
from appliance.verify import command
from appliance.verify.command import run_verify


def verify(settings: tuple[str, ...], *options: str) -> subprocess.CompletedProcess[str]:
    sets = [part for each in settings for part in ("--set", each)]
    argv = [sys.executable, "-m", "appliance", "verify", "arithmetic-tiny-int8", *sets, *options]
    return subprocess.run(argv, capture_output=True, text=True, timeout=900, check=False)


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.long  # a minute and a half: four engines
def test_each_worker_of_two_is_looked_at(
    settings: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU a rank of the plan is a worker: two of them share each engine. The second one in INT8 is stale: the
    logits move, by the other rank, and return; only that worker's own layers show it."""
    monkeypatch.setattr(command, "CHILD", "broken_child")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    two = ("rollout.tensor_parallel=2", "cluster.gpus_per_node=2")
    with pytest.raises(EngineError) as raised:
        run_verify(
            load_recipe("arithmetic-tiny-int8", sets=(*settings, *two)), schemes=None, emulate=False, json_mode=False
        )
    assert raised.value.message == (
        "verify: 1 of 4 workers failed: int8: model.embed_tokens and 14 other layers give the same with other weights"
    )
    rows = capsys.readouterr().out.splitlines()[1:5]
    assert [line.split()[:2] for line in rows] == [["bf16", "0"], ["bf16", "1"], ["int8", "0"], ["int8", "1"]]
    assert [("live" in line, "FAILED" in line) for line in rows] == [(True, False)] * 3 + [(False, True)]


def test_a_scheme_without_kernels_is_refused(settings: tuple[str, ...]) -> None:
    done = verify(settings, "--schemes", "fp8")
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.splitlines()[1] == (
        "hint: leave that scheme out, or check the numbers of an FP8 scheme with --emulate"
    )


def engines_of(
    settings: tuple[str, ...], *sets: str, schemes: tuple[Scheme, ...] | None = None, emulate: bool = False
) -> list[Quantisation]:
    """What the engines would be told, each profile as planned."""
    recipe = load_recipe("arithmetic-tiny-int8", sets=(*settings, *sets))
    host = read_host(Path("/"))
    plans = command._plans(Path("/run"), recipe, schemes=schemes, emulate=emulate, host=host)
    return [each for each, _ in command._engines_of(plans)]


def test_bf16_comes_first_and_each_scheme_once(settings: tuple[str, ...]) -> None:
    found = engines_of(settings, "rollout.scheme=auto", "rollout.replicas=[int8, bf16]", "cluster.gpus_per_node=4")
    assert found == [Quantisation(scheme=Scheme.BF16), Quantisation(scheme=Scheme.INT8, profile="/run/profile")]


def test_a_scheme_of_the_command_line_gets_what_a_run_in_it_would_get(settings: tuple[str, ...]) -> None:
    found = engines_of(settings, "quantization.ignore=[a]", schemes=(Scheme.FP8_CHANNEL, Scheme.FP8), emulate=True)
    assert found == [
        Quantisation(scheme=Scheme.BF16),
        Quantisation(scheme=Scheme.FP8_CHANNEL, emulated=True, ignore=("a",), profile="/run/profile"),
        Quantisation(scheme=Scheme.FP8, emulated=True, ignore=("a",)),
    ]


def test_emulate_is_for_the_recipes_own_schemes_too(settings: tuple[str, ...]) -> None:
    found = engines_of(settings, "rollout.scheme=fp8", emulate=True)
    assert found == [Quantisation(scheme=Scheme.BF16), Quantisation(scheme=Scheme.FP8, emulated=True)]


def test_a_recipe_with_another_scheme_is_not_judged_as_one_that_was_typed(settings: tuple[str, ...]) -> None:
    """`emulate` is for FP8 alone, and BF16 has no precision to raise."""
    both = [Quantisation(scheme=Scheme.BF16), Quantisation(scheme=Scheme.INT8, profile="/run/profile")]
    assert engines_of(settings, emulate=True) == both
    raises = "guard.actions=[warn, raise-precision]"
    assert engines_of(settings, raises, schemes=(Scheme.BF16, Scheme.INT8)) == both


def test_engines_are_without_graphs_where_one_has_quantised_experts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever scheme comes first. All of them, since they are compared."""
    shapes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_experts": 4}
    (tmp_path / "config.json").write_text(json.dumps(shapes))
    jobs: list[dict[str, object]] = []

    def start(module: list[str], *, env: dict[str, str], **_: object) -> None:
        assert env["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"  # all prompts are one batch, each time
        jobs.append(json.loads(Path(module[1]).read_text()))
        raise EngineError("no GPU")

    monkeypatch.setattr(command, "run_child", start)
    monkeypatch.setattr(command, "examine_for", lambda *args, **kwargs: None)
    sets = ("model.builtin=null", f"model.path={tmp_path}", f"cluster.run_dir={tmp_path}", "cluster.device=h100")
    for schemes in ((Scheme.BF16, Scheme.INT8), (Scheme.INT8,), (Scheme.BF16,)):
        with pytest.raises(EngineError):
            run_verify(load_recipe("arithmetic-tiny-int8", sets=sets), schemes=schemes, emulate=False, json_mode=False)
    assert [job["enforce_eager"] for job in jobs] == [True, True, True, True, False]


def test_a_prompt_has_a_token_whose_log_prob_can_move(
    settings: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one of a prompt has none."""
    lengths: list[int] = []

    def start(module: list[str], **_: object) -> None:
        lengths.append(json.loads(Path(module[1]).read_text())["prompt_tokens"])
        raise EngineError("enough")

    monkeypatch.setattr(command, "run_child", start)
    recipe = load_recipe("arithmetic-tiny-int8", sets=(*settings, "task.max_prompt_tokens=1"))
    with pytest.raises(EngineError):
        run_verify(recipe, schemes=(Scheme.BF16,), emulate=False, json_mode=False)
    assert lengths == [2]


def test_preflight_stops_it_before_an_engine_starts(
    settings: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "run_child", lambda *args, **kwargs: pytest.fail("an engine was started"))
    recipe = load_recipe("arithmetic-tiny-int8", sets=(*settings, "cluster.device=h200", "model.path=/nonexistent"))
    monkeypatch.setattr(command, "read_host", lambda root: dataclasses.replace(read_host(root), gpus=()))
    with pytest.raises(PreflightError) as raised:
        run_verify(recipe, schemes=(Scheme.FP8,), emulate=False, json_mode=False)
    assert raised.value.message == "this plan cannot run here: 2 findings above"
    assert capsys.readouterr().err.splitlines() == [
        "error: --set cluster.device=h200: cluster.device: `h200` is wanted, this host has no GPU",
        "hint: run it on a host with 1 x `h200`, or try `--set cluster.device=cpu`",
        "error: --set model.path=/nonexistent: model.path: /nonexistent: no such folder",
        "hint: correct the path",
    ]


def test_an_engine_that_dies_is_a_row_and_the_others_are_looked_at(
    settings: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "dead_child.py").write_text("raise SystemExit(7)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(command, "CHILD", "dead_child")
    recipe = load_recipe("arithmetic-tiny-int8", sets=settings)
    with pytest.raises(EngineError) as raised:
        run_verify(recipe, schemes=None, emulate=False, json_mode=False)
    died = f"verify: dead_child ended with code 7 (its log: {tmp_path}/verify-failed.log)"
    assert raised.value.message == f"verify: 2 of 2 workers failed: bf16: {died}"
    assert capsys.readouterr().out.splitlines()[3:] == [f"bf16: {died}", f"int8: {died}"]
