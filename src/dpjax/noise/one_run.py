# SPDX-License-Identifier: Apache-2.0
"""Refuses noise that several sums or several runs would share.

The noise of a link is a function of key and step. Two sums with equal noise have a difference
without noise, and programs make that easy: a loop that closes over a state, `jax.vmap` over sums, a
stacked state, shards that keep sums of their own. What is traced is refused where the trace shows
it; what only values can show becomes NaN. `dpjax.noise.seals` sees releases outside of ``jit``.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from dpjax import trees
from dpjax.noise.seals import seal
from dpjax.types import Key, PyTree


def require_one_run(key: Key, step: Array, params: PyTree, name: str) -> None:
    """Refuses to begin several runs with one key.

    Args:
      key: The root key of the link.
      step: The first step, made where the run begins.
      params: The parameters.
      name: How errors call the link.
    """
    _in_one_run(jax.random.key_data(key), [x for x in jax.tree.leaves(params) if trees.traced(x)])
    if any(map(_repeats, set(_programs(step)) - set(_programs(key)))):
        raise ValueError(
            f"{name}: init runs in the body of a loop, and the key of the link is a constant "
            "there; expected one init for each key. Every round would add the same noise to "
            "another sum, and differences of two results would have none. Usually jax.lax.map "
            "trains an ensemble: map over keys too, and build the link from each in the body. For "
            "one run, call init before the loop, and carry the state."
        )


def with_own_noise(total: PyTree, state: Any, name: str) -> PyTree:
    """The total; refuses functions in which several totals share the noise of one state.

    Args:
      total: The clipped sum.
      state: The state of the link.
      name: How errors call the link.
    """
    if not trees.traced(total):
        return total
    words = jax.random.key_data(state.key)
    total = _in_one_run(words, _on_all_shards(words, total))
    # A state that is an argument, is carried or begins here has a step traced where the sum is.
    around = _programs(state.step)
    inner = [programs[0] for leaf in jax.tree.leaves(total) if (programs := _programs(leaf))]
    if not trees.traced(state.step) or not set(inner) <= set(around):
        raise ValueError(
            f"{name}: the sum is computed inside a traced function, and the state of the link "
            f"(step {state.step}) comes from outside of it, as a constant; expected both among the "
            "arguments of the traced function. Every call or round would add the same noise to "
            "another sum, and differences of two results would have none. Usually a jitted step, "
            "the body of jax.lax.map or a branch of jax.lax.cond closes over the state: take it as "
            "an argument, or in the carry of the loop, and return the next one. Or "
            "optax.apply_if_finite or optax.conditionally_mask stands around the link: put it "
            "behind the noise."
        )
    return total


def _programs(x: Any) -> list[Any]:
    """The traced programs around an array, innermost first: a jitted function, a loop's body."""
    trace, found = getattr(x, "_trace", None), []
    while trace is not None:
        # `jax.vmap` and derivatives make no program: their arrays belong to the one around them.
        if hasattr(trace, "frame"):
            found.append(trace)
        trace = getattr(trace, "parent_trace", None)
    return found


def _repeats(program: Any) -> bool:
    """Whether a traced program is the body of a loop; False where JAX does not say."""
    made_for = getattr(getattr(program.frame, "debug_info", None), "traced_for", None)
    return made_for in ("scan", "fori_loop", "while_body")


@jax.custom_batching.custom_vmap
def _in_one_run(words: Array, total: PyTree) -> PyTree:
    """The total of the key of these words; of many under `jax.vmap`, ``[..., words]``."""
    del words
    return total


@_in_one_run.def_vmap
def _refuse_shared_noise(size: int, batched: Any, words: Array, total: PyTree) -> Any:
    several, total_batched = batched[0], any(jax.tree.leaves(batched[1]))
    if several and words.shape[-1] != 2:
        raise ValueError(
            f"noise: jax.vmap maps the link over {size} states with keys of rbg; expected keys of "
            "threefry2x32. JAX draws for all of them from the first key, so two ensembles that "
            "begin with one key would share the noise of their other members. Make the keys by "
            "jax.random.split(dpjax.noise.secret_key(), n)."
        )
    if total_batched and not several:
        raise ValueError(
            f"noise: jax.vmap maps the link over {size} sums or runs, and its state has one key; "
            "expected a key for each. All sums would have equal noise, and their differences none. "
            "Make a state for each, jax.vmap(lambda key, p: link_of(key).init(p))(keys, params), "
            "and map over states too."
        )
    if total_batched:
        rows = words.reshape(-1, words.shape[-1])
        shared = _shared(rows, jnp.arange(len(rows))[:, None])
        if not trees.traced(shared) and shared:
            raise ValueError(
                f"noise: jax.vmap maps the link over {size} states, and some have equal keys; "
                "expected a key for each. Their sums would have equal noise, and the differences "
                "none. Usually one state was stacked or broadcast. Make a state for each: "
                "jax.vmap(lambda key, p: link_of(key).init(p))(keys, params)."
            )
        total = _nan_if(shared, total)
    # Again, with the words of all rows: another `jax.vmap` may stand around this one.
    return _in_one_run(words, total), batched[1]


def _on_all_shards(words: Array, total: PyTree) -> PyTree:
    """The total; NaN where shards of `jax.shard_map` or `jax.pmap` add one noise to several sums.

    Args:
      words: The words of the key.
      total: The clipped sum.
    """
    axes = jax.sharding.get_abstract_mesh().manual_axes
    if not axes:
        return total
    # Equal sums pass: replicas that added up their sums before. Only values can say so, as
    # check_vma=False and pmap do not tell what differs.
    own = jnp.append(words.reshape(-1), seal(total))
    rows = jnp.zeros((jax.lax.axis_size(axes), len(own)), own.dtype)
    # A sum of zeros and one row is equal in all shards by its type too; all_gather is not.
    rows = jax.lax.psum(rows.at[jax.lax.axis_index(axes)].set(own), axes)
    return _nan_if(_shared(rows[:, :-2], rows[:, -2:]), total)


def _shared(keys: Array, sums: Array) -> Any:
    """Whether two of these rows have one key and two sums."""
    one_key, one_sum = (jnp.all(x[:, None] == x[None], axis=-1) for x in (keys, sums))
    return jnp.any(one_key & ~one_sum)


def _nan_if(wrong: Any, total: PyTree) -> PyTree:
    # In the sum: noise, mean and any factor on either of them then are NaN too.
    return jax.tree.map(lambda x: jnp.where(wrong, jnp.nan, x), total)


def unless_reset(total: PyTree, key: Key, name: str) -> PyTree:
    """The total; inside ``jit`` NaN, and outside an error, if the key was overwritten by zeros.

    ``jax.tree.map(jnp.zeros_like, state)``, a common way to reset momentum, makes the public key
    of zeros and the step 0.

    Args:
      total: The clipped sum.
      key: The key of the state, of a link whose own key is not zero.
      name: How errors call the link.
    """
    reset = ~jnp.any(jax.random.key_data(key) != 0)
    if trees.traced(reset):
        return _nan_if(reset, total)
    if reset:
        raise ValueError(
            f"{name}: the key in the state is zero, and the link was made with another one; "
            "expected the key of the link. Usually a whole optimizer state was reset with "
            "zeros_like. Reset the momentum alone, or start a new run with a new key."
        )
    return total
