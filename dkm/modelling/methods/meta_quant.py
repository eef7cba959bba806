"""MetaQuant (Chen et al., 2019): a small network learns what gradient the quantiser lets through."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ...clustering.assign import assign
from ...clustering.cluster import Clustering
from ...clustering.options import StartOptions
from ...clustering.vectors import compute_dtype, to_vectors
from ..clustered import Clustered
from .by_vectors import ByVectors, means
from .hard import HardOptions, k_means
from .registry import register

UNITS = 8  # hidden ones, of the network
REACH = 2.0  # their thresholds lie evenly between this many typical weights below zero and above it


@register("meta-quant")
class MetaQuant(ByVectors):
    """The nearest centroid, with a gradient that a small network makes of the weight and its gradient.

        W~ = the nearest centroid;  dW = M(dW~, W) = f(W) dW~,  f(W) = 2 sigmoid(sum_j v_j tanh(a_j W / s + c_j))

    with s the root mean square of the first weight.  All tensors share the network, which starts as f = 1, the
    straight-through gradient.  It learns from the next step: the weight that an optimizer has made depends on M, and
    what the loss says about that weight says which M would have been better.

        dphi = sum dW d/dphi log f(W_before) (W - W_before) / |W - W_before|

    That is the gradient through a step of SGD, W = W_before - lr M, whose length is divided out, so that a learning
    rate that suits the model suits the network.  Any other optimizer's step counts as proportional to M too.

    The centroids follow the weights by k-means.  One more parameter, and three more buffers:
        phi      (3, 8)  a, c and v: one and the same object in all tensors.  Build the optimizer afterwards.
        size     ()      s
        present  like the weight: the one that was clustered last
        before   like the weight: the one before it
    """

    Options: ClassVar[type[StartOptions]] = HardOptions
    paper: ClassVar[str] = "Chen 2019"
    options: HardOptions
    loop: HardOptions
    size: Tensor
    present: Tensor
    before: Tensor

    def __init__(self, weight: Tensor, bits: int, dim: int = 1, **options: Any):
        super().__init__(weight, bits, dim, **options)
        values = weight.detach()
        dtype = compute_dtype(weight.dtype)
        self.register_buffer("size", self.scaled(values).to(dtype).square().mean().sqrt().clamp(min=1e-30))
        self.register_buffer("present", values.clone())
        self.register_buffer("before", values.clone())
        units = torch.ones(UNITS, dtype=dtype, device=weight.device)
        thresholds = torch.linspace(-REACH, REACH, UNITS, dtype=dtype, device=weight.device)
        network = torch.stack([units, thresholds, torch.zeros_like(units)])
        self.phi = nn.Parameter(network, requires_grad=weight.requires_grad)
        self.borrows = False  # whether phi is that of another tensor

    def join(self, first: Clustered) -> None:
        """Become a part of the model of `first`, and learn with its network."""
        super().join(first)
        assert isinstance(first, MetaQuant)
        first.phi.requires_grad_(first.phi.requires_grad or self.phi.requires_grad)
        self.phi = first.phi
        self.borrows = first is not self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.borrows and not keep_vars:  # trainers refuse to write tensors that share memory
            destination[prefix + "phi"] = destination[prefix + "phi"].clone()

    def soft(self, weight: Tensor) -> Tensor:
        """W~, with gradient.  The state advances if the weight has changed."""
        moved = self.moment(weight).step != self.step
        self._keep(torch.where(moved, self.present, self.before), torch.where(moved, weight.detach(), self.present))
        return super().soft(weight)

    def cluster_vectors(self, V: Tensor, C: Tensor, step: Tensor) -> Clustering:
        """`(n, d)` vectors and the centroids to start from -> their clustering.  Changes nothing."""
        values = V.detach()
        C, codes, iterations = k_means(values, C, self.loop)
        C = means(values, codes, C)
        before = to_vectors(self.scaled(self.before), self.dim).to(V.dtype)
        way = values - before
        way = way / torch.linalg.vector_norm(way).clamp(min=1e-30)
        nearest = C[assign(values, C)]
        V_tilde = _Learned.apply(V, self.phi.to(V.device, V.dtype), nearest, self.size, before, way)
        return Clustering(V_tilde, C, iterations)

    def _keep(self, before: Tensor, present: Tensor) -> None:
        if torch.compiler.is_compiling():  # as in `advance`
            self.before, self.present = before, present
            return
        with torch.no_grad():
            self.before.copy_(before)
            self.present.copy_(present)


def factor(u: Tensor, phi: Tensor) -> Tensor:
    """`f(W)` of weights in units of their first root mean square: between 0 and 2."""
    total = torch.zeros_like(u)
    for a, c, v in phi.T:  # one after the other: together they would take 8 times the memory of the weight
        total = total + v * torch.tanh(a * u + c)
    return 2 * torch.sigmoid(total)


class _Learned(torch.autograd.Function):
    """The nearest centroids, with the gradient that the network makes, and the network's own."""

    @staticmethod
    def forward(V: Tensor, phi: Tensor, nearest: Tensor, size: Tensor, before: Tensor, way: Tensor) -> Tensor:
        """Vectors, the network, their nearest centroids, the unit, the vectors before, and the way from there."""
        return nearest.view_as(nearest)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """All but the centroids."""
        V, phi, _, *others = inputs
        ctx.save_for_backward(V, phi, *others)

    @staticmethod
    def backward(ctx: Any, G: Tensor) -> tuple[Tensor | None, ...]:
        """M of the weights, and how it should have been one step ago."""
        V, phi, size, before, way = ctx.saved_tensors
        M = G * factor(V / size, phi)
        u = before / size
        r = M * way * (1 - factor(u, phi) / 2)  # by the sum that the sigmoid gets: d log f = 1 - f / 2
        columns = []
        for a, c, v in phi.T:
            t = torch.tanh(a * u + c)
            of_c = v * (r * (1 - t * t))
            columns.append(torch.stack([(of_c * u).sum(), of_c.sum(), (r * t).sum()]))
        return M, torch.stack(columns, dim=1), None, None, None, None
