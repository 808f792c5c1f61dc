"""Safetensors as far as they can be read without torch: the shapes in a model's files, and a profile's JSON header,
held to its shape before anything reads it. And the file that names an engine with a profile, `quantization.yaml`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Self

import yaml
from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.dataclasses import dataclass

from appliance.errors import EngineError
from appliance.files import digest_of, whole_file, write_whole
from appliance.terms.families import unlisted
from appliance.terms.schemes import Scheme
from appliance.terms.settings import Quantisation

CONFIG_FILE, PROFILE_FILE = "quantization.yaml", "profile.safetensors"
SMOOTHING = "smoothing."  # before the name of a group's source: the tensor of its scales
HEADER_KEY = "appliance"  # of the safetensors metadata; its value is the JSON header of a profile
SCHEMA_VERSION = 2
_READABLE = (1, SCHEMA_VERSION)  # in version 1 every source of smoothing is a norm, and is called so
_OWN_SAMPLES_SINCE = 2  # before, a prediction was on reference answers
_LENGTH_BYTES = 8
_NAME_DIGITS = 16
_LONGEST_HEADER = 64 << 20
_LARGEST_HEAD = 1 << 16
_HINT = "make it again with `appliance profile`"


def read_file_header(folder: Path) -> dict[str, Any]:
    """Read the JSON header of the profile in a folder (or of that file). Raises EngineError when there is none of
    ours."""
    file = folder / PROFILE_FILE if folder.is_dir() else folder
    try:
        metadata = _read_header(file)[0].get("__metadata__", {})
    except OSError as error:
        raise EngineError(f"{file}: no profile: {error.strerror}", hint="make one with `appliance profile`") from error
    except ValueError as error:
        raise EngineError(f"{file}: not a safetensors file", hint=_HINT) from error
    text = metadata.get(HEADER_KEY)
    try:
        header = _json_object(text) if isinstance(text, str) else {}
    except ValueError as error:
        raise EngineError(f"{file}: its header is not JSON", hint=_HINT) from error
    if header.get("schema_version") not in _READABLE:
        versions = " or ".join(map(str, _READABLE))
        raise EngineError(f"{file}: not a profile of schema version {versions}", hint=_HINT)
    try:
        completed = _Header.model_validate_json(text).model_dump(
            mode="json", include={"architecture", "layers", "settings", "smoothing"}
        )
    except ValidationError as error:
        first = error.errors()[0]
        why = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        raise EngineError(f"{file}: its header cannot be used: {why}", hint=_HINT) from error
    return header | completed  # with the defaults of what is left out, and with the names of this version


def is_by_own_samples(header: dict[str, Any]) -> bool:
    """Return whether a profile's prediction is on answers of the model itself, as rollouts are. Earlier versions
    predicted on reference answers, by which a run cannot be judged. header: as `read_file_header` returns it."""
    return header["schema_version"] >= _OWN_SAMPLES_SINCE and header["settings"]["response_tokens"] > 0


def made_of_another_class(header: Mapping[str, Any], *, architectures: Iterable[str]) -> str:
    """Return why a profile cannot smooth a model of these classes, or an empty text: which layers read which norm is
    one for all listed families, and was tried in the one class that any other profile was made of. header: as
    `read_file_header` returns it."""
    class_of_profile, class_of_model = header["architecture"], unlisted(architectures)
    if class_of_profile == class_of_model:
        return ""
    made_of, model = (name or "a listed family" for name in (class_of_profile, class_of_model))
    return f"it was made of {made_of} and the model is {model}, where other layers may read a norm"


def kept_layers(folder: Path) -> tuple[str, ...]:
    """Read the layers that a profile keeps in BF16, as an `ignore` list. Raises EngineError when there is no
    profile."""
    return tuple(read_file_header(folder)["suggested_ignore"])


def by_content(folder: Path, *, cache_dir: Path) -> Path:
    """Return the folder of the cache with a copy of this profile, under a name that its content decides; it is made
    where there is none.

    For what hashes its settings: vLLM keeps compiled code by them, so a run's own folder would never find any.
    A folder without a profile is returned as it is.  Raises OSError.
    """
    if not (digest := digest_of(folder / PROFILE_FILE)):
        return folder
    cached = cache_dir / "profiles" / f"content-{digest[:_NAME_DIGITS]}"
    if digest_of(cached / PROFILE_FILE) != digest:
        place_profile(folder, target=cached)
    return cached


def place_profile(profile: Path, *, target: Path) -> None:
    """Copy a profile into a folder; it appears there whole or not at all. Raises OSError."""
    target.mkdir(parents=True, exist_ok=True)
    with whole_file(target / PROFILE_FILE) as partial:
        shutil.copyfile(profile / PROFILE_FILE, partial)


def engine_named(quantisation: Quantisation, *, profile: Path | None) -> Quantisation:
    """Return the quantisation with which an engine elsewhere is started: with the profile of this folder, where one is
    used, and with its kept layers named."""
    if not (quantisation.profile and profile):
        return quantisation.replace(profile="")
    ignore = tuple(dict.fromkeys((*quantisation.ignore, *kept_layers(profile))))
    return quantisation.replace(ignore=ignore, profile=str(profile.absolute()))


def write_config(path: Path, quantisations: Iterable[Quantisation], *, model: str) -> None:
    """Write a file that `FLASHRL_CONFIG` takes, one entry per replica. A profile is written relative to the file where
    it lies beside or below it.  model: folder or name on the hub."""
    entries = [_entry(each, model=model, folder=path.parent.absolute()) for each in quantisations]
    text = yaml.safe_dump({"configs": entries}, sort_keys=False, allow_unicode=True)
    write_whole(path, text)


def _entry(quantisation: Quantisation, *, model: str, folder: Path) -> dict[str, Any]:
    """Make an entry in FlashRL's words: its name of a scheme is ours with `_` for `-`, what is not set is left out."""
    entry: dict[str, Any] = {"fn": str(quantisation.scheme).replace("-", "_"), "load_format": "auto", "model": model}
    if quantisation.profile:
        profile = Path(quantisation.profile).absolute()
        entry["profile"] = str(profile.relative_to(folder) if profile.is_relative_to(folder) else profile)
    if quantisation.emulated:
        entry["emulated"] = True
    if quantisation.ignore:
        entry["ignore"] = list(quantisation.ignore)
    if quantisation.lm_head_fp32:
        entry["lm_head_fp32"] = True
    return entry


def tensor_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Read the shapes of the tensors in a folder's safetensors files, by name. Raises OSError, and ValueError, KeyError
    or TypeError for a file that is none."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        entries = _read_header(file)[0].items()
        shapes |= {name: _shape(entry["shape"]) for name, entry in entries if name != "__metadata__"}
    return shapes


def tensor_names(file: Path) -> list[str]:
    """Read the names of a safetensors file's tensors. Raises as `tensor_shapes` does."""
    return [name for name in _read_header(file)[0] if name != "__metadata__"]


def tensor_end(file: Path) -> int:
    """Return the bytes that a safetensors file has to have by its own header. Raises as `tensor_shapes` does."""
    header, length = _read_header(file)
    ends = (entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__")
    return _LENGTH_BYTES + length + max(ends, default=0)


def _shape(sizes: object) -> tuple[int, ...]:
    if not isinstance(sizes, list) or not all(type(size) is int for size in sizes):
        raise ValueError("a shape is no list of whole numbers")
    return tuple(sizes)


def _read_header(file: Path) -> tuple[dict[str, Any], int]:
    """Return the header and its length in bytes."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(_LENGTH_BYTES), "little")
        raw = opened.read(length) if length <= _LONGEST_HEADER else b""
    header = _json_object(raw.decode())
    if not all(isinstance(entry, dict) for entry in header.values()):
        raise ValueError("the header is no mapping of mappings")
    return header, length


def _json_object(text: str) -> dict[str, Any]:
    """Parse a JSON object. Raises ValueError for what is none."""
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(value, dict):
        raise ValueError("not a mapping")
    return value


Text_ = Annotated[str, Field(max_length=4096)]
Names_ = tuple[Text_, ...]
Count_ = Annotated[int, Field(ge=0, le=2**62)]
_STRICT = ConfigDict(strict=True, extra="forbid")
_part = dataclass(frozen=True, config=_STRICT)  # numbers may be infinite: the error of a layer that answers nothing


@_part
class LayerError:
    """One layer of the engine: linears that it fuses, such as q, k and v, or one of the two GEMMs of all experts."""

    layer: Names_
    """Names of the layer in an `ignore` list, by which it is kept in BF16."""
    linears: Annotated[Names_, Field(min_length=1)]
    weight_error: float
    """Relative error of the weights, |W' - W| / |W|, Frobenius."""
    output_error: float
    """Relative error of the outputs, |y' - y| / |y|, over the calibration tokens: weights and activations by the codec,
    the layer's inputs exact, with smoothing."""
    output_error_plain: float
    """Relative error of the outputs without smoothing."""
    stays_in_bf16: Annotated[bool, Field(validation_alias=AliasChoices("stays_in_bf16", "kept"))]
    """Whether the layer stays in BF16, by the mismatch budget or because the user's `ignore` names it. A profile of an
    earlier version has it as `kept`."""
    multiplications: Count_ = 0
    """Number of multiplications for one token; 0 where nobody counted them."""
    contribution: float | None = None
    """Mismatch that quantising this layer of the engine alone adds, nats per token; the same for the two GEMMs of
    experts. None where it was not measured."""


@_part
class NotSmoothed:
    """A norm, or a linear layer that others could be smoothed through, that smoothing cannot divide."""

    source: Text_
    """Name of the layer."""
    why: Text_


@_part
class Predicted:
    """The mismatch to expect between BF16 and quantised rollouts, over the calibration tokens; nats."""

    tokens: Count_
    kl: float
    """Exact KL(quantised || BF16) of the next-token distributions, the mean over positions: what `mismatch_k3_kl` of a
    run estimates."""
    k3_kl: float
    """The k3 estimate on the text's own next tokens."""
    kl_tokens: float
    """The k1 estimate on the text's own next tokens."""
    probs_diff_mean: float
    weight_max: float


@_part
class Memory:
    """Bytes of parameters and their codes that were alive at once, and those of the largest decoder layer."""

    peak_bytes: Count_
    largest_layer_bytes: Count_
    model_bytes: Count_


@_part
class Settings:
    strength: float = 0.5
    """Alpha of SmoothQuant's rule; 0: off."""
    error_budget: float | None = None
    """Error budget of profiles that earlier versions made: the error of a layer's outputs above which it was kept."""
    mismatch_budget: float | None = None
    """Mismatch budget, nats per token; None keeps no layer."""
    measure_above: float | None = None
    """Mismatch, nats per token, above which the contributions of the layers are measured; None: never."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Temperature of the rollouts."""
    top_p: float = 1.0
    """Top-p of the rollouts."""
    top_k: Count_ = 0
    """Top-k of the rollouts; 0: all words."""
    response_tokens: Count_ = 32
    """Most tokens of the model's own responses to the prompts."""
    ignore: Names_ = ()
    prompts: Count_ = 64
    """Number of prompts in the calibration text."""
    max_tokens: Count_ = 2048
    """Most tokens of the calibration text."""


@_part
class Origin:
    kind: Text_
    """Kind of profile: `calibrated`, `donor` or `flashrl`."""
    model: Text_
    """Folder or hub name of the model."""
    revision: Text_ = ""
    model_hash: Text_ = ""
    """SHA-256 of the model's files, or empty."""
    data_hash: Text_ = ""
    """SHA-256 of the calibration data or, for `donor`, of the donor's files; or empty."""
    donor: Text_ = ""
    """Donor: the W8A8 checkpoint or FlashRL's file."""
    versions: dict[str, Text_ | None] = Field(default_factory=dict)
    """Versions of the packages that made the profile."""


@_part
class _Group:
    """As `quant.profile.SmoothingGroup`."""

    linears: Names_
    source: Text_ = Field(validation_alias=AliasChoices("source", "norm"))
    head_dim: Annotated[int, Field(ge=0, le=_LARGEST_HEAD)] = 0
    readers_of_head: Annotated[int, Field(ge=1, le=_LARGEST_HEAD)] = 1

    @model_validator(mode="after")
    def _has_heads(self) -> Self:
        if self.readers_of_head > 1 and not self.head_dim:
            raise ValueError("heads are shared, and have no size")
        return self


class _Header(BaseModel):
    """As `quant.profile.Profile.header` writes it."""

    model_config = _STRICT

    schema_version: int
    kind: Text_
    model: Text_
    revision: Text_
    model_hash: Text_
    data_hash: Text_
    donor: Text_
    versions: dict[str, Text_ | None]
    scheme: Annotated[Scheme, Field(strict=False)]
    settings: Settings
    smoothing: tuple[_Group, ...]
    layers: tuple[LayerError, ...]
    not_smoothed: tuple[NotSmoothed, ...] = ()
    architecture: Text_ = ""
    suggested_ignore: Names_
    predicted: Predicted | None
    predicted_all: Predicted | None = None
    memory: Memory | None
