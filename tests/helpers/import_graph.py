"""What a package's source says about its structure: who imports whom, who uses whose private names, what is too long.

Everything is read with `ast`; nothing of the package is imported.  An import counts wherever it is written: at the top
of a file, inside a function (a lazy import), or under `if TYPE_CHECKING:`.  So does a text that is the dotted name of a
module of the package, because a registry imports modules by such names.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

Function = ast.FunctionDef | ast.AsyncFunctionDef

# the public interface of a named tuple, in spite of the underscores
NAMED_TUPLE = {"_asdict", "_field_defaults", "_fields", "_make", "_replace"}


class Violation(NamedTuple):
    """A rule that is broken, and where.  As text: `dkm/x.py:12: the rule`."""

    file: str
    line: int
    rule: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.rule}"


class Import(NamedTuple):
    """One module names another one; `name` is what it takes from it, if not the module itself."""

    target: str
    line: int
    name: str | None
    bound: str | None  # the name that it has in the importing module


@dataclass
class Module:
    """A file of the package."""

    name: str  # dotted: dkm.plans.rows; a package has the name of its folder
    file: str  # relative to the folder that the package is in
    tree: ast.Module
    lines: int
    imports: list[Import] = field(default_factory=list)

    @property
    def package(self) -> str:
        """The package that relative imports start from."""
        return self.name if self.file.endswith("__init__.py") else self.name.rpartition(".")[0]

    def functions(self) -> Iterator[tuple[Function, bool]]:
        """Every function, and whether it is a method: directly in a class."""
        for node in ast.walk(self.tree):
            for child in ast.iter_child_nodes(node):
                if isinstance(child, Function):
                    yield child, isinstance(node, ast.ClassDef)


def read_package(folder: Path) -> dict[str, Module]:
    """All modules of a package by their dotted names, with their imports from within the package."""
    modules = {}
    for path in sorted(folder.rglob("*.py")):
        parts = [folder.name, *path.relative_to(folder).with_suffix("").parts]
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        text = path.read_text(encoding="utf-8")
        file = path.relative_to(folder.parent).as_posix()
        modules[name] = Module(name, file, ast.parse(text, str(path)), text.count("\n"))
    for module in modules.values():
        module.imports = list(_imports(module, modules))
    return modules


def _imports(module: Module, modules: dict[str, Module]) -> Iterator[Import]:
    root = next(iter(modules)).partition(".")[0]
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name in modules:
                    yield Import(alias.name, node.lineno, None, alias.asname or alias.name)
        elif isinstance(node, ast.ImportFrom):
            above = module.package.split(".")[: len(module.package.split(".")) - max(node.level - 1, 0)]
            source = ".".join([*above, *([node.module] if node.module else [])]) if node.level else node.module or ""
            if source != root and not source.startswith(f"{root}."):
                continue
            for alias in node.names:
                bound = alias.asname or alias.name
                if f"{source}.{alias.name}" in modules:
                    yield Import(f"{source}.{alias.name}", node.lineno, None, bound)
                else:
                    yield Import(source, node.lineno, alias.name, bound)
        elif isinstance(node, ast.Constant) and _names_another(node.value, module, modules):
            yield Import(node.value, node.lineno, None, None)


def _names_another(value: object, module: Module, modules: dict[str, Module]) -> bool:
    """Whether a constant is the dotted name of another module of the package, other than one that the module is in:
    whoever looks for files next to it names its own package."""
    if not isinstance(value, str) or "." not in value or value not in modules:
        return False
    return not f"{module.name}.".startswith(f"{value}.")


# --- the rules -----------------------------------------------------------------------------------


def room(module: str) -> str:
    """What is directly in the package and holds the module: `plans`, `compress`; `__init__` for the package itself."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def against_the_order(modules: dict[str, Module], allowed: dict[str, set[str]]) -> list[Violation]:
    """Imports of rooms that the importing room may not know.  `allowed`: room -> the other rooms that it may import."""
    found = []
    for module in modules.values():
        own = room(module.name)
        for target, line, *_ in module.imports:
            if room(target) != own and room(target) not in allowed.get(own, set()):
                found.append(
                    Violation(module.file, line, f"{own} must not import {room(target)} (it imports {target})")
                )
    return found


def cycles(modules: dict[str, Module]) -> list[Violation]:
    """Modules that import each other, directly or through others: one violation for each such group."""
    reached = {name: _reachable(name, modules) for name in modules}
    groups = {frozenset(other for other in reached[name] if name in reached[other]) for name in modules}
    found = []
    for group in sorted(map(sorted, filter(None, groups))):
        module = modules[group[0]]
        line = next(made.line for made in module.imports if made.target in group)
        found.append(Violation(module.file, line, f"a cycle of imports between {', '.join(group)}"))
    return found


def _reachable(name: str, modules: dict[str, Module]) -> set[str]:
    """The modules that importing this one may lead to; itself only where there is a cycle."""
    found: set[str] = set()
    waiting = [name]
    while waiting:
        for target in {made.target for made in modules[waiting.pop()].imports if made.target in modules} - found:
            found.add(target)
            waiting.append(target)
    return found


def is_private(name: str) -> bool:
    """Whether a name begins with an underscore and is no `__special__` one."""
    return name.startswith("_") and not name.endswith("__") and name not in NAMED_TUPLE


def private_names_of_others(modules: dict[str, Module]) -> list[Violation]:
    """Private names that are imported from another module, or reached through a name that was."""
    found = []
    for module in modules.values():
        bound = {made.bound for made in module.imports if made.target != module.name}
        for target, line, name, _ in module.imports:
            private = [part for part in (name, target.rpartition(".")[2]) if part and is_private(part)]
            found += [Violation(module.file, line, f"{part} is private to {target}") for part in private]
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Attribute) and is_private(node.attr) and ast.unparse(node.value) in bound:
                rule = f"{node.attr} is private to {ast.unparse(node.value)}, which is imported"
                found.append(Violation(module.file, node.lineno, rule))
    return found


def too_long(modules: dict[str, Module], *, file_lines: int, function_lines: int) -> list[Violation]:
    """Files and functions with more lines than this; a device kernel may have any length."""
    found = []
    for module in modules.values():
        if module.lines > file_lines:
            rule = f"the file has {module.lines} lines, {file_lines} are allowed"
            found.append(Violation(module.file, file_lines + 1, rule))
        for function, _ in module.functions():
            lines = (function.end_lineno or function.lineno) - function.lineno + 1
            if lines > function_lines and not is_kernel(function):
                rule = f"{function.name} has {lines} lines, {function_lines} are allowed"
                found.append(Violation(module.file, function.lineno, rule))
    return found


def not_annotated(modules: dict[str, Module]) -> list[Violation]:
    """Functions that lack the type of a parameter or of the result.  Device kernels have none."""
    found = []
    for module in modules.values():
        for function, is_method in module.functions():
            if is_kernel(function):
                continue
            given = function.args
            ordered = [*given.posonlyargs, *given.args]
            if is_method and not any(ast.unparse(mark) == "staticmethod" for mark in function.decorator_list):
                ordered = ordered[1:]
            every = [*ordered, *given.kwonlyargs, *filter(None, (given.vararg, given.kwarg))]
            missing = [argument.arg for argument in every if argument.annotation is None]
            if function.returns is None and function.name != "__init__":
                missing.append("the result")
            if missing:
                rule = f"{function.name} has no type for {', '.join(missing)}"
                found.append(Violation(module.file, function.lineno, rule))
    return found


def is_kernel(function: Function) -> bool:
    """Whether Triton compiles it."""
    return any(ast.unparse(mark).startswith("triton.jit") for mark in function.decorator_list)


def shadowing(modules: dict[str, Module], public: set[str]) -> list[Violation]:
    """Modules and packages directly in the package whose name is also that of something public."""
    return [
        Violation(module.file, 1, f"{name} is a public name of the package: a module of that name would hide it")
        for module in modules.values()
        if module.name.count(".") == 1 and (name := room(module.name)) in public
    ]
