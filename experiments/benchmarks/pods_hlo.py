# SPDX-License-Identifier: Apache-2.0
"""What one run of a compiled step sends and computes, with the trips of its loops.

`counted` reads the text of the compiled program: collectives, by the axes of the mesh over which
they run, and the cycles that the compiler of a TPU expects.  `matmul_flop` reads the traced
program, where a product has its shapes.  Loops without a known number of trips are the loop over
microbatches, whose usual number the caller gives.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from dpjax.gradients.jaxprs import inner_programs

KINDS = "all-reduce|all-gather|reduce-scatter|collective-permute|all-to-all"
# What moves no bytes.
_FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all"}
_BITS = {"pred": 8, "bf16": 16, "c64": 64, "c128": 128}


def counted(text: str, mesh: Mapping[str, int], dynamic: tuple[int, int]) -> dict[str, Any]:
    """Collectives and expected cycles of one step on one device.

    Args:
      text: The compiled program.
      mesh: Its axes and their sizes.
      dynamic: The trips of the two loops whose number is known at run time alone: blocks of
        microbatches, and microbatches in a block.
    """
    bodies, entry = _computations(text)
    collectives: Counter[str] = Counter()
    sent: Counter[str] = Counter()
    cycles = 0

    def walk(name: str, times: int, depth: int) -> None:
        nonlocal cycles
        for line in bodies.get(name, ()):
            cost = re.search(r'"estimated_cycles":"(\d+)"', line)
            # The largest integer stands for no estimate, as of a scatter on a SparseCore.
            cycles += times * int(cost[1]) if cost and int(cost[1]) < 2**62 else 0
            found = re.search(rf"= (.*?) ({KINDS})(?:-start)?\(", line)
            if found:
                over = _axes(line, mesh)
                collectives[over] += times
                sent[over] += times * _bytes(found[1], found[2])
            trips, below = 1, depth
            if loop := re.search(r" while\(.*condition=%([\w.\-]+)", line):
                known = _trips(line, bodies.get(loop[1], ()))
                trips, below = known or dynamic[min(depth, 1)], depth + (known is None)
            for callee in re.findall(r"(?:body|calls|to_apply)=%([\w.\-]+)", line):
                # The fusions that continue and end an asynchronous collective name it again.
                if not re.search(r"%async-collective-done|=%async_collective_fusion", line):
                    walk(callee, times * trips, below)
            # The second branch is for examples whose gradient is not finite.
            usual = re.search(r"branch_computations=\{%([\w.\-]+)", line)
            if usual := usual or re.search(r"false_computation=%([\w.\-]+)", line):
                walk(usual[1], times, depth)

    walk(entry, 1, 0)
    return {"collectives": dict(collectives), "collective_bytes": dict(sent), "cycles": cycles}


def accessed(text: str, dynamic: tuple[int, int]) -> int:
    """Bytes that the kernels of one step read and write, if nothing stays in a cache.

    Args:
      text: The compiled program of a GPU.
      dynamic: As for `counted`.
    """
    bodies, entry = _computations(text)

    def walk(name: str, depth: int) -> int:
        sizes, total = {}, 0
        for line in bodies.get(name, ()):
            found = re.match(r"\s*(?:ROOT )?%([\w.\-]+) = (.*?) ([\w\-]+)\((.*?)\)", line)
            if not found:
                continue
            out, shape, kind, operands = found.groups()
            sizes[out] = _bytes(shape, kind)
            if kind == "while":
                condition = re.search(r"condition=%([\w.\-]+)", line)
                known = _trips(line, bodies.get(condition[1], ()) if condition else ())
                trips = known or dynamic[min(depth, 1)]
                body = re.search(r"body=%([\w.\-]+)", line)
                total += trips * walk(body[1], depth + (known is None)) if body else 0
            elif kind in ("call", "conditional"):
                within = r"(?:to_apply|branch_computations=\{|false_computation)=?%([\w.\-]+)"
                inner = re.search(within, line)
                total += walk(inner[1], depth) if inner else 0
            elif kind not in _FREE:
                read = re.findall(r"%([\w.\-]+)", operands)
                total += sizes[out] + sum(sizes.get(operand, 0) for operand in read)
        return total

    return walk(entry, 0)


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    """The lines of each computation, and the name of the entry."""
    bodies: dict[str, list[str]] = {}
    entry, name = "", ""
    for line in text.splitlines():
        head = re.match(r"(ENTRY )?%([\w.\-]+) .*\{$", line)
        if head:
            name = head[2]
            bodies[name] = []
            entry = name if head[1] else entry
        elif name:
            bodies[name].append(line)
    return bodies, entry


def _trips(line: str, condition: Iterable[str]) -> int | None:
    """The trips of a loop; None if they are known at run time alone."""
    if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', line):
        return int(known[1])
    text = "\n".join(condition)
    compared = re.search(r"compare\(.*%(constant[\w.\-]*)\), direction=LT", text)
    number = compared and re.search(rf"%{re.escape(compared[1])} = .* constant\((\d+)\)", text)
    return int(number[1]) if number else None


def _axes(line: str, mesh: Mapping[str, int]) -> str:
    """Over which axes of the mesh a collective runs, from its first group of devices."""
    iota = re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line)
    listed = re.search(r"replica_groups=\{\{([\d,]+)\}", line)
    pairs = re.search(r"source_target_pairs=\{\{(\d+,\d+)\}", line)
    if iota:
        dims = [int(x) for x in iota[3].split(",")]
        order = [int(x) for x in iota[4].split(",")] if iota[4] else range(len(dims))
        group = np.arange(math.prod(dims)).reshape(dims).transpose(*order)
        group = group.reshape(int(iota[1]), int(iota[2]))[0]
    elif found := listed or pairs:
        group = np.array([int(x) for x in found[1].split(",")])
    else:
        group = np.arange(math.prod(mesh.values()))
    places = np.unravel_index(group, tuple(mesh.values()))
    return ",".join(name for name, at in zip(mesh, places, strict=True) if len(set(at)) > 1)


def _bytes(shape: str, kind: str) -> int:
    """The bytes of what a collective returns."""
    sizes = []
    for dtype, dims in re.findall(r"\b(pred|bf16|[fsuc]\d+)\[([\d,]*)\]", shape):
        bits = _BITS.get(dtype) or int(dtype[1:])
        sizes.append(bits * math.prod(int(x) for x in dims.split(",") if x) // 8)
    # The asynchronous forms of these return their operand as well.
    return max(sizes, default=0) if kind in ("all-gather", "collective-permute") else sum(sizes)


def matmul_flop(jaxpr: Any, mesh: Mapping[str, int], dynamic: tuple[int, int]) -> float:
    """Floating-point operations of products and convolutions in one step, on one device.

    Args:
      jaxpr: The traced step.
      mesh: The axes and their sizes.
      dynamic: As for `counted`.
    """

    def walk(jaxpr: Any, devices: int, depth: int) -> float:
        total = 0.0
        for equation in jaxpr.eqns:
            name, params = equation.primitive.name, equation.params
            if name == "dot_general":
                (contracted, _), _ = params["dimension_numbers"]
                left, result = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
                terms = math.prod(left[axis] for axis in contracted)
                total += 2 * terms * math.prod(result) / devices
            if name == "conv_general_dilated":
                kernel, result = equation.invars[1].aval.shape, equation.outvars[0].aval.shape
                terms = math.prod(kernel) // kernel[params["dimension_numbers"].rhs_spec[0]]
                total += 2 * terms * math.prod(result) / devices
            times, among, below = 1, devices, depth
            if name == "scan":
                times = params["length"]
            elif name == "while":
                times, below = dynamic[min(depth, 1)], depth + 1
            elif name == "shard_map":
                # Inside, shapes are of a part; XLA splits the work over the other axes.
                split = set(params["newly_manual_axes"])
                among = math.prod(n for axis, n in mesh.items() if axis not in split)
            inner = inner_programs(equation)
            # The last branch of a choice by platform is that of accelerators.
            usual = slice(-1, None) if params.get("branches_platforms") else slice(1)
            for each in inner[usual] if name == "cond" else inner:
                total += times * walk(each, among, below)
        return total

    return walk(jaxpr, math.prod(mesh.values()), 0)
