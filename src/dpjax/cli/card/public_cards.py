# SPDX-License-Identifier: Apache-2.0
"""A run's privacy card as a model card, or as an entry of a registry of deployments.

Both are written from `privacy.json` and the two statements, so they claim what these claim. Fields
that no file of a run has are empty, never guessed.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Sequence

from absl import app, flags

from dpjax._files import read_json, replace
from dpjax._rounding import upwards

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

```text
{board}
```

`privacy.json` holds the facts that this guarantee follows from, and the SHA-256 of the released
parameters. This command of dpjax recomputes the guarantee and compares the digest:

```sh
dpjax verify --params=params.msgpack privacy.json
```

```text
{statement}
```
"""

# The fields of tests/good_deployments/template.yaml in opendp/deployments-registry-data.
_REGISTRY = """\
url_slug: ""
deployment:
  basic:
    name: ""
    data_curators:
      - data_curator_name: ""
        data_curator_type: ""
    description: ""
    intended_use: ""
    data_product_type: Machine learning model
    data_product_region: ""
    data_product_sector: ""
    publication_date: ""
  dp_variant:
    variant_name: Approximate DP
    data_domain: ""
    unprotected_quantities: ""
  privacy_loss:
    privacy_unit: {unit}
    privacy_unit_details: {neighbours}
    number_of_privacy_units: 1
    privacy_parameters:
      epsilon: {epsilon}
      delta: {delta}
    privacy_parameters_details: {attacks}
  deployment_model:
    model_name: Central
    trust_assumptions: ""
    actors: ""
    release_type: ""
    data_source_type: ""
    access_type: Non-interactive
  implementation:
    preprocessing_and_hyperparameter_tuning: ""
    mechanisms: {mechanisms}
    composition: {composition}
    post_processing: ""
    justification: ""
    utility: ""
    additional_information: {digest}
  administrative:
    evidence_sources: {{}}
    status: Draft
    registry_authors: [""]
    tier: 3
"""


def run(given: flags.FlagValues, argv: Sequence[str]) -> None:
    """Writes the card of the run that the command line names."""
    if len(argv) != 2:
        raise app.UsageError("expected one run: dpjax card runs/demo")
    write = {"huggingface": model_card, "registry": registry_entry}[given.format]
    try:
        text = write(pathlib.Path(argv[1]))
    except (OSError, LookupError, ValueError) as error:
        raise app.UsageError(f"{argv[1]}: {error}") from error
    if given.out is None:
        print(text, end="")
    else:
        replace(pathlib.Path(given.out), text, public=True)


def model_card(folder: pathlib.Path) -> str:
    """The model card of a run: a YAML block for Hugging Face, and Markdown."""
    board = (folder / "board.txt").read_text(encoding="utf-8")
    statement = (folder / "statement.txt").read_text(encoding="utf-8")
    return _MODEL_CARD.format(board=board.strip(), statement=statement.strip())


def registry_entry(folder: pathlib.Path) -> str:
    """An entry of the registry of deployments, filled in as far as a card has its fields."""
    card = read_json(folder / "privacy.json")
    # Proven upper bounds on epsilon, each with its accountant; the smallest counts.
    bounds = [
        (claim["value"], method.upper())
        for method, claim in card["epsilon"].items()
        if claim["proven"] and claim["value"] != "inf"  # a word, because JSON has no infinity
    ]
    if not bounds:
        raise ValueError("the card proves no epsilon. Expected the folder of a private run.")
    epsilon, method = min(bounds)
    mechanism = card["mechanism"]
    sampling = mechanism["sampling"]
    unit = mechanism["unit"]  # whose data are protected, such as "person"
    multipliers = [multiplier for multiplier, _ in mechanism["multiplier_and_steps"]]
    multiplier_range = f"{min(multipliers):.4g}"
    if max(multipliers) > min(multipliers):
        multiplier_range += f" to {max(multipliers):.4g}"
    attack_rates = []
    for false_positives, true_positives in card["true_positive_rates"]:
        attack_rates.append(f"{upwards(true_positives, '.3g')} at {false_positives}")
    digest = ""
    if card.get("parameters") is not None:
        digest = f"SHA-256 of the released parameters: {card['parameters']}"
    texts = {  # by the names of the fields in `_REGISTRY`
        "unit": f"one {unit}",
        "neighbours": f"{mechanism['neighbours']}, among {sampling['examples']:,} {unit}s",
        "attacks": f"By {method}. The true positives of a membership attack are at most, at these "
        f"rates of false positives: {', '.join(attack_rates)}.",
        "mechanisms": f"{card['steps']:,} steps of DP-SGD with {sampling['name']} batches of "
        f"{sampling['batch_size']:g}, per-{unit} clipping ({mechanism['clipping']['name']}) and "
        f"Gaussian noise with multiplier {multiplier_range}, by "
        f"dpjax {card['versions']['dpjax']}: {card['claim']}.",
        "composition": f"All steps and earlier runs on these data together, by {method}.",
        "digest": digest,
    }
    # A JSON string is a YAML string, which may then hold colons and quotes.
    return _REGISTRY.format(
        epsilon=upwards(epsilon, ".3g"),
        delta=upwards(card["delta"], ".3g"),
        **{name: json.dumps(text) for name, text in texts.items()},
    )
