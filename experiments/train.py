# SPDX-License-Identifier: Apache-2.0
"""Trains a network with differential privacy, and says what that is worth.

With no flags: a two-layer tanh network on the handwritten digits of scikit-learn (1,437
training images), at epsilon 3 and delta 1e-5, by exact Poisson sampling, RDP accounting.

  claim     at least 93 % test accuracy
  seen      95.1 %, mean of 5 runs with secret keys (94.7 to 96.1), 7 s on two CPU cores
  command   python experiments/train.py --out runs/demo

Other data, networks, losses and features are flags away, such as the loss of
losing_less_2022, or a network on wavelet features that are scaled privately:

  python experiments/train.py --dataset=mnist --model=tempered_cnn --loss=composite
  python experiments/train.py --dataset=mnist --model=scatter_cnn --features=scattering \\
      --normalization=data

It prints the privacy statement, and in the output folder it leaves `report.html` (figures,
each with a word on who may see it), `metrics.jsonl` (a line an evaluation), `params.msgpack`
(Flax; may be released), `privacy.json` (from which `experiments/verify.py` recomputes
epsilon), `statement.txt`, and `checkpoints` (secret: they hold the key).  A run that was
killed goes on when the same command is given again.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import pathlib
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags, logging
from common.classifier import cleared, describe, rehearse, released, train
from common.flag_checks import in_range, only_flags, whole_and_positive

import dpjax
from dpjax import (
    accounting,
    activations,
    clipping,
    data,
    features,
    losses,
    models,
    noise,
    reports,
    sampling,
    scattering,
    schedules,
    training,
)
from dpjax.accounting.rounding import upwards

_DATASET = flags.DEFINE_enum("dataset", "digits", data.NAMES, "What to learn.")
_DATA_DIR = flags.DEFINE_string(
    "data_dir", None, "Where the data are; by default what DPJAX_DATA_DIR says."
)
_STREAM = flags.DEFINE_bool(
    "stream", False, "Leave training examples on the disk, and read what is drawn (by TFDS)."
)
_FEATURES = flags.DEFINE_enum(
    "features", "none", ["none", "scattering"], "What is computed of each image beforehand."
)
_CACHE = flags.DEFINE_string(
    "cache_dir", None, "Where features are kept between runs; they are as secret as the data."
)
_NORMALIZATION = flags.DEFINE_enum(
    "normalization",
    "group",
    ["group", "data"],
    "How features are scaled: each example by itself, or by private moments of all of them.",
)
_NORM_GROUPS = flags.DEFINE_integer("norm_groups", 27, "With --normalization=group: how many.")
_NORM_NOISE = flags.DEFINE_float(
    "norm_multiplier", 8.0, "With --normalization=data: the noise of each of two queries."
)
_SEARCH_NOISE = flags.DEFINE_float(
    "search_multiplier", 20.0, "The noise of each of two more, which find what to clip at."
)

_MODEL = flags.DEFINE_enum("model", "mlp", models.NAMES, "The network.")
_HIDDEN = flags.DEFINE_list("hidden", ["128"], "Widths of the hidden layers of an mlp.")
whole_and_positive("hidden")
_OPTIONS = flags.DEFINE_list("model_options", [], "Further fields of the model: depth=10,width=1.")
_ACTIVATION = flags.DEFINE_string(
    "activation", None, "Of the hidden layers; by default the model's own (mlp and CNNs: tanh)."
)
_TORCH = flags.DEFINE_bool("torch_init", False, "Begin as PyTorch does, as published runs did.")

_LOSSES: dict[str, Callable[..., losses.ExampleLoss]] = {
    "cross_entropy": lambda: losses.cross_entropy,
    "focal": losses.focal,
    "composite": losses.composite,
    "squared_error": lambda: losses.one_hot(losses.squared_error),
    "absolute": lambda: losses.one_hot(losses.absolute),
    "huber": lambda: losses.one_hot(losses.huber()),
}
_LOSS = flags.DEFINE_enum("loss", "cross_entropy", list(_LOSSES), "The loss of one example.")
_LOSS_OPTIONS = flags.DEFINE_list(
    "loss_options",
    [],
    "Arguments of a focal or composite loss: threshold=7,beta=11,gamma=5 was published for "
    "CIFAR-10; losses.composite lists the others, and MNIST's are its defaults.",
)

_RULE = flags.DEFINE_enum(
    "clipping",
    "flat",
    ["flat", "grouped", "automatic", "normalized", "psac", "hard_threshold"],
    "How one example's gradient is held to the bound.",
)
_BOUND = flags.DEFINE_float("bound", 0.5, "The most that one example moves the sum.")
_GROUPS = flags.DEFINE_integer("groups", 8, "With --clipping=grouped: how many.")

_SCHEDULE = flags.DEFINE_enum(
    "noise_schedule",
    "constant",
    ["constant", *schedules.CURRICULA],
    "How the noise changes over the epochs.",
)
_EPSILON = flags.DEFINE_float(
    "target_epsilon", 3.0, "Scale the noise so that the run costs at most this."
)
in_range("target_epsilon", 0, strictly=True)
_MULTIPLIER = flags.DEFINE_float(
    "noise_multiplier", None, "Instead of --target_epsilon: scale the noise by this."
)
_MOST = flags.DEFINE_float(
    "max_epsilon",
    None,
    "With --noise_multiplier: run until one more step would pass this; with --epochs or --steps "
    "as well, refuse to begin what would pass it.",
)
flags.register_validator(
    "max_epsilon",
    lambda most: most is None or most > 0,
    "Expected an epsilon above 0: at 0 no step fits. Leave it out to run without a limit.",
)
_DELTA = flags.DEFINE_float("delta", 1e-5, "The delta of the guarantee.")
in_range("delta", 0, 1, strictly=True)
_METHOD = flags.DEFINE_enum("accountant", "rdp", ["rdp", "pld"], "Which accountant.")

_SAMPLER = flags.DEFINE_enum(
    "sampling", "poisson", ["poisson", "fixed", "shuffled"], "How batches are drawn."
)
_BATCH = flags.DEFINE_integer("batch_size", 512, "The expected size of a batch.", 1)
_EPOCHS = flags.DEFINE_float("epochs", 40, "How many epochs.")
in_range("epochs", 0)
_STEPS = flags.DEFINE_integer("steps", None, "Instead of --epochs: how many steps.", 0)

_OPTIMIZERS: dict[str, Callable[..., optax.GradientTransformation]] = {
    "sgd": lambda rate, _: optax.sgd(rate, momentum=_MOMENTUM.value),
    "nesterov": lambda rate, _: optax.sgd(rate, momentum=_MOMENTUM.value, nesterov=True),
    "adagrad": lambda rate, _: optax.adagrad(rate),
    "rmsprop": lambda rate, _: optax.rmsprop(rate),
    "adam": lambda rate, _: optax.adam(rate),
    "adamw": lambda rate, _: optax.adamw(rate),
    "dp_adam": lambda rate, mechanism: training.dp_adam(rate, mechanism, floor=_FLOOR.value),
}
_OPTIMIZER = flags.DEFINE_enum(
    "optimizer", "sgd", list(_OPTIMIZERS), "dp_adam is Adam without the noise's second moment."
)
_RATE = flags.DEFINE_float("learning_rate", 0.4, "Of the optimizer.")
in_range("learning_rate", 0)
_PER_512 = flags.DEFINE_bool("rate_per_512", False, "The rate is for 512 examples: scale it.")
_WARMUP = flags.DEFINE_integer("warmup_steps", 0, "Steps in which the rate rises from 0.", 0)
_MOMENTUM = flags.DEFINE_float("momentum", 0.9, "Of SGD.")
in_range("momentum", 0, 1)
_FLOOR = flags.DEFINE_float("floor", 1e-8, "Of dp_adam's second moment.")
in_range("floor", 0, strictly=True)
_AVERAGE = flags.DEFINE_float("average", 0.95, "Decay of the parameter average.")
in_range("average", 0, 1)
_EVALUATIONS = flags.DEFINE_integer("evaluations", 20, "How often to test on the way.", 1)

_SEED = flags.DEFINE_integer(
    "seed", None, "For reproduction only: whoever knows it can subtract the noise."
)
_OUT = flags.DEFINE_string(
    "out", "runs/train", "Folder of the run; one that was interrupted goes on."
)
_OVERWRITE = flags.DEFINE_bool("overwrite", False, "Forget the run that is in the folder.")
_CONTINUE = flags.DEFINE_string(
    "continue_from",
    None,
    "The folder of an earlier run on these data: begin with the parameters that it released, "
    "under other settings, and count what it spent too.",
)
_SAVE = flags.DEFINE_integer("save_every", None, "Steps between checkpoints; else 5 minutes.", 1)
_REPORT = flags.DEFINE_bool("report", True, "Write report.html and its figures.")

_ELSEWHERE = {
    "out",
    "stream",
    "overwrite",
    "data_dir",
    "cache_dir",
    "save_every",
    "report",
}  # same run


def numbers(pairs: list[str]) -> dict[str, Any]:
    """Reads ``name=value`` pairs; values are as in JSON, and else words."""
    read = {}
    for name, _, value in (pair.partition("=") for pair in pairs):
        try:
            read[name] = json.loads(value)
        except json.JSONDecodeError:
            read[name] = value
    return read


def settings() -> dict[str, Any]:
    """The flags that make the run what it is."""
    own = flags.FLAGS.get_flags_for_module(sys.modules[__name__])
    return {flag.name: flag.value for flag in own if flag.name not in _ELSEWHERE}


def loss_from_flags() -> losses.ExampleLoss:
    """The loss that the flags describe."""
    make, options = _LOSSES[_LOSS.value], numbers(_LOSS_OPTIONS.value)
    known = list(inspect.signature(make).parameters)
    try:
        if not options.keys() <= set(known):
            raise ValueError(f"{_LOSS.value} has {', '.join(known) or 'no options'}.")
        return make(**options)
    except (TypeError, ValueError) as error:
        raise app.UsageError(
            f"--loss={_LOSS.value} --loss_options={','.join(_LOSS_OPTIONS.value)}: {error} "
            "Expected name=value of what this loss has, as in --loss=focal --loss_options=gamma=2."
        ) from error


def normalization_from_flags(examples: int) -> features.Normalization | None:
    """The queries on private data that features take, if they take any."""
    if _FEATURES.value == "none" or _NORMALIZATION.value != "data":
        return None
    return features.Normalization(
        examples=examples,
        noise_multiplier=_NORM_NOISE.value,
        thresholds=features.Search(noise_multiplier=_SEARCH_NOISE.value),
    )


def scaled(x: Any, moments: features.Moments | None) -> Any:
    """Features as the network takes them: by moments of all of them, or each by itself."""
    if moments is None:
        return features.group_norm(x, groups=_NORM_GROUPS.value)
    return features.normalize(x, moments)


def input_of(dataset: data.Dataset) -> jax.ShapeDtypeStruct:
    """What the network is shown of one example, without its numbers."""
    x, _ = dataset.train.row if isinstance(dataset.train, data.Stream) else dataset.train
    shape = x.shape if isinstance(dataset.train, data.Stream) else x.shape[1:]
    if _FEATURES.value == "none":
        return jax.ShapeDtypeStruct(shape, x.dtype)
    row = jax.eval_shape(scattering.scatter, jax.ShapeDtypeStruct((1, *shape), x.dtype))
    channels = jax.ShapeDtypeStruct(row.shape[-1:], row.dtype)
    moments = features.Moments(channels, channels) if _NORMALIZATION.value == "data" else None
    return jax.eval_shape(lambda row, moments: scaled(row, moments)[0], row, moments)


def featured(dataset: data.Dataset) -> data.Dataset:
    """The features that the flags describe, of each image by itself."""
    if _FEATURES.value == "none":
        return dataset
    x, x_test = (
        jnp.asarray(features.scattered(part[0], directory=_CACHE.value))
        for part in (dataset.train, dataset.test)
    )
    return dataset._replace(train=(x, dataset.train[1]), test=(x_test, dataset.test[1]))


def prepared(
    dataset: data.Dataset,
    normalization: features.Normalization | None,
    key: Any,
    folder: pathlib.Path,
) -> data.Dataset:
    """The features on one scale, by what these queries release."""
    if _FEATURES.value == "none":
        return dataset
    (x, labels), (x_test, test_labels) = dataset.train, dataset.test
    moments = None
    if normalization is not None:
        moments = released_once(folder / "moments.npz", normalization, key, x)
    x, x_test = map(jax.jit(partial(scaled, moments=moments)), (x, x_test))
    return dataset._replace(train=(x, labels), test=(x_test, test_labels))


def released_once(
    path: pathlib.Path, normalization: features.Normalization, key: Any, x: Any
) -> features.Moments:
    """What the queries released, kept for a run that goes on: to ask again is to spend again."""
    asked = {"multipliers": normalization.multipliers, "of": dpjax.trees.fingerprint(x)}
    if not path.exists():
        if (path.parent / "run.json").exists():
            raise dpjax.ledger.Refused(
                f"--out={path.parent}: a run is there that asked nothing of its data beforehand, "
                "so this is another one. Give another folder, or --overwrite."
            )
        beside = path.with_suffix(".part.npz")
        np.savez(beside, **asked, **normalization.release(key, x)._asdict())
        os.replace(beside, path)
    kept = np.load(path)
    if any(not np.array_equal(kept[name], asked[name]) for name in asked):
        raise dpjax.ledger.Refused(
            f"{path} holds the answers to other queries, or of other data: multipliers "
            f"{kept['multipliers'].tolist()} there, {list(normalization.multipliers)} now. What "
            "they cost is spent."
        )
    return features.Moments(kept["mean"], kept["variance"])


def steps_per_epoch(examples: int) -> int:
    """How many steps the schedules and losses call an epoch."""
    return max(1, round(examples / _BATCH.value))


def mechanism_from_flags(examples: int, queries: tuple[float, ...] = ()) -> dpjax.Mechanism:
    """The private computation that the flags describe, after these queries on all the data."""
    per_epoch = steps_per_epoch(examples)
    options: dict[str, Any] = {"groups": _GROUPS.value} if _RULE.value == "grouped" else {}
    steps = round(_EPOCHS.value * examples / _BATCH.value) if _STEPS.value is None else _STEPS.value
    noise_multiplier: Any = 1.0
    if _SCHEDULE.value != "constant":  # over the steps that run; the last epoch may be cut off
        curriculum = schedules.CURRICULA[_SCHEDULE.value]
        epochs = max(1, -(-steps // per_epoch))
        noise_multiplier = curriculum(epochs=epochs, steps_per_epoch=per_epoch)
    mechanism = dpjax.Mechanism(
        sampling=getattr(sampling, _SAMPLER.value)(examples, _BATCH.value),
        clipping=getattr(clipping, _RULE.value)(_BOUND.value, **options),
        noise_multiplier=noise_multiplier,
        steps=steps,
        preparation=queries,
        before=() if _CONTINUE.value is None else training.earlier(_CONTINUE.value),
    )
    if not mechanism.steps:
        raise app.UsageError(
            f"--epochs={_EPOCHS.value:g} --steps={_STEPS.value}: expected one step at least, and "
            f"an epoch has {per_epoch} of them. Without one nothing is trained. Give more."
        )
    if _MULTIPLIER.value is None:
        return mechanism.calibrate(_EPSILON.value, _DELTA.value, _METHOD.value)
    mechanism = mechanism.scaled(_MULTIPLIER.value)
    if _MOST.value is None or flags.FLAGS["epochs"].present or flags.FLAGS["steps"].present:
        return mechanism
    if _SCHEDULE.value != "constant":
        raise app.UsageError(
            f"--noise_schedule={_SCHEDULE.value} --max_epsilon={_MOST.value:g}: a schedule is "
            "spread over the steps that run, and how many fit would depend on the schedule. Give "
            "--steps or --epochs too, or take --target_epsilon in place of --noise_multiplier."
        )
    return dataclasses.replace(mechanism, steps=steps_that_fit(mechanism, _MOST.value))


def steps_that_fit(mechanism: dpjax.Mechanism, most: float) -> int:
    """How many steps cost at most this, if one does."""
    by = _DELTA.value, _METHOD.value
    found = accounting.largest_steps(
        lambda n: dataclasses.replace(mechanism, steps=n).event, most, *by, mechanism.relation
    )
    if not found:
        none, one = (dataclasses.replace(mechanism, steps=n).epsilon(*by) for n in (0, 1))
        raise app.UsageError(
            f"--max_epsilon={most:g}: not one step fits. Before the first one epsilon is "
            f"{upwards(none)} at delta={by[0]:g} ({by[1]}), and it would bring it to "
            f"{upwards(one)}. Usually "
            f"the noise is too small: raise --noise_multiplier={_MULTIPLIER.value:g} or "
            f"--max_epsilon, or lower --batch_size={_BATCH.value}."
        )
    return found


def optimizer_from_flags(mechanism: dpjax.Mechanism) -> optax.GradientTransformation:
    """The optimizer that the flags describe; it keeps an average of the parameters."""
    rate = _RATE.value
    if _PER_512.value:
        rate = training.scaled_rate(rate, mechanism.batch_size)
    if _WARMUP.value:
        rate = optax.warmup_constant_schedule(0.0, rate, _WARMUP.value)
    moves = _OPTIMIZERS[_OPTIMIZER.value](rate, mechanism)
    return optax.chain(moves, training.average_parameters(_AVERAGE.value))


def model_from_flags(classes: int) -> Any:
    """The network that the flags describe."""
    if _MODEL.value.startswith("scatter") and _FEATURES.value != "scattering":
        raise app.UsageError(
            f"--model={_MODEL.value} reads wavelet features, and --features={_FEATURES.value} "
            "gives it images. Add --features=scattering, or take --model=tempered_cnn."
        )
    options = {"torch_init": _TORCH.value, **numbers(_OPTIONS.value)}
    if _ACTIVATION.value is not None:
        options["activation"] = activations.by_name(_ACTIVATION.value)
    if _MODEL.value == "mlp":
        options["features"] = tuple(map(int, _HIDDEN.value))
    return models.by_name(_MODEL.value, classes, **options)


def main(argv: list[str]) -> None:
    only_flags(argv)
    try:
        job()
    except dpjax.ledger.Refused as refused:
        sys.exit(
            f"{refused}\nHere: another --out, --overwrite to forget what is there, or "
            "--continue_from=RUN --out=ANOTHER to go on from it under other settings."
        )


def require_one_of_each() -> None:
    """Refuses two flags of which one would be passed over without a word."""
    for one, other in (("noise_multiplier", "target_epsilon"), ("steps", "epochs")):
        if flags.FLAGS[one].value is not None and flags.FLAGS[other].present:
            raise app.UsageError(
                f"--{one}={flags.FLAGS[one].value} --{other}={flags.FLAGS[other].value}: expected "
                "one of the two, since each says the same in its own way. To hold a given noise "
                "to a budget, add --max_epsilon to --noise_multiplier."
            )


def require_affordable(mechanism: dpjax.Mechanism, budget: dpjax.ledger.Budget | None) -> None:
    """Refuses a plan that would pass the budget, before anything is touched."""
    try:
        dpjax.ledger.require(dpjax.ledger.empty(), mechanism, mechanism.steps, budget)
    except dpjax.ledger.Refused as refused:
        raise app.UsageError(
            f"--max_epsilon={_MOST.value}: {refused}\nRaise it, give fewer --steps or --epochs, "
            "or more noise: a larger --noise_multiplier, or a lower --target_epsilon. Nothing was "
            "spent, and nothing in --out was touched."
        ) from refused


def require_another_folder(folder: pathlib.Path, earlier: str | None) -> None:
    """Refuses to go on from a run in its own folder, before anything there is touched."""
    if earlier is not None and folder.resolve() == pathlib.Path(earlier).resolve():
        raise app.UsageError(
            f"--continue_from={earlier} --out={folder}: both are {folder.resolve()}. There lies "
            "what the earlier run spent, which counts for this one too: give another --out. If "
            "that run was only interrupted, give its own command again, without --continue_from."
        )


def job() -> None:
    """The whole of it: data, mechanism, training, and the files.

    Flags and budget are checked, and all is gone through on the shape of one example, before a
    folder is emptied and private data are asked.
    """
    logging.set_verbosity(logging.WARNING)  # JAX reports the accelerators it did not find
    started, folder = time.time(), pathlib.Path(_OUT.value)
    require_one_of_each()
    require_another_folder(folder, _CONTINUE.value)
    if _FEATURES.value != "none" and _STREAM.value:
        raise app.UsageError("--features are computed of all images at once: leave --stream out.")
    dataset = (data.stream if _STREAM.value else data.load)(_DATASET.value, _DATA_DIR.value)
    if dataset.classes is None:
        raise app.UsageError(
            f"--dataset={_DATASET.value} has a quantity to predict; this binary classifies."
        )
    model = model_from_flags(dataset.classes)
    loss = loss_from_flags()
    normalization = normalization_from_flags(dataset.examples)
    queries = () if normalization is None else normalization.multipliers
    try:
        mechanism = mechanism_from_flags(dataset.examples, queries)
    except ValueError as error:
        raise app.UsageError(f"these flags describe no private run: {error}") from error
    optimizer = optimizer_from_flags(mechanism)
    per_epoch = steps_per_epoch(dataset.examples)
    per_step = (lambda step: step // per_epoch) if _LOSS.value == "composite" else None
    earlier = _CONTINUE.value and released(pathlib.Path(_CONTINUE.value))
    rehearse(partial(input_of, dataset), model, loss, mechanism, earlier, epochs=bool(per_step))
    budget = _MOST.value and dpjax.ledger.Budget(
        epsilon=_MOST.value, delta=_DELTA.value, method=_METHOD.value
    )
    require_affordable(mechanism, budget)
    planned = mechanism.epsilon(_DELTA.value, _METHOD.value)
    print(
        f"{mechanism.steps} steps with noise multiplier {np.mean(mechanism.multipliers):.4g} "
        f"cost epsilon {upwards(planned)} at delta={_DELTA.value:g} ({_METHOD.value})",
        flush=True,
    )
    dataset = featured(dataset)
    key = noise.secret_key() if _SEED.value is None else jax.random.key(_SEED.value)
    if _OVERWRITE.value:
        training.forget(folder)
        cleared(folder, "moments.npz")
    folder.mkdir(parents=True, exist_ok=True)
    dataset = prepared(dataset, normalization, key, folder)
    params, state, history = train(
        dataset,
        model,
        loss,
        mechanism,
        optimizer,
        key=key,
        params=earlier,
        per_step=per_step,
        budget=budget,
        evaluations=_EVALUATIONS.value,
        delta=_DELTA.value,
        method=_METHOD.value,
        directory=folder,
        configuration={f"--{name}": value for name, value in settings().items()},
        save_every=_SAVE.value,
    )
    facts = {"ledger": state.ledger, "seed": _SEED.value}
    words = dpjax.statement(mechanism, _DELTA.value, **facts)
    card = reports.card(mechanism, _DELTA.value, **facts)
    (folder / "privacy.json").write_text(json.dumps(card, indent=2) + "\n")
    (folder / "statement.txt").write_text(words + "\n")
    describe(
        folder,
        {**settings(), "out": _OUT.value},
        started=time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(started)),
        seconds=round(time.time() - started, 1),
        dataset=f"{dataset.name} {dataset.note}".strip(),
        model=_MODEL.value,
        parameters=sum(x.size for x in jax.tree.leaves(params)),
    )
    print(words)
    accuracy = history[-1]["accuracy"] if history else float("nan")
    print(f"\nTest accuracy {accuracy:.1%} on {dataset.name} {dataset.note}")
    if _REPORT.value:
        print(f"To look at: {reports.report(folder)}")
    print(f"{time.time() - started:.1f} s on {jax.devices()[0].device_kind}")
    print(f"Files in {folder}: " + ", ".join(sorted(p.name for p in folder.iterdir())))
    print(f"Recompute epsilon: python experiments/verify.py {folder / 'privacy.json'}")


if __name__ == "__main__":
    app.run(main)
