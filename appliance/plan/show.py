"""A plan for people: the resolved recipe, what was derived and why, and the exact child."""

from __future__ import annotations

import shlex

from appliance.plan.model import RunPlan


def plan_text(plan: RunPlan, *, recipe_yaml: str, needs: list[tuple[str, str]]) -> str:
    """needs: (what, how much) estimates.  The last part is a command line that a shell reads."""
    width = max(len(choice.key) for choice in plan.choices)
    amount = max(len(choice.value) for choice in plan.choices)
    parts = [
        "# recipe, resolved",
        recipe_yaml.rstrip(),
        "",
        "# derived",
        *(f"{choice.key:<{width}}  {choice.value:<{amount}}  {choice.why}" for choice in plan.choices),
        "",
        "# needs, estimated",
        *(f"{what:<{width}}  {how_much}" for what, how_much in needs),
        "",
        "# paths",
        f"{'run folder':<{width}}  {plan.run_dir}",
        f"{'model':<{width}}  {plan.model.path}",
        *([f"{'model commit':<{width}}  {plan.model.commit} of {plan.model.source}"] if plan.model.commit else []),
        f"{'training data':<{width}}  {plan.task.train_parquet}",
        f"{'validation data':<{width}}  {plan.task.val_parquet}",
        "",
        "# child",
        *(f"{name}={shlex.quote(value)} \\" for name, value in plan.env),
        f"{shlex.join(plan.argv[:3])} \\",
        " \\\n".join(f"  {shlex.quote(argument)}" for argument in plan.argv[3:]),
    ]
    return "\n".join(parts)
