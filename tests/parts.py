# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin that runs one part of the selected tests: `make test-slow PART=3`.

Part 3 of 12 holds the tests 3, 15, 27, ... of the order in which pytest collects them. This spreads
the cases of a costly test over all parts, and a new test needs no table.
"""

import pytest


def pytest_addoption(parser):
    parser.addoption("--part", metavar="3/12", help="run this part of the selected tests")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """Keeps the tests of the part, after `-m` has selected from all."""
    option = config.getoption("part")
    if option is None:
        return
    part, parts = option.split("/")
    selected = items[int(part) - 1 :: int(parts)]
    chosen = set(selected)
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = selected
