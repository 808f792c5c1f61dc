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

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from appliance.errors import EngineError
from appliance.files import whole_file
from appliance.quant.files import HEADER_KEY, PROFILE_FILE, SCHEMA_VERSION, parse_header, read_file_header
from appliance.quant.smoothing import Smoothing, load_smoothing, scale_key
from appliance.terms.schemes import Scheme

ACTIVATION = "activation."
INPUT_SCALE = "input_scale."
OUTPUT_SCALE = "output_scale."


@dataclass(frozen=True)
class LayerError:
    """One layer of the engine: linears that it fuses, such as q, k and v, or one of the two GEMMs of all experts.

    layer: how the layer is called where it is kept in BF16 (`ignore`), once for each of the names.
    weight_error: |W' - W| / |W|, Frobenius.  output_error: |y' - y| / |y| over the calibration tokens, weights and
    activations by the codec, the layer's inputs exact; with smoothing.  output_error_plain: the same without it.
    kept: in BF16, by the error budget or because the user's `ignore` names it.
    """

    layer: tuple[str, ...]
    linears: tuple[str, ...]
    weight_error: float
    output_error: float
    output_error_plain: float
    kept: bool


@dataclass(frozen=True)
class Predicted:
    """The mismatch to expect between BF16 and quantised rollouts, over the calibration tokens; nats.

    kl: exact KL(quantised || BF16) of the next-token distributions, the mean over positions: what `mismatch_k3_kl` of
    a run estimates.  k3_kl, kl_tokens: the k3 and k1 estimates on the text's own next tokens.
    """

    tokens: int
    kl: float
    k3_kl: float
    kl_tokens: float
    probs_diff_mean: float
    weight_max: float


@dataclass(frozen=True)
class Memory:
    """Bytes of parameters and their codes that were alive at once, and those of the largest decoder layer."""

    peak_bytes: int
    largest_layer_bytes: int
    model_bytes: int


@dataclass(frozen=True)
class Settings:
    """strength: alpha, 0 is off.  error_budget: None keeps nothing.  prompts, max_tokens: of the calibration text."""

    strength: float = 0.5
    error_budget: float | None = None
    ignore: tuple[str, ...] = ()
    prompts: int = 64
    max_tokens: int = 2048


@dataclass(frozen=True)
class Origin:
    """kind: `calibrated`, `donor` or `flashrl`.  model: folder or hub name.  model_hash, data_hash: sha256 or empty.

    donor: the W8A8 checkpoint or FlashRL's file.  versions: of what made it.
    """

    kind: str
    model: str
    revision: str = ""
    model_hash: str = ""
    data_hash: str = ""
    donor: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)


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
    for prefix, values in _parts(profile).items():
        tensors |= {prefix + name: tensor for name, tensor in values.items()}
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / PROFILE_FILE
    copies = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    with whole_file(target) as partial:
        save_file(copies, partial, metadata={HEADER_KEY: json.dumps(profile.header())})
    return target


def read_profile(folder: Path) -> Profile:
    """folder: of the profile, or its file. Raises EngineError when there is none that can be read."""
    smoothing = load_smoothing(folder)
    file = folder / PROFILE_FILE if folder.is_dir() else folder
    parts: dict[str, dict[str, Tensor]] = {ACTIVATION: {}, INPUT_SCALE: {}, OUTPUT_SCALE: {}}
    try:
        with safe_open(file, framework="pt") as tensors:
            header = parse_header(tensors.metadata(), file=file)
            for name in tensors.keys():  # noqa: SIM118 - the handle is no mapping
                prefix = f"{name.partition('.')[0]}."
                if prefix in parts:
                    parts[prefix][name.removeprefix(prefix)] = tensors.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise EngineError(f"{file}: not a profile that can be read: {error}") from error
    origin = {each.name: header[each.name] for each in dataclasses.fields(Origin)}
    settings = header["settings"]
    return Profile(
        origin=Origin(**origin),
        scheme=Scheme(header["scheme"]),
        settings=Settings(**{**settings, "ignore": tuple(settings["ignore"])}),
        smoothing=smoothing,
        layers=tuple(
            LayerError(**{**each, "layer": tuple(each["layer"]), "linears": tuple(each["linears"])})
            for each in header["layers"]
        ),
        predicted=Predicted(**header["predicted"]) if header["predicted"] else None,
        memory=Memory(**header["memory"]) if header["memory"] else None,
        activations=parts[ACTIVATION],
        input_scales=parts[INPUT_SCALE],
        output_scales=parts[OUTPUT_SCALE],
    )


def _parts(profile: Profile) -> dict[str, Mapping[str, Tensor]]:
    return {
        ACTIVATION: profile.activations,
        INPUT_SCALE: profile.input_scales,
        OUTPUT_SCALE: profile.output_scales,
    }


def kept_layers(folder: Path) -> tuple[str, ...]:
    """The layers that a profile keeps in BF16, as an `ignore` list. Raises EngineError when there is no profile."""
    return tuple(read_file_header(folder)["suggested_ignore"])
