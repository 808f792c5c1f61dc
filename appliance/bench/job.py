"""What one benchmark measures, as a value that goes to its child process, what comes back, and the verdict."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from statistics import median
from typing import TypeVar

from appliance.errors import RecipeError
from appliance.files import Frozen
from appliance.finding import Finding, fault
from appliance.plan.bench_results import SchemeResult
from appliance.terms.schemes import Scheme
from appliance.terms.settings import Dtype, Quantisation
from appliance.terms.shapes import KNOWN, ModelShape

GIB = 1 << 30
PROMPT_TOKENS = 16
PROMPT_WORDS = 500  # of a vocabulary, from word 1 on: prompts of `shapes` are made of them


class Shapes(Frozen):
    """A Qwen2 of these dimensions with random weights.

    With the default vocabulary, which is small, layers are what is measured. A model's own vocabulary adds its
    embedding, head and sampling, which weigh more beside a few layers than beside all of the model's: `parse_shapes`
    gives a name the model's own.
    """

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

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights in BF16, in which embedding and head count separately."""
        sizes = {"layers": self.layers, "vocab": self.vocabulary, "head_size": self.hidden // self.heads}
        return 2 * dataclasses.replace(self.model, **sizes).weights

    @property
    def workload(self) -> Workload:
        return Workload(num_prompts=self.batch, new_tokens=self.new_tokens, shapes=self)


class Workload(Frozen):
    """Rollouts that every engine makes. The defaults are those of `shapes`, which have no checkpoint."""

    model_path: str = ""
    trust_remote_code: bool = False
    prompts_parquet: str = ""
    """File that the prompts come from."""
    num_prompts: int
    samples_per_prompt: int = 1
    most_at_once: int | None = None
    """Sequences that an engine of a run has at one time; None: any number."""
    max_prompt_tokens: int = PROMPT_TOKENS
    new_tokens: int
    temperature: float = 1.0
    """Sampling temperature; 0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """Likeliest words that are drawn from; 0: all."""
    shapes: Shapes | None = None

    @property
    def sequences(self) -> int:
        """Number of sequences that are generated at once when there is room."""
        whole = self.num_prompts * self.samples_per_prompt
        return min(whole, self.most_at_once or whole)


_MODELS = {
    "qwen2.5-0.5b": ("Qwen/Qwen2.5-0.5B-Instruct", 4),
    "qwen2.5-1.5b": ("Qwen/Qwen2.5-1.5B-Instruct", 4),
    "qwen2.5-7b": ("Qwen/Qwen2.5-7B-Instruct", 6),
    "qwen2.5-32b": ("Qwen/Qwen2.5-32B", 1),
}
"""Name of the model and the number of its layers that are measured."""


def _layers_of(name: str, *, layers: int) -> Shapes:
    """Return the shapes of some layers of a model that we know."""
    whole = KNOWN[name]
    width = {"hidden": whole.hidden, "intermediate": whole.intermediate}
    return Shapes(**width, heads=whole.heads, kv_heads=whole.kv_heads, layers=layers)


NAMED_SHAPES = {short: _layers_of(name, layers=layers) for short, (name, layers) in _MODELS.items()}


class BenchJob(Frozen):
    workload: Workload
    engines: tuple[Quantisation, ...]
    """Engines to measure; the first is the base of every ratio."""
    eager: tuple[Scheme, ...]
    """Schemes whose engines have no CUDA graphs and no torch.compile, as in a run."""
    dtype: Dtype = Dtype.BF16
    tensor_parallel: int
    pairs: int
    """Interleaved repetitions, after one warm-up of each engine."""
    kv_bytes: int
    """KV cache of each engine, bytes per worker."""
    memory_bytes: int | None
    """Memory of each worker, bytes, of which the KV cache gets what the weights leave. None: the KV cache is
    `kv_bytes`."""
    seed: int
    results: str
    """File that measurements are written to."""
    facts: str
    """File that each engine writes its EngineFacts to."""

    @property
    def schemes(self) -> tuple[Scheme, ...]:
        return tuple(engine.scheme for engine in self.engines)


class EngineFacts(Frozen):
    """Contents of an engine's memory, summed over its workers."""

    scheme: Scheme
    weight_bytes: int
    """Bytes of the weights, each once, in the form that is multiplied."""
    kv_bytes: int
    sequences: int
    """Number of the longest sequences that fit into the KV cache at once."""
    kernels: tuple[tuple[str, int], ...]
    """Kernels of one worker: name and number of layers."""


class Measurement(Frozen):
    """One repetition of one scheme: tokens that were generated, and the seconds they took."""

    pair: int
    scheme: Scheme
    tokens: int
    seconds: float
    processor_s: float
    """Processor time of the measuring process, over all its threads: on a CPU that is its engine's time, without the
    waiting for other work on the host."""

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


Line = TypeVar("Line", Measurement, EngineFacts)


def read_lines(path: str, kind: type[Line]) -> list[Line]:
    """Read the whole lines of a file: the child may be writing the last one."""
    text = Path(path).read_text() if Path(path).exists() else ""
    return [kind.model_validate_json(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def judge_schemes(measured: list[Measurement], *, schemes: tuple[Scheme, ...]) -> list[SchemeResult]:
    """Judge the schemes: one verdict for each, in order, with ratios to the first. Only complete pairs count; there
    must be one."""
    speed = {(m.pair, m.scheme): m.tokens_per_s for m in measured}
    pairs = [p for p in sorted({m.pair for m in measured}) if all((p, scheme) in speed for scheme in schemes)]
    verdicts = []
    for scheme in schemes:
        ratios = [speed[p, scheme] / speed[p, schemes[0]] for p in pairs]
        verdicts.append(
            SchemeResult(
                scheme=scheme,
                tokens_per_s=median(speed[p, scheme] for p in pairs),
                ratio=median(ratios),
                ratio_min=min(ratios),
                ratio_max=max(ratios),
            )
        )
    return verdicts


def parse_shapes(text: str) -> Shapes:
    """Parse shapes: `qwen2.5-7b`, or `hidden=...,intermediate=...,heads=...,kv_heads=...,layers=...`, or a name and
    changes: `qwen2.5-7b,layers=1,batch=16`. A name has its model's vocabulary. Raises RecipeError with every
    problem."""
    first, *rest = text.split(",")
    base = NAMED_SHAPES.get(first)
    fields = Shapes.model_fields
    values = dict(base.replace(vocabulary=KNOWN[_MODELS[first][0]].vocab)) if base else {}
    option, faults = (f"--shapes {text}",), list[Finding]()
    for change in rest if base else [first, *rest]:
        name, _, value = change.partition("=")
        if name not in fields or not value.isdecimal() or int(value) < 1:
            known = ", ".join([*NAMED_SHAPES, *(f"{each}=N" for each in fields)])
            faults.append(fault(option, f"`{change}` is not a size", f"use {known}"))
        else:
            values[name] = int(value)
    missing = [name for name, field in fields.items() if field.is_required() and name not in values]
    if missing and not faults:
        faults.append(fault(option, f"{', '.join(missing)} missing", "or begin with a name such as qwen2.5-7b"))
    if faults:
        raise RecipeError(faults)
    shapes = Shapes(**values)
    if unfit := _unfit(shapes, option=option):
        raise RecipeError(unfit)
    return shapes


def _unfit(shapes: Shapes, *, option: tuple[str, ...]) -> list[Finding]:
    """Report what no engine takes. option: the place of each fault."""
    hint = "use the model's own numbers"
    faults = [fault(option, "heads must divide hidden", hint)] if shapes.hidden % shapes.heads else []
    faults += [fault(option, "kv_heads must divide heads", hint)] if shapes.heads % shapes.kv_heads else []
    if shapes.vocabulary <= PROMPT_WORDS:
        message = f"the prompts are made of words 1 to {PROMPT_WORDS}"
        faults.append(fault(option, message, f"use vocabulary={PROMPT_WORDS + 1} or more"))
    return faults
