"""Which levels a policy has, and what each asks of the run."""

from __future__ import annotations

import itertools

import pytest

from appliance.guard.governor import Level, Measures, Rung, ladder, measures, place
from appliance.guard.policy import Action, Bounds, Collapse, Patience, Policy
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
    found = {level.text: measures(level, policy=policy) for level in ladder(policy)}
    untouched = Measures(Scheme.INT8, bf16_layer_fraction=0.0, tight=False, stop=False)
    tight = Measures(Scheme.INT8, bf16_layer_fraction=0.0, tight=True, stop=False)
    bf16 = Measures(Scheme.BF16, bf16_layer_fraction=1.0, tight=True, stop=False)
    assert found["observe"] == found["warn"] == measures(None, policy=policy) == untouched
    assert found["tighten"] == tight
    assert found["raise-precision (int8, 25% of layers in bf16)"].bf16_layer_fraction == 0.25
    assert found["raise-precision (int8, 25% of layers in bf16)"].tight
    assert found["bf16"] == bf16
    assert found["stop"] == Measures(Scheme.BF16, 1.0, tight=True, stop=True)


def test_nothing_is_tightened_where_tightening_is_forbidden() -> None:
    policy = Policy(Scheme.INT8, actions=frozenset({Action.BF16, Action.STOP}))
    found = measures(ladder(policy)[-2], policy=policy)
    assert found == Measures(Scheme.BF16, bf16_layer_fraction=1.0, tight=False, stop=False)


def test_a_level_that_a_changed_policy_lost_becomes_the_next_lower_one() -> None:
    """A resume with other actions: from raised precision of layers to a ladder that cannot raise."""
    levels = ladder(Policy(Scheme.INT8))
    assert levels[place(Level(Rung.RAISE_PRECISION, Scheme.INT8, 0.25), levels=levels)].rung is Rung.TIGHTEN
    other_shares = ladder(Policy(Scheme.INT8, actions=EVERYTHING, bf16_layer_fractions=(0.1, 0.6)))
    assert other_shares[place(Level(Rung.RAISE_PRECISION, Scheme.INT8, 0.25), levels=other_shares)].text == (
        "raise-precision (int8, 60% of layers in bf16)"
    )
    only_warn = ladder(Policy(Scheme.INT8, actions=frozenset({Action.WARN})))
    assert only_warn[place(Level(Rung.BF16, Scheme.BF16, 1.0), levels=only_warn)].rung is Rung.WARN
    assert place(Level(Rung.BF16, Scheme.BF16, 1.0), levels=ladder(Policy(Scheme.INT8, actions=frozenset()))) == 0


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda: Policy(Scheme.INT8, climb_bad=6), "climbing after 6 bad steps of 5 is not possible"),
        (lambda: Policy(Scheme.INT8, climb_bad=0), "climbing after 0 bad steps of 5 is not possible"),
        (lambda: Policy(Scheme.INT8, descend_fine=0), "descend_fine is at least 1 step, cooling_steps at least 0"),
        (lambda: Policy(Scheme.INT8, cooling_steps=-1), "descend_fine is at least 1 step, cooling_steps at least 0"),
        (
            lambda: Policy(Scheme.INT8, bf16_layer_fractions=(0.5, 0.25)),
            "the shares of BF16 layers (0.5, 0.25) do not grow between 0 and 1",
        ),
        (
            lambda: Policy(Scheme.INT8, bf16_layer_fractions=(1.0,)),
            "the shares of BF16 layers (1.0,) do not grow between 0 and 1",
        ),
        (lambda: Patience(warn_after=4, stop_after=3), "a guard cannot warn after 4 steps and stop after 3"),
        (lambda: Patience(warn_after=0, stop_after=3), "a guard cannot warn after 0 steps and stop after 3"),
        (lambda: Collapse(reward_window=0), "a window has at least 1 step"),
        (lambda: Collapse(reward_floor=1.0), "the reward's floor 1.0 is not below its ceiling 1.0"),
        (
            lambda: Bounds(bad=(0.0, 1.0), fine=(0.0, 2.0)),
            "what is fine, (0.0, 2.0), does not lie inside what is not bad, (0.0, 1.0)",
        ),
    ],
)
def test_a_policy_that_contradicts_itself_is_refused(build, said: str) -> None:
    with pytest.raises(ValueError) as raised:
        build()
    assert str(raised.value) == said
