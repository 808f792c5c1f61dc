"""A name that outlives three lines says what the thing is: a noun, or a verb with an object."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

FOLDERS = ("appliance", "benchmarks", "container", "examples", "flashrl_compat", "plugin", "tests")
OUTLIVES = 3  # lines after the one that binds it
NAMELESS = re.compile(
    r"_*(?:each|found|said|told|kept|held|own|of|made|got"  # they name no thing
    r"|watched|governed|go_on|keeper|ahead|pays|said_failures"  # nor do these, which the program had once
    r"|given|wanted|asked|one|what|named|by|had"
    r"|Shown|Heard|Asked|Spoken|Look|Story|Order|Some|Ask|Judged)_*|(?i:.*(?:utils?|helper|manager))"
)
IN_FILES_OF_A_RUN = {
    "appliance/record/events.py: Event.what",
    "appliance/record/events.py: append_event.what",
}
"""Fields that are keys of events.jsonl."""
OF_LIBRARIES = {
    "appliance/trainer/rewards.py: _TellingPool.__init__._pool_manager",
    "appliance/trainer/rewards.py: _TellingProcesses.__init__.worker_manager",
    "appliance/trainer/trainer.py: ApplianceTrainer._restart_engines.llm_server_manager",
    "tests/engine/test_engine_routes.py: Model.__init__.one",
}
"""Attributes of pebble's pool, of verl's trainer, and of a module, whose tensors have its name."""
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


class _Scope:
    """A module, class, function or comprehension."""

    def __init__(self, node: ast.AST, around: _Scope | None) -> None:
        self.node, self.around = node, around
        self.bound: set[str] = set()
        """Names that it binds itself."""
        self.declared: set[str] = set()
        """Names that `global` or `nonlocal` gives to a scope around it."""

    def binder(self, name: str) -> _Scope | None:
        """The scope whose binding a name here is, by Python's rules. None: a builtin, or nobody's."""
        scope: _Scope | None = self
        while scope is not None:
            # The names of a class are seen in its body, not in its methods.
            is_seen = scope is self or not isinstance(scope.node, ast.ClassDef)
            if is_seen and name in scope.bound:
                return scope
            scope = scope.around
        return None

    @property
    def function(self) -> _Scope:
        """The innermost scope around that is no comprehension: where `:=` binds."""
        return self.around.function if isinstance(self.node, _COMPREHENSIONS) and self.around else self

    @property
    def title(self) -> str:
        """`Class.method`, empty for a module."""
        names = [self.around.title if self.around else "", getattr(self.node, "name", "")]
        return ".".join(filter(None, names))


class _Names(ast.NodeVisitor):
    """Every place of every name in a module, with the scope that it is in."""

    def __init__(self, tree: ast.Module) -> None:
        self.scope = _Scope(tree, None)
        self.places: list[tuple[_Scope, str, int]] = []
        """(scope, name, line) where a name is bound or read."""
        self.lasting: list[tuple[_Scope, str]] = []
        """Functions, classes and attributes: they outlive any number of lines."""
        self.imported: set[tuple[_Scope, str]] = set()
        self.generic_visit(tree)

    def bind(self, name: str, node: ast.AST, *, scope: _Scope | None = None) -> None:
        scope = scope or self.scope
        if name not in scope.declared:
            scope.bound.add(name)
        self.places.append((scope, name, node.lineno))

    @contextmanager
    def within(self, node: ast.AST) -> Iterator[None]:
        self.scope = _Scope(node, self.scope)
        yield
        self.scope = self.scope.around

    def visit_all(self, nodes: Iterable[ast.AST | None]) -> None:
        for node in filter(None, nodes):
            self.visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load):
            self.places.append((self.scope, node.id, node.lineno))
        else:
            self.bind(node.id, node)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self.bind(node.target.id, node.target, scope=self.scope.function)
        self.visit(node.value)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if not isinstance(node.ctx, ast.Load) and ast.unparse(node.value) == "self":
            self.lasting.append((self.scope, node.attr))
        self.generic_visit(node)

    def visit_For(self, node: ast.For | ast.AsyncFor) -> None:
        self.generic_visit(node)
        # The names live as long as the loop: whoever reads the body has to know them.
        names = [each.id for each in ast.walk(node.target) if isinstance(each, ast.Name)]
        self.places += [(self.scope, name, node.body[-1].end_lineno) for name in names]

    visit_AsyncFor = visit_For

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> None:
        if not isinstance(node, ast.Lambda):
            self.bind(node.name, node)
            self.lasting.append((self.scope, node.name))
            self.visit_all(node.decorator_list)
        self.visit_all([*node.args.defaults, *node.args.kw_defaults])
        with self.within(node):
            self.visit_all(each for each in ast.iter_child_nodes(node.args) if isinstance(each, ast.arg))
            self.visit_all(node.body if isinstance(node.body, list) else [node.body])

    visit_AsyncFunctionDef = visit_Lambda = visit_FunctionDef

    def visit_arg(self, node: ast.arg) -> None:
        self.bind(node.arg, node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.bind(node.name, node)
        self.lasting.append((self.scope, node.name))
        self.visit_all([*node.decorator_list, *node.bases, *node.keywords])
        with self.within(node):
            self.visit_all(node.body)
            self.lasting += [(self.scope, name) for name in self.scope.bound]

    def visit_ListComp(self, node: ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp) -> None:
        first, *others = node.generators
        self.visit(first.iter)  # outside, by Python's rules
        with self.within(node):
            self.visit_all([first.target, *first.ifs, *others])
            self.visit_all([node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt])

    visit_SetComp = visit_DictComp = visit_GeneratorExp = visit_ListComp

    def visit_Global(self, node: ast.Global | ast.Nonlocal) -> None:
        self.scope.declared |= set(node.names)

    visit_Nonlocal = visit_Global

    def visit_alias(self, node: ast.alias) -> None:
        self.bind(name := node.asname or node.name.partition(".")[0], node)
        if not node.asname:  # it is named where it is defined
            self.imported.add((self.scope, name))

    def visit_with_name(self, node: ast.ExceptHandler | ast.MatchAs | ast.MatchStar) -> None:
        if node.name:
            self.bind(node.name, node)
        self.generic_visit(node)

    visit_ExceptHandler = visit_MatchAs = visit_MatchStar = visit_with_name


def long_lived(text: str) -> list[str]:
    """Names of a module that outlive three lines, each with the class and function that it is bound in."""
    names = _Names(ast.parse(text))
    lines: dict[tuple[_Scope, str], list[int]] = defaultdict(list)
    for scope, name, line in names.places:
        if binder := scope.binder(name):
            lines[binder, name].append(line)
    lasting = {(scope, name) for (scope, name), at in lines.items() if max(at) - min(at) >= OUTLIVES}
    lasting = (lasting | set(names.lasting)) - names.imported
    return sorted(f"{scope.title}.{name}".strip(".") for scope, name in lasting)


def nameless(text: str) -> list[str]:
    return [name for name in long_lived(text) if NAMELESS.fullmatch(name.rpartition(".")[2])]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("found = 1\n1\n2\nfound", ["found"]),
        ("found = 1\n1\nfound", []),
        ("found = 1\n2\n3\nfounder = 4", []),
        ("def f(each):\n 1\n 2\n return each", ["f.each"]),
        ("def f(*, each, **own):\n 1\n 2\n return each, own", ["f.each", "f.own"]),
        ("def f():\n found = 1\n def g():\n  2\n  return found", ["f.found"]),
        ("def f():\n found = 1\n def g(found):\n  2\n  return found", []),
        ("def f(found):\n def g():\n  nonlocal found\n  found = 1", ["f.found"]),
        ("for each in a: 1\nfor other in b: 2\nfor each in c: 3", []),
        ("for each in a:\n each\n 2\n 3", ["each"]),
        ("for each in a:\n each\n 2", []),
        ("for one, (two, said) in a:\n 1\n 2\n 3", ["one", "said"]),
        ("async def f():\n async for made in a:\n  1\n  2\n  3", ["f.made"]),
        ("for each in a: 1\n2\n3\nfor each in c: 3", ["each"]),
        ("a = [each for each in b]\n1\n2\nc = [each for each in d]", []),
        ("a = [\n each\n for b in c\n for each in b\n]", []),
        ("a = [\n each\n for b in c\n if b\n for each in b\n]", ["each"]),
        ("a = [each for each in b if (found := each)]\n1\n2\nfound", ["found"]),
        ("each = 1\n2\n3\na = [each for each in b]", []),
        ("each = 1\n2\n3\na = [each for each in each]", ["each"]),
        ("with a as held:\n 1\n 2\n held", ["held"]),
        ("try: 1\nexcept E as said:\n 1\n 2\n said", ["said"]),
        ("match a:\n case [*own]:\n  1\n  2\n  own", ["own"]),
        ("import a as made\n1\n2\nmade", ["made"]),
        ("from a import made\n1\n2\nmade", []),
        ("from a import made\n1\ndef f(made):\n 3\n 4\n made", ["f.made"]),
        ("f(lambda own: [\n 1,\n 2,\n own])", ["own"]),
        ("class A:\n held: int = 0", ["A.held"]),
        ("found = 1\nclass A:\n found = 2\n def f(self): return found", ["A.found", "found"]),
        ("class A:\n def of(self): pass", ["A.of"]),
        ("class A:\n held = 1\n2\n3\nheld", ["A.held"]),
        ("class A:\n def f(self): self.got = 1", ["A.f.got"]),
        ("class A:\n def f(self, verls): verls.got = 1", []),
        ("def told(): pass", ["told"]),
        ("class ThreadManager: pass\nclass Managers: pass\ndef path_utils(): pass", ["ThreadManager", "path_utils"]),
    ],
)
def test_a_name_lives_from_its_binding_to_its_last_place(text: str, names: list[str]) -> None:
    assert nameless(text) == names


def test_names_say_what_a_thing_is(root: Path) -> None:
    """Names of files, too."""
    nameless_places: list[str] = []
    for path in (file for folder in FOLDERS for file in sorted((root / folder).rglob("*.py"))):
        file = str(path.relative_to(root))
        names = [path.stem] if NAMELESS.fullmatch(path.stem) else []
        places = [f"{file}: {name}" for name in names + nameless(path.read_text())]
        nameless_places += [place for place in places if place not in IN_FILES_OF_A_RUN | OF_LIBRARIES]
    assert nameless_places == []
