# SPDX-License-Identifier: Apache-2.0
"""Reads ``Example:`` as the section of examples, so that doctests are shown as code."""

import griffe


class ExamplesSection(griffe.Extension):
    """Renames the section in every docstring; griffe knows only ``Examples:``."""

    def on_instance(self, *, obj, **kwargs):
        """Called for each object that griffe loads."""
        del kwargs
        if obj.docstring:
            obj.docstring.value = obj.docstring.value.replace("\nExample:\n", "\nExamples:\n")
