"""A compressed model -> its tensors as plain data, one after another: what every writer starts from."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..clustering.decode import all_finite
from ..clustering.precision import FLOAT8, check_dtype, rounded, stored_dtype
from ..foundation.errors import FileError
from ..modelling.clustered import Clustered
from ..modelling.dtensors import is_first, reshard, whole
from ..modelling.packed_tensor import Held, PackedTensor, packed_tensors
from ..modelling.parameters import Owned, parameters, unwrapped
from .codec import pack
from .container import DTYPES
from .described import Codes, Described


@torch.no_grad()
def describe(
    model: nn.Module, dtype: torch.dtype = torch.float16, walk: list[Owned] | None = None
) -> Iterator[Described]:
    """The tensors of a compressed model, one at a time: memory is bounded by the largest of them.

    Parameters that are not clustered are rounded to `dtype`; buffers keep their own.  The model is checked first, so an
    error comes before the first tensor.  For a model that `fully_shard` has split, all ranks iterate to the end, and
    only the first one gets any tensors.  `walk` is `parameters(model)`, for a caller that has it already.
    """
    check_dtype(dtype)
    if dtype not in DTYPES.values():
        raise FileError(f"a .dkm file cannot hold {dtype}: give another dtype, such as torch.float16")
    model = unwrapped(model)
    writes = is_first(reshard(model))
    walk = parameters(model) if walk is None else walk
    packed = packed_tensors(model)
    if not packed and all(owned.clustered is None for owned in walk):
        raise FileError("the model has no clustered tensor: call dkm.compress_(model, plan, ...) first")
    for owned in walk:
        _check_storable(owned.name, owned.tensor)
        if owned.on_top is not None:
            raise FileError(
                f"{owned.name} has another parametrization, {owned.on_top}, on top of its clustering, and a file holds "
                "codes and centroids only: remove it first, torch.nn.utils.parametrize.remove_parametrizations"
            )
    for held in packed:
        _check_storable(held.names[0], held.tensor.content().packed)
    buffers = other_state(model, {name for owned in walk for name in owned.names})
    return _each(walk, packed, buffers, dtype, writes)


@torch.no_grad()
def _each(
    walk: list[Owned], packed: list[Held], buffers: dict[str, Tensor], dtype: torch.dtype, writes: bool
) -> Iterator[Described]:
    for (name, *aliases), held in packed if writes else ():
        yield Described(name, held.shape, held.source, held.content(), tuple(aliases))
    for owned in walk:
        weight, clustered = whole(owned.tensor), owned.clustered
        # on every rank: if only one raised, the others would wait for it in the next collective
        _check_finite(owned.name, weight, clustered)
        if writes:
            content = rounded(weight, dtype) if clustered is None else _codes(clustered, weight)
            yield Described(owned.name, tuple(weight.shape), weight.dtype, content, owned.aliases)
    for name, tensor in buffers.items():
        value = whole(tensor)
        if writes:
            yield Described(name, tuple(value.shape), value.dtype, value.detach())


def _codes(clustered: Clustered, weight: Tensor) -> Codes:
    C, codes = clustered.codes(weight)
    spec = clustered.spec
    scales = clustered.stored_scales(weight)
    outliers = clustered.outliers(weight)
    return Codes(spec.bits, spec.dim, clustered.shift, pack(codes, spec.bits), C, spec.group, scales, outliers)


def _check_finite(name: str, weight: Tensor, clustered: Clustered | None) -> None:
    finite = bool(weight.isfinite().all())
    if finite and clustered is not None:
        C = clustered.C.to(FLOAT8 if clustered.spec.float8 else stored_dtype(weight.dtype))
        scales = clustered.stored_scales(weight)
        finite = all_finite(C, scales, clustered.shift, weight.dtype)
        if scales is not None and finite and not bool((scales > 0).all()):
            raise FileError(f"{name} has scales that are zero or negative in {scales.dtype}; nothing was written")
    if not finite:
        raise FileError(f"{name} holds NaN, infinite or too large values: the training diverged; nothing was written")


def other_state(model: nn.Module, known: set[str]) -> dict[str, Tensor]:
    """The state that is neither a parameter nor ours: buffers."""
    other = {}
    is_ours = _ours(model)
    for name, tensor in model.state_dict(keep_vars=True).items():  # a lazy tensor cannot be detached
        plain = name.replace("parametrizations.", "").removesuffix(".original")
        if name in known or plain in known or is_ours(name):
            continue
        if not isinstance(tensor, Tensor):
            raise FileError(f"{name} in the model's state is a {type(tensor).__name__}: only tensors can be saved")
        _check_storable(name, tensor)
        other[name] = tensor
    return other


def _check_storable(name: str, tensor: Tensor) -> None:
    """FileError unless a file can hold the tensor's values, and its name."""
    try:
        name.encode()
    except UnicodeEncodeError:
        raise FileError(f"{name!r} is not a name that a file can hold: rename it") from None
    if is_lazy(tensor) or tensor.is_meta:
        raise FileError(f"{name} has no values (it is on the meta device, or of a lazy module): load or compute them")
    if tensor.layout != torch.strided or tensor.is_nested:
        kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
        raise FileError(f"{name} is {kind}, and a file holds dense tensors only: convert it or make it not persistent")
    if tensor.dtype not in DTYPES.values():
        raise FileError(f"{name} is {tensor.dtype}, which a file cannot hold: convert it or make it not persistent")


def _ours(model: nn.Module) -> Callable[[str], bool]:
    """Whether a name in the state_dict belongs to one of our parametrizations."""
    modules = model.named_modules(remove_duplicate=False)
    prefixes = tuple(f"{name}." for name, module in modules if isinstance(module, Clustered | PackedTensor))
    return lambda name: name.startswith(prefixes)
