# SPDX-License-Identifier: Apache-2.0
"""The console command: its overview, its version, its subcommands and what it refuses."""

import importlib
import pathlib
import subprocess
import sys
import tomllib

import pytest
from absl import flags

from dpjax import cli

ROOT = pathlib.Path(__file__).parent.parent


def python(*words):
    done = subprocess.run([sys.executable, *words], check=True, capture_output=True, text=True)
    return done.stdout


def test_the_overview_lists_every_subcommand(capsys):
    for words in ([], ["--help"]):
        cli.main(words)
        listed = capsys.readouterr().out
        assert "usage: dpjax SUBCOMMAND" in listed
        for name, purpose in cli.COMMANDS.items():
            assert f"{name} " in listed
            assert purpose in listed


def test_the_help_of_a_subcommand_lists_its_flags(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", sys.argv)
    cli.main(["train", "--help"])
    listed = capsys.readouterr().out
    for words in ("dpjax train --out=runs/demo", "--target_epsilon:", "--[no]report:"):
        assert words in listed


def test_an_unknown_subcommand_is_refused_with_those_there_are():
    with pytest.raises(SystemExit, match=r"dpjax trian: .* Expected one of train"):
        cli.main(["trian"])


@pytest.mark.slow
def test_flags_of_a_subcommand_are_its_own():
    """No other program finds the flags of `dpjax train` among its own, whatever it imports."""
    known = python("-c", "import dpjax.cli.train; from absl import flags; print([*flags.FLAGS])")
    assert "target_epsilon" not in known
    assert isinstance(importlib.import_module("dpjax.cli.train").FLAGS, flags.FlagValues)


def test_the_console_script_and_the_module_are_the_command():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"dpjax": "dpjax.cli:main"}
    assert python("-m", "dpjax", "--version") == f"dpjax {project['version']}\n"


def test_what_another_subcommand_needs_is_not_imported():
    words = "import sys, dpjax.cli; print([m for m in sys.modules if m in ('jax', 'dpjax.data')])"
    assert python("-c", words) == "[]\n"
