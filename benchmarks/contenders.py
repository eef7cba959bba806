"""The contenders: each takes a Layer and returns its training step, forward and backward, as a function.

A step starts from the same centroids every time, makes `iterations` iterations, and returns W_tilde, the gradient of
W, and the centroids from which the next step would start.
"""

import logging
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn

import dkm
from dkm.clustering.vectors import from_vectors, to_vectors

from .measure import Layer


class Result(NamedTuple):
    W_tilde: Tensor
    dW: Tensor
    C: Tensor


Step = Callable[[], Result]


def ours(layer: Layer, iterations: int, impl: str = "auto") -> Step:
    W = layer.W.clone().requires_grad_()

    def step() -> Result:
        found = dkm.cluster(W, layer.C, tau=layer.tau, eps=0, max_iter=iterations, impl=impl)
        (dW,) = torch.autograd.grad(found.W_tilde, W, layer.G)
        assert int(found.iterations) == iterations  # at the end, because it waits for a GPU
        return Result(found.W_tilde.detach(), dW, found.C)

    return step


def unrolled(layer: Layer, iterations: int) -> Step:
    """Plain autograd, with the distances as a matrix product: |w|^2 cancels in the softmax."""

    def cluster(W: Tensor, C: Tensor, tau: float) -> tuple[Tensor, Tensor]:
        for i in range(iterations):
            A = torch.softmax((2 * W @ C.T - C.square().sum(1)) / tau, dim=1)
            if i < iterations - 1:
                C = (A.T @ W) / A.sum(0)[:, None]
        with torch.no_grad():
            C_next = (A.T @ W) / A.sum(0)[:, None]
        return A @ C, C_next

    return _autograd_step(layer, cluster)


def tuned(layer: Layer, iterations: int) -> Step:
    """Like `unrolled`, with as few passes over A as autograd allows, as far as we know.

    1/tau is folded into the centroids, A^T W and A^T 1 are one product, and for few centroids A is (k, n) in
    memory.
    """

    def cluster(W: Tensor, C: Tensor, tau: float) -> tuple[Tensor, Tensor]:
        few = len(C) < 32
        if few:
            W = W.T.contiguous().T
            W1 = torch.cat([W.T, W.new_ones(1, len(W))]).T
        else:
            W1 = torch.cat([W, W.new_ones(len(W), 1)], dim=1)

        def update(A: Tensor) -> Tensor:
            sums = A.T @ W1
            return sums[:, :-1] / sums[:, -1:]

        for i in range(iterations):
            slopes, offsets = C * (2 / tau), C.square().sum(1) / -tau
            if few:
                A = torch.softmax(torch.addmm(offsets[:, None], slopes, W.T), dim=0).T
            else:
                A = torch.softmax(torch.addmm(offsets, W, slopes.T), dim=1)
            if i < iterations - 1:
                C = update(A)
        with torch.no_grad():
            C_next = update(A)
        return A @ C, C_next

    return _autograd_step(layer, cluster)


def _autograd_step(layer: Layer, cluster: Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor]]) -> Step:
    W = layer.W.clone().requires_grad_()

    def step() -> Result:
        V_tilde, C = cluster(to_vectors(W, layer.dim), layer.C, layer.tau)
        W_tilde = from_vectors(V_tilde, W.shape)
        (dW,) = torch.autograd.grad(W_tilde, W, layer.G)
        return Result(W_tilde.detach(), dW, C)

    return step


# --- coremltools ---------------------------------------------------------------------------------


class Unavailable(Exception):
    """Raised where coremltools cannot do what is measured.  The message gives the reason in a few words."""


def coremltools(layer: Layer, iterations: int) -> Step:
    """The DKM palettizer of coremltools on an nn.Linear with the same weights: its fake-palettize module alone.

    `weight_fake_quant(weight)` is what the prepared layer's forward pass calls before its matrix product.
    Its options have their defaults, except those that define the problem: bits, dim, tau, the number of iterations, an
    epsilon so small that it never stops early, and no pruning.

    It still differs from dkm in two ways: W_tilde = A C uses the *updated* C, so the gradient passes through one more
    update; and its attention is clamped to at least 1e-7.  Without the clamp its centroids are those of dkm.
    """
    options = dict(kmeans_max_iter=iterations, palett_epsilon=-1.0, palett_tau=layer.tau, prune_threshold=0.0)
    fake, weight = _palettizer(layer.W, layer.bits, layer.dim, **options)
    G = _as_weight(layer.G)

    checked = False

    def step() -> Result:
        nonlocal checked
        fake.centroids = [layer.C.clone()]
        with nullcontext() if checked else _exactly(iterations):
            W_tilde = fake(weight)
        checked = True
        (dW,) = torch.autograd.grad(W_tilde, weight, G)
        return Result(W_tilde.detach(), dW, fake.centroids[0])

    return step


def coremltools_init(W: Tensor, bits: int, dim: int, init: str = "auto") -> Callable[[], Tensor]:
    """The k-means that coremltools starts with, in its first forward pass, before it clusters."""
    fake, weight = _palettizer(W, bits, dim, kmeans_init=init)

    def start() -> Tensor:
        fake.create_partitions(weight.detach())
        fake.init_partitions(weight.detach().clone())
        return fake.centroids[0]

    return start


def has_coremltools() -> bool:
    try:
        _import_coremltools()
    except ImportError:
        return False
    return True


def _import_coremltools():
    """The palettization package of coremltools, imported without its warnings about untested versions."""
    logging.getLogger("coremltools").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import coremltools.optimize.torch.palettization as palettization
    return palettization


def _palettizer(W: Tensor, bits: int, dim: int, **options) -> tuple[nn.Module, nn.Parameter]:
    """The FakePalettize module that coremltools puts into an nn.Linear with these weights, and its parameter."""
    palettization = _import_coremltools()
    linear = nn.Linear(*_as_weight(W).shape, bias=False, device=W.device)
    with torch.no_grad():
        linear.weight.copy_(_as_weight(W))
    config = palettization.ModuleDKMPalettizerConfig(n_bits=bits, cluster_dim=dim, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        palettizer = palettization.DKMPalettizer(
            nn.Sequential(linear), palettization.DKMPalettizerConfig(global_config=config)
        )
        model = palettizer.prepare(inplace=True)
    if not hasattr(model[0], "weight_fake_quant"):
        raise Unavailable("skipped by it")
    return model[0].weight_fake_quant, model[0].weight


def _as_weight(flat: Tensor) -> Tensor:
    """`(N,)` as a square matrix, arranged such that coremltools cuts it into the same vectors as dkm.

    coremltools transposes the matrix first.  For d = 1 the order does not matter.
    """
    side = math.isqrt(flat.numel())
    if side * side != flat.numel():
        raise Unavailable("not a square")
    return flat.view(side, side).T.contiguous()


@contextmanager
def _exactly(iterations: int) -> Iterator[None]:
    """Raise Unavailable unless the code inside makes this many iterations, which are counted by calls for distances."""
    from coremltools.optimize.torch.palettization import fake_palettize

    kmeans = fake_palettize._EfficientKMeans
    with mock.patch.object(kmeans, "x_c_dist", side_effect=kmeans.x_c_dist) as distances:
        yield
    if distances.call_count != iterations:
        raise Unavailable(f"made {distances.call_count} iterations")
