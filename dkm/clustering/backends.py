"""The kernel backends by name, and when each is worth importing.  Nothing is imported here.

A backend is the module of its name in `kernels/`, with the functions of `kernels.backend.Backend`.
"""

from typing import NamedTuple


class Registration(NamedTuple):
    """What a kernel backend is for."""

    device: str | None = None  # the type of device that it is for; None: any
    package: str | None = None  # what it needs to be installed


# in the order in which impl="auto" tries them
BACKENDS = {
    "triton": Registration(device="cuda", package="triton"),
    "native": Registration(device="cpu"),
    "blocked": Registration(),
}
