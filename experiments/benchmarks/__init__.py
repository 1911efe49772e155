# SPDX-License-Identifier: Apache-2.0
"""Benchmarks: each prints a ratio to plain JAX or a peer, and keeps its figures in a file."""
