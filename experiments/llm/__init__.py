# SPDX-License-Identifier: Apache-2.0
"""Private fine-tuning of causal language models: `python -m experiments.llm --help`."""
