"""`dkm.DKM`: the clustering as a layer on activations."""

import pytest
import torch
from torch import nn

import dkm


def test_starts_from_the_k_means_of_the_first_input():
    x = torch.randn(50, 4)
    layer = dkm.DKM(4, 2, tau=1e-3)
    layer.eval()
    layer(x)
    assert torch.equal(layer.C, dkm.init_centroids(x.view(-1, 2), 4))


def test_is_cluster():
    x = torch.randn(50, 4)
    layer = dkm.DKM(4, 2, tau=1e-2)
    expected = dkm.cluster(x, dkm.init_centroids(x.view(-1, 2), 4), tau=1e-2)
    torch.testing.assert_close(layer(x), expected.W_tilde)
    torch.testing.assert_close(layer.C, expected.C)


def test_options_reach_cluster():
    x = torch.randn(50, 4)
    options = dict(tau=0.3, eps=0.0, max_iter=2, metric="euclidean", impl="reference")
    layer = dkm.DKM(8, 2, seed=5, **options)
    wanted = dkm.cluster(x, dkm.init_centroids(x.view(-1, 2), 8, seed=5), **options).W_tilde
    torch.testing.assert_close(layer(x), wanted)


def test_gradient_flows_to_what_is_before_it():
    model = nn.Sequential(nn.Linear(6, 8), dkm.DKM(4, 2, tau=0.1), nn.Linear(8, 1))
    model(torch.randn(20, 6)).square().mean().backward()
    assert model[0].weight.grad.abs().sum() > 0
    assert model[0].weight.grad.isfinite().all()


def test_training_moves_the_centroids():
    layer = dkm.DKM(4, tau=0.1)
    layer(torch.randn(100))
    before = layer.C.clone()
    layer(torch.randn(100) + 1)
    assert not torch.equal(layer.C, before)


def test_evaluation_does_not_move_the_centroids():
    layer = dkm.DKM(4, tau=0.1)
    layer(torch.randn(100))
    layer.eval()
    before = layer.C.clone()
    layer(torch.randn(100) + 1)
    assert torch.equal(layer.C, before)


def test_centroids_hold_no_graph():
    layer = dkm.DKM(4, tau=0.1)
    layer(torch.randn(100, requires_grad=True))
    assert not layer.C.requires_grad


def test_two_steps_backward_one_after_another():
    layer = dkm.DKM(4, tau=0.1)
    first, second = (layer(torch.randn(100, requires_grad=True)) for _ in range(2))
    first.sum().backward()
    second.sum().backward()


def test_state_dict_round_trip():
    layer, x = dkm.DKM(4, 2, tau=0.1), torch.randn(30, 4)
    layer(x)
    copy = dkm.DKM(4, 2, tau=0.1)
    copy.load_state_dict(layer.state_dict())
    assert torch.equal(copy(x + 1), layer(x + 1))
    assert torch.equal(copy.C, layer.C)


def test_state_dict_before_the_first_input():
    layer, x = dkm.DKM(4, 2, tau=0.1), torch.randn(30, 4)
    copy = dkm.DKM(4, 2, tau=0.1)
    copy.load_state_dict(layer.state_dict())
    assert torch.equal(copy(x), layer(x))


@pytest.mark.parametrize("shape", [(1,), (2,), (3, 5), (2, 3, 5, 7), ()], ids=str)
@pytest.mark.parametrize("dim", [1, 3, 8])
def test_odd_inputs_keep_their_shape(shape, dim):
    y = dkm.DKM(4, dim, tau=0.1)(torch.randn(shape))
    assert y.shape == shape
    assert y.isfinite().all()


def test_inputs_of_changing_size():
    layer = dkm.DKM(4, 2, tau=0.1)
    assert [layer(torch.randn(n)).shape[0] for n in (100, 1, 7)] == [100, 1, 7]


def test_an_input_that_is_not_contiguous():
    x = torch.randn(6, 4)
    torch.testing.assert_close(dkm.DKM(4, tau=0.1)(x.t()), dkm.DKM(4, tau=0.1)(x.t().contiguous()))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_dtype_of_the_input(dtype):
    layer = dkm.DKM(4, tau=0.1)
    assert layer(torch.randn(40).to(dtype)).dtype == dtype
    assert layer.C.dtype == torch.promote_types(dtype, torch.float32)


def test_repr_names_the_arguments():
    assert repr(dkm.DKM(4, 2, tau=0.1)) == "DKM(k=4, dim=2, tau=0.1)"


BAD = {
    "k": [0, -1, 2.5, "4", None],
    "dim": [0, -1, 1.5, "2"],
    "tau": [0, -1.0, float("nan"), float("inf"), "hot", None],
    "eps": [-1, float("nan")],
    "max_iter": [0, 1.5],
    "metric": ["cosine", None],
    "impl": ["fast", None],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD.items() for value in values])
def test_bad_arguments_are_refused_at_once(name, value):
    arguments = dict(k=4, tau=0.1) | {name: value}
    with pytest.raises((ValueError, TypeError), match=rf"\b{name}\b.*must.*got") as caught:
        dkm.DKM(**arguments)
    assert str(value) in str(caught.value)


BAD_INPUT = {
    "integers": (torch.arange(10), "floating"),
    "nothing": (torch.zeros(0), "at least one"),
    "nan": (torch.full((10,), float("nan")), "NaN"),
    "nan, dim 2": (torch.full((10, 2), float("nan")), "NaN"),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_a_bad_first_input_is_refused_and_not_remembered(case):
    x, word = BAD_INPUT[case]
    layer = dkm.DKM(4, x.ndim, tau=0.1)
    with pytest.raises((ValueError, TypeError), match=word):
        layer(x)
    assert not layer.initialized
    assert layer(torch.randn(10)).isfinite().all()
