"""The blocks of a model, found from its module tree and one forward pass: what `reconstruct_` trains one by one."""

import difflib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves

from ..modelling.parameters import clustered_parameters, unwrapped


class Seen(NamedTuple):
    """Which tensor this was, and in which state: some modules change their input in place."""

    number: int
    version: int


@dataclass
class Call:
    """A call of a module during the forward pass."""

    name: str
    inputs: list[Any]  # the leaves of its arguments; a `Seen` for each tensor
    outputs: list[Any]
    spec: Any  # how the leaves make the arguments
    entering: list[torch.Size]  # the shapes of the tensors that went in
    leaving: list[torch.Size]  # and of those that came out
    bytes_in: int
    bytes_out: int


@dataclass(frozen=True)
class Block:
    """A part of the model that computes as a whole: a module, and what follows it without weights of its own.

    `tensors` are the names of the clustered tensors that are trained in this block.
    """

    modules: tuple[str, ...]
    tensors: tuple[str, ...]
    first: Call
    last: Call

    @property
    def name(self) -> str:
        """That of the module."""
        return self.modules[0]

    @property
    def bytes_per_batch(self) -> int:
        """What it takes to keep its inputs, those of both networks, and its output."""
        return 2 * self.first.bytes_in + self.last.bytes_out


def find_blocks(
    model: nn.Module, teacher: nn.Module, run: Callable[[nn.Module], Any], names: Sequence[str] | None = None
) -> tuple[list[Block], list[str]]:
    """The blocks in the order in which they are called, and the names of the clustered tensors that are in none.

    A tensor that several blocks have is trained in the first of them.  `run(module)` is a forward pass; the blocks are
    those of these `names` or, without, the ones described in `reconstruct_`.
    """
    if isinstance(names, str):
        raise TypeError(f"blocks is a list of names, got {names!r}: write [{names!r}]")
    plain = unwrapped(teacher)
    calls = _trace(plain, run)
    clustered = {owned.name: owned for owned, _ in clustered_parameters(model)}
    trained = {n: name for name, owned in clustered.items() if owned.tensor.requires_grad for n in owned.names}
    tree = _Tree(plain, {call.name: call for call in calls}, _counts(calls), list(trained))
    chosen = list(tree.blocks()) if names is None else [_named(name, tree) for name in names]
    order = {call.name: i for i, call in enumerate(calls)}
    chosen.sort(key=order.__getitem__)
    if names is not None:
        _check_apart(chosen)
    blocks: list[Block] = []
    taken: set[str] = set()
    for name in chosen:
        own = tuple(dict.fromkeys(trained[n] for n in tree.held(name)))
        own = tuple(n for n in own if n not in taken)
        taken.update(own)
        if own:
            _check_arguments(tree.calls[name])
            modules = (name, *(tree.followers(name) if names is None else ()))
            blocks.append(Block(modules, own, tree.calls[name], tree.calls[modules[-1]]))
    return blocks, [name for name in clustered if name not in taken]


def _counts(calls: list[Call]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for call in calls:
        counts[call.name] = counts.get(call.name, 0) + 1
    return counts


def _trace(model: nn.Module, run: Callable[[nn.Module], Any]) -> list[Call]:
    """All calls of modules in one forward pass, in the order in which they begin."""
    names = {module: name for name, module in model.named_modules()}
    calls: list[Call] = []
    open_calls: list[Call] = []
    alive: dict[int, Tensor] = {}  # so that no number is given twice

    def seen(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        alive[id(leaf)] = leaf
        return Seen(id(leaf), leaf._version)

    def begin(module: nn.Module, args: Any, kwargs: Any) -> None:
        leaves, spec = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        shapes, size = [tensor.shape for tensor in tensors], sum(tensor.nbytes for tensor in tensors)
        call = Call(names[module], [seen(leaf) for leaf in leaves], [], spec, shapes, [], size, 0)
        calls.append(call)
        open_calls.append(call)

    def end(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        call = open_calls.pop()
        leaves = tree_leaves(output)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        call.outputs = [seen(leaf) for leaf in leaves]
        call.leaving, call.bytes_out = [tensor.shape for tensor in tensors], sum(tensor.nbytes for tensor in tensors)

    hooks: list[Any] = []
    try:
        for module in names:
            hooks.append(module.register_forward_pre_hook(begin, with_kwargs=True))
            hooks.append(module.register_forward_hook(end, with_kwargs=True))
        run(model)
    finally:
        for hook in hooks:
            hook.remove()
    return calls


class _Tree:
    """The modules of the plain model, with what is known of their calls."""

    def __init__(self, model: nn.Module, calls: dict[str, Call], counts: dict[str, int], trained: list[str]):
        self.model, self.calls, self.counts, self.trained = model, calls, counts, trained
        self.modules = dict(model.named_modules())
        self.passed_by: list[str] = []  # modules without trained tensors that are in no block, as they are called

    def held(self, name: str) -> list[str]:
        """The trained clustered tensors within a module."""
        prefix = f"{name}." if name else ""
        return [tensor for tensor in self.trained if tensor.startswith(prefix)]

    def blocks(self) -> Iterator[str]:
        """The names of the modules that are blocks."""
        yield from self._within("", False)

    def _within(self, name: str, listed: bool) -> Iterator[str]:
        """The blocks among the children of a module; `listed` says whether it is a list of modules."""
        for child, _ in self.modules[name].named_children():
            whole = f"{name}.{child}" if name else child
            if not self.held(whole):
                self.passed_by.append(whole)
            elif self.counts.get(whole) == 1 and not self._is_opened(whole, listed):
                yield whole
            else:
                yield from self._within(whole, _is_list(self.modules[whole]))

    def _is_opened(self, name: str, listed: bool) -> bool:
        """Whether not the module is a block, but its children are, or theirs."""
        module = self.modules[name]
        children = [(f"{name}.{child}", each) for child, each in module.named_children()]
        if not children:
            return False
        if _is_list(module):
            heavy = [whole for whole, _ in children if self.held(whole)]
            return len(heavy) > 1 or any(next(each.children(), None) is not None for _, each in children)
        return not listed and any(self._repeats(each) for each in module.modules() if _is_list(each))

    def _repeats(self, module: nn.Module) -> bool:
        """Whether a list holds modules of one class that have children."""
        kinds = [type(each) for each in module.children() if next(each.children(), None) is not None]
        return len(kinds) > len(set(kinds))

    def followers(self, name: str) -> list[str]:
        """Modules outside of all blocks that take exactly what comes out of this one and keep its shape: such as a
        batch norm and an activation."""
        found: list[str] = []
        last = self.calls[name]
        for other in self.passed_by:
            call = self.calls.get(other)
            leaf = self.counts.get(other) == 1 and next(self.modules[other].children(), None) is None
            if leaf and call is not None and call.inputs == last.outputs and call.leaving == last.leaving:
                found.append(other)
                last = call
        return found


def _is_list(module: nn.Module) -> bool:
    """Whether a module only holds others: it does not compute, or calls one after the other."""
    return isinstance(module, nn.ModuleList | nn.ModuleDict) or type(module).forward is nn.Sequential.forward


def _named(name: str, tree: _Tree) -> str:
    if name not in tree.modules or not name:
        close = difflib.get_close_matches(name, tree.modules, n=3)
        hint = f"did you mean {' or '.join(close)}?" if close else "see model.named_modules()"
        raise ValueError(f"the model has no module {name!r} to be a block: {hint}")
    times = tree.counts.get(name, 0)
    if times != 1:
        raise ValueError(f"a block is called once in a forward pass, and {name!r} is called {times} times: name others")
    if not tree.held(name):
        raise ValueError(f"{name!r} has no clustered weight that trains: leave it out")
    return name


PLAIN = (Seen, bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, type(None))


def _check_arguments(call: Call) -> None:
    """ValueError where a block gets something that a call may change, so that it cannot be given it again."""
    for leaf in call.inputs:
        if not isinstance(leaf, PLAIN):
            raise ValueError(
                f"the block {call.name!r} is called with a {type(leaf).__name__}, and only tensors and plain values "
                "can be kept for it: call the model without (such as use_cache=False), or name other blocks"
            )


def _check_apart(names: list[str]) -> None:
    for name in names:
        for other in names:
            if names.count(name) > 1 or other.startswith(f"{name}."):
                raise ValueError(f"blocks must not overlap: {name!r} and {other!r} do")
