"""The row of a model: medians of each sampler's own steps."""

from __future__ import annotations

from benchmarks.sampling import MODELS, OURS, VLLMS, Step, table_row


def test_each_sampler_has_the_medians_of_its_own_steps() -> None:
    steps = [Step(OURS, 0.2, 0.004), Step(VLLMS, 0.5, 0.3), Step(OURS, 0.3, 0.006), Step(VLLMS, 0.6, 0.3)]
    steps.append(Step(OURS, 9.0, 0.009))
    row = table_row("SmolLM2-135M", MODELS["SmolLM2-135M"], rows=128, steps=steps)
    assert row == ("| SmolLM2-135M, 30 layers | 49,152 | 128 | 300.0 ms | 550 ms | 55.0 % | 6.0 ms | 300 ms | 2.0 % |")


def test_the_models_have_the_vocabularies_that_the_bar_is_of() -> None:
    assert [shapes.vocabulary for shapes in MODELS.values()] == [49_152, 152_064]
