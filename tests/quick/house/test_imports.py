"""Which way is down: every room imports only what lies below it, and no command loads torch to start."""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

TOOLS = {"console", "control_groups", "errors", "files", "finding", "hub", "patch", "processes", "signals"}
FACTS = {"terms", "corrections", "guard"}

# A folder -> the folders and tools that it may import. A rule that needs an exception for a file says that a wall is
# wrong: move the wall.
MAY_IMPORT = {
    "page": set(),
    "terms": {"errors", "files"},
    "corrections": {"errors", "finding"},
    "guard": {"terms"},
    # what a user sets
    "settings": {"files", *FACTS},
    # on disk, and between processes
    "record": {"errors", "files", "finding", "processes", "settings", *FACTS},
    "sync": {"errors", "files", "record", "terms"},
    "quant": {"errors", "files", "terms"},
    "gguf": {"files", "terms"},
    # the worker: in the processes of vLLM and verl
    "engine": {"errors", "files", "patch", "quant", "record", "sync", "terms"},
    "trainer": {
        *("control_groups", "errors", "files", "patch", "processes"),
        *("cluster", "quant", "record", "settings", "sync", "tasks", *FACTS),
    },
    # the launcher: recipe -> plan -> everything else
    "tasks": {"errors", "files", "finding", "gguf", "hub", "processes", "quant", "record", "settings", "terms"},
    "recipe": {"errors", "finding", "quant", "settings", "tasks", *FACTS},
    "plan": {
        *("control_groups", "errors", "files", "finding", "gguf", "hub", "processes"),
        *("recipe", "record", "settings", "tasks", *FACTS),
    },
    "preflight": {
        *("console", "control_groups", "errors", "finding", "gguf", "hub", "patch", "processes"),
        *("plan", "quant", "recipe", "record", "settings", "tasks", "terms"),
    },
    "report": {"console", "errors", "files", "finding", "guard", "page", "plan", "record", "sync", "terms"},
    "launch": {
        *("console", "errors", "files", "finding", "processes", "signals"),
        *("plan", "preflight", "quant", "recipe", "record", "report", "settings", "sync", "tasks", "terms"),
    },
    "cluster": {*TOOLS, "launch", "plan", "preflight", "quant", "recipe", "record", "terms"},
    # commands beside the run
    "profile": {*TOOLS, "launch", "plan", "preflight", "quant", "recipe", "record", "terms"},
    "bench": {*TOOLS, "engine", "launch", "plan", "preflight", "recipe", "record", "terms"},
    "verify": {*TOOLS, "engine", "launch", "plan", "preflight", "profile", "recipe", "record", "terms"},
    "compare": {
        *TOOLS,
        *("corrections", "launch", "page", "plan", "preflight", "profile", "recipe", "record", "report", "settings"),
        *("tasks", "terms", "trainer"),
    },
    "container": {*TOOLS, "cluster", "launch", "preflight", "recipe", "record", "report", "tasks", "terms"},
}

# Beside the core, which imports none of it. One arrow: the command line starts `accept` so, and not by an entry point,
# for a bundle (container/bundle) is the code alone, without the package's metadata.
BESIDE = {"benchmarks", "flashrl_compat"}
TO_BESIDE = {("appliance", "benchmarks.accept")}

HEAVY = {"torch", "vllm", "verl", "ray", "transformers", "tensordict", "datasets", "numpy", "pandas", "pyarrow"}
SLOW = HEAVY | {"huggingface_hub", "httpx", "jinja2"}  # 0.3 s each: where a command needs it, inside a function


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


def room(module: str) -> str:
    return module.partition(".")[0]


def test_every_room_has_a_place(modules: dict[str, ast.Module]) -> None:
    folders = {room(module) for module in modules if "." in module}
    single = {module for module in modules if "." not in module} - {"__init__", "__main__", "cli"}
    assert (folders, single) == (set(MAY_IMPORT), TOOLS)


def test_imports_go_down(modules: dict[str, ast.Module]) -> None:
    wrong = [
        f"{module} imports {target}"
        for module, target in edges(modules, nodes=ast.walk)
        if "." in module and room(module) != room(target) and room(target) not in MAY_IMPORT[room(module)]
    ]
    assert wrong == []


def test_what_stands_beside_the_core_is_imported_by_none_of_it(modules: dict[str, ast.Module]) -> None:
    folders = {module: ".".join(["appliance", *module.split(".")[:-1]]) for module in modules}
    arrows = {
        (folders[module], ".".join(name.split(".")[:2]))
        for module, tree in modules.items()
        for name in imported(ast.walk(tree))
        if name.partition(".")[0] in BESIDE
    }
    assert arrows == TO_BESIDE


def test_what_stands_beside_the_core_does_not_start_the_command_line(root: Path) -> None:
    paths = [path for folder in sorted(BESIDE) for path in (root / folder).rglob("*.py")]
    importing = [path.name for path in paths if "appliance.cli" in {*imported(ast.walk(ast.parse(path.read_text())))}]
    assert len(paths) > 30 and importing == []


def test_no_rule_allows_what_nobody_does(modules: dict[str, ast.Module]) -> None:
    done = {(room(module), room(target)) for module, target in edges(modules, nodes=ast.walk)}
    idle = {(one, other) for one, others in MAY_IMPORT.items() for other in others - TOOLS} - done
    assert idle == set()


def test_no_two_rooms_import_each_other() -> None:
    order = list(graphlib.TopologicalSorter(MAY_IMPORT).static_order())  # CycleError names the circle
    assert set(MAY_IMPORT) <= set(order)


def test_the_tools_import_each_other_only(modules: dict[str, ast.Module]) -> None:
    used = {target for module, target in edges(modules, nodes=ast.walk) if module in TOOLS}
    assert used <= TOOLS


def test_no_module_imports_itself_in_a_circle(modules: dict[str, ast.Module]) -> None:
    graph = {module: set[str]() for module in modules}
    for module, target in edges(modules, nodes=ast.walk):  # also of an import inside a function
        graph[module].add(target)
    assert len(list(graphlib.TopologicalSorter(graph).static_order())) >= len(modules)  # CycleError names the circle


def test_no_command_loads_anything_slow_to_start(modules: dict[str, ast.Module]) -> None:
    """The command line imports a command's module in a function; from there on the module level counts."""
    below = dict[str, set[str]]()
    for module, target in edges(modules, nodes=lambda tree: tree.body):
        below.setdefault(module, set()).add(target)
    waiting, seen = {target for module, target in edges(modules, nodes=ast.walk) if module == "cli"}, set[str]()
    while waiting:
        module = waiting.pop()
        seen.add(module)
        waiting |= below.get(module, set()) - seen
    wrong = [
        f"{module} imports {name}"
        for module in sorted(seen)
        for name in imported(modules[module].body if module in modules else [])
        if name.partition(".")[0] in SLOW
    ]
    assert len(seen) > 50 and wrong == []


def test_command_line_starts_without_torch() -> None:
    code = f"import appliance.cli, sys; print(sorted({SLOW!r} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"


def test_what_vllm_imports_of_ours_imports_nothing() -> None:
    """vLLM goes on without a plugin whose import fails (appliance/engine/plugin.py)."""
    code = "import sys, appliance.engine.plugin; print(sorted(n for n in sys.modules if n.startswith('appliance')))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "['appliance', 'appliance.engine', 'appliance.engine.plugin']\n"
