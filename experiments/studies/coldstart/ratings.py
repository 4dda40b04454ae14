"""InstEval's ratings as tasks: a task is a student, and no student of the test is in training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from experiments.examples.common import find_file
from metagrad.tasks import Batch, Examples, Tabular

NAMES = {
    "s": "student",
    "d": "lecturer",
    "dept": "department",
    "studage": "student_age",
    "lectage": "lecturer_age",
    "service": "service",
    "y": "score",
}
INPUTS = ("lecturer", "course", "department", "student_age", "lecturer_age")
PARTS = {"train": 0.64, "validation": 0.16, "test": 0.20}
TRAITS = {"department": 0, "student_age": 16, "lecturer_age": 25}  # where each begins in one table
LOWEST, HIGHEST = 1.0, 5.0

Predict = Callable[[Examples, dict[str, Tensor]], Tensor]
"""Ratings of students ``[tasks, shots]``, none at all too, and inputs ``[tasks, n]`` to scores ``[tasks, n, 1]``."""


class Ratings(NamedTuple):
    """A table of ratings, and its students by part.

    Attributes:
        columns: Of the table, ``[ratings]`` each.
        students: Numbers of students, by the name of the part.
    """

    columns: dict[str, np.ndarray]
    students: dict[str, list[int]]

    @property
    def sizes(self) -> dict[str, int]:
        """How many rows the tables of lecturers, courses and traits have."""
        last = {name: int(self.columns[name].max()) + 1 for name in INPUTS}
        return {
            "lecturer": last["lecturer"],
            "course": 2 * last["lecturer"],
            "traits": max(last[name] for name in TRAITS),
        }

    def tasks(self, part: str, shots: int, queries: int) -> Tabular:
        """Return the students of a part who have as many ratings."""
        return Tabular(
            self.columns,
            task="student",
            x={name: name for name in INPUTS},
            y="score",
            shots=shots,
            queries=queries,
            tasks=self.students,
            split=part,
            small="skip",
        )

    def of(self, part: str) -> dict[str, Tensor]:
        """Return all ratings of the students of a part, ``[ratings]`` by the name of the column."""
        chosen = np.isin(self.columns["student"], self.students[part])
        return {name: torch.from_numpy(column[chosen]) for name, column in self.columns.items()}


def load(seed: int) -> Ratings:
    """Read the table, and draw the students of each part."""
    with find_file("insteval/InstEval.csv").open() as file:
        header = [name.strip('"') for name in file.readline().strip().split(",")]
        table = np.loadtxt(
            file, delimiter=",", dtype=np.int64, usecols=[header.index(name) for name in NAMES]
        )
    return split({name: table[:, number] for number, name in enumerate(NAMES.values())}, seed)


def split(columns: Mapping[str, np.ndarray], seed: int) -> Ratings:
    """Add what a course is, a lecturer's teaching for the own department or for another, and draw the parts."""
    columns = {**columns, "course": 2 * columns["lecturer"] + columns["service"]}
    columns |= {name: columns[name] + first for name, first in TRAITS.items()}
    students = np.random.default_rng(seed).permutation(np.unique(columns["student"]))
    ends = np.round(np.cumsum([0, *PARTS.values()]) * len(students)).astype(int)
    parts = zip(PARTS, ends, ends[1:], strict=False)
    return Ratings(columns, {name: students[first:last].tolist() for name, first, last in parts})


def errors(predict: Predict, batch: Batch, shots: list[int]) -> dict[int, float]:
    """Return the root mean square error on the query ratings, by how many support ratings were seen."""
    found = {}
    for seen in shots:
        x, y = batch.support
        support = Examples({name: column[:, :seen] for name, column in x.items()}, y[:, :seen])
        scores = predict(support, batch.query.x).detach().clamp(LOWEST, HIGHEST)
        found[seen] = float((scores - batch.query.y).square().mean().sqrt())
    return found


def mean_error(found: dict[int, float]) -> float:
    """Return what settings are chosen by: the mean over how many ratings were seen."""
    return sum(found.values()) / len(found)
