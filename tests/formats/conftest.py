import pytest
from dkm_files import trained

import dkm


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.dkm"


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> bytes:
    path = tmp_path_factory.mktemp("good") / "model.dkm"
    dkm.save(trained(), path)
    return path.read_bytes()
