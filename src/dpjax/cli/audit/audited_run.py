# SPDX-License-Identifier: Apache-2.0
"""The audits of a run that `dpjax train` left in a folder.

Flags, data, model, loss, mechanism and optimizer are built again from the folder, as `dpjax train`
builds them. A run whose mechanism, data or program then differs from the one in `run.json` is
refused, by the comparison of a resume, so what is audited is what ran. Keys come from public seeds,
because nothing is released here.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags

import dpjax
from dpjax import auditing, losses
from dpjax.cli.train import FLAGS, inputs, run_files
from dpjax.cli.train.classifier import first_parameters
from dpjax.cli.train.flags import settings
from dpjax.cli.train.job import Checked, configuration_of, load, plan
from dpjax.reports.load_run import SavedRun, read
from dpjax.training.released import restored
from dpjax.training.run_folder import differences, identity_of

_MOST = 10_000  # rows whose losses are compared
_KNOWN = 2_000  # rows whose gradients the attacker subtracts
_USUAL = (
    " Usually the file of the data or the module of the model changed since, DPJAX_DATA_DIR holds "
    "other data, or another version of dpjax wrote the folder. Restore what the run was trained "
    "with."
)


class Rebuilt(NamedTuple):
    """A run, built again from its folder."""

    run: SavedRun
    planned: Checked
    dataset: dpjax.data.Dataset
    first: Any
    """The parameters before the first step."""
    released: Any
    """The parameters after the last one."""
    unseen: str = ""
    """What could not be compared with the run, in words."""

    @property
    def loss(self) -> Callable[..., jax.Array]:
        """The loss of one example, as the step differentiates it."""
        return losses.of(self.planned.model, self.planned.loss)

    def algorithm(
        self, mechanism: dpjax.Mechanism, optimizer: optax.GradientTransformation, train: Any
    ) -> dpjax.types.Algorithm:
        """DP-SGD with this run's loss."""
        per_step = self.planned.per_step
        return dpjax.dpsgd(self.loss, optimizer, mechanism, train, per_step=per_step)


def rebuild(folder: pathlib.Path, data_dir: str | None = None) -> Rebuilt:
    """Reads a run's folder and builds the run again; refuses folders that lack what it needs.

    ``data_dir`` is the flag of that name, which no run's folder records.
    """
    run, parameters = _files(folder)
    try:
        given = _flags(run)
        given["data_dir"].value = data_dir
        configured = settings(given)
        _fix_steps(given, run)
        planned = plan(given)
    except (flags.Error, app.UsageError) as error:
        raise app.UsageError(
            f"{folder}: its run cannot be built again from the flags in its config.json: {error}\n"
            "Usually the run was started in another folder, and the paths of its flags begin "
            "there: run the audit in that folder. Or a file was moved or changed since."
        ) from error
    if planned.normalization is not None and not (folder / inputs.MOMENTS).exists():
        raise app.UsageError(
            f"{folder}: has no {inputs.MOMENTS}, the private scales of its features, and a second "
            "query would spend privacy. Restore the file."
        )
    dataset = inputs.with_features(given, planned.dataset)
    try:
        scale = planned.normalization, jax.random.key(0), folder
        dataset = inputs.with_scale(given, dataset, *scale)
    except dpjax.ledger.Refused as refused:
        raise app.UsageError(
            f"{folder}: its {inputs.MOMENTS} is of other data.{_USUAL}"
        ) from refused
    first = first_parameters(planned.model, dataset, planned.earlier)
    rebuilt = Rebuilt(run, planned, dataset, *jax.tree.map(jnp.asarray, (first, first)))
    # Before the released parameters are read: another network's may not fit this one.
    unseen = _require_same(rebuilt, configuration_of(configured, planned.dataset))
    released = restored(parameters, first, str(folder))
    if given.stream:  # the audits need all rows in memory
        given["stream"].value = False
        dataset = load(given)
    return rebuilt._replace(dataset=dataset, released=released, unseen=unseen)


def _require_same(rebuilt: Rebuilt, configuration: dict[str, Any]) -> str:
    """Refuses what is not the run of the folder; returns what could not be compared."""
    planned, run = rebuilt.planned, rebuilt.run
    algorithm = rebuilt.algorithm(planned.mechanism, planned.optimizer, rebuilt.dataset.train)
    state = algorithm.init(rebuilt.first, jax.random.key(0))
    identity = json.loads(json.dumps(identity_of(algorithm, state, configuration)))
    there = run.identity or {}
    if lines := differences(there, {**identity, "randomness": there.get("randomness")}):
        raise app.UsageError(
            f"{run.path}: its flags, these data and this code are another run than its run.json:\n"
            + "\n".join(lines)
            + f"\nAn audit of them says nothing of what ran.{_USUAL}"
        )
    return ""


def _files(folder: pathlib.Path) -> tuple[SavedRun, bytes]:
    """What the folder holds, and the parameters that the run released."""
    if not folder.is_dir():
        raise app.UsageError(f"{folder}: there is no such folder; expected that of a run.")
    try:
        run = read(folder, arrays=False)
    except (OSError, ValueError) as error:
        raise app.UsageError(f"{folder}: {error}") from error
    if run.mechanism.get("unit") == "client":
        raise app.UsageError(
            f"{folder}: holds a federated run, whose clients are not in its folder. Audit its "
            "algorithm with dpjax.auditing.audit_algorithm."
        )
    if run.card is None or run.config is None or "flags" not in run.config:
        raise app.UsageError(
            f"{folder}: has no privacy.json and config.json of one run, which say how to build it "
            "again. Usually the run was interrupted, which its own command resumes; or dpjax.fit "
            "wrote the folder, and then dpjax.auditing audits its algorithm."
        )
    if not (folder / "params.msgpack").exists():
        raise app.UsageError(
            f"{folder}: has no params.msgpack, the released parameters. The command of the run "
            "writes them again."
        )
    try:
        return run, run_files.released(folder)
    except app.UsageError as error:
        raise app.UsageError(
            f"{folder}: its params.msgpack is not of the run in run.json. Usually another run was "
            "started in the folder. The command of the run writes both."
        ) from error


def _flags(run: SavedRun) -> flags.FlagValues:
    """The flags of the run, by value: a command line would need quotes around lists in options."""
    config: Any = run.config
    given = copy.deepcopy(FLAGS)
    given(["train"])
    for name, value in config["flags"].items():
        if name in given:
            given[name].value = value
    # No flag says it, and a hash of all examples is not that of a stream.
    given["stream"].value = " streamed, " in (run.identity or {}).get("data", "")
    given.validate_all_flags()
    return given


def _fix_steps(given: flags.FlagValues, run: SavedRun) -> None:
    """Fixes the number of steps: no file says which flags were given, and so decided it."""
    multipliers = run.mechanism["multiplier_and_steps"]
    given["steps"].value = sum(steps for _, steps in multipliers)
    given["steps"].present = 1


def step(rebuilt: Rebuilt, pairs: int, confidence: float) -> auditing.Separation:
    """The white-box audit of the first step, with the row whose clipped gradient is longest."""
    dataset, mechanism = rebuilt.dataset, rebuilt.planned.mechanism
    size = dataset.examples
    some = np.linspace(0, size - 1, min(512, size)).astype(int)
    rows = jax.tree.map(jnp.asarray, dataset.rows(some))
    if rebuilt.planned.per_step is not None:
        rows = (*rows, jnp.zeros(len(some), jnp.int32))
    found = dpjax.clipped_grad(rebuilt.loss, mechanism.clipping)(rebuilt.first, rows)
    # A dropped row has factor 0 and a norm that is not finite: it moves nothing.
    reach = np.linalg.norm(np.nan_to_num(np.asarray(found.factors * found.norms)), axis=1)

    def build(sampler: Any) -> Any:
        drawn = dataclasses.replace(mechanism, sampling=sampler)
        # Any optimizer post-processes the mean; this one shows it as it is.
        return rebuilt.algorithm(drawn, optax.sgd(1.0), dataset.train)

    canary = int(some[np.argmax(reach)])
    options = {"pairs": pairs, "confidence": confidence}
    return auditing.audit_algorithm(build, mechanism.sampling, rebuilt.first, canary, **options)


class Guessed(NamedTuple):
    """Guesses about canaries after one run, and the claim for its steps."""

    right: int
    guesses: int
    canaries: int
    steps: int
    epsilon: float
    claimed: float
    confidence: float


def number_of_canaries(rebuilt: Rebuilt, asked: int | None) -> int:
    """How many rows become canaries; by default a fourth, and at most 1,000."""
    size = rebuilt.dataset.examples
    count = min(1000, size // 4) if asked is None else asked
    if not 10 <= count < size:
        raise app.UsageError(
            f"--canaries={count}: expected 10 or more, and fewer than the {size} rows; by default "
            "they are a fourth of the rows, and at most 1,000."
        )
    return count


def canaries(rebuilt: Rebuilt, count: int, steps: int, confidence: float) -> Guessed:
    """Trains once more, on data in which some rows are canaries that join by fair coins.

    A canary is an image of white noise with a random label, as long as the row in whose place it
    stands: its gradient is nearly orthogonal to all others. Of whole numbers, such as tokens, each
    entry of a canary comes from another canary's row.
    """
    (x, y), planned = rebuilt.dataset.train, rebuilt.planned
    draw, size = np.random.default_rng(0), rebuilt.dataset.examples
    places = draw.choice(size, count, replace=False)
    x, y = np.array(x), np.array(y)
    if np.issubdtype(x.dtype, np.integer):
        x[places] = draw.permuted(x[places], axis=0)
    else:
        image, old = draw.normal(size=(count, *x.shape[1:])), x[places].reshape(count, -1)
        lengths = np.linalg.norm(old, axis=1) / np.linalg.norm(image.reshape(count, -1), axis=1)
        x[places] = image * lengths.reshape(-1, *[1] * (x.ndim - 1))
    y[places] = draw.integers(0, rebuilt.dataset.classes or 1, count)
    members = draw.random(count) < 0.5
    others = np.setdiff1d(np.arange(size), places)
    others = draw.permutation(others)[:_KNOWN]
    # All of its steps, although few run: correlated noise is designed for the whole run.
    mechanism = dataclasses.replace(
        planned.mechanism,
        sampling=auditing.without(planned.mechanism.sampling, places[~members]),
        preparation=(),
        before=(),
    )
    steps = min(steps, mechanism.steps)
    algorithm = rebuilt.algorithm(mechanism, auditing.recording(planned.optimizer), (x, y))
    scores, _ = auditing.score_canaries(
        algorithm,
        algorithm.init(rebuilt.first, jax.random.key(0)),
        steps,
        rebuilt.loss,
        (jnp.asarray(x[places]), jnp.asarray(y[places])),
        (jnp.asarray(x[others]), jnp.asarray(y[others])),
        per_step=planned.per_step,
    )
    right, guesses = auditing.guess_members(scores, members, count // 5)
    delta = rebuilt.run.delta
    found = auditing.epsilon_lower_bound(
        right, guesses, canaries=count, delta=delta, confidence=confidence
    )
    claimed = mechanism.epsilon_of(mechanism.multipliers[:steps], delta, planned.method)
    return Guessed(right, guesses, count, steps, found, claimed, confidence)


def membership(
    rebuilt: Rebuilt, confidence: float
) -> tuple[auditing.Membership, tuple[np.ndarray, np.ndarray]]:
    """Guesses training rows from the losses of the released parameters; and these scores."""
    model, dataset = rebuilt.planned.model, rebuilt.dataset
    loss = losses.of(model, losses.cross_entropy)

    @jax.jit
    def scores(rows: Any) -> jax.Array:
        return jax.lax.map(lambda row: -loss(rebuilt.released, row), rows, batch_size=500)

    some = np.linspace(0, dataset.examples - 1, min(_MOST, dataset.examples)).astype(int)
    members = np.asarray(scores(jax.tree.map(jnp.asarray, dataset.rows(some))))
    others = np.asarray(scores(jax.tree.map(lambda x: jnp.asarray(x[:_MOST]), dataset.test)))
    audit = auditing.audit_membership(
        members, others, delta=rebuilt.run.delta, confidence=confidence
    )
    return audit, (members, others)
