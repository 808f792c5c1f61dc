"""Whether a model's files hold the model that its config.json describes, as transformers says in a child of ours:
`python -m appliance.preflight.weights FOLDER TRUST_REMOTE_CODE`, the last `True` or `False`.

The child loads torch, which takes seconds, and perhaps code that comes with the model. It is started first and heard
last, and what else preflight reads is read meanwhile. What it said of a folder counts in this process until a file
there changes: `compare` and `verify` look at one model several times.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from appliance import hub
from appliance.finding import Finding, error, warning
from appliance.preflight.child import REMEDY_OF_LATE, WITHIN_S, EarlyChild
from appliance.processes import module_argv
from appliance.record.plan import WeightsPlan
from appliance.tasks.user_code import open_voice
from appliance.terms.families import REMEDY_OF_OWN_ATTENTION, why_own_attention

_CHILD = "appliance.preflight.weights"
_HELD = "its weights could not be checked against its config.json"

_Key = tuple[str, bool, tuple[tuple[str, int, int], ...]]
_KNOWN: dict[_Key, WeightsFacts] = {}


@dataclass(frozen=True)
class WeightsFacts:
    """Report of the child; all of it is empty where nothing is wrong, or where no child was started."""

    problem: str = ""
    remedy: str = ""
    doubt: str = ""
    own_attention: str = ""
    """Name of transformers' class, where it takes no other attention than its own."""
    unproven: str = ""
    """Reason why it is not known whether the files hold the model."""


class WeightsChild:
    """The child that checks a model's files of weights: started (`start`) where there are files, read later (`hear`),
    and ended with the block in any case."""

    def __init__(self) -> None:
        self._child = EarlyChild(doing="checking the model's weights against its config.json")
        self._key: _Key | None = None

    def __enter__(self) -> WeightsChild:
        self._child.__enter__()
        return self

    def __exit__(self, *of_an_error: object) -> None:
        self._child.__exit__(*of_an_error)

    def start(self, folder: Path, *, trust_remote_code: bool) -> None:
        """Start the child, unless its report on these files is known. trust_remote_code: whether code that comes with
        the model may run."""
        self._key = (str(folder), trust_remote_code, _stamp(folder))
        if self._key not in _KNOWN:
            self._child.start(module_argv(_CHILD, str(folder), str(trust_remote_code)))

    def hear(self) -> WeightsFacts:
        if self._key is None:
            return WeightsFacts()
        if self._child.is_started:
            output = self._child.hear()
            if "loading" not in output.words:
                if output.is_late:
                    return WeightsFacts(unproven=f"{_HELD} within {WITHIN_S:g} s")
                problem = f"{_HELD}: exit code {output.code}: {output.printed}"
                return WeightsFacts(problem, "look at what it printed; the model's files are unproven")
            _KNOWN[self._key] = WeightsFacts(**output.words["loading"])
        return _KNOWN[self._key]


def _stamp(folder: Path) -> tuple[tuple[str, int, int], ...]:
    """List what changes with the files: names, sizes, times."""
    stats = [(file.name, file.stat()) for file in sorted(folder.iterdir()) if os.path.isfile(file)]
    return tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)


def folder_of_weights(weights: WeightsPlan) -> Path | None:
    """Return the folder of the model's files, if all of them are on this host; None for a model that this program made
    in the cache."""
    if weights.is_cached:
        return None
    folder = weights.folder or hub.cached_snapshot(weights.hub_name)
    return None if folder is None or hub.missing_parts(folder) else folder


def judge_weights(facts: WeightsFacts, *, model: str) -> Iterator[Finding]:
    """Yield findings about the weights. model: as the recipe names it."""
    if facts.problem:
        yield error("model-weights", "model.path", f"{model}: {facts.problem}", facts.remedy)
    if facts.own_attention:
        message = f"{model}: {why_own_attention(facts.own_attention)}"
        yield error("attention", "model.path", message, REMEDY_OF_OWN_ATTENTION)
    if facts.doubt:
        remedy = "save the model again in one type, unless you know why"
        yield warning("model-types", "model.path", f"{model}: {facts.doubt}", remedy)
    if facts.unproven:
        yield warning("model-unproven", "model.path", f"{model}: {facts.unproven}", REMEDY_OF_LATE)


def main() -> int:
    from appliance.quant.loading import ask_transformers  # loads torch

    say = open_voice()
    say("loading", asdict(ask_transformers(Path(sys.argv[1]), trust_remote_code=sys.argv[2] == "True")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
