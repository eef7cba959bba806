"""The one walk over a model: every distinct parameter, its names, and the modules that hold it."""

import pytest
import torch
from example_models import MODELS, Tied
from torch import nn
from torch.optim.swa_utils import AveragedModel

import dkm
from dkm.modelling.parameters import Owned, clusterings, parameters, unwrapped


def compressed(model: nn.Module, plan: str) -> nn.Module:
    dkm.compress_(model, plan, steps=1)
    return model


@pytest.mark.parametrize("case", MODELS)
def test_every_parameter_is_found_once_under_all_its_names(case: str):
    model = MODELS[case]()
    walk = parameters(model)
    assert [owned.name for owned in walk] == [name for name, _ in model.named_parameters()]
    assert [id(owned.tensor) for owned in walk] == list(map(id, model.parameters()))
    every = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    assert sorted(name for owned in walk for name in owned.names) == sorted(every)


@pytest.mark.parametrize("case", MODELS)
def test_owners_hold_the_parameter(case: str):
    for owned in parameters(MODELS[case]()):
        assert owned.owners
        assert all(module._parameters[attribute] is owned.tensor for module, attribute in owned.owners)


def test_a_tie_has_two_owners():
    model = Tied()
    owned = parameters(model)[0]
    assert (owned.name, owned.aliases) == ("embedding.weight", ("output.weight",))
    assert owned.owners == [(model.embedding, "weight"), (model.output, "weight")]


def test_a_module_with_two_names_is_one_owner():
    linear = nn.Linear(3, 3)
    weight, bias = parameters(nn.Sequential(linear, nn.ReLU(), linear))
    assert weight.names == ["0.weight", "2.weight"]
    assert weight.owners == [(linear, "weight")]
    assert bias.aliases == ("2.bias",)


def test_the_root_owns_parameters_too():
    assert [owned.name for owned in parameters(nn.Linear(2, 2))] == ["weight", "bias"]


@pytest.mark.parametrize("case", MODELS)
def test_names_and_tensors_are_those_of_the_plain_model(case: str):
    model = MODELS[case]()
    before = {tuple(owned.names): owned.tensor for owned in parameters(model)}
    compressed(model, "all:1")
    after = {tuple(owned.names): owned.tensor for owned in parameters(model)}
    assert after.keys() == before.keys()
    assert all(after[names] is before[names] for names in before)


def test_what_a_method_adds_is_not_the_models():
    model = nn.Linear(8, 8)
    dkm.compress_(model, "weight:2", tau="learn")
    assert len(list(model.parameters())) == 3
    assert sorted(owned.name for owned in parameters(model)) == ["bias", "weight"]


def test_clustered_is_our_parametrization():
    model = compressed(Tied(), "embedding:2")
    found = {owned.name: owned.clustered for owned in parameters(model)}
    assert found["embedding.weight"] is model.embedding.parametrizations.weight[0]
    assert vars(found["embedding.weight"]) is vars(model.output.parametrizations.weight[0])  # its twin
    assert found["output.bias"] is None
    assert set(map(id, clusterings(model))) == {id(found["embedding.weight"])}


def test_a_tie_that_is_clustered_in_one_place_only():
    model = Tied()
    dkm.cluster_weight(model.output, bits=2, steps=1)
    owned = parameters(model)[0]
    with pytest.raises(
        ValueError, match=r"embedding\.weight and output\.weight are one tensor, clustered in one place"
    ):
        _ = owned.clustered


@pytest.mark.parametrize(
    "wrap", [lambda m: torch.compile(m, backend="aot_eager"), AveragedModel], ids=["compile", "average"]
)
def test_wrappers_are_looked_through(wrap):
    model = nn.Sequential(nn.Linear(2, 2))
    wrapped = wrap(model)
    assert [owned.name for owned in parameters(wrapped)] == ["0.weight", "0.bias"]
    assert type(unwrapped(wrapped)) is nn.Sequential
    assert unwrapped(model) is model


class Counted(nn.Sequential):
    """Counts how often somebody walks over it."""

    walks = 0

    def named_modules(self, memo=None, prefix="", remove_duplicate=True):
        if not prefix:
            self.walks += 1
        return super().named_modules(memo, prefix, remove_duplicate)


@pytest.mark.parametrize("text", ["all:2", "0:2, 1:2/2", "*:1"])
def test_compressing_walks_over_the_parameters_once(text: str):
    model = Counted(nn.Linear(8, 8), nn.Linear(8, 8))
    dkm.compress_(model, text, steps=1)
    assert model.walks == 2  # one for the parameters, and before it one for packed tensors, which are refused


def test_planning_walks_over_the_model_once():
    model = Counted(nn.Linear(8, 8), nn.Linear(8, 8))
    dkm.plan(model, "all:2")
    assert model.walks == 1


def test_an_owned_parameter_by_itself():
    layer = nn.Linear(2, 2)
    owned = Owned(layer.weight, ["a", "b", "c"], [(layer, "weight")])
    assert (owned.name, owned.aliases, owned.clustered) == ("a", ("b", "c"), None)
