"""How many codes an update changes, by its learning rate: `python -m benchmarks.codes FILE.results.jsonl...`.

FILE.results.jsonl is what `appliance compare` leaves of its runs. In each of them the learning rate rises and sinks, so
a run answers for many rates. An update falls into the bin of its learning rate: a factor of two wide, counted from
the largest rate of all. A code is a weight of a quantised layer as the engine has it, an integer of 8 bits; the share
of codes that the update changed is over all such layers. Updates at a learning rate of 0, and runs in BF16, have none.

QuRL (its second claim) says that an update is too small for the codes, and that UAQ, which scales the layers behind a
norm up, mends it. So the updates of runs with UAQ are a column beside those without, at the same rates.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from statistics import median

from appliance import console
from appliance.compare.stored import StoredRun, read_results

PLAIN, UAQ = "plain", "UAQ"


def shares_by_rate(results: Iterable[StoredRun]) -> dict[int, dict[str, list[float]]]:
    """The shares of codes that the updates changed: by bin, 0 for the largest rates, 1 for those of half as much, ...,
    and by whether the run had UAQ."""
    updates = [
        (step.learning_rate, UAQ if line.recipe["correction"]["uaq_scale"] else PLAIN, step.codes_changed_fraction)
        for line in results
        for step in line.result.steps
        if step.learning_rate and step.codes_changed_fraction is not None
    ]
    most = max((rate for rate, _, _ in updates), default=0.0)
    shares: dict[int, dict[str, list[float]]] = defaultdict(lambda: {PLAIN: [], UAQ: []})
    for rate, kind, share in updates:
        # The largest rate is the upper end of its bin, and belongs to it.
        shares[math.floor(math.log2(most / rate))][kind].append(share)
    return dict(sorted(shares.items()))


def table(results: list[StoredRun]) -> str:
    """A row for each bin: the median share, the smallest and the largest, and how many updates it is of."""
    most = max((step.learning_rate or 0.0 for line in results for step in line.result.steps), default=0.0)
    lines = [
        "| learning rate | updates | codes changed | updates with UAQ | codes changed with UAQ |",
        "| --- | --- | --- | --- | --- |",
    ]
    for place, shares in shares_by_rate(results).items():
        rates = f"{most / 2 ** (place + 1):.1e} to {most / 2**place:.1e}"
        cells = [cell for kind in (PLAIN, UAQ) for cell in (str(len(shares[kind])), _spread(shares[kind]))]
        lines.append(f"| {' | '.join([rates, *cells])} |")
    return "\n".join(lines) + "\n"


def _spread(shares: list[float]) -> str:
    if not shares:
        return "-"
    middle, least, most = (f"{100 * share:.2g}" for share in (median(shares), min(shares), max(shares)))
    return f"{middle} % ({least} to {most})"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.codes", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE.results.jsonl")
    given = parser.parse_args()
    console.out(table([line for file in given.files for line in read_results(file)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
