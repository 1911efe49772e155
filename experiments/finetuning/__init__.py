# SPDX-License-Identifier: Apache-2.0
"""Private fine-tuning of published networks, by the bounds of Bu et al. (2023)."""
