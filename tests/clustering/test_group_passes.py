"""The passes over groups without autograd, against the literal clustering of each group."""

import pytest
import torch
from group_cases import CASES, literal, problem

from dkm.clustering import group_passes
from dkm.clustering.groups import Grouping
from dkm.clustering.kernels import blocked
from dkm.clustering.options import ClusterOptions

# What a shard may be left with: less than one tile, which one process would have made smaller.
SHORT = [Grouping(3, 10, 5, 4, 3), Grouping(1, 5, 1, 24, 2), Grouping(2, 9, 4, 9, 1)]
GROUPINGS = [Grouping.of(*case) for case in CASES] + SHORT


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("grouping", GROUPINGS, ids=str)
def test_values_and_gradients(grouping, at_once, monkeypatch):
    if not at_once:
        monkeypatch.setattr(blocked, "fits_groups", lambda *_: False)
    W, C, tau, G = problem((grouping.rows, grouping.columns), grouping, 3)
    options = ClusterOptions(eps=1e-9, max_iter=4, impl="blocked")
    got = group_passes.forward(W.view(-1), C, tau, grouping, options)
    dW, dC, dtau = group_passes.backward(G.view(-1), W.view(-1), tau, got.traces, grouping, options, temperature=True)
    assert dC is None
    assert isinstance(got.traces, list) == (not at_once)
    W, tau = W.requires_grad_(), tau.requires_grad_()
    W_tilde, C_next, iterations = literal(W, C, tau, grouping, options)
    wanted_dW, wanted_dtau = torch.autograd.grad(W_tilde, (W, tau), G)
    assert torch.equal(got.iterations, iterations)
    pairs = (got.W_tilde, W_tilde), (got.C, C_next), (dW, wanted_dW), (dtau, wanted_dtau)
    for a, b in pairs:
        # float64: a thousand operations of 1e-16, amplified by a temperature of a tenth
        torch.testing.assert_close(a, b.detach().reshape(a.shape), rtol=1e-10, atol=1e-10)
