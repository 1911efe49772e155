# SPDX-License-Identifier: Apache-2.0
"""XLA computes per-example kernel gradients wrongly when it partitions the batch over devices.

Plain JAX, without dpjax; anyone can report this to https://github.com/openxla/xla/issues. With
jaxlib 0.10.2 on a CPU the error is as large as the gradient; it should be that of rounding.
"""

import jax
import jax.numpy as jnp

jax.config.update("jax_num_cpu_devices", 8)
mesh = jax.sharding.Mesh(jax.devices("cpu"), ("data",))
images = jax.random.normal(jax.random.key(0), (16, 1, 6, 6, 1))
kernel = jax.random.normal(jax.random.key(1), (3, 3, 1, 8))
layout = ("NHWC", "HWIO", "NHWC")


def loss(kernel, x):
    """A loss of one image."""
    y = jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=layout)
    return jnp.sum(y**2)


gradients = jax.jit(jax.vmap(jax.grad(loss), (None, 0)))
split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
one, eight = gradients(kernel, images), gradients(kernel, jax.device_put(images, split))
error = jnp.max(jnp.abs(jax.device_get(eight) - jax.device_get(one))) / jnp.max(jnp.abs(one))
print("error relative to the gradient:", float(error))
