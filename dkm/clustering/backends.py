"""The kernel backends by name: where each is, and when it is worth importing.  Nothing is imported here."""

from typing import NamedTuple


class Registration(NamedTuple):
    """A kernel backend: a module with the functions of `kernels.backend.Backend`."""

    module: str
    device: str | None = None  # the type of device that it is for; None: any
    package: str | None = None  # what it needs to be installed


# in the order in which impl="auto" tries them
BACKENDS = {
    "triton": Registration("dkm.clustering.kernels.triton", device="cuda", package="triton"),
    "blocked": Registration("dkm.clustering.kernels.blocked"),
}
