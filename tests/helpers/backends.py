"""The backends that tests run on a CPU."""

import torch

from dkm.clustering.kernels import native

# without a compiler there is no `native`
ON_CPU = ["blocked", "native"] if native.fits(torch.zeros(1), 1) else ["blocked"]
