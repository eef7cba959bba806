"""Entropy-constrained scalar quantisation by its definition."""

from itertools import pairwise

import pytest
import torch
from method_helpers import close, make_weight, network
from torch import Tensor, nn
from torch.nn import functional as F

import dkm
from dkm.clustering.vectors import to_vectors
from dkm.modelling.methods.escq import ESCQ, Clusters, clusters, improved, lagrangian
from dkm.modelling.parameters import clusterings

LEVELS = torch.tensor([0.0, 0.1, 0.5, 2.0, 10.0], dtype=torch.float64)


def vectors(dim: int) -> tuple[Tensor, Tensor, Clusters]:
    """500 vectors, their h, and clusters to start from."""
    generator = torch.Generator().manual_seed(1)
    V = torch.randn(500, dim, generator=generator, dtype=torch.float64)
    H = torch.rand(500, dim, generator=generator, dtype=torch.float64) ** 4 + 1e-3
    C = V[:8].clone()
    return V, H, Clusters(C, dkm.assign(V, C))


def entropy(codes: Tensor) -> float:
    """Bits per code."""
    p = torch.bincount(codes).double() / len(codes)
    return float(-torch.special.xlogy(p, p).sum() / torch.log(torch.tensor(2.0)))


def literal(V: Tensor, H: Tensor, found: Clusters, lam: float) -> float:
    counts = torch.bincount(found.codes, minlength=len(found.C))
    total = 0.0
    for v, h, code in zip(V, H, found.codes, strict=True):
        total += float((h * (v - found.C[code]) ** 2).sum() - lam * torch.log2(counts[code].double() / len(V)))
    return total


@pytest.mark.parametrize("dim", [1, 3])
@pytest.mark.parametrize("lam", LEVELS.tolist())
def test_no_round_raises_the_lagrangian(dim: int, lam: float):
    V, H, found = vectors(dim)
    before = lagrangian(V, H, found, lam)
    assert before == pytest.approx(literal(V, H, found, lam), rel=1e-12)
    for _ in range(20):
        found = improved(V, H, found, lam)
        now = lagrangian(V, H, found, lam)
        assert now <= before * (1 + 1e-12)
        before = now
    V, H, found = vectors(dim)
    assert lagrangian(V, H, clusters(V, H, found, lam), lam) < lagrangian(V, H, found, lam)


@pytest.mark.parametrize("dim", [1, 3])
def test_a_round_is_the_best_cluster_of_each_vector_and_then_the_weighted_mean(dim: int):
    V, H, found = vectors(dim)
    p = torch.bincount(found.codes, minlength=8).double() / len(V)
    costs = torch.stack([(H * (V - c) ** 2).sum(1) - 0.7 * torch.log2(p[j]) for j, c in enumerate(found.C)], 1)
    after = improved(V, H, found, 0.7)
    assert torch.equal(after.codes, costs.argmin(1))
    for j in after.codes.unique():
        mine = after.codes == j
        close(after.C[j], (H[mine] * V[mine]).sum(0) / H[mine].sum(0))


@pytest.mark.parametrize("dim", [1, 3])
def test_without_a_price_and_with_equal_h_it_is_k_means(dim: int):
    V, _, found = vectors(dim)
    for _ in range(200):
        found = improved(V, torch.ones_like(V), found, 0.0)
    assert torch.equal(dkm.assign(V, found.C), found.codes)
    close(found.C, torch.stack([V[found.codes == j].mean(0) for j in range(8)]))


@pytest.mark.parametrize("dim", [1, 3])
def test_the_entropy_falls_with_the_price(dim: int):
    found = [entropy(clusters(*vectors(dim), lam).codes) for lam in LEVELS.tolist()]
    assert all(one > other for one, other in pairwise(found) if one)
    assert found[0] > 2
    assert found[-1] == 0


def test_h_is_the_second_derivative_of_the_divergence():
    """Of a linear classifier it is known: the mean of p (1 - p) x^2."""
    torch.manual_seed(0)
    model, x = nn.Linear(6, 5), torch.randn(40, 6)
    p = model(x).detach().softmax(1)
    known = torch.einsum("bi,bj->ij", p * (1 - p), x.square())
    dkm.compress_(model, "weight:2", method="escq")
    dkm.calibrate_(model, [x] * 200)
    h = model.parametrizations.weight[0].h
    # 800 draws: their mean is off by sqrt(2 / 800) = 0.05 typically, and every h has a hundredth or more of another's
    known, h = known / known.sum(), h / h.sum()
    assert ((h - known).abs() < 6 * 0.05 * known + 0.02 * known.mean()).all()


def test_a_bit_has_one_price_in_all_tensors():
    torch.manual_seed(0)

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(40, 6, bias=False), nn.Linear(40, 6, bias=False)
            nn.init.normal_(self.first.weight)
            self.second.weight.data.copy_(self.first.weight)

        def forward(self, x: Tensor) -> Tensor:
            return 0.1 * self.first(x) + 0.03 * self.second(x)

    bits = {}
    for lam in (0.0, 1.0):
        torch.manual_seed(0)
        model = Two()
        dkm.compress_(model, "first:3, second:3", method="escq", lam=lam)
        dkm.calibrate_(model, [torch.randn(64, 40) for _ in range(8)])
        both = [layer.parametrizations.weight[0] for layer in (model.first, model.second)]
        assert 7 < both[0].h.mean() / both[1].h.mean() < 17  # (0.1 / 0.03)^2 = 11
        bits[lam] = [entropy(each.cluster_of.long()) for each in both]
    assert abs(bits[0.0][0] - bits[0.0][1]) < 0.4
    assert bits[1.0][0] > bits[1.0][1] + 0.5


def trained(**options) -> tuple[nn.Sequential, list[Tensor]]:
    model = network()
    dkm.compress_(model, "0:3, 3:4/3", method="escq", **options)
    x = torch.randn(64, 12, generator=torch.Generator().manual_seed(8))
    dkm.calibrate_(model, [x[:32], x[32:]])
    frozen = [model[i].parametrizations.weight[0].cluster_of.clone() for i in (0, 3)]
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(10):
        optimizer.zero_grad()
        F.cross_entropy(model(x), x[:, :5].argmax(1)).backward()
        optimizer.step()
    return model, frozen


def test_the_clusters_stay_and_their_weighted_means_train():
    model, frozen = trained(lam=0.1)
    for i, codes in zip((0, 3), frozen, strict=True):
        clustered, weight = model[i].parametrizations.weight[0], model[i].parametrizations.weight.original
        C, found = clustered.codes(weight)
        assert torch.equal(found, codes.long())
        V, H = (to_vectors(x.detach(), clustered.dim) for x in (weight, clustered.h))
        means = torch.stack([(H * V)[found == j].sum(0) / H[found == j].sum(0) for j in found.unique()])
        torch.testing.assert_close(C[found.unique()].float(), means, rtol=2**-10, atol=1e-6)
        assert not clustered.squares


def test_each_weight_gets_the_mean_gradient_of_its_cluster():
    weight = make_weight()
    escq = ESCQ(weight, 2)
    escq.give("batches")
    escq.h.copy_(torch.rand(weight.shape, generator=torch.Generator().manual_seed(6), dtype=torch.float64) + 0.01)
    G = torch.randn(weight.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    (gradient,) = torch.autograd.grad(escq(weight), weight, G)
    codes = escq.cluster_of.view(weight.shape)
    for j in range(4):
        close(gradient[codes == j], G[codes == j].mean().expand(int((codes == j).sum())))


def test_entropy_coded_files_are_smaller():
    sizes = []
    for lam in (0.0, 0.3):
        model = nn.Sequential(nn.Linear(64, 200), nn.ReLU(), nn.Linear(200, 8))
        torch.manual_seed(0)
        for layer in (model[0], model[2]):
            nn.init.normal_(layer.weight)
        dkm.compress_(model, "0:4, 2:4", method="escq", lam=lam)
        dkm.calibrate_(model, [torch.randn(64, 64)])
        sizes.append(dkm.size(model, coding="entropy").file_bytes)
    assert sizes[1] < sizes[0]


@pytest.mark.parametrize("x", [torch.zeros(4, 12), torch.full((4, 12), torch.nan)])
def test_batches_that_say_nothing(x: Tensor):
    model = nn.Linear(12, 5, bias=False)
    dkm.compress_(model, "weight:2", method="escq")
    with pytest.raises(dkm.NeedError, match="has seen no gradient that is finite and not zero: give batches for which"):
        dkm.calibrate_(model, [x])


def test_answers_that_are_not_logits():
    model = nn.Linear(12, 5)
    dkm.compress_(model, "weight:2", method="escq")
    with pytest.raises(TypeError, match=r"calibrate_ needs the model's logits, a tensor or an output with .logits"):
        dkm.calibrate_(model, [torch.randn(4, 12)], forward=lambda model, batch: model(batch).tolist())


def test_calibrating_changes_nothing_else():
    model = network()
    model[3].requires_grad_(False)
    dkm.compress_(model, "0:3, 3:4/3", method="escq")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.train()
    dkm.calibrate_(model, [torch.randn(16, 12)])
    assert [parameter.requires_grad for parameter in (model[0].bias, model[3].bias)] == [True, False]
    assert not model[3].parametrizations.weight.original.requires_grad
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(module.training for module in model.modules())
    plain = {name for name in before if "parametrizations.weight.0" not in name}
    assert all(torch.equal(model.state_dict()[name], before[name]) for name in plain)


class Tagger(nn.Module):
    """Recurrent, and with an embedding that the head shares."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.rnn, self.head = nn.Embedding(20, 8), nn.LSTM(8, 8), nn.Linear(8, 20, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(self.emb(x))[0])


def test_recurrent_and_tied_weights():
    torch.manual_seed(0)
    model = Tagger()
    dkm.compress_(model, "emb.weight:3, rnn:2", method="escq")
    dkm.calibrate_(model, [torch.randint(20, (9, 4)) for _ in range(4)])
    h = [each.h for each in clusterings(model)]
    assert len(h) == 3
    assert all(each.std() > 0.1 * each.mean() for each in h)  # they differ: every tensor was seen
    model(torch.randint(20, (9, 4))).sum().backward()


def test_extreme_and_scaled_weights():
    """The choice does not depend on the scale of the weights."""
    x, codes = torch.randn(64, 12, generator=torch.Generator().manual_seed(8)), []
    for scale in (1.0, 2.0**-40):
        model = nn.Sequential(nn.Linear(12, 40, bias=False), nn.Linear(40, 5, bias=False)).double()
        torch.manual_seed(0)
        for layer in model:
            nn.init.normal_(layer.weight)
        model[0].weight.data.mul_(scale)
        model[1].weight.data.div_(scale * 6)
        dkm.compress_(model, "0:3 scaled, 1:2", method="escq", lam=0.5)
        dkm.calibrate_(model, [x.double()])
        codes.append([layer.parametrizations.weight[0].cluster_of for layer in model])
    for one, other in zip(*codes, strict=True):
        assert (one == other).float().mean() > 0.99
