import os
import sys

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before the kernels are imported: they then run on the CPU

# Several workers on few cores: more threads each would only wait for one another.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
    if "torch._dynamo" in sys.modules:  # it counts what it compiled for all tests of a process together, up to a limit
        torch._dynamo.reset()
