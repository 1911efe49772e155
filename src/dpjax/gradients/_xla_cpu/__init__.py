# SPDX-License-Identifier: Apache-2.0
"""Faster versions of single primitives for XLA on CPU.

The docstring of each file gives the symptom, the jaxlib version on which it was seen, the
benchmark command that shows it, and the test that tells when the file may be deleted.
"""
