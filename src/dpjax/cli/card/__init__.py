# SPDX-License-Identifier: Apache-2.0
"""`dpjax card`: a run's privacy card for readers elsewhere, such as Hugging Face and a registry."""

from dpjax.cli.card.public_cards import run

__all__ = ["run"]
