# SPDX-License-Identifier: Apache-2.0
"""Papernot et al., 2021, *Tempered Sigmoid Activations for Deep Learning with DP*."""
