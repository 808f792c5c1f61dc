"""The trainer's log-probs of the words that the engine found most likely, and how far the two policies are apart there.

A batch brings for each response token the engine's k most likely words and their log-probs, as two separate fields.
The labels of verl's row, a word for each token, get these words as further columns, and the function that computes the
labels' log-probs computes all of them from one softmax (trainer/worker.py). What comes out is taken apart again here:
the first column is verl's log-probs. The others go to the loss, where a correction asks for them, and the divergence of
the two distributions goes wherever the log-probs of the policy before the update go (corrections/distributions.py).

A reference's forward has one column, as without these fields.

Legend: S sequences, T tokens of verl's row, N response positions of all sequences, K words.
"""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from appliance.corrections.distributions import divergence
from appliance.quant.mismatch import TopWords
from appliance.trainer.support import LABELS, SupportEngine, predicting_places
from appliance.trainer.update_log_probs import UPDATE_LOG_PROBS

TOP_IDS, TOP_ROLLOUT = "rollout_top_ids", "rollout_top_log_probs"  # of a batch: int32, and float32 nats; see words_of
TOP_TRAINER = "top_log_probs"  # [S, T, K] of a model's output: the trainer's, of the same words, with a gradient
DIVERGENCE = "divergence"  # [S, N] of a model's output, and of a batch after a pass: float32, nats


def top_fields(top: TopWords) -> dict[str, Tensor]:
    """Return the fields of one sequence, in one dimension. verl turns nested tensors of three around on their way.

    top: of all of its response positions.
    """
    return {TOP_IDS: torch.from_numpy(top.ids_TK).flatten(), TOP_ROLLOUT: torch.from_numpy(top.log_probs_TK).flatten()}


def words_of(data: TensorDict, name: str) -> Tensor:
    """Return [N, K] of one of these fields."""
    return data[name].values().view(len(data["response_mask"].values()), -1)


class TopWordsEngine(SupportEngine):
    """verl's engine, which compares the most likely words where a batch brings them."""

    def _compares(self, micro_batch: TensorDict) -> bool:
        return TOP_IDS in micro_batch.keys() and not self.engine_config.forward_only  # noqa: SIM118

    def prepare_model_inputs(self, micro_batch: TensorDict) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return verl's (inputs of the model, arguments of `prepare_model_outputs`), with 1 + K labels for each
        token."""
        inputs, arguments = super().prepare_model_inputs(micro_batch)
        if not self._compares(micro_batch):
            return inputs, arguments
        labels, ids_NK = arguments[LABELS], words_of(micro_batch, TOP_IDS).long()
        if not self.shares_prompts:  # logits of all tokens
            whole_TK = ids_NK.new_zeros(len(labels), ids_NK.shape[1])
            ids_NK = whole_TK.index_copy(0, predicting_places(micro_batch), ids_NK)
        arguments[LABELS] = torch.cat([labels[:, None], ids_NK], dim=1)
        if "shift_labels" in inputs:
            inputs["shift_labels"] = arguments[LABELS][None]
        return inputs, arguments

    def prepare_model_outputs(
        self, output: Any, output_args: dict[str, Any], micro_batch: TensorDict, logits_processor_func: Any
    ) -> dict[str, Tensor]:
        """Return verl's outputs, with TOP_TRAINER where gradients are needed, and DIVERGENCE of the policy before
        an update."""
        outputs: dict[str, Tensor] = super().prepare_model_outputs(
            output, output_args, micro_batch, logits_processor_func
        )
        if not self._compares(micro_batch):
            return outputs
        both, offsets = outputs["log_probs"].values(), micro_batch["input_ids"].offsets()
        outputs["log_probs"] = torch.nested.nested_tensor_from_jagged(both[:, 0], offsets)
        if torch.is_grad_enabled():
            outputs[TOP_TRAINER] = torch.nested.nested_tensor_from_jagged(both[:, 1:], offsets)
        if UPDATE_LOG_PROBS.is_open or not torch.is_grad_enabled():
            trainer_NK = both.detach()[predicting_places(micro_batch), 1:]
            apart_N = divergence(words_of(micro_batch, TOP_ROLLOUT), trainer_TK=trainer_NK)
            outputs[DIVERGENCE] = torch.nested.nested_tensor_from_jagged(
                apart_N, micro_batch["response_mask"].offsets()
            )
        return outputs
