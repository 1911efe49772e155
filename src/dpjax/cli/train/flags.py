# SPDX-License-Identifier: Apache-2.0
"""The flags of `dpjax train`, in groups: data, model, privacy, optimization, output, machine.

`dpjax.cli` parses a copy of `FLAGS` and passes it on.  Nothing here imports JAX.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from absl import flags

from dpjax.cli import mesh_flag, process_flags
from dpjax.cli.flag_checks import in_range, not_empty
from dpjax.cli.flag_groups import LARGEST_SEED, Group
from dpjax.cli.train import names

FLAGS = flags.FlagValues()

_data = Group(FLAGS, "Data")
_data.path(
    "dataset",
    "digits",
    f"Data set to learn: one of {', '.join(names.DATASETS)}; or a file of yours, my.npz with x and "
    "y (or x_train, y_train, x_test, y_test), or my.csv with a header and the label in the column "
    "named label, or else the last.",
)
flags.register_validator("dataset", names.check_dataset, flag_values=FLAGS)
_data.whole(
    "classes",
    None,
    "Number of classes of a file of yours. By default they are read from all its labels, and which "
    "labels occur then counts as public.",
    2,
)
_data.text("label", None, "Column of the label in a .csv of yours; by default label, or the last.")
_data.path("data_dir", None, "Folder of the data; by default the environment's DPJAX_DATA_DIR.")
_data.yes_no(
    "stream",
    False,
    "Read drawn training examples from disk if TFDS has prepared the data; a file of --data_dir is "
    "read whole.",
)
_data.choice(
    "features", "none", ["none", "scattering"], "Features to compute from each image first."
)
_data.path("cache_dir", None, "Folder that keeps features between runs; as secret as the data.")
_data.choice(
    "normalization",
    "group",
    ["group", "data"],
    "Scale of features: of each example by itself, or by private moments of all examples.",
)
_data.whole("norm_groups", 27, "Number of groups for --normalization=group.")
_data.number("norm_multiplier", 8.0, "Noise of both moment queries of --normalization=data.")
_data.number("search_multiplier", 20.0, "Noise of the two queries that find clipping thresholds.")

_model = Group(FLAGS, "Model and loss")
_model.text(
    "model",
    "mlp",
    f"Network: one of {', '.join(names.MODELS)}; or yours, networks:CNN for the Flax module CNN in "
    "networks.py here, or for a function that returns a module.",
)
flags.register_validator("model", names.check_model, flag_values=FLAGS)
_model.several("hidden", ["128"], "Widths of the hidden layers of an mlp.")
flags.register_validator(
    "hidden",
    lambda words: all(word.isdecimal() and int(word) > 0 for word in words),
    "Expected whole numbers above 0, separated by commas.",
    flag_values=FLAGS,
)
_model.several("model_options", [], "Further fields of the model: depth=10,width=1.")
_model.text(
    "activation", None, "Activation of hidden layers; by default the model's (CNN, mlp: tanh)."
)
_model.yes_no("torch_init", False, "Use PyTorch's initial weights, as many published runs did.")
_model.choice("loss", "cross_entropy", names.LOSSES, "Loss of one example.")
_model.several(
    "loss_options",
    [],
    "Arguments of a focal or composite loss: threshold=7,beta=11,gamma=5 was published for "
    "CIFAR-10; losses.composite lists the others, and MNIST's are its defaults.",
)

_privacy = Group(FLAGS, "Privacy")
_privacy.choice(
    "clipping",
    "flat",
    ["flat", "grouped", "automatic", "normalized", "psac", "hard_threshold"],
    "Rule that bounds the gradient of one example.",
)
_privacy.number(
    "bound",
    0.5,
    "Largest norm that one example adds to the sum; with --clipping=grouped, to each group of it.",
)
_privacy.whole("groups", 8, "Number of groups for --clipping=grouped.")
_privacy.choice(
    "noise_schedule",
    "constant",
    ["constant", *names.CURRICULA],
    "Change of the noise multiplier over the epochs.",
)
_privacy.number(
    "target_epsilon", 3.0, "Scale the noise so that the run costs at most this epsilon."
)
in_range(FLAGS, "target_epsilon", 0, strictly=True)
_privacy.number(
    "noise_multiplier",
    None,
    "Noise multiplier, in place of --target_epsilon; a factor on the values of --noise_schedule.",
)
_privacy.number(
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
_privacy.number("delta", 1e-5, "Delta of the guarantee.")
in_range(FLAGS, "delta", 0, 1, strictly=True)
_privacy.choice(
    "accountant",
    "tightest",
    ["tightest", "rdp", "pld"],
    "Accountant that computes epsilon: tightest is pld where it has a proof, and else rdp.",
)
_privacy.choice(
    "sampling",
    "poisson",
    ["poisson", "fixed", "shuffled", "balls_in_bins", "cyclic_poisson"],
    "How batches are drawn; cyclic_poisson has as many parts as --bands.",
)
_privacy.choice(
    "noise",
    "white",
    ["white", "banded", "square_root", "banded_inverse_square_root", "buffered", "tree"],
    "How the noise of different steps is correlated; all but white need --sampling=cyclic_poisson, "
    "balls_in_bins or shuffled.",
)
_privacy.whole("bands", 16, "Bands of correlated noise, and parts of cyclic_poisson.", 1)
_privacy.whole("batch_size", 512, "Expected size of a batch.", 1)
_privacy.number("epochs", 40, "Number of epochs.")
# An epoch has a step at least, and `dpjax.Mechanism` counts steps in an int32.
in_range(FLAGS, "epochs", 0, 2**31)
_privacy.whole("steps", None, "Number of steps, in place of --epochs.", 0, 2**31 - 1)
_privacy.whole(
    "seed",
    None,
    "Reproducible noise: anyone who knows the seed can subtract it.",
    0,
    LARGEST_SEED,
)

_optimization = Group(FLAGS, "Optimization")
_optimization.choice(
    "optimizer",
    "sgd",
    names.OPTIMIZERS,
    "Optimizer; dp_adam subtracts the noise's share from Adam's second moment.",
)
_optimization.number("learning_rate", 0.4, "Learning rate.")
in_range(FLAGS, "learning_rate", 0)
_optimization.yes_no(
    "rate_per_512", False, "Multiply the learning rate by the whole 512s in the batch size."
)
_optimization.whole("warmup_steps", 0, "Steps over which the learning rate rises from 0.", 0)
_optimization.number("momentum", 0.9, "Momentum of SGD.")
in_range(FLAGS, "momentum", 0, 1)
_optimization.number("floor", 1e-8, "Smallest second moment of dp_adam.")
in_range(FLAGS, "floor", 0, strictly=True)
_optimization.number("average", 0.95, "Decay of the parameter average.")
in_range(FLAGS, "average", 0, 1)
_optimization.whole("evaluations", 20, "Number of evaluations during the run.", 1)

_output = Group(FLAGS, "Output")
_output.path("out", "runs/train", "Folder of the run; the same command resumes an interrupted run.")
not_empty(FLAGS, "out")
_output.yes_no("overwrite", False, "Delete the run that is in the folder first.")
_output.path(
    "continue_from",
    None,
    "Folder of an earlier run on these data: start from the parameters that it released, with "
    "other settings, and count its privacy cost too.",
)
_output.whole("save_every", None, "Steps between checkpoints; by default 5 minutes.", 1)
_output.yes_no("report", True, "Write report.html and its figures, for which Matplotlib is needed.")

_machine = Group(FLAGS, "Machine")
_machine.text("mesh", None, mesh_flag.HELP)
_machine.yes_no("distributed", False, process_flags.DISTRIBUTED)
_machine.text("coordinator_address", None, process_flags.ADDRESS)
_machine.whole("num_processes", None, process_flags.COUNT, 1)
_machine.whole("process_id", None, process_flags.NUMBER, 0)

_CORRELATED = ("banded", "square_root", "banded_inverse_square_root")

# Flags, and what they have an effect with: any one setting of a row, and all rows of a flag.
NEEDS: tuple[tuple[tuple[str, ...], dict[str, Sequence[str]]], ...] = (
    (("groups",), {"clipping": ["grouped"]}),
    (("bands",), {"noise": _CORRELATED, "sampling": ["cyclic_poisson"]}),
    (("momentum",), {"optimizer": ["sgd", "nesterov"]}),
    (("floor",), {"optimizer": ["dp_adam"]}),
    (("hidden",), {"model": ["mlp"]}),
    (("activation",), {"model": [name for name in names.MODELS if "linear" not in name]}),
    (("torch_init",), {"model": names.MODELS}),
    (("normalization", "cache_dir"), {"features": ["scattering"]}),
    (("norm_groups", "norm_multiplier", "search_multiplier"), {"features": ["scattering"]}),
    (("norm_groups",), {"normalization": ["group"]}),
    (("norm_multiplier", "search_multiplier"), {"normalization": ["data"]}),
)


def idle(values: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Sequence[str]]]]:
    """The flags without effect among these values, each with what would give it one."""
    for names_of_row, needed in NEEDS:
        # Flags of another binary may have some of these names.
        known = needed.keys() <= values.keys()
        if known and not any(values[other] in allowed for other, allowed in needed.items()):
            yield from ((name, needed) for name in names_of_row)


def without_effect(given: flags.FlagValues) -> Iterator[tuple[str, dict[str, Sequence[str]]]]:
    """The given flags without effect, each with the settings that would give it one."""
    found = idle(given.flag_values_dict())
    return ((name, needed) for name, needed in found if given[name].present)


def refusal(given: flags.FlagValues, name: str, needed: dict[str, Sequence[str]]) -> str:
    """The words that refuse a flag without effect."""
    said = " ".join(given[each].serialize() for each in (name, *needed))
    settings = " or ".join(f"--{other}={'|'.join(values)}" for other, values in needed.items())
    remedy = "Leave it out, or give one of these too."
    if names.is_own(given.model) and "model" in needed:
        remedy = "Pass it to your model by --model_options=name=value."
    return f"{said}: --{name} has an effect with {settings} alone. {remedy}"


# Flags that may differ between two calls of one and the same run.
_ELSEWHERE = {"out", "stream", "overwrite", "data_dir", "cache_dir", "save_every", "report", "mesh"}
_ELSEWHERE |= {"distributed", *process_flags.NAMES}


def settings(given: flags.FlagValues) -> dict[str, Any]:
    """The flags that identify a run."""
    return {n: value for n, value in given.flag_values_dict().items() if n not in _ELSEWHERE}
