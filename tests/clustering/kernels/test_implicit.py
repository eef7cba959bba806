"""The linear system of the fixed point."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from dkm.clustering.kernels.implicit import PASSES, solve


def system(size: int, seed: int, reach: float) -> tuple[torch.Tensor, torch.Tensor]:
    """A map that contracts by at least `reach`, of no symmetry, and a right-hand side."""
    generator = torch.Generator().manual_seed(seed)
    J = torch.randn(size, size, dtype=torch.float64, generator=generator)
    return J * (reach / torch.linalg.matrix_norm(J, 2)), torch.randn(size, 1, dtype=torch.float64, generator=generator)


@given(st.integers(1, PASSES), st.integers(0, 1000), st.floats(0, 0.9))
def test_exact_in_as_many_passes_as_there_are_unknowns(size, seed, reach):
    J, v = system(size, seed, reach)
    u = solve(v, lambda x: J.T @ x)
    assert float((u - J.T @ u - v).norm()) <= 1e-9 * float(v.norm())


@given(st.integers(PASSES + 1, 200), st.integers(0, 1000), st.floats(0, 0.9))
def test_no_worse_than_as_many_terms_of_the_series(size, seed, reach):
    J, v = system(size, seed, reach)
    u = solve(v, lambda x: J.T @ x)
    series = v.clone()
    for _ in range(PASSES - 1):
        series = v + J.T @ series
    residuals = [float((x - J.T @ x - v).norm()) for x in (u, series)]
    assert residuals[0] <= residuals[1] * (1 + 1e-9) + 1e-12


def test_nothing_to_solve():
    assert torch.equal(solve(torch.zeros(3, 1), lambda x: x / 2), torch.zeros(3, 1))


def test_systems_of_groups_are_solved_for_themselves():
    systems = [system(5, seed, 0.9) for seed in range(3)]
    J, v = (torch.stack(parts) for parts in zip(*systems, strict=True))
    together = solve(v, lambda x: J.mT @ x)
    for i in range(3):
        torch.testing.assert_close(together[i], solve(v[i], lambda x, i=i: J[i].T @ x))
