# SPDX-License-Identifier: Apache-2.0
"""Writes the released model of a run as one file, which predicts without dpjax.

usage: dpjax export RUN [--out=model.jax]

A RUN is a folder that `dpjax train` wrote.  The file is a `jax.export` of the network with the
parameters of params.msgpack.  With JAX and without dpjax,

  import jax
  from jax import export
  model = export.deserialize(open("model.jax", "rb").read())
  outputs = model.call(x)

gives the outputs (logits, or the numbers of a regression from -1 to 1) for any number of rows x.
Features that the run computed from images are a part of the network, and so is their scale.  Rows
of a table are encoded as for training; model.in_avals has their shape.  The export needs
flatbuffers.
"""

from absl import flags

from dpjax.cli.flag_sets import Group

WORDS = "RUN"
FLAGS = flags.FlagValues()
Group(FLAGS, "Output").path("out", None, "The file; by default model.jax in the folder of the run.")
