"""How many threads a process computes with on a node that has fewer cores than the head."""

from __future__ import annotations

import os

import torch

from appliance.plan.control_groups import usable_cores
from appliance.plan.env import THREADS_VARIABLE


def fit_threads_to_host() -> None:
    """At most as many as this host has cores. Every process is given the plan's number, made from the head's cores.

    Call it before the process computes. The engine's processes, which this one starts, read the variable.
    """
    cores = usable_cores()
    if torch.get_num_threads() > cores:
        torch.set_num_threads(cores)
        os.environ[THREADS_VARIABLE] = str(cores)
