# SPDX-License-Identifier: Apache-2.0
"""`persons`: a draw of people, each with a few of the rows that it owns.

People are drawn as `poisson` draws examples, so the event is that of `poisson`. The rows of a drawn
person are drawn after that, only from this person's rows. Given the rows of all people, a step is a
Poisson-subsampled Gaussian. A mixture of such steps costs no more than one of them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Int

from dpjax import checks, trees
from dpjax.sampling.independent import poisson
from dpjax.sampling.sizes import checked_count
from dpjax.types import Draw, Key, Purpose, Sampler


def persons(owners: ArrayLike, batch_size: float, most_rows: int = 1) -> Sampler:
    r"""Each person joins each batch by a coin of its own, with up to ``most_rows`` of its rows.

    A draw has ``indices`` and ``mask`` of shape ``[capacity, most_rows]``: rows of the data, one
    person after the other. If a person has more rows, a uniform subset of ``most_rows`` is drawn at
    every step. If a person has fewer, masked places repeat one of its rows. `dpjax.dpsgd`
    clips one gradient a person, that of the mean over its drawn rows (`dpjax.losses.of_person`).

    Args:
      owners: The person who owns each row, ``[rows]``, as any integers.
      batch_size: The *expected* number of persons a step; sums are divided by it.
      most_rows: The most rows of a person in a step. Choose it without a look at the data.

    Privacy:
      With add-or-remove neighbours, which differ by one person with all of its rows: the
      Poisson-subsampled Gaussian mechanism at rate
      $q = \mathrm{batch\_size}/\mathrm{persons}$, however many rows a person has.
      ``sampler.examples``, the number of persons, is public. Who owns which row is private, and so
      is the number of rows: nothing on a privacy card follows from them.

    Example:
      >>> sampler = persons(owners=[7, 7, 7, 2, 9, 9], batch_size=2, most_rows=2)
      >>> sampler.examples, sampler.draw(jax.random.key(0), 0).indices.shape
      (3, (3, 2))
    """
    call = "sampling.persons"
    ids = np.asarray(owners)
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(
            f"{call}: owners are {ids.dtype}{list(ids.shape)}; expected one integer a row. A row "
            "of two people is in two gradients, which clipping does not bound: give it to one."
        )
    rows = checked_count("persons", "the number of rows", ids.size)  # int32 counts them
    most_rows = checks.whole(call, "most_rows", most_rows)
    _, counts = np.unique(ids, return_counts=True)
    of_people = poisson(len(counts), batch_size)
    # Rows are ordered by person, so the shapes of a draw do not depend on how many each one owns.
    ordered = jnp.asarray(np.argsort(ids, kind="stable"), jnp.int32)
    sizes = jnp.asarray(counts)  # how many rows each person has, [persons]
    starts = jnp.asarray(np.cumsum(counts) - counts, jnp.int32)  # of each person in `ordered`

    def draw(key: Key, step: Any) -> Draw:
        people = of_people.draw(key, step)
        count = sizes[people.indices].astype(jnp.int32)  # the rows of each drawn person
        taken = jnp.minimum(count, most_rows)
        # Which of the rows of each person are drawn, counted from 0, [people, most_rows].
        places = subsets(trees.step_key(key, Purpose.ROWS, step), count, taken, most_rows)
        real = jnp.arange(most_rows)[None] < taken[:, None]  # [people, most_rows]
        # Padding is a row of the same person: zeros or other people's rows may have NaN gradients.
        places = jnp.where(real, places, places[:, :1])
        indices = ordered[starts[people.indices][:, None] + places]
        return Draw(indices, real & people.mask[:, None])

    # The claim of `poisson` has two parts: how it draws, and what is proved.
    kind, proof = of_people.claim.split("; ")
    each = "one row"
    if most_rows > 1:
        each = f"up to {most_rows} rows"
    return replace(
        of_people,
        name="persons",
        paper_name="Poisson",
        unit="person",
        draw=draw,
        rows=rows,
        most_rows=most_rows,
        claim=f"{kind} of people, by {each} of each; {proof}",
        fingerprint=trees.fingerprint([ids]),
    )


def subsets(
    key: Key, count: Int[Array, " people"], taken: Int[Array, " people"], most: int
) -> Int[Array, "people most"]:
    """A uniform subset of ``taken`` of ``count`` places for each person, then anything.

    Robert Floyd's algorithm, in time of the subset however many rows a person has: Bentley,
    "Programming pearls: a sample of brilliance", 1987.
    """

    def body(turn: Int[Array, ""], places: Int[Array, "people most"]) -> Array:
        last = count - taken + turn
        place = jax.random.randint(jax.random.fold_in(key, turn), count.shape, 0, last + 1)
        used = jnp.any(places == place[:, None], axis=1)
        return places.at[:, turn].set(jnp.where(used, last, place))

    return jax.lax.fori_loop(0, most, body, jnp.full((*count.shape, most), -1, jnp.int32))
