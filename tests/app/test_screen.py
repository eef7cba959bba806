"""What a run looks like: how far an evaluation is."""

import io

import pytest

pytest.importorskip("typer")
import rich.console

from dkm.app import screen
from dkm.app.screen import Screen


def test_an_evaluation_in_a_terminal_is_a_bar_that_disappears():
    with Screen() as shown:
        shown.console = rich.console.Console(file=(written := io.StringIO()), force_terminal=True, width=60)
        for done in (64, 128, 150):
            shown.measured(done, 150)
        assert shown.counting is None
        shown.note("done")
    assert "measuring" in written.getvalue()
    assert "100%" in written.getvalue()
    assert "\x1b[2K" in written.getvalue().partition("100%")[2]  # its line is erased
    assert written.getvalue().endswith("done\n")


def test_elsewhere_it_is_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch):
    clock = [0.0]
    monkeypatch.setattr(screen.time, "monotonic", lambda: clock[0])
    with Screen() as shown:
        shown.console = rich.console.Console(file=(written := io.StringIO()), width=60)
        for done in range(10, 101, 10):
            clock[0] += 4.0
            shown.measured(done, 1000)
    assert written.getvalue().splitlines() == [f"{done} of 1,000 examples measured" for done in (30, 60, 90)]
