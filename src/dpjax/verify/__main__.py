# SPDX-License-Identifier: Apache-2.0
"""The command ``python -m dpjax.verify RUN``, which reads the privacy card of a run."""

import sys

from dpjax.verify.cards import main

sys.exit(main())
