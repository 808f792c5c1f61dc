"""verl's vLLM server with one more call: all samples of a prompt at once.

Named in `VERL_USE_EXTERNAL_MODULES`; it takes the place of verl's replica in verl's own registry. verl's server takes
one request per sample and reads every intermediate token of it; for short answers that costs more than the model.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry

from appliance.plan.env import PLAN_VARIABLE
from appliance.plan.model import read_plan


@dataclass(frozen=True)
class Sample:
    """One response. token_ids and log_probs (nats, after temperature) have one entry per generated token.

    finished: the model ended it itself; otherwise it was cut at the length limit.
    """

    token_ids: list[int]
    log_probs: list[float]
    finished: bool


@dataclass(frozen=True)
class Group:
    """The samples of one prompt, and the number of the weight update they were made with."""

    samples: list[Sample]
    weights_version: int


def load_replica() -> type[RolloutReplica]:
    """verl's replica whose servers can answer `generate_group`. Imports vLLM, so only on use."""
    import ray
    from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer, vLLMReplica
    from vllm import SamplingParams, TokensPrompt
    from vllm.sampling_params import RequestOutputKind

    class GroupServer(vLLMHttpServer):
        def _preprocess_engine_kwargs(self, engine_kwargs: dict[str, Any]) -> None:
            """Each replica has a scheme of its own; verl's configuration has one place for all of them."""
            super()._preprocess_engine_kwargs(engine_kwargs)
            plan = read_plan(Path(os.environ[PLAN_VARIABLE]))
            engine_kwargs.update(plan.rollout.replicas[self.replica_rank].engine_arguments())

        async def generate_group(
            self, *, prompt_ids: list[int], sampling: dict[str, Any], num_samples: int, request_id: str
        ) -> Group:
            """Samples of one prompt.

            prompt_ids: at most max_model_len - 1 of them.  sampling: temperature, top_p, top_k.  num_samples: >= 1.
            """
            room = self.config.max_model_len - len(prompt_ids)
            params = SamplingParams(
                **sampling,
                n=num_samples,
                max_tokens=min(self.config.response_length, room),
                logprobs=0,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            final = None
            async for output in self.engine.generate(TokensPrompt(prompt_token_ids=prompt_ids), params, request_id):
                final = output
            return Group(
                samples=[_sample(completion) for completion in final.outputs],
                weights_version=self.global_steps or 0,
            )

        async def engine_problem(self) -> str:
            """Why this server's engine can no longer answer, or nothing."""
            return "died: its core process is gone" if self.engine.errored else ""

    class GroupReplica(vLLMReplica):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.server_class = ray.remote(GroupServer)

    return GroupReplica


def _sample(completion: Any) -> Sample:
    """From vLLM's CompletionOutput."""
    ids = list(completion.token_ids)
    log_probs = [step[token].logprob for token, step in zip(ids, completion.logprobs, strict=True)]
    return Sample(token_ids=ids, log_probs=log_probs, finished=completion.finish_reason == "stop")


RolloutReplicaRegistry.register("vllm", load_replica)
