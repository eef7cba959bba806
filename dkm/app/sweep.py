"""Several runs of the same settings in one folder, each with a plan or a size, a method and a seed of its own."""

import json
import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from ..foundation.atomic import write_atomically
from .errors import Problem, reason_of
from .places import located
from .settings import FIELDS, as_number, flag, make, read

SIZED = ("plan", "target_size")  # each value of these is a run,
VARIED = ("method", "seed")  # with each value of these
SWEPT = (*SIZED, *VARIED)
FOR_SIZES = ("allocator", "episodes")  # settings that say nothing to the run of a plan
REFUSED = "refused.json"  # in the folder of a sweep: the runs that their methods cannot make, and why
OF_A_METHOD = re.compile(r"\s*([A-Za-z][\w-]*)\s*=(.*)", re.DOTALL)  # a plan that one method alone has


@dataclass(frozen=True)
class Planned:
    """One of the runs: what it has of its own, and its folder."""

    own: dict[str, Any]
    folder: Path

    @property
    def flags(self) -> str:
        """What it has of its own, as it would be typed."""
        pairs = [(name, item) for name, value in self.own.items() for item in _items(value)]
        return shlex.join(word for name, item in pairs for word in (flag(name), str(item)))


class Sweep:
    """The folder of a sweep: `sweep.toml`, which says what to run, and a folder for each run."""

    def __init__(self, folder: Path, values: dict[str, list[Any]], common: dict[str, Any]):
        self.folder, self.values, self.common = folder, values, common

    @property
    def file(self) -> Path:
        """What the sweep consists of."""
        return self.folder / "sweep.toml"

    def runs(self) -> list[Planned]:
        """The runs in their order.

        A folder has the name of the plan or the size, and of a method and a seed other than the default: so it keeps
        its name where values are added.
        """
        sized = [(setting, value, *_divided(value)) for setting in SIZED for value in self.values[setting]]
        names = _different(folder_name(text) for _, _, _, text in sized)
        methods = self.values["method"] or [None]
        method_names = _different(folder_name(method or "") for method in methods)
        found = []
        for seed, (at, (setting, value, only, text)), (number, method) in product(
            self.values["seed"] or [None], enumerate(sized), enumerate(methods)
        ):
            own = {setting: text if setting == "plan" else value} | _settings_of_method(method)
            if setting == "plan" and only and only != self.method(own):
                continue
            parts = [names[at]]
            parts += [method_names[number]] if method not in (None, FIELDS["method"].default) else []
            parts += [f"seed-{seed}"] if seed not in (None, FIELDS["seed"].default) else []
            own |= {} if seed is None else {"seed": seed}
            found.append(Planned(own, self.folder / "_".join(parts)))
        return found

    def method(self, own: dict[str, Any]) -> str:
        """The method of a run."""
        return str(own.get("method", self.common.get("method", FIELDS["method"].default)))

    def settings_of(self, planned: Planned) -> dict[str, Any]:
        """What a run has in common with the others, and what it has of its own."""
        left_out = FOR_SIZES if "plan" in planned.own else ()
        common = {name: value for name, value in self.common.items() if name not in left_out}
        options = [*common.get("method_option", ()), *planned.own.get("method_option", ())]
        both = common | planned.own | ({"method_option": options} if options else {})
        return both | {"out": str(planned.folder)}

    def check(self) -> None:
        """Problem where a run has a wrong setting, or a plan is for a method that no run has."""
        runs = self.runs()
        for planned in runs:
            make(self.settings_of(planned))
        there = {self.method(planned.own) for planned in runs} | {self.method({})}
        for plan in self.values["plan"]:
            if (only := _divided(plan)[0]) and only not in there:
                raise Problem(f"the plan '{plan}' is for the method {only}: give --method {only} too, or leave it out")
        if not runs:
            raise Problem("how small? give --plan or --target-size, each as often as there are to be runs")

    def write(self) -> None:
        """Write `sweep.toml`, so that the sweep can be resumed."""
        given = {**{name: values for name, values in self.values.items() if values}, **self.common}
        lines = [f"{name.replace('_', '-')} = {json.dumps(value, ensure_ascii=False)}" for name, value in given.items()]
        self._write(self.file, "\n".join(lines) + "\n")

    def write_refused(self, refused: dict[str, str]) -> None:
        """Write down which runs cannot be made, by the names of their folders, and why."""
        self._write(self.folder / REFUSED, json.dumps(refused, ensure_ascii=False, indent=1) + "\n")

    def _write(self, file: Path, text: str) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_atomically(file, text)
        except OSError as error:
            raise Problem(f"cannot write {file}: {reason_of(error)}") from None


def read_refused(folder: Path) -> dict[str, str]:
    """What `write_refused` wrote; empty where it wrote nothing."""
    try:
        found = json.loads((folder / REFUSED).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {str(name): str(why) for name, why in found.items()} if isinstance(found, dict) else {}


def folder_name(value: str) -> str:
    """A plan, a size or a method as the name of a folder: cv-4-4_fc-8."""
    words = [re.sub(r"[^A-Za-z0-9.]+", "-", part).strip("-.") for part in value.split(",")]
    return "_".join(filter(None, words))[:60] or "run"


def _different(names: Iterable[str]) -> list[str]:
    """The names, with a number where two plans differ in signs only."""
    found: list[str] = []
    for name in names:
        number, free = 2, name
        while free in found:
            free, number = f"{name}-{number}", number + 1
        found.append(free)
    return found


def _divided(plan: str) -> tuple[str, str]:
    """`bwn=all:1 scaled` -> the method that alone has the plan, or "", and the plan."""
    found = OF_A_METHOD.fullmatch(plan)
    return (found[1], found[2].strip()) if found else ("", plan)


def _settings_of_method(text: str | None) -> dict[str, Any]:
    """`quant_noise p=0.2 lr=0.05` -> the method, its options and its own settings; nothing of None."""
    if text is None:
        return {}
    method, *words = text.split() or [""]
    own: dict[str, Any] = {"method": method}
    options = []
    for word in words:
        name, equals, value = word.partition("=")
        setting = name.replace("-", "_")
        if not equals or setting in (*SWEPT, "out"):
            raise Problem(f"--method is NAME and SETTING=VALUE, such as 'dkm lr=0.05', and not '{text}'")
        if setting in FIELDS:
            own[setting] = as_number(value)
        else:
            options.append(word)
    return own | ({"method_option": options} if options else {})


def _items(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else [value]


def open_sweep(values: dict[str, Sequence[Any]], given: dict[str, Any], config: dict[str, Any], resume: bool) -> Sweep:
    """The sweep of these plans and sizes, methods and seeds, and settings, of which `given` win over `config`.

    A sweep that is resumed has the settings that it was started with; values that are new are added to its own.
    Raises Problem for wrong settings, and where the folder has something else in it.
    """
    swept_values: dict[str, list[Any]] = {name: list(dict.fromkeys(values.get(name, ()))) for name in SWEPT}
    common = {name.replace("-", "_"): value for name, value in config.items()} | given
    for name in SWEPT:
        if name in SIZED or swept_values[name]:
            swept = common.pop(name, None)  # of a config file
            if isinstance(swept, str) and not swept_values[name]:
                swept_values[name] = [swept]
    if not common.get("out"):
        raise Problem("where to? give --out FOLDER, for a folder with a run for each plan in it")
    folder = Path(str(common.pop("out")))
    places = located(make(common))
    common = {name: getattr(places, name) for name in common}  # so that it can be resumed from everywhere
    sweep = Sweep(folder, swept_values, common)
    if resume and sweep.file.is_file():
        sweep = _resumed(sweep)
    elif folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        hint = (
            "choose another --out" if not sweep.file.is_file() else "go on with it by --resume, or choose another --out"
        )
        raise Problem(f"{folder} exists: {hint}")
    elif resume and common.get("model") is None:
        raise Problem(f"there is no sweep in {folder} to go on with: it has no sweep.toml")
    sweep.check()  # a wrong setting is found before the first run begins
    return sweep


def _resumed(wanted: Sweep) -> Sweep:
    """The sweep in the folder, with the values that are wanted besides."""
    stored = {name.replace("-", "_"): value for name, value in read(wanted.file).items()}
    values = {name: stored.pop(name, []) for name in SWEPT if isinstance(stored.get(name, []), list)}
    before, wants = located(make(stored)), located(make(stored, wanted.common))
    for name in wanted.common:
        if getattr(before, name) != getattr(wants, name):
            raise _started_with_another(wanted, name)
    for name, new in wanted.values.items():
        if name not in values:  # one value for all runs, of a config file
            values[name] = []
            if new and new != [getattr(before, name)]:
                raise _started_with_another(wanted, name)
        elif new:
            first = [] if values[name] or name in SIZED else [FIELDS[name].default]
            values[name] = list(dict.fromkeys([*first, *values[name], *new]))
    return Sweep(wanted.folder, values, stored)


def _started_with_another(sweep: Sweep, name: str) -> Problem:
    return Problem(
        f"{sweep.folder} was started with another {flag(name)}: leave it out to go on, or choose another --out"
    )
