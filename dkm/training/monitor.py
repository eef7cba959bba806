"""How the clustering goes while a model trains: numbers for every clustered tensor."""

import math
import os
from typing import Any

import torch
from torch import Tensor, distributed, nn

from ..foundation import jsonl as lines
from ..modelling.clustered import Clustered
from ..modelling.dtensors import reshard, whole
from ..modelling.parameters import Owned, clustered_parameters


class monitor:
    """Watches a compressed model: `record(step)` measures, writes and returns.  Nothing happens in between.

    A record is `{"step": int, "tensors": {name: numbers}, "total": numbers}`.  The numbers of a tensor are

        iterations   that the last clustering used; 0 before the first one
        tau          the temperature
        gap          |W~ - snapped| / |W~|, Frobenius norms: what snapping changes (the paper's appendix)
        changed      the share of the vectors whose nearest centroid is another one than at the last record;
                     None at the first record
        dead         how many centroids are the nearest one of no vector
        entropy      of the codes, in bits per code: `bits` where all centroids are used equally often
        code_bytes   of the codes as the file packs them
        ideal_bytes  of the codes as an ideal entropy coder would write them: n * entropy / 8

    and those of the total are `gap`, `changed`, `dead` and the bytes.  What is not finite, because the training
    diverged, is None.  The model and its training stay as they are.

    Args:
        every: `record(step)` returns None, at once, unless `step` is a multiple of it.
        jsonl: a file to append the records to, one line per record.  Recording a step again, or an earlier one, removes
            the lines from there on: they belong to a run that was abandoned for a checkpoint.
        writer: an object with TensorBoard's `add_scalar(tag, value, step)`; the tags are `dkm/NAME/NUMBER`.

    Where there are several processes, all of them call `record` (for a sharded model they must), and the first one
    writes.
    """

    def __init__(
        self, model: nn.Module, *, every: int = 100, jsonl: str | os.PathLike | None = None, writer: Any = None
    ):
        if not isinstance(every, int) or every is True or every < 1:
            raise ValueError(f"every must be an integer of at least 1, got {every!r}")
        if writer is not None and not callable(getattr(writer, "add_scalar", None)):
            raise TypeError(f"writer must have add_scalar(tag, value, step), as TensorBoard's has, got {writer!r}")
        self.model, self.every, self.jsonl, self.writer = model, every, jsonl, writer
        self._codes: dict[str, Tensor] = {}  # of the last record, one or two bytes per vector
        self._written: list[int] | None = None  # the steps in the file, once it was read
        self._targets()

    def record(self, step: int) -> dict[str, Any] | None:
        """Measure, write and return; None where `step` is not a multiple of `every`."""
        if not isinstance(step, int) or step < 0:
            raise ValueError(f"step must be an integer of at least 0, got {step!r}")
        if step % self.every:
            return None
        reshard(self.model)
        targets = self._targets()
        measured = [self._measure(owned.name, clustered, owned.tensor) for owned, clustered in targets]
        # to the host in one piece: that waits for the device once, not once per number
        rows = torch.stack([row.to(measured[0].device) for row in measured]).tolist()
        record = {"step": step, **_summary(targets, rows)}
        if not (distributed.is_available() and distributed.is_initialized() and distributed.get_rank()):
            self._write(record)
        return record

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """What a checkpoint needs, so that `changed` is counted from the last record before it."""
        return {"codes": dict(self._codes)}

    def load_state_dict(self, state: dict[str, dict[str, Tensor]]) -> None:
        """Go on from what `state_dict` returned."""
        self._codes = dict(state["codes"])

    def _targets(self) -> list[tuple[Owned, Clustered]]:
        targets = clustered_parameters(self.model)
        if not targets:
            raise ValueError("the model has no clustered tensor to watch: call dkm.compress_(model, plan, ...) first")
        return targets

    @torch.no_grad()
    def _measure(self, name: str, clustered: Clustered, weight: Tensor) -> Tensor:
        """`(7,)` float32, on the weight's device: iterations, tau, |W~ - snapped|^2, |W~|^2, vectors changed,
        dead centroids, entropy."""
        frozen, weight = not weight.requires_grad, whole(weight)
        now = clustered.moment(weight)
        tau = clustered.temperature(now.step)
        codes, snapped = clustered.codes(weight)[1], clustered.scaled(clustered.snapped(weight))
        weight = clustered.scaled(weight)
        # a frozen weight is snapped in training, too
        W_tilde = snapped if frozen else clustered.cluster(weight, now.start, now.step).W_tilde
        k, grouping = 2**clustered.bits, clustered.grouping
        of_all = codes + k * grouping.group_of_codes(codes.device)
        counts = torch.bincount(of_all, minlength=k * grouping.count).view(-1, k)
        share = counts / counts.sum(1, keepdim=True)
        entropy = -torch.special.xlogy(share, share).sum(1) / math.log(2)
        codes = codes.to(torch.uint8 if clustered.bits <= 8 else torch.int16)
        last, self._codes[name] = self._codes.get(name), codes
        numbers = (
            clustered.iterations,
            torch.as_tensor(math.nan if tau is None else tau).mean(),
            (W_tilde.float() - snapped.float()).square().sum(),
            W_tilde.float().square().sum(),
            torch.tensor(math.nan) if last is None else (codes != last.to(codes.device)).sum(),
            (counts == 0).sum(),
            (entropy * counts.sum(1)).sum() / len(codes),
        )
        return torch.stack([number.to(weight.device, torch.float32) for number in numbers])

    def _write(self, record: dict[str, Any]) -> None:
        step = record["step"]
        if self.jsonl is not None:
            if self._written is None:
                self._written = [line.get("step", -1) for line in lines.read(self.jsonl)]
            if self._written and self._written[-1] >= step:
                self._written = [written for written in self._written if written < step]
                lines.keep(self.jsonl, len(self._written))
            lines.append(self.jsonl, record)
            self._written.append(step)
        if self.writer is not None:
            for name, numbers in (*record["tensors"].items(), ("total", record["total"])):
                for key, value in numbers.items():
                    if value is not None:
                        self.writer.add_scalar(f"dkm/{name}/{key}", value, step)


def _summary(targets: list[tuple[Owned, Clustered]], rows: list[list[float]]) -> dict[str, Any]:
    """From what `_measure` gave for each tensor to the numbers of a record."""
    tensors: dict[str, dict[str, Any]] = {}
    squares, norms, changes, vectors = 0.0, 0.0, 0.0, 0
    for (owned, clustered), row in zip(targets, rows, strict=True):
        iterations, tau, square, norm, changed, dead, entropy = row
        bits, n = clustered.bits, clustered.grouping.codes
        tensors[owned.name] = dict(
            iterations=int(iterations),
            tau=_finite(tau),
            gap=_gap(square, norm),
            changed=_finite(changed / n),
            dead=int(dead),
            entropy=_finite(entropy),
            code_bytes=-(-n * bits // 8),
            ideal_bytes=n * entropy / 8,
        )
        squares, norms, changes, vectors = squares + square, norms + norm, changes + changed, vectors + n
    total = dict(gap=_gap(squares, norms), changed=_finite(changes / vectors))
    total |= {key: sum(numbers[key] for numbers in tensors.values()) for key in ("dead", "code_bytes", "ideal_bytes")}
    return {"tensors": tensors, "total": total}


def _gap(square: float, norm: float) -> float | None:
    return _finite(math.sqrt(square / norm)) if norm else 0.0


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
