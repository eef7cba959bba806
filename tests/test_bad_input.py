"""Wrong arguments and wrong weights: the error names what is wrong, and the model stays as it was."""

import copy
import re

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm

import dkm

NAN, INF = float("nan"), float("inf")


def net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 5))


def refused(call, *words: str, error=(ValueError, TypeError)) -> str:
    """Assert that `call` raises an error of ours whose message has all these words in it."""
    with pytest.raises(error) as caught:
        call()
    message = str(caught.value)
    for word in words:
        assert re.search(rf"(?<!\w){re.escape(word)}(?!\w)", message), f"no {word!r} in: {message}"
    assert len(message.split()) >= 5, f"not a sentence: {message}"
    assert message.splitlines() == [message]
    return message


def untouched(model: nn.Module, before: dict[str, torch.Tensor]) -> None:
    assert not any(parametrize.is_parametrized(module) for module in model.modules())
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) or before[name].isnan().any() for name in before)


def refused_and_untouched(model: nn.Module, call, *words: str) -> str:
    before = copy.deepcopy(model.state_dict())
    message = refused(call, *words)
    untouched(model, before)
    return message


# --- arguments -----------------------------------------------------------------------------------

TAU = [True, 1e-40, 0, 0.0, -1, NAN, INF, "hot", None, [1e-3]]
OPTIONS = [
    *(("tau", tau) for tau in TAU),
    ("eps", -1),
    ("eps", NAN),
    ("eps", "small"),
    ("max_iter", 0),
    ("max_iter", 2.5),
    ("metric", "cosine"),
    ("metric", None),
    ("impl", "fast"),
    ("impl", None),
]
CLUSTERED_OPTIONS = [*OPTIONS, ("init", "linear"), ("init", None)]
SCHEDULES = [("steps", None), ("steps", 0), ("steps", -5), ("steps", 2.5), ("steps", "many"), ("steps", True)]
SIZES = [("bits", bits) for bits in (0, 13, -1, 2.5, "4", None, True)] + [("dim", dim) for dim in (0, -1, 1.5, None)]


def ids(value):
    return repr(value) if not isinstance(value, str) else value


@pytest.mark.parametrize(("name", "value"), OPTIONS, ids=ids)
def test_cluster_options(name, value):
    options = dict(tau=1e-3) | {name: value}
    refused(lambda: dkm.cluster(torch.randn(20), torch.randn(4, 1), **options), name, f"{value!r}")


@pytest.mark.parametrize(("name", "value"), CLUSTERED_OPTIONS, ids=ids)
def test_compress_options(name, value):
    model, options = net(), dict(tau=1e-3) | {name: value}
    refused_and_untouched(model, lambda: dkm.compress_(model, "all:2", **options), name, f"{value!r}")


@pytest.mark.parametrize(("name", "value"), CLUSTERED_OPTIONS, ids=ids)
def test_cluster_weight_options(name, value):
    model, options = net(), dict(tau=1e-3) | {name: value}
    refused_and_untouched(model, lambda: dkm.cluster_weight(model[0], bits=2, **options), name, f"{value!r}")


@pytest.mark.parametrize(("name", "value"), SCHEDULES, ids=ids)
def test_compress_steps(name, value):
    model = net()
    refused_and_untouched(model, lambda: dkm.compress_(model, "all:2", steps=value), "steps", f"{value!r}")


@pytest.mark.parametrize(("name", "value"), SCHEDULES, ids=ids)
def test_cluster_weight_steps(name, value):
    model = net()
    refused_and_untouched(model, lambda: dkm.cluster_weight(model[0], bits=2, steps=value), "steps", f"{value!r}")


@pytest.mark.parametrize(("name", "value"), SIZES, ids=ids)
def test_cluster_weight_sizes(name, value):
    model, options = net(), dict(bits=2) | {name: value}
    refused_and_untouched(model, lambda: dkm.cluster_weight(model[0], steps=5, **options), name, f"{value!r}")


def test_an_option_that_does_not_exist():
    model = net()
    refused_and_untouched(model, lambda: dkm.cluster_weight(model[0], bits=2, steps=5, temperature=1), "temperature")


@pytest.mark.parametrize("plan", [None, 4, {"cv": 4}, ["cv:4"]], ids=ids)
def test_a_plan_that_is_no_plan(plan):
    model = net()
    refused_and_untouched(model, lambda: dkm.compress_(model, plan, steps=5), "plan", type(plan).__name__)


@pytest.mark.parametrize("text", ["", "cv:0", "emb:4", "conf:4", "*.bias:4"])
def test_a_plan_that_does_not_fit(text):
    model = net()
    refused_and_untouched(model, lambda: dkm.compress_(model, text, steps=5), "plan")


# --- tensors -------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["W", "C"])
def test_cluster_integers(where):
    tensors = dict(W=torch.randn(20), C=torch.randn(4, 1))
    tensors[where] = tensors[where].long()
    refused(lambda: dkm.cluster(**tensors, tau=1e-3), f"{where} torch.int64")


def test_cluster_an_empty_weight():
    refused(lambda: dkm.cluster(torch.zeros(0, 3), torch.randn(4, 1), tau=1e-3), "W of shape (0, 3")


@pytest.mark.parametrize("shape", [(4,), (0, 1), (4, 0), (2, 2, 1), ()], ids=str)
def test_cluster_wrong_centroids(shape):
    refused(lambda: dkm.cluster(torch.randn(20), torch.zeros(shape), tau=1e-3), "C", "shape")


BAD_W = {
    "one dimension": (torch.randn(20), "(20,"),
    "three dimensions": (torch.randn(5, 2, 2), "(5, 2, 2"),
    "integers": (torch.arange(20)[:, None], "torch.int64"),
    "empty": (torch.zeros(0, 2), "(0, 2"),
    "NaN": (torch.full((20, 1), NAN), "NaN"),
    "NaN, d = 2": (torch.full((20, 2), NAN), "NaN"),
    "infinite": (torch.full((20, 1), INF), "infinite"),
}


@pytest.mark.parametrize("case", BAD_W)
def test_init_centroids_of_a_wrong_weight(case):
    W, word = BAD_W[case]
    refused(lambda: dkm.init_centroids(W, 4), "W", word)


@pytest.mark.parametrize("k", [0, -1, 2.5, None])
@pytest.mark.parametrize("init", ["kmeans", "random"])
def test_init_centroids_of_a_wrong_k(k, init):
    refused(lambda: dkm.init_centroids(torch.randn(20, 1), k, init=init), "k", f"{k!r}")


@pytest.mark.parametrize(
    ("W", "C"), [((20, 2), (4, 1)), ((20, 1), (4, 2)), ((20, 3), (4, 2)), ((20,), (4, 1)), ((20, 1), (4,))], ids=str
)
def test_assign_shapes_that_do_not_match(W, C):
    refused(lambda: dkm.assign(torch.randn(W), torch.randn(C)), "W", "C")


BAD_WEIGHTS = {  # what is in the weight, and a word of the error
    "NaN": (NAN, "NaN"),
    "inf": (INF, "infinite"),
    "-inf": (-INF, "infinite"),
    "too large for float32": (1e36, "1e+36"),
}


@pytest.mark.parametrize("case", BAD_WEIGHTS)
def test_compress_a_bad_weight(case):
    value, word = BAD_WEIGHTS[case]
    model = net()
    with torch.no_grad():
        model[3].weight[1, 1] = value  # the last of them: all the others would be done by then
    refused_and_untouched(model, lambda: dkm.compress_(model, "all:2", steps=5), "3.weight", word)


@pytest.mark.parametrize("case", BAD_WEIGHTS)
def test_cluster_weight_of_a_bad_weight(case):
    value, word = BAD_WEIGHTS[case]
    model = net()
    with torch.no_grad():
        model[3].weight[1, 1] = value
    refused_and_untouched(model, lambda: dkm.cluster_weight(model[3], bits=2, steps=5), "Linear.weight", word)


def test_compress_leaves_out_what_is_kept():
    model = net()
    with torch.no_grad():
        model[3].weight[1, 1] = NAN
    dkm.compress_(model, "cv:2", steps=5)


@pytest.mark.parametrize(
    ("tensor", "word"),
    [(torch.zeros(3, 4, dtype=torch.int64), "torch.int64"), (torch.zeros(0, 4), "empty")],
    ids=["integers", "empty"],
)
def test_cluster_weight_of_no_weight(tensor, word):
    module = nn.Module()
    module.register_parameter("table", nn.Parameter(tensor, requires_grad=False))
    refused_and_untouched(module, lambda: dkm.cluster_weight(module, "table", bits=2, steps=5), "Module.table", word)


def test_compress_a_model_without_values():
    with torch.device("meta"):
        model = net()
    message = refused(lambda: dkm.compress_(model, "all:2", steps=5), "0.weight", "meta")
    assert "load" in message
    assert not any(parametrize.is_parametrized(module) for module in model.modules())


# --- models --------------------------------------------------------------------------------------


def test_compress_twice():
    model = net()
    dkm.compress_(model, "all:2", steps=5)
    keys = list(model.state_dict())
    refused(lambda: dkm.compress_(model, "all:2", steps=5), "0.weight", "snap_")
    assert list(model.state_dict()) == keys


def test_compress_twice_with_another_plan():
    model = net()
    dkm.compress_(model, "cv:2", steps=5)
    refused(lambda: dkm.compress_(model, "fc:2", steps=5), "0.weight", "snap_")


@pytest.mark.parametrize(
    ("other", "word"),
    [(nn.Sequential(nn.Conv2d(2, 4, 3)), "(4, 2, 3, 3"), (nn.ModuleDict({"a": nn.Linear(3, 3)}), "a.weight")],
    ids=["shape", "name"],
)
def test_a_plan_for_another_model(other, word):
    model, plan = net(), dkm.plan(other, "all:2")
    refused_and_untouched(model, lambda: dkm.compress_(model, plan, steps=5), "another model", word)


def test_cluster_weight_of_a_missing_parameter():
    model = net()
    refused_and_untouched(
        model, lambda: dkm.cluster_weight(model[3], "wieght", bits=2, steps=5), "Linear", "wieght", "weight", "bias"
    )


def test_cluster_weight_of_a_parameter_that_is_none():
    model = nn.Linear(3, 3, bias=False)
    refused_and_untouched(model, lambda: dkm.cluster_weight(model, "bias", bits=2, steps=5), "Linear", "bias")


def test_cluster_weight_of_a_submodules_parameter():
    model = net()
    refused_and_untouched(model, lambda: dkm.cluster_weight(model, "3.weight", bits=2, steps=5), "Sequential")


def test_cluster_weight_twice():
    module = dkm.cluster_weight(nn.Linear(3, 3), bits=2, steps=5)
    message = refused(lambda: dkm.cluster_weight(module, bits=2, steps=5), "ParametrizedLinear.weight", "already")
    assert "remove" in message or "snap_" in message  # what to do


def test_cluster_weight_where_something_else_is():
    module = weight_norm(nn.Linear(3, 3))
    message = refused(lambda: dkm.cluster_weight(module, bits=2, steps=5), "ParametrizedLinear.weight", "already")
    assert "remove" in message  # what to do


def test_compress_where_something_else_is():
    model = nn.Sequential(weight_norm(nn.Linear(3, 3)))
    refused(lambda: dkm.compress_(model, "all:2", steps=5), "plan 'all:2'", "none")


def test_a_plan_from_before_something_else_came():
    model = net()
    plan = dkm.plan(model, "all:2")
    weight_norm(model[3])
    refused(lambda: dkm.compress_(model, plan, steps=5), "3.weight")
    assert not parametrize.is_parametrized(model[0])


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.complex64, "float16"], ids=str)
@pytest.mark.parametrize("verb", ["snap_", "size", "save"])
def test_a_dtype_that_holds_no_weights(verb, dtype, tmp_path):
    model = net()
    dkm.compress_(model, "all:2", steps=5)
    bias = model[3].bias.clone()
    arguments = [tmp_path / "x.dkm"] if verb == "save" else []
    refused(lambda: getattr(dkm, verb)(model, *arguments, dtype=dtype), "dtype", str(dtype))
    assert torch.equal(model[3].bias, bias)
    assert list(tmp_path.iterdir()) == []


def test_size_of_a_plain_model():
    refused(lambda: dkm.size(net()), "model", "compress_")
