# SPDX-License-Identifier: Apache-2.0
"""One contestant's training step, in a process and perhaps an environment of its own.

Started by `steps` as ``python -m experiments.benchmarks.peers CONTESTANT`` and asked in lines of
JSON: first ``{"prepare": task}``, then ``{"steps": 3}`` as often as it likes. PyTorch and Opacus
run eagerly, as their users run them, on all cores or on CUDA, with the batch in place as tensors;
Opacus' modes are set up as its privacy engine does, without the accountant. jax_privacy gets
dpjax's network, loss and compiled SGD, at the best microbatch of a short list, which is printed.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import sys
import time
from typing import Any

from experiments.benchmarks import memory, workers

MICROBATCHES = (None, 64, 16)  # of jax_privacy; None is the whole batch in one


def with_jax_privacy(task: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """jax_privacy's clipped gradient and noise, each microbatch size tried for one warm step."""
    version = importlib.metadata.version("jax_privacy")  # first: its error names the package
    import jax

    from experiments.benchmarks import contestants, workloads

    batch_size = task["batch_size"]
    problem = workloads.WORKLOADS[task["workload"]]._replace(batch_size=batch_size)
    loss, params, batch = workloads.problem(problem)
    tried = {}
    for size in MICROBATCHES:
        if size is not None and size >= batch_size:
            continue
        gradient, noise = contestants.jax_privacy(loss, batch_size, size)
        made = contestants.compiled(gradient, noise, params, batch)
        first = made.run(1)
        tried[size] = (made.run(1), first, made)
    warm = {size: seconds for size, (seconds, _, _) in tried.items()}
    best = min(tried, key=lambda size: warm[size])
    _, first, made = tried[best]
    facts = {
        "parameters": problem.parameters,
        "device": jax.devices()[0].device_kind,
        "note": f"microbatch {best or batch_size}",
        "first_s": first,
        "microbatches_ms": {str(size or batch_size): 1e3 * t for size, t in warm.items()},
        "versions": {"jax_privacy": version},
    }

    def take(steps: int) -> dict[str, Any]:
        return {"seconds": made.run(steps), "sound": made.sound(), "memory": made.memory()}

    return take, facts


def with_torch(mode: str | None, task: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """A PyTorch training step; `mode` is Opacus' way to per-example gradients, or None."""
    packages = ["torch"]
    if mode is not None:
        packages.append("opacus")
    versions = {name: importlib.metadata.version(name) for name in packages}
    import torch

    from experiments.benchmarks import torch_models

    torch.manual_seed(0)
    torch.set_num_threads(os.cpu_count() or 1)
    device = torch.device("cpu")
    device_name = "cpu"
    if torch.cuda.is_available():
        device = torch.device("cuda")
        device_name = torch.cuda.get_device_name()
        # TF32 for all products, as in JAX; PyTorch's default has it for convolutions only.
        torch.set_float32_matmul_precision("high")
    if "decoder" in task:  # `llm` asks for a decoder by its sizes
        shape = (task["decoder"]["length"],)
        make = functools.partial(torch_models.Decoder, **task["decoder"])
    else:
        make, shape = torch_models.NETWORKS[task["workload"]]
    batch_size = task["batch_size"]
    network = make().to(device)
    trains = sum(p.numel() for p in network.parameters() if p.requires_grad)
    if trains != task["parameters"]:
        raise RuntimeError(f"the network trains {trains:,} parameters, not {task['parameters']:,}")
    if task["text"]:
        x = torch.randint(torch_models.TOKENS, (batch_size, *shape), device=device)
        y = x.roll(-1, 1).flatten()
    else:
        x = torch.randn(batch_size, *shape, device=device)
        y = torch.randint(torch_models.CLASSES, (batch_size,), device=device)
    network, optimizer, criterion = trained_by(mode, network, task)
    rise = memory.of_torch()

    def take(steps: int) -> dict[str, Any]:
        started = time.perf_counter()
        for _ in range(steps):
            optimizer.zero_grad()
            logits = network(x)
            flat = logits.flatten(0, -2)
            if mode == "ghost" and task["text"]:
                # Opacus' ghost mode joins the tokens of an example by their shape.
                loss = criterion(flat, y, shape=logits.shape)
            else:
                loss = criterion(flat, y)
            loss.backward()
            optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds = (time.perf_counter() - started) / steps
        peak = {"peak_bytes": rise()}
        sound = all(bool(torch.isfinite(p).all()) for p in network.parameters())
        return {"seconds": seconds, "sound": sound, "memory": peak}

    return take, {"parameters": trains, "device": device_name, "versions": versions}


def trained_by(mode: str | None, network: Any, task: dict[str, Any]) -> tuple[Any, Any, Any]:
    """The network, its SGD and its loss; with a mode, as Opacus makes them private."""
    import torch

    trained = [p for p in network.parameters() if p.requires_grad]
    sgd = torch.optim.SGD(trained, lr=task["learning_rate"])
    loss = torch.nn.CrossEntropyLoss()
    if mode is None:
        return network, sgd, loss
    from opacus import grad_sample, optimizers
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    bound = {"max_grad_norm": task["bound"]}
    options = {"expected_batch_size": task["batch_size"], **bound}
    options["noise_multiplier"] = task["noise_multiplier"]
    if mode == "ghost":
        module = grad_sample.GradSampleModuleFastGradientClipping(network, **bound)
        optimizer = optimizers.DPOptimizerFastGradientClipping(sgd, **options)
        return module, optimizer, DPLossFastGradientClipping(module, optimizer, loss)
    if mode == "ew":
        module = grad_sample.GradSampleModuleExpandedWeights(network)
    else:
        module = grad_sample.GradSampleModule(network, force_functorch=mode == "functorch")
    return module, optimizers.DPOptimizer(sgd, **options), loss


CONTESTANTS = {
    "jax_privacy": with_jax_privacy,
    "opacus hooks": functools.partial(with_torch, "hooks"),
    "opacus functorch": functools.partial(with_torch, "functorch"),
    "opacus ew": functools.partial(with_torch, "ew"),
    "opacus ghost": functools.partial(with_torch, "ghost"),
    "torch plain": functools.partial(with_torch, None),
}


def main() -> None:
    _, name = sys.argv
    # The asking process may hold the GPU too, so no process preallocates its memory.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    prepared = []

    def handle(question: dict[str, Any]) -> dict[str, Any]:
        if "steps" in question:
            return prepared[0](question["steps"])
        take, facts = CONTESTANTS[name](question["prepare"])
        prepared.append(take)
        return facts

    workers.serve(handle)


if __name__ == "__main__":
    main()
