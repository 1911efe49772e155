# SPDX-License-Identifier: Apache-2.0
"""Faster versions of single primitives for XLA on CPU.

Each file names the symptom, the jaxlib version, the benchmark command, and when it may go.
"""
