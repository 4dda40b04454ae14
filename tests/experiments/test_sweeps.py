"""Launchers and sweepers are plugins of Hydra: what `conf/` says to them, and what a sweep leaves to compare."""

import copy

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins

from experiments.compare import find_jobs
from experiments.run.config import register
from experiments.run.help import CONF
from tests.experiments.conftest import FAST

NODES = {
    ("launcher", "joblib"): {},
    ("launcher", "submitit_slurm"): {"timeout_min": 60, "cpus_per_task": None, "max_num_timeout": 0},
    ("sweeper", "optuna"): {
        "direction": "minimize",
        "n_trials": 1,
        "n_jobs": 2,
        "max_failure_rate": 0.0,
        "sampler": {"seed": None},
    },
}
"""The keys of the plugins that `conf/` sets. An unknown key raises."""

CASES = [
    ("launcher=joblib", "launcher", "joblib", {}, None),
    ("launcher=slurm", "launcher", "submitit_slurm", {"max_num_timeout": 10}, "auto"),
    ("sweeper=optuna", "sweeper", "optuna", {"max_failure_rate": 1.0, "n_trials": 20}, None),
]


@pytest.fixture
def plugins(monkeypatch):
    """Register the nodes of the plugins with Hydra, whether they are installed or not."""
    register()
    Plugins.instance()  # on their first use they store nodes of their own
    store = ConfigStore.instance()
    monkeypatch.setattr(store, "repo", copy.deepcopy(store.repo))
    for (kind, name), keys in NODES.items():
        store.store(name, {"_target_": f"plugins.{name}", **keys}, f"hydra/{kind}", provider="test")


@pytest.mark.parametrize(("option", "kind", "name", "expected", "resume"), CASES)
def test_an_option_chooses_its_plugin_and_what_a_job_needs_for_it(
    plugins, option, kind, name, expected, resume
):
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose("config", [option], return_hydra_config=True)
    assert config.hydra.runtime.choices[f"hydra/{kind}"] == name
    assert expected.items() <= dict(config.hydra[kind]).items()
    assert config.resume == resume
    assert config.threads == (1 if name == "joblib" else None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("package", "arguments", "finished"),
    [
        ("hydra_joblib_launcher", ["launcher=joblib", "seed=0,1", "optimizer.lr=0.01,-1"], 2),
        ("hydra_submitit_launcher", ["hydra/launcher=submitit_local", "seed=0,1", "resume=auto"], 2),
        (
            "hydra_optuna_sweeper",
            ["sweeper=optuna", "hydra.sweeper.n_trials=12", "optimizer.lr=tag(log,interval(1e-4,1e-1))"],
            12,
        ),
    ],
)
def test_a_sweep_by_a_plugin_ends_with_every_job_that_can(
    start_program, tmp_path, package, arguments, finished
):
    """A job that fails ends no other."""
    pytest.importorskip(f"hydra_plugins.{package}", reason="not installed: pip install -e '.[sweep]'")
    sweep = ["-m", *arguments, *FAST, "memory.enabled=false", "hydra.sweep.dir=multirun"]
    start_program("train", *sweep, cwd=tmp_path).communicate()
    jobs = find_jobs(tmp_path / "multirun")
    assert sum(job.metrics is not None for job in jobs) == finished
    assert all(job.metrics is not None or "Invalid learning rate" in job.status for job in jobs)
