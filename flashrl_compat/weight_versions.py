"""Which version of the weights sampled each token of an answer, by the names of vLLM 0.32.

There the last output of a request has `weight_versions`, spans of its tokens, each with the label that `GET
/weight_info` had when they were sampled. In the versions that this plugin serves no message of the core has a field for
the label, so it travels in a field that is there: an entry of `kv_transfer_params`, which is taken out again where the
message arrives.

A label is what the trainer gave last (`finish_weight_update(weight_version=...)` or `/update_weight_version`), else the
number of the update (core.py), and "default" before the first.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm.outputs import CompletionOutput

from appliance.patch import Patch, apply_patch
from flashrl_compat.worker import WORKER_CLASS

CORE = Patch(
    name="flashrl-core-labels-tokens",
    target="vllm.v1.engine.core:EngineCore._attach_iteration_details",
    why="what a step has sampled leaves the core without the version of the weights",
    upstream="https://github.com/vllm-project/vllm/blob/v0.28.0/vllm/v1/engine/core.py",
    distribution="vllm",
    sources={
        "0.28.0": "e006ef2bb5031a16d381f22ec56b64bc28a1ee033d88d97dcd3a681d6ff5e8b8",
        "0.29.0": "e006ef2bb5031a16d381f22ec56b64bc28a1ee033d88d97dcd3a681d6ff5e8b8",
        "0.30.0": "e006ef2bb5031a16d381f22ec56b64bc28a1ee033d88d97dcd3a681d6ff5e8b8",
        "0.31.0": "e006ef2bb5031a16d381f22ec56b64bc28a1ee033d88d97dcd3a681d6ff5e8b8",
    },
    remove_when="vLLM 0.32 is the oldest version that the plugin serves",
)
ARRIVAL = Patch(
    name="flashrl-labels-of-tokens-arrive",
    target="vllm.v1.engine.output_processor:OutputProcessor.process_outputs",
    why="a request's state does not know which version of the weights sampled its tokens",
    upstream="https://github.com/vllm-project/vllm/blob/v0.28.0/vllm/v1/engine/output_processor.py",
    distribution="vllm",
    sources={
        "0.28.0": "0c036d303eb6e8672b2e2fb08ed5c3ace9e2076e495662de0368501dd55d9fb3",
        "0.29.0": "0daaf1825a70c86a6d1fb23d9fb39030cb402eca5a5cc501072f4c21745e48b3",
        "0.30.0": "0daaf1825a70c86a6d1fb23d9fb39030cb402eca5a5cc501072f4c21745e48b3",
        "0.31.0": "c2ecb854b1e38930a8a0dfa04144b75d87fec7bf4541f0be933bd2c74f4dff79",
    },
    remove_when="vLLM 0.32 is the oldest version that the plugin serves",
)
OUTPUT = Patch(
    name="flashrl-outputs-have-versions",
    target="vllm.v1.engine.output_processor:RequestState._new_completion_output",
    why="an output does not say which version of the weights sampled its tokens",
    upstream="https://github.com/vllm-project/vllm/blob/v0.28.0/vllm/v1/engine/output_processor.py",
    distribution="vllm",
    sources={
        "0.28.0": "2fd1ef68f1b509a19810aa4344236e95c3dfe96f9db4e52a29b7ab75e22988f0",
        "0.29.0": "214655b5a0facf4350ea6f59951129bc89e6d085d8d73272d0e8c2a715bd26ee",
        "0.30.0": "62dfceebe0742488a13275d74dd4cfbe5d1201a29a578d323551cc240c0b842b",
        "0.31.0": "62dfceebe0742488a13275d74dd4cfbe5d1201a29a578d323551cc240c0b842b",
    },
    remove_when="vLLM 0.32 is the oldest version that the plugin serves",
)
MERGED = Patch(
    name="flashrl-merged-outputs-have-versions",
    target="vllm.outputs:RequestOutput.add",
    why="parts of an answer that are merged because the reader is slow keep the fields of the first part",
    upstream="https://github.com/vllm-project/vllm/blob/v0.28.0/vllm/outputs.py",
    distribution="vllm",
    sources={
        "0.28.0": "469efdf72a5cb52dd2e377a1830aa43317a1ecf2a1e69e0773210335d23f063e",
        "0.29.0": "469efdf72a5cb52dd2e377a1830aa43317a1ecf2a1e69e0773210335d23f063e",
        "0.30.0": "469efdf72a5cb52dd2e377a1830aa43317a1ecf2a1e69e0773210335d23f063e",
        "0.31.0": "fdf822ebc39d56fec304c1bd6018a4653cd177bc5530b359e3dbaeeb99c6b34b",
    },
    remove_when="vLLM 0.32 is the oldest version that the plugin serves",
)

_KEY = "flashrl_weight_version"


@dataclass(frozen=True)
class WeightVersionSpan:
    """The output tokens `[start, end)`, sampled by the weights that were labelled `version`."""

    version: str
    start: int
    end: int


def patch_weight_versions() -> None:
    """Patch the core and what reads its messages. Raises PatchError."""
    apply_patch(CORE, _labels)
    apply_patch(ARRIVAL, _notes_labels)
    apply_patch(OUTPUT, _with_spans)
    apply_patch(MERGED, _merges_spans)
    CompletionOutput.weight_versions = None  # of those that vLLM makes elsewhere, of its beam search


def note_batches_in_flight(core: Any) -> None:
    """Keep the present label for the batches that a core has handed to its workers and not read yet. Call it before the
    label of new weights is set: the workers compute in the order in which they are called."""
    waiting = _labels_in_flight(core)
    waiting.extend([core.get_weight_version()] * (len(core.batch_queue or ()) - len(waiting)))


def _labels_in_flight(core: Any) -> deque[str]:
    """The labels of the oldest batches that are not read yet, where they are not the present one."""
    return core.__dict__.setdefault("_appliance_labels_in_flight", deque())


def _labels(original: Callable[..., None]) -> Callable[..., None]:
    """vLLM calls this once for each batch that it has read, with the messages that it makes of it."""

    @functools.wraps(original)
    def attach_iteration_details(self: Any, outputs: dict[int, Any], *args: Any, **kwargs: Any) -> None:
        original(self, outputs, *args, **kwargs)
        if self.vllm_config.parallel_config.worker_cls != WORKER_CLASS:
            return  # FLASHRL_CONFIG was unset before this engine
        waiting = _labels_in_flight(self)
        label = waiting.popleft() if waiting else self.get_weight_version()
        for message in outputs.values():
            for output in message.outputs:
                if output.new_token_ids:
                    output.kv_transfer_params = {**(output.kv_transfer_params or {}), _KEY: label}

    return attach_iteration_details


def _notes_labels(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def process_outputs(self: Any, engine_core_outputs: list[Any], *args: Any, **kwargs: Any) -> Any:
        for output in engine_core_outputs:
            label = (output.kv_transfer_params or {}).pop(_KEY, None)
            if label is None:
                continue
            output.kv_transfer_params = output.kv_transfer_params or None
            state = self.request_states.get(output.request_id)
            if state is not None:  # else it was aborted
                starts = _starts(state)
                if not starts or starts[-1][0] != label:
                    starts.append((label, state.detokenizer.num_output_tokens()))
        return original(self, engine_core_outputs, *args, **kwargs)

    return process_outputs


def _starts(state: Any) -> list[tuple[str, int]]:
    """The labels of a request's tokens so far, each with the index of the first token that has it."""
    return state.__dict__.setdefault("_appliance_label_starts", [])


def _with_spans(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def new_completion_output(self: Any, *args: Any, **kwargs: Any) -> Any:
        completion = original(self, *args, **kwargs)
        is_last = completion.finish_reason is not None
        completion.weight_versions = (
            spans_of(_starts(self), num_tokens=self.detokenizer.num_output_tokens()) if is_last else None
        )
        return completion

    return new_completion_output


def spans_of(starts: list[tuple[str, int]], *, num_tokens: int) -> list[WeightVersionSpan] | None:
    """Return the spans of an answer's tokens; None, as in vLLM 0.32, where no core has reported a label. starts: each
    label with the index of the first token that has it."""
    if not starts and num_tokens:
        return None
    ends = [*(start for _, start in starts[1:]), num_tokens]
    return [WeightVersionSpan(label, start, end) for (label, start), end in zip(starts, ends, strict=False)]


def _merges_spans(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def add(self: Any, next_output: Any, aggregate: bool) -> None:
        original(self, next_output, aggregate)
        spans = {completion.index: completion.weight_versions for completion in next_output.outputs}
        for completion in self.outputs:
            if completion.index in spans:
                completion.weight_versions = spans[completion.index]

    return add
