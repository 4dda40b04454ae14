"""The message of each mistake in the construction of tasks, once."""

import math

import pytest
import torch

from metagrad.tasks import FewShot, GaussianProcess, Lines, Sinusoid, SinusoidOrLine, StepFunctions, Tabular
from tests.draws import seeded
from tests.sparse.mistakes import complaints
from tests.tasks.fewshot.test_few_shot import data
from tests.tasks.test_tabular import table


def few_shot(dataset=None, **arguments):
    return lambda: FewShot(data() if dataset is None else dataset, **arguments)


def tabular(**changes):
    given = {"table": table(), "task_column": "who", "x": ["row"], "y": "y", "shots": 2, "queries": 2}
    return lambda: Tabular(**given | changes)


def of(family, **arguments):
    return lambda: family(**arguments)


VALUE_ERRORS = {
    r"FewShot.*\(ways\): expected an int of 1 or more, got 0": few_shot(ways=0),
    r"FewShot.*ways must be \(lowest, highest\), got \(3, 2\)": few_shot(ways=(3, 2)),
    "FewShot.*ways must be at most 4, the classes, got 5": few_shot(ways=5, queries=2),
    r"FewShot.*shots \+ queries = 11 examples, and 2": few_shot(ways=2, shots=5, queries=6),
    "FewShot.*classes has 7, which .* there are 4: 0, 1, 2": few_shot(classes=[0, 7], queries=2),
    "FewShot.*classes has 0 twice": few_shot(classes=[0, 0], queries=2),
    "FewShot.*split='train' needs classes= by split": few_shot(classes=[0], split="train"),
    "FewShot.*split must be one of 'train', as": few_shot(classes={"train": [0]}, split="test"),
    "FewShot.*0 is in the splits 'train' and": few_shot(classes={"train": [0], "val": [0]}, split="val"),
    "FewShot.*'val', 'valid': two of these": few_shot(classes={"val": [0], "valid": [1]}, split="val"),
    r"FewShot.*workers\): expected an int of 0 or more, got -1": few_shot(workers=-1),
    "FewShot.*labels are given twice": few_shot(labels=[0] * 47),
    "FewShot.*dtype must be a floating-point type": few_shot(dtype=torch.int64),
    "FewShot.*x and labels must have one entry an item, got 3 and 2": few_shot((torch.zeros(3), [1, 2])),
    r"FewShot.*must be a data set or a pair \(x, labels\), got 1 parts": few_shot((torch.zeros(3),)),
    "FewShot.*a label for each of the 1 items, got 2": few_shot([(0, 1)], labels=[1, 2]),
    "FewShot.*a label for each of the 0 items, got 0": few_shot([]),
    r"FewShot.*must be \(x, label\), got a Tensor\. Pass labels=": few_shot([torch.zeros(2)] * 3),
    "FewShot.*got None for item 0 .* torch.utils.data.Subset": few_shot([(0, None)]),
    "FewShot.*got ' ' for item 1 and 'a' for item 0": few_shot([(0, "a"), (0, " ")]),
    "FewShot.*got nan for item 1 and 1 for item 0": few_shot([(0, 1), (0, math.nan)]),
    "FewShot.*no mixture, got '1' for item 1 and 1 for item 0": few_shot([(0, 1), (0, "1")]),
    r"FewShot.*got \[0, 1\] for item 0": few_shot([(0, torch.tensor([0, 1]))]),
    r"FewShot.sample\(num_tasks\): expected an int of 1 or more, got 0": lambda: few_shot(
        ways=2, queries=2
    )().sample(0),
    "FewShot.sample: the generator is on cpu, the tasks are on meta": lambda: few_shot(
        ways=2, queries=2, device="meta"
    )().sample(1, generator=seeded()),
    "Tabular.*task_column='whom' is none of the columns 'who', 'row', 'kind', 'y'": tabular(
        task_column="whom"
    ),
    r"Tabular.*x='kind' must hold a number .* got 'c' in row 0\. For ids pass x=": tabular(x=["kind"]),
    r"Tabular.*x must name at least one column, got \[\]": tabular(x=[]),
    "Tabular.*y='kind' must hold a number .* For classes pass classify=True": tabular(y="kind"),
    "Tabular.*tasks has 77, which the data do not have; there are 10": tabular(tasks=[77]),
    r"Tabular.*shots \+ queries = 7 rows, and 3 of 10 have fewer: 0 has": tabular(shots=5),
    r"Tabular.*\(column_types\['who'\]\): expected one of 'integer'": tabular(column_types={"who": "int"}),
    "Tabular.*column_types='age' is none of the columns": tabular(column_types={"age": "text"}),
    "Tabular.*task_column='who' must hold text in each row, got 0 in row": tabular(
        column_types={"who": "text"}
    ),
    r"Tabular.*\(missing\): expected one of 'raise', 'skip', got 'drop'": tabular(missing="drop"),
    "Tabular.*dtype must be a floating-point type": tabular(dtype=torch.int64),
    r"Tabular.*table must have columns with different names, got \[\]": tabular(table={}),
    r"Tabular.*columns with different names, got \['1', '1'\]": tabular(table={"1": [1], 1: [2]}),
    r"Tabular.*of one length, \[rows\], got": tabular(table={"who": [1], "row": [1, 2]}),
    "Tabular.*table has no rows": tabular(table={"who": [], "row": []}),
    r"Tabular.*there is no no\.csv, and there is no /.*METAGRAD_DATA": tabular(table="no.csv"),
    "Tabular.*/ is not a CSV file in UTF-8": tabular(table="/"),
    r"Lines: slope must be \(lowest, highest\).* got \(1.0, 0.0\)": of(Lines, slope=(1.0, 0.0)),
    "position must be .* finite and ascending": of(StepFunctions, position=(0.0, math.inf)),
    r"Lines: x must be \(lowest, highest\)": of(Lines, x=("a", "b")),
    r"Lines\(noise\): expected a number of 0 or more, got -1": of(Lines, noise=-1),
    r"\(probability\): expected a number from 0 to 1, got 1.5": of(SinusoidOrLine, probability=1.5),
    r"\(kernel\): expected one of 'rbf', 'matern12', .* got 'rbv'": of(GaussianProcess, kernel="rbv"),
    r"Sinusoid\(shots\): expected an int of 1 or more, got 2.5": of(Sinusoid, shots=2.5),
}
TYPE_ERRORS = {
    "FewShot.*dataset must be a map-style data set, .* got a int": few_shot(3),
    r"FewShot.*dataset must be \(x, labels\), inputs and a vector of labels": few_shot((torch.zeros(3), 3)),
    r"FewShot.*\(labels\): expected one label for each item, got int": few_shot([(0, 1)], labels=3),
    r"Tabular.*\(..., task_column\): expected str, got list": tabular(task_column=["who"]),
    r"Tabular.*\(..., x\): expected str or list or tuple or Mapping, got int": tabular(x=3),
    "Tabular.*table must be the path of a CSV file, a dict of columns or a data": tabular(table=[1, 2]),
}
ERRORS = {ValueError: VALUE_ERRORS, TypeError: TYPE_ERRORS}


@pytest.mark.parametrize("error", ERRORS)
def test_each_mistake_is_named(error):
    assert complaints(ERRORS[error], error) == {}
