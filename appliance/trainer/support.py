"""Log-probs over the words that a token was drawn from, where rollouts are sampled with top-p or top-k.

A batch then brings the support of each response token (quant/support.py), as two separate fields. Every log-prob that
this engine computes is over it: of the policy before the update, in the update, and of the reference. The divergence
from a reference is so that of the two policies that would have been sampled from, 0 where they are the same. Entropies
are of all words.

Legend: S sequences, T tokens of verl's row, N response positions of all sequences, F words in all supports together.
"""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from appliance.quant.support import RowSupport, Support, log_probs_over
from appliance.trainer.shared_prompts import SharedPromptsEngine

SUPPORT_IDS = "rollout_support_ids"  # [S, F] of a batch, nested: int32
SUPPORT_SIZES = "rollout_support_sizes"  # [S, N] of a batch, nested: int32, words of each response token; 0: all
LABELS = "input_ids_rmpad_rolled"  # verl's
_OF_ROWS = "support"  # ours, in what verl's engine hands from a model's inputs to its outputs


def support_fields(support: Support) -> dict[str, Tensor]:
    """Return the fields of one sequence. support: of all of its response positions."""
    return {SUPPORT_IDS: torch.from_numpy(support.ids_F), SUPPORT_SIZES: torch.from_numpy(support.size_T)}


def predicting_places(micro_batch: TensorDict) -> Tensor:
    """Return [N] int64: places in verl's row of the token before each response position."""
    ends_S = micro_batch["input_ids"].offsets()[1:]
    offsets = micro_batch["response_mask"].offsets()
    length_S = offsets.diff()
    before_first_S = ends_S - length_S - 1
    within_N = torch.arange(int(offsets[-1]), device=ends_S.device) - offsets[:-1].repeat_interleave(length_S)
    return before_first_S.repeat_interleave(length_S) + within_N


class SupportEngine(SharedPromptsEngine):
    """verl's engine, whose log-probs are over the words that were drawn from where a batch brings them."""

    def prepare_model_inputs(self, micro_batch: TensorDict) -> tuple[dict[str, Any], dict[str, Any]]:
        inputs, arguments = super().prepare_model_inputs(micro_batch)
        if SUPPORT_SIZES not in micro_batch.keys():  # noqa: SIM118
            return inputs, arguments
        size_R, ids_F = micro_batch[SUPPORT_SIZES].values().long(), micro_batch[SUPPORT_IDS].values()
        if not self.shares_prompts:  # logits of all tokens
            size_T = size_R.new_zeros(len(arguments[LABELS]))
            size_R = size_T.index_copy(0, predicting_places(micro_batch), size_R)
        support = RowSupport(ids_F, size_R)
        if "shift_labels" in inputs:  # of a model that gives log-probs itself
            inputs["support"] = support
        return inputs, arguments | {_OF_ROWS: support}

    def prepare_model_outputs(
        self, output: Any, output_args: dict[str, Any], micro_batch: TensorDict, logits_processor_func: Any
    ) -> dict[str, Tensor]:
        with log_probs_over(output_args.get(_OF_ROWS)):
            outputs: dict[str, Tensor] = super().prepare_model_outputs(
                output, output_args, micro_batch, logits_processor_func
            )
        return outputs
