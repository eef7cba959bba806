"""A whole run: a trained model, data and settings -> a folder with the compressed file and how it came about.

    preparation    settings from flags and files, and whether there is a run to resume
    compression    `compress`, the whole run from its settings to its result; `rehearse`, its beginning alone
    choosing       a plan for a size
    stage          where to compute and on what: the device, the processes, the data
    bad_images     images that cannot be read
    order          which examples each step sees
    reconstruction training block by block, before that of the whole model
    training       the training loop
    training_step  one step of the optimizer
    optimizer      the optimizer and its learning rate
    evaluation     the score of a model, and of a clustered model in training
    sampling       what a language model writes, to be trained on
    tracking       what is logged, sent to TensorBoard and the like
    stopping       Ctrl-C and SIGTERM, and how several processes agree to stop
    listener       whoever shows what happens, such as the terminal

Everything random is drawn from a seed that is computed from the settings' seed and the step.  So a checkpoint needs no
random state, and a run that was killed and resumed ends in the same bytes.
"""

from .choosing import choose_plan, own_texts
from .compression import compress, rehearse
from .evaluation import evaluate
from .listener import Listener
from .preparation import prepare
from .stage import Stage, open_stage
from .stopping import Stopped, stop_requests

__all__ = [
    "Listener",
    "Stage",
    "Stopped",
    "choose_plan",
    "compress",
    "evaluate",
    "open_stage",
    "own_texts",
    "prepare",
    "rehearse",
    "stop_requests",
]
