"""Are the weights in a folder whole? Told from names, headers and sizes, without reading them."""

from __future__ import annotations

import json
import os.path
from pathlib import Path

from appliance.quant.files import tensor_end

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
