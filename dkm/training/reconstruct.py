"""Training block by block: each one follows what the same block of the uncompressed network computes."""

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_leaves, tree_map_only, tree_unflatten

from ..foundation.errors import DKMError
from ..modelling.clock import Clock
from ..modelling.clustered import Clustered
from ..modelling.dtensors import is_sharded
from ..modelling.parameters import clustered_parameters, unwrapped
from .batchnorm import feed, recalibrate_
from .blocks import Block, Seen, find_blocks
from .needs import method_loss, needs

Forward = Callable[[nn.Module, Any], Any]


class Reconstructed(NamedTuple):
    """What became of a block.  An error is that of its snapped outputs: the mean square over their variance."""

    name: str
    modules: tuple[str, ...]  # that module, and those that follow it in the block
    tensors: tuple[str, ...]  # the clustered tensors that were trained
    before: float  # the error before, with k-means
    after: float


@dataclass(frozen=True)
class Reconstruction:
    """What `reconstruct_` has done: `print` it for a table."""

    blocks: list[Reconstructed] = field(default_factory=list)
    left: list[str] = field(default_factory=list)  # clustered tensors that are in no block, and were not trained

    def __str__(self) -> str:
        width = max((len(block.name) for block in self.blocks), default=0)
        lines = [
            f"{block.name:<{width}}  error {block.before:.3g} -> {block.after:.3g}, {', '.join(block.tensors)}"
            for block in self.blocks
        ]
        return "\n".join([*lines, f"in no block: {', '.join(self.left) or 'none'}"])


def reconstruct_(
    model: nn.Module,
    teacher: nn.Module,
    batches: Iterable[Any],
    *,
    epochs: int = 10,
    lr: float = 3e-3,
    blocks: Sequence[str] | None = None,
    forward: Forward | None = None,
    memory: float = 4e9,
    progress: Callable[[Reconstructed], None] | None = None,
) -> Reconstruction:
    """Train the compressed model block by block, in place, to follow the uncompressed one.  Needs no labels.

    From the first block to the last, the weights, biases and norms of a block are trained with Adam, so that its
    output, from what the snapped blocks before it give, comes near to what the teacher's block outputs: the loss is the
    mean squared error over the variance of the teacher's output.  The temperatures of the block's tensors go through
    their whole schedule in the steps of the block.  Its batch norms then get the statistics of the snapped block.
    A block whose snapped output training did not improve stays as it was.

    Args:
        model: compressed, with `compress_`.
        teacher: the model as it was before, `dkm.teacher(model)`.
        batches: of the training data, about 1,000 examples or more, augmented; each is what `recalibrate_` takes.
        epochs: how often each block is trained on all of them.
        lr: the highest learning rate; it falls along a cosine in each block.
        blocks: names of modules, each called once in a forward pass.  Without, they are found: the modules in lists
            (ModuleList, Sequential), such as residual blocks and the layers of a transformer, and the layers outside of
            them, each with the norm and the activation that follow it.
        forward: `forward(model, batch)`, for batches of other kinds, as of `recalibrate_`.
        memory: bytes that the inputs and outputs of one block may take, on the device of the model.  A block that
            needs more computes them again in each step, with the part of both networks that is before it.
        progress: called after each block.

    Frozen weights stay.  A tied weight is trained in the first block that has it.  Modes are as before afterwards.  The
    schedules of the temperatures are over: a training of the whole model that follows is at their cold end.
    """
    work = Reconstructing(model, teacher, batches, epochs=epochs, lr=lr, blocks=blocks, forward=forward, memory=memory)
    done = []
    for number in range(len(work.blocks)):
        done.append(work.train(number))
        if progress is not None:
            progress(done[-1])
    return Reconstruction(done, work.left)


class _Reached(BaseException):
    """A forward pass has come to where it need not go on.  Nobody else should catch it."""


class _Pair(NamedTuple):
    """What a block gets and should give, for one batch; inputs are `(args, kwargs)`."""

    inputs: Any  # of the compressed network
    taught: Any  # inputs of the teacher's block
    target: Any  # its output


class Reconstructing:
    """The work of `reconstruct_`, a block at a time.  A block depends on the model as it is and on nothing else that
    an earlier call has left, so that `train` may begin at any block of a model that was stored after the one before."""

    def __init__(
        self,
        model: nn.Module,
        teacher: nn.Module,
        batches: Iterable[Any],
        *,
        epochs: int,
        lr: float,
        blocks: Sequence[str] | None = None,
        forward: Forward | None = None,
        memory: float = 4e9,
    ):
        self.model, self.teacher = unwrapped(model), unwrapped(teacher)
        self.batches = list(batches)
        self.clusterings = {owned.name: clustered for owned, clustered in clustered_parameters(self.model)}
        _check(self.model, self.teacher, self.batches, epochs, lr)
        self.epochs, self.lr, self.memory = epochs, lr, memory
        device = next(self.model.parameters()).device
        self.run: Forward = (lambda network, batch: feed(network, batch, device)) if forward is None else forward
        self.blocks, self.left = find_blocks(
            self.model, self.teacher, lambda network: self._forward(network, 0), blocks
        )
        if not self.blocks:
            raise ValueError(f"no block has a clustered weight that trains; not reached: {', '.join(self.left)}")
        taken: set[int] = set()
        self.parameters = [_parameters_of(_parts(self.model, block), taken) for block in self.blocks]
        self.kept: list[_Pair] = []  # for each batch, where there is room
        self.kept_of = -1  # the number of the block that they belong to

    @property
    def steps(self) -> int:
        """Of the optimizer, in each block."""
        return self.epochs * len(self.batches)

    def train(self, number: int) -> Reconstructed:
        """Train the block of this number; the blocks before it are trained."""
        block = self.blocks[number]
        modes = {module: module.training for module in self.model.modules()}
        clusterings: list[Any] = [self.clusterings[name] for name in block.tensors]
        clocks = [(clustered.clock, clustered.steps if clustered.anneals else 0) for clustered in clusterings]
        clock = Clock()  # not the model's: the schedule runs over the steps of this block
        try:
            self.model.eval()
            for clustered in clusterings:
                _set_clock(clustered, clock, self.steps, over=False)
            before, after = self._train(number, block, clusterings)
        finally:
            for clustered, (old, steps) in zip(clusterings, clocks, strict=True):
                _set_clock(clustered, old, steps, over=True)
            for module, mode in modes.items():
                module.training = mode
        return Reconstructed(block.name, block.modules, block.tensors, before, after)

    def _train(self, number: int, block: Block, clusterings: list[Clustered]) -> tuple[float, float]:
        """The errors of the snapped block before and after its training."""
        parts, parameters = _parts(self.model, block), self.parameters[number]
        self._fill(number)
        self._recalibrate(number, parts)
        scales = _scales(self._pair(number, 0).target)
        before = self._error(number, scales)
        saved = copy.deepcopy(parts.state_dict())
        optimizer = torch.optim.Adam(parameters, lr=self.lr)
        adds_to_the_loss = needs(parts, "loss")
        for clustered in clusterings:
            clustered.train()
        for norm in _norms(parts):
            norm.train()
        step = 0
        for epoch in range(self.epochs):
            # the same order in each run, also where it begins at this block
            generator = torch.Generator().manual_seed(1000 * number + epoch)
            for k in torch.randperm(len(self.batches), generator=generator).tolist():
                optimizer.param_groups[0]["lr"] = self.lr * (1 + math.cos(math.pi * step / self.steps)) / 2
                pair = self._pair(number, k)
                with torch.enable_grad():
                    loss = _distance(_apply(self.model, block, pair.inputs), pair.target, scales)
                    loss = loss + method_loss(parts) if adds_to_the_loss else loss
                    found = torch.autograd.grad(loss, parameters, allow_unused=True)  # leaves gradients elsewhere alone
                for parameter, gradient in zip(parameters, found, strict=True):
                    parameter.grad = gradient
                optimizer.step()
                step += 1
        optimizer.zero_grad()
        self.model.eval()
        self._recalibrate(number, parts)
        after = self._error(number, scales)
        if not after < before:
            if not math.isfinite(after):
                raise DKMError(
                    f"the training of the block {block.name} diverged: give a lower learning rate than {self.lr:g}"
                )
            parts.load_state_dict(saved)
            after = before
        return before, after

    def _recalibrate(self, number: int, parts: nn.ModuleList) -> None:
        """The statistics of the snapped block."""
        block = self.blocks[number]
        recalibrate_(
            parts,
            range(len(self.batches)),
            forward=lambda _, k: _apply(self.model, block, self._pair(number, k).inputs),
        )

    @torch.no_grad()
    def _error(self, number: int, scales: list[Tensor]) -> float:
        """The mean error of the snapped block."""
        block = self.blocks[number]
        errors = []
        for k in range(len(self.batches)):
            pair = self._pair(number, k)
            errors.append(_distance(_apply(self.model, block, pair.inputs), pair.target, scales))
        return float(torch.stack(errors).mean())

    # --- what goes into a block

    @torch.no_grad()
    def _fill(self, number: int) -> None:
        """Keep the inputs and targets of a block for all batches, if there is room.

        Where they follow from those of the block before, the networks need not compute them from the beginning.
        """
        block, before = self.blocks[number], self.blocks[number - 1]
        links = _links(before, block) if number and self.kept_of == number - 1 and self.kept else None
        fits = block.bytes_per_batch * len(self.batches) <= self.memory
        kept, self.kept, self.kept_of = [] if links is None else self.kept, [], number
        for k in range(len(self.batches)) if fits else ():
            if links is None:
                self.kept.append(self._computed(number, k))
                continue
            old = kept[k]
            output = _apply(self.model, before, old.inputs)
            taught = _follow(links, block, old.taught, old.target)
            pair = _Pair(_follow(links, block, old.inputs, output), taught, _apply(self.teacher, block, taught))
            self.kept.append(pair)
            kept[k] = pair  # frees the old one

    def _pair(self, number: int, k: int) -> _Pair:
        return self.kept[k] if self.kept else self._computed(number, k)

    @torch.no_grad()
    def _computed(self, number: int, k: int) -> _Pair:
        """What a block gets and should give, from the batch of this number."""
        block = self.blocks[number]
        modes = {module: module.training for module in self.model.modules()}
        self.model.eval()  # what comes before the block is snapped
        inputs, _ = self._captured(self.model, block, k, with_output=False)
        for module, mode in modes.items():
            module.training = mode
        taught, target = self._captured(self.teacher, block, k, with_output=True)
        return _Pair(inputs, taught, target)

    def _captured(self, network: nn.Module, block: Block, k: int, *, with_output: bool) -> tuple[Any, Any]:
        """The inputs and the output of a block in a forward pass, which ends there."""
        found: dict[str, Any] = {}

        def begin(module: nn.Module, args: Any, kwargs: Any) -> None:
            found["inputs"] = _copied((args, kwargs))
            if not with_output:
                raise _Reached

        def end(module: nn.Module, args: Any, output: Any) -> None:
            found["output"] = _copied(output)
            raise _Reached

        first, last = network.get_submodule(block.modules[0]), network.get_submodule(block.modules[-1])
        hooks = [first.register_forward_pre_hook(begin, with_kwargs=True)]
        hooks += [last.register_forward_hook(end)] if with_output else []
        try:
            self._forward(network, k)
        except _Reached:
            return found["inputs"], found.get("output")
        finally:
            for hook in hooks:
                hook.remove()
        raise ValueError(f"the block {block.name!r} is not called for each batch: name other blocks")

    @torch.no_grad()
    def _forward(self, network: nn.Module, k: int) -> Any:
        return self.run(network, self.batches[k])


def _check(model: nn.Module, teacher: nn.Module, batches: list[Any], epochs: int, lr: float) -> None:
    named = clustered_parameters(model)
    if not named:
        raise ValueError("the model has no clustered weight: call dkm.compress_(model, plan, ...) first")
    if any(is_sharded(owned.tensor) for owned, _ in named):
        raise ValueError("reconstruct_ works on a whole model: call it before fully_shard")
    if clustered_parameters(teacher):
        raise ValueError("the teacher is compressed: make it before dkm.compress_, teacher = dkm.teacher(model)")
    missing = {owned.name for owned, _ in named} - dict(teacher.named_parameters(remove_duplicate=False)).keys()
    if missing:
        raise ValueError(f"the teacher is another model: it has no {min(missing)}")
    if teacher.training:
        raise ValueError("the teacher is in training mode: call teacher.eval(), or make it with dkm.teacher(model)")
    if not batches:
        raise ValueError("reconstruct_ needs at least one batch, got none: an exhausted iterator?")
    if not isinstance(epochs, int) or isinstance(epochs, bool) or epochs < 1:
        raise ValueError(f"epochs must be an integer of at least 1, got {epochs!r}")
    if not 0 < lr < math.inf:
        raise ValueError(f"lr must be a positive finite number, got {lr!r}")


def _set_clock(clustered: Any, clock: Clock, steps: int, *, over: bool) -> None:
    """The weight is at the beginning or at the end of a schedule of so many steps, by this clock."""
    clustered.clock = clock
    clustered.step.fill_(steps if over else 0)
    if clustered.anneals:
        clustered.set_steps(steps)


def _parts(model: nn.Module, block: Block) -> nn.ModuleList:
    return nn.ModuleList(model.get_submodule(name) for name in block.modules)


def _parameters_of(parts: nn.Module, taken: set[int]) -> list[nn.Parameter]:
    """The parameters that train, without those that blocks before have `taken`: what these compute must not change."""
    found = [each for each in parts.parameters() if each.requires_grad and id(each) not in taken]
    taken.update(map(id, found))
    return found


def _norms(module: nn.Module) -> list[nn.Module]:
    return [each for each in module.modules() if isinstance(each, _BatchNorm) and each.track_running_stats]


def _apply(network: nn.Module, block: Block, inputs: Any) -> Any:
    """The output of a block.  Its inputs stay as they are, whatever it does to what it is given."""
    args, kwargs = _copied(inputs)
    output = network.get_submodule(block.modules[0])(*args, **kwargs)
    for name in block.modules[1:]:
        output = network.get_submodule(name)(output)
    return output


def _copied(tree: Any) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), tree)


def _numbers(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _scales(target: Any) -> list[Tensor]:
    """What the squared errors of the outputs are multiplied by."""
    return [1 / tensor.float().var(correction=0).clamp(min=1e-12) for tensor in _numbers(target)]


def _distance(output: Any, target: Any, scales: list[Tensor]) -> Tensor:
    """`()`: the error of an output, in at least float32; the mean over its tensors."""
    pairs = zip(_numbers(output), _numbers(target), scales, strict=True)
    return torch.stack([(a.float() - b.float()).square().mean() * scale for a, b, scale in pairs]).mean()


def _links(before: Block, block: Block) -> list[tuple[str, Any]] | None:
    """Where the inputs of a block come from: each is an output or an input of the block before, or no tensor.  None
    where something else happens to them in between."""
    links: list[tuple[str, Any]] = []
    for leaf in block.first.inputs:
        if not isinstance(leaf, Seen):
            links.append(("the same", leaf))
        elif leaf in before.last.outputs:
            links.append(("an output", before.last.outputs.index(leaf)))
        elif leaf in before.first.inputs:
            links.append(("an input", before.first.inputs.index(leaf)))
        else:
            return None
    return links


def _follow(links: list[tuple[str, Any]], block: Block, inputs: Any, output: Any) -> Any:
    """The inputs of a block, from the inputs and the output of the one before."""
    sources = {"an output": tree_leaves(output), "an input": tree_leaves(inputs)}
    leaves = [value if source == "the same" else sources[source][value] for source, value in links]
    return tree_unflatten(leaves, block.first.spec)
