"""Random numbers as a function of their place.

The state of a generator would be one more thing to resume, and would make a second look at the same weight another
draw.
"""

import math

import torch
from torch import Tensor

from ..checksum import checksum


def draw_key(weight: Tensor, seed: int) -> Tensor:
    """() int64: another one for every seed and every weight."""
    return mix(mix(checksum(weight)) + seed)


def uniform(key: Tensor, first: int, count: int, dtype: torch.dtype) -> Tensor:
    """Numbers `first`, `first + 1`, ... of the sequence that the () int64 `key` names: in (0, 1), `(count,)`."""
    place = torch.arange(first, first + count, device=key.device)
    drawn = mix(mix(key) + place * -7046029254386353131)  # splitmix64: multiples of the golden ratio, mixed
    return ((drawn >> 41 & 0x7FFFFF).to(dtype) + 0.5) / 2**23  # 23 bits: float32 holds the halves too, and never 1


def normal(key: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """Numbers of the standard normal distribution that the () int64 `key` names, `(count,)`."""
    half = -(-count // 2)
    u = uniform(key, 0, 2 * half, dtype)
    radius, angle = (-2 * u[:half].log()).sqrt(), 2 * math.pi * u[half:]  # Box and Muller: two of each pair
    return torch.cat([radius * angle.cos(), radius * angle.sin()])[:count]


def mix(x: Tensor) -> Tensor:
    """splitmix64's bijection of int64, whose products wrap around."""
    x = (x ^ (x >> 30 & 0x3FFFFFFFF)) * -4658895280553007687
    x = (x ^ (x >> 27 & 0x1FFFFFFFFF)) * -7723592293110705685
    return x ^ (x >> 31 & 0x1FFFFFFFF)
