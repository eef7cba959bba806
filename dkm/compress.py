"""Put clustering on a model, measure it, and take it off again."""

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from .clustered import Clustered, check_bits_dim, check_weight
from .methods import named
from .plan import Owned, Plan, parameters
from .plan import plan as make_plan
from .sharded import Chain, reshard
from .temperature import Schedule


def compress_(
    model: nn.Module,
    plan: str | Plan,
    *,
    steps: int | None = None,
    tau: float | str | Schedule = "auto",
    eps: float = 1e-4,
    max_iter: int = 5,
    metric: str = "sqeuclidean",
    gradient: str = "unrolled",
    init: str = "kmeans",
    seed: int = 0,
    impl: str = "auto",
    method: str = "dkm",
    **own,
) -> Plan:
    """Cluster the model's weights while it trains, in place.  Returns the plan, a row for every tensor.

    Train as before; `model.eval()` evaluates with every weight snapped to its nearest centroid.  The
    parameters stay the same objects, so an optimizer may be built before or after.

    Args:
        plan: "cv:4/4, fc:8/4", or what `dkm.plan` returned.
        steps: how many optimizer steps you will train; tau="auto" and every schedule anneal over them.
        tau: "auto"; a number, the paper's fixed temperature; a schedule, see `dkm.temperature`; or "learn", a
            parameter for every tensor: build the optimizer afterwards.
        init, seed: see `init_centroids`.
        eps, max_iter, metric, gradient, impl: see `cluster`.
        method: "dkm", or one to compare with, see `dkm.methods`: "hard", "gumbel", "dc" or "quant_noise".
        own: options that the method alone has, such as quant_noise's `p`.
    """
    kind = named(method, own)
    already = [owned.names[0] for owned in parameters(model) if owned.clustered is not None]
    if already:
        raise ValueError(
            f"the model is compressed already ({already[0]} and {len(already) - 1} more): "
            "call dkm.snap_(model) first to start over, or keep training it"
        )
    chosen = plan if isinstance(plan, Plan) else make_plan(model, plan)
    rows = {row.name: row for row in chosen.rows if row.bits is not None}
    targets = {owned.names[0]: owned for owned in parameters(model) if owned.names[0] in rows}
    for name, row in rows.items():
        if name not in targets or tuple(targets[name].tensor.shape) != row.shape:
            raise ValueError(f"the plan was made for another model: it has no {name} of shape {row.shape}")
        if isinstance(targets[name].owners[0][0], parametrize.ParametrizationList):
            raise ValueError(f"{name} is parametrized already: remove that parametrization first, or keep it")
    for name, owned in targets.items():
        check_weight(owned.tensor, name)
    options = dict(tau=tau, steps=steps, eps=eps, max_iter=max_iter, metric=metric, gradient=gradient)
    options |= dict(init=init, seed=seed, impl=impl) | own
    # All of them first: an error leaves the model untouched.
    made = {n: kind(o.tensor, rows[n].bits, rows[n].dim, **options) for n, o in targets.items()}
    for name, owned in targets.items():
        _register(owned, made[name])
    return chosen


def cluster_weight(
    module: nn.Module, name: str = "weight", *, bits: int, dim: int = 1, method: str = "dkm", **options
) -> nn.Module:
    """Cluster one tensor of one module, in place; `options` as in `compress_`.  Returns the module."""
    check_bits_dim(bits, dim)
    kind = named(method, options)
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
    check_weight(tensor, f"{type(module).__name__}.{name}")
    _register(Owned(tensor, [name], [(module, name)]), kind(tensor, bits, dim, **options))
    return module


def _register(owned: Owned, clustered: Clustered) -> None:
    for module, attribute in owned.owners:
        clustered.train(module.training)
        # unsafe: the checks it skips would run the clustering, and ours keeps shape and dtype
        parametrize.register_parametrization(module, attribute, clustered, unsafe=True)
        module.parametrizations[attribute].__class__ = Chain
        _share_reads(module)


@torch.no_grad()
def snap_(model: nn.Module, *, dtype: torch.dtype = torch.float16) -> nn.Module:
    """Freeze: every clustered weight becomes its snapped dense value, and dkm is gone.  Returns the model.

    Other parameters are rounded to `dtype`, as in the file: the result is bit-equal to what
    `load(save(model, dtype=dtype))` gives.  Buffers, running statistics among them, stay as they are.
    """
    check_dtype(dtype)
    if reshard(model) is not None:
        raise ValueError(
            "snap_ works on a whole model and fully_shard has split this one: dkm.save it, from all ranks, and "
            "dkm.load that into a plain model"
        )
    # All values first: taking one parametrization off may make a module read, and so cluster, another weight.
    dense = {}
    for owned in parameters(model):
        clustered = owned.clustered
        dense[owned.tensor] = rounded(owned.tensor, dtype) if clustered is None else clustered.snapped(owned.tensor)
    for owned in parameters(model):
        for module, attribute in owned.owners if owned.clustered is not None else ():
            # A deep copy shares its class with the original, and the attribute lives on that class:
            # without a class of its own, this would take the attribute away from the original too.
            cls = type(module)
            module.__class__ = type(cls.__name__, cls.__bases__, dict(cls.__dict__))
            parametrize.remove_parametrizations(module, attribute, leave_parametrized=False)
            _unshare_reads(module)
        owned.tensor.copy_(dense[owned.tensor])
    return model


def check_dtype(dtype: torch.dtype) -> None:
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise TypeError(f"dtype must be a floating-point torch.dtype such as torch.float16, got {dtype!r}")


def rounded(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A parameter that is not clustered, in the precision of the file.

    Wider than `dtype`, it is rounded; a tensor that `dtype` cannot hold (overflow) stays as it is, and so
    does one of 16 bit or of integers.
    """
    if not tensor.is_floating_point() or tensor.element_size() <= torch.empty((), dtype=dtype).element_size():
        return tensor
    narrow = tensor.to(dtype)
    return tensor if bool((narrow.isfinite() != tensor.isfinite()).any()) else narrow


# Recurrent layers read each weight several times a forward pass and keep the results in a list.  Within a
# forward pass the reads share one clustering; outside of it the list is empty, because a module that holds on
# to a graph cannot be deep-copied.


def _share_reads(module: nn.Module) -> None:
    if isinstance(module, nn.RNNBase) and _enter not in module._forward_pre_hooks.values():
        module.register_forward_pre_hook(_enter)
        module.register_forward_hook(_leave, always_call=True)
        type(module)._apply = _apply_and_forget  # the class is parametrize's, made for this module
        _forget(module)


def _unshare_reads(module: nn.Module) -> None:
    if isinstance(module, nn.RNNBase):
        for hooks, ours in ((module._forward_pre_hooks, _enter), (module._forward_hooks, _leave)):
            for key in [key for key, hook in hooks.items() if hook is ours]:
                del hooks[key]
        module._init_flat_weights()


def _enter(module: nn.RNNBase, args) -> None:
    module._dkm_reads = parametrize.cached()
    module._dkm_reads.__enter__()
    module._init_flat_weights()


def _leave(module: nn.RNNBase, args, output) -> None:
    module.__dict__.pop("_dkm_reads").__exit__(None, None, None)
    _forget(module)


def _forget(module: nn.RNNBase) -> None:
    module._flat_weights = [None] * len(module._flat_weights_names)


def _apply_and_forget(module: nn.RNNBase, fn, recurse: bool = True) -> nn.RNNBase:
    nn.RNNBase._apply(module, fn, recurse)
    _forget(module)
    return module
