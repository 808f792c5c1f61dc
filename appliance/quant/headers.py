"""Which of a folder's files hold its weights, and what is wrong with the files themselves. Imports no torch.

transformers reads `model.safetensors`, else the files that the index names. An engine of ours reads the files that the
index names, else all there are, as vLLM's own loader does. Where they would read different files a folder is refused.
Neither reads Mistral's `consolidated*.safetensors`, which have all weights once more in a format that only vLLM knows:
without an index vLLM's own loader would take them for transformers' files, and engine/first_load.py leaves them out.
"""

from __future__ import annotations

import json
import os.path
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from appliance.quant.files import tensor_end, tensor_names

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
ADAPTER = "adapter_config.json"
MISTRALS = "consolidated"  # what its files' names begin with
_MOST_NAMED = 3
_COPY_AGAIN = "copy or download the model again"
_SAVE_AGAIN = "load the model with transformers and save it again"
_NO_FILE = (OSError, ValueError, TypeError, KeyError, AttributeError, IndexError)  # what reading something else raises


@dataclass(frozen=True)
class Damage:
    """Problem with a model's files of weights; empty where there is none."""

    problems: tuple[str, ...] = ()
    remedy: str = ""

    def __bool__(self) -> bool:
        return bool(self.problems)


def weight_files(folder: Path) -> tuple[Path, ...]:
    """List the files that transformers reads, sorted; none where it would find none. Raises OSError, and ValueError,
    TypeError or KeyError for an index that is none."""
    if os.path.isfile(folder / WHOLE):
        return (folder / WHOLE,)
    index = read_index(folder)
    return tuple(folder / name for name in sorted(set(index.values())))


def read_index(folder: Path) -> Mapping[str, str]:
    """Read an index as tensor -> the file that has it; empty without an index. Raises OSError, and ValueError for a
    file that is no index."""
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
    """List the files that the index names and that are not there, as after a download that broke off. Empty where the
    index cannot be read, which is damage."""
    try:
        index = read_index(folder)
    except (OSError, ValueError):
        return ()
    return tuple(name for name in sorted(set(index.values())) if not os.path.isfile(folder / name))


def damage(folder: Path) -> Damage:
    """Find what is wrong with the files of weights, whatever the model: files that the index names and that are not
    there, files that are cut short or are something else, and what transformers and vLLM would not read alike."""
    try:
        index = read_index(folder)
    except PermissionError:
        return Damage()  # preflight/access.py says so
    except (OSError, ValueError):
        return Damage((f"{INDEX} cannot be read",), _COPY_AGAIN)
    broken = [f"{name} is missing, {INDEX} names it" for name in missing_shards(folder)]
    broken += [problem for file in sorted(folder.glob("*.safetensors")) if (problem := _cut_short(file))]
    problems = [(problem, _COPY_AGAIN) for problem in broken]
    problems = problems or _differing_files(folder, index=index) or _differing_tensors(folder, index=index)
    more = len(problems) - _MOST_NAMED
    shown = [problem for problem, _ in problems[:_MOST_NAMED]]
    remedies = dict.fromkeys(remedy for _, remedy in problems[:_MOST_NAMED])
    return Damage((*shown, f"and {more} more") if more > 0 else tuple(shown), "; ".join(remedies))


def _cut_short(file: Path) -> str:
    try:
        num_needed, has = tensor_end(file), file.stat().st_size
    except PermissionError:
        return ""
    except _NO_FILE:
        return f"{file.name} is not a safetensors file"
    return "" if has >= num_needed else f"{file.name} has {has:,} of {num_needed:,} bytes"


def _differing_files(folder: Path, *, index: Mapping[str, str]) -> list[tuple[str, str]]:
    """Find where transformers and vLLM would read different files: (problem, remedy)."""
    there = {file.name for file in folder.glob("*.safetensors") if not file.name.startswith(MISTRALS)}
    problems: list[tuple[str, str]] = []
    if index and WHOLE in there and set(index.values()) != {WHOLE}:
        problem = f"{INDEX} does not name {WHOLE}: transformers reads the one, vLLM the others"
        problems.append((problem, f"take {WHOLE} out of the folder, or {INDEX} and the files that it names"))
    elif there and not index and WHOLE not in there:
        first = min(there)
        remedy = f"rename it to {WHOLE}" if len(there) == 1 else f"copy or download {INDEX}, too"
        problems.append((f"there is no {WHOLE}, and no {INDEX} that names {first}", remedy))
    elif not index and len(there) > 1:
        other = min(there - {WHOLE})
        problem = f"{other} lies beside {WHOLE} and no {INDEX} names it: transformers leaves it out, vLLM reads it"
        problems.append(
            (problem, f"take {other} out of the folder; or copy or download {INDEX}, if it is of the model")
        )
    if os.path.isfile(folder / ADAPTER):
        problem = f"{ADAPTER}: an adapter that transformers would load with the model, and vLLM would not"
        problems.append(
            (problem, f"merge the adapter into the model and save that, or take {ADAPTER} out of the folder")
        )
    return problems


def _differing_tensors(folder: Path, *, index: Mapping[str, str]) -> list[tuple[str, str]]:
    """List where the index and its files differ, and tensors that two files have: (problem, remedy)."""
    file_of: dict[str, str] = {}
    problems: list[tuple[str, str]] = []
    for name in sorted(set(index.values())):
        for tensor in tensor_names(folder / name):
            if tensor in file_of:
                problems.append((f"{tensor} is in {file_of[tensor]} and in {name}", _SAVE_AGAIN))
            file_of[tensor] = name
    lost = sorted(set(index) - set(file_of))
    return problems + [(f"{index[tensor]} has no {tensor}, {INDEX} says it has", _COPY_AGAIN) for tensor in lost]
