"""A scale for each row of a weight."""

import torch
from torch import Tensor

SMALLEST = 2.0**-14  # the smallest number that float16 holds in full precision


def row_scales(weight: Tensor) -> Tensor:
    """`(rows,)` float32: the root mean square of each row, an index of the first axis, as float16 holds it.

    Never zero: a row of zeros has scale 1.
    """
    rows = weight.detach().reshape(len(weight), -1)
    scales = rows.to(torch.float64).square().mean(1).sqrt()
    scales = torch.where(scales == 0, 1.0, scales).clamp(min=SMALLEST)
    return scales.clamp(max=torch.finfo(torch.float16).max).to(torch.float16).float()
