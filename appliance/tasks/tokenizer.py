"""The tokenizer of a plan's model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from appliance.record.liveness import Heartbeat
from appliance.record.plan import RunPlan
from appliance.tasks.library import PACKAGED_MODELS, TINY_MODELS, CalculatorSpec
from appliance.tasks.packaged_model import read_packaged_tokenizer, read_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_tokenizer(plan: RunPlan) -> PreTrainedTokenizerBase:
    """Load the tokenizer of the plan's model, whose weights need not be here yet.

    Raises OSError when the hub does not give it, and of a package or a GGUF file what make_packaged and convert_gguf
    raise.
    """
    from transformers import AutoTokenizer

    model, weights = plan.model, plan.weights
    if os.path.isdir(weights.name_or_path):
        return AutoTokenizer.from_pretrained(weights.name_or_path, trust_remote_code=model.trust_remote_code)
    if weights.gguf:
        return read_tokenizer(Path(weights.gguf))
    if packaged := PACKAGED_MODELS.get(model.builtin):
        return read_packaged_tokenizer(packaged, cache_dir=Path(plan.cache_dir), beat=Heartbeat().beat)
    if model.builtin:
        from appliance.tasks.tiny_model import byte_tokenizer  # loads torch

        spec = TINY_MODELS[model.builtin]
        return byte_tokenizer(max_positions=spec.max_positions, calls_tools=isinstance(spec, CalculatorSpec))
    return AutoTokenizer.from_pretrained(
        weights.hub_name, revision=weights.commit or None, trust_remote_code=model.trust_remote_code
    )
