"""From a size to a plan: it keeps to the budget to the bit, and costs the measured loss as little as possible.

Sizes are as the paper counts where the tests are about the choice, because their networks are as small as a file's
header; those of files have tests of their own at the end.
"""

import copy
import itertools
from dataclasses import replace
from unittest import mock

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import dkm
from dkm.clustering.groups import Group
from dkm.clustering.spec import Spec
from dkm.modelling.parameters import parameters
from dkm.plans.bench import Bench
from dkm.plans.candidates import SAMPLE, Original, closest
from dkm.plans.language import parse_spec
from dkm.plans.selection import survey
from dkm.plans.target_size import allocate


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 32),
        nn.ReLU(),
        nn.Linear(32, 10),
    )


def train(model: nn.Module, data: tuple[Tensor, Tensor], epochs: int, lr: float) -> None:
    x, y = data
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.Adam(model.parameters(), lr)
    model.train()
    for _ in range(epochs):
        for batch in torch.randperm(len(x), generator=generator).split(64):
            optimizer.zero_grad()
            F.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()


@pytest.fixture(scope="module")
def digits() -> tuple[Tensor, Tensor]:
    data = load_digits()
    return torch.tensor(data.images, dtype=torch.float32)[:, None] / 16, torch.tensor(data.target)


@pytest.fixture(scope="module")
def trained(digits: tuple[Tensor, Tensor]) -> nn.Sequential:
    torch.manual_seed(0)
    model = network()
    train(model, digits, 4, 3e-3)
    return model.eval()


@pytest.fixture(scope="module")
def loss(trained: nn.Sequential, digits: tuple[Tensor, Tensor]):
    return dkm.divergence(trained, digits[0][:512].split(256))


def snapped_loss(trained: nn.Module, plan: dkm.Plan, loss, **training) -> float:
    model = copy.deepcopy(trained)
    dkm.compress_(model, plan, steps=100)
    if training:
        train(model, **training)
    return float(loss(model.eval()))


def uniform(model: nn.Module, size: int) -> list[dkm.Plan]:
    """The plans that give all tensors the same bits and dim, as far as they are no larger than this."""
    plans = [dkm.plan(model, f"*:{bits}/{dim}") for bits, dim in FEW]
    return [plan for plan in plans if plan.bytes <= size]


SIZES_OF_DIGITS = [3_300, 5_000, 8_000]


def paper(size: int) -> str:
    return f"{size} paper"


def without_derivatives(loss):
    return lambda model: loss(model)


FEW = [(1, 1), (2, 1), (3, 1), (4, 2), (5, 2), (4, 4), (6, 4), (4, 8)]  # as the k-means of all takes a second


@pytest.fixture(scope="module")
def plans(trained: nn.Sequential, loss) -> dict[int, dkm.Plan]:
    """By derivatives."""
    return {size: dkm.plan(trained, size=paper(size), loss=loss, candidates=FEW) for size in SIZES_OF_DIGITS}


@pytest.fixture(scope="module")
def measured_plans(trained: nn.Sequential, loss) -> dict[int, dkm.Plan]:
    """By measuring each tensor."""
    measure = without_derivatives(loss)
    return {size: dkm.plan(trained, size=paper(size), loss=measure, candidates=FEW) for size in SIZES_OF_DIGITS}


@pytest.mark.parametrize("size", SIZES_OF_DIGITS)
def test_it_is_within_the_budget(plans, trained, size: int):
    model = copy.deepcopy(trained)
    dkm.compress_(model, plans[size], steps=1)
    assert dkm.size(model).bytes == plans[size].bytes <= size


@pytest.mark.parametrize("size", SIZES_OF_DIGITS)
def test_it_uses_the_budget(trained, loss, size: int):
    """No tensor could have a bit more: of single weights each bit takes most of the error away, so it would be had."""
    bits = range(1, 7)
    plan = dkm.plan(trained, size=paper(size), loss=loss, candidates=[(b, 1) for b in bits])
    finer = [f"{plan.text}, {row.name}:{row.bits + 1}/1" for row in plan.rows if row.bits and row.bits < bits[-1]]
    assert finer
    assert all(dkm.plan(trained, text).bytes > size for text in finer)


@pytest.mark.parametrize("size", SIZES_OF_DIGITS)
def test_it_beats_every_uniform_plan(plans, measured_plans, trained, loss, size: int):
    best = min(snapped_loss(trained, plan, loss) for plan in uniform(trained, size))
    assert snapped_loss(trained, plans[size], loss) < 0.8 * best
    assert snapped_loss(trained, measured_plans[size], loss) < 0.8 * best


def test_it_beats_the_best_uniform_plan_after_training_too(plans, trained, loss, digits):
    def after(plan: dkm.Plan) -> float:
        return snapped_loss(trained, plan, loss, data=half, epochs=2, lr=1e-3)

    size, half = SIZES_OF_DIGITS[0], tuple(tensor[:900] for tensor in digits)
    best = sorted(uniform(trained, size), key=lambda plan: snapped_loss(trained, plan, loss))[:2]
    assert after(plans[size]) < min(map(after, best))


def test_more_bytes_cost_less(plans, trained, loss):
    losses = [snapped_loss(trained, plans[size], loss) for size in SIZES_OF_DIGITS]
    assert losses == sorted(losses, reverse=True)


def test_measuring_the_whole_makes_it_no_worse(plans, trained, loss):
    apart = dkm.plan(trained, size=paper(SIZES_OF_DIGITS[0]), loss=loss, rounds=0, candidates=FEW)
    limit = snapped_loss(trained, apart, loss) * (1 + 1e-4)  # where both are one plan, rounding decides
    assert snapped_loss(trained, plans[SIZES_OF_DIGITS[0]], loss) <= limit


def test_it_is_deterministic(plans, trained, loss):
    assert dkm.plan(trained, size=paper(SIZES_OF_DIGITS[1]), loss=loss, candidates=FEW) == plans[SIZES_OF_DIGITS[1]]


def test_the_text_gives_the_plan_back(plans, trained):
    plan = plans[SIZES_OF_DIGITS[0]]
    again = dkm.plan(trained, plan.text)
    assert [(row.bits, row.dim) for row in again.rows] == [(row.bits, row.dim) for row in plan.rows]


def test_the_rows_say_why(plans):
    row = plans[SIZES_OF_DIGITS[0]]["8.weight"]
    assert row.reason.startswith("cost 0.")
    assert " would cost 0." in row.reason
    assert row.reason.endswith((" kB", " B"))


def test_entries_of_the_text_stay(trained, loss):
    plan = dkm.plan(trained, "first:keep, last:8/1", size=paper(8_000), loss=loss, candidates=FEW)
    assert plan["0.weight"].bits is None
    assert (plan["10.weight"].bits, plan["10.weight"].dim) == (8, 1)
    assert plan["10.weight"].reason == "last"
    assert plan.bytes <= 8_000


def test_the_others_are_measured_next_to_what_the_text_clusters(trained, loss):
    seen = []

    def watched(model: nn.Module) -> Tensor:
        seen.append([len(layer.weight.unique()) for layer in (model[8], model[10])])
        return loss(model)

    dkm.plan(trained, "last:2/1", size=paper(5_000), loss=watched, candidates=FEW)
    assert seen[-1][0] < 1_000  # the whole: not one tensor alone
    assert seen[-1][1] == 4


def test_candidates_are_what_it_chooses_from(trained, loss):
    plan = dkm.plan(trained, size=paper(7_000), loss=loss, candidates=[(1, 1), (3, 1)])
    assert {(row.bits, row.dim) for row in plan.rows if row.bits} <= {(1, 1), (3, 1)}


def test_the_model_is_as_before(trained, loss):
    model = copy.deepcopy(trained).train()
    model[3].eval()
    before, modes = copy.deepcopy(model.state_dict()), [m.training for m in model.modules()]
    dkm.plan(model, size=paper(5_000), loss=loss, candidates=FEW)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert [m.training for m in model.modules()] == modes


@pytest.mark.parametrize("calls", [0, 1, 5])
def test_the_model_is_as_before_where_the_loss_fails(trained, calls: int):
    model = copy.deepcopy(trained)
    counted = itertools.count(1)

    def fails(model: nn.Module) -> float:
        if next(counted) > calls:
            raise MemoryError("too large")
        return 1.0

    with pytest.raises(MemoryError):
        dkm.plan(model.train(), size=paper(5_000), loss=fails, candidates=FEW)
    assert all(torch.equal(tensor, trained.state_dict()[name]) for name, tensor in model.state_dict().items())
    assert all(m.training for m in model.modules())


def test_ties_are_measured_and_chosen_once():
    model = nn.ModuleDict(
        {"emb": nn.Embedding(50, 16), "out": nn.Linear(16, 50, bias=False), "more": nn.Linear(16, 16)}
    )
    model["out"].weight = model["emb"].weight
    tokens = torch.arange(50)
    plan = dkm.plan(
        model,
        size="700 paper",
        loss=dkm.divergence(model, [tokens], forward=lambda m, x: m["out"](torch.tanh(m["more"](m["emb"](x))))),
    )
    assert plan.bytes <= 700
    assert plan["emb.weight"] is plan["out.weight"]
    assert plan["emb.weight"].bits is not None


def test_a_loss_that_is_not_finite_counts_as_worst(trained, loss):
    def cold(model: nn.Module) -> float:
        """NaN where the first layer has fewer than 8 different values."""
        return float("nan") if len(model[0].weight.unique()) < 8 else loss(model)

    plan = dkm.plan(trained, size=paper(5_000), loss=cold, candidates=FEW)
    row = plan["0.weight"]
    assert row.bits is None or row.bits >= 3


def test_too_small_says_what_the_smallest_is(trained, loss):
    with pytest.raises(
        dkm.PlanError, match=r"size '1kB paper' is too small: .* takes ([\d,]+) bytes as the paper"
    ) as e:
        dkm.plan(trained, size="1kB paper", loss=loss, candidates=FEW)
    least = int(str(e.value).split(" takes ")[1].split()[0].replace(",", ""))
    assert dkm.plan(trained, size=paper(least), loss=loss, rounds=0, candidates=FEW).bytes == least
    with pytest.raises(dkm.PlanError, match="too small"):
        dkm.plan(trained, size=paper(least - 1), loss=loss, candidates=FEW)


def test_more_than_is_needed(trained, loss):
    kept = dkm.plan(trained, "all:keep").bytes
    with pytest.raises(dkm.PlanError, match=f"more than is needed: .* takes {kept:,} bytes"):
        dkm.plan(trained, size=paper(kept), loss=loss)
    assert dkm.plan(trained, size=paper(kept - 1), loss=loss, candidates=FEW).bytes < kept


def test_nothing_left_to_choose(trained, loss):
    with pytest.raises(dkm.PlanError, match="'all:4' says what becomes of every tensor"):
        dkm.plan(trained, "all:4", size="40kB", loss=loss)


@pytest.mark.parametrize("loss", [None, 3.0])
def test_a_size_needs_a_loss(trained, loss):
    with pytest.raises(TypeError, match=r"a size needs loss=, a function model -> number .* dkm.divergence"):
        dkm.plan(trained, size="8kB", loss=loss)


def test_a_loss_is_a_number(trained):
    with pytest.raises(TypeError, match=r"loss\(model\) must return a number"):
        dkm.plan(trained, size="8kB", loss=lambda model: None)


def test_a_loss_that_is_nan_from_the_start(trained):
    with pytest.raises(ValueError, match="loss of the uncompressed model is nan"):
        dkm.plan(trained, size="8kB", loss=lambda model: float("nan"))


@pytest.mark.parametrize("options", [dict(loss=len), dict(text="all:4", loss=len), dict(text="all:4", rounds=2)])
def test_what_belongs_to_a_size_needs_one(trained, options: dict):
    with pytest.raises(TypeError, match=f"{list(options)[-1]} would choose a plan for a size: give size= too"):
        dkm.plan(trained, **options)


SPECS = ["1 scaled", "2 scaled", (2, 1), Spec(3), "2 per 8 rows", "2 per 8x64 e4m3", "3 scaled per 1024", "4/4"]


def test_candidates_with_scales_and_groups(trained, loss):
    plan = dkm.plan(trained, size=paper(5_000), loss=loss, candidates=SPECS)
    assert 0.8 * 5_000 < plan.bytes <= 5_000
    wanted = {spec if isinstance(spec, Spec) else parse_spec("{}/{}".format(*spec), "") for spec in SPECS[2:4]}
    wanted |= {parse_spec(spec, "a test") for spec in SPECS if isinstance(spec, str)}
    assert {row.spec for row in plan.clustered} <= wanted
    assert dkm.plan(trained, plan.text).bytes == plan.bytes


def test_scales_are_chosen_where_rows_differ_in_size():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.ReLU(), nn.Linear(64, 64, bias=False))
    with torch.no_grad():
        model[0].weight *= torch.logspace(-2, 0, 64)[:, None]
    loss = dkm.divergence(model, [torch.randn(256, 64)])
    plain, scaled = (
        dkm.plan(model, size=paper(3_000), loss=loss, candidates=[(b, 1) for b in (1, 2, 3)] + more)
        for more in ([], [f"{b} scaled" for b in (1, 2, 3)])
    )
    assert scaled["0.weight"].spec.scaled
    assert max(plain.bytes, scaled.bytes) <= 3_000


@pytest.mark.parametrize("spec", ["2 skaled", "scaled", "2 per"])
def test_a_candidate_that_is_no_spec(trained, loss, spec: str):
    with pytest.raises(dkm.PlanError, match=f"'{spec}' in candidates"):
        dkm.plan(trained, size=8_000, loss=loss, candidates=[spec])


@pytest.mark.parametrize("candidate", [4, (4,), (4, 1, 1), None])
def test_a_candidate_of_another_type(trained, loss, candidate):
    with pytest.raises(TypeError, match="a candidate is a pair of bits and dim, a text such as '2 scaled', or a Spec"):
        dkm.plan(trained, size=8_000, loss=loss, candidates=[candidate])


@pytest.mark.parametrize("candidates", [[(0, 1)], [(13, 1)], [(4, 0)]])
def test_bad_candidates(trained, loss, candidates):
    with pytest.raises(ValueError, match="must be an integer"):
        allocate(trained, 8_000, loss, candidates=candidates)


def test_a_weight_that_cannot_be_clustered(trained, loss):
    model = copy.deepcopy(trained)
    with torch.no_grad():
        model[3].weight[0] = float("nan")
    with pytest.raises(ValueError, match=r"3\.weight holds NaN"):
        dkm.plan(model, size=8_000, loss=loss)


# --- derivatives ---------------------------------------------------------------------------------


def test_derivatives_say_what_a_fine_candidate_costs(trained, loss, digits):
    """Where the error is small, the second order is all there is; four random passes know it to a factor of two."""
    seen = {}

    class Watched(Bench):
        def expected_costs(self, choices, at):
            costs = super().expected_costs(choices, at)
            if not any(at):
                base = self.loss(self.uncompressed)
                for i, options in enumerate(choices):
                    j = next(j for j, candidate in enumerate(options) if candidate.row.label == "5/1")
                    seen[options[j].row.name] = costs[i][j], self.cost(i, options[j], at, base)
            return costs

    with mock.patch("dkm.plans.target_size.Bench", Watched):
        dkm.plan(trained, size=paper(10_000), loss=loss, candidates=[(3, 1), (5, 1)])
    assert len(seen) == 4
    for expected, measured in seen.values():
        assert 0.5 < expected / measured < 2


def test_derivatives_need_few_evaluations(trained, loss):
    """As many for a hundred tensors as for four."""
    calls = []

    class Counted:
        passes = loss.passes

        def __call__(self, model: nn.Module) -> Tensor:
            calls.append("loss")
            return loss(model)

        def probes(self, model: nn.Module):
            for number in loss.probes(model):
                calls.append("probe")
                yield number

    dkm.plan(trained, size=paper(5_000), loss=Counted(), candidates=FEW)
    assert calls.count("loss") <= 4
    assert calls.count("probe") <= 3 * loss.passes


@pytest.mark.parametrize("stop_at", [1, 2, 4])
def test_the_model_is_as_before_where_a_derivative_is_interrupted(trained, loss, stop_at: int):
    model, counted = copy.deepcopy(trained), itertools.count(1)
    model[3].weight.requires_grad_(False)
    model[8].weight.grad = torch.ones_like(model[8].weight)

    class Interrupted:
        passes, __call__ = loss.passes, staticmethod(loss)

        def probes(self, model: nn.Module):
            for number in loss.probes(model):
                if next(counted) == stop_at:
                    raise KeyboardInterrupt
                yield number

    with pytest.raises(KeyboardInterrupt):
        dkm.plan(model.train(), size=paper(5_000), loss=Interrupted(), candidates=FEW)
    assert all(torch.equal(tensor, trained.state_dict()[name]) for name, tensor in model.state_dict().items())
    assert all(m.training for m in model.modules())
    assert not model[3].weight.requires_grad
    assert model[8].weight.grad.eq(1).all()
    assert not model[8].weight._backward_hooks


def test_a_sample_stands_for_a_large_tensor():
    torch.manual_seed(0)
    weight = torch.randn(700, 300)
    tested = Original.of(weight, 0)
    assert SAMPLE <= tested.sampled(weight).numel() < 1.1 * SAMPLE
    row = survey(parameters(nn.Linear(300, 700)))[0]
    for spec in (Spec(3), Spec(4, 4), Spec(2, scaled=True), Spec(3, group=Group(4))):
        estimated = closest([replace(row, spec=spec)], tested)[0].error
        whole = closest([replace(row, spec=spec)], Original(weight, 0))[0].error
        assert estimated == pytest.approx(whole, rel=0.05)


# --- progress and memory -------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["derivatives", "measuring"])
def test_progress(trained, loss, form: str):
    seen = []
    measure = loss if form == "derivatives" else without_derivatives(loss)
    dkm.plan(
        trained,
        size=paper(5_000),
        loss=measure,
        candidates=FEW,
        progress=lambda p: seen.append((sum(p.done.values()), sum(p.total.values()), p.last)),
    )
    done, total, last = zip(*seen, strict=True)
    assert list(done) == list(range(1, len(done) + 1))
    assert all(a <= b for a, b in zip(done, total, strict=True))
    # "" for the whole choice, where it is one that was measured before
    assert {"losses", "k-means"} <= set(last) <= {"losses", "k-means", "gradients", ""}
    assert ("gradients" in last) == (form == "derivatives")


@pytest.mark.parametrize("form", ["derivatives", "measuring"])
def test_what_was_measured_is_not_measured_again(trained, loss, form: str):
    calls, measured = [], {}

    class Counted:
        def __call__(self, model: nn.Module) -> Tensor:
            calls.append("loss")
            return loss(model)

    class CountedTwice(Counted):
        passes = loss.passes

        def probes(self, model: nn.Module):
            calls.append("probes")
            return loss.probes(model)

    measure = CountedTwice() if form == "derivatives" else Counted()
    plan = dkm.plan(trained, size=paper(5_000), loss=measure, candidates=FEW, measured=measured)
    first = len(calls)
    assert len(measured) == first
    assert dkm.plan(trained, size=paper(5_000), loss=measure, candidates=FEW, measured=measured) == plan
    assert len(calls) == first
    half = dict(list(measured.items())[: first // 2])
    assert dkm.plan(trained, size=paper(5_000), loss=measure, candidates=FEW, measured=half) == plan
    assert len(calls) == first + first - first // 2
    assert half == measured


# --- the size of the file ------------------------------------------------------------------------


@pytest.mark.parametrize("size", [5_400, 6_001, 9_999])
@pytest.mark.parametrize("form", ["derivatives", "measuring"])
def test_the_file_is_no_larger(trained, loss, tmp_path, size: int, form: str):
    measure = loss if form == "derivatives" else without_derivatives(loss)
    plan = dkm.plan(trained, size=size, loss=measure, candidates=FEW)
    model = copy.deepcopy(trained)
    dkm.compress_(model, plan, steps=1)
    written = dkm.save(model, tmp_path / "model.dkm")
    assert written == plan.file_bytes <= size
    assert written > 0.95 * size
    assert f"the file takes {written:,} bytes" in plan.summary()


def test_the_smallest_file(trained, loss, tmp_path):
    with pytest.raises(dkm.PlanError, match=r"takes ([\d,]+) bytes in the file") as error:
        dkm.plan(trained, size=100, loss=loss, candidates=FEW)
    least = int(str(error.value).split(" takes ")[1].split()[0].replace(",", ""))
    plan = dkm.plan(trained, size=least, loss=loss, candidates=FEW)
    assert plan.file_bytes == least
    with pytest.raises(dkm.PlanError, match="too small"):
        dkm.plan(trained, size=least - 1, loss=loss, candidates=FEW)


def test_the_paper_counts_less(trained, loss):
    plan = dkm.plan(trained, size="6kB paper", loss=loss, candidates=FEW)
    assert plan.file_bytes is None
    assert dkm.plan(trained, size="6kB", loss=loss, candidates=FEW).bytes < plan.bytes <= 6_000
