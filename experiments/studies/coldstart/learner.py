"""One recommender, and how it is learned: MAML adapts all of it to a student, ANIL its head, CAVIA a context."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

import metagrad as mg
from metagrad.sparse import embedding
from metagrad.tasks import Examples

TABLES = ("lecturer.weight", "lecturer_bias.weight", "course_bias.weight")  # traits have a few dozen rows
SCALE = 10.0  # ratings: the loss is a sum over them, so that more of a student weigh more


class Recommender(nn.Module):
    """Score = mean + biases of lecturer and course + a network of vectors of lecturer and traits, and a context.

    Args:
        sizes: How many rows the tables of lecturers, courses and traits have.
        width: Of the vectors.
        hidden: Units.
        context: Entries of the context.
        mean: Of all ratings.
    """

    def __init__(self, sizes: Mapping[str, int], width: int, hidden: int, context: int, mean: float) -> None:
        super().__init__()
        self.lecturer, self.traits = (
            nn.Embedding(sizes["lecturer"], width),
            nn.Embedding(sizes["traits"], width),
        )
        self.lecturer_bias, self.course_bias = (
            nn.Embedding(sizes["lecturer"], 1),
            nn.Embedding(sizes["course"], 1),
        )
        self.context = nn.Parameter(torch.zeros(context))
        self.body = nn.Sequential(nn.Linear(4 * width + context, hidden), nn.Tanh())
        self.head = nn.Linear(hidden, 1)
        self.mean = mean
        for table in (self.lecturer, self.traits):
            nn.init.normal_(table.weight, std=0.1)
        for zero in (self.lecturer_bias.weight, self.course_bias.weight, *self.head.parameters()):
            nn.init.zeros_(zero)

    def forward(
        self, lecturer: Tensor, course: Tensor, department: Tensor, student_age: Tensor, lecturer_age: Tensor
    ) -> Tensor:
        """Return scores ``[n, 1]`` of columns ``[n]``."""
        traits = [self.traits(each) for each in (department, student_age, lecturer_age)]
        context = self.context.expand(*lecturer.shape, -1)
        hidden = self.body(torch.cat([self.lecturer(lecturer), *traits, context], -1))
        return self.mean + self.lecturer_bias(lecturer) + self.course_bias(course) + self.head(hidden)


def loss_fn(scores: Tensor, given: Tensor) -> Tensor:
    """Add the squared errors of a student."""
    return (scores - given).square().sum() / SCALE


def learner(
    name: str, model: Recommender, *, steps: int, lr: float, sparse: Sequence[str] = TABLES
) -> mg.MAML:
    """Return what learns the model, with a learned rate for each parameter that adapts; `joint` adapts nothing."""
    parts = {"maml": "", "anil": "head.", "cavia": "context", "joint": ""}
    adapted = [each for each, _ in model.named_parameters() if each.startswith(parts[name])]
    rule = mg.optim.rules.sgd(lr={each: nn.Parameter(torch.tensor(lr)) for each in adapted})
    arguments = {"inner": rule, "steps": steps, "sparse": sparse}
    if name == "anil":
        return mg.ANIL(model, loss_fn, head="head", **arguments)
    if name == "cavia":
        return mg.CAVIA(model, loss_fn, context="context", **arguments)
    return mg.MAML(model, loss_fn, **{**arguments, "steps": 0 if name == "joint" else steps})


def penalty(model: nn.Module, x: dict[str, Tensor]) -> Tensor:
    """Return the mean squared norm of what ratings look up beside the bias of the lecturer; its gradient is rows."""
    looked_up = {"lecturer.weight": "lecturer", "course_bias.weight": "course"}
    found = [embedding(x[column], model.get_parameter(name)) for name, column in looked_up.items()]
    return torch.cat(found, -1).square().sum(-1).mean()


def optimizers(maml: mg.MAML, lr: float) -> tuple[torch.optim.Optimizer, ...]:
    """Return one for the tables, which moves the rows that were ever touched, and one for all else."""
    tables = [maml.get_parameter(f"model.{name}") for name in TABLES]
    others = [p for name, p in maml.named_parameters() if name.removeprefix("model.") not in TABLES]
    return mg.optim.SparseAdam(tables, lr=lr), torch.optim.Adam(others, lr=lr)


def predict(maml: mg.MAML, support: Examples, x: dict[str, Tensor], *, steps: int | None = None) -> Tensor:
    """Adapt to the ratings of students, if any are known, and return scores ``[tasks, n, 1]``."""
    known = support.y.shape[1] > 0
    placeholder = Examples(
        {name: column[:, :1] for name, column in x.items()}, torch.zeros(len(support.y), 1, 1)
    )
    fast = maml.adapt(support if known else placeholder, steps=steps if known else 0)
    return fast(x)
