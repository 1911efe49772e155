# SPDX-License-Identifier: Apache-2.0
"""What the papers share: rows that run once a seed, claims with one rule, tables and figures."""
