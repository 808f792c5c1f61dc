"""The two orders in which layers stay in BF16, and that a choice is measured as a profile measures it."""

from __future__ import annotations

from pathlib import Path

from tiny_models import tiny, tokens

from appliance.profile.job import ProfileJob
from appliance.quant.choice import Candidate, candidates_of, share_in_bf16
from appliance.quant.own_samples import ProfileSample
from appliance.terms.schemes import Scheme
from benchmarks import budget


def test_no_order_takes_more_than_its_share() -> None:
    """Errors would take the wide layer first, which has half of the multiplications."""
    wide, small, other = Candidate(("a",), 3.0, 60), Candidate(("b",), 2.0, 20), Candidate(("c",), 1.0, 40)
    candidates = (other, small, wide)
    error = {("a",): 0.9, ("b",): 0.1, ("c",): 0.5}
    by_error = budget.within(candidates, most=0.9, by=lambda candidate: error[candidate.layer])
    by_gain = budget.within(candidates, most=0.9, by=lambda candidate: candidate.gain)
    assert (by_error, by_gain) == ((wide, other), (small, wide))
    for most in (0.0, 0.1, 0.49, 0.5, 1.0):
        chosen = budget.within(candidates, most=most, by=lambda candidate: candidate.gain)
        assert share_in_bf16(chosen, candidates=candidates) <= most


def test_a_choice_is_measured_on_the_samples_and_with_the_smoothing_of_the_profile(tmp_path: Path) -> None:
    """With nothing in BF16 it is the profile's own prediction to the last bit; with all of them there is none."""
    tiny("qwen2").save_pretrained(tmp_path)
    samples = [ProfileSample(tuple(row), prompt_tokens=4) for row in tokens().tolist()]
    job = ProfileJob(model=str(tmp_path), scheme=Scheme.INT8, strength=0.5, cache_dir="", target="", report_dir="")
    profile = budget.profile_of(job, samples)
    measure = budget.measurement(profile, samples=samples)
    assert profile.smoothing.groups
    assert measure(frozenset()) == profile.predicted
    candidates = candidates_of(vars(layer) for layer in profile.layers)
    assert len(candidates) == len({layer.layer for layer in profile.layers})
    assert measure(frozenset(name for candidate in candidates for name in candidate.layer)).kl == 0.0
