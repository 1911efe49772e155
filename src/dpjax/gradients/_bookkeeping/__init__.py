# SPDX-License-Identifier: Apache-2.0
"""The book-keeping engine: norms and sums from one backward pass, without per-example gradients."""
