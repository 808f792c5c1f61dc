"""A model's decoder layers, one at a time, ready for passes over the calibration text.

Legend: B sequences of T tokens, H the width of the residual stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from appliance.quant.checkpoint import Ledger, StreamedModel
from appliance.quant.layer_view import LayerView
from appliance.quant.prediction import Batch
from appliance.quant.profile import SmoothingGroup
from appliance.terms.schemes import Scheme


class Views:
    """embedded: [B, T, H] BF16 of each batch.  groups: the smoothing that `open` folds in, none at first.

    on_layer: called after every layer of every pass, so that a run can tell a slow pass from none at all: with the name
    of the pass, the layers done in it, and their number.
    """

    def __init__(
        self,
        model: StreamedModel,
        *,
        batches: Sequence[Batch],
        scheme: Scheme,
        ignore: tuple[str, ...],
        ledger: Ledger,
        on_layer: Callable[[str, int, int], None] = lambda name, done, total: None,
    ) -> None:
        self.model = model
        self.batches = batches
        self.embedded = [model.embed(batch.tokens_BT) for batch in batches]
        self.groups: tuple[SmoothingGroup, ...] = ()
        self._calls = [model.layer_calls(hidden_BTH) for hidden_BTH in self.embedded]
        self._scheme = scheme
        self._ignore = ignore
        self._ledger = ledger
        self._on_layer = on_layer

    @contextmanager
    def open(self, index: int, *, pass_name: str, is_back: bool = False) -> Iterator[LayerView]:
        """A decoder layer with its weights, while the block lasts. is_back: whether the pass begins at the
        last layer."""
        with self.model.layer(index) as layer:
            view = LayerView(
                layer,
                family=self.model.family,
                prefix=f"model.layers.{index}.",
                scheme=self._scheme,
                ignore=self._ignore,
                ledger=self._ledger,
                calls=[calls[index] for calls in self._calls],
                valid=[batch.valid_BT for batch in self.batches],
                active_experts=self.model.active_experts,
            )
            for group in self.groups:
                if group.linears[0].startswith(view.prefix):
                    view.fold(group)
            yield view
            del view, layer
        total = self.model.num_layers
        self._on_layer(pass_name, total - index if is_back else index + 1, total)
