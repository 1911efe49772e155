# SPDX-License-Identifier: Apache-2.0
"""The shared parts of the papers: rows that run once a seed, claims with one rule, and figures."""
