# SPDX-License-Identifier: Apache-2.0
"""Real clients: how far one can move the sum by its reply, and what a killed server repeats."""

import json
import logging
import pathlib
import re
import subprocess
import sys

import jax
import numpy as np
import optax
import pytest
from mutation import kills

import dpjax
from dpjax import clipping, federated, ledger, sampling
from dpjax.federated._remote import check_remote, remote_rounds, run_rounds
from dpjax.training.run_folder import released_steps

MODEL = {"a": np.zeros(3, np.float32), "b": np.zeros((2, 2), np.float32)}


def mechanism(**facts):
    usual = {"sampling": sampling.full(4), "clipping": clipping.flat(0.5), "steps": 6}
    return dpjax.Mechanism(**{**usual, "noise_multiplier": 0.0, "unit": "client", **facts})


def rounds(exchange, plan=None, weights=(1, 1, 1, 1), budget=None):
    held = federated.Weights(values=list(weights))
    name = {"algorithm": "test"}
    return remote_rounds(
        "test", optax.sgd(4.0), plan or mechanism(), held, exchange, MODEL, name, budget
    )


def moved_by(number):
    return jax.tree.map(lambda x: x + np.float32(number), MODEL)


HONEST = [moved_by(number) for number in (0.1, -0.2, 9.0, 1.0)]
REPLIES = {
    "silent": [],
    "twice": [moved_by(30.0), moved_by(30.0)],
    "huge": [moved_by(1e15)],
    "beyond float32": [moved_by(1e30)],
    "infinite": [moved_by(np.inf)],
    "NaN": [{**MODEL, "a": np.full(3, np.nan)}],
    "a shape": [{**MODEL, "a": np.ones(4, np.float32)}],
    "a name": [{"a": MODEL["a"]}],
    "no numbers": [{**MODEL, "a": np.array(["a"] * 3)}],
    "wide": [{**MODEL, "a": np.full(3, 1e300)}],
    "garbage": [None],
}
ZERO = {name for name in REPLIES if name not in ("twice", "huge")}


@kills("federated/_remote.py", "            if client not in waiting:\n", "            if False:\n")
@kills("federated/_remote.py", "new.shape != old.shape or ", "")
@kills("federated/_remote.py", "reply.share,\n", "1.0,\n")
def test_whatever_a_client_replies_it_moves_the_sum_by_at_most_the_bound_and_its_weight():
    replies = {}

    def exchange(step, params, drawn):
        assert drawn == [0, 1, 2, 3]
        for client in reversed(drawn):
            yield from ((client, reply) for reply in replies[client])

    algorithm = rounds(exchange, weights=(1, 1, 0.3, 7))
    state = algorithm.init(MODEL)

    def sum_with(*of_last):
        replies.update({client: [reply] for client, reply in enumerate(HONEST)})
        replies[3] = list(of_last)
        after, info = algorithm.step(state)
        return np.concatenate([x.ravel() for x in jax.tree.leaves(after.params)]), info

    without, info = sum_with()
    assert (info.examples, info.missing, info.dropped) == (4, 1, 0)
    # The definition: clip each update to 0.5, then weight it by at most 1.
    updates = [np.concatenate([x.ravel() for x in jax.tree.leaves(h)]) for h in HONEST[:3]]
    clipped = [u * min(1, 0.5 / np.linalg.norm(u)) for u in updates]
    np.testing.assert_allclose(without, clipped[0] + clipped[1] + 0.3 * clipped[2], atol=1e-6)
    for name, reply in REPLIES.items():
        change = np.linalg.norm(sum_with(*reply)[0] - without)
        assert change <= 0.5 * (1 + 1e-5), name
        assert (change == 0) == (name in ZERO), name


class Killed(Exception):
    pass


@kills("federated/_remote.py", "evaluate_every=1,", "evaluate_every=4, save_every=4,")
def test_a_killed_server_repeats_no_release_and_stops_at_its_budget(tmp_path, caplog):
    plan = mechanism(noise_multiplier=2.0, steps=4)
    budget = ledger.Budget(epsilon=float(plan.epsilon_of(plan.multipliers[:3], 1e-2)), delta=1e-2)
    sent, kill_at = [], [1]

    def exchange(step, params, drawn):
        # Saved, then released: the model that leaves is on the disk.
        assert step == 0 or released_steps(tmp_path) == step
        sent.append((step, params["a"].tobytes()))
        yield drawn[0], moved_by(1.0)
        if kill_at and step == kill_at[0]:
            del kill_at[0]
            raise Killed

    def run():
        algorithm = rounds(exchange, plan, budget=budget)
        return run_rounds("test", algorithm, MODEL, None, tmp_path, lambda state: {})

    with pytest.raises(Killed):
        run()
    with caplog.at_level(logging.WARNING, logger="absl"):
        state, rows = run()
    assert "round 4 of 4 exceeds" in caplog.text
    assert [step for step, _ in sent] == [0, 1, 1, 2]
    assert len(set(sent)) == 3
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert state.ledger.steps == 3
    run()
    assert len(sent) == 4
    assert set(rows[0]["private"]) >= {"examples", "missing", "dropped"}


@kills(
    "training/assembly.py",
    "            spent = ledger.admit(state.ledger, self.mechanism, self.budget, steps=count)\n",
    "            spent = ledger.admit(state.ledger, self.mechanism, None, steps=count)\n",
)
def test_a_round_beyond_the_budget_sends_nothing():
    def exchange(step, params, drawn):
        raise AssertionError("sent")

    budget = ledger.Budget(epsilon=0.01, delta=1e-2)
    plan = mechanism(noise_multiplier=1.0)
    algorithm = rounds(exchange, plan, budget=budget)
    with pytest.raises(dpjax.checks.Refused, match="0 of 6 steps fit"):
        algorithm.step(algorithm.init(MODEL))


@pytest.mark.parametrize(
    ("facts", "clients", "words"),
    [
        ({"sampling": sampling.shuffled(4, 2)}, "abcd", "shuffled draws are not of one client"),
        ({"unit": "example"}, "abcd", "the unit is an example"),
        ({}, "abca", "a client is twice in the population"),
        ({}, "abc", "3 clients and 4 weights; the mechanism's sampler draws from 4"),
        ({"clipping": clipping.jl(1.0)}, "abcd", "neither adaptive bounds nor estimated norms"),
    ],
)
def test_rounds_that_do_not_run_are_refused(facts, clients, words):
    weights = federated.Weights(values=np.ones(4))
    with pytest.raises(ValueError, match=words):
        check_remote("test", mechanism(**facts), optax.sgd(1.0), weights, list(clients))


# Flower itself ------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # Flower's own warnings are not ours
def test_a_deployment_loses_nothing_and_repeats_nothing(tmp_path):
    pytest.importorskip("flwr", reason="optional; `make test-flower` installs it")
    from flower_deployment import Deployment

    plan = mechanism(sampling=sampling.poisson(10, 6), noise_multiplier=1.0, steps=9)
    epsilon = round(float(plan.epsilon_of(plan.multipliers[:7], 1e-2)) + 0.01, 2)
    settings = {"drawn": 6, "noise": 1.0, "rounds": 9, "timeout": 30}
    here = Deployment(tmp_path, 10, **settings, epsilon=epsilon, delta=1e-2)
    log = tmp_path / "run" / "metrics.jsonl"

    def rows():
        text = log.read_text() if log.exists() else ""
        return [json.loads(line) for line in text.splitlines() if line.endswith("}")]

    def in_a_round(first):
        """The clients that work on a round after this one, which is not in the log."""
        done = len(rows())
        names = [path.name.split() for path in (tmp_path / "seen").glob("*")]
        return [int(c) for r, _, c in names if int(r) == done + 1 > first and c != "3"]

    try:
        here.begin_link()
        for client in range(10):
            here.flwr("supernode", "register", f"keys/{client}.pub", "hospitals")
        here.say("10 keys are registered")
        cuts = {0: (0, 400), 1: (400, 600), 2: (600, 700), 3: (700, 750)}
        for client, (first, last) in cuts.items():
            here.begin_node(client, first, last)
        online = lambda: len(re.findall("Activated node_id", here.log("link"))) >= 4  # noqa: E731
        here.until(online, "4 nodes are online")
        here.run("run1")
        here.until(rows, "round 1 ended")
        here.hold()
        here.until(lambda: in_a_round(1), "a node works on a round")
        victim = in_a_round(1)[0]
        here.kill(f"node{victim}")
        here.release()
        here.say(f"node {victim} killed with -9 in round {len(rows()) + 1}")
        killed_in = len(rows()) + 1
        here.until(lambda: len(rows()) >= killed_in, f"round {killed_in} ended without it")
        here.begin_node(victim, *cuts[victim])
        here.hold()
        here.until(lambda: in_a_round(killed_in), "a node works on a round")
        here.kill_server_app()
        here.release()
        here.say(f"the server app killed with -9 in round {len(rows()) + 1}")
        here.run("run2")
        done = len(rows())
        here.until(lambda: len(rows()) > done, f"a new run resumed: round {done + 1} ended")
        here.hold()
        here.until(lambda: in_a_round(done + 1), "a node works on a round")
        here.kill_server_app()
        here.kill("link")
        here.release()
        here.say(f"the server app and the link killed with -9 in round {len(rows()) + 1}")
        here.begin_link()
        done = len(rows())
        here.run("run3")
        here.until(lambda: len(rows()) > done, f"a new run resumed: round {done + 1} ended")
        sentence = "round 8 of 9 exceeds Budget"
        here.until(lambda: sentence in here.log("run3"), "the budget is reached")
        here.run("run4")
        here.until(lambda: sentence in here.log("run4"), "a further run trained no round")
        here.faults(rows())
    finally:
        here.end()

    assert [row["step"] for row in rows()] == list(range(1, 8))
    models = {}
    for path in (tmp_path / "seen").glob("*"):
        models.setdefault(int(path.name.split()[0]), set()).add(path.read_text())
    # Each round sent one model, also where it was drawn twice, and no two rounds sent the same.
    assert all(len(of_round) == 1 for of_round in models.values()), models
    assert len(set.union(*models.values())) == len(models)
    card = pathlib.Path(tmp_path, "run")
    done = subprocess.run(
        [sys.executable, "-m", "dpjax", "verify", card], capture_output=True, text=True
    )
    print(done.stdout)
    assert done.returncode == 0
    assert "holds" in done.stdout
    assert "steps         7 (of 9 planned)" in (card / "statement.txt").read_text()
