"""Tensor parallel 2 under FLASHRL_CONFIG: every way in ends in the engine of the new weights, and a rank that fails in
an update closes the engine for good."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from engines import make_checkpoint
from families import make_family
from ranked_ways import WAYS

from appliance.engine.ways_in import FINAL

pytestmark = [pytest.mark.engine, pytest.mark.slow]

SHAPE = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 176}
ENGINES = ("int8 dense", "bf16 dense", "int8 experts", "bf16 experts")
CROPPED = r"model\.layers\.0\.mlp\.up_proj\.weight of shape \[\d+, 64\] is not as large as the model's"
DROPPED = r"1 layer did not receive all its weights: model\.layers\.0\.mlp\.gate_up_proj \(\d+ of \d+ elements\)"
FLIPPED = r"model\.layers\.0\.mlp\.up_proj\.weight arrived with digest \w+, it was sent with \w+ \(rank 1\)"
# Of each engine two, that begin with each other's weights: what the last update does to which rank, and what is said.
CASES = {
    "int8 dense 1 cropped-on-0": CROPPED,
    "int8 dense 2 dropped-on-1": DROPPED,
    "bf16 dense 1 dropped-in-a-reload-on-1": DROPPED,
    "bf16 dense 2 flipped-on-1": FLIPPED,
    "int8 experts 1 flipped-on-1": FLIPPED,
    "int8 experts 2 cropped-on-0": CROPPED,
    "bf16 experts 1 cropped-on-0": CROPPED,
    "bf16 experts 2 flipped-on-1": FLIPPED,
}


@pytest.fixture(scope="module")
def looks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    """What ranked_ways.py saw, by case."""
    root, here = tmp_path_factory.mktemp("ranks"), Path(__file__).parent
    for seed in (1, 2):
        make_checkpoint(root / "dense" / str(seed), seed=seed, **SHAPE)
        make_family(root / "experts" / str(seed), name="qwen3-moe", seed=seed)
    path = [os.environ.get("PYTHONPATH", ""), *map(str, (here, here.parent, here.parents[2]))]
    with (root / "log.txt").open("wb") as log:
        child = subprocess.Popen(
            [sys.executable, here / "ranked_ways.py", root, *CASES],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, path))},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            code = child.wait(timeout=400)
        finally:
            with contextlib.suppress(ProcessLookupError):  # cores and workers
                os.killpg(child.pid, signal.SIGKILL)
    assert code == 0, (root / "log.txt").read_text()[-4000:]
    return torch.load(root / "found.pt")


@pytest.mark.parametrize("engine", ENGINES)
def test_every_way_over_two_ranks_ends_in_the_engine_of_the_new_weights(looks: dict[str, dict], engine: str) -> None:
    one, two = (found for case, found in looks.items() if case.startswith(engine))
    assert one["fresh"] != two["fresh"]
    for start, other in ((one, two), (two, one)):
        assert start["there"] == dict.fromkeys(WAYS, other["fresh"])
        assert start["back"] == dict.fromkeys(WAYS, start["fresh"])
        assert start["version"] == str(2 * len(WAYS))


@pytest.mark.parametrize("case", CASES)
def test_a_rank_that_fails_in_an_update_closes_the_engine_for_good(looks: dict[str, dict], case: str) -> None:
    """The other rank has taken the update whole. No way of a whole update opens it again."""
    report, why = looks[case], CASES[case]
    assert bool(report["update"]) == (case != "int8 dense 2 dropped-on-1")  # of which no call is the last one
    assert all(re.search(why, said) for said in (*report["requests"], report["last"])), report
    assert re.fullmatch(rf"request \S+: .*; {re.escape(FINAL)}", report["last"])
    assert all(report["next"].values())
    assert report["version after"] == report["version"]
