# SPDX-License-Identifier: Apache-2.0
"""Tramèr and Boneh, 2021, *Differentially Private Learning Needs Better Features*."""
