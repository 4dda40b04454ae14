import numpy as np
import pytest
import torch

from metagrad.tasks import Tabular
from tests.draws import seeded

CSV = """who,age,kind,size
"ann",1,cat,2.5
ann,2,dog,3
ann,3,dog,4
bob,1,cat,1
bob,2,cat,2
bob,3,dog,5
bob,4,cat,7
"""


def table() -> dict:
    """Return 10 tasks with 4 to 13 rows. The target is the square of the row number."""
    who = np.repeat(np.arange(10), np.arange(4, 14))
    return {
        "who": who,
        "row": np.arange(85),
        "kind": np.array(list("cab"))[np.arange(85) % 3],
        "y": np.arange(85.0) ** 2,
    }


def test_rows_of_a_task_belong_together_and_none_is_drawn_twice():
    batch = Tabular(table(), "who", ["row"], "y", 1, 3, dtype=torch.float64).sample(200, generator=seeded())
    assert batch.support.x.shape == batch.support.y.shape == (200, 1, 1)
    rows = torch.cat([batch.support.x, batch.query.x], 1).squeeze(-1)
    assert torch.equal(torch.cat([batch.support.y, batch.query.y], 1).squeeze(-1), rows.square())
    tasks = torch.from_numpy(table()["who"])[rows.long()]
    assert (tasks == tasks[:, :1]).all()
    assert all(len(set(row.tolist())) == 4 for row in rows)
    assert set(tasks[:, 0].tolist()) == set(range(10))


def test_columns_by_name_are_ids_and_a_mapping_makes_arguments():
    x = {"item": "row", "kind": "kind", "features": ["row", "who"]}
    tasks = Tabular(table(), "who", x, "kind", 2, 2, classify=True)
    batch = tasks.sample(3, generator=seeded())
    assert {name: (tuple(part.shape), part.dtype) for name, part in batch.support.x.items()} == {
        "item": ((3, 2), torch.int64),
        "kind": ((3, 2), torch.int64),
        "features": ((3, 2, 2), torch.float32),
    }
    assert tasks.categories == {"kind": ["a", "b", "c"]}
    assert torch.equal(batch.support.x["kind"], batch.support.y)
    assert torch.equal(batch.support.y, torch.tensor([2, 0, 1])[batch.support.x["item"] % 3])
    assert batch.num_tasks == 3


def test_files_are_found_in_the_data_folder_and_hold_text(tmp_path, monkeypatch):
    (tmp_path / "pets.csv").write_text(CSV)
    monkeypatch.setenv("METAGRAD_DATA", str(tmp_path))
    tasks = Tabular("pets.csv", "who", ["age"], "size", 2, 1, dtype=torch.float64)
    assert tasks.tasks == ["ann", "bob"]
    drawn = tasks.sample(50, generator=seeded()).query
    assert set(zip(drawn.x.flatten().tolist(), drawn.y.flatten().tolist(), strict=True)) == {
        *zip((1, 2, 3, 1, 2, 3, 4), (2.5, 3, 4, 1, 2, 5, 7), strict=True)
    }
    ages = {"task_column": "age", "x": "kind", "y": "size", "shots": 1, "queries": 1, "on_small": "skip"}
    assert Tabular("pets.csv", **ages).tasks == ["1", "2", "3"]
    assert Tabular("pets.csv", **ages, column_types={"age": "integer"}).tasks == [1, 2, 3]


def test_standardized_by_the_training_tasks_alone():
    splits = {"train": [1, 2, 3], "test": [8, 9]}
    how = {"standardize": True, "tasks": splits, "dtype": torch.float64}
    made = {name: Tabular(table(), "who", ["row"], "y", 2, 2, split=name, **how) for name in splits}
    rows = torch.arange(4, 22, dtype=torch.float64)  # of tasks 1, 2 and 3
    for tasks in made.values():
        raw = torch.arange(85, dtype=torch.float64)
        expected = (raw - rows.mean()) / rows.std(correction=0)
        torch.testing.assert_close(tasks._x[:, 0], expected)
        y = rows.square()
        torch.testing.assert_close(tasks._y[:, 0], (raw.square() - y.mean()) / y.std(correction=0))
    constant = Tabular({"w": [1, 1], "c": [2, 2]}, "w", ["c"], "c", 1, 1, standardize=True)
    assert constant._x.tolist() == [[0], [0]]


def test_tasks_are_dealt_out_or_chosen():
    names = ("train", "validation", "test")
    parts = [Tabular(table(), "who", ["row"], "y", 2, 2, split=name).tasks for name in names]
    assert sorted(parts[0] + parts[1] + parts[2]) == list(range(10))
    assert [len(part) for part in parts] == [6, 2, 2]
    assert Tabular(table(), "who", ["row"], "y", 2, 2, tasks=[7, 3]).tasks == [7, 3]


def test_small_tasks_are_left_out_when_told_to():
    tasks = Tabular(table(), "who", ["row"], "y", 5, 5, on_small="skip")
    assert tasks.skipped == [0, 1, 2, 3, 4, 5]
    assert tasks.tasks == [6, 7, 8, 9]
    assert tasks.protocol_description == ("Tabular tasks by 'who', 5 support and 5 query rows, 4 tasks")
    assert repr(tasks) == f"<{tasks.protocol_description}>"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a,b,a\n1,2,3\n", r"must have columns with different names, got \['a', 'b', 'a'\]"),
        (b"", r"must have columns with different names, got \[\]"),
        (b"a,b\n", "has no rows"),
        (b"a,b\n1,2\n1\n", r"line 3 of .*t\.csv: expected 2 fields, got 1"),
        (b'a,b\n1,"2\n', r"t\.csv is not a CSV file in UTF-8: unexpected end of data"),
        ("a,b\n1,2\n".encode("utf-16"), r"t\.csv is not a CSV file in UTF-8: 'utf-8' codec"),
    ],
    ids=["a name twice", "empty", "header alone", "ragged", "an open quote", "UTF-16"],
)
def test_a_file_that_is_no_table_is_named(tmp_path, content, message):
    path = tmp_path / "t.csv"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"^Tabular: .*{message}"):
        Tabular(path, "a", ["a"], "b", 1, 1)
