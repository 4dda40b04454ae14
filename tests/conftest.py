"""Set-up of all tests: the same random numbers in any order, another seed on request, skips by reason.

``METAGRAD_TEST_SEED=n`` adds n to every seed that a file of ``tests/`` sets, and to the seed at the start of each
test. The functions are ``torch.manual_seed``, ``torch.Generator().manual_seed``, ``random.seed``,
``numpy.random.seed`` and ``numpy.random.default_rng``. Seeds inside the library and seeds that a test passes to the
library do not change.

``METAGRAD_TEST_NOISE=1`` makes matrix products, convolutions and sums round differently, see ``tests/noise.py``.
"""

from __future__ import annotations

import gc
import logging
import os
import random
import sys
from collections import defaultdict
from pathlib import Path

import hypothesis.core
import numpy as np
import pytest
import torch

from tests import noise

TESTS = str(Path(__file__).parent)
SEED = int(os.environ.get("METAGRAD_TEST_SEED", "0"))
NOISE = os.environ.get("METAGRAD_TEST_NOISE", "0") == "1"
KERNELS = noise.install() if NOISE else None  # dropped, torch's own are back


def shifted(seed: int) -> int:
    """Add METAGRAD_TEST_SEED to a seed that a file of tests/ gives."""
    from_tests = sys._getframe(2).f_code.co_filename.startswith(TESTS)
    return seed + SEED if from_tests else seed


def shift_seeds() -> None:
    """Replace what takes a seed by what adds METAGRAD_TEST_SEED to it."""

    class Generator(torch.Generator):
        def manual_seed(self, seed):
            return super().manual_seed(shifted(seed))

    torch.Generator = Generator  # torch's own cannot be patched: it is immutable
    for module, name in (
        (torch, "manual_seed"),
        (random, "seed"),
        (np.random, "seed"),
        (np.random, "default_rng"),
    ):
        setattr(module, name, with_shifted_seed(getattr(module, name)))


def with_shifted_seed(function):
    def call(seed=None):
        return function(None if seed is None else shifted(seed))

    return call


def seed_no_absent_devices() -> None:
    """Spare each `torch.manual_seed` the stack that torch formats for each kind of device that is not there."""
    for device in (torch.cuda, torch.xpu, torch.mtia):
        if not device.is_available():
            device.manual_seed_all = lambda seed: None


def measure_no_guards() -> None:
    """Spare each compilation the 30 ms in which Dynamo empties the caches, to log how long its guards take."""
    guards = sys.modules.get("torch._dynamo.guards")  # imported with the tests that compile
    if guards is not None:
        guards.profile_guard_manager = lambda *args: 0.0


def let_loggers_propagate() -> None:
    """Make torch's loggers propagate. Otherwise pytest adds its handlers to each of them before each test."""
    for logger in list(logging.root.manager.loggerDict.values()):
        if isinstance(logger, logging.Logger):
            logger.propagate = True


def pytest_configure(config):
    seed_no_absent_devices()
    let_loggers_propagate()
    hypothesis.settings.register_profile("suite", derandomize=SEED == 0, deadline=None, database=None)
    hypothesis.settings.load_profile("suite")
    if SEED:
        hypothesis.core.global_force_seed = SEED
        shift_seeds()


def pytest_collection_finish():
    measure_no_guards()
    gc.freeze()  # the garbage collector skips everything that was imported and collected


def pytest_report_header():
    capability = torch.backends.cpu.get_cpu_capability()
    return f"METAGRAD_TEST_SEED: {SEED}, METAGRAD_TEST_NOISE: {int(NOISE)}, CPU capability: {capability}"


def restart_random_numbers():
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)


@pytest.fixture(autouse=True)
def _same_random_numbers():
    """Start every test with the same random numbers, for any order of tests."""
    restart_random_numbers()


@pytest.fixture
def doubles():
    """Make float64 the default dtype of a test."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef):
    """Set up shared fixtures with the same random numbers, for any order of tests."""
    if fixturedef.scope != "function":
        restart_random_numbers()


def pytest_terminal_summary(terminalreporter):
    reasons = defaultdict(list)
    for report in terminalreporter.stats.get("skipped", []):
        path, _, reason = report.longrepr
        reasons[reason.removeprefix("Skipped: ")].append(Path(path).name)
    if reasons:
        terminalreporter.section("skipped, by reason")
    for reason, files in sorted(reasons.items()):
        terminalreporter.line(f"{len(files):5d}  {reason} ({', '.join(sorted(set(files)))})")
