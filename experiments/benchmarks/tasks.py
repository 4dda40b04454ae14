"""What drawing tasks costs beside learning from them: `python -m experiments.benchmarks.tasks [SOURCE ...]`.

5-way 1-shot tasks with 15 queries, of images of 28 x 28 pixels, and second-order MAML of one inner step on a Conv4 of
64 filters with an outer step of Adam. Sampling and meta-steps take turns, as in training: what is timed of a sampling
is until the batch is on the device, and worker processes load while the meta-step runs. `memory` is as many images
as of Omniglot in training, with rotations; `files` are 1000 PNG files of 105 x 105 pixels, which Pillow decodes and
scales when they are drawn, in as many processes as the name says.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

import metagrad as mg
from experiments.benchmarks.arguments import add_words
from experiments.run.progress import Progress
from metagrad.tasks import FewShot, ImageFolders

NUM_CLASSES, PER_CLASS = 4112, 20  # of Omniglot's 1028 training characters in four orientations
NUM_FOLDERS = 50


class Times(NamedTuple):
    """Seconds of each round."""

    sampling: list[float]
    steps: list[float]

    @property
    def share(self) -> float:
        """The time of sampling in that of meta-steps, the median over the rounds."""
        return statistics.median(a / b for a, b in zip(self.sampling, self.steps, strict=True))


@contextmanager
def in_memory(device: torch.device) -> Iterator[FewShot]:
    """Images in uint8, on the device."""
    images = torch.randint(256, (NUM_CLASSES * PER_CLASS, 1, 28, 28), dtype=torch.uint8)
    yield FewShot((images, torch.arange(NUM_CLASSES).repeat_interleave(PER_CLASS)), device=device)


@contextmanager
def of_files(device: torch.device, workers: int = 0) -> Iterator[FewShot]:
    """Files that are read for each task, here or in other processes."""
    from PIL import Image

    with tempfile.TemporaryDirectory(prefix="metagrad-bench-") as name:
        pixels = np.random.default_rng(0).integers(0, 2, (NUM_FOLDERS, PER_CLASS, 105, 105), dtype=np.uint8)
        for number, drawings in enumerate(255 * pixels):
            (folder := Path(name) / f"{number:03d}").mkdir()
            for k, drawing in enumerate(drawings):
                Image.fromarray(drawing).save(folder / f"{k}.png")
        yield FewShot(ImageFolders(name, size=28, mode="L"), workers=workers, device=device)


SOURCES: dict[str, Callable] = {
    "memory": in_memory,
    "files": of_files,
    "files-1": partial(of_files, workers=1),
    "files-2": partial(of_files, workers=2),
}
"""Where images are; the number is that of the worker processes."""


def measure(source: str, device: torch.device, *, num_tasks: int, hidden: int, rounds: int) -> Times:
    """Let sampling and meta-steps take turns, once before anything is timed."""
    generator = torch.Generator(device if source == "memory" else "cpu").manual_seed(0)
    maml = mg.MAML(
        mg.models.Conv4(5, hidden=hidden), F.cross_entropy, inner=mg.optim.rules.sgd(lr=0.4), steps=1
    )
    outer = torch.optim.Adam(maml.to(device).parameters(), lr=1e-3)
    times = Times([], [])
    with SOURCES[source](device) as tasks:
        for _ in Progress(range(rounds + 1), unit="round", leave=False):
            start = _now(device)
            batch = tasks.sample(num_tasks, generator=generator)
            drawn = _now(device)
            outer.zero_grad()
            maml(batch).loss.backward()
            outer.step()
            times.steps.append(_now(device) - drawn)
            times.sampling.append(drawn - start)
    return Times(times.sampling[1:], times.steps[1:])


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def line(source: str, times: Times) -> str:
    """Format the medians, and what sampling takes of a meta-step."""
    sampling, step = (1000 * statistics.median(part) for part in times)
    return f"{source:12}{sampling:14.2f}{step:14.1f}{100 * times.share:13.2f} %"


def main() -> None:
    """Measure the sources named on the command line, by default all."""
    parser = argparse.ArgumentParser(description="Time the drawing of few-shot tasks beside meta-steps.")
    add = parser.add_argument
    add_words(parser, "sources", SOURCES)
    add("--tasks", type=int, default=32, help="of a batch (32)")
    add("--hidden", type=int, default=64, help="filters of the Conv4 (64)")
    add("--rounds", type=int, default=5, help="how many are timed (5)")
    add("--threads", type=int, default=torch.get_num_threads(), help="of the meta-step (as torch takes)")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cuda if there is one")
    arguments = parser.parse_args()
    if min(arguments.tasks, arguments.hidden, arguments.rounds, arguments.threads) < 1:
        parser.error("expected positive numbers")
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    settings = {"num_tasks": arguments.tasks, "hidden": arguments.hidden, "rounds": arguments.rounds}
    print(f"{'':12}{'sampling, ms':>14}{'meta-step, ms':>14}{'of a step':>15}")
    for source in arguments.sources:
        print(line(source, measure(source, torch.device(arguments.device), **settings)), flush=True)


if __name__ == "__main__":
    main()
