"""What verl and its TransferQueue reserve of Ray's CPUs, asked of themselves, against what a node offers."""

from __future__ import annotations

import pytest
from transfer_queue.controller import TransferQueueController
from transfer_queue.storage.simple_storage import SimpleStorageUnit
from verl.single_controller.ray.base import ResourcePoolManager

from appliance.cluster.form import cpus_for_ray
from appliance.plan.verl_args import STORAGE_UNITS


@pytest.mark.parametrize("is_cpu", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_a_node_of_one_core_has_room_for_all_that_is_reserved(ranks: int, is_cpu: bool) -> None:
    """And for one more process of each rank: while it starts it takes a CPU."""
    of_a_rank = ResourcePoolManager(resource_pool_spec={}, mapping={}).max_colocate_count
    unit, controller = (each._default_options["num_cpus"] for each in (SimpleStorageUnit, TransferQueueController))
    reserved = ranks * (of_a_rank + 1) + STORAGE_UNITS[is_cpu] * unit + controller
    assert cpus_for_ray(1, ranks=ranks, is_cpu=is_cpu) >= reserved
