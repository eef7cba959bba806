"""The language of plans: text -> entries.  No tensors, no model.

A plan is entries `selector:bits/dim` or `selector:keep`, separated by commas; later entries win.  `/dim`
defaults to 1.  A selector that holds a comma, a colon, a quotation mark or a space at its ends is written as a JSON
string, in double quotes.  A size is text such as "1.0MB".
"""

import json
import math
import re
from dataclasses import dataclass

from ..clustering.precision import MAX_BITS
from ..foundation.errors import PlanError

UNITS = {"": 1, "b": 1} | {
    f"{letter}{b}": 2**n for letter, n in zip("kmg", (10, 20, 30), strict=True) for b in ("b", "ib")
}


@dataclass(frozen=True)
class Entry:
    """One `selector:bits/dim` of a plan's text; bits None is `keep`."""

    selector: str
    bits: int | None
    dim: int


def parse(text: str | None) -> list[Entry]:
    """Text -> entries.  No model involved."""
    if not isinstance(text, str):
        raise TypeError(f"a plan is text such as 'cv:4/4, fc:8', got {type(text).__name__}")
    if not text.strip():
        raise PlanError("the plan is empty: say at least one 'selector:bits/dim', for example 'all:4'")
    return [_parse_entry(part.strip(), text) for part in _entries(text)]


def quoted(name: str) -> str:
    """A tensor's name as a selector: as it is where that can be read back, and otherwise as a JSON string."""
    plain = name and name == name.strip() and not set(name) & set(',:"')
    return name if plain else json.dumps(name, ensure_ascii=False)


def _entries(text: str) -> list[str]:
    """Split at the commas that are not within double quotes."""
    parts, inside, escaped = [""], False, False
    for letter in text:
        if letter == "," and not inside:
            parts.append("")
            continue
        if letter == '"' and not escaped:
            inside = not inside
        escaped = inside and letter == "\\" and not escaped
        parts[-1] += letter
    if inside:
        raise PlanError(f"plan '{text}' has a double quotation mark without its other half")
    return parts


def _parse_entry(part: str, text: str) -> Entry:
    selector, colon, spec = (piece.strip() for piece in part.rpartition(":"))
    if selector.startswith('"'):
        try:
            selector = json.loads(selector)
        except ValueError:
            raise PlanError(f"{selector} in plan '{text}' is not a name in double quotes") from None
    if not part or not colon or not selector or not spec:
        raise PlanError(f"'{part}' in plan '{text}' is not 'selector:bits/dim' or 'selector:keep'")
    if spec == "keep":
        return Entry(selector, None, 1)
    bits, slash, dim = (piece.strip() for piece in spec.partition("/"))
    if not _is_number(bits) or (slash and not _is_number(dim)):
        raise PlanError(f"'{spec}' in plan '{text}' is not 'bits', 'bits/dim' or 'keep'")
    if not 1 <= int(bits) <= MAX_BITS:
        raise PlanError(f"'{spec}' in plan '{text}': bits must be from 1 to {MAX_BITS}, got {int(bits)}")
    if slash and int(dim) < 1:
        raise PlanError(f"'{spec}' in plan '{text}': dim must be at least 1, got {int(dim)}")
    return Entry(selector, int(bits), int(dim) if slash else 1)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 10


def parse_size(size: int | str) -> int:
    """The bytes that "1.0MB", "40kB", "800B" or a plain integer means.

    kB, MB and GB are 2^10, 2^20 and 2^30 bytes, as the paper counts; KiB, MiB and GiB mean the same.
    """
    if isinstance(size, int) and not isinstance(size, bool):
        parsed = size
    elif isinstance(size, str):
        found = re.fullmatch(r"\s*(\d+|\d+\.\d*|\.\d+)\s*([a-z]*)\s*", size, re.ASCII | re.IGNORECASE)
        unit = None if found is None else UNITS.get(found[2].lower())
        if found is None or unit is None or not (found[2] or found[1].isdigit()):
            raise PlanError(f"'{size}' is not a size: write 1.0MB, 40kB or a whole number of bytes")
        parsed = math.floor(float(found[1]) * unit)
    else:
        raise TypeError(f"a size is text such as '1.0MB', or an integer, the bytes; got {size!r}")
    if parsed < 1:
        raise PlanError(f"a size must be at least 1 byte, got {size!r}")
    return parsed
