# SPDX-License-Identifier: Apache-2.0
"""The clipped sum of per-example gradients: one function, several engines.

`clipped_grad` joins three free axes: the *rule* (how norms become factors), the
*partition* (which leaves are clipped together) and the *engine* (how the sum is
computed). An engine means speed only: all engines give the same `ClippedSum`.

| place | content |
|---|---|
| `clipped_grad.py`, `plain_grad.py` | the public functions: checks, then one engine |
| `traced.py` | the loss as engines receive it: traced once |
| `engines.py` | the table of engines; ``ghost`` is the fast one |
| `_bookkeeping/` | ``ghost``: norms and sums without per-example gradients; see `explain` |
| `layout.py`, `batching.py` | how many examples are differentiated together, and on which devices |
| `platforms.py` | for which kind of device a program is traced, which decides layouts and forms |
| `loss_checks.py` | refuses losses of a batch |
| `jaxprs.py` | the interpreter of jaxprs |
| `nan_isolation.py` | guards against wrong results of XLA |
| `_xla_cpu/` | primitives that are slow on CPU, in a faster form |
| `_estimated_norms/` | `dpjax.clipping.jl` |

In `_bookkeeping`, `trace` finds the sites of a loss, `outer_products` brings the gradient at a site
into one form (that of a kernel with `patches`), `cost` chooses a rule for each leaf, `leaf_norms`
and `leaf_sums` apply it.
"""

from dpjax.gradients.batching import Layout
from dpjax.gradients.clipped_grad import clipped_grad
from dpjax.gradients.engines import ENGINES
from dpjax.gradients.explain import explain
from dpjax.gradients.layout import layout
from dpjax.gradients.plain_grad import plain_grad

__all__ = ["ENGINES", "Layout", "clipped_grad", "explain", "layout", "plain_grad"]
