# SPDX-License-Identifier: Apache-2.0
"""One frontend of kymatio, in a process and an environment of its own.

  command   python experiments/benchmarks/kymatio_frontends.py numpy|torch|jax

Started by `scattering`, which asks in lines of JSON: first ``{"images": path, "J": 2, "L": 8}``,
answered with the path of the features of a few images, and then ``{"seconds": 1.0}`` as often as
it likes, answered with images a second.  Each frontend gets the batch size of a short list that
is fastest with it; torch without gradients, JAX compiled.  Peers are imported where they are used.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import workers

BATCHES = (16, 64, 256, 1024)
CHECKED = 8  # images whose features are handed back


def transform(frontend: str, shape: tuple[int, int], J: int, L: int) -> Callable[[Any], Any]:
    """``(batch, channels, height, width)`` -> features, finished when it returns."""
    import scipy.special

    # kymatio's three-dimensional part asks for a name that SciPy has removed.
    if not hasattr(scipy.special, "sph_harm"):
        scipy.special.__dict__["sph_harm"] = None
    if frontend == "torch":
        import torch
        from kymatio.torch import Scattering2D

        scattering = Scattering2D(J=J, shape=shape, L=L)

        def with_torch(batch: Any) -> Any:
            with torch.inference_mode():
                return scattering(torch.from_numpy(batch)).numpy()

        return with_torch
    if frontend == "jax":
        import jax
        from kymatio.jax import Scattering2D

        compiled = jax.jit(Scattering2D(J=J, shape=shape, L=L))
        return lambda batch: np.asarray(compiled(batch))
    from kymatio.numpy import Scattering2D

    with_numpy: Callable[[Any], Any] = Scattering2D(J=J, shape=shape, L=L)
    return with_numpy


def speed(run: Callable[[Any], Any], images: Any, batch: int, seconds: float) -> float:
    """Images per second, over at least ``seconds``."""
    done, started = 0, time.perf_counter()
    while done == 0 or time.perf_counter() - started < seconds:
        start = done % (len(images) - batch + 1)
        run(images[start : start + batch])
        done += batch
    return done / (time.perf_counter() - started)


def main(frontend: str) -> None:
    state: dict[str, Any] = {}

    def handle(question: dict[str, Any]) -> dict[str, Any]:
        if "images" not in question:
            return {"speed": speed(**state, seconds=question["seconds"])}
        images = np.load(question["images"])
        run = transform(frontend, images.shape[2:], question["J"], question["L"])
        features = os.path.join(os.path.dirname(question["images"]), f"{frontend}.npy")
        np.save(features, run(images[:CHECKED]))
        tried = {}
        for batch in sorted({min(batch, len(images)) for batch in BATCHES}):
            run(images[:batch])  # compiles, or allocates
            tried[batch] = speed(run, images, batch, question["seconds"])
        best = max(tried, key=tried.__getitem__)
        state.update(run=run, images=images, batch=best)
        names = {"kymatio", "numpy", frontend}
        versions = {name: importlib.metadata.version(name) for name in sorted(names)}
        return {"features": features, "batch_size": best, "versions": versions}

    workers.serve(handle)


if __name__ == "__main__":
    main(sys.argv[1])
