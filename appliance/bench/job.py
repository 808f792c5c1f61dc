"""What one benchmark measures, as a value that goes to its child process, and what comes back."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from appliance.errors import RecipeError
from appliance.terms.schemes import Scheme
from appliance.terms.settings import Quantisation, quantisation_from_config
from appliance.terms.shapes import KNOWN, ModelShape

GIB = 1 << 30
PROMPT_TOKENS = 16


@dataclass(frozen=True)
class Shapes:
    """A Qwen2 of these dimensions with random weights. The vocabulary is small: the layers are what is measured, and
    embedding, head and sampling of a full vocabulary would weigh on few layers as they do not on all of them."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    layers: int
    vocabulary: int = 1024
    batch: int = 64
    new_tokens: int = 128

    @property
    def model(self) -> ModelShape:
        return ModelShape(hidden=self.hidden, intermediate=self.intermediate, heads=self.heads, kv_heads=self.kv_heads)


def _layers_of(name: str, *, layers: int) -> Shapes:
    """Some layers of a model that we know."""
    whole = KNOWN[name]
    return Shapes(whole.hidden, whole.intermediate, heads=whole.heads, kv_heads=whole.kv_heads, layers=layers)


NAMED_SHAPES = {
    "qwen2.5-0.5b": _layers_of("Qwen/Qwen2.5-0.5B-Instruct", layers=4),
    "qwen2.5-1.5b": _layers_of("Qwen/Qwen2.5-1.5B-Instruct", layers=4),
    "qwen2.5-7b": _layers_of("Qwen/Qwen2.5-7B-Instruct", layers=6),
    "qwen2.5-32b": _layers_of("Qwen/Qwen2.5-32B", layers=1),
}


@dataclass(frozen=True)
class Workload:
    """The rollouts that every engine makes. model_path: a checkpoint, empty for `shapes`.

    prompts_parquet: where the prompts come from, empty for `shapes`.  temperature > 0 samples, 0 is greedy.
    """

    model_path: str
    trust_remote_code: bool
    prompts_parquet: str
    num_prompts: int
    samples_per_prompt: int
    max_prompt_tokens: int
    new_tokens: int
    temperature: float
    top_p: float
    shapes: Shapes | None

    @property
    def sequences(self) -> int:
        """How many are generated at once when there is room."""
        return self.num_prompts * self.samples_per_prompt

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return self.max_prompt_tokens + self.new_tokens


@dataclass(frozen=True)
class Job:
    """engines[0] is the base of every ratio.  pairs: interleaved repetitions, after one warm-up of each.

    kv_bytes: KV cache of each engine; with `memory_bytes` it is what the weights leave of that. Both per worker.
    results: where measurements go.  facts: where each engine says what it holds.
    """

    workload: Workload
    engines: tuple[Quantisation, ...]
    tensor_parallel: int
    pairs: int
    kv_bytes: int
    memory_bytes: int | None
    seed: int
    results: str
    facts: str

    @property
    def schemes(self) -> tuple[Scheme, ...]:
        return tuple(engine.scheme for engine in self.engines)

    def to_json(self) -> str:
        return json.dumps({**dataclasses.asdict(self), "engines": [each.to_config() for each in self.engines]})


@dataclass(frozen=True)
class EngineFacts:
    """What the workers of an engine hold, summed. kernels: name and number of layers, of one worker.

    weight_bytes: each weight once, in the form that is multiplied.  kv_bytes: of the KV cache.
    sequences: how many of the longest fit into the KV cache at once.
    """

    scheme: Scheme
    weight_bytes: int
    kv_bytes: int
    sequences: int
    kernels: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Measurement:
    """One repetition of one scheme: generated tokens, and the seconds they took."""

    pair: int
    scheme: Scheme
    tokens: int
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


@dataclass(frozen=True)
class Verdict:
    """Medians over the pairs. ratio: of the pairwise ratios to the base scheme."""

    scheme: Scheme
    tokens_per_s: float
    ratio: float
    ratio_min: float
    ratio_max: float


def read_job(text: str) -> Job:
    raw = json.loads(text)
    workload = raw["workload"]
    shapes = workload["shapes"]
    return Job(
        **{
            **raw,
            "engines": tuple(quantisation_from_config(each) for each in raw["engines"]),
            "workload": Workload(**{**workload, "shapes": Shapes(**shapes) if shapes else None}),
        }
    )


def read_measurements(path: Path) -> list[Measurement]:
    """Whole lines only: the child may be writing the last one."""
    return [Measurement(**{**raw, "scheme": Scheme(raw["scheme"])}) for raw in map(json.loads, _whole_lines(path))]


def read_facts(path: Path) -> list[EngineFacts]:
    return [facts_from_json(line) for line in _whole_lines(path)]


def facts_from_json(text: str) -> EngineFacts:
    raw = json.loads(text)
    kernels = tuple((name, count) for name, count in raw["kernels"])
    return EngineFacts(**{**raw, "scheme": Scheme(raw["scheme"]), "kernels": kernels})


def _whole_lines(path: Path) -> list[str]:
    text = path.read_text() if path.exists() else ""
    return text[: text.rfind("\n") + 1].splitlines()


def judge(measured: list[Measurement], *, schemes: tuple[Scheme, ...]) -> list[Verdict]:
    """One verdict per scheme, in order. Only complete pairs count; there must be one."""
    speed = {(m.pair, m.scheme): m.tokens_per_s for m in measured}
    pairs = [p for p in sorted({m.pair for m in measured}) if all((p, scheme) in speed for scheme in schemes)]
    verdicts = []
    for scheme in schemes:
        ratios = [speed[p, scheme] / speed[p, schemes[0]] for p in pairs]
        verdicts.append(
            Verdict(
                scheme=scheme,
                tokens_per_s=median(speed[p, scheme] for p in pairs),
                ratio=median(ratios),
                ratio_min=min(ratios),
                ratio_max=max(ratios),
            )
        )
    return verdicts


def parse_shapes(text: str) -> Shapes:
    """`qwen2.5-7b`, or `hidden=...,intermediate=...,heads=...,kv_heads=...,layers=...`, or a name and changes:
    `qwen2.5-7b,layers=1,batch=16`. Raises RecipeError with every problem."""
    first, *rest = text.split(",")
    base = NAMED_SHAPES.get(first)
    changes = rest if base else [first, *rest]
    names = [field.name for field in dataclasses.fields(Shapes)]
    given: dict[str, int] = {}
    problems: list[tuple[str, str]] = []
    for change in changes:
        name, _, value = change.partition("=")
        if name not in names or not value.isdecimal() or int(value) < 1:
            known = ", ".join([*NAMED_SHAPES, *(f"{each}=N" for each in names)])
            problems.append((f"--shapes {text}: `{change}` is not a size", f"use {known}"))
        else:
            given[name] = int(value)
    values = (dataclasses.asdict(base) if base else {}) | given
    missing = [f.name for f in dataclasses.fields(Shapes) if f.default is dataclasses.MISSING and f.name not in values]
    if missing and not problems:
        problems.append((f"--shapes {text}: {', '.join(missing)} missing", "or begin with a name such as qwen2.5-7b"))
    if not problems and values["hidden"] % values["heads"]:
        problems.append((f"--shapes {text}: heads must divide hidden", "use the model's own numbers"))
    if problems:
        raise RecipeError(problems)
    return Shapes(**values)
