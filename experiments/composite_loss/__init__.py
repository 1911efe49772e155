# SPDX-License-Identifier: Apache-2.0
"""Losing Less, 2022: a loss made for clipping and noise."""
