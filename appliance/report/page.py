"""The page of a run: one HTML file that needs nothing else. Pure; the clock is an argument."""

from __future__ import annotations

import datetime

from appliance.page.render import render
from appliance.record.session import RunStatus
from appliance.record.state import median_tokens_per_s, remaining_s, step_seconds
from appliance.report import display, draw
from appliance.report.curves import curves
from appliance.report.folder import RunView
from appliance.report.generations import of_training, of_validation
from appliance.report.summary import quoted_path, result
from appliance.report.timeline import event_rows, timeline
from appliance.report.verdicts import verdicts

RELOAD_S = 10  # of a page whose run goes on
_GIB = 1 << 30
_GRADES = {RunStatus.DONE: "fine", RunStatus.FAILED: "bad", RunStatus.STOPPED: "warn"}  # classes of the pages' style


def page(view: RunView, *, now: float, awaits_restart: bool = False) -> str:
    """The whole document. Everything that a run, a recipe or a model wrote is escaped.

    now: unix s, of a run that goes on the time up to which the page tells.  awaits_restart: its launcher lives, and
    may begin another attempt.
    """
    record = view.record
    code = "" if record.exit_code in (None, 0) else f", exit code {record.exit_code}"
    rows, left_out = event_rows(view)
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
        validation=of_validation(view),
        training=of_training(view),
        recipe_yaml=view.recipe_yaml,
        choices=[(each.key, each.value, each.why) for each in view.plan.choices],
        findings=[(event.what,) for event in view.events if event.kind == "note" and event.why == "preflight"],
        attests=_attests(view),
        versions=view.versions,
        argv=view.plan.argv,
        reload_s=RELOAD_S if view.is_live or awaits_restart else 0,
        written=now,
        forsaken="This page was not written anew for five minutes: its launcher may be gone. To make it anew: "
        f"appliance report {quoted_path(view.run_dir)}",
    )


def _about(view: RunView, *, now: float, awaits_restart: bool) -> str:
    plan = view.plan
    where = f"{plan.device}, {plan.nodes} × {plan.gpus_per_node}" if plan.device != "cpu" else "CPU"
    written = datetime.datetime.fromtimestamp(now, tz=datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    live = ". The run goes on: the page is written anew as it does, and loads itself again" if view.is_live else ""
    if awaits_restart:
        live = ". Another attempt may follow by itself: the page waits for it, and loads itself again"
    return f"{display.title(plan).partition(': ')[2]}; {where}. Written {written}{live}."


def _tiles(view: RunView, *, now: float) -> list[tuple[str, str]]:
    """(value, what it is) pairs."""
    state, found = view.state, result(view.state)
    peak = max((sample.pss_bytes for sample in view.memory), default=None)
    took = (now if view.is_live else view.ended) - view.started if view.started else 0.0
    left = remaining_s(state, now=now) if view.is_live and state.work is None else None
    return [
        (f"{state.step} / {state.steps}", "steps" + (f", about {draw.duration(left)} left" if left else "")),
        (draw.number(found.after), f"reward, {draw.number(found.before)} before"),
        (draw.tokens_per_s(median_tokens_per_s(state)).removesuffix(" tokens/s"), "tokens/s of rollout, median"),
        ("-" if step_seconds(state) is None else f"{step_seconds(state):.1f} s", "a step, median, all included"),
        (draw.duration(took), "in all" if len(view.attempts) < 2 else f"in all, {len(view.attempts)} attempts"),
        ("-" if peak is None else f"{peak / _GIB:.1f} GiB", "memory at the peak"),
    ]


def _attests(view: RunView) -> list[tuple[str, ...]]:
    return [
        (
            each.process,
            each.role,
            each.scheme + (", emulated" if each.emulated else ""),
            ", ".join(each.patches) or "none",
            ", ".join(f"{count} × {name}" for name, count in each.kernels),
        )
        for each in view.attests
    ]
