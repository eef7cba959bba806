"""MetaQuant by its definition."""

import copy

import pytest
import torch
from method_helpers import PLAN, close, make_gradient, make_weight, network
from torch import Tensor, nn
from torch.nn import functional as F

import dkm
from dkm.modelling.methods.meta_quant import MetaQuant

LR = 0.05


def f(weight: Tensor, phi: Tensor, size: Tensor) -> Tensor:
    """The network, literally."""
    a, c, v = phi
    return 2 * torch.sigmoid((v * torch.tanh(a * (weight / size)[..., None] + c)).sum(-1))


def learned(meta: MetaQuant) -> MetaQuant:
    """With a network that is not the first one."""
    with torch.no_grad():
        meta.phi.copy_(torch.randn(meta.phi.shape, generator=torch.Generator().manual_seed(6), dtype=torch.float64))
    return meta


@pytest.mark.parametrize(("bits", "dim"), [(1, 1), (3, 1), (2, 3)])
def test_it_starts_with_the_straight_through_gradient_of_the_nearest_centroid(bits: int, dim: int):
    weight = make_weight()
    meta = MetaQuant(weight, bits, dim)
    W_tilde = meta(weight)
    W_tilde.backward(make_gradient(weight))
    assert torch.equal(weight.grad, make_gradient(weight))
    torch.testing.assert_close(W_tilde.detach(), meta.snapped(weight), rtol=2**-10, atol=0)  # centroids of 16 bits


@pytest.mark.parametrize(("bits", "dim"), [(2, 1), (2, 3)])
def test_the_gradient_of_the_weight_is_what_the_network_says(bits: int, dim: int):
    weight = make_weight()
    meta = learned(MetaQuant(weight, bits, dim))
    meta(weight).backward(make_gradient(weight))
    size = weight.detach().square().mean().sqrt()
    close(weight.grad, make_gradient(weight) * f(weight.detach(), meta.phi.detach(), size))
    assert not meta.phi.grad.any()  # no step was made yet


def unrolled(weight: Tensor, phi: Tensor, G: Tensor, G_next: Tensor) -> Tensor:
    """What two steps of SGD say about the network: the gradient of M_2 . W(phi), W(phi) = W - lr M_1(phi)."""
    size = weight.square().mean().sqrt()
    phi = phi.clone().requires_grad_()
    W_next = weight - LR * G * f(weight, phi, size)
    M_next = G_next * f(W_next.detach(), phi.detach(), size)
    return torch.autograd.grad((M_next * W_next).sum(), phi)[0]


@pytest.mark.parametrize("dim", [1, 3])
def test_the_gradient_of_the_network_is_that_of_two_steps_unrolled(dim: int):
    weight = make_weight()
    W, G = weight.detach().clone(), make_gradient(weight)
    meta = learned(MetaQuant(weight, 2, dim))
    optimizer = torch.optim.SGD([weight], lr=LR)
    meta(weight).backward(G)
    optimizer.step()
    length = (weight.detach() - W).norm()
    G_next = G.flip(0) - 0.3
    meta.phi.grad = None
    for _ in range(2):  # reading it again says the same
        meta(weight).backward(G_next / 2)
    close(meta.phi.grad, unrolled(W, meta.phi.detach(), G, G_next) / length)


def test_a_step_that_went_too_far_lowers_the_factor():
    """Where the next gradient is the opposite, smaller gradients would have been better, and the other way round."""
    for sign, grows in ((1, True), (-1, False)):
        weight, G = make_weight(), make_gradient(make_weight())
        meta = MetaQuant(weight, 2)
        optimizer = torch.optim.SGD([weight, meta.phi], lr=LR)
        for each in (G, sign * G):
            optimizer.zero_grad()
            meta(weight).backward(each)
            optimizer.step()
        M = torch.autograd.grad(meta(weight), weight, G)[0]
        assert ((M * G).sum() > (G * G).sum()) == grows


def test_all_tensors_share_one_network(tmp_path):
    model = network()
    dkm.compress_(model, PLAN, method="meta-quant")
    names = [name for name, _ in model.named_parameters()]
    assert sum(name.endswith("phi") for name in names) == 1
    x = torch.randn(8, 12)
    for each in (model, copy.deepcopy(model)):
        optimizer = torch.optim.SGD(each.parameters(), 0.1)
        for _ in range(2):
            optimizer.zero_grad()
            each(x).square().mean().backward()
            optimizer.step()
        phis = [each[i].parametrizations.weight[0].phi for i in (0, 3)]
        assert phis[0] is phis[1]
        assert phis[0].grad.any()
    assert model[0].parametrizations.weight[0].phi is not phis[0]


def test_a_layer_that_is_frozen_does_not_freeze_the_network():
    model = network()
    model[0].requires_grad_(False)
    dkm.compress_(model, PLAN, method="meta-quant")
    assert model[3].parametrizations.weight[0].phi.requires_grad
    frozen = network().requires_grad_(False)
    dkm.compress_(frozen, PLAN, method="meta-quant")
    assert not any(parameter.requires_grad for parameter in frozen.parameters())


def test_a_loss_times_two_is_a_gradient_times_two():
    """What gradient scalers and accumulated batches rely on."""
    gradients = []
    for scale in (1.0, 2.0):
        torch.manual_seed(0)
        layer = nn.Linear(6, 5)
        dkm.compress_(layer, "weight:2", method="meta-quant")
        x, y = torch.randn(9, 6), torch.randint(5, (9,))
        F.cross_entropy(layer(x), y).backward()
        with torch.no_grad():
            layer.parametrizations.weight.original.sub_(layer.parametrizations.weight.original.grad)
        layer.zero_grad()
        (scale * F.cross_entropy(layer(x), y)).backward()
        gradients.append([parameter.grad / scale for parameter in layer.parameters()])
    for one, two in zip(*gradients, strict=True):
        torch.testing.assert_close(one, two)
