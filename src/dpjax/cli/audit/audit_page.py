# SPDX-License-Identifier: Apache-2.0
"""The page of an audit: bounds next to claims, and the curve of each attack.

An attack guesses which rows were trained on, the members, by the scores of rows.
"""

from collections.abc import Iterator, Sequence
from html import escape

import numpy as np

from dpjax._rounding import downwards, three_digits
from dpjax.cli.audit.lines import Line
from dpjax.cli.audit.losses import Attack
from dpjax.cli.report import page, style
from dpjax.cli.report.figures import PRIVATE
from dpjax.cli.report.load_run import SavedRun


def page_of(lines: Sequence[Line], attacks: Sequence[Attack], run: SavedRun) -> str:
    """The whole page, as HTML."""
    return page.page(f"Audit of {run.path.name}", _sections(lines, attacks, run))


def _sections(lines: Sequence[Line], attacks: Sequence[Attack], run: SavedRun) -> Iterator[str]:
    """The sections, as HTML: bounds next to claims, curves of all attacks, AUROC of each class.

    A line is the result of one audit: its name, its lower bound, the claim, and what it measured.
    """
    yield f'<h1>Audit of {escape(run.path.name)}</h1>\n<p class="badge private">{PRIVATE}</p>'
    bounds = {}
    for line in lines:
        # The bound is rounded down and the claim up, so both still hold.
        bound = three_digits(line.bound, downwards)
        claimed = three_digits(line.claimed)
        bounds[line.audit] = f"epsilon above {bound}, claimed {claimed}; {line.measured}"
    note = "<h3>Lower bounds</h3><p>Each beside what is claimed.</p>"
    yield page.section(note, page.table(bounds))
    if attacks:
        note = (
            "<h3>Attacks on the released model</h3><p>Members found, by the share of other rows "
            "that are taken for members. Grey: guessing. Blue: the most that the claim allows.</p>"
        )
        yield page.section(note, _curves(attacks, run), tag="figure")
    for attack in attacks:
        note = f"<h3>{escape(attack.name)}</h3><p>AUROC of each class.</p>"
        yield page.section(note, page.table(attack.by_class()))


def _curves(attacks: Sequence[Attack], run: SavedRun) -> str:
    """The rate of true positives of each attack against its false positives, as SVG.

    Two more curves are there to compare with: guessing, and the most that the claim allows.
    """
    with style.style():
        figure = style.canvas(style.WIDTH, height=3.6)
        axes = style.panel(figure, "others taken for members", "members found")
        rates = np.geomspace(1e-4, 1, 200)  # of false positives; the axes begin at 5e-4
        axes.plot(rates, rates, color=style.PALETTE["muted"], linewidth=0.8)  # guessing
        # A guarantee bounds true positives by exp(epsilon) times the false positives, plus delta.
        # From an epsilon of 50 on that is 1 at all drawn rates, so 50 stands for larger ones: exp
        # overflows above 709.
        claim = np.minimum(np.exp(min(run.epsilon, 50)) * rates + run.delta, 1)
        axes.plot(rates, claim, color=style.PALETTE["blue"], linewidth=0.8)
        # The first color, blue, is that of the claim; there are more colors than attacks.
        for attack, color_name in zip(attacks, style.SERIES[1:], strict=False):
            member_scores, other_scores = attack.scores
            thresholds = np.unique(np.concatenate(attack.scores))
            true_positives = _shares_above(thresholds, member_scores)
            false_positives = _shares_above(thresholds, other_scores)
            axes.plot(
                false_positives,
                true_positives,
                color=style.PALETTE[color_name],
                label=attack.name,
            )
        axes.set(xscale="log", yscale="log", xlim=(5e-4, 1), ylim=(5e-4, 1.1))
        style.legend(axes)
        description = "Members found by the rate of false positives."  # for screen readers
        return style.svg(figure, name="attacks", label=description)


def _shares_above(thresholds: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """The share of the scores that reaches each threshold."""
    return 1 - np.searchsorted(np.sort(scores), thresholds) / len(scores)
