"""What the trainings of `benchmarks.step` took: the file that an interrupted benchmark continues with, and the page."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from appliance.errors import TrainingError
from appliance.terms.counts import counted
from benchmarks.demo import MAX_BUSY
from benchmarks.step.systems import PROMPTS, RESPONSE_TOKENS, SAMPLES, VERL, Lines, Setting

PHASES = ("rollout_s", "logprob_s", "update_s", "sync_s")
_HEAD = ("system", "a step, s", "spread", "steps", "÷ ours", "tokens of a response")

ABOUT = (
    "How long does a training step of a real model take with this program, and with what people would use instead? *a",
    "step* is the median of the counted steps, *spread* the smallest and the largest of them, *÷ ours* their median",
    "as a multiple of ours. The last four columns are the parts of a step, in seconds; `-` where a system does not",
    "report them or has none.",
)
_BARE_VERL = """\
*verl* is version 0.9.1 by its own entry point and with its own settings. On a CPU it does not run without three
additions, and has no others: a platform for a CPU, a process group that torch does not refuse, and vLLM's own layerwise
reload in verl's extension of the worker, without which vLLM's CPU kernels take no second set of weights. A head that is
tied to the embedding is packed again with it: the reload leaves it out."""
_BYPASS = """\
*verl-bypass* takes the rollouts' log-probs for the old ones, where *verl* computes them in a pass of its own."""
_UNCORRECTED = """\
*trl-vllm-uncorrected* leaves out the importance sampling that is TRL's default for what vLLM sampled, and with it a
forward for old log-probs."""


@dataclass(frozen=True)
class Measured:
    """One training of a system: what its steps took, without the first one."""

    system: str
    round: int
    """Number of its round, from 1; 0: it tries a setting."""
    setting: str
    """The setting of a peer, in words; empty for ours."""
    step_s: tuple[float, ...]
    """Seconds of each step: generation, everything computed of it, the update, and the weights' way to the engine.
    Empty where the training failed."""
    response_tokens: tuple[float, ...]
    """Mean tokens of a response, of each step."""
    phases_s: dict[str, float]
    """Median seconds of a step's phases; empty for systems that do not say them."""
    busy: float
    """Share of all cores that other processes used just before it started, 0..1."""
    failure: str = ""
    """The end of what a training printed that failed."""


def summary(
    system: str, *, round_number: int, setting: Setting | None, lines: Lines, busy: float, failure: str = ""
) -> Measured:
    """Summarise a training's lines, ours or a peer's."""
    phases = {
        name: median(line[name] for line in lines) for name in PHASES if lines and all(name in line for line in lines)
    }
    return Measured(
        system=system,
        round=round_number,
        setting=str(setting or ""),
        step_s=tuple(line["step_s"] for line in lines),
        response_tokens=tuple(line["response_tokens_mean"] for line in lines),
        phases_s=phases,
        busy=busy,
        failure=failure,
    )


class Trainings:
    """The trainings that have ended, one JSON line each, below a first line that says what they are of."""

    about: dict[str, Any]
    """Commit, host and steps, with which a training may be compared."""

    def __init__(self, path: Path, *, about: dict[str, Any], measured: list[Measured]) -> None:
        self.path = path
        self.about = about
        self.measured = measured

    @classmethod
    def open(cls, path: Path, *, about: dict[str, Any]) -> Trainings:
        """The file's trainings, or a new file. Raises TrainingError for a file that is of something else."""
        if not path.exists():
            path.write_text(json.dumps(about) + "\n")
        first, *others = path.read_text().splitlines()
        known = json.loads(first)
        if differ := [key for key in about if key != "date" and about[key] != known.get(key)]:
            was = ", ".join(f"{key} {known.get(key)!r}, now {about[key]!r}" for key in differ)
            raise TrainingError(
                f"{path} has trainings that cannot stand beside new ones: {was}",
                hint="give another --folder, or remove the file",
            )
        return cls(path, about=known, measured=[Measured(**_of_json(line)) for line in others])

    def find(self, system: str, *, round_number: int, setting: Setting | None) -> Measured | None:
        return next(
            (
                one
                for one in self.measured
                if (one.system, one.round, one.setting) == (system, round_number, str(setting or ""))
            ),
            None,
        )

    def add(self, measured: Measured) -> None:
        self.measured.append(measured)
        with self.path.open("a") as file:
            file.write(json.dumps(asdict(measured)) + "\n")


def _of_json(line: str) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in json.loads(line).items()}


def document(trainings: Trainings, *, systems: Iterable[str], rounds: int) -> dict[str, Any]:
    """What `step.json` has. systems: those of this command, which the file may have more than."""
    names = list(systems)
    measured = [asdict(one) for one in trainings.measured if one.system in names and one.round <= rounds]
    return {"schema_version": 2, **trainings.about, "rounds": rounds, "systems": names, "measured": measured}


def page(content: dict[str, Any]) -> str:
    """The tables: each system's median step, its spread, its ratio to ours and its phases; and what was tried."""
    measured = [Measured(**{**one, "step_s": tuple(one["step_s"])}) for one in content["measured"]]
    of_rounds = [one for one in measured if one.round]
    ours = median(_seconds(of_rounds, "ours")) if "ours" in content["systems"] else None
    rows = []
    for system in content["systems"]:
        trainings = [one for one in of_rounds if one.system == system]
        seconds = _seconds(of_rounds, system)
        mark = "~" if any(one.busy > MAX_BUSY for one in trainings) else ""
        tokens = median(value for one in trainings for value in one.response_tokens)
        ratio = "-" if ours is None else f"{median(seconds) / ours:.2f}"
        spread = f"{min(seconds):.1f} to {max(seconds):.1f}"
        cells = (system, f"{mark}{median(seconds):.1f}", spread, str(len(seconds)), ratio, f"{tokens:.1f}")
        rows.append(f"| {' | '.join((*cells, *(_phase(trainings, name) for name in PHASES)))} |")
    old = f" *old* is commit {content['old']}." if content["old"] else ""
    kernels = " Every process computed as on a CPU with AVX2 and without AVX-512." if content["avx2"] else ""
    head = (*_HEAD, "rollout", "log-probs", "update", "sync")
    return "\n".join(
        [
            "# A step on a real model",
            "",
            *ABOUT,
            "",
            "Made by `python -m benchmarks.step`; every number is in [step.json](step.json).",
            f"Begun on {content['date']}, commit {content['commit']}: {content['processor']}, "
            f"{content['cores']} cores, CPython {content['python']}. Times with ~ were taken while the machine had "
            f"other work.{kernels}",
            "",
            f"{content['model']}, {PROMPTS} prompts with {SAMPLES} samples of at most {RESPONSE_TOKENS} tokens, one "
            f"update a step. {counted(content['rounds'], 'round')} in which each system trained once, in fresh "
            f"processes, for {content['steps']} steps. The first step of a training is left out.{old}",
            "",
            f"| {' | '.join(head)} |",
            f"|{' --- |' * len(head)}",
            *rows,
            *_tried(measured),
            *_about_peers(content["systems"]),
            "",
        ]
    )


def _seconds(measured: list[Measured], system: str) -> list[float]:
    return [seconds for one in measured if one.system == system for seconds in one.step_s]


def _tried(measured: list[Measured]) -> list[str]:
    """The settings of peers that were tried, one short training each: in the rounds each peer has the fastest."""
    tried = [one for one in measured if not one.round]
    if not tried:
        return []
    rows = [f"| {one.system} | {one.setting} | {_seconds_or_failure(one)} |" for one in tried]
    text = "Settings that were tried before, one step counted of each. In the rounds a peer has its fastest one."
    return ["", text, "", "| system | setting | a step, s |", "| --- | --- | --- |", *rows]


def _about_peers(systems: list[str]) -> list[str]:
    """Return what a reader has to know of the peers' rows, where there are some."""
    texts = [_UNCORRECTED] if "trl-vllm-uncorrected" in systems else []
    texts += [_BARE_VERL] if set(VERL) & set(systems) else []
    texts += [_BYPASS] if "verl-bypass" in systems else []
    return [line for text in texts for line in ("", text)]


def _seconds_or_failure(measured: Measured) -> str:
    if not measured.step_s:
        return "failed"
    return f"{'~' if measured.busy > MAX_BUSY else ''}{median(measured.step_s):.1f}"


def _phase(trainings: list[Measured], name: str) -> str:
    values = [one.phases_s[name] for one in trainings if name in one.phases_s]
    return f"{median(values):.1f}" if values else "-"
