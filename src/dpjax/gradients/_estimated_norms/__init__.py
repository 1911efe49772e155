# SPDX-License-Identifier: Apache-2.0
"""Norms estimated from random projections: `clipping.jl`, which changes the guarantee."""
