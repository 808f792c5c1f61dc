"""What a truth or a response answers, in text: the alternatives of a truth."""

from __future__ import annotations

import json


def truth_alternatives(truth: str) -> tuple[str, ...]:
    """The answers of which each one is right: the members of a JSON list of texts such as `["0", "1"]`, blank ones and
    repetitions left out; of any other truth the truth alone.

    `[0,1]` has numbers and stays one truth, an interval. Without any member that is not blank the truth is one as well.
    """
    if not truth.lstrip().startswith("["):
        return (truth,)
    try:
        members = json.loads(truth)
    except (ValueError, RecursionError):
        return (truth,)
    if not isinstance(members, list) or not all(isinstance(member, str) for member in members):
        return (truth,)
    return tuple(dict.fromkeys(member for member in members if member.strip())) or (truth,)
