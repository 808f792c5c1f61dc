"""Which way is down: every room imports only what lies below it, and the launcher starts without torch."""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
from collections.abc import Iterator

# The part of quant that needs no torch.
NUMBERS = {
    "quant.correction",
    "quant.device",
    "quant.files",
    "quant.precision",
    "quant.scheme",
    "quant.settings",
    "quant.uaq",
}
# The folder of checkpoints: the trainer fills it, the launcher looks for where to resume.
SAVED = {"run.seal", "run.checkpoints", "run.last_line"}
CHILDREN = {
    "errors",
    "patch",
    "quant",
    "plan.model",
    "plan.read",
    "plan.env",
    "plan.control_groups",
    "run.attest",
    "run.events",
    "run.generation",
    "run.acknowledge",
    "run.heartbeat",
    "run.precision",
    "run.samples",
    "run.stacks",
    "run.stop_request",
    *SAVED,
}

# A room or module -> what it may import besides its own room. A name stands for everything below it.
MAY_IMPORT = {
    "__init__": set(),
    "__main__": {"cli"},
    "errors": set(),
    "frozen": set(),
    "console": {"errors"},
    "patch": {"errors"},
    "page": set(),
    "terms": {"errors"},
    "interruption": {"console"},
    "quant": {"errors"},
    "guard": {"errors"},
    "tasks": {"errors", "plan.model", "plan.read", "run.events", "run.boundary", "run.heartbeat", "run.stacks"},
    "recipe": {"errors", "tasks", "guard", *NUMBERS},
    "plan": {"errors", "frozen", "tasks", "recipe", "guard", *NUMBERS},
    "preflight": {"errors", "patch", "tasks", "recipe", "plan", "cluster.token", *NUMBERS},
    "run": {
        *("errors", "tasks", "recipe", "plan", "preflight", "cluster.token", "console", "page"),
        *("interruption", *NUMBERS),
    },
    "cluster": {"errors", "plan", "run", "console", "preflight", "recipe.text", *NUMBERS},
    "engine": CHILDREN,
    "trainer": {*CHILDREN, "tasks", "guard", "cluster.form", "run.boundary"},
    "bench": {"errors", "tasks", "recipe", "plan", "preflight", "run", "console", "engine", "quant"},
    "profile": {"errors", "tasks", "recipe", "plan", "preflight", "run", "console", "quant"},
    "verify": {
        "errors",
        "frozen",
        "tasks",
        "recipe",
        "plan",
        "preflight",
        "run",
        "console",
        "engine",
        "quant",
        "profile",
    },
    # A comparison is many runs, each with its profile.
    "compare": {"errors", "tasks", "recipe", "plan", "preflight", "run", "console", "page", "profile", "quant"},
    "container": {"errors", "tasks", "recipe", "plan", "preflight", "run", "console", "cluster.news", *NUMBERS},
    "data": {"errors", "tasks", "console", "run.session", "run.work"},  # its files are a task's, made without a recipe
    "cli": {
        *("errors", "tasks", "recipe", "plan", "preflight", "run", "bench", "profile", "verify", "compare", "cluster"),
        *("container", "console", "data", "interruption"),
        *NUMBERS,
    },
}

HEAVY = {"torch", "vllm", "verl", "ray", "transformers", "tensordict", "datasets", "numpy", "pandas", "pyarrow"}
# Only children load these. Everything else is the launcher's, and keeps heavy imports inside functions.
OF_THE_CHILDREN = (
    "engine",
    "trainer",
    "quant",
    "tasks.tiny_model",
    "tasks.tokenizer",
    "tasks.parquet",
    "bench.measure",
    "bench.worker",
    "compare.bootstrap",
    "compare.child",
    "compare.coarse",
    "verify.child",
    "verify.worker",
    "profile.child",
    "profile.unpickle",
    "profile.take_over",
)


def is_heavy(module: str) -> bool:
    return is_below(module, OF_THE_CHILDREN) and module not in NUMBERS


def is_below(module: str, rooms: tuple[str, ...] | set[str]) -> bool:
    return any(module == room or module.startswith(f"{room}.") for room in rooms)


def imported(nodes: Iterator[ast.AST] | list[ast.stmt]) -> Iterator[str]:
    """Full names of what is imported. `from a import b` counts as `a.b`."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def edges(modules: dict[str, ast.Module], *, nodes) -> Iterator[tuple[str, str]]:
    """(module, module of ours that it imports) for the statements that `nodes` takes out of a syntax tree."""
    for module, tree in modules.items():
        for name in imported(nodes(tree)):
            if name.startswith("appliance."):
                target = name.removeprefix("appliance.")
                known = target if target in modules or f"{target}.__init__" in modules else target.rpartition(".")[0]
                yield module, known


def test_every_room_has_a_place(modules: dict[str, ast.Module]) -> None:
    assert {module.split(".")[0] for module in modules} - set(MAY_IMPORT) == set()


def test_imports_go_down(modules: dict[str, ast.Module]) -> None:
    wrong = [
        f"{module} imports {target}"
        for module, target in edges(modules, nodes=ast.walk)
        if (room := module.split(".")[0]) != target.split(".")[0] and not is_below(target, {"terms", *MAY_IMPORT[room]})
    ]
    assert wrong == []


def test_no_module_imports_itself_in_a_circle(modules: dict[str, ast.Module]) -> None:
    graph = {module: set[str]() for module in modules}
    for module, target in edges(modules, nodes=lambda tree: tree.body):
        graph[module].add(target)
    assert len(list(graphlib.TopologicalSorter(graph).static_order())) >= len(modules)  # CycleError names the circle


def _module_of(name: str, modules: dict[str, ast.Module]) -> str:
    """`quant.scheme.Scheme` -> `quant.scheme`."""
    return name if name in modules else name.rpartition(".")[0]


def test_launcher_imports_nothing_heavy_at_module_level(modules: dict[str, ast.Module]) -> None:
    wrong = [
        f"{module} imports {name}"
        for module, tree in modules.items()
        if not is_heavy(module)
        for name in imported(tree.body)
        if name.split(".")[0] in HEAVY or is_heavy(_module_of(name.removeprefix("appliance."), modules))
    ]
    assert wrong == []


def test_command_line_starts_without_torch() -> None:
    code = f"import appliance.cli, sys; print(sorted({HEAVY!r} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"
