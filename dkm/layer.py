"""DKM as a layer on activations: the paper's "generic neural layer"."""

import torch
from torch import Tensor, nn

from .functional import check_options, cluster, init_centroids, to_vectors


class DKM(nn.Module):
    """Clusters its input: `(..., anything) -> the same shape`, each vector a soft average of k centroids.

    The input is flattened contiguously into vectors of `dim` values, as in `cluster`.  The centroids
    start from the k-means of the first input and move on at every training forward; in evaluation mode
    they stay.
    """

    def __init__(
        self,
        k: int,
        dim: int = 1,
        *,
        tau: float,
        eps: float = 1e-4,
        max_iter: int = 5,
        metric: str = "sqeuclidean",
        gradient: str = "unrolled",
        impl: str = "auto",
        seed: int = 0,
    ):
        super().__init__()
        for name, value in (("k", k), ("dim", dim)):
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
        check_options(tau, eps, max_iter, metric, impl, gradient)
        self.k, self.dim, self.seed = k, dim, seed
        self.options = dict(tau=tau, eps=eps, max_iter=max_iter, metric=metric, gradient=gradient, impl=impl)
        self.register_buffer("C", torch.zeros(k, dim))
        self.register_buffer("initialized", torch.tensor(False))

    def forward(self, x: Tensor) -> Tensor:
        if not self.initialized:
            self.C = init_centroids(to_vectors(x, self.dim), self.k, seed=self.seed)
            self.initialized = torch.tensor(True, device=x.device)
        W_tilde, C, _ = cluster(x, self.C, **self.options)
        if self.training:
            self.C = C
        return W_tilde

    def extra_repr(self) -> str:
        return f"k={self.k}, dim={self.dim}, tau={self.options['tau']}"
