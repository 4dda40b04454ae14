"""The programs as the user starts them: exit codes, messages, logs."""

from __future__ import annotations

import pytest

from tests.marks import slow

ERRORS = [
    (["seed=abc"], "seed: Value 'abc' of type 'str' could not be converted to Integer"),
    slow(["task.foo=1"], "There is no key task.foo; the keys there are shots, "),
    slow(["resume=nothing.pt"], "resume: there is no checkpoint nothing.pt."),
    slow(["resume=."], "resume: . is not a run folder: it has no .hydra/overrides.yaml."),
    slow(
        ["model.sizes=[2,4,1]", "logger=none"],
        "train: the model and the tasks do not fit: on inputs [10, 1] ",
    ),
    slow(["hydra.run.dir=/dev/null/run"], "Not a directory: /dev/null/run"),
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
    assert "Iteration 0: MAML: the loss of task" in log
    assert "Traceback" in log
    assert "Traceback" not in err
    assert (tmp_path / "run" / "failure.txt").read_text().startswith("Iteration 0: MAML: the loss of task")


@pytest.mark.slow
def test_compare_refuses_other_folders(program, tmp_path):
    code, _, err = program("compare", ".", cwd=tmp_path)
    assert code != 0
    assert err.startswith("compare: . is neither a sweep nor a run folder")
    assert "Traceback" not in err
