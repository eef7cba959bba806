"""JSON lines: one record per line, in a file that a crash leaves readable."""

import json
import os
from pathlib import Path
from typing import Any


def read(path: str | os.PathLike) -> list[dict[str, Any]]:
    """The records of a file; none where there is no file.  A last line that a crash cut off does not count."""
    records = []
    for number, line in enumerate(_lines(Path(path)), 1):
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if not isinstance(record, dict):
            raise ValueError(
                f"line {number} of {path} is not a JSON object: it is another kind of file, name a new one"
            )
        records.append(record)
    return records


def append(path: str | os.PathLike, record: dict[str, Any]) -> None:
    """Add a record after those that `read` reads.  Makes the file and its folder if there are none."""
    path = Path(path)
    line = json.dumps(record, allow_nan=False).encode() + b"\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a+b") as stream:
        if stream.tell():
            stream.seek(-1, os.SEEK_END)
            if stream.read(1) != b"\n":
                stream.truncate(sum(map(len, _lines(path))))
        stream.write(line)


def keep(path: str | os.PathLike, count: int) -> None:
    """Cut a file after its first `count` records."""
    os.truncate(path, sum(map(len, _lines(Path(path))[:count])))


def _lines(path: Path) -> list[bytes]:
    """The finished lines, with their line ends."""
    return (
        [line for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")] if path.exists() else []
    )
