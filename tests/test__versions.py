# SPDX-License-Identifier: Apache-2.0
"""Versions of packages, and of none."""

import json
from importlib import metadata

import dpjax
from dpjax import cli
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
