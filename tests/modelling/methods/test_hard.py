"""Hard k-means by its definition."""

import pytest
import torch
from method_helpers import CONFIGURATIONS, backward, close, literal, make_gradient, make_weight, moved
from torch import Tensor
from torch.nn import functional as F

from dkm.clustering.kernels.reference import distance
from dkm.clustering.vectors import from_vectors, to_vectors
from dkm.modelling.methods.hard import Hard


@pytest.mark.parametrize(("bits", "dim"), CONFIGURATIONS)
@pytest.mark.parametrize("max_iter", [1, 3, 50])
def test_hard(bits: int, dim: int, max_iter: int):
    weight = make_weight()
    hard = Hard(weight, bits, dim, max_iter=max_iter)
    start, step = moved(hard)
    found = hard.cluster(weight, start, step)

    def nearest(V: Tensor, C: Tensor, iteration: int) -> Tensor:
        return F.one_hot(distance(V, C, "sqeuclidean").argmin(1), len(C)).to(V.dtype)

    V = to_vectors(weight, dim)
    A, _, C_next, iterations = literal(V, start, hard.options.eps, max_iter, nearest)
    W_tilde = from_vectors(A @ C_next, weight.shape)
    close(found.W_tilde, W_tilde)
    close(found.C, C_next.detach())
    assert int(found.iterations) == iterations
    assert max_iter < 50 or iterations < 50  # it stops both ways
    close(backward(found.W_tilde, weight), backward(W_tilde, weight))


def test_hard_gives_each_weight_the_mean_gradient_of_its_cluster():
    weight = make_weight()
    hard = Hard(weight, 2)
    G = make_gradient(weight)
    gradient, codes = backward(hard(weight), weight), hard.codes(weight)[1].view(weight.shape)
    for j in range(4):
        close(gradient[codes == j], G[codes == j].mean().expand(int((codes == j).sum())))


def test_an_empty_cluster_stays_where_it_is():
    weight = make_weight()
    hard = Hard(weight, 2)
    hard.C = torch.tensor([[-1.0], [0.0], [1.0], [99.0]], dtype=torch.float64)
    found = hard.cluster(weight, hard.C, hard.step)
    assert found.C[3] == 99
    assert found.W_tilde.isfinite().all()
