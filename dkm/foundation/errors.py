"""The errors that dkm raises on purpose.  `except dkm.DKMError` catches all of them."""


class DKMError(Exception):
    """Something that the caller can put right.  The message says what is wrong and what to do."""


class PlanError(DKMError, ValueError):
    """The text of a plan cannot be understood, or does not fit the model."""


class NeedError(DKMError, RuntimeError):
    """A method has not got what it needs besides the weight, such as a term of the loss or a few batches."""


class MethodError(DKMError, ValueError):
    """A method cannot cluster what a plan gives it, such as vectors where it has single weights only."""


class FileError(DKMError, ValueError):
    """A .dkm file cannot be written or read."""


class ExportError(DKMError, ValueError):
    """A model cannot be exported as it is, or what was written does not compute what the model computes."""
