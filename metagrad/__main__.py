"""The command of metagrad: facts for a bug report, and the programs of ``experiments``.

    metagrad info                        versions, devices, optional packages
    metagrad train experiment=demo       meta-training, with plots and checkpoints
    metagrad gallery                     all programs with small settings, on one page
    metagrad compare, table, watch       compares and watches runs
    metagrad studies.NAME, benchmarks.NAME, examples.NAME

``metagrad NAME --help`` lists the settings. All programs except ``info`` need the extra ``metagrad[experiments]``.
They write into the current folder. In a checkout, ``python -m experiments.NAME`` is the same program.
"""

from __future__ import annotations

import os
import runpy
import sys
from importlib.util import find_spec
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]
_INSTALLED = _ROOT / "metagrad_experiments"  # folder of `experiments` and `conf` in a wheel
HOME = str(_INSTALLED if _INSTALLED.is_dir() else _ROOT)


def main() -> None:
    """Run the program of the command line."""
    name, *arguments = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help"):
        print((__doc__ or "").replace("``", "`"), end="")
        return
    module = "metagrad.info" if name == "info" else f"experiments.{name}"
    sys.path.insert(0, HOME)
    os.environ["PYTHONPATH"] = os.pathsep.join([HOME, *filter(None, [os.environ.get("PYTHONPATH")])])
    sys.argv = ["-m", *arguments]  # as `python -m` sets it while it looks for a module
    if name.startswith("-") or not _exists(module):
        sys.exit(f"metagrad: there is no program {name!r}. `metagrad --help` lists the programs.")
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _exists(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # a parent package is missing
        return False


if __name__ == "__main__":
    main()
