"""Put clustering on a model, and take it off again: the two lines of a training script."""

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from .clustering.at_once import at_once
from .clustering.options import DKMOptions, shows_options
from .clustering.precision import check_bits_dim, check_dtype, check_weight, rounded
from .clustering.spec import Spec
from .foundation.errors import MethodError
from .modelling.attach import attach, check_layers, detach
from .modelling.clustered import Clustered
from .modelling.dtensors import is_sharded, reshard
from .modelling.first_centroids import first_centroids
from .modelling.methods import METHODS, named
from .modelling.packed_tensor import refuse_packed
from .modelling.parameters import Owned, parameters
from .modelling.rehearsal import rehearse
from .plans.plan import plan_of
from .plans.rows import Plan


@shows_options(DKMOptions)
def compress_(model: nn.Module, plan: str | Plan, *, method: str = "dkm", **options: Any) -> Plan:
    """Cluster the model's weights while it trains, in place.  Returns the plan, which has a row for every tensor.

    Train as before; `model.eval()` evaluates with every weight snapped to its nearest centroid.  The
    parameters stay the same objects, so an optimizer may be built before or after.

    Args:
        plan: "cv:4/4, fc:8/4", or what `dkm.plan` returned.
        method: "dkm", or one to compare with: such as "hard" or "dc", see docs/methods.md, or one that you registered.
        steps: how many optimizer steps you will train; tau="auto" and every schedule anneal over them.
        tau: "auto", the default; a number, the paper's fixed temperature; a schedule, see `dkm.temperature`; or
            "learn", a parameter for every tensor: build the optimizer afterwards.
        init, seed: see `init_centroids`.
        eps, max_iter, metric, gradient, impl: see `cluster`.
        options: also those that a method has of its own, such as quant_noise's `p`.
    """
    kind, taken = named(method, options)
    refuse_packed(model, "dkm.compress_")
    walk = parameters(model)
    already = [owned.name for owned in walk if owned.clustered is not None]
    if already:
        raise ValueError(
            f"the model is compressed already ({already[0]} and {len(already) - 1} more): "
            "call dkm.snap_(model) first to start over, or keep training it"
        )
    chosen = plan if isinstance(plan, Plan) else plan_of(walk, plan)
    targets = _targets(walk, chosen)
    _check_method(kind, targets)
    # All of them first: an error leaves the model untouched.
    first = first_centroids(kind, [(owned.tensor, spec) for owned, spec in targets], taken)
    calls = [partial(kind, owned.tensor, **spec.arguments, **taken) for owned, spec in targets]
    calls = [call if C is None else partial(call, start_from=C) for call, C in zip(calls, first, strict=True)]
    # on a GPU, threads would wait for each other, and they would not work on the stream of this one
    threads = kind.made_at_once and all(owned.tensor.device.type == "cpu" for owned, _ in targets)
    made = at_once(calls) if threads else [call() for call in calls]
    for (owned, _), clustered in zip(targets, made, strict=True):
        clustered.join(made[0])
        attach(owned, clustered)
    rehearse((clustered, owned.tensor) for (owned, _), clustered in zip(targets, made, strict=True))
    return chosen


def _targets(walk: list[Owned], plan: Plan) -> list[tuple[Owned, Spec]]:
    """The parameters that a plan clusters, and how finely, all of them checked."""
    by_name = {owned.name: owned for owned in walk}
    targets = []
    for row in plan.rows:
        if row.spec is None:
            continue
        owned = by_name.get(row.name)
        if owned is None or tuple(owned.tensor.shape) != row.shape:
            raise ValueError(f"the plan was made for another model: it has no {row.name} of shape {row.shape}")
        if isinstance(owned.owners[0][0], parametrize.ParametrizationList):
            raise ValueError(f"{row.name} is parametrized already: remove that parametrization first, or keep it")
        targets.append((owned, row.spec))
    for owned, _ in targets:
        _check(owned.tensor, owned.name)
    return targets


def check_method(model: nn.Module, plan: Plan, method: str) -> None:
    """MethodError where the method cannot cluster what the plan says, before there is any other reason to wait."""
    _check_method(METHODS[method], _targets(parameters(model), plan))


def _check_method(kind: type[Clustered], targets: list[tuple[Owned, Spec]]) -> None:
    """MethodError where the method cannot cluster what the plan says: with all such tensors, and why the first."""
    refused = [(owned.name, reason, spec) for owned, spec in targets if (reason := kind.cannot(spec))]
    if refused:
        name, reason, spec = refused[0]
        more = ", ".join(other for other, _, _ in refused[1:])
        also = f"; the same goes for {more}" if more else ""
        raise MethodError(f'method="{kind.method}" {reason}, got {name}:{spec.label}{also}')
    for owned, _ in targets:
        check_layers(kind, owned)


def _check(tensor: torch.Tensor, name: str) -> None:
    if is_sharded(tensor):
        raise ValueError(f"{name} is a DTensor: call dkm.compress_ before fully_shard")
    check_weight(tensor, name)


@shows_options(DKMOptions)
def cluster_weight(
    module: nn.Module, name: str = "weight", *, bits: int, dim: int = 1, method: str = "dkm", **options: Any
) -> nn.Module:
    """Cluster one tensor of one module, in place; `options` as in `compress_`.  Returns the module."""
    check_bits_dim(bits, dim)
    kind, taken = named(method, options)
    if parametrize.is_parametrized(module, name):
        raise ValueError(
            f"{type(module).__name__}.{name} is parametrized already: remove that first, "
            "with torch.nn.utils.parametrize.remove_parametrizations or, if it is dkm's, dkm.snap_"
        )
    tensor = module._parameters.get(name)
    if tensor is None:
        raise ValueError(
            f"{type(module).__name__} has no parameter '{name}'; it has {', '.join(module._parameters) or 'none'}"
        )
    _check(tensor, f"{type(module).__name__}.{name}")
    owned = Owned(tensor, [name], [(module, name)])
    check_layers(kind, owned)
    attach(owned, kind(tensor, bits, dim, **taken))
    return module


@torch.no_grad()
def snap_(model: nn.Module, *, dtype: torch.dtype = torch.float16) -> nn.Module:
    """Make a plain model again, in place: every clustered weight becomes its snapped dense value.  Returns the model.

    Other parameters are rounded to `dtype`, as in the file.  So the weights are bit-equal to those that `load` reads
    from the file that `save(model, path, dtype=dtype)` writes.  Buffers stay as they are, running statistics too.
    """
    check_dtype(dtype)
    refuse_packed(model, "dkm.snap_")
    if reshard(model) is not None:
        raise ValueError(
            "snap_ works on a whole model and fully_shard has split this one: dkm.save it, from all ranks, and "
            "dkm.load that into a plain model"
        )
    walk = parameters(model)
    for owned in walk:
        if owned.clustered is not None:
            owned.clustered.check_given()
        if owned.on_top is not None:
            raise ValueError(
                f"{owned.name} has another parametrization, {owned.on_top}, on top of its clustering, and snap_ would "
                "drop it: remove that one first, torch.nn.utils.parametrize.remove_parametrizations"
            )
    # All values first: taking one parametrization off may make a module read, and so cluster, another weight.
    dense = [
        rounded(owned.tensor, dtype) if owned.clustered is None else owned.clustered.snapped(owned.tensor)
        for owned in walk
    ]
    for owned, value in zip(walk, dense, strict=True):
        detach(owned, value)
    return model
