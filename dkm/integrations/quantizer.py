"""What transformers calls to read a folder with packed codes: see `exporters/transformers_folder.py`.

Before the weights are read, each clustered parameter is replaced by bytes of the size of its codes, so transformers
reads, places and ties these as it does any parameter.  Afterwards the layers get them as their packed weights.
"""

import re
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from ..exporters.transformers_folder import VERSION, check_dense, codes_shape, part_name, to_stored
from ..formats.described import Codes, Described
from ..formats.parts import checksum, from_parts, sizes
from ..foundation.errors import FileError
from ..foundation.text import shown
from ..modelling.packed_tensor import PREFIX, packed_tensors
from ..modelling.parameters import parameters
from ..runtime.layers import hold, release, why_not
from ..runtime.packed import PackedWeight


class _Place(NamedTuple):
    """Where a clustered tensor belongs."""

    module: nn.Module
    attribute: str
    dtype: torch.dtype  # that transformers computes in
    sizes: dict[str, int]  # bytes of each of its parts


@register_quantization_config("dkm")
class DKMConfig(QuantizationConfigMixin):  # type: ignore[misc]  # transformers may be untyped
    """The `quantization_config` of a folder: an entry for each clustered tensor, a checksum for each other one."""

    def __init__(
        self,
        version: int = VERSION,
        tensors: dict[str, Any] | None = None,
        ties: dict[str, str] | None = None,
        dense: dict[str, str] | None = None,  # without: of a folder that has no such checksums
        **kwargs: Any,
    ):
        self.quant_method: Any = "dkm"
        self.version, self.tensors, self.ties, self.dense = version, tensors or {}, ties or {}, dense or {}


@register_quantizer("dkm")
class DKMQuantizer(HfQuantizer):  # type: ignore[misc]
    """Reads a folder with packed codes into a model that computes with them."""

    quantization_config: DKMConfig
    requires_calibration = True  # that is, it reads folders, and compresses nothing by itself

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        """Refuse what a later version of dkm has written."""
        config = self.quantization_config
        if config.version != VERSION:
            raise FileError(
                f"the folder has version {shown(str(config.version))}, this dkm reads {VERSION}: upgrade torch-dkm"
            )
        if not all(isinstance(each, dict) for each in (config.tensors, config.ties, config.dense)):
            raise FileError("the quantization_config contradicts itself: its tensors, ties and dense are not objects")

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        self.file = str(model.config.name_or_path) or "the folder"
        files = kwargs.get("checkpoint_files")  # none where the caller gives a state_dict
        if files:
            check_dense(files, self.quantization_config.dense, self.quantization_config.ties, self.file)
        self.places: dict[str, _Place] = {}
        for name, entry in self.quantization_config.tensors.items():
            parts = sizes(name, entry, self.file)
            found = _found(model, name)
            if found is None:  # a head that this class of models has not
                continue
            module, attribute, parameter = found
            if list(parameter.shape) != entry["shape"]:
                raise FileError(
                    f"{self.file} does not fit the model: {shown(name)} is {tuple(entry['shape'])} in the folder and "
                    f"{tuple(parameter.shape)} in the model"
                )
            self.places[name] = _Place(module, attribute, parameter.dtype, parts)
            codes = torch.empty(codes_shape(entry["shape"], parts["codes"]), dtype=torch.uint8, device="meta")
            module._parameters[attribute] = nn.Parameter(codes, requires_grad=False)
            module.__dict__["_is_hf_initialized"] = True  # random bytes are no codes: absent ones shall be an error
            for kind in parts.keys() - {"codes"}:
                empty = torch.empty(parts[kind], dtype=torch.uint8, device="meta")
                module.register_buffer(part_name(attribute, kind), empty)
        # ties that transformers does not know are made afterwards
        ignored = [re.escape(alias) for alias in self.quantization_config.ties]
        model._keys_to_ignore_on_load_missing = [*(model._keys_to_ignore_on_load_missing or []), *ignored]
        return model

    @torch.no_grad()
    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        owners = {place: list(owned.owners) for owned in parameters(model) for place in owned.owners}
        self._tie(model, owners)
        for name, (module, attribute, dtype, parts) in self.places.items():
            everyone = owners[module, attribute]
            bytes_ = {kind: getattr(module, part_name(attribute, kind)).view(-1)[:size] for kind, size in parts.items()}
            found, device = self._tensor(name, bytes_), bytes_["codes"].device
            for kind in parts.keys() - {"codes"}:
                delattr(module, part_name(attribute, kind))
            if any(why_not(other) for other, _ in everyone):
                weight = nn.Parameter(found.values().to(device, dtype), requires_grad=False)
                for other, alias in everyone:
                    other._parameters[alias] = weight
                continue
            assert isinstance(found.content, Codes)
            packed = PackedWeight(found.content, found.shape, found.dtype, dtype).to(device)
            for other, alias in everyone:
                hold(other, alias, packed)
        return model

    def _tie(self, model: PreTrainedModel, owners: dict[tuple[nn.Module, str], list[tuple[nn.Module, str]]]) -> None:
        """The ties that transformers does not know: of codes in `owners`, of other tensors in the model."""
        for alias, name in self.quantization_config.ties.items():
            first, other = _found(model, str(name)), _found(model, alias)
            if first is None or other is None or first[2] is other[2]:
                continue
            if name in self.places:
                owners[first[:2]].append(other[:2])
            else:
                other[0]._parameters[other[1]] = first[2]

    def get_state_dict_and_metadata(self, model: PreTrainedModel) -> tuple[dict[str, Tensor], dict[str, str]]:
        """What `save_pretrained` writes: packed codes again.  The config, which it writes next, says what they are."""
        held = packed_tensors(model)
        children = (name.rpartition(".") for names, _ in held for name in names)
        ours = tuple(f"{path}{dot}{PREFIX}{attribute}." for path, dot, attribute in children)
        state = {name: value for name, value in model.state_dict().items() if not name.startswith(ours)}
        self.quantization_config.dense = _checksums(model, state)
        self.quantization_config.tensors = {}
        for (name, *aliases), packed in held:
            each = Described(name, packed.shape, packed.source, packed.content(), tuple(aliases))
            entry, stored = to_stored(each)
            self.quantization_config.tensors[name] = entry
            state |= stored
        return state, {}

    @torch.no_grad()
    def _dequantize(self, model: PreTrainedModel, dtype: torch.dtype | None = None) -> PreTrainedModel:
        """What `model.dequantize()` calls: a plain model, with dense weights."""
        for names, packed in packed_tensors(model):
            weight = nn.Parameter(packed.dense())  # type: ignore[operator]
            for name in names:
                path, _, attribute = name.rpartition(".")
                release(model.get_submodule(path), attribute, weight)
        return model

    def _tensor(self, name: str, parts: dict[str, Tensor]) -> Described:
        absent = [kind for kind, part in parts.items() if part.is_meta]
        if absent:
            raise FileError(
                f"{self.file}: the {absent[0]} of {shown(name)} are absent, or offloaded, which codes cannot be"
            )
        return from_parts(name, self.quantization_config.tensors[name], parts, self.file)

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        """Whether `save_pretrained` works."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Whether a Trainer may train the model: codes cannot be trained, `model.dequantize()` can."""
        return False


def _checksums(model: PreTrainedModel, state: dict[str, Tensor]) -> dict[str, str]:
    """Checksums of those tensors that transformers writes as they are, under their names."""
    if getattr(model, "_weight_conversions", None):  # it read them in another form, and writes them so
        return {}
    left_out = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    return {
        name: checksum(value)
        for name, value in state.items()
        if name not in left_out and isinstance(value, Tensor) and not value.is_meta  # offloaded ones are
    }


def _found(model: PreTrainedModel, name: str) -> tuple[nn.Module, str, nn.Parameter] | None:
    """The module, attribute and parameter of this name.  A model with a head has a prefix that one without it lacks."""
    prefix = f"{model.base_model_prefix}."
    for own in (name, name.removeprefix(prefix), prefix + name):
        path, _, attribute = own.rpartition(".")
        try:
            module = model.get_submodule(path)
        except AttributeError:
            continue
        parameter = module._parameters.get(attribute)
        if parameter is not None:
            return module, attribute, parameter
    return None
