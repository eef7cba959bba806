"""Where the centroids of groups start."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dkm
from dkm.clustering import initialize_groups
from dkm.clustering.groups import Group, Grouping
from dkm.clustering.initialize_groups import init_group_centroids


def errors(V: torch.Tensor, C: torch.Tensor) -> torch.Tensor:
    """`(g, n, d), (g, k, d) -> (g,)`: the squared error of each group, whose vectors all count."""
    return (V.double()[:, :, None] - C.double()[:, None]).square().sum(-1).amin(2).sum(1)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def one_by_one(W: torch.Tensor, k: int, grouping: Grouping) -> torch.Tensor:
    """Each group by `init_centroids`, only with the vectors that count."""
    return torch.stack(
        [dkm.init_centroids(v[c], k) for v, c in zip(grouping.split(W), grouping.counted(), strict=True)]
    )


@pytest.mark.parametrize(("weights", "k"), [(32, 8), (64, 4), (64, 16), (128, 8), (512, 8), (512, 64), (2000, 16)])
def test_groups_are_as_close_as_tensors_for_d_1(weights: int, k: int):
    W = normal(40 * weights)
    grouping = Grouping.of(W.shape, Group(None, weights), 1)
    V = grouping.split(W)
    ratios = errors(V, init_group_centroids(W, k, grouping)) / errors(V, one_by_one(W, k, grouping))
    assert ratios.median() <= 1.1


@pytest.mark.parametrize(("weights", "dim", "k"), [(256, 2, 8), (512, 4, 16), (512, 3, 32)])
def test_groups_are_as_close_as_tensors_for_larger_d(weights: int, dim: int, k: int):
    W = normal(40 * weights)
    grouping = Grouping.of(W.shape, Group(None, weights), dim)
    V = grouping.split(W)
    ratios = errors(V, init_group_centroids(W, k, grouping)) / errors(V, one_by_one(W, k, grouping))
    # Both are k-means++ with other draws, and Lloyd: neither is better by construction.
    assert ratios.median() <= 1.1


CLUSTERS = {"d = 1": (1, 4), "d = 2": (2, 8), "d = 4": (4, 16)}


@pytest.mark.parametrize("case", CLUSTERS)
def test_clusters_of_each_group_are_found(case: str):
    dim, k = CLUSTERS[case]
    centers = 10 * normal(6, k, dim, seed=1)
    V = centers.repeat(1, 20, 1) + 1e-3 * normal(6, 20 * k, dim)
    C = init_group_centroids(V, k, Grouping.of((6, 20 * k * dim), Group(1), dim))
    nearest = (centers[:, :, None] - C[:, None]).norm(dim=-1).amin(2)
    # k-means++ may leave a cluster out for d > 1, which Lloyd cannot repair: most of them are found.
    assert (nearest < 1e-2).double().mean() >= (1.0 if dim == 1 else 0.8)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 7),
    st.integers(1, 12),
    st.integers(1, 8),
    st.integers(1, 13),
    st.integers(1, 3),
    st.integers(1, 9),
    st.sampled_from(["kmeans", "random"]),
)
def test_what_does_not_count_has_no_influence(rows, columns, tile_rows, tile_columns, dim, k, init):
    """With values of at least 1, zeros at the edges of the tensor would be seen: as a centroid, or in a mean."""
    W = 1 + torch.rand(rows, columns, generator=torch.Generator().manual_seed(rows * columns))
    grouping = Grouping.of(W.shape, Group(tile_rows, tile_columns), dim)
    C = init_group_centroids(W, k, grouping, init=init)
    assert C.shape == (grouping.count, k, dim)
    for v, counted, c in zip(grouping.split(W), grouping.counted(), C, strict=True):
        # Every centroid is within the box of the vectors that count, up to the rounding of centring them.
        assert (c >= v[counted].amin(0) - 1e-6).all()
        assert (c <= v[counted].amax(0) + 1e-6).all()


@pytest.mark.parametrize("dim", [1, 2, 4])
@pytest.mark.parametrize("init", ["kmeans", "random"])
def test_groups_with_few_distinct_vectors(dim: int, init: str):
    kinds = torch.tensor([0.0, 0.25, -3.0, 8.0]).repeat_interleave(dim).view(4, dim)
    picks = torch.tensor([[0] * 6, [0, 1] * 3, [1, 2, 3] * 2, [3, 2, 1, 0, 0, 0]])
    V = kinds[picks]
    C = init_group_centroids(V, 8, Grouping.of((4, 6 * dim), Group(1), dim), init=init)
    assert errors(V, C).tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("scale", [0.0, 1e-42, 1e-30, 1e-5, 1e30])
@pytest.mark.parametrize("dim", [1, 2])
@pytest.mark.parametrize("init", ["kmeans", "random"])
def test_any_scale_gives_finite_centroids(scale: float, dim: int, init: str):
    W = normal(8, 32) * scale
    C = init_group_centroids(W, 4, Grouping.of(W.shape, Group(2), dim), init=init)
    assert C.isfinite().all()
    assert C.abs().amax() <= W.abs().amax() * (1 + 1e-6)


@pytest.mark.parametrize("dim", [1, 2])
@pytest.mark.parametrize("init", ["kmeans", "random"])
def test_deterministic_and_the_global_generator_is_left_alone(dim: int, init: str):
    W, grouping = normal(16, 96), Grouping.of((16, 96), Group(4, 32), dim)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = init_group_centroids(W, 4, grouping, init=init, seed=3)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(init_group_centroids(W.clone(), 4, grouping, init=init, seed=3), first)
    if init == "random" or dim > 1:
        assert not torch.equal(init_group_centroids(W, 4, grouping, init=init, seed=4), first)


def test_chunks_do_not_change_the_centroids(monkeypatch):
    W, grouping = normal(32, 64), Grouping.of((32, 64), Group(1), 1)
    whole = init_group_centroids(W, 8, grouping)
    monkeypatch.setattr(initialize_groups, "CHUNK", 1)
    assert torch.equal(init_group_centroids(W, 8, grouping), whole)  # d = 1 draws nothing, and adds integers


@pytest.mark.parametrize("dim", [1, 3])
def test_one_group_and_large_groups_are_clustered_as_tensors_are(dim: int, monkeypatch):
    W = normal(30, 30)
    whole = Grouping.of(W.shape, None, dim)
    assert torch.equal(init_group_centroids(W, 8, whole)[0], dkm.init_centroids(whole.split(W)[0], 8))
    monkeypatch.setattr(initialize_groups, "LARGE", 10)
    grouping = Grouping.of(W.shape, Group(7, 11), dim)
    assert torch.equal(init_group_centroids(W, 8, grouping), one_by_one(W, 8, grouping))


@pytest.mark.parametrize("dim", [1, 2])
def test_random_picks_vectors_that_count(dim: int):
    W, k = normal(5, 10), 4
    grouping = Grouping.of(W.shape, Group(2, 6), dim)
    C = init_group_centroids(W, k, grouping, init="random")
    for v, counted, c in zip(grouping.split(W), grouping.counted(), C, strict=True):
        same = (c[:, None] == v[counted][None]).all(-1)
        assert same.any(1).all()
        assert same.any(0).sum() == min(k, int(counted.sum()))  # different ones, while there are enough


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("dim", [1, 2])
@pytest.mark.parametrize("init", ["kmeans", "random"])
def test_dtype_is_at_least_float32(dtype: torch.dtype, dim: int, init: str):
    W = normal(8, 16).to(dtype).requires_grad_()
    C = init_group_centroids(W, 4, Grouping.of(W.shape, Group(2), dim), init=init)
    assert C.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert not C.requires_grad


def test_what_cannot_be_clustered_is_refused():
    W, grouping = normal(4, 4), Grouping.of((4, 4), Group(1), 1)
    with pytest.raises(ValueError, match=r"init must be .* got 'linear'"):
        init_group_centroids(W, 2, grouping, init="linear")
    with pytest.raises(ValueError, match="k must be an integer of at least 1, got 0"):
        init_group_centroids(W, 0, grouping)
    with pytest.raises(ValueError, match="4 x 4 weights, and W has 15"):
        init_group_centroids(W.flatten()[:15], 2, grouping)
    with pytest.raises(TypeError, match="floating-point"):
        init_group_centroids(W.long(), 2, grouping)
    with pytest.raises(ValueError, match="NaN or infinite"):
        init_group_centroids(W / 0, 2, grouping)
