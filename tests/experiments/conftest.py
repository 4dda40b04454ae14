"""Composed configs, runs in this process, and runs as the user starts them."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import pytest
import torch
from hydra import compose, initialize_config_dir

from experiments.config import register, typed
from experiments.train import run_job

REPOSITORY = Path(__file__).parents[2]
FAST = ("debug=fast", "logger=none", "device=cpu", "threads=1")


def pytest_configure(config):
    # wandb's generated protobuf modules are older than the protobuf that is installed with it.
    config.addinivalue_line("filterwarnings", "ignore:.*google.protobuf.*:DeprecationWarning")


@pytest.fixture(scope="session")
def composed():
    """Return a function from overrides to a typed config."""
    register()

    def build(*overrides):
        with initialize_config_dir(str(REPOSITORY / "conf"), version_base="1.3"):
            return typed(compose("config", list(overrides)))

    return build


@pytest.fixture(scope="session")
def run(composed):
    """Return a function that runs a few iterations in a folder, in this process, and draws only if it is told to."""

    def start(folder, *overrides, plots=False):
        folder.mkdir(parents=True, exist_ok=True)
        threads = torch.get_num_threads()
        try:
            with nullcontext() if plots else mock.patch("experiments.train.draw", return_value=[]):
                run_job(composed(*FAST, *overrides), folder)
        finally:
            torch.set_num_threads(threads)
        return folder

    return start


@pytest.fixture(scope="session")
def fast_run(run, tmp_path_factory):
    """Return the folder of one finished run, not to be written to."""
    return run(tmp_path_factory.mktemp("fast"), plots=True)


@pytest.fixture(scope="session")
def start_program():
    """Return a function that starts `python -m experiments.MODULE`, on one thread: the same bits anywhere."""

    def start(module, *arguments, cwd):
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "WANDB_MODE": "disabled",
            "PYTHONPATH": str(REPOSITORY),
        }
        environment.pop("HYDRA_FULL_ERROR", None)
        command = [sys.executable, "-m", f"experiments.{module}", *arguments]
        return subprocess.Popen(
            command, cwd=cwd, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )

    return start


@pytest.fixture(scope="session")
def program(start_program):
    """Return a function that runs a program to its end: exit code, standard output, standard error."""

    def call(module, *arguments, cwd):
        process = start_program(module, *arguments, cwd=cwd)
        out, err = process.communicate(timeout=300)
        return process.returncode, out, err

    return call
