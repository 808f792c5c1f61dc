"""The budget for the mismatch of a model: what it would be, what each layer contributes, and which stay in BF16.

The whole of it is passes over the calibration text with one layer in memory: one back for the contributions, and one
forward for each choice that is tried. The prediction in a profile is the measurement of the choice that was taken.

Legend: B sequences of T tokens, M positions whose next token counts, H the width of the residual stream, D draws.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from appliance.quant.choice import candidates_of, meet_budget
from appliance.quant.contribution import Contributions, pass_back
from appliance.quant.files import LayerError, Predicted, Settings
from appliance.quant.layer_view import Views
from appliance.quant.prediction import at_counted, head_gradients, predict, targets_of

_DRAWS = 2  # words at each position; a choice by more of them is no cheaper
_SEED = 0


class MismatchBudget:
    """Passes of one calibration."""

    def __init__(self, views: Views, *, exact: Sequence[list[Tensor]], settings: Settings) -> None:
        """exact: [B, T, H] of each batch at each decoder layer, and behind the last one."""
        self._views = views
        self._exact = exact
        self._exact_MH = at_counted(views.model, exact[-1], batches=views.batches)
        self._settings = settings
        self._target_M = targets_of(views.batches)
        self._num_choices = 0

    def predict(self, quantised: Sequence[Tensor]) -> Predicted | None:
        """Predict the mismatch; None where no token is compared. quantised: [B, T, H] of each batch, behind the last
        layer."""
        model, batches = self._views.model, self._views.batches
        return predict(
            model,
            exact_MH=self._exact_MH,
            quantised_MH=at_counted(model, quantised, batches=batches),
            target_M=self._target_M,
            temperature=self._settings.temperature,
        )

    def choose(
        self, layers: list[LayerError], *, all_quantised: Predicted | None
    ) -> tuple[list[LayerError], Predicted | None]:
        """Return the layers with what each contributes, where that matters, and whether it stays in BF16; and the
        mismatch then."""
        budget = self._settings.mismatch_budget
        bounds = [bound for bound in (self._settings.measure_above, budget) if bound is not None]
        if all_quantised is None or not bounds or all_quantised.kl <= min(bounds):
            return layers, all_quantised
        contributions = self.contributions()
        layers = [dataclasses.replace(layer, contribution=contributions.get(layer.layer)) for layer in layers]
        if budget is None or all_quantised.kl <= budget:
            return layers, all_quantised
        candidates = candidates_of(dataclasses.asdict(layer) for layer in layers if not layer.stays_in_bf16)
        kept, predicted = meet_budget(candidates, all_quantised=all_quantised, budget=budget, measure=self.measure)
        layers = [
            dataclasses.replace(layer, stays_in_bf16=layer.stays_in_bf16 or bool(kept & set(layer.layer)))
            for layer in layers
        ]
        return layers, predicted

    def measure(self, in_bf16: frozenset[str]) -> Predicted:
        """Measure the mismatch when the layers of these names stay in BF16."""
        self._num_choices += 1
        stream = list(self._views.embedded)
        for index in range(self._views.model.num_layers):
            with self._views.open(index, pass_name=f"choice {self._num_choices}, layer") as view:
                units = frozenset(
                    unit.members[0] for unit in view.units if in_bf16 & {view.prefix + name for name in unit.layer}
                )
                stream = view.quantised(stream, in_bf16=units)
                del view
        predicted = self.predict(stream)
        assert predicted is not None, "only a text with tokens to compare has a budget"
        return predicted

    def contributions(self) -> Contributions:
        """Measure the contributions, nats per token, by the names of an engine's layer."""
        model, batches = self._views.model, self._views.batches
        gradient_DMH = head_gradients(
            model,
            exact_MH=self._exact_MH,
            temperature=self._settings.temperature,
            draws=_DRAWS,
            generator=torch.Generator().manual_seed(_SEED),
        )
        gradients, first = [], 0
        for batch, output_BTH in zip(batches, self._exact[-1], strict=True):
            number = int(batch.before_BT.sum())
            gradient_DBTH = torch.zeros(_DRAWS, *output_BTH.shape, dtype=output_BTH.dtype)
            of_norm_DMH = gradient_DMH[:, first : first + number]
            gradient_DBTH[:, batch.before_BT] = model.norm_gradient(output_BTH[batch.before_BT], of_norm_DMH)
            gradients.append(gradient_DBTH)
            first += number
        contributions: Contributions = {}
        for index in reversed(range(model.num_layers)):
            with self._views.open(index, pass_name="contributions, layer", is_back=True) as view:
                gradients, sums = pass_back(view, inputs=self._exact[index], gradients=gradients)
                names = {unit.layer: tuple(view.prefix + name for name in unit.layer) for unit in view.units}
                del view
            contributions |= {names[layer]: total / len(self._target_M) for layer, total in sums.items()}
        return contributions
