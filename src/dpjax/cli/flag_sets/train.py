# SPDX-License-Identifier: Apache-2.0
"""Trains a network with differential privacy and reports what the guarantee is.

With no flags: a two-layer tanh network on the handwritten digits of scikit-learn (1,437
training images), at epsilon 3 and delta 1e-5, with Poisson sampling and the tightest proven
accountant.  Batch, epochs, clipping and step sizes are planned from public numbers (`dpjax plan`
prints why); a flag that is given is kept.

Examples:
  dpjax train --out=runs/demo
  dpjax train --preset=mnist_eps3
  dpjax train --dataset=my.csv --model=networks:Net --target_epsilon=2
  dpjax train --dataset=visits.csv --columns=columns.toml --unit_column=patient --most_rows=5
  dpjax train --dataset=mnist --model=tempered_cnn --loss=composite
  dpjax train --dataset=mnist --model=scatter_cnn --features=scattering --normalization=data

The output folder receives `report.html` (figures, each with a note on who may see it),
`metrics.jsonl` (a line per evaluation), `params.msgpack` (Flax; may be released; of the last
evaluation, and averaged once the run has ended), `privacy.json` (from which `dpjax verify`
recomputes epsilon), `statement.txt`, `config.json`, and `checkpoints` (secret).  `run.json` and
`lock` say which run is there, and that no second process trains in it.  The same command resumes a
run that was killed.

Compiled programs stay in ~/.cache/dpjax, where the next run finds them: JAX_COMPILATION_CACHE_DIR
names another folder, and JAX_ENABLE_COMPILATION_CACHE=false keeps none.
"""

from __future__ import annotations

import re
from typing import Any

from absl import flags

from dpjax.cli import machine_flags
from dpjax.cli.flag_sets import LARGEST_SEED, Group, names
from dpjax.cli.flag_sets.presets import ROWS

WORDS = ""  # only flags
FLAGS = flags.FlagValues()

_results = "; ".join(f"{name} {result} %" for name, (result, *_) in ROWS.items())
_words = "Flags of a published row, where they are not given. Test accuracies, seeds in brackets: "
Group(FLAGS, "Preset").choice("preset", None, list(ROWS), f"{_words}{_results}.")

_data = Group(FLAGS, "Data")
_data.named(
    "dataset",
    "digits",
    lambda word: names.is_file(word) or word in names.DATASETS,
    "Data set to learn. A file has x and y (or x_train, y_train, x_test, y_test), or a header and "
    "the label in --label: ",
    f"my.npz, my.csv, or one of {', '.join(names.DATASETS)}.",
)
_data.whole("classes", None, "Number of classes of a file; by default its labels, as public.", 2)
_data.text("label", None, "Column of the label in a .csv of yours; by default label, or the last.")
_data.path(
    "test",
    None,
    "Public file with the rows for the test, of the form of --dataset=my.csv or my.npz; no row is "
    "then held out.",
)
_data.number(
    "holdout",
    None,
    "Fraction of the rows, or of the persons, of a file of yours that is held out for the test: "
    "0.2 unless given. No epsilon covers them. 0 trains on all, without a test.",
    0,
    1,
)
_data.path("columns", None, "Declared columns of a .csv; `dpjax columns my.csv` drafts them.")
_data.text(
    "unit_column",
    None,
    "With --columns: the column that says whose row it is. A person with all rows is then the "
    "unit; batches and epochs count persons.",
)
_data.whole("most_rows", 1, "Rows of a person that one step reads, with --unit_column.", 1)
_data.path("data_dir", None, "Folder of the data; by default the environment's DPJAX_DATA_DIR.")
_data.yes_no("stream", False, "Read drawn examples from disk, if TFDS has prepared the data.")
_data.choice("features", "none", ["none", "scattering"], "Features to compute from each image.")
_data.path("cache_dir", None, "Folder that keeps features between runs; as secret as the data.")
_scales = ["group", "data"]
_data.choice("normalization", "group", _scales, "By its own example, or private moments.")
_data.whole("norm_groups", 27, "Number of groups for --normalization=group.")
_data.number("norm_multiplier", 8.0, "Noise of both moment queries of --normalization=data.")
_data.number("search_multiplier", 20.0, "Noise of the two queries that find clipping thresholds.")

_model = Group(FLAGS, "Model and loss")
_model.named(
    "model",
    "mlp",
    lambda word: names.is_own(word) or word in names.MODELS,
    "Network. Yours is networks:CNN for the Flax module CNN in networks.py here, or for a function "
    "that returns a module: ",
    f"module:name, or one of {', '.join(names.MODELS)}.",
)
_model.several("hidden", ["128"], "Widths of the hidden layers of an mlp.")
_model.several("model_options", [], "Further fields of the model: depth=10,width=1.")
_model.text("activation", None, "Activation; by default the model's (CNN, mlp: tanh).")
_model.yes_no("torch_init", False, "Use PyTorch's initial weights, as many published runs did.")
_model.choice("loss", "cross_entropy", names.LOSSES, "Loss; of a target one of the last three.")
_model.several("loss_options", [], "Arguments of a focal, composite or huber loss: threshold=7.")
_model.several(
    "class_weights",
    [],
    "Public weights of the classes, as 1,5. Losses are weighted before clipping: a gradient at the "
    "bound gains nothing, and the others shrink relative to the noise.",
)

_privacy = Group(FLAGS, "Privacy")
_rules = ["flat", "grouped", "automatic", "normalized", "psac", "hard_threshold"]
_PLANNED = "; planned from sizes, epsilon and delta if not given"
_privacy.choice("clipping", "flat", _rules, f"Rule that bounds one example's gradient{_PLANNED}.")
_privacy.number("bound", 0.5, "Largest norm that one example adds to the sum, or to each group.")
_privacy.number(
    "quantile",
    None,
    f"Let the bound follow this quantile of the gradient norms, from --bound on{_PLANNED}.",
    0,
    1,
)
_privacy.whole("groups", 8, "Number of groups for --clipping=grouped.")
_schedules = ["constant", *names.CURRICULA]
_privacy.choice("noise_schedule", "constant", _schedules, "Noise multiplier over the epochs.")
_privacy.number("target_epsilon", 3.0, "Scale the noise to this epsilon of the run.", 0)
_privacy.named(
    "risk",
    None,
    lambda word: word is None or re.fullmatch(r"[\d.e-]+@[\d.e-]+", word) is not None,
    "Scale the noise to this risk of the run, in place of --target_epsilon: ",
    "0.05@0.01 for an attack with at most 5 % true alarms at 1 % false ones.",
)
_privacy.number("noise_multiplier", None, "Noise, in place of --target_epsilon; scales a schedule.")
_privacy.number(
    "max_epsilon",
    None,
    "With --noise_multiplier: run the steps that fit. With --epochs or --steps: refuse more.",
    0,
)
_privacy.number("delta", 1e-5, "Delta of the guarantee.", 0, 1)
_accountants = ["tightest", "rdp", "pld"]  # the first is pld where that has a proof, else rdp
_privacy.choice("accountant", "tightest", _accountants, "Accountant that computes epsilon.")
_samplers = ["poisson", "random_allocation", "fixed", "shuffled", "balls_in_bins", "cyclic_poisson"]
_privacy.choice("sampling", "poisson", _samplers, "How batches are drawn.")
_privacy.choice(
    "noise",
    "white",
    ["white", "banded", "square_root", "banded_inverse_square_root", "buffered", "tree"],
    "How the noise of different steps is correlated; all but white need --sampling=cyclic_poisson, "
    "balls_in_bins or shuffled.",
)
_privacy.whole("bands", 16, "Bands of correlated noise, and parts of cyclic_poisson.", 1)
_privacy.whole("batch_size", 512, f"Expected size of a batch{_PLANNED}.", 1)
_privacy.number("epochs", 40, f"Number of epochs{_PLANNED}.", 0)
_privacy.whole("steps", None, "Number of steps, in place of --epochs.", 0, 2**31 - 1)
_privacy.whole(
    "seed",
    None,
    "Supply the key, so that the run repeats. A seed is no secret: who knows it can subtract the "
    "noise. By default keys come from the operating system.",
    0,
    LARGEST_SEED,
)

_optimization = Group(FLAGS, "Optimization")
_optimization.choice("optimizer", "sgd", names.OPTIMIZERS, f"Optimizer{_PLANNED}.")
_optimization.number("learning_rate", 0.4, "Learning rate.", 0)
_optimization.yes_no(
    "rate_per_512", False, "Scale the rate with the batch: times batch_size // 512."
)
_optimization.whole("warmup_steps", 0, "Steps over which the learning rate rises from 0.", 0)
_optimization.number("momentum", 0.9, "Momentum of SGD.", 0, 1)
_optimization.number("floor", 1e-8, "Smallest second moment of dp_adam.", 0)
_optimization.number("average", 0.95, "Decay of the parameter average.", 0, 1)
_optimization.whole("evaluations", 20, "Number of evaluations during the run.", 1)

_output = Group(FLAGS, "Output")
_output.path("out", "runs/train", "Folder of the run; the same command resumes an interrupted run.")
_output.yes_no("overwrite", False, "Delete the run that is in the folder first.")
_output.path("continue_from", None, "Start from this run's parameters, and count its cost too.")
_output.whole("save_every", None, "Steps between checkpoints that have no evaluation.", 1)
_output.yes_no("report", True, "Write report.html and its figures, for which Matplotlib is needed.")

_machine = Group(FLAGS, "Machine")
_machine.text("mesh", None, machine_flags.MESH)
_machine.yes_no("distributed", False, machine_flags.DISTRIBUTED)
_machine.text("coordinator_address", None, machine_flags.ADDRESS)
_machine.whole("num_processes", None, machine_flags.COUNT, 1)
_machine.whole("process_id", None, machine_flags.NUMBER, 0)

# Flags that may differ between two calls of the same run.
_ELSEWHERE = ("out", "stream", "overwrite", "data_dir", "cache_dir", "save_every", "report", "mesh")
# A preset is recorded by the flags that it sets.
_ELSEWHERE += ("preset", "distributed", *machine_flags.PROCESSES)


def settings(given: flags.FlagValues) -> dict[str, Any]:
    """The flags that identify a run."""
    return {n: value for n, value in given.flag_values_dict().items() if n not in _ELSEWHERE}
