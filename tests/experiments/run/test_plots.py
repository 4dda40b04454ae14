import pytest

from experiments.run.plots.learning import smooth
from experiments.run.plots.style import figure, legend_below


@pytest.mark.parametrize("name", ["learning_curve", "adaptation"])
def test_plots_are_pictures_with_something_on_them(fast_run, name):
    from matplotlib.image import imread

    picture = imread(fast_run / "plots" / f"{name}.png")
    assert min(picture.shape[:2]) > 400
    assert 0.01 < (picture[..., :3].min(-1) < 0.95).mean() < 0.9


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
