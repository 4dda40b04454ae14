from __future__ import annotations

import copy
import json
import math
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from experiments.benchmarks.optimizers import __main__ as program_of
from experiments.benchmarks.optimizers import checks, lbfgs, measuring, methods, report, robustness, zoo
from metagrad.optim import NewtonCG


def tiny() -> methods.Work:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    return methods.Work(model, torch.randn(8, 4), torch.randint(3, (8,)))


@pytest.fixture
def program(monkeypatch, tmp_path):
    def run(*arguments: str) -> None:
        threads = str(torch.get_num_threads())
        monkeypatch.setattr(program_of, "WORKLOADS", {"tiny": tiny})
        options = ("--rounds", "1", "--threads", threads, "--out", str(tmp_path), *arguments)
        monkeypatch.setattr(sys, "argv", ["bench_optimizers", *options])
        program_of.main()

    return run


@pytest.fixture
def no_rival(monkeypatch):
    monkeypatch.setitem(sys.modules, methods.RIVAL, None)


class Rival(torch.optim.SGD):
    """Notes whether the gradients that it is given can be differentiated."""

    seen: list[bool]

    def __init__(self, params, **options) -> None:
        super().__init__(params, lr=0.0)
        Rival.seen = []

    def step(self, closure=None):  # type: ignore[override]
        loss = super().step(closure)
        params = [p for group in self.param_groups for p in group["params"]]
        Rival.seen.append(all(p.grad.requires_grad for p in params))
        return loss


@pytest.mark.slow
def test_every_optimizer_is_measured(program, no_rival, capsys, tmp_path):
    program()
    out = capsys.readouterr().out
    rows = [line.strip("| ").split("|") for line in out.splitlines() if line.startswith("| ")][2:]
    assert [row[0].strip() for row in rows] == list(methods.METHODS)
    for name, *cells in rows:
        if name.startswith(methods.RIVAL):
            assert cells[-1].strip() == "pytorch_optimizer is not installed"
        else:
            assert float(cells[0]) > 0
            assert float(cells[2]) >= 1
    record = json.loads((tmp_path / "optimizers.json").read_text())
    assert list(record["workloads"]["tiny"]["results"]) == list(methods.METHODS)
    assert len(record["checks"]) == 3
    assert "## tiny" in (tmp_path / "optimizers.md").read_text()
    assert (tmp_path / "optimizers.png").stat().st_size > 0


def test_robustness_counts_runs_that_end_at_nan_above_the_first_loss_and_far_below_it(
    program, monkeypatch, capsys, tmp_path
):
    def line() -> robustness.Problem:
        w = nn.Linear(1, 1, bias=False)
        w.weight.data.fill_(2.0)
        return w, lambda: w.weight.square().sum()

    def sgd(lr: float):
        return lambda model: torch.optim.SGD(model.parameters(), lr=lr)

    rates = {"learns": 0.4, "still": 0.0, "climbs": 1.1, "explodes": 1e30}
    monkeypatch.setattr(robustness, "NETS", {"line": line})
    monkeypatch.setattr(robustness, "OPTIMIZERS", {name: sgd(lr) for name, lr in rates.items()})
    program("robustness", "--optimizers", "learns", "still", "climbs", "explodes")
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| line")]
    cells = [[cell.strip() for cell in row.strip("| ").split("|")] for row in rows]
    assert [row[1] for row in cells] == list(rates)
    assert [row[3:7] for row in cells] == [
        ["0 of 20", "0 of 20", "20 of 20", "0 of 500"],
        ["0 of 20", "0 of 20", "0 of 20", "0 of 500"],
        ["0 of 20", "20 of 20", "0 of 20", "500 of 500"],
        ["20 of 20", "0 of 20", "0 of 20", cells[3][6]],
    ]
    assert (tmp_path / "robustness.md").read_text().splitlines()[2:] == rows
    newton = robustness.run(line, lambda model: NewtonCG(model.parameters()), seeds=range(2), steps=2)
    assert newton.num_below_a_tenth == 2
    assert newton.products > 0


def test_each_step_is_timed_beside_a_gradient_over_whole_periods(monkeypatch):
    calls = []

    class Counting(torch.optim.SGD):
        def step(self, closure=None):  # type: ignore[override]
            calls.append("step")
            return super().step(closure)

    monkeypatch.setitem(methods.METHODS, "counting", methods.Method(methods.of_all(Counting), period=5))
    gradient_of = measuring.gradient_of

    def noted(work, model):
        gradient = gradient_of(work, model)
        return lambda: (calls.append("gradient"), gradient())[1]

    monkeypatch.setattr(measuring, "gradient_of", noted)
    measured = measuring.measure(tiny(), ["counting"], rounds=2)
    weighed, first, rest = calls[0], calls[1], calls[2:]
    assert (weighed, first) == ("gradient", "step")
    assert rest == ["gradient", "step"] * 10 + ["step"] * 6  # the last are weighed
    assert len(measured.results["counting"].times) == 2


def test_the_peak_holds_what_an_optimizer_keeps():
    measured = measuring.measure(tiny(), ["torch.SGD", "torch.Adam"], rounds=1)
    params = sum(p.nbytes for p in tiny().model.parameters())
    held = {name: result.peak * measured.nbytes for name, result in measured.results.items()}
    assert held["torch.Adam"] - held["torch.SGD"] >= 2 * params


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize(("name", "expected"), [("AdaHessian", [True] * 12), ("Lion", [False] * 12)])
def test_a_rival_is_given_graphs_when_it_wants_them(name, expected, monkeypatch):
    monkeypatch.setitem(sys.modules, methods.RIVAL, SimpleNamespace(**{name: Rival, "SophiaH": Rival}))
    for method, wanted in (
        (f"{methods.RIVAL}.{name}", expected),
        (f"{methods.RIVAL}.SophiaH-10", [True, *[False] * 9, True, False]),
    ):
        work = tiny()
        step = methods.METHODS[method].stepper(work, work.model)
        for _ in range(12):
            step()
        assert Rival.seen == wanted


def test_muon_has_the_matrices_and_descent_the_rest():
    muon, descent = methods.METHODS["Muon"].make(methods.cnn(1).model)
    assert {p.ndim for p in muon.param_groups[0]["params"]} == {2}
    assert {p.ndim for p in descent.param_groups[0]["params"]} == {1, 4}


def test_exact_diagonals_are_those_of_the_dense_hessian():
    work = checks.few()
    shapes = [p.shape for p in work.model.parameters()]
    sizes = [shape.numel() for shape in shapes]

    def loss(flat):
        values = [part.view(shape) for part, shape in zip(flat.split(sizes), shapes, strict=True)]
        W1, b1, W2, b2 = values
        return F.cross_entropy(torch.tanh(work.x @ W1.t() + b1) @ W2.t() + b2, work.y)

    flat = torch.cat([p.detach().reshape(-1) for p in work.model.parameters()])
    expected = torch.autograd.functional.hessian(loss, flat).diagonal()
    torch.testing.assert_close(checks.exact_diagonals(work)["Hessian"], expected)


def test_an_estimate_that_is_wrong_ends_the_program_if_it_is_ours(program, no_rival, monkeypatch):
    matrix, make, read = checks.ESTIMATES["SophiaH-10"]
    wrong = (matrix, make, lambda state: 2 * read(state))
    monkeypatch.setitem(checks.ESTIMATES, "SophiaH-10", wrong)
    with pytest.raises(
        SystemExit, match=r"SophiaH-10: the mean of 1000 estimates is off the Hessian diagonal"
    ):
        program("--optimizers", "SophiaH-10")


def test_equal_rules_are_compared(monkeypatch):
    names = ("Lion", f"{methods.RIVAL}.Lion")
    monkeypatch.setitem(sys.modules, methods.RIVAL, SimpleNamespace(__spec__=SimpleNamespace()))
    for factor, expected in ((1.0, "differ by 0.0e+00"), (3.0, "differ by 6.0e-05")):
        make = methods.of_all(lambda params, lr, factor=factor: methods.Lion(params, lr=factor * lr))
        monkeypatch.setitem(methods.METHODS, names[1], methods.Method(make))
        (line,) = checks.check(names)
        assert expected in line


def test_goals_are_judged():
    results = {
        "AdaHessian": measuring.Result([3.0, 3.4, 9.0], 1.0),
        report.RIVALS["AdaHessian"]: measuring.Result([3.3], 1.0),
        "KFAC-10": measuring.Result([1.5], 1.0),
        "Lion": measuring.Result([1.0], 1.0),
    }
    judged = "<= 2.4: MISSED, <= pytorch_optimizer's 3.30: MISSED"
    assert report.goal("AdaHessian", results) == judged
    assert report.goal("KFAC-10", results) == "<= 1.6: met"
    assert report.goal("Lion", results) == ""
    results[report.RIVALS["AdaHessian"]] = measuring.Result(note="is not installed")
    assert report.goal("AdaHessian", results) == "<= 2.4: MISSED"


def test_an_optimizer_that_raises_says_so(monkeypatch):
    def failing(model):
        raise RuntimeError("no\nand more")

    monkeypatch.setitem(methods.METHODS, "failing", methods.Method(failing))
    measured = measuring.measure(tiny(), ["torch.SGD", "failing"], rounds=1)
    assert measured.results["failing"].note == "RuntimeError: no"
    assert measured.results["torch.SGD"].times
    assert report.table("tiny", measured).endswith("RuntimeError: no |")


@pytest.mark.parametrize("name", [name for name in methods.WORKLOADS if name.endswith("128")])
def test_workloads_are_classified(name):
    work = methods.WORKLOADS[name]()
    assert len(work.x) == len(work.y) == 128
    loss = work.loss(copy.deepcopy(work.model))
    assert 1 < loss.item() < 4


def test_what_is_unknown_is_named(program, capsys):
    for arguments, text in (
        (("--workloads", "huge"), "huge: expected any of tiny"),
        (("--optimizers", "Nought"), "Nought: expected any of torch.SGD"),
        (("--rounds", "0"), "--rounds and --threads must be positive"),
    ):
        with pytest.raises(SystemExit):
            program(*arguments)
        assert text in capsys.readouterr().err


def test_the_zoo_marks_what_does_not_end_below_adam(program, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(zoo, "PROBLEMS", {"beale": zoo.beale})
    program("zoo", "--optimizers", zoo.REFERENCE, "Lion", "Shampoo")
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]
    assert [name for name, _ in rows] == [zoo.REFERENCE, "Lion", "Shampoo"]
    assert [loss.endswith("*") for _, loss in rows] == [False, True, False]
    assert len((tmp_path / "zoo.md").read_text().splitlines()) == 5


# What ends above Adam from some seeds: ten ReLU layers begin with gradients that vanish.
CHAOTIC = {("SophiaH", "deep_relu"), ("SophiaG", "deep_relu")}


@pytest.fixture(scope="module")
def by_adam() -> dict[tuple[str, int], float]:
    adam = zoo.OPTIMIZERS[zoo.REFERENCE]
    return {
        (name, seed): zoo.trained(zoo.made(name, seed), adam) for name in zoo.PROBLEMS for seed in range(3)
    }


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:KFAC:UserWarning")  # of parameters that are in no layer
@pytest.mark.parametrize("name", zoo.SECOND_ORDER)
def test_second_order_optimizers_end_below_adam(name, by_adam):
    """In the median of three seeds, since single runs of the deep nets are chaotic; and nobody at NaN."""
    for problem in zoo.PROBLEMS:
        seeds = range(1 if isinstance(zoo.made(problem).model, zoo.Point) else 3)
        losses = [zoo.trained(zoo.made(problem, seed), zoo.OPTIMIZERS[name]) for seed in seeds]
        assert all(map(math.isfinite, losses)), (problem, losses)
        if (name, problem) not in CHAOTIC:
            ratios = sorted(loss / by_adam[problem, seed] for seed, loss in zip(seeds, losses, strict=True))
            assert ratios[len(ratios) // 2] < 1, (problem, losses)


def test_a_step_of_the_zoo_that_refuses_counts_as_nan():
    problem = zoo.Problem(zoo.Point(1.0), lambda model: (model() - 1).sqrt().sum())
    assert math.isnan(zoo.trained(problem, zoo.OPTIMIZERS["Lion"], steps=1))


def test_lbfgs_stands_beside_torchs(program, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(lbfgs, "PROBLEMS", {"Beale": (lbfgs.PROBLEMS["Beale"][0], 4)})
    program("lbfgs")
    name, steps, torchs, ours, ratio = capsys.readouterr().out.splitlines()[2].strip("| ").split(" | ")
    assert (name, steps, torchs.split(",")[0]) == ("Beale", "4", ours.split(",")[0])
    assert float(ratio) > 0
    assert len((tmp_path / "lbfgs.md").read_text().splitlines()) == 3
