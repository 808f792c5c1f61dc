"""Weights of a frozen model that are not kept in memory: they are read from its files again where they are needed.

With `trainer.forward: rollout` and `model.lora.sync: adapter` the forward has codes of a layer, and so has its
gradient. The BF16 weights are needed for an update that brings the model to the engines (the first one of an
engine, and each that changes its precision), and while rollouts are in BF16. What is read is compared, by digest, with
what transformers loaded at the start: other files, or a format that is read in another way, end the run.

Of the files the headers are read at the start, and then the weights that are asked for, no others and each once for a
purpose. The trainer has one rank (plan/rules.py), so no other process reads them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from verl.utils.device import get_device_id

from appliance.errors import EngineError, SyncError
from appliance.quant.checkpoint import ModelTensors
from appliance.sync.manifest import digest


class WeightsOnDisk:
    """Weights that were taken out of a model, by their digests, and the files that have them."""

    def __init__(self, folder: Path) -> None:
        """folder: that the model was loaded from.  Raises EngineError for one without safetensors."""
        self._files = ModelTensors(folder)
        self._digests: dict[str, str] = {}

    def take_out(self, name: str, linear: nn.Linear) -> None:
        """Take a layer's weight out of it. name: of the layer in the checkpoint.  Raises EngineError where the files
        have none of this name."""
        weight = f"{name}.weight"
        if weight not in self._files:
            raise EngineError(f"{self._files.folder}: the checkpoint has no {weight}", hint="use trainer.forward: bf16")
        self._digests[weight] = digest(linear.weight)
        linear.register_parameter("weight", None)

    def read(self, name: str) -> Tensor:
        """Read a weight that was taken out, in BF16. Raises SyncError where it is another one than was taken out."""
        tensor = self._files.read(name).to(torch.bfloat16)
        if (digest_now := digest(tensor)) != self._digests[name]:
            message = f"{name} has digest {digest_now} in the model's files, and was loaded with {self._digests[name]}"
            hint = "put the files back that the run began with, and resume; or use trainer.forward: bf16"
            raise SyncError(message, hint=hint)
        return tensor

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all that were taken out, by the checkpoint's names, on the trainer's device."""
        for name in self._digests:
            yield name, self.read(name).to(get_device_id())
