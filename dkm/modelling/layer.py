"""DKM as a layer on activations: the paper's "generic neural layer"."""

from typing import Any

import torch
from torch import Tensor, nn

from ..clustering.cluster import check_tensors, run
from ..clustering.initialize import init_centroids
from ..clustering.options import ClusterOptions, shows_options
from ..clustering.temperature import check_tau
from ..clustering.vectors import to_vectors


class DKM(nn.Module):
    """A layer that clusters its input: every vector becomes a soft average of k centroids.  The shape stays.

    The input is flattened contiguously into vectors of `dim` values, as in `cluster`.  The centroids start from the
    k-means of the first input and move with every forward pass in training mode; in evaluation mode they stay.

    Args:
        k: how many centroids.
        dim: how many values a vector has.
        tau: the temperature, a number.
        seed: the seed of the k-means.
        options: as in `cluster`: eps, max_iter, metric, gradient, impl.
    """

    C: Tensor
    initialized: Tensor

    @shows_options(ClusterOptions)
    def __init__(self, k: int, dim: int = 1, *, tau: float, seed: int = 0, **options: Any):
        super().__init__()
        for name, value in (("k", k), ("dim", dim)):
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
        check_tau(tau)
        self.k, self.dim, self.tau, self.seed = k, dim, tau, seed
        self.options = ClusterOptions(**options)
        self.register_buffer("C", torch.zeros(k, dim))
        self.register_buffer("initialized", torch.tensor(False))

    def forward(self, x: Tensor) -> Tensor:
        """The input with every vector replaced by a soft average of the centroids."""
        if not self.initialized:
            self.C = init_centroids(to_vectors(x, self.dim), self.k, seed=self.seed)
            self.initialized = torch.tensor(True, device=x.device)
        check_tensors(x, self.C)
        W_tilde, C, _ = run(x, self.C, self.tau, self.options)
        if self.training:
            self.C = C
        return W_tilde

    def extra_repr(self) -> str:
        """What `print(model)` shows."""
        return f"k={self.k}, dim={self.dim}, tau={self.tau}"
