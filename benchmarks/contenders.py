"""The contenders: each takes a Layer and returns its training step, forward and backward, as a function.

A step starts from the same centroids every time, makes exactly `iterations` iterations, and returns W_tilde,
the gradient of W, and the centroids that the next step would start from.
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
        assert int(found.iterations) == iterations  # at the end: it waits for a GPU
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
    """As `unrolled`, with as few passes over A as we found autograd to allow.

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
    """coremltools cannot do this; the message says why, in few words."""


def coremltools(layer: Layer, iterations: int) -> Step:
    """coremltools's DKM palettizer on an nn.Linear of the same weights: its fake-palettize module alone.

    `weight_fake_quant(weight)` is what the prepared layer's forward pass calls before its matrix product.
    The options are its defaults but for those that state the problem: bits, dim, tau, the number of
    iterations, an epsilon that no change of inertia falls below, and no pruning.

    Two things remain that are its own: W_tilde = A C with the *updated* C (so the gradient passes through
    one more update), and attention clamped to at least 1e-7 (without the clamp its centroids are ours).
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
    """The k-means with which coremltools starts: what the first forward pass does before it clusters."""
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
    """Its palettization package, without the warnings that it was tested with other versions of everything."""
    logging.getLogger("coremltools").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import coremltools.optimize.torch.palettization as palettization
    return palettization


def _palettizer(W: Tensor, bits: int, dim: int, **options) -> tuple[nn.Module, nn.Parameter]:
    """The FakePalettize module that coremltools puts in an nn.Linear with these weights, and its parameter."""
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
    """`(N,)` as the square matrix whose vectors, as coremltools cuts them, are ours: it transposes first.

    For d = 1 the order does not matter.
    """
    side = math.isqrt(flat.numel())
    if side * side != flat.numel():
        raise Unavailable("not a square")
    return flat.view(side, side).T.contiguous()


@contextmanager
def _exactly(iterations: int) -> Iterator[None]:
    """Raises Unavailable unless so many iterations are made inside: each computes its distances once."""
    from coremltools.optimize.torch.palettization import fake_palettize

    kmeans = fake_palettize._EfficientKMeans
    with mock.patch.object(kmeans, "x_c_dist", side_effect=kmeans.x_c_dist) as distances:
        yield
    if distances.call_count != iterations:
        raise Unavailable(f"made {distances.call_count} iterations")
