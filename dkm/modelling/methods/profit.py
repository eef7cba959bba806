"""PROFIT (Park and Yoo, 2020): a clipped uniform quantiser, fewer bits by and by, and layers frozen one by one."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.conv import _ConvNd

from ...clustering.cluster import Clustering
from ...clustering.options import MethodOptions, option
from ...clustering.vectors import compute_dtype
from ...foundation.errors import NeedError
from ..dtensors import whole
from ..needs import Needs
from .by_codes import ByCodes, Coded
from .registry import register

LADDER = (8, 5, 4, 3, 2)  # bits, of which a tensor has those above its own before these
ONE = math.log(math.e - 1)  # softplus of it is 1
SAMPLE = 2**16  # weights that a first range is chosen by


@dataclass(frozen=True, kw_only=True)
class ProfitOptions(MethodOptions):
    """What PROFIT takes."""

    lowering: float = option(0.45, "the part of the training, at its start, with more bits than the plan's", least=0)
    last: float = option(0.05, "the part, at its end, in which everything that is clustered is frozen", least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.lowering + self.last <= 1:
            raise ValueError(
                f"lowering and last are parts of one training, at most 1 together, got {self.lowering} and {self.last}"
            )
        if self.steps is None:
            raise ValueError(
                "profit lowers the bits and freezes layers over the training: say how many optimizer steps you will "
                "train, steps=<an integer of at least 1>, got steps=None"
            )


class Range(NamedTuple):
    """Three () tensors."""

    levels: Tensor  # from the least value to the greatest: one less than there are values
    clip: Tensor
    scale: Tensor


@register("profit")
class Profit(ByCodes):
    """Evenly spaced values on a learned range, at first of more bits; then layers are frozen, the least stable first.

        x = clip(W / a, -1, 1);  q = x rounded to 2^b values evenly from -1 to 1;  W~ = c q

    The gradient passes straight through the rounding.  The bits fall from 8 over 5, 4, 3 and 2 to those of the plan in
    the first part of the training, `lowering`.  In the rest, up to the `last` part, all tensors train, then two thirds
    of them, then one; in the last part none.  What is frozen has its codes and its scale for good, whatever an
    optimizer's momentum or weight decay do to the weight.  First frozen are the tensors whose quantisation moves the
    outputs of their layers most: by the KL divergence of a Gaussian for each channel, on the batches that
    `dkm.calibrate_` shows.

    More buffers and one more parameter:
        ladder      (stages, 3)  for each number of bits, its levels, and the a and the c with the least squared error
        offsets     (2,)  a and c are those of the ladder times softplus(offset + log(e - 1)), which is 1 at the start.
                    Build the optimizer afterwards.  Gradients are divided by |W~|^2, as for ewgs.
        third       ()    when it is frozen: with the first, the second or the last third of the tensors
        holds       ()    whether it is frozen
        held        (n,)  uint8, or int16 above 8 bits: its codes since then
        held_scale  ()    and its scale
    """

    Options: ClassVar[type[MethodOptions]] = ProfitOptions
    needs: ClassVar[tuple[str, ...]] = ("batches",)
    paper: ClassVar[str] = "Park 2020"
    options: ProfitOptions
    ladder: Tensor
    third: Tensor
    holds: Tensor
    held: Tensor
    held_scale: Tensor

    def __init__(self, weight: Tensor, bits: int, dim: int = 1, **options: Any):
        super().__init__(weight, bits, dim, **options)
        assert self.options.steps is not None
        self.steps = self.options.steps
        self.offsets = nn.Parameter(torch.zeros_like(self.ladder[0, :2]), requires_grad=weight.requires_grad)
        dtype = torch.uint8 if bits <= 8 else torch.int16
        self.register_buffer("third", torch.full_like(self.step, 2))
        self.register_buffer("holds", torch.zeros_like(self.step, dtype=torch.bool))
        self.register_buffer("held", torch.zeros(weight.numel(), dtype=dtype, device=weight.device))
        self.register_buffer("held_scale", torch.zeros_like(self.ladder[0, 0]))
        self.divergences: list[Tensor] = []  # of the batches that were shown
        self.instability = 0.0

    def initial_centroids(self, W: Tensor) -> Tensor:
        """`(n, 1) -> (k, 1)`: the values of the first range, which is chosen here."""
        w = W[:, 0].to(compute_dtype(W.dtype))
        stages = [*(bits for bits in LADDER if bits > self.bits), self.bits]
        self.register_buffer("ladder", torch.stack([_best_range(w, bits) for bits in stages]))
        return self._values(self.ladder[-1, 2])

    # --- the quantiser

    def cluster_vectors(self, V: Tensor, C: Tensor, step: Tensor) -> Clustering:
        """`(n, 1)` scaled weights -> W~ and the values of the codes.  Changes nothing."""
        final = self.coded(V.detach()[:, 0])
        values = final.C[final.codes]
        norm = values.square().sum().clamp(min=1e-30)
        levels, clip, scale = self._range(self.ladder.index_select(0, self.stage(step).view(1))[0], 1 / norm)
        x = (V / clip).clamp(-1, 1)
        q = x + (_rounded(x.detach(), levels) - x.detach())  # + 0, and its gradient
        return Clustering(torch.where(self.holds, values, scale * q), final.C, torch.zeros_like(self.step))

    @torch.no_grad()
    def coded(self, w: Tensor) -> Coded:
        """`(n,)` scaled weights -> their codes at the bits of the plan; those that are held, where it is frozen."""
        levels, clip, scale = self._range(self.ladder[-1])
        x = (w / clip).clamp(-1, 1).nan_to_num(0.0)  # a code must be one
        codes = ((x + 1) / 2 * levels).round().long()
        codes = torch.where(self.holds, self.held.long(), codes)
        return Coded(self._values(torch.where(self.holds, self.held_scale, scale)), codes)

    def _range(self, rung: Tensor, slope: Tensor | float = 1.0) -> Range:
        """The present range for a row of the ladder; the gradients of the offsets are multiplied by the slope."""
        offsets = whole(self.offsets)
        factors = F.softplus(offsets.detach() + slope * (offsets - offsets.detach()) + ONE)
        return Range(rung[0], *(rung[1:] * factors))

    def _values(self, scale: Tensor) -> Tensor:
        """`(k, 1)`: of the codes."""
        return scale * torch.linspace(-1, 1, 2**self.bits, device=scale.device, dtype=scale.dtype)[:, None]

    # --- the phases

    def stage(self, step: Tensor) -> Tensor:
        """() int64: which row of the ladder it has after `step` steps."""
        before, steps = len(self.ladder) - 1, round(self.options.lowering * self.steps)
        return (step * before // steps).clamp(max=before) if steps else torch.full_like(step, before)

    def frozen(self, step: Tensor) -> Tensor:
        """() bool: whether its time to be frozen has come."""
        training = 1 - self.options.lowering - self.options.last
        first, second, third = (round((self.options.lowering + training * part / 3) * self.steps) for part in (1, 2, 3))
        return step >= first + (second - first) * (self.third > 0) + (third - second) * (self.third > 1)

    def soft(self, weight: Tensor) -> Tensor:
        """W~, with gradient.  The state advances if the weight has changed."""
        self._hold(weight)
        return super().soft(weight)

    @torch.no_grad()
    def _hold(self, weight: Tensor) -> None:
        """Keep the codes, if the time to be frozen has just come."""
        now = self.frozen(self.moment(weight).step) | self.holds
        C, codes = self.coded(self.scaled(weight).reshape(-1).to(compute_dtype(weight.dtype)))
        self.held.copy_(torch.where(now, codes.to(self.held.dtype), self.held))
        self.held_scale.copy_(torch.where(now, C[-1, 0], self.held_scale))
        self.holds.copy_(now)

    @property
    def anneals(self) -> bool:
        """Whether it changes over `steps`."""
        return True

    def set_steps(self, steps: int) -> None:
        """The training has so many optimizer steps."""
        self.steps = steps

    # --- the order in which tensors are frozen

    def observe(self, module: nn.Module, name: str, inputs: tuple[Any, ...]) -> None:
        """A batch has come to the module that computes with the weight: let it compute with both."""
        if isinstance(module, nn.RNNBase):  # has read its weights before its hooks are called, and would not look again
            return
        outputs = []
        for self.dense in (False, True):
            out = module.forward(*inputs)
            outputs.append(_by_channel(module, out[0] if isinstance(out, tuple) else out))
        self.divergences.append(_divergence(*outputs))

    def calibrate(self, weight: Tensor, name: str) -> None:
        """How far quantisation moves the outputs; not at all where nothing was seen."""
        self.instability = float(torch.stack(self.divergences).mean()) if self.divergences else 0.0
        self.divergences = []
        if not math.isfinite(self.instability):
            raise NeedError(
                f'method="profit" has seen outputs that are not finite, of the layer with {name}: give other batches, '
                'or "keep" it'
            )

    @classmethod
    def calibrate_together(cls, shown: Sequence[tuple[Needs, Tensor, str]]) -> None:
        """All batches have come, for all weights of a model."""
        super().calibrate_together(shown)
        rank([each for each, weight, _ in shown if isinstance(each, cls) and weight.requires_grad])


def rank(clusterings: list[Profit]) -> None:
    """The least stable third of them will be frozen first, and the most stable third last."""
    for place, clustered in enumerate(sorted(clusterings, key=lambda each: -each.instability)):
        clustered.third.fill_(sum(place >= len(clusterings) * part // 3 for part in (1, 2)))


def _rounded(x: Tensor, levels: Tensor) -> Tensor:
    """The nearest of the values evenly from -1 to 1."""
    return 2 * ((x + 1) / 2 * levels).round() / levels - 1


def _best_range(w: Tensor, bits: int) -> Tensor:
    """`(3,)`: the levels, and the clip and the scale with about the least squared error; of equal ones the widest."""
    w = w[:: -(-len(w) // SAMPLE)]
    clips = w.abs().amax().clamp(min=1e-30) * 0.93 ** torch.arange(50, device=w.device, dtype=w.dtype)
    levels = torch.full_like(clips[0], 2**bits - 1)
    q = _rounded((w / clips[:, None]).clamp(-1, 1), levels)
    scales = (q @ w / q.square().sum(1)).clamp(min=1e-30)
    errors = (w - scales[:, None] * q).square().sum(1)
    best = (errors <= 1.001 * errors.amin()).int().argmax()
    return torch.stack([levels, clips[best], scales[best]])


def _by_channel(module: nn.Module, out: Tensor) -> Tensor:
    """`(channels, values)`: the outputs."""
    if isinstance(module, _ConvNd):
        out = out.movedim(-1 - len(module.kernel_size), -1)
    return out.reshape(-1, out.shape[-1]).T.double()


def _divergence(moved: Tensor, before: Tensor) -> Tensor:
    """`()`: of a Gaussian for each channel, from those before; channels without any variation do not count."""
    (s, t), (m, n) = ([x.std(1, correction=0) for x in (moved, before)], [x.mean(1) for x in (moved, before)])
    counts = (s != 0) & (t != 0)  # NaN counts
    s, t = torch.where(counts, s, 1), torch.where(counts, t, 1)
    KL = (t / s).log() + (s.square() + (m - n).square()) / (2 * t.square()) - 0.5
    return torch.where(counts, KL, 0).sum() / counts.sum().clamp(min=1)
