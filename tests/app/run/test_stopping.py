"""Requests to stop, where a launcher has started several processes."""

import os
import signal

import pytest

from dkm.app.run.stopping import stop_requests

LOST = RuntimeError("[gloo/transport/tcp/pair.cc:561] Connection closed by peer [127.0.0.1]:12168")


@pytest.fixture(autouse=True)
def two_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")


def run(error: RuntimeError, *, is_ended: bool) -> None:
    """A run in which this error is raised, after the launcher has ended the process or not."""
    with stop_requests():
        if is_ended:
            os.kill(os.getpid(), signal.SIGTERM)
        raise error


def test_a_process_that_is_ended_with_the_others_says_nothing():
    """The one that had the problem has said it."""
    with pytest.raises(SystemExit) as ended:
        run(LOST, is_ended=True)
    assert ended.value.code == 2


def test_a_process_that_is_left_alone_says_so():
    with pytest.raises(RuntimeError, match="Connection closed"):
        run(LOST, is_ended=False)


def test_other_errors_stay():
    with pytest.raises(RuntimeError, match="shapes"):
        run(RuntimeError("shapes do not fit"), is_ended=True)
