"""Where the training of a weight is: whether it has changed, the number of the step, and its temperature.

`modelling/checksum.py`, `modelling/clock.py` and `temperature.Law` say the same for PyTorch.

Names are explained in the glossary of `triton/__init__.py`.
"""

import triton
import triton.language as tl

SPAN = tl.constexpr(1 << 16)
SPREAD = tl.constexpr(0x1E3779B97F4A7C15)
MIX = tl.constexpr(0x3F58476D1CE4E5B9)


@triton.jit
def _mixed(x):
    """A factor for each number: odd, and without a pattern."""
    x = (x + 1) * SPREAD
    return ((x ^ (x >> 32)) * MIX) | 1


@triton.jit
def checksum(W, N, channels, pixels, program, programs, CHANNELS_LAST: tl.constexpr, SIZE: tl.constexpr):
    """The bits of this program's share of the weights, each times the factor of its position, added up; int64."""
    if W.dtype.element_ty.primitive_bitwidth == 16:
        bits = W.to(tl.pointer_type(tl.int16), bitcast=True)
    else:
        bits = W.to(tl.pointer_type(tl.int32), bitcast=True)
    total = tl.zeros((SIZE,), tl.int64)
    for first in range(program * SIZE, N, programs * SIZE):
        offs = first + tl.arange(0, SIZE)
        position = offs
        if CHANNELS_LAST:  # the position in the order of the shape, as if the weight was contiguous
            image = channels * pixels
            within = offs % image
            position = offs - within + within % channels * pixels + within // channels
        position = position.to(tl.int64)
        factor = _mixed(position % SPAN) * _mixed(position // SPAN)
        total += tl.load(bits + offs, mask=offs < N, other=0).to(tl.int64) * factor
    return tl.sum(total, 0)


@triton.jit
def next_step(step, clock):
    """The step that follows if the weight has changed, and whether the model is ahead of the weight."""
    own = tl.load(step)
    count = tl.maximum(tl.load(clock), own)
    return count + (own == count).to(tl.int64), own < count


@triton.jit
def moment(checksum, seen, step, clock, recomputing):
    """Whether the step of this weight is a new one, and its number."""
    following, behind = next_step(step, clock)
    changed = tl.load(checksum, cache_modifier=".cg") != tl.load(seen)
    moved = changed | (behind & (recomputing == 0))
    return moved, tl.where(moved, following, tl.load(step))


@triton.jit
def temperature(now, unit, hot, decay, relative, steps):
    """`temperature.Law` at step `now`."""
    fraction = tl.minimum(now.to(tl.float32) / steps, 1.0)
    return tl.where(relative != 0, tl.load(unit), 1.0) * hot * tl.exp2(decay * fraction)
