"""The plans of the shipped recipes, as files: what changes in one of them shows in a review.

`make golden` writes them anew; `git diff` shows what changed.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

GOLDEN = Path(__file__).parent / "golden"
RUN_DIR = Path("/runs/golden-1")
NAMES = (
    "dapo-32b-bf16",
    "dapo-32b-fp8",
    "dapo-32b-int8",
    "dapo-7b-int8",
    "gsm8k-0.5b-bf16",
    "gsm8k-0.5b-fp8",
    "gsm8k-0.5b-int8",
    "gsm8k-7b-lora-int8",
    "qwen2.5-1.5b-int8",
    "qwen3-32b-fp8",
    "qwen3-8b-fp8",
    "qwen3-8b-int8",
)  # for real hardware
ON_CPU = (
    "arithmetic-tiny-bf16",
    "arithmetic-tiny-int8",
    "arithmetic-tiny-lora-int8",
    "gsm8k-tiny-int8",
    "smollm2-int8",
)
KEPT = (*NAMES, *ON_CPU)


def golden(name: str) -> str:
    """argv, environment and derived numbers of a shipped recipe's plan, and its needs; nothing of this machine."""
    from plans import HOST

    from appliance.plan.build import build_plan
    from appliance.preflight.checks import estimates
    from appliance.recipe.load import load_recipe
    from appliance.terms.shapes import KNOWN
    from appliance.trainer import rewards

    plan = build_plan(load_recipe(name), run_dir=RUN_DIR, host=HOST)
    here = {sys.executable: "PYTHON", str(Path(rewards.__file__).parent): "TRAINER", str(RUN_DIR.parent): "/runs"}

    def elsewhere(text: str) -> str:
        for path, word in here.items():
            text = text.replace(path, word)
        return text

    document = {
        "argv": [elsewhere(each) for each in plan.argv],
        "environment": {key: elsewhere(value) for key, value in plan.env if key != "APPLIANCE_RAY_DIR"},
        "derived": {each.key: f"{each.value}: {each.why}" for each in plan.choices},
        "needs": dict(estimates(plan, shape=None if plan.model.builtin else KNOWN[plan.model.path])),
        "pins": dict(plan.pins),
    }
    return json.dumps(document, indent=2) + "\n"


def main() -> None:
    GOLDEN.mkdir(exist_ok=True)
    for name in KEPT:
        (GOLDEN / f"{name}.json").write_text(golden(name))


if __name__ == "__main__":
    main()
