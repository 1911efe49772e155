# SPDX-License-Identifier: Apache-2.0
"""The picture that chats and networks show with a link to the site, from the committed results.

`docs/generated_pages.py` puts it into the site; `python docs/social_card.py FILE` writes it.
"""

import pathlib
import statistics
import sys

ROOT = pathlib.Path(__file__).parent.parent
WIDTH = 7.5  # inches of 160 pixels
HEIGHT = 3.9375
WORDS = "Train JAX models\nwith differential privacy.\n\nWhat is accounted is what runs."


def social_card():
    """The bytes of a PNG file of 1200 by 630 pixels."""
    from experiments import accuracy
    from experiments.common import tables

    from dpjax.cli.report import style

    rows = tables.load("accuracy")["rows"]
    with style.style():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(WIDTH, HEIGHT))
        figure.text(0.06, 0.76, "dpjax", fontsize=40)
        figure.text(0.062, 0.3, WORDS, fontsize=13, linespacing=1.4, color=style.PALETTE["muted"])
        axes = figure.add_axes((0.6, 0.2, 0.3, 0.62))
        for (dataset, name), color in zip(tables.TITLES.items(), style.SERIES, strict=False):
            means = []
            for epsilon in accuracy.EPSILONS:
                seeds = rows[tables.chosen_row(dataset, epsilon)].values()
                means.append(statistics.mean(run["accuracy"] for run in seeds))
            axes.plot(accuracy.EPSILONS, means, color=style.PALETTE[color], lw=2, **style.DOTS)
            axes.text(
                8, means[-1] + 1.2, name, color=style.PALETTE[color], fontsize=9.5, ha="right"
            )
        axes.set_xscale("log")
        axes.set_xticks(accuracy.EPSILONS, [f"{epsilon:g}" for epsilon in accuracy.EPSILONS])
        axes.set_xticks([], minor=True)
        axes.tick_params(labelsize=8.5)
        axes.set_ylim(68, 102)
        axes.set_xlabel("epsilon at delta 1e-5", fontsize=9)
        axes.set_title("test accuracy, %", fontsize=9, loc="left")
        return style.png(figure)


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "src")]
    pathlib.Path(sys.argv[1]).write_bytes(social_card())
