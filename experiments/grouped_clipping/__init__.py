# SPDX-License-Identifier: Apache-2.0
"""Liu et al., 2021: clipping gradients in groups."""
