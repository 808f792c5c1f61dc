"""verl's vLLM server with one more call: all samples of many prompts at once.

The engine gets them in their order and begins when it has all of them. What is computed together then never depends on
when a request came, and neither do the last bits of a log-probability: with a seed per sample, the same prompts and
weights give the same samples again.

Named in `VERL_USE_EXTERNAL_MODULES`; it takes the place of verl's replica in verl's own registry. verl's server takes
one request per sample and reads every intermediate token of it; for short answers that costs more than the model.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry

from appliance.errors import EngineError
from appliance.quant.files import by_content
from appliance.quant.kv_scales import Pairs
from appliance.quant.mismatch import LayerTrace, Place, TopWords
from appliance.quant.support import Support
from appliance.record.engine_start import starting
from appliance.record.events import report_failures
from appliance.record.plan import RunPlan, read_plan
from appliance.sync.precision import quantisation_at, read_generation
from appliance.terms.environment import PLAN_VARIABLE
from appliance.terms.schemes import AS_PLANNED, Precision
from appliance.terms.settings import Quantisation

_ALL_WORDS = 1 << 30  # as top_k: vLLM takes it for the vocabulary
ENGINE_ENDS_WITHIN_S = 20.0


@dataclass(frozen=True)
class EngineSample:
    """One response of an engine."""

    token_ids: list[int]
    """Ids of the generated tokens."""
    log_probs: list[float]
    """Log-probs of the generated tokens, nats, after temperature."""
    finished: bool
    """Whether the model ended the response itself; otherwise it was cut at the length limit."""
    top: TopWords | None = None
    """Most likely words at each generated token; None where they were not requested."""
    support: Support | None = None
    """Words that each generated token was drawn from; None where the engine does not report them."""


@dataclass(frozen=True)
class Group:
    """The samples of one prompt, and the number of the weight update they were made with."""

    samples: list[EngineSample]
    weights_version: int


def quantisation_of_replica(plan: RunPlan, *, replica: int, precision: Precision = AS_PLANNED) -> Quantisation:
    """Return the quantisation with which an engine is started. Its profile is named by its content: see
    `by_content`."""
    quantisation = quantisation_at(plan.engines[replica], precision)
    if not quantisation.profile:
        return quantisation
    folder = by_content(Path(quantisation.profile), cache_dir=Path(plan.cache_dir))
    return quantisation.replace(profile=str(folder))


def reportable(sampling: dict[str, Any]) -> dict[str, Any]:
    """Return settings with the same distribution that an engine which reports supports accepts. vLLM then wants a
    temperature and a `top_k`: the most likely word is drawn as the only one (one of several where their logits are
    equal)."""
    if not sampling["temperature"]:
        return sampling | {"temperature": 1.0, "top_p": 1.0, "top_k": 1}
    return sampling if sampling["top_k"] > 0 else sampling | {"top_k": _ALL_WORDS}


def support_of(words: Sequence[Sequence[int]]) -> Support:
    """Make a Support. words: of each token."""
    size_T = np.fromiter(map(len, words), np.int32, len(words))
    return Support(np.fromiter(chain.from_iterable(words), np.int32, int(size_T.sum())), size_T)


@contextlib.asynccontextmanager
async def standing_still(engine: Any, *, lock: asyncio.Lock) -> AsyncIterator[None]:
    """Pause an engine while this is open. lock: lock of this engine, since a pause that another call ends before the
    engine is idle gets no answer."""
    async with lock:
        await engine.pause_generation(mode="keep", clear_cache=False)
        try:
            yield
        finally:
            await engine.resume_generation()


def adapter_request() -> Any:
    """Make vLLM's request for the adapter that weight updates bring. Imports vLLM."""
    from verl.workers.rollout.vllm_rollout.utils import VLLM_LORA_INT_ID, VLLM_LORA_NAME, VLLM_LORA_PATH
    from vllm.lora.request import LoRARequest

    return LoRARequest(lora_name=VLLM_LORA_NAME, lora_int_id=VLLM_LORA_INT_ID, lora_path=VLLM_LORA_PATH)


def load_replica() -> type[RolloutReplica]:
    """Return verl's replica, with servers that answer `generate_groups`. Imports vLLM, so call it only where it is
    needed."""
    import ray
    from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer, vLLMReplica
    from vllm import SamplingParams, TokensPrompt
    from vllm.sampling_params import RequestOutputKind

    class GroupServer(vLLMHttpServer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            with report_failures(), starting():
                super().__init__(*args, **kwargs)

        def _validate_configs(self) -> None:
            """Leave out verl's own check, which compares the longest sequence with `max_position_embeddings`, which a
            rope may multiply: vLLM limits it by its own rule, as preflight does (terms/ropes.py). The rest of verl's
            the plan has done."""
            assert self.config.max_model_len is not None, "every plan says it"

        async def launch_server(self, *args: Any, **kwargs: Any) -> None:
            with report_failures(), starting():
                await super().launch_server(*args, **kwargs)

        def _preprocess_engine_kwargs(self, engine_kwargs: dict[str, Any]) -> None:
            """Set the replica's own scheme; verl's configuration has one place for all of them."""
            super()._preprocess_engine_kwargs(engine_kwargs)
            self._reports_support = bool(engine_kwargs.get("return_sampling_mask"))
            plan = read_plan(Path(os.environ[PLAN_VARIABLE]))
            self._adapter = adapter_request() if plan.sends_adapters else None
            precision = read_generation(Path(plan.run_dir)).precision
            quantisation = quantisation_of_replica(plan, replica=self.replica_rank, precision=precision)
            engine_kwargs.update(quantisation.engine_arguments())
            if plan.sends_adapters:  # elsewhere vLLM would multiply by zeros, at the head by one copy for each sequence
                assert plan.model.lora is not None
                engine_kwargs["lora_target_modules"] = [str(target) for target in plan.model.lora.targets]

        async def generate_groups(
            self,
            prompts: list[list[int]],
            *,
            seeds: list[int | None],
            sampling: dict[str, Any],
            num_samples: int,
            already: list[int] | None = None,
        ) -> AsyncIterator[tuple[int, Group]]:
            """Samples of each prompt with its place in the list, as they come.

            prompts: at most max_model_len - 1 tokens each.  seeds: of a prompt's first sample, the next number for each
            further one; None where nothing is drawn.  sampling: temperature, top_p, top_k (-1: all words), logprobs
            (how many of the most likely words are reported).  num_samples: >= 1.
            already: tokens at the end of each prompt that count as its response, of earlier turns.
            """
            if self._reports_support:
                sampling, seeds = reportable(sampling), [seed or 0 for seed in seeds]
            # Flat: no object for each word of each token.
            always = {"flat_logprobs": True, "detokenize": False, "output_kind": RequestOutputKind.FINAL_ONLY}
            requests = zip(prompts, seeds, already or [0] * len(prompts), strict=True)
            async with standing_still(self.engine, lock=self.__dict__.setdefault("_one_pause", asyncio.Lock())):
                queues = [
                    await self._add(
                        prompt, params=SamplingParams(**sampling, n=num_samples, seed=seed, **always), used=used
                    )
                    for prompt, seed, used in requests
                ]
            waiting = [asyncio.create_task(self._group(place, queue)) for place, queue in enumerate(queues)]
            try:
                for finished in asyncio.as_completed(waiting):
                    yield await finished
            finally:
                for task in waiting:
                    task.cancel()

        async def _add(self, prompt: list[int], *, params: SamplingParams, used: int) -> Any:
            params.max_tokens = min(self.config.response_length - used, self.config.max_model_len - len(prompt))
            tokens = TokensPrompt(prompt_token_ids=prompt)
            return await self.engine.add_request(uuid.uuid4().hex, tokens, params, lora_request=self._adapter)

        async def _group(self, place: int, queue: Any) -> tuple[int, Group]:
            final = await queue.get()
            samples = []
            for output in final.outputs:
                support = None if output.sampling_mask is None else support_of(output.sampling_mask.token_ids)
                ids, flat = list(output.token_ids), output.logprobs
                words_TL = np.array(flat.token_ids, np.int32).reshape(len(ids), -1 if ids else 1)
                log_probs_TL = np.array(flat.logprobs, np.float32).reshape(words_TL.shape)
                if words_TL[:, 0].tolist() != ids:
                    what = "vLLM did not put the sampled word before the most likely ones"
                    raise EngineError(what, hint="report it with the log: this version of vLLM is not as expected")
                top = TopWords(words_TL[:, 1:].copy(), log_probs_TL[:, 1:].copy()) if words_TL.shape[1] > 1 else None
                finished = output.finish_reason == "stop"
                samples.append(
                    EngineSample(ids, log_probs_TL[:, 0].tolist(), finished=finished, top=top, support=support)
                )
            return place, Group(samples, weights_version=self.global_steps or 0)

        async def traced(
            self, ids: list[int], *, token: int, temperature: float, names: list[str], values_at: Place | None = None
        ) -> LayerTrace:
            """Trace `token` after `ids`, which are read as a prompt, through the layers `names`, with its log-prob
            among all words. While nothing is generated."""
            params = SamplingParams(
                temperature=temperature,
                top_k=_ALL_WORDS if self._reports_support else 0,
                max_tokens=1,
                logprob_token_ids=[token],
                skip_reading_prefix_cache=True,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            await self.engine.collective_rpc("begin_trace", args=(names, values_at))
            try:
                prompt = TokensPrompt(prompt_token_ids=ids)
                asked = await self.engine.add_request(uuid.uuid4().hex, prompt, params, lora_request=self._adapter)
                final = await asked.get()
            finally:
                (digests, values), *_ = await self.engine.collective_rpc("end_trace")
            return LayerTrace(values_at, digests, values, final.outputs[0].logprobs[0][token].logprob)

        async def kv_ranges(self, prompts: list[list[int]], *, scales: Pairs) -> list[Pairs]:
            """Read prompts, and return the range of the keys and values that each rank's layers wrote. While nothing is
            generated. scales: in place meanwhile; empty: 1 everywhere."""
            sampling = {"temperature": 0.0, "top_p": 1.0, "top_k": -1}
            params = SamplingParams(
                **(reportable(sampling) if self._reports_support else sampling),
                max_tokens=1,
                seed=0 if self._reports_support else None,
                skip_reading_prefix_cache=True,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            await self.engine.collective_rpc("begin_kv_ranges", args=(scales,))
            try:
                async with standing_still(self.engine, lock=self.__dict__.setdefault("_one_pause", asyncio.Lock())):
                    queues = [
                        await self.engine.add_request(
                            uuid.uuid4().hex,
                            TokensPrompt(prompt_token_ids=ids),
                            params,
                            lora_request=self._adapter,
                        )
                        for ids in prompts
                    ]
                for queue in queues:
                    await queue.get()
            finally:
                ranges = await self.engine.collective_rpc("end_kv_ranges")
            return ranges

        async def take_kv_scales(self, scales: Pairs) -> list[str]:
            """Give each rank scales, forget what was cached by others, and return the digest of what each has then."""
            digests = await self.engine.collective_rpc("take_kv_scales", args=(scales,))
            await self.clear_kv_cache()
            return digests

        async def check_kv_scales(self) -> list[str]:
            """Return the digest of the scales that each rank has."""
            return await self.engine.collective_rpc("check_kv_scales")

        async def engine_problem(self) -> str:
            """Return the reason why this server's engine can no longer answer, or an empty text."""
            return "died: its core process is gone" if self.engine.errored else ""

        async def end_engine(self) -> list[int]:
            """End the engine before this process is killed: vLLM asks the engine's processes to end, waits, and kills
            what is left. Returns the ids of all that were there, this one included."""
            processes = [os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))]
            if self.node_rank == 0:  # on further hosts of an engine there is no handle of it, only its workers
                await asyncio.to_thread(self.engine.shutdown, timeout=ENGINE_ENDS_WITHIN_S)
            return processes

    class GroupReplica(vLLMReplica):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.server_class = ray.remote(GroupServer)

    return GroupReplica


RolloutReplicaRegistry.register("vllm", load_replica)
