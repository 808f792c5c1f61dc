"""A plan read back from `plan.json`, in every process of a run."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from appliance.plan.model import SCHEMA_VERSION, RunPlan


def read_plan(path: Path) -> RunPlan:
    """Raises ValueError with one sentence where it is no plan of this version, OSError when it cannot be read."""
    try:
        return RunPlan.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise ValueError(sentence(error)) from error


def sentence(error: ValidationError) -> str:
    """What is wrong with the text of a plan, in one."""
    problems = error.errors(include_url=False)
    for each in problems:
        if each["loc"] == ("schema_version",):
            said = None if each["type"] == "missing" else each["input"]
            return f"plan has schema_version {said!r}, this program reads {SCHEMA_VERSION}"
    first = problems[0]
    place = ".".join(map(str, first["loc"])) or "the file"
    more = f", and {len(problems) - 1} more" if len(problems) > 1 else ""
    return f"not a plan that this version reads: {place}: {first['msg']}{more}"
