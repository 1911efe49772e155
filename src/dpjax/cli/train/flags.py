# SPDX-License-Identifier: Apache-2.0
"""The flags of `dpjax train`: data, network, loss, mechanism, optimizer, and the run's folder.

`FLAGS` is a set of its own rather than absl's process-wide one, so that an import of this
module defines no flag for any other program.  `dpjax.cli` parses a copy and passes it on.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from absl import flags

from dpjax import data, models, schedules
from dpjax.cli import process_flags
from dpjax.cli.flag_checks import in_range
from dpjax.cli.mesh_flag import HELP
from dpjax.cli.train.build import LOSSES, OPTIMIZERS

# Flags of its own, not absl's global ones: tests and other programs parse them several times in one
# process.
FLAGS = flags.FlagValues()

_text: Any = partial(flags.DEFINE_string, flag_values=FLAGS)
_choice: Any = partial(flags.DEFINE_enum, flag_values=FLAGS)
_yes_no: Any = partial(flags.DEFINE_bool, flag_values=FLAGS)
_whole: Any = partial(flags.DEFINE_integer, flag_values=FLAGS)
_number: Any = partial(flags.DEFINE_float, flag_values=FLAGS)
_list: Any = partial(flags.DEFINE_list, flag_values=FLAGS)

# --- data and features ---

_choice("dataset", "digits", data.NAMES, "Data set to learn.")
_text("data_dir", None, "Folder of the data; by default the environment's DPJAX_DATA_DIR.")
_yes_no("stream", False, "Read drawn examples from disk, by TFDS; keep none in memory.")
_choice("features", "none", ["none", "scattering"], "Features to compute from each image first.")
_text("cache_dir", None, "Folder that keeps features between runs; as secret as the data.")
_choice(
    "normalization",
    "group",
    ["group", "data"],
    "Scale of features: of each example by itself, or by private moments of all examples.",
)
_whole("norm_groups", 27, "Number of groups for --normalization=group.")
_number("norm_multiplier", 8.0, "Noise of both moment queries of --normalization=data.")
_number("search_multiplier", 20.0, "Noise of the two queries that find clipping thresholds.")

# --- network and loss ---

_choice("model", "mlp", models.NAMES, "Network.")
_list("hidden", ["128"], "Widths of the hidden layers of an mlp.")
flags.register_validator(
    "hidden",
    lambda words: all(word.isdecimal() and int(word) > 0 for word in words),
    "Expected whole numbers above 0, separated by commas.",
    flag_values=FLAGS,
)
_list("model_options", [], "Further fields of the model: depth=10,width=1.")
_text("activation", None, "Activation of hidden layers; by default the model's (CNN, mlp: tanh).")
_yes_no("torch_init", False, "Use PyTorch's initial weights, as many published runs did.")
_choice("loss", "cross_entropy", list(LOSSES), "Loss of one example.")
_list(
    "loss_options",
    [],
    "Arguments of a focal or composite loss: threshold=7,beta=11,gamma=5 was published for "
    "CIFAR-10; losses.composite lists the others, and MNIST's are its defaults.",
)

# --- mechanism ---

_choice(
    "clipping",
    "flat",
    ["flat", "grouped", "automatic", "normalized", "psac", "hard_threshold"],
    "Rule that bounds the gradient of one example.",
)
_number("bound", 0.5, "Largest norm that one example adds to the sum.")
_whole("groups", 8, "Number of groups for --clipping=grouped.")
_choice(
    "noise_schedule",
    "constant",
    ["constant", *schedules.CURRICULA],
    "Change of the noise multiplier over the epochs.",
)
_number("target_epsilon", 3.0, "Scale the noise so that the run costs at most this epsilon.")
in_range(FLAGS, "target_epsilon", 0, strictly=True)
_number("noise_multiplier", None, "Noise multiplier, in place of --target_epsilon.")
_number(
    "max_epsilon",
    None,
    "With --noise_multiplier alone: run as many steps as fit in this epsilon. With --epochs or "
    "--steps too: refuse a plan that costs more.",
)
flags.register_validator(
    "max_epsilon",
    lambda most: most is None or most > 0,
    "Expected an epsilon above 0: at 0 no step fits. Leave it out to run without a limit.",
    flag_values=FLAGS,
)
_number("delta", 1e-5, "Delta of the guarantee.")
in_range(FLAGS, "delta", 0, 1, strictly=True)
_choice(
    "accountant",
    "tightest",
    ["tightest", "rdp", "pld"],
    "Accountant that computes epsilon: tightest is pld where it takes seconds, and else rdp.",
)
_choice(
    "sampling",
    "poisson",
    ["poisson", "fixed", "shuffled", "balls_in_bins", "cyclic_poisson"],
    "How batches are drawn; cyclic_poisson has as many parts as --bands.",
)
_choice(
    "noise",
    "white",
    ["white", "banded", "square_root", "banded_inverse_square_root", "buffered", "tree"],
    "How the noise of different steps is correlated; all but white need --sampling=cyclic_poisson, "
    "balls_in_bins or shuffled.",
)
_whole("bands", 16, "Bands of correlated noise, and parts of cyclic_poisson.", 1)
_whole("batch_size", 512, "Expected size of a batch.", 1)
_number("epochs", 40, "Number of epochs.")
in_range(FLAGS, "epochs", 0)
_whole("steps", None, "Number of steps, in place of --epochs.", 0)

# --- optimizer and evaluation ---

_choice(
    "optimizer",
    "sgd",
    list(OPTIMIZERS),
    "Optimizer; dp_adam subtracts the noise's share from Adam's second moment.",
)
_number("learning_rate", 0.4, "Learning rate.")
in_range(FLAGS, "learning_rate", 0)
_yes_no("rate_per_512", False, "Scale the learning rate by the batch size over 512.")
_whole("warmup_steps", 0, "Steps over which the learning rate rises from 0.", 0)
_number("momentum", 0.9, "Momentum of SGD.")
in_range(FLAGS, "momentum", 0, 1)
_number("floor", 1e-8, "Smallest second moment of dp_adam.")
in_range(FLAGS, "floor", 0, strictly=True)
_number("average", 0.95, "Decay of the parameter average.")
in_range(FLAGS, "average", 0, 1)
_whole("evaluations", 20, "Number of evaluations during the run.", 1)

# --- the run and its folder ---

_whole("seed", None, "Reproducible noise: anyone who knows the seed can subtract it.")
_text("mesh", None, HELP)
_yes_no("distributed", False, process_flags.DISTRIBUTED)
_text("coordinator_address", None, process_flags.ADDRESS)
_whole("num_processes", None, process_flags.COUNT, 1)
_whole("process_id", None, process_flags.NUMBER, 0)
_text("out", "runs/train", "Folder of the run; the same command resumes an interrupted run.")
_yes_no("overwrite", False, "Delete the run that is in the folder first.")
_text(
    "continue_from",
    None,
    "Folder of an earlier run on these data: start from the parameters that it released, with "
    "other settings, and count its privacy cost too.",
)
_whole("save_every", None, "Steps between checkpoints; by default 5 minutes.", 1)
_yes_no("report", True, "Write report.html and its figures.")

# Flags that may differ between two calls of one and the same run.
_ELSEWHERE = {"out", "stream", "overwrite", "data_dir", "cache_dir", "save_every", "report", "mesh"}
_ELSEWHERE |= {"distributed", *process_flags.NAMES}


def settings(given: flags.FlagValues) -> dict[str, Any]:
    """The flags that identify a run."""
    return {n: value for n, value in given.flag_values_dict().items() if n not in _ELSEWHERE}
