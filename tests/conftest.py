# SPDX-License-Identifier: Apache-2.0
"""Shared set-up: deterministic property tests, and proof of which sources are tested."""

import os
import pathlib
import tempfile

import hypothesis
import jax
import pytest

import dpjax

# The mutant runner points this at its edited copy.
MUTANT = os.environ.get("DPJAX_TESTED_SOURCES")
if MUTANT:  # a mutant that is not loaded is no test
    assert pathlib.Path(dpjax.__file__).is_relative_to(MUTANT), dpjax.__file__

PHASES = set(hypothesis.Phase)
hypothesis.settings.register_profile(
    "dpjax",
    deadline=None,
    derandomize=True,
    max_examples=50,
    # Nobody reads why a mutant failed, so nothing is made shorter for a reader.
    phases=PHASES - {hypothesis.Phase.shrink, hypothesis.Phase.explain} if MUTANT else PHASES,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("dpjax")

# Most of a test's time is compilation; programs are shared between tests, workers and runs.
jax.config.update("jax_compilation_cache_dir", f"{tempfile.gettempdir()}/dpjax-tests-{os.getuid()}")
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


def pytest_collection_modifyitems(items):
    """Mutants last: what they ask of the tests means little before the tests have passed."""
    items.sort(key=lambda item: item.path.stem == "test_mutants")


@pytest.fixture(autouse=True, scope="module")
def _leaves_no_programs():
    """A module's compiled programs go with it; kept, they fill gigabytes."""
    yield
    jax.clear_caches()
