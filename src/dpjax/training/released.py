# SPDX-License-Identifier: Apache-2.0
"""What a run may publish, in the files of its folder: card, statement and parameters.

They are written with each row of the log, for every model and every algorithm, so a run that was
stopped leaves them too. All three are of the same step, or a kill left a card that counts more.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import jax
from absl import logging

from dpjax import processes, reports, trees
from dpjax._files import replace
from dpjax.mechanism import Mechanism
from dpjax.mechanism.card import seed_of
from dpjax.training.run_folder import Folder
from dpjax.types import Plan, State


def write_released(
    folder: Folder,
    mechanism: Plan,
    state: State,
    delta: float,
    method: str,
    *,
    last: bool,
) -> None:
    """Writes card, statement and parameters of a state into a run's folder.

    Args:
      folder: The folder of the run.
      mechanism: What ran. Only a `dpjax.Mechanism` has a card and a statement.
      state: Its ledger says which steps ran, its params are released.
      delta: The delta at which epsilon is stated.
      method: The method of the log.
      last: Whether the run ends here.
    """
    params = jax.tree.map(trees.on_host, state.params)
    if not processes.first_process():
        return
    # A resumed run repeats steps. Those after them are public, and a card of this step would count
    # fewer.
    if max(state.ledger.steps, int(state.ledger.chosen)) < folder.marked:
        return
    path = folder.path
    try:
        if isinstance(mechanism, Mechanism):
            # Loss distributions of many different steps take seconds: the last card has them.
            methods = None if last else ("rdp", "rdp-classic", method)
            facts: dict[str, Any] = {"ledger": state.ledger, "methods": methods}
            facts["seed"] = seed_of(folder.identity)
            card = reports.card(mechanism, delta, **facts)
            facts["scaled_by"] = _scaled_by(folder.identity, mechanism)
            words = reports.statement(mechanism, delta, **facts)
            replace(path / "privacy.json", json.dumps(card, indent=2) + "\n", public=True)
            replace(path / "statement.txt", words + "\n", public=True)
        replace(path / "params.msgpack", serialized(params), public=True)
    except OSError as error:
        # As with the log: a full disk does not end a run, and the next row tries again.
        logging.error("fit: %s has no card of this step (%s); the run continues.", path, error)


def _scaled_by(identity: Mapping[str, Any], mechanism: Mechanism) -> str | None:
    """What this run multiplies sum and noise by, which its mechanism does not say."""
    if identity.get("bound schedule") is not None:
        return "a bound schedule"
    clients = mechanism.sampling.examples
    total = identity.get("weights", {}).get("total", clients)
    return None if total == clients else "the total of weights"


def serialized(params: Any) -> bytes:
    """Parameters as Flax serialises them; leaves by name where Flax does not know the tree."""
    from flax import serialization  # which training without a folder does not need

    held = jax.device_get(params)
    try:
        return serialization.to_bytes(held)
    except TypeError:  # a class that Flax does not know
        named = dict(zip(trees.leaf_names(held), jax.tree.leaves(held), strict=True))
        return serialization.msgpack_serialize(named)
