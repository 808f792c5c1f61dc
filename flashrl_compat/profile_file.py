"""FlashRL's `profile.pt`, already out of its pickle (unpickle.py), becomes a profile of ours:
`python -m flashrl_compat.profile_file SCALES SOURCE FOLDER`, with problems as lines on stderr.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from appliance.errors import ApplianceError, RecipeError
from appliance.finding import fault
from appliance.quant.profile import INPUT_SCALE, OUTPUT_SCALE, Origin, Profile, Settings, write_profile
from appliance.terms.families import LLAMA_NORMS
from appliance.terms.schemes import Scheme
from flashrl_compat.donor import smoothing_of_scales

_NORM_WEIGHTS = tuple(f"{norm}.weight" for norm in LLAMA_NORMS)


def from_flashrl(scales: Path, *, source: str) -> Profile:
    """Make a profile of FlashRL's scales. scales: safetensors with `input_scale.<parameter>` and
    `output_scale.<parameter>`, flat, 1.0 left out.

    source: how the pickle was called.  Raises RecipeError when no norm's ratio is in it, or one is not positive.
    """
    parts: dict[str, dict[str, Tensor]] = {INPUT_SCALE: {}, OUTPUT_SCALE: {}}
    with safe_open(scales, framework="pt") as tensors:
        for key in tensors.keys():  # noqa: SIM118 - the handle is no mapping
            prefix = f"{key.partition('.')[0]}."
            parts[prefix][key.removeprefix(prefix)] = tensors.get_tensor(key)
    norms = {name: ratio_K for name, ratio_K in parts[INPUT_SCALE].items() if name.endswith(_NORM_WEIGHTS)}
    if not norms:
        message = f"has no scale of a norm ({' or '.join(_NORM_WEIGHTS)})"
        raise RecipeError([fault((source,), message, "FlashRL's int8 profiles are of Llama- and Qwen-like models")])
    bad = [name for name, ratio_K in norms.items() if not bool(((ratio_K > 0) & torch.isfinite(ratio_K)).all())]
    if bad:
        raise RecipeError(
            [fault((source,), f"{name}: a scale is not positive", "make the profile again") for name in bad]
        )
    return Profile(
        origin=Origin(kind="flashrl", model="", donor=source),
        scheme=Scheme.INT8,
        settings=Settings(strength=0.0),
        smoothing=smoothing_of_scales(parts[INPUT_SCALE]),
        input_scales=parts[INPUT_SCALE],
        output_scales=parts[OUTPUT_SCALE],
    )


def main(arguments: list[str]) -> int:
    scales, source, folder = arguments
    try:
        write_profile(from_flashrl(Path(scales), source=source), folder=Path(folder))
    except ApplianceError as error:
        sys.stderr.write(f"{error.message}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
