"""A whole training step as one CUDA graph.

A compressed network launches a few more kernels per weight than a plain one, and Python needs longer to launch them
than the GPU to run them.  A graph is launched as a whole, so that only the GPU's own time is left.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only


class capture:
    """The same step as a CUDA graph, after `warm_up` ordinary calls.

        def step(x, y):
            optimizer.zero_grad()
            loss = loss_of(model(x), y)
            loss.backward()
            optimizer.step()
            return loss

        step = dkm.capture(step, optimizer)

    Every call is a training step, also during the warm-up.  What a call returns is overwritten by the next one.
    Learning rates become tensors, so that schedulers reach the graph.  If the inputs are not on a GPU, the step is
    just called.

    The rules of any CUDA graph apply: the inputs are tensors and always of the same shapes; nothing in the step may
    wait for the GPU (`loss.item()`, a `GradScaler`); Python numbers keep the values that they had when the step was
    captured; the gradients belong to the graph.

    `captured` says whether the graph exists, and `capturing`, after an error, whether it came from making the graph.
    """

    def __init__(self, step: Callable[..., Any], *optimizers: torch.optim.Optimizer, warm_up: int = 5):
        if not callable(step) or not all(isinstance(optimizer, torch.optim.Optimizer) for optimizer in optimizers):
            raise TypeError("capture needs a function, and the optimizers that it calls: capture(step, optimizer)")
        if not isinstance(warm_up, int) or warm_up < 1:
            raise ValueError(f"warm_up must be an integer of at least 1, got {warm_up!r}")
        self.step, self.optimizers, self.warm_up = step, optimizers, warm_up
        self.calls, self.captured, self.capturing = 0, False, False

    def __call__(self, *inputs: Tensor) -> Any:
        if not all(isinstance(tensor, Tensor) for tensor in inputs):
            raise TypeError(f"a captured step takes tensors, got {', '.join(type(x).__name__ for x in inputs)}")
        if not inputs or not all(tensor.is_cuda for tensor in inputs):
            return self.step(*inputs)
        if not self.calls:
            for optimizer in self.optimizers:
                _prepare(optimizer, inputs[0].device)
            self.stream = torch.cuda.Stream(inputs[0].device)
        self.calls += 1
        if self.calls <= self.warm_up:
            # On a stream of its own, as PyTorch asks for.  The warm-up makes optimizer states, workspaces and compiled
            # kernels, none of which may be made during the capture.
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                result = self.step(*inputs)
            torch.cuda.current_stream().wait_stream(self.stream)
            return result
        if not self.captured:
            self._capture(*inputs)
        for place, tensor in zip(self.inputs, inputs, strict=True):
            if place.shape != tensor.shape or place.dtype != tensor.dtype:
                raise ValueError(
                    f"the step was captured with {_described(place)} and is called with {_described(tensor)}: "
                    f"give it batches of one shape (drop_last=True)"
                )
            place.copy_(tensor)
        self.graph.replay()
        return self.result

    def _capture(self, *inputs: Tensor) -> None:
        self.capturing = True
        self.inputs = tuple(tensor.clone() for tensor in inputs)
        self.graph = torch.cuda.CUDAGraph()
        try:
            # thread_local: a DataLoader's thread may pin memory during the capture
            with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
                self.result = tree_map_only(Tensor, Tensor.detach, self.step(*self.inputs))
        except BaseException:
            # Without this the generator would go on drawing random numbers for a graph that does not exist.
            generator = torch.cuda.default_generators[self.inputs[0].device.index]
            fresh = torch.Generator(generator.device).manual_seed(generator.initial_seed())
            generator.graphsafe_set_state(fresh.graphsafe_get_state())
            raise
        self.captured, self.capturing = True, False


def _described(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _prepare(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Turn numbers that change, such as learning rates, into tensors on the GPU: a graph would keep the old values."""
    if type(optimizer) is torch.optim.SGD and not all(group["fused"] for group in optimizer.param_groups):
        raise ValueError("a captured step needs SGD(..., fused=True): the other forms wait for the GPU")
    for state in optimizer.state.values():
        if isinstance(state.get("step"), Tensor):
            state["step"] = state["step"].to(device)
    for group in optimizer.param_groups:
        if not isinstance(group["lr"], Tensor):
            group["lr"] = torch.tensor(float(group["lr"]), device=device)
        if "capturable" in group:
            group["capturable"] = True
