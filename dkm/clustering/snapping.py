"""What a weight would become if it were snapped to k-means of its own: what a file would hold without training."""

import math

import torch
from torch import Tensor

from .assign import assign, assign_groups
from .groups import Grouping
from .initialize_groups import init_group_centroids
from .kmeans_many import nearest_of_group
from .precision import PLAIN_EXPONENTS, exponent_of, stored_centroids
from .spec import Spec
from .vectors import compute_dtype, in_memory


def row_scales(weight: Tensor) -> Tensor:
    """`(rows,)`: the largest absolute value of each index of the first axis, rounded to float16, in at least float32.

    It is never zero: a row of zeros has 1, and others at least the smallest that float16 has.  On a language model at 2
    bits, the largest value served better than the root mean square, before and after training (docs/plan.md).
    """
    rows = weight.detach().reshape(len(weight) if weight.ndim else 1, -1)
    largest = rows.abs().amax(1).to(compute_dtype(weight.dtype))
    limits = torch.finfo(torch.float16)
    scales = largest.clamp(limits.smallest_normal * limits.eps, limits.max).to(torch.float16)
    return torch.where(largest > 0, scales.to(largest.dtype), 1.0)


def nearest_codes(W: Tensor, C: Tensor, grouping: Grouping) -> Tensor:
    """`(n,)` int64: the nearest centroid of each vector that counts, group after group.

    W has any shape; C is `(groups, k, d)`, or `(k, d)` where all of W is one group.
    """
    V = grouping.split(W)
    if C.ndim == 2:
        return assign(V[0], C)
    return _counted(assign_groups(V, C), grouping)


def coded_values(codes: Tensor, W: Tensor, C: Tensor, grouping: Grouping) -> Tensor:
    """`(weights,)`: every vector of W replaced by the centroid of its code, and by NaN where it has one; as
    `nearest_codes`."""
    if C.ndim == 3:
        codes = codes + C.shape[1] * grouping.group_of_codes(codes.device)
    values = _looked_up(C.reshape(-1, grouping.dim), codes)
    if not surely_finite(W):
        lost = _counted(grouping.split(W.isnan()).any(2), grouping)
        values = torch.where(lost[:, None], torch.nan, values)
    return grouping.place(values)


def _looked_up(table: Tensor, codes: Tensor) -> Tensor:
    """`(m, d), (n,) -> (n, d)`: rows of a table by their number.  numpy takes a fifth of PyTorch's time."""
    if not in_memory(table) or table.dtype not in (torch.float32, torch.float64):
        return table.index_select(0, codes)
    values = table.new_empty(len(codes), table.shape[1])
    # clip: the other ways to handle numbers out of range copy everything once more, and here are none
    table.detach().numpy().take(codes.numpy(), axis=0, out=values.numpy(), mode="clip")
    return values


def surely_finite(W: Tensor) -> bool:
    """Whether W certainly holds neither NaN nor infinities.  False where to find out would have to wait for a device,
    and where the values are so large that their sum is not finite."""
    if W.device.type != "cpu" or torch.compiler.is_compiling() or not W.is_floating_point():
        return False
    return math.isfinite(W.sum())


def _counted(X: Tensor, grouping: Grouping) -> Tensor:
    """`(groups, vectors)` -> `(n,)`: what belongs to the vectors that count."""
    return X.reshape(-1) if grouping.all_count else X[grouping.counted(X.device)]


def kmeans_groups(weight: Tensor, spec: Spec, seed: int = 0) -> Tensor:
    """`(groups, k, d)`: the centroids of each group by k-means, with the precision that a file has, in at least
    float32.  They belong to the weight divided by its `row_scales` where the spec says so.

    16 bits hold them as they are for weights of an ordinary scale, and otherwise a power of two below; 8 bits hold them
    always so, because E4M3 has few exponents.
    """
    X = _divided(weight, row_scales(weight) if spec.scaled else None)
    C = init_group_centroids(X, 2**spec.bits, spec.grouping(weight.shape), seed=seed)
    exponent = exponent_of(X)
    unit = 1.0 if exponent in PLAIN_EXPONENTS and not spec.float8 else 2.0**exponent
    return stored_centroids(C / unit, weight.dtype, spec.float8).to(C.dtype) * unit


def snapped_values(weight: Tensor, C: Tensor, spec: Spec, scales: Tensor | None = None) -> Tensor:
    """The weight with every vector replaced by the nearest centroid of its group: C is `(groups, k, d)`, and belongs to
    the weight divided by the `scales` of its rows, if there are any."""
    grouping = spec.grouping(weight.shape)
    codes, _ = nearest_of_group(grouping.split(_divided(weight, scales)), C)
    V = C.gather(1, codes[..., None].expand(-1, -1, spec.dim))
    values = grouping.join(V).view(weight.shape)
    return (values if scales is None else values * _beside(scales, weight)).to(weight.dtype)


def _divided(weight: Tensor, scales: Tensor | None) -> Tensor:
    X = weight.detach().to(compute_dtype(weight.dtype))
    return X if scales is None else X / _beside(scales, X)


def _beside(scales: Tensor, weight: Tensor) -> Tensor:
    """`(rows,)` in a shape that multiplies the rows of the weight."""
    return scales.view(-1, *[1] * (weight.ndim - 1)) if weight.ndim else scales.view(())
