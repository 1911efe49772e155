# SPDX-License-Identifier: Apache-2.0
"""Argument checks: one function per question, one form for every message.

A message ends with ``hint``, the cure. Each function returns the argument as a plain Python type,
so NumPy and JAX scalars, and 3.0 for 3, mean the same everywhere.
"""

from __future__ import annotations

import difflib
import importlib
import math
from collections.abc import Collection
from types import MappingProxyType
from typing import Any, TypeVar

import jax
import numpy as np

__all__ = [
    "Refused",
    "fraction",
    "importable",
    "instance",
    "key",
    "not_negative",
    "number",
    "one_of",
    "positive",
    "whole",
    "whole_or_none",
]

T = TypeVar("T")


class Refused(ValueError):
    """A step was refused before anything was released."""


# Text has a wrong type and NaN is a wrong value, so a caller may catch either error.
class NotANumber(TypeError, ValueError):
    """Text, an array, a boolean or NaN in place of a number."""


def number(call: str, name: str, value: Any, hint: str = "") -> float:
    """A finite or infinite real number; text, arrays and booleans raise, and so does NaN."""
    try:
        # Scalars of NumPy, JAX and Python alike; the kind excludes booleans and text.
        array = np.asarray(value)
        good = array.ndim == 0 and array.dtype.kind in "iuf" and not math.isnan(array)
    except (TypeError, ValueError):
        good = False
    _expect(good, call, name, value, "a number", hint, NotANumber)
    return float(value)


def whole(
    call: str, name: str, value: Any, hint: str = "", *, least: int = 1, most: float = math.inf
) -> int:
    """A whole number from ``least`` to ``most``; 3.0 is 3."""
    given = number(call, name, value, hint)
    limits = f"a whole number, at least {least}"
    if most < math.inf:
        limits += f" and at most {most}"
    _expect(given % 1 == 0 and least <= given <= most, call, name, value, limits, hint)
    return int(value)


def whole_or_none(
    call: str, name: str, value: Any, hint: str = "", *, least: int = 1
) -> int | None:
    """As `whole`, for an argument that may be left out: None is None."""
    if value is None:
        return None
    return whole(call, name, value, hint, least=least)


def not_negative(
    call: str, name: str, value: Any, hint: str = "", *, infinite: bool = True
) -> float:
    """A number of 0 or more; infinity is one unless ``infinite`` is False."""
    given = number(call, name, value, hint)
    good = given >= 0 and (infinite or given < math.inf)
    _expect(good, call, name, value, f"{_number_word(infinite)}, 0 or more", hint)
    return given


def positive(call: str, name: str, value: Any, hint: str = "", *, infinite: bool = False) -> float:
    """A number above 0; infinity is one only if ``infinite`` is True."""
    given = number(call, name, value, hint)
    good = given > 0 and (infinite or given < math.inf)
    _expect(good, call, name, value, f"{_number_word(infinite)} above 0", hint)
    return given


def _number_word(infinite: bool) -> str:
    return "a number" if infinite else "a finite number"


def fraction(call: str, name: str, value: Any, hint: str = "") -> float:
    """A number strictly between 0 and 1."""
    given = number(call, name, value, hint)
    _expect(0 < given < 1, call, name, value, "a number between 0 and 1", hint)
    return given


def delta(call: str, value: Any) -> float:
    """A delta, strictly between 0 and 1."""
    return fraction(call, "delta", value, "Choose it well below 1 / examples.")


def constant_noise(call: str, noise_multiplier: Any) -> None:
    """Refuses a schedule as the multiplier of correlated noise."""
    if callable(noise_multiplier):
        raise ValueError(
            f"{call}: the noise multiplier is a schedule; expected a number, or one per group."
        )


def one_of(call: str, name: str, value: Any, choices: Collection[Any], hint: str = "") -> Any:
    """One of a few values."""
    # Identity first, because a NaN does not equal itself and arrays compare by element.
    good = any(value is choice or value == choice for choice in choices)
    if not good and (near := difflib.get_close_matches(str(value), map(str, choices), 1)):
        hint = f"Did you mean {near[0]}?"
    _expect(good, call, name, value, f"one of {', '.join(map(str, choices))}", hint)
    return value


def instance(call: str, name: str, value: Any, kind: type[T], hint: str = "") -> T:
    """An object of a class."""
    if not isinstance(value, kind):
        given = f"{call}: {name} is a {type(value).__name__}; expected a {kind.__name__}."
        raise TypeError(f"{given} {hint}".rstrip())
    return value


def optimizer(name: str, given: Any) -> None:
    """Refuses an object that is not an Optax optimizer; ``name`` is the argument in the error."""
    if not (hasattr(given, "init") and hasattr(given, "update")):
        raise TypeError(
            f"{name} is a {type(given).__name__}; expected an Optax optimizer: optax.sgd(0.1)."
        )


def is_typed_key(value: Any) -> bool:
    """Whether a value is a key of `jax.random.key`, traced or not, or an array of such keys."""
    return isinstance(value, jax.Array) and jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key)


def key(call: str, value: Any) -> Any:
    """A key, typed or not, traced or not, whose folds are keys of their own."""
    typed = is_typed_key(value)
    if not typed and not (isinstance(value, jax.Array | np.ndarray) and value.dtype == np.uint32):
        kind = type(value).__name__
        raise TypeError(f"{call}(key: {kind}): expected a key, such as jax.random.key(seed).")
    rank = 0 if typed else 1
    if value.ndim != rank:
        raise ValueError(f"{call}(key of shape {value.shape}): expected one key.")
    # Folds of unsafe_rbg commute, so two leaves share noise. A key of philox2x32 has 32 bits.
    one_of(call, "key", str(jax.random.key_impl(value)), ("threefry2x32", "rbg"))
    return value


def _expect(
    good: bool, call: str, name: str, value: Any, expected: str, hint: str, error: Any = ValueError
) -> None:
    if not good:
        # Cut off, because a whole array in a message hides the sentence.
        raise error(f"{call}({name}={value!r:.100}): expected {expected}. {hint}".rstrip())


# The package that installs a module, where their names differ.
_PACKAGES = MappingProxyType(
    {"PIL": "pillow", "matplotlib.figure": "matplotlib", "sklearn": "scikit-learn"}
)


def importable(call: str, *modules: str, otherwise: str = "") -> None:
    """Refuses a call that needs modules which cannot be imported; one command installs all."""
    reasons = {}
    for module in modules:
        try:
            # Imported, not only found: an installed one may not fit this version of NumPy.
            importlib.import_module(module)
        except Exception as error:  # ImportError, or AttributeError of another NumPy
            reasons[module] = str(error)
    if reasons:
        packages = [_PACKAGES.get(module, module) for module in reasons]
        raise ImportError(
            f"{call}: {' and '.join(packages)} cannot be imported ({'; '.join(reasons.values())}). "
            f"Run pip install -U {' '.join(packages)}{otherwise}."
        )
