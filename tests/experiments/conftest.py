"""Composed configs, runs in this process, and runs as the user starts them."""

import copy
import functools
import multiprocessing
import os
import runpy
import subprocess
import sys
from contextlib import nullcontext
from multiprocessing import forkserver
from pathlib import Path
from unittest import mock

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore

from experiments.run.config import register, typed
from experiments.train import run_job

REPOSITORY = Path(__file__).parents[2]
FAST = ("debug=fast", "logger=none", "device=cpu", "threads=1")


def pytest_configure(config):
    # wandb's generated protobuf modules are older than the protobuf that is installed with it.
    config.addinivalue_line("filterwarnings", "ignore:.*google.protobuf.*:DeprecationWarning")


@pytest.fixture(scope="session", autouse=True)
def _one_store():
    """Skip the copy of the whole store in each composition, a third of its time. Loading copies already."""
    with mock.patch.object(ConfigStore, "__deepcopy__", lambda self, memo: self, create=True):
        yield


@pytest.fixture(scope="session")
def composed():
    """Return a function from overrides to a typed config, which composes the same overrides only once."""
    register()

    @functools.cache
    def compose_once(overrides, wandb_mode):
        with initialize_config_dir(str(REPOSITORY / "conf"), version_base="1.3"):
            return typed(compose("config", list(overrides)))

    return lambda *overrides: copy.deepcopy(compose_once(overrides, os.environ.get("WANDB_MODE")))


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
    """Return a function that starts `python -m experiments.MODULE` on one thread, for the same bits anywhere."""

    def start(module, *arguments, cwd):
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "WANDB_MODE": "disabled",
            "PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")]),
        }
        environment.pop("HYDRA_FULL_ERROR", None)
        command = [sys.executable, "-m", f"experiments.{module}", *arguments]
        return subprocess.Popen(
            command, cwd=cwd, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )

    return start


@pytest.fixture(scope="session")
def forks():
    """Return the context of processes that find torch, Hydra and the library imported, and no experiment."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "hydra", "hydra.core.plugins", "matplotlib.pyplot", "metagrad"])
    with mock.patch.dict(os.environ, OMP_NUM_THREADS="1"):
        forkserver.ensure_running()
    return context


@pytest.fixture(scope="session")
def program(forks, tmp_path_factory):
    """Return a function that runs `python -m experiments.MODULE` to its end: exit code, output, errors."""

    def call(module, *arguments, cwd):
        outputs = [tmp_path_factory.mktemp("program") / name for name in ("out", "err")]
        process = forks.Process(target=run_as_program, args=(module, arguments, cwd, *outputs))
        process.start()
        process.join(timeout=300)
        assert process.exitcode is not None, "the program does not end"
        return process.exitcode, *(file.read_text() for file in outputs)

    return call


def run_as_program(module, arguments, cwd, *outputs):
    for descriptor, file in enumerate(outputs, start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), descriptor)
    os.environ["WANDB_MODE"] = "disabled"
    os.environ.pop("HYDRA_FULL_ERROR", None)
    os.chdir(cwd)
    sys.path.insert(0, str(REPOSITORY))
    sys.argv = [module, *arguments]
    runpy.run_module(f"experiments.{module}", run_name="__main__", alter_sys=True)
