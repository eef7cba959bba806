"""Soft weight sharing by its definition."""

import pytest
import torch
from method_helpers import PLAN, close, make_weight, network
from torch import Tensor
from torch.distributions import Categorical, Independent, MixtureSameFamily, Normal

import dkm
from dkm.clustering.vectors import from_vectors, to_vectors
from dkm.modelling.methods.soft_sharing import Mixture, SoftSharing


def literal(mixture: Mixture) -> MixtureSameFamily:
    deviations = mixture.variances.sqrt()[:, None].expand_as(mixture.C)
    return MixtureSameFamily(Categorical(mixture.shares), Independent(Normal(mixture.C, deviations), 1))


@pytest.mark.parametrize(("bits", "dim"), [(2, 1), (3, 5)])
@pytest.mark.parametrize("zero", [0.0, 0.6])
def test_the_term_is_the_negative_logarithm_of_the_prior(bits: int, dim: int, zero: float):
    weight = make_weight()
    sharing = SoftSharing(weight, bits, dim, strength=3.0, first=1, zero=zero)
    V = to_vectors(weight.detach(), dim).requires_grad_()
    mixture = sharing.mixture(V.detach(), sharing.start)
    wanted = -3 * mixture.variance * literal(mixture).log_prob(V).sum()
    term = sharing.loss_term(weight)
    close(term.detach(), wanted.detach())
    (of_vectors,) = torch.autograd.grad(wanted, V)
    close(torch.autograd.grad(term, weight)[0], from_vectors(of_vectors, weight.shape))


def test_the_mixture_is_a_round_of_expectation_and_maximisation():
    weight = make_weight()
    sharing = SoftSharing(weight, 2, 1, first=1)
    V = weight.detach().view(-1, 1)
    C = sharing.C + 0.1
    codes = dkm.assign(V, C)
    C = torch.stack([V[codes == j].mean(0) for j in range(4)])  # every centroid has some
    hard = torch.stack([(V[codes == j] - C[j]).square().sum() for j in range(4)])
    counts = torch.bincount(codes, minlength=4).double()

    def fit(C: Tensor, masses: Tensor, squares: Tensor) -> Mixture:
        variance = squares.sum() / 85
        return Mixture(C, (squares + 85 * variance) / (masses + 85), (masses + 1) / 89, variance)

    first = fit(C, counts, hard)
    R = torch.stack([s * Normal(c, v.sqrt()).log_prob(V[:, 0]).exp() for c, v, s in zip(*first[:3], strict=True)], 1)
    R = R / R.sum(1, keepdim=True)
    C = R.T @ V / R.sum(0)[:, None]
    wanted = fit(C, R.sum(0), (R * (V - C.T).square()).sum(0))
    for ours, theirs in zip(sharing.mixture(V, sharing.C + 0.1), wanted, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_step_of_sgd_takes_weights_the_same_part_of_the_way_at_every_scale():
    parts = []
    for scale in (1e-3, 1.0, 1e3):
        weight = torch.nn.Parameter(make_weight().detach() * scale)
        sharing = SoftSharing(weight, 3, 1, first=1)
        parts.append(torch.autograd.grad(sharing.loss_term(weight), weight)[0] / scale)
    torch.testing.assert_close(parts[0], parts[1], rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(parts[2], parts[1], rtol=1e-6, atol=1e-9)


def test_a_component_stays_at_zero():
    weight = make_weight()
    sharing = SoftSharing(weight, 2, 1, first=1, zero=0.7)
    mixture = sharing.mixture(weight.detach().view(-1, 1), sharing.C)
    at_zero = (mixture.C == 0).all(1)
    assert int(at_zero.sum()) == 1
    close(mixture.shares[at_zero], torch.tensor([0.7], dtype=torch.float64))
    close(mixture.shares.sum(), torch.ones((), dtype=torch.float64))


def test_the_strength_grows_geometrically():
    sharing = SoftSharing(make_weight(), 2, strength=4.0, first=0.01, steps=10)
    for step, wanted in ((0, 0.04), (5, 0.4), (10, 4.0), (20, 4.0)):
        assert float(sharing.strength(torch.tensor(step))) == pytest.approx(wanted)


def test_weights_gather_around_the_means():
    weight = make_weight()
    sharing = SoftSharing(weight, 2, first=1, strength=1.0)
    optimizer = torch.optim.SGD([weight], lr=0.2)

    def spread() -> float:
        return float((weight - sharing.snapped(weight)).detach().square().mean())

    before = spread()
    for _ in range(50):
        optimizer.zero_grad()
        sharing(weight)
        sharing.give("loss")
        sharing.loss_term(weight).backward()
        optimizer.step()
    assert spread() < 1e-3 * before


@pytest.mark.parametrize(
    ("options", "sentence"),
    [(dict(zero=1.0, steps=3), "zero is a share"), (dict(), "strength grows from first=0.01 of itself over the")],
)
def test_options(options: dict, sentence: str):
    with pytest.raises(ValueError, match=sentence):
        dkm.compress_(network(), PLAN, method="soft-sharing", **options)
