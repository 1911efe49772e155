# SPDX-License-Identifier: Apache-2.0
"""Versions of packages, and of none."""

import hashlib
import json
from importlib import metadata

import dpjax
from dpjax import _versions, cli
from dpjax.cli.train import run_files


def test_a_run_from_sources_says_that_it_has_no_version(tmp_path, monkeypatch, capsys):
    def missing(package):
        raise metadata.PackageNotFoundError(package)

    monkeypatch.setattr(metadata, "version", missing)
    for name in ("run.json", "params.msgpack"):
        (tmp_path / name).touch()
    run_files.describe(tmp_path, {})
    versions = json.loads((tmp_path / "config.json").read_text())["versions"]
    assert versions["dpjax"] == dpjax.__version__ == "not installed: run from its sources"
    cli.main(["--version"])
    assert capsys.readouterr().out == f"dpjax {dpjax.__version__}\n"


def test_the_digest_of_the_sources_changes_with_each_name_and_byte(tmp_path, monkeypatch):
    monkeypatch.setattr(_versions, "__file__", str(tmp_path / "_versions.py"))
    digests = set()
    for files in ({"a": "1"}, {"a": "2"}, {"b": "1"}, {"a": "1", "b": ""}, {"a/b": "1"}):
        for old in tmp_path.rglob("*.py"):
            old.unlink()
        for name, content in files.items():
            path = tmp_path / f"{name}.py"
            path.parent.mkdir(exist_ok=True)
            path.write_text(content)
        digests.add(_versions.sources.__wrapped__())
    assert len(digests) == 5
    path.write_text("1")
    assert _versions.sources.__wrapped__() == hashlib.sha256(b"a/b.py 1\n1").hexdigest()
