"""What verl needs to run at all on a CPU, for `benchmarks.step`: imported by verl in each of its processes
(`VERL_USE_EXTERNAL_MODULES`), and its reward function.

verl 0.9.1 has no platform for a CPU, and asks torch for a process group that it refuses there. Both are taken from the
appliance. Nothing else is: of everything that this project changes in verl or vLLM, these processes have no more.
"""

from __future__ import annotations

from appliance.patch import apply_patch
from appliance.tasks.graders import number
from appliance.tasks.task import Response
from appliance.trainer.cpu_platform import PROCESS_GROUP, gloo_only

apply_patch(PROCESS_GROUP, gloo_only)


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: object = None) -> float:
    """Grade a response, as verl calls a reward function."""
    return number(Response(solution_str, ground_truth))
