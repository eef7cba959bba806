"""Milliseconds of the forward and backward pass of one layer with a codebook per group."""

from collections.abc import Callable

import torch
from torch import Tensor

from dkm.clustering.grouped import cluster_groups
from dkm.clustering.groups import Group, Grouping
from dkm.clustering.initialize_groups import init_group_centroids
from dkm.clustering.kernels.reference import no_mass
from dkm.clustering.options import ClusterOptions
from dkm.clustering.spec import Spec
from dkm.modelling.clustered import squared_errors

from .measure import alternate, relative, weights
from .table import digits, note, ratio, table

SPECS = [Spec(3, group=Group(8, 64)), Spec(2, group=Group(1)), Spec(4, 4, group=Group(None, 4096))]
SHAPES, QUICK_SHAPE = {"cpu": (768, 768), "cuda": (6144, 4096)}, (64, 128)
ITERATIONS = 5


def run(device: str, quick: bool) -> list[dict]:
    shape = QUICK_SHAPE if quick else SHAPES[device]
    rows = []
    for spec in SPECS:
        note(f"groups {spec.label}")
        grouping = spec.grouping(shape)
        W = weights(shape[0] * shape[1]).to(device)
        C = init_group_centroids(W, 2**spec.bits, grouping)
        problem = (W, C, 2 * squared_errors(W, C, grouping), weights(len(W), 1).to(device), grouping)
        steps = dict(ours=_ours(*problem), unrolled=_unrolled(*problem))
        difference = relative(steps["ours"](), steps["unrolled"]())
        assert difference < 1e-3, f"{spec.label}: the gradients differ by {difference}"
        rows.append(dict(label=spec.label, size=len(W)) | alternate(steps, device, 3 if quick else 9, 3.0))
    return rows


def _ours(W: Tensor, C: Tensor, tau: Tensor, G: Tensor, grouping: Grouping) -> Callable[[], Tensor]:
    W, options = W.clone().requires_grad_(), ClusterOptions(eps=0.0, max_iter=ITERATIONS)
    return lambda: torch.autograd.grad(cluster_groups(W, C, tau, grouping, options).W_tilde, W, G)[0]


def _unrolled(W: Tensor, C: Tensor, tau: Tensor, G: Tensor, grouping: Grouping) -> Callable[[], Tensor]:
    """The same mathematics for all groups at once in plain PyTorch, with autograd's gradient."""
    W = W.clone().requires_grad_()

    def step() -> Tensor:
        V, centroids = grouping.split(W), C
        for i in range(ITERATIONS):
            far = (V[:, :, None, :] - centroids[:, None, :, :]).square().sum(3)
            A = torch.softmax(-far / tau[:, None, None], 2)
            if i < ITERATIONS - 1:
                mass = A.sum(1)[:, :, None]
                moved = (A.mT @ V) / mass.clamp(min=no_mass(mass.dtype))
                centroids = torch.where(mass > no_mass(mass.dtype), moved, centroids)
        return torch.autograd.grad(grouping.join(A @ centroids), W, G)[0]

    return step


def text(rows: list[dict]) -> str:
    cells = []
    for row in rows:
        times = [f"{digits(1000 * row[name])} ms" for name in ("unrolled", "ours")]
        cells.append([row["label"], f"{row['size'] / 1e6:.2f} M", *times, ratio(row["unrolled"], row["ours"])])
    header = ["spec", "weights", "unrolled", "ours", "unrolled / ours"]
    return f"### Groups: forward + backward, {ITERATIONS} iterations\n\n" + table(header, cells)
