"""The day that a chat template gets. Imports no torch.

transformers gives templates a function `strftime_now`, by which many name today's date in the system message. Two
renderings of one prompt would then differ, from day to day or from second to second. transformers hands the arguments
of `apply_chat_template` on to the template, and one of that name comes first: so a run gives its own, whose day is
always that on which the run began.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping
from typing import Any

CLOCK = "strftime_now"
ANY_DAY = "2026-01-01"  # of what is rendered outside of a run: the same whenever it is made


def clock_of(tokenizer: Any, *, date: str) -> dict[str, Callable[[str], str]]:
    """Return the functions to give to `apply_chat_template` beside the messages; none where the template does not ask
    for the date. tokenizer: of transformers.  date: YYYY-MM-DD, whose midnight the template gets; empty: the template
    has transformers' own function."""
    templates = tokenizer.chat_template
    texts = templates.values() if isinstance(templates, Mapping) else (templates,)
    if not date or not any(CLOCK in text for text in texts if isinstance(text, str)):
        return {}
    return {CLOCK: datetime.datetime.fromisoformat(date).strftime}
