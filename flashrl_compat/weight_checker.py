"""`POST /weight_checker` as vLLM 0.32 has it, for the vLLM that this plugin serves, in an API server.

Actions, answers and keys are vLLM's, so scripts for it work. The digests are of what the kernels answer
(weight_digests.py), and each answer also has the last update's proof. `reset` writes no zeros: it declares the weights
gone, and requests are refused until an update has brought all of them.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated, Any, Literal

from fastapi import Body, FastAPI, HTTPException, Request
from vllm import envs

from appliance.engine.update import WeightState
from flashrl_compat.core import read_reports, why_closed

ROUTE = "/weight_checker"


def add_weight_checker(app: FastAPI) -> None:
    """Add the route where vLLM has its other ones for weights: in servers with VLLM_SERVER_DEV_MODE=1."""
    if envs.VLLM_SERVER_DEV_MODE:
        app.add_api_route(ROUTE, check_weights, methods=["POST"])


async def check_weights(
    raw_request: Request,
    action: Annotated[Literal["checksum", "reset", "compare"], Body(embed=True)],
    baseline: Annotated[dict[str, str] | None, Body(embed=True)] = None,
) -> dict[str, Any]:
    """Answer a request. baseline: digests of an earlier `checksum`, which `compare` needs."""
    engine = raw_request.app.state.engine_client
    if engine.vllm_config.parallel_config.data_parallel_size > 1:
        raise _refusal(HTTPStatus.BAD_REQUEST, "with --data-parallel-size the first engine alone would answer")
    if action == "compare" and baseline is None:
        raise _refusal(HTTPStatus.BAD_REQUEST, "`compare` needs a `baseline`: the `checksums` of an earlier answer")
    reports = read_reports(await engine.collective_rpc("appliance_weights", args=(False,)))
    # Not `engine.is_sleeping`, which is true of every pause: vLLM's own script for this route begins with one.
    if not why_closed(reports) and any(await engine.collective_rpc("are_weights_asleep")):
        raise _refusal(HTTPStatus.CONFLICT, "the engine sleeps: wake it up first")
    if action == "reset":
        if any(report.state is WeightState.OPEN for report in reports):
            raise _refusal(HTTPStatus.CONFLICT, f"{why_closed(reports)}: `reset` would leave it half done")
        await engine.collective_rpc("reset_weights")
        return {"status": "reset"}
    by_rank = await engine.collective_rpc("checked_weights")
    if closed := why_closed(read_reports([tuple(report) for report, _, _ in by_rank])):
        raise _refusal(HTTPStatus.CONFLICT, f"there are no whole weights to check: {closed}")
    checksums = {name: digest for _, digests, _ in by_rank for name, digest in digests.items()}
    proof = [rank_proof for _, _, rank_proof in by_rank]
    if action == "checksum":
        return {"checksums": checksums, "proof": proof}
    mismatches = sorted(
        name for name in checksums.keys() | baseline.keys() if checksums.get(name) != baseline.get(name)
    )
    return {"match": not mismatches, "mismatches": mismatches, "proof": proof}


def _refusal(status: HTTPStatus, why: str) -> HTTPException:
    return HTTPException(status_code=status.value, detail=f"{ROUTE}: {why}")
