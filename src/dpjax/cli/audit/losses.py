# SPDX-License-Identifier: Apache-2.0
"""Attacks on the released model, and the first of them: members have lower losses.

No coin decided which rows are for the test, so these attacks give no verdict.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpjax import auditing, metrics
from dpjax._rounding import upwards
from dpjax.cli.audit.lines import ASSUMED, OF_A_RUN, Line
from dpjax.cli.audit.rebuilt_run import Rebuilt
from dpjax.cli.report.load_run import SavedRun
from dpjax.cli.train.evaluation import spread

_MOST = 10_000  # rows whose losses are compared


class Attack(NamedTuple):
    """Scores of members and of other rows, with their classes, and how well they tell members."""

    name: str
    membership: auditing.Membership
    scores: tuple[np.ndarray, np.ndarray]
    labels: tuple[np.ndarray, np.ndarray]

    def line(self, run: SavedRun) -> Line:
        """Never a verdict: rows of another year have other losses under a sound model too."""
        membership = self.membership
        rates = ", ".join(self.rates(run))
        measured = f"AUROC {membership.auroc.value:.3f}; members found {rates}; {ASSUMED}"
        bound = membership.epsilon
        return Line(self.name, measured, bound, run.epsilon, membership.confidence, refutes=False)

    def rates(self, run: SavedRun) -> list[str]:
        """The rates of true positives, each with the largest that the claim allows."""
        largest = dict((run.card or {})["true_positive_rates"])
        return [
            f"{share} of at most {upwards(100 * largest[at], '.1f')}% at {at:.1%}"
            for at, share in self.membership.true_positives.items()
        ]

    def by_class(self) -> dict[str, str]:
        """The AUROC of members against others in each class, as text; empty for a regression."""
        member_scores, other_scores = self.scores
        member_labels, other_labels = self.labels
        if member_labels.dtype.kind == "f":  # targets, which have no classes
            return {}
        aurocs = {}
        for label in np.unique(member_labels).tolist():
            members = member_scores[member_labels == label]
            others = other_scores[other_labels == label]
            is_member = np.repeat([1, 0], [len(members), len(others)])
            auroc = metrics.auroc(np.concatenate([members, others]), is_member)
            aurocs[str(label)] = f"{auroc:.3f}"
        return aurocs


def attack_losses(rebuilt: Rebuilt) -> Attack:
    """Guesses training rows from the losses of the released parameters."""
    dataset = rebuilt.dataset
    # Log odds order rows as losses do, without ties of losses that are rounded to 0.
    odds = jax.jit(partial(log_odds, rebuilt.planned.model))
    members = dataset.rows(spread(dataset.examples, _MOST))
    others = jax.tree.map(lambda x: x[:_MOST], dataset.test)
    member_scores = np.asarray(odds(rebuilt.released, members))
    other_scores = np.asarray(odds(rebuilt.released, others))
    scores = (member_scores, other_scores)
    return attack_of("losses of the released model", rebuilt, scores, members, others)


def attack_of(
    name: str, rebuilt: Rebuilt, scores: tuple[np.ndarray, np.ndarray], members: Any, others: Any
) -> Attack:
    """An attack from its scores, and the rows of members and others."""
    membership = auditing.audit_membership(*scores, delta=rebuilt.run.delta, confidence=OF_A_RUN)
    labels = (np.asarray(members[1]), np.asarray(others[1]))
    return Attack(name, membership, scores, labels)


def log_odds(model: Any, params: Any, rows: Any) -> jax.Array:
    """The log of how much likelier the model holds the label of each row than all others.

    The score of a target is its negative squared error.
    """

    def of_row(row: Any) -> jax.Array:
        x, y = row
        logits = model.apply({"params": params}, x)
        if jnp.issubdtype(y.dtype, jnp.floating):
            return -jnp.square(logits[0] - y)
        rest = jnp.where(jnp.arange(logits.size) == y, -jnp.inf, logits)
        return logits[y] - jax.nn.logsumexp(rest)

    # 500 rows at a time: the activations of all rows may not fit into memory.
    return jax.lax.map(of_row, rows, batch_size=500)
