# SPDX-License-Identifier: Apache-2.0
"""How objects look in a terminal and in a notebook: short, without addresses, and escaped."""

import dataclasses
import xml.etree.ElementTree as ET

import jax
import jax.numpy as jnp
import optax
import pytest
from html_pages import text
from mutation import kills
from small_mechanisms import mechanism_with

from dpjax import clipping, dpsgd, ledger, noise, sampling, schedules, strategies
from dpjax.mechanism import Spent

SAMPLER = "Sampler(name='poisson', examples=1000, batch_size=10)"
PLAIN = (
    f"Mechanism(sampling={SAMPLER}, clipping=Clipping(name='flat', bounds=(1.0,)), "
    "noise_multiplier=2.0, steps=5)"
)
FALLING = schedules.CURRICULA["linear-down"](epochs=5, steps_per_epoch=1)


def of(**changes):
    return mechanism_with(1000, 10, **{"noise_multiplier": 2.0, "steps": 5, **changes})


def algorithm(**options):
    full = of(sampling=sampling.full(3))
    return dpsgd(lambda w, x: (w - x) ** 2, optax.sgd(1.0), full, jnp.arange(3.0), **options)


def test_a_line_says_what_an_object_was_made_from():
    assert repr(of()) == PLAIN
    assert repr(sampling.poisson(1000, 10)) == SAMPLER
    many = clipping.grouped(1.0, groups=100)
    assert repr(many) == "Clipping(name='grouped', bounds=(1.0, 1.0, 1.0, 1.0, ...))"
    assert repr(many.partition).startswith("Partition(names=('group 0', ")
    assert "noise_multiplier=<schedule from 5 to 1>, " in repr(of(noise_multiplier=FALLING))
    assert repr(of(noise_multiplier=FALLING, steps=0).noise_multiplier) == "<schedule from >"
    calibrated = of().calibrate(3.0, 1e-5, "rdp")
    assert "target=Target(epsilon=3.0, delta=1e-05, method='rdp')" in repr(calibrated)


@kills("_display.py", "if name in secrets else", "if False else", slow=True)
def test_no_state_shows_its_key():
    key, adaptive = noise.secret_key(), clipping.Quantile(count_multiplier=20.0)
    states = [
        algorithm().init(jnp.zeros(()), key),
        noise.gaussian(1.0, clipping.flat(1.0), key=key).init(jnp.zeros(())),
        of(adaptive=adaptive).privatize(key).init(jnp.zeros(())),
    ]
    for state in states:
        assert "key=<secret>, step=Array(0, dtype=int32)" in repr(state)
        for word in jax.random.key_data(key).tolist():
            assert str(word) not in repr(state)


SHOWN = {
    "mechanism": (of, ["one example; add-or-remove", "10 of 1,000 examples", "sensitivity 1"]),
    "calibrated": (lambda: of().calibrate(3.0, 1e-5, "rdp"), ["method='rdp'"]),
    "options": (
        lambda: of(
            sampling=sampling.full(1000),
            noise=strategies.tree(5),
            unit="client",
            before=[Spent(sampling=sampling.poisson(1000, 10), runs=((1.0, 5),), unit="client")],
        ),
        ["1000 of 1,000 clients", "before(Spent", "name='tree', steps=5"],
    ),
    "sampler": (lambda: sampling.poisson(1000, 10), ["Sampler: poisson", "examples1,000"]),
    "rule": (lambda: clipping.grouped(0.5, 9), ["sensitivity1.5", "group 70.5", "1 more groups"]),
    "rule of few groups": (lambda: clipping.flat(0.5), ["sensitivity0.5", "bound of group 00.5"]),
    "algorithm": (algorithm, ["Algorithm budgetNone", "Mechanism", "full: 3 of 3 examples"]),
    "budget": (lambda: algorithm(budget=ledger.Budget(epsilon=9, delta=0.1)), ["epsilon=9"]),
    "a name with markup": (
        lambda: of(clipping=dataclasses.replace(clipping.flat(1.0), name="<b>")),
        ["<b>: sensitivity 1"],
    ),
}


@pytest.mark.parametrize("case", SHOWN)
def test_a_notebook_shows_a_table_without_addresses(case):
    make, words = SHOWN[case]
    thing = make()
    shown = text(ET.fromstring(f"<div>{thing._repr_html_()}</div>"))
    for word in words:
        assert word in shown, shown
    for said in (shown, repr(thing)):
        assert " at 0x" not in said
        assert len(said) < 900
