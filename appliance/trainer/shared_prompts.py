"""Prompts that several sequences of a micro-batch share are computed once, and what no log-prob depends on not at all.

The samples of a prompt are sequences that begin alike, and verl packs each of them whole. Causal layers give equal
tokens after equal tokens the same, so a prompt stands in our row once, with the responses behind one another after it.
What comes out is the same formula; its gradients add up over the responses, as they do over whole sequences. In the row

    prompt, response 1, response 2, ...; next prompt, response, ...

positions alone say what continues what (trainer/attention.py): the first response goes on where the prompt ends, each
other one starts again at that position. A sequence's last token is left out: nothing is predicted after it. Logits are
computed at the tokens before response tokens only, and log-probs elsewhere are 0: nobody reads them.

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
    """Places of its tokens in verl's row, int64."""
    predicting_R: Tensor
    """Places in our row of the token before each response token, sequence by sequence, int64. A prompt's last token
    stands here once for each of its responses."""
    predicted_R: Tensor
    """Places in verl's row where the log-prob of each response token belongs: of the token before it, int64."""
    offsets_S1: Tensor
    """Where the responses start in R; the last one is R."""

    @staticmethod
    def of(micro_batch: TensorDict) -> SharedRow:
        """micro_batch: verl's, without padding: `input_ids` and `response_mask` are nested. Raises TrainingError for a
        sequence without a prompt."""
        ids = micro_batch["input_ids"].values().tolist()
        ends = micro_batch["input_ids"].offsets()[1:].tolist()
        responses = micro_batch["response_mask"].offsets().diff().tolist()
        sharing: dict[tuple[int, ...], list[range]] = {}  # places of the responses by prompt
        start = 0
        for end, response in zip(ends, responses, strict=True):
            if end - start <= response:
                raise TrainingError(f"a sequence of {end - start} tokens has a response of {response} and no prompt")
            sharing.setdefault(tuple(ids[start : end - response]), []).append(range(end - response, end))
            start = end
        places: list[int] = []
        predicting: dict[int, list[int]] = {}  # by the place where a response starts
        for prompt, of_prompt in sharing.items():
            first = of_prompt[0].start
            places += range(first - len(prompt), first)
            before = len(places) - 1
            for response_places in of_prompt:
                seen = range(len(places), len(places) + max(0, len(response_places) - 1))
                places += response_places[:-1]
                predicting[response_places.start] = [before, *seen] if response_places else []
        starts = [end - response for end, response in zip(ends, responses, strict=True)]
        predicted = [range(end - response - 1, end - 1) for end, response in zip(ends, responses, strict=True)]
        return SharedRow(
            torch.tensor(places),
            torch.tensor([place for start in starts for place in predicting[start]]),
            torch.tensor([place for response_places in predicted for place in response_places]),
            micro_batch["response_mask"].offsets(),
        )

    def in_verls_row(self, value_R: Tensor, *, offsets_S1: Tensor) -> Tensor:
        """Nested, 0 but where a response token is predicted. offsets_S1: of the sequences in T."""
        value_T = value_R.new_zeros(int(offsets_S1[-1])).index_copy(0, self.predicted_R, value_R)
        return torch.nested.nested_tensor_from_jagged(value_T, offsets_S1)


class SharedPromptsEngine(FSDPEngineWithLMHead):
    """verl's engine, with shared prompts where `shares_prompts` is set."""

    shares_prompts = False

    def prepare_model_inputs(self, micro_batch: TensorDict) -> tuple[dict[str, Any], dict[str, Any]]:
        """verl's (inputs of the model, arguments of `prepare_model_outputs`), of our row in place of verl's.
        `logits_to_keep` is transformers' own: at which tokens a causal language model computes logits."""
        inputs, arguments = super().prepare_model_inputs(micro_batch)
        if not self.shares_prompts:
            return inputs, arguments
        row = SharedRow.of(micro_batch)
        inputs |= {name: inputs[name][:, row.places_U] for name in ("input_ids", "position_ids")}
        inputs["logits_to_keep"] = row.predicting_R
        arguments |= {name: arguments[name][row.predicted_R] for name in _OF_TOKENS}
        return inputs, arguments | {_ROW: row}

    def prepare_model_outputs(
        self, output: Any, output_args: dict[str, Any], micro_batch: TensorDict, logits_processor_func: Any
    ) -> dict[str, Tensor]:
        """verl's: nested, in verl's row. verl reads of a micro-batch where sequences lie, and gets responses for
        sequences here."""
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
        """Nested, in verl's row, of a value at each token that this rank has logits of."""
        row: SharedRow | None = output_args.get(_ROW)
        offsets_S1 = micro_batch["input_ids"].offsets()
        if row is not None:
            return row.in_verls_row(value_T, offsets_S1=offsets_S1)
        whole_T = self._gather_and_unpad_packed(value_T, output_args["pad_size"])
        return torch.nested.nested_tensor_from_jagged(whole_T, offsets_S1)
