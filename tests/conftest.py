# SPDX-License-Identifier: Apache-2.0
"""Shared set-up: deterministic property tests, and proof of which sources are tested."""

import os
import pathlib

import hypothesis
import jax

import dpjax

hypothesis.settings.register_profile(
    "dpjax",
    deadline=None,
    derandomize=True,
    max_examples=50,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("dpjax")

# The mutant runner points this at its edited copy: a mutant that is not loaded is no test.
if expected := os.environ.get("DPJAX_TESTED_SOURCES"):
    assert pathlib.Path(dpjax.__file__).is_relative_to(expected), dpjax.__file__

jax.config.update("jax_numpy_dtype_promotion", "standard")
