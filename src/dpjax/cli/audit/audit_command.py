# SPDX-License-Identifier: Apache-2.0
"""`dpjax audit`: checks its arguments, runs the audits, prints and writes their results.

Each audit measures a lower bound on epsilon, and gives a `Line`: the bound next to the epsilon that
the run claims. An attack is an audit by scores of training rows and of other rows.
"""

import json
import pathlib
import time
from collections.abc import Sequence
from typing import Any

from absl import app, flags, logging

import dpjax
from dpjax._files import replace, strict
from dpjax.cli import compilation_cache
from dpjax.cli.audit.audit_page import page_of
from dpjax.cli.audit.canaries import audit_canaries
from dpjax.cli.audit.lines import HEAD, Line, conclude
from dpjax.cli.audit.losses import Attack, attack_losses
from dpjax.cli.audit.rebuilt_run import Rebuilt, rebuild
from dpjax.cli.audit.shadows import attack_shadows
from dpjax.cli.audit.step import audit_step, line_of_step
from dpjax.cli.flag_checks import require
from dpjax.cli.report.figures import PRIVATE
from dpjax.cli.report.load_run import SavedRun

ATTACKS = ("canaries", "loss", "lira")


def run(given: flags.FlagValues, argv: Sequence[str]) -> None:
    """Audits the run that the command line names."""
    if len(argv) != 2:
        raise app.UsageError("expected the folder of one run: dpjax audit runs/demo")
    require("dpjax audit", "matplotlib.figure")  # an optional package, which draws the page
    logging.set_verbosity(logging.ERROR)  # nothing is released, so public seeds need no warning
    unknown = set(given.attacks) - set(ATTACKS)
    if unknown:
        raise app.UsageError(f"--attacks={','.join(unknown)}: expected {', '.join(ATTACKS)}.")
    began = time.time()
    folder = pathlib.Path(argv[1])
    compilation_cache.switch_on()
    out = folder
    if given.out is not None:
        out = pathlib.Path(given.out)
    try:
        rebuilt = rebuild(folder, given.data_dir, given.dataset)
        attacks = attacks_on(given, rebuilt)
        require_test_rows(attacks, rebuilt.dataset)
        # The folder is made before the audits, because it may fail and they take minutes; but after
        # `rebuild`, because a run whose data are not found leaves no folder.
        out.mkdir(parents=True, exist_ok=True)
        lines = audit_run(given, rebuilt, out, attacks)
    except (OSError, ValueError) as error:
        raise app.UsageError(f"{folder}: {error}") from error
    print("\n".join(map(str, (HEAD, *lines))))
    print(f"Wrote {out / 'audit.json'} and {out / 'audit.html'}.")
    print(f"The bounds and what was measured are {PRIVATE}. The claims may be published.")
    conclude(lines, time.time() - began)  # the verdict; exits with 1 if a claim is refuted


def attacks_on(given: flags.FlagValues, rebuilt: Rebuilt) -> list[str]:
    """The attacks to make: in a run that protects persons only canaries, by default.

    The other attacks need independent rows, and rows of one person are not independent.
    """
    if not rebuilt.planned.persons:
        return given.attacks
    left_out = [name for name in given.attacks if name != "canaries"]
    if left_out and given["attacks"].present:
        raise app.UsageError(
            f"--attacks={','.join(left_out)}: this run protects a {rebuilt.run.unit}; expected "
            "canaries, which then are persons."
        )
    return ["canaries"]


def require_test_rows(attacks: Sequence[str], dataset: dpjax.data.Dataset) -> None:
    """Refuses attacks on membership in a run that trained on all rows."""
    need_test = [name for name in attacks if name != "canaries"]
    if need_test and not len(dataset.test[1]):
        raise app.UsageError(
            f"--attacks={','.join(need_test)}: the run has no test rows to compare training rows "
            "with. Give --attacks=canaries."
        )


def audit_run(
    given: flags.FlagValues, rebuilt: Rebuilt, out: pathlib.Path, chosen: Sequence[str]
) -> list[Line]:
    """Audits a run by one step and by the chosen attacks; writes numbers and page into ``out``.

    The flags ``given`` have the sizes: ``pairs`` of steps that measure the noise of the one step,
    ``canaries`` and ``steps`` of a second training, and ``shadows``, the models that `lira` trains.
    """
    run = rebuilt.run
    # `audit_step` measures the first step. It stands for every step that draws the row, unless
    # noise is correlated: the noise of later steps depends on earlier noise.
    step_name = "one step in which the row is drawn"
    if rebuilt.planned.persons:
        step_name = "one step in which the person is drawn"
    if rebuilt.planned.mechanism.noise is not None:
        step_name = "first step of correlated noise"
    separation = audit_step(rebuilt, given.pairs)
    lines = [line_of_step(separation, run.delta, step_name)]
    if "canaries" in chosen:
        lines.append(audit_canaries(rebuilt, given.canaries, given.steps))
    attacks = []
    if "loss" in chosen:
        attacks.append(attack_losses(rebuilt))
    if "lira" in chosen:
        attacks += attack_shadows(rebuilt, given.shadows)
    lines += [attack.line(run) for attack in attacks]
    results = {
        "run": str(run.path),
        "delta": run.delta,
        "publish": PRIVATE,
        "audits": [line._asdict() for line in lines],
        "attacks": {attack.name: _facts_of(attack, run) for attack in attacks},
    }
    # JSON has no inf and no nan; `strict` writes them as words.
    replace(out / "audit.json", json.dumps(strict(results), indent=2) + "\n")
    replace(out / "audit.html", page_of(lines, attacks, run))
    return lines


def _facts_of(attack: Attack, run: SavedRun) -> dict[str, Any]:
    """The measurements of an attack, for ``audit.json``."""
    facts = attack.membership._asdict()
    return {**facts, "rates": attack.rates(run), "by_class": attack.by_class()}
