"""The language of plans: text -> entries.  No tensors, no model.

A plan is entries `selector:spec` or `selector:keep`, separated by commas; later entries win.  A spec says how a tensor
is clustered: `bits[/dim] [scaled] [per GROUP] [e4m3]`, where a group is `row`, `8 rows`, `8x64` (a tile of 8 rows and
64 columns) or `4096` (so many consecutive weights).  `/dim` defaults to 1.  A selector that holds a comma, a colon, a
quotation mark or a space at its ends is written as a JSON string, in double quotes.  A size is text such as "1.0MB", or
"1.0MB paper" for one that is counted as the paper does.
"""

import difflib
import json
import math
import re
from dataclasses import dataclass
from typing import NamedTuple

from ..clustering.groups import Group
from ..clustering.precision import MAX_BITS
from ..clustering.spec import Spec
from ..foundation.errors import PlanError

UNITS = {"": 1, "b": 1} | {
    f"{letter}{b}": base**n for n, letter in enumerate("kmg", 1) for b, base in (("b", 1000), ("ib", 1024))
}

WORDS_OF_A_SPEC = ("scaled", "per", "e4m3")  # after the bits, in any order


@dataclass(frozen=True)
class Entry:
    """One `selector:spec` of a plan's text; spec None is `keep`."""

    selector: str
    spec: Spec | None


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
    return Entry(selector, None if spec == "keep" else parse_spec(spec, f"plan '{text}'"))


def parse_spec(text: str, place: str) -> Spec:
    """`3/1 scaled per 8x64 e4m3` -> Spec, the inverse of `Spec.label`; `place` says in errors where the text is."""

    def wrong(sentence: str) -> PlanError:
        return PlanError(f"'{text}' in {place}{sentence}")

    head, *words = re.sub(r"\s*/\s*", "/", text).split() or [""]
    bits, slash, dim = head.partition("/")
    if not _is_number(bits) or (slash and not _is_number(dim)):
        raise wrong(" is not 'keep', and does not begin with 'bits' or 'bits/dim'")
    if not 1 <= int(bits) <= MAX_BITS:
        raise wrong(f": bits must be from 1 to {MAX_BITS}, got {int(bits)}")
    if slash and int(dim) < 1:
        raise wrong(f": dim must be at least 1, got {int(dim)}")
    said: dict[str, list[str]] = {}  # each word, and what follows `per`
    for word in words:
        if word in said:
            raise wrong(f" says '{word}' twice")
        if word in WORDS_OF_A_SPEC:
            said[word] = []
        elif list(said)[-1:] == ["per"]:
            said["per"].append(word)
        else:
            close = difflib.get_close_matches(word, [*WORDS_OF_A_SPEC, "row"], n=1)
            hint = f"did you mean '{close[0].replace('row', 'per row')}'? " if close else ""
            raise wrong(f": unknown word '{word}'. {hint}After the bits come 'scaled', 'per GROUP' or 'e4m3'")
    group = None
    if "per" in said:
        group = _group(" ".join(said["per"]))
        if group is None:
            given = f"not '{' '.join(said['per'])}'" if said["per"] else "not nothing"
            raise wrong(f": after 'per' comes 'row', '8 rows', '8x64' or '4096', with numbers of at least 1, {given}")
    return Spec(int(bits), int(dim or 1), scaled="scaled" in said, group=group, float8="e4m3" in said)


def _group(text: str) -> Group | None:
    """The group that a text means; None where it means none."""
    if text == "row":
        return Group(1)
    found = re.fullmatch(r"(?:(\d+) rows|(\d+) ?x ?(\d+)|(\d+))", text)
    if found is None or not all(_is_number(size) and int(size) for size in found.groups() if size is not None):
        return None
    rows, tile_rows, tile_columns, weights = (None if size is None else int(size) for size in found.groups())
    return Group(rows or tile_rows, tile_columns or weights)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 10


class Target(NamedTuple):
    """How small a plan is to be."""

    bytes: int
    as_paper: bool  # as the paper counts; otherwise it is the file that has so many bytes


def parse_target(size: int | str) -> Target:
    """The size that "1.0MB" or a plain integer means, of the file; "1.0MB paper" is the size as the paper counts."""
    words = size.split() if isinstance(size, str) else []
    if words and words[-1].lower() == "paper":
        return Target(parse_size(" ".join(words[:-1])), True)
    return Target(parse_size(size), False)


def parse_size(size: int | str) -> int:
    """The bytes that "1.0MB", "40kB", "800B" or a plain integer means.

    kB, MB and GB are 1,000, 1,000,000 and 10^9 bytes; KiB, MiB and GiB are 2^10, 2^20 and 2^30.
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
