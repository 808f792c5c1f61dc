"""How the GPUs of a training are shared out, for the rules of a recipe and for its plan."""

from __future__ import annotations

from pathlib import Path

import pytest
from plans import HOST

from appliance.plan.build import build_plan
from appliance.recipe.load import load_recipe
from appliance.terms.devices import Topology


@pytest.mark.parametrize(
    ("topology", "gpus", "engines", "data_parallel"),
    [(Topology(1, 1, 1, 1), 1, 1, 1), (Topology(2, 8, 4, 2), 16, 4, 8), (Topology(1, 2, 4, 4), 2, 1, 1)],
)
def test_shares_of_the_gpus(topology: Topology, gpus: int, engines: int, data_parallel: int) -> None:
    assert (topology.gpus, topology.engines, topology.data_parallel) == (gpus, engines, data_parallel)


def test_recipe_and_plan_have_the_same() -> None:
    sets = ("cluster.device=h100", "cluster.gpus_per_node=8", "rollout.tensor_parallel=2")
    recipe = load_recipe("gsm8k-0.5b-int8", sets=sets)
    plan = build_plan(recipe, run_dir=Path("/runs/a-1"), host=HOST)
    assert plan.topology == recipe.topology == Topology(1, 8, 2, 1)
    assert len(plan.rollout.replicas) == recipe.topology.engines
