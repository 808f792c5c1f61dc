"""A prompt that several sequences of a micro-batch share is computed once; logits only where a response token is
predicted.

The samples of a prompt are sequences that begin alike, and verl packs each of them whole. Causal layers give equal
tokens after equal tokens the same, so that a prompt needs to stand in our row once, up to its last token, with the
responses behind one another after it. Each response begins with the prompt's last token, at which its own first token
is predicted, and lacks its last token, after which nothing is predicted:

    prompt, [end of prompt, response 1], [end of prompt, response 2], ...; next prompt, ...

What comes out is the same formula; its gradients add up over the responses, as they do over whole sequences. Only
attention computes a prompt again for each of its responses. Which segment continues which tokens follows from the
positions alone (`Sequences` of trainer/attention.py): the first response continues where the prompt ends, each other
one starts again at that position. Log-probs are 0 at all other tokens: nobody reads them.

Legend: S sequences, T tokens of verl's row, U tokens of ours, R response tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from appliance.errors import TrainingError

_ROW = "shared_row"  # ours, in what verl's engine hands from a model's inputs to its outputs
_OF_TOKENS = ("input_ids_rmpad_rolled", "temperature_rmpad")  # verl's, beside it


@dataclass(frozen=True)
class SharedRow:
    """A micro-batch's row with shared prompts."""

    places_U: Tensor
    """Places of the row's tokens in verl's row, int64."""
    predicting_R: Tensor
    """Places in our row of the token before each response token, sequence by sequence, int64, none of them twice."""
    predicted_R: Tensor
    """Places in verl's row where the log-prob of each response token belongs: of the token before it, int64."""
    offsets_S1: Tensor
    """Start of each response in R; the last entry is R."""

    @staticmethod
    def from_micro_batch(micro_batch: TensorDict) -> SharedRow:
        """Find the shared prompts. micro_batch: verl's, without padding: `input_ids` and `response_mask` are nested.
        Raises TrainingError for a sequence without a prompt."""
        ids = micro_batch["input_ids"].values().tolist()
        ends = micro_batch["input_ids"].offsets()[1:].tolist()
        response_lengths = micro_batch["response_mask"].offsets().diff().tolist()
        responses: list[range] = []  # places in verl's row of each sequence's response
        by_prompt: dict[tuple[int, ...], list[range]] = {}
        start = 0
        for end, length in zip(ends, response_lengths, strict=True):
            if end - start <= length:
                raise TrainingError(f"a sequence of {end - start} tokens has a response of {length} and no prompt")
            responses.append(range(end - length, end))
            by_prompt.setdefault(tuple(ids[start : end - length]), []).append(responses[-1])
            start = end
        places: list[int] = []
        predicting: dict[int, range] = {}  # by the place in verl's row where a response starts
        for prompt, responses_of_prompt in by_prompt.items():
            first = responses_of_prompt[0].start
            places += range(first - len(prompt), first - 1)
            for response in responses_of_prompt:
                predicting[response.start] = range(len(places), len(places) + len(response))
                places += range(response.start - 1, response.stop - 1)
        return SharedRow(
            torch.tensor(places),
            torch.tensor([place for response in responses for place in predicting[response.start]]),
            torch.tensor([place - 1 for response in responses for place in response]),
            micro_batch["response_mask"].offsets(),
        )

    def in_verls_row(self, value_R: Tensor, *, offsets_S1: Tensor) -> Tensor:
        """Return a nested tensor, 0 but where a response token is predicted. value_R: [R] or [R, ...].  offsets_S1:
        of the sequences in T."""
        empty_T = value_R.new_zeros(int(offsets_S1[-1]), *value_R.shape[1:])
        value_T = empty_T.index_copy(0, self.predicted_R, value_R)
        return torch.nested.nested_tensor_from_jagged(value_T, offsets_S1)


class SharedPromptsEngine(FSDPEngineWithLMHead):
    """verl's engine, with shared prompts where `shares_prompts` is set."""

    shares_prompts = False

    def prepare_model_inputs(self, micro_batch: TensorDict) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return verl's (inputs of the model, arguments of `prepare_model_outputs`), of our row in place of verl's.
        `logits_to_keep` is transformers' own: at which tokens a causal language model computes logits.
        `shift_labels` has a model that gives log-probs itself (trainer/rollout_forward.py)."""
        inputs, arguments = super().prepare_model_inputs(micro_batch)
        if not self.shares_prompts:
            return inputs, arguments
        row = SharedRow.from_micro_batch(micro_batch)
        inputs |= {name: inputs[name][:, row.places_U] for name in ("input_ids", "position_ids")}
        inputs["logits_to_keep"] = row.predicting_R
        arguments |= {name: arguments[name][row.predicted_R] for name in _OF_TOKENS}
        if "shift_labels" in inputs:
            inputs["shift_labels"] = arguments["input_ids_rmpad_rolled"][None]
        return inputs, arguments | {_ROW: row}

    def prepare_model_outputs(
        self, output: Any, output_args: dict[str, Any], micro_batch: TensorDict, logits_processor_func: Any
    ) -> dict[str, Tensor]:
        """Return verl's outputs: nested, in verl's row. verl reads of a micro-batch where sequences lie, and gets
        responses for sequences here."""
        row: SharedRow | None = output_args.get(_ROW)
        sequences = micro_batch
        if row is not None:
            sequences = micro_batch.copy()
            labels_R = output_args["input_ids_rmpad_rolled"]
            sequences["input_ids"] = torch.nested.nested_tensor_from_jagged(labels_R, row.offsets_S1)
        outputs: dict[str, Tensor] = super().prepare_model_outputs(
            output, output_args, sequences, logits_processor_func
        )
        if row is None:
            return outputs
        offsets_S1 = micro_batch["input_ids"].offsets()
        return {name: row.in_verls_row(value.values(), offsets_S1=offsets_S1) for name, value in outputs.items()}

    def in_sequences(self, value_T: Tensor, output_args: dict[str, Any], micro_batch: TensorDict) -> Tensor:
        """Return a value at each token that this rank has logits of as a nested tensor in verl's row."""
        row: SharedRow | None = output_args.get(_ROW)
        offsets_S1 = micro_batch["input_ids"].offsets()
        if row is not None:
            return row.in_verls_row(value_T, offsets_S1=offsets_S1)
        whole_T = self._gather_and_unpad_packed(value_T, output_args["pad_size"])
        return torch.nested.nested_tensor_from_jagged(whole_T, offsets_S1)
