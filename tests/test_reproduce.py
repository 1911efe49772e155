# SPDX-License-Identifier: Apache-2.0
"""The commands that fill the papers' results: they parse, and name the rows that they fill."""

import itertools
import json
import shlex
import sys
import time

import numpy as np
import pytest
import run_binary
from absl.flags import FLAGS

import dpjax

SHAPES = {"mnist": (60_000, 28, 28, 1), "fashion_mnist": (60_000, 28, 28, 1)}
SHAPES |= {"cifar10": (50_000, 32, 32, 3)}
KINDS = ("paper", "rdp", "pld")
FOUND = {"deviation": 1.0, "core_seconds": 1.0, "ece": 0.01, "mce": 0.1, "nll": 0.1}
FOUND |= {"rdp": 1.0, "pld": 1.0, "data": "", "epsilons": 4 * [""]}
LOOK = {"accuracy": 0.9, "epsilon": 1.0, "step": 1, "norm": 1.0, "loss": 1.0}


def zeros(name, folder=None):
    """A data set's shapes, without its memory."""
    shape = SHAPES[name]
    parts = [
        (np.broadcast_to(np.float32(0), (n, *shape[1:])), np.zeros(n, int))
        for n in (shape[0], 10_000)
    ]
    return dpjax.data.Dataset(name, *parts, classes=10)


BINARIES = (
    "tramer2021_scatternet.py",
    "papernot2021_tempered_sigmoids.py",
    "an2021_noise_curricula.py",
    "losing_less2022_loss.py",
    "liu2021_grouped_clipping.py",
    "bu2023_calibration.py",
    "bu2023_algorithms.py",
)


@pytest.mark.parametrize("binary", BINARIES)
def test_commands_name_the_rows_that_they_fill(binary, monkeypatch, imported):
    """The binaries run, with data, training and epsilons left out."""
    listed = imported("common.paper_commands").COMMANDS
    assert {command.binary for command in listed} == set(BINARIES)
    commands = [command for command in listed if command.binary == binary]
    module, runs = imported(binary.removesuffix(".py")), imported("common.paper_runs")
    asked = []

    def of(self, row, seed, run):
        asked.append((row, seed))
        # No two alike, since figure 4 correlates them.
        return {**FOUND, "accuracy": 90 + len(asked) / 1000, "way": [LOOK] * 60}

    monkeypatch.setattr(dpjax.data, "load", zeros)
    monkeypatch.setattr(runs.Results, "of", of)
    monkeypatch.setattr(runs, "standardized", lambda dataset: dataset)
    # A line through points of figure 4 needs different ones.
    costs = map(float, itertools.count(1))
    monkeypatch.setattr(runs, "epsilons", lambda *_: dict.fromkeys(KINDS, next(costs)))
    if binary.startswith("an2021"):
        bins, plain = np.zeros(60_000, int), module.mechanism_of(1.38)
        monkeypatch.setattr(module.scorers, "difficulty", lambda _: np.arange(60_000))
        monkeypatch.setattr(module.scorers, "public", lambda _: bins)
        spent = plain.spent(plain.multipliers)
        monkeypatch.setattr(module.scorers, "private", lambda *_: (bins, spent))
    for command in commands:
        FLAGS.unparse_flags()
        for name in FLAGS.get_flags_for_module(module):
            name.unparse()
        asked.clear()
        FLAGS([binary, *shlex.split(command.flags), f"--seeds={command.seeds}"])
        module.main([binary])
        wanted = {(row, seed) for row in command.names() for seed in range(command.seeds)}
        assert set(asked) == wanted, command.flags


@pytest.mark.slow
def test_the_list_counts_what_is_missing(tmp_path):
    rows = {"cifar wavelets linear": {"0": {}, "2": {}}}
    (tmp_path / "tramer2021.json").write_text(json.dumps({"rows": rows}))
    asked = ["--list", "--only=tramer2021", "--results", tmp_path]
    lines = run_binary.run("reproduce.py", *asked).stdout.splitlines()
    begun = next(line for line in lines if "cifar wavelets linear" in line)
    assert begun.split(",")[0].split() == ["2", "of", "3", "done"]
    assert all(line.split()[0] == "0" for line in lines if line != begun)
    refused = run_binary.run("reproduce.py", "--only=nothing", status=1).stderr
    assert "--only=nothing: expected some of tramer2021" in refused


def test_missing_commands_run_side_by_side_and_a_failure_is_reported(imported, monkeypatch):
    """Known rows start no process, and two commands of one paper never run together."""
    module = imported("reproduce")
    one, known = module.Command("a", "--x", "row", 1, 1), module.Command("a", "--y", "known", 1, 1)
    two, bad = module.Command("a", "--z", "{u|v}", 1, 1), module.Command("b", "--bad", "w", 1, 1)
    begun, alive = [], []

    class Process:
        def __init__(self, command):
            self.command, self.polls = command, 3
            assert command.paper not in {other.command.paper for other in alive}
            begun.append(command)
            alive.append(self)

        def poll(self):
            self.polls -= 1
            if self.polls > 0:
                return None
            alive.remove(self)
            return self.returncode

        @property
        def returncode(self):
            return int(self.command is bad)

    monkeypatch.setattr(module, "COMMANDS", (one, known, two, bad))
    monkeypatch.setattr(module, "BINARIES", {"a": "a.py", "b": "b.py"})
    monkeypatch.setattr(module, "rows_of", lambda paper: {"known": {"0": {}}})
    monkeypatch.setattr(module, "started", lambda command, core, minutes: Process(command))
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    FLAGS(["reproduce.py", "--processes=2"])
    with pytest.raises(SystemExit, match="1 commands failed, whose output is above: b --bad"):
        module.main(["reproduce.py"])
    assert begun == [one, bad, two]
    begun.clear()
    FLAGS(["reproduce.py", "--processes=2", "--minutes=0"])
    module.main(["reproduce.py"])
    assert not begun, "no time, no command"


def test_a_command_keeps_its_results_and_its_time(imported, monkeypatch, tmp_path):
    module = imported("reproduce")
    FLAGS(["reproduce.py", "--results", str(tmp_path), "--checkpoints=kept"])
    monkeypatch.setattr(module.subprocess, "Popen", lambda words: words)
    monkeypatch.delattr(module.os, "sched_setaffinity", raising=False)
    command = module.Command("tramer2021", "--rows='two words'", "row", 1, 2)
    python, binary, *words = module.started(command, 0, 1.5)
    assert (python, binary.endswith("tramer2021_scatternet.py")) == (sys.executable, True)
    out = f"--out={tmp_path / 'tramer2021.json'}"
    limits = ["--seeds=2", out, "--runs=kept", "--minutes=1.50", "--cache_dir=kept/features"]
    assert words == ["--rows=two words", *limits]


def test_no_run_starts_after_its_time(imported, tmp_path):
    runs = imported("common.paper_runs")
    results = runs.Results(tmp_path / "results.json")
    FLAGS(["paper", "--minutes=10"])
    assert results.of("a", 0, lambda *_: {"accuracy": 1.0})["accuracy"] == 1
    FLAGS(["paper", "--minutes=0"])
    assert results.of("a", 0, lambda *_: pytest.fail("it is known"))["accuracy"] == 1
    with pytest.raises(SystemExit) as ended:
        results.of("a", 1, lambda *_: pytest.fail("too late"))
    assert ended.value.code == 0
