"""Launches that take Python little time: a network has many layers, and each of them a launch or two in every pass."""

from collections.abc import Callable

import torch
import triton
from torch import Tensor
from triton.compiler import CompiledKernel


def quick(kernel: triton.JITFunction):
    """A kernel, launched as ever: `kernel[grid](*arguments, **constants_and_options)`, but on the device of the first
    argument, a tensor; Triton would take the current one."""
    return _Quick(kernel) if isinstance(kernel, triton.JITFunction) else kernel  # or it is interpreted


class _Quick:
    """Triton finds the compiled form of a kernel by what it makes of every argument and of every constant.

    Here it is found by the arguments themselves, and only the first launch of its kind is Triton's.
    """

    def __init__(self, kernel: triton.JITFunction):
        self.kernel = kernel
        self.compiled: dict[tuple, tuple[Callable, list]] = {}

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        return lambda *arguments, **constants: self._launch(grid, arguments, constants)

    def _launch(self, grid: tuple[int], arguments: tuple, constants: dict) -> None:
        device = arguments[0].device
        kind = [grid, device, *constants.items()]
        addresses = 0
        for argument in arguments:
            if isinstance(argument, Tensor):
                addresses |= argument.data_ptr()
                kind.append(argument.dtype)
            elif isinstance(argument, float):
                kind.append(float)  # whatever its value
            else:
                kind += argument, type(argument)  # 1 and True are equal, and not the same to a kernel
        kind = tuple(kind)
        aligned = addresses % 16 == 0  # all of them: compiled code may rely on it
        with torch.cuda.device(device):
            if aligned and kind in self.compiled:
                launch, rest = self.compiled[kind]
                launch(*arguments, *rest)
                return
            compiled = self.kernel[grid](*arguments, **constants)
        if aligned and isinstance(compiled, CompiledKernel):  # Triton may be told to do something else
            rest = [constants[name] for name in self.kernel.arg_names[len(arguments) :]]
            self.compiled[kind] = compiled[*grid, 1, 1], rest
