"""The GPU kernels against float64: on a GPU where there is one, else through Triton's interpreter."""

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
import triton
from torch import Tensor

import dkm
from dkm import assign, cluster, init_centroids
from dkm.clustering.kernels import blocked, choose
from dkm.clustering.kernels import triton as kernels
from dkm.clustering.kernels.backend import State, progress_size
from dkm.clustering.kernels.triton import backward_pass, forward_pass, support, tiles
from dkm.clustering.options import METRICS, ClusterOptions
from dkm.clustering.temperature import Law
from dkm.clustering.vectors import from_vectors, to_vectors
from dkm.modelling.checksum import checksum as checksum_of
from dkm.modelling.methods.dkm import DKMClustered

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
make_tiles = tiles.choose_tiles.__wrapped__  # anew, whatever was patched

# numpy's opinion of inf - inf in lanes that are masked out, and of 1 / 0 that is not used
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")


def run(W: Tensor, C: Tensor, G: Tensor, impl: str, **options) -> tuple[dict[str, Tensor], int]:
    W, C = W.clone().requires_grad_(), C.clone().requires_grad_()
    W_tilde, C_next, iterations = cluster(W, C, impl=impl, **options)
    dW, dC = torch.autograd.grad(W_tilde, (W, C), G)
    return {"W_tilde": W_tilde.detach(), "C": C_next, "dW": dW, "dC": dC}, int(iterations)


def error(got: Tensor, wanted: Tensor, scale: Tensor | None = None) -> float:
    size = wanted.norm() if scale is None else torch.maximum(wanted.norm(), scale.double().norm())
    return float((got.double() - wanted).norm() / size.clamp(min=1e-300))


def unrolled(W: Tensor, C: Tensor, G: Tensor, tau: float, max_iter: int) -> dict[str, Tensor]:
    """What one would write: logits by a matrix product, and autograd."""
    V = to_vectors(W, C.shape[1]).clone().requires_grad_()
    C = start = C.clone().requires_grad_()
    for _ in range(max_iter):
        A, before = torch.softmax((2 * V @ C.T - C.square().sum(1)) / tau, 1), C
        C = (A.T @ V) / A.sum(0)[:, None]
    V_tilde = A @ before
    dV, dC = torch.autograd.grad(V_tilde, (V, start), to_vectors(G, C.shape[1]))
    return {
        "W_tilde": from_vectors(V_tilde.detach(), W.shape), "C": C.detach(), "dW": from_vectors(dV, W.shape), "dC": dC
    }  # fmt: skip


def assert_close_to_float64(W: Tensor, C: Tensor, G: Tensor, **options) -> None:
    """About as close to float64 as float32 allows: four times the error of the literal or the unrolled form in
    float32, or of the exact form on weights that differ in the last bit of float32, whichever is largest."""
    wanted, wanted_iterations = run(W.double(), C.double(), G.double(), "reference", **options)
    literal, _ = run(W.float(), C.float(), G.float(), "reference", **options)
    nudge = 1 + 2**-24 * torch.randn_like(W, dtype=torch.float64)
    nudged, _ = run(W.double() * nudge, C.double(), G.double(), "reference", **options)
    got, iterations = run(W, C, G, "triton", **options)
    if options["eps"] > 0:  # at 0, which iteration moves nothing is a matter of rounding
        assert iterations == wanted_iterations
    others = [literal, nudged]
    if options.get("metric") != "euclidean":
        others.append(unrolled(W.float(), C.float(), G.float(), options["tau"], wanted_iterations))
    unit = torch.finfo(W.dtype).eps if W.element_size() == 2 else 2**-22
    for name in wanted:
        # gradients are sums over G: where they cancel to nothing, G's size is what rounding is relative to
        scale = G if name.startswith("d") else None
        floor = max(error(other[name], wanted[name], scale) for other in others)
        assert error(got[name], wanted[name], scale) <= 4 * floor + unit, name


@pytest.fixture
def h200(monkeypatch) -> torch.device:
    """A device of 132 processors, where there is none."""
    monkeypatch.setattr(tiles, "INTERPRETED", False)
    properties = SimpleNamespace(multi_processor_count=132, major=9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    return torch.device("cuda")


def tiles_of(N: int, k: int, d: int, device: torch.device, *, backward: bool, deterministic: bool = True):
    """How float32 weights are shared out: neither a table nor windows."""
    problem = tiles.Problem(
        N=N,
        k=k,
        d=d,
        euclidean=False,
        counts=False,
        windows=False,
        backward=backward,
        deterministic=deterministic,
        device=device,
    )
    return make_tiles(problem)


def problem(n: int, d: int, k: int, dtype=torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    W = (torch.randn(n, d) * 0.05).to(dtype)
    C = init_centroids(W, k) + 0.005 * torch.randn(k, d)
    return W.to(DEVICE), C.to(DEVICE), torch.randn(n, d).to(dtype).to(DEVICE)


# few and many centroids, one and several tiles of them, ragged tiles of vectors, both families
SHAPES = [
    (1, 1, 7),
    (3, 1, 1025),
    (16, 1, 301),
    (70, 1, 140),
    (2, 3, 257),
    (16, 4, 130),
    (5, 7, 65),
    (32, 2, 129),
    (33, 8, 71),
    (70, 10, 150),
    (70, 8, 200),
    (130, 16, 140),
    (20, 33, 50),
]


@pytest.mark.parametrize(
    ("k", "d", "n", "metric"),
    # the plain distance walks over many small tiles: minutes in the interpreter
    [(*s, m) for s in SHAPES for m in METRICS if DEVICE == "cuda" or m == "sqeuclidean" or s[0] * s[1] <= 600],
)
def test_equals_float64(k, d, n, metric):
    W, C, G = problem(n, d, k)
    tau = 2e-3 if metric == "sqeuclidean" else 2e-2
    assert_close_to_float64(W, C, G, tau=tau, eps=1e-9, max_iter=3, metric=metric)


@pytest.mark.parametrize("temperature", [10.0, 2.0, 0.1])
@pytest.mark.parametrize(("k", "d"), [(8, 1), (70, 1), (16, 4), (40, 8)])
def test_tiny_and_large_tau(k, d, temperature):
    W, C, G = problem(290, d, k)
    tau = temperature * float((W - C[assign(W, C)]).square().mean())
    assert_close_to_float64(W, C, G, tau=tau, eps=0, max_iter=4)


@pytest.mark.parametrize(("k", "d"), [(16, 1), (70, 1), (16, 4), (40, 8)])
def test_a_vector_far_from_all_centroids(k, d):
    """Squares of its distances are so much larger than tau that their rounding alone would overflow."""
    W, C, G = problem(290, d, k)
    W[7] = 30.0
    W_tilde = cluster(W, C, tau=1e-8, eps=0, max_iter=1, impl="triton").W_tilde
    assert error(W_tilde[7], C[assign(W, C)[7]].double()) <= 2**-22
    assert all(value.isfinite().all() for value in run(W, C, G, "triton", tau=1e-8, eps=0, max_iter=3)[0].values())


@pytest.mark.parametrize(("k", "d"), [(16, 1), (70, 1), (40, 8)])
def test_a_weight_that_is_not_aligned(k, d):
    """After one that is: a kernel compiled for that would read other weights.  As exact, not the same bits: where
    threads read less at once, they add up in another order."""
    W, C, G = problem(150, d, k)
    options = dict(tau=2e-3, eps=0, max_iter=3)
    exact = run(W.double(), C.double(), G.double(), "reference", **options)[0]
    aligned = run(W, C, G, "triton", **options)[0]
    for shift in (1, 2, 0):
        w, g = (torch.zeros(X.numel() + shift, device=DEVICE)[shift:].view_as(X).copy_(X) for X in (W, G))
        assert w.data_ptr() % 16 == 4 * shift
        w.requires_grad_()
        W_tilde = cluster(w, C, impl="triton", **options).W_tilde
        got = dict(W_tilde=W_tilde.detach(), dW=torch.autograd.grad(W_tilde, w, g)[0])
        for name in got:
            assert error(got[name], exact[name]) <= 2 * error(aligned[name], exact[name]) + 2**-22, name


@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter has 3 programs")
def test_more_programs_than_centroids():
    """Their sums are added up in another way."""
    W, C, G = problem(17_001, 8, 200)
    chosen = tiles_of(W.numel(), 200, 8, W.device, backward=False)
    assert chosen.programs >= chosen.k_padded
    assert_close_to_float64(W, C, G, tau=2e-3, eps=0, max_iter=3)


@pytest.mark.parametrize(
    ("version", "hip", "runs"),
    [
        ("3.2.0", None, False),
        ("3.3.0+git", None, True),
        ("3.10.1", None, True),
        ("4.0", None, True),
        ("3.6", "6", False),
    ],
)
def test_which_triton_and_which_gpu(version, hip, runs, monkeypatch):
    """3.2 has no launch of programs that wait for one another."""
    monkeypatch.setattr(triton, "__version__", version)
    monkeypatch.setattr(torch.version, "hip", hip)
    assert support.runs_here.__wrapped__() is runs


def test_without_the_triton_it_needs(monkeypatch):
    monkeypatch.setattr(support, "runs_here", lambda: False)
    monkeypatch.setattr(tiles, "INTERPRETED", False)
    W = SimpleNamespace(is_cuda=True, device=torch.device("cuda"), dtype=torch.float32, numel=lambda: 80)
    assert choose("auto", W, 8) is blocked
    with pytest.raises(ValueError, match=r'Triton 3\.3, .* use impl="auto"'):
        kernels.forward(W, torch.zeros(4, 8), torch.tensor(1.0), ClusterOptions(eps=0.0, max_iter=1))


@pytest.mark.parametrize("gradient", ["unrolled", "last", "implicit"])
@pytest.mark.parametrize("eps", [0.0, 1e9])  # all iterations, and one
@pytest.mark.parametrize(("k", "d", "dtype"), [(4, 1, torch.float32), (40, 8, torch.float32), (70, 3, torch.bfloat16)])
def test_the_gradient_of_the_weight_alone(k, d, dtype, eps, gradient):
    """In a training nobody asks for that of the centroids: less to compute, and the same numbers."""
    W, C, G = problem(150, d, k)
    results = []
    for asked in (True, False):
        w, c = W.to(dtype).requires_grad_(), C.clone().requires_grad_(asked)
        W_tilde = cluster(w, c, tau=2e-3, eps=eps, max_iter=3, gradient=gradient, impl="triton").W_tilde
        W_tilde.backward(G.to(dtype))
        results.append(w.grad)
        assert (c.grad is not None) is asked
    assert torch.equal(*results)


@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter has all the room")
def test_a_device_with_less_room(monkeypatch):
    monkeypatch.setattr(tiles, "is_hopper", lambda _: False)
    for user in (forward_pass, backward_pass):
        monkeypatch.setattr(user, "choose_tiles", make_tiles)
    W, C, G = problem(17_001, 8, 200)
    assert_close_to_float64(W, C, G, tau=2e-3, eps=0, max_iter=3)


@pytest.mark.parametrize(
    ("k", "d", "dtype"), [(40, 8, torch.float32), (200, 5, torch.float32), (70, 8, torch.bfloat16)]
)
def test_programs_may_share_their_sums(k, d, dtype, monkeypatch):
    for user in (forward_pass, backward_pass):
        monkeypatch.setattr(user, "choose_tiles", make_tiles)
    monkeypatch.setattr(tiles, "SHARED_ROWS", 2)
    W, C, G = problem(2000 if DEVICE == "cuda" else 290, d, k, dtype)
    chosen = tiles_of(W.numel(), k, d, W.device, backward=True, deterministic=False)
    assert chosen.partial_rows == 2 < min(chosen.programs, len(W) // chosen.constants["BLOCK_N"])
    assert_close_to_float64(W, C, G, tau=2e-3, eps=0, max_iter=3)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("deterministic", [False, True])
def test_sums_are_shared_where_they_would_weigh(backward, deterministic, h200):
    """By programs of the backward pass, for small weights, and not where the same bits are asked for."""
    for N in (147_456, 2_359_296, 25_165_824):
        chosen = tiles_of(N, 256, 8, h200, backward=backward, deterministic=deterministic)
        own = min(chosen.programs, N // 8 // chosen.constants["BLOCK_N"])
        if backward and not deterministic and N < 10**7:
            assert chosen.partial_rows < own
            assert chosen.partial_rows == tiles.SHARED_ROWS or chosen.partial_rows * chosen.k_padded * 9 <= N / 48
        else:
            assert chosen.partial_rows == own


@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter runs one program after the other")
def test_the_same_bits_where_they_are_asked_for():
    W, C, G = problem(50_000, 8, 256)
    torch.use_deterministic_algorithms(True)
    try:
        results = [run(W, C, G, "triton", tau=2e-3, eps=0, max_iter=4)[0] for _ in range(5)]
    finally:
        torch.use_deterministic_algorithms(False)
    for other in results[1:]:
        assert all(torch.equal(other[name], results[0][name]) for name in other)


@pytest.mark.parametrize(("backward", "deterministic"), [(False, True), (True, True), (True, False)])
@pytest.mark.parametrize("d", [1, 2, 8, 16, 32])
@pytest.mark.parametrize("k", [4, 64, 256, 1024, 4096])
def test_whoever_has_vectors_has_a_row(k, d, backward, deterministic, h200):
    """For sums of their own, else they would be written past the end.  Products may share."""
    for n in [1, 64, *range(3000, 300_000, 997)]:
        chosen = tiles_of(n * d, k, d, h200, backward=backward, deterministic=deterministic)
        shared = chosen.constants["PRODUCTS"] and not deterministic
        least = 1 if shared else min(chosen.programs, -(-n // chosen.constants["BLOCK_N"]))
        assert least <= chosen.partial_rows <= chosen.programs


@pytest.mark.parametrize("gradient", ["last", "implicit"])
@pytest.mark.parametrize(("k", "d"), [(4, 1), (3, 2), (40, 8)])
def test_other_gradients(k, d, gradient):
    W, C, G = problem(150, d, k)
    fixed = cluster(W.double(), C.double(), tau=2e-3, eps=1e-12, max_iter=5000, impl="blocked").C
    results = []
    for impl, dtype in (("blocked", torch.float64), ("blocked", torch.float32), ("triton", torch.float32)):
        w = W.to(dtype, copy=True).requires_grad_()
        W_tilde = cluster(w, fixed.to(dtype), tau=2e-3, eps=0, max_iter=2, gradient=gradient, impl=impl).W_tilde
        results.append(torch.autograd.grad(W_tilde, w, G.to(dtype))[0])
    exact, other, got = results
    assert error(got, exact) <= 4 * error(other, exact) + 2**-20


@pytest.mark.parametrize(
    ("dtype", "gradient"), [(torch.bfloat16, "unrolled"), (torch.float16, "unrolled"), (torch.bfloat16, "last")]
)
def test_table_of_all_16_bit_values(monkeypatch, dtype, gradient):
    W, C, G = problem(700, 1, 5, dtype)
    W[:90] = 0  # a value that is everywhere
    W[90:95] = 1e-6  # and some that are far from all others
    options = dict(tau=2e-3, eps=0, max_iter=2, gradient=gradient)
    wanted = run(W.float(), C, G.float(), "triton", **options)[0]
    monkeypatch.setattr(tiles, "VALUE_TABLE", 0)
    monkeypatch.setattr(tiles, "FEW_CENTROIDS", 0)
    got = run(W, C, G, "triton", **options)[0]
    unit = torch.finfo(dtype).eps
    for name, limit in dict(W_tilde=unit, C=2**-20, dW=unit, dC=2**-18).items():
        assert error(got[name], wanted[name].double(), G if name[0] == "d" else None) <= limit, name


@pytest.mark.parametrize(
    ("k", "temperature", "ordered", "gradient"),
    [
        (33, 2.0, True, "unrolled"),
        (100, 0.1, True, "unrolled"),
        (100, 2.0, False, "unrolled"),  # windows of all centroids
        (100, 1e4, True, "unrolled"),
        (100, 2.0, True, "last"),
        (100, 2.0, True, "implicit"),
    ],
)
def test_windows_of_near_centroids(monkeypatch, k, temperature, ordered, gradient):
    """As close to float64 as with all centroids, as plain float32, or as float64 on weights that differ in the last bit
    of float32: no float32 computation can tell such weights apart."""
    n = 601 if DEVICE == "cpu" else 4_400_001  # several tiles of weights, the last one not full
    W = torch.randn(n, device=DEVICE) * 0.05
    W[: n // 3] *= 0.1  # tiles that are not alike
    some = W[torch.randperm(n, device=DEVICE)[:1000], None].cpu()
    C = torch.cat([init_centroids(some, k - 1), torch.tensor([[9.0]])]).to(DEVICE)  # one has no mass
    C = C if ordered else C[torch.randperm(k)]
    tau = temperature * float((W[:, None] - C[assign(W[:, None], C)]).square().mean())
    if gradient == "implicit":  # is about fixed points
        C = cluster(W.double()[:, None], C.double(), tau=tau, eps=1e-12, max_iter=300, impl="blocked").C.float()
    W, G = W[:, None], torch.randn(n, 1, device=DEVICE)
    options = dict(tau=tau, eps=0, max_iter=3, gradient=gradient)
    exact = run(W.double(), C.double(), G.double(), "blocked", **options)[0]
    plain = run(W, C, G, "blocked", **options)[0]
    nudge = 1 + 2**-24 * torch.randn_like(W, dtype=torch.float64)
    nudged = run(W.double() * nudge, C.double(), G.double(), "blocked", **options)[0]
    monkeypatch.setattr(tiles, "WINDOWS", n + 1)
    assert not tiles.by_windows(W, k, 1, "sqeuclidean")
    dense = run(W, C, G, "triton", **options)[0]
    monkeypatch.setattr(tiles, "WINDOWS", 0)
    assert tiles.by_windows(W, k, 1, "sqeuclidean")
    got = run(W, C, G, "triton", **options)[0]
    for name, wanted in exact.items():
        scale = G if name[0] == "d" else None
        allowed = max(error(other[name], wanted, scale) for other in (dense, plain, nudged))
        assert error(got[name], wanted, scale) <= 2 * allowed + 2**-22, name


@pytest.mark.parametrize("centroids", [True, False])
@pytest.mark.parametrize("gradient", ["unrolled", "last", "implicit"])
def test_processes_reduce_equally_often(gradient, centroids, monkeypatch):
    """One may have so many weights that windows pay, another not: they would wait for one another forever."""
    W, C, G = problem(300, 1, 40)
    tau = torch.tensor(2e-4, device=DEVICE)
    counts = []
    for windows in (0, 1 << 22):
        monkeypatch.setattr(tiles, "WINDOWS", windows)
        sums = []
        reduce = lambda x, sums=sums: sums.append(x) or x  # noqa: E731
        options = ClusterOptions(eps=0.0, max_iter=3, gradient=gradient)
        _, trace = kernels.forward(W.view(-1), C, tau, options, reduce)
        kernels.backward(G.view(-1), W.view(-1), tau, trace, options, reduce=reduce, centroids=centroids)
        counts.append(len(sums))
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize(("k", "d"), [(70, 8), (40, 8), (70, 1), (40, 3)])
def test_a_process_without_vectors_adds_nothing(k, d):
    W, C, G = (x.to(DEVICE) for x in problem(150, d, k))
    none, tau = W.view(-1)[:0], torch.tensor(2e-3, device=DEVICE)
    sent, received = [], []

    def others(x: Tensor) -> Tensor:
        received.append(x.clone())
        return x

    def own(x: Tensor) -> Tensor:
        sent.append(x.clone())
        return received[len(sent) - 1]

    options = ClusterOptions(eps=0.0, max_iter=3)
    _, trace = kernels.forward(W.view(-1), C, tau, options, others)
    _, same = kernels.forward(none, C, tau, options, own)
    assert torch.equal(trace.trail, same.trail)
    kernels.backward(G.view(-1), W.view(-1), tau, trace, options, reduce=others)
    kernels.backward(none, none, tau, trace, options, reduce=own)
    assert len(sent) == len(received)
    assert not any(x.any() for x in sent)


@pytest.mark.skipif(DEVICE == "cpu", reason="autocast on a CPU leaves norms alone")
def test_autocast_does_not_reach_the_table(monkeypatch):
    monkeypatch.setattr(tiles, "VALUE_TABLE", 1)
    W, C, G = problem(5000, 1, 16, torch.bfloat16)
    wanted = run(W, C.float(), G, "triton", tau=2e-4, eps=0, max_iter=3)[0]
    with torch.autocast("cuda", torch.bfloat16):
        got = run(W, C.float(), G, "triton", tau=2e-4, eps=0, max_iter=3)[0]
    assert all(torch.equal(got[name], wanted[name]) for name in wanted)


class _Cut(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, _):
        return None


def test_no_gradient_arrives():
    weight = torch.randn(8, 6, device=DEVICE).requires_grad_()
    W_tilde = DKMClustered(weight, 2, tau=1e-2, impl="triton")(weight)
    (_Cut.apply(W_tilde).sum() + weight.sum()).backward()
    assert torch.equal(weight.grad, torch.ones_like(weight))


@pytest.mark.parametrize(("k", "d"), [(5, 1), (40, 8)])
def test_sums_may_be_reduced_in_between(k, d):
    W, C, G = problem(150, d, k)
    tau = torch.tensor(2e-3, device=DEVICE)
    shapes = []

    def reduce(sums: Tensor) -> Tensor:
        shapes.append(tuple(sums.shape))
        return sums

    results = []
    for how in (None, reduce):
        options = ClusterOptions(eps=0.0, max_iter=2)
        W_tilde, trace = kernels.forward(W.flatten(), C, tau, options, how)
        gradients = kernels.backward(G.flatten(), W.flatten(), tau, trace, options, reduce=how)
        results.append((W_tilde, trace.trail[-1], gradients.dW, gradients.dC))
    assert shapes == [(k, d + 1)] * 4  # two iterations, the output and an update
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize(("k", "d"), [(5, 1), (40, 8)])
def test_words_of_progress(k, d):
    """The checksum, a barrier counter for each pass and the moves are where the glossary of the kernels says."""
    W, C, G = problem(150, d, k)
    W, G = W.flatten(), G.flatten()
    zero = torch.zeros((), dtype=torch.int64, device=DEVICE)
    law = Law(hot=2e-3, decay=0.0, relative=False, steps=1)
    unit = torch.ones((), device=DEVICE)
    state = State(C.clone(), C.clone(), zero, zero.clone(), zero.clone(), unit=unit, law=law, recomputing=False)
    options = ClusterOptions(eps=0.0, max_iter=3)
    _, tau, trace = kernels.advance(W, state, options)
    assert int(trace.iterations) == 3
    assert len(trace.progress) == progress_size(3) == 7
    checksum, barriers, moves = trace.progress[:2], trace.progress[2:4].view(torch.int32), trace.progress[4:]
    assert int(checksum.view(torch.int64)) == int(checksum_of(W)) == int(state.seen)
    centroids = trace.trail[:, :, :-1]
    torch.testing.assert_close(moves, (centroids[1:] - centroids[:-1]).abs().amax((1, 2)))
    forward_count, backward_count = barriers.tolist()
    assert backward_count == 0
    trail = trace.trail.clone()
    kernels.backward(G, W, tau, trace, options)
    assert torch.equal(trace.trail, trail)
    assert int(barriers[0]) == forward_count
    waits = DEVICE == "cuda"  # the interpreter runs one program after another, without barriers
    assert bool(forward_count) == bool(barriers[1]) == waits


@pytest.mark.parametrize("gradient", ["unrolled", "implicit"])
@pytest.mark.parametrize(("k", "d"), [(5, 1), (40, 1), (40, 8)])
def test_a_backward_pass_may_run_twice(k, d, gradient, monkeypatch):
    """On one trace, with `retain_graph`: the barrier goes on counting from where the first pass left it."""
    monkeypatch.setattr(tiles, "WINDOWS", 0)  # k = 40, d = 1 goes by windows
    W, C, G = problem(150, d, k)
    W, C = W.requires_grad_(), C.requires_grad_()
    W_tilde = cluster(W, C, tau=2e-3, eps=0, max_iter=3, gradient=gradient, impl="triton").W_tilde
    torch.use_deterministic_algorithms(True)
    try:
        first, second = (torch.autograd.grad(W_tilde, (W, C), G, retain_graph=True) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("k", "d"), [(8, 1), (40, 8)])
def test_16_bit_weights(k, d, dtype):
    assert_close_to_float64(*problem(200, d, k, dtype), tau=2e-3, eps=0, max_iter=3)


@pytest.mark.parametrize(("k", "d"), [(8, 1), (40, 4)])
def test_stops_when_the_reference_stops(k, d):
    W, C, G = problem(60, d, k)
    centroids = [C, *(cluster(W, C, tau=1e-3, eps=0, max_iter=i, impl="reference").C for i in range(1, 5))]
    moves = [float((b - a).abs().max()) for a, b in pairwise(centroids)]
    stops = set()
    for eps in [(larger * smaller) ** 0.5 for larger, smaller in pairwise(moves)]:
        first = next((i for i, move in enumerate(moves, start=1) if move <= eps), 5)
        assert_close_to_float64(W, C, G, tau=1e-3, eps=eps, max_iter=5)
        assert int(cluster(W, C, tau=1e-3, eps=eps, max_iter=5, impl="triton").iterations) == first
        stops.add(first)
    assert len(stops) > 1


@pytest.mark.parametrize("d", [1, 8])
def test_centroid_without_mass_stays(d):
    W = torch.randn(60, d, device=DEVICE) * 0.01
    C = torch.cat([W[:40], torch.full((1, d), 100.0, device=DEVICE)])
    got, _ = run(W, C, torch.randn_like(W), "triton", tau=1e-4, eps=0.0)
    assert torch.equal(got["C"][-1], C[-1])
    assert all(value.isfinite().all() for value in got.values())


@pytest.mark.parametrize("d", [1, 3, 8])
def test_padding_and_strides(d):
    W = torch.randn(7, 33, device=DEVICE).t() * 0.05
    C = torch.randn(40, d, device=DEVICE) * 0.05
    assert_close_to_float64(W, C, torch.randn(7, 33, device=DEVICE).t(), tau=2e-3, eps=0, max_iter=3)


def test_same_result_every_time():
    W, C, G = problem(150, 8, 70)
    first, second = (run(W, C, G, "triton", tau=1e-3, max_iter=2)[0] for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_what_it_cannot_do_says_so():
    W, C, _ = problem(8, 2, 2)
    with pytest.raises(ValueError, match="computes in float32"):
        cluster(W.double(), C.double(), tau=1e-3, impl="triton")
    with pytest.raises(ValueError, match="d = 65"):
        cluster(torch.randn(4, 65, device=DEVICE), torch.randn(2, 65, device=DEVICE), tau=1e-3, impl="triton")


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_a_training_step_can_be_captured_in_a_graph():
    W, C, G = problem(5000, 4, 16)
    W.requires_grad_()
    wanted = torch.autograd.grad(cluster(W, C, tau=1e-3).W_tilde, W, G)[0]
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.autograd.grad(cluster(W, C, tau=1e-3).W_tilde, W, G)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        got = torch.autograd.grad(cluster(W, C, tau=1e-3).W_tilde, W, G)[0]
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(got, wanted)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_replays_of_a_captured_training_step_go_on():
    """Centroids and temperature move on at every replay, as they do without a graph."""

    def make():
        torch.manual_seed(0)
        layer = dkm.cluster_weight(torch.nn.Linear(64, 32, device=DEVICE), bits=3, dim=2, steps=20)
        return layer, torch.optim.SGD(layer.parameters(), lr=0.1)

    x = torch.randn(16, 64, device=DEVICE)

    def step(layer, optimizer):
        optimizer.zero_grad(set_to_none=False)
        layer(x).square().mean().backward()
        optimizer.step()

    eager, captured = make(), make()
    stream = torch.cuda.Stream()
    for layer, optimizer in (eager, captured):
        with torch.cuda.stream(stream):
            for _ in range(2):
                step(layer, optimizer)
        torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(*captured)
    for _ in range(5):
        step(*eager)
        graph.replay()
    torch.cuda.synchronize()
    for name, wanted in eager[0].state_dict().items():
        torch.testing.assert_close(captured[0].state_dict()[name], wanted, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize(
    ("bits", "dim", "dtype", "tau"),
    [
        (2, 1, torch.float32, "auto"),
        (2, 1, torch.bfloat16, 1e-3),
        (4, 4, torch.float32, dkm.temperature.constant(0.5)),
        (5, 8, torch.float32, "auto"),
        (6, 1, torch.float32, "auto"),  # by windows
        (1, 3, torch.float32, dkm.temperature.linear(2, 0.1)),
    ],
)
def test_one_launch_does_what_the_operations_do(monkeypatch, bits, dim, dtype, tau):
    """The checksum, the start, the temperature and the new state: of a weight that changes now and then."""
    monkeypatch.setattr(tiles, "WINDOWS", 0)
    torch.manual_seed(0)
    weight = torch.randn(8, 5, 3, 3, device=DEVICE).mul(0.1).to(dtype, memory_format=torch.channels_last)
    ones, others = (
        DKMClustered(weight.requires_grad_(), bits, dim, tau=tau, steps=3, eps=1e-6, max_iter=3, impl="triton")
        for _ in range(2)
    )
    # both round tau, by 2^-23, and cold iterations on few weights amplify that a thousand times
    limit = 1e-3 if dtype == torch.float32 else 2**-7
    for changed in (False, True, False, True, True):
        if changed:
            weight = (weight.detach() + 0.01 * torch.randn_like(weight)).requires_grad_()
        G = torch.randn_like(weight)
        results = []
        for clustered, together in ((ones, True), (others, False)):
            with monkeypatch.context() as patch:
                if not together:
                    patch.setattr("dkm.modelling.methods.dkm.can_advance", lambda *_: False)
                W_tilde = clustered(weight)
            results.append((W_tilde.detach(), *torch.autograd.grad(W_tilde, weight, G)))
        for got, wanted in zip(*results, strict=True):
            assert got.shape == wanted.shape == weight.shape
            assert error(got, wanted.double()) < limit
        for name, wanted in others.state_dict().items():
            got = ones.state_dict()[name]
            assert error(got, wanted.double()) < 1e-3 if name in ("C", "start") else torch.equal(got, wanted), name
        assert int(ones.iterations) == int(others.iterations)
    assert int(ones.step) == 3


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_one_launch_takes_a_gradient_that_is_one_number(layout):
    """That of a sum: its strides are zero."""
    torch.manual_seed(0)
    weight = torch.randn(8, 6, 3, 3, device=DEVICE).to(memory_format=layout).requires_grad_()
    clustered = DKMClustered(weight, 2, tau=1e-2, impl="triton")
    got, wanted = (
        torch.autograd.grad(clustered(weight), weight, G)[0]
        for G in (torch.ones((), device=DEVICE).expand_as(weight), torch.ones_like(weight))
    )
    assert torch.equal(got, wanted)


def test_one_launch_keeps_the_layout_in_memory():
    """d = 1: in the order of memory, without a copy."""
    weight = torch.randn(8, 6, 3, 3, device=DEVICE).to(memory_format=torch.channels_last).requires_grad_()
    clustered = DKMClustered(weight, 2, tau=1e-2, impl="triton")
    wanted = cluster(weight, clustered.C.clone(), tau=1e-2, impl="triton").W_tilde
    W_tilde = clustered(weight)
    W_tilde.sum().backward()
    assert W_tilde.stride() == weight.grad.stride() == weight.stride()
    torch.testing.assert_close(W_tilde, wanted, rtol=1e-5, atol=1e-7)
