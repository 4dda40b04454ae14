"""How well scores predict: comparisons with retrained models, with intervals."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from metagrad.attribution.retraining import Outcomes, retrain
from metagrad.attribution.scores import Scores
from metagrad.core.checks import check_count, check_positive, check_type, refuse, warn
from metagrad.curvature.rows import norm
from metagrad.training import Training
from metagrad.training.training import Metrics


@dataclasses.dataclass(frozen=True, repr=False)
class Evaluation:
    """A number between -1 and 1 with its 95 % confidence interval. :func:`lds` returns it.

    Attributes:
        name: Name of the measurement.
        value: The number.
        interval: Lower and upper bound.
        note: Size of the sample.
        outcomes: Metrics of the retrained models, to evaluate other scores on the same models, or None.
    """

    name: str
    value: float
    interval: tuple[float, float]
    note: str
    outcomes: Outcomes | None = None

    def __repr__(self) -> str:
        low, high = self.interval
        return f"{self.name} = {self.value:.3f} [{low:.3f}, {high:.3f}] ({self.note})"


def subsets(size: int, drop: float, count: int, seed: int = 0) -> Tensor:
    """Return random weights of 0 or 1, ``[count, size]``. Each row drops the same number of examples.

    Args:
        size: Number of examples.
        drop: Share of the examples that a row drops.
        count: Number of rows.
        seed: Seed.

    Raises:
        ValueError: A row would drop no example or all examples.

    Example:
        >>> metagrad.attribution.subsets(10, drop=0.3, count=2).sum(1)
        tensor([7., 7.])
    """
    check_count("subsets(size)", size)
    if not 0 < drop < 1 or not 0 < round(drop * size) < size:
        refuse("subsets(drop)", f"a share that drops some but not all of {size} examples", drop)
    generator = torch.Generator().manual_seed(seed)
    masks = torch.ones(check_count("subsets(count)", count), size)
    for mask in masks:
        mask[torch.randperm(size, generator=generator)[: round(drop * size)]] = 0
    return masks


def lds(
    training: Training,
    scores: Scores,
    metrics: Metrics,
    *,
    drop: float = 0.1,
    subsets: int = 100,
    seed: int = 0,
    outcomes: Outcomes | None = None,
) -> Evaluation:
    """Return the linear datamodeling score: the rank correlation of predicted and retrained metrics over subsets.

    Each subset drops a random share of the examples. Retraining on it uses the same order, initialization and
    random numbers. The correlations of the metrics are averaged. The interval is a bootstrap over subsets and
    metrics.

    Args:
        training: The training.
        scores: The scores. For large ``drop``, compute the scores at the mean weights of the subsets, which are
            ``1 - drop``.
        metrics: The metrics, as in :func:`metagrad.attribute`.
        drop: Share of the examples that a subset drops.
        subsets: Number of subsets.
        seed: Seed of the subsets and of the bootstrap.
        outcomes: Retrained models from :func:`retrain`, or the ``outcomes`` of another evaluation.

    Raises:
        ValueError: The scores are scores of tokens, or a metric is NaN.

    Example:
        >>> x = torch.linspace(-1, 1, 8).unsqueeze(1)
        >>> training = metagrad.Training(
        ...     torch.nn.Linear(1, 1), torch.nn.functional.mse_loss, (x, 2 * x),
        ...     optimizer=metagrad.optim.rules.sgd(lr=0.1), batch_size=8, steps=3
        ... )
        >>> metrics = lambda model: model(x[:2])[:, 0]
        >>> scores = metagrad.attribute(training(), metrics)
        >>> metagrad.attribution.lds(training, scores, metrics, drop=0.125, subsets=10).value > 0.9
        True

    References:
        Park et al., "TRAK: Attributing model behavior at scale", ICML 2023, definition 2.2.
    """
    check_type("lds(training)", training, Training)
    _check_weights("lds(scores)", scores)
    if outcomes is None:
        outcomes = retrain(training, _subsets(training.num_examples, drop, subsets, seed), metrics)
    distance = float((outcomes.weights.mean(0) - scores.at).mean().abs())
    if distance > 0.2:
        warn(
            f"lds(scores): the mean weight of the subsets is {distance:.2g} from the weights of the scores. Compute "
            "the scores at the mean: attribute(training(torch.full((n,), 1 - drop)), metrics)."
        )
    return _compared("lds", scores, outcomes, f"{len(outcomes.weights)} subsets", seed)


_subsets = subsets


def loo(
    training: Training, scores: Scores, metrics: Metrics, examples: Tensor, *, seed: int = 0
) -> Evaluation:
    """Return the rank correlation of scores with the effect of leaving out one example at a time.

    The effect of one example can be as small as 1e-5 of a metric, so train in float64. The interval is a
    bootstrap over examples and metrics.

    Args:
        training: The training.
        scores: The scores.
        metrics: The metrics, as in :func:`metagrad.attribute`.
        examples: Indices of the examples to leave out, at least three.
        seed: Seed of the bootstrap.

    Raises:
        ValueError: There are fewer than three examples, the scores are of tokens, or a metric is NaN.

    Example:
        >>> x = torch.linspace(-1, 1, 8).unsqueeze(1)
        >>> training = metagrad.Training(
        ...     torch.nn.Linear(1, 1), torch.nn.functional.mse_loss, (x, 2 * x),
        ...     optimizer=metagrad.optim.rules.sgd(lr=0.1), batch_size=8, steps=3
        ... )
        >>> metrics = lambda model: model(x[:2])[:, 0]
        >>> scores = metagrad.attribute(training(), metrics)
        >>> metagrad.attribution.loo(training, scores, metrics, torch.arange(8)).value > 0.9
        True
    """
    check_type("loo(examples)", examples, Tensor)
    _check_weights("loo(scores)", scores)
    if examples.ndim != 1 or len(examples) < 3 or examples.dtype != torch.int64:
        refuse("loo(examples)", "at least three indices, int64", f"{examples.dtype} {tuple(examples.shape)}")
    if not bool((examples.abs() < scores.at.numel()).all()):
        refuse("loo(examples)", f"indices of {len(scores.at)} examples", examples)
    weights = scores.at.repeat(len(examples), 1)
    weights[torch.arange(len(examples)), examples] = 0
    outcomes = retrain(training, weights, metrics)
    return _compared("loo", scores, outcomes, f"{len(examples)} examples", seed)


def _compared(name: str, scores: Scores, outcomes: Outcomes, note: str, seed: int) -> Evaluation:
    """Return the rank correlation of predicted and retrained metrics, with its interval."""
    predicted, actual = scores.predict(outcomes.weights).double(), outcomes.metrics.double()
    value = float(_rank_correlation(predicted, actual))
    return Evaluation(name, value, _bootstrap(predicted, actual, value, seed), note, outcomes)


def auc(scores: Tensor, wrong: Tensor) -> Evaluation:
    """Return the probability that a wrong example has a higher score than a correct one. Ties count half.

    Args:
        scores: A score for each example, ``[n]``, such as ``Scores.values.mean(0)`` of validation losses.
        wrong: True for each wrong example, ``[n]``.

    Raises:
        ValueError: The shapes differ, ``wrong`` is not bool or has the same value for all examples, or a score is
            NaN.

    Example:
        >>> metagrad.attribution.auc(torch.tensor([3.0, 1.0, 2.0]), torch.tensor([True, False, False])).value
        1.0

    References:
        Newcombe, "Confidence intervals for an effect size measure based on the Mann-Whitney statistic, part 2",
        Statistics in Medicine 25(4), 2006, method 5 (the interval).
    """
    check_type("auc(scores)", scores, Tensor)
    num_wrong = int(check_type("auc(wrong)", wrong, Tensor).sum())
    num_right = len(wrong) - num_wrong
    are_vectors = scores.ndim == 1 and scores.shape == wrong.shape
    if not are_vectors or wrong.dtype != torch.bool or not num_wrong * num_right:
        refuse("auc(scores, wrong)", "[n] and bool [n], with wrong and correct examples", wrong)
    ranks = _ranks(scores.double().unsqueeze(1))[:, 0]
    value = (float(ranks[wrong].sum()) - num_wrong * (num_wrong - 1) / 2) / (num_wrong * num_right)
    others = torch.tensor([value, *(i / 10000 for i in range(10001))], dtype=torch.float64)
    shape = 1 + (len(wrong) / 2 - 1) * ((1 - others) / (2 - others) + others / (1 + others))
    errors = (others * (1 - others) * shape / (num_wrong * num_right)).sqrt()
    inside = others[(others - value).abs() <= 1.96 * errors]
    interval = float(inside.min()), float(inside.max())
    return Evaluation("auc", value, interval, f"{num_wrong} of {len(wrong)} wrong")


@dataclasses.dataclass(frozen=True)
class Smoothness:
    """How well a derivative predicts the effect of a finite change. :func:`metasmoothness` returns it.

    Attributes:
        value: Metasmoothness, from -1 to 1. Near 1, a second change of the weights moves the parameters in
            the same direction as the first.
        slope_error: Relative error of the predicted change of the metrics along the direction, or None without
            scores. It indicates better than metasmoothness how well scores predict.
        movement: Norm of the first change of the parameters, relative to the norm of the parameters.
    """

    value: float
    slope_error: float | None
    movement: float


def metasmoothness(
    training: Training, metrics: Metrics, scores: Scores | None = None, *, h: float = 0.1, seed: int = 0
) -> Smoothness:
    r"""Return how smoothly the trained model depends on the example weights, in one random direction.

    Training with the weights :math:`w, w + h v, w + 2 h v` gives two changes of the parameters.
    Metasmoothness measures whether their entries have the same sign, weighted by the first change. Entries of
    v are :math:`\pm 1`.

    Args:
        training: The training.
        metrics: The metrics, as in :func:`metagrad.attribute`.
        scores: Scores, to compute the slope error. If given, w are the example weights of the scores.
        h: Size of the change of each weight.
        seed: Seed of the direction.

    Raises:
        ValueError: ``h`` is not above 0, or the scores are scores of tokens.

    Example:
        >>> x = torch.linspace(-1, 1, 8).unsqueeze(1)
        >>> training = metagrad.Training(
        ...     torch.nn.Linear(1, 1), torch.nn.functional.mse_loss, (x, 2 * x),
        ...     optimizer=metagrad.optim.rules.sgd(lr=0.1), batch_size=8, steps=3
        ... )
        >>> metrics = lambda model: model(x[:2])[:, 0]
        >>> scores = metagrad.attribute(training(), metrics)
        >>> smooth = metagrad.attribution.metasmoothness(training, metrics, scores, h=0.01)
        >>> smooth.value > 0.9, smooth.slope_error < 0.1
        (True, True)

    References:
        Engstrom et al., "Optimizing ML training with metagradient descent", arXiv:2503.13751, definition 2.
    """
    check_type("metasmoothness(training)", training, Training)
    check_positive("metasmoothness(h)", h)
    generator = torch.Generator().manual_seed(seed)
    if scores is not None:
        _check_weights("metasmoothness(scores)", scores)
    at = torch.ones(training.num_examples) if scores is None else scores.at
    direction = torch.randint(0, 2, at.shape, generator=generator).to(at.device).double() * 2 - 1
    weights = torch.stack([at + i * h * direction for i in range(3)])
    outcomes = retrain(training, weights, metrics, keep=True)
    flat = torch.cat([p.double().flatten(1) for p in (outcomes.params or {}).values()], 1)
    first, second = flat[1] - flat[0], flat[2] - flat[1]
    agreement = (first.sign() * second.sign() * first.abs()).sum() / first.abs().sum().clamp(min=1e-300)
    error = None
    if scores is not None:
        actual = (outcomes.metrics[1] - outcomes.metrics[0]).double()
        predicted = h * scores.values.double() @ direction
        error = float(norm(predicted - actual) / norm(actual).clamp(min=1e-300))
    return Smoothness(float(agreement), error, float(norm(first) / norm(flat[0])))


def _check_weights(call: str, scores: Scores) -> None:
    if scores.at.ndim != 1:
        refuse(call, "scores of examples, from weights [n]", f"weights {tuple(scores.at.shape)}")


def _ranks(values: Tensor) -> Tensor:
    """Return the ranks of ``[..., m, k]`` along m, from 0. Ties get their mean rank."""
    if bool(values.isnan().any()):
        refuse("lds, loo or auc", "scores and metrics that are numbers. NaN has no rank", math.nan)
    columns = values.transpose(-1, -2).contiguous()
    ordered = columns.sort(-1).values
    left = torch.searchsorted(ordered, columns)
    right = torch.searchsorted(ordered, columns, right=True)
    return ((left + right - 1).double() / 2).transpose(-1, -2)


def _rank_correlation(a: Tensor, b: Tensor) -> Tensor:
    """Return the mean rank correlation of the columns of ``[m, k]``. It is 0 for a constant column."""
    a, b = (ranks - ranks.mean(0) for ranks in (_ranks(a), _ranks(b)))
    return ((a * b).sum(0) / (norm(a.mT) * norm(b.mT)).clamp(min=1e-12)).mean()


def _bootstrap(predicted: Tensor, actual: Tensor, value: float, seed: int) -> tuple[float, float]:
    """Return the interval of the mean rank correlation, over random rows and metrics.

    A mean over repeated rows differs from the mean over all rows as this one differs from the true value. It is
    lower, because repeated rows have the same rank.
    """
    generator = torch.Generator().manual_seed(seed)
    means = list[Tensor]()
    for _ in range(1000):
        i, j = (torch.randint(size, (size,), generator=generator) for size in predicted.shape)
        means.append(_rank_correlation(predicted[i][:, j], actual[i][:, j]))
    low, high = map(float, torch.stack(means).quantile(torch.tensor([0.025, 0.975]).to(means[0])))
    return max(min(2 * value - high, value), -1.0), min(2 * value - low, 1.0)
