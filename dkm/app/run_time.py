"""What a compressed file saves at run time: one text, for the result that is printed and for the report."""

from ..foundation.text import size_text


def run_time_sentence(dense_bytes: float) -> str:
    """What a model takes in memory once its file is loaded; `dense_bytes` are those of its parameters in float32."""
    return (
        f"Loaded dense, the weights take {size_text(dense_bytes)} of memory in float32, as before; loaded with "
        "packed=True, those that are clustered take as little as in a file with packed codes."
    )
