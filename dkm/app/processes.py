"""The processes of one run: a launcher such as torchrun may have started several."""

import os

import torch


def has_several_processes() -> bool:
    """Whether a launcher has started other processes of this run besides this one."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def rank() -> int:
    """The number of this process among those of the run.  Process 0 writes the files and talks to the user."""
    return int(os.environ.get("RANK", "0")) if has_several_processes() else 0


def is_from_a_lost_process(error: Exception) -> bool:
    """Whether this is the error that a process gets to see when another process of the run has ended."""
    if not has_several_processes() or not isinstance(error, RuntimeError):
        return False
    return isinstance(error, torch.distributed.DistError) or "gloo" in str(error)  # gloo raises plain RuntimeErrors
