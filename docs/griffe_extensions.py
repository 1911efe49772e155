# SPDX-License-Identifier: Apache-2.0
"""What the reference needs griffe to read differently: examples, and hidden functions."""

import griffe


class ExamplesSection(griffe.Extension):
    """Reads ``Example:`` as ``Examples:``, the only name of that section that griffe knows."""

    def on_instance(self, *, obj, **kwargs):
        """Called for each object that griffe loads."""
        del kwargs
        if obj.docstring:
            obj.docstring.value = obj.docstring.value.replace("\nExample:\n", "\nExamples:\n")


class FunctionsNamedAsTheirFile(griffe.Extension):
    """Lets ``dpjax.training.fit`` be the function, as in Python, and not the file ``fit.py``."""

    def on_package(self, *, pkg, loader, **kwargs):
        """Called when the whole package is loaded."""
        del kwargs
        # Aliases lead through these files, so they are resolved before the files give way.
        loader.resolve_aliases(implicit=False, external=False)
        for room in pkg.modules.values():
            for name in set(map(str, room.exports or ())) & set(room.members):
                file = room.members[name]
                if file.is_module and name in file.members:
                    room.set_member(name, griffe.Alias(name, file.members[name], parent=room))
