"""Launches that take little time in Python: a network has many layers, and each of them a launch or two per pass."""

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from operator import itemgetter
from typing import Any, NamedTuple, Protocol

import torch
import triton
from torch import Tensor
from triton.compiler import CompiledKernel
from triton.runtime.jit import MockTensor

from .ahead import Launch, compile_together

Launches = dict[Hashable, Launch]  # of each kind, see `_Quick`, the first one
_written: ContextVar[Launches | None] = ContextVar("_written", default=None)
_expected: deque[Launches] = deque(maxlen=8)


@contextmanager
def written_down() -> Iterator[Launches]:
    """Within this, this thread launches no kernels: how it would is written into the dictionary.

    What a kernel would have computed is then whatever was in memory: nobody may look at it.
    """
    launches: Launches = {}
    token = _written.set(launches)
    try:
        yield launches
    finally:
        _written.reset(token)


def expect(launches: Launches) -> None:
    """As soon as one of these launches is made, the kernels of all are compiled together.

    What is expected again and again and never made, as for a model that is thrown away, is forgotten at some time.
    """
    if launches:
        _expected.append(launches)


class Kernel(Protocol):
    """What can be launched: `kernel[grid](name=value, ...)`, with all arguments, constants and options by keyword."""

    def __getitem__(self, grid: tuple[int]) -> Callable[..., Any]: ...


def quick(kernel: Any) -> Kernel:
    """Decorate a Triton kernel so that launching it takes little time.

    It is launched on the device of its first argument, a tensor; Triton itself would take the current device.
    """
    return _Quick(kernel) if isinstance(kernel, triton.JITFunction) else kernel  # otherwise it is interpreted


class _Order(NamedTuple):
    """How to read the keywords of a launch, found once for each set of names that a kernel is launched with."""

    run_time: Callable[[dict[str, Any]], tuple]  # the arguments that are known at run time
    constants: Callable[[dict[str, Any]], tuple]  # all others: compile-time constants, and options of the launch


class _Quick:
    """Triton finds the compiled form of a kernel by an analysis of every argument and of every constant.

    Here it is found by the arguments themselves, and only the first launch of each kind goes through Triton.
    """

    def __init__(self, kernel: Any):
        self.kernel = kernel
        self.first = kernel.arg_names[0]
        self.all_arguments = _getter(kernel.arg_names)  # in the order in which compiled code takes them
        self.orders: dict[tuple[str, ...], _Order] = {}
        self.compiled: dict[tuple, Callable[..., None]] = {}

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        return lambda **arguments: self._launch(grid, arguments)

    def _launch(self, grid: tuple[int], arguments: dict[str, Any]) -> None:
        device = arguments[self.first].device
        names = tuple(arguments)
        order = self.orders.get(names) or self._order(names)
        # The names are part of the kind: they say which option or constant a value belongs to.
        parts: list[Any] = [grid, device, names, order.constants(arguments)]
        addresses = 0
        for argument in order.run_time(arguments):
            if isinstance(argument, Tensor):
                addresses |= argument.data_ptr()
                parts.append(argument.dtype)
            elif isinstance(argument, float):
                parts.append(float)  # compiled code does not depend on its value
            else:
                parts += argument, type(argument)  # 1 and True are equal, but not the same to a kernel
        kind = tuple(parts)
        aligned = addresses % 16 == 0  # all tensors are: compiled code may rely on it
        if (written := _written.get()) is not None:
            if aligned:  # others are rare
                written[self, kind] = Launch(self.kernel, grid, device, _without_memory(arguments))
            return
        with torch.cuda.device(device):
            if aligned and kind in self.compiled:
                self.compiled[kind](*self.all_arguments(arguments))
                return
            for launches in list(_expected):
                if (self, kind) in launches:
                    _expected.remove(launches)
                    compile_together(list(launches.values()))
            compiled = self.kernel[grid](**arguments)
        # Triton may return something else: where it compiles in the background, or where a hook keeps it from launching
        if aligned and isinstance(compiled, CompiledKernel):
            self.compiled[kind] = compiled[*grid, 1, 1]

    def _order(self, names: tuple[str, ...]) -> _Order:
        run_time = {parameter.name for parameter in self.kernel.params if not parameter.is_constexpr}
        order = _Order(
            _getter([name for name in names if name in run_time]),
            _getter([name for name in names if name not in run_time]),
        )
        self.orders[names] = order
        return order


def _without_memory(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments as Triton compiles for them, without the memory that was allocated for the launch."""
    return {
        name: MockTensor(argument.dtype) if isinstance(argument, Tensor) else argument
        for name, argument in arguments.items()
    }


def _getter(names: Sequence[str]) -> Callable[[dict[str, Any]], tuple]:
    """A function from a dictionary to the tuple of its values for these names."""
    if len(names) < 2:  # itemgetter would return the value itself
        return lambda arguments: tuple(arguments[name] for name in names)
    return itemgetter(*names)
