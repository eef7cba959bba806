"""The kernel for the gradient of tau.  It runs after a backward pass, and only where that gradient is wanted.

Names are explained in the glossary of `triton/__init__.py`.
"""

import triton
import triton.language as tl

from ..launch import quick
from .differences import (
    attention_gradient,
    distances,
    load_gradient_tiles,
    load_vectors,
    logits,
    mean_attention_gradient,
    statistics,
)
from .steps import LOG2E


@triton.jit
def _terms(
    w, g, C, C_next, H, K, scale, UPDATE: tl.constexpr, D: tl.constexpr, D_PADDED: tl.constexpr, BLOCK_K: tl.constexpr,
    K_TILES: tl.constexpr, EUCLIDEAN: tl.constexpr,
):  # fmt: skip
    """The sum of A (dA - mean) logit over the centroids, in units of log 2: `(BLOCK_N,)`.

    The logits are relative to that of the nearest centroid.  A (dA - mean) adds up to zero, so this changes nothing but
    the rounding.
    """
    c, h, offset = load_gradient_tiles(C, C_next, H, tl.arange(0, BLOCK_K), K, UPDATE, D, D_PADDED)
    nearest, denominator = statistics(
        w=w, c0=c, C=C, K=K, scale=scale, D=D, D_PADDED=D_PADDED, BLOCK_K=BLOCK_K, K_TILES=K_TILES,
        EUCLIDEAN=EUCLIDEAN,
    )  # fmt: skip
    mean = mean_attention_gradient(
        w=w, g=g, nearest=nearest, denominator=denominator, c0=c, h0=h, offset0=offset, C=C, C_next=C_next, H=H, K=K,
        scale=scale, UPDATE=UPDATE, D=D, D_PADDED=D_PADDED, BLOCK_K=BLOCK_K, K_TILES=K_TILES, EUCLIDEAN=EUCLIDEAN,
    )  # fmt: skip
    total = tl.zeros_like(nearest)
    for tile in range(K_TILES):
        offs_k = tile * BLOCK_K + tl.arange(0, BLOCK_K)
        c, h, offset = load_gradient_tiles(C, C_next, H, offs_k, K, UPDATE, D, D_PADDED)
        tile_logits = logits(nearest[None, :], distances(w, c, EUCLIDEAN), scale, EUCLIDEAN, D)
        numerators = tl.exp2(tile_logits)
        dA = attention_gradient(w, g, c, h, offset, UPDATE, D)
        # logits of centroids that do not exist are infinite
        terms = tl.where(numerators > 0, numerators * (dA - mean[None, :]) * tile_logits, 0.0)
        total += tl.sum(terms, 0)
    return total / denominator


@quick
@triton.jit(do_not_specialize=["n", "K", "max_iter"])
def temperature_kernel(
    G, W, trail, iterations, tau, H_slots, partial, N, n, K, max_iter, GRADIENT: tl.constexpr, D: tl.constexpr,
    D_PADDED: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr, K_TILES: tl.constexpr,
    EUCLIDEAN: tl.constexpr,
):  # fmt: skip
    """The gradient of tau through this program's vectors, to `partial[program]`.

    The H in slot i is `(k, d + 1)` and belongs to row i of the trail; for GRADIENT = "implicit", that in slot max_iter
    belongs to row `used`.
    """
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    temperature = tl.load(tau)
    scale = LOG2E / temperature
    used = tl.load(iterations).to(tl.int32)
    row = K * (D + 1)
    first_update = 0
    end_update = 0
    slot_shift = 1
    if GRADIENT == "unrolled":
        end_update = used - 1
    if GRADIENT == "implicit":
        first_update = used - 1
        end_update = used
        slot_shift = max_iter - first_update
    total = tl.zeros((BLOCK_N,), tl.float32)
    for first in range(program * BLOCK_N, n, programs * BLOCK_N):
        offs_n = first + tl.arange(0, BLOCK_N)
        w = load_vectors(W, N, offs_n, D, D_PADDED)
        g = load_vectors(G, N, offs_n, D, D_PADDED)
        C = trail + (used - 1) * row
        terms = _terms(
            w=w, g=g, C=C, C_next=C, H=H_slots, K=K, scale=scale, UPDATE=False, D=D, D_PADDED=D_PADDED,
            BLOCK_K=BLOCK_K, K_TILES=K_TILES, EUCLIDEAN=EUCLIDEAN,
        )  # fmt: skip
        for t in range(first_update, end_update):
            C = trail + t * row
            terms += _terms(
                w=w, g=w, C=C, C_next=C + row, H=H_slots + (t + slot_shift) * row, K=K, scale=scale, UPDATE=True, D=D,
                D_PADDED=D_PADDED, BLOCK_K=BLOCK_K, K_TILES=K_TILES, EUCLIDEAN=EUCLIDEAN,
            )  # fmt: skip
        total += tl.where(offs_n < n, terms, 0.0)
    # a logit is -distance / tau, so its derivative by tau is -logit / tau
    tl.store(partial + program, tl.sum(total, 0) / (-LOG2E * temperature))
