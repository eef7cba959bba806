"""And the Bit Goes Down by its definition."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dkm
from dkm.clustering.vectors import to_vectors


def correlated(count: int, width: int) -> Tensor:
    """Inputs that vary much in a few directions and little in others."""
    generator = torch.Generator().manual_seed(0)
    directions = torch.randn(width, width, generator=generator) * torch.logspace(0, -2, width)
    return torch.randn(count, width, generator=generator) @ directions.T


def compressed(layer: nn.Module, spec: str, x: Tensor, **options) -> nn.Module:
    model = copy.deepcopy(layer)
    dkm.compress_(model, f"weight:{spec}", method="atb", **options)
    return dkm.calibrate_(model, [x[: len(x) // 2], (x[len(x) // 2 :], "a label")])


def patches(layer: nn.Module, x: Tensor) -> Tensor:
    """`(n, weights of a row)`: what each row of the weight is multiplied with."""
    if isinstance(layer, nn.Linear):
        return x
    pad = [size for size in reversed(layer.padding) for _ in range(2)]
    x = F.pad(x, pad, mode="constant" if layer.padding_mode == "zeros" else layer.padding_mode)
    if isinstance(layer, nn.Conv1d):
        found = x.unfold(2, layer.kernel_size[0], layer.stride[0])  # (batch, channels, places, kernel)
        found = found.movedim(1, 2)
    else:
        (a, b), (s, t) = layer.kernel_size, layer.stride
        found = x.unfold(2, a, s).unfold(3, b, t).movedim(1, 3)  # (batch, places, places, channels, kernel, kernel)
    grouped = found.unflatten(-layer.weight.ndim + 1, (layer.groups, -1))
    return grouped.reshape(-1, layer.weight[0].numel())


LAYERS = {
    "linear": (nn.Linear(12, 40), torch.randn(64, 12)),
    "conv1d": (nn.Conv1d(4, 30, 3, stride=2, padding=1), torch.randn(8, 4, 9)),
    "conv2d": (nn.Conv2d(4, 20, 3, padding=1, padding_mode="circular"), torch.randn(4, 4, 6, 6)),
    "groups": (nn.Conv2d(4, 20, (3, 2), stride=(1, 2), groups=2), torch.randn(4, 4, 6, 6)),
}


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("dim", [1, 4, 8])
def test_its_metric_is_that_of_the_inputs(kind: str, dim: int):
    """Vector by vector: the error that its change makes in the outputs is (v - c)^T M (v - c), up to M's scale."""
    layer, x = LAYERS[kind]
    model = compressed(layer, f"2/{dim}", x)
    X = patches(layer, x).double()
    M = torch.zeros(dim, dim, dtype=torch.float64)
    width, numel = X.shape[1], layer.weight.numel()
    for start in range(0, numel // dim * dim, dim):  # every vector, literally; it may reach over the end of a row
        for a in range(dim):
            for b in range(dim):
                if (start + a) // width == (start + b) // width:
                    M[a, b] += X[:, (start + a) % width] @ X[:, (start + b) % width]
    M = M / M.diagonal().mean() + 1e-4 * torch.eye(dim, dtype=torch.float64)
    ours = model.parametrizations.weight[0].metric.double()
    torch.testing.assert_close(ours, M / M.diagonal().mean(), rtol=1e-4, atol=1e-4)


def test_its_clusters_are_the_nearest_in_what_the_layer_computes():
    torch.manual_seed(0)
    layer, x = nn.Linear(8, 200, bias=False), correlated(256, 8)
    model = compressed(layer, "3/8", x)
    atb = model.parametrizations.weight[0]
    V, C = to_vectors(layer.weight.detach(), 8), atb.C
    errors = torch.stack([(x @ (V - c).T).square().sum(0) for c in C], dim=1)  # of each row of outputs, by centroid
    chosen = errors.gather(1, atb.cluster_of.long()[:, None])[:, 0]
    # k-means has converged but for a few vectors between two centroids
    assert (chosen <= errors.amin(1) * (1 + 1e-3) + 1e-6).float().mean() > 0.97
    members = torch.eye(8)[atb.cluster_of.long()]
    torch.testing.assert_close(C, members.T @ V / members.sum(0)[:, None])  # the means


@torch.no_grad()
@pytest.mark.parametrize("seed", range(3))
def test_it_keeps_the_outputs_where_k_means_keeps_the_weights(seed: int):
    """Two clusters of vectors (r, s) that meet inputs (x, 0): it splits them by r, and k-means by s, which is larger.

    Both r = 1 and r = -1 have either s, three times as often their own one.  So neither split is a resting place of
    the other k-means: after the split by s the means are (0.5, 10) and (-0.5, -10), and r = -1 is nearer to -0.5 by
    far where s counts for little; after the one by r they are (1, 5) and (-1, -5), and s = 10 is nearer to 5.
    """
    rows = torch.tensor([[1.0, 10.0]] * 150 + [[-1.0, 10.0]] * 50 + [[1.0, -10.0]] * 50 + [[-1.0, -10.0]] * 150)
    layer, x = nn.Linear(2, 400, bias=False), torch.linspace(-1, 1, 64)[:, None] * torch.tensor([1.0, 0.0])
    layer.weight.copy_(rows)
    plain = copy.deepcopy(layer)
    dkm.compress_(plain, "weight:1/2", method="dc", seed=seed)
    ours, theirs = (
        float((model.eval()(x) - layer(x)).square().mean()) for model in (compressed(layer, "1/2", x, seed=seed), plain)
    )
    assert theirs == pytest.approx(0.75 * float(x[:, 0].square().mean()), rel=1e-3)  # the variance of r for one s
    assert ours < 1e-6 * theirs


def test_an_embedding_counts_all_parts_alike():
    table = nn.Embedding(30, 8)
    dkm.compress_(table, "weight:2/4", method="atb")
    dkm.calibrate_(table, [torch.arange(30)])
    torch.testing.assert_close(table.parametrizations.weight[0].metric, torch.eye(4))


def test_a_layer_whose_inputs_it_does_not_know():
    model = nn.Sequential(nn.ConvTranspose2d(3, 4, 3))
    dkm.compress_(model, "0:2", method="atb")
    with pytest.raises(dkm.NeedError, match=r"0.weight belongs to a .*ConvTranspose2d: name it with"):
        dkm.calibrate_(model, [torch.randn(1, 3, 5, 5)])


@pytest.mark.parametrize("x", [torch.zeros(4, 12), torch.full((4, 12), torch.nan)])
def test_inputs_that_say_nothing(x: Tensor):
    layer = nn.Linear(12, 40)
    dkm.compress_(layer, "weight:2", method="atb")
    with pytest.raises(dkm.NeedError, match="has seen no finite input but zeros at weight: give other batches"):
        dkm.calibrate_(layer, [x])
