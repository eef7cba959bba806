"""The report in a few lines."""

from pathlib import Path

from sample_run import write_run

from dkm.app import report


def test_the_summary_fits_a_terminal(tmp_path: Path):
    summary = report.summary(write_run(tmp_path / "run", word="a_rather_long_name_of_a_layer_" * 3))
    assert max(map(len, summary.splitlines())) <= 80
    for text in ("88.25 %", "-4.25", "k-means alone 60.00", "7.8 kB", "25.3x", "count 6.9 kB", "200 steps", "90 s"):
        assert text in summary
