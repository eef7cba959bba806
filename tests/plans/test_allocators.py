"""HAWQ and HAQ: two other ways to choose a plan for a size, within the same budget."""

import copy
import itertools
import random
import statistics
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import dkm
from dkm.plans import haq, target_size
from dkm.plans.bench import Bench
from dkm.plans.ddpg import Agent
from dkm.plans.haq import cut_back, geometry
from dkm.plans.rows import Row

FEW = [(1, 1), (2, 1), (3, 1), (4, 2), (4, 4)]
EFFORT = {"hawq": dict(vectors=4), "haq": dict(episodes=12)}
ALLOCATORS = list(EFFORT)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.attention = nn.Embedding(40, 16), nn.MultiheadAttention(16, 2, batch_first=True)
        self.out = nn.Linear(16, 40)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.emb(tokens)
        return self.out(self.attention(x, x, x, need_weights=False)[0])


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 48), nn.Tanh(), nn.Linear(48, 32), nn.Tanh(), nn.Linear(32, 4))


def convolutional() -> nn.Module:
    layers = nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.AdaptiveAvgPool2d(2)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64, 10))


def tied() -> nn.Module:
    model = Attention()
    model.out.weight = model.emb.weight
    return model


INPUTS = {
    perceptron: lambda: torch.randn(32, 16),
    convolutional: lambda: torch.randn(16, 1, 8, 8),
    Attention: lambda: torch.randint(40, (8, 6)),
    tied: lambda: torch.randint(40, (8, 6)),
}


def prepared(make=perceptron, batches: int = 1):
    torch.manual_seed(0)
    model = make().eval()
    return model, dkm.divergence(model, [INPUTS[make]() for _ in range(batches)])


def plan(model, loss, allocator: str, size: str = "1000 paper", **options) -> dkm.Plan:
    return dkm.plan(
        model, size=size, loss=loss, allocator=allocator, candidates=FEW, **EFFORT.get(allocator, {}) | options
    )


# --- both ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", INPUTS)
@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_the_plan_is_within_the_budget(make, allocator: str):
    """Of the file as it is written."""
    model, loss = prepared(make)
    with pytest.raises(dkm.PlanError, match=r"too small: .* takes") as error:
        plan(model, loss, allocator, size="1B")
    least = int(str(error.value).split(" takes ")[1].split()[0].replace(",", ""))
    for size in (least, least + 150, least + 700):
        chosen = plan(model, loss, allocator, size=size)
        compressed = copy.deepcopy(model)
        dkm.compress_(compressed, chosen, steps=1)
        assert dkm.size(compressed).file_bytes == chosen.file_bytes <= size


@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_it_is_deterministic_for_a_seed(allocator: str):
    model, loss = prepared()
    assert plan(model, loss, allocator) == plan(model, loss, allocator)
    assert dkm.plan(model, plan(model, loss, allocator).text).bytes <= 1000


@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_entries_of_the_text_stay(allocator: str):
    model, loss = prepared()
    chosen = dkm.plan(
        model, "first:3", size="900 paper", loss=loss, allocator=allocator, candidates=FEW, **EFFORT[allocator]
    )
    assert (chosen["0.weight"].label, chosen["0.weight"].reason) == ("3/1", "first")
    assert chosen.bytes <= 900


@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_what_was_measured_is_not_measured_again(allocator: str):
    model, loss = prepared()
    calls, measured = [], {}

    def counted(model: nn.Module) -> Tensor:
        calls.append(model)
        return loss.terms(model)[0]()

    first = plan(model, counted, allocator, measured=measured)
    count = len(calls)
    assert plan(model, counted, allocator, measured=measured) == first
    assert len(calls) == count > 1
    half = dict(list(measured.items())[: len(measured) // 2])
    assert plan(model, counted, allocator, measured=half) == first


@pytest.mark.parametrize("allocator", ALLOCATORS)
@pytest.mark.parametrize("batches", [1, 3])
def test_progress(allocator: str, batches: int):
    model, loss = prepared(batches=batches)
    seen = []
    plan(model, loss, allocator, progress=lambda p: seen.append((p.last, sum(p.done.values()), sum(p.total.values()))))
    last, done, total = zip(*seen, strict=True)
    assert list(done) == list(range(1, len(seen) + 1))
    assert all(a <= b for a, b in zip(done, total, strict=True))
    assert done[-1] == total[-1]
    work = {"hawq": ("gradients", 6 if batches == 3 else 4), "haq": ("losses", 1)}
    assert last.count(work[allocator][0]) >= work[allocator][1]


@pytest.mark.parametrize("allocator", ALLOCATORS)
@pytest.mark.parametrize("stop_at", [1, 3, 6])
def test_the_model_is_as_before_where_it_is_interrupted(allocator: str, stop_at: int):
    model, loss = prepared()
    model.train()
    model[2].weight.requires_grad_(False)
    model[0].weight.grad = torch.ones_like(model[0].weight)
    before, counted = copy.deepcopy(model.state_dict()), itertools.count(1)

    def stop(progress) -> None:
        if next(counted) == stop_at:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        plan(model, loss, allocator, progress=stop)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(module.training for module in model.modules())
    assert not model[2].weight.requires_grad
    assert model[0].weight.grad.eq(1).all()


WRONG = {
    "a name that is close": (dict(allocator="hawk"), "allocator must be one of dkm, hawq, haq, got 'hawk'; did you"),
    "another name": (dict(allocator=None), "allocator must be one of dkm, hawq, haq, got None"),
    "an option of another": (dict(allocator="hawq", rounds=1), 'rounds is of allocator="dkm", and this is "hawq": '),
    "of the default": (dict(episodes=3), 'episodes is of allocator="haq", and this is "dkm": leave it out'),
    "no episode": (dict(allocator="haq", episodes=0), "episodes must be an integer of at least 1, got 0"),
    "half a vector": (dict(allocator="hawq", vectors=0.5), "vectors must be an integer of at least 1, got 0.5"),
    "fewer than no rounds": (dict(rounds=-1), "rounds must be an integer of at least 0, got -1"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_said(case: str):
    options, sentence = WRONG[case]
    model, loss = prepared()
    with pytest.raises(dkm.PlanError) as error:
        dkm.plan(model, size="1kB", loss=loss, **options)
    assert str(error.value).startswith(sentence)


@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_a_loss_is_needed(allocator: str):
    with pytest.raises(TypeError, match=r"a size needs loss=, a function model -> number"):
        plan(perceptron(), None, allocator)


# --- HAWQ ----------------------------------------------------------------------------------------


def test_hawq_chooses_what_brute_force_over_its_objective_chooses():
    """Sum of Tr H_i / n_i |Q(W_i) - W_i|^2, over every plan of these candidates within the budget."""
    model, loss = prepared()
    seen = {}

    class Watched(Bench):
        def traces(self, vectors: int, seed: int) -> list[float]:
            seen["traces"] = super().traces(vectors, seed)
            return seen["traces"]

    with mock.patch("dkm.plans.target_size.Bench", Watched):
        chosen = plan(model, loss, "hawq")
    names = ["0.weight", "2.weight", "4.weight"]

    def cost(name: str, trace: float, label: str) -> float:
        weight = model.get_parameter(name)
        snapped = copy.deepcopy(model)
        if label != "keep":
            dkm.compress_(snapped, f"{name}:{label}", steps=1)
            dkm.snap_(snapped)
        squares = (snapped.get_parameter(name).detach().double() - weight.detach().double()).square().sum()
        return max(0.0, trace) / weight.numel() * float(squares)

    labels = [f"{bits}/{dim}" for bits, dim in FEW] + ["keep"]
    fits = {name: [x for x in labels if x == "keep" or enough(model.get_parameter(name), x)] for name in names}
    costs = {(n, x): cost(n, trace, x) for n, trace in zip(names, seen["traces"], strict=True) for x in fits[n]}
    every = {}
    for combination in itertools.product(*fits.values()):
        text = ", ".join(f"{name}:{label}" for name, label in zip(names, combination, strict=True))
        if dkm.plan(model, text).bytes <= 1000:
            every[combination] = sum(costs[pair] for pair in zip(names, combination, strict=True))
    assert len(every) > 20
    found = tuple(chosen[name].label for name in names)
    assert every[found] == pytest.approx(min(every.values()), rel=1e-4)


def enough(weight: Tensor, label: str) -> bool:
    bits, dim = map(int, label.split("/"))
    return weight.numel() >= 4 * dim * 2**bits


def test_more_curvature_gets_more_bits():
    """Two equal tensors; the loss curves 100 times more along the first, then along the second."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"a": nn.Linear(32, 32, bias=False), "b": nn.Linear(32, 32, bias=False)})
    with torch.no_grad():
        model["b"].weight.copy_(model["a"].weight)
    start = model["a"].weight.detach().clone()
    for strong, weak in (("a", "b"), ("b", "a")):

        def loss(model: nn.Module, strong: str = strong) -> Tensor:
            distances = {name: (layer.weight - start).square().sum() for name, layer in model.items()}
            return sum((100 if name == strong else 1) * distance for name, distance in distances.items())

        chosen = plan(model, loss, "hawq", size="600 paper", vectors=1)
        assert chosen[f"{strong}.weight"].bits > chosen[f"{weak}.weight"].bits


def test_the_traces_are_those_of_the_loss():
    """200 w'w has the second derivative 400 by each weight, whatever the vectors; a linear term has none."""
    model = nn.ModuleDict({"a": nn.Linear(8, 8, bias=False), "b": nn.Linear(8, 4, bias=False)})
    model["b"].weight.requires_grad_(False)

    def term(times: float) -> Tensor:
        return times * model["a"].weight.square().sum() + model["b"].weight.sum()

    class InTwoTerms:
        """Their mean is the loss."""

        def __call__(self, model: nn.Module) -> Tensor:
            return (term(100) + term(300)) / 2

        def terms(self, model: nn.Module):
            return [lambda: term(100), lambda: term(300)]

    for loss in (lambda model: term(200), InTwoTerms()):
        measured = {}
        plan(model, loss, "hawq", size="150 paper", measured=measured)
        (traces,) = [values for values in measured.values() if len(values) == 2]
        assert traces == pytest.approx([400 * 64, 0.0])


def test_frozen_weights_and_other_losses_of_the_user():
    model, _ = prepared()
    model.requires_grad_(False)
    x, y = torch.randn(32, 16), torch.randint(4, (32,))
    assert plan(model, lambda model: F.cross_entropy(model(x), y), "hawq").bytes <= 1000
    assert not any(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("value", [lambda y: 1.0, lambda y: y.detach().sum(), lambda y: y, lambda y: y.sum().item()])
def test_a_loss_without_its_gradient(value):
    model, _ = prepared()
    x = torch.randn(2, 16)

    def loss(model: nn.Module):
        return value(model(x)) if torch.is_grad_enabled() else 1.0

    with pytest.raises(dkm.PlanError, match="hawq differentiates the loss twice: return it as a tensor with its grad"):
        plan(model, loss, "hawq")


def test_a_second_derivative_that_is_not_finite():
    """That of |x|^1.5 at 0."""
    model, _ = prepared()
    start = model[0].weight.detach().clone()
    with pytest.raises(dkm.PlanError, match="the second derivative of the loss is not finite: choose with another"):
        plan(model, lambda model: (model[0].weight - start).abs().pow(1.5).sum(), "hawq")


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0] * gradient


def test_an_operation_without_a_second_derivative():
    model, _ = prepared()
    x = torch.randn(8, 16)
    with pytest.raises(dkm.PlanError) as error:
        plan(model, lambda model: Once.apply(model(x)).square().sum(), "hawq")
    assert "can be differentiated once only (a function that is marked with @once_differentiable)" in str(error.value)
    assert "or choose with another allocator" in str(error.value)


# --- HAQ -----------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_what_is_cut_back_fits_and_was_cut_from_the_end(data):
    counts = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=6))
    steps = [data.draw(st.lists(st.integers(1, 9), min_size=count, max_size=count)) for count in counts]
    sizes = [list(itertools.accumulate(own)) for own in steps]  # the candidates of each tensor grow
    picked = [data.draw(st.integers(0, count - 1)) for count in counts]
    least = sum(own[0] for own in sizes)
    budget = data.draw(st.integers(least, sum(own[-1] for own in sizes)))

    def size(choice: list[int]) -> int:
        return sum(own[at] for own, at in zip(sizes, choice, strict=True))

    cut = cut_back(picked, lambda choice: size(choice) <= budget)
    assert size(cut) <= budget
    assert all(0 <= after <= before for before, after in zip(picked, cut, strict=True))
    if size(picked) <= budget:
        assert cut == picked
        return
    # Tensors are lowered in turn, so none that still could is more than one step behind those after it.
    lowered = [before - after for before, after in zip(picked, cut, strict=True)]
    for i, j in itertools.combinations(range(len(cut)), 2):
        if cut[i]:
            assert lowered[i] <= lowered[j] or not cut[j]
        if cut[j]:
            assert lowered[j] <= lowered[i] + 1 or not cut[i]
    turns = max(lowered)  # the last cut was needed: it was that of the first tensor lowered in the last turn
    last = next(i for i, count in enumerate(lowered) if count == turns)
    assert size([at + (i == last) for i, at in enumerate(cut)]) > budget


class Chance:
    """In the place of the agent: it learns nothing."""

    def __init__(self, features: Tensor, episodes: int, seed: int):
        self.draw, self.layers = random.Random(seed), len(features)

    def propose(self) -> list[float]:
        return [self.draw.random() for _ in range(self.layers)]

    def learn(self, actions: list[float], reward: float) -> None:
        pass


def tried_by(agent: type, model: nn.Module, **options) -> tuple[dkm.Plan, list[float]]:
    """The plan that haq finds with this agent, and the loss of each that it tried."""
    seen: list[float] = []

    class Watched(Bench):
        def loss(self, wanted) -> float:
            seen.append(super().loss(wanted))
            return seen[-1]

    with mock.patch("dkm.plans.target_size.Bench", Watched), mock.patch("dkm.plans.haq.Agent", agent):
        found = dkm.plan(model, allocator="haq", episodes=100, **options)
    return found, seen[1:]  # the first is that of the uncompressed model


def test_haq_learns_and_finds_nearly_the_best_plan_where_the_best_is_known():
    """Small tensors matter 100 times more, and the loss is a sum over the tensors, for which the knapsack is exact."""
    torch.manual_seed(0)
    model = nn.ModuleDict({f"layer{i}": nn.Linear(*((16, 16), (48, 16))[i % 2], bias=False) for i in range(6)})
    start = copy.deepcopy(model.state_dict())

    def loss(model: nn.Module) -> Tensor:
        squares = {name: (weight - start[name]).square().sum() for name, weight in model.named_parameters()}
        return sum((100 if start[name].numel() == 256 else 1) * square for name, square in squares.items())

    options = dict(size="1300 paper", loss=loss, candidates=[(bits, 1) for bits in range(1, 7)])
    best = dkm.plan(model, allocator="hawq", vectors=1, **options)  # exact: the Hessian is diagonal and constant
    snapped = copy.deepcopy(model)
    dkm.compress_(snapped, best, steps=1)
    least = float(loss(dkm.snap_(snapped)).detach())
    found, losses = tried_by(Agent, model, **options)
    assert len(losses) == 100
    assert found["layer0.weight"].reason == f"haq: best of 100 tried, cost {min(losses):.2g}"
    by_chance = statistics.mean(tried_by(Chance, model, **options)[1])
    assert by_chance > 40 * least  # else there would be nothing to learn
    assert statistics.mean(losses[-20:]) < by_chance / 5  # 1/30 with each of six seeds
    assert 0.999 * least <= min(losses) < 3 * least


def test_an_episode_costs_one_evaluation_and_snaps_nothing_twice():
    model, loss = prepared()
    calls, snapped = [], []

    def counted(model: nn.Module) -> Tensor:
        calls.append(1)
        return loss(model)

    with mock.patch("dkm.plans.candidates.Candidate.values", autospec=True, side_effect=values_noting(snapped)):
        plan(model, counted, "haq", episodes=25)
    assert len(calls) <= 1 + 25
    assert len(snapped) == len(set(snapped))


def values_noting(seen: list):
    from dkm.plans.candidates import Candidate

    values = Candidate.values

    def noted(candidate: Candidate) -> Tensor:
        seen.append(id(candidate))
        return values(candidate)

    return noted


def test_without_room_it_snaps_again_and_chooses_the_same(monkeypatch: pytest.MonkeyPatch):
    model, loss = prepared()
    before = plan(model, loss, "haq")
    monkeypatch.setattr(haq, "ROOM", 0)
    assert plan(model, loss, "haq") == before


def test_losses_that_are_not_finite_are_never_chosen():
    model, loss = prepared()

    def cold(model: nn.Module) -> float:
        return float("nan") if len(model[0].weight.unique()) < 4 else loss(model)

    row = plan(model, cold, "haq", episodes=30)["0.weight"]
    assert row.bits is None or row.bits >= 2


def test_what_is_not_finite_teaches_the_agent_that_it_is_bad():
    """Also where it comes before anything else, and all losses are far from 0."""
    model, loss = prepared()
    rewards, numbers = [], itertools.count()

    class Watched(haq.Agent):
        def learn(self, actions: list[float], reward: float) -> None:
            rewards.append(reward)
            super().learn(actions, reward)

    def sometimes(model: nn.Module) -> float:
        at = next(numbers)
        return float("inf") if at in (1, 2, 6) else 100 + float(loss(model))

    class Forgets(dict):
        """So that a plan that is tried again is measured again."""

        def get(self, *key):
            return None

    with mock.patch("dkm.plans.haq.Agent", Watched):
        plan(model, sometimes, "haq", episodes=10, measured=Forgets())
    assert all(-110 < reward <= -100 for reward in rewards)
    assert rewards[3] == min(rewards[:4])
    assert len(rewards) == 8


def test_no_plan_has_a_finite_loss():
    model, _ = prepared()
    numbers = itertools.count()
    with pytest.raises(dkm.PlanError, match="none of the 12 plans that haq tried has a finite loss"):
        plan(model, lambda model: 0.0 if not next(numbers) else float("inf"), "haq")


def test_a_single_plan_is_tried_once():
    """Nothing is closer to equal weights than one bit, and by the text there is one way for the others."""
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    nn.init.ones_(model[0].weight)
    seen = []
    chosen = dkm.plan(
        model,
        "last:2",
        size="2000 paper",
        loss=lambda model: 1.0,
        allocator="haq",
        candidates=[(1, 1)],
        progress=lambda p: seen.append((dict(p.done), dict(p.total))),
    )
    assert chosen["0.weight"].reason == "haq: best of 1 tried, cost 0"
    assert seen[-1][0] == {kind: count for kind, count in seen[-1][1].items() if count}


def test_the_state_is_the_geometry_of_the_layers():
    shapes = {"cv": (16, 8, 3, 3), "lin": (10, 64), "emb": (1000, 64)}
    features = geometry([Row(name, shape, name, None, "") for name, shape in shapes.items()])
    assert features.shape[0] == 3
    assert 0 <= features.min() <= features.max() <= 1
    assert len({tuple(row.tolist()) for row in features}) == 3
    same = geometry([Row(name, (4, 4), "lin", None, "") for name in ("a", "b")])
    assert torch.equal(same[0] != same[1], torch.tensor([False] * 4 + [True] + [False] * 4))  # the place alone


def test_the_names_are_those_of_the_documentation():
    assert list(target_size.ALLOCATORS) == ["dkm", "hawq", "haq"]
