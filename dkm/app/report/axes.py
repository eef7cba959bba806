"""The numbers beside an axis."""

import math
from typing import NamedTuple


class Axis(NamedTuple):
    """Round numbers in rising order, and the range that they span."""

    ticks: list[float]
    low: float
    high: float


def linear_axis(low: float, high: float) -> Axis:
    """About four round numbers whose range holds `low` and `high`."""
    most = max(abs(low), abs(high))
    if high - low <= 1e-9 * most or most < 1e-30:  # practically equal: a flat line in the middle
        room = most / 10 if most >= 1e-30 else 1.0
        low, high = low - room, high + room
    size = (high - low) / 4
    power = 10 ** math.floor(math.log10(size))
    size = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= size * 0.999)
    first, last = math.floor(low / size + 1e-9), math.ceil(high / size - 1e-9)
    ticks = [float(f"{i * size:.12g}") for i in range(first, last + 1)]
    return Axis(ticks, ticks[0], ticks[-1])


def log_axis(low: float, high: float) -> Axis:
    """The same for a logarithmic axis: powers of ten, or 1, 2, 5, 10 where there are few of those."""
    first, last = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
    if last - first < 2:
        fine = [f * 10.0**p for p in range(first - 1, last + 1) for f in (1, 2, 5, 10)]
        below = max(t for t in fine if t <= low * 1.0001)
        above = min(t for t in fine if t >= high * 0.9999 and t > below)
        ticks = sorted({float(f"{t:.3g}") for t in fine if below <= t <= above})
    else:
        every = -(-(last - first) // 5)
        ticks = [10.0**p for p in range(first, last + 1, every)]
        ticks += [ticks[-1] * 10.0**every] if ticks[-1] < high else []
    return Axis(ticks, ticks[0], ticks[-1])


def tick_text(value: float, room: int = 5) -> str:
    """A number in at most about `room` characters."""
    text = f"{value:,.10g}"
    if len(text.lstrip("-")) <= room and "e" not in text:
        return text
    power = math.floor(math.log10(abs(value)) + 1e-9)
    return f"{value / 10.0**power:.3g}e{power}"
