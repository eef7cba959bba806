"""A GPU that is not there: Triton compiles for it, and launches do nothing.

For what can be known of kernels without running them.  Nothing is computed: results are whatever was in memory.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

PROCESSORS = {80: 108, 90: 132}  # of an A100 and of an H200, by the architecture


class _Driver:
    """As much of Triton's driver as compiling and launching use."""

    def __init__(self, architecture: int):
        from triton.backends.compiler import GPUTarget

        self.target = GPUTarget("cuda", architecture, 32)
        self.launched: list[str] = []
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": 232448},
            load_binary=lambda *_: (0, 0, 0, 0, 1024),
            unload_module=lambda module: None,
        )

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def launcher_cls(self, src: Any, metadata: Any) -> Callable[..., None]:
        return lambda *_: self.launched.append(metadata.name)


@contextmanager
def stand_in(architecture: int = 90) -> Iterator[list[str]]:
    """Within this, `impl="triton"` is for weights on the CPU.  Gives the names of the kernels that are launched."""
    from triton.runtime import driver

    from dkm.clustering.kernels.triton import support

    installed = _Driver(architecture)
    properties = SimpleNamespace(major=architecture // 10, multi_processor_count=PROCESSORS[architecture])
    with (
        mock.patch.object(torch.cuda, "get_device_properties", return_value=properties),
        mock.patch.object(torch.cuda, "device", return_value=nullcontext()),
        mock.patch.object(support, "check", return_value=None),
    ):
        driver.set_active(installed)
        yield installed.launched
