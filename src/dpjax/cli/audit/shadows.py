# SPDX-License-Identifier: Apache-2.0
"""LiRA: likelihood ratios from shadow models, which the run's own algorithm trains."""

import dataclasses
import sys
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import numpy as np

import dpjax
from dpjax import auditing, training
from dpjax._display import duration
from dpjax.cli.audit.losses import Attack, attack_of, log_odds
from dpjax.cli.audit.rebuilt_run import Rebuilt
from dpjax.cli.train.evaluation import held

_ATTACKED = 1_000  # members, and as many others, that are scored


def attack_shadows(rebuilt: Rebuilt, count: int) -> Iterator[Attack]:
    """Trains ``count`` shadow models and yields the online and the offline attack that use them.

    The attacked rows are ``size`` members, which the run trained on, and as many others. A shadow
    model trains on the data of the run with half of the attacked rows in the places of the members.
    The score of a row is a likelihood ratio of its log odds under the released model: the density
    of log odds under the shadow models that trained on the row, over that under the other ones.
    """
    dataset = rebuilt.dataset
    rng = np.random.default_rng(0)
    size = min(_ATTACKED, dataset.examples // 2, len(dataset.test[0]))
    places = rng.permutation(dataset.examples)[:size]
    test_places = rng.permutation(len(dataset.test[0]))[:size]
    members = dataset.rows(places)
    others = jax.tree.map(lambda x: np.asarray(x)[test_places], dataset.test)
    attacked = jax.tree.map(lambda a, b: np.concatenate([a, b]), members, others)
    odds = jax.jit(partial(log_odds, rebuilt.planned.model))
    joined = np.zeros((count, 2 * size), bool)  # which attacked rows each model trained on
    shadow_odds = np.zeros(joined.shape)
    # Keys from a split, because a key made of a seed may be that of the run, whose noise the shadow
    # model then shares.
    keys = jax.random.split(jax.random.key(0), count)
    began = time.time()
    for number in range(count):
        # `half` has the numbers of `size` attacked rows. Two consecutive models get one half each,
        # so each row is in half of all models.
        if number % 2 == 0:
            half = rng.permutation(2 * size)[:size]
        else:
            half = np.flatnonzero(~joined[number - 1])
        joined[number, half] = True
        rows = jax.tree.map(np.array, dataset.train)  # a copy
        for array, attacked_array in zip(rows, attacked, strict=True):  # inputs, and labels
            array[places] = attacked_array[half]
        shadow_params = _trained(rebuilt, rows, keys[number])
        shadow_odds[number] = odds(shadow_params, attacked)
        seconds_left = (time.time() - began) / (number + 1) * (count - number - 1)
        words = f"shadow model {number + 1} of {count}, {duration(seconds_left)} left"
        print(words, file=sys.stderr)
    released_odds = np.asarray(odds(rebuilt.released, attacked))
    # The offline attack uses only the models that did not train on a row.
    for name, online in (("LiRA, online", True), ("LiRA, offline", False)):
        ratios = auditing.lira(released_odds, shadow_odds, joined, online=online)
        scores = (ratios[:size], ratios[size:])  # of members, and of others
        yield attack_of(f"{name}, {count} shadow models", rebuilt, scores, members, others)


def _trained(rebuilt: Rebuilt, rows: Any, key: dpjax.types.Key) -> Any:
    """The parameters that the run's algorithm releases after training on other rows."""
    planned = rebuilt.planned
    # Only the steps run again: the queries of the run are answered, and its earlier runs are over.
    mechanism = dataclasses.replace(planned.mechanism, preparation=(), before=())
    algorithm = planned.algorithm(mechanism, rows)
    state = algorithm.init(rebuilt.first_params, key)
    state, _ = dpjax.fit(algorithm, state, evaluate_every=mechanism.steps, progress=False)
    return held(training.averaged(state.optimizer))
