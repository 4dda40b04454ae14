"""Fresh processes that answer one request: a JSON line goes in, a JSON line comes out."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def answered(
    module: str, line: str, *, threads: int, limit: float, environment: Mapping[str, str]
) -> dict[str, Any]:
    """Have a fresh process answer; one that fails or takes longer than `limit` seconds is a refusal.

    Args:
        module: What it runs, by `python -m`.
        line: The request.
        threads: Of OpenMP and MKL.
        limit: Seconds.
        environment: Variables beside those of this process.
    """
    command, pipe = [sys.executable, "-m", module], subprocess.PIPE
    variables = {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        **environment,
    }
    # In a session of its own, so that a compiler's helpers can be ended with it.
    with subprocess.Popen(
        command,
        stdin=pipe,
        stdout=pipe,
        stderr=pipe,
        text=True,
        cwd=ROOT,
        env=variables,
        start_new_session=True,
    ) as process:
        try:
            out, err = process.communicate(line + "\n", timeout=limit)
        except subprocess.TimeoutExpired:
            return {"refused": f"took longer than {limit:g} s"}
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode != 0:
        return {"refused": f"failed: {(err.strip().splitlines() or ['without a word'])[-1]}"}
    return json.loads(out.splitlines()[-1])
