"""The methods by name.  The registry is open: a class of your own joins with `@register("name")`."""

import difflib
from collections.abc import Callable
from dataclasses import fields
from typing import Any, TypeVar

from ...clustering.options import DKMOptions
from ..clustered import Clustered

METHODS: dict[str, type[Clustered]] = {}

Kind = TypeVar("Kind", bound=type[Clustered])


def register(name: str) -> Callable[[Kind], Kind]:
    """A class decorator for a subclass of `Clustered`: `compress_(..., method=name)` then uses it."""

    def decorate(kind: Kind) -> Kind:
        if METHODS.get(name, kind).__qualname__ != kind.__qualname__:  # the same class again: a module was reloaded
            raise ValueError(f"there is a method {name!r} already, {METHODS[name].__name__}: choose another name")
        METHODS[name] = kind
        kind.method = name
        return kind

    return decorate


def named(method: str, given: dict[str, Any]) -> tuple[type[Clustered], dict[str, Any]]:
    """The class of a method, and those of the given options that it takes, all of them checked.

    An option of DKM's that this method does not take is an error unless it has DKM's default, in which case it says
    nothing and is left out: a script may give the same options to every method.
    """
    if method not in METHODS:
        close = difflib.get_close_matches(str(method), METHODS, n=1, cutoff=0.4)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"method must be one of {', '.join(METHODS)}, got {method!r}{hint}")
    kind, defaults = METHODS[method], {f.name: f.default for f in fields(DKMOptions)}
    takes = option_names(kind)
    for name, value in given.items():
        if name not in takes and name not in defaults:
            raise TypeError(f'method="{method}" takes no {name}, it takes {", ".join(takes)}{_hint(name, takes)}')
        if name not in takes and value != defaults[name]:
            reason = "it has no temperature" if name == "tau" else "it would change nothing"
            raise ValueError(f'method="{method}" takes no {name}, {reason}: leave it out; got {value!r}')
    taken = {name: value for name, value in given.items() if name in takes}
    kind.Options(**taken)
    return kind, taken


def option_names(kind: type[Clustered]) -> list[str]:
    """The options that a method takes: DKM's in their usual order, then its own."""
    own, usual = [f.name for f in fields(kind.Options)], [f.name for f in fields(DKMOptions)]
    return [name for name in usual if name in own] + [name for name in own if name not in usual]


def _hint(name: str, takes: list[str]) -> str:
    others = [other for other, kind in METHODS.items() if name in option_names(kind)]
    if others:
        return f'; method="{others[0]}" takes {name}'
    close = difflib.get_close_matches(name, takes, n=1)
    return f"; did you mean {close[0]}?" if close else ""
