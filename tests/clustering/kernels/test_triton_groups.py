"""The GPU kernels for groups against the literal clustering of each in float64: on a GPU where there is one, else
through Triton's interpreter."""

import pytest
import torch
from group_cases import CASES, literal, problem
from torch import Tensor

from dkm.clustering.grouped import cluster_groups
from dkm.clustering.groups import Group, Grouping
from dkm.clustering.kernels import reference
from dkm.clustering.kernels import triton as kernels
from dkm.clustering.kernels.triton import support
from dkm.clustering.kernels.triton.groups import choose_constants
from dkm.clustering.options import ClusterOptions

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAMES = ("W_tilde", "C", "dW", "dC", "dtau")

# numpy's opinion of inf - inf in lanes that are masked out, and of 1 / 0 that is not used
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")

Problem = tuple[Tensor, Tensor, Tensor, Tensor]  # W, C, tau and a gradient of W_tilde


def draw(shape: tuple[int, ...], grouping: Grouping, k: int, metric: str = "sqeuclidean") -> Problem:
    W, C, tau, G = (X.to(DEVICE) for X in problem(shape, grouping, k))
    return W, C, tau if metric == "sqeuclidean" else tau.sqrt(), G


def results(function, W: Tensor, C: Tensor, tau: Tensor, G: Tensor, grouping: Grouping, options: ClusterOptions):
    """By name: W_tilde, the next centroids, and the gradients; and the iterations."""
    W, C, tau = (X.detach().clone().requires_grad_() for X in (W, C, tau))
    W_tilde, C_next, iterations = function(W, C, tau, grouping, options)
    gradients = torch.autograd.grad(W_tilde, (W, C, tau), G.to(W_tilde.dtype), allow_unused=True)
    return dict(zip(NAMES, (W_tilde.detach(), C_next, *gradients), strict=True)), iterations.cpu()


def error(got: Tensor, wanted: Tensor, scale: Tensor | None = None) -> float:
    size = wanted.norm() if scale is None else torch.maximum(wanted.norm(), scale.double().norm())
    return float((got.double() - wanted).norm() / size.clamp(min=1e-300))


def last_bit(X: Tensor) -> Tensor:
    """X in float32, many of its values rounded to a neighbour of the nearest."""
    return (X * (1 + 2**-24 * torch.randn_like(X))).float()


def assert_close_to_float64(drawn: Problem, grouping: Grouping, dtype: torch.dtype = torch.float32, **options) -> None:
    """About as close to float64 as float32 allows: four times the error of the literal form in float32, on arguments
    that differ in their last bit.  It is the largest of four: few sums have a small error by luck."""
    chosen = ClusterOptions(impl="triton", **options)
    W, C, tau, G = drawn
    W, G = W.to(dtype), G.to(dtype)
    C, tau = C.float(), tau.float()
    exact = [X.double() for X in (W, C, tau, G)]
    wanted, wanted_iterations = results(literal, *exact, grouping, chosen)
    plain = [results(literal, *(last_bit(X) for X in exact), grouping, chosen)[0] for _ in range(4)]
    got, iterations = results(cluster_groups, W, C, tau, G, grouping, chosen)
    if chosen.eps > 0:  # at 0, which iteration moves nothing is a matter of rounding
        assert torch.equal(iterations, wanted_iterations)
    for name in NAMES:
        if name == "dC" and chosen.gradient != "unrolled":
            assert not got[name].any()
            continue
        # gradients are sums over G: where they cancel to nothing, G's size is what rounding is relative to
        scale = G if name.startswith("d") else None
        # and a sum of a few terms may be in another order
        limit = 4 * max(error(other[name], wanted[name], scale) for other in plain) + 2**-22
        if name in ("W_tilde", "dW") and W.element_size() == 2:
            # rounded once, at the end: the distance to the next 16-bit number changes no more than the number itself
            rounding = error(wanted[name].to(dtype), wanted[name], scale)
            if dtype == torch.bfloat16 and DEVICE == "cpu":  # the interpreter cuts off the bits that do not fit
                rounding = torch.finfo(dtype).eps
            limit = rounding + 2 * limit
        assert error(got[name], wanted[name], scale) <= limit, name


# shape, group, dim, k.  In addition to those for all implementations: vectors that end with the rows of a tile, which
# have addresses of their own, and groups that are walked over in several steps.
LARGER = [
    ((6, 20), Group(4, 8), 4, 5),
    ((5, 18), Group(2, 9), 3, 6),
    ((3, 24), Group(2), 8, 4),
    ((20, 22), Group(16, 11), 1, 7),
    ((2, 300), Group(1), 1, 16),
    ((2, 210), Group(None, 200), 2, 9),
]
ALL = [(*case, 2 + i % 4) for i, case in enumerate(CASES)] + LARGER


@pytest.mark.parametrize(("shape", "group", "dim", "k"), ALL)
def test_equals_float64(shape, group, dim, k):
    grouping = Grouping.of(shape, group, dim)
    assert_close_to_float64(draw(shape, grouping, k), grouping, eps=0, max_iter=3)


@pytest.mark.parametrize(
    ("shape", "group", "dim", "k"), [((5, 7), Group(2, 3), 2, 3), ((2, 90), Group(1), 1, 5), ((3, 24), Group(2), 4, 4)]
)
def test_the_plain_distance(shape, group, dim, k):
    grouping = Grouping.of(shape, group, dim)
    assert_close_to_float64(draw(shape, grouping, k, "euclidean"), grouping, eps=0, max_iter=3, metric="euclidean")


@pytest.mark.parametrize("metric", ["sqeuclidean", "euclidean"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits(dtype, metric):
    """The steps of a gradient are added up in float32."""
    grouping = Grouping.of((9, 26), Group(8, 13), 2)
    assert_close_to_float64(draw((9, 26), grouping, 4, metric), grouping, dtype, eps=0, max_iter=4, metric=metric)


@pytest.mark.parametrize("max_iter", range(1, 8))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_iterations(max_iter, dtype):
    grouping = Grouping.of((2, 40), Group(1), 1)
    assert_close_to_float64(draw((2, 40), grouping, 3), grouping, dtype, eps=0, max_iter=max_iter)


@pytest.mark.parametrize(("dim", "dtype"), [(1, torch.float32), (4, torch.float16), (16, torch.float32)])
def test_several_tiles_of_centroids(dim, dtype):
    grouping = Grouping.of((2, 160), Group(1), dim)
    assert choose_constants(grouping, 64, "sqeuclidean")["K_TILES"] > 1
    assert_close_to_float64(draw((2, 160), grouping, 64), grouping, dtype, eps=0, max_iter=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_each_group_converges_for_itself(dtype):
    """Some start where they end, some move on and converge later, some never do."""
    grouping = Grouping.of((3, 60), Group(1), 1)
    W, C, tau, G = draw((3, 60), grouping, 4)
    W = W.to(dtype).double()
    reached = literal(W, C, tau, grouping, ClusterOptions(eps=1e-12, max_iter=500))[1]
    C[0], C[1] = reached[0], reached[1] + 1e-3
    options = ClusterOptions(eps=2e-4, max_iter=6)
    used = literal(W, C, tau, grouping, options)[2].tolist()
    assert used[0] == 1 < used[1] < used[2] == 6
    assert_close_to_float64((W, C, tau, G), grouping, dtype, eps=2e-4, max_iter=6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("gradient", ["last", "implicit"])
def test_other_gradients(gradient, dtype):
    """At the fixed point, where the few passes that solve the linear system of "implicit" suffice."""
    grouping = Grouping.of((4, 24), Group(2, 24), 1)
    W, C, tau, G = draw((4, 24), grouping, 3)
    W = W.to(dtype).double()
    C = literal(W, C, tau, grouping, ClusterOptions(eps=1e-12, max_iter=500))[1]
    assert_close_to_float64((W, C, tau, G), grouping, dtype, eps=0, max_iter=2, gradient=gradient)


def test_the_last_centroids_have_a_gradient():
    """Those that the last iteration started from, with gradient="last"."""
    grouping = Grouping.of((5, 7), Group(2, 3), 2)
    W, C, tau, G = (X.float().flatten(0, 1) if X.dim() == 2 else X.float() for X in draw((5, 7), grouping, 3))
    options = ClusterOptions(eps=0, max_iter=3, gradient="last")
    _, trace = kernels.forward_groups(W, C, tau, grouping, options)
    _, dC, dtau = kernels.backward_groups(G, W, tau, trace, grouping, options)
    assert dC is not None
    assert dtau is None

    def expected(dtype: torch.dtype) -> Tensor:
        V, counted, upstream = (grouping.split(X.to(dtype)) for X in (W, torch.ones_like(W), G))
        last = trace.trail[:, 2].to(dtype).requires_grad_()
        found = []
        for i in range(grouping.count):
            inside = counted[i].any(-1)
            A, _ = reference.update(V[i][inside], last[i], tau[i].to(dtype), "sqeuclidean")
            found.append(((A @ last[i]) * upstream[i][inside]).sum())
        return torch.autograd.grad(sum(found), last)[0]

    wanted = expected(torch.float64)
    assert error(dC, wanted) <= 4 * error(expected(torch.float32), wanted) + 2**-22


def test_the_trace():
    """Row 0 is the start, the last row what was reached; C may be a part of a larger tensor."""
    grouping = Grouping.of((3, 20), Group(1), 1)
    W, C, tau, _ = (X.float() for X in draw((3, 20), grouping, 3))
    larger = torch.stack([C, C], 1)
    options = ClusterOptions(eps=0, max_iter=2)
    _, trace = kernels.forward_groups(W.flatten(), larger[:, 1], tau, grouping, options)
    assert trace.trail.shape == (3, 3, 3, 1)
    assert trace.trail.dtype == torch.float32
    assert torch.equal(trace.trail[:, 0], C)
    assert trace.iterations.tolist() == [2, 2, 2]
    assert trace.iterations.dtype == torch.int64
    reached = literal(W.double(), C.double(), tau.double(), grouping, options)[1]
    plain = literal(W, C, tau, grouping, options)[1]
    assert error(trace.trail[:, -1], reached) <= 4 * error(plain, reached) + 2**-22


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_only_what_is_asked_for(dtype):
    """The rest is the same, and a repetition gives the same bits."""
    grouping = Grouping.of((3, 20), Group(1), 1)
    W, C, tau, G = draw((3, 20), grouping, 3)
    W, C, tau, G = W.flatten().to(dtype), C.float(), tau.float(), G.flatten().to(dtype)
    options = ClusterOptions(eps=0, max_iter=3)
    W_tilde, trace = kernels.forward_groups(W, C, tau, grouping, options)
    assert torch.equal(W_tilde, kernels.forward_groups(W, C, tau, grouping, options)[0])
    everything = kernels.backward_groups(G, W, tau, trace, grouping, options, temperature=True)
    again = kernels.backward_groups(G, W, tau, trace, grouping, options, temperature=True)
    assert all(torch.equal(a, b) for a, b in zip(everything, again, strict=True))
    alone = kernels.backward_groups(G, W, tau, trace, grouping, options, centroids=False)
    assert (alone.dC, alone.dtau) == (None, None)
    assert everything.dC.shape == C.shape
    assert everything.dtau.shape == tau.shape
    # compiled for less, the same formula may be rounded elsewhere, once or twice in each of three iterations
    assert error(alone.dW, everything.dW.double()) <= 6 * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_an_empty_centroid_stays_and_passes_on_its_gradient(dtype):
    """In the second group, 3 is nearer than -4 to all weights.  It moves to 20 / 3, and then -4 is nearer to 0."""
    grouping = Grouping.of((2, 6), Group(1), 1)
    W, C, tau, G = draw((2, 6), grouping, 2)
    W[1] = torch.tensor([0.0, 10.0, 10.0, 0.0, 10.0, 10.0])
    C[1, :, 0], tau[1] = torch.tensor([3.0, -4.0]), 5e-3  # so that exp(-(16 - 9) / tau) is zero, also in float64
    assert_close_to_float64((W, C, tau, G), grouping, dtype, eps=0, max_iter=2)
    options = ClusterOptions(eps=0, max_iter=2)
    W, C, tau, G = W.flatten().to(dtype), C.float(), tau.float(), G.flatten().to(dtype)
    W_tilde, trace = kernels.forward_groups(W, C, tau, grouping, options)
    assert float(W_tilde[6]) == float(trace.trail[1, 1, 1, 0]) == -4
    dC = kernels.backward_groups(G, W, tau, trace, grouping, options).dC
    torch.testing.assert_close(dC[1, 1, 0], (G[6] + G[9]).float(), rtol=2**-7, atol=0)  # G may be in 16 bit


def test_a_centroid_on_a_weight():
    """The gradient of the plain distance is zero there, and not NaN."""
    grouping = Grouping.of((2, 12), Group(1), 2)
    W, C, tau, G = draw((2, 12), grouping, 3, "euclidean")
    W, C = W.float().double(), C.float().double()
    C[0, 0], C[1, 1] = W[0, :2], W[1, 2:4]
    assert_close_to_float64((W, C, tau, G), grouping, eps=0, max_iter=2, metric="euclidean")


def test_weights_far_from_zero():
    """Differences to the mean decide, and products of the weights themselves would cancel."""
    grouping = Grouping.of((2, 40), Group(1), 2)
    W, C, tau, G = draw((2, 40), grouping, 4)
    assert_close_to_float64((W + 50, C + 50, tau, G), grouping, eps=0, max_iter=3)


def test_which_groups_fit(monkeypatch):
    monkeypatch.setattr(support, "runs_here", lambda: True)
    W = torch.zeros(2**18)

    def fits(k: int, group: Group, dim: int, W: Tensor = W) -> bool:
        return kernels.fits_groups(W, k, Grouping.of(W.shape, group, dim))

    assert fits(256, Group(None, 2**16), 16)
    assert not fits(257, Group(None, 2**16), 16)
    assert not fits(256, Group(None, 2**16 + 1), 16)
    assert not fits(256, Group(None, 2**16), 17)
    assert not fits(2, Group(None, 64), 1, W.double())


def test_every_quotient_is_exact():
    """The kernels multiply by the reciprocal of a tile's columns instead of dividing."""
    element = torch.arange(2**16)
    for columns in [*range(1, 300), 4095, 4096, 4097, 2**15 - 1, 2**16 - 1, 2**16]:
        assert torch.equal((element * (2**32 // columns + 1)) >> 32, element // columns)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_in_a_cuda_graph():
    """The host reads nothing."""
    grouping = Grouping.of((64, 256), Group(8, 64), 1)
    W, C, tau, G = (X.float() for X in draw((64, 256), grouping, 8))
    W, G = W.flatten(), G.flatten()
    options = ClusterOptions(eps=1e-4, max_iter=5)

    def step() -> Tensor:
        W_tilde, trace = kernels.forward_groups(W, C, tau, grouping, options)
        return W_tilde + kernels.backward_groups(G, W, tau, trace, grouping, options).dW

    wanted = step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    captured.zero_()
    graph.replay()
    assert torch.equal(captured, wanted)


@pytest.mark.parametrize(
    "grouping", [Grouping(3, 10, 5, 4, 3), Grouping(1, 5, 1, 24, 2), Grouping(2, 9, 4, 9, 1)], ids=str
)
def test_less_than_one_tile(grouping):
    """What a shard may be left with; one process would have made the tile smaller."""
    assert_close_to_float64(draw((grouping.rows, grouping.columns), grouping, 4), grouping)
