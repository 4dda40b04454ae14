"""Adapt a recommender to a student's few ratings: MAML over unmodified embedding tables, whose gradients are rows.

    python -m experiments.examples.recommender

InstEval has 73,421 ratings, 1 to 5, that students gave to lecturers. A task is a student. The model is a matrix
factorization with biases (Koren, Bell, Volinsky, IEEE Computer 42:30, 2009). A student's vector and bias start from
zero. These and the rows of the rated lecturers adapt to some of the student's ratings by a few gradient steps. MAML
learns the tables of the lecturers and the learning rates. The meta-gradient of a table is a `RowSparse`. It is
checked against dense tables in float64. A fifth of the students are test tasks.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from torch import Tensor, nn

import metagrad as mg
from experiments.examples.common import compare, find_file
from experiments.run.progress import Progress, tell
from metagrad.sparse import RowSparse
from metagrad.tasks import Batch, Tabular

COLUMNS = {"s": "student", "d": "lecturer", "y": "rating"}
TABLES = ("lecturers.weight", "lecturer_bias.weight")
ADAPTED = ("student", "student_bias", *TABLES)
SCALE = 10.0  # ratings of a typical student: in a sum, students with more ratings have a larger weight
TOLERANCE = 1e-9  # relative, float64


class Factorization(nn.Module):
    """Rating = mean + biases of student and lecturer + product of the student's and the lecturer's vectors."""

    def __init__(self, lecturers: int, rank: int, mean: float) -> None:
        super().__init__()
        self.student, self.student_bias = nn.Parameter(torch.zeros(rank)), nn.Parameter(torch.zeros(()))
        self.lecturers, self.lecturer_bias = nn.Embedding(lecturers, rank), nn.Embedding(lecturers, 1)
        nn.init.normal_(self.lecturers.weight, std=0.3)
        nn.init.zeros_(self.lecturer_bias.weight)
        self.mean = mean

    def forward(self, lecturer: Tensor) -> Tensor:
        """Predict the ratings of lecturers, [n, 1]."""
        vectors, biases = self.lecturers(lecturer), self.lecturer_bias(lecturer)
        return self.mean + self.student_bias + biases + (vectors @ self.student)[:, None]


def loss_fn(predicted: Tensor, ratings: Tensor) -> Tensor:
    """Add the squared errors of a student."""
    return (predicted - ratings).square().sum() / SCALE


def load(shots: int, queries: int) -> tuple[Tabular, Tabular, int]:
    """Return the students of training and of the test, and the number of lecturers."""
    with find_file("insteval/InstEval.csv").open() as file:
        header = [name.strip('"') for name in file.readline().strip().split(",")]
        places = [header.index(name) for name in COLUMNS]
        table = np.loadtxt(file, delimiter=",", dtype=np.int64, usecols=places)
    columns = dict(zip(COLUMNS.values(), table.T, strict=True))
    students = np.random.default_rng(0).permutation(np.unique(columns["student"])).tolist()
    fifth = len(students) // 5
    tasks = {"train": students[fifth:], "test": students[:fifth]}
    options = {"task_column": "student", "x": {"lecturer": "lecturer"}, "y": "rating", "on_small": "skip"}
    train, test = (
        Tabular(columns, shots=shots, queries=queries, tasks=tasks, split=split, **options) for split in tasks
    )
    return train, test, int(columns["lecturer"].max()) + 1


def maml_over(model: Factorization, *, steps: int, sparse: bool = True) -> mg.MAML:
    """Return MAML with a learned step size for each parameter."""
    like = model.student
    rates = {name: nn.Parameter(torch.full((), 0.05).to(like)) for name in ADAPTED}
    rule = mg.optim.rules.sgd(lr=rates)
    return mg.MAML(model, loss_fn, inner=rule, steps=steps, sparse=TABLES if sparse else ())


def check(batch: Batch, lecturers: int, *, rank: int, steps: int) -> None:
    """Compare the meta-gradients with dense tables in float64."""
    gradients = []
    for sparse in (True, False):
        torch.manual_seed(0)
        maml = maml_over(Factorization(lecturers, rank, 3.2).double(), steps=steps, sparse=sparse)
        loss = maml(batch.to(dtype=torch.float64)).loss
        gradients.append(mg.grad(loss, dict(maml.named_parameters())))
    for name, expected in gradients[1].items():
        got = gradients[0][name]
        compare(name, got.to_dense() if isinstance(got, RowSparse) else got, expected, tolerance=TOLERANCE)


def train(maml: mg.MAML, tasks: Tabular, *, iterations: int, students: int, lr: float) -> None:
    """Learn the tables by an optimizer that writes only the rows of each batch, and other parameters by Adam."""
    generator = torch.Generator().manual_seed(0)
    tables = [maml.get_parameter(f"model.{name}") for name in TABLES]
    others = [p for name, p in maml.named_parameters() if name.removeprefix("model.") not in TABLES]
    optimizers = mg.optim.SparseAdam(tables, lr=lr), torch.optim.Adam(others, lr=lr)
    for number in Progress(range(1, iterations + 1), unit="step", leave=False):
        loss = maml(tasks.sample(students, generator=generator)).loss
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if number % max(1, iterations // 10) == 0:
            tell(f"  iteration {number}: query loss {loss.item():.3f}")


def main(arguments: list[str] | None = None) -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--iterations", type=int, default=500, help="meta-batches")
    parser.add_argument("--students", type=int, default=64, help="of a meta-batch")
    parser.add_argument("--shots", type=int, default=10, help="ratings that a student is adapted to")
    parser.add_argument("--steps", type=int, default=3, help="inner steps")
    parser.add_argument("--rank", type=int, default=2, help="length of the vectors")
    parser.add_argument("--lr", type=float, default=0.01, help="of the outer optimizers")
    options = parser.parse_args(arguments)

    tasks, test, lecturers = load(options.shots, queries=5)
    print("Meta-gradients of 8 students against dense tables, float64:")
    batch = tasks.sample(8, generator=torch.Generator().manual_seed(0))
    check(batch, lecturers, rank=options.rank, steps=options.steps)
    torch.manual_seed(0)
    maml = maml_over(Factorization(lecturers, options.rank, 3.2), steps=options.steps)
    print(f"MAML over students, {options.shots} ratings, {options.steps} steps:")
    train(maml, tasks, iterations=options.iterations, students=options.students, lr=options.lr)
    print("Root mean square error on other ratings of new students:")
    batch = test.sample(1000, generator=torch.Generator().manual_seed(1))
    for steps in (0, options.steps):
        predicted = maml.adapt(batch.support, steps=steps)(batch.query.x).detach().clamp(1, 5)
        error = (predicted - batch.query.y).square().mean().sqrt()
        print(f"  MAML, {steps} steps on {options.shots} ratings: {error:.3f}")


if __name__ == "__main__":
    main()
