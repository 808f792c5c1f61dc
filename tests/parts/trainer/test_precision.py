"""What the governor asks of the engines: told to the senders, held against what the engines say, written down."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from plans import make_plan, make_rollout

from appliance.errors import PreflightError, SyncError
from appliance.guard.governor import Measures
from appliance.guard.policy import Action
from appliance.record.plan import ProfilePlan, RunPlan
from appliance.settings.sections import SchemeChange
from appliance.sync.precision import read_wanted
from appliance.sync.records import Acknowledgement, SyncRecord, add_layer_errors, layer_errors_file
from appliance.terms.schemes import AS_PLANNED, Precision, Scheme
from appliance.trainer.precision import BF16, Live, RolloutPrecision, worst_layers

PLANNED = Measures(Scheme.INT8, bf16_layer_fraction=0.0, tight=False)
TOP = replace(PLANNED, scheme=Scheme.BF16, bf16_layer_fraction=1.0)


def acknowledgement(scheme: str, *, replica: int = 0, raised: int = 0, switched: int = 0) -> Acknowledgement:
    return Acknowledgement(
        sync=4,
        replica=replica,
        rank=0,
        manifest="ab",
        tensors=1,
        bytes=1,
        layers=4,
        layers_proven=4,
        parameters_proven=1,
        unproven=0,
        waiting_bytes=0,
        digest_s=0.0,
        proof_s=0.0,
        seconds=0.0,
        telemetry=None,
        scheme=scheme,
        bf16_layers=raised,
        switched=switched,
    )


def record(*acknowledgements: Acknowledgement) -> SyncRecord:
    return SyncRecord(sent=(), acknowledgements=acknowledgements)


def notes(run_dir: Path) -> list[str]:
    path = run_dir / "events.jsonl"
    return [json.loads(line)["what"] for line in path.read_text().splitlines()] if path.exists() else []


def test_a_change_is_asked_for_at_once_and_counts_from_the_update_that_brings_it(tmp_path: Path) -> None:
    precision = RolloutPrecision(make_plan(tmp_path))
    precision.want(PLANNED)
    assert read_wanted(tmp_path) == AS_PLANNED
    precision.took(record(acknowledgement("int8")))
    precision.want(TOP)
    assert (read_wanted(tmp_path), precision.live) == (BF16, Live("int8", emulated=False))
    precision.took(record(acknowledgement("bf16", raised=4, switched=4)))
    assert precision.live == Live("bf16", emulated=False, bf16_layers=4)
    precision.took(record(acknowledgement("bf16", raised=4)))
    precision.want(PLANNED)
    assert read_wanted(tmp_path) == AS_PLANNED
    precision.took(record(acknowledgement("int8", switched=4)))
    assert notes(tmp_path) == ["rollouts from now on: bf16", "rollouts from now on: int8"]


def test_a_validation_in_bf16_leaves_what_was_wanted(tmp_path: Path) -> None:
    precision = RolloutPrecision(make_plan(tmp_path))
    with precision.meanwhile(BF16):
        assert read_wanted(tmp_path) == BF16
        precision.took(record(acknowledgement("bf16", raised=4, switched=4)))
    assert read_wanted(tmp_path) == AS_PLANNED
    precision.took(record(acknowledgement("int8", switched=4)))
    assert notes(tmp_path) == []  # the run's own scheme did not change


def test_what_another_attempt_left_behind_is_no_wish_of_this_one(tmp_path: Path) -> None:
    with RolloutPrecision(make_plan(tmp_path)).meanwhile(BF16):
        RolloutPrecision(make_plan(tmp_path)).want(PLANNED)
        assert read_wanted(tmp_path) == AS_PLANNED


def restarting(run_dir: Path) -> RunPlan:
    plan = make_plan(run_dir, rollout=make_rollout(Scheme.INT8))
    return plan.replace(guard=plan.guard.replace(scheme_change=SchemeChange.RESTART))


def test_what_new_engines_bring_is_asked_of_no_weight_update(tmp_path: Path) -> None:
    """Held against what they say all the same."""
    precision = RolloutPrecision(restarting(tmp_path))
    precision.want(TOP)
    assert (precision.target, read_wanted(tmp_path)) == (BF16, AS_PLANNED)
    with pytest.raises(SyncError, match="runs int8, it was to run bf16"):
        precision.took(record(acknowledgement("int8")))
    precision.took(record(acknowledgement("bf16", raised=4)))
    (line,) = (tmp_path / "events.jsonl").read_text().splitlines()
    assert json.loads(line)["why"] == "weight update 4: the first of these engines, all proven"
    with precision.meanwhile(BF16):
        assert precision.target == BF16
    precision.want(PLANNED)
    assert precision.target == AS_PLANNED


@pytest.mark.parametrize(
    ("measures", "answer", "problem"),
    [
        (TOP, acknowledgement("int8"), "rollout rank 0 of replica 0 runs int8, it was to run bf16"),
        (PLANNED, acknowledgement("bf16", raised=4), "rollout rank 0 of replica 0 runs bf16, it was to run int8"),
        (
            PLANNED,
            acknowledgement("int8", raised=2),
            "rollout rank 0 of replica 0 raised 2 layers to bf16, it was to raise none",
        ),
        (TOP, acknowledgement("bf16"), "rollout rank 0 of replica 0 raised 0 layers to bf16, it was to raise some"),
    ],
)
def test_an_engine_that_runs_something_else_is_an_error(
    tmp_path: Path, measures: Measures, answer: Acknowledgement, problem: str
) -> None:
    precision = RolloutPrecision(make_plan(tmp_path))
    precision.want(measures)
    with pytest.raises(SyncError) as raised:
        precision.took(record(answer))
    assert raised.value.message == f"weight update 4: {problem}"


def test_a_bf16_replica_beside_a_quantised_one_stays_as_it_is(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, rollout=make_rollout(Scheme.INT8, Scheme.BF16))
    precision = RolloutPrecision(plan)
    precision.took(record(acknowledgement("bf16", replica=1), acknowledgement("int8")))
    assert precision.live.label == "int8+bf16"
    precision.want(TOP)
    precision.took(record(acknowledgement("bf16", replica=1), acknowledgement("bf16", raised=4, switched=4)))
    assert precision.live.label == "bf16"


def test_a_run_in_bf16_has_nothing_to_ask_for(tmp_path: Path) -> None:
    precision = RolloutPrecision(make_plan(tmp_path, rollout=make_rollout(Scheme.BF16)))
    precision.want(TOP)
    assert read_wanted(tmp_path) == AS_PLANNED


def test_a_finer_scheme_is_asked_for_by_name(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, rollout=make_rollout(Scheme.FP8))
    precision = RolloutPrecision(plan)
    precision.want(replace(PLANNED, scheme=Scheme.FP8_BLOCK))
    assert read_wanted(tmp_path) == Precision(Scheme.FP8_BLOCK)
    precision.took(record(acknowledgement("fp8-block", switched=4)))


def profiled(plan: RunPlan, folder: Path) -> RunPlan:
    from appliance.quant.profile import LayerError, Origin, Profile, Settings, Smoothing, write_profile

    def layer(name: str, *, error: float, kept: bool = False) -> LayerError:
        return LayerError(
            (name,), (name,), weight_error=0.0, output_error=error, output_error_plain=0.0, stays_in_bf16=kept
        )

    parts = ("a.q_proj", "a.k_proj")
    layers = (
        layer("fine", error=0.01),
        layer("worst", error=0.9, kept=True),
        LayerError(parts, parts, weight_error=0.0, output_error=0.5, output_error_plain=0.0, stays_in_bf16=False),
        layer("bad", error=0.3),
    )
    write_profile(
        Profile(Origin("calibrated", "m"), Scheme.INT8, Settings(), Smoothing(), layers=layers), folder=folder
    )
    return plan.replace(profile=ProfilePlan(folder=str(folder), source="", scheme=Scheme.INT8))


def test_the_worst_layers_by_the_profile(tmp_path: Path) -> None:
    """A share is rounded up; what the profile keeps in BF16 anyway does not count."""
    plan = profiled(make_plan(tmp_path), tmp_path / "profile")
    assert worst_layers(plan, share=0.25) == ("a.q_proj", "a.k_proj")
    assert worst_layers(plan, share=0.5) == ("a.q_proj", "a.k_proj", "bad")


def test_the_worst_layers_by_the_engines_own_numbers(tmp_path: Path) -> None:
    """Without a profile, and of the first quantised replica."""
    plan = make_plan(tmp_path, rollout=make_rollout(Scheme.BF16, Scheme.INT8))
    with pytest.raises(PreflightError, match="no layer errors to go by"):
        worst_layers(plan, share=0.5)
    errors = {"layer.a": 0.01, "layer.b": 0.03, "layer.c": 0.02, "layer.d": 0.03}
    add_layer_errors(layer_errors_file(tmp_path, replica=1, rank=0), errors)
    assert worst_layers(plan, share=0.5) == ("layer.b", "layer.d")
    precision = RolloutPrecision(plan)
    precision.want(replace(PLANNED, bf16_layer_fraction=0.75))
    assert read_wanted(tmp_path) == Precision(bf16_layers=("layer.b", "layer.c", "layer.d"))
    precision.took(record(acknowledgement("bf16"), acknowledgement("int8", replica=1, raised=3, switched=3)))
    assert notes(tmp_path) == ["rollouts from now on: bf16+int8 with 3 layers in bf16"]


def raising(plan: RunPlan) -> RunPlan:
    return plan.replace(guard=plan.guard.replace(actions=(Action.RAISE_PRECISION,)))


def test_engines_that_tell_no_errors_are_refused_by_the_first_update_that_quantises(tmp_path: Path) -> None:
    """And not when the guard climbs, hours later."""
    precision = RolloutPrecision(raising(make_plan(tmp_path)))
    with precision.meanwhile(BF16):
        precision.took(record(acknowledgement("bf16", raised=4, switched=4)))
    with pytest.raises(PreflightError) as caught:
        precision.took(record(acknowledgement("int8", switched=4)))
    message = "`raise-precision` has no layer errors to go by: no profile, and no engine reports any"
    assert caught.value.message == f"{message} (kernels that pack their codes, such as Marlin's, do not)"
    remedy = "give a profile in quantization.profile, or leave `raise-precision` out of guard.actions"
    assert caught.value.hint == remedy


def test_a_run_with_layer_errors_from_somewhere_goes_on(tmp_path: Path) -> None:
    by_profile = profiled(raising(make_plan(tmp_path / "profiled")), tmp_path / "profile")
    RolloutPrecision(by_profile).took(record(acknowledgement("int8")))
    RolloutPrecision(raising(make_plan(tmp_path, rollout=make_rollout(Scheme.BF16)))).took(
        record(acknowledgement("bf16"))
    )
    add_layer_errors(layer_errors_file(tmp_path, replica=0, rank=0), {"a": 0.01})
    RolloutPrecision(raising(make_plan(tmp_path))).took(record(acknowledgement("int8")))


def test_which_layers_are_the_worst_holds_until_the_measures_change(tmp_path: Path) -> None:
    """Those in BF16 keep the error that they had, those of the others drift past it; the order says nothing."""
    file = layer_errors_file(tmp_path, replica=0, rank=0)
    precision = RolloutPrecision(restarting(tmp_path))
    add_layer_errors(file, {"a": 0.03, "b": 0.04, "c": 0.02, "d": 0.01})
    half = replace(PLANNED, bf16_layer_fraction=0.5)
    precision.want(half)
    assert precision.target == Precision(bf16_layers=("a", "b"))
    add_layer_errors(file, {"c": 0.05, "d": 0.06})
    precision.want(replace(half, tight=True))
    assert precision.target == Precision(bf16_layers=("a", "b"))
    precision.want(replace(half, bf16_layer_fraction=0.75))
    assert precision.target == Precision(bf16_layers=("b", "c", "d"))
    precision.want(half)
    assert precision.target == Precision(bf16_layers=("c", "d"))


def test_an_attempt_that_began_with_layers_in_bf16_knows_their_errors(tmp_path: Path) -> None:
    """From the attempts before; its own engines have measured the others."""
    plan = restarting(tmp_path)
    for number, errors in ((2, {"a": 0.9, "b": 0.8, "c": 0.1, "d": 0.1}), (10, {"a": 0.3, "c": 0.2, "d": 0.1})):
        kept = tmp_path / "logs" / str(number) / "sync" / "layers-0-0.json"
        kept.parent.mkdir(parents=True)
        kept.write_text(json.dumps(errors))
    assert worst_layers(plan, share=0.5) == ("b", "a")
    add_layer_errors(layer_errors_file(tmp_path, replica=0, rank=0), {"c": 0.25, "d": 0.35})
    assert worst_layers(plan, share=0.5) == ("b", "d")
    (tmp_path / "logs" / "10" / "sync" / "layers-0-0.json").write_text("")  # of a host that crashed
    assert worst_layers(plan, share=0.5) == ("a", "b")


def test_a_wish_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "sync").mkdir()
    (tmp_path / "sync" / "precision.json").write_text("{")
    with pytest.raises(SyncError, match="the requested precision cannot be read"):
        read_wanted(tmp_path)


@pytest.mark.parametrize(("every", "due"), [(0, []), (10, [10]), (4, [0, 4, 8, 10]), (5, [0, 5, 10]), (20, [10])])
def test_when_a_validation_is_made_in_bf16_as_well(tmp_path: Path, every: int, due: list[int]) -> None:
    precision = RolloutPrecision(make_plan(tmp_path, steps=10, validate_bf16_every=every))
    assert [step for step in range(11) if precision.validates_bf16(step)] == due
