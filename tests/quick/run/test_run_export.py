"""`appliance export` on a run's folder: which checkpoint, and what is refused. The model itself: tests/training."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors import SafetensorError

from appliance.errors import EngineError, PreflightError, RecipeError
from appliance.files import partial_prefix
from appliance.launch import command
from appliance.launch.command import run_export
from appliance.record.checkpoints import Facts, checkpoint_folder, seal
from appliance.record.earlier_plans import with_keys_of_today
from appliance.record.plan import ProfilePlan, read_plan
from appliance.record.session import create_session
from appliance.terms.schemes import Scheme
from appliance.terms.settings import Quantisation
from appliance.trainer import export
from appliance.trainer.export import _export, _first_engine, _writing, export_checkpoint


@pytest.fixture
def run_dir(tmp_path: Path, small_plan: Callable) -> Path:
    """A run with the steps 2 and 4, and 4 is damaged."""
    with create_session(small_plan(tmp_path), recipe_yaml="", is_chosen=False) as session:
        for step in (2, 4):
            folder = checkpoint_folder(session.run_dir, step=step)
            (folder / "actor" / "huggingface").mkdir(parents=True)
            (folder / "actor" / "huggingface" / "config.json").write_text(f'{{"step": {step}}}')
            seal(folder, facts=Facts(step=step, world_size=1, reason="", time=0.0))
    (checkpoint_folder(tmp_path / "small-1", step=4) / "actor" / "huggingface" / "config.json").write_text(
        '{"step": 5}'
    )
    return tmp_path / "small-1"


def test_the_newest_whole_checkpoint_is_exported(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_export("small-1", run_root=tmp_path, step=None, output=tmp_path / "new" / "out") == 0
    assert (tmp_path / "new" / "out" / "config.json").read_text() == '{"step": 2}'
    assert [each.name for each in (tmp_path / "new").iterdir()] == ["out"]
    said = capsys.readouterr()
    assert said.out == f"{tmp_path / 'new' / 'out'}\n"
    assert "warning: global_step_4 is passed over: actor/huggingface/config.json has other content" in said.err


def test_a_model_says_where_it_is_from(run_dir: Path, tmp_path: Path) -> None:
    """Licence and quantisation of the file that it was trained from go with the weights."""
    plan = json.loads((run_dir / "plan.json").read_text())
    plan["weights"]["provenance"] = "SmolLM2, licence Apache-2.0, dequantised from Q4_1"
    (run_dir / "plan.json").write_text(json.dumps(plan))
    _export(run_dir, checkpoint=checkpoint_folder(run_dir, step=2), target=tmp_path / "out")
    assert (tmp_path / "out" / "README.md").read_text() == (
        "# A trained policy\n\n## Where it is from\n\n"
        "It was trained from SmolLM2, licence Apache-2.0, dequantised from Q4_1.\n"
    )


@pytest.mark.parametrize(
    ("trainer", "is_flow"),
    [
        ({"forward": "rollout"}, True),
        ({"forward": "linears"}, False),
        ({"forward": "bf16"}, False),
        ({"one_flow": True, "linears": False}, True),  # of an earlier version
        ({"one_flow": False, "linears": True}, False),
        ({}, False),
    ],
)
def test_a_model_of_one_flow_goes_with_how_it_is_served(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trainer: dict[str, object], is_flow: bool
) -> None:
    plan = read_plan(run_dir / "plan.json")
    plan = plan.replace(profile=ProfilePlan(folder=f"{run_dir}/profile", source="", scheme=Scheme.INT8))
    (run_dir / "plan.json").write_text(json.dumps({**json.loads(plan.to_json()), "trainer": trainer}))
    exported: list[dict[str, object]] = []
    monkeypatch.setattr(export, "export_checkpoint", lambda checkpoint, **asked: exported.append(asked))
    _export(run_dir, checkpoint=checkpoint_folder(run_dir, step=2), target=tmp_path / "out")
    flow, model = (plan.engines[0], plan.model) if is_flow else (None, None)
    assert [(asked["flow"], asked["model"]) for asked in exported] == [(flow, model)]


def test_the_engine_of_a_flow_is_read_from_an_earlier_plan() -> None:
    """Whose replicas have their quantisation written out: of the second one, the first is in BF16."""
    earlier = Path(__file__).parents[1] / "plan" / "earlier" / "one-node.json"
    raw = json.loads(earlier.read_text())
    raw["rollout"]["replicas"].reverse()
    written = raw["rollout"]["replicas"][0]
    today = json.loads(with_keys_of_today(json.dumps(raw).encode()))
    assert _first_engine(today) == Quantisation.model_validate(written, strict=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "why"),
    [
        ('{"uaq": null, "of another version": 1}', None),
        ('{"of another version": 1}', "'uaq'"),
        ("{", "Expecting property name"),
        ("[]", "list indices"),
        ('{"uaq": {"scale": "x"}}', "validation error"),
    ],
)
def test_the_plan_of_another_version_will_do_if_it_says_how_the_model_was_scaled(
    run_dir: Path, tmp_path: Path, plan: str, why: str | None
) -> None:
    (run_dir / "plan.json").write_text(plan)
    target = tmp_path / "out"
    if why is None:
        assert run_export(str(run_dir), run_root=tmp_path, step=2, output=target) == 0 and target.is_dir()
        return
    with pytest.raises(PreflightError, match=f"plan.json: .*{why}") as caught:
        run_export(str(run_dir), run_root=tmp_path, step=2, output=target)
    assert caught.value.hint == "export it with the version that made the run" and not target.exists()


def test_what_cannot_be_exported_is_refused(run_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as caught:
        run_export(str(run_dir), run_root=tmp_path, step=3, output=tmp_path / "out")
    assert caught.value.problems == [
        (f"--step 3: {run_dir} has no checkpoint of that step", "steps with a checkpoint: 2, 4")
    ]
    with pytest.raises(PreflightError) as caught:
        run_export(str(run_dir), run_root=tmp_path, step=4, output=tmp_path / "out")
    why = "actor/huggingface/config.json has other content than was saved"
    assert caught.value.message == f"{run_dir}/checkpoints/global_step_4 is damaged: {why}"
    with pytest.raises(RecipeError) as refused:
        run_export(str(run_dir), run_root=tmp_path, step=2, output=tmp_path / "out", adapter=True)
    hint = "leave --adapter out: its checkpoints have the whole model"
    assert refused.value.problems == [(f"--adapter: {run_dir} trained no adapter (model.lora)", hint)]
    (tmp_path / "out").mkdir()
    with pytest.raises(RecipeError, match="is there already and is not overwritten"):
        run_export(str(run_dir), run_root=tmp_path, step=2, output=tmp_path / "out")


def test_a_folder_that_takes_no_file_is_refused_before_the_child(run_dir: Path, tmp_path: Path, monkeypatch) -> None:
    """/proc takes none from root either."""
    monkeypatch.setattr(command, "run_child", lambda *_, **__: pytest.fail("a child was started"))
    with pytest.raises(PreflightError) as caught:
        run_export(str(run_dir), run_root=tmp_path, step=2, output=Path("/proc/out"))
    assert caught.value.hint == "set -o to another folder"


def test_an_output_that_cannot_be_written_is_no_fault_of_an_engine(run_dir: Path, tmp_path: Path) -> None:
    """The child finds out, as of a disk that fills. Nothing half made stays, nor the folder made for it."""
    with pytest.raises(PreflightError) as caught:
        run_export(str(run_dir), run_root=tmp_path, step=2, output=tmp_path / "new" / ("a" * 250))
    assert caught.value.message == f"{tmp_path / 'new' / ('a' * 250)}: cannot be written: File name too long"
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "error",
    [
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
        SafetensorError("Error while serializing: I/O error: Disk quota exceeded (os error 122)"),
        shutil.Error([("a", "b", "[Errno 28] No space left on device: 'a' -> 'b'")]),
    ],
)
def test_a_disk_that_fills_is_no_fault_of_an_engine(tmp_path: Path, error: Exception) -> None:
    with pytest.raises(PreflightError) as caught, _writing(tmp_path / "out"):
        raise error
    assert caught.value.message == f"{tmp_path / 'out'}: no space left"
    assert caught.value.hint == "free some space, or set -o to another folder"


def test_a_model_that_cannot_be_read_is_no_full_disk(tmp_path: Path) -> None:
    with pytest.raises(SafetensorError), _writing(tmp_path / "out"):
        raise SafetensorError("Error while deserializing header: header too small")


def test_half_a_model_does_not_stay(run_dir: Path, tmp_path: Path, monkeypatch) -> None:
    def fill(source: Path, target: Path, *, dirs_exist_ok: bool) -> None:
        (target / "half").write_text("x")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("shutil.copytree", fill)
    with pytest.raises(OSError, match="No space left"):
        export_checkpoint(checkpoint_folder(run_dir, step=2), target=tmp_path / "out", uaq=None)
    assert not [each for each in tmp_path.iterdir() if "out" in each.name]


def test_an_export_that_is_stopped_leaves_nothing_beside_what_was_there(run_dir: Path, tmp_path: Path, monkeypatch):
    child = "import sys, time\nfrom pathlib import Path\nfrom appliance.files import whole_folder\n"
    child += "with whole_folder(Path(sys.argv[3])) as folder:\n    (folder / 'half').touch()\n    time.sleep(60)\n"
    (tmp_path / "slow_child.py").write_text(child)
    (mine := tmp_path / "mine" / ".out-of-mine").mkdir(parents=True)
    monkeypatch.setattr(command, "EXPORT_MODULE", "slow_child")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")

    def stopped(seconds: float) -> None:
        if list(mine.parent.glob("*/half")):
            (others := mine.with_name(".out-of-another-01234567")).mkdir()
            assert others.name.startswith(partial_prefix(mine.with_name("out")))
            raise SystemExit(130)

    monkeypatch.setattr("time.sleep", stopped)
    with pytest.raises(SystemExit):
        run_export(str(run_dir), run_root=tmp_path, step=2, output=mine.parent / "out")
    assert sorted(mine.parent.iterdir()) == [mine.with_name(".out-of-another-01234567"), mine]


def test_the_log_of_a_failure_is_ours_alone(run_dir: Path, tmp_path: Path, monkeypatch) -> None:
    """In a temporary folder for all users, where somebody else's log may have the name."""
    (temporary := tmp_path / "temporary" / "export-failed.log").mkdir(parents=True)
    (tmp_path / "dead_child.py").write_text("print('error: it broke'); raise SystemExit(1)")
    monkeypatch.setattr("tempfile.tempdir", str(temporary.parent))
    monkeypatch.setattr(command, "EXPORT_MODULE", "dead_child")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    with pytest.raises(EngineError, match="export: dead_child ended with code 1") as caught:
        run_export(str(run_dir), run_root=tmp_path, step=2, output=tmp_path / "out")
    log = Path(caught.value.hint.removeprefix("its log: "))
    assert log.read_text() == "error: it broke\n"
    assert (log.name, log.parent.parent) == ("export-failed.log", temporary.parent)
    assert log.parent.stat().st_mode & 0o077 == 0
    assert list(log.parent.iterdir()) == [log]


def test_a_temporary_folder_that_takes_nothing_is_not_the_outputs_fault(run_dir: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", "/proc")
    with pytest.raises(PreflightError) as caught:
        run_export(str(run_dir), run_root=tmp_path, step=2, output=tmp_path / "out")
    assert caught.value.hint == "set TMPDIR to another folder"
