"""The installed package is small, has few dependencies and imports quickly."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
NOT_IN_THE_CORE = {"hydra", "omegaconf", "wandb", "matplotlib", "scipy", "pytest"}


def run(*command: str | Path, **environment: str) -> str:
    result = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, env={**os.environ, **environment}
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ROOT)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def loaded() -> list[str]:
    """Return the modules that are loaded after importing the library and measuring memory."""
    program = (
        "import sys, torch, metagrad as mg\nwith mg.MemoryTracker('cpu'): torch.ones(1)\nprint(*sys.modules)"
    )
    return run(sys.executable, "-c", program).split()


def test_import_pulls_in_nothing_that_belongs_to_experiments(loaded):
    assert not NOT_IN_THE_CORE & {name.split(".")[0] for name in loaded}


def test_the_compiler_is_not_loaded(loaded):
    assert not [name for name in loaded if name.startswith(("torch._dynamo", "torch._inductor"))]


@pytest.mark.slow
def test_the_wheel_carries_the_library_alone(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"metagrad"}
    assert "metagrad/py.typed" in names
    sources = {str(p.relative_to(ROOT)) for p in (ROOT / "metagrad").rglob("*.py")}
    assert sources <= set(names)


@pytest.mark.slow
def test_the_wheel_works_in_an_empty_environment_with_torch_and_numpy_only(wheel, tmp_path):
    run(sys.executable, "-m", "venv", tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    constraints = ("--constraint", ROOT / "constraints.txt")
    run(python, "-m", "pip", "install", "--quiet", *constraints, wheel)
    installed = {line.split("==")[0].lower() for line in run(python, "-m", "pip", "freeze").splitlines()}
    assert {"torch", "numpy"} <= installed
    assert not installed & {"hydra-core", "wandb", "matplotlib", "tqdm", "scipy", "pytest"}
    program = (
        "import torch, metagrad as mg;"
        "maml = mg.MAML(mg.models.MLP([1, 8, 1]), torch.nn.functional.mse_loss,"
        " inner=mg.optim.rules.sgd(lr=0.01), steps=2);"
        "out = maml(mg.tasks.Sinusoid().sample(3)); out.loss.backward(); print(out.loss.item())"
    )
    assert float(run(python, "-W", "error", "-c", program)) > 0
