# SPDX-License-Identifier: Apache-2.0
"""`dpjax card`: a run's privacy card as a model card, or as an entry of a registry of deployments.

Both are written from `privacy.json` and the two statements, so they claim what these claim. Fields
that no file of a run has are empty, never guessed.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from absl import app, flags

from dpjax._files import read_json, replace
from dpjax._rounding import three_digits, upwards

_MODEL_CARD = """\
---
library_name: jax
license: ""  # yours
tags:
- differential-privacy
- dpjax
- jax
---

# Model card

<!-- What the model is for, what it was trained on, and its results. -->

## Privacy

{headline}

```text
{board}
```

### For a reader with the parameters

`privacy.json` holds the facts that this guarantee follows from, and the SHA-256 of the parameters.
These commands recompute the guarantee from the facts, and compare the digest:

```sh
pip install dp-accounting msgpack  # and dpjax
dpjax verify --params=params.msgpack privacy.json
```

### Statement

```text
{statement}
```
"""


def run(given: flags.FlagValues, argv: Sequence[str]) -> None:
    """Writes the card of the run that the command line names."""
    if len(argv) != 2:
        raise app.UsageError("expected one run: dpjax card runs/demo")
    folder = pathlib.Path(argv[1])
    written = {"huggingface": model_card, "registry": registry}[given.format]
    try:
        text = written(folder)
    except (OSError, LookupError, ValueError) as error:
        raise app.UsageError(f"{folder}: {error}") from error
    if given.out is None:
        print(text, end="")
    else:
        replace(pathlib.Path(given.out), text, public=True)
        print(f"Wrote {given.out}")


def model_card(folder: pathlib.Path) -> str:
    """The model card of a run: a YAML block for Hugging Face, and Markdown."""
    board = (folder / "board.txt").read_text(encoding="utf-8")
    statement = (folder / "statement.txt").read_text(encoding="utf-8")
    return _MODEL_CARD.format(
        headline=headline(read_json(folder / "privacy.json")),
        board=board.strip(),
        statement=statement.strip(),
    )


def headline(card: Mapping[str, Any]) -> str:
    """The guarantee of a card in a sentence."""
    proven = smallest(card)
    if proven is None:
        return f"Nothing is promised. {card['not_private'] or 'No guarantee is proved.'}"
    epsilon, method = proven
    unit = card["mechanism"]["unit"]
    relation = card["mechanism"]["neighbours"]
    words = (
        f"({three_digits(epsilon)}, {upwards(card['delta'], '.3g')})-differential privacy for one "
        f"{unit} ({relation} neighbours), by {method.upper()}."
    )
    if card["randomness"] == "supplied":
        words += " The key was supplied: this holds against those who do not know the key."
    return words


def smallest(card: Mapping[str, Any]) -> tuple[float, str] | None:
    """The smallest proven finite epsilon of a card, and its method."""
    bounds = [
        (claim["value"], method)
        for method, claim in card["epsilon"].items()
        if claim["proven"] and claim["value"] != "inf"
    ]
    return min(bounds, default=None)


def registry(folder: pathlib.Path) -> str:
    """An entry of the registry of deployments, as YAML."""
    return "\n".join(_yaml(registry_entry(read_json(folder / "privacy.json")))) + "\n"


def registry_entry(card: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the registry's template, filled in as far as a card has them."""
    proven = smallest(card)
    if proven is None:
        raise ValueError("the card proves no epsilon; expected a private run.")
    epsilon, method = proven
    mechanism = card["mechanism"]
    sampling = mechanism["sampling"]
    unit = mechanism["unit"]
    digest = card.get("parameters") or "not recorded"
    multipliers = sorted({multiplier for multiplier, _ in mechanism["multiplier_and_steps"]})
    noise = "Gaussian noise" if mechanism["noise"] is None else "correlated Gaussian noise"
    spread = f"{multipliers[0]:.4g}"
    if len(multipliers) > 1:
        spread += f" to {multipliers[-1]:.4g}"
    attacks = [
        f"{upwards(right, '.3g')} at {wrong:g}" for wrong, right in card["true_positive_rates"]
    ]
    return {
        "url_slug": "",
        "deployment": {
            "basic": {
                "name": "",
                "data_curators": [{"data_curator_name": "", "data_curator_type": ""}],
                "description": "",
                "intended_use": "",
                "data_product_type": "Machine learning model",
                "data_product_region": "",
                "data_product_sector": "",
                "publication_date": "",
            },
            "dp_variant": {
                "variant_name": "Approximate DP",
                "data_domain": "",
                "unprotected_quantities": "",
            },
            "privacy_loss": {
                "privacy_unit": f"one {unit}",
                "privacy_unit_details": (
                    f"{mechanism['neighbours']} neighbours, among {sampling['examples']:,} {unit}s"
                ),
                "number_of_privacy_units": 1,
                "privacy_parameters": {
                    "epsilon": float(upwards(epsilon, ".3g")),
                    "delta": float(upwards(card["delta"], ".3g")),
                },
                "privacy_parameters_details": (
                    f"By {method.upper()}. The true positive rates of a membership attack are at most, "
                    f"at these false positive rates: {', '.join(attacks)}."
                ),
            },
            "deployment_model": {
                "model_name": "Central",
                "trust_assumptions": "",
                "actors": "",
                "release_type": "",
                "data_source_type": "",
                "access_type": "Non-interactive",
            },
            "implementation": {
                "preprocessing_and_hyperparameter_tuning": "",
                "mechanisms": (
                    f"{card['steps']:,} steps of {sampling['name']} batches of "
                    f"{sampling['batch_size']:g}, per-{unit} clipping "
                    f"({mechanism['clipping']['name']}) and {noise} with multiplier {spread}; "
                    f"dpjax {card['versions']['dpjax']}. {card['claim']}."
                ),
                "composition": f"All steps and earlier runs together, by {method.upper()}.",
                "post_processing": "",
                "justification": "",
                "utility": "",
                "additional_information": f"SHA-256 of the released parameters: {digest}",
            },
            "administrative": {
                "evidence_sources": {},
                "status": "Draft",
                "registry_authors": [""],
                "tier": 3,
            },
        },
    }


def _yaml(value: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    """The lines of nested mappings; scalars and lists as JSON, which YAML reads."""
    for name, entry in value.items():
        if isinstance(entry, Mapping) and entry:
            yield f"{indent}{name}:"
            yield from _yaml(entry, f"{indent}  ")
        else:
            yield f"{indent}{name}: {json.dumps(entry)}"
