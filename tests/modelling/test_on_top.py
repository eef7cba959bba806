"""What others do to a clustered weight: parametrizations on top of ours, assignments to `.data`, torch.func."""

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import spectral_norm

import dkm


class Twice(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def layer(**options) -> nn.Linear:
    torch.manual_seed(0)
    made = nn.Linear(12, 8)
    dkm.compress_(made, "weight:2", **({"steps": 5} | options))
    return made


@pytest.mark.parametrize("name", ["Twice", "_SpectralNorm"])
def test_a_parametrization_on_top_is_refused_by_save_size_and_snap(name: str, tmp_path: Path):
    module = layer()
    if name == "Twice":
        parametrize.register_parametrization(module, "weight", Twice())
    else:
        spectral_norm(module)
    module(torch.randn(3, 12)).sum().backward()  # it trains; only what would be dropped is refused
    before = copy.deepcopy(module.state_dict())
    for call in (lambda: dkm.save(module, tmp_path / "x.dkm"), lambda: dkm.size(module), lambda: dkm.snap_(module)):
        with pytest.raises(ValueError, match=rf"weight has another parametrization, {name}, on top .* remove"):
            call()
    assert not list(tmp_path.iterdir())
    assert all(torch.equal(value, before[key]) for key, value in module.state_dict().items())


@pytest.mark.parametrize("training", [False, True])
def test_assigning_to_data_raises_instead_of_doing_nothing(training: bool):
    """peft's merge_and_unload does this to the layer that an adapter sits on."""
    module = layer().requires_grad_(False).train(training)
    with pytest.raises(RuntimeError, match=r"clustered.*dkm\.snap_"):
        module.weight.data += 1
    with pytest.raises(RuntimeError, match=r"clustered.*dkm\.snap_"):
        module.weight.data = torch.zeros(8, 12)


def test_what_a_module_reads_is_otherwise_a_plain_tensor():
    module = layer().requires_grad_(False).eval()
    weight = module.weight
    for made in (weight + 1, weight.clone(), weight[0], weight.t(), weight.data, copy.deepcopy(weight)):
        assert type(made) is torch.Tensor
    assert type(module(torch.ones(12))) is torch.Tensor


def test_torch_func_grad_over_a_model_in_training():
    """As with batch norm, the buffers are arguments of the function that is differentiated."""
    model, x = layer(tau=1e-3), torch.randn(4, 12)
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    start = copy.deepcopy(model)

    def loss(parameters: dict[str, Tensor], buffers: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, (parameters, buffers), (x,)).square().sum()

    got = torch.func.grad(loss)(parameters, buffers)
    start(x).square().sum().backward()
    for name, parameter in start.named_parameters():
        torch.testing.assert_close(got[name], parameter.grad)
    model.eval()(x)  # nothing of the transform is left behind
    assert int(model.parametrizations.weight[0].iterations) >= 1
    assert torch.isfinite(torch.func.grad(loss)(parameters, buffers)["bias"]).all()  # evaluation, straight through
