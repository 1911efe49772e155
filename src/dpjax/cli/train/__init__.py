# SPDX-License-Identifier: Apache-2.0
"""Trains a network with differential privacy and reports what the guarantee is.

With no flags: a two-layer tanh network on the handwritten digits of scikit-learn (1,437
training images), at epsilon 3 and delta 1e-5, with Poisson sampling and the tightest proven
accountant.

Examples:
  dpjax train --out=runs/demo
  dpjax train --dataset=my.csv --model=networks:Net --target_epsilon=2
  dpjax train --dataset=mnist --model=tempered_cnn --loss=composite
  dpjax train --dataset=mnist --model=scatter_cnn --features=scattering --normalization=data

The output folder receives `report.html` (figures, each with a note on who may see it),
`metrics.jsonl` (a line per evaluation), `params.msgpack` (Flax; may be released; averaged once the
run has ended, and until then of the last line's step),
`privacy.json` (from which `dpjax verify` recomputes epsilon), `statement.txt`, and
`checkpoints` (secret: means without noise).  `run.json` and `lock` say which run
is there, which steps it released, and that no second process trains in it.  The same command
resumes a run that was killed.

Compiled programs stay in ~/.cache/dpjax, where the next run finds them: JAX_COMPILATION_CACHE_DIR
names another folder, and JAX_ENABLE_COMPILATION_CACHE=false keeps none.
"""

from dpjax.cli.train.flags import FLAGS

__all__ = ["FLAGS", "WORDS"]

WORDS = ""  # flags alone
