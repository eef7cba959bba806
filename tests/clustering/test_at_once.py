"""Several weights at a time."""

import threading

import pytest
import torch
from torch import nn

import dkm
from dkm.clustering.at_once import at_once


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def test_results_are_in_order_and_the_threads_of_pytorch_come_back(threads: int):
    assert at_once([lambda i=i: i * i for i in range(20)]) == [i * i for i in range(20)]
    assert torch.get_num_threads() == threads


def test_calls_run_at_the_same_time_with_one_thread_each():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        meeting = threading.Barrier(2, timeout=60)  # two calls wait for each other

        def call() -> int:
            meeting.wait()
            return torch.get_num_threads()

        assert at_once([call, call]) == [1, 1]
    finally:
        torch.set_num_threads(before)


def test_an_error_arrives_and_the_threads_of_pytorch_come_back(threads: int):
    def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        at_once([lambda: None, fail, lambda: None])
    assert torch.get_num_threads() == threads


def test_a_model_starts_alike_with_any_number_of_threads():
    states = []
    before = torch.get_num_threads()
    for number in (1, 3):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(256, 128), nn.Linear(128, 96), nn.Linear(96, 80))
        torch.set_num_threads(number)
        try:
            dkm.compress_(model, "0:4/4, 1:2, 2:4/8", steps=10)
        finally:
            torch.set_num_threads(before)
        states.append(model.state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
