# SPDX-License-Identifier: Apache-2.0
"""The clipped sum of per-example gradients: one function, several engines.

`clipped_grad` joins three free axes: the *rule* (how norms become factors), the
*partition* (which leaves are clipped together) and the *engine* (how the sum is
computed).  An engine means speed only: all engines give the same `ClippedSum`.

Engines live in `engines`, a row each in one table.  `ghost` is the fast one: `walk` finds
where a loss uses its parameters, `forms` writes what happens there as outer products,
`rules` makes norms and sums of them, and `explain` says what was found.  `primitives`,
`convolution` and `pooling` keep single equations fast, where need be `apart`.  `layout`
chooses how many examples are on the chip at once, and `rows` hands them out.  `isolation` and
`placement` guard against what XLA gets wrong.  Nothing here knows of noise, sampling or epsilon.
"""

from dpjax.gradients.batching import Layout
from dpjax.gradients.clipped_grad import clipped_grad
from dpjax.gradients.engines import ENGINES
from dpjax.gradients.explain import explain
from dpjax.gradients.layout import layout
from dpjax.gradients.plain_grad import plain_grad

__all__ = ["ENGINES", "Layout", "clipped_grad", "explain", "layout", "plain_grad"]
