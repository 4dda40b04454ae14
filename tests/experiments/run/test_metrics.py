from experiments.run.metrics import JsonLines, read_rows, series


def test_floats_survive_to_the_last_bit(tmp_path):
    values = [0.1 + 0.2, 1 / 3, 5e-324, 1.7976931348623157e308]
    file = JsonLines(tmp_path / "m.jsonl")
    for step, value in enumerate(values, start=1):
        file.write(step, {"train/query_loss": value})
    assert series(read_rows(tmp_path / "m.jsonl"), "train/query_loss") == ([1, 2, 3, 4], values)
    file.close()


def test_a_resumed_file_keeps_the_rows_up_to_its_step(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1, "a": 1.0}\n{"step": 2, "a": 2.0}\n{"step": 3, "a": 3.0}\n{"step": 4, "a"')
    JsonLines(path, until=2).close()
    assert path.read_text() == '{"step": 1, "a": 1.0}\n{"step": 2, "a": 2.0}\n'


def test_a_fresh_file_drops_what_was_there(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1, "a": 1.0}\n')
    JsonLines(path).close()
    assert path.read_text() == ""


def test_a_missing_file_has_no_rows(tmp_path):
    assert read_rows(tmp_path / "none.jsonl") == []
