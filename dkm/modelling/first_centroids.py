"""The first centroids of the weights of a model on a GPU, of many weights at a time."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..clustering.initialize_many import by_batches, kmeans_of_weights
from ..clustering.options import StartOptions
from ..clustering.precision import PLAIN_EXPONENTS, exponent_of
from ..clustering.spec import Spec
from ..clustering.vectors import to_vectors
from .clustered import Clustered


def first_centroids(
    kind: type[Clustered], weights: Sequence[tuple[Tensor, Spec]], options: dict[str, Any]
) -> list[Tensor | None]:
    """`(k, d)` for each weight, which its constructor takes as `start_from`; None where it is to find them by itself.

    It is on a CPU, where each weight takes a thread, and where centroids are not those of k-means of the weight itself:
    of groups, of rows with scales, of weights of an extreme scale, or as the method decides.
    """
    chosen = kind.Options(**options)
    result: list[Tensor | None] = [None] * len(weights)
    usual = kind.initial_centroids is Clustered.initial_centroids
    if not usual or not isinstance(chosen, StartOptions) or chosen.init != "kmeans":
        return result
    alike: dict[tuple[torch.device, torch.dtype, int, int], list[int]] = defaultdict(list)
    for i, (weight, spec) in enumerate(weights):
        if by_batches(weight.device) and _plain(weight, spec):
            alike[weight.device, weight.dtype, spec.bits, spec.dim].append(i)
    for (_, _, bits, dim), indices in alike.items():
        vectors = [to_vectors(weights[i][0].detach(), dim) for i in indices]
        for i, C in zip(indices, kmeans_of_weights(vectors, 2**bits, chosen.seed), strict=True):
            result[i] = C
    return result


def _plain(weight: Tensor, spec: Spec) -> bool:
    """Whether the weight is clustered as it is: nothing divides it first."""
    divided = spec.group is not None or spec.scaled or spec.float8
    return not divided and not spec.is_absurd(weight.shape) and exponent_of(weight) in PLAIN_EXPONENTS
