# SPDX-License-Identifier: Apache-2.0
"""A draft of the declarations of a table's columns: names and kinds, and no value of a row."""

from __future__ import annotations

import json
import pathlib
import re
from collections.abc import Sequence

from absl import app, flags

from dpjax.data.tables import kinds_of

_HEAD = """\
# Drafted by `dpjax columns`. Kinds were guessed from the rows: a look at private data, and so a
# release that no epsilon covers, as is every range or list that you read off the rows. Fill in
# each "?" from public knowledge, such as a code book or the limits of a device.
#
# The kinds: number (low, high), category (values), date (since, days, format), one label (values)
# or one target (low, high), which is learnt, and ignore, for a column that is not an input, such as
# the number of a patient. A column for `--unit_column` needs no table.
"""
_FILL = '# fill = "?"  # what a gap counts as; without it a gap is an error'
# The lines of a column's table after its kind, by the kind that `kinds_of` guesses.
_DRAFTS = {
    "number": ('low = "?"', 'high = "?"', _FILL),
    "date": ('since = "?"', 'days = "?"', _FILL),
    "date, day first": ('since = "?"', 'days = "?"', 'format = "%d.%m.%Y"', _FILL),
    "category": ('values = "?"', "# other = true  # a place for words that are not listed", _FILL),
    "label": ('values = "?"  # or kind = "target" with low and high, for a number',),
}


def run(given: flags.FlagValues, argv: Sequence[str]) -> None:
    """Prints the draft for the table that the command line names."""
    if len(argv) != 2:
        raise app.UsageError("expected one table: dpjax columns my.csv > columns.toml")
    try:
        # The kind of each column, by its name. Messages of errors begin with `call`, the file.
        kinds = kinds_of(pathlib.Path(argv[1]), call=argv[1])
    except (ImportError, OSError, ValueError) as error:
        raise app.UsageError(str(error)) from error
    print(_HEAD)
    for name, kind in kinds.items():
        key = name
        if not re.fullmatch(r"[\w-]+", name, re.ASCII):
            # TOML needs quotes around names with other characters.
            key = json.dumps(name, ensure_ascii=False)
        declared_kind, _, _ = kind.partition(",")  # "date" for "date, day first"
        print("\n".join([f"[{key}]", f'kind = "{declared_kind}"', *_DRAFTS[kind], ""]))
