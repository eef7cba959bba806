import pytest
import torch

# Several workers on few cores: more threads each would only wait for one another.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
