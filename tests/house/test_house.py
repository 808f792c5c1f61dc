"""The habits of the house: sizes, names, one place for each kind of thing."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

MAX_LINES = 400
WRITTEN_BY_HAND = ("*.py", "*.sh", "*.md", "*.yaml", "*.yml", "*.toml", "Makefile", "Dockerfile", ".ci/run")

# A broad `except` is a boundary: the command line, a user's reward function, the outermost line of a child, the page
# that the launcher writes beside its work, and the end of the backends of `logging.backends`.
BOUNDARIES = {
    *("cli", "run.events", "run.report.write"),
    *("trainer.engines", "trainer.entry", "trainer.reward_pool", "trainer.tracking_end"),
}
VAGUE = re.compile(r"(?i)utils?$|helper|manager$")
UNFINISHED = re.compile(r"\b(?:TO" + r"DO|FIX" + r"ME)\b")
OF_ONE_MACHINE = re.compile(r"(?<![\w.}])/(?:home|root|Users|work)/\w")


def hand_written(root: Path) -> Iterator[Path]:
    rooms = [
        root,
        root / ".ci",
        *(root / name for name in ("appliance", "container", "docs", "recipes", "requirements", "tests")),
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


def test_no_file_is_long(root: Path) -> None:
    lengths = {str(path.relative_to(root)): len(path.read_text().splitlines()) for path in hand_written(root)}
    assert {path: lines for path, lines in lengths.items() if lines > MAX_LINES} == {}


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
    named = {text for text in strings(modules["plan.env"]) if variable.match(text)}
    assert named
    wrong = {
        f"{module}: {text}"
        for module, tree in modules.items()
        if module != "plan.env"
        for text in strings(tree)
        if text in named or re.match(r"^APPLIANCE_[A-Z_]+$", text)
    }
    assert wrong == set()


def test_names_say_what_a_thing_is(modules: dict[str, ast.Module]) -> None:
    defined = {
        f"{module}.{node.name}": node.name
        for module, tree in modules.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    }
    names = defined | {module: module.rpartition(".")[2] for module in modules}
    assert {place for place, name in names.items() if VAGUE.search(name)} == set()


def test_nothing_is_unfinished_or_bound_to_one_machine(root: Path) -> None:
    wrong = [
        f"{path.relative_to(root)}:{number}: {line.strip()}"
        for path in hand_written(root)
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if UNFINISHED.search(line) or OF_ONE_MACHINE.search(line)
    ]
    assert wrong == []


def test_every_recipe_is_in_the_readme_and_in_make_help(root: Path) -> None:
    recipes = sorted(path.stem for path in (root / "recipes").glob("*.yaml") if path.stem != "reference")
    shown = subprocess.run(["make", "help"], cwd=root, capture_output=True, text=True, check=True).stdout
    readme = (root / "README.md").read_text()
    assert recipes
    assert [name for name in recipes if f"make {name} " not in shown or f"`{name}`" not in readme] == []


def test_every_test_that_security_names_is_there(root: Path) -> None:
    named = set(re.findall(r"`(?:tests/\w+/)?(test_\w+)(?:\.py)?`", (root / "SECURITY.md").read_text()))
    assert len(named) > 10
    assert named - {path.stem for path in root.glob("tests/*/test_*.py")} == set()


def test_every_allowed_skip_names_a_test_and_a_reason(root: Path) -> None:
    lines = [line for line in (root / "tests/skips.txt").read_text().splitlines() if line and line[0] != "#"]
    assert [line for line in lines if not re.match(r"tests/\S+\.py\S*: \S", line)] == []
    assert [line for line in lines if not (root / re.split(r"::|: ", line)[0]).is_file()] == []


def test_every_test_file_holds_a_test(root: Path) -> None:
    def holds_a_test(path: Path) -> bool:
        return any(
            isinstance(n, ast.FunctionDef) and n.name.startswith("test_") for n in ast.parse(path.read_text()).body
        )

    files = [path for path in (root / "tests").rglob("*.py") if path.name != "conftest.py"]
    assert [str(p) for p in files if holds_a_test(p) != p.name.startswith("test_")] == []
