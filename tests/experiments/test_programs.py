"""The programs as the user starts them: exit codes, messages, logs."""

import re

import pytest

from tests.marks import slow

ERRORS = [
    (["seed=abc"], "seed: Value 'abc' of type 'str' could not be converted to Integer"),
    slow(
        ["hydra.run.dir=/dev/null/run"],
        "/dev/null/run is a file or lies below a file; choose another hydra.run.dir",
    ),
]


@pytest.mark.parametrize(("arguments", "message"), ERRORS)
def test_bad_input_is_one_clear_line_and_a_failure(program, tmp_path, arguments, message):
    code, _, err = program("train", *arguments, cwd=tmp_path)
    assert code != 0
    assert any(line.startswith(message) for line in err.splitlines())
    assert "Traceback" not in err


def test_a_loss_that_is_not_finite_fails_and_is_logged(program, tmp_path):
    arguments = [
        "debug=fast",
        "logger=none",
        "algorithm.inner.lr=1e30",
        "evaluate.steps=0",
        "hydra.run.dir=run",
    ]
    code, _, err = program("train", *arguments, cwd=tmp_path)
    assert code != 0
    assert "Iteration 0: MAML: the loss of task" in err
    log = (tmp_path / "run" / "train.log").read_text()
    assert re.search(r"Iteration 0: MAML: the loss of task \d+ is .* at inner step \d", log)
    assert "Traceback" in log
    assert "Traceback" not in err
    assert (tmp_path / "run" / "failure.txt").read_text().startswith("Iteration 0: MAML: the loss of task")
