"""Whoever wants to know what happens in a run."""

from ...plans.bench import Progress
from ...plans.rows import Plan
from ..measures import Score
from ..run_folder import BlockRecord, Blocks, EvalRecord, Result, StepRecord
from ..tasks import Task


class Listener:
    """Gets a call for everything that happens, and does nothing; subclasses show what they want to show."""

    def note(self, text: str) -> None:
        """A line of text for the user."""

    def measured_before(self, score: Score, task: Task) -> None:
        """The uncompressed model was evaluated."""

    def sampled(self, done: int, count: int) -> None:
        """The uncompressed language model has written so many of the texts to train on; 0 before it begins."""

    def choosing_begins(self, size: str, allocator: str) -> None:
        """A plan for this size is going to be chosen, in one of `ALLOCATORS`."""

    def choosing(self, progress: Progress) -> None:
        """A piece of the work of choosing it is done."""

    def chosen(self) -> None:
        """It is chosen."""

    def planned(self, plan: Plan, file_bytes: int) -> None:
        """It is decided what becomes of each tensor, and how large the file will be."""

    def reconstruction_begins(self, done: int, blocks: Blocks) -> None:
        """The blocks of the model are going to be trained one by one; so many are, by a run that is resumed."""

    def reconstructed(self, record: BlockRecord, done: int, count: int) -> None:
        """A block is trained, and so many of all are."""

    def training_begins(self, done: int, steps: int, steps_per_epoch: int, lr: float) -> None:
        """The training starts or, with some steps done, goes on; `lr` is the highest learning rate."""

    def stepped(self, record: StepRecord) -> None:
        """A step was logged."""

    def evaluation_begins(self) -> None:
        """The model in training is being evaluated, which may take a while."""

    def evaluated(self, record: EvalRecord) -> None:
        """An evaluation was logged."""

    def finished(self, result: Result) -> None:
        """The file is written."""
