import sys
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from experiments.benchmarks import curvature as bench
from tests.marks import slow


def tiny() -> bench.Work:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    return bench.Work(model, torch.randn(8, 4), torch.randint(3, (8,)))


@pytest.fixture
def program(monkeypatch):
    def run(*arguments: str) -> None:
        monkeypatch.setattr(bench, "WORKLOADS", {"tiny": tiny})
        monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
        monkeypatch.setattr(sys, "argv", ["bench_curvature", "--probes", "4", *arguments])
        bench.main()

    return run


@pytest.mark.slow
def test_prints_time_and_peak_of_every_method(program, capsys, monkeypatch):
    monkeypatch.setattr(bench, "peak_bytes", lambda call: 1000 + 0 * len(str(call())))
    program("--rounds", "1")
    title, header, *lines = capsys.readouterr().out.strip().splitlines()
    assert title.startswith("tiny: one gradient takes")
    assert header.split() == ["x", "its", "time", "x", "its", "peak"]
    rows, ratios = lines[: len(bench.METHODS)], lines[len(bench.METHODS) :]
    assert [line[:30].strip() for line in rows] == list(bench.METHODS)
    assert rows[0].split()[-2:] == ["1.00", "1.00"]
    assert [line.split(":")[0] for line in ratios] == [name for name in bench.METHODS if name in bench.PLAIN]
    assert all("of the peak of what is written by hand" in line for line in ratios)


def test_gauss_newton_products_by_hand_are_ours():
    work = tiny().few()
    torch.testing.assert_close(bench.gauss_newton_by_hand(work)(), bench.gauss_newton_product(work)())


@pytest.mark.parametrize(
    "method", [bench.hessian_product, bench.hessian_product_by_hand, bench.forward_over_reverse]
)
def test_hessian_products_are_those_of_the_dense_hessian(method):
    work = tiny().few()
    shapes = [p.shape for p in work.params.values()]
    sizes = [shape.numel() for shape in shapes]

    def loss(flat):
        values = [part.reshape(shape) for part, shape in zip(flat.split(sizes), shapes, strict=True)]
        W1, b1, W2, b2 = values
        return F.cross_entropy(torch.tanh(work.x @ W1.t() + b1) @ W2.t() + b2, work.y)

    flat = torch.cat([p.detach().reshape(-1) for p in work.params.values()])
    H = torch.autograd.functional.hessian(loss, flat)
    torch.testing.assert_close(method(work)(), H @ work.vector)


def test_a_product_that_is_wrong_ends_the_program(program, monkeypatch):
    monkeypatch.setattr(bench, "hessian_product", lambda work: lambda: 1.001 * work.vector)
    with pytest.raises(SystemExit, match="Hessian product does not agree with forward-over-reverse: off by"):
        program("--rounds", "1")


def test_what_is_written_by_hand_is_what_ours_computes():
    work = replace(tiny().few(), probes=500)
    H = bench.hessian(work.loss, work.params, (work.x, work.y)).to_dense()
    values = torch.linalg.eigvalsh(H).flip(0)[: bench.NUM_EIGENVALUES]
    for method in (bench.eigenvalues, bench.eigenvalues_by_scipy):
        torch.testing.assert_close(method(work)(), values, rtol=1e-4, atol=1e-4)
    error = 4 * (2 * H.square().sum() / work.probes).sqrt()
    assert (bench.trace_by_hand(work)() - H.trace()).abs() < error


@pytest.mark.parametrize("workload", [slow(name) if name == "resnet20" else name for name in bench.WORKLOADS])
def test_workloads_have_second_derivatives(workload):
    bench.check(bench.WORKLOADS[workload]())
