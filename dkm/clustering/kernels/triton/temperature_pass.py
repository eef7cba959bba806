"""The gradient of tau, as the host sees it: memory, arguments and the launch of `device/temperature.py`."""

import torch
from torch import Tensor

from ...options import ClusterOptions
from ..backend import Trace
from ..reference import no_mass
from .device.temperature import temperature_kernel
from .tiles import choose_temperature_tiles

NO_MASS = no_mass(torch.float32)


def temperature_gradient(
    G: Tensor, W: Tensor, tau: Tensor, trace: Trace, trail_gradients: Tensor, options: ClusterOptions
) -> Tensor:
    """dtau `()`, from G and W `(N,)` and the `trail_gradients` that a backward pass has left.

    Where the weight is a shard, it is the share of its own vectors.  Learned temperatures are rare, so this is a walk
    of its own through all iterations, by differences, whichever way the backward pass took.
    """
    rows, k, columns = trace.trail.shape
    d = columns - 1
    mass = trace.trail[:, :, d:]
    H = torch.where(mass <= NO_MASS, 0.0, trail_gradients / mass)
    H = torch.cat([H, (H * trace.trail[:, :, :d]).sum(2, keepdim=True)], 2)
    programs, constants = choose_temperature_tiles(W, k, d)
    partial = torch.empty(programs, device=W.device)
    temperature_kernel[(programs,)](
        G=G,
        W=W,
        trail=trace.trail,
        iterations=trace.iterations,
        tau=tau,
        H_slots=H,
        partial=partial,
        N=W.numel(),
        n=-(-W.numel() // d),
        K=k,
        max_iter=rows - 1,
        GRADIENT=options.gradient,
        EUCLIDEAN=options.metric == "euclidean",
        **constants,
    )
    return partial.sum()
