"""The layout of the package is what ARCHITECTURE.md says: rooms, imports one way, nothing private shared, short files.

`import_graph.py` reads the source and knows the rules; here is which rooms there are, and proof that each rule can
fail.
"""

import ast
import re
from pathlib import Path

import pytest
from import_graph import (
    against_the_order,
    cycles,
    not_annotated,
    private_names_of_others,
    read_package,
    shadowing,
    too_long,
)

import dkm

ROOT = Path(__file__).parents[2]
MODULES = read_package(ROOT / "dkm")

# Each room, and the other rooms that it may import.  A new room is added here and in ARCHITECTURE.md.
ALLOWED: dict[str, set[str]] = {
    "foundation": set(),
    "clustering": {"foundation"},
    "modelling": {"clustering", "foundation"},
    "plans": {"modelling", "clustering", "foundation"},
    "compress": {"plans", "modelling", "clustering", "foundation"},
    "formats": {"plans", "modelling", "clustering", "foundation"},
    "planning": {"formats", "plans", "modelling", "clustering", "foundation"},
    "runtime": {"formats", "plans", "modelling", "clustering", "foundation"},
    "exporters": {"formats", "compress", "plans", "modelling", "clustering", "foundation"},
    "training": {"formats", "plans", "modelling", "clustering", "foundation"},
    "integrations": {
        "exporters",
        "runtime",
        "training",
        "formats",
        "compress",
        "plans",
        "modelling",
        "clustering",
        "foundation",
    },
}
LIBRARY = set(ALLOWED) - {"integrations"}  # what `import dkm` may import
ALLOWED["__init__"] = LIBRARY
ALLOWED["app"] = {"__init__", "integrations", *LIBRARY}  # `from .. import __version__` is in __init__
ALLOWED["__main__"] = {"app"}


def report(violations: list) -> str:
    return "\n".join(map(str, sorted(violations)))


def test_every_room_is_in_the_table():
    rooms = {path.stem for path in (ROOT / "dkm").iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert rooms == set(ALLOWED)


def test_the_table_has_an_order():
    """A room that another one may import may not import that one."""
    both_ways = {(a, b) for a, allowed in ALLOWED.items() for b in allowed if a in ALLOWED[b]}
    assert not both_ways


def test_rooms_import_one_way():
    assert not (found := against_the_order(MODULES, ALLOWED)), report(found)


def test_no_module_imports_itself_through_others():
    assert not (found := cycles(MODULES)), report(found)


def test_private_names_stay_in_their_module():
    assert not (found := private_names_of_others(MODULES)), report(found)


def test_no_module_hides_a_public_name():
    assert not (found := shadowing(MODULES, set(dkm.__all__))), report(found)


def test_files_and_functions_are_short():
    assert not (found := too_long(MODULES, file_lines=450, function_lines=60)), report(found)


def test_no_call_has_many_arguments_without_names():
    """Eight arguments in a row cannot be told apart by a reader."""
    calls = [
        f"{module.file}:{node.lineno}: {ast.unparse(node.func)} has {len(node.args)} arguments without names"
        for module in MODULES.values()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call) and len(node.args) > 8
    ]
    assert not calls, "\n".join(calls)


def test_every_function_has_types():
    assert not (found := not_annotated(MODULES)), report(found)


def test_the_graph_is_not_empty():
    """Against a builder that finds nothing and so never complains."""
    assert len(MODULES) > 40
    edges = {(module.name, made.target) for module in MODULES.values() for made in module.imports}
    assert ("dkm.compress", "dkm.plans.plan") in edges
    assert ("dkm.__main__", "dkm.app.cli") in edges
    assert ("dkm.clustering.cluster", "dkm.clustering.kernels") in edges


def test_architecture_md_names_every_room():
    page = ROOT / "ARCHITECTURE.md"
    assert page.exists(), "ARCHITECTURE.md is missing"
    text = page.read_text(encoding="utf-8")
    rooms = {f"{name}/" if (ROOT / "dkm" / name).is_dir() else f"{name}.py" for name in ALLOWED} - {"__init__.py"}
    missing = {room for room in rooms - {"__main__.py"} if not re.search(rf"\b{re.escape(room)}", text)}
    assert not missing, f"ARCHITECTURE.md does not name {', '.join(sorted(missing))}"


def test_architecture_md_names_nothing_that_does_not_exist():
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    paths = set(re.findall(r"\b(?:dkm|tests|docs|benchmarks|examples)/[\w/.-]*\w", text))
    absent = {path for path in paths if not (ROOT / path).exists()}
    assert not absent, f"ARCHITECTURE.md names {', '.join(sorted(absent))}"


# --- each rule can fail --------------------------------------------------------------------------


def package(folder: Path, **files: str) -> dict:
    """A small package `house`, read as dkm is; in the names of files `__` stands for a slash."""
    for name, text in files.items():
        path = folder / "house" / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        for above in (path.parent, folder / "house"):
            (above / "__init__.py").touch()
        path.write_text(text)
    return read_package(folder / "house")


ORDER = {"ground": set(), "roof": {"ground"}}

BACK_EDGES = {
    "relative": "from ..roof import tiles\n",
    "a name of a module": "from ..roof.tiles import lay\n",
    "a module of a package": "from .. import roof\n",
    "absolute": "import house.roof.tiles\n",
    "absolute, from": "from house.roof import tiles\n",
    "lazy": "def build() -> None:\n    from ..roof import tiles\n",
    "for types only": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ..roof.tiles import lay\n",
    "by name": 'import importlib\nimportlib.import_module("house.roof.tiles")\n',
}


@pytest.mark.parametrize("case", BACK_EDGES)
def test_a_back_edge_is_found(case: str, tmp_path: Path):
    modules = package(tmp_path, roof__tiles="def lay(): ...\n", ground__floor=BACK_EDGES[case])
    (found,) = against_the_order(modules, ORDER)
    line = next(i for i, text in enumerate(BACK_EDGES[case].splitlines(), 1) if "roof" in text)
    assert str(found).startswith(f"house/ground/floor.py:{line}: ground must not import roof")


def test_the_allowed_direction_is_no_back_edge(tmp_path: Path):
    modules = package(tmp_path, roof__tiles="from ..ground.floor import x\nimport os\n", ground__floor="x = 1\n")
    assert not against_the_order(modules, ORDER)
    assert [made.target for made in modules["house.roof.tiles"].imports] == ["house.ground.floor"]


def test_a_room_that_is_not_in_the_table_may_import_nothing(tmp_path: Path):
    modules = package(tmp_path, cellar__wine="from ..ground import floor\n", ground__floor="")
    assert "cellar must not import ground" in report(against_the_order(modules, ORDER))


CYCLES = {
    "two": dict(a="from . import b\n", b="from .a import x\n"),
    "two, one of them lazy": dict(a="from . import b\n", b="def f():\n    from . import a\n"),
    "three": dict(a="from . import b\n", b="from . import c\n", c="from . import a\n"),
    "in a package": dict(p__a="from . import b\n", p__b="from ..p import a\n"),
}


@pytest.mark.parametrize("case", CYCLES)
def test_a_cycle_is_found(case: str, tmp_path: Path):
    (found,) = cycles(package(tmp_path, d="from . import e\n", e="", **CYCLES[case]))
    names = ", ".join(f"house.{name.replace('__', '.')}" for name in sorted(CYCLES[case]))
    assert found.rule == f"a cycle of imports between {names}"
    assert found.line == 1


def test_a_diamond_is_no_cycle(tmp_path: Path):
    files = dict(a="from . import b, c\n", b="from . import d\n", c="from . import d\n", d="")
    assert not cycles(package(tmp_path, **files))


def test_the_name_of_its_own_package_is_no_import(tmp_path: Path):
    """A module that looks for files next to it names its package."""
    texts = dict(p__a='x = files("house.p")\n', p__b="from . import a\n")
    modules = package(tmp_path, **texts)
    (tmp_path / "house" / "p" / "__init__.py").write_text("from . import a\n")
    assert not modules["house.p.a"].imports
    assert not cycles(read_package(tmp_path / "house"))


PRIVATE = {
    "imported": "from .b import _x\n",
    "imported, renamed": "from .b import _x as y\n",
    "through a module": "from . import b\nb._x()\n",
    "through a renamed module": "from . import b as c\n_ = [c._x for _ in ()]\n",
    "through a dotted name": "import house.b\nhouse.b._x()\n",
    "through a class": "from .b import B\nB._x()\n",
}


@pytest.mark.parametrize("case", PRIVATE)
def test_a_private_name_of_another_module_is_found(case: str, tmp_path: Path):
    found = private_names_of_others(package(tmp_path, a=PRIVATE[case], b=""))
    assert [(each.file, each.line) for each in found] == [("house/a.py", PRIVATE[case].count("\n"))]
    assert found[0].rule.startswith("_x is private to ")


@pytest.mark.parametrize(
    "text",
    [
        "from .b import x\n",
        "from . import __version__\n",
        "class A:\n    def f(self):\n        return self._x\n",
        "import torch\ntorch._dynamo.reset()\n",  # of another package: not for this rule
        "from .b import B\nB._fields\n",  # the interface of a named tuple
    ],
)
def test_what_is_not_private_to_another_module(text: str, tmp_path: Path):
    assert not private_names_of_others(package(tmp_path, a=text, b=""))


def test_a_private_module_is_private(tmp_path: Path):
    assert private_names_of_others(package(tmp_path, a="from ._b import x\n", _b=""))


def test_length_is_counted_to_the_line(tmp_path: Path):
    def function(lines: int, mark: str = "") -> str:
        return f"{mark}def f():\n" + "    x = 1\n" * (lines - 1)

    def found(text: str) -> list[str]:
        return list(map(str, too_long(package(tmp_path, a=text), file_lines=10, function_lines=5)))

    assert found(function(5)) == []
    assert found("\n" + function(6)) == ["house/a.py:2: f has 6 lines, 5 are allowed"]
    assert found("\n" * 10) == []
    assert found("\n" * 11) == ["house/a.py:11: the file has 11 lines, 10 are allowed"]
    assert found(function(6, "import triton\n@triton.jit\n")) == []
    assert found(function(6, "import triton\n@triton.jit(do_not_specialize=[1])\n")) == []
    assert found(function(6, "@cache\n")) != []


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ("def f(x: int) -> int: ...\n", None),
        ("def f(x) -> int: ...\n", "x"),
        ("def f(x: int): ...\n", "the result"),
        ("def f(*x, **y: int) -> int: ...\n", "x"),
        ("class A:\n    def __init__(self, x: int): ...\n", None),
        ("class A:\n    @staticmethod\n    def f(x) -> int: ...\n", "x"),
        ("def f() -> None:\n    def g(y): ...\n", "y, the result"),
        ("import triton\n@triton.jit\ndef f(x): ...\n", None),
    ],
)
def test_a_missing_type_is_found(text: str, missing: str | None, tmp_path: Path):
    rules = [found.rule.partition(" has no type for ")[2] for found in not_annotated(package(tmp_path, a=text))]
    assert rules == ([] if missing is None else [missing])


def test_a_module_that_hides_a_public_name_is_found(tmp_path: Path):
    modules = package(tmp_path, plan__rows="", compress="", other="")
    found = shadowing(modules, {"plan", "compress", "rows"})
    assert sorted(each.file for each in found) == ["house/compress.py", "house/plan/__init__.py"]
