"""The page of a run, `report.html` in its folder: one HTML file that needs nothing else. `page` is pure; it is written
at a command, and by the launcher while the run lasts."""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from appliance import console
from appliance.errors import RecipeError
from appliance.files import write_whole
from appliance.finding import fault
from appliance.page import render
from appliance.record import events
from appliance.record.attestations import Attestation
from appliance.record.samples import Sample
from appliance.record.session import RunStatus, cannot_write
from appliance.record.state import median_tokens_per_s, remaining_s, step_seconds
from appliance.report import display, draw
from appliance.report.figures import GIB, curves, event_rows, timeline
from appliance.report.folder import RunReader, RunView, find_run, read_view, reading
from appliance.report.summary import REPORT_FILE, quoted_path, result, typed_path
from appliance.report.verdicts import verdicts

RELOAD_S = 10  # of a page of a run that lasts
_GRADES = {RunStatus.DONE: "fine", RunStatus.FAILED: "bad", RunStatus.STOPPED: "warn"}  # classes of the pages' style
_SHORT = 60  # characters of a model's text that go into a cell of a table
_MOST_TIMES = 12  # that one problem's answers are shown: the first, the last and some between
_EVERY_S = 10.0  # the page of a running run is written
_AT_LEAST_EVERY_S = 60.0  # without news, too: a page that was not written for long says that its launcher may be gone
_TIMES_ITS_COST = 50


@dataclass(frozen=True)
class ShownAnswer:
    """Response of a step, as the page shows it."""

    step: int
    sample: Sample
    is_graded: bool = True
    """Whether 1 is right and 0 wrong; in a task of the user's own nobody knows what a reward means."""

    @property
    def grade(self) -> str:
        """Class of the pages' style."""
        accuracy = self.sample.accuracy
        if accuracy is None or not self.is_graded:
            return ""
        return "fine" if accuracy >= 1 else "bad" if accuracy <= 0 else "warn"

    @property
    def accuracy(self) -> str:
        """Accuracy as the page shows it."""
        return "-" if self.sample.accuracy is None else f"{self.sample.accuracy:g}"

    @property
    def reward(self) -> str:
        value = self.sample.accuracy if self.sample.reward is None else self.sample.reward
        return "-" if value is None else f"{value:.3g}"


@dataclass(frozen=True)
class PromptAnswers:
    """Answers to one prompt, at least one."""

    name: str
    """Name that consists of letters and digits."""
    title: str
    answers: list[ShownAnswer]

    @property
    def prompt(self) -> str:
        return self.answers[0].sample.prompt

    @property
    def truth(self) -> str:
        return self.answers[-1].sample.truth

    @property
    def shown(self) -> list[ShownAnswer]:
        """Some of the answers."""
        return _some(self.answers)


def page(view: RunView, *, now: float, awaits_restart: bool = False) -> str:
    """Render the whole document. Everything that a run, a recipe or a model wrote is escaped. now: Unix s; for a run
    that is not over, the time up to which the page reports.  awaits_restart: whether its launcher lives and may begin
    another attempt."""
    record = view.record
    code = "" if record.exit_code in (None, 0) else f", exit code {record.exit_code}"
    rows, left_out = event_rows(view)
    validation, training = _validation(view), _training(view)
    return render(
        "run.html.j2",
        title=f"{view.run_dir.name}: {record.state}",
        name=view.run_dir.name,
        state=f"{record.state}{code}",
        state_grade=_GRADES.get(record.state, "open"),
        about=_about(view, now=now, awaits_restart=awaits_restart),
        tiles=_tiles(view, now=now),
        verdicts=verdicts(view),
        curves=curves(view),
        timeline=timeline(view),
        events=rows,
        events_left_out=left_out,
        validation=validation,
        val_how=view.state.val_how,
        validation_by_step=_by_step(validation) if _are_short(validation) else [],
        training=training,
        training_is_short=_are_short(training),
        recipe_yaml=view.recipe_yaml,
        choices=[(each.key, each.value, each.why) for each in view.plan.choices],
        findings=[(what,) for what in view.events.findings.with_last()],
        attests=[_attest(each) for each in view.attests],
        versions=view.versions,
        argv=view.plan.argv,
        reload_s=RELOAD_S if view.is_live or awaits_restart else 0,
        written=now,
        forsaken="This page has not been rewritten for five minutes: the run's launcher may be gone. To rewrite it: "
        f"appliance report {quoted_path(view.run_dir)}",
    )


def _about(view: RunView, *, now: float, awaits_restart: bool) -> str:
    plan = view.plan
    where = "CPU" if plan.is_cpu else f"{plan.cluster.device}, {plan.cluster.nodes} × {plan.cluster.gpus_per_node}"
    written = datetime.datetime.fromtimestamp(now, tz=datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    live = ". The run is not over: the page is rewritten as it progresses, and reloads itself" if view.is_live else ""
    if awaits_restart:
        live = ". Another attempt may follow by itself: the page waits for it, and loads itself again"
    return f"{display.title(plan).partition(': ')[2]}; {where}. Written {written}{live}."


def _tiles(view: RunView, *, now: float) -> list[tuple[str, str]]:
    """Return (value, what it is) pairs."""
    state, rewards, per_step = view.state, result(view.state), step_seconds(view.state)
    peak = view.memory.peak
    took = (now if view.is_live else view.ended) - view.started if view.started else 0.0
    left = remaining_s(state, now=now) if view.is_live and state.work is None else None
    return [
        (f"{state.step} / {state.steps}", "steps" + (f", about {draw.duration(left)} left" if left else "")),
        (draw.number(rewards.after), f"reward, {draw.number(rewards.before)} before"),
        (draw.tokens_per_s(median_tokens_per_s(state)).removesuffix(" tokens/s"), "tokens/s of rollout, median"),
        ("-" if per_step is None else f"{per_step:.1f} s", "per step, median, all parts included"),
        (draw.duration(took), "in all" if len(view.attempts) < 2 else f"in all, {len(view.attempts)} attempts"),
        ("-" if peak is None else f"{peak / GIB:.1f} GiB", "memory at the peak"),
    ]


def _attest(attestation: Attestation) -> tuple[str, ...]:
    scheme, kernels = (
        attestation.scheme + (", emulated" if attestation.emulated else ""),
        attestation.detail.get("kernels"),
    )
    counts = kernels.items() if isinstance(kernels, dict) else ()
    details = [f"{count} × {name}" for name, count in counts]
    backward = attestation.detail.get("backward")
    if str(backward).endswith("emulated"):
        details.append(f"gradients in {backward}")
    return attestation.process, attestation.role, scheme, ", ".join(attestation.patches) or "none", ", ".join(details)


def _validation(view: RunView) -> list[PromptAnswers]:
    """Return one per problem, by its prompt: problems keep their order from one validation to the next."""
    by_prompt: dict[str, list[ShownAnswer]] = {}
    for samples in view.samples:
        for sample in samples.validation:
            answer = ShownAnswer(samples.step, sample, is_graded=not view.plan.task.is_own)
            by_prompt.setdefault(sample.prompt, []).append(answer)
    numbered = enumerate(by_prompt.values(), start=1)
    return [PromptAnswers(f"validation{number}", f"problem {number}", told) for number, told in numbered]


def _training(view: RunView) -> list[PromptAnswers]:
    """Return one per step, some of them, of one prompt: its best and its worst sample."""
    shown = _some([samples for samples in view.samples if samples.training])
    is_graded = not view.plan.task.is_own
    return [
        PromptAnswers(
            f"training{s.step}",
            f"step {s.step}",
            [ShownAnswer(s.step, each, is_graded=is_graded) for each in s.training],
        )
        for s in shown
    ]


def _are_short(prompts: Sequence[PromptAnswers]) -> bool:
    """Tell whether all texts fit into the cells of one table."""
    samples = [answer.sample for prompt in prompts for answer in prompt.answers]
    texts = [text for sample in samples for text in (sample.prompt, sample.response)]
    return all(len(text) <= _SHORT and "\n" not in text for text in texts) and not any(s.turns for s in samples)


def _by_step(prompts: Sequence[PromptAnswers]) -> list[tuple[int, list[ShownAnswer | None]]]:
    """Return some of the steps, each with the answer to every prompt."""
    steps = _some(sorted({answer.step for prompt in prompts for answer in prompt.answers}))
    answers = [{answer.step: answer for answer in reversed(prompt.answers)} for prompt in prompts]
    return [(step, [each.get(step) for each in answers]) for step in steps]


def _some(samples: list) -> list:
    """Return at most so many samples, evenly, the first and the last among them."""
    if len(samples) <= _MOST_TIMES:
        return samples
    return [samples[round(place * (len(samples) - 1) / (_MOST_TIMES - 1))] for place in range(_MOST_TIMES)]


def print_report(run: str, *, run_root: Path, output: Path | None) -> None:
    """Write the page again, and print its path. output: another file than the one in the run's folder. Raises
    RecipeError when there is no such run or it cannot be read, PreflightError when the page cannot be written."""
    run_dir = find_run(run, run_root=run_root)
    target = output or run_dir / REPORT_FILE
    if output is not None and os.path.isdir(output):  # unlike Path.is_dir it takes any text
        raise RecipeError([fault(("-o",), f"{output} is a folder", "name a file, or leave -o out")])
    with reading(run_dir):
        content = _content(read_view(run_dir), may_restart=False)
    try:
        write_whole(target, content, durable=False)
    except OSError as error:
        raise cannot_write(target, error, setting="-o") from error
    console.out(typed_path(target.absolute()))


def write_page(run: RunReader, *, target: Path, may_restart: bool = False) -> None:
    """Write the page of a run. may_restart: as for LivePage. Raises OSError and RecipeError."""
    write_whole(target, _content(run.view(), may_restart=may_restart), durable=False)


def _content(view: RunView, *, may_restart: bool) -> bytes:
    """Text that is no UTF-8 costs only itself. may_restart: as of LivePage."""
    awaits = may_restart and view.record.state is RunStatus.FAILED
    awaits = awaits and events.may_restart(view.run_dir, code=view.record.exit_code or 0)
    return page(view, now=time.time(), awaits_restart=awaits).encode(errors="replace")


class LivePage:
    """The page of a run while its launcher lives, written when something is new, and seldom enough to cost nothing.

    What shows a run must not end it: what goes wrong here is reported once. A disk that is full now may have room
    later, so a page that could not be written is tried again when it is due; after any other error none is written any
    more.
    """

    may_restart: bool
    """Whether a run that ended by a fault may restart by itself, so that its page is to load itself again."""

    def __init__(self, run_dir: Path) -> None:
        self.may_restart = False
        self._run_dir = run_dir
        self._run = RunReader(run_dir)
        self._next = 0.0
        self._stale = True
        self._written = 0.0
        self._warned = False
        self._broken = False

    def tick(self, *, news: bool, now: float) -> None:
        """Write the page when it is due. news: whether something is new.  now: s of a steady clock."""
        self._stale |= news or now >= self._written + _AT_LEAST_EVERY_S
        if not self._stale or now < self._next:
            return
        started = time.perf_counter()
        self.write()
        self._written = now
        cost = time.perf_counter() - started
        self._next = now + min(_AT_LEAST_EVERY_S, max(_EVERY_S, _TIMES_ITS_COST * cost))

    def write(self) -> None:
        if self._broken:
            return
        try:
            write_page(self._run, target=self._run_dir / REPORT_FILE, may_restart=self.may_restart)
        except Exception as error:  # the boundary, see above
            self._broken = not isinstance(error, OSError)
            if not self._warned:
                console.say(f"warning: {REPORT_FILE} cannot be written: {type(error).__name__}: {error}")
            self._warned = True
        else:
            self._stale = False
