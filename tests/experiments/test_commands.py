"""Every printed command runs: as printed if it is short, or with its program's smallest settings."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from docs._hooks.programs import RUN, programs
from tests.experiments.conftest import FAST, REPOSITORY

DATA = Path(os.environ.get("METAGRAD_DATA", "/nowhere"))
PAGES = [
    REPOSITORY / "README.md",
    *(p for f in ("experiments", "docs") for p in REPOSITORY.glob(f"{f}/*.md")),
]
PAGES += REPOSITORY.glob("docs/tutorials/*.md")
COMMAND = re.compile(r"(?:torchrun .*-m |python -m )((?:experiments|metagrad)\.[\w.]+)(.*)")
TINY = " ".join(("", *FAST, "iterations=2", "evaluate.every=2", "memory.enabled=false"))
QUICK = " --rounds 1 --seconds 0.1 --methods 'naive loop' 'metagrad, \"full\"'"
GRID = " minutes=0.05 iterations=null experiments=[sinusoid] algorithms=[maml] 'seeds=[0]'"
GRID += """ "overrides=['debug=fast','logger=none']\""""
SECONDS = ",".join(
    f"{w}:0.3" for w in ["poisson", "helmholtz", "burgers", "allen_cahn", "logistic", "conv4", "transformer"]
)
OPTIMIZERS = f"'optimizers=[adam]' evaluations=2 'seeds=[0]' 'seconds={{{SECONDS}}}'"
SMALL = {
    "train": TINY,
    "train -m sweeper": f"{TINY} hydra.sweeper.n_trials=2",
    "train resume=": "",
    "watch": " --once",
    "table": GRID,
    "gallery": " only=[hypergradients]",
    "studies": " preset=small",
    "studies.optimizers ": f" {OPTIMIZERS}",
    "studies.equations": " poisson --seconds 2",
    "studies.hypergradients": " --size 8 --steps 64",
    "studies.scale": "",
    "benchmarks.maml": QUICK,
    "benchmarks.sparse ": " --rounds 1",
    "benchmarks.curvature": " --rounds 1 --probes 2 --methods gradient",
    "benchmarks.forces": " --rounds 1",
    "benchmarks.heads": " --rounds 1 --width 16 --layers 1 --positions 32",
    "benchmarks.optimizers": " --rounds 1 --workloads mlp-128 --optimizers AdaHessian",
    "benchmarks.kronecker": " --loss 3 --dampings 1e-2",
    "benchmarks.training": " --rounds 1 --steps 20",
    "benchmarks.spectra": " --repeats 4 --size 100",
    "examples.gnn_cora": " --epochs 40 --hidden 8 --check-steps 1 --check-nodes 700 --steps 5 --outer-steps 1",
    "examples.test_time_training": " --iterations 2 --lengths 32 64",
    "examples.recommender": " --iterations 2 --students 8 --shots 2 --steps 2",
}
"""The arguments that make a program short. The longest beginning counts, and a preset that is printed stays."""

OPTIONS = {"benchmarks.sparse NAME": "benchmarks.sparse lookup", " ...": ""}
"""Choices for arguments that a page leaves to the reader."""

NEEDS = {
    r"omniglot|studies\.(algorithms|attack_images|clean|distill|landscape|search)|sparse_convolution|conv4,": (
        "omniglot/omniglot_105_bits.npz"
    ),
    r"studies\.attack\b|cora": "planetoid/cora.npz",
    r"coldstart|recommender": "insteval/InstEval.csv",
}
PACKAGES = {
    "launcher=joblib": "hydra_plugins.hydra_joblib_launcher",
    "sweeper=optuna": "hydra_plugins.hydra_optuna_sweeper",
    r"laplace|studies\.attribution": "mlxtend",
}


def printed(text, blocks=True):
    """Return the commands of a page, in blocks and in sentences, without comments and redirections."""
    shown = [block.text.replace("\\\n", " ") for block in programs(text) if blocks and block.language == "sh"]
    lines = [line for block in shown for line in block.splitlines()] + re.findall(r"`([^`\n]+)`", text)
    stripped = (re.sub(r" +#.*|[|>&].*", "", " ".join(line.split())).strip() for line in lines)
    return [command for command in stripped if re.match("torchrun .*-m|python -m", command)]


def shortened(command):
    """Return a command with the arguments that make it short."""
    for left_open, chosen in OPTIONS.items():
        command = command.replace(left_open, chosen)
    program = "".join(COMMAND.fullmatch(command).groups()).removeprefix("experiments.")
    begin = max((begin for begin in SMALL if f"{program} ".startswith(begin)), key=len, default=None)
    return command if begin is None or "preset=small" in command else command + SMALL[begin]


def commands():
    """Return the commands of all pages. The blocks of `RUN` run as printed in `tests/test_documents.py`."""
    found = [command for page in PAGES for command in printed(page.read_text(), page not in RUN)]
    return list(dict.fromkeys(shortened(command) for command in found if COMMAND.fullmatch(command)))


@pytest.fixture
def folder(tmp_path):
    """Return a folder with the runs and the package that commands name."""
    package = programs((REPOSITORY / "docs/tasks.md").read_text())[0].text
    package += "\n\ndef Model(width):\n    return mg.models.MLP([1, width, 1])\n"
    (tmp_path / "mypackage.py").write_text(package)
    return tmp_path


def execute(command, cwd):
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(cwd)]),
        "WANDB_MODE": "disabled",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        ["bash", "-c", command], cwd=cwd, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}{done.stderr[-4000:]}"


@pytest.mark.slow
@pytest.mark.parametrize("command", commands(), ids=str)
def test_a_printed_command_runs(folder, command):
    for pattern, file in NEEDS.items():
        if re.search(pattern, command) and not (DATA / file).is_file():
            pytest.skip(f"$METAGRAD_DATA/{file} is missing")
    for pattern, package in PACKAGES.items():
        if re.search(pattern, command):
            pytest.importorskip(package)
    if "--device cuda" in command and not torch.cuda.is_available():
        pytest.skip("no GPU")
    if found := re.search(r"(outputs|multirun)/[\w/]+", command):
        where = f"hydra.run.dir={found[0]}" if found[1] == "outputs" else f"-m hydra.sweep.dir={found[0]}"
        if "resume=" in command or "experiments.train" not in command:
            execute(f"python -m experiments.train {where}{TINY}", folder)
    execute(command, folder)
    if "experiments.studies." in command and "preset=small" in command:
        assert {file.suffix for file in folder.rglob("*.*") if file.stat().st_size} >= {".md", ".png"}


def test_commands_are_found_in_blocks_and_in_sentences():
    page = "Run `python -m experiments.a`.\n```sh\npython -m experiments.b \\\n    x=1 > log.txt  # a comment\n```\n"
    assert printed(page) == ["python -m experiments.b x=1", "python -m experiments.a"]
