"""The schema of a cold start: every key and its type. Values live in `conf/coldstart.yaml`."""

from __future__ import annotations

from dataclasses import dataclass, field

from experiments.run.config import check_least
from experiments.run.schema import key
from experiments.studies.study import StudyConfig


@dataclass
class ModelConfig:
    """The network that MAML, ANIL and CAVIA share."""

    width: int = key("Of the vectors of lecturers and traits.")
    hidden: int = key("Units.")
    context: int = key("Entries of the context that CAVIA adapts.")


@dataclass
class TrainingConfig:
    """How it is learned."""

    steps: int = key("Inner steps.")
    lr: float = key("Where the inner rates begin, which are learned.")
    outer_lr: float = key("Of the tables by SparseAdam, and of all else by Adam; falls to zero by a cosine.")
    iterations: int = key("Meta-batches.")
    every: int = key("Meta-batches from one validation to the next; the best one is kept.")
    students: int = key("Of a meta-batch.")
    penalty: float = key("On the squared entries of the tables, for each rating.")


@dataclass
class LeastSquaresConfig:
    """What biases and factors are chosen from, by the validation students."""

    student: list[float] = key("Penalties of a student's bias, in ratings.")
    lecturer: list[float] = key("Penalties of a lecturer's bias, in ratings.")
    factors: list[float] = key("Penalties of factors, in ratings.")
    ranks: list[int] = key("Numbers of factors.")


@dataclass
class FineTuningConfig:
    """What fine-tuning is chosen from, likewise."""

    lr: list[float] = key("Step sizes.")
    steps: list[int] = key("Numbers of steps.")


@dataclass
class RowsConfig:
    """The meta-steps on synthetic ratings that are timed and weighed."""

    sizes: list[int] = key("Rows of the table of lecturers; the courses are twice as many.")
    dense_sizes: list[int] = key("Rows of the same with whole tables, for comparison.")
    width: int = key("Of the vectors.")
    students: int = key("Of a meta-batch.")
    repeats: int = key("Meta-steps that are timed; the median is reported.")
    dense_mib: int = key(
        "The most that a meta-step of whole tables may be expected to take, or it is left out."
    )


@dataclass
class ColdStartConfig(StudyConfig):
    """A whole run; each seed has students of the test, and a network, of its own."""

    shots: list[int] = key("How many ratings of a student are seen, ascending.")
    queries: int = key("Ratings that a student is judged on.")
    drawn: int = key("Students that are drawn, with repetition, for validation and for the test.")
    model: ModelConfig = field(default_factory=ModelConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    least_squares: LeastSquaresConfig = field(default_factory=LeastSquaresConfig)
    fine_tuning: FineTuningConfig = field(default_factory=FineTuningConfig)
    rows: RowsConfig = field(default_factory=RowsConfig)


def check(config: ColdStartConfig) -> None:
    """Refuse numbers that are out of their range."""
    training, rows = config.training, config.rows
    check_least(
        "coldstart",
        {
            "queries": (config.queries, 1),
            "drawn": (config.drawn, 1),
            "training.iterations": (training.iterations, 1),
            "training.every": (training.every, 1),
            "training.students": (training.students, 1),
            "rows.students": (rows.students, 1),
            "rows.repeats": (rows.repeats, 1),
        },
    )
    if (
        not config.shots
        or sorted(set(config.shots)) != config.shots
        or config.shots[0] < 0
        or not config.shots[-1]
    ):
        raise ValueError(
            f"coldstart: shots must ascend from 0 or more, such as [0,1,2,5,10], got {config.shots}."
        )
