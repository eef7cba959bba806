"""The ways to cluster a weight while it trains: a file each, and a registry of their names.

    dkm           the paper: attention, with gradient through every iteration
    hard          k-means: each vector belongs wholly to its nearest centroid
    gumbel        attention drawn from a Gumbel-softmax
    dc            Deep Compression: k-means once, then only the centroids train
    quant_noise   Quant-Noise: a random part of the vectors is snapped at each step
    bwn           binary weight networks: the sign of each weight, and a scale
    abc-net       ABC-Net: a sum of several binary bases
    ewgs          a uniform quantiser with element-wise gradient scaling
    atb           And the Bit Goes Down: k-means that keeps what a layer computes
    soft-sharing  a mixture of Gaussians as a prior of the weights, in the loss
    rps           Deep k-Means: the objective of k-means, in the loss
    profit        a clipped uniform quantiser, fewer bits by and by, and layers frozen one after the other
    meta-quant    MetaQuant: a small network learns the gradient of a quantised weight
    lr-net        LR-Net: a distribution over two or three values, and layers that sample their outputs
    escq          k-means that minimises the error and the entropy of the codes together
    gobo          GOBO: outliers stay as they are, the others are clustered by their absolute error

Importing this package registers them.
"""

from . import dkm, hard, gumbel, deep_compression, quant_noise, bwn, abc_net, ewgs, atb, soft_sharing  # isort: skip  # in the order of the table above
from . import rps, profit, meta_quant, lr_net, escq, gobo  # isort: skip
from .registry import METHODS, named, option_names, register

__all__ = [
    "METHODS",
    "abc_net",
    "atb",
    "bwn",
    "deep_compression",
    "dkm",
    "escq",
    "ewgs",
    "gobo",
    "gumbel",
    "hard",
    "lr_net",
    "meta_quant",
    "named",
    "option_names",
    "profit",
    "quant_noise",
    "register",
    "rps",
    "soft_sharing",
]
