"""Which curves a run has."""

from pathlib import Path

import pytest
from sample_run import write_run

from dkm.app import report
from dkm.app.report.curves import clustering_figures, training_figures


@pytest.mark.parametrize(
    ("settings", "titles"),
    [
        ("", ["Accuracy, %", "Loss"]),
        ('teacher = "none"', ["Accuracy, %", "Loss"]),
        ('teacher = "self"', ["Accuracy, %", "Training loss", "Evaluation loss"]),
    ],
)
def test_the_two_losses_of_a_distillation_have_an_axis_each(tmp_path: Path, settings: str, titles: list[str]):
    folder = write_run(tmp_path / "run")
    (folder / "config.toml").write_text(settings)
    figures = training_figures(report.read(folder))
    assert [figure.title for figure in figures] == titles
    assert sum(len(figure.legend) for figure in figures[1:]) == 2


def test_iterations_begin_with_the_first_clustering(tmp_path: Path):
    figures = {figure.title: figure for figure in clustering_figures(report.read(write_run(tmp_path / "run")))}
    for line in figures["Iterations"].legend:
        assert min(x for x, _ in line.points) > 0
        assert min(y for _, y in line.points) >= 1
    assert min(x for x, _ in figures["Snap gap, %"].legend[-1].points) == 0


def test_without_training_there_are_none(tmp_path: Path):
    run = report.read(write_run(tmp_path / "run", steps=0))
    assert training_figures(run) == clustering_figures(run) == []


def test_the_accuracy_before_is_a_level_over_the_whole_training(tmp_path: Path):
    run = report.read(write_run(tmp_path / "run", steps=40, finished=False, older=False))  # measured at its start only
    level = next(line for line in training_figures(run)[0].legend if line.label == "before")
    assert level.points == [(0.0, 92.5), (pytest.approx(0.8), 92.5)]
