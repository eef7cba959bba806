"""Deep k-Means by its definition."""

import pytest
import torch
from method_helpers import PLAN, close, make_weight, network
from torch import Tensor, nn

import dkm
from dkm.clustering.vectors import from_vectors, to_vectors
from dkm.modelling.methods.rps import RPS


def literal(W: Tensor, F: Tensor) -> Tensor:
    """1/2 (Tr W W^T - Tr F^T W W^T F), of the `(n, d)` vectors and the `(n, k)` F."""
    torch.testing.assert_close(F.T @ F, torch.eye(F.shape[1], dtype=F.dtype))
    return (torch.trace(W @ W.T) - torch.trace(F.T @ W @ W.T @ F)) / 2


@pytest.mark.parametrize(("bits", "dim"), [(2, 1), (2, 3), (1, 5)])
def test_the_term_of_clusters_is_that_of_their_indicator(bits: int, dim: int):
    weight = make_weight()
    rps = RPS(weight, bits, dim, strength=3.0, first=1)
    V = to_vectors(weight.detach(), dim).requires_grad_()
    codes = dkm.assign(V.detach(), rps.start)
    indicator = torch.eye(2**bits, dtype=torch.float64)[codes]
    wanted = 3 * literal(V, indicator / indicator.sum(0).sqrt())
    term = rps.loss_term(weight)
    close(term.detach(), wanted.detach())
    (of_vectors,) = torch.autograd.grad(wanted, V)
    close(torch.autograd.grad(term, weight)[0], from_vectors(of_vectors, weight.shape))


def test_the_relaxed_term_is_that_of_the_singular_vectors_beyond_the_first_k():
    generator = torch.Generator().manual_seed(0)
    U, _ = torch.linalg.qr(torch.randn(40, 5, generator=generator, dtype=torch.float64))
    Q, _ = torch.linalg.qr(torch.randn(5, 5, generator=generator, dtype=torch.float64))
    singular = torch.tensor([4.0, 3.0, 2.0, 1.0, 0.5], dtype=torch.float64)
    W = U * singular @ Q.T
    weight = nn.Parameter(W.reshape(8, 25).clone())
    rps = RPS(weight, 1, 5, assignment="spectral", strength=3.0, first=1)
    term = rps.loss_term(weight)
    close(term.detach(), torch.tensor(3 * (4.0 + 1.0 + 0.25) / 2, dtype=torch.float64))
    close(term.detach(), 3 * literal(W, U[:, :2]))
    gradient = torch.autograd.grad(term, weight)[0].view(40, 5)
    close(gradient, 3 * U[:, 2:] * singular[2:] @ Q[:, 2:].T)


@pytest.mark.parametrize("assignment", ["clusters", "spectral"])
def test_k_different_vectors_have_no_term(assignment: str):
    generator = torch.Generator().manual_seed(0)
    few = torch.randn(4, 5, generator=generator, dtype=torch.float64)
    weight = nn.Parameter(few[torch.randint(4, (32,), generator=generator)].view(8, 20))
    rps = RPS(weight, 2, 5, assignment=assignment, first=1)
    close(rps.loss_term(weight).detach(), torch.zeros((), dtype=torch.float64))


def test_a_step_of_sgd_takes_weights_a_part_of_the_way_to_their_mean():
    weight = make_weight()
    rps = RPS(weight, 2, first=1, strength=1.0)
    codes = dkm.assign(weight.detach().view(-1, 1), rps.C)
    means = torch.stack([weight.detach().view(-1)[codes == j].mean() for j in range(4)])[codes].view(weight.shape)
    (G,) = torch.autograd.grad(rps.loss_term(weight), weight)
    close(weight.detach() - 0.2 * G, weight.detach() + 0.2 * (means - weight.detach()))


@pytest.mark.parametrize("assignment", ["clusters", "spectral"])
def test_weights_gather(assignment: str):
    weight = make_weight()
    rps = RPS(weight, 1, 5, first=1, strength=1.0, assignment=assignment)
    optimizer = torch.optim.SGD([weight], lr=0.2)
    before = float(rps.loss_term(weight).detach())
    for _ in range(50):
        optimizer.zero_grad()
        rps.give("loss")
        rps(weight)
        rps.loss_term(weight).backward()
        optimizer.step()
    assert float(rps.loss_term(weight).detach()) < 1e-3 * before


def test_spectral_where_its_term_would_be_zero():
    model = network()
    with pytest.raises(ValueError, match=r"centroids: give a dim above 8, or assignment=.*got 3/8"):
        dkm.compress_(model, "0:3/8", method="rps", steps=3, assignment="spectral")
    assert type(model[0]) is nn.Linear
    with pytest.raises(ValueError, match="assignment must be one of clusters, spectral"):
        dkm.compress_(model, PLAN, method="rps", steps=3, assignment="nearest")
