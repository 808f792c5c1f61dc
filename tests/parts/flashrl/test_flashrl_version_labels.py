"""Labels of tokens on their way from a core to an answer; with real engines: test_flashrl_weight_versions.py beside
the other ways in."""

from __future__ import annotations

import json
from collections import deque
from types import SimpleNamespace

import pytest
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs

from flashrl_compat import weight_versions as module
from flashrl_compat.generate_route import with_spans
from flashrl_compat.weight_versions import WeightVersionSpan, spans_of
from flashrl_compat.worker import WORKER_CLASS


class Core(SimpleNamespace):
    """As much of vLLM's as the labels touch. label: of its present weights; queued: batches that it has not read."""

    def __init__(self, *, label: str, queued: int = 0, worker: str = WORKER_CLASS) -> None:
        super().__init__(
            label=label,
            batch_queue=deque(range(queued)) if queued else None,
            vllm_config=SimpleNamespace(parallel_config=SimpleNamespace(worker_cls=worker)),
        )

    def get_weight_version(self) -> str:
        return self.label


def read_batch(core: Core, **fields: object) -> EngineCoreOutput:
    """What the core sends for a request that got a token."""
    output = EngineCoreOutput("r", [7], **fields)
    module._labels(lambda *args: None)(core, {0: EngineCoreOutputs(outputs=[output])}, None)
    return output


def test_a_batch_that_was_in_flight_when_the_weights_changed_has_the_old_label() -> None:
    core = Core(label="1", queued=2)
    module.note_batches_in_flight(core)
    core.label = "2"
    module.note_batches_in_flight(core)  # a second update before any of them is read
    core.label = "3"
    labels = [read_batch(core).kv_transfer_params["flashrl_weight_version"] for _ in range(3)]
    assert labels == ["1", "1", "3"]


def test_the_label_leaves_what_else_is_in_the_field() -> None:
    core, processor = Core(label="1"), SimpleNamespace(request_states={})
    plain, with_params = read_batch(core), read_batch(core, kv_transfer_params={"remote": 1})
    assert with_params.kv_transfer_params == {"remote": 1, "flashrl_weight_version": "1"}
    module._notes_labels(lambda self, outputs: None)(processor, [plain, with_params])
    assert (plain.kv_transfer_params, with_params.kv_transfer_params) == (None, {"remote": 1})


def test_an_engine_that_is_not_ours_sends_no_label() -> None:
    assert read_batch(Core(label="1", worker="vllm.v1.worker.cpu_worker.CPUWorker")).kv_transfer_params is None


@pytest.mark.parametrize(
    ("starts", "num_tokens", "spans"),
    [
        ([], 0, []),
        ([], 4, None),
        ([("a", 0)], 4, [("a", 0, 4)]),
        ([("a", 0), ("b", 3)], 4, [("a", 0, 3), ("b", 3, 4)]),
    ],
)
def test_spans_cover_an_answer(starts: list, num_tokens: int, spans: list | None) -> None:
    expected = None if spans is None else [WeightVersionSpan(*span) for span in spans]
    assert spans_of(starts, num_tokens=num_tokens) == expected


def test_parts_of_an_answer_that_are_merged_have_the_spans_of_the_last() -> None:
    def part(token: int, spans: list | None) -> RequestOutput:
        completion = CompletionOutput(0, "", [token], None, None, finish_reason=spans and "length")
        completion.weight_versions = spans
        return RequestOutput("r", None, [1], None, [completion], finished=spans is not None)

    spans = [WeightVersionSpan("a", 0, 2)]
    merged = part(5, None)
    module._merges_spans(RequestOutput.add)(merged, part(6, spans), aggregate=True)
    assert (merged.outputs[0].token_ids, merged.outputs[0].weight_versions) == ([5, 6], spans)


def test_each_choice_of_a_stream_has_the_field_and_the_last_one_the_spans() -> None:
    def event(reason: str | None) -> str:
        return f"data: {json.dumps({'choices': [{'index': 1, 'finish_reason': reason}]})}\n\n"

    spans = {1: [WeightVersionSpan("a", 0, 2)]}
    [early, last] = [json.loads(with_spans(event(reason), spans)[6:]) for reason in (None, "length")]
    assert early["choices"][0]["weight_versions"] is None
    assert last["choices"][0]["weight_versions"] == [{"version": "a", "start": 0, "end": 2}]
    for other in ("data: [DONE]\n\n", 'data: {"choices":[],"usage":{}}\n\n', 'data: {"error":{}}\n\n'):
        assert with_spans(other, spans) == other
