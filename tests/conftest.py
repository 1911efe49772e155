# SPDX-License-Identifier: Apache-2.0
"""Shared set-up: deterministic property tests, and a check that these sources are tested."""

import collections
import ctypes
import os
import pathlib
import tempfile

# One device unless a test asks for several, on every machine, and no message about it.
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "1")

import hypothesis
import jax
import pytest

import dpjax

# The mutant runner points this at its edited copy.
MUTANT = os.environ.get("DPJAX_TESTED_SOURCES")
if MUTANT:  # a mutant that is not loaded is no test
    assert pathlib.Path(dpjax.__file__).is_relative_to(MUTANT), dpjax.__file__

# A plugin of pytest's, loaded by its name; a deployment, which needs packages of its own.
collect_ignore = ["guards.py", "flower_deployment.py"]

# Tests of the rooms in which no dtype and no rank may be promoted silently.
ROOMS = (
    "adaptive clipping filters golden gradients groups ledger mechanism noise sampling trees types"
)
STRICT = {f"test_{room}" for room in ROOMS.split()}
# What is not the guarantee is left to `.ci/run`, as are the examples of docstrings.
SHELF = "activations arrays diagnostics docs features finetuning losses metrics models papers"
SHELF += " pretrained run_report scattering sgld sweep testing"
THOROUGH = {f"test_{name}" for name in SHELF.split()}

PHASES = set(hypothesis.Phase)
hypothesis.settings.register_profile(
    "dpjax",
    deadline=None,
    derandomize=True,
    max_examples=50,
    # No one reads why a mutant failed, so pytest shortens nothing for a reader.
    phases=PHASES - {hypothesis.Phase.shrink, hypothesis.Phase.explain} if MUTANT else PHASES,
    report_multiple_bugs=not MUTANT,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("dpjax")

# Most of a test's time is compilation; programs are shared between tests, workers and runs, and
# with the processes that tests begin.
SHARED = {
    "jax_compilation_cache_dir": f"{tempfile.gettempdir()}/dpjax-tests-{os.getuid()}",
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": 0,
}
for name, value in SHARED.items():
    jax.config.update(name, value)
    os.environ[name.upper()] = str(value)
# Warnings are errors in those processes too, but for one: what was killed, or is not done, while
# it writes an entry of the cache leaves one that cannot be read, and is then compiled again.
entries = [f"ignore:Error {doing} persistent compilation cache" for doing in ("reading", "writing")]
os.environ["PYTHONWARNINGS"] = ",".join(["error", *entries])


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Marks the cases that `sample` leaves out as slow, the shelf as thorough; mutants come last.

    Mutants mean little before the tests that kill them have passed.
    """
    cases = collections.defaultdict(list)
    for item in items:
        if item.path.stem in THOROUGH or isinstance(item, pytest.DoctestItem):
            item.add_marker("thorough")
        if mark := item.get_closest_marker("sample"):
            cases[item.parent, item.originalname].append((item, mark.args[0]))
    for found in cases.values():
        few = found[0][1]
        kept = {round(i * (len(found) - 1) / max(1, few - 1)) for i in range(few)}
        for number, (item, _) in enumerate(found):
            if number not in kept:
                item.add_marker("slow")
    items.sort(key=lambda item: item.path.stem == "test_mutants")


@pytest.fixture(autouse=True)
def _strict(request):
    """The core promotes dtypes and ranks in words; user code in a marked test need not."""
    if request.path.stem not in STRICT or request.node.get_closest_marker("promotes"):
        yield
        return
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


@pytest.fixture(autouse=True, scope="module")
def _leaves_no_programs():
    """A module's compiled programs go with it; kept, they fill gigabytes."""
    yield
    jax.clear_caches()
    # The allocator keeps what compilers freed until `malloc_trim` of glibc is called.
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim:
        trim(0)


@pytest.fixture
def imported():
    """Imports binaries of the experiments by their names."""
    import run_binary  # not above: most tests, and each mutant, start without it

    with run_binary.importing() as import_binary:
        yield import_binary
