"""Numbers and tables as text, the same everywhere: plans, `dkm inspect`, the command's output and the report."""

import re
import textwrap
from collections.abc import Sequence

LEAST_ROOM = 28  # of the columns of a table, for names and free text together


def size_text(count: float) -> str:
    """Bytes as 1.09 MB, 12.3 kB or 812 B.  A kB is 1,000 bytes and a MB 1,000,000, here and wherever a size is read."""
    if round(count / 1e3, 1) >= 1e3:
        return f"{count / 1e6:,.2f} MB"
    return f"{count / 1e3:.1f} kB" if round(count) >= 1e3 else f"{count:.0f} B"


def clock_text(seconds: float) -> str:
    """Seconds as 1:05 or 2:00:09."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def table(
    lines: Sequence[Sequence[str]], align: str, columns: int, *, shrink_last: bool = False, spare: Sequence[str] = ()
) -> str:
    """Lines of cells as text, at most `columns` wide where that is possible; `align` has a "<" or ">" per cell.

    Where the lines are too wide, the columns whose titles, in the first line, are `spare` are left out one after the
    other.  Then the first cell, a tensor's name, becomes shorter, but not shorter than 12.  With `shrink_last` the last
    cell, free text, becomes narrower as well, and goes on below itself: both get at least half of the room there is.
    """
    for title in spare:
        widths = [max(len(line[i]) for line in lines) for i in range(len(align))]
        least = LEAST_ROOM if shrink_last else 13 + widths[-1]
        if sum(widths[1:-1]) + len(align) - 2 + least > columns:
            at = list(lines[0]).index(title)
            lines = [[cell for i, cell in enumerate(line) if i != at] for line in lines]
            align = align[:at] + align[at + 1 :]
    widths = [max(len(line[i]) for line in lines) for i in range(len(align))]
    room = columns - sum(widths[1:-1]) - len(align) + 1
    least = max(12, room // 2) if shrink_last else 12
    widths[0] = min(widths[0], max(room - widths[-1], least))
    if shrink_last:
        widths[-1] = max(room - widths[0], 8)
    cells = [[_abbreviate(line[0], widths[0]), *line[1:]] for line in lines]
    if shrink_last:
        cells = [row for line in cells for row in _broken(line, widths[-1])]
    return "\n".join(
        " ".join(f"{_shorten(cell, w):{a}{w}}" for cell, w, a in zip(line, widths, align, strict=True)).rstrip()
        for line in cells
    )


def _broken(cells: Sequence[str], width: int) -> list[list[str]]:
    """The cells of a line, and below them those of further lines, which hold what is too wide of the last cell."""
    words = " ".join(_shorten(word, width) for word in cells[-1].split(" "))
    first, *more = textwrap.wrap(words, width) or [""]
    return [[*cells[:-1], first], *([*[""] * (len(cells) - 1), text] for text in more)]


def _abbreviate(name: str, width: int) -> str:
    """Reduce the words of a dotted name to their first letters, from the left, until it fits.  Numbers stay, because
    they tell layers apart."""
    parts = name.split(".")
    for i, part in enumerate(parts[:-1]):
        if len(".".join(parts)) > width:
            parts[i] = re.sub(r"^(\D)\D+", r"\1", part)
    return ".".join(parts)


def _shorten(text: str, width: int) -> str:
    """Cut out the middle of a text that is too long; more of its end stays, which tells more than the beginning."""
    if len(text) <= width:
        return text
    head = (width - 1) // 3
    return text[:head] + "…" + text[len(text) - (width - 1 - head) :]


def shown(name: str, width: int = 200) -> str:
    """A name that comes from a file, safe to print: what a terminal would obey instead of show (control characters,
    escape sequences, marks that change the direction of writing) is escaped, and a long name is cut."""
    plain = "".join(c if c.isprintable() and c != "\\" else c.encode("unicode_escape").decode() for c in name[:width])
    return plain + "…" if len(name) > width else plain
