# SPDX-License-Identifier: Apache-2.0
"""A model of the user, ``module:name``: a Flax module, or a function that returns one.

The module is imported from the folder in which the command runs. A run's folder compares the
program of a step, so a run does not resume with code that computes something else.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from typing import Any

import flax.linen as nn

_EXPECTED = (
    "expected a Flax module (flax.linen), or a function that returns one, for one example without "
    "a batch axis:\n"
    "  class Net(nn.Module):\n"
    "      classes: int\n"
    "      @nn.compact\n"
    "      def __call__(self, x): return nn.Dense(self.classes)(x.ravel())\n"
    "Modules of NNX, Equinox and Haiku train by dpjax.fit in a script."
)


def build(word: str, classes: int, options: dict[str, Any]) -> nn.Module:
    """The model that ``module:name`` names, with ``classes`` and options by their names.

    Raises:
      ValueError: It cannot be found, or is no Linen module.
    """
    found = _found(word)
    if isinstance(found, nn.Module) and not options:
        return found
    if not callable(found) or isinstance(found, nn.Module):
        raise ValueError(
            f"{word} is of type {type(found).__name__} and takes no options; {_EXPECTED}"
        )
    known = inspect.signature(found).parameters
    any_name = any(each.kind is each.VAR_KEYWORD for each in known.values())
    # Also a model without the number of classes is one, if its outputs are as many.
    taken = {"classes": classes, **options} if "classes" in known or any_name else options
    if not any_name and (unknown := sorted(taken.keys() - known)):
        raise ValueError(f"{word} takes {', '.join(known) or 'nothing'}, not {', '.join(unknown)}.")
    try:
        model = found(**taken)
    except TypeError as error:
        raise ValueError(
            f"{word}({', '.join(taken)}): {error}. The number of classes arrives as classes=, and "
            "other arguments by --model_options=name=value."
        ) from error
    if not isinstance(model, nn.Module):
        raise ValueError(f"{word} makes a {type(model).__name__}; {_EXPECTED}")
    return model


def _found(word: str) -> Any:
    module, _, name = word.partition(":")
    # As `python -m` does; the console script itself lives in another folder.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        loaded = importlib.import_module(module)
    except ImportError as error:
        raise ValueError(
            f"{module} cannot be imported from {os.getcwd()}: {error}. Run the command in the "
            f"folder that holds {module.split('.')[0]}.py."
        ) from error
    if not hasattr(loaded, name):
        named = [
            n for n, value in vars(loaded).items() if not n.startswith("_") and callable(value)
        ]
        raise ValueError(f"{module} has no {name}; it has {', '.join(sorted(named)) or 'nothing'}.")
    return getattr(loaded, name)
