# SPDX-License-Identifier: Apache-2.0
r"""Rules: a leaf's per-example gradient norms and its clipped sum, from its sites.

Five ways lead to a norm, and `choose` takes the cheapest that fits:

* *product*: a single position, $\lVert x g^\top \rVert = \lVert x \rVert \lVert g \rVert$;
* *gram*: $\lVert \sum_s x_s g_s^\top \rVert^2 = \sum_{st} \langle x_s, x_t \rangle
  \langle g_s, g_t \rangle$, also across the sites of tied weights;
* *rows*: of a table, what was taken of one row added up before it is squared;
* *instantiate*: the gradient of each example, as one batched product, kept for the sum if
  it is no larger than what is kept anyway, or if a view could tear the two apart;
* *derivative*: the same by the equation's own derivative, for what has no form.

Everything is float32 or wider at the highest precision, whatever the model computes in:
clipping trusts these norms.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from dpjax import trees
from dpjax.gradients._bookkeeping.outer_products import Outer, form_of
from dpjax.gradients._bookkeeping.trace import Site

Squares = Float[Array, " batch"]
Shape = jax.ShapeDtypeStruct
Total = Callable[[Squares], Callable[[bool], Array]]
"""From factors to a sum; the rest of the way depends on whether care is needed."""

# Writing and squaring one number, or scaling it, in multiplications of a matrix product.
_TRAFFIC = 8
# Inner products between positions are summed in blocks of so many terms, which makes each of
# their multiplications cost as much as so many of a large product.
_BLOCK, _SLOWER = 16, 10
# Each pair of sites has a program of its own: of many they take minutes to compile.
_MANY = 6
# What is pulled back through these adds nothing up, and so is rounded as its cotangent is.
_ENTRYWISE = {"add", "add_any", "sub", "mul", "div"}
# An instantiated gradient is kept while it is at most so many times what its product reads.
_ROOM = 4


class Entry(NamedTuple):
    """A site, and what the backward pass brought of it for a batch."""

    site: Site
    data: Sequence[Array]
    cotangent: Array

    def scaled(self, factors: Squares) -> Entry:
        """Each example's cotangent times its factor."""
        return self._replace(cotangent=self.cotangent * trees.expand(factors, self.cotangent))

    def wiped(self, keep: Array) -> Entry:
        """Without what is not to be kept, NaN and all."""
        # With a cotangent of 0 any finite data give 0; 1 may also be divided by.
        data = [_wiped(x, keep, 1) for x in self.data]
        return self._replace(data=data, cotangent=_wiped(self.cotangent, keep, 0))

    @property
    def form(self) -> Outer | None:
        """What it says about the gradient of the view."""
        return form_of(self.site, self.data, self.cotangent)


class Choice(NamedTuple):
    """How the gradient of a leaf is dealt with.

    Args:
      rule: "product", "gram", "rows", "instantiate" or "derivative".
      keep: Whether per-example gradients are kept for the sum.
      operations: What one example's norm costs, in multiplications of a large product.
      numbers: How many are written for it, beside the data and cotangents themselves.
    """

    rule: str
    keep: bool
    operations: int
    numbers: int


def choose(leaf: Array | Shape, sites: Sequence[Site], forms: Sequence[Outer | None]) -> Choice:
    """Takes the cheapest rule that fits; by shapes alone."""
    outers = [form for form in forms if form is not None]
    isometric = all(site.isometry for site in sites)
    if len(outers) < len(sites):
        once = len(sites) == 1 and sites[0].equation.primitive.name in _ENTRYWISE
        keep = not (isometric and once and _entire(leaf, sites))
        return Choice("derivative", keep, _TRAFFIC * leaf.size, leaf.size)
    blocks, positions = outers[0].g.shape[1], sum(o.g.shape[2] for o in outers)
    width = max(1 if o.chosen else o.width for o in outers)
    depth, rows = outers[0].g.shape[3], any(o.chosen for o in outers)
    read = sum(math.prod(a.shape[1:]) for o in outers for a in (*o.x, o.g))
    keep = leaf.size <= _ROOM * read or not isometric
    product = 0 if rows else blocks * positions * width * depth
    copied = sum(math.prod(x.shape[1:]) for o in outers if o.copied for x in o.x)
    again = product + _TRAFFIC * copied
    by_rows, pairs = rows and len(outers) == 1, blocks * positions**2
    gram = pairs * (width + depth) * (1 if by_rows else _SLOWER)
    instantiate = product + _TRAFFIC * leaf.size
    after = _TRAFFIC * leaf.size if rows or keep else again
    one_form = isometric and _alike(outers) is not None
    if one_form and positions == 1 and not rows:
        return Choice("product", False, blocks * (width + depth), copied)
    if one_form and len(outers) <= _MANY and gram + again < instantiate + after:
        written = pairs * (2 if by_rows else _paired(width) + _paired(depth))
        return Choice("rows" if by_rows else "gram", False, gram, copied + written)
    rule = "derivative" if rows else "instantiate"
    return Choice(rule, keep, instantiate, copied + leaf.size)


def foresee(leaf: Shape, sites: Sequence[Site]) -> Choice:
    """What will be chosen for a leaf, from shapes alone."""
    found: list[Choice] = []

    def on_shapes(data: Sequence[Sequence[Array]], cotangents: Sequence[Array]) -> None:
        entries = map(Entry, sites, data, cotangents)
        found.append(choose(leaf, sites, [entry.form for entry in entries]))

    def batched(x: Shape) -> Shape:
        return jax.ShapeDtypeStruct((1, *x.shape), x.dtype)

    jax.eval_shape(
        on_shapes,
        [[batched(x) for x in site.data] for site in sites],
        [batched(site.output) for site in sites],
    )
    return found[0]


def norms(leaf: int, entries: Sequence[Entry], leaves: Sequence[Array]) -> tuple[Squares, Total]:
    """Squared norms of each example's gradient of a leaf, and the way to its weighted sum.

    Args:
      leaf: Which leaf.
      entries: All its sites.
      leaves: All leaves, in full precision.

    Returns:
      Squared norms, and the way from factors to the sum of the examples' gradients, each
      times its factor, with or without care.  It is needed where some norm is not finite:
      then an example with factor 0 contributes exactly 0, whatever its data and cotangent.
    """
    forms = [entry.form for entry in entries]
    choice = choose(leaves[leaf], [entry.site for entry in entries], forms)
    outers = _alike([form for form in forms if form is not None])

    def anew(factors: Squares) -> Callable[[bool], Array]:
        # Before it is known whether care is needed: so they can be scaled where they lie.
        ready = [entry.scaled(factors) for entry in entries]

        def value(careful: bool) -> Array:
            sound = [entry.wiped(factors != 0) for entry in ready] if careful else ready
            return summed(leaf, sound, leaves)

        return value

    if choice.rule == "product" and outers is not None:
        return _product_norms(outers[0]), anew
    if choice.rule == "rows" and outers is not None:
        return _row_norms(outers[0]), anew
    if choice.rule == "gram" and outers is not None:
        return _gram_norms(outers), anew
    if choice.rule == "instantiate" and len(entries) == 1 and entries[0].site.isometry:
        place, gradients = _placed(leaf, entries[0], forms[0], leaves)
    else:
        place, gradients = (lambda x: x[0]), [_instantiated(leaf, entries, forms, leaves)]
    squares = _added([_square(x) for x in gradients])
    if choice.keep:
        return squares, kept(gradients, place)
    return (jnp.sqrt(squares) + _doubt(forms)) ** 2, anew


def kept(
    gradients: Sequence[Array], place: Callable[[Sequence[Array]], Array] = lambda x: x[0]
) -> Total:
    """The way to the sum of per-example gradients that are there, in pieces that `place` joins."""
    return lambda factors: lambda careful: place([scaled(x, factors, careful) for x in gradients])


def scaled(gradients: Array, factors: Squares, careful: bool) -> Array:
    """The sum of per-example gradients, each times its factor."""
    if careful:
        # One after the other: a product would need a copy of all, without what is broken.
        def add(total: Array, one: tuple[Array, Array]) -> tuple[Array, None]:
            factor, gradient = one
            return total + jnp.where(factor != 0, factor * gradient, 0), None

        start = jnp.zeros(gradients.shape[1:], jnp.result_type(factors, gradients))
        return jax.lax.scan(add, start, (factors, gradients))[0]
    return jnp.einsum("b,b...->...", factors, gradients, precision=jax.lax.Precision.HIGHEST)


def summed(leaf: int, entries: Sequence[Entry], leaves: Sequence[Array]) -> Array:
    """The sum of the examples' gradients of a leaf, site by site."""
    total = jnp.zeros_like(leaves[leaf])
    for entry in entries:
        form = entry.form
        if form is not None and not form.chosen:
            part = _pulled(leaf, leaves, entry.site.of)(form.joined(_over_all(form)))
        elif form is None and _entire(leaves[leaf], [entry.site]):
            part = _ones_times(_instantiated(leaf, [entry], [None], leaves))
        else:
            run = jax.vmap(entry.site.apply, (None, 0))
            part = _pulled(leaf, leaves, lambda p, e=entry, f=run: f(p, e.data))(entry.cotangent)
        total = total + part
    return total


def into_table(leaf: int, entries: Sequence[Entry]) -> Callable[[Array, Squares], Array] | None:
    """Adds to a sum, in place, what a batch took from a table; None for whatever is no table.

    Elsewhere a part is written and then added; most rows of a table were not taken, and that
    would be passes over nothing but zeros.

    Args:
      leaf: Which leaf.
      entries: All its sites.
    """
    site, form = entries[0].site, entries[0].form
    if len(entries) > 1 or form is None or not form.chosen or site.stacks:
        return None
    if not site.isometry or site.leaves != {leaf} or site.axes != tuple(range(len(site.shape))):
        return None

    def put(total: Array, factors: Squares) -> Array:
        rows = entries[0].scaled(factors).wiped(factors != 0).form
        assert rows is not None
        taken = rows.g.reshape(-1, *total.shape[1:])
        return total.at[rows.x[0].reshape(-1)].add(taken.astype(total.dtype))

    return put


def _over_all(form: Outer) -> list[Array]:
    """The outer products of all examples and positions, summed: ``[blocks, inputs, outputs]``."""

    def one(x: Array) -> Array:
        if form.g.shape[1] > 1:
            return _product("bhks,bhsd->hkd", x, form.g)
        # As a product of two matrices: XLA would copy the inputs to bring them into its order.
        x = jnp.swapaxes(x, 2, 3).reshape(-1, x.shape[2])
        return _product("nk,nd->kd", x, form.g.reshape(-1, form.g.shape[3]))[None]

    return [one(x) for x in form.x]


def _product_norms(form: Outer) -> Squares:
    """One position: the norm of an outer product is the product of norms.

    What squaring lost of the smallest numbers is added back, because the other norm may
    be huge: a norm may be too long, and then clipping is a little too strong, but never
    too short.
    """
    x, g = _lengths(form)
    inputs, outputs = form.width, form.g.shape[3]
    tiny = jnp.finfo(g.dtype).tiny
    return jnp.sum((x + inputs * tiny) * (g + outputs * tiny), axis=(1, 2))


def _gram_norms(forms: Sequence[Outer]) -> Squares:
    """Inner products between positions, within each site and between any two.

    Rounded up by the error that such sums can have: it is relative to what cancels between
    positions, not to what is left, and grows with the number of terms.
    """
    eps, positions = jnp.finfo(forms[0].g.dtype).eps, sum(form.g.shape[2] for form in forms)
    total = jnp.zeros(forms[0].g.shape[0], forms[0].g.dtype)
    for a, b in itertools.combinations_with_replacement(range(len(forms)), 2):
        p, q = forms[a], forms[b]
        x, g = _inner(p, q), _dots(p.g, q.g)
        (px, pg), (qx, qg) = _lengths(p), _lengths(q)
        lengths_x = jnp.sqrt(px)[..., :, None] * jnp.sqrt(qx)[..., None, :]
        lengths_g = jnp.sqrt(pg)[..., :, None] * jnp.sqrt(qg)[..., None, :]
        inputs = 0 if p.chosen or q.chosen else _roundings(p.width)  # chosen ones are exact
        outputs = _roundings(p.g.shape[3])
        doubt = inputs * lengths_x * jnp.abs(g) + outputs * jnp.abs(x) * lengths_g
        doubt = eps * (doubt / 2 + (positions + 2) * jnp.abs(x * g))
        total = total + (1 if a == b else 2) * jnp.sum(x * g + doubt, axis=(1, 2, 3))
    return jnp.maximum(total, 0) + _lost(forms)


def _row_norms(form: Outer) -> Squares:
    """What was taken of a row is added up, once for each row.

    Rounded up by the error that such a sum can have, which is relative to what cancels in it.
    """
    (ids,), eps = form.x, jnp.finfo(form.g.dtype).eps
    same = ids[..., :, None] == ids[..., None, :]
    mates, (_, g) = same.astype(form.g.dtype), _lengths(form)
    rows = jnp.sqrt(jnp.sum(_product("bhst,bhtd->bhsd", mates, form.g) ** 2, axis=3))
    doubt = eps * jnp.sum(mates, axis=3) * jnp.sum(mates * jnp.sqrt(g)[:, :, None], axis=3)
    first = ~jnp.any(jnp.tril(same, -1), axis=3)
    return jnp.sum(jnp.where(first, (rows + doubt) ** 2, 0), axis=(1, 2)) + _lost([form])


def _doubt(forms: Sequence[Outer | None]) -> Squares:
    """How far the sum of positions, taken anew, may lie from the one whose norm was taken.

    It is relative to what cancels between positions.
    """
    total = jnp.zeros(())
    for form in forms:
        if form is not None:
            x, g = map(jnp.sqrt, _lengths(form))
            terms = _roundings(form.g.shape[2]) * jnp.finfo(g.dtype).eps
            total += terms * jnp.sum(x * g, axis=(1, 2))
    return total


def _lost(forms: Sequence[Outer]) -> Squares:
    """How much of the square may be missing because the smallest numbers square to 0."""
    tiny, lost = jnp.finfo(forms[0].g.dtype).tiny, jnp.zeros(())
    for form in forms:
        x, g = _lengths(form)
        inputs, outputs = 1 if form.chosen else form.width, form.g.shape[3]
        lost += jnp.sum(jnp.sqrt(inputs * tiny * g + outputs * tiny * x), axis=2)
    return jnp.sum(lost**2, axis=1)


def _lengths(form: Outer) -> tuple[Array, Array]:
    """Squared lengths ``[batch, blocks, positions]`` of inputs and of outputs."""
    g = jnp.sum(form.g**2, axis=3)
    if form.chosen:
        return jnp.ones_like(g), g
    return _added([jnp.sum(x**2, axis=2) for x in form.x]), g


def _inner(p: Outer, q: Outer) -> Array:
    """Inner products of inputs ``[batch, blocks, positions of p, positions of q]``."""
    if p.chosen and not q.chosen:
        return jnp.swapaxes(_inner(q, p), 2, 3)
    x, y = (jnp.concatenate(form.x, axis=2) for form in (p, q))
    if p.chosen:
        return (x[:, :, :, None] == y[:, :, None, :]).astype(p.g.dtype)
    if q.chosen:
        return jnp.swapaxes(jnp.take_along_axis(x, y[:, :, :, None], axis=2), 2, 3)
    return _dots(jnp.swapaxes(x, 2, 3), jnp.swapaxes(y, 2, 3))


def _dots(a: Array, b: Array) -> Array:
    """Inner products of rows, ``[.., s, n]`` and ``[.., t, n]``: in blocks, then in pairs.

    In one long sum rounding errors could add up over all terms; here over `_roundings`.
    """
    blocks = _paired(a.shape[-1])

    def split(x: Array) -> Array:
        ends = [(0, 0)] * (x.ndim - 1) + [(0, blocks * _BLOCK - x.shape[-1])]
        return jnp.pad(x, ends).reshape(*x.shape[:-1], blocks, _BLOCK)

    parts = _product("bhsjn,bhtjn->jbhst", split(a), split(b))
    while len(parts) > 1:
        parts = parts[::2] + parts[1::2]
    return parts[0]


def _paired(terms: int) -> int:
    """How many blocks so many terms take: a power of two, to be added in pairs."""
    return 2 ** math.ceil(math.log2(max(1, -(-terms // _BLOCK))))


def _roundings(terms: int) -> int:
    """Through how many roundings a term of an inner product goes."""
    return min(terms, _BLOCK) + round(math.log2(_paired(terms)))


def _alike(forms: Sequence[Outer]) -> list[Outer] | None:
    """The forms of one leaf, turned so that inputs meet inputs; None if they do not."""
    first = forms[0] if forms else None
    if first is None or len(forms) == 1:
        return list(forms)
    turned = []
    for form in forms:
        if first.axes is None or form.axes is None or form.axes[0] != first.axes[0]:
            return None
        if form.axes == first.axes:
            turned.append(form)
        elif form.axes[1:] == first.axes[:0:-1] and not form.chosen:
            x, g = (jnp.swapaxes(a, 2, 3) for a in (form.g, jnp.concatenate(form.x, axis=2)))
            turned.append(form._replace(x=(x,), g=g))
        else:
            return None
    return turned


def _placed(
    leaf: int, entry: Entry, form: Outer | None, leaves: Sequence[Array]
) -> tuple[Callable[[Sequence[Array]], Array], list[Array]]:
    """Each example's gradient in the pieces of its form, and the way from there to the leaf."""
    assert form is not None
    pull = _pulled(leaf, leaves, entry.site.of)
    gradients = [_product("bhks,bhsd->bhkd", x, form.g) for x in form.x]
    return lambda parts: pull(form.joined(parts)), gradients


def _instantiated(
    leaf: int, entries: Sequence[Entry], forms: Sequence[Outer | None], leaves: Sequence[Array]
) -> Float[Array, "batch ..."]:
    """Each example's gradient of a leaf, from all its sites."""

    def one(entry: Entry, form: Outer | None) -> Array:
        if form is not None and not form.chosen:
            place, gradients = _placed(leaf, entry, form, leaves)
            return jax.vmap(place)(gradients)

        def derivative(data: Sequence[Array], cotangent: Array) -> Array:
            return _pulled(leaf, leaves, lambda p: entry.site.apply(p, data))(cotangent)

        return jax.vmap(derivative)(entry.data, entry.cotangent)

    parts = [one(entry, form) for entry, form in zip(entries, forms, strict=True)]
    return _added(parts)


def _pulled(
    leaf: int, leaves: Sequence[Array], function: Callable[[Sequence[Array]], Array]
) -> Callable[[Array], Array]:
    """From the cotangent of a function of all leaves to that of one of them."""

    def of_one(chosen: Array) -> Array:
        return function([*leaves[:leaf], chosen, *leaves[leaf + 1 :]])

    output, pull = jax.vjp(of_one, leaves[leaf])
    return lambda cotangent: pull(cotangent.astype(output.dtype))[0]


def _entire(leaf: Array | Shape, sites: Sequence[Site]) -> bool:
    """Whether one example's gradient of a leaf is as large as what it is made of.

    Then it is not kept: scaled cotangents take its place, and perhaps that of others too.
    """
    return leaf.size == sum(math.prod(site.output.shape) for site in sites)


def _ones_times(x: Array) -> Array:
    """The sum over the first axis, as a product: XLA's own sum down a matrix is slower."""
    return _product("b,b...->...", jnp.ones(len(x), x.dtype), x)


def _product(formula: str, a: Array, b: Array) -> Array:
    return jnp.einsum(formula, a, b, precision=jax.lax.Precision.HIGHEST)


def _added(parts: Sequence[Array]) -> Array:
    return sum(parts[1:], parts[0])


def _square(x: Array) -> Squares:
    return jnp.sum(x * x, axis=tuple(range(1, x.ndim)))


def _wiped(x: Array, keep: Array, filling: float) -> Array:
    """A constant where an example takes no part, so that its NaN reaches nobody."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    return jnp.where(trees.expand(keep, x), x, filling)
