"""A model's profile: what calibration, or a donor checkpoint, found out about it. One file, `profile.safetensors`.

The tensors are vectors of the model (names in `Profile`), the header is JSON in the safetensors metadata. Nothing in
the file is code, so a profile can be passed on.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from appliance.files import whole_file
from appliance.quant.files import (
    HEADER_KEY,
    PROFILE_FILE,
    SCHEMA_VERSION,
    LayerError,
    Memory,
    Origin,
    Predicted,
    Settings,
    read_file_header,
)
from appliance.quant.smoothing import Smoothing, scale_key
from appliance.terms.schemes import Scheme

ACTIVATION = "activation."
INPUT_SCALE = "input_scale."
OUTPUT_SCALE = "output_scale."


@dataclass(frozen=True)
class Profile:
    """activations: [K] float32, largest |x| per input channel before smoothing, by a linear's name.

    input_scales, output_scales: of a donor, by a parameter's name, as FlashRL has them: codes are
    round(w_nk * output_scale_n * input_scale_k).  layers, predicted, memory: of a calibration only.
    """

    origin: Origin
    scheme: Scheme
    settings: Settings
    smoothing: Smoothing
    layers: tuple[LayerError, ...] = ()
    predicted: Predicted | None = None
    memory: Memory | None = None
    activations: Mapping[str, Tensor] = field(default_factory=dict, repr=False)
    input_scales: Mapping[str, Tensor] = field(default_factory=dict, repr=False)
    output_scales: Mapping[str, Tensor] = field(default_factory=dict, repr=False)

    @property
    def suggested_ignore(self) -> tuple[str, ...]:
        """The user's `ignore` and then the layers that the error budget keeps in BF16, each once."""
        kept = (name for layer in self.layers if layer.kept for name in layer.layer)
        return tuple(dict.fromkeys((*self.settings.ignore, *kept)))

    def header(self) -> dict:
        """What the file's header holds: JSON types only."""
        return {
            "schema_version": SCHEMA_VERSION,
            **dataclasses.asdict(dataclasses.replace(self.origin, versions={})),
            "versions": dict(self.origin.versions),
            "scheme": str(self.scheme),
            "settings": dataclasses.asdict(self.settings),
            "smoothing": [{"norm": each.norm, "linears": list(each.linears)} for each in self.smoothing.groups],
            "layers": [dataclasses.asdict(each) for each in self.layers],
            "suggested_ignore": list(self.suggested_ignore),
            "predicted": dataclasses.asdict(self.predicted) if self.predicted else None,
            "memory": dataclasses.asdict(self.memory) if self.memory else None,
        }


def write_profile(profile: Profile, *, folder: Path) -> Path:
    """Write `profile.safetensors` into the folder and return its path. The file appears whole or not at all."""
    tensors = {scale_key(group.norm): group.scale_K for group in profile.smoothing.groups}
    tensors |= {ACTIVATION + name: tensor for name, tensor in profile.activations.items()}
    tensors |= {INPUT_SCALE + name: tensor for name, tensor in profile.input_scales.items()}
    tensors |= {OUTPUT_SCALE + name: tensor for name, tensor in profile.output_scales.items()}
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / PROFILE_FILE
    copies = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    with whole_file(target) as partial:
        save_file(copies, partial, metadata={HEADER_KEY: json.dumps(profile.header())})
    return target


def kept_layers(folder: Path) -> tuple[str, ...]:
    """The layers that a profile keeps in BF16, as an `ignore` list. Raises EngineError when there is no profile."""
    return tuple(read_file_header(folder)["suggested_ignore"])
