"""One clock for all clustered weights of a model: those whose weight did not change anneal with the others."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import dkm
from dkm.modelling.clock import Clock
from dkm.modelling.clustered import Clustered


def network(layers: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(layers)))
    dkm.compress_(model, "all:4", steps=8)
    return model


def clusterings(model: nn.Module) -> list[Clustered]:
    return [module for module in model.modules() if isinstance(module, Clustered)]


def steps(model: nn.Module) -> list[int]:
    return [int(c.step) for c in clusterings(model)]


def forward(model: nn.Module) -> torch.Tensor:
    return model(torch.ones(1, 16)).square().sum()


@torch.no_grad()
def change(model: nn.Sequential, *layers: int) -> None:
    """An optimizer's step that only these layers notice."""
    for i in layers:
        model[i].parametrizations.weight.original.mul_(1.01)


class TestSteps:
    def test_all_count_the_same(self):
        model = network()
        for step in range(4):
            forward(model)
            assert steps(model) == [step] * 3
            change(model, 0, 1, 2)

    @pytest.mark.parametrize("lucky", [0, 1, 2])
    def test_a_weight_that_rounding_keeps_follows(self, lucky):
        """Those after the first one that has changed follow at once, those before it one step later."""
        model = network()
        for step in range(1, 6):
            forward(model)
            change(model, lucky)
            forward(model)
            assert steps(model) == [step - (i < lucky) for i in range(3)]

    def test_a_layer_that_is_rarely_used(self):
        model = network()
        for _ in range(5):
            change(model, 0, 2)
            model[2](model[0](torch.ones(1, 16)))
        assert steps(model) == [5, 0, 5]
        change(model, 0, 1, 2)
        forward(model)
        assert steps(model) == [6, 6, 6]

    def test_a_layer_that_was_frozen_for_a_while(self):
        model = network()
        weight = model[1].parametrizations.weight.original.requires_grad_(False)
        for _ in range(5):
            change(model, 0, 2)
            forward(model)
        assert steps(model) == [5, 0, 5]
        weight.requires_grad_(True)
        forward(model)
        assert steps(model) == [5, 5, 5]

    def test_temperature_and_centroids_follow(self):
        """As they would if the weight had changed."""
        model = network(2)
        forward(model)
        unlucky = clusterings(model)[1]
        before = float(unlucky.temperature(unlucky.step)), unlucky.C.clone()
        change(model, 0)
        forward(model)
        assert float(unlucky.temperature(unlucky.step)) < before[0]
        assert torch.equal(unlucky.start, before[1])

    def test_nothing_moves_without_a_step(self):
        model = network()
        change(model, 1)
        forward(model), forward(model)
        state = copy.deepcopy(model.state_dict())
        for _ in range(3):
            forward(model)
        assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())

    def test_pure_bfloat16(self):
        """Every tensor ends as cold as the schedule says, though many steps are too small for some of them."""
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4)).bfloat16()
        dkm.compress_(model, "0:2, 1:2, 2:2", steps=20)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        unchanged, x = 0, torch.randn(8, 16, dtype=torch.bfloat16)
        for _ in range(22):
            seen = [int(c.seen) for c in clusterings(model)]
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            unchanged += sum(a == int(c.seen) for a, c in zip(seen, clusterings(model), strict=True))
            with torch.no_grad():  # one tensor moves for sure
                model[0].parametrizations.weight.original.mul_(1 + 2**-6)
        assert unchanged > 5  # what this test is about
        assert min(steps(model)) >= 20


class TestPurity:
    @pytest.mark.parametrize("use_reentrant", [False, True])
    @pytest.mark.parametrize("lucky", [0, 1])
    def test_checkpointing_computes_the_same_again(self, lucky, use_reentrant):
        """The unlucky weight is read again when the others have moved on: it must not follow in between."""

        def gradients(checked: bool) -> list[torch.Tensor]:
            model, x, result = network(2), torch.randn(4, 16, requires_grad=True), []
            for _ in range(4):
                model.zero_grad()
                y = x
                for layer in model:
                    y = checkpoint(layer, y, use_reentrant=use_reentrant) if checked else layer(y)
                y.square().sum().backward()
                result += [p.grad.clone() for p in model.parameters()]
                change(model, lucky)
            return [*result, *(c.C for c in clusterings(model)), *(c.step for c in clusterings(model))]

        torch.manual_seed(1)
        unchecked = gradients(False)
        torch.manual_seed(1)
        checked = gradients(True)
        assert all(torch.equal(a, b) for a, b in zip(checked, unchecked, strict=True))


class TestSharing:
    def test_models_have_clocks_of_their_own(self):
        one, other = network(), network()
        change(one, 0, 1, 2)
        forward(one), forward(other)
        assert (steps(one), steps(other)) == ([1] * 3, [0] * 3)

    def test_deep_copies_have_a_clock_of_their_own(self):
        model = network()
        twin = copy.deepcopy(model)
        assert len({id(c.clock) for c in clusterings(twin)}) == 1
        change(model, 0)
        forward(model), forward(model), forward(twin)
        assert (steps(model), steps(twin)) == ([1] * 3, [0] * 3)

    def test_functional_calls_and_compile_see_the_same_clock(self):
        torch._dynamo.reset()
        model = network()
        compiled = torch.compile(model, backend="aot_eager")
        for step in range(3):
            forward(compiled)
            assert steps(model) == [step] * 3
            change(model, 0, 2)


class TestResuming:
    def straggling(self) -> nn.Sequential:
        """At step 3, but for the first layer, which is not up to date."""
        model = network()
        for _ in range(3):
            change(model, 1, 2)
            model[2](model[1](torch.ones(1, 16)))
        assert steps(model) == [0, 3, 3]
        return model

    def test_a_checkpoint_continues_as_the_model_would(self):
        model, resumed = self.straggling(), network()
        resumed.load_state_dict(model.state_dict())
        for m in (model, resumed):
            change(m, 0, 1, 2)
            forward(m)
        assert steps(model) == steps(resumed) == [3, 4, 4]

    def test_an_older_checkpoint_turns_the_clock_back(self):
        model = self.straggling()
        model.load_state_dict(network().state_dict())
        change(model, 0, 1, 2)
        forward(model)
        assert steps(model) == [1, 1, 1]

    def test_a_part_of_a_checkpoint(self):
        """The clock learns from the weights themselves."""
        model, resumed = self.straggling(), network()
        resumed[1].load_state_dict(model[1].state_dict())
        change(resumed, 0, 1, 2)
        forward(resumed), forward(resumed)
        assert steps(resumed) == [4, 4, 4]

    def test_another_device_begins_with_the_same_count(self):
        clock = Clock()
        clock.on(torch.device("cpu")).fill_(7)
        assert clock.on(torch.device("meta")).is_meta
        assert int(clock.on(torch.device("cpu"))) == 7
