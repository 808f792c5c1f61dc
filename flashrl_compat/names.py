"""FlashRL's names for its quantisers, and what each of them is here: a closed table, shown in docs/flashrl.md too.

Source: `flash_quantization.py`, `vllm_patch.py` and `configs/` of flash-llm-rl 1.0.3. Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from appliance.terms.schemes import Scheme


@dataclass(frozen=True)
class Name:
    theirs: str
    """The word in `FLASHRL_CONFIG` or `fn:`."""
    scheme: Scheme
    meant: str
    """Meaning in FlashRL."""
    differs: str
    """Difference here."""


_PROCESSED = "nothing is quantised; log-probs after temperature, top-k and top-p"
_VLLM_FP8 = "vLLM's own online FP8, one scale per weight"
_NO_FAST = "there is one path for every sync, so it is the same as `{same}`"
_INT8 = (
    "scales are computed again from the weights at every sync; a profile is optional: it smooths, and keeps the layers "
    "of its mismatch budget in BF16; codes end at ±127, not -128"
)

NAMES: tuple[Name, ...] = (
    Name("bf16", Scheme.BF16, _PROCESSED, "the same, by vLLM's own `processed_logprobs`, so penalties count too"),
    Name("fp8", Scheme.FP8, _VLLM_FP8, "layers reload one by one; `lm_head` stays BF16"),
    Name("fp8_vllm", Scheme.FP8, _VLLM_FP8, "the same as `fp8`, as in FlashRL"),
    Name("fp8_fast", Scheme.FP8, "`fp8`, quantised straight into the old tensors", _NO_FAST.format(same="fp8")),
    Name("fp8_vllm_fast", Scheme.FP8, "`fp8_fast`", _NO_FAST.format(same="fp8")),
    Name(
        "fp8_tensor",
        Scheme.FP8,
        "one scale per weight, in the layout of a quantised donor checkpoint",
        "no donor and no profile: a BF16 checkpoint is served",
    ),
    Name(
        "fp8_channel",
        Scheme.FP8_CHANNEL,
        "one scale per output channel, in the layout of a quantised donor checkpoint",
        "no donor; a profile is optional, as for `int8`",
    ),
    Name("int8", Scheme.INT8, "W8A8 with the channel scales and the smoothing of a donor, fixed for the run", _INT8),
    Name("int8_fast", Scheme.INT8, "`int8`, copied straight into the old tensors", _NO_FAST.format(same="int8")),
    Name(
        "int8_prune",
        Scheme.INT8,
        "`int8`, and a norm's channel is zeroed where every code that it feeds is 0",
        "nothing is pruned: the same as `int8`",
    ),
    Name("int8_wo_prune", Scheme.INT8, "`int8`", "the same as `int8`, as in FlashRL"),
)

# Schemes of ours that FlashRL has no name for; a file may use them, FLASHRL_CONFIG takes FlashRL's names only.
OWN_NAMES: tuple[Name, ...] = tuple(
    Name(scheme.replace("-", "_"), scheme, "not in FlashRL", f"{scheme.spec.label}; in a file only")
    for scheme in Scheme
    if scheme not in {name.scheme for name in NAMES}
)

BY_NAME = {name.theirs: name for name in NAMES}  # what a word in `FLASHRL_CONFIG` means
IN_FILES = {name.theirs: name for name in (*NAMES, *OWN_NAMES)}  # and one in `fn:` of a file


def listed(names: tuple[Name, ...]) -> str:
    """List names for messages: each name in back quotes."""
    return ", ".join(f"`{name.theirs}`" for name in names)
