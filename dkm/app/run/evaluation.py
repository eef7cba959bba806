"""Evaluation: of any model, and of a clustered model while it trains."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import parametrize

from ...clustering.vectors import to_vectors
from ...modelling.clustered import Clustered
from ...modelling.parameters import clusterings, parameters
from ...training.batchnorm import recalibrate_
from ...training.needs import calibrate_, needs
from ..errors import Problem
from ..measures import Score
from ..own_code import problem_in_own_code
from ..run_folder import HistogramRecord
from ..tasks.batches import batches
from .stage import Stage
from .stopping import Stopped

BINS = 60  # of a histogram
CALIBRATION = 512  # examples, for methods that need any


@torch.no_grad()
def evaluate(
    stage: Stage, model: nn.Module, progress: Callable[[int, int], None] | None = None, *, most: int | None = None
) -> Score:
    """The score of a model on all evaluation examples, over all processes.  Leaves the model's modes as they are.

    After each batch, `progress` gets the number of examples that this process has evaluated, and of those it will.
    With `most`, each process evaluates so many only.
    """
    accelerator, task = stage.accelerator, stage.task
    mine = range(accelerator.process_index, task.eval_count, accelerator.num_processes)[:most]
    keys = [[(0, i) for i in mine[at : at + stage.batch_size]] for at in range(0, len(mine), stage.batch_size)]
    metric = task.metric(accelerator.device)
    stopped = torch.zeros(1, dtype=torch.float64, device=accelerator.device)
    with parametrize.cached(), accelerator.autocast():  # the weights do not change: cluster them once
        for number, batch in enumerate(batches(task, task.eval, keys, stage.settings), 1):
            if stage.check_for_stop():
                stopped.fill_(1)
                break
            args, kwargs, labels = task.split(stage.move(batch))
            compared = task.compared(_answers(stage, model, args, kwargs), labels)
            _check_outputs(stage, compared.logits)
            metric.add(compared.logits.float(), compared.labels, compared.examples)
            if progress is not None:
                progress(min(number * stage.batch_size, len(mine)), len(mine))
    totals = metric.totals(accelerator.process_index, accelerator.num_processes)
    *added, stops = accelerator.reduce(torch.cat([totals, stopped])).tolist()
    if stops:
        raise Stopped
    return metric.score(added)


def _answers(stage: Stage, model: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> Any:
    """What the model makes of a batch; Problem where the model, as it was given, cannot take the data."""
    try:
        return model(*args, **kwargs)
    except Exception as error:
        blamed = problem_in_own_code(error)
        if blamed is not None or clusterings(model) or isinstance(error, torch.OutOfMemoryError):
            raise
        first = next(iter((*args, *kwargs.values())))
        shape, said = "x".join(map(str, first.shape[1:])), (str(error).strip() or type(error).__name__).splitlines()[0]
        raise Problem(
            f"the model cannot take {stage.task.unit} of shape {shape}: {stage.task.hint} ({said})"
        ) from error


def _check_outputs(stage: Stage, logits: Tensor) -> None:
    """Say, once, where the model has another number of outputs than the data has classes."""
    if not stage.outputs_checked and logits.ndim == 2:
        stage.outputs_checked = True
        warning = stage.task.check_outputs(logits.shape[1])
        if warning:
            stage.listener.note(warning)


@dataclass(frozen=True)
class ClusteredScores:
    """The scores of a clustered model, each with batch-norm statistics of its own."""

    train_time: Score | None  # None before the first training step
    snapped: Score


def evaluate_clustered(stage: Stage, model: nn.Module, *, trained: bool, keep_statistics: bool) -> ClusteredScores:
    """Evaluate with train-time weights, if the model was `trained`, and with snapped ones.

    Changes nothing, unless `keep_statistics`: then the batch norms have those of the snapped model afterwards.
    """
    statistics = _BatchNormStatistics(model)
    model.eval()
    train_time = None
    if trained:  # first: reading them moves the centroids on to the present weights, which the rest must see as well
        with parametrize.cached():
            read_train_time_weights(model)
            train_time = _evaluate_recalibrated(stage, model, statistics)
        statistics.restore()
    snapped = _evaluate_recalibrated(stage, model, statistics)
    if not keep_statistics:
        statistics.restore()
    return ClusteredScores(train_time, snapped)


def _evaluate_recalibrated(stage: Stage, model: nn.Module, statistics: "_BatchNormStatistics") -> Score:
    if statistics.saved and stage.settings.recalibrate:
        recalibrate(stage, model)
    return evaluate(stage, model)


def recalibrate(stage: Stage, model: nn.Module) -> None:
    """Re-estimate the batch-norm statistics of the model, with the weights that it computes with."""
    with parametrize.cached(), stage.accelerator.autocast():
        # The sample is augmented: on the very images that the model has learned by heart, its activations differ from
        # those on other images.
        recalibrate_(model, stage.sample(stage.settings.recalibrate), forward=forward_of(stage))


def calibrate(stage: Stage, model: nn.Module) -> None:
    """Show the method a few batches of training data, where it needs any."""
    if needs(model, "batches"):
        with stage.accelerator.autocast():
            calibrate_(model, stage.sample(CALIBRATION), forward=forward_of(stage))


def forward_of(stage: Stage) -> Callable[[nn.Module, Any], Any]:
    """What a model makes of a batch of the task; the labels stay out."""

    def forward(model: nn.Module, batch: Any) -> Any:
        args, kwargs, _ = stage.task.split(batch)
        return model(*args, **kwargs)

    return forward


@torch.no_grad()
def read_train_time_weights(model: nn.Module) -> None:
    """Fill the cache of `parametrize.cached()` with train-time weights.  Until the cache is closed the model computes
    with these, whatever mode it is in."""
    chains = [module for module in model.modules() if isinstance(module, parametrize.ParametrizationList)]
    for chain in chains:
        chain.train()
    for owned in parameters(model):
        for module, attribute in owned.owners if owned.clustered is not None else ():
            getattr(module, attribute)
    for chain in chains:
        chain.eval()


def histograms(model: nn.Module, step: int) -> list[HistogramRecord]:
    """The first, the largest and the last clustered tensor: their weights, or the first weight of each vector.

    Weights whose rows have scales are divided by them.
    """
    targets = [(owned, owned.clustered) for owned in parameters(model) if owned.clustered is not None]
    largest = max(targets, key=lambda target: target[0].tensor.numel())
    chosen = {owned.name: (owned, clustered) for owned, clustered in (targets[0], largest, targets[-1])}
    records = []
    for name, (owned, clustered) in chosen.items():
        values = to_vectors(clustered.scaled(owned.tensor.detach()), clustered.dim)[:, 0].float().cpu()
        counts, edges = torch.histogram(values, BINS)
        record = HistogramRecord(
            kind="histogram",
            step=step,
            name=name,
            edges=edges.tolist(),
            counts=counts.int().tolist(),
            centroids=_shown_centroids(clustered),
        )
        records.append(record)
    return records


def _shown_centroids(clustered: Clustered) -> list[float]:
    """The first value of each centroid; of many groups, the means over the groups, from the smallest to the largest."""
    first = clustered.C.detach()[..., 0].float()
    return (first if clustered.spec.group is None else first.sort(dim=1).values.mean(0)).tolist()


class _BatchNormStatistics:
    """A copy of the running statistics of all batch norms."""

    def __init__(self, model: nn.Module):
        self.saved: list[tuple[nn.Module, dict[str, Tensor]]] = [
            (module, {name: value.clone() for name, value in module.named_buffers()})
            for module in model.modules()
            if isinstance(module, _BatchNorm) and module.track_running_stats
        ]

    def restore(self) -> None:
        for module, buffers in self.saved:
            for name, value in buffers.items():
                module.get_buffer(name).copy_(value)
