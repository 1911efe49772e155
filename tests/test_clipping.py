# SPDX-License-Identifier: Apache-2.0
"""Rules, partitions and the Optax link, on small cases whose sums are known."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mutation import kills

from dpjax import clip_and_sum, clipped_grad, clipping, testing, types

inf = math.inf

# One record with a gradient of norm 3, one of .5, one of 0; R = 1.
FACTORS = [
    ("flat", clipping.flat(1.0), [1.0, 0.5, 0.0]),
    ("automatic", clipping.automatic(1.0, 0.01), [0.996678, 0.980392, 0.0]),
    ("normalized", clipping.normalized(1.0), [1.0, 1.0, 0.0]),
    ("psac", clipping.psac(1.0, 0.1), [0.989362, 0.75, 0.0]),
    ("hard threshold", clipping.hard_threshold(1.0), [0.0, 0.5, 0.0]),
    ("hard threshold, Z=6", clipping.hard_threshold(1.0, 6.0), [0.5, 0.083333, 0.0]),
]


@pytest.mark.parametrize(("name", "rule", "lengths"), FACTORS)
def test_length_after_clipping(name, rule, lengths):
    for length, want in zip([3.0, 0.5, 0.0], lengths, strict=True):
        gradient = {"a": jnp.array([[length * 0.6, 0.0]]), "b": jnp.array([[length * 0.8]])}
        summed, _, _ = clipping.clip(rule, gradient)
        found = math.hypot(*np.concatenate([summed["a"], summed["b"]]))
        assert found == pytest.approx(want, abs=1e-5), name


# 0.5 * |w - x|^2 at w = [1, 2 | 3]: four examples, gradients from the formula.
W = (jnp.array([1.0, 2.0]), jnp.array([3.0]))
X = (
    jnp.array([[3.0, 6.0], [5.0, 6.0], [4.0, 8.0], [-1.0, 0.0]]),
    jnp.array([[8.0], [2.0], [3.0], [1.0]]),
)


def quadratic(w, x):
    return sum(0.5 * jnp.sum((a - b) ** 2) for a, b in zip(w, x, strict=True))


SUMS = [
    ("flat", clipping.flat(2.5), [-2.16079087, -4.02418085, 0.01517983]),
    ("automatic", clipping.automatic(1.0, 0.01), [-0.86365874, -1.60790528, 0.00521702]),
    ("normalized", clipping.normalized(1.0), [-0.86431635, -1.60967234, 0.00607193]),
    ("global", clipping.hard_threshold(6.0), [-2, -2, 3]),
    ("global, Z", clipping.hard_threshold(2.5, 6.0), [-0.83333333, -0.83333333, 1.25]),
    ("grouped", clipping.grouped(2.5, 2), [-2.23606798, -4.47213595, 0.5]),
    ("grouped, total", clipping.grouped(total=2.5, groups=2), [-1.58113883, -3.16227766, 1.0]),
]


@pytest.mark.sample(4)
@pytest.mark.parametrize("engine", ["vmap", "scan", "ghost"])
@pytest.mark.parametrize(("name", "rule", "want"), SUMS)
def test_sums_of_the_quadratic(name, rule, want, engine):
    result = clipped_grad(quadratic, rule, engine, 3)(W, X)
    np.testing.assert_allclose(np.concatenate(result.value), want, rtol=2e-6, atol=2e-7)
    if rule.name == "flat":
        np.testing.assert_allclose(
            result.norms[:, 0], [6.70820393, 5.74456265, 6.70820393, 3.46410162], rtol=1e-6
        )


@kills("types.py", "math.hypot(*self.bounds)", "max(self.bounds)")
def test_sensitivities():
    assert clipping.grouped(2.5, 2).sensitivity == pytest.approx(3.53553391)
    assert clipping.grouped(total=2.5, groups=2).sensitivity == pytest.approx(2.5)
    assert clipping.per_group((1, 15), 2).sensitivity == pytest.approx(15.0333, abs=1e-4)
    assert clipping.per_group((2, 5), 2).sensitivity == pytest.approx(math.sqrt(29))
    assert clipping.per_group((3, 4), 2).sensitivity == 5.0
    assert clipping.hard_threshold(1.0, screen=6.0).sensitivity == 1.0
    assert clipping.automatic(2.0).sensitivity == 2.0


GRADIENTS = {"w": jnp.array([[0.0, 0, 0], [0, 3, 4], [4, 0, 3], [3, 4, 0]])}


@pytest.mark.parametrize(("bound", "want", "clipped"), [(1.25, 1.75, 3), (inf, 7.0, 0), (0, 0, 3)])
def test_bounds_at_their_edges(bound, want, clipped):
    summed, norms, _ = clipping.clip(clipping.flat(bound), GRADIENTS)
    np.testing.assert_allclose(summed["w"], [want] * 3, rtol=1e-6)
    assert int(jnp.sum(norms > bound)) == clipped


@pytest.mark.parametrize(
    "rule",
    [
        clipping.flat(0.0),
        clipping.automatic(0.0, 0.0),
        clipping.psac(0.0),
        clipping.normalized(0.0),
        clipping.hard_threshold(0.0, 0.0),
        clipping.hard_threshold(0.0, 2.0),
        clipping.jl(0.0),
    ],
    ids=lambda rule: rule.name,
)
def test_a_bound_of_0_silences_whatever_the_rule(rule):
    norms = jnp.array([[0.0], [1e-30], [1.0], [1e10], [inf], [math.nan]])
    assert rule.sensitivity == 0.0
    np.testing.assert_array_equal(rule.factors(norms), np.zeros_like(norms))


def test_groups_of_the_worked_example():
    params = {"a": jnp.zeros(2), "b": jnp.zeros(2)}
    rule = clipping.per_group({"a": 1.0, "b": 15.0}, clipping.by_leaf(params))
    gradients = {"a": jnp.array([[3.0, 4.0]]), "b": jnp.array([[0.0, 10.0]])}
    summed, norms, _ = clipping.clip(rule, gradients)
    np.testing.assert_allclose(norms, [[5.0, 10.0]])
    np.testing.assert_allclose(summed["a"], [0.6, 0.8], rtol=1e-6)
    np.testing.assert_allclose(summed["b"], [0.0, 10.0])


def test_float16_gradients_do_not_underflow():
    gradients = {"w": jnp.full((1, 1_000_000), 1e-4, jnp.float16)}
    summed, _, _ = clipping.clip(clipping.flat(0.01), gradients)
    assert float(jnp.linalg.norm(summed["w"])) <= 0.01 * (1 + 1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("microbatch", [1, 32, None])
def test_bfloat16_sums_do_not_saturate(microbatch):
    clipped = clipped_grad(jnp.vdot, clipping.flat(1.0), microbatch_size=microbatch)
    result = clipped(jnp.zeros(1, jnp.bfloat16), jnp.ones((1024, 1), jnp.bfloat16))
    assert float(result.value[0]) == 1024.0


def test_partitions():
    params = {
        "conv": {"bias": jnp.zeros(16), "kernel": jnp.zeros((8, 8, 1, 16))},
        "dense": {"bias": jnp.zeros(10), "kernel": jnp.zeros((512, 10))},
    }
    assert clipping.by_leaf(params).size == 4
    assert clipping.by_layer(params).names == ("conv", "dense")
    top = clipping.by_layer({"b": 0, "layer": {"kernel": 0}, "w": 0})
    assert (top.names, top.assign({"b": 0, "layer": {"kernel": 0}, "w": 0})) == (
        ("(top)", "layer"),
        (0, 1, 0),
    )
    by_path = clipping.by_path(params, {"bias$": "biases", "conv": "conv", ".*": "rest"})
    assert by_path.assign(params) == (0, 1, 0, 2)
    assert clipping.balanced(2).assign(params) == (0, 0, 0, 1)
    for groups in range(1, 5):
        assigned = clipping.balanced(groups).assign(params)
        assert sorted(set(assigned)) == list(range(groups))
        assert list(assigned) == sorted(assigned)


@pytest.mark.parametrize("seed", range(2))
def test_balanced_groups_are_as_equal_as_they_can_be(seed):
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 60, rng.integers(3, 9))
    leaves = [jnp.zeros(int(n)) for n in sizes]

    def best(start, groups):  # the smallest largest group, by trying every cut
        if groups == 1:
            return sizes[start:].sum()
        ends = range(start + 1, len(sizes) - groups + 2)
        return min(max(sizes[start:end].sum(), best(end, groups - 1)) for end in ends)

    for groups in range(1, min(5, len(sizes)) + 1):
        assigned = np.array(clipping.balanced(groups).assign(leaves))
        assert sorted(set(assigned)) == list(range(groups))
        largest = max(sizes[assigned == g].sum() for g in range(groups))
        assert largest == best(0, groups)


@kills("types.py", "set(groups) != set(range(len(self.names)))", "False", case="groups0")
@pytest.mark.parametrize("groups", [(0, -1), (0,), (0, 0)])
def test_every_leaf_has_a_group_and_every_group_a_leaf(groups):
    """A leaf in no group would be in no norm, and pass unclipped."""
    partition = types.Partition(("a", "b"), lambda tree: groups)
    rule = types.Clipping(partition, (1.0, 1.0), jnp.ones_like)
    with pytest.raises(ValueError, match="every leaf needs a group"):
        clipping.clip(rule, [jnp.ones((3, 2)), jnp.ones((3, 4))])


@kills("types.py", "jnp.clip(wished, 0, limit)", "jnp.clip(wished, 0, 2 * limit)", slow=True)
def test_a_rule_of_ones_own_cannot_break_its_bound():
    greedy = types.Clipping(clipping.balanced(1), (1.0,), lambda norms: norms * 100)
    norms = jnp.array([[0.0], [1e-20], [0.5], [1.0], [1e10]])
    assert float(jnp.max(greedy.factors(norms) * norms)) <= 1.0 + 1e-6
    negative = types.Clipping(clipping.balanced(1), (1.0,), lambda norms: -norms)
    assert float(jnp.min(negative.factors(norms))) >= 0.0


@pytest.mark.sample(1)
@pytest.mark.parametrize("engine", ["vmap", "ghost"])
def test_an_example_exactly_on_its_bound_is_within_for_every_engine(engine):
    """The book-keeping engine rounds norms up."""
    w, x, bound = jnp.zeros((16, 16)), jnp.ones((1, 2, 16)), 32.0
    run = clipped_grad(lambda w, x: jnp.sum(x @ w), clipping.hard_threshold(bound), engine)
    found = run(w, x)
    assert 0.9999 * bound < float(jnp.linalg.norm(found.value)) <= bound
    below = clipping.Quantile().below(clipping.flat(bound), found.norms, jnp.ones(1, bool))
    assert float(below) == 0.5


@pytest.mark.thorough
@kills("types.py", "(norms, _LEAST)", "(norms, jnp.finfo(norms.dtype).tiny)", slow=True)
@pytest.mark.parametrize(
    "rule",
    [
        clipping.normalized(1.0),
        types.Clipping(clipping.balanced(1), (1.0,), lambda norms: 1 / norms),
    ],
    ids=lambda rule: rule.name,
)
@pytest.mark.parametrize("entry", [1e-20, 1.2e-19])
def test_what_squares_to_nothing_is_not_made_longer_than_the_bound(rule, entry):
    """A norm that is too short allows too large a factor."""
    gradients = np.full((2, 26_010), entry, np.float32)
    gradients[0, 0] = 1.2e-19
    testing.assert_sensitivity(rule, jnp.asarray(gradients))


@pytest.mark.thorough
@pytest.mark.sample(1)
@kills(
    "types.py",
    "jax.vmap(self._alone)(norms)",
    "jnp.broadcast_to(self.wish(norms), norms.shape)",
    case="mean",
    slow=True,
)
@pytest.mark.parametrize(
    "wish",
    [
        lambda norms: 1 / (norms.sum(axis=-1) + 0.01),
        lambda norms: 1 / jnp.mean(norms) + 0 * norms,
        lambda norms: jnp.max(norms) * jnp.ones_like(norms),
        lambda norms: jnp.where(norms > 4, jnp.nan, 1.0),
        lambda norms: 0.5,
    ],
    ids=["an axis is lost", "mean", "largest", "NaN", "constant"],
)
def test_a_rule_of_ones_own_sees_one_example_at_a_time(wish):
    rule = types.Clipping(clipping.balanced(1), (1.0,), wish)
    gradients = jnp.concatenate([jnp.full((20, 1), 0.02), jnp.full((1, 1), 5.0)])
    testing.assert_sensitivity(rule, gradients)
    assert rule.factors(jnp.abs(gradients)).shape == (21, 1)
    alone = [rule.factors(jnp.abs(row[None])) for row in gradients]
    np.testing.assert_array_equal(rule.factors(jnp.abs(gradients)), jnp.concatenate(alone))


@kills("types.py", ".wish if isinstance(self.factors, _Held) else self.factors", "", slow=True)
def test_a_rule_with_other_bounds_keeps_its_wish():
    other = dataclasses.replace(clipping.flat(1.0), bounds=(4.0,))
    np.testing.assert_allclose(other.factors(jnp.array([[2.0], [8.0]])), [[1.0], [0.5]])


OF_A, OF_B = {"a": jnp.zeros(2)}, {"b": jnp.zeros(2)}
TEACHES = [
    (lambda: clipping.flat(-1.0), r"^clipping\.flat\(bound=-1.0\): expected a number, 0 or more"),
    (lambda: clipping.flat(math.nan), "expected a number"),
    (lambda: clipping.grouped(1.0, 2, total=1.0), "give one of them"),
    (lambda: clipping.per_group((1.0, 2.0, 3.0), 2), "3 bounds for 2 groups"),
    (lambda: dataclasses.replace(clipping.grouped(1.0, 2), projections=30), "one group alone"),
    (lambda: clipping.hard_threshold(1.0, 0.0), r"screen=0.0\): expected a finite number above 0"),
    (lambda: clipping.balanced(3).assign(OF_A), r"^clipping\.balanced\(groups=3\): .*only 1"),
    (lambda: clipping.by_path(OF_A, {"b": 0}), "no pattern"),
    (lambda: clipping.by_leaf(OF_A).assign(OF_B), r"^clipping\.by_leaf: made for"),
]


def test_bounds_are_pythons_numbers():
    for rule in (clipping.flat(jnp.float32(1)), clipping.per_group(np.ones(2), 2)):
        assert [type(bound) for bound in rule.bounds] == [float] * len(rule.bounds)


@pytest.mark.parametrize(("call", "message"), TEACHES)
def test_errors_teach(call, message):
    with pytest.raises(ValueError, match=message):
        call()


PARAMS = {"w": jnp.zeros(3), "b": jnp.zeros(())}
BATCH = {"w": jnp.ones((2, 3)), "b": jnp.ones(2)}


UNBATCHED = {
    "averaged over the batch": {"w": jnp.ones(3), "b": jnp.ones(())},
    "one leaf averaged": {"w": jnp.ones((2, 3)), "b": jnp.ones(())},
    "another model": {"w": jnp.ones((2, 4)), "b": jnp.ones(2)},
}


@pytest.mark.parametrize("name", UNBATCHED)
def test_clip_and_sum_refuses_what_are_no_rows(name):
    link = clip_and_sum(clipping.flat(1.0))
    with pytest.raises(ValueError, match=r"expected \(batch, |leading axis"):
        link.update(UNBATCHED[name], link.init(PARAMS))


@pytest.mark.parametrize("mask", [np.ones((2, 1)), np.ones(3)])
def test_a_mask_of_another_shape_is_refused(mask):
    link = clip_and_sum(clipping.flat(1.0))
    with pytest.raises(ValueError, match=r"mask has shape.*expected \(2,\)"):
        link.update(BATCH, link.init(PARAMS), mask=mask)
    clipped = clipped_grad(lambda p, x: jnp.sum(p["w"] * x), clipping.flat(1.0))
    with pytest.raises(ValueError, match=r"clipped_grad: mask has shape.*expected \(2,\)"):
        clipped(PARAMS, jnp.ones((2, 3)), mask)


@kills(
    "clipping/application.py",
    "jnp.where(real, rule.factors(norms), 0)",
    "rule.factors(norms)",
    slow=True,
)
def test_a_padded_row_with_a_huge_gradient_leaves_exactly_nothing():
    link = clip_and_sum(clipping.flat(1.0))
    gradients = jax.tree.map(lambda g: g.at[1].set(100.0), BATCH)
    out, _ = link.update(gradients, link.init(PARAMS), mask=jnp.array([0, 0]))
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(out.value))


def test_weights_without_groups_are_refused_by_the_definition():
    """They would be weights of columns: the first example's would be everyone's."""
    each = [0.0, 1.0, 1.0]
    with pytest.raises(ValueError, match="Incompatible"):
        clipping.clip(clipping.flat(1.0), jnp.ones((3, 2)), weights=each)
    total, *_ = clipping.clip(clipping.flat(2.0), jnp.ones((3, 2)), weights=np.c_[each])
    np.testing.assert_array_equal(total, [2.0, 2.0])


def test_a_partition_never_sees_the_batch_axis():
    by_rank = types.Partition(
        ("vectors", "matrices"), lambda tree: [int(leaf.ndim > 1) for leaf in jax.tree.leaves(tree)]
    )
    rule = clipping.per_group((0.01, 1.0), groups=by_rank)
    gradients = {"bias": jnp.full((1, 20), 100.0), "kernel": jnp.full((1, 5, 4), 100.0)}
    total, *_ = clipping.clip(rule, gradients)
    assert float(jnp.linalg.norm(total["bias"])) == pytest.approx(0.01, rel=1e-5)
    assert float(jnp.linalg.norm(total["kernel"])) == pytest.approx(1.0, rel=1e-5)


@pytest.mark.parametrize("third", [np.full(4, 0.25), np.array([2, 0, 1, 1])])
def test_weights_and_labels_are_no_mask(third):
    """Each nonzero entry would be an example, and class 0 would be left out as padding."""
    clipped = clipped_grad(lambda w, x: w @ x, clipping.flat(1.0))
    with pytest.raises(ValueError, match="mask has entries that are neither 0 nor 1"):
        clipped(jnp.ones(3), jnp.ones((4, 3)), third)
    assert clipped(jnp.ones(3), jnp.ones((4, 3)), np.array([1.0, 0, 1, 1])).norms[1] == 0
