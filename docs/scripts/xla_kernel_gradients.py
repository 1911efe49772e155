# SPDX-License-Identifier: Apache-2.0
"""XLA computes per-example kernel gradients wrongly when it partitions the batch over devices.

Plain JAX, without dpjax; anyone can report this to https://github.com/openxla/xla/issues.  With jaxlib
0.10.2 on a CPU the error is as large as the gradient; without the fault it is zero up to rounding.
"""

import jax
import jax.numpy as jnp

jax.config.update("jax_num_cpu_devices", 8)
mesh = jax.sharding.Mesh(jax.devices("cpu"), ("data",))
split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
images = jax.random.normal(jax.random.key(0), (16, 1, 6, 6, 1))
kernel = jax.random.normal(jax.random.key(1), (3, 3, 1, 8))
loss = lambda kernel, x: jnp.sum(jax.lax.conv_general_dilated(
    x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")) ** 2)  # fmt: skip
gradients = jax.jit(jax.vmap(jax.grad(loss), (None, 0)))
right, found = gradients(kernel, images), gradients(kernel, jax.device_put(images, split))
print("relative error:", float(jnp.max(jnp.abs(jax.device_get(found) - right)) / jnp.max(jnp.abs(right))))
