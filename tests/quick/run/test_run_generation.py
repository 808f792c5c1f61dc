"""Which engines are the present ones: written by the driver, read by them."""

from __future__ import annotations

from pathlib import Path

import pytest
from plans import make_plan, make_rollout

from appliance.errors import SyncError
from appliance.record.plan import ExpectedAttestation
from appliance.settings.sections import Quantization
from appliance.sync.precision import (
    Generation,
    attestations_at,
    precision_of,
    quantisation_at,
    read_generation,
    write_generation,
)
from appliance.terms.schemes import AS_PLANNED, Precision, Scheme
from appliance.terms.settings import Quantisation

RAISED = Precision(bf16_layers=("a.q_proj", "b"))
INFINITE = '{"firsts": [1e999], "precision": {"scheme": null, "bf16_layers": []}}'
NONE = '{"firsts": [], "precision": {"scheme": null, "bf16_layers": []}}'


def test_the_first_engines_are_as_planned(tmp_path: Path) -> None:
    assert read_generation(tmp_path) == Generation(AS_PLANNED, firsts=(1,))


@pytest.mark.parametrize("precision", [AS_PLANNED, RAISED, Precision(Scheme.BF16)])
def test_what_is_written_is_read(tmp_path: Path, precision: Precision) -> None:
    new = Generation().next(RAISED, after_sync=4).next(precision, after_sync=9)
    write_generation(tmp_path, new)
    assert read_generation(tmp_path) == new == Generation(precision, firsts=(1, 5, 10))
    assert (new.number, new.after_sync) == (3, 9)


@pytest.mark.parametrize("text", ["{", "[]", '{"firsts": []}', INFINITE, NONE])
def test_a_file_that_cannot_be_read_is_no_first_generation(tmp_path: Path, text: str) -> None:
    write_generation(tmp_path, Generation())
    (tmp_path / "sync" / "engines.json").write_text(text)
    with pytest.raises(SyncError, match="the engines' generation cannot be read"):
        read_generation(tmp_path)


@pytest.mark.parametrize("precision", [AS_PLANNED, RAISED, Precision(Scheme.FP8_BLOCK, ("a",))])
def test_a_precision_survives_its_way_through_json(precision: Precision) -> None:
    assert precision_of(precision.to_json()) == precision


@pytest.mark.parametrize(
    "text",
    [
        *("{", "[]", "{}", '{"scheme": null}', '{"scheme": "int9", "bf16_layers": []}'),
        *('{"scheme": null, "bf16_layers": "a"}', '{"scheme": null, "bf16_layers": [1]}'),
    ],
)
def test_a_text_that_is_no_precision_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"^not a precision: "):
        precision_of(text)


INT8 = Quantisation(scheme=Scheme.INT8, ignore=("b", "re:c.*"), profile="/p", lm_head_fp32=True)


@pytest.mark.parametrize(
    ("planned", "precision", "told"),
    [
        (INT8, AS_PLANNED, INT8),
        (INT8, Precision(Scheme.BF16), Quantisation(scheme=Scheme.BF16, lm_head_fp32=True)),
        (
            INT8,
            RAISED,
            Quantisation(scheme=Scheme.INT8, ignore=("b", "re:c.*", "a.q_proj"), profile="/p", lm_head_fp32=True),
        ),
        (
            Quantisation(scheme=Scheme.FP8, emulated=True),
            Precision(Scheme.FP8_BLOCK, ("b",)),
            Quantisation(scheme=Scheme.FP8_BLOCK, emulated=True, ignore=("b",)),
        ),
        (Quantisation(scheme=Scheme.BF16), RAISED, Quantisation(scheme=Scheme.BF16)),
        (Quantisation(scheme=Scheme.BF16), Precision(Scheme.BF16), Quantisation(scheme=Scheme.BF16)),
    ],
)
def test_what_an_engine_is_told_that_starts_in_a_precision(
    planned: Quantisation, precision: Precision, told: Quantisation
) -> None:
    assert quantisation_at(planned, precision) == told


def test_new_engines_must_attest_what_they_were_started_in(tmp_path: Path) -> None:
    """Two replicas with two ranks each, the second in BF16 as planned; who trains says what it said before."""
    expected = (
        *(
            ExpectedAttestation(role="rollout", rank=rank, scheme=Scheme.FP8, patches=("p",), emulated=True)
            for rank in (0, 1)
        ),
        *(ExpectedAttestation(role="rollout", rank=rank, scheme=Scheme.BF16, patches=("p",)) for rank in (2, 3)),
        ExpectedAttestation(role="trainer", rank=0, scheme=Scheme.BF16),
    )
    plan = make_plan(
        tmp_path,
        rollout=make_rollout(Scheme.FP8, Scheme.BF16, tensor_parallel=2),
        quantization=Quantization(prove_every=1, emulate=True),
        attestations=expected,
    )
    assert attestations_at(plan, AS_PLANNED) == expected
    in_bf16 = tuple(
        ExpectedAttestation(role="rollout", rank=rank, scheme=Scheme.BF16, patches=("p",)) for rank in range(4)
    )
    assert attestations_at(plan, Precision(Scheme.BF16)) == (*in_bf16, expected[-1])
    finer = tuple(each.replace(scheme=Scheme.FP8_BLOCK) for each in expected[:2])
    assert attestations_at(plan, Precision(Scheme.FP8_BLOCK)) == (*finer, *expected[2:])
