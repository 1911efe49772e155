# SPDX-License-Identifier: Apache-2.0
"""Checks of a command line that run before data are read or privacy is spent.

absl passes words that are not flags on to the program.  A program that ignores them would run
`train --steps 2 target_epsilon=0.5` at the default epsilon, so every program here calls
`only_flags`.
"""

from __future__ import annotations

import importlib
import math
import pathlib
import tempfile
from collections.abc import Sequence

from absl import app, flags

# Names of other libraries and of papers, and the flag here.
USUAL_NAMES = {
    **dict.fromkeys(["epsilon", "eps", "epsilon_target"], "target_epsilon"),
    **dict.fromkeys(["sigma", "noise_scale", "noise_std"], "noise_multiplier"),
    **dict.fromkeys(["max_grad_norm", "l2_norm_clip", "clip", "clip_norm", "C", "c"], "bound"),
    **dict.fromkeys(["batch", "bs", "lot_size", "logical_batch_size"], "batch_size"),
    **dict.fromkeys(["lr", "rate", "eta"], "learning_rate"),
    **dict.fromkeys(["epoch", "num_epochs", "n_epochs"], "epochs"),
    **dict.fromkeys(["iterations", "max_steps", "num_steps"], "steps"),
    **dict.fromkeys(["data", "data_path", "input"], "dataset"),
    **dict.fromkeys(["output", "output_dir", "logdir", "save_dir"], "out"),
}


def cure(error: Exception, known: flags.FlagValues) -> str:
    """The flag here that an unknown flag has elsewhere, or what a flag takes; else no words."""
    # A parser repeats the words of Python's `float`; a range says itself what it expects.
    if isinstance(error, flags.IllegalFlagValueError) and isinstance(error.__context__, ValueError):
        name = str(error).removeprefix("flag --").partition("=")[0]
        takes = known[name].parser.syntactic_help if name in known else ""
        return f" (expected {takes})" if takes else ""
    name = USUAL_NAMES.get(getattr(error, "flagname", ""), "")
    return f" (here it is --{name})" if name in known else ""


def only_flags(argv: Sequence[str]) -> None:
    """Refuses words on the command line that are not flags."""
    # absl ignores words without dashes: `steps=2` would train with the default number of steps.
    if words := list(argv[1:]):
        raise app.UsageError(
            f"{' '.join(words)}: expected flags alone, which begin with two dashes. Usually dashes "
            "were forgotten, as in steps=2 for --steps=2, or a list was given with spaces."
            + "".join(f" A file of data: --dataset={word}" for word in words if _is_data(word))
        )


def _is_data(word: str) -> bool:
    return "=" not in word and word.endswith((".csv", ".npz"))


def not_empty(given: flags.FlagValues, name: str) -> None:
    """Refuses an empty path, which would be the current folder."""
    words = "Expected a path. Usually a variable of the shell is empty; the current folder is '.'."
    flags.register_validator(
        name, lambda path: path is None or bool(path.strip()), words, flag_values=given
    )


def require_matplotlib(otherwise: str = "") -> None:
    """Refuses a command whose figures could not be drawn, before its work rather than after it.

    Args:
      otherwise: What helps too, in words after "Install it".
    """
    try:
        # Imported, not only found: an installed one may not fit this version of NumPy.
        importlib.import_module("matplotlib.figure")
    except Exception as error:  # ImportError, or AttributeError of another NumPy
        raise app.UsageError(
            f"figures are drawn with Matplotlib, which cannot be imported ({error}). Install it "
            f"(pip install --upgrade matplotlib){otherwise}."
        ) from error


def writable_folder(out: str | pathlib.Path, folder: pathlib.Path, *, mode: int = 0o777) -> None:
    """Makes the folder that ``--out=out`` writes into; refuses one that cannot hold a new file."""
    try:
        folder.mkdir(mode, parents=True, exist_ok=True)
        if mode != 0o777:  # a folder that was there has kept its own
            folder.chmod(mode)
        # Permissions do not tell: the file system may be read-only, or one of the kernel's.
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise app.UsageError(
            f"--out={out}: no file can be written into the folder {folder} ({error}). Usually a "
            "file has its name or that of a folder above it, or it belongs to another user. Give "
            "another --out."
        ) from error


def in_range(
    given: flags.FlagValues,
    name: str,
    low: float,
    high: float = math.inf,
    *,
    strictly: bool = False,
) -> None:
    """Refuses values of a flag that are not finite, below ``low`` or not below ``high``.

    ``strictly`` refuses ``low`` itself too.  A flag without a value passes.
    """
    words = f"Expected a finite number {'above' if strictly else 'of at least'} {low:g}"
    words += "." if math.isinf(high) else f" and below {high:g}."

    def fits(value: float | None) -> bool:
        if value is None:
            return True
        return math.isfinite(value) and low <= value < high and not (strictly and value == low)

    flags.register_validator(name, fits, words, flag_values=given)
