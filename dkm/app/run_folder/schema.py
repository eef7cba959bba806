"""What the files of a run folder hold.

All accuracies are in percent, correlations and F1 times 100, all sizes in bytes, all times in seconds.  A number that
may be None is null in the file where it does not exist, or where it is not finite because the training diverged.
"""

from typing import Any, Literal, NamedTuple, NotRequired, TypedDict, cast

from torch import Tensor

from ...plans.rows import Plan
from ..measures import MEASURES, Measure, named_measure

# --- plan.json -----------------------------------------------------------------------------------


class PlanRow(TypedDict):
    """What becomes of one tensor."""

    name: str
    shape: list[int]
    bits: int | None  # None: the tensor is not clustered
    dim: int
    label: str  # how the tensor is clustered, as a plan says it: 3/1 scaled per 8x64; or keep
    centroids: str  # 16, or 8 x 96 for 8 in each of 96 groups; empty where the tensor is not clustered
    reason: str
    bytes: int  # as the paper counts


class Beginning(TypedDict):
    """What a run knows before its first step, for the report of a run that is still going."""

    model: str  # the name of the model's class; empty where that is one of PyTorch's, such as Sequential
    date: str  # in UTC: 2026-11-19T14:05:33Z
    metric: str  # as in result.json, and the next two as well
    unit: str
    before: dict[str, float | None]
    file: dict[str, int]  # what the file will take, counted as in result.json; entropy-coded codes still change


class PlanFile(TypedDict):
    """plan.json."""

    text: str  # the plan as the user gave it, or as it was chosen for a size
    rows: list[PlanRow]
    bytes: int  # of all tensors, as the paper counts
    dense_bytes: int  # of all tensors in float32
    beginning: NotRequired[Beginning]


def plan_file(plan: Plan, text: str, beginning: Beginning | None = None) -> PlanFile:
    """The contents of plan.json for a plan that was made from this text."""
    rows = [
        PlanRow(
            name=row.name,
            shape=list(row.shape),
            bits=row.bits,
            dim=row.dim,
            label=row.label,
            centroids=row.centroids,
            reason=row.why,
            bytes=row.stored_bytes,
        )
        for row in plan.rows
    ]
    file = PlanFile(text=text, rows=rows, bytes=plan.bytes, dense_bytes=4 * plan.parameters)
    return file if beginning is None else PlanFile(**file, beginning=beginning)


# --- log.jsonl -----------------------------------------------------------------------------------


class StepRecord(TypedDict):
    """An optimizer step; not every step has one."""

    kind: Literal["step"]
    step: int  # optimizer steps done, this one included
    epoch: float
    loss: float | None
    lr: NotRequired[float]
    per_second: NotRequired[float]  # training examples


class EvalRecord(TypedDict):
    """An evaluation."""

    kind: Literal["eval"]
    metric: NotRequired[str]  # what soft and snapped are: accuracy, also where this is missing, or perplexity
    step: int
    epoch: float
    soft: float | None  # with train-time weights; None before the first step
    snapped: float | None  # with snapped weights
    loss: NotRequired[float | None]  # of the snapped weights
    standard_error: NotRequired[float | None]  # of `snapped`, in its unit
    examples: NotRequired[int]  # that were evaluated
    more: NotRequired[dict[str, float]]  # other measures of the snapped weights: top5, f1, matthews, spearman


class TensorNumbers(TypedDict):
    """One clustered tensor, measured by `dkm.monitor`, which explains the numbers."""

    iterations: int
    tau: float | None
    gap: float | None
    changed: float | None
    dead: int
    entropy: float | None
    code_bytes: int
    ideal_bytes: float


class TotalNumbers(TypedDict):
    """All clustered tensors together."""

    gap: float | None
    changed: float | None
    dead: int
    code_bytes: int
    ideal_bytes: float


class LayersRecord(TypedDict):
    """All clustered tensors at one moment."""

    kind: Literal["layers"]
    step: int
    tensors: dict[str, TensorNumbers]
    total: TotalNumbers


class HistogramRecord(TypedDict):
    """The weights of one tensor at one moment; where vectors are clustered, the first weight of each."""

    kind: Literal["histogram"]
    step: int
    name: str
    edges: list[float]  # one more than counts
    counts: list[float]
    centroids: list[float]  # always in the same order, so that each can be followed through time


class BlockRecord(TypedDict):
    """A block that was trained to follow the same block of the uncompressed model, before the first step."""

    kind: Literal["block"]
    step: int  # 0
    name: str
    modules: list[str]  # it, and what follows it in the block, such as a batch norm
    tensors: list[str]  # the clustered ones that were trained
    steps: int  # of the block's own optimizer
    before: float  # the mean squared error of its snapped outputs over their variance
    after: float


Record = StepRecord | EvalRecord | LayersRecord | HistogramRecord | BlockRecord

# --- bad-images.json -----------------------------------------------------------------------------

LeftOut = dict[str, list[int]]  # "train" and "eval" -> the numbers of the images that are left out of them

# --- result.json ---------------------------------------------------------------------------------


class Blocks(TypedDict):
    """How the model was trained block by block, before the training of the whole model."""

    count: int
    steps: int  # of each block's own optimizer
    examples: int  # that each block was trained on, so often as --reconstruct says
    left: list[str]  # clustered tensors that are in no block


class Result(TypedDict):
    """result.json: the figures of a finished run."""

    metric: NotRequired[str]  # accuracy, also where this is missing, perplexity or pearson; below are those of one
    accuracy_before: NotRequired[float]
    accuracy_after: NotRequired[float]  # of the file, read back
    perplexity_before: NotRequired[float]
    perplexity_after: NotRequired[float]
    pearson_before: NotRequired[float]
    pearson_after: NotRequired[float]
    unit: NotRequired[str]  # what the evaluated examples are: images
    # All figures by name: that of `metric`, its standard_error, examples, loss; top5, f1, matthews, spearman.
    before: NotRequired[dict[str, float | None]]
    after: NotRequired[dict[str, float | None]]
    bytes_dense: int  # of the parameters in float32
    bytes_paper: int  # of the compressed parameters, as the paper counts
    bytes_file: int
    file: NotRequired[dict[str, int]]  # the bytes of each array of the file, and of its `header`: together bytes_file
    ratio: float  # bytes_dense / bytes_file
    seconds: float  # of work, those before an interruption included
    steps: int  # with the whole model; those of single blocks are in `blocks`
    blocks: NotRequired[Blocks]  # with --reconstruct
    command: str  # the command line that repeats the run
    seed: int
    date: NotRequired[str]  # when the file was written, in UTC: 2026-11-19T14:05:33Z
    finished: bool
    environment: dict[str, str]


class Other(NamedTuple):
    """A measure besides the main one."""

    measure: Measure
    before: Any  # a number, where the file is one that dkm wrote
    after: Any


class Figures(NamedTuple):
    """What was measured before and after, and what that is."""

    measure: Measure
    before: Any  # a number, where the file is one that dkm wrote
    after: Any
    error_before: Any  # standard errors; None in older files
    error_after: Any
    examples: Any  # how many were evaluated; None in older files
    unit: str  # what they are
    others: list[Other]


def figures(result: Result | Beginning) -> Figures:
    """What result.json, or the beginning of a run, says about the model; None for what it does not have."""
    measure, given = named_measure(result.get("metric")), cast(dict[str, Any], result)
    before, after = (given.get(f"{measure.name}_{when}") for when in ("before", "after"))
    all_before, all_after = (
        found if isinstance(found, dict) else {} for found in (given.get("before"), given.get("after"))
    )
    before = all_before.get(measure.name) if before is None else before
    others = [
        Other(other, all_before.get(name), all_after[name])
        for name, other in MEASURES.items()
        if name in all_after and other is not measure
    ]
    return Figures(
        measure,
        before,
        after,
        error_before=all_before.get("standard_error"),
        error_after=all_after.get("standard_error"),
        examples=(all_after or all_before).get("examples"),
        unit=str(given.get("unit", "examples")),
        others=others,
    )


# --- checkpoints/last.pt -------------------------------------------------------------------------


class Checkpoint(TypedDict):
    """What a run needs to go on.  There is no random state: every seed is computed from the settings and the step."""

    model: dict[str, Tensor]
    optimizer: dict[str, Any]
    scaler: dict[str, Any] | None  # of float16 gradients
    codes: dict[str, Tensor]  # of the monitor's last record, from which it counts what has changed
    done: int  # optimizer steps
    blocks_done: NotRequired[int]  # that were trained one by one
    evaluated: int  # the step of the last evaluation; -1 before the first
    lines: int  # of log.jsonl: the lines after these belong to steps that are done again
    before: float  # the accuracy, perplexity or correlation of the uncompressed model
    score_before: NotRequired[dict[str, Any]]  # all of its score
    seconds: float  # of work until here
    steps: int  # optimizer steps of the whole run
    world: int  # processes
