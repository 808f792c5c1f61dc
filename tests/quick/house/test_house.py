"""The habits of the house: sizes, names, one place for each kind of thing."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from appliance import tasks

WRITTEN_BY_HAND = ("*.py", "*.sh", "*.md", "*.yaml", "*.yml", "*.toml", "Makefile", "Dockerfile", ".ci/run")

# A broad `except` is a boundary: the command line, a user's reward function, a model's program, the outermost line of a
# child, the page that the launcher writes beside its work, the start of an engine, and the end of the backends of
# `logging.backends`.
BOUNDARIES = {
    *("cli", "quant.checkpoint", "quant.loading", "record.events", "report.page", "record.engine_start"),
    *("tasks.code_child", "tasks.first_answers", "tasks.grading", "tasks.sample", "tasks.templates", "tasks.tools"),
    *("trainer.engines", "trainer.entry", "trainer.fit", "trainer.forks", "trainer.rewards"),
}
OF_A_TOPOLOGY = {
    *("nodes", "gpus_per_node", "gpus", "world_size", "engines", "replica", "replicas", "rank"),
    *("tensor_parallel", "tensor_parallel_size", "sequence_parallel", "data_parallel"),
}
IMPORT_TORCH = ("tiny_model",)
UNFINISHED = re.compile(r"\b(?:TO" + r"DO|FIX" + r"ME)\b")
OF_ONE_MACHINE = re.compile(r"(?<![\w.}])/(?:home|root|Users|work)/\w")


def hand_written(root: Path) -> Iterator[Path]:
    rooms = [
        root,
        root / ".ci",
        *map(root.joinpath, ("appliance", "benchmarks", "container", "docs", "flashrl_compat", "recipes")),
        *map(root.joinpath, ("requirements", "tests")),
    ]
    for pattern in WRITTEN_BY_HAND:
        yield from root.glob(pattern)
        for room in rooms[2:]:
            yield from room.rglob(pattern)


def calls(tree: ast.AST, name: str) -> bool:
    return any(
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name
        for node in ast.walk(tree)
    )


def strings(tree: ast.AST) -> set[str]:
    return {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def catches_everything(handler: ast.ExceptHandler) -> bool:
    caught = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(kind is None or ast.unparse(kind) in ("Exception", "BaseException") for kind in caught)


def test_only_the_console_prints(modules: dict[str, ast.Module]) -> None:
    wrong = [m for m, tree in modules.items() if m != "console" and (calls(tree, "print") or calls(tree, "Console"))]
    assert wrong == []


def test_broad_except_only_at_boundaries(modules: dict[str, ast.Module]) -> None:
    wrong = {
        module
        for module, tree in modules.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ExceptHandler) and catches_everything(node)
    }
    assert wrong - BOUNDARIES == set()


PLACELESS = {
    "errors: RecipeError.retold": 2,  # of lines that begin with their places
    "recipe.load: _parent": 3,  # whoever calls it places them at `extends`
}
"""Faults without a place of their own, by function: how many, and why."""


def placeless_faults(tree: ast.Module) -> Iterator[str]:
    """Functions with a fault of no keys and of no `where`, once for each such fault."""

    def within(node: ast.AST, title: str) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            is_scope = isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            name = f"{title}.{child.name}".strip(".") if is_scope else title
            if isinstance(child, ast.Call) and ast.unparse(child.func) == "fault" and child.args:
                has_where = any(keyword.arg == "where" for keyword in child.keywords)
                if ast.unparse(child.args[0]) == "()" and not has_where:
                    yield title
            yield from within(child, name)

    return within(tree, "")


def test_a_fault_has_a_place(modules: dict[str, ast.Module]) -> None:
    assert list(placeless_faults(ast.parse("def f():\n fault((), 'x')\n fault((), 'x', where='y')"))) == ["f"]
    places = Counter(f"{module}: {name}" for module, tree in modules.items() for name in placeless_faults(tree))
    assert places == PLACELESS


def test_only_verl_args_knows_verls_keys(modules: dict[str, ast.Module]) -> None:
    key = re.compile(r"^\+{0,2}(?:actor_rollout_ref|algorithm|critic|data|trainer|ray_kwargs)\.\w+")
    known = {text for text in strings(modules["plan.verl_args"]) if key.match(text)}
    assert known
    verl_only = re.compile(r"^\+{0,2}(?:actor_rollout_ref|ray_kwargs)\.")
    wrong = {
        f"{module}: {text}"
        for module, tree in modules.items()
        if module != "plan.verl_args"
        for text in strings(tree)
        if verl_only.match(text)
    }
    assert wrong == set()


def test_environment_of_children_is_named_in_one_file(modules: dict[str, ast.Module]) -> None:
    variable = re.compile(r"^(?!HF_)[A-Z][A-Z0-9]*_[A-Z0-9_]+$")  # HF_* is also the launcher's own
    variables = {text for text in strings(modules["terms.environment"]) if variable.match(text)}
    assert variables
    wrong = {
        f"{module}: {text}"
        for module, tree in modules.items()
        if module != "terms.environment"
        for text in strings(tree)
        if text in variables or re.match(r"^APPLIANCE_[A-Z_]+$", text)
    }
    assert wrong == set()


def test_how_python_starts_a_module_is_said_in_one_file(modules: dict[str, ast.Module]) -> None:
    """Without `-P` the files of the user's folder would take the place of modules."""
    assert [module for module, tree in modules.items() if "-m" in strings(tree)] == ["processes"]


def test_a_field_is_described_below_it(root: Path) -> None:
    """Where an editor shows it, and not as `name: text` in the docstring of its class; an argument, in `__init__`."""
    files = [
        file
        for room in ("appliance", "benchmarks", "container", "flashrl_compat")
        for file in (root / room).rglob("*.py")
    ]
    classes = [
        (file, node)
        for file in files
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ClassDef)
    ]
    with_fields = [(file, node, names) for file, node in classes if (names := fields_of(node))]
    wrong = [
        f"{file.relative_to(root)}: {node.name}: {found[0].strip()}"
        for file, node, names in with_fields
        for found in re.finditer(
            rf"(?:^|[^\w ] +|\n *)(?:\w+(?:, | / | and ))*(?:{names}): ", ast.get_docstring(node) or ""
        )
    ]
    assert len(with_fields) > 200 and wrong == []


def fields_of(node: ast.ClassDef) -> str:
    """Names of annotated fields, of what a method stores in `self`, and of what `__init__` takes, as alternatives of a
    pattern."""
    names = [
        child.target.id
        for child in node.body
        if isinstance(child, ast.AnnAssign) and isinstance(child.target, ast.Name)
    ]
    names += [
        part.attr
        for part in ast.walk(node)
        if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store) and ast.unparse(part.value) == "self"
    ]
    for method in node.body:
        if isinstance(method, ast.FunctionDef) and method.name == "__init__":
            names += [argument.arg for argument in (*method.args.args[1:], *method.args.kwonlyargs)]
    return "|".join(dict.fromkeys(names))


def test_the_ranks_of_a_topology_are_computed_in_one_place(modules: dict[str, ast.Module]) -> None:
    """What nodes, GPUs and shares of them come to together: `Topology`. Divisibility and bytes a node are others'."""
    wrong = [
        f"{module}: {ast.unparse(node)}"
        for module, tree in modules.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult | ast.FloorDiv)
        if module != "terms.devices" and {name_of(node.left), name_of(node.right)} <= OF_A_TOPOLOGY
    ]
    assert wrong == []


def name_of(node: ast.expr) -> str:
    """The last part of a name, also where its length is meant."""
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "len":
        return name_of(node.args[0])
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def test_nothing_is_unfinished_or_bound_to_one_machine(root: Path) -> None:
    wrong = [
        f"{path.relative_to(root)}:{number}: {line.strip()}"
        for path in hand_written(root)
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if UNFINISHED.search(line) or OF_ONE_MACHINE.search(line)
    ]
    assert wrong == []


def test_every_test_file_holds_a_test(root: Path) -> None:
    files = [path for path in (root / "tests").rglob("*.py") if path.name != "conftest.py"]
    holds_one = {path: re.search(r"^def test_", path.read_text(), re.M) is not None for path in files}
    assert [str(path) for path, holds in holds_one.items() if holds != path.name.startswith("test_")] == []


def test_no_group_is_possessive(root: Path) -> None:
    """Before Python 3.11.5 a possessive group may fail to match, without a word (python/cpython#106052): Debian 12's
    Python is 3.11.2, where the reward `format` gave 0 to every right response. A character or a class may be.

    Sources are searched, and the compiled patterns of tasks, which may be put together of parts."""
    possessive = re.compile(r"[)}](?:[*+?]|\{+[\d,]+\}+)\+|\(\?>")
    rooms = [root / room for room in ("appliance", "flashrl_compat", "benchmarks", "container")]
    lines = [
        f"{file.relative_to(root)}:{number}"
        for room in rooms
        for file in room.rglob("*.py")
        for number, line in enumerate(file.read_text().splitlines(), start=1)
        if possessive.search(line.replace(r"\}", "").replace(r"\)", ""))
    ]
    assert lines == []
    names = [module.name for module in pkgutil.walk_packages(tasks.__path__, f"{tasks.__name__}.")]
    modules = [importlib.import_module(name) for name in names if name.rpartition(".")[2] not in IMPORT_TORCH]
    patterns = {value.pattern for module in modules for value in vars(module).values() if isinstance(value, re.Pattern)}
    assert len(patterns) > 60
    assert [pattern for pattern in patterns if has_possessive_group(re._parser.parse(pattern))] == []


def has_possessive_group(items: Iterable[object]) -> bool:
    """items: of a parsed pattern."""
    for item in items:
        if isinstance(item, tuple) and str(item[0]) == "ATOMIC_GROUP":
            return True
        if isinstance(item, tuple) and str(item[0]) == "POSSESSIVE_REPEAT":
            _, _, repeated = item[1]
            if len(repeated) != 1 or str(repeated[0][0]) not in ("LITERAL", "NOT_LITERAL", "IN", "ANY", "CATEGORY"):
                return True
        is_nested = isinstance(item, (tuple, list, re._parser.SubPattern))
        if is_nested and has_possessive_group(item):
            return True
    return False
