"""And the Bit Goes Down (Stock et al., 2020): k-means that keeps what a layer computes, not what its weights are."""

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...clustering.assign import assign
from ...clustering.initialize import init_centroids
from ...clustering.vectors import to_vectors
from ...foundation.errors import NeedError
from ..clustered import squared_error
from .deep_compression import DeepCompression
from .registry import register

LARGEST = 4096  # positions of a batch that are looked at


@register("atb")
class ATB(DeepCompression):
    """k-means once, by what it does to the layer's outputs; then only the centroids train.

        minimise  sum (v - c)^T M (v - c),  M = the mean of x x^T over the inputs x that the vectors v meet

    The inputs come from `dkm.calibrate_`.  With M = L L^T that is the k-means of the vectors v L; a centroid is the
    mean of its vectors.  It then trains as Deep Compression does.

    One more buffer: `metric`, (d, d), which is M, of mean diagonal 1.
    """

    needs: ClassVar[tuple[str, ...]] = ("batches",)
    paper: ClassVar[str] = "Stock 2020"
    metric: Tensor

    def __init__(self, weight: Tensor, bits: int, dim: int = 1, **options: Any):
        super().__init__(weight, bits, dim, **options)
        self.register_buffer("metric", torch.eye(dim, device=weight.device, dtype=self.C.dtype))
        self.inputs = torch.zeros(dim, dim, device=weight.device, dtype=torch.float64)  # the sum of x x^T

    def observe(self, module: nn.Module, name: str, inputs: tuple[Any, ...]) -> None:
        """A batch has come to the module that computes with the weight."""
        if isinstance(module, nn.Embedding):  # the inputs are one-hot, and all parts of a row count alike
            self.inputs = torch.eye(self.dim, device=self.inputs.device, dtype=torch.float64)
            return
        x = _rows_of_inputs(module, inputs)
        if x is None:
            raise NeedError(
                f'method="atb" knows what linear layers and convolutions of 1 and 2 dimensions do to their inputs, and '
                f'{name} belongs to a {type(module).__name__}: name it with "keep", or use method="dc"'
            )
        x = x[:: -(-len(x) // LARGEST)].double()
        width = x.shape[1]
        # the places of the vectors in a row; where d does not divide it, they repeat after a few rows
        rows = self.dim // math.gcd(width, self.dim)
        places = torch.arange(rows * width, device=x.device).view(-1, self.dim)
        seen = x[:, places % width]
        together = (places[:, :, None] // width) == (places[:, None, :] // width)  # in one row, of one output
        self.inputs = self.inputs + (torch.einsum("nbi,nbj->bij", seen, seen) * together).sum(0)

    def calibrate(self, weight: Tensor, name: str) -> None:
        """Cluster the vectors by the inputs that they have met."""
        size = self.inputs.diagonal().mean()
        if not size > 0 or not size.isfinite():
            raise NeedError(
                f'method="atb" has seen no finite input but zeros at {name}: give other batches, or "keep" it'
            )
        # the least part of a direction that no input had: k-means must not move it for nothing
        M = self.inputs / size + 1e-4 * torch.eye(self.dim, device=self.inputs.device, dtype=torch.float64)
        self.metric.copy_(M / M.diagonal().mean())
        root = torch.linalg.cholesky(self.metric.double()).to(self.C.dtype)
        V = to_vectors(self.scaled(weight.detach()), self.dim).to(self.C.dtype)
        near = init_centroids(V @ root, 2**self.bits, init=self.options.init, seed=self.options.seed)
        self.cluster_of.copy_(assign(V @ root, near))
        self.C.copy_(self.centroids(self.scaled(weight.detach()))[1])
        self.start.copy_(self.C)
        self.unit.copy_(squared_error(V, self.C))
        self.inputs = torch.zeros_like(self.inputs)


def _rows_of_inputs(module: nn.Module, inputs: tuple[Any, ...]) -> Tensor | None:
    """`(n, weights of a row)`: what meets each row of the weight; None of a module that is not known."""
    x = inputs[0] if inputs else None
    if not isinstance(x, Tensor):
        return None
    forward = type(module).forward  # a subclass may compute something else
    if forward is nn.Linear.forward:
        return x.reshape(-1, x.shape[-1])
    if not isinstance(module, nn.Conv1d | nn.Conv2d) or forward not in (nn.Conv1d.forward, nn.Conv2d.forward):
        return None
    two = isinstance(module, nn.Conv2d)
    x = x if x.ndim == (4 if two else 3) else x[None]
    reversed_padding = module._reversed_padding_repeated_twice
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    x = F.pad(x, reversed_padding, mode=mode)
    if not two:
        x = x[:, :, None]
    kernel, stride, dilation = (
        (size if two else (1, *size)) for size in (module.kernel_size, module.stride, module.dilation)
    )
    patches = F.unfold(x, kernel, dilation=dilation, stride=stride)  # (batch, weights of all groups, places)
    return patches.unflatten(1, (module.groups, -1)).movedim(2, -1).flatten(0, 2)
