"""Numbers as the report writes them, besides those of `dkm.foundation.text`."""


def percent_text(share: float) -> str:
    """0.0123 -> 1.23 %."""
    return f"{100 * share:.2f} %"


def ratio_text(ratio: float) -> str:
    """12.3, or 123."""
    return f"{ratio:.0f}" if ratio >= 100 else f"{ratio:.1f}"


def duration_text(seconds: float) -> str:
    """90 s, 12 min, or 2 h 05 min: rounded, for a reader who wants to know how long it takes."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60:02d} min"
