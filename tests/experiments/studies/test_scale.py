"""What many processes send is computed right, and what two send is what was computed."""

from __future__ import annotations

import math
import sys
from unittest import mock

import pytest

from experiments.studies import scale
from experiments.studies.scale import COUNTERS, Network, dense, measure, steps, table


def test_times_in_closed_form():
    net = Network(4, bandwidth=100.0, latency=1.0)
    assert net.all_reduce(400.0) == 2 * 3 * (1 + 1)  # by a ring; by trees 2 * (2 + 4), as many
    assert net.all_reduce(0.0) == 2 * 2  # by trees: less than six messages
    assert net.all_gather(100.0) == 3 * 2
    assert net.all_to_all(100.0) == 3


def test_bytes_in_closed_form():
    net = Network(1000, bandwidth=50e9, latency=10e-6)
    assert dense("", 10**6, net).nbytes == 2 * 4e6 * 999 / 1000
    full, gathered, exchanged = table(10**9, 64, 6400, net)
    assert full.nbytes == 2 * 4 * 64e9 * 999 / 1000
    assert gathered.nbytes == 999 * (6400 * (4 + 256) + 16)
    assert exchanged.nbytes == pytest.approx(6400 * (4 + 256) * 2 * 0.999)
    assert table(2**31, 1, 1, net)[2].nbytes == pytest.approx((8 + 4) * 2 * 0.999)
    assert all(math.isfinite(step.seconds) and step.seconds > 0 for step in steps(net, 6400))


def test_the_table_is_printed(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["scale", "--processes", "8"])
    scale.main()
    out = capsys.readouterr().out
    assert "8 processes, 50 GB/s each, latency 10 us" in out
    assert "| Conv4, 64 filters | all-reduce of gradients | 786 kB |" in out


def test_numbers_that_mean_nothing_are_refused(monkeypatch):
    for option in (["--processes", "1"], ["--measure", "1"], ["--bandwidth", "0"]):
        monkeypatch.setattr(sys, "argv", ["scale", *option])
        with pytest.raises(ValueError, match="give two processes or more"):
            scale.main()


def test_a_system_that_does_not_count_is_refused():
    with (
        mock.patch.object(scale, "COUNTERS", COUNTERS / "missing"),
        pytest.raises(ValueError, match="which counts bytes; Linux has it"),
    ):
        measure(2)


@pytest.mark.slow
@pytest.mark.skipif(not COUNTERS.exists(), reason="the system does not count bytes")
@pytest.mark.parametrize("processes", [2, 4])
def test_what_processes_send_is_what_was_predicted(processes):
    rows, speed = measure(processes, steps=1)
    assert min(speed) > 0
    for row in rows:
        assert 0.98 < row.counted / row.predicted < 1.1
