"""The methods the paper compares with, as parametrizations: `forward(weight) -> W~`, `codes(weight) -> (C, codes)`.

Each one replaces `Clustered.cluster`, what training computes with.  When the centroids advance, evaluation, the file,
checkpoints and the monitor are Clustered's.  Plain PyTorch, on any device; no kernels of their own.
"""

import difflib
import functools
import inspect
import math
from collections.abc import Callable, Iterable
from numbers import Real

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from . import initialize
from .clustered import Clustered, checksum, squared_error, stored_dtype
from .functional import Clustering, assign, from_vectors, to_vectors
from .kernels.blocked import BLOCK, compute_dtype
from .kernels.reference import distance, no_mass


class Method(Clustered):
    """What the others have in common.  `takes`: which of Clustered's options mean something to it."""

    takes: frozenset[str] = frozenset()

    def __init__(self, weight: Tensor, bits: int, dim: int = 1, **options):
        takes = _taken(type(self))
        for name, default in _DEFAULTS.items():
            if name not in takes and options.get(name, default) != default:
                reason = "it has no temperature" if name == "tau" else "it would change nothing"
                raise ValueError(
                    f'method="{_NAMES[type(self)]}" takes no {name}, {reason}: leave it out; got {options[name]!r}'
                )
        if "tau" not in takes:
            options["tau"] = 1.0
        super().__init__(weight, bits, dim, **options)
        if "tau" not in takes:
            self.tau = None

    # Sharded does DKM's own sums over the ranks, and no others.
    @property
    def sharded(self) -> None:
        return None

    @sharded.setter
    def sharded(self, value: object) -> None:
        if value is not None:
            raise NotImplementedError(
                f'method="{_NAMES[type(self)]}" cannot be sharded with fully_shard: use DistributedDataParallel, '
                'or method="dkm"'
            )

    def temperature(self, step: Tensor) -> Tensor | float:
        return math.nan if self.tau is None else super().temperature(step)

    def cluster(self, weight: Tensor, start: Tensor, step: Tensor) -> Clustering:
        with torch.autocast(weight.device.type, enabled=False):
            V = to_vectors(weight, self.dim).to(compute_dtype(weight.dtype))
            V_tilde, C, iterations = self.cluster_vectors(V, start, step)
        return Clustering(from_vectors(V_tilde.to(weight.dtype), weight.shape), C.detach(), iterations)

    def cluster_vectors(self, V: Tensor, C: Tensor, step: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`(n, d)` and the centroids to start from -> `(V_tilde, C_next, iterations)`.  Changes nothing."""
        raise NotImplementedError

    def iterate(self, update: Callable[[Tensor, Tensor], Tensor], C: Tensor) -> tuple[Tensor, Tensor]:
        """DKM's loop around `C_next = update(C, number)`: what its last iteration starts from, and that one's number.

        Once converged, C stays: nothing waits for the device.
        """
        number = torch.ones((), dtype=torch.int64, device=C.device)
        done = torch.zeros((), dtype=torch.bool, device=C.device)
        for _ in range(self.max_iter - 1):
            C_next = update(C, number)
            done = done | ((C_next - C).detach().abs().amax() <= self.eps)
            C = torch.where(done, C, C_next)
            number = number + ~done
        return C, number


class Hard(Method):
    """DKM's loop with each vector wholly in its nearest cluster, and no gradient through that choice.

        A = one-hot of the nearest centroid;  C_next = (A^T W) / (A^T 1);  W~ = A C_next

    A weight's gradient is the mean of its cluster's.
    """

    takes = frozenset({"eps", "max_iter"})

    def cluster_vectors(self, V: Tensor, C: Tensor, step: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        C, codes, iterations = self.k_means(V, C)
        C = means(V, codes, C)
        return C[codes], C, iterations

    @torch.no_grad()
    def k_means(self, V: Tensor, C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        C, number = self.iterate(lambda C, number: means(V, assign(V, C), C), C)
        return C, assign(V, C), number


class Gumbel(Method):
    """GBS: DKM's loop with its attention drawn from a Gumbel-softmax of the same logits, anew in every iteration.

        A = softmax(-f(W, C) / tau + g),  g = -log(-log(u)),  u uniform

    The draw is a function of the seed, the weight's first values, the step and the iteration: reading the weight
    again and activation checkpointing give the same.  The attention is recomputed in the backward pass.

    One more buffer: `key`, () int64, of the draws.
    """

    takes = frozenset({"tau", "eps", "max_iter", "metric"})

    def __init__(self, weight: Tensor, bits: int, dim: int = 1, *, seed: int = 0, **options):
        super().__init__(weight, bits, dim, seed=seed, **options)
        self.register_buffer("key", draw_key(weight, seed))

    def cluster_vectors(self, V: Tensor, C: Tensor, step: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        tau = self.temperature(step)
        tau = tau.to(V.dtype) if isinstance(tau, Tensor) else V.new_full((), tau)
        key = _mix(self.key + step)

        def attend(C: Tensor, number: Tensor) -> tuple[Tensor, Tensor]:
            rows = max(1, BLOCK // (C.numel() if self.metric == "euclidean" else len(C)))
            again = functools.partial(checkpoint, _attend, use_reentrant=False, preserve_rng_state=False)
            parts = [again(block, C, tau, key + number, i * rows, self.metric) for i, block in enumerate(V.split(rows))]
            V_tilde, sums, mass = zip(*parts, strict=True)
            sums, mass = sum(sums), sum(mass)[:, None]
            empty = mass <= no_mass(V.dtype)
            return torch.cat(V_tilde), torch.where(empty, C, sums / torch.where(empty, 1.0, mass))

        C, iterations = self.iterate(lambda C, number: attend(C, number)[1], C)
        return *attend(C, iterations), iterations


def _attend(V: Tensor, C: Tensor, tau: Tensor, key: Tensor, first: int, metric: str) -> tuple[Tensor, Tensor, Tensor]:
    """Some of the vectors, the first of which is number `first`: A C, A^T V and A^T 1."""
    noise = -(-uniform(key, first * len(C), len(V) * len(C), V.dtype).log()).log()
    # |v|^2 cancels in the softmax
    nearness = 2 * V @ C.T - C.square().sum(1) if metric == "sqeuclidean" else -distance(V, C, metric)
    A = torch.softmax(nearness / tau + noise.view(len(V), len(C)), dim=1)
    return A @ C, A.T @ V, A.sum(0)


class DC(Method):
    """Deep Compression (Han et al., 2016): k-means once, the clusters frozen; only their centroids train.

        c_j = the mean of the weights of cluster j;  W~ = c[cluster]

    A weight's gradient is the sum of its cluster's: all of them take the same step, and c_j the step that an
    optimizer would make with the gradient of c_j.  For dim 1 k-means starts from centroids evenly between the least
    and the greatest weight, as in the paper; for more dimensions from k-means++.

    One more buffer: `cluster_of`, (n,) uint8, or int16 above 8 bits.
    """

    def __init__(self, weight: Tensor, bits: int, dim: int = 1, *, init: str = "kmeans", seed: int = 0, **options):
        linear = dim == 1 and init == "kmeans"
        super().__init__(weight, bits, dim, init="random" if linear else init, seed=seed, **options)
        V = to_vectors(weight.detach(), dim)
        if linear:
            values = initialize._sorted_values(V[:, 0], torch.Generator().manual_seed(seed))
            C = initialize._lloyd_1d(values, np.linspace(values[0], values[-1], 2**bits))
            self.C = torch.from_numpy(C)[:, None].to(self.C)
        codes = assign(V, self.C)
        self.register_buffer("cluster_of", codes.to(torch.uint8 if bits <= 8 else torch.int16))
        self.C = self.centroids(weight.detach())[1]
        self.start, self.unit = self.C.clone(), squared_error(V, self.C)

    def cluster(self, weight: Tensor, start: Tensor, step: Tensor) -> Clustering:
        sums, C = self.centroids(weight)
        moving = C.detach() + (sums - sums.detach())  # the value of a mean, the gradient of a sum
        W_tilde = from_vectors(moving[self.cluster_of.long()].to(weight.dtype), weight.shape)
        return Clustering(W_tilde, C.detach(), torch.zeros_like(self.step))

    def centroids(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """`(k, d)` twice: the sum and the mean of each cluster.  The zeros that fill up the tail do not count."""
        codes, nothing = self.cluster_of.long(), torch.zeros_like(self.C)
        sums = nothing.index_add(0, codes, to_vectors(weight, self.dim).to(self.C.dtype))
        count = nothing.index_add(0, codes, to_vectors(torch.ones_like(weight), self.dim).to(self.C.dtype))
        return sums, torch.where(count > 0, sums / count.clamp(min=1), self.C)

    @torch.no_grad()
    def codes(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        return self.centroids(weight)[1].to(stored_dtype(weight.dtype)), self.cluster_of.long()


class QuantNoise(Hard):
    """Quant-Noise (Fan et al., 2021): a random fraction `p` of the vectors is snapped, anew in every step.

        W~ = where(u < p, the nearest centroid of W, W),  dW = dW~

    The centroids follow the weights by Hard's k-means.  The draw is a function of the seed, the weight's first values
    and the step: reading the weight again and activation checkpointing give the same.

    One more buffer: `key`, () int64, of the draws.
    """

    def __init__(self, weight: Tensor, bits: int, dim: int = 1, *, p: float = 0.1, seed: int = 0, **options):
        if not isinstance(p, Real) or not 0 < p <= 1:
            raise ValueError(f"p is the fraction of the vectors that are snapped, above 0 and up to 1, got {p!r}")
        super().__init__(weight, bits, dim, seed=seed, **options)
        self.p = p
        self.register_buffer("key", draw_key(weight, seed))

    def cluster_vectors(self, V: Tensor, C: Tensor, step: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        values = V.detach()
        C, codes, iterations = self.k_means(values, C)
        C = means(values, codes, C)
        noisy = uniform(_mix(self.key + step), 0, len(V), V.dtype)[:, None] < self.p
        V_tilde = torch.where(noisy, C[assign(values, C)], values) + (V - values)  # + 0, and its gradient
        return V_tilde, C, iterations


METHODS: dict[str, type[Clustered]] = dict(dkm=Clustered, hard=Hard, gumbel=Gumbel, dc=DC, quant_noise=QuantNoise)
_NAMES = {kind: name for name, kind in METHODS.items()}


def _options(kind: type[Clustered]) -> dict[str, object]:
    """The options that its constructor names, and their defaults."""
    named = inspect.signature(kind.__init__).parameters.values()
    return {option.name: option.default for option in named if option.kind is option.KEYWORD_ONLY}


_DEFAULTS = _options(Clustered)


def _taken(kind: type[Clustered]) -> list[str]:
    """The options that mean something to it, or are harmless: scripts give `steps`, `init` and `seed` to any method."""
    common = {*kind.takes, "steps", "init", "seed"} if issubclass(kind, Method) else _DEFAULTS
    return [name for name in _DEFAULTS if name in common] + [name for name in _options(kind) if name not in _DEFAULTS]


def named(method: str, options: Iterable[str] = ()) -> type[Clustered]:
    """The class of a method's name.  Raises a TypeError where one of `options` is none of it, nor of DKM's."""
    if method not in METHODS:
        close = difflib.get_close_matches(str(method), METHODS, n=1, cutoff=0.4)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"method must be one of {', '.join(METHODS)}, got {method!r}{hint}")
    taken = _taken(METHODS[method])
    for option in options:
        if option not in taken and option not in _DEFAULTS:
            others = [name for name, kind in METHODS.items() if option in _taken(kind)]
            close = difflib.get_close_matches(option, taken, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            hint = f'; method="{others[0]}" takes {option}' if others else hint
            raise TypeError(f'method="{method}" takes no {option}, it takes {", ".join(taken)}{hint}')
    return METHODS[method]


def means(V: Tensor, codes: Tensor, C: Tensor) -> Tensor:
    """`(n, d), (n,) -> (k, d)`: the mean of each cluster; an empty one stays where it is, in C."""
    sums = torch.zeros_like(C).index_add(0, codes, V)
    ones = torch.ones_like(codes)  # integers: float32 would stop counting at 2^24; bincount would wait for the device
    count = torch.zeros(len(C), dtype=torch.int64, device=C.device).index_add(0, codes, ones)[:, None]
    return torch.where(count > 0, sums / count.clamp(min=1), C)


# --- random numbers as a function of their place ---------------------------------------------------
# A generator's state would be one more thing to resume, and would make a second look at the weight another draw.


def draw_key(weight: Tensor, seed: int) -> Tensor:
    """() int64: another one for every seed and every weight."""
    return _mix(_mix(checksum(weight)) + seed)


def uniform(key: Tensor, first: int, count: int, dtype: torch.dtype) -> Tensor:
    """Numbers `first`, `first + 1`, ... of the sequence that the () int64 `key` names: in (0, 1), `(count,)`."""
    place = torch.arange(first, first + count, device=key.device)
    drawn = _mix(_mix(key) + place * -7046029254386353131)  # splitmix64: multiples of the golden ratio, mixed
    return ((drawn >> 41 & 0x7FFFFF).to(dtype) + 0.5) / 2**23  # 23 bits: float32 holds the halves too, and never 1


def _mix(x: Tensor) -> Tensor:
    """splitmix64's bijection of int64, whose products wrap around."""
    x = (x ^ (x >> 30 & 0x3FFFFFFFF)) * -4658895280553007687
    x = (x ^ (x >> 27 & 0x1FFFFFFFFF)) * -7723592293110705685
    return x ^ (x >> 31 & 0x1FFFFFFFF)
