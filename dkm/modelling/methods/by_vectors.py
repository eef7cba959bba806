"""What the methods that compute in plain PyTorch share: vectors in at least float32, and DKM's loop."""

from abc import abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from ...clustering.cluster import Clustering
from ...clustering.options import LoopOptions
from ...clustering.vectors import compute_dtype, from_vectors, to_vectors
from ..clustered import Clustered


class ByVectors(Clustered):
    """A method that maps vectors `(n, d)` to vectors, on any device and without kernels of its own."""

    def cluster(self, weight: Tensor, start: Tensor, step: Tensor) -> Clustering:
        """The clustering of the scaled weight from the centroids `start`, at the moment `step`.  Changes nothing."""
        with torch.autocast(weight.device.type, enabled=False):
            V = to_vectors(weight, self.dim).to(compute_dtype(weight.dtype))
            V_tilde, C, iterations = self.cluster_vectors(V, start, step)
        return Clustering(from_vectors(V_tilde.to(weight.dtype), weight.shape), C.detach(), iterations)

    @abstractmethod
    def cluster_vectors(self, V: Tensor, C: Tensor, step: Tensor) -> Clustering:
        """`(n, d)` vectors and the centroids to start from -> their clustering.  Changes nothing."""


def iterate(update: Callable[[Tensor, Tensor], Tensor], C: Tensor, options: LoopOptions) -> tuple[Tensor, Tensor]:
    """DKM's loop around `C_next = update(C, number)`, where number, a () tensor, counts the iterations from 1.

    Returns the centroids that the last iteration starts from, and the number of that iteration; the caller makes it.
    Once the centroids have converged they stay the same, so that nothing waits for the device.
    """
    number = torch.ones((), dtype=torch.int64, device=C.device)
    done = torch.zeros((), dtype=torch.bool, device=C.device)
    for _ in range(options.max_iter - 1):
        C_next = update(C, number)
        done = done | ((C_next - C).detach().abs().amax() <= options.eps)
        C = torch.where(done, C, C_next)
        number = number + ~done
    return C, number


def means(V: Tensor, codes: Tensor, C: Tensor) -> Tensor:
    """`(n, d), (n,) -> (k, d)`: the mean of each cluster; an empty one stays where it is, in C."""
    sums = torch.zeros_like(C).index_add(0, codes, V)
    ones = torch.ones_like(codes)  # integers: float32 would stop counting at 2^24; bincount would wait for the device
    count = torch.zeros(len(C), dtype=torch.int64, device=C.device).index_add(0, codes, ones)[:, None]
    return torch.where(count > 0, sums / count.clamp(min=1), C)
