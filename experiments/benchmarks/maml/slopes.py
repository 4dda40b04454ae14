"""What an inner step adds to the peak memory, for every mode, against the bytes of the state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from experiments.benchmarks.maml.runner import Ask
from experiments.benchmarks.maml.worker import Request

WORKLOAD = "memory"
STEPS = (1, 2, 5, 10, 20, 50)
FAR = 200
FAR_METHODS = ('metagrad, "sqrt"', 'metagrad, "budget"')
METHODS = (
    "textbook loop",
    *(f'metagrad, "{memory}"' for memory in ("full", "step", "sqrt", "budget")),
    *(f'metagrad, "{memory}", compiled' for memory in ("full", "step")),
    "JAX jit",
    "JAX jit, checkpoint",
)
MIB = 2**20


@dataclass
class Growth:
    """Peaks of one method by the number of steps.

    Attributes:
        peaks: Bytes, by number of steps.
        state_bytes: Of the adapted parameters.
        note: Why there are no more.
    """

    peaks: dict[int, int]
    state_bytes: int = 0
    note: str = ""

    @property
    def slope(self) -> float:
        """Bytes that a step adds to the peak: the line through all numbers of steps up to the workload's."""
        near = [steps for steps in self.peaks if steps < FAR]
        return float(np.polyfit(near, [self.peaks[steps] for steps in near], 1)[0])


def grow(ask: Ask, method: str, steps: Sequence[int]) -> Growth:
    """Weigh a method, each number of steps in a process of its own."""
    growth = Growth({})
    for count in steps:
        answer = ask(Request(WORKLOAD, method, steps=count, weigh=True))
        if "refused" in answer:
            growth.note = f"{count} steps: {answer['refused']}"
            break
        growth.peaks[count] = answer["peak"]
        growth.state_bytes = answer["state_bytes"]
    return growth


def grow_all(ask: Ask, methods: Sequence[str] = METHODS) -> dict[str, Growth]:
    """Weigh all methods, and those that are made for long loops on a long one as well."""
    return {method: grow(ask, method, steps_of(method)) for method in methods}


def steps_of(method: str) -> list[int]:
    """Return the numbers of steps on which a method is weighed."""
    return [*STEPS, FAR] if method in FAR_METHODS else [*STEPS]


def table(about: str, found: dict[str, Growth]) -> str:
    """Format peaks, and slopes in units of the state."""
    columns = [*STEPS, FAR]
    head = "".join(f"{f'{count} steps':>10}" for count in columns)
    lines = [
        f"{WORKLOAD}: peak MiB of {about}, and of fewer or more",
        f"{'':30}{head}{'MiB a step':>13}{'of a state':>12}",
    ]
    for method, growth in found.items():
        cells = "".join(f"{_mib(growth.peaks.get(count)):>10}" for count in columns)
        slope = ""
        if len(growth.peaks) > 1:
            slope = f"{growth.slope / MIB:13.2f}{growth.slope / growth.state_bytes:11.2f}x"
        lines.append(f"{method:30}{cells}{slope}   {growth.note}".rstrip())
    return "\n".join(lines)


def _mib(nbytes: int | None) -> str:
    return "" if nbytes is None else f"{nbytes / MIB:.1f}"
