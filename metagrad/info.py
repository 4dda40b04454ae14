"""Versions, devices, threads, environment and optional packages for a bug report: ``python -m metagrad.info``."""

from __future__ import annotations

import os
import platform
import shutil
import warnings
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import torch

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

TESTED = (2, 13)
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


if __name__ == "__main__":
    print(collect())
    if _is_newer(torch.__version__):
        tested = ".".join(map(str, TESTED))
        warnings.warn(
            f"metagrad was tested with torch {tested} and older, not with {torch.__version__}.", stacklevel=1
        )
