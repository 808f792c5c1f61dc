"""What rollouts compute in when it is not what the plan says: the guard's wish, or a validation in BF16. No torch.

It travels with every weight update that is not as planned, so that what an engine does never depends on what it did
before: an update that says nothing is as planned.
"""

from __future__ import annotations

import functools
import json
from dataclasses import asdict, fields

from pydantic import TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from appliance.terms.schemes import Scheme
from appliance.terms.settings import Quantisation

DIRECTIVE_NAME = "appliance.precision"  # of the first tensor of an update that is not as planned


@dataclass(frozen=True)
class Precision:
    """A departure from an engine's own settings.

    scheme: None, the engine's own; BF16, no layer is quantised; else a finer scheme of the same kind.
    bf16_layers: quantised layers that compute in BF16 as well, as `ignore` would name them.
    """

    scheme: Scheme | None = None
    bf16_layers: tuple[str, ...] = ()

    @property
    def is_planned(self) -> bool:
        return self == AS_PLANNED

    @property
    def text(self) -> str:
        """For people: `as planned`, `bf16`, `with some layers in bf16`."""
        raised = "with some layers in bf16" if self.bf16_layers else ""
        return " ".join(filter(None, (str(self.scheme or ""), raised))) or "as planned"

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Precision:
        """Raises ValueError when the text is no precision."""
        try:
            found = _reader().validate_json(text)
        except ValidationError as error:
            raise ValueError(f"not a precision: {error.errors()[0]['msg']}") from error
        if left_out := {each.name for each in fields(cls)} - json.loads(text).keys():  # nothing is planned by silence
            raise ValueError(f"not a precision: it does not say {', '.join(sorted(left_out))}")
        return found


AS_PLANNED = Precision()


@functools.cache
def _reader() -> TypeAdapter[Precision]:
    return TypeAdapter(Precision)


def quantisation_at(planned: Quantisation, precision: Precision) -> Quantisation:
    """What an engine is started with that computes in `precision` from its first token on; one in BF16 stays so."""
    if not planned.scheme.quantised or precision.is_planned:
        return planned
    if precision.scheme is Scheme.BF16:
        return Quantisation(scheme=Scheme.BF16, lm_head_fp32=planned.lm_head_fp32)
    ignore = tuple(dict.fromkeys((*planned.ignore, *precision.bf16_layers)))
    return planned.replace(scheme=precision.scheme or planned.scheme, ignore=ignore)
