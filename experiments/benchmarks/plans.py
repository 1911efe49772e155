# SPDX-License-Identifier: Apache-2.0
"""What compilers expect of one private step on one TPU or GPU that is not there.

  result    a private step on v5e takes 1.5 to 8.4 times the cycles of a plain one (W1 to W5), where
            `vmap` takes 4 to 119 times; by the compiler's first estimate 1.4 to 2.8 times. It takes
            1.47 times the cycles on WRN-16-4, 0.92 on ViT-S, 0.69 on the Transformer and 0.65 with
            LoRA; on a v5p 1.51 on W5, 2.27 on WRN-16-4, 1.25 on ViT-S and the Transformer, 0.96
            with LoRA; on a v6e 1.30 on W5, 1.93 on WRN-16-4, 0.88 on ViT-S (`vmap` 2.12), 0.85 on
            the Transformer and 0.75 with LoRA. On an H100 it takes 1.2 to 2.5 times the roofline of
            a plain one (W1 to W5), 2.12 on WRN-16-4, 1.41 on ViT-S (`vmap` 1.35), 1.06 on the
            Transformer and 1.03 with LoRA. Goals are 1.3, and 1.2 for the large models. Plans,
            never measurements
  hardware  none of the devices: compilers of TPU v5e, v5p, v6e (libtpu) and H100, JAX 0.10.2; for
            ViT-S on the H100 JAX 0.11.2
  command   make bench BENCH=plans ARGS="--out experiments/results/plans.json"
  figures   experiments/results/plans.json; the table in docs/pages/speed.md (``--page``)

W1 to W5 (`workloads`) and four large models are compiled as a plain step, a plain step with noise
("noised": no private step can cost less), dpjax's engines, and jax_privacy. "expected" is the
analysis of the compiler of a TPU, which counts the bodies of loops once and the passes of a product
not at all; "cycles" is what its scheduler expects, with loops and passes. On an H100 "roofline" is
the larger of FLOPs and bytes of the optimised program over the peaks of the device; XLA counts the
body of a loop once there too, and not what libraries such as cuDNN compute.

The last rows are the gradients of one matrix alone (examples x positions x inputs x outputs), in
several forms and precisions (`plans_cases.form_of`), and of one kernel (examples x side of the
image x inputs x outputs), by `vmap` and by the forms of the engine (`plans_cases.kernel_form_of`).

The environment is that of `pods`: ``python -m venv .venv-compilers``, then
``.venv-compilers/bin/pip install . 'jax[tpu]'`` for TPUs, or ``. 'jax[cuda12]'`` for GPUs; for its
rows, ``jax-privacy`` as well. A plan takes minutes; ``--out`` is written after each, and a plan
that it holds is not compiled again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import compilers
import reporting
from absl import flags
from common import markdown
from compilers import COMPILERS

STEPS = ("plain", "auto", "vmap", "jax_privacy", "noised")
DEVICES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "h100": "h100:1"}
MODELS = {
    "W1": 256,
    "W2": 256,
    "W3": 1024,
    "W4": 1024,
    "W5": 64,
    "WRN-16-4": 4096,
    "ViT-S": 256,
    "Transformer": 64,
    "Transformer LoRA": 64,
}
# What each precision costs: the gradients of one matrix, in several forms.
PRECISIONS = ("default", "high", "highest")
FORMS = {
    (8, 1024, 768, 768): [f"{form} {p}" for form in ("kept", "twice", "gram") for p in PRECISIONS],
    (1024, 1, 784, 256): [f"sum {p}" for p in PRECISIONS],
}
# What the form of a kernel's gradients costs: examples, side of the image, inputs and outputs.
KERNELS = {
    (256, 32, 32, 32): ("vmap", "kept"),
    (256, 16, 64, 64): ("vmap", "kept", "gram"),
    (256, 8, 128, 128): ("vmap", "kept", "gram"),
}


def tasks(smoke: bool = False) -> Iterator[tuple[str, dict[str, Any]]]:
    """Names and tasks of all plans."""
    models = {"W4": 8} if smoke else MODELS
    for device, topology in ({"cpu": "cpu:1"} if smoke else DEVICES).items():
        for model, size in models.items():
            for step in STEPS:
                task = {"model": model, "device": topology, "step": step, "batch_size": size}
                yield f"{device}: {model}: {step}", task
    for sizes, forms in ({} if smoke else FORMS).items():
        for step in ("plain", *forms):
            task = {"device": DEVICES["v5e"], "step": step, "sizes": sizes}
            yield f"v5e: {' x '.join(map(str, sizes))}: {step}", task
    for sizes, forms in ({} if smoke else KERNELS).items():
        for step in ("plain", *forms):
            task = {"device": DEVICES["v5e"], "step": step, "convolution": sizes}
            yield f"v5e: 3x3 on {' x '.join(map(str, sizes))}: {step}", task


def plan(task: dict[str, Any], python: str, seconds: float | None = None) -> dict[str, Any]:
    """What the compiler of the task's device plans, or why there is no plan."""
    on_host = task["device"].startswith("cpu")
    return compilers.answer("plans_cases.py", task, on_host, python, seconds)


def shown(found: dict[str, Any], plain: dict[str, Any]) -> list[str]:
    """The cells of a plan, with ratios to the plan of the plain step."""
    if "too_large" in found:
        return [f"does not fit: {found['too_large']}", "", "", ""]

    def cell(key: str, unit: float, form: str) -> str:
        mine, other = found.get(key), plain.get(key)
        if mine is None:
            return "-"
        ratio = f" ({mine / other:.2f})" if other and found is not plain else ""
        return format(mine / unit, form) + ratio

    time = "roofline_ms" if "roofline_ms" in found else "expected_ms"
    return [
        cell(time, 1, ".3f"),
        cell("cycles", 1e6, ".3f"),
        cell("temporary_bytes", 2**20, ",.1f"),
        cell("bytes", 1e9, ".3f"),
    ]


def show(name: str, found: dict[str, Any]) -> None:
    """One line of a plan."""
    refused = f"no plan: {found['refused']}" if "refused" in found else ""
    print(f"{name:32} {refused or '  '.join(shown(found, found))}", flush=True)


def table(report: dict[str, Any]) -> str:
    """The plans as a table in Markdown."""
    head = "| device | model | step | expected ms | Mcycles | temporaries, MiB | GB accessed |"
    rows = []
    for name, found in report["plans"].items():
        device, model, step = name.split(": ")
        plain = report["plans"].get(f"{device}: {model}: plain", {})
        cells = shown(found, found if step == "plain" else plain)
        rows.append(markdown.line(device, model, step, *cells))
    return markdown.table(head, rows) + "\n\n" + versions(report["plans"])


def versions(plans: dict[str, Any]) -> str:
    """Which compilers made the plans, in Markdown."""
    found: dict[str, dict[str, dict[str, None]]] = {}
    for name, each in plans.items():
        device, model, _ = name.split(": ")
        found.setdefault(each["compiler"], {}).setdefault(device, {})[model] = None
    lines = []
    for compiler, made in found.items():
        places = [f"{device} ({', '.join(models)})" for device, models in made.items()]
        lines.append(f"* {compiler}: {', '.join(places)}")
    return "\n".join(["What compiled them:", "", *lines])


def main(asked: Any) -> None:
    report = reporting.begin(("jax", "jaxlib", "optax"), smoke=asked.smoke)
    report["plans"] = compilers.kept(asked.out).get("plans", {})

    def made(task: dict[str, Any]) -> dict[str, Any]:
        return plan(task, asked.compiler_python, asked.seconds or None)

    compilers.continued(report, dict(tasks(asked.smoke)), asked.plans, asked.out, made, show)
    markdown.rewrite(asked.page, {"step plans": table(report)})


if __name__ == "__main__":
    flags.DEFINE_string("page", None, "Markdown file whose table is written again.")
    flags.DEFINE_multi_string("plans", None, "A plan, or the beginning of several names.")
    flags.DEFINE_string("compiler_python", str(COMPILERS), "A Python that has the compilers.")
    flags.DEFINE_float("seconds", 0, "Gives a plan up after this time; 0 waits.")
    reporting.run(
        main,
        smoke="A small batch, compiled for this CPU",
        out="JSON file for the figures; its plans are kept.",
    )
