"""Every algorithm by one protocol: the cells, the table and the curves."""

from experiments.run.plots.panels import read_panels
from experiments.run.schemas import ALGORITHMS
from experiments.studies.algorithms import cells, figures, report, study


def of_cell(cell, seed, steps, values):
    measure = "accuracy (%)" if cell.startswith("omniglot") else "squared error"
    found = {"outer_steps": 7, "inner_steps": 5, "measure": measure, "steps": steps, "values": values}
    return {"cell": cell, "seed": seed, **found}


def test_every_algorithm_has_a_cell_and_only_chooses_some(configured):
    names = {cell.name.partition("/")[2] for cell in cells(configured(study))}
    assert names == set(ALGORITHMS)
    assert [cell.name for cell in cells(configured(study, "only=[protonet]"))] == ["omniglot/protonet"] * 2


def test_table_and_curves_are_means_over_seeds(configured, tmp_path):
    results = [of_cell("sinusoid/maml", seed, [0, 1], [4.0, 1.0 + seed]) for seed in (0, 1)]
    results.append(of_cell("omniglot/protonet", 0, None, [90.0]))
    page = report(results, configured(study))
    assert "| maml | 4 | 1.5 |" in page
    assert "| protonet | 90 |" in page
    (drawn,) = figures(results, configured(study), tmp_path)
    assert drawn.stat().st_size > 10_000
    first, second = read_panels(tmp_path / "curves.json")
    assert first.curves["maml"][:4] == ([0, 1], [4.0, 1.5], [4.0, 1.0], [4.0, 2.0])
    assert second.curves["protonet"].x is None
