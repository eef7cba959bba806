"""The entry point: a command line -> an exit code.  What the user can put right is one sentence, and code 2."""

import signal
import sys
import time

from ..foundation.interrupts import STOPPED, quiet_imports

with quiet_imports():
    try:
        import jinja2  # noqa: F401
        import rich  # noqa: F401
        import typer
    except ImportError:
        sys.exit('dkm: the command needs more than the library: pip install "torch-dkm[cli]"')

    import torch

    from ..foundation.errors import DKMError
    from . import run
    from .commands import app
    from .errors import Problem, say
    from .own_code import OwnCodeProblem, own_problems
    from .processes import has_several_processes, is_from_a_lost_process, rank

HEAD_START = 5.0  # seconds; see `_problem`


def main(arguments: list[str] | None = None) -> None:
    """The entry point: run a command line, say what is wrong in one sentence, and exit."""
    code = 0
    try:
        if any("\0" in argument for argument in arguments or ()):  # a program that calls this one can give it
            raise Problem("an argument holds the character NUL, which no name or path can have")
        with own_problems():
            code = app(arguments, prog_name="dkm", standalone_mode=False) or 0
    except run.Stopped:
        code = STOPPED
    except KeyboardInterrupt:
        code = STOPPED
        if rank() == 0:
            say("stopped")
    except typer.Exit as end:
        code = end.exit_code
    except OwnCodeProblem as error:
        code = _problem(str(error), before=error.frames)
    except DKMError as error:
        code = _problem(str(error))
    except torch.OutOfMemoryError:
        code = _problem("the GPU has too little memory: give a smaller --batch-size, or --autocast bf16")
    except OSError as error:
        code = _problem(f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}")
    except Exception as error:
        if is_from_a_lost_process(error):
            sentence = f"another process has ended; --resume goes on from the last checkpoint: {error}"
            code = _problem(sentence, let_others_speak=True)
        elif hasattr(error, "format_message"):
            message = error.format_message()
            code = _problem(message) if message else 2  # no message: the user gave nothing and gets the help
        else:  # not a mistake on the command line but a fault of dkm, whose traceback is needed
            raise
    if code == 0 and has_several_processes() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    sys.exit(code)


def _problem(sentence: str, *, before: str = "", let_others_speak: bool = False) -> int:
    """Say what is wrong, after the text `before`, and return the exit code.

    Where there are several processes, mostly all of them have the same problem.  The first one says it and ends, upon
    which a launcher ends the others; they wait for that.  A process that is still there after the wait has a problem of
    its own, and says it.
    """
    if rank() or let_others_speak:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        time.sleep(HEAD_START + rank() / 2)
    print(before, end="", file=sys.stderr)
    say(sentence)
    return 2
