"""The page of a run: one HTML file that needs nothing else. Pure; the clock is an argument."""

from __future__ import annotations

import datetime
import html

from appliance.page.frame import block, document, fold, table
from appliance.run import display, draw
from appliance.run.report.curves import curves
from appliance.run.report.folder import RunView
from appliance.run.report.generations import generations
from appliance.run.report.timeline import event_table, timeline
from appliance.run.report.verdicts import Verdict, Word, verdicts
from appliance.run.session import RunStatus
from appliance.run.state import median_tokens_per_s, remaining_s, step_seconds
from appliance.run.summary import quoted_path, result

RELOAD_S = 10  # of a page whose run goes on
_GIB = 1 << 30
_CLASSES = {Word.FINE: "fine", Word.WARN: "warn", Word.BAD: "bad", Word.OPEN: "open"}
_STATES = {
    RunStatus.DONE: "fine",
    RunStatus.FAILED: "bad",
    RunStatus.STOPPED: "warn",
    RunStatus.RUNNING: "open",
    RunStatus.STARTING: "open",
}
_STYLE = """
header { display: flex; flex-wrap: wrap; gap: .3rem 1rem; align-items: center; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px; margin: 1.2rem 0; }
.tiles div { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 10px 14px; }
.tiles b { display: block; font-size: 1.35rem; line-height: 1.3; font-variant-numeric: tabular-nums; }
.tiles span { color: var(--soft); font-size: 13px; }
.verdicts { display: grid; grid-template-columns: max-content max-content 1fr; gap: 6px 14px; margin: 0; }
.verdicts dt, .verdicts dd { margin: 0; overflow-wrap: anywhere; min-width: 0; }
@media (max-width: 700px) { .verdicts { grid-template-columns: max-content 1fr; }
  .verdicts .text { grid-column: 1 / -1; } }
"""


def page(view: RunView, *, now: float, awaits_restart: bool = False) -> str:
    """The whole document. Everything that a run, a recipe or a model wrote is escaped.

    now: unix s, of a run that goes on the time up to which the page tells.  awaits_restart: its launcher lives, and
    may begin another attempt.
    """
    return document(
        f"{view.run_dir.name}: {view.record.state}",
        [
            *_head(view, now=now, awaits_restart=awaits_restart),
            _tiles(view, now=now),
            _verdicts(verdicts(view)),
            *(
                f'<h2>{html.escape(name)}</h2><div class="charts">{"".join(figures)}</div>'
                for name, figures in curves(view)
            ),
            "<h2>Over time</h2>",
            f'<div class="over-time">{"".join(timeline(view))}</div>',
            fold("events", "Events", event_table(view), is_open=True),
            "<h2>What the model said</h2>",
            *generations(view),
            "<h2>What ran</h2>",
            *_details(view),
        ],
        style=_STYLE,
        reload_s=RELOAD_S if view.is_live or awaits_restart else 0,
        written=now,
        forsaken=f"This page was not written anew for five minutes: its launcher may be gone. To make it anew: "
        f"appliance report {quoted_path(view.run_dir)}",
    )


def _head(view: RunView, *, now: float, awaits_restart: bool) -> list[str]:
    plan, record = view.plan, view.record
    code = "" if record.exit_code in (None, 0) else f", exit code {record.exit_code}"
    where = f"{plan.device}, {plan.nodes} × {plan.gpus_per_node}" if plan.device != "cpu" else "CPU"
    written = datetime.datetime.fromtimestamp(now, tz=datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    live = ". The run goes on: the page is written anew as it does, and loads itself again" if view.is_live else ""
    if awaits_restart:
        live = ". Another attempt may follow by itself: the page waits for it, and loads itself again"
    return [
        f'<header><h1>{html.escape(view.run_dir.name)}</h1><span class="word {_STATES[record.state]}">'
        f"{html.escape(record.state)}{code}</span></header>",
        f'<p class="soft">{html.escape(display.title(plan).partition(": ")[2])}; {html.escape(where)}. '
        f"Written {written}{live}.</p>",
    ]


def _tiles(view: RunView, *, now: float) -> str:
    state, found = view.state, result(view.state)
    peak = max((sample.pss_bytes for sample in view.memory), default=None)
    took = (now if view.is_live else view.ended) - view.started if view.started else 0.0
    left = remaining_s(state, now=now) if view.is_live and state.work is None else None
    tiles = [
        (f"{state.step} / {state.steps}", "steps" + (f", about {draw.duration(left)} left" if left else "")),
        (draw.number(found.after), f"reward, {draw.number(found.before)} before"),
        (draw.tokens_per_s(median_tokens_per_s(state)).removesuffix(" tokens/s"), "tokens/s of rollout, median"),
        ("-" if step_seconds(state) is None else f"{step_seconds(state):.1f} s", "a step, median, all included"),
        (draw.duration(took), "in all" if len(view.attempts) < 2 else f"in all, {len(view.attempts)} attempts"),
        ("-" if peak is None else f"{peak / _GIB:.1f} GiB", "memory at the peak"),
    ]
    return (
        f'<div class="tiles">{"".join(f"<div><b>{value}</b><span>{name}</span></div>" for value, name in tiles)}</div>'
    )


def _verdicts(found: list[Verdict]) -> str:
    rows = "".join(
        f'<dt><span class="word {_CLASSES[each.word]}">{each.word}</span></dt><dt>{html.escape(each.question)}</dt>'
        f'<dd class="text">{html.escape(each.text)}</dd>'
        for each in found
    )
    return f'<dl class="verdicts">{rows}</dl>'


def _details(view: RunView) -> list[str]:
    plan = view.plan
    findings = [(event.what,) for event in view.events if event.kind == "note" and event.why == "preflight"]
    said = [
        (
            each.process,
            each.role,
            each.scheme + (", emulated" if each.emulated else ""),
            ", ".join(each.patches) or "none",
            ", ".join(f"{count} × {name}" for name, count in each.kernels),
        )
        for each in view.attests
    ]
    nothing = '<p class="soft">None.</p>'
    return [
        fold("recipe", "Recipe, as resolved", block(view.recipe_yaml)),
        fold(
            "choices",
            f"{len(plan.choices)} numbers that were derived, with their reasons",
            table(("key", "value", "why"), [(each.key, each.value, each.why) for each in plan.choices]),
        ),
        fold(
            "findings", f"{len(findings)} findings of preflight", table(("finding",), findings) if findings else nothing
        ),
        fold(
            "attest",
            f"{len(said)} processes, by their own word",
            table(("process", "role", "scheme", "patches", "kernels"), said) if said else nothing,
        ),
        fold("versions", "Versions", table(("of", "version"), view.versions)),
        fold("command", "The training process, exactly", block("\n".join(plan.argv)) if plan.argv else nothing),
    ]
