"""Which of a folder's files hold its weights, and what is wrong with the files themselves. Imports no torch.

transformers reads `model.safetensors`, else the files that the index names. An engine of ours reads the files that the
index names, else all there are, as vLLM's own loader does. A folder in which they would read different files is refused.
Neither reads Mistral's `consolidated*.safetensors`, which have all weights once more in a format that only vLLM knows:
without an index vLLM's own loader would take them for transformers' files, and engine/first_load.py leaves them out.
"""

from __future__ import annotations

import json
import os.path
from collections.abc import Mapping
from pathlib import Path

from appliance.quant.files import tensor_end, tensor_names

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
ADAPTER = "adapter_config.json"
MISTRALS = "consolidated"  # what its files' names begin with
_MOST_NAMED = 3
_NO_FILE = (OSError, ValueError, TypeError, KeyError, AttributeError, IndexError)  # what reading something else raises


def weight_files(folder: Path) -> tuple[Path, ...]:
    """The files that transformers reads, sorted; none where it would find none. Raises OSError, and ValueError,
    TypeError or KeyError for an index that is none."""
    if os.path.isfile(folder / WHOLE):
        return (folder / WHOLE,)
    index = read_index(folder)
    return tuple(folder / name for name in sorted(set(index.values())))


def read_index(folder: Path) -> Mapping[str, str]:
    """Tensor -> the file that has it; empty without an index. Raises OSError, and ValueError for what is none."""
    try:
        text = (folder / INDEX).read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    try:
        index = json.loads(text)["weight_map"]
    except (TypeError, KeyError, RecursionError) as error:
        raise ValueError("an index without a weight_map") from error
    if not isinstance(index, dict) or not all(isinstance(file, str) for file in index.values()):
        raise ValueError("a weight_map that is no mapping of names to files")
    return index


def missing_shards(folder: Path) -> tuple[str, ...]:
    """The files that the index names and that are not there: of a download that broke off. Empty where the index
    cannot be read, which is damage."""
    try:
        index = read_index(folder)
    except (OSError, ValueError):
        return ()
    return tuple(name for name in sorted(set(index.values())) if not os.path.isfile(folder / name))


def damage(folder: Path) -> tuple[str, ...]:
    """What is wrong with the files of weights, whatever the model: files that the index names and that are not there,
    files that are cut short or something else, and what transformers and vLLM would not read alike."""
    try:
        index = read_index(folder)
    except PermissionError:
        return ()  # preflight/access.py says so
    except (OSError, ValueError):
        return (f"{INDEX} cannot be read",)
    names = sorted(set(index.values()))
    problems = [f"{name} is missing, {INDEX} names it" for name in names if not os.path.isfile(folder / name)]
    problems += [problem for file in sorted(folder.glob("*.safetensors")) if (problem := _cut_short(file))]
    problems = problems or _other_files(folder, index=index) or _other_tensors(folder, index=index)
    more = len(problems) - _MOST_NAMED
    return (*problems[:_MOST_NAMED], f"and {more} more") if more > 0 else tuple(problems)


def _cut_short(file: Path) -> str:
    try:
        wanted, has = tensor_end(file), file.stat().st_size
    except PermissionError:
        return ""
    except _NO_FILE:
        return f"{file.name} is not a safetensors file"
    return "" if has >= wanted else f"{file.name} has {has:,} of {wanted:,} bytes"


def _other_files(folder: Path, *, index: Mapping[str, str]) -> list[str]:
    """Where transformers and vLLM would read different files."""
    there = {file.name for file in folder.glob("*.safetensors") if not file.name.startswith(MISTRALS)}
    problems: list[str] = []
    if index and WHOLE in there and set(index.values()) != {WHOLE}:
        problems.append(f"{INDEX} does not name {WHOLE}: transformers reads the one, vLLM the others")
    elif there and not index and WHOLE not in there:
        problems.append(f"there is no {WHOLE}, and no {INDEX} that names {sorted(there)[0]}")
    elif not index and len(there) > 1:
        other = min(there - {WHOLE})
        problems.append(
            f"{other} lies beside {WHOLE} and no {INDEX} names it: transformers leaves it out, vLLM reads it"
        )
    if os.path.isfile(folder / ADAPTER):
        problems.append(f"{ADAPTER}: an adapter that transformers would load with the model, and vLLM would not")
    return problems


def _other_tensors(folder: Path, *, index: Mapping[str, str]) -> list[str]:
    """What the index and its files do not say alike, and tensors that two files have."""
    file_of: dict[str, str] = {}
    problems: list[str] = []
    for name in sorted(set(index.values())):
        for tensor in tensor_names(folder / name):
            if tensor in file_of:
                problems.append(f"{tensor} is in {file_of[tensor]} and in {name}")
            file_of[tensor] = name
    lost = sorted(set(index) - set(file_of))
    return problems + [f"{index[tensor]} has no {tensor}, {INDEX} says it has" for tensor in lost]
