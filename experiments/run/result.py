"""The result of a run: test metrics with their protocol."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from torch import nn

from experiments.run.config import plain
from experiments.run.evaluate import Interval
from experiments.run.files import write_text
from experiments.run.loop import Run, evaluate_split
from experiments.run.metrics import read_rows
from experiments.run.schemas import given

if TYPE_CHECKING:
    from pathlib import Path

    from metagrad.tasks import TaskDistribution

FILE, FAILURE = "result.json", "failure.txt"
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
POLICIES = {
    None: "batch statistics, transductive",
    "transductive": "batch statistics, transductive",
    "support": "statistics of the support examples of a task",
    "running": "running statistics in evaluation",
    "per_step": "running statistics of each inner step in evaluation",
    "per_step_transductive": "batch statistics, transductive; weights and biases of each inner step",
}


def judge(run: Run) -> dict[str, Any]:
    """Evaluate on test tasks, and return the result in the form of `result.json`."""
    intervals = evaluate_split(run, "test", num_tasks=run.config.evaluate.tasks)
    metrics = {f"test/{name}": interval._asdict() for name, interval in intervals.items()}
    return {"step": run.step, "seed": run.config.seed, "protocol": protocol(run), "metrics": metrics}


def protocol(run: Run) -> dict[str, Any]:
    """Return the settings that must be known to compare the result with another result."""
    config, model = run.config, run.parts.model
    batch_norm = any(isinstance(module, NORMS) for module in model.modules())
    policy = POLICIES[getattr(run.parts.algorithm, "norm", None)]
    return {
        "test_tasks": config.evaluate.tasks,
        "tasks": describe(run.splits.test),
        "algorithm": {name: value for name, value in given(config.algorithm).items() if name != "inner"},
        "inner_rule": plain(config)["algorithm"]["inner"],
        "inner_steps_train": config.algorithm.steps,
        "inner_steps_test": config.evaluate.steps,
        "meta_batch": config.meta_batch,
        "iterations": config.iterations,
        "batch_norm": policy if batch_norm else "none in the model",
    }


def describe(tasks: TaskDistribution) -> str:
    """Return the distribution in words: its own seed, if it has one."""
    own = getattr(tasks, "protocol_description", None)
    if own is not None:
        return own
    named = {**vars(tasks), **getattr(tasks, "ranges", {})}
    settings = {name: value for name, value in named.items() if isinstance(value, (int, float, tuple))}
    return (
        f"{type(tasks).__name__}({', '.join(f'{name}={_short(value)}' for name, value in settings.items())})"
    )


def write(folder: Path, result: dict[str, Any]) -> None:
    """Write `result.json`."""
    write_text(folder / FILE, json.dumps(result, indent=2) + "\n")


def set_aside(folder: Path) -> None:
    """Add the step to the name of the result of a run that is resumed."""
    file = folder / FILE
    if file.exists():
        step = json.loads(file.read_text())["step"]
        file.rename(folder / f"result_{step}.json")


def reason(folder: Path) -> str:
    """Return why a run has no result."""
    failure = folder / FAILURE
    if failure.exists():
        words = failure.read_text().strip().partition("\n")[0]
        return words if words.startswith("Interrupted") else f"failed: {words or 'without a reason'}"
    rows = read_rows(folder / "metrics.jsonl")
    return f"unfinished at step {rows[-1]['step'] if rows else 0}"


def text(result: dict[str, Any]) -> str:
    """Return the result as a few lines to print."""
    protocol = result["protocol"]
    intervals = {name.removeprefix("test/"): Interval(**value) for name, value in result["metrics"].items()}
    steps, number = protocol["inner_steps_test"], protocol["test_tasks"]
    lines = [f"Test on {number} tasks after {result['step']} iterations, mean and 95 % confidence interval:"]
    lines += [_row(name, intervals, steps) for name in intervals if "_before" not in name]
    lines += [
        "Protocol:",
        *(f"  {name.replace('_', ' ')}: {_words(value)}" for name, value in protocol.items()),
    ]
    return "\n".join(lines)


def _row(name: str, intervals: dict[str, Interval], steps: int | None) -> str:
    stem, bracket, unit = name.partition("(")
    before, after = intervals.get(f"{stem}_before{bracket}{unit}"), intervals[name]
    title = f"{stem.replace('_', ' ')} {bracket}{unit}".strip()
    if before is None:
        return f"  {title}: {after}"
    gain = f"  (ratio {before.mean / after.mean:.1f})" if not unit and after.mean > 0 else ""
    return f"  {title}: {before} before, {after} after {steps} inner steps{gain}"


def _words(value: Any) -> str:
    if not isinstance(value, dict):
        return str(value)
    arguments = ", ".join(f"{name}={item}" for name, item in value.items() if name != "_target_")
    return f"{value['_target_'].rpartition('.')[2]}({arguments})"


def _short(value: Any) -> str:
    return f"({', '.join(map(_short, value))})" if isinstance(value, tuple) else f"{value:.4g}"
