from __future__ import annotations

import pytest

from experiments.run.plots.learning import smooth
from experiments.run.plots.memory import fitting, leaves, memory_plot
from experiments.run.plots.style import figure, legend_below


def phase(outer, *path):
    name, index = path[-1]
    steps = [["outer", outer], *map(list, path)]
    sizes = {"before": 10, "after": 20, "peak": 30}
    return {
        "path": steps,
        "name": name,
        "index": index,
        "outer": outer,
        "device": "cpu",
        **sizes,
    }


def step(outer, inner_steps):
    whole = {**phase(outer, ("outer", outer)), "path": [["outer", outer]]}
    inner = [phase(outer, ("inner", k)) for k in range(inner_steps)]
    return [whole, *inner, phase(outer, ("backward", None))]


@pytest.mark.parametrize("name", ["learning_curve", "adaptation", "memory"])
def test_plots_are_pictures_with_something_on_them(fast_run, name):
    from matplotlib.image import imread

    picture = imread(fast_run / "plots" / f"{name}.png")
    assert min(picture.shape[:2]) > 400
    assert 0.01 < (picture[..., :3].min(-1) < 0.95).mean() < 0.9


def test_leaves_are_the_innermost_phases_of_outer_steps():
    rows = [*step(0, 2), {**phase(0, ("validation", None)), "path": [["validation", None]], "outer": None}]
    assert [row["name"] for row in leaves(rows)] == ["inner", "inner", "backward"]


def test_as_many_of_the_last_outer_steps_are_shown_as_fit():
    phases = leaves([row for outer in range(3) for row in step(outer, 27)])
    assert {row["outer"] for row in fitting(phases)} == {1, 2}
    assert {row["outer"] for row in fitting(leaves(step(0, 90)))} == {0}


def test_a_run_without_inner_steps_has_a_plot(tmp_path):
    import json

    (tmp_path / "memory.jsonl").write_text("".join(json.dumps(row) + "\n" for row in step(0, 0)))
    assert memory_plot(tmp_path).stat().st_size > 0


def test_smoothing_takes_means_and_one_sided_ones_at_the_ends():
    assert smooth([2.0] * 5, 2) == [2.0] * 5
    assert smooth([0.0, 3.0, 6.0, 3.0], 1) == [1.5, 3.0, 4.0, 4.5]
    assert smooth([1.0, 2.0], 0) == [1.0, 2.0]


def test_drawing_leaves_the_users_style_alone(tmp_path):
    import matplotlib

    before = dict(matplotlib.rcParams)
    with figure(tmp_path / "x.png", size=(2, 2)) as axes:
        axes[0, 0].plot([0, 1])
    assert dict(matplotlib.rcParams) == before


@pytest.mark.parametrize(("count", "length"), [(1, 12), (4, 1), (9, 3)])
def test_a_legend_is_within_its_figure(tmp_path, count, length):
    with figure(tmp_path / "x.png", size=(6.6, 3.9)) as axes:
        for i in range(count):
            axes[0, 0].plot([0, 1], label=" ".join([f"algorithm.inner.lr=0.{i}"] * length))
        legend_below(axes[0, 0], columns=3)
        whole = axes[0, 0].figure
        whole.draw_without_rendering()
        box, frame = whole.legends[0].get_window_extent(), whole.bbox
    assert frame.x0 <= box.x0 < box.x1 <= frame.x1
    assert frame.y0 <= box.y0 < box.y1 <= frame.y1
