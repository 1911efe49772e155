# SPDX-License-Identifier: Apache-2.0
"""The clipped sum of per-example gradients: one function, several engines.

`clipped_grad` joins three free axes: the *rule* (how norms become factors), the *partition* (which
leaves are clipped together) and the *engine* (how the sum is computed). An engine means speed only:
all engines give the same `ClippedSum`.

The fast one, ``ghost``, is in `_bookkeeping`: `trace` finds the sites of a loss, `outer_products`
brings the gradient at a site into one form, `cost` chooses a rule for each leaf, `leaf_norms` and
`leaf_sums` apply it.
"""

from dpjax.gradients._explain import explain
from dpjax.gradients._layout import layout
from dpjax.gradients.batching import Layout
from dpjax.gradients.clipped_grad import clipped_grad
from dpjax.gradients.engines import ENGINES

__all__ = ["ENGINES", "Layout", "clipped_grad", "explain", "layout"]
