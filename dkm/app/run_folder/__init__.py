"""The folder of a run: what its files are called and what they hold.

`schema` declares the contents of every file as types.  The run writes them, the report reads them, and a training loop
of your own may write them as well, as examples/digits.py does, to get a report.  `folder` has the files themselves.
"""

from .folder import FILES, RunFolder, run_of
from .schema import (
    Beginning,
    BlockRecord,
    Blocks,
    Checkpoint,
    EvalRecord,
    Figures,
    HistogramRecord,
    LayersRecord,
    LeftOut,
    Other,
    PlanFile,
    PlanRow,
    Record,
    Result,
    StepRecord,
    TensorNumbers,
    TotalNumbers,
    figures,
    plan_file,
)

__all__ = [
    "FILES",
    "Beginning",
    "BlockRecord",
    "Blocks",
    "Checkpoint",
    "EvalRecord",
    "Figures",
    "HistogramRecord",
    "LayersRecord",
    "LeftOut",
    "Other",
    "PlanFile",
    "PlanRow",
    "Record",
    "Result",
    "RunFolder",
    "StepRecord",
    "TensorNumbers",
    "TotalNumbers",
    "figures",
    "plan_file",
    "run_of",
]
