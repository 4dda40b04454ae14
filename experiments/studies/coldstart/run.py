"""The methods: each chosen by the same validation students, and judged on the same students of the test."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch

import metagrad as mg
from experiments.run.progress import Progress
from experiments.studies.coldstart.factors import Factors, Ridge, factorize
from experiments.studies.coldstart.learner import Recommender, learner, optimizers, penalty, predict
from experiments.studies.coldstart.ratings import Predict, Ratings, errors, load, mean_error
from experiments.studies.study import Result, Work
from metagrad.tasks import Batch

if TYPE_CHECKING:
    from experiments.studies.coldstart.schema import ColdStartConfig

Setting = TypeVar("Setting")


class Judge(NamedTuple):
    """The ratings of a seed, and the students that every method is chosen by and judged on.

    Attributes:
        ratings: The data.
        validation: Students that settings are chosen by.
        test: Students of the test.
        shots: How many of their ratings are seen.
    """

    ratings: Ratings
    validation: Batch
    test: Batch
    shots: list[int]

    def best(
        self, settings: Iterable[Setting], method: Callable[[Setting], Predict]
    ) -> tuple[Setting, Predict]:
        """Return the setting with the least error on the validation students, and its predictions."""
        found = [(setting, method(setting)) for setting in settings]
        return min(found, key=lambda pair: mean_error(errors(pair[1], self.validation, self.shots)))

    def result(self, predict: Predict, **chosen: float) -> Result:
        """Return the errors on the students of the test, and what was chosen."""
        return {"errors": list(errors(predict, self.test, self.shots).values()), "chosen": chosen}


def judge_of(config: ColdStartConfig, seed: int) -> Judge:
    """Read the data of a seed, and draw the students."""
    ratings = load(seed)
    validation, test = (
        ratings.tasks(part, config.shots[-1], config.queries).sample(
            config.drawn, generator=torch.Generator().manual_seed(seed)
        )
        for part in ("validation", "test")
    )
    return Judge(ratings, validation, test, config.shots)


def biases(config: ColdStartConfig, judge: Judge) -> tuple[tuple[float, float], Factors]:
    """Fit biases of students and lecturers, with the best penalties."""
    choices = config.least_squares
    fitted = {
        pair: fit(judge, 0, Ridge(pair[0], 0.0), Ridge(pair[1], 0.0))
        for pair in itertools.product(choices.student, choices.lecturer)
    }
    chosen, _ = judge.best(fitted, lambda pair: fitted[pair].predict)
    return chosen, fitted[chosen]


def fit(judge: Judge, rank: int, student: Ridge, lecturer: Ridge) -> Factors:
    """Fit factors to the students of training."""
    lecturers = judge.ratings.sizes["lecturer"]
    return factorize(judge.ratings.of("train"), lecturers, rank, student=student, lecturer=lecturer)


def user_and_item(config: ColdStartConfig, work: Work) -> Result:
    """Judge biases."""
    judge = judge_of(config, work.seed)
    (student, lecturer), found = biases(config, judge)
    return judge.result(found.predict, student=student, lecturer=lecturer)


def factorization(config: ColdStartConfig, work: Work) -> Result:
    """Judge factors beside the biases."""
    judge, choices = judge_of(config, work.seed), config.least_squares
    (student, lecturer), _ = biases(config, judge)

    def method(setting: tuple[int, float]) -> Predict:
        rank, factors = setting
        return fit(judge, rank, Ridge(student, factors), Ridge(lecturer, factors)).predict

    (rank, factors), best = judge.best(itertools.product(choices.ranks, choices.factors), method)
    return judge.result(best, rank=rank, factors=factors)


def fine_tuning(config: ColdStartConfig, work: Work) -> Result:
    """Learn the network on all students together, and judge it after gradient steps on a new one's ratings."""
    judge, choices = judge_of(config, work.seed), config.fine_tuning
    model = trained("joint", config, judge, work).model
    assert isinstance(model, Recommender)

    def method(setting: tuple[float, int]) -> Predict:
        lr, steps = setting
        return partial(predict, learner("maml", model, steps=steps, lr=lr))

    (lr, steps), best = judge.best(itertools.product(choices.lr, choices.steps), method)
    return judge.result(best, lr=lr, steps=steps)


def meta_learning(config: ColdStartConfig, name: str, work: Work) -> Result:
    """Judge MAML, ANIL or CAVIA."""
    judge = judge_of(config, work.seed)
    maml = trained(name, config, judge, work)
    rates = {each: p.item() for each, p in maml.named_parameters() if each.startswith("inner_")}
    return judge.result(partial(predict, maml), **rates)


def trained(name: str, config: ColdStartConfig, judge: Judge, work: Work) -> mg.MAML:
    """Learn a network from the biases on, and return it as it was when the validation students were served best."""
    settings, generator = config.training, torch.Generator().manual_seed(work.seed)
    maml = new_learner(name, config, judge)
    tasks = [judge.ratings.tasks("train", shots, config.queries) for shots in config.shots if shots]
    steppers = optimizers(maml, settings.outer_lr)
    schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(each, settings.iterations) for each in steppers]
    least, best = float("inf"), {}
    for number in Progress(range(1, settings.iterations + 1), unit="step", leave=False):
        shots = int(torch.randint(len(tasks), (), generator=generator))
        batch = tasks[shots].sample(settings.students, generator=generator)
        loss = maml(batch).loss
        (loss + settings.penalty * penalty(maml.model, batch.query.x)).backward()
        for each in (*steppers, *schedules):
            each.step()
        maml.zero_grad()
        if number % settings.every == 0 or number == settings.iterations:
            error = mean_error(errors(partial(predict, maml), judge.validation, judge.shots))
            work.log(number, {"train/query_loss": loss.item(), "validation/rmse": error})
            if error < least:
                least, best = error, {key: value.clone() for key, value in maml.state_dict().items()}
    maml.load_state_dict(best)
    return maml


def new_learner(name: str, config: ColdStartConfig, judge: Judge) -> mg.MAML:
    """Return a learner of a network whose bias of a lecturer is that of least squares."""
    shape, settings = config.model, config.training
    _, found = biases(config, judge)
    model = Recommender(judge.ratings.sizes, shape.width, shape.hidden, shape.context, found.mean)
    with torch.no_grad():
        model.lecturer_bias.weight.copy_(found.items)
    return learner(name, model, steps=settings.steps, lr=settings.lr)
