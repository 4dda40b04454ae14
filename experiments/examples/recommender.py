"""Adapt a recommender to a student's few ratings: MAML over unmodified embedding tables, whose gradients are rows.

    python -m experiments.examples.recommender

InstEval has 73,421 ratings, 1 to 5, that students gave to lecturers. A task is a student: a matrix factorization
with biases (Koren, Bell, Volinsky, IEEE Computer 42:30, 2009) takes a few gradient steps on some of the student's
ratings, and is judged on others. A student starts from zero; the tables of the lecturers, and the step sizes, are
learned by MAML. Each task adapts the rows that its ratings look up, and the meta-gradient of a table is a
`RowSparse`, which is checked against dense tables. Judged on a random fifth of all ratings, each student adapted to
ratings of the other four fifths. On these data the biases carry what there is to find: with a small `--penalty` the
lecturers' vectors fit noise.
"""

from __future__ import annotations

import argparse
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

import metagrad as mg
from experiments.examples.common import compare, find_file
from experiments.run.progress import Progress, tell
from metagrad.sparse.tables.embedding import embedding
from metagrad.sparse.tables.row_sparse import RowSparse
from metagrad.tasks import Batch, Examples

COLUMNS = ("s", "d", "service", "y")  # student, lecturer, whether for another department, rating
STUDENTS = ("students.weight", "student_bias.weight")
LECTURERS = ("lecturers.weight", "lecturer_bias.weight", "course_bias.weight")
SCALE = 10.0  # ratings of a typical student: the loss is a sum over ratings, so that more of them weigh more
TOLERANCE = 1e-9  # relative, float64


class Ratings(NamedTuple):
    """Ratings, and which of them each student gave."""

    ids: (
        Tensor  # [ratings, 3]: student, lecturer, and course: the lecturer, for the own department or another
    )
    scores: Tensor  # [ratings]
    of_student: Tensor  # [students, most]: ratings, the first `counts` of each row
    counts: Tensor  # [students]


class Factorization(nn.Module):
    """Rating = mean + biases of student, lecturer and course + product of student's and lecturer's vectors."""

    def __init__(self, students: int, lecturers: int, rank: int, mean: float) -> None:
        super().__init__()
        self.students, self.lecturers = nn.Embedding(students, rank), nn.Embedding(lecturers, rank)
        self.student_bias, self.lecturer_bias = nn.Embedding(students, 1), nn.Embedding(lecturers, 1)
        self.course_bias = nn.Embedding(2 * lecturers, 1)
        for table in (self.students, self.student_bias, self.lecturer_bias, self.course_bias):
            nn.init.zeros_(table.weight)
        nn.init.normal_(self.lecturers.weight, std=0.3)
        self.mean = mean

    def forward(self, ids: Tensor) -> Tensor:
        """Predict the ratings of [n, 3] students, lecturers and courses."""
        student, lecturer, course = ids.unbind(-1)
        biases = self.student_bias(student) + self.lecturer_bias(lecturer) + self.course_bias(course)
        return self.mean + biases.squeeze(-1) + (self.students(student) * self.lecturers(lecturer)).sum(-1)


def loss_fn(predicted: Tensor, scores: Tensor) -> Tensor:
    """Add the squared errors of a task; a rating that is not there is NaN."""
    return torch.where(scores.isnan(), 0, predicted - scores).square().sum() / SCALE


def load(seed: int) -> tuple[Ratings, Ratings]:
    """Read the ratings, and split them into four fifths and one."""
    with find_file("insteval/InstEval.csv").open() as file:
        names = [name.strip('"') for name in file.readline().strip().split(",")]
        table = np.loadtxt(
            file, delimiter=",", dtype=np.int64, usecols=[names.index(name) for name in COLUMNS]
        )
    students, lecturers = (np.unique(table[:, column], return_inverse=True)[1] for column in (0, 1))
    ids = torch.from_numpy(np.stack([students, lecturers, 2 * lecturers + table[:, 2]], 1))
    scores = torch.from_numpy(table[:, 3]).float()
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(seed))
    num_students = int(ids[:, 0].max()) + 1
    fifth = len(ids) // 5
    held_out, rest = (group(ids[part], scores[part], num_students) for part in (order[:fifth], order[fifth:]))
    return rest, held_out


def group(ids: Tensor, scores: Tensor, num_students: int) -> Ratings:
    """List the ratings of each student."""
    order = ids[:, 0].argsort(stable=True)
    counts = ids[:, 0].bincount(minlength=num_students)
    places = (counts.cumsum(0) - counts)[:, None] + torch.arange(int(counts.max()))
    return Ratings(ids, scores, order[places.clamp(max=len(order) - 1)], counts)


def shuffled(ratings: Ratings, students: Tensor, generator: torch.Generator) -> Tensor:
    """Return the ratings of each student in random order, [students, most], those that are there first."""
    most = ratings.of_student.shape[1]
    keys = torch.rand(len(students), most, generator=generator)
    keys[torch.arange(most) >= ratings.counts[students, None]] = 2.0
    return ratings.of_student[students].gather(1, keys.argsort(1))


def chosen(ratings: Ratings, listed: Tensor, first: Tensor, last: Tensor, num: int) -> Examples:
    """Take up to `num` ratings between two places of each row; the scores of those that are not there are NaN."""
    places = first[:, None] + torch.arange(num)
    absent = places >= last[:, None]
    picked = listed.gather(1, torch.where(absent, 0, places))
    return Examples(ratings.ids[picked], ratings.scores[picked].masked_fill(absent, torch.nan))


def batch_of(ratings: Ratings, students: Tensor, shots: int, generator: torch.Generator) -> Batch:
    """Make a task of each student: half of the ratings to adapt to, and the others to be judged on."""
    listed, counts = shuffled(ratings, students, generator), ratings.counts[students]
    half = (counts + 1) // 2
    support = chosen(ratings, listed, torch.zeros_like(half), half, shots)
    return Batch(support, chosen(ratings, listed, half, counts, shots))


def maml_over(model: Factorization, *, steps: int, sparse: bool = True) -> mg.MAML:
    """Return MAML with a learned step size for each table."""
    like = model.students.weight
    rates = {name: nn.Parameter(torch.full((), 0.05).to(like)) for name in STUDENTS + LECTURERS}
    rule = mg.optim.rules.sgd(lr=rates)
    return mg.MAML(model, loss_fn, inner=rule, steps=steps, sparse=STUDENTS + LECTURERS if sparse else ())


def train(maml: mg.MAML, ratings: Ratings, options: argparse.Namespace) -> None:
    """Learn the lecturers' tables and the step sizes; the optimizer writes the rows of each batch alone."""
    generator = torch.Generator().manual_seed(0)
    tables = [maml.get_parameter(f"model.{name}") for name in LECTURERS]
    rates = [p for name, p in maml.named_parameters() if name.startswith("inner_")]
    optimizers = torch.optim.SparseAdam(tables, lr=options.lr), torch.optim.Adam(rates, lr=options.lr / 4)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8) for optimizer in optimizers]
    rated = (ratings.counts > 1).nonzero().squeeze(1)
    for epoch in Progress(range(options.epochs), unit="epoch", leave=False):
        losses = []
        drawn = rated[torch.randperm(len(rated), generator=generator)].split(options.tasks)
        for students in Progress(drawn, unit="step", leave=False):
            batch = batch_of(ratings, students, options.shots, generator)
            loss = maml(batch).loss
            size = embedding(batch.query.x[..., 1], tables[0]).square().mean()
            (loss + options.penalty * size).backward()
            for table in tables:
                assert isinstance(table.grad, RowSparse)
                table.grad = table.grad.to_coo()  # what torch's optimizers take
            for optimizer in optimizers:
                optimizer.step()
            maml.zero_grad()
            losses.append(loss.item())
        for schedule in schedules:
            schedule.step()
        tell(f"  epoch {epoch + 1}: query loss {sum(losses) / len(losses):.3f}")


def test_rmse(maml: mg.MAML, ratings: Ratings, held_out: Ratings, *, shots: int, steps: int) -> float:
    """Adapt to each student's ratings, and return the root mean square error on the held-out ones."""
    generator = torch.Generator().manual_seed(1)
    students = ((ratings.counts > 0) & (held_out.counts > 0)).nonzero().squeeze(1)
    error, num = 0.0, 0
    for part in Progress(students.split(256), unit="batch", leave=False):
        listed, counts = shuffled(ratings, part, generator), ratings.counts[part]
        fast = maml.adapt(chosen(ratings, listed, torch.zeros_like(counts), counts, shots), steps=steps)
        query, there = held_out.of_student[part], torch.arange(held_out.of_student.shape[1])
        residual = fast(held_out.ids[query]).detach().clamp(1, 5) - held_out.scores[query]
        error += float(residual[there < held_out.counts[part, None]].square().sum())
        num += int(held_out.counts[part].sum())
    return (error / num) ** 0.5


def check(batch: Batch, sizes: tuple[int, int], rank: int, steps: int) -> None:
    """Compare the meta-gradients with those of dense tables, in float64."""
    doubled, gradients = batch.to(dtype=torch.float64), []
    for sparse in (True, False):
        torch.manual_seed(0)
        model = Factorization(*sizes, rank, 3.2).double()
        nn.init.normal_(
            model.students.weight, std=0.3
        )  # from zero the lecturers' vectors get little gradient
        maml = maml_over(model, steps=steps, sparse=sparse)
        gradients.append(mg.grad(maml(doubled).loss, dict(maml.named_parameters())))
    for name, expected in gradients[1].items():
        got = gradients[0][name]
        got = got.to_dense() if isinstance(got, RowSparse) else got
        compare(name, got, expected, tolerance=TOLERANCE)


def main(arguments: list[str] | None = None) -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=12, help="times that every student is a task")
    parser.add_argument("--tasks", type=int, default=64, help="students of a batch")
    parser.add_argument("--shots", type=int, default=20, help="most ratings that a student is adapted to")
    parser.add_argument("--steps", type=int, default=3, help="inner steps")
    parser.add_argument("--rank", type=int, default=2, help="length of the vectors")
    parser.add_argument("--lr", type=float, default=0.02, help="of the outer optimizer of the tables")
    parser.add_argument(
        "--penalty", type=float, default=1.0, help="on the lecturers' vectors, for each rating"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the split")
    options = parser.parse_args(arguments)

    ratings, held_out = load(options.seed)
    sizes = len(ratings.counts), int(max(part.ids[:, 1].max() for part in (ratings, held_out))) + 1
    counts = f"{len(ratings.ids)} ratings and {len(held_out.ids)} held out"
    print(f"InstEval: {sizes[0]} students, {sizes[1]} lecturers, {counts}")
    batch = batch_of(ratings, torch.arange(8), options.shots, torch.Generator().manual_seed(0))
    print("Meta-gradients of 8 students against dense tables, float64:")
    check(batch, sizes, options.rank, options.steps)

    torch.manual_seed(0)
    maml = maml_over(Factorization(*sizes, options.rank, float(ratings.scores.mean())), steps=options.steps)
    print(f"MAML over students, up to {options.shots} ratings, {options.steps} steps:")
    train(maml, ratings, options)
    print("Root mean square error on the held-out ratings:")
    for steps in (0, options.steps):
        error = test_rmse(maml, ratings, held_out, shots=2 * options.shots, steps=steps)
        print(f"  MAML, {steps} steps on up to {2 * options.shots} ratings: {error:.3f}")


if __name__ == "__main__":
    main()
