# SPDX-License-Identifier: Apache-2.0
"""dpjax: training with differential privacy in JAX; the mechanism that runs is the one accounted.

| module | contents | names at the top |
|---|---|---|
| `clipping` | rules that bound one example's contribution | `clip_and_sum` |
| `noise` | Gaussian and Langevin noise as Optax links | |
| `schedules` | noise multipliers that change with the step | |
| `strategies` | correlated noise: matrices, sensitivities and errors | |
| `sampling` | which examples a step sees | |
| `accounting` | privacy events to epsilon and delta | |
| `mechanism` | the private computation, described once | `Mechanism` |
| `ledger` | the steps that ran, and a budget that refuses further ones | |
| `gradients` | clipped sums of per-example gradients, by several engines | `clipped_grad` |
| `training` | algorithms, the loop that drives them, and checkpoints | `dpsgd`, `fit` |
| `meshes` | which devices share a run, of one process or of several | |
| `planning` | a run without a search, from public numbers | `plan` |
| `federated` | algorithms that protect a client instead of an example | |
| `reports` | privacy statement, privacy card, page for a board | `statement` |
| `verify` | reads a privacy card, and recomputes its epsilon without dpjax | |
| `testing` | the library's laws as assertions for your own rules and losses | |
| `auditing` | empirical lower bounds on epsilon | |
| `diagnostics` | clipping bias, gradient norms, curvature, kernels | |
| `models`, `losses`, `metrics`, `data` | networks and their training | |
| `scattering`, `features` | fixed features, and their normalisation | |
| `types`, `trees`, `checks` | shared types, tree arithmetic, argument checks | |

A module is imported when it is first used.
Read in this order: `training/step.py` (the private step on one page), `types`,
`clipping/rules.py`, `mechanism`, `tests/test_laws.py`.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__: str
"""The version that is installed; only `pyproject.toml` holds it."""

__all__ = [
    "Mechanism",
    "accounting",
    "auditing",
    "checks",
    "clip_and_sum",
    "clipped_grad",
    "clipping",
    "data",
    "diagnostics",
    "dpsgd",
    "features",
    "federated",
    "fit",
    "gradients",
    "ledger",
    "losses",
    "mechanism",
    "meshes",
    "metrics",
    "models",
    "noise",
    "plan",
    "planning",
    "reports",
    "sampling",
    "scattering",
    "schedules",
    "statement",
    "strategies",
    "testing",
    "training",
    "trees",
    "types",
    "verify",
]

# A bare `import dpjax` must not cost the accountants' SciPy or the figures' Matplotlib.
_HOMES = {
    "Mechanism": "mechanism",
    "clip_and_sum": "clipping",
    "clipped_grad": "gradients",
    "dpsgd": "training",
    "fit": "training",
    "plan": "planning",
    "statement": "reports",
}

if TYPE_CHECKING:
    from dpjax import (
        accounting,
        auditing,
        checks,
        clipping,
        data,
        diagnostics,
        features,
        federated,
        gradients,
        ledger,
        losses,
        mechanism,
        meshes,
        metrics,
        models,
        noise,
        planning,
        reports,
        sampling,
        scattering,
        schedules,
        strategies,
        testing,
        training,
        trees,
        types,
        verify,
    )
    from dpjax.clipping import clip_and_sum
    from dpjax.gradients import clipped_grad
    from dpjax.mechanism import Mechanism
    from dpjax.planning import plan
    from dpjax.reports import statement
    from dpjax.training import dpsgd, fit
else:
    # Hidden from type checkers: a module with `__getattr__` has every name, misspelt ones too.
    def __getattr__(name: str) -> Any:
        """Imports a module, or the module that defines a name, on first use (PEP 562)."""
        if name == "__version__":
            return importlib.import_module("dpjax._versions").version("dpjax")
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = importlib.import_module(f"dpjax.{_HOMES.get(name, name)}")
        if name in _HOMES:
            value = getattr(value, name)
        globals()[name] = value  # the next access does not come here
        return value

    def __dir__() -> list[str]:
        """All public names, imported or not."""
        return sorted({*globals(), *__all__})
