# SPDX-License-Identifier: Apache-2.0
"""Faster versions of single primitives for XLA on CPU; each file states when it may be deleted."""
