"""The report for bugs: versions, devices, threads, variables, and missing packages."""

import os
import subprocess
import sys

import numpy
import pytest
import torch

import metagrad
from metagrad import info


def test_info_names_versions_and_threads():
    found = info.collect()
    assert found.versions["metagrad"] == metagrad.__version__
    assert found.versions["torch"] == torch.__version__
    assert found.versions["numpy"] == numpy.__version__
    assert found.threads["of torch"] == torch.get_num_threads()
    assert torch.backends.cpu.get_cpu_capability() in found.cpu


def test_what_is_missing_is_said_with_what_needs_it(monkeypatch):
    monkeypatch.setitem(info.OPTIONAL, "no-such-package", "nothing")
    monkeypatch.setattr("shutil.which", lambda name: None)
    found = info.collect()
    assert found.optional["no-such-package"] is None
    lines = dict(line.split("  ", 1) for line in str(found).splitlines())
    assert lines["no-such-package"].strip() == "missing (nothing)"
    assert lines["C++ compiler"].strip() == "missing (compile=True on a CPU)"


def test_variables_that_change_numbers_or_memory_are_shown_and_no_others(monkeypatch):
    monkeypatch.setenv("MALLOC_TOP_PAD_", "1048576")
    monkeypatch.setenv("A_TOKEN", "hidden")
    shown = str(info.collect())
    assert "MALLOC_TOP_PAD_=1048576" in shown
    assert "hidden" not in shown


@pytest.mark.skipif(info._is_newer(torch.__version__), reason="the table is of an older torch")
@pytest.mark.parametrize(
    "fault",
    [pytest.param(f, id=f.name, marks=[pytest.mark.slow] if f.is_compiled else []) for f in info.FAULTS],
)
def test_the_known_faults_of_torch_are_there(fault):
    assert fault.is_there(), f"gone from torch {torch.__version__}. Workaround: {fault.workaround}."


def test_probes_say_what_is_there(monkeypatch):
    monkeypatch.setattr(
        info, "FAULTS", [info.Fault("sums", "adds", bool), info.Fault("products", "multiplies", lambda: True)]
    )
    assert info.probed().split() == ["gone", "sums", "adds", "present", "products", "multiplies"]


@pytest.mark.slow
def test_the_command_prints_what_is_collected():
    read, write = os.pipe()
    os.close(read)
    closed = subprocess.run([sys.executable, "-m", "metagrad.info"], stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    assert not closed.stderr  # as in `metagrad info | head`
    done = subprocess.run([sys.executable, "-m", "metagrad.info"], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[0].split() == ["metagrad", metagrad.__version__]
    assert not done.stderr


@pytest.mark.parametrize(
    ("version", "is_newer"), [("2.11.0", False), ("2.13.1+cpu", False), ("99.0.0a0", True)]
)
def test_a_torch_that_is_newer_than_tested_is_noticed(version, is_newer):
    assert info._is_newer(version) == is_newer
