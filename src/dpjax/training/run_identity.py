# SPDX-License-Identifier: Apache-2.0
"""What a run is, in JSON types, and in what it differs from the run in a folder.

An algorithm says most of it: the mechanism, the hashes of the data and of the program of a step.
`fit` adds whether the seed of its key is small, and the caller's configuration.
``numerics`` lists what could change the last bits of a step: versions, settings of JAX and XLA,
devices, the machine. Under other versions or settings of JAX, programs cannot be compared; where
devices or the machine changed alone, loss and optimizer are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from dpjax import trees
from dpjax.training.environment import machine, numerics
from dpjax.types import Algorithm

# Of the folder that the run began in, by which `Folder.resume` knows a copy.
INODE = "inode of lock"
# Numerics that do not change how loss and optimizer are traced.
PLACES = frozenset({"devices", "engine", "mesh", "microbatch_size", "processor", "XLA_FLAGS"})
BLIND = (
    "\nOther versions and settings trace other programs, so loss, optimizer and rate were not "
    "compared. See that they did not change."
)


def identity_of(
    algorithm: Algorithm, state: Any, configuration: Mapping[str, Any]
) -> dict[str, Any]:
    """The identity of the run. The configuration may not replace accounted facts."""
    # Versions, devices and machine join what the algorithm says of itself: they may change last
    # bits.
    identity = dict(algorithm.identity(state))
    identity["numerics"] = {**numerics(), **machine(), **identity.get("numerics", {})}
    # Not the key: one bit, by which a run that continues this one knows that its seed is public.
    identity["small seed"] = trees.seeded(state.key)
    try:
        json.dumps(dict(configuration))
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"fit(configuration=...): {error}; expected text, numbers, and lists and mappings of "
            "them. Usually a path, or an array or number of NumPy is among them: write str(path), "
            "array.tolist() or float(number)."
        ) from error
    taken = sorted(identity.keys() & configuration.keys())
    if taken:
        raise ValueError(
            f"fit(configuration=...): {', '.join(taken)} would replace facts by which the run is "
            "accounted. Usually all flags are passed as they are: leave these out, or rename them, "
            "for example 'microbatch' for a batch on the device."
        )
    return {**identity, **configuration}


def differences(before: Mapping[str, Any], identity: Mapping[str, Any]) -> tuple[list[str], str]:
    """In what a run differs from the one in a folder, and what could not be compared.

    Args:
      before: What ``run.json`` holds.
      identity: The identity of the run now, in JSON types.

    Returns:
      A line for each difference, none for the same run; and a warning where other versions or
      settings trace other programs, else an empty text.
    """
    there, now = map(_leaves, (before, identity))
    differ = [name for name in {**there, **now} if there.get(name) != now.get(name)]
    # A changed mechanism changes the program too, and is named instead of it.
    names = [name for name in differ if name[0] != "program"]
    changed = changed_numerics(before.get("numerics", {}), identity["numerics"])
    # Other versions trace other programs of one loss, and another mesh another step of one loss.
    # `Folder.resume` compares both.
    comparable = PLACES.issuperset(changed)
    if not names and comparable:
        names = [name for name in differ if name == ("program", "functions")]
    if not names and not changed:
        names = differ
    lines = [
        f"  {'.'.join(name)}: {_short(there.get(name))} there, {_short(now.get(name))} now"
        for name in names
    ]
    if names and names[0][0] == "program":
        lines.append(
            "  The program follows from loss, optimizer, rate, weights, per_step, "
            "the arrays that they close over, and the shapes of the parameters."
        )
    return lines, "" if comparable else BLIND


def changed_numerics(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The names of numerics that differ."""
    return [name for name in {**was, **now} if was.get(name, "unknown") != now.get(name)]


def _leaves(facts: Mapping[str, Any], path: tuple[str, ...] = ()) -> dict[tuple[str, ...], str]:
    """The values of nested mappings as JSON, by path, without numerics, kind of key and inode."""
    leaves = {}
    for name, value in facts.items():
        # `Folder.resume` compares the first and the last, and a resumed run has the key of its
        # checkpoint.
        if not path and name in ("numerics", "small seed", INODE):
            continue
        if isinstance(value, Mapping) and value:
            leaves |= _leaves(value, (*path, name))
        else:  # as JSON, because NaN is not equal to itself
            leaves[*path, name] = json.dumps(value, sort_keys=True)
    return leaves


def _short(text: str | None) -> str:
    text = "null" if text is None else text
    return text if len(text) <= 60 else text[:57] + "..."
