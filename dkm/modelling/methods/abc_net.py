"""ABC-Net (Lin et al., 2017): weights as a sum of several binary bases."""

from typing import ClassVar

import torch
from torch import Tensor

from ...clustering.cluster import Clustering
from .by_codes import ByCodes, Coded
from .registry import register


@register("abc-net")
class ABCNet(ByCodes):
    """The least-squares sum of M binary bases, one for each bit.

        B_i = sign(W - mean(W) + u_i std(W)),  u_i evenly from -1 to 1;  W~ = sum a_i B_i,  a = argmin |W - sum a_i B_i|

    A code has a bit for each basis, and the 2^M sums are the centroids; bases with growing thresholds give M + 1 of
    them.  The gradient passes straight through each basis to the weight in units of std(W), so that it is dW~ times
    sum(a) / std(W), which is about 1.
    """

    paper: ClassVar[str] = "Lin 2017"

    def cluster_vectors(self, V: Tensor, C: Tensor, step: Tensor) -> Clustering:
        """`(n, 1)` scaled weights -> W~ and the values of the codes.  Changes nothing."""
        w = V[:, 0].detach()
        B, a = self.bases(w)
        slope = a.sum() / _spread(w)
        values = (B @ a)[:, None]
        W_tilde = values + slope * (V - V.detach())  # + 0, and its gradient
        return Clustering(W_tilde, self._values(a), torch.zeros_like(self.step))

    def coded(self, w: Tensor) -> Coded:
        """`(n,)` scaled weights -> their codes, of which bit i is the sign in basis i."""
        B, a = self.bases(w)
        codes = torch.zeros(len(w), dtype=torch.int64, device=w.device)
        for i in range(self.bits):
            codes += (B[:, i] > 0).long() << i
        return Coded(self._values(a), codes)

    def bases(self, w: Tensor) -> tuple[Tensor, Tensor]:
        """`(n,) -> (n, M), (M,)`: the bases, and the factors with which their sum is the nearest to the weights."""
        u = torch.linspace(-1, 1, self.bits, device=w.device, dtype=w.dtype) if self.bits > 1 else w.new_zeros(1)
        shifted = (w - w.mean())[:, None] + u * _spread(w)
        B = torch.where(shifted >= 0, 1.0, -1.0).to(w.dtype)
        # bases of a few weights may be equal, and their matrix singular: this little more makes it regular
        products = (B.T @ B).double() / len(w) + 1e-6 * torch.eye(self.bits, device=w.device, dtype=torch.float64)
        a, _ = torch.linalg.solve_ex(products, (B.T @ w).double()[:, None] / len(w))
        return B, a[:, 0].to(w.dtype)

    def _values(self, a: Tensor) -> Tensor:
        """`(M,) -> (2^M, 1)`: the sum for each code."""
        numbers = torch.arange(2**self.bits, device=a.device)[:, None]
        return torch.where(numbers >> torch.arange(self.bits, device=a.device) & 1 > 0, a, -a).sum(1, keepdim=True)


def _spread(w: Tensor) -> Tensor:
    """`()`: the standard deviation; never zero."""
    return w.std(correction=0).clamp(min=1e-30)
