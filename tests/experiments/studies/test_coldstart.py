"""Cold start: the meta-gradient against a naive loop, least squares, separate students, and resumed runs."""

import json

import numpy as np
import pytest
import torch

from experiments.studies import coldstart
from metagrad.sparse import RowSparse
from metagrad.tasks import Examples
from tests.marks import fast

LECTURERS, STUDENTS = 30, 50


@pytest.fixture
def ratings():
    """Return ratings that are biases of students and lecturers, and noise."""
    generator = np.random.default_rng(0)
    student = np.repeat(np.arange(STUDENTS), 14)
    lecturer = np.concatenate([generator.permutation(LECTURERS)[:14] for _ in range(STUDENTS)])
    columns = {name: generator.integers(1, 6, len(student)) for name in coldstart.TRAITS}
    biases = generator.normal(size=STUDENTS)[student] + generator.normal(size=LECTURERS)[lecturer]
    score = np.clip(np.round(3 + 0.5 * biases + 0.3 * generator.normal(size=len(student))), 1, 5).astype(
        np.int64
    )
    columns |= {"student": student, "lecturer": lecturer, "service": lecturer % 2, "score": score}
    return coldstart.split(columns, seed=0)


@pytest.mark.parametrize("name", fast(["anil"], ["maml", "anil", "cavia"]))
def test_the_meta_gradient_is_that_of_a_naive_loop_on_whole_tables(ratings, name):
    batch = ratings.tasks("train", 4, 3).sample(3, generator=torch.Generator().manual_seed(0))
    batch = batch.to(dtype=torch.float64)
    torch.manual_seed(0)
    model = coldstart.Recommender(ratings.sizes, width=2, hidden=3, context=2, mean=3.0).double()
    torch.nn.init.normal_(model.head.weight)
    maml = coldstart.learner(name, model, steps=2, lr=0.25)
    maml(batch).loss.backward()
    params, part = dict(model.named_parameters()), {"maml": "", "anil": "head.", "cavia": "context"}[name]
    start = {key: p.detach().clone().requires_grad_() for key, p in params.items()}
    losses = []
    for task in range(3):
        (xs, ys), (xq, yq) = (({key: v[task] for key, v in x.items()}, y[task]) for x, y in batch)
        own = {key: p.clone() for key, p in start.items()}
        for _ in range(2):
            loss = coldstart.loss_fn(torch.func.functional_call(model, own, (), xs), ys)
            adapted = [key for key in own if key.startswith(part)]
            grads = torch.autograd.grad(loss, [own[key] for key in adapted], create_graph=True)
            own |= {key: own[key] - 0.25 * g for key, g in zip(adapted, grads, strict=True)}
        losses.append(coldstart.loss_fn(torch.func.functional_call(model, own, (), xq), yq))
    expected = dict(zip(start, torch.autograd.grad(sum(losses) / 3, list(start.values())), strict=True))
    assert all(isinstance(params[table].grad, RowSparse) for table in coldstart.TABLES)
    for key in set(params) - {"context"} if name == "cavia" else params:
        found = params[key].grad
        found = found.to_dense() if key in coldstart.TABLES else found
        torch.testing.assert_close(found, expected[key], rtol=1e-9, atol=1e-12)


def test_biases_of_a_new_student_are_least_squares(ratings):
    known = ratings.of("train")
    found = coldstart.fit_biases(known, ratings.sizes["lecturer"], (3.0, 1.0), sweeps=50)
    batch = ratings.tasks("test", 4, 3).sample(5, generator=torch.Generator().manual_seed(0))
    offsets = found.mean + found.lecturers[batch.support.x["lecturer"]]
    bias = (batch.support.y[..., 0] - offsets).sum(1) / (4 + 3.0)
    expected = found.mean + found.lecturers[batch.query.x["lecturer"]] + bias[:, None]
    torch.testing.assert_close(found(batch.support, batch.query.x), expected[..., None])
    errors_of = coldstart.errors(found, batch, [0, 4])
    assert errors_of[4] < errors_of[0]
    student = known["student"].unique(return_inverse=True)[1]
    residual = known["score"] - found.mean - found.lecturers[known["lecturer"]]
    counts = student.bincount()
    own = torch.zeros(len(counts)).index_add(0, student, residual) / (counts + 3.0)
    residual = known["score"] - found.mean - own[student]
    sums = torch.zeros(len(found.lecturers)).index_add(0, known["lecturer"], residual)
    normal = sums / (known["lecturer"].bincount(minlength=len(sums)) + 1.0)
    torch.testing.assert_close(found.lecturers, normal, rtol=1e-4, atol=1e-5)


def test_no_student_is_in_two_parts(ratings):
    parts = [set(ratings.of(part)["student"].tolist()) for part in ratings.students]
    assert [len(part) for part in parts] == [32, 8, 10]
    assert len(set.union(*parts)) == STUDENTS
    x = ratings.of("train")
    assert all(int(x[name].max()) < ratings.sizes["traits"] for name in coldstart.TRAITS)
    assert torch.equal(x["course"], 2 * x["lecturer"] + x["service"])


def test_without_ratings_nobody_is_adapted(ratings):
    batch = ratings.tasks("test", 4, 3).sample(2, generator=torch.Generator().manual_seed(0))
    model = coldstart.Recommender(ratings.sizes, width=2, hidden=3, context=2, mean=3.0)
    maml = coldstart.learner("maml", model, steps=2, lr=0.3)
    none = Examples({name: batch.support.x[name][:, :0] for name in coldstart.INPUTS}, batch.support.y[:, :0])
    torch.testing.assert_close(coldstart.predict(maml, none, batch.query.x), model(**batch.query.x))
    assert not torch.equal(coldstart.predict(maml, batch.support, batch.query.x), model(**batch.query.x))


@pytest.mark.slow
def test_the_program_writes_page_and_figure(ratings, configured, tmp_path, monkeypatch):
    monkeypatch.setattr(coldstart, "load", lambda seed: ratings)
    small = configured(coldstart.study, "preset=small", "shots=[0,1,5]", "sizes=[1000]", "dense_sizes=[100]")
    text = coldstart.study.run(small, tmp_path)
    results = json.loads((tmp_path / "results.json").read_text())
    assert [one["cell"] for one in results][:4] == ["biases", "maml", "anil", "cavia"]
    assert all(0.1 < error < 2 for one in results[:4] for error in one["errors"])
    assert "| MAML, all parameters adapt |" in text
    assert "| CAVIA, dense tables | 100 |" in text
    assert (tmp_path / "coldstart.png").stat().st_size > 0


@pytest.mark.slow
def test_a_meta_step_takes_the_same_memory_at_any_number_of_rows(configured):
    small = configured(coldstart.study, "preset=small")
    work = type("Work", (), {"seed": 0})
    peaks = [coldstart.meta_step(small, "maml", rows, True, work)["peak_mib"] for rows in (20_000, 200_000)]
    assert peaks[1] < 1.05 * peaks[0]
