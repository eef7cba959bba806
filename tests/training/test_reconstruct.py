"""`dkm.reconstruct_`: blocks that follow those of the uncompressed network."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dkm
from dkm.training.reconstruct import Reconstructing, Reconstruction


class Residual(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu_(x + self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))))


def network(width: int = 8) -> nn.Sequential:
    """A stem, two residual blocks and a head, with statistics of the batches below."""
    torch.manual_seed(3)
    stem = nn.Sequential(nn.Conv2d(3, width, 3), nn.BatchNorm2d(width), nn.ReLU())
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 4))
    model = nn.Sequential(stem, Residual(width), Residual(width), head)
    return dkm.recalibrate_(model, batches()).eval()


def batches(count: int = 4) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [images(12, generator) for _ in range(count)]


def images(count: int, generator: torch.Generator) -> Tensor:
    return torch.randn(count, 3, 8, 8, generator=generator)


PLAN = "0.0.weight:2, *.conv*:2/2, 3.2.weight:2/2"  # by name: small tensors would have 8 bits otherwise


def compressed(plan: str = PLAN, steps: int = 5, **options) -> tuple[nn.Sequential, nn.Sequential]:
    model = network()
    teacher = dkm.teacher(model)
    dkm.compress_(model, plan, steps=steps, **options)
    return model, teacher


def reconstructed(**options) -> tuple[nn.Sequential, nn.Sequential, Reconstruction]:
    model, teacher = compressed()
    options = dict(epochs=5, lr=3e-3) | options
    return model, teacher, dkm.reconstruct_(model, teacher, batches(), **options)


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


@torch.no_grad()
def distance(model: nn.Module, teacher: nn.Module) -> float:
    unseen = images(64, torch.Generator().manual_seed(9))
    return float(F.mse_loss(model.eval()(unseen), teacher(unseen)))


@pytest.fixture(scope="module")
def trained() -> tuple[nn.Sequential, nn.Sequential, Reconstruction]:
    torch.set_num_threads(1)
    return reconstructed()


def test_each_block_and_the_whole_come_nearer(trained):
    model, teacher, done = trained
    untrained = dkm.recalibrate_(compressed()[0], batches())
    assert [block.name for block in done.blocks] == ["0", "1", "2", "3"]
    # of random inputs, k-means of the weights is the best that there is for the first layer
    assert all(block.after < 0.95 * block.before for block in done.blocks[1:])
    assert done.blocks[0].after <= done.blocks[0].before
    assert distance(model, teacher) < 0.7 * distance(untrained, teacher)
    assert not done.left
    assert "1  error " in str(done)
    assert "in no block: none" in str(done)


def test_the_error_is_that_of_the_snapped_outputs(trained):
    """By hand: what the plain networks give, over the variance of the first batch."""
    model, teacher, done = trained
    plain = dkm.snap_(copy.deepcopy(model), dtype=torch.float32).eval()
    with torch.no_grad():
        pairs = [(plain[:2](x), teacher[:2](x)) for x in batches()]
    expected = torch.stack([(a - b).square().mean() for a, b in pairs]).mean() / pairs[0][1].var(correction=0)
    assert done.blocks[1].after == pytest.approx(float(expected), rel=1e-4)


@torch.no_grad()
def test_statistics_are_those_of_the_snapped_block(trained):
    model, _, _ = trained
    again = copy.deepcopy(model).eval()
    for number in range(len(again)):
        dkm.recalibrate_(again[number], [again[:number](x) for x in batches()])
    for (name, ours), (_, theirs) in zip(model.named_buffers(), again.named_buffers(), strict=True):
        torch.testing.assert_close(ours, theirs, msg=name, rtol=1e-4, atol=1e-6)


def test_each_schedule_runs_over_the_steps_of_its_block_and_ends_cold(monkeypatch: pytest.MonkeyPatch):
    model, teacher = compressed(steps=1000)
    seen: dict[int, list[float]] = {}
    original = dkm.Clustered.soft

    def soft(self, weight: Tensor) -> Tensor:
        result = original(self, weight)
        seen.setdefault(id(self.C), []).append(float(self.temperature(self.step) / self.unit))
        return result

    for clustered in _clusterings(model):
        monkeypatch.setattr(type(clustered), "soft", soft)
    clusterings = _clusterings(model)
    dkm.reconstruct_(model, teacher, batches(), epochs=4)
    for clustered in clusterings:
        multiples = seen[id(clustered.C)]
        assert len(multiples) == 16
        # the first read does not see a step, and the last one sees all but the last
        expected = [float(dkm.temperature.geometric(2.0, 0.1)(torch.tensor(i / 16))) for i in range(1, 17)]
        assert multiples == pytest.approx(expected, rel=1e-2) or multiples[1:] == pytest.approx(expected[:-1], rel=1e-2)
        # a training that follows stays at the end of it
        assert clustered.steps == 1000
        assert float(clustered.temperature(clustered.step) / clustered.unit) == pytest.approx(0.1, rel=1e-5)
    assert len({id(clustered.clock) for clustered in clusterings}) == 1


def _clusterings(model: nn.Module) -> list[dkm.Clustered]:
    return [module for module in model.modules() if isinstance(module, dkm.Clustered)]


def test_what_is_represented_exactly_stays():
    """Two values are two centroids: there is nothing to gain, and Adam makes steps of any gradient."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    for layer in model[::2]:
        layer.weight.data = layer.weight.data.sign() / 8  # which 16 bits hold
    teacher = dkm.teacher(model.eval())
    dkm.compress_(model, "*weight:1", steps=5)
    before = weights(model)
    done = dkm.reconstruct_(model, teacher, torch.randn(4, 16, 6), epochs=2)
    assert all(block.after == block.before < 1e-12 for block in done.blocks)
    unchanged = [name for name, value in weights(model).items() if torch.equal(value, before[name])]
    assert {name for name in before if "original" in name or "bias" in name} <= set(unchanged)


def test_a_block_that_training_makes_worse_stays_as_it_was():
    model, teacher = compressed(tau=1e6)  # so soft that all weights are the same
    done = dkm.reconstruct_(model, teacher, batches(), epochs=2, lr=1.0)
    untrained = compressed()[0]
    assert all(block.after == block.before for block in done.blocks)
    for (name, ours), theirs in zip(weights(model).items(), weights(untrained).values(), strict=True):
        if "original" in name or "C" in name:
            assert torch.equal(ours, theirs), name


def test_little_memory_gives_the_same():
    """Inputs that are computed again in each step are those that are kept."""
    model, _, kept = reconstructed(epochs=2)
    frugal, _, computed = reconstructed(epochs=2, memory=0)
    assert [b.after for b in computed.blocks] == pytest.approx([b.after for b in kept.blocks], rel=1e-3)
    for (name, ours), theirs in zip(weights(model).items(), weights(frugal).values(), strict=True):
        if "seen" not in name:
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4, msg=name)


def test_blocks_by_name_leave_the_others_alone():
    model, teacher = compressed()
    before = weights(model)
    done = dkm.reconstruct_(model, teacher, batches(), epochs=2, blocks=["2"])
    assert [block.name for block in done.blocks] == ["2"]
    assert done.left == ["0.0.weight", "1.conv1.weight", "1.conv2.weight", "3.2.weight"]
    changed = {name for name, value in weights(model).items() if not torch.equal(value, before[name])}
    assert changed
    assert all(name.startswith("2.") for name in changed)


def test_it_goes_on_from_a_state_dict():
    """A run that is resumed begins at the block after the last one that was stored."""
    whole, teacher = compressed()
    work = Reconstructing(whole, teacher, batches(), epochs=2, lr=1e-3)
    first = [work.train(number) for number in (0, 1)]
    stored = weights(whole)
    rest = [work.train(number) for number in (2, 3)]
    again, _ = compressed()
    again.load_state_dict(stored)
    resumed = Reconstructing(again, teacher, batches(), epochs=2, lr=1e-3)
    assert [resumed.train(number).after for number in (2, 3)] == pytest.approx([b.after for b in rest], rel=1e-3)
    assert len(first) == 2
    for (name, ours), theirs in zip(weights(whole).items(), weights(again).values(), strict=True):
        if "seen" not in name:
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4, msg=name)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.layers = nn.Embedding(20, 8), nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, 20)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        x = self.embedding(tokens) * mask[..., None]
        for layer in self.layers:
            x = x + layer(x).relu()
        return self.head(x)


def test_tied_weights_are_trained_in_the_first_block_only():
    model = Tied()
    teacher = dkm.teacher(model.eval())
    dkm.compress_(model, "*weight:2", steps=5)
    tokens = [dict(tokens=torch.randint(20, (4, 6)), mask=torch.ones(4, 6)) for _ in range(3)]
    found: list[tuple[str, Tensor]] = []
    done = dkm.reconstruct_(
        model,
        teacher,
        tokens,
        epochs=3,
        progress=lambda block: found.append((block.name, weights(model)["head.parametrizations.weight.original"])),
    )
    assert [block.name for block in done.blocks] == ["embedding", "layers.0", "layers.1"]
    assert [name for name, _ in found] == [block.name for block in done.blocks]
    assert all(torch.equal(value, found[0][1]) for _, value in found)
    assert model.head.parametrizations.weight.original is model.embedding.parametrizations.weight.original


@pytest.mark.parametrize("kind", ["Bert", "Llama"])
def test_transformers(kind: str):
    """Layers get masks and positions besides what the layer before gives, and all of it follows."""
    transformers = pytest.importorskip("transformers")
    size = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, vocab_size=50)
    config = getattr(transformers, f"{kind}Config")(**size, use_cache=False)
    make = transformers.BertForSequenceClassification if kind == "Bert" else transformers.LlamaForCausalLM
    plan = {"Bert": "bert.encoder*dense.weight:1", "Llama": "*proj.weight:1"}[kind]
    tokens = [torch.randint(50, (4, 7)) for _ in range(3)]
    mask = torch.ones(4, 7, dtype=torch.long)
    mask[0, 5:] = 0
    texts = [dict(input_ids=each, attention_mask=mask) for each in tokens]
    errors = []
    for memory in (4e9, 0):
        torch.manual_seed(0)
        model = make(config).eval()
        teacher = dkm.teacher(model)
        dkm.compress_(model, plan, steps=1)
        done = dkm.reconstruct_(model, teacher, texts, epochs=8, lr=1e-3, memory=memory)
        assert [block.name.rpartition(".")[2] for block in done.blocks] == ["0", "1"]
        assert all(block.after < block.before for block in done.blocks)
        assert not done.left
        errors.append([block.after for block in done.blocks])
    assert errors[0] == pytest.approx(errors[1], rel=1e-3)


def test_modes_gradients_and_frozen_weights_stay():
    model, teacher = compressed()
    model.train()
    model[1].eval()
    model[2].conv1.parametrizations.weight.original.requires_grad_(False)
    frozen = weights(model)["2.conv1.parametrizations.weight.original"]
    modes = [module.training for module in model.modules()]
    done = dkm.reconstruct_(model, teacher, batches(2), epochs=1)
    assert [module.training for module in model.modules()] == modes
    assert all(parameter.grad is None for parameter in (*model.parameters(), *teacher.parameters()))
    assert torch.equal(weights(model)["2.conv1.parametrizations.weight.original"], frozen)
    assert done.blocks[2].tensors == ("2.conv2.weight",)
    assert done.left == ["2.conv1.weight"]


@pytest.mark.parametrize("method", ["hard", "soft-sharing", "quant_noise"])
def test_other_methods(method: str):
    model = network()
    teacher = dkm.teacher(model)
    dkm.compress_(model, "*.conv*:2", method=method, steps=5)
    done = dkm.reconstruct_(model, teacher, batches(), epochs=4)
    assert any(block.after < block.before for block in done.blocks)


def test_batches_of_another_kind():
    model, teacher = compressed()
    pairs = [{"image": x} for x in batches(2)]

    def forward(network: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return network(batch["image"])

    assert dkm.reconstruct_(model, teacher, pairs, epochs=1, forward=forward).blocks


def test_a_block_that_some_batches_leave_out():
    class Branch(nn.Module):
        def __init__(self):
            super().__init__()
            self.always, self.sometimes = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.sometimes(self.always(x) * 2) if x.sum() > 0 else self.always(x)

    model = Branch()
    teacher = dkm.teacher(model)
    dkm.compress_(model, "*weight:1", steps=1)
    with pytest.raises(ValueError, match="'sometimes' is not called for each batch"):
        dkm.reconstruct_(model, teacher, [torch.ones(2, 4), -torch.ones(2, 4)], epochs=1)


def uncompressed() -> tuple[nn.Module, nn.Module]:
    return network(), network()


def taught_by_itself() -> tuple[nn.Module, nn.Module]:
    model, _ = compressed()
    return model, copy.deepcopy(model).eval()


def taught_by_another() -> tuple[nn.Module, nn.Module]:
    return compressed()[0], nn.Sequential(nn.Conv2d(3, 8, 3)).eval()


def taught_in_training_mode() -> tuple[nn.Module, nn.Module]:
    return compressed()[0], network().train()


@pytest.mark.parametrize(
    ("make", "options", "said"),
    [
        (uncompressed, {}, "no clustered weight: call dkm.compress_"),
        (taught_by_itself, {}, "the teacher is compressed"),
        (taught_by_another, {}, "the teacher is another model: it has no"),
        (taught_in_training_mode, {}, "the teacher is in training mode"),
        (compressed, dict(batches=[]), "at least one batch"),
        (compressed, dict(epochs=0), "epochs must be an integer of at least 1, got 0"),
        (compressed, dict(lr=float("nan")), "lr must be a positive finite number"),
        (compressed, dict(blocks=["1", "nothing"]), "no module 'nothing' to be a block"),
    ],
)
def test_what_cannot_be(make: Callable[[], tuple[nn.Module, nn.Module]], options: dict, said: str):
    model, teacher = make()
    given = dict(batches=batches(1)) | options
    with pytest.raises(ValueError, match=said):
        dkm.reconstruct_(model, teacher, given.pop("batches"), **given)
