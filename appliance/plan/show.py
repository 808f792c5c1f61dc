"""A plan for people: what was decided and why, what it needs, the host's findings; the exact child on request."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Iterator, Sequence

from appliance.record.plan import Choice, RunPlan

# Heading -> the sections of a recipe whose choices stand below it; what no other names is of training.
_GROUPS = {
    "Rollouts": ("rollout", "engine", "quantization", "sync", "cluster"),
    "Training": (),
    "Guard and checkpoints": ("guard", "checkpoint"),
}
_NARROWEST = 40  # columns of a reason beside its choice; where a terminal has fewer it stands below
_LONGEST_VALUE = 28


def plan_text(
    plan: RunPlan,
    *,
    needs: Sequence[tuple[str, str]],
    findings: Sequence[str] = (),
    recipe_yaml: str = "",
    columns: int | None = None,
) -> str:
    """needs: (what, how much) estimates.  findings: lines.  columns: of a terminal; None: one line for each thing.

    recipe_yaml: the resolved recipe; given, it is shown with the child, at the end, a command line that a shell reads.
    """
    files = {
        "run folder": plan.run_dir,
        "model": plan.model.path,
        "model commit": f"{plan.model.commit} of {plan.model.source}" if plan.model.commit else "",
        "training data": plan.task.train_parquet,
        "validation data": plan.task.val_parquet,
    }
    parts = [
        [_headline(plan)],
        *_decided(plan.choices, columns=columns),
        ["Needs, estimated", *_pairs(needs, columns=columns)],
        ["Files", *_pairs([(what, path) for what, path in files.items() if path], columns=None)],
    ]
    if findings:
        parts.append(["Findings on this host", *findings])
    if recipe_yaml:
        parts += [["Recipe, resolved", recipe_yaml.rstrip()], ["Child", *_child(plan)]]
    else:
        parts.append(["`appliance plan RECIPE --full` adds the resolved recipe and the exact child."])
    return "\n\n".join("\n".join(part) for part in parts)


def _headline(plan: RunPlan) -> str:
    gpus = f"{plan.gpus_per_node} x {plan.device}" + (f" on each of {plan.nodes} nodes" if plan.nodes > 1 else "")
    emulated = ", emulated" if plan.rollout.emulated else ""
    batch = f"{plan.prompts_per_step} prompts x {plan.rollout.samples_per_prompt} samples"
    rollouts = f"rollouts in {plan.rollout.label}{emulated}"
    return f"{plan.name}: {plan.steps} steps of {batch}; {rollouts}; {plan.correction.text}; {gpus}"


def _decided(choices: Sequence[Choice], *, columns: int | None) -> Iterator[list[str]]:
    """A heading and its choices, for each group that has some."""
    key = max(len(each.key) for each in choices)
    value = min(_LONGEST_VALUE, max(len(each.value) for each in choices))
    grouped: dict[str, list[str]] = {heading: [] for heading in _GROUPS}
    for each in choices:
        section = each.key.partition(".")[0]
        heading = next((name for name, sections in _GROUPS.items() if section in sections), "Training")
        grouped[heading] += _wrapped(f"  {each.key:<{key}}  {each.value:<{value}}  ", each.why, columns=columns)
    yield from ([heading, *lines] for heading, lines in grouped.items() if lines)


def _pairs(pairs: Sequence[tuple[str, str]], *, columns: int | None) -> Iterator[str]:
    width = max(len(what) for what, _ in pairs)
    for what, text in pairs:
        yield from _wrapped(f"  {what:<{width}}  ", text, columns=columns)


def _wrapped(begin: str, text: str, *, columns: int | None) -> list[str]:
    """The text behind its beginning, or below it where there is no room beside."""
    if columns is None or len(begin) + len(text) <= columns:
        return [f"{begin}{text}"]
    if columns - len(begin) < _NARROWEST:
        indent = " " * 6
        return [begin.rstrip(), *textwrap.wrap(text, columns, initial_indent=indent, subsequent_indent=indent)]
    return textwrap.wrap(text, columns, initial_indent=begin, subsequent_indent=" " * len(begin))


def _child(plan: RunPlan) -> Iterator[str]:
    yield from (f"{name}={shlex.quote(value)} \\" for name, value in plan.env)
    yield f"{shlex.join(plan.argv[:3])} \\"
    yield " \\\n".join(f"  {shlex.quote(argument)}" for argument in plan.argv[3:])
