# SPDX-License-Identifier: Apache-2.0
"""`PRIMITIVES`: one table of the properties of each primitive of JAX for the book-keeping engine.

A leaf that meets the data in a primitive without a row is materialised.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from jaxtyping import Array

from dpjax.gradients._bookkeeping.outer_products import (
    Form,
    Outer,
    convolution,
    dot_general,
    gather,
    rounds_operands,
    without_stacks,
)
from dpjax.gradients._bookkeeping.sites import Site


class Primitive(NamedTuple):
    """The properties of a primitive for the engine."""

    linear_in: tuple[int, ...] = ()  # or affine, one at a time: no other input is a view
    together: slice | None = None  # linear in these inputs together
    entrywise: bool = False  # an entry depends only on the same entry of each input
    rearranges: bool = False  # the result holds the entries of its one input, perhaps negated
    repeats: bool = False  # the result holds copies of some entries
    form: Form | None = None  # of the gradient at a site; without one the VJP
    writes: bool = False  # XLA writes the result to memory, where it fuses most others
    calls: str | None = None  # the parameter with the program that it calls

    def linear(self, sources: Sequence[int], inputs: int) -> bool:
        """Whether it is linear in these of its inputs together."""
        if self.together is not None:
            return {*sources} <= {*range(inputs)[self.together]}
        return len(sources) == 1 and sources[0] in self.linear_in


_ENTRYWISE = [
    "abs", "cos", "erf", "exp", "expm1", "integer_pow", "log", "log1p", "log2", "logistic", "max",
    "min", "one_minus_square", "pow", "rsqrt", "sign", "sin", "sqrt", "square", "tanh",
]  # fmt: skip
_SAME = ["convert_element_type", "copy", "neg"]

PRIMITIVES: Mapping[str, Primitive] = MappingProxyType(
    {
        **dict.fromkeys(_ENTRYWISE, Primitive(entrywise=True)),
        **dict.fromkeys(["add", "add_any", "sub", "mul"], Primitive((0, 1), entrywise=True)),
        "div": Primitive((0,), entrywise=True),
        "select_n": Primitive(together=slice(1, None), entrywise=True),
        **dict.fromkeys(_SAME, Primitive(entrywise=True, rearranges=True)),
        **dict.fromkeys(["reshape", "transpose", "squeeze", "rev"], Primitive(rearranges=True)),
        **dict.fromkeys(["broadcast_in_dim", "slice"], Primitive(repeats=True)),
        **dict.fromkeys(["reduce_sum", "reduce_max"], Primitive(writes=True)),
        "dot_general": Primitive((0, 1), form=dot_general, writes=True),
        "conv_general_dilated": Primitive((0, 1), form=convolution, writes=True),
        "gather": Primitive((0,), form=gather, writes=True),
        **dict.fromkeys(["dynamic_slice", "pad"], Primitive((0,))),
        "scatter-add": Primitive((0, 2)),
        "dynamic_update_slice": Primitive(together=slice(0, 2)),
        "concatenate": Primitive(together=slice(0, None)),
        "polynomial": Primitive(together=slice(1, None)),
        # Only the memory of their results counts here; `scan_trace` handles a loop.
        **dict.fromkeys(["reduce_window_max", "reduce_window_sum", "scan"], Primitive(writes=True)),
        # A call with a custom derivative is not entered, which keeps the derivative.
        **dict.fromkeys(["jit", "xla_metadata_call"], Primitive(calls="jaxpr")),
        "closed_call": Primitive(calls="call_jaxpr"),
    }
)


def known(name: str) -> Primitive:
    """The row of a primitive; an empty one if it has none."""
    return PRIMITIVES.get(name, Primitive())


def row_of(site: Site) -> Primitive:
    """The row of the primitive of a site."""
    return known(site.equation.primitive.name)


def form_of(site: Site, data: Sequence[Array], cotangent: Array) -> Outer | None:
    """The form of a site, or None if it has none."""
    form = row_of(site).form
    if form is None:
        return None
    outer = form(site, data, cotangent)
    if outer is None:
        return None
    outer = without_stacks(site, outer)
    # A single position cancels nothing, and its sum reads less in one product of six passes.
    return outer._replace(short=outer.g.shape[2] > 1 and rounds_operands(site))
