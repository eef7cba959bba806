"""One base for the errors that dkm raises on purpose."""

import pytest
from torch import nn

import dkm
from dkm.foundation import errors


def test_every_error_has_the_one_base():
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    assert {"DKMError", "PlanError", "FileError"} <= {kind.__name__ for kind in kinds}
    assert all(issubclass(kind, dkm.DKMError) for kind in kinds)


@pytest.mark.parametrize("kind", [dkm.PlanError, dkm.FileError, dkm.MethodError])
def test_they_are_value_errors_too(kind: type[Exception]):
    """So that code that catches ValueError catches them."""
    assert issubclass(kind, ValueError)


def test_the_base_catches_a_wrong_plan_and_a_missing_file(tmp_path):
    with pytest.raises(dkm.DKMError, match="plan"):
        dkm.plan(nn.Linear(2, 2), "nonsense")
    with pytest.raises(dkm.DKMError, match="cannot read"):
        dkm.load(tmp_path / "nothing.dkm")
