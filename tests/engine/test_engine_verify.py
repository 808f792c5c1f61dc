"""What `appliance verify` finds in engines that are right, and in those that are broken in one way. The code of its
children runs in this process, which has imported vLLM already; tests/parts/verify starts it as users do."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from engines import Engine, forget_engines, free_engine, run_here

from appliance.errors import EngineError
from appliance.launch import side_job
from appliance.recipe.load import load_recipe
from appliance.terms.schemes import Scheme
from appliance.verify.command import run_verify

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.usefixtures("in_this_process")]

# 2 layers of 4 linear layers and 2 norms, the last norm, embedding and lm_head.
NUM_LAYERS = 15


@pytest.fixture(scope="module")
def in_this_process() -> Iterator[None]:
    """Runs each child of `verify` here, and frees its engine when the next one starts."""
    from appliance.verify import child

    start, llm, engines = child._engine, child.LLM, []

    def free() -> None:
        while engines:
            free_engine(Engine(llm=engines.pop(), scheme=""))
        forget_engines()

    def engine(job: object) -> object:
        free()
        engines.append(start(job))
        return engines[-1]

    def with_worker(model: str, *, worker_extension_cls: str, **settings: object) -> object:
        assert worker_extension_cls == child.WORKER
        return llm(model, worker_cls="verifying_worker.VerifyingWorker", **settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(child, "_engine", engine)
        patch.setattr(child, "LLM", with_worker)
        patch.setattr(side_job, "_run", run_here)
        yield
        free()


def test_every_scheme_is_live(settings: tuple[str, ...], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    recipe = load_recipe("arithmetic-tiny-int8", sets=settings)
    schemes = (Scheme.INT8, Scheme.FP8, Scheme.FP8_CHANNEL, Scheme.FP8_BLOCK)
    assert run_verify(recipe, schemes=schemes, emulate=True, json_mode=True) == 0
    report = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert report["live"] is True
    rows = {row["scheme"]: row for row in report["workers"]}
    assert list(rows) == ["bf16", *map(str, schemes)]
    assert [row["emulated"] for row in report["workers"]] == [False, False, True, True, True]
    kernels = rows["int8"]["kernels"].items()
    assert sum(count for name, count in kernels if name.startswith("CPUInt8ScaledMMLinearKernel[")) == 8
    assert rows["bf16"]["from_bf16"] is None
    for scheme, row in rows.items():
        assert (row["rank"], row["layers"], row["unmoved"], row["unreturned"]) == (0, NUM_LAYERS, [], []), scheme
        assert row["moved"] > 0 and row["returned"] and row["problems"] == [], scheme
        assert scheme == "bf16" or 0 < row["from_bf16"] < row["moved"], scheme
    assert list(tmp_path.iterdir()) == [], "a check leaves nothing behind"


def test_engines_are_in_the_type_of_the_training(
    settings: tuple[str, ...], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from appliance.verify import child

    recipe = load_recipe("arithmetic-tiny-int8", sets=(*settings, "trainer.dtype=fp16", "quantization.profile=none"))
    dtypes = []

    def noted(model: str, *, dtype: str, **more: object) -> object:
        engine = start(model, dtype=dtype, **more)
        dtypes.append((dtype, str(engine.llm_engine.model_config.dtype)))
        return engine

    start = child.LLM
    monkeypatch.setattr(child, "LLM", noted)
    assert run_verify(recipe, schemes=(Scheme.INT8,), emulate=False, json_mode=True) == 0
    assert json.loads(capfd.readouterr().out.splitlines()[-1])["live"] is True
    assert dtypes == [("float16", "torch.float16")] * 2


def swallow_updates(patch: pytest.MonkeyPatch) -> None:
    from appliance.engine.update import WeightUpdate

    for name in ("begin", "load", "finish"):
        patch.setattr(WeightUpdate, name, lambda self, *_: None)


def serve_bf16(patch: pytest.MonkeyPatch) -> None:
    from appliance.terms.settings import Quantisation

    patch.setattr(Quantisation, "engine_arguments", lambda self: {})


def lose_a_tensor(patch: pytest.MonkeyPatch) -> None:
    """As a checkpoint that lacks one, or a stream that drops it."""
    from appliance.engine.update import WeightUpdate

    whole = WeightUpdate.load
    patch.setattr(WeightUpdate, "load", lambda self, bucket: "up_proj" in bucket[0][0] or whole(self, bucket))


def keep_a_norm(patch: pytest.MonkeyPatch) -> None:
    """One small layer gets its old weights back at the end of every update."""
    from appliance.verify.child import VerifyWorker

    take = VerifyWorker.verify_update

    def verify_update(self: VerifyWorker, perturb: bool) -> str:
        norm = self.model_runner.model.model.layers[1].input_layernorm
        before = norm.weight.data.clone()
        failed = take(self, perturb)
        norm.weight.data.copy_(before)
        return failed

    patch.setattr(VerifyWorker, "verify_update", verify_update)


@pytest.mark.parametrize(
    ("break_it", "scheme", "message", "problems"),
    [
        (
            swallow_updates,
            "bf16",
            "verify: 1 of 1 worker failed: bf16: model.embed_tokens and 14 other layers give the same with other "
            "weights",
            ["bf16 worker 0: the logits did not move with other weights"],
        ),
        (
            serve_bf16,
            "int8",
            "verify: 1 of 2 workers failed: int8: it runs bf16, asked for int8",
            ["int8 worker 0: its output is bf16's to the last bit: nothing is quantised"],
        ),
        (
            lose_a_tensor,
            "bf16",
            "verify: 1 of 1 worker failed: bf16: weight update: 2 layers did not receive all their weights: "
            "model.layers.0.mlp.gate_up_proj (45056 of 90112 elements), model.layers.1.mlp.gate_up_proj (45056 of "
            "90112 elements)",
            [],
        ),
        (
            keep_a_norm,
            "bf16",
            "verify: 1 of 1 worker failed: bf16: model.layers.1.input_layernorm gives the same with other weights",
            [],
        ),
    ],
)
def test_a_broken_engine_is_found_out(
    settings: tuple[str, ...],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    break_it: Callable[[pytest.MonkeyPatch], None],
    scheme: str,
    message: str,
    problems: list[str],
) -> None:
    break_it(monkeypatch)
    recipe = load_recipe("arithmetic-tiny-int8", sets=(*settings, f"rollout.scheme={scheme}"))
    with pytest.raises(EngineError) as raised:
        run_verify(recipe, schemes=None, emulate=False, json_mode=False)
    assert (raised.value.message, raised.value.exit_code) == (message, 4)
    said = capfd.readouterr().out.splitlines()
    assert [line for line in said if line in problems] == problems
    assert "FAILED" in next(line for line in said if line.startswith(f"{scheme} "))
