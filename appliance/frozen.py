"""What one process writes as JSON and another reads: a pydantic model of this kind."""

from __future__ import annotations

from typing import Self

from pydantic import BaseModel, ConfigDict


class Frozen(BaseModel):
    """Frozen, nothing extra, no coercion (the text `3` is not the number 3)."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    def replace(self, **changes: object) -> Self:
        """The same with these fields changed, checked as a new one is."""
        return self.model_validate({**dict(self), **changes})
