"""The Gumbel-softmax by its definition."""

import pytest
import torch
from method_helpers import CONFIGURATIONS, backward, close, literal, make_weight, moved
from torch import Tensor

from dkm.clustering.kernels.reference import distance
from dkm.clustering.vectors import from_vectors, to_vectors
from dkm.modelling.methods import draws as draws_module
from dkm.modelling.methods import gumbel as gumbel_module
from dkm.modelling.methods.draws import uniform
from dkm.modelling.methods.gumbel import Gumbel


@pytest.mark.parametrize(("bits", "dim"), CONFIGURATIONS)
@pytest.mark.parametrize("metric", ["sqeuclidean", "euclidean"])
@pytest.mark.parametrize("block", [64, 1 << 20])
def test_gumbel(bits: int, dim: int, metric: str, block: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gumbel_module, "BLOCK", block)
    weight, tau = make_weight(), 0.2
    gumbel = Gumbel(weight, bits, dim, tau=tau, max_iter=3, metric=metric)
    start, step = moved(gumbel)
    found = gumbel.cluster(weight, start, step)

    def drawn(V: Tensor, C: Tensor, iteration: int) -> Tensor:
        key = draws_module.mix(gumbel.key + step) + iteration
        u = uniform(key, 0, len(V) * len(C), V.dtype).view(len(V), len(C))
        return torch.softmax(-distance(V, C, metric) / tau - torch.log(-torch.log(u)), 1)

    A, C, C_next, iterations = literal(to_vectors(weight, dim), start, gumbel.options.eps, 3, drawn)
    W_tilde = from_vectors(A @ C, weight.shape)
    close(found.W_tilde, W_tilde)
    close(found.C, C_next.detach())
    assert int(found.iterations) == iterations
    close(backward(found.W_tilde, weight), backward(W_tilde, weight))


def test_gumbel_is_unbiased_in_the_assignment():
    """The largest of the noisy logits is a draw from the softmax of the logits: what Gumbel noise is for."""
    logits = torch.tensor([0.0, 1.0, 2.0]).expand(100_000, 3)
    u = uniform(torch.tensor(1), 0, logits.numel(), torch.float32).view(logits.shape)
    share = torch.bincount((logits - (-u.log()).log()).argmax(1)) / len(logits)
    torch.testing.assert_close(share, logits[0].softmax(0), rtol=0, atol=0.006)


def test_gumbel_learns_a_temperature():
    weight = make_weight()
    gumbel = Gumbel(weight, 2, tau="learn")
    gumbel(weight).square().sum().backward()
    assert gumbel.log_multiple.grad.abs() > 0
