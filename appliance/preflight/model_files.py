"""What the files of a model, and of a profile for it, say without torch: names, headers and sizes."""

from __future__ import annotations

import json
import os.path
from dataclasses import dataclass
from pathlib import Path

from appliance.errors import EngineError
from appliance.quant.files import PROFILE_FILE, SMOOTHING, read_file_header, tensor_end, tensor_shapes
from appliance.record.plan import RunPlan
from appliance.terms.schemes import Scheme

INDEX = "model.safetensors.index.json"
_MOST_NAMED = 3


def damage(folder: Path) -> tuple[str, ...]:
    """What is wrong with the safetensors files: those that the index names and are not there, and those cut short."""
    missing = _missing_shards(folder)
    found = (
        [f"{INDEX} cannot be read"] if missing is None else [f"{name} is missing, {INDEX} names it" for name in missing]
    )
    found += [problem for file in sorted(folder.glob("*.safetensors")) if (problem := _cut_short(file))]
    more = len(found) - _MOST_NAMED
    return (*found[:_MOST_NAMED], f"and {more} more") if more > 0 else tuple(found)


def _missing_shards(folder: Path) -> list[str] | None:
    """Of the index, where there is one; None when it cannot be read."""
    try:
        files = set(json.loads((folder / INDEX).read_text())["weight_map"].values())
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    return sorted(str(name) for name in files if not os.path.isfile(folder / str(name)))


def _cut_short(file: Path) -> str:
    try:
        wanted, has = tensor_end(file), file.stat().st_size
    except PermissionError:
        return ""  # preflight/access.py says so
    except (OSError, ValueError, TypeError, KeyError, AttributeError, IndexError):
        return f"{file.name} is not a safetensors file"
    return "" if has >= wanted else f"{file.name} has {has:,} of {wanted:,} bytes"


@dataclass(frozen=True)
class _Profile:
    """norms: channels by name of the smoothed norm, as its scales in the file have them."""

    scheme: Scheme
    norms: tuple[tuple[str, int], ...]


def profile_problem(plan: RunPlan) -> str:
    """Why the folder of `quantization.profile` has no profile for this plan; empty where it has, or none is named."""
    if plan.profile is None or not plan.profile.source:
        return ""
    source = Path(plan.profile.source)
    if not os.path.isfile(source / PROFILE_FILE):
        return f"{source}: the folder has no {PROFILE_FILE}"
    try:
        profile = _read(source)
    except EngineError as error:
        return error.message
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        return f"{source / PROFILE_FILE}: its header cannot be used: {type(error).__name__}: {error}"
    if profile.scheme is not plan.profile.scheme:
        return f"{source}: a profile for `{profile.scheme}`, and the plan's scheme is `{plan.profile.scheme}`"
    return _of_another_model(profile, source=source, model=Path(plan.model.path))


def _read(source: Path) -> _Profile:
    """Raises EngineError for what is no profile; KeyError, TypeError and ValueError for a header that lacks a part."""
    header, shapes = read_file_header(source), tensor_shapes(source)
    norms = [each["norm"] for each in header["smoothing"]]
    if flat := [norm for norm in norms if len(shapes[SMOOTHING + norm]) != 1]:
        raise ValueError(f"the scales of {flat[0]} are no vector")
    return _Profile(Scheme(header["scheme"]), tuple((norm, shapes[SMOOTHING + norm][0]) for norm in norms))


def _of_another_model(profile: _Profile, *, source: Path, model: Path) -> str:
    """What the profile smooths and the model has not; nothing of a model that is not here yet, or cannot be read."""
    try:
        have = tensor_shapes(model) if model.is_absolute() else {}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return ""  # the model's own finding
    for norm, channels in profile.norms if have else ():
        if norm not in have:
            return f"{source}: of another model: it smooths {norm}, which {model} does not have"
        if have[norm] != (channels,):
            return f"{source}: of another model: {norm} has {channels} channels there and {list(have[norm])} in {model}"
    return ""
