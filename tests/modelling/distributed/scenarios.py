"""What several processes do together; run by test_distributed.py under torchrun: scenarios.py FOLDER [SCENARIO ...].

Every function `ddp_*`, `fsdp_*` and `saved_*` is a scenario.  It is called on every rank, and raises where something
is wrong.  Rank r writes FOLDER/RANKS.r.json: scenario -> "" or what was wrong.  Where nothing else is said, a model on
all ranks is compared with the same model in one process, with all ranks' batches, in float64.
"""

import datetime
import json
import math
import os
import sys
import time
import traceback
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import dkm
from dkm import Clustered
from dkm.clustering.kernels import choose

RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
FOLDER = Path(sys.argv[1])


def build(seed: int = 0) -> nn.Sequential:
    """Layer 0 has 21 rows, which no number of ranks divides, and vectors of 5 that cross from shard to shard.  Layer 4
    has 3 rows, so that one of 4 ranks has none."""
    torch.manual_seed(seed)
    layers = nn.Linear(24, 21), nn.Tanh(), nn.Linear(21, 10), nn.Tanh(), nn.Linear(10, 3)
    return nn.Sequential(*layers).double()


PLAN = "0:3/5, 2:3/1, 4:2/4"


def compressed(model: nn.Module | None = None, plan: str = PLAN, **options) -> nn.Module:
    model = build() if model is None else model
    dkm.compress_(model, plan, **{"tau": 1e-2, "eps": 0.0, **options})
    return model


def sharded(model: nn.Module, **options) -> nn.Module:
    for child in model.children():
        if any(True for _ in child.parameters()):
            fully_shard(child, **options)
    return fully_shard(model, **options)


def pair(plan: str = PLAN, make=build, shard: dict | None = None, **options) -> tuple[nn.Module, nn.Module]:
    """A model for one process and the same one, sharded."""
    return compressed(make(), plan, **options), sharded(compressed(make(), plan, **options), **(shard or {}))


def batch(step: int = 0, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(*(shape or (8, 24)), generator=generator, dtype=torch.float64)


def mine(x: torch.Tensor) -> torch.Tensor:
    return x.chunk(RANKS)[RANK]


def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def clusterings(model: nn.Module) -> list[Clustered]:
    return [module for module in model.modules() if isinstance(module, Clustered)]


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_close(got, wanted, what: str = "", rtol: float = 1e-8, atol: float = 1e-11) -> None:
    torch.testing.assert_close(full(got), full(wanted), rtol=rtol, atol=atol, msg=lambda text: f"{what}: {text}")


def assert_same_gradients(model: nn.Module, reference: nn.Module) -> None:
    for (name, got), wanted in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert (got.grad is None) == (wanted.grad is None), name
        if wanted.grad is not None:
            assert_close(got.grad, wanted.grad, f"gradient of {name}")


def assert_same_state(model: nn.Module, reference: nn.Module, **tolerance) -> None:
    state = model.state_dict()
    for name, wanted in reference.state_dict().items():
        if name.endswith(".seen"):
            continue  # of other bits
        assert_close(state[name], wanted, name, **tolerance)


def assert_ranks_agree(model: nn.Module) -> None:
    """Assert that whatever is not sharded is the same on all ranks, bit for bit."""
    for name, tensor in model.state_dict().items():
        if not isinstance(tensor, DTensor):
            everyone = [torch.empty_like(tensor) for _ in range(RANKS)]
            dist.all_gather(everyone, tensor)
            assert all(torch.equal(other, tensor) for other in everyone), name


def train(model: nn.Module, reference: nn.Module, steps: int = 3, make=None) -> None:
    """Train both models; compare their gradients at every step and their state at the end."""
    make = make or (lambda parameters: torch.optim.AdamW(parameters, lr=1e-2))
    optimizers = make(model.parameters()), make(reference.parameters())
    for step in range(steps):
        loss(model, mine(batch(step))).backward()
        loss(reference, batch(step)).backward()
        assert_same_gradients(model, reference)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_state(model, reference)
    assert_ranks_agree(model)
    assert [int(c.step) for c in clusterings(model)] == [int(c.step) for c in clusterings(reference)]


# DistributedDataParallel


def _ddp(seed: int = RANK, **options) -> None:
    """Other weights and another stream of random numbers on every rank, before DDP sends those of the first rank."""
    model = DistributedDataParallel(compressed(build(seed), steps=4, tau="auto"), **options)
    reference = compressed(steps=4, tau="auto")
    assert_ranks_agree(model)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, reference)]
    for step in range(3):
        loss(model, mine(batch(step))).backward()
        loss(reference, batch(step)).backward()
        assert_ranks_agree(model)
        assert_same_gradients(model, reference)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_state(model.module, reference)
    assert [int(c.step) for c in clusterings(model)] == [2, 2, 2]


def ddp_default():
    _ddp()


def ddp_static_graph():
    _ddp(static_graph=True)


def ddp_find_unused_parameters():
    _ddp(find_unused_parameters=True)


def ddp_gradient_as_bucket_view():
    _ddp(gradient_as_bucket_view=True)


def ddp_without_broadcasting_buffers():
    """Then DDP sends no buffers at all, and the weights must have been the same when they were compressed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # a newer name comes up
        _ddp(seed=0, broadcast_buffers=False)


def ddp_no_sync():
    model, reference = DistributedDataParallel(compressed(build(seed=RANK))), compressed()
    with model.no_sync():
        loss(model, mine(batch(0))).backward()
    loss(model, mine(batch(1))).backward()
    for step in range(2):
        loss(reference, batch(step)).backward()
    assert_same_gradients(model, reference)


# fully_shard: values and gradients


def fsdp_equals_one_process():
    reference, model = pair()
    train(model, reference, 4)


def fsdp_every_way_to_split_vectors():
    """Vectors longer than a row, a shard or two shards; ranks without a row; sizes that do not divide evenly."""
    for rows, width, dim in [(1, 7, 3), (2, 5, 4), (3, 1, 2), (5, 2, 3), (7, 1, 5), (6, 2, 4), (9, 3, 30), (13, 2, 7)]:

        def make(rows=rows, width=width):
            torch.manual_seed(0)
            return nn.Sequential(nn.Linear(24, width), nn.Linear(width, rows)).double()

        reference, model = pair(f"1:1/{dim}", make, tau=1.0)
        loss(model, mine(batch())).backward()
        loss(reference, batch()).backward()
        assert_same_gradients(model, reference)
        model.eval(), reference.eval()
        assert_close(model(batch()), reference(batch()), f"{rows} rows of {width}, vectors of {dim}")


# Scales, and groups of each kind.  21 rows of 24 are 11 + 10 on 2 ranks, and 6 + 6 + 6 + 3 on 4: tiles of 4 rows,
# groups of 8 rows and of 25 consecutive weights cross from shard to shard, and tiles of 7 columns are cut off at the
# edge.  Some groups are as large as all of a weight, so that most ranks have none.
SCALES_AND_GROUPS = (
    "0:2 scaled, 2:2/3 scaled, 4:1 scaled e4m3",
    "0:2 per 8 rows, 2:2/3 per 4 rows, 4:1 per 2 rows",
    "0:2/3 per 4x7, 2:1 per 3x8, 4:1 per 2x4",
    "0:2 per 25, 2:1/2 per 24, 4:1/3 per 7",
    "0:2/3 scaled per 8 rows, 2:1/2 scaled per 4x8 e4m3, 4:1 scaled per row",
    "0:1/2 scaled per 400, 2:1 per 999, 4:1 per 9 rows",
)


GROUPED = "0:2/3 scaled per 4x7, 2:2 per 25, 4:1 per 2 rows"


def fsdp_scales_and_groups():
    for plan in SCALES_AND_GROUPS:
        reference, model = pair(plan)
        train(model, reference)
        reference.load_state_dict({name: full(tensor) for name, tensor in model.state_dict().items()})
        model.eval(), reference.eval()
        for got, wanted in zip(model[::2], reference[::2], strict=True):
            assert torch.equal(full(got.weight), wanted.weight), plan
        assert_close(model(batch()), reference(batch()), plan)


def fsdp_learned_temperature_and_other_options_of_groups():
    for options in (
        dict(tau="learn"),
        dict(tau="auto", steps=3, eps=1e-2),
        dict(gradient="implicit"),
        dict(metric="euclidean", tau=0.1, gradient="last"),
    ):
        reference, model = pair(GROUPED, **options)
        train(model, reference)
        for got, wanted in zip(clusterings(model), clusterings(reference), strict=True):
            assert torch.equal(got.iterations, wanted.iterations)  # the most of any group, on whatever rank


def fsdp_large_groups_one_by_one():
    """As for groups that are too large to be clustered together."""
    backend = choose("auto", torch.zeros(1, dtype=torch.double), 4)

    fits, backend.fits_groups = backend.fits_groups, lambda *_: False
    try:
        reference, model = pair("0:2/3 scaled per 4x7, 2:2 per 25", tau="learn")
        train(model, reference)
    finally:
        backend.fits_groups = fits


def fsdp_every_group_on_one_rank():
    """A rank holds its groups and no more: at most the values of one group come from other ranks."""
    backend = choose("auto", torch.zeros(1, dtype=torch.double), 4)

    sizes, forward = [], backend.forward_groups

    def counted(W, *args):
        sizes.append(W.numel())
        return forward(W, *args)

    backend.forward_groups = counted
    try:
        for plan, rows in (("0:2 per 8x6", 64), ("0:2 per 5 rows", 64)):
            _, model = pair(plan, make=lambda rows=rows: nn.Sequential(nn.Linear(24, rows)).double())
            sizes.clear()
            loss(model, mine(batch()))
            groups = [min(5, 64 - row) for row in range(0, 64, 5) if row * RANKS // 64 == RANK]
            assert sizes == [24 * (64 // RANKS if "x" in plan else sum(groups))], (plan, sizes)
    finally:
        backend.forward_groups = forward


def fsdp_diverged_weights_of_groups():
    """A vector with NaN shows as NaN on every rank that holds a part of it, and no other weight does."""
    for plan in ("0:2/5", "0:2/5 scaled per 8 rows", "0:2/5 per 4x7"):
        reference, model = pair(plan)
        reference[0].parametrizations.weight.original.data[5, 3] = math.inf
        if RANK == 0:
            model[0].parametrizations.weight.original._local_tensor[5, 3] = math.inf
        model.eval(), reference.eval()
        got, wanted = full(model[0].weight), reference[0].weight
        assert wanted.isnan().any()
        assert torch.equal(got.isnan(), wanted.isnan()), plan
        assert torch.equal(got.nan_to_num(), wanted.nan_to_num()), plan


def fsdp_convolutions():
    def make():
        torch.manual_seed(0)
        return nn.Sequential(nn.Unflatten(1, (3, 8)), nn.Conv1d(3, 10, 3), nn.Flatten(), nn.Linear(60, 4)).double()

    reference, model = pair("1:3/4, 3:4", make)
    train(model, reference)


def fsdp_recurrent_layers():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.recurrent = nn.LSTM(6, 10, batch_first=True)

        def forward(self, x):
            return self.recurrent(x.view(-1, 4, 6))[0].sum(1)

    def make():
        torch.manual_seed(0)
        return Net().double()

    plan = "recurrent.weight_*:3/4"
    reference, model = compressed(make(), plan), fully_shard(compressed(make(), plan))
    train(model, reference)


def fsdp_gathered_ahead_of_time():
    reference, model = pair()
    model[0].set_modules_to_forward_prefetch([model[2]])
    model[4].set_modules_to_backward_prefetch([model[2]])
    for step in range(2):
        model.unshard() if step else None
        model[4].unshard(async_op=True) if step else None
        loss(model, mine(batch(step))).backward()
        loss(reference, batch(step)).backward()
        assert_same_gradients(model, reference)


def fsdp_compiled_blocks():
    reference, model = compressed(), compressed()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's own
        for block in model:
            block.compile(backend="aot_eager")
        train(sharded(model), reference)


def fsdp_options_of_the_clustering():
    for options in (
        dict(metric="euclidean", tau=0.1),
        dict(gradient="last"),
        dict(gradient="implicit"),
        dict(eps=1e-3),
        dict(tau="auto", steps=3),
    ):
        reference, model = pair(**options)
        train(model, reference)


def fsdp_learned_temperature():
    reference, model = pair(tau="learn")
    train(model, reference)


def fsdp_every_rank_clusters_its_own_shard():
    backend = choose("auto", torch.zeros(1, dtype=torch.double), 4)

    sizes, forward, backward = [], backend.forward, backend.backward

    def counted(real, position):
        def wrapper(*args, **options):
            sizes.append(args[position].numel())
            return real(*args, **options)

        return wrapper

    _, model = pair("0:3/4", make=lambda: nn.Sequential(nn.Linear(24, 64)).double())
    backend.forward, backend.backward = counted(forward, 0), counted(backward, 0)
    try:
        loss(model, mine(batch())).backward()
    finally:
        backend.forward, backend.backward = forward, backward
    assert sizes
    assert set(sizes) == {64 * 24 // RANKS}, sizes


def fsdp_extreme_scales():
    """Weights that are divided by a power of two before they are clustered, on top of scales and groups."""

    def make():
        model = build()
        with torch.no_grad():
            model[0].weight *= 2.0**-40
            model[0].bias.zero_()
            model[2].weight *= 2.0**40
        return model

    reference, model = pair("0:2/5 scaled, 2:2 per 25, 4:2/4", make, tau="auto", steps=3)
    assert [c.shift != 0 for c in clusterings(model)] == [True, True, False]
    loss(model, mine(batch())).backward()
    loss(reference, batch()).backward()
    for got, wanted in zip(model.parameters(), reference.parameters(), strict=True):
        size = float(wanted.grad.abs().max())
        assert_close(got.grad / size, wanted.grad / size)
    model.eval(), reference.eval()
    assert torch.equal(full(model[0].weight), reference[0].weight)


def fsdp_one_group_for_all():
    reference, model = compressed(), fully_shard(compressed())
    train(model, reference)


def fsdp_reshard_after_forward():
    for choice in (True, False):
        reference, model = pair(shard=dict(reshard_after_forward=choice))
        train(model, reference)


def fsdp_replicated_shards():
    mesh = init_device_mesh("cpu", (2, RANKS // 2), mesh_dim_names=("replicate", "shard"))
    for plan in (PLAN, GROUPED):
        reference, model = pair(plan, shard=dict(mesh=mesh))
        train(model, reference)


def fsdp_a_weight_read_several_times():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(24, 2, batch_first=True)
            self.twice = nn.Linear(24, 24)

        def forward(self, x):
            y = self.attention(x[None], x[None], x[None])[0][0]
            return self.twice(torch.tanh(self.twice(y)))

    def make():
        torch.manual_seed(0)
        return Net().double()

    plan = "attention.in_proj_weight:3/5, twice:4"
    reference, model = compressed(make(), plan), fully_shard(compressed(make(), plan))
    for step in range(2):
        loss(model, batch(step)).backward()  # attention mixes the samples of a batch: the same one everywhere
        loss(reference, batch(step)).backward()
        assert_same_gradients(model, reference)


def fsdp_tied_weights():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(24, 24), nn.Linear(24, 24)
            self.b.weight = self.a.weight

        def forward(self, x):
            return self.b(torch.tanh(self.a(x)))

    def make():
        torch.manual_seed(0)
        return Net().double()

    reference, model = compressed(make(), "a:3/5"), fully_shard(compressed(make(), "a:3/5"))
    train(model, reference)
    assert model.a.parametrizations.weight.original is model.b.parametrizations.weight.original


def fsdp_activation_checkpointing():
    for use_reentrant in (False, True):
        reference, model = pair()
        x = mine(batch()).requires_grad_()
        checkpoint(model, x, use_reentrant=use_reentrant).square().mean().backward()
        loss(reference, batch()).backward()
        assert_same_gradients(model, reference)

        class Checked(nn.Module):
            def __init__(self, inner, use_reentrant=use_reentrant):
                super().__init__()
                self.inner, self.use_reentrant = inner, use_reentrant

            def forward(self, x):
                return checkpoint(self.inner, x, use_reentrant=self.use_reentrant)

        parts = compressed()
        model = sharded(nn.Sequential(Checked(parts[:2]), Checked(parts[2:])))
        loss(model, mine(batch()).requires_grad_()).backward()
        assert_same_gradients(model, reference)


def fsdp_frozen_weights():
    def make():
        model = build()
        model[2].weight.requires_grad_(False)
        return model

    reference, model = pair(make=make)
    train(model, reference)
    for m in (model, reference):  # and thawed again
        m[2].parametrizations.weight.original.requires_grad_(True)
    train(model, reference)


# fully_shard: what else can happen to a gradient


def fsdp_accumulation():
    for set_to_none in (True, False):
        for zero_first in (True, False):
            reference, model = pair()
            optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]
            for step in range(2):
                for m, part in ((model, mine), (reference, lambda x: x)):
                    for micro in range(2):
                        value = loss(m, part(batch(2 * step + micro)))
                        if micro == 0 and zero_first:
                            m.zero_grad(set_to_none)
                        value.backward()
                    nn.utils.clip_grad_norm_(m.parameters(), 0.1)
                    loss(m, part(batch(99))).backward()
                assert_same_gradients(model, reference)
                for optimizer in optimizers:
                    optimizer.step()
                    if not zero_first:
                        optimizer.zero_grad(set_to_none)
            assert_same_state(model, reference)


def fsdp_accumulation_without_sync():
    for keep in (False, True):
        reference, model = pair()
        for step in range(2):
            for micro in range(3):
                model.set_requires_gradient_sync(micro == 2)
                model.set_reshard_after_backward(micro == 2 or not keep)
                loss(model, mine(batch(3 * step + micro))).backward()
                loss(reference, batch(3 * step + micro)).backward()
            assert_same_gradients(model, reference)  # of the second round too: on top of the first


def fsdp_two_forward_passes_one_backward():
    reference, model = pair()
    (loss(model, mine(batch(0))) + loss(model, mine(batch(1)))).backward()
    (loss(reference, batch(0)) + loss(reference, batch(1))).backward()
    assert_same_gradients(model, reference)


def fsdp_a_penalty_on_the_parameters():
    reference, model = pair("0:3/5", lambda: build()[:3])  # FSDP2 itself fails here where a rank has no rows
    for _ in range(2):
        for m, x in ((model, mine(batch())), (reference, batch())):
            (loss(m, x) + sum(full(p.square().sum()) for p in m.parameters())).backward()
        assert_same_gradients(model, reference)
    for m in (model, reference):
        m.zero_grad()
        sum(full(p.square().sum()) for p in m.parameters()).backward()
    assert_same_gradients(model, reference)


def fsdp_hooks_of_the_user_see_the_gradient_of_the_weight():
    reference, model = pair()
    weight, seen = model[0].parametrizations.weight.original, []
    loss(model, mine(batch())).backward()
    weight.grad = None
    weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.full_tensor().clone()))
    loss(model, mine(batch())).backward()
    loss(reference, batch()).backward()
    assert_close(seen[0], reference[0].parametrizations.weight.original.grad)


# fully_shard: modes


def fsdp_modes_alternate():
    for choice in (True, False):
        reference, model = pair(shard=dict(reshard_after_forward=choice))
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]
        for step in range(3):
            for grad in (False, True):
                model.eval(), reference.eval()
                with torch.set_grad_enabled(grad):
                    assert_close(model(batch(9)), reference(batch(9)), "evaluation")
                model.train(), reference.train()
                with torch.set_grad_enabled(grad):
                    assert_close(model(batch(9)), reference(batch(9)), "training")
            loss(model, mine(batch(step))).backward()
            loss(reference, batch(step)).backward()
            assert_same_gradients(model, reference)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        assert_same_state(model, reference)


def fsdp_evaluation_between_forward_and_backward():
    for choice in (True, False):
        reference, model = pair(shard=dict(reshard_after_forward=choice))
        values = loss(model, mine(batch())), loss(reference, batch())
        model.eval(), reference.eval()
        with torch.no_grad():
            assert_close(model(batch(9)), reference(batch(9)), "evaluation")
        for value in values:
            value.backward()
        assert_same_gradients(model, reference)


def fsdp_evaluation_changes_no_state():
    _, model = pair()
    before = {name: full(tensor).clone() for name, tensor in model.state_dict().items()}
    model.eval()(batch())
    assert all(torch.equal(full(tensor), before[name]) for name, tensor in model.state_dict().items())


def fsdp_reading_the_weight_outside_of_a_forward_pass():
    reference, model = pair()
    for mode in (True, False):
        model.train(mode), reference.train(mode)
        weight = model[0].weight
        assert isinstance(weight, DTensor)
        assert not weight.requires_grad
        assert_close(weight, reference[0].weight)
    assert [int(c.step) for c in clusterings(model)] == [0, 0, 0]


# fully_shard: precision


def fsdp_mixed_precision():
    """The clustering is that of the float32 weights; what is gathered is bfloat16."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    make = lambda: build().float()  # noqa: E731
    reference, model = pair(make=make, shard=dict(mp_policy=policy))
    read = []
    model[0].register_forward_pre_hook(lambda module, args: read.append(module.weight.detach().clone()))
    x = batch().float()
    loss(model, mine(x)).float().backward()
    assert read[0].dtype == torch.bfloat16
    assert_close(read[0], reference[0].weight.bfloat16(), rtol=1e-2, atol=1e-5)
    for name, got in model.named_parameters():
        assert got.dtype == got.grad.dtype == torch.float32, name
    loss(reference, x).backward()
    got, wanted = (full(m[0].parametrizations.weight.original.grad) for m in (model, reference))
    assert float((got - wanted).norm() / wanted.norm()) < 0.05
    assert [c.C.dtype for c in clusterings(model)] == [torch.float32] * 3
    assert_ranks_agree(model)


def fsdp_bfloat16_model():
    for plan in (PLAN, GROUPED):
        reference, model = pair(plan, make=lambda: build().bfloat16())
        loss(model, mine(batch().bfloat16())).backward()
        loss(reference, batch().bfloat16()).backward()
        for name in "024":
            got, wanted = (m.get_submodule(name) for m in (model, reference))
            assert_close(got.weight, wanted.weight, rtol=1e-2, atol=1e-3)
            got, wanted = (full(m.parametrizations.weight.original.grad).float() for m in (got, wanted))
            assert float((got - wanted).norm() / wanted.norm()) < 0.05, name
        assert [c.C.dtype for c in clusterings(model)] == [torch.float32] * 3


def fsdp_converted_afterwards():
    """model.double() on shards, uneven ones too.  FSDP2 itself allows it until the first forward pass."""
    reference, model = pair(make=lambda: build().float())
    for m in (model, reference):
        m.double()
    train(model, reference)


def fsdp_checksum_is_that_of_the_whole_weight():
    """So that a checkpoint of shards continues on one process, and the other way round."""
    reference, model = pair()
    loss(model, mine(batch())).backward()
    for got, wanted in zip(clusterings(model), clusterings(reference), strict=True):
        assert torch.equal(got.seen, wanted.seen)


# checkpoints and files.  4 ranks write, then 2 ranks read


def saved_state_resumes_on_other_ranks():
    for plan in (PLAN, GROUPED):
        _resumes_on_other_ranks(plan)


def _resumes_on_other_ranks(plan: str):
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    def make_optimizer(model):
        return torch.optim.AdamW(model.parameters(), lr=1e-2)

    def run(model, optimizer, first, last, part=mine):
        for step in range(first, last):
            loss(model, part(batch(step))).backward()
            optimizer.step()
            optimizer.zero_grad()

    def state(model, optimizer):
        return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))

    options = dict(plan=plan, tau="auto", steps=6)
    where = FOLDER / f"checkpoint{plan == PLAN}"
    if RANKS == 4:
        model = sharded(compressed(**options))
        optimizer = make_optimizer(model)
        run(model, optimizer, 0, 3)
        dcp.save(state(model, optimizer), checkpoint_id=where)
        return
    whole = compressed(**options)
    optimizer = make_optimizer(whole)
    run(whole, optimizer, 0, 6, lambda x: x)
    for model, part in ((sharded(compressed(build(seed=5), **options)), mine), (compressed(build(5), **options), None)):
        optimizer = make_optimizer(model)
        loaded = state(model, optimizer)
        dcp.load(loaded, checkpoint_id=where)
        set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
        run(model, optimizer, 3, 6, part or (lambda x: x))
        assert_same_state(model, whole, rtol=1e-6, atol=1e-9)
        assert [int(c.step) for c in clusterings(model)] == [5, 5, 5]


def saved_state_resumes_exactly_on_as_many_ranks():
    def run(model, optimizer, first, last):
        for step in range(first, last):
            loss(model, mine(batch(step))).backward()
            optimizer.step()
            optimizer.zero_grad()

    plan = "0:2/3 scaled per 4x7, 2:3/5, 4:1 per 2 rows"
    model = sharded(compressed(plan=plan))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run(model, optimizer, 0, 2)
    dcp.save({"model": model.state_dict()}, checkpoint_id=FOLDER / f"exact{RANKS}")
    run(model, optimizer, 2, 4)
    twin = sharded(compressed(build(seed=3), plan))
    loaded = {"model": twin.state_dict()}
    dcp.load(loaded, checkpoint_id=FOLDER / f"exact{RANKS}")
    for assign in (False, True):
        twin.load_state_dict(loaded["model"], assign=assign)
    run(twin, torch.optim.SGD(twin.parameters(), lr=0.1), 2, 4)
    for (name, a), b in zip(model.state_dict().items(), twin.state_dict().values(), strict=True):
        assert torch.equal(full(a), full(b)), name


def saved_file_is_that_of_one_process():
    for plan in (PLAN, GROUPED):
        _file_is_that_of_one_process(plan)


def _file_is_that_of_one_process(plan: str):
    reference, model = pair(plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss(model, mine(batch())).backward()
    optimizer.step()
    model(mine(batch()))
    reference.load_state_dict({name: full(tensor) for name, tensor in model.state_dict().items()})
    model.eval()(batch())  # the root module keeps what it has gathered
    path, wanted = FOLDER / f"sharded{RANKS}.dkm", FOLDER / f"whole{RANKS}.{RANK}.dkm"
    size, written = dkm.size(model), dkm.save(model, path)
    assert written == dkm.save(reference, wanted) == size.file_bytes
    assert str(size) == str(dkm.size(reference))
    assert path.read_bytes() == wanted.read_bytes()
    assert_close(dkm.load(path, into=build())(batch()), model(batch()), atol=1e-2)
    train(model, model, 0)  # still bit-equal


def saved_file_from_one_rank_that_cannot_write():
    _, model = pair()
    with pytest.raises((dkm.FileError, RuntimeError), match="cannot write" if RANK == 0 else "first rank failed"):
        dkm.save(model, FOLDER / "no" / "such" / "folder.dkm")
    dist.barrier()
    assert not (FOLDER / "no").exists()


def saved_file_of_a_diverged_model():
    _, model = pair()
    weight = model[2].parametrizations.weight.original
    if RANK == 0:
        weight._local_tensor[0, 0] = math.nan
    with pytest.raises(dkm.FileError, match=r"2\.weight holds NaN"):
        dkm.save(model, FOLDER / "diverged.dkm")


# what is watched


def fsdp_monitor():
    reference, model = pair("0:3/5, 2:2/3 scaled per 4x7", tau="learn")
    file = FOLDER / f"monitor.{RANKS}.jsonl"
    watched = dkm.monitor(model, every=1, jsonl=file)
    watched.record(0)
    train(model, reference)
    record, wanted = watched.record(1), dkm.monitor(reference).record(0)
    for name, numbers in wanted["tensors"].items():
        for key in numbers.keys() - {"changed"}:
            assert math.isclose(record["tensors"][name][key], numbers[key], rel_tol=1e-4), (name, key, record, wanted)
    assert record["total"]["changed"] is not None
    dist.barrier()
    assert len(file.read_text().splitlines()) == 2


# what is refused


def fsdp_refusals():
    with pytest.raises(ValueError, match="before fully_shard"):
        compressed(fully_shard(build()))
    with pytest.raises(ValueError, match=r"dkm\.save"):
        dkm.snap_(sharded(compressed()))
    with pytest.raises(NotImplementedError, match="rows"):
        fully_shard(compressed(nn.Sequential(nn.Linear(24, 8)), "0:3"), shard_placement_fn=lambda p: Shard(p.ndim - 1))


def main() -> None:
    warnings.simplefilter("error", UserWarning)
    dist.init_process_group("gloo", timeout=datetime.timedelta(minutes=10))
    results = {}
    for name in sys.argv[2:] or [name for name in globals() if name.startswith(("ddp_", "fsdp_", "saved_"))]:
        began = time.perf_counter()
        try:
            globals()[name]()
            results[name] = ""
        except BaseException:  # checkpoints raise those
            results[name] = traceback.format_exc()
        if RANK == 0:
            print(f"{RANKS} ranks, {name}: {time.perf_counter() - began:.1f} s", flush=True)
        (FOLDER / f"{RANKS}.{RANK}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
