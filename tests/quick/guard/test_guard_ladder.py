"""Which levels a policy has, and what each asks of the run."""

from __future__ import annotations

import itertools

import pytest

from appliance.guard.governor import Level, Measures, Rung, ladder, measures_of_level, place_on_ladder
from appliance.guard.policy import Action, Policy
from appliance.terms.schemes import Scheme

EVERYTHING = frozenset(Action)


def texts(policy: Policy) -> list[str]:
    return [level.text for level in ladder(policy)]


def test_the_default_ladder_of_int8() -> None:
    assert texts(Policy(Scheme.INT8)) == ["observe", "warn", "tighten", "bf16", "stop"]


def test_precision_is_raised_by_layers_and_then_by_schemes() -> None:
    assert texts(Policy(Scheme.FP8, actions=EVERYTHING)) == [
        "observe",
        "warn",
        "tighten",
        "raise-precision (fp8, 25% of layers in bf16)",
        "raise-precision (fp8, 50% of layers in bf16)",
        "raise-precision (fp8-channel, 50% of layers in bf16)",
        "raise-precision (fp8-block, 50% of layers in bf16)",
        "bf16",
        "stop",
    ]


def test_int8_has_no_finer_scheme() -> None:
    assert texts(Policy(Scheme.INT8, actions=EVERYTHING, bf16_layer_fractions=(0.1,))) == [
        "observe",
        "warn",
        "tighten",
        "raise-precision (int8, 10% of layers in bf16)",
        "bf16",
        "stop",
    ]


def test_bf16_rollouts_have_no_precision_to_raise() -> None:
    assert texts(Policy(Scheme.BF16, actions=EVERYTHING)) == ["observe", "warn", "tighten", "stop"]


@pytest.mark.parametrize("count", range(len(Action) + 1))
@pytest.mark.parametrize("scheme", list(Scheme))
def test_only_allowed_actions_are_on_the_ladder(count: int, scheme: Scheme) -> None:
    for actions in itertools.combinations(Action, count):
        rungs = [level.rung for level in ladder(Policy(scheme, actions=frozenset(actions)))]
        assert rungs[0] is Rung.OBSERVE
        assert {rung.action for rung in rungs[1:]} <= set(actions)
        assert rungs == sorted(rungs, key=list(Rung).index)


def test_measures_of_each_level() -> None:
    policy = Policy(Scheme.INT8, actions=EVERYTHING)
    measures_by_level = {level.text: measures_of_level(level, policy=policy) for level in ladder(policy)}
    untouched = Measures(Scheme.INT8, bf16_layer_fraction=0.0, tight=False)
    tight = Measures(Scheme.INT8, bf16_layer_fraction=0.0, tight=True)
    bf16 = Measures(Scheme.BF16, bf16_layer_fraction=1.0, tight=True)
    assert (
        measures_by_level["observe"] == measures_by_level["warn"] == measures_of_level(None, policy=policy) == untouched
    )
    assert measures_by_level["tighten"] == tight
    assert measures_by_level["raise-precision (int8, 25% of layers in bf16)"].bf16_layer_fraction == 0.25
    assert measures_by_level["raise-precision (int8, 25% of layers in bf16)"].tight
    assert measures_by_level["bf16"] == bf16
    assert measures_by_level["stop"] == Measures(Scheme.BF16, 1.0, tight=True)


def test_nothing_is_tightened_where_tightening_is_forbidden() -> None:
    policy = Policy(Scheme.INT8, actions=frozenset({Action.BF16, Action.STOP}))
    found = measures_of_level(ladder(policy)[-2], policy=policy)
    assert found == Measures(Scheme.BF16, bf16_layer_fraction=1.0, tight=False)


def test_a_level_that_a_changed_policy_lost_becomes_the_next_lower_one() -> None:
    """A resume with other actions: from raised precision of layers to a ladder that cannot raise."""
    levels = ladder(Policy(Scheme.INT8))
    assert levels[place_on_ladder(Level(Rung.RAISE_PRECISION, Scheme.INT8, 0.25), levels=levels)].rung is Rung.TIGHTEN
    other_shares = ladder(Policy(Scheme.INT8, actions=EVERYTHING, bf16_layer_fractions=(0.1, 0.6)))
    assert other_shares[place_on_ladder(Level(Rung.RAISE_PRECISION, Scheme.INT8, 0.25), levels=other_shares)].text == (
        "raise-precision (int8, 60% of layers in bf16)"
    )
    only_warn = ladder(Policy(Scheme.INT8, actions=frozenset({Action.WARN})))
    assert only_warn[place_on_ladder(Level(Rung.BF16, Scheme.BF16, 1.0), levels=only_warn)].rung is Rung.WARN
    assert (
        place_on_ladder(Level(Rung.BF16, Scheme.BF16, 1.0), levels=ladder(Policy(Scheme.INT8, actions=frozenset())))
        == 0
    )
