"""A profile as it was written, read back whole: the program itself reads its header, or its smoothing."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from appliance.quant.files import (
    PROFILE_FILE,
    LayerError,
    Memory,
    NotSmoothed,
    Origin,
    Predicted,
    Settings,
    read_file_header,
)
from appliance.quant.profile import ACTIVATION, INPUT_SCALE, OUTPUT_SCALE, Profile, load_smoothing
from appliance.terms.schemes import Scheme


def read_profile(folder: Path) -> Profile:
    """Raises EngineError when there is none that can be read."""
    smoothing, header = load_smoothing(folder), read_file_header(folder)
    parts: dict[str, dict[str, Tensor]] = {ACTIVATION: {}, INPUT_SCALE: {}, OUTPUT_SCALE: {}}
    with safe_open(folder / PROFILE_FILE, framework="pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118 - the handle is no mapping
            prefix = f"{name.partition('.')[0]}."
            if prefix in parts:
                parts[prefix][name.removeprefix(prefix)] = tensors.get_tensor(name)
    settings = header["settings"]
    return Profile(
        origin=Origin(**{each.name: header[each.name] for each in dataclasses.fields(Origin)}),
        scheme=Scheme(header["scheme"]),
        settings=Settings(**{**settings, "ignore": tuple(settings["ignore"])}),
        smoothing=smoothing,
        layers=tuple(
            LayerError(**{**each, "layer": tuple(each["layer"]), "linears": tuple(each["linears"])})
            for each in header["layers"]
        ),
        predicted=Predicted(**header["predicted"]) if header["predicted"] else None,
        architecture=header["architecture"],
        not_smoothed=tuple(NotSmoothed(**each) for each in header["not_smoothed"]),
        memory=Memory(**header["memory"]) if header["memory"] else None,
        activations=parts[ACTIVATION],
        input_scales=parts[INPUT_SCALE],
        output_scales=parts[OUTPUT_SCALE],
    )
