# SPDX-License-Identifier: Apache-2.0
"""Committed results of the experiments over Flower, and one audit of each strategy."""

import json
import pathlib

import pytest
from experiments import flower_accuracy, flower_audit

RESULTS = pathlib.Path(__file__).parents[1] / "experiments" / "results"
STOCK, OURS = flower_audit.ROWS


def rows_of(name):
    return json.loads((RESULTS / f"{name}.json").read_text())["rows"]


def test_the_audit_refutes_the_stock_strategy_and_never_ours():
    rows = rows_of("flower_audit")
    assert [len(rows[name]) for name in (STOCK, OURS)] == [flower_audit.TRIES] * 2
    for audit in rows[STOCK].values():
        assert audit["refutes"]
        assert audit["lower"] > audit["claimed"] > 4.37
    assert not any(audit["refutes"] for audit in rows[OURS].values())
    assert "20 of 20" in flower_audit.tables(rows)["flower audit"]


def test_paths_have_equal_trials_and_three_seeds():
    table = flower_accuracy.tables(rows_of("flower_accuracy"))["flower accuracy"]
    lines = [line for line in table.splitlines() if "seeds" in line]
    assert len(lines) == len(flower_accuracy.PATHS)
    for line in lines:
        assert "3 seeds" in line
        assert line.endswith("| 10 |")


@pytest.mark.thorough
@pytest.mark.parametrize("name", flower_audit.ROWS)
def test_one_audit(name):
    pytest.importorskip("flwr")
    found = flower_audit.measured(name, 0)
    assert found["refutes"] == (name == STOCK)
