"""On a GPU: milliseconds and memory of one layer, and of whole training steps.

python -m benchmarks --device cuda
"""

import statistics
from collections.abc import Callable

import torch
from torch import Tensor, nn

import dkm
from dkm.clustering.vectors import to_vectors

from .contenders import ours, unrolled
from .measure import Layer
from .table import digits, note, ratio, table

CONFIGURATIONS = [(2, 1), (4, 1), (8, 1), (4, 4), (6, 6), (6, 8), (8, 8), (8, 16)]
SIZES, QUICK_SIZES = [25_165_824, 2_359_296], [147_456]
ITERATIONS = 5
# Torchvision models and plans; None is the plain step.
STEPS = {"resnet50": [None, "cv:8/8", "cv:4/4"], "resnet18": [None, "cv:2/1"]}


def run(device: str, quick: bool) -> list[dict]:
    rows = []
    for size in QUICK_SIZES if quick else SIZES:
        for bits, dim in CONFIGURATIONS:
            note(f"gpu {size:,} {bits}/{dim}")
            row: dict = dict(kind="layer", size=size, bits=bits, dim=dim)
            layer = Layer.make(size, bits, dim, device)
            contenders = dict(ours=ours, unrolled=unrolled)
            if size < 10**7:  # larger weights would take seconds
                contenders["cdist"] = _cdist
            for name, contender in contenders.items():
                row[name], row[f"{name}_bytes"] = _measure(lambda c=contender, x=layer: c(x, ITERATIONS))
            half = Layer(**{**vars(layer), "W": layer.W.bfloat16(), "G": layer.G.bfloat16()})
            row["bfloat16"], row["bfloat16_bytes"] = _measure(lambda x=half: ours(x, ITERATIONS))
            rows.append(row)
            note(f"  {row}")
            del layer, half
    for model, plan in ((model, plan) for model, plans in STEPS.items() for plan in plans):
        for settled in (False, True) if plan else (False,):
            note(f"gpu {model} {plan}" + (", settled" if settled else ""))
            row = dict(kind="step", model=model, plan=plan, settled=settled)
            for how in ("eager", "captured"):
                row[how], row["iterations"] = _training_step(model, plan, 8 if quick else 128, device, how, settled)
            rows.append(row)
            note(f"  {row}")
    note("gpu stack")
    return [*rows, _stack(device, layers=1 if quick else 16)]


def _cdist(layer: Layer, iterations: int) -> Callable[[], Tensor]:
    """The clustering with torch.cdist, which is what most people would write first."""
    W = layer.W.view(-1, layer.dim).clone().requires_grad_()

    def step() -> Tensor:
        C = layer.C
        for i in range(iterations):
            A = torch.softmax(-torch.cdist(W, C).square() / layer.tau, dim=1)
            if i < iterations - 1:
                C = (A.T @ W) / A.sum(0)[:, None]
        return torch.autograd.grad(A @ C, W, layer.G.view_as(W))[0]

    return step


def _measure(make: Callable[[], Callable]) -> tuple[float | str, int | None]:
    """The median seconds of a step, and the most bytes that it holds beyond its inputs and what stays afterwards."""
    try:
        step = make()
        step()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        seconds = [_seconds(step)]
        peak = torch.cuda.max_memory_allocated() - before
        seconds += [_seconds(step) for _ in range(1 if seconds[0] > 0.5 else 6)]
        return statistics.median(seconds), peak
    except torch.OutOfMemoryError:
        return "out of memory", None
    finally:
        torch.cuda.empty_cache()


def _seconds(step: Callable) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    step()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1000


def _training_step(
    name: str, plan: str | None, batch: int, device: str, how: str, settled: bool
) -> tuple[float, float | None]:
    """The median seconds of forward, backward and SGD step, and the mean number of iterations of all clusterings.

    With bf16 autocast and channels_last; eager, or captured in a graph.  The model is as at the start of a training or,
    with `settled`, as late in it.
    """
    import torchvision

    torch.manual_seed(0)
    model = getattr(torchvision.models, name)().to(device, memory_format=torch.channels_last)
    if plan is not None:
        dkm.compress_(model, plan, steps=1000)
    if settled:
        _settle(model)
    # The learning rates are this low because gradients through five iterations at random weights are large, and a
    # training that diverges stops iterating.  Late in a training weights hardly move and one iteration is enough, as in
    # real trainings.
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-7 if settled else 1e-5, momentum=0.9, fused=True)
    images = torch.randn(batch, 3, 224, 224, device=device).to(memory_format=torch.channels_last)
    labels = torch.randint(1000, (batch,), device=device)

    def step(images: Tensor, labels: Tensor) -> None:
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()

    step = dkm.capture(step, optimizer) if how == "captured" else step
    for _ in range(8):
        step(images, labels)
    seconds = statistics.median(_seconds(lambda: step(images, labels)) for _ in range(20))
    if not all(parameter.isfinite().all() for parameter in model.parameters()):
        raise RuntimeError(f"{name} with {plan} diverged: this was no training step")
    iterations = [float(module.iterations) for module in model.modules() if isinstance(module, dkm.Clustered)]
    return seconds, statistics.mean(iterations) if iterations else None


@torch.no_grad()
def _settle(model: nn.Module) -> None:
    """Bring a model to a late point of a training: the temperature is at its end, and the centroids have settled."""
    for layer in model.modules():
        if nn.utils.parametrize.is_parametrized(layer, "weight"):
            (clustered,) = layer.parametrizations.weight
            W = to_vectors(layer.parametrizations.weight.original, clustered.dim)
            clustered.step.fill_(clustered.steps)
            tau = float(clustered.temperature(clustered.step))
            for _ in range(40):  # large layers of random weights take thousands of iterations
                result = dkm.cluster(W, clustered.C, tau=tau, eps=clustered.options.eps / 4, max_iter=250)
                clustered.C.copy_(result.C)
                if result.iterations < 250:
                    break
            clustered.start.copy_(clustered.C)


class _Block(nn.Module):
    """A layer of a language model in the shape of Llama: grouped-query attention and a gated feed-forward network."""

    def __init__(self, width: int = 2048, inner: int = 8192, heads: int = 32, groups: int = 8):
        super().__init__()
        self.heads, self.groups, size = heads, groups, width // heads
        shapes = dict(q=(width, width), k=(groups * size, width), v=(groups * size, width), o=(width, width))
        shapes |= dict(gate=(inner, width), up=(inner, width), down=(width, inner))
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape) * 0.02))

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.rms_norm(x, x.shape[-1:])
        q, k, v = (
            nn.functional.linear(y, w).unflatten(-1, (n, -1)).transpose(1, 2)
            for w, n in ((self.q, self.heads), (self.k, self.groups), (self.v, self.groups))
        )
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + nn.functional.linear(y.transpose(1, 2).flatten(2), self.o)
        y = nn.functional.rms_norm(x, x.shape[-1:])
        gate, up = nn.functional.linear(y, self.gate), nn.functional.linear(y, self.up)
        return x + nn.functional.linear(nn.functional.silu(gate) * up, self.down)


def _stack(device: str, layers: int, bits: int = 3, tokens: int = 4096) -> dict:
    """A stack of bf16 layers: the clustering of all its weights, forward and backward, and for comparison the stack."""
    torch.manual_seed(0)
    with torch.device(device):
        stack = nn.Sequential(*(_Block() for _ in range(layers))).bfloat16()
        x = torch.randn(1, tokens, 2048, dtype=torch.bfloat16)
    weights = list(stack.parameters())
    C = dkm.init_centroids(weights[0].detach().view(-1, 1), 2**bits)

    def clusterings() -> list[Tensor]:
        averages = [dkm.cluster(W, C, tau=1e-4, eps=0).W_tilde for W in weights]
        return [torch.autograd.grad(W_tilde, W, W.detach())[0] for W_tilde, W in zip(averages, weights, strict=True)]

    def step() -> None:
        torch.autograd.grad(stack(x).square().mean(), weights)

    size = sum(W.numel() * W.element_size() for W in weights)
    clustering, extra = _measure(lambda: clusterings)
    return dict(
        kind="stack",
        weights=sum(W.numel() for W in weights),
        clustering=clustering,
        memory=extra / size,
        step=_measure(lambda: step)[0],
    )


def text(rows: list[dict]) -> str:
    lines = [f"### One layer: forward + backward, {ITERATIONS} iterations", ""]
    cells = []
    for row in (row for row in rows if row["kind"] == "layer"):
        line = [f"{row['size'] / 1e6:.1f} M", f"{row['bits']}/{row['dim']}"]
        for name, width in dict(cdist=4, unrolled=4, ours=4, bfloat16=2).items():
            time, extra = row.get(name, ""), row.get(f"{name}_bytes")
            if isinstance(time, str):
                line += [time]
            else:
                line += [f"{digits(1000 * time)} ms, {extra / row['size'] / width:.1f}x"]
        cells.append([*line, ratio(row["unrolled"], row["ours"])])
    lines += [table(["weights", "b/d", "cdist", "unrolled", "ours", "ours, bf16", "unrolled / ours"], cells), ""]
    lines += ["The multiple is the extra memory, in the weight's own bytes.", "", "### Whole training steps", ""]
    plain, cells = {}, []
    for row in (row for row in rows if row["kind"] == "step"):
        first = plain.setdefault(row["model"], row)
        state = "" if row["plan"] is None else "late" if row["settled"] else "first"
        iterations = "" if row["plan"] is None else f"{row['iterations']:.1f}"
        cells.append([row["model"], row["plan"] or "plain", state, iterations])
        for how in ("captured", "eager"):
            cells[-1] += [f"{digits(1000 * row[how])} ms", f"{row[how] / first[how]:.2f}x"]
    names = ["model", "plan", "steps", "iterations", "one graph", "of plain", "eager", "of plain"]
    lines += [table(names, cells), ""]
    for row in (row for row in rows if row["kind"] == "stack"):
        lines += [
            f"A stack of Llama-shaped bf16 layers, {row['weights'] / 1e6:,.0f} M weights, all at 3/1, 5 iterations: "
            f"forward + backward of all clusterings in {digits(1000 * row['clustering'])} ms and "
            f"{row['memory']:.2f} times the weights' memory; of the stack itself, on 4,096 tokens, in "
            f"{digits(1000 * row['step'])} ms.",
        ]
    return "\n".join(lines)
