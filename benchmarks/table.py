"""An aligned Markdown table from rows of text."""

import sys


def table(header: list[str], rows: list[list[str]]) -> str:
    """The first column is aligned to the left, the others to the right."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]

    def line(cells: list[str]) -> str:
        first, *others = (
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return "| " + " | ".join([first, *others]) + " |"

    rule = "| " + " | ".join(("-" * (w - 1) + ":") if i else "-" * w for i, w in enumerate(widths)) + " |"
    return "\n".join([line(header), rule, *map(line, rows)])


def digits(value: float) -> str:
    """A number with at most three significant digits and no exponent."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.2f}"


def ratio(value: float | str | None, unit: float) -> str:
    """`value / unit` as text, if the value is a number."""
    return f"{digits(value / unit)}x" if isinstance(value, float) else ""


def note(text: str) -> None:
    """Print what is being measured, for whoever waits."""
    print(f"  ... {text}", file=sys.stderr, flush=True)
