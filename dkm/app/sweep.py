"""Several runs of the same settings, each with a plan or a size of its own, in one folder."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..foundation.atomic import write_atomically
from .errors import Problem, reason_of
from .places import located
from .settings import flag, make, read

SWEPT = ("plan", "target_size")  # each value is a run
FOR_SIZES = ("allocator", "episodes")  # settings that say nothing to the run of a plan


@dataclass(frozen=True)
class Planned:
    """One of the runs: what it has of its own, and its folder."""

    setting: str
    value: str
    folder: Path


class Sweep:
    """The folder of a sweep: `sweep.toml`, which says what to run, and a folder for each run."""

    def __init__(self, folder: Path, values: dict[str, list[str]], common: dict[str, Any]):
        self.folder, self.values, self.common = folder, values, common

    @property
    def file(self) -> Path:
        """What the sweep consists of."""
        return self.folder / "sweep.toml"

    def runs(self) -> list[Planned]:
        """The runs in their order.  Their folders have the names of their plans and sizes."""
        return list(self._runs())

    def _runs(self) -> Iterator[Planned]:
        taken: set[str] = set()
        for setting, values in self.values.items():
            for value in values:
                name = folder_name(value)
                number = 2
                while name in taken:  # two plans that differ in signs only
                    name, number = f"{folder_name(value)}-{number}", number + 1
                taken.add(name)
                yield Planned(setting, value, self.folder / name)

    def settings_of(self, planned: Planned) -> dict[str, Any]:
        """What a run has in common with the others, and what it has of its own."""
        left_out = FOR_SIZES if planned.setting == "plan" else ()
        common = {name: value for name, value in self.common.items() if name not in left_out}
        return common | {planned.setting: planned.value, "out": str(planned.folder)}

    def write(self) -> None:
        """Write `sweep.toml`, so that the sweep can be resumed."""
        given = {**self.values, **self.common}
        lines = [f"{name.replace('_', '-')} = {json.dumps(value, ensure_ascii=False)}" for name, value in given.items()]
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_atomically(self.file, "\n".join(lines) + "\n")
        except OSError as error:
            raise Problem(f"cannot write {self.file}: {reason_of(error)}") from None


def folder_name(value: str) -> str:
    """A plan or a size as the name of a folder: cv-4-4_fc-8."""
    words = [re.sub(r"[^A-Za-z0-9.]+", "-", part).strip("-.") for part in value.split(",")]
    return "_".join(filter(None, words))[:60] or "run"


def open_sweep(values: dict[str, Sequence[str]], given: dict[str, Any], config: dict[str, Any], resume: bool) -> Sweep:
    """The sweep of these plans and sizes, and settings, of which `given` win over `config`.

    A sweep that is resumed has the settings that it was started with; plans and sizes that are new are added to its
    own.  Raises Problem for wrong settings, and where the folder has something else in it.
    """
    swept_values = {name: list(dict.fromkeys(values.get(name, ()))) for name in SWEPT}
    common = {name.replace("-", "_"): value for name, value in config.items()} | given
    for name in SWEPT:
        if isinstance(swept := common.pop(name, None), str) and not swept_values[name]:
            swept_values[name] = [swept]  # of a config file
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
    if not any(sweep.values.values()):
        raise Problem("how small? give --plan or --target-size, each as often as there are to be runs")
    for planned in sweep.runs():
        make(sweep.settings_of(planned))  # a wrong setting is found before the first run begins
    return sweep


def _resumed(wanted: Sweep) -> Sweep:
    """The sweep in the folder, with the plans and sizes that are wanted besides."""
    stored = {name.replace("-", "_"): value for name, value in read(wanted.file).items()}
    values = {name: stored.pop(name, []) for name in SWEPT}
    before, wants = located(make(stored)), located(make(stored, wanted.common))
    for name in wanted.common:
        if getattr(before, name) != getattr(wants, name):
            raise Problem(
                f"{wanted.folder} was started with another {flag(name)}: leave it out to go on, or choose another --out"
            )
    for name, new in wanted.values.items():
        values[name] = list(dict.fromkeys([*values[name], *new]))
    return Sweep(wanted.folder, values, stored)
