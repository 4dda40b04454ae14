"""What was measured, as tables, a chart and a record."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from experiments.benchmarks.optimizers.measuring import Measured, Result
from experiments.benchmarks.optimizers.methods import RIVAL
from experiments.benchmarks.sparse import MIB
from experiments.run import provenance
from experiments.run.plots.style import BLUE, INK, MUTED, SKY, figure

GOALS = {"AdaHessian": 2.4, "SophiaH-10": 1.2, "KFAC-10": 1.6}  # gradients
RIVALS = {"AdaHessian": f"{RIVAL}.AdaHessian", "SophiaH-10": f"{RIVAL}.SophiaH-10"}


def table(name: str, measured: Measured) -> str:
    """Format one workload in Markdown, and whether the goals are met."""
    lines = [
        f"## {name}",
        "",
        f"One gradient takes {1000 * measured.seconds:.1f} ms and {measured.nbytes / MIB:.1f} MiB.",
        "",
        f"| {'optimizer':30} | a step, in gradients | in the rounds | peak, in gradients' | goal |",
        f"| {'---':30} | ---: | --- | ---: | --- |",
    ]
    for method, result in measured.results.items():
        cells = f" | | | {result.note}"
        if not result.note:
            spread = f"{min(result.times):.2f} to {max(result.times):.2f}"
            cells = f"{result.time:.2f} | {spread} | {result.peak:.2f} | {goal(method, measured.results)}"
        lines.append(f"| {method:30} | {cells} |")
    return "\n".join(lines)


def goal(method: str, results: dict[str, Result]) -> str:
    """Say what a step should cost at most, and whether it does."""
    own, verdicts = results[method].time, []
    if method in GOALS:
        verdicts.append(_verdict(own <= GOALS[method], f"<= {GOALS[method]:g}"))
    other = results.get(RIVALS.get(method, ""))
    if other is not None and other.times:
        verdicts.append(_verdict(own <= other.time, f"<= {RIVAL}'s {other.time:.2f}"))
    return ", ".join(verdicts)


def _verdict(is_met: bool, text: str) -> str:
    return f"{text}: {'met' if is_met else 'MISSED'}"


def chart(path: Path, everything: dict[str, Measured]) -> None:
    """Draw what a step costs in gradients and what it holds, a row for each workload."""
    rows = {name: {m: r for m, r in found.results.items() if r.times} for name, found in everything.items()}
    heights = [len(results) + 1.5 for results in rows.values()]
    size = (10.0, 0.24 * sum(heights) + 0.6)
    with figure(path, len(rows), 2, size=size, height_ratios=heights) as axes:
        for (time, memory), (name, results) in zip(axes, rows.items(), strict=True):
            _bars(time, list(results), [r.time for r in results.values()], BLUE)
            _bars(memory, list(results), [r.peak for r in results.values()], SKY)
            memory.set_yticklabels([])
            time.set_title(f"{name}: time of a step, in gradients")
            memory.set_title("peak memory, in gradients'")


def _bars(axis: Any, labels: list[str], values: list[float], color: str) -> None:
    bars = axis.barh(range(len(labels)), values, color=color, height=0.7)
    axis.bar_label(bars, [f"{value:.2f}" for value in values], padding=3, color=INK)
    axis.set_yticks(range(len(labels)), labels)
    axis.invert_yaxis()
    axis.axvline(1.0, color=MUTED, linewidth=0.8)
    axis.set_xlim(0, 1.15 * max(values, default=1.0))
    axis.grid(axis="x")


def write(folder: Path, checked: list[str], everything: dict[str, Measured]) -> None:
    """Write what has been measured so far."""
    folder.mkdir(parents=True, exist_ok=True)
    record = {
        "provenance": provenance.start(seed=0),
        "checks": checked,
        "workloads": {name: asdict(measured) for name, measured in everything.items()},
    }
    (folder / "optimizers.json").write_text(json.dumps(record, indent=2) + "\n")
    tables = [table(name, measured) for name, measured in everything.items()]
    (folder / "optimizers.md").write_text("\n\n".join(["\n".join(checked), *tables]) + "\n")
    chart(folder / "optimizers.png", everything)
