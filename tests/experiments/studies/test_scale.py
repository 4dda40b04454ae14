"""Processes send as many bytes as predicted."""

import sys
from unittest import mock

import pytest

from experiments.studies import scale
from experiments.studies.scale import COUNTERS, measure


def test_one_process_is_an_error(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["scale", "--processes", "1"])
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
