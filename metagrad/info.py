"""Versions, devices, threads, environment and optional packages for a bug report: ``python -m metagrad.info``.

``python -m metagrad.info --probes`` tests whether the installed torch has the faults that metagrad knows.
"""

from __future__ import annotations

import os
import platform
import shutil
import signal
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from metagrad import __version__

OPTIONAL = {
    "scipy": "SparseTensor to and from SciPy",
    "pillow": "mg.tasks.ImageFolders",
    "hydra-core": "experiments",
    "wandb": "experiments, logger=wandb",
    "matplotlib": "experiments, plots",
    "tqdm": "experiments, progress bars",
    "markdown": "experiments, gallery",
    "torchvision": "data sets for mg.tasks.FewShot",
    "triton": "compile=True on a GPU",
}
"""Optional distributions, each with the feature that needs it."""

PREFIXES = ("OMP_", "MKL_", "OPENBLAS_", "KMP_", "MALLOC_", "PYTORCH_", "TORCH_", "CUDA_VISIBLE", "CUBLAS_")
"""Prefixes of environment variables that change speed, numbers or memory.

``LD_PRELOAD``, ``ATEN_CPU_CAPABILITY`` and ``CXX`` are also reported.
"""

_COMPILER = "C++ compiler"

TESTED = (2, 15)
"""Newest minor version of torch that the tests have covered."""


@dataclass(frozen=True)
class Info:
    """Result of :func:`collect`. ``python -m metagrad.info`` prints its ``str``."""

    versions: dict[str, str]
    platform: str
    cpu: str
    threads: dict[str, int]
    devices: list[str]
    environment: dict[str, str]
    optional: dict[str, str | None]

    def __str__(self) -> str:
        rows = {
            **self.versions,
            "platform": self.platform,
            "CPU": self.cpu,
            "threads": ", ".join(f"{number} {kind}" for kind, number in self.threads.items()),
            "devices": ", ".join(self.devices) or "no GPU",
            "environment": " ".join(f"{name}={value}" for name, value in self.environment.items()) or "-",
            **{name: found or f"missing ({_needed_by(name)})" for name, found in self.optional.items()},
        }
        width = max(map(len, rows))
        return "\n".join(f"{name:{width}}  {value}" for name, value in rows.items())


def collect() -> Info:
    """Collect the facts that a bug report needs. Nothing is imported, allocated or sent.

    Returns:
        An :class:`Info`, whose ``str`` is a table. The table lists

        - the versions of metagrad, Python, torch and NumPy,
        - the vector width of torch's CPU kernels, the number of threads, and the GPUs,
        - environment variables that change speed, numbers or memory,
        - the installed and the missing optional packages.

    Example:
        >>> import metagrad.info
        >>> info = metagrad.info.collect()
        >>> info.versions["metagrad"] == metagrad.__version__, info.threads["of torch"] >= 1
        (True, True)
    """
    return Info(
        versions={
            "metagrad": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": version("numpy"),
        },
        platform=platform.platform(),
        cpu=f"{platform.processor() or platform.machine()}, {torch.backends.cpu.get_cpu_capability()}",
        threads={
            "cores": os.cpu_count() or 1,
            "of torch": torch.get_num_threads(),
            "between operations": torch.get_num_interop_threads(),
        },
        devices=_devices(),
        environment={name: value for name, value in sorted(os.environ.items()) if _matters(name)},
        optional={**{name: _version(name) for name in OPTIONAL}, _COMPILER: _compiler()},
    )


def _devices() -> list[str]:
    cuda = [
        f"{torch.cuda.get_device_name(index)} (CUDA {torch.version.cuda})"
        for index in range(torch.cuda.device_count())
    ]
    return [*cuda, "MPS"] if torch.backends.mps.is_available() else cuda


def _matters(variable: str) -> bool:
    return variable.startswith(PREFIXES) or variable in {"LD_PRELOAD", "ATEN_CPU_CAPABILITY", "CXX"}


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _compiler() -> str | None:
    """Return the path of the C++ compiler that torch.compile uses on a CPU, or None."""
    return shutil.which(os.environ.get("CXX", "")) or shutil.which("g++") or shutil.which("clang++")


def _needed_by(name: str) -> str:
    return OPTIONAL.get(name, "compile=True on a CPU")


def _is_newer(torch_version: str) -> bool:
    return tuple(int(part) for part in torch_version.split(".")[:2]) > TESTED


class Fault(NamedTuple):
    """A fault of torch.

    Attributes:
        name: Description of the wrong computation.
        workaround: Description of what the library does instead.
        is_there: Function that returns whether the installed torch has the fault.
        is_compiled: True if the probe compiles a kernel, which takes up to a minute.
    """

    name: str
    workaround: str
    is_there: Callable[[], bool]
    is_compiled: bool = False


def _compiled_alpha() -> bool:
    w, a, b = torch.ones(6, 3), torch.ones(6, 4), torch.ones(4, 3)

    def scaled(w: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return torch.add(w, a @ b, alpha=-0.1)

    untyped: Any = torch
    compiled = untyped.compile(scaled, fullgraph=True)
    return not torch.allclose(compiled(w, a, b), w - 0.1 * (a @ b), rtol=1e-3)


def _third_derivative_of_layer_norm() -> bool:
    def second(x: Tensor) -> Tensor:
        (first,) = torch.autograd.grad(F.layer_norm(x, (3,)).sin().sum(), x, create_graph=True)
        return torch.autograd.grad(first.sin().sum(), x, create_graph=True)[0]

    x = torch.tensor([0.3, 1.0, -0.5], dtype=torch.float64, requires_grad=True)
    step = torch.tensor([1e-4, 0.0, 0.0], dtype=torch.float64)
    difference = (second(x + step) - second(x - step))[0] / 2e-4
    (third,) = torch.autograd.grad(second(x)[0], x)
    return not torch.allclose(third[0], difference, rtol=1e-2)


def _functional_call_of_a_module_that_occurs_twice() -> bool:
    layer = nn.Linear(1, 1)
    model = nn.Sequential(layer, layer)
    other = {name: p.detach() for name, p in model.named_parameters()}
    functional_call(model, other, (torch.ones(1, 1),))
    return not isinstance(layer.weight, nn.Parameter)


FAULTS = (
    Fault(
        "torch.compile of torch.add(w, a @ b, alpha=...) ignores alpha on a CPU",
        "formulas of functional optimizers are written as w + c * d",
        _compiled_alpha,
        is_compiled=True,
    ),
    Fault(
        "third derivatives of F.layer_norm, F.batch_norm and F.instance_norm are wrong",
        "mg.models.composite_norms writes them out, and lint reports them",
        _third_derivative_of_layer_norm,
    ),
    Fault(
        "functional_call leaves its tensors in a module that occurs twice in a model",
        "the library substitutes parameters itself",
        _functional_call_of_a_module_that_occurs_twice,
    ),
)


def probed() -> str:
    """Return a text with the known faults of torch, whether each fault is present, and the workaround."""
    lines: list[str] = []
    for fault in FAULTS:
        lines += [f"{'present' if fault.is_there() else 'gone':8} {fault.name}", f"{'':8} {fault.workaround}"]
    return "\n".join(lines)


if __name__ == "__main__":
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `metagrad info | head` ends without a traceback
    print(probed() if sys.argv[1:] == ["--probes"] else collect())
    if _is_newer(torch.__version__):
        tested = ".".join(map(str, TESTED))
        warnings.warn(
            f"metagrad was tested with torch {tested} and older, not with {torch.__version__}.", stacklevel=1
        )
