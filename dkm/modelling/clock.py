"""The clock of a model: how many optimizer steps its clustered weights have seen, one count for all of them."""

from typing import Any

import torch
from torch import Tensor


class Clock:
    """What the clustered weights of a model share.  Each of them has a `step` of its own besides, in its state.

    The weight that is the first one to see that it has changed moves the clock on, and all others follow when they are
    read next, also those that have not changed: an optimizer's step may be too small for 16 bits, a layer may be frozen
    for a while, or rarely used.  Without the clock they would stay behind, at too high a temperature.

    The count is that of the most advanced weight, so it is not part of a state_dict.  There is a tensor per device that
    the model is on, changed in place: nothing is read on the host, and a CUDA graph can hold it.
    """

    def __init__(self) -> None:
        self.times: dict[torch.device, Tensor] = {}
        self.load: list[Any] | None = None  # a list that belongs to the call of load_state_dict that was last

    def on(self, device: torch.device) -> Tensor:
        """The count, () int64, on a device.  It may be too low, never too high: see `ahead`."""
        if device not in self.times:
            known = [int(time) for time in self.times.values()]
            self.times[device] = torch.full((), max(known, default=0), dtype=torch.int64, device=device)
        return self.times[device]

    def ahead(self, step: Tensor, changed: Tensor, recomputing: bool) -> tuple[Tensor, Tensor]:
        """From a weight's own step, and whether it has changed, to its new step and the clock's new count.

        An unchanged weight that is read again in the backward pass, by activation checkpointing, keeps its step: it
        must give the same as in the forward pass.
        """
        count = torch.maximum(self.on(step.device), step)
        next_one = count + (step == count)
        moved = changed if recomputing else changed | (step < count)
        now = torch.where(moved, next_one, step)
        return now, torch.maximum(count, now)

    def loaded(self, step: Tensor, load: list[Any]) -> None:
        """A weight got this step from a checkpoint.  `load` is the same list for all weights of one call."""
        if step.is_meta:
            return
        first = load is not self.load
        self.load = load
        for device in {step.device, *self.times}:
            time, known = self.on(device), int(step)
            time.fill_(known if first else max(known, int(time)))


def in_backward() -> bool:
    """Whether a backward pass is running: reading a weight then means activation checkpointing."""
    # as FSDP2 itself asks; torch.compile recomputes within the graph that it has made
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
