"""Products that are added up from terms that are looked up: as close to float64 as sums of float32 are."""

import pytest
import torch
from dkm_files import tensor
from torch import nn

from dkm.clustering.groups import Group
from dkm.clustering.spec import Spec
from dkm.runtime import tables
from dkm.runtime.loading import pack_
from dkm.runtime.packed import PackedWeight

# bits, dim, inputs of the layer -> how many codes are read as one
AT_ONCE = {
    (8, 8, 48): 1,
    (8, 16, 48): 1,
    (5, 8, 48): 2,
    (4, 4, 48): 2,
    (4, 4, 44): 1,  # 11 codes in a row
    (4, 2, 48): 2,
    (2, 1, 48): 4,
    (1, 1, 48): 8,
    (1, 3, 48): 8,
    (9, 8, 48): 1,
}


def packed(spec: Spec, inputs: int, outputs: int = 1200, dtype: torch.dtype = torch.float32, exponent: int = 0):
    """A layer with a bias that computes from codes, and what it computes with."""
    torch.manual_seed(0)
    layer = nn.Linear(inputs, outputs, dtype=dtype)
    pack_(layer, [tensor("weight", (outputs, inputs), spec, dtype=dtype, exponent=exponent)])
    return layer, layer.packed_weight


def decoding(monkeypatch) -> list[int]:
    """The rows that are decoded from now on."""
    seen, own = [], PackedWeight.rows
    monkeypatch.setattr(PackedWeight, "rows", lambda weight, *rows: seen.append(rows) or own(weight, *rows))
    return seen


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("case", AT_ONCE, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_is_exact_up_to_rounding(case, scaled, dtype, monkeypatch):
    bits, dim, inputs = case
    layer, weight = packed(Spec(bits, dim, scaled=scaled), inputs, dtype=dtype, exponent=-3)
    exact = weight.dense().double()
    decoded = decoding(monkeypatch)
    for shape in [(inputs,), (1, 1, inputs)]:
        x = torch.randn(shape, dtype=dtype)
        assert tables.codes_at_once(x, weight) == AT_ONCE[case]
        found = layer(x).double()
        assert found.shape == (*shape[:-1], 1200)
        # each product and each sum is rounded once, and so are scales and the bias
        room = (inputs + 4) * torch.finfo(dtype).eps * (x.double().abs() @ exact.abs().t() + layer.bias.abs())
        assert ((found - x.double() @ exact.t() - layer.bias).abs() <= room).all()
    assert not decoded


def test_few_inputs_at_once(monkeypatch):
    """A table for each; many inputs are multiplied by the decoded weight."""
    layer, weight = packed(Spec(8, 16), 48)
    exact, decoded = weight.dense(), decoding(monkeypatch)
    for count, looked_up in ((4, True), (5, False)):
        x = torch.randn(count, 48)
        torch.testing.assert_close(layer(x), x @ exact.t() + layer.bias)
        assert bool(decoded) != looked_up


def test_in_blocks(monkeypatch):
    """Whose first codes are not at the beginning of a byte."""
    monkeypatch.setattr("dkm.runtime.packed.BLOCK", 3 * 40)
    layer, weight = packed(Spec(5, 8), 40, outputs=50)
    x, exact = torch.randn(40), weight.dense()
    assert tables.codes_at_once(x, weight) == 1
    torch.testing.assert_close(layer(x), exact @ x + layer.bias)


def test_what_is_decoded_instead():
    one, two = torch.randn(48), torch.randn(2, 48)
    assert tables.codes_at_once(one, packed(Spec(8, 8), 48)[1])
    with torch.no_grad():
        assert tables.codes_at_once(one.requires_grad_(), packed(Spec(8, 8), 48)[1])
    assert not tables.codes_at_once(one, packed(Spec(8, 8), 48)[1])  # a gradient is wanted
    one = one.detach()
    assert not tables.codes_at_once(two, packed(Spec(2), 48)[1])  # one look-up for 4 weights and 2 inputs
    assert not tables.codes_at_once(one, packed(Spec(3), 48)[1])  # 2 codes at once, at most
    assert not tables.codes_at_once(one, packed(Spec(8, 8), 48, outputs=255)[1])  # more terms than outputs
    assert not tables.codes_at_once(one[:47], packed(Spec(8, 8), 47)[1])  # a vector with weights of two rows
    assert not tables.codes_at_once(one, packed(Spec(8, 8, group=Group(4, 16)), 48)[1])
    assert not tables.codes_at_once(one.double(), packed(Spec(8, 8), 48)[1])
    assert not tables.codes_at_once(one[:0], packed(Spec(8, 8), 48)[1])
    assert not tables.codes_at_once(one.half(), packed(Spec(8, 8), 48)[1].half())  # it rounds weights
    with torch.autocast("cpu"):
        assert not tables.codes_at_once(one, packed(Spec(8, 8), 48)[1])


def test_inputs_of_another_length_get_the_usual_error():
    layer, _ = packed(Spec(8, 8), 48)
    with pytest.raises(RuntimeError, match="shape"):
        layer(torch.randn(40))
