# SPDX-License-Identifier: Apache-2.0
"""What compilers plan for one private step on devices that are not there.

  result    124 million parameters on a host of 8 H100s, batch 256, data parallel: a private step
            reduces twice the bytes of a plain one and does as many operations in matrix
            products; 4.4 GiB of temporaries, where a plain step takes 1.8
  hardware  none of the devices: compilers of TPU v5e and v5p (libtpu 0.0.42.1) and H100, JAX 0.10.2
  command   make bench BENCH=pods ARGS="--out experiments/results/pods.json"
  figures   experiments/results/pods.json; tables in docs/pages/scale.md (``--page``)

These are plans and not measurements. A decoder (AdamW, texts of 1,024 tokens, bfloat16 with float32
parameters, layers in a scan) is compiled with and without privacy for the same mesh. Bytes are
the compiler's; operations are of matrix products alone; collectives and the cycles that the
compiler of a TPU expects are multiplied by the trips of the loops around them (`pods_hlo`). It
gives no cycles of collectives, nor of a SparseCore, so cycles are of computation alone. Use the
libtpu of the same ``jax[tpu]``: of newer ones jaxlib cannot read all programs.

The compilers need an environment of their own: ``python -m venv .venv-compilers``, then
``.venv-compilers/bin/pip install . 'jax[tpu]'`` for TPUs, or ``. 'jax[cuda12]'`` for GPUs. One plan
takes minutes; ``--out`` is written after each, and a plan that it holds is not compiled again.
``--train=20`` trains a decoder of 28 million parameters on eight host devices instead.
"""

from __future__ import annotations

import os
import pathlib
import statistics
import time
from collections.abc import Iterator
from typing import Any

import compilers
import reporting
from absl import flags
from common import markdown
from compilers import COMPILERS

SHAPES = {
    "0.5M": {"vocabulary": 512, "length": 64, "width": 128, "depth": 2, "heads": 4},
    "30M": {"vocabulary": 128, "length": 128, "width": 512, "depth": 9, "heads": 8},
    "124M": {"vocabulary": 50_304, "length": 1024, "width": 768, "depth": 12, "heads": 12},
    "1B": {"vocabulary": 50_304, "length": 1024, "width": 2048, "depth": 18, "heads": 16},
}
# Model, devices, meshes, batch, microbatch.
LARGE = (
    ("124M", "v5e:16x16", ("data:256", "data:16,model:16"), 4096, 4),
    ("1B", "v5e:16x16", ("data:16,model:16",), 4096, 1),
    ("1B", "v5p:4x8x8", ("data:256",), 4096, 1),
    ("124M", "h100:8", ("data:8", "data:4,model:2", "data:2,model:4"), 256, 4),
)
GROWING = (("v5e:1x2", 2), ("v5e:2x2", 4), ("v5e:4x4", 16), ("v5e:16x16", 256))
PER_DEVICE = 16


def growing(chips: int) -> tuple[str, str]:
    """The meshes of the small model: one that splits the batch alone, one that splits both."""
    model = min(4, chips)
    return f"data:{chips}", f"data:{chips // model},model:{model}"


def tasks(smoke: bool = False) -> Iterator[tuple[str, dict[str, Any]]]:
    """Names and tasks of all plans, with and without privacy."""
    cases = [(*case[:2], mesh, *case[3:]) for case in LARGE for mesh in case[2]]
    cases += [
        ("0.5M", devices, mesh, PER_DEVICE * chips, 4)
        for devices, chips in GROWING
        for mesh in growing(chips)
    ]
    if smoke:
        cases = [("0.5M", "cpu:4", mesh, 16, 2) for mesh in ("data:4", "data:2,model:2")]
    for model, devices, mesh, batch, microbatch in cases:
        for step in ("plain", "private"):
            yield (
                f"{model} {devices} {mesh} {step}",
                {
                    "devices": devices,
                    "mesh": {k: int(n) for k, n in (x.split(":") for x in mesh.split(","))},
                    "shape": SHAPES[model],
                    "step": step,
                    "batch_size": batch,
                    "microbatch_size": microbatch,
                    "examples": 65_536,
                },
            )


def plan(task: dict[str, Any], python: str) -> dict[str, Any]:
    """What the compiler of the task's devices plans, or why there is no plan."""
    name, _, count = task["devices"].partition(":")
    host = count if name == "cpu" else "1"
    more = {"JAX_NUM_CPU_DEVICES": host}
    return compilers.answer("pods_cases.py", task, name == "cpu", python, **more)


def show(name: str, found: dict[str, Any]) -> None:
    """One line of a plan."""
    if "refused" in found:
        text = f"no plan: {found['refused']}"
    elif "too_large" in found:
        text = f"does not fit: {found['too_large']}"
    else:
        counts = ", ".join(
            f"{n:,} over {axes} ({found['collective_bytes'][axes] / 2**20:,.1f} MiB)"
            for axes, n in found["collectives"].items()
        )
        text = (
            f"{found['state_bytes'] / 2**20:9,.1f} MiB state"
            f" {found['temporary_bytes'] / 2**20:9,.1f} MiB temporary"
            f" {found['matmul_flop'] / 1e12:9.4f} Tflop {found['cycles'] / 1e6:9.1f} Mcycles;"
            f" {counts}"
        )
    print(f"{name:42} {text}", flush=True)


def train(steps: int) -> dict[str, Any]:
    """Trains a decoder on eight host devices, and returns its losses and seconds per step."""
    import jax

    jax.config.update("jax_num_cpu_devices", 8)
    import numpy as np
    import pods_cases

    import dpjax
    from dpjax import meshes

    shape = SHAPES["30M"]
    path = pathlib.Path(os.environ.get("DPJAX_DATA_DIR", "data")) / "tiny_shakespeare.txt"
    text, width = np.frombuffer(path.read_bytes(), np.uint8), shape["length"] + 1
    data = text[: len(text) // width * width].reshape(-1, width).astype(np.int32) % 128
    sizes, loss = pods_cases.decoder(shape)
    keys = jax.random.split(jax.random.key(0), len(sizes))
    params = {
        name: jax.numpy.ones(leaf.shape)
        if name in ("scales", "last")
        else 0.02 * jax.random.normal(key, leaf.shape)
        for key, (name, leaf) in zip(keys, sizes.items(), strict=True)
    }
    mechanism = dpjax.Mechanism(
        sampling=dpjax.sampling.poisson(examples=len(data), batch_size=32),
        clipping=dpjax.clipping.flat(bound=1.0),
        noise_multiplier=0.01,
        steps=steps,
    )
    mesh = meshes.parse("data:4,model:2")
    algorithm = dpjax.dpsgd(
        loss, pods_cases.OPTIMIZER, mechanism, data, microbatch_size=2, mesh=mesh
    )
    state, losses, seconds = algorithm.init(params, jax.random.key(1)), [], []
    for _ in range(steps):
        began = time.perf_counter()
        state, info = algorithm.run(state, 1)
        seconds.append(time.perf_counter() - began)
        losses.append(float(info.loss[0]))
        print(f"loss {losses[-1]:.3f}  {seconds[-1]:.1f} s", flush=True)
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    return {"parameters": count, "mesh": dict(mesh.shape), "losses": losses, "seconds": seconds}


def tables(report: dict[str, Any]) -> str:
    """The tables of docs/pages/scale.md."""
    rows, plans = [], report["plans"]
    for name, found in plans.items():
        model, devices, mesh, step = name.split()
        if model == "0.5M" or "refused" in found:
            continue
        place = f"{model}, {devices}, {mesh}"
        if "too_large" in found:
            rows.append(f"| {place} | {step} | does not fit: {found['too_large']} | | | | | |")
            continue
        cycles = f"{found['cycles'] / 1e9:.2f}" if found.get("cycles") else "-"
        sent = [_over(found, batch) for batch in (True, False)]
        held = [_gib(found[kind]) for kind in ("state_bytes", "temporary_bytes")]
        tflop = f"{found['matmul_flop'] / 1e12:.1f}"
        rows.append(markdown.line(place, step, *held, tflop, cycles, *sent))
    head = (
        "| model, devices, mesh | step | state | temporaries | Tflop | Gcycles | over data "
        "| over model |"
    )
    parts, rows = [markdown.table(head, rows)], []
    for devices, chips in GROWING:
        for mesh in growing(chips):
            both = [plans.get(f"0.5M {devices} {mesh} {step}", {}) for step in ("plain", "private")]
            if not all("cycles" in found for found in both):
                continue
            cells = [str(_count(f, batch)) for batch in (True, False) for f in both]
            mib = [(f["state_bytes"] + f["temporary_bytes"]) / 2**20 for f in both]
            cells += [f"{x:.1f} MiB" for x in mib]
            rows.append(markdown.line(str(chips), mesh, *cells))
    head = (
        "| chips | mesh | collectives over data, plain | private | over model, plain | private "
        "| state + temporaries, plain | private |"
    )
    parts.append(markdown.table(head, rows))
    if ran := report.get("training"):
        mesh = ",".join(f"{name}:{size}" for name, size in ran["mesh"].items())
        first, *_, last = ran["losses"]
        steps = len(ran["losses"])
        parts.append(
            f"What ran: {steps} private steps of a decoder of {ran['parameters'] / 1e6:.0f}\n"
            f"million parameters on eight host devices ({mesh}), each with 32 texts of 128\n"
            f"characters. The loss fell from {first:.2f} to {last:.2f}; a step took\n"
            f"{statistics.median(ran['seconds'][1:]):.0f} s. Two cores played eight devices beside"
            "\nother programs, so the seconds say nothing of a cluster. The noise was too small for"
            "\na guarantee: this shows that a mesh trains."
        )
    return "\n\n".join(parts)


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"


def _chosen(found: dict[str, Any], batch: bool) -> list[str]:
    """Axes of collectives that touch the batch's axes, or those over the parameters' alone."""
    return [axes for axes in found["collectives"] if (axes != "model") == batch]


def _count(found: dict[str, Any], batch: bool) -> int:
    return sum(found["collectives"][axes] for axes in _chosen(found, batch))


def _over(found: dict[str, Any], batch: bool) -> str:
    sent = sum(found["collective_bytes"][axes] for axes in _chosen(found, batch))
    return f"{_count(found, batch):,}: {_gib(sent)}" if sent else "0"


def main(asked: Any) -> None:
    before = compilers.kept(asked.out)
    if asked.train:
        before["training"] = train(asked.train)
        reporting.keep(before, asked.out)
        return
    report = reporting.begin(("jax", "jaxlib", "optax"), smoke=asked.smoke)
    report |= {"plans": {}} | {key: before[key] for key in ("plans", "training") if key in before}

    def made(task: dict[str, Any]) -> dict[str, Any]:
        return plan(task, asked.compiler_python)

    compilers.continued(report, dict(tasks(asked.smoke)), asked.plans, asked.out, made, show)
    markdown.rewrite(asked.page, {"plans": tables(report)})


if __name__ == "__main__":
    flags.DEFINE_string("page", None, "Markdown file whose tables are written again.")
    flags.DEFINE_multi_string("plans", None, "A plan, or the beginning of several names.")
    flags.DEFINE_string("compiler_python", str(COMPILERS), "A Python that has the compilers.")
    flags.DEFINE_integer("train", 0, "Train this many steps on host devices instead.")
    reporting.run(
        main,
        smoke="A tiny network on four host devices",
        out="JSON file for the figures; its plans are kept.",
    )
