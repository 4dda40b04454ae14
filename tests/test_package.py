"""The installed package is small, has few dependencies and imports quickly."""

from __future__ import annotations

import importlib
import os
import shlex
import subprocess
import sys
import sysconfig
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
def test_the_wheel_carries_the_library_and_its_programs_in_a_folder_of_their_own(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"metagrad", "metagrad_experiments"}
    assert "metagrad/py.typed" in names
    library = {str(p.relative_to(ROOT)) for p in (ROOT / "metagrad").rglob("*.py")}
    programs = [*ROOT.glob("experiments/**/*.py"), *ROOT.glob("conf/**/*.yaml")]
    assert library | {f"metagrad_experiments/{p.relative_to(ROOT)}" for p in programs} <= set(names)
    assert not [name for name in names if "__pycache__" in name]


@pytest.mark.slow
def test_the_command_of_the_wheel_works_in_an_empty_folder(wheel, tmp_path):
    """The environment sees the packages that are installed here, but not this checkout."""
    pytest.importorskip("hydra", reason="the extra `experiments` is not installed")
    run(sys.executable, "-m", "venv", tmp_path / "venv")
    python, empty = tmp_path / "venv" / "bin" / "python", tmp_path / "empty"
    run(python, "-m", "pip", "install", "--quiet", "--no-deps", wheel)
    (site,) = (tmp_path / "venv").glob("lib/*/site-packages")
    (site / "shared.pth").write_text(
        "\n".join({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
    )
    empty.mkdir()
    settings = {"PYTHONPATH": "", "OMP_NUM_THREADS": "1"}
    metagrad = f"cd {shlex.quote(str(empty))} && {python.with_name('metagrad')}"
    where = "import metagrad; print(metagrad.__file__)"
    assert run(python, "-P" if sys.version_info >= (3, 11) else "-I", "-c", where, **settings).startswith(
        str(tmp_path)
    )
    assert f"metagrad{' ' * 5}" in run("sh", "-c", f"{metagrad} info", **settings)
    trained = run("sh", "-c", f"{metagrad} train debug=fast iterations=2 logger=none", **settings)
    assert "outer 1 / backward" in trained
    assert [path.name for path in empty.iterdir()] == ["outputs"]
    assert run("sh", "-c", f"{metagrad} gallery --help", **settings).startswith("metagrad gallery [")


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


@pytest.mark.parametrize("name", ["no", "no.such", "--no"])
def test_a_command_without_a_program_names_the_help(name, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["metagrad", name])
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PYTHONPATH", "")
    with pytest.raises(SystemExit, match=rf"there is no program '{name}'. `metagrad --help` lists"):
        importlib.import_module("metagrad.__main__").main()


def test_the_help_of_the_command_lists_programs_that_exist(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["metagrad"])
    importlib.import_module("metagrad.__main__").main()
    named = {
        word
        for line in capsys.readouterr().out.splitlines()
        for word in line.split()[1:2]
        if line[:5] == " " * 4 + "m"
    }
    assert {"info", "train", "gallery", "compare,", "studies.NAME,"} == named
