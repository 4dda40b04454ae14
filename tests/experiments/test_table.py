"""The table of a grid of runs: each cell runs once, and the table reports it."""

import json
from unittest import mock

import pytest
from hydra import compose, initialize_config_dir

from experiments import table
from experiments.run.config import converted
from experiments.run.help import CONF
from experiments.table import run_table
from tests.experiments.run.test_algorithms import TINY


@pytest.fixture
def grid(run, tmp_path, monkeypatch):
    """Return a config of two cells, and the list of command lines that are run, in this process."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = converted("table", compose("table", ["algorithms=[maml,protonet]", "seeds=[0]"]))
    config.folder, config.experiments = str(tmp_path), ["sinusoid"]
    config.overrides, config.papers = ["task=custom"], {"sinusoid": {"maml": "98 %, a paper"}}
    commands, drawn = [], []

    def train(arguments):
        commands.append(arguments)
        chosen = {key: value for key, _, value in (word.partition("=") for word in arguments)}
        folder = tmp_path.joinpath(*chosen["hydra.run.dir"].strip("'").split("/")[-3:])
        (folder / ".hydra").mkdir(parents=True)
        (folder / ".hydra" / "overrides.yaml").write_text(json.dumps(arguments[:-1]))
        own = [f"algorithm={chosen['algorithm']}", f"seed={chosen.get('seed', 0)}"]
        run(folder, *own, *TINY)

    monkeypatch.setattr(table, "train", train)
    monkeypatch.setattr(table, "_check_data", lambda config: None)
    monkeypatch.setattr(table, "comparison", lambda path, curves: drawn.append((path, curves)))
    return config, commands, drawn


def test_cells_run_once_and_fill_a_table(grid, tmp_path, capsys):
    config, commands, drawn = grid
    run_table(config)
    assert [command[:3] for command in commands] == [
        ["experiment=sinusoid", "algorithm=maml", "seed=0"],
        ["experiment=sinusoid", "algorithm=protonet", "seed=0"],
    ]
    written = (tmp_path / "sinusoid.md").read_text()
    assert written.strip() in capsys.readouterr().out
    rows = {line.split(" | ")[0].strip("| "): line for line in written.splitlines() if line.startswith("| ")}
    assert list(rows) == ["algorithm", "---", "maml", "protonet"]
    assert "98 %, a paper" in rows["maml"]
    assert "2, 2 in the test" in rows["maml"]
    assert "+-" in rows["protonet"]
    assert "Corners()" in written
    assert "Not finished" not in written
    path, curves = drawn[-1]
    assert path == tmp_path / "sinusoid.png"
    assert {name: len(runs) for name, runs in curves.items()} == {"maml": 1, "protonet": 1}
    run_table(config)
    assert len(commands) == 2
    config.overrides = ["meta_batch=3"]
    with pytest.raises(ValueError, match=r"holds a run with other overrides, .*; choose another folder="):
        run_table(config)


def test_minutes_are_outer_steps_by_the_time_of_a_few(grid, tmp_path):
    config, commands, _ = grid
    config.minutes, config.algorithms = 1.0, ["maml"]
    with mock.patch.object(table, "series", return_value=([1, 2, 3], [90_000.0, 20_000.0, 19_000.0])):
        run_table(config)
    assert [command[-2] for command in commands] == [table.SHORT[-1], "iterations=3"]
    assert sorted(folder.name for folder in (tmp_path / "sinusoid" / "maml").iterdir()) == ["0", "pilot"]
    assert "minutes of training: 1" in (tmp_path / "sinusoid.md").read_text()


def test_a_cell_that_was_interrupted_goes_on_and_one_that_failed_is_told(tmp_path, grid, monkeypatch):
    config, *_ = grid
    config.algorithms, commands = ["maml"], []
    cell = tmp_path / "sinusoid" / "maml" / "0"
    (cell / "checkpoints").mkdir(parents=True)
    (cell / "checkpoints" / "last.pt").touch()
    (cell / "failure.txt").write_text("Out of memory.\nmore\n")
    monkeypatch.setattr(table, "train", commands.append)
    run_table(config)
    assert commands == [[f"resume={cell}"]]
    written = (tmp_path / "sinusoid.md").read_text()
    assert f"Not finished:\n\n- {cell}: failed: Out of memory.\n" in written
    assert "No cell is finished." in written


def test_missing_data_end_a_table_before_any_cell(grid, tmp_path, monkeypatch):
    config, commands, _ = grid
    monkeypatch.undo()
    monkeypatch.setenv("METAGRAD_DATA", str(tmp_path))
    config.experiments, config.overrides = ["omniglot_5way1shot"], ["threads=1"]
    with pytest.raises(ValueError, match=r"(?s)Omniglot: this split needs .*Set task\.download=true"):
        run_table(config)
    assert not commands


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"minutes": 1.0, "iterations": 10}, "give iterations or minutes, not both"),
        (
            {"algorithms": ["maml", "mamml"]},
            "there is no algorithm=mamml; conf/algorithm has one file for each",
        ),
    ],
)
def test_what_no_cell_could_run_is_refused_before_any_is_started(grid, settings, message):
    config, commands, _ = grid
    vars(config).update(settings)
    with pytest.raises(ValueError, match=f"table: {message}"):
        run_table(config)
    assert not commands
