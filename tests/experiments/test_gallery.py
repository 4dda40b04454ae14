"""The gallery runs programs once, and shows their output or the reason of their failure."""

import json
import signal
import time

import pytest
from hydra import compose, initialize_config_dir

from experiments.gallery import Gallery, Program, make
from experiments.run.config import converted
from experiments.run.help import CONF


@pytest.fixture
def gallery(tmp_path):
    programs = {
        "good": Program("A <good> one", ["platform", "terse"]),
        "bad": Program("Bad", ["json.tool", "none"]),
    }
    return Gallery(str(tmp_path), 1, [], programs)


def test_the_page_shows_what_was_made_and_what_failed(gallery, tmp_path):
    (tmp_path / "good").mkdir()
    (tmp_path / "good" / "good.md").write_text("# Found\n\n| a | b |\n| --- | --- |\n| 1 | 2 < 3 |\n")
    (tmp_path / "good" / "curve.png").write_bytes(b"")
    with pytest.raises(ValueError, match=r"gallery: bad failed; the page says why."):
        make(gallery)
    text = (tmp_path / "index.html").read_text()
    assert "<h2>A &lt;good&gt; one</h2><pre>python -m platform terse</pre>" in text
    assert "<td>2 &lt; 3</td>" in text
    assert '<img src="good/curve.png" alt="curve"' in text
    assert "No such file or directory: &#x27;none&#x27;" in text


def test_what_ended_well_is_not_run_again(gallery, tmp_path):
    gallery.only = ["good"]
    make(gallery)
    first = (tmp_path / "good" / "gallery.json").read_text()
    (tmp_path / "good" / "gallery.log").unlink()
    make(gallery)
    assert (tmp_path / "good" / "gallery.json").read_text() == first
    assert not (tmp_path / "good" / "gallery.log").exists()
    gallery.programs["good"].run = ["platform"]
    make(gallery)
    assert json.loads((tmp_path / "good" / "gallery.json").read_text())["command"] == "python -m platform"


def test_the_whole_message_of_a_failure_is_shown(gallery, tmp_path):
    gallery.programs["bad"].run = ["json.tool", "--indent=two"]
    with pytest.raises(ValueError, match="gallery: bad failed"):
        make(gallery)
    assert json.loads((tmp_path / "bad" / "gallery.json").read_text())["failure"].startswith("usage: ")


def test_missing_data_are_one_error_before_anything_starts(gallery, tmp_path, monkeypatch):
    monkeypatch.setenv("METAGRAD_DATA", str(tmp_path / "none"))
    for name, data in {"bad": "omniglot", "cora": "cora.npz", "more": "cora.npz"}.items():
        gallery.programs[name] = Program(name, ["platform"], data)
    missing = r"gallery: omniglot, cora.npz missing; run the other programs by only=\[good\]\."
    with pytest.raises(ValueError, match=missing + r"\nOmniglot: [^$]*cora.npz is missing"):
        make(gallery)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_no_child_outlives_the_gallery(start_program, tmp_path):
    process = start_program("gallery", "only=[train]", f"folder={tmp_path}", cwd=tmp_path)
    while not (tmp_path / "train" / "metrics.jsonl").exists() and process.poll() is None:
        time.sleep(0.1)
    process.terminate()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM, errors
    assert (tmp_path / "train" / "failure.txt").read_text().startswith("Interrupted by SIGTERM")


def test_an_unknown_program_is_an_error(gallery):
    gallery.only = ["other"]
    with pytest.raises(ValueError, match=r"gallery: there is no program other; there are good, bad."):
        make(gallery)


def test_every_program_with_a_small_setting_is_in_the_gallery():
    with initialize_config_dir(str(CONF), version_base="1.3"):
        programs = converted("gallery", compose("gallery")).programs
    assert {folder.name for folder in (CONF / "preset").iterdir() if folder.is_dir()} <= set(programs)
