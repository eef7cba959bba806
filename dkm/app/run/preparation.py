"""What the user gave -> settings, and whether there is a run to go on with."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from ..errors import Problem
from ..places import located
from ..run_folder import RunFolder
from ..settings import CHANGEABLE_ON_RESUME, FIELDS, Settings, flag, make


def prepare(given: dict[str, Any], config: dict[str, Any], resume: bool) -> tuple[Settings, bool]:
    """Settings from flags and from a config file, and whether `--out` has a run that is to be resumed.

    A resumed run keeps the settings that it was started with; Problem where the user gives others.
    """
    settings = make(config, given)
    if settings.out is None:
        raise Problem("where to? give --out FOLDER")
    path = Path(settings.out)
    folder = RunFolder(path)
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        if resume and settings.model is None:
            raise Problem(
                f"there is no run in {path} to go on with: name the folder of a run, or give --model, --data and "
                "--plan as well, to begin one"
            )
        return settings, False
    if not folder.is_run():
        raise Problem(f"{path} exists and is not a run of dkm: choose another --out")
    if not resume:
        raise Problem(f"{path} exists: go on with it by --resume, or choose another --out")
    before, same_places = located(folder.read_settings()), located(settings)
    given_names = {key.replace("-", "_") for key in (*config, *given)}
    fixed = [name for name in FIELDS if name in given_names and name not in (*CHANGEABLE_ON_RESUME, "out")]
    for name in fixed:
        if getattr(same_places, name) != getattr(before, name):
            raise Problem(
                f"{path} was started with {flag(name)} {_as_text(getattr(before, name))} and not "
                f"{_as_text(getattr(settings, name))}: leave it out to go on, or choose another --out"
            )
    changes = {name: getattr(settings, name) for name in CHANGEABLE_ON_RESUME if name in given_names}
    return replace(before, out=settings.out, **changes), True


def _as_text(value: Any) -> str:
    return " ".join(value) if isinstance(value, tuple) else str(value)
