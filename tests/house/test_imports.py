"""Which way is down: every room imports only what lies below it, and the launcher starts without torch."""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
from collections.abc import Iterator

# The part of quant that needs no torch.
NUMBERS = {
    "quant.architectures",
    "quant.correction",
    "quant.device",
    "quant.files",
    "quant.scheme",
    "quant.settings",
}
CHILDREN = {"errors", "patch", "quant", "plan.model", "plan.env", "run.attest", "run.events", "run.acknowledge"}

# A room or module -> what it may import besides its own room. A name stands for everything below it.
MAY_IMPORT = {
    "__init__": set(),
    "__main__": {"cli"},
    "errors": set(),
    "console": {"errors"},
    "patch": {"errors"},
    "quant": {"errors"},
    "guard": {"errors", "quant.scheme"},
    "tasks": {"errors", "plan.model", "run.events", "run.boundary"},
    "recipe": {"errors", "tasks", "guard", *NUMBERS},
    "plan": {"errors", "tasks", "recipe", "guard", *NUMBERS},
    "preflight": {"errors", "tasks", "recipe", "plan", *NUMBERS},
    "run": {"errors", "tasks", "plan", "preflight", "console", "flashrl.variables", *NUMBERS},
    "engine": {*CHILDREN, "flashrl"},
    "flashrl": {"errors", "patch", "quant", "plan.env", "engine", "recipe.tree"},
    "trainer": {*CHILDREN, "tasks", "guard"},
    "bench": {"errors", "tasks", "recipe", "plan", "preflight", "run", "console", "engine", "quant"},
    "profile": {"errors", "tasks", "recipe", "plan", "preflight", "run", "console", "quant", "flashrl.config_file"},
    "verify": {"errors", "tasks", "recipe", "plan", "preflight", "run", "console", "engine", "quant", "profile"},
