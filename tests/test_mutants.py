# SPDX-License-Identifier: Apache-2.0
"""Mutants: single edits that break the guarantee, each of which a named fast test must kill.

A library whose parts are all tested can still leak where they meet.  Each row edits one
line of a copy of the sources and runs the tests it names against that copy; a mutant that
survives is a hole in the tests.  A new room that touches the guarantee brings its rows.
"""

import os
import pathlib
import shutil
import subprocess
import sys
from typing import NamedTuple

import pytest

import dpjax

SOURCES = pathlib.Path(dpjax.__file__).parent
TESTS = pathlib.Path(__file__).parent


class Mutant(NamedTuple):
    """One edit: in this file, ``before`` becomes ``after``; ``killer`` must fail."""

    name: str
    file: str
    before: str
    after: str
    killer: str


LAWS, CLIP, NOISE = "test_laws.py::test_", "test_clipping.py::test_", "test_noise.py::test_"
SAMPLE, MECHANISM, LEDGER = (f"test_{x}.py::test_" for x in ("sampling", "mechanism", "ledger"))
ACCOUNT, GHOST = "test_accounting.py::test_", "test_ghost.py::test_ghost_"
FEATURES = "test_features.py::test_"

MUTANTS = [
    # Clipping and sensitivity
    Mutant(
        "clip at 2C",
        "types.py",
        "jnp.clip(wish(norms), 0, limit)",
        "jnp.clip(wish(norms), 0, 2 * limit)",
        CLIP + "clipping_is_per_example",
    ),
    Mutant(
        "a rule's own wish is not held to the bound",
        "types.py",
        "jnp.clip(wish(norms), 0, limit)",
        "wish(norms)",
        CLIP + "a_rule_of_ones_own_cannot_break_its_bound",
    ),
    Mutant(
        "sensitivity without sqrt(k)",
        "types.py",
        "math.hypot(*self.bounds)",
        "max(self.bounds)",
        CLIP + "sensitivities",
    ),
    Mutant(
        "NaN let through by the factors",
        "types.py",
        "jnp.where(finite, jnp.clip(wish(norms), 0, limit), 0)",
        "jnp.clip(wish(norms), 0, limit)",
        LAWS + "an_example_that_is_not_finite_contributes_exactly_nothing[nan-flat-one group]",
    ),
    Mutant(
        "NaN let through by the sum",
        "trees.py",
        "jnp.where(expand(scale, leaf) != 0, leaf.astype(scale.dtype), 0)",
        "leaf.astype(scale.dtype)",
        LAWS + "an_example_that_is_not_finite_contributes_exactly_nothing[nan-flat-one group]",
    ),
    Mutant(
        "total= not shared between the groups",
        "clipping.py",
        "total / size**0.5",
        "total",
        CLIP + "sensitivities",
    ),
    Mutant(
        "padding not zeroed",
        "clipping.py",
        "jnp.where(real, factors, 0)",
        "factors",
        "test_clipping.py::TestClipAndSum::test_a_padded_row_with_a_huge_gradient_leaves_exactly_nothing",
    ),
    Mutant(
        "norms in the gradient's own narrow dtype",
        "trees.py",
        "leaves = [leaf.astype(wide(leaf.dtype)) for leaf in jax.tree.leaves(gradients)]",
        "leaves = jax.tree.leaves(gradients)",
        CLIP + "float16_gradients_do_not_underflow",
    ),
    Mutant(
        "the last group's norm forgotten",
        "trees.py",
        "for group in range(size)",
        "for group in [*range(size - 1), 0]",
        CLIP + "groups_of_the_worked_example",
    ),
    Mutant(
        "unbatched gradients accepted",
        "clipping.py",
        "        _refuse_unbatched(updates, state.shapes)\n",
        "",
        "test_clipping.py::TestClipAndSum::test_refuses_unbatched_gradients",
    ),
    # Engines and microbatches
    Mutant(
        "the last, smaller microbatch dropped",
        "gradients/rows.py",
        "trips = -(-count // size)",
        "trips = max(1, count // size)",
        LAWS + "engines_agree[flat-one group]",
    ),
    Mutant(
        "a draw truncated to one microbatch",
        "training/resident.py",
        "lambda carry: carry[0] < draw.size",
        "lambda carry: carry[0] < jnp.minimum(draw.size, size)",
        LAWS + "infinite_bound_and_no_noise_is_plain_sgd[3-poisson]",
    ),
    Mutant(
        "an example counted in two microbatches",
        "training/resident.py",
        "return start + size, add(",
        "return start + size - 1, add(",
        LAWS + "infinite_bound_and_no_noise_is_plain_sgd[3-poisson]",
    ),
    Mutant(
        "padding of the draw takes part",
        "training/resident.py",
        "mask = start + jnp.arange(size) < draw.size",
        "mask = jnp.ones(size)",
        LAWS + "infinite_bound_and_no_noise_is_plain_sgd[3-poisson]",
    ),
    Mutant(
        "realised instead of expected batch size",
        "training/stepping.py",
        "    updates, inner = recipe.optimizer.update(mean",
        "    mean = jax.tree.map(lambda x: x * recipe.mechanism.batch_size / sums.examples, mean)\n"
        "    updates, inner = recipe.optimizer.update(mean",
        LAWS + "infinite_bound_and_no_noise_is_plain_sgd[3-poisson]",
    ),
    Mutant(
        "noise per microbatch",
        "training/stepping.py",
        "jax.tree.map(jnp.add, sums.gradients, part.value)",
        "jax.tree.map(lambda t, p: t + p + jax.random.normal(jax.random.key(0), p.shape), "
        "sums.gradients, part.value)",
        LAWS + "noise_is_added_once_whatever_the_microbatches[5]",
    ),
    Mutant(
        "ghost: tied weights without their cross term",
        "gradients/rules.py",
        "(1 if a == b else 2) * jnp.sum(x * g",
        "(1 if a == b else 0) * jnp.sum(x * g",
        GHOST + "is_the_definition[tied embedding]",
    ),
    Mutant(
        "ghost: a cross term counted once",
        "gradients/rules.py",
        "(1 if a == b else 2) * jnp.sum(x * g",
        "jnp.sum(x * g",
        GHOST + "is_the_definition[tied embedding]",
    ),
    Mutant(
        "ghost: only the first site of a leaf",
        "gradients/rules.py",
        "    return sum(parts[1:], parts[0])",
        "    return parts[0]",
        GHOST + "is_the_definition[used twice, plainly and scaled]",
    ),
    Mutant(
        "ghost: the sum leaves a site out",
        "gradients/rules.py",
        "        total = total + part",
        "        total = part",
        GHOST + "is_the_definition[tied embedding]",
    ),
    Mutant(
        "ghost: a view that is not a rearrangement taken for one",
        "gradients/walk.py",
        'isometry = isometry and name in {"convert_element_type", *_REARRANGE}',
        "pass",
        GHOST + "is_the_definition[broadcast matrix]",
    ),
    Mutant(
        "ghost: a product of views loses a factor",
        "gradients/walk.py",
        "inputs = [view.of(leaves, memo) for view in views]",
        "inputs = [view.of(leaves, memo) for view in views[:1]] + [v.value for v in views[1:]]",
        GHOST + "is_the_definition[two parameters meet]",
    ),
    Mutant(
        "ghost: rounds of a scan that share a parameter taken for layers",
        "gradients/walk.py",
        "stacks=(by_round, *site.stacks)",
        "stacks=(True, *site.stacks)",
        GHOST + "is_the_definition[lstm]",
    ),
    Mutant(
        "ghost: the product rule forgets a factor",
        "gradients/rules.py",
        "(x + inputs * tiny) * (g + outputs * tiny)",
        "(x + inputs * tiny)",
        GHOST + "is_the_definition[transposed view]",
    ),
    Mutant(
        "ghost: the Gram rule forgets to multiply",
        "gradients/rules.py",
        "x, g = _inner(p, q), _dots(p.g, q.g)",
        "x, g = _inner(p, q), jnp.ones(())",
        GHOST + "is_the_definition[wide, few positions]",
    ),
    Mutant(
        "ghost: equal ids of an embedding not added up",
        "gradients/rules.py",
        "(p.x[:, :, :, None] == q.x[:, :, None, :])",
        "jnp.eye(p.x.shape[2], dtype=bool)[None, None]",
        GHOST + "is_the_definition[embedding]",
    ),
    Mutant(
        "ghost: ids outside the table take part",
        "gradients/forms.py",
        "g = jnp.where(inside[..., None], g, 0)",
        "pass",
        GHOST + "is_the_definition[ids outside the table]",
    ),
    Mutant(
        "ghost: Gram matrices not rounded up",
        "gradients/rules.py",
        "jnp.sum(x * g + doubt, axis",
        "jnp.sum(x * g, axis",
        "test_ghost.py::test_positions_that_cancel_do_not_slip_past_the_bound",
    ),
    Mutant(
        "ghost: tiny data lost by the product of norms",
        "gradients/rules.py",
        "(x + inputs * tiny) * (g + outputs * tiny)",
        "x * g",
        "test_ghost.py::test_tiny_data_with_huge_cotangents_do_not_slip_past_the_bound[1]",
    ),
    Mutant(
        "ghost: tiny data lost by Gram matrices",
        "gradients/rules.py",
        "jnp.maximum(total, 0) + _lost(forms)",
        "jnp.maximum(total, 0)",
        "test_ghost.py::test_tiny_data_with_huge_cotangents_do_not_slip_past_the_bound[3]",
    ),
    Mutant(
        "ghost: rounding errors of wide layers forgotten",
        "gradients/rules.py",
        "doubt = inputs * lengths_x * jnp.abs(g) + outputs * jnp.abs(x) * lengths_g",
        "doubt = jnp.zeros(())",
        "test_ghost.py::test_roundings_that_conspire_do_not_slip_past_the_bound",
    ),
    Mutant(
        "ghost: a frozen leaf read as another inside a scan",
        "gradients/walk.py",
        "        leaves = frozenset[int]()\n",
        "        leaves = reads = frozenset[int]()\n",
        GHOST + "is_the_definition[frozen in a scan]",
    ),
    Mutant(
        "ghost: a sliced view taken for a shared one",
        "gradients/walk.py",
        "by_round = any(sliced[j] for j in entering)",
        "by_round = sliced[entering[0]]",
        GHOST + "is_the_definition[shared times sliced in a scan]",
    ),
    Mutant(
        "a broken image breaks the others",
        "gradients/isolation.py",
        "broken = ~jnp.all(jnp.isfinite(together.norms))",
        "broken = jnp.zeros((), bool)",
        "test_ghost.py::test_a_broken_image_stays_alone_in_float64[kernel-vmap]",
    ),
    Mutant(
        "padding of a microbatch takes part",
        "gradients/rows.py",
        "grown.mask & (jnp.arange(size) < count)",
        "grown.mask",
        LAWS + "engines_agree[flat-one group]",
    ),
    Mutant(
        "ghost: rounding to integers taken for a cast",
        "gradients/walk.py",
        "moved = leaves if _is(jnp.floating, x) else frozenset[int]()",
        "moved = leaves",
        GHOST + "is_the_definition[rounded through integers]",
    ),
    Mutant(
        "ghost: several positions taken for one",
        "gradients/rules.py",
        "if one_form and positions == 1 and not rows:",
        "if one_form and not rows:",
        GHOST + "is_the_definition[few outputs, many positions]",
    ),
    Mutant(
        "ghost: groups of a convolution mixed up",
        "gradients/forms.py",
        "kernel = jnp.moveaxis(kernel, 0, -2)",
        "kernel = jnp.moveaxis(kernel, 0, -1)",
        GHOST + "is_the_definition[conv grouped]",
    ),
    Mutant(
        "ghost: kept gradients forget their factors",
        "gradients/rules.py",
        'jnp.einsum("b,b...->...", factors, gradients,',
        'jnp.einsum("b,b...->...", jnp.sign(factors), gradients,',
        GHOST + "is_the_definition[conv same]",
    ),
    Mutant(
        "ghost: the sum forgets its factors",
        "gradients/rules.py",
        "cotangent=cotangent * trees.expand(factors, cotangent)",
        "cotangent=cotangent",
        LAWS + "engines_agree[flat-one group]",
    ),
    Mutant(
        "ghost: every leaf takes the factors of the first group",
        "gradients/ghost.py",
        "totals[i](factors[:, groups[i]], careful)",
        "totals[i](factors[:, 0], careful)",
        LAWS + "engines_agree[per_group-by layer]",
    ),
    Mutant(
        "ghost: a leaf's norm in the wrong group",
        "gradients/ghost.py",
        "squares[groups[i]] = squares[groups[i]] + square\n    lengths",
        "squares[0] = squares[0] + square\n    lengths",
        LAWS + "engines_agree[per_group-by layer]",
    ),
    Mutant(
        "ghost: materialised leaves left out of the norm",
        "gradients/ghost.py",
        "square = trees.group_norms([gradient], (0,), 1)[:, 0] ** 2",
        "square = 0.0",
        GHOST + "is_the_definition[cond on a parameter]",
    ),
    Mutant(
        "ghost: padding takes part",
        "gradients/ghost.py",
        "factors = jnp.where(real, rule.factors(lengths), 0) * rows.weights",
        "factors = rule.factors(lengths) * rows.weights",
        GHOST + "is_the_definition[wide, few positions]",
    ),
    Mutant(
        "ghost: NaN reaches the sum",
        "gradients/rules.py",
        "return jnp.where(trees.expand(keep, x), x, filling)",
        "return x",
        "test_ghost.py::test_a_broken_example_contributes_nothing",
    ),
    Mutant(
        "ghost: nobody looks whether a norm is broken",
        "gradients/ghost.py",
        "broken = ~jnp.all(jnp.isfinite(lengths))",
        "broken = jnp.zeros((), bool)",
        "test_ghost.py::test_a_broken_example_contributes_nothing",
    ),
    Mutant(
        "weights above 1 let an example past its bound",
        "gradients/clipped.py",
        "jnp.where(rows > 0, jnp.minimum(rows, 1), 0)",
        "rows",
        "test_gradients.py::test_weights_are_held_to_one",
    ),
    Mutant(
        "one device's sum taken for that of all",
        "gradients/rows.py",
        'jax.lax.psum(part.value, "examples")',
        "part.value",
        "test_gradients.py::test_two_devices_are_one",
    ),
    Mutant(
        "a convolution's cotangent shifted by one",
        "gradients/convolution.py",
        "low = reach - parameters",
        "low = reach - 1 - parameters",
        GHOST + "is_the_definition[conv dilated]",
    ),
    Mutant(
        "a pool's cotangent to inputs that did not win",
        "gradients/pooling.py",
        "jax.lax.slice(winner, start, end) == number",
        "jax.lax.slice(winner, start, end) >= number",
        GHOST + "is_the_definition[norms and pools]",
    ),
    # Noise
    Mutant(
        "noise x 0.9",
        "noise/link.py",
        "deviations[group] * z",
        "0.9 * deviations[group] * z",
        LAWS + "the_noise_of_the_whole_chain_has_its_scale[constant]",
    ),
    Mutant(
        "noise omitted by the link",
        "noise/link.py",
        "leaf.astype(z.dtype) + deviations[group] * z",
        "leaf.astype(z.dtype)",
        LAWS + "the_noise_of_the_whole_chain_has_its_scale[constant]",
    ),
    Mutant(
        "noise omitted by the algorithm",
        "training/stepping.py",
        "mean, noise_state = recipe.mechanism.privatize(key).update(sums.gradients, noise_state)",
        "mean = jax.tree.map(lambda x: x / recipe.mechanism.batch_size, sums.gradients)\n"
        "    noise_state = noise_state._replace(step=noise_state.step + 1)",
        LAWS + "what_ran_is_what_is_accounted",
    ),
    Mutant(
        "noise scaled to one bound instead of the sensitivity",
        "noise/link.py",
        "_product(multiplier, rule.sensitivity)",
        "_product(multiplier, rule.bounds[0])",
        LAWS + "the_audit_of_one_step_measures_the_stated_multiplier[grouped bound-1.0]",
    ),
    Mutant(
        "a group's multiplier without its bound",
        "noise/link.py",
        "[_product(multiplier, bound) for multiplier, bound in pairs]",
        "[multiplier for multiplier, bound in pairs]",
        LAWS + "a_tuple_of_multipliers_gives_each_group_its_own_noise",
    ),
    Mutant(
        "noise after the mean",
        "mechanism.py",
        "noisy, state = link.update(updates, state)",
        "noisy, state = link.update("
        "jax.tree.map(lambda x: x / self.batch_size**2, updates), state)",
        MECHANISM + "noise_is_scaled_to_the_sum_and_divided_by_the_expected_size",
    ),
    Mutant(
        "sum-scaled noise on the mean, never divided",
        "mechanism.py",
        "1 / self.batch_size",
        "1.0",
        LAWS + "the_noise_of_a_mechanism_has_its_scale[constant]",
    ),
    Mutant(
        "noise key never advances",
        "noise/link.py",
        "trees.step_key(state.key, Purpose.NOISE, state.step)",
        "trees.step_key(state.key, Purpose.NOISE, 0)",
        LAWS + "noise_is_independent_between_steps_leaves_and_runs",
    ),
    Mutant(
        "noise step never advances",
        "noise/link.py",
        "GaussianState(state.key, state.step + 1)",
        "GaussianState(state.key, state.step)",
        LAWS + "noise_is_independent_between_steps_leaves_and_runs",
    ),
    Mutant(
        "same key for each leaf",
        "trees.py",
        "sample(jax.random.fold_in(key, i), jnp.shape(leaf)",
        "sample(key, jnp.shape(leaf)",
        LAWS + "noise_is_independent_between_steps_leaves_and_runs",
    ),
    Mutant(
        "noise and sampling share a stream",
        "trees.py",
        "jax.random.fold_in(jax.random.fold_in(root, purpose), step)",
        "jax.random.fold_in(root, step)",
        NOISE + "the_stream_is_a_function_of_root_purpose_and_step",
    ),
    Mutant(
        "noise in bfloat16",
        "trees.py",
        "(sum(sizes),), wide(run[0].dtype))",
        "(sum(sizes),), run[0].dtype)",
        NOISE + "narrow_noise_is_refused_and_narrow_leaves_get_wide_noise",
    ),
    Mutant(
        "noise without its tails",
        "noise/normal.py",
        "(low.astype(dtype) + 0.5) * 2.0**-8",
        "0.5",
        NOISE + "the_support_reaches_beyond_seven_on_both_sides",
    ),
    Mutant(
        "the second half of a draw repeats the first",
        "noise/normal.py",
        "_box_muller(words[0], words[1], across, dtype)",
        "_box_muller(words[0], words[1], False, dtype)",
        NOISE + "the_halves_of_a_draw_know_nothing_of_each_other",
    ),
    Mutant(
        "every block of a draw repeats the first",
        "noise/normal.py",
        "counter[0] += first",
        "counter[0] += 0 * first",
        NOISE + "no_number_is_drawn_twice",
    ),
    Mutant(
        "radius and angle of a normal number from the same word",
        "noise/normal.py",
        "_either(last, *_threefry",
        "_either(False, *_threefry",
        NOISE + "the_distribution_is_normal",
    ),
    Mutant(
        "every draw of a tree repeats the first",
        "trees.py",
        "jax.random.fold_in(key, len(values))",
        "jax.random.fold_in(key, 0)",
        NOISE + "leaves_are_cut_from_few_draws_and_share_no_number",
    ),
    Mutant(
        "one link, two runs, the same noise",
        "noise/link.py",
        "if runs and not replay:",
        "if False:",
        "test_noise.py::TestKeys::test_a_link_starts_one_run",
    ),
    Mutant(
        "accepted under MultiSteps",
        "noise/link.py",
        "        _refuse_multi_steps()\n",
        "",
        "test_noise.py::TestMultiSteps",
    ),
    # Sampling
    Mutant(
        "sampler at 2q",
        "sampling.py",
        "largest = math.floor(rate * _WORDS) - 1",
        "largest = math.floor(2 * rate * _WORDS) - 1",
        LAWS + "poisson_draws_of_a_small_set",
    ),
    Mutant(
        "coins rounded up",
        "sampling.py",
        "largest = math.floor(rate * _WORDS) - 1",
        "largest = math.floor(rate * _WORDS)",
        SAMPLE + "the_rate_that_runs_is_never_above_the_rate_that_is_accounted",
    ),
    Mutant(
        "the same people at every step",
        "sampling.py",
        "trees.step_key(key, Purpose.SAMPLING, step), (examples,)",
        "trees.step_key(key, Purpose.SAMPLING, 0), (examples,)",
        LAWS + "draws_differ_between_steps_and_keys[poisson]",
    ),
    Mutant(
        "the algorithm draws the first batch for ever",
        "training/resident.py",
        "recipe.mechanism.sampling.draw(key, step)",
        "recipe.mechanism.sampling.draw(key, 0)",
        LAWS + "infinite_bound_and_no_noise_is_plain_sgd[3-poisson]",
    ),
    Mutant(
        "accountant at q/2",
        "sampling.py",
        "dp.PoissonSampledDpEvent(rate,",
        "dp.PoissonSampledDpEvent(rate / 2,",
        LAWS + "the_mechanism_accounts_for_its_own_sampler_noise_and_steps",
    ),
    Mutant(
        "shuffled batches claim amplification",
        "sampling.py",
        "        return _gaussians(worst)\n",
        "        return _runs(multipliers, lambda z: dp.PoissonSampledDpEvent("
        "batch_size / examples, dp.GaussianDpEvent(z)))\n",
        SAMPLE + "shuffled_and_fixed_orders_are_one_gaussian_an_epoch[shuffled-1.0-28.3735]",
    ),
    Mutant(
        "an epoch counted by its best step",
        "sampling.py",
        "np.minimum.reduceat",
        "np.maximum.reduceat",
        SAMPLE + "an_epoch_is_counted_by_its_worst_step",
    ),
    Mutant(
        "fixed batches claim add-or-remove",
        "sampling.py",
        "neighbours=Neighbours.REPLACE_ONE",
        "neighbours=Neighbours.ADD_OR_REMOVE",
        SAMPLE + "fixed_batches_are_accounted_for_replace_one",
    ),
    Mutant(
        "a private order claims to be public",
        "sampling.py",
        "    if public:\n",
        "    if True:\n",
        SAMPLE + "an_order_made_from_private_data_is_not_private",
    ),
    # Accounting of the mechanism
    Mutant(
        "half the steps",
        "mechanism.py",
        "np.full(self.steps, multiplier, np.float64)",
        "np.full(self.steps // 2, multiplier, np.float64)",
        LAWS + "the_mechanism_accounts_for_its_own_sampler_noise_and_steps",
    ),
    Mutant(
        "an infinite bound is called private",
        "mechanism.py",
        "if np.isinf(self.clipping.sensitivity) and len(multipliers):",
        "if False:",
        MECHANISM + "an_infinite_bound_is_never_private",
    ),
    Mutant(
        "replace-one asked for and forgotten",
        "mechanism.py",
        "return Neighbours(self.neighbours or self.sampling.neighbours)",
        "return Neighbours(self.sampling.neighbours)",
        MECHANISM + "replace_one_is_asked_for_and_doubled",
    ),
    Mutant(
        "any neighbours for any sampler",
        "mechanism.py",
        "if _STRENGTH.index(self.relation) < _STRENGTH.index(self.sampling.neighbours):",
        "if False:",
        SAMPLE + "no_sampler_claims_more_neighbours_than_are_proved",
    ),
    Mutant(
        "calibration scales the account and not the noise",
        "mechanism.py",
        "return lambda step: schedule(step) * factor",
        "return schedule",
        MECHANISM + "calibration",
    ),
    Mutant(
        "steps past the plan are released",
        "mechanism.py",
        "jnp.where(step < self.steps, 1 / self.batch_size, jnp.nan)",
        "jnp.where(step <= self.steps, 1 / self.batch_size, jnp.nan)",
        "test_mechanism.py::TestHorizon",
    ),
    Mutant(
        "equal steps counted once",
        "accounting/leaves.py",
        "sampled[key] = sampled.get(key, 0) + count",
        "sampled[key] = count",
        ACCOUNT + "singletons_equal_grouped[rdp]",
    ),
    Mutant(
        "RDP forgets to double for replace-one",
        "accounting/renyi.py",
        "(4 if swap else 1)",
        "(1 if swap else 1)",
        ACCOUNT + "neighbours",
    ),
    Mutant(
        "fixed batches accounted without doubling",
        "accounting/renyi.py",
        "inner.unsampled_multiplier / 2)",
        "inner.unsampled_multiplier)",
        ACCOUNT + "neighbours",
    ),
    Mutant(
        "RDP of Poisson claims replace-one",
        "accounting/renyi.py",
        "if swap and parts.sampled:",
        "if False:",
        ACCOUNT + "no_proof_no_number",
    ),
    Mutant(
        "several multipliers count as their smallest",
        "accounting/events.py",
        "precision = sum(z**-2 for z in zs)",
        "precision = max(z**-2 for z in zs)",
        MECHANISM + "group_multipliers_are_joined_before_sampling",
    ),
    Mutant(
        "divergences of a schedule not added up",
        "accounting/renyi.py",
        "counts @ curves(list(parts.sampled))",
        "counts.mean() * curves(list(parts.sampled)).sum(axis=0)",
        ACCOUNT + "figure[two-rates-rdp]",
    ),
    Mutant(
        "multipliers rounded up for PLD",
        "accounting/pld.py",
        'np.searchsorted(multipliers, z, side="right") - 1',
        'np.minimum(np.searchsorted(multipliers, z, side="right"), len(multipliers) - 1)',
        ACCOUNT + "rounding_costs_no_less",
    ),
    Mutant(
        "calibration ends a little above its target",
        "accounting/search.py",
        "    while spent(value) > epsilon:\n        value *= 1 + tight / 2\n",
        "    value *= 0.999\n",
        ACCOUNT + "calibrate_rdp",
    ),
    Mutant(
        "the CLT estimate claims to be proven",
        "accounting/methods.py",
        "proven=False",
        "proven=True",
        LEDGER + "budgets_that_mean_nothing_are_refused",
    ),
    # Private normalisation of features
    Mutant(
        "normalisation: examples not clipped",
        "features/normalization.py",
        "factors = rule.factors(trees.group_norms(rows, (0,), 1))",
        "factors = jnp.ones((len(rows), 1))",
        FEATURES + "one_example_moves_a_query_by_no_more_than_its_threshold[10000.0]",
    ),
    Mutant(
        "normalisation: noise omitted",
        "features/normalization.py",
        "noisy, _ = link.update(total, link.init(total))",
        "noisy = total",
        FEATURES + "every_query_has_a_stream_of_its_own",
    ),
    Mutant(
        "normalisation: noise of one bound whatever the multiplier",
        "features/normalization.py",
        "link = noise.gaussian(multiplier, rule, key=stream)",
        "link = noise.gaussian(min(multiplier, 1.0), rule, key=stream)",
        FEATURES + "the_noise_of_each_query_has_its_scale",
    ),
    Mutant(
        "normalisation: all queries share one noise",
        "features/normalization.py",
        "trees.step_key(key, Purpose.PREPARATION, query)",
        "trees.step_key(key, Purpose.PREPARATION, 0)",
        FEATURES + "every_query_has_a_stream_of_its_own",
    ),
    Mutant(
        "normalisation: a quantile of the private norms, without noise",
        "features/normalization.py",
        "counts = _release(key, 2 + query, votes, 1.0, search.noise_multiplier)",
        "counts = votes.sum(axis=0)",
        FEATURES + "one_example_moves_a_histogram_by_no_more_than_one[1.0]",
    ),
    Mutant(
        "normalisation: only one of its queries is listed",
        "features/normalization.py",
        "queries = (float(self.noise_multiplier),) * 2",
        "queries = (float(self.noise_multiplier),)",
        FEATURES + "alone_it_costs_what_the_reference_says[8.0-0.8639-0.6948-0.634]",
    ),
    Mutant(
        "normalisation: the search for thresholds is free",
        "features/normalization.py",
        "(float(self.thresholds.noise_multiplier),) * 2 + queries",
        "queries",
        FEATURES + "a_search_is_paid_for",
    ),
    Mutant(
        "normalisation: less noise than is listed",
        "features/normalization.py",
        "return _release(key, query, rows, bound, self.noise_multiplier)",
        "return _release(key, query, rows, bound, self.noise_multiplier / 2)",
        FEATURES + "one_example_moves_a_query_by_no_more_than_its_threshold[1.0]",
    ),
    Mutant(
        "normalisation: the search has less noise than is listed",
        "features/normalization.py",
        "counts = _release(key, 2 + query, votes, 1.0, search.noise_multiplier)",
        "counts = _release(key, 2 + query, votes, 1.0, search.noise_multiplier / 2)",
        FEATURES + "one_example_moves_a_histogram_by_no_more_than_one[1.0]",
    ),
    Mutant(
        "normalisation: noise that hides nothing passes",
        "features/normalization.py",
        "noise.check_multiplier(multiplier, clipping.flat(bound))",
        "pass",
        FEATURES + "what_means_nothing_is_refused[changes2-bound must be positive]",
    ),
    Mutant(
        "normalisation: sums of another number of examples",
        "features/normalization.py",
        "if features.shape[0] != self.examples:",
        "if False:",
        FEATURES + "another_data_set_is_refused",
    ),
    Mutant(
        "preparation left out of the event",
        "mechanism.py",
        "return accounting.compose(self.prepared, self.sampling.event(multipliers))",
        "return self.sampling.event(multipliers)",
        MECHANISM + "preparation_is_paid_for_before_the_first_step",
    ),
    Mutant(
        "the card forgets the preparation",
        "reports/card.py",
        '{"gaussian_multipliers": list(spent.preparation)}',
        '{"gaussian_multipliers": []}',
        FEATURES + "the_card_and_the_statement_carry_it",
    ),
    # Resume
    Mutant(
        "a checkpoint is there and the run begins anew",
        "training/run.py",
        "if found.state.ledger.steps >= self.done:",
        "if False:",
        "test_faults.py::test_the_root_key_is_on_disk_before_the_first_step",
    ),
    Mutant(
        "a resumed run takes a fresh key",
        "training/run.py",
        'self.state, self.seen = found.state, list(found.facts["seen"])',
        "self.state, self.seen = found.state._replace(key=self.state.key), []",
        "test_faults.py::test_the_root_key_is_on_disk_before_the_first_step",
    ),
    Mutant(
        "what was seen before a checkpoint is forgotten",
        "training/run.py",
        '{"seen": list(self.seen)}',
        '{"seen": []}',
        "test_faults.py::test_rules_with_several_groups_resume",
    ),
    Mutant(
        "no checkpoint before the first step",
        "training/run.py",
        "if not self.save(wait=True):",
        "if False:",
        "test_faults.py::test_the_root_key_is_on_disk_before_the_first_step",
    ),
    Mutant(
        "rows younger than the checkpoint stay",
        "training/folder.py",
        ' if row["step"] <= until]',
        "]",
        "test_faults.py::test_rows_that_will_be_written_again_are_taken_back",
    ),
    Mutant(
        "a run with other settings goes on",
        "training/folder.py",
        "    if names:\n",
        "    if False:\n",
        "test_faults.py::test_another_run_is_refused_by_name[multiplier]",
    ),
    Mutant(
        "a run on other data goes on",
        "training/dpsgd.py",
        '"data": _content(data),',
        '"data": None,',
        "test_faults.py::test_another_run_is_refused_by_name[data]",
    ),
    Mutant(
        "a run with another noise goes on",
        "mechanism.py",
        "[int(start), float(self.multipliers[start])] for start in starts",
        "[int(start), 1.0] for start in starts",
        "test_faults.py::test_another_run_is_refused_by_name[multiplier]",
    ),
    Mutant(
        "two processes in one folder",
        "training/folder.py",
        "fcntl.LOCK_EX | fcntl.LOCK_NB",
        "fcntl.LOCK_SH",
        "test_faults.py::test_two_processes_do_not_share_a_folder",
    ),
    Mutant(
        "numbers that were not written are believed",
        "checkpoints.py",
        "if trees.fingerprint(numbers) != digest:",
        "if False:",
        "test_faults.py::test_numbers_of_another_checkpoint_are_noticed",
    ),
    Mutant(
        "a signal ends the run without a checkpoint",
        "training/fit.py",
        "now=run.done == end or stop.asked",
        "now=run.done == end",
        "test_faults.py::test_a_signal_is_obeyed_after_saving[15]",
    ),
    Mutant(
        "what earlier runs spent is forgotten",
        "mechanism.py",
        "*(spent.event for spent in self.before), *queries",
        "*queries",
        MECHANISM + "what_was_spent_before_is_paid_for",
    ),
    Mutant(
        "of an earlier run only its queries count",
        "mechanism.py",
        "self.sampling.event(np.asarray(each, np.float64))",
        "dp.NoOpDpEvent()",
        MECHANISM + "what_was_spent_before_is_paid_for",
    ),
    Mutant(
        "of an earlier run only what was saved counts",
        "training/folder.py",
        "max([*saved, *logged, 0])",
        "max([*saved, 0])",
        "test_faults.py::test_a_run_goes_on_from_another_and_pays_for_both",
    ),
    Mutant(
        "of an earlier run one step is forgotten",
        "mechanism.py",
        "left -= runs[-1][1]",
        "left -= runs[-1][1] + 1",
        MECHANISM + "what_was_spent_is_cut_at_the_steps_that_ran",
    ),
    Mutant(
        "runs before the earlier run are forgotten",
        "training/folder.py",
        '(*map(Spent.of, facts["before"]), Spent.of(',
        "(Spent.of(",
        "test_faults.py::test_a_run_goes_on_from_another_and_pays_for_both",
    ),
    Mutant(
        "the card forgets what was spent before",
        "reports/card.py",
        '"before": [_spent(spent) for spent in mechanism.before]',
        '"before": []',
        "test_reports.py::test_a_card_of_a_run_that_goes_on_is_verified",
    ),
    Mutant(
        "the deviation on the mean is that on the sum",
        "mechanism.py",
        "[deviation / self.batch_size for deviation in each]",
        "each",
        "test_training.py::TestAdam::test_groups_have_their_own_noise",
    ),
    # The ledger
    Mutant(
        "the plan off by one",
        "ledger.py",
        "if done + steps > planned:",
        "if done + steps > planned + 1:",
        LEDGER + "the_step_after_the_last_is_refused",
    ),
    Mutant(
        "the budget off by one",
        "ledger.py",
        "done + steps > fits:",
        "done + steps > fits + 1:",
        LEDGER + "the_step_that_would_pass_the_budget_is_refused_in_words",
    ),
    Mutant(
        "the bisection ends one too high",
        "ledger.py",
        "if cost <= budget.epsilon else",
        "if cost <= 1.001 * budget.epsilon else",
        LEDGER + "the_step_that_would_pass_the_budget_is_refused_in_words",
    ),
    Mutant(
        "equal steps written down once",
        "ledger.py",
        "return Ledger(ran[starts], np.diff(starts, append=len(ran)))",
        "return Ledger(ran[starts], np.ones(len(starts), np.int64))",
        LEDGER + "what_ran_costs_what_was_planned_and_less_if_it_stopped",
    ),
    Mutant(
        "another mechanism's ledger accepted",
        "ledger.py",
        "if not np.array_equal(ledger.expand(), _multipliers(mechanism)[:done]):",
        "if False:",
        LEDGER + "a_ledger_of_another_mechanism_is_refused",
    ),
    Mutant(
        "the algorithm does not ask the ledger",
        "training/dpsgd.py",
        "spent = ledger.admit(state.ledger, mechanism, budget, steps=count)",
        "spent = state.ledger",
        LAWS + "no_step_runs_beyond_the_plan",
    ),
    Mutant(
        "every step sees the entry of the first",
        "training/stepping.py",
        "jax.tree.map(jnp.asarray, recipe.per_step(step))",
        "jax.tree.map(jnp.asarray, recipe.per_step(0 * step))",
        "test_training.py::TestPerStep::test_the_loss_of_step_t_sees_the_epoch_of_step_t[None-vmap]",
    ),
    Mutant(
        "a scheduled bound that the noise does not follow",
        "training/stepping.py",
        "mean = jax.tree.map(lambda x: (x * scale).astype(x.dtype), mean)",
        "pass",
        "test_training.py::TestBoundSchedule::test_noise_follows_the_bound",
    ),
    Mutant(
        "a scheduled bound that gradients are not clipped to",
        "training/stepping.py",
        "lambda p, x: loss(p, x) / scale",
        "lambda p, x: loss(p, x)",
        "test_training.py::TestBoundSchedule::test_it_is_clipping_to_the_bound_of_the_step",
    ),
    Mutant(
        "several steps written down as one",
        "training/dpsgd.py",
        "mechanism, budget, steps=count)",
        "mechanism, budget, steps=1)",
        "test_training.py::test_many_steps_at_once_are_the_same_steps",
    ),
    Mutant(
        "steps at once that all have one number",
        "training/resident.py",
        "params, moved, info = one(params, moved, key, data)",
        "params, (_, inner), info = one(params, moved, key, data)\n"
        "            moved = (moved[0], inner)",
        "test_training.py::test_many_steps_at_once_are_the_same_steps",
    ),
    Mutant(
        "streamed: padding takes part",
        "training/streamed.py",
        "return whole, np.arange(size) < count",
        "return whole, np.arange(size) <= count",
        "test_training.py::TestStreamed::test_it_takes_the_steps_of_data_in_memory[poisson-8]",
    ),
    Mutant(
        "streamed: the last microbatch forgotten",
        "training/streamed.py",
        "for i in range(0, len(indices), size)]",
        "for i in range(0, len(indices) - size, size)]",
        "test_training.py::TestStreamed::test_it_takes_the_steps_of_data_in_memory[poisson-8]",
    ),
    Mutant(
        "streamed: every step draws the first batch",
        "training/streamed.py",
        "_chosen(draw(key, step), size)",
        "_chosen(draw(key, first), size)",
        "test_training.py::TestStreamed::test_it_takes_the_steps_of_data_in_memory[poisson-8]",
    ),
    Mutant(
        "what a step adds pushes its examples aside",
        "training/stepping.py",
        "return (*rows, every)",
        "return (*jax.tree.map(lambda x: jnp.roll(x, 1, -1), rows), every)",
        "test_training.py::TestPerStep::test_it_is_as_if_each_example_brought_it",
    ),
    Mutant(
        "a stream reads other rows than were drawn",
        "data/streaming.py",
        "self._read(indices[share].tolist())",
        "self._read(share.tolist())",
        "test_streaming.py::test_rows_come_as_they_are_asked_for_and_nothing_else_is_read",
    ),
    Mutant(
        "a stream gives the batch of another step",
        "data/streaming.py",
        "if len(waiting) > ahead:\n                    yield self._finish(*waiting.popleft())",
        "if len(waiting) > ahead:\n                    yield self._finish(*waiting.pop())",
        "test_streaming.py::test_batches_come_in_order[1]",
    ),
    Mutant(
        "a stream takes padding for the last example",
        "data/streaming.py",
        "indices.min() >= 0 and indices.max() < examples",
        "indices.max() < examples",
        "test_streaming.py::test_indices_are_checked",
    ),
    Mutant(
        "a stream leaves out what cannot be read",
        "data/streaming.py",
        "for promise in promises:",
        "for promise in []:",
        "test_streaming.py::test_what_cannot_be_read_is_named",
    ),
    Mutant(
        "rows that were held out are trained on",
        "data/dataset.py",
        "rest, held = order[size:], order[:size]",
        "rest, held = order, order[:size]",
        "test_data.py::test_a_validation_part_is_split_off_without_a_look_at_it",
    ),
    Mutant(
        "batch statistics pass for parameters",
        "losses/modules.py",
        'if "batch_stats" in params:',
        "if False:",
        "test_losses.py::test_of_refuses_batch_statistics",
    ),
    Mutant(
        "batch statistics are made on the way",
        "losses/modules.py",
        'mutable=["preactivations"]',
        "mutable=True",
        "test_losses.py::test_batch_statistics_are_refused_with_a_penalty_too",
    ),
]


def test_there_are_enough_and_no_two_alike():
    assert len(MUTANTS) >= 25
    assert len({m.name for m in MUTANTS}) == len(MUTANTS)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_mutant_is_killed(mutant, tmp_path):
    shutil.copytree(SOURCES, tmp_path / "dpjax", ignore=shutil.ignore_patterns("__pycache__"))
    edited = tmp_path / "dpjax" / mutant.file
    source = edited.read_text()
    assert source.count(mutant.before) == 1, "the line to edit must be there, once"
    edited.write_text(source.replace(mutant.before, mutant.after))
    options = ["-q", "-x", "--no-header", "-p", "no:cacheprovider", "-p", "no:xdist"]
    outcome = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            *options,
            f"--rootdir={TESTS.parent}",
            TESTS / mutant.killer,
        ],
        env={
            **{k: v for k, v in os.environ.items() if not k.startswith("PYTEST")},
            "PYTHONPATH": str(tmp_path),
            "DPJAX_TESTED_SOURCES": str(tmp_path),
        },
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    # 1: tests ran and failed.  Anything else (no such test, a crash) proves nothing.
    assert outcome.returncode == 1, outcome.stdout[-3000:] + outcome.stderr[-1000:]
    assert " failed" in outcome.stdout
