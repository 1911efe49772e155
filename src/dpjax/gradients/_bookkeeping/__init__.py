# SPDX-License-Identifier: Apache-2.0
"""The book-keeping engine, ``"ghost"``: clipped sums from data and cotangents of each site."""
