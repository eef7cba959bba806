"""The snapped weight as a module reads it in evaluation, and how it is remembered from one forward pass to the next."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..clustering.threads import spread
from .dtensors import is_sharded

PIECE = 1 << 19  # values that a thread compares at a time


class Snapped(Tensor):
    """A snapped weight as a module reads it: an ordinary tensor, but for assignments to `.data`.

    It is not where the weight is kept, so a value assigned to it would be lost: peft's `merge_and_unload` tries that.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        """The values."""
        return self.detach().as_subclass(Tensor)

    @data.setter
    def data(self, value: Tensor) -> None:
        raise RuntimeError(
            "this weight is clustered: it is computed at every read, and assigning to its .data would change nothing; "
            "call dkm.snap_(model) first, or assign to the module's attribute itself (module.weight = value)"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.as_subclass(Tensor).__deepcopy__(memo)


def guarded(snapped: Tensor) -> Tensor:
    """The same tensor, which refuses assignments to its `.data`."""
    return snapped if torch.compiler.is_compiling() else snapped.as_subclass(Snapped)


class StraightThrough(torch.autograd.Function):
    """The snapped weight, with the gradient passed on to the weight as if it had not been snapped."""

    @staticmethod
    def forward(weight: Tensor, snapped: Tensor) -> Tensor:
        """`weight`, `snapped` of one shape -> the snapped weight."""
        return snapped.view_as(snapped)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Nothing is needed in the backward pass."""

    @staticmethod
    def backward(ctx: Any, G: Tensor) -> tuple[Tensor, None]:
        """The gradient of the snapped weight is that of the weight."""
        return G, None


class _Kept(NamedTuple):
    made_of: list[Tensor]  # copies
    snapped: Tensor
    version: int
    total: int


class Memory:
    """The snapped weight of the last read, and the proof that it is still right.

    PyTorch counts the changes of a tensor, but not those through `.data` or numpy.  So the proof is a comparison with
    copies of everything that the snapped weight was made of, which is a tenth of the time of making it anew.  The
    snapped weight itself is in the hands of the modules that read it: if one of them has changed it, it is made anew.

    It takes twice the memory of the weight, as much as training does for W~ and the gradient, and training frees it.
    Copies of a model and pickles begin with an empty one.
    """

    def __init__(self) -> None:
        self._kept: _Kept | None = None

    def __reduce__(self) -> Any:
        return Memory, ()

    def forget(self) -> None:
        """Free the memory."""
        self._kept = None

    @torch.no_grad()
    def recall(self, make: Callable[[Tensor], Tensor], weight: Tensor, state: Iterable[Tensor]) -> Tensor:
        """`make(weight)`, or what it gave at the last call if neither the weight nor the state has changed."""
        if not _is_plain(weight):
            return make(weight)
        made_of = [weight, *state]
        kept = self._kept  # read once: another thread may replace it
        if kept is not None and _is_intact(kept) and _all_equal(kept.made_of, made_of):
            return kept.snapped
        with torch.inference_mode(False):  # tensors that inference mode makes do not count their changes
            copies = [tensor.detach().clone() for tensor in made_of]
            snapped = make(copies[0])
        self._kept = _Kept(copies, snapped, snapped._version, _sum_of_bits(snapped))
        return snapped


def _is_plain(weight: Tensor) -> bool:
    """Whether the values can be compared here and now, at no cost but time: nothing waits for a device."""
    if torch.compiler.is_compiling() or weight.device.type != "cpu" or is_sharded(weight):
        return False
    return not torch._C._functorch.is_functorch_wrapped_tensor(weight)


def _all_equal(kept: list[Tensor], now: list[Tensor]) -> bool:
    return len(kept) == len(now) and all(
        a.dtype == b.dtype and a.device == b.device and a.shape == b.shape and _equal(a, b)
        for a, b in zip(kept, now, strict=True)
    )


def _equal(a: Tensor, b: Tensor) -> bool:
    """`torch.equal`, in several threads."""
    if a.numel() <= PIECE or not (a.is_contiguous() and b.is_contiguous()):
        return torch.equal(a, b)
    a, b = a.reshape(-1), b.reshape(-1)
    return all(spread(lambda at: torch.equal(a[at : at + PIECE], b[at : at + PIECE]), range(0, len(a), PIECE)))


def _is_intact(kept: _Kept) -> bool:
    return kept.snapped._version == kept.version and _sum_of_bits(kept.snapped) == kept.total


def _sum_of_bits(tensor: Tensor) -> int:
    """The sum of the bits as integers of 64 bits; the few bytes at the end that fill none are added one by one."""
    data = tensor.detach().reshape(-1).view(torch.uint8)
    whole = len(data) // 8 * 8
    return int(data[:whole].view(torch.int64).sum()) + int(data[whole:].sum())
