"""What is measured, against other people's implementations and against the definitions."""

import math

import pytest
import torch

from dkm.app.measures import ACCURACY, PERPLEXITY
from dkm.app.tasks.metrics import Classification, Correlation, Metric, NextToken, Score

CPU = torch.device("cpu")


def score_of(metric: Metric) -> Score:
    return metric.score(metric.totals(0, 1).tolist())


def test_f1_and_matthews_are_those_of_scikit_learn():
    sklearn = pytest.importorskip("sklearn.metrics")
    logits, labels = torch.randn(200, 2), (torch.rand(200) < 0.3).long()
    metric = Classification(CPU, pairs=True)
    for at in range(0, 200, 64):
        metric.add(logits[at : at + 64], labels[at : at + 64])
    more = score_of(metric).more
    assert more["f1"] == pytest.approx(100 * sklearn.f1_score(labels, logits.argmax(1)))
    assert more["matthews"] == pytest.approx(100 * sklearn.matthews_corrcoef(labels, logits.argmax(1)))


@pytest.mark.parametrize("answer", [0, 1])
def test_one_class_only_gives_zero_and_no_error(answer: int):
    metric = Classification(CPU, pairs=True)
    metric.add(torch.eye(2)[torch.full((5,), answer)], torch.zeros(5, dtype=torch.long))
    assert score_of(metric).more == {"f1": 0, "matthews": 0}


def test_top5_is_measured_for_many_outputs_only():
    logits = torch.arange(100.0).repeat(4, 1)  # the likeliest five are 95 to 99
    labels = torch.tensor([99, 95, 94, 0])
    metric, few = Classification(CPU), Classification(CPU)
    metric.add(logits, labels)
    few.add(logits[:, :99], labels.clamp(max=98))
    assert (score_of(metric).value, score_of(metric).more) == (25, {"top5": 50})
    assert score_of(few).more == {}


def test_the_error_of_an_accuracy():
    """Of many examples it is the binomial one; of a few that are all right it says so little as they do."""
    score = Classification(CPU).score([7000, 1.0, 10_000, 0, 0, 0, 0, 0, 0])
    assert score.error == pytest.approx(100 * math.sqrt(0.7 * 0.3 / 10_000), rel=1e-3)
    assert Classification(CPU).score([30, 1.0, 30, 0, 0, 0, 0, 0, 0]).error == pytest.approx(3.03, abs=0.01)


def test_correlations_are_those_of_scipy_and_do_not_depend_on_the_processes():
    stats = pytest.importorskip("scipy.stats")
    answers, labels = torch.randn(51), (torch.randn(51) * 2).round() / 2  # labels with many ties
    answers += labels
    whole = Correlation(CPU, 51)
    whole.add(answers[:30], labels[:30])
    whole.add(answers[30:], labels[30:])
    score = score_of(whole)
    assert score.value == pytest.approx(100 * stats.pearsonr(answers, labels).statistic, rel=1e-5)
    assert score.more["spearman"] == pytest.approx(100 * stats.spearmanr(answers, labels).statistic, rel=1e-5)
    assert score.loss == pytest.approx(float((answers - labels).square().mean()), rel=1e-5)
    totals = torch.zeros(102, dtype=torch.float64)
    for process in range(2):
        part = Correlation(CPU, 51)
        part.add(answers[process::2], labels[process::2])
        totals += part.totals(process, 2)
    assert part.score(totals.tolist()) == score


def test_a_model_that_always_says_the_same_has_no_correlation():
    metric = Correlation(CPU, 4)
    metric.add(torch.ones(4), torch.arange(4.0))
    assert (score_of(metric).value, score_of(metric).more) == (0, {"spearman": 0})


def test_the_error_of_a_perplexity_is_that_between_texts():
    """The texts are drawn again and again; the error of one draw is the deviation of the perplexities of all draws."""
    generator = torch.Generator().manual_seed(0)
    values, errors = [], []
    for _ in range(400):
        rows = torch.arange(50).repeat_interleave(torch.randint(3, 9, (50,), generator=generator))
        difficulty = 0.5 * torch.randn(50, generator=generator)  # of each text: its tokens are alike
        logits = torch.stack([torch.randn(len(rows), generator=generator) + difficulty[rows], torch.zeros(len(rows))])
        metric = NextToken(CPU)
        metric.add(logits.T, torch.zeros(len(rows), dtype=torch.long), rows)
        score = score_of(metric)
        assert score.examples == 50
        values.append(score.value)
        errors.append(score.error)
    # The deviation of 400 values is itself off by 1 / sqrt(800) = 3.5 %; 4 of these happen once in 16,000 draws.
    assert torch.tensor(errors).mean().item() == pytest.approx(torch.tensor(values).std().item(), rel=0.14)


def test_a_score_by_name():
    score = Score(88.25, 0.5, 300, 1.86, {"top5": 97.0})
    assert score.figures(ACCURACY) == {
        "accuracy": 88.25, "standard_error": 1.86, "examples": 300, "loss": 0.5, "top5": 97.0,
    }  # fmt: skip
    assert Score(3.0, math.inf, 1, None, {}).figures(PERPLEXITY)["loss"] is None
