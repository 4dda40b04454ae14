"""Hydra programs around metagrad: training, evaluation, plots, comparison. The algorithms are in `metagrad`."""

import sys
from importlib.util import find_spec

if sys.argv[:1] == ["-m"] and find_spec("hydra") is None:  # as `python -m experiments.PROGRAM` sets it
    sys.exit(
        "The programs need Hydra, Matplotlib and others. Run pip install 'metagrad[experiments]', or in a checkout "
        "pip install -e '.[experiments]'."
    )
