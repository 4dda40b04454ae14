"""Versions, tools, interpreters and addresses agree in all files of the project."""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path

import yaml

import metagrad
import metagrad.info
from docs._hooks.addresses import PLACEHOLDER, address, placeholders

ROOT = Path(__file__).resolve().parents[1]


def read(name: str) -> str:
    return (ROOT / name).read_text()


def project(key: str) -> str:
    """Return a value of pyproject.toml. The standard library reads TOML only from Python 3.11 on."""
    found = re.search(rf'^{key} = "(.*)"$', read("pyproject.toml"), re.MULTILINE)
    assert found, key
    return found[1]


def tool(command: str) -> str:
    """Return a tool and its subcommand, without options."""
    return " ".join(word for word in Path(command).name.split() if word[0].isalpha())


def test_hooks_are_what_make_lint_runs_by_the_versions_of_constraints():
    lint = re.search(r"^lint:.*\n((?:\t.*\n)+)", read("Makefile"), re.MULTILINE)
    assert lint
    expected = {tool(line.strip().removesuffix(" .")) for line in lint[1].splitlines()}
    hooks = [
        hook for repo in yaml.safe_load(read(".pre-commit-config.yaml"))["repos"] for hook in repo["hooks"]
    ]
    assert {tool(hook["entry"]) for hook in hooks} == expected
    for hook in hooks:
        assert hook["language"] == "system"
        assert hook["entry"].startswith(".venv/bin/")
    for name in {name.split()[0] for name in expected}:
        assert re.search(rf"^{name}==", read("constraints.txt"), re.MULTILINE), name


def test_the_workflow_runs_ci_on_every_python_that_is_supported():
    (job,) = yaml.safe_load(read(".github/workflows/ci.yml"))["jobs"].values()
    least, past = (int(minor) for minor in re.findall(r"3\.(\d+)", project("requires-python")))
    assert job["strategy"]["matrix"]["python"] == [f"3.{minor}" for minor in range(least, past)]
    assert [step["run"] for step in job["steps"] if "run" in step] == [".ci/run"]


def test_a_release_is_tried_on_every_python_before_it_is_published():
    ci, release = (
        yaml.safe_load(read(f".github/workflows/{name}.yml"))["jobs"] for name in ("ci", "release")
    )
    assert release["try"]["strategy"]["matrix"] == ci["ci"]["strategy"]["matrix"]
    assert release["publish"]["needs"] == "try"
    assert release["try"]["needs"] == "build"


def test_one_version_everywhere():
    citation = yaml.safe_load(read("CITATION.cff"))
    assert {"authors", "cff-version", "message", "title"} <= set(citation)
    assert citation["version"] == metagrad.__version__
    assert project("path") == "metagrad/__init__.py"  # where the build reads the version
    assert not re.search(r"^version = ", read("pyproject.toml"), re.MULTILINE)
    assert citation["license"] == project("license")
    assert f"## {metagrad.__version__} - " in read("CHANGELOG.md")


def test_addresses_agree_and_a_release_needs_them():
    citation = yaml.safe_load(read("CITATION.cff"))
    assert citation["repository-code"] == address("Repository")
    assert read("README.md").count(address("Repository")) > 2
    assert address("Documentation") in read("README.md")
    assert "python docs/_hooks/addresses.py" in read(".github/workflows/release.yml")
    if PLACEHOLDER in address("Repository"):
        assert {"pyproject.toml", "README.md"} <= {place.partition(":")[0] for place in placeholders()}


def strict_patterns():
    listed = re.search(r"^strict = \[(.*?)^\]", read("pyproject.toml"), re.MULTILINE | re.DOTALL)
    return re.findall(r'"(.*)"', listed[1])


def test_modules_that_define_public_names_are_under_strict_types():
    rooms = [room for name in metagrad.__all__ if inspect.ismodule(room := getattr(metagrad, name))]
    public = [getattr(room, name) for room in rooms for name in room.__all__]
    homes = {value.__module__ for value in public if inspect.isclass(value) or inspect.isfunction(value)}
    files = {sys.modules[home].__file__ for home in homes | {"metagrad.info"} if home.startswith("metagrad.")}
    strict = {str(file) for pattern in strict_patterns() for file in ROOT.glob(pattern)}
    assert not files - strict


def test_modules_under_strict_types_have_no_line_that_is_left_out():
    patterns = strict_patterns()
    unmatched = [pattern for pattern in patterns if not [*ROOT.glob(pattern)]]
    ignored = [
        f"{file.relative_to(ROOT)}: {line}"
        for pattern in patterns
        for file in ROOT.glob(pattern)
        for line in file.read_text().splitlines()
        if re.search(r"#.*(type: ignore|pyright:)", line)
    ]
    assert (unmatched, ignored) == ([], [])
