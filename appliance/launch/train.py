"""One run from its folder to its summary: prepare what the cache lacks, train, say how it went.

`run.json` is right at every moment: it is there from the start, follows the phases, and gets its end in every path,
Ctrl-C and errors of our own included. Only a SIGKILL of this process leaves it at `running`; then the folder's lock is
free, which `status` sees, and the subreaper has ended the children.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from appliance import console
from appliance.errors import ApplianceError, EngineError, PreflightError, TrainingError
from appliance.files import is_full
from appliance.finding import Finding, Severity
from appliance.launch.outcome import DONE, Child, Outcome, failed_outcome, interrupted_outcome
from appliance.launch.resume import Resume, begin_attempt
from appliance.launch.subreaper import SubreaperReport
from appliance.launch.supervise import GracefulStop, supervise
from appliance.preflight.access import write_token
from appliance.processes import find_processes, module_argv
from appliance.record.code import code_of
from appliance.record.events import Event, MemoryWatch, RunTail, append_event, append_failure, failure_event
from appliance.record.liveness import STACKS_FOLDER, dump_stacks, last_beat
from appliance.record.plan import RunPlan
from appliance.record.samples import SampleReader
from appliance.record.session import (
    RUN_FILE,
    RunStatus,
    Session,
    ask_to_stop,
    asked_to_stop,
    cannot_write,
    create_session,
    forget_stop,
)
from appliance.record.state import RunState, fold
from appliance.report import draw, summary
from appliance.report.answers import answers_table
from appliance.report.display import Progress, choose_progress, json_line
from appliance.report.page import LivePage
from appliance.signals import Interrupts
from appliance.tasks.prepare import is_prepared
from appliance.terms.counts import counted
from appliance.terms.environment import (
    LOG_DIR_VARIABLE,
    PLAN_VARIABLE,
    RAY_DIR_VARIABLE,
    RAY_OWN,
    RAY_TOKEN,
    RUN_VARIABLE,
    temporary_env,
    with_ray_token,
)
from appliance.terms.phases import AT_AN_ENGINE

_LOG_TAIL_BYTES = 65536
SAVING = "saving, then stopping (press Ctrl-C again to stop at once)"


@dataclass(frozen=True)
class Stage:
    """A step of a run between its preparation and its training. (The packages that define one read runs, so none is
    imported here.) Each of its functions may raise an ApplianceError."""

    child: Callable[[RunPlan], Child | None]
    """Function that makes the program to run; it gives None where there is nothing to do."""
    is_done: Callable[[RunPlan], bool]
    """Function that tells whether the result is there."""
    finish: Callable[[RunPlan], None]
    """Function that is called once the result is there."""


def run_training(
    plan: RunPlan,
    *,
    recipe_yaml: str,
    findings: Sequence[Finding],
    name: str | None,
    json_mode: bool,
    stages: Sequence[Stage] = (),
    quiet: bool = False,
    resume: Resume | None = None,
    may_restart: bool = False,
) -> int:
    """Run the plan and return the exit code; everything that a person should know has been printed.

    recipe_yaml: the resolved recipe, kept in the folder.  findings: what preflight let pass; warnings become notes.
    name: as the user gave it, None when the run's name was chosen.  stages: between preparation and training, in order.
    quiet: the caller says how it went; here only a live panel is shown, and why a run did not end well.
    resume: the run to continue, None for a new one.  may_restart: after a fault the caller may make another attempt:
    the run's lock is kept for it.
    Raises RecipeError (the name is in use) and PreflightError (a folder cannot be written, or not any more).
    """
    started = time.monotonic()
    with Interrupts() as interrupts, contextlib.ExitStack() as at_the_end:
        if resume is None:
            session = create_session(plan, recipe_yaml=recipe_yaml, is_chosen=name is None)
        else:
            session = begin_attempt(plan, resume=resume, recipe_yaml=recipe_yaml)
        at_the_end.enter_context(_host_is_to_blame(session.run_dir))
        page = LivePage(session.run_dir)
        at_the_end.callback(_pass_on, interrupts, run_dir=session.run_dir)  # one that came while the page was written
        at_the_end.callback(page.write)  # after the session's own end, which says in run.json how it went
        at_the_end.enter_context(session)
        for finding in findings:
            if finding.severity is Severity.WARNING:
                message = "; ".join(filter(None, (f"{finding.place}: {finding.message}", finding.remedy)))
                append_event(session.run_dir, kind="note", what=message, why="preflight")
        for code in code_of(plan):
            message = f"{code.path} is code that this run executes"
            append_event(session.run_dir, kind="note", what=message, why=f"SHA-256 {code.sha256}")
        progress = choose_progress(plan, json_mode=json_mode, quiet=quiet)
        training = _Training(plan, session, interrupts, progress, page, saved_step=resume.step if resume else 0)
        outcome = training.run(stages)
        if outcome.state is RunStatus.FAILED and training.state.failure is None:  # a child that died without a word
            with contextlib.suppress(OSError):  # a full disk: run.json says it as well
                append_event(session.run_dir, kind="failure", what=outcome.reason, exit_code=outcome.exit_code)
        outcome = _recorded(session, outcome)
        _pass_on(interrupts, run_dir=session.run_dir)
        page.may_restart = may_restart and not interrupts.names  # not where an error ends the launcher as well
        if may_restart:
            session.keep_lock()
    seconds = time.monotonic() - started
    with _reader_of(interrupts):
        _tell(plan, training.state, outcome=outcome, seconds=seconds, json_mode=json_mode, quiet=quiet)
    return outcome.exit_code


@contextlib.contextmanager
def _host_is_to_blame(run_dir: Path) -> Iterator[None]:
    """Raise PreflightError where a file of the run cannot be written: that is the host's fault."""
    try:
        yield
    except console.StdoutError:
        raise
    except OSError as error:
        name = error.filename  # None for a write, which is of a file that was opened
        if not (is_full(error) if name is None else Path(os.fsdecode(name)).is_relative_to(run_dir)):
            raise  # of somebody else's folder, or nobody reads stdout
        raise cannot_write(run_dir, error) from error


def _recorded(session: Session, outcome: Outcome) -> Outcome:
    """Write down how the run ended. Where that fails, the failure of a child still counts; without one this one
    does."""
    try:
        session.finish(state=outcome.state, exit_code=outcome.exit_code, reason=outcome.reason)
    except OSError as error:
        problem = cannot_write(session.run_dir, error)
        advice = (f"error: {problem.message}: {RUN_FILE} does not say how the run ended", f"hint: {problem.hint}")
        if outcome.exit_code:
            return replace(outcome, advice=(*outcome.advice, *advice))
        return Outcome(RunStatus.FAILED, exit_code=problem.exit_code, reason=problem.message, advice=advice)
    return outcome


def _pass_on(interrupts: Interrupts, *, run_dir: Path) -> None:
    """Pass a signal on to whoever would start another attempt, or the next run of a comparison, where the child was
    not asked already."""
    if interrupts.names and not asked_to_stop(run_dir):
        with contextlib.suppress(OSError):
            ask_to_stop(run_dir, why=interrupts.names[0])


@contextlib.contextmanager
def _reader_of(interrupts: Interrupts) -> Iterator[None]:
    """Ignore after a signal that the reader of stdout has gone, which else ends the run: Ctrl-C ends the `| jq` as
    well."""
    try:
        yield
    except OSError:
        if not interrupts.names:
            raise


class _Training:
    """The children of one run in their order, and the state that their events add up to."""

    def __init__(
        self,
        plan: RunPlan,
        session: Session,
        interrupts: Interrupts,
        progress: Progress,
        page: LivePage,
        *,
        saved_step: int,
    ) -> None:
        """saved_step: the step that the attempt resumes from, 0 for none."""
        self._plan = plan
        self._session = session
        self._interrupts = interrupts
        self._progress = progress
        self._page = page
        self._saved_step = saved_step
        self._memory = MemoryWatch(session.run_dir)
        self._tail = RunTail(session.run_dir)
        self._untold: list[Event] = []
        self.state = RunState(plan.trainer.steps, plan.mismatch_bounds)
        if session.record.attempt > 1:  # what earlier attempts wrote is known, and no news: where this one resumes is
            for item in self._tail.stream():
                self.state = fold(self.state, item)
                if isinstance(item, Event) and item.kind in ("restart", "resume"):
                    announced = item.kind == "resume" and [each.kind for each in self._untold] == ["restart"]
                    self._untold = [*(self._untold if announced else ()), item]

    def run(self, stages: Sequence[Stage]) -> Outcome:
        with self._progress:
            outcome = DONE
            if not is_prepared(self._plan):
                argv = module_argv("appliance.tasks.prepare", str(Path(self._plan.run_dir) / "plan.json"))
                child = Child("prepare", "preparation", argv, default_code=1)
                outcome = self._run_child(child, is_done=is_prepared)
            for stage in stages:
                if outcome == DONE and (child := stage.child(self._plan)) is not None:
                    outcome = self._run_child(child, is_done=stage.is_done)
                if outcome == DONE:
                    stage.finish(self._plan)
            return self._train() if outcome == DONE else outcome

    def _train(self) -> Outcome:
        """Run the training, with Ray's sockets and files where the plan says for as long as they are needed."""
        plan = self._plan
        ray_dir = make_ray_dir(dict(plan.env)[RAY_DIR_VARIABLE])
        try:
            outcome = self._run_child(
                Child("train", "training", plan.argv, default_code=5),
                is_done=lambda plan: (Path(plan.run_dir) / "model" / "config.json").is_file(),
                ask=GracefulStop(self._ask_to_stop, budget_s=plan.guard.save_budget_s),
                ray_dir=ray_dir,
                ray_token=make_ray_token(ray_dir) if plan.cluster.has_own_ray else Path(plan.cluster.token_file),
            )
            if outcome.state is RunStatus.FAILED:
                try:
                    keep_ray_logs(ray_dir, target=self._session.log_dir / "ray")
                except OSError as error:
                    console.say(f"warning: Ray's own logs could not be kept: {error}")
        finally:
            shutil.rmtree(ray_dir, ignore_errors=True)
        return outcome

    def _ask_to_stop(self, why: str) -> None:
        try:
            append_event(self._session.run_dir, kind="note", what=SAVING, why=why)  # before what the child says of it
        finally:
            ask_to_stop(self._session.run_dir, why=why)

    def _run_child(
        self,
        child: Child,
        *,
        is_done: Callable[[RunPlan], bool],
        ask: GracefulStop | None = None,
        ray_dir: Path | None = None,
        ray_token: Path | None = None,
    ) -> Outcome:
        if self._interrupts.names:
            return interrupted_outcome(self._interrupts.names, saved_step=self._saved_step)
        forget_stop(self._session.run_dir)
        log = self._session.log_dir / f"{child.name}.log"
        try:
            report = supervise(
                child.argv,
                run_dir=self._session.run_dir,
                env=_child_environment(self._plan, log_dir=self._session.log_dir, ray_dir=ray_dir, ray_token=ray_token),
                log=log,
                interrupts=self._interrupts,
                on_tick=self._watched_tick(),
                ask=ask,
                remove=str(ray_dir or ""),
            )
        except (EngineError, TrainingError) as stall:
            try:
                append_failure(self._session.run_dir, stall)
            except OSError:  # a full disk: it is reported, and counts, all the same
                self._untold.append(failure_event(stall))
            self._tick()
            report = SubreaperReport(-signal.SIGKILL, ended=(), left=())
        self._note_processes(report)
        return self._judge(child, returncode=report.returncode, is_done=is_done(self._plan), log=log)

    def _watched_tick(self) -> Callable[[], None]:
        """Return a tick that raises EngineError or TrainingError when the child makes no progress. A child that was
        asked to end may make none: saving and ending have their own limits."""
        stall_s, log_dir = self._plan.guard.stall_s, self._session.log_dir
        watch = StallWatch(stall_s=stall_s, log_dir=log_dir, now=time.monotonic())

        def tick() -> None:
            if watch.is_stalled(news=self._tick(), now=time.monotonic()) and not self._interrupts.names:
                raise ask_around(self._session.run_dir, log_dir=log_dir, phase=self.state.phase, stall_s=stall_s)

        return tick

    def _tick(self) -> bool:
        """Show and record what the child has reported. Returns whether there was news."""
        news, self._untold = [*self._untold, *self._tail.read()], []
        for item in news:
            self.state = fold(self.state, item)
        with _reader_of(self._interrupts):
            self._progress.show(self.state, news, now=time.time())
        self._session.update(state=RunStatus.RUNNING, phase=self.state.phase)
        self._memory.tick(now=time.monotonic())
        self._page.tick(news=bool(news), now=time.monotonic())
        return bool(news)

    def _judge(self, child: Child, *, returncode: int, is_done: bool, log: Path) -> Outcome:
        """Judge how a child ended. A signal that came when the work was done already changes nothing."""
        if returncode == 0 and is_done:
            return DONE
        if self._interrupts.names and (self.state.failure is None or self.state.stop is not None):
            return interrupted_outcome(
                self._interrupts.names,
                stop=self.state.stop,
                training=child.name == "train",
                saved_step=self._saved_step,
            )
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _LOG_TAIL_BYTES))
            log_tail = file.read().decode(errors="replace")
        return failed_outcome(
            child,
            returncode=returncode,
            state=self.state,
            log_tail=log_tail,
            log=summary.typed_path(log),
            run=summary.quoted_path(self._session.run_dir),
        )

    def _note_processes(self, report: SubreaperReport) -> None:
        for verb, names in (("ended", report.ended), ("could not end", report.left)):
            if names:
                with contextlib.suppress(OSError):  # a note is not worth a run
                    append_event(self._session.run_dir, kind="sweep", what=f"{verb} {', '.join(names)}")
        if report.left:
            console.say(f"warning: processes of this run could not be ended: {', '.join(report.left)}")


class StallWatch:
    """Watches for progress: an event, a line of metrics or a heartbeat. The state of a process is no progress."""

    def __init__(self, *, stall_s: float, log_dir: Path, now: float) -> None:
        """stall_s: seconds without progress after which the child is ended.  log_dir: of the attempt.  now: s of any
        steady clock."""
        self._stall_s = stall_s
        self._log_dir = log_dir
        self._beat = last_beat(log_dir)
        self._moved_at = now

    def is_stalled(self, *, news: bool, now: float) -> bool:
        """Judge whether the child has made no progress for too long. news: whether an event or a line of metrics has
        come since the last call."""
        beat = last_beat(self._log_dir)
        if news or beat != self._beat:
            self._beat, self._moved_at = beat, now
        return now - self._moved_at >= self._stall_s


def ask_around(run_dir: Path, *, log_dir: Path, phase: str, stall_s: float) -> ApplianceError:
    """Have every process write down what it is doing, and return the error that says where to read it. EngineError
    where the trainer waits for an engine, else TrainingError."""
    living = {process.pid for process in find_processes(f"{RUN_VARIABLE}={run_dir}", below=os.getpid())}
    dumps = dump_stacks(log_dir, living=living)
    fact = f"no progress for {draw.duration(stall_s)} in phase {phase}"
    with contextlib.suppress(OSError):  # a full disk: the error is reported all the same
        append_event(run_dir, kind="stall", what=fact, why="guard.stall_s", stacks=[path.name for path in dumps])
    folder = summary.typed_path(log_dir / STACKS_FOLDER)
    were_doing = counted(len(dumps), "process was doing", plural="processes were doing")
    hint = f"what {were_doing} is in {folder}; if they are only slow, raise guard.stall_s"
    kind = EngineError if phase in AT_AN_ENGINE else TrainingError
    return kind(
        f"{fact}: ended by the launcher", hint=hint if dumps else "no process reported what it was doing: see the log"
    )


def _child_environment(plan: RunPlan, *, log_dir: Path, ray_dir: Path | None, ray_token: Path | None) -> dict[str, str]:
    of_this_attempt = {PLAN_VARIABLE: str(Path(plan.run_dir) / "plan.json"), LOG_DIR_VARIABLE: str(log_dir)}
    temporary = {} if ray_dir is None else temporary_env(ray_dir)
    environment = {**os.environ, **temporary, **dict(plan.env), **of_this_attempt}
    is_ours = not plan.cluster.address
    return environment if ray_token is None else with_ray_token(environment, ray_token, is_ours=is_ours)


def make_ray_dir(path: str) -> Path:
    """Make a folder that is private to this user: Ray opens the folder that it makes in it to everybody, and the token
    lies beside that one. What a run that was killed left there is removed first.

    Raises PreflightError when it cannot be made, or belongs to somebody else.
    """
    folder = Path(path)
    try:
        with contextlib.suppress(FileNotFoundError):
            found = folder.lstat()
            if stat.S_ISLNK(found.st_mode) or found.st_uid != os.getuid():
                raise PreflightError(
                    f"{folder}: belongs to somebody else", hint="have it removed, or set TMPDIR to another folder"
                )
            shutil.rmtree(folder, onerror=_unless_gone)
        folder.mkdir(mode=0o700)
    except OSError as error:
        raise cannot_write(folder, error, setting="TMPDIR") from error
    return folder


def _unless_gone(function: object, path: str, error: tuple[type, BaseException, object]) -> None:
    """Ignore a file that is gone: the subreaper of the run that was killed may be removing the same. error:
    sys.exc_info()."""
    if not isinstance(error[1], FileNotFoundError):
        raise error[1]


def make_ray_token(folder: Path) -> Path:
    """Write the file with the token of a Ray on one host, new in every attempt, into a folder that `make_ray_dir`
    has made. Raises PreflightError."""
    file = folder / RAY_TOKEN
    try:
        write_token(file)
    except OSError as error:
        raise cannot_write(file, error, setting="TMPDIR") from error
    return file


def keep_ray_logs(ray_dir: Path, *, target: Path) -> None:
    """Copy Ray's own logs beside the child's, for a run that failed. Raises OSError."""
    for logs in sorted(ray_dir.glob(f"{RAY_OWN}/session_*/logs")):
        if not logs.parent.is_symlink():
            shutil.copytree(logs, target, symlinks=True, dirs_exist_ok=True)


def _show_answers(plan: RunPlan) -> None:
    """Print the answers before and after, of a run that validated at both ends."""
    try:
        samples = SampleReader(Path(plan.run_dir)).read()
    except OSError as error:
        console.say(f"note: no answers are shown: {error}")
        return
    if table := answers_table(samples, is_graded=not plan.task.is_own):
        console.say(f"\n{table}")


def _tell(plan: RunPlan, state: RunState, *, outcome: Outcome, seconds: float, json_mode: bool, quiet: bool) -> None:
    """Report the end, for people on stderr and with --json for machines on stdout."""
    if json_mode:
        values = summary.summary_object(
            plan, state, state_name=outcome.state, exit_code=outcome.exit_code, reason=outcome.reason, seconds=seconds
        )
        console.out(json_line("summary", values))
    if outcome.state is RunStatus.DONE and not json_mode and not quiet:
        folder = summary.typed_path(Path(plan.run_dir))
        console.say(console.table(summary.summary_rows(plan, state, seconds=seconds, folder=folder)))
        _show_answers(plan)
    go_on = "" if outcome.state is RunStatus.DONE else summary.go_on_command(Path(plan.run_dir))
    for line in (*outcome.advice, *([f"to resume: {go_on}"] if go_on else [])):
        console.say(line)
