"""What one check of an engine is told and what it saw, as values that go through files. Imports no torch."""

from __future__ import annotations

from pydantic import ConfigDict

from appliance.frozen import Frozen
from appliance.terms.schemes import Scheme
from appliance.terms.settings import Quantisation


class Job(Frozen):
    """One engine to check."""

    model: str
    """Folder or hub name."""
    trust_remote_code: bool
    quantisation: Quantisation
    tensor_parallel: int
    enforce_eager: bool
    prompt_tokens: int
    """Of each of the few sequences."""
    new_tokens: int
    """Of each of the few sequences."""
    seed: int
    result: str
    """The file for the CheckResult."""


class LayerProbe(Frozen):
    """One worker at one moment: what is live, and what each of its layers gives for a fixed input."""

    scheme: Scheme
    emulated: bool
    lm_head_fp32: bool
    kernels: tuple[tuple[str, int], ...]
    """Name and number of layers."""
    layers: tuple[tuple[str, str], ...]
    """Name and digest of the output, for every layer that holds weights."""


class EngineOutput(Frozen):
    """What an engine generated, greedily."""

    # An engine that is broken may say what is no number: it is judged, not refused.
    model_config = ConfigDict(allow_inf_nan=True, ser_json_inf_nan="constants")

    tokens: tuple[tuple[int, ...], ...]
    """Per prompt."""
    log_probs: tuple[tuple[float, ...], ...]
    """Nats, of those tokens."""
    prompt_log_probs: tuple[tuple[float, ...], ...]
    """Nats, of the prompts' own tokens but the first: the same tokens whatever the weights are."""

    def distance(self, other: EngineOutput) -> float:
        """Mean absolute difference of the prompts' log-probs, nats."""
        pairs = [
            (mine, theirs)
            for row, other_row in zip(self.prompt_log_probs, other.prompt_log_probs, strict=True)
            for mine, theirs in zip(row, other_row, strict=True)
        ]
        return sum(abs(mine - theirs) for mine, theirs in pairs) / len(pairs)


class Worker(Frozen):
    """One rank of an engine."""

    rank: int
    scheme: Scheme
    emulated: bool
    lm_head_fp32: bool
    kernels: tuple[tuple[str, int], ...]
    """Name and number of layers."""
    layers: int
    unmoved: tuple[str, ...]
    """Layers that gave the same with other weights."""
    unreturned: tuple[str, ...]
    """Layers that did not give the same again with the old ones."""


class CheckResult(Frozen):
    """One engine through three weight updates: the checkpoint's weights, perturbed ones, the checkpoint's again."""

    model_config = ConfigDict(allow_inf_nan=True, ser_json_inf_nan="constants")

    failed: str
    """The error that ended the check, or empty."""
    first: EngineOutput | None = None
    """After the first update."""
    same_as_loaded: bool = False
    """Whether that was what it said before any update."""
    moved: float = 0.0
    """Nats, from the first to the second update."""
    returned: bool = False
    """Whether it said the same again after the third, to the last bit."""
    workers: tuple[Worker, ...] = ()
