"""Recommend to students of few known ratings: `python -m experiments.studies.coldstart [preset=small]`.

MAML, ANIL and CAVIA learn one network from InstEval's students. The evaluation compares them with biases on other
students, by the number of known ratings. The time and the peak memory of a meta-step are measured on tables of up to
ten million rows.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

import metagrad as mg
from experiments.examples.common import find_file
from experiments.run.files import markdown
from experiments.run.measure import cpu_seconds, peak_bytes
from experiments.run.plots.style import BLUE, GREEN, MUTED, VERMILION, figure, legend_below
from experiments.run.progress import Progress
from experiments.run.schema import key
from experiments.studies.study import Cell, Result, Study, StudyConfig, Work, by_cell, spread
from metagrad.sparse.tables.embedding import embedding
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
QUERIES = 5  # ratings that a student is evaluated on
LOWEST, HIGHEST = 1.0, 5.0
TABLES = ("lecturer.weight", "lecturer_bias.weight", "course_bias.weight")  # traits have a few dozen rows
SCALE = 10.0  # ratings. The loss is a sum over them, so students with more ratings have a larger weight.
WIDTH, HIDDEN, CONTEXT = 4, 16, 4  # of vectors, units, and entries of the context that CAVIA adapts
STEPS, LR, OUTER_LR = 3, 0.1, 0.003  # inner steps, the start of the learned inner rates, and the outer rate
PENALTY = 0.1  # on the squared entries of the tables, for each rating
RIDGES = tuple(
    itertools.product((5, 10, 20, 30), (2, 5, 10))
)  # penalties of biases of students and lecturers
ROWS, WIDE = 32, 16  # of the table of traits, and the width of vectors, in synthetic ratings
MOST_DENSE = 1000  # maximum expected MiB of a meta-step with dense tables
LEARNERS = ("maml", "anil", "cavia")
METHODS = {
    "biases": ("user + item bias", MUTED),
    "maml": ("MAML, all parameters adapt", VERMILION),
    "anil": ("ANIL, only the head adapts", GREEN),
    "cavia": ("CAVIA, only a context adapts", BLUE),
}

Predict = Callable[[Examples, dict[str, Tensor]], Tensor]
"""Maps ratings of students ``[tasks, shots]``, possibly none, and inputs ``[tasks, n]`` to scores."""


@dataclass
class ColdStartConfig(StudyConfig):
    """Each seed has its own test students and its own network."""

    shots: list[int] = key("Numbers of known ratings of a student, ascending.", least=0)
    drawn: int = key("Students that are drawn, with repetition, for validation and for the test.")
    iterations: int = key("Meta-batches.")
    every: int = key("Meta-batches from one validation to the next; the best one is kept.")
    students: int = key("Students of a meta-batch.")
    sizes: list[int] = key("Rows of the table of lecturers in the meta-steps that are timed.")
    dense_sizes: list[int] = key("Rows of the same with dense tables, for comparison.")
    repeats: int = key("Meta-steps that are timed; the median is reported.")


class Ratings(NamedTuple):
    """A table of ratings, and the ids of the students of each part."""

    columns: dict[str, np.ndarray]
    students: dict[str, list[int]]

    @property
    def sizes(self) -> dict[str, int]:
        """Number of rows in the tables of lecturers, courses and traits."""
        last = {name: int(self.columns[name].max()) + 1 for name in INPUTS}
        traits = max(last[name] for name in TRAITS)
        return {"lecturer": last["lecturer"], "course": 2 * last["lecturer"], "traits": traits}

    def tasks(self, part: str, shots: int, queries: int = QUERIES) -> Tabular:
        """Return the students of a part who have enough ratings."""
        return Tabular(
            self.columns,
            task_column="student",
            x={name: name for name in INPUTS},
            y="score",
            shots=shots,
            queries=queries,
            tasks=self.students,
            split=part,
            on_small="skip",
        )

    def of(self, part: str) -> dict[str, Tensor]:
        """Return all ratings of the students of a part, ``[ratings]`` by the name of the column."""
        chosen = np.isin(self.columns["student"], self.students[part])
        return {name: torch.from_numpy(column[chosen]) for name, column in self.columns.items()}


def load(seed: int) -> Ratings:
    """Read the table, and draw the students of each part."""
    with find_file("insteval/InstEval.csv").open() as file:
        header = [name.strip('"') for name in file.readline().strip().split(",")]
        columns = [header.index(name) for name in NAMES]
        table = np.loadtxt(file, delimiter=",", dtype=np.int64, usecols=columns)
    return split({name: table[:, number] for number, name in enumerate(NAMES.values())}, seed)


def split(columns: Mapping[str, np.ndarray], seed: int) -> Ratings:
    """Add the column of courses, and split the students. A lecturer has one course for each value of ``service``."""
    columns = {**columns, "course": 2 * columns["lecturer"] + columns["service"]}
    columns |= {name: columns[name] + first for name, first in TRAITS.items()}
    students = np.random.default_rng(seed).permutation(np.unique(columns["student"]))
    ends = np.round(np.cumsum([0, *PARTS.values()]) * len(students)).astype(int)
    parts = zip(PARTS, ends, ends[1:], strict=False)
    return Ratings(columns, {name: students[first:last].tolist() for name, first, last in parts})


def errors(predict: Predict, batch: Batch, shots: list[int]) -> dict[int, float]:
    """Return the root mean square error on the query ratings for each number of support ratings."""
    found = {}
    for seen in shots:
        x, y = batch.support
        support = Examples({name: column[:, :seen] for name, column in x.items()}, y[:, :seen])
        scores = predict(support, batch.query.x).detach().clamp(LOWEST, HIGHEST)
        found[seen] = float((scores - batch.query.y).square().mean().sqrt())
    return found


@dataclass(frozen=True)
class Biases:
    """The mean of all ratings, the bias of each lecturer, and the penalty of a student's bias (in ratings)."""

    mean: float
    lecturers: Tensor
    penalty: float

    def __call__(self, support: Examples, x: dict[str, Tensor]) -> Tensor:
        """Fit the bias of each student, and return scores."""
        residual = support.y.squeeze(-1) - self.mean - self.lecturers[support.x["lecturer"]]
        student = residual.sum(1, keepdim=True) / (residual.shape[1] + self.penalty)
        return (self.mean + self.lecturers[x["lecturer"]] + student).unsqueeze(-1)


def fit_biases(
    ratings: dict[str, Tensor], lecturers: int, penalties: tuple[float, float], sweeps: int = 10
) -> Biases:
    """Fit the biases of students and lecturers alternately, by penalized least squares."""
    scores = ratings["score"].float()
    mean = scores.mean()
    sides = ratings["student"].unique(return_inverse=True)[1], ratings["lecturer"]
    found = [torch.zeros(int(sides[0].max()) + 1), torch.zeros(lecturers)]
    for own in (0, 1) * sweeps:
        residual = scores - mean - found[1 - own][sides[1 - own]]
        sums = torch.zeros_like(found[own]).index_add_(0, sides[own], residual)
        found[own] = sums / (sides[own].bincount(minlength=len(sums)) + penalties[own])
    return Biases(mean.item(), found[1], penalties[0])


class Recommender(nn.Module):
    """Score = mean + biases of lecturer and course + a network of vectors of lecturer and traits, and a context."""

    def __init__(self, sizes: Mapping[str, int], width: int, hidden: int, context: int, mean: float) -> None:
        super().__init__()
        self.lecturer, self.lecturer_bias = (nn.Embedding(sizes["lecturer"], n) for n in (width, 1))
        self.traits, self.course_bias = nn.Embedding(sizes["traits"], width), nn.Embedding(sizes["course"], 1)
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
    name: str, model: Recommender, *, steps: int = STEPS, lr: float = LR, sparse: Sequence[str] = TABLES
) -> mg.MAML:
    """Return a learner with a learned learning rate for each adapted parameter."""
    parts = {"maml": "", "anil": "head.", "cavia": "context"}
    adapted = [each for each, _ in model.named_parameters() if each.startswith(parts[name])]
    rule = mg.optim.rules.sgd(lr={each: nn.Parameter(torch.tensor(lr)) for each in adapted})
    arguments = {"inner": rule, "steps": steps, "sparse": sparse}
    if name == "anil":
        return mg.ANIL(model, loss_fn, head="head", **arguments)
    if name == "cavia":
        return mg.CAVIA(model, loss_fn, context="context", **arguments)
    return mg.MAML(model, loss_fn, **arguments)


def penalty(model: nn.Module, x: dict[str, Tensor]) -> Tensor:
    """Return the mean squared norm of the looked-up rows, with a sparse gradient, except the bias of the lecturer."""
    looked_up = {"lecturer.weight": "lecturer", "course_bias.weight": "course"}
    found = [embedding(x[column], model.get_parameter(name)) for name, column in looked_up.items()]
    return torch.cat(found, -1).square().sum(-1).mean()


def optimizers(maml: mg.MAML) -> tuple[torch.optim.Optimizer, ...]:
    """Return an optimizer of the tables, which updates all rows touched so far, and one for other parameters."""
    tables = [maml.get_parameter(f"model.{name}") for name in TABLES]
    others = [p for name, p in maml.named_parameters() if name.removeprefix("model.") not in TABLES]
    return mg.optim.SparseAdam(tables, lr=OUTER_LR), torch.optim.Adam(others, lr=OUTER_LR)


def predict(maml: mg.MAML, support: Examples, x: dict[str, Tensor]) -> Tensor:
    """Adapt to the ratings of students, if any are known, and return scores."""
    known = support.y.shape[1] > 0
    first = {name: column[:, :1] for name, column in x.items()}
    placeholder = Examples(first, torch.zeros(len(support.y), 1, 1))
    return maml.adapt(support if known else placeholder, steps=None if known else 0)(x)


class Evaluation(NamedTuple):
    """The ratings of a seed, the biases, and the students of validation and test."""

    ratings: Ratings
    biases: Biases
    validation: Batch
    test: Batch
    shots: list[int]

    def error(self, predict: Predict) -> float:
        """Return the mean error on the validation students, which choose the settings."""
        return statistics.mean(errors(predict, self.validation, self.shots).values())

    def result(self, predict: Predict, **chosen: float) -> Result:
        """Return the errors on the test students, and the settings."""
        return {"errors": list(errors(predict, self.test, self.shots).values()), "chosen": chosen}


def evaluation_of(config: ColdStartConfig, seed: int) -> Evaluation:
    """Read the data of a seed, draw the students, and fit the biases."""
    ratings, generators = load(seed), [torch.Generator().manual_seed(seed) for _ in range(2)]
    validation, test = (
        ratings.tasks(part, config.shots[-1]).sample(config.drawn, generator=generator)
        for part, generator in zip(("validation", "test"), generators, strict=True)
    )
    fitted = [fit_biases(ratings.of("train"), ratings.sizes["lecturer"], pair) for pair in RIDGES]
    parts = (validation, test, config.shots)
    best = min(fitted, key=Evaluation(ratings, fitted[0], *parts).error)
    return Evaluation(ratings, best, *parts)


def user_and_item(config: ColdStartConfig, work: Work) -> Result:
    """Evaluate biases."""
    evaluation = evaluation_of(config, work.seed)
    return evaluation.result(evaluation.biases, penalty=evaluation.biases.penalty)


def meta_learning(config: ColdStartConfig, name: str, work: Work) -> Result:
    """Evaluate MAML, ANIL or CAVIA."""
    evaluation = evaluation_of(config, work.seed)
    maml = trained(name, config, evaluation, work)
    rates = {each: p.item() for each, p in maml.named_parameters() if each.startswith("inner_")}
    return evaluation.result(partial(predict, maml), **rates)


def trained(name: str, config: ColdStartConfig, evaluation: Evaluation, work: Work) -> mg.MAML:
    """Train a network that starts from the biases, and return its state with the lowest validation error."""
    generator, ratings = torch.Generator().manual_seed(work.seed), evaluation.ratings
    model = Recommender(ratings.sizes, WIDTH, HIDDEN, CONTEXT, evaluation.biases.mean)
    with torch.no_grad():
        model.lecturer_bias.weight.copy_(evaluation.biases.lecturers[:, None])
    maml = learner(name, model)
    tasks = [ratings.tasks("train", shots) for shots in config.shots if shots]
    steppers = optimizers(maml)
    schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(each, config.iterations) for each in steppers]
    least, best = float("inf"), {}
    for number in Progress(range(1, config.iterations + 1), unit="step", leave=False):
        shots = int(torch.randint(len(tasks), (), generator=generator))
        batch = tasks[shots].sample(config.students, generator=generator)
        loss = maml(batch).loss
        (loss + PENALTY * penalty(maml.model, batch.query.x)).backward()
        for each in (*steppers, *schedules):
            each.step()
        maml.zero_grad()
        if number % config.every == 0 or number == config.iterations:
            error = evaluation.error(partial(predict, maml))
            work.log(number, {"train/query_loss": loss.item(), "validation/rmse": error})
            if error < least:
                least, best = error, {key: value.clone() for key, value in maml.state_dict().items()}
    maml.load_state_dict(best)
    return maml


def meta_step(config: ColdStartConfig, name: str, rows: int, is_sparse: bool, work: Work) -> Result:
    """Measure time and memory of the meta-gradient of a table of many rows."""
    model = Recommender({"lecturer": rows, "course": 2 * rows, "traits": ROWS}, WIDE, HIDDEN, CONTEXT, 3.0)
    maml = learner(name, model, sparse=TABLES if is_sparse else ())
    generator = torch.Generator().manual_seed(work.seed)
    times = []
    for _ in range(config.repeats + 2):
        batch = synthetic(config, rows, generator)
        maml.zero_grad()
        times.append(cpu_seconds(lambda batch=batch: maml(batch).loss.backward()))
    maml.zero_grad()
    batch = synthetic(config, rows, generator)
    return {
        "rows": rows,
        "method": name,
        "sparse": is_sparse,
        "ms": 1000 * statistics.median(times[2:]),
        "peak_mib": peak_bytes(lambda: maml(batch).loss.backward()) / 2**20,
        "table_mib": sum(model.get_parameter(table).nbytes for table in TABLES) / 2**20,
    }


def synthetic(config: ColdStartConfig, rows: int, generator: torch.Generator) -> Batch:
    """Draw students who rate lecturers at random."""
    shots = config.shots[-1]
    shape = (config.students // 2, shots + QUERIES)
    x = {name: torch.randint(ROWS, shape, generator=generator) for name in INPUTS}
    x["lecturer"] = torch.randint(rows, shape, generator=generator)
    x["course"] = 2 * x["lecturer"] + x["course"] % 2
    y = torch.randint(1, 6, (*shape, 1), generator=generator).float()
    parts = slice(None, shots), slice(shots, None)
    return Batch(*(Examples({k: v[:, part] for k, v in x.items()}, y[:, part]) for part in parts))


def dense_mib(config: ColdStartConfig, name: str, rows: int) -> float:
    """Return the approximate MiB of dense tables in a meta-step. MAML has a table for each student and inner step."""
    copies = config.students * (STEPS + 1) if name == "maml" else 3
    return copies * rows * (WIDE + 3) * 4 / 2**20


def above_biases(found: dict[str, list[Result]], name: str) -> list[tuple[float, ...]]:
    """Return the error of each seed minus the error of biases (x 10^-3) for each number of known ratings."""
    floors = {} if name == "biases" else {one["seed"]: one["errors"] for one in found.get("biases", [])}
    pairs = [(one["errors"], floors[one["seed"]]) for one in found.get(name, []) if one["seed"] in floors]
    each = [[1000 * (a - b) for a, b in zip(*pair, strict=True)] for pair in pairs]
    return list(zip(*each, strict=True))


def report(results: list[Result], config: ColdStartConfig) -> str:
    """Return the page."""
    found, table = by_cell(results), [["method", *map(str, config.shots)]]
    for name, (title, _) in METHODS.items():
        if name in found:
            columns = zip(*(one["errors"] for one in found[name]), strict=True)
            table.append([title, *(f"{statistics.mean(column):.4f}" for column in columns)])
            if differences := above_biases(found, name):
                table.append(["", *map(spread, differences)])
    keys = {"table_mib": 1, "ms": 1, "peak_mib": 2}
    steps = [["method", "rows", "tables (MiB)", "ms", "MiB"]]
    for own in found.values():
        if "ms" in (first := own[0]):
            title = METHODS[first["method"]][0].partition(",")[0] + (
                "" if first["sparse"] else ", dense tables"
            )
            values = [spread([one[name] for one in own], digits) for name, digits in keys.items()]
            steps.append([title, f"{first['rows']:,}", *values])
    return f"""# Students of whom few ratings are known

Root mean square error on {QUERIES} ratings of each of {config.drawn} students, drawn from the fifth that no
method saw in training, for each number of other known ratings. Below it the difference from user +
item bias, in thousandths. Mean and standard deviation over {len(config.seeds)} seeds.

{markdown(table)}

A meta-step of {config.students // 2} students on synthetic ratings, with vectors of {WIDE}: CPU time and peak memory
of the meta-gradient, beyond the tables.

{markdown(steps)}
"""


def figures(results: list[Result], config: ColdStartConfig, folder: Path) -> list[Path]:
    """Draw differences from biases over ratings seen, and time and memory of a meta-step over rows."""
    path, found = folder / "coldstart.png", by_cell(results)
    with figure(path, columns=3, size=(11.5, 3.6)) as axes:
        errors, time, memory = axes[0]
        for place, (name, (title, color)) in enumerate(METHODS.items()):
            if columns := above_biases(found, name):
                x = [seen + 0.1 * (place - 1.5) for seen in range(len(columns))]
                errors.vlines(x, list(map(min, columns)), list(map(max, columns)), color=color, alpha=0.35)
                means = list(map(statistics.mean, columns))
                errors.plot(x, means, color=color, marker="o", markersize=4, label=title)
            for kind, style in (("rows", "-"), ("dense", "--")):
                own = [one for one in results if one["cell"].startswith(f"{kind}/{name}/")]
                _draw_sizes(time, own, "ms", color, style)
                _draw_sizes(memory, own, "peak_mib", color, style)
        errors.set_xticks(range(len(config.shots)), config.shots)
        errors.axhline(0, color=MUTED, linewidth=1.2)
        errors.set(xlabel="Known ratings of a student", ylabel="RMSE minus biases' RMSE (x 10⁻³)")
        errors.set_title("Error on new students, range of seeds")
        time.set(ylabel="CPU time of a meta-gradient (ms)", title="With sparse=, time is constant")
        memory.set(ylabel="Peak memory of a meta-gradient (MiB)", title="With sparse=, memory is constant")
        for axis in (time, memory):
            scale = {"xscale": "log", "yscale": "log"} if axis.lines else {}
            axis.set(xlabel="Rows of the embedding table", **scale)
        for label, style in (("sparse=", "-"), ("dense tables", "--")):
            time.plot([], [], color=MUTED, linestyle=style, label=label)
        for axis in axes[0]:
            axis.grid(axis="y")
        legend_below(errors, time, columns=6)
    return [path]


def _draw_sizes(axis: Any, own: list[Result], key: str, color: str, style: str) -> None:
    sizes = sorted({one["rows"] for one in own})
    means = [statistics.mean(one[key] for one in own if one["rows"] == size) for size in sizes]
    if sizes:
        axis.plot(sizes, means, color=color, linestyle=style, marker="o", markersize=4)


def check(config: ColdStartConfig) -> None:
    """Raise `ValueError` unless shots ascend."""
    if not config.shots or sorted(set(config.shots)) != config.shots or not config.shots[-1]:
        raise ValueError(
            f"coldstart: shots must ascend from 0 or more, such as [0,1,2,5,10], got {config.shots}."
        )


def cells(config: ColdStartConfig) -> list[Cell]:
    """Return every method and every size, for each seed."""
    runs = {"biases": partial(user_and_item, config)}
    runs |= {name: partial(meta_learning, config, name) for name in LEARNERS}
    for name in LEARNERS:
        runs |= {f"rows/{name}/{rows}": partial(meta_step, config, name, rows, True) for rows in config.sizes}
        small = (rows for rows in config.dense_sizes if dense_mib(config, name, rows) <= MOST_DENSE)
        runs |= {f"dense/{name}/{rows}": partial(meta_step, config, name, rows, False) for rows in small}
    return [Cell(name, seed, run) for name, run in runs.items() for seed in config.seeds]


study = Study("coldstart", ColdStartConfig, cells=cells, report=report, figures=figures, check=check)

if __name__ == "__main__":
    study.main()
