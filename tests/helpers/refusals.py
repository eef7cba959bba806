"""What all readers of a file do with one that contradicts itself."""

import re
from pathlib import Path

import pytest
import strict_reader

import dkm
from dkm.formats.contents import describe
from dkm.formats.dkm_file import decode


def every_reader_refuses(data: bytes, words: str, path: Path) -> None:
    """Each says so in these words; the strict reader has none."""
    path.write_bytes(data)
    for read in (dkm.load, describe):
        with pytest.raises(dkm.FileError, match=f"{re.escape(str(path))} is intact but contradicts itself .*{words}"):
            read(path)
    with pytest.raises(dkm.FileError, match=words):
        decode(data)
    with pytest.raises(strict_reader.Refused):
        strict_reader.read(data)
