"""At the same share of BF16 multiplications, which layers to keep: those with the largest error of their own, or those
that contribute most to the mismatch for each multiplication.

    python -m benchmarks.budget PLAN [-o docs/results]

PLAN is the `plan.json` of a run whose profile is made (INT8). By *error* is what `quantization.error_budget` was until
it went: layers stay in BF16 in the order of the relative error of their outputs. By *contribution* is what
`quantization.mismatch_budget` takes: in the order of what a layer's quantisation adds to the mismatch, divided by its
multiplications. Layers are taken until the next one would exceed the share. The figure is the predicted mismatch, on
the same text and with the same smoothing: KL, and k3 beside it.

Legend: B sequences of T tokens, H the width of the residual stream.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch

from appliance import console
from appliance.profile.child import own_samples
from appliance.profile.job import ProfileJob, job_of_run
from appliance.quant.calibrate import calibrate
from appliance.quant.checkpoint import Ledger, ModelTensors, StreamedModel
from appliance.quant.choice import Candidate, candidates_of, share_in_bf16
from appliance.quant.files import LayerError, Predicted
from appliance.quant.layer_view import Errors, Views
from appliance.quant.mismatch_budget import MismatchBudget
from appliance.quant.own_samples import ProfileSample
from appliance.quant.prediction import batches_of
from appliance.quant.profile import Origin, Profile, Settings
from appliance.record.plan import read_plan
from benchmarks.demo import processor

SHARES = (0.1, 0.25, 0.5)
Ranking = Callable[[Candidate], float]


def orders_of(layers: Sequence[LayerError]) -> dict[str, Ranking]:
    """By the name of an order, the value of which a layer with more stays in BF16 first."""
    error = {layer.layer: max(one.output_error for one in layers if one.layer == layer.layer) for layer in layers}
    return {"error": lambda candidate: error[candidate.layer], "contribution": lambda candidate: candidate.gain}


def within(candidates: Iterable[Candidate], *, most: float, by: Ranking) -> tuple[Candidate, ...]:
    """The first layers of an order, as many as have this share of the multiplications at most. most: 0..1."""
    ordered = sorted(candidates, key=by, reverse=True)
    chosen: tuple[Candidate, ...] = ()
    for candidate in ordered:
        if share_in_bf16((*chosen, candidate), candidates=ordered) > most:
            break
        chosen = (*chosen, candidate)
    return chosen


def profile_of(job: ProfileJob, samples: Sequence[ProfileSample]) -> Profile:
    """The profile of the samples, with the contribution of every layer and all of them quantised."""
    names = {field.name for field in dataclasses.fields(Settings)}
    settings = Settings(**job.replace(mismatch_budget=None, measure_above=0.0).model_dump(include=names))
    return calibrate(
        Path(job.model),
        sequences=[sample.tokens for sample in samples],
        prompt_tokens=[sample.prompt_tokens for sample in samples],
        scheme=job.scheme,
        settings=settings,
        origin=Origin(kind="calibrated", model=job.model),
        on_layer=report,
    )


def measurement(profile: Profile, *, samples: Sequence[ProfileSample]) -> Callable[[frozenset[str]], Predicted]:
    """The function that predicts the mismatch with the layers of these names in BF16."""
    ledger = Ledger()
    model = StreamedModel(ModelTensors(Path(profile.origin.model), ledger=ledger))
    batches = batches_of(
        [sample.tokens for sample in samples], prompt_tokens=[sample.prompt_tokens for sample in samples]
    )
    views = Views(
        model,
        batches=batches,
        scheme=profile.scheme,
        ignore=profile.settings.ignore,
        ledger=ledger,
        on_layer=report,
    )
    exact = [views.embedded]
    for index in range(model.num_layers):
        with views.open(index, pass_name="exact, layer") as view:
            outputs, _ = view.exact(exact[-1], errors=Errors(), ranges={})
            exact.append(outputs)
            del view
    views.groups = profile.smoothing.groups
    return MismatchBudget(views, exact=exact, settings=profile.settings).measure


def report(pass_name: str, done: int, total: int) -> None:
    if done == total:
        console.say(f"{pass_name} {done} of {total}")


def table(profile: Profile, *, measure: Callable[[frozenset[str]], Predicted]) -> list[str]:
    candidates = candidates_of(dataclasses.asdict(layer) for layer in profile.layers)
    lines = ["| most in BF16 | order | layers | in BF16 | predicted KL | predicted k3 |", f"|{' --- |' * 6}"]
    whole = profile.predicted
    assert whole is not None, "samples have tokens to compare"
    lines.append(f"| 0 % | - | 0 | 0.0 % | {whole.kl:.2g} | {whole.k3_kl:.2g} |")
    for most in SHARES:
        for name, ranking in orders_of(profile.layers).items():
            chosen = within(candidates, most=most, by=ranking)
            predicted = measure(frozenset(linear for candidate in chosen for linear in candidate.layer))
            part = share_in_bf16(chosen, candidates=candidates)
            numbers = f"{len(chosen)} | {part:.1%} | {predicted.kl:.2g} | {predicted.k3_kl:.2g}".replace("%", " %")
            lines.append(f"| {most:.0%} | {name} | {numbers} |".replace("0% |", "0 % |").replace("5% |", "5 % |"))
            console.say(lines[-1])
    return lines


ABOUT = (
    "A budget for the mismatch keeps some layers in BF16. In which order should they be chosen?",
    "`quantization.mismatch_budget` takes those first that contribute most to the mismatch for each multiplication",
    "(*contribution*). Before it, `quantization.error_budget` took those with the largest relative error of their own",
    "outputs (*error*). Each row may have the share *most in BF16* of the multiplications in BF16; the orders fill it",
    "as far as whole layers allow. *layers* is how many that are, *in BF16* their real share, and the predicted KL",
    "and k3 are nats per token between the quantised model and the BF16 trainer, on the same text and with the same",
    "smoothing.",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", type=Path, help="plan.json of a run")
    parser.add_argument("--tokens", type=int, default=2048, help="most tokens of prompts and responses together")
    parser.add_argument("-o", "--output", type=Path, help="folder for budget.md")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    job = job_of_run(read_plan(arguments.plan)).replace(max_tokens=arguments.tokens)
    samples = own_samples(job, folder=Path(job.model))
    profile = profile_of(job, samples)
    lines = table(profile, measure=measurement(profile, samples=samples))
    number = profile.predicted.tokens if profile.predicted else 0
    head = f"Made by `python -m benchmarks.budget`. {datetime.date.today()}: {processor()}. "
    head += f"{Path(job.model).name}, {len(samples)} answers of its own, {number} tokens."
    title = "# Which layers stay in BF16: by their error, or by their contribution"
    text = "\n".join([title, "", *ABOUT, "", head, "", *lines, ""])
    console.out(text)
    if arguments.output is not None:
        arguments.output.mkdir(parents=True, exist_ok=True)
        (arguments.output / "budget.md").write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
