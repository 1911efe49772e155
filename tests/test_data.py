# SPDX-License-Identifier: Apache-2.0
"""Data: every format, from small files made here; the real sets where a folder has them."""

import builtins
import importlib.util
import io
import os
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from mutation import kills
from PIL import Image
from small_mechanisms import mechanism_with

import dpjax
from dpjax import data
from dpjax.data.sources import SOURCES

RNG = np.random.default_rng(0)
REAL = os.environ.get("DPJAX_DATA_DIR")


@pytest.fixture(autouse=True)
def _nothing_but_what_a_test_gives(monkeypatch):
    monkeypatch.delenv("DPJAX_DATA_DIR", raising=False)


@pytest.fixture
def without_tfds(monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name == "tensorflow_datasets" else real(name, *rest),
    )


def arrays(dtype=np.uint8, shape=(28, 28, 1)):
    def images(count):
        x = RNG.integers(0, 256, (count, *shape))
        return x.astype(np.uint8) if dtype == np.uint8 else (x / 255).astype(dtype)

    return {
        "x_train": images(6),
        "y_train": RNG.integers(0, 10, 6, dtype=np.uint8),
        "x_test": images(3),
        "y_test": RNG.integers(0, 10, 3, dtype=np.uint8),
    }


def saved(folder, **changes):
    """The arrays of a small MNIST, with changes, as a file in the folder."""
    stored = {name: x for name, x in (arrays() | changes).items() if x is not None}
    np.savez(folder / "mnist.npz", **stored)
    return stored


def load_raises(name, path, words):
    """`data.load` refuses what the file holds, and names the file."""
    with pytest.raises(ValueError, match=words) as error:
        data.load(name, data_dir=path.parent)
    assert str(path) in str(error.value)


def test_digits():
    digits = data.load("digits")
    (x, y), (x_test, y_test) = digits.train, digits.test
    assert x.shape == (1437, 8, 8, 1)
    assert x_test.shape == (360, 8, 8, 1)
    assert (x.dtype, y.dtype) == (np.float32, np.int32)
    assert (x.min(), x.max()) == (0.0, 1.0)
    assert set(y) == set(y_test) == set(range(10))
    assert digits.classes == 10
    again = data.load("digits")
    assert np.array_equal(x, again.train[0])
    assert np.array_equal(y_test, again.test[1])


def test_digits_are_each_in_one_part_only():
    from sklearn.datasets import load_digits

    digits = data.load("digits")
    together = np.concatenate([digits.train[0], digits.test[0]]).reshape(-1, 64) * 16
    assert sorted(map(bytes, together)) == sorted(map(bytes, load_digits().data.astype(np.float32)))


@pytest.mark.parametrize("dtype", [np.uint8, np.float64])
@pytest.mark.parametrize("shape", [(28, 28, 1), (28, 28)])
@pytest.mark.parametrize("name", ["mnist", "fashion_mnist"])
def test_npz(tmp_path, name, dtype, shape):
    stored = arrays(dtype, shape)
    np.savez(tmp_path / f"{name}.npz", **stored)
    loaded = data.load(name, data_dir=tmp_path)
    x, y = loaded.train
    scale = 255 if dtype == np.uint8 else 1
    np.testing.assert_allclose(x[..., 0], stored["x_train"].reshape(6, 28, 28) / scale, rtol=1e-6)
    assert np.array_equal(y, stored["y_train"])
    assert loaded.test[0].shape == (3, 28, 28, 1)
    assert (x.dtype, y.dtype) == (np.float32, np.int32)
    assert (loaded.name, loaded.classes, loaded.note) == (name, 10, "")


def test_the_folder_may_come_from_the_environment(tmp_path, monkeypatch):
    saved(tmp_path)
    monkeypatch.setenv("DPJAX_DATA_DIR", str(tmp_path))
    assert data.load("mnist").train[0].shape == (6, 28, 28, 1)


def encoded(form="jpeg"):
    stored = {}
    for part, shades in (("train", [0, 100, 255]), ("test", [50])):
        pieces = []
        for shade in shades:
            stream = io.BytesIO()
            Image.new("RGB", (32, 32), (shade, shade, shade)).save(stream, form)
            pieces.append(stream.getvalue())
        stored[f"{form}_{part}"] = np.frombuffer(b"".join(pieces), np.uint8)
        stored[f"offsets_{part}"] = np.cumsum([0, *map(len, pieces)])
        stored[f"y_{part}"] = np.arange(len(shades), dtype=np.uint8)
    return stored


@pytest.mark.parametrize(
    ("array", "change", "word"),
    [
        ("jpeg_train", lambda x: x[:-300], "offsets are from 0 to"),
        ("jpeg_train", lambda x: x[: len(x) // 2], "cut off: fetch it again"),
        ("jpeg_train", lambda x: np.concatenate([x[:-300], x[:300]]), "do not decode"),
        ("jpeg_train", np.zeros_like, r"cifar10\.npz holds encoded images that do not decode"),
        ("offsets_train", lambda x: None, "without their offsets"),
        ("offsets_train", lambda x: x.astype(float), "without their offsets"),
        ("offsets_train", lambda x: x[None], "without their offsets"),
        ("offsets_train", lambda x: x[1:], "but the offsets are from"),
        ("offsets_train", lambda x: x[[0, 2, 1, 3]], "do not decode"),
        ("offsets_train", lambda x: x[[0, 1, 3]], "2 inputs and 3 targets"),
    ],
)
def test_damaged_jpeg_streams_are_refused(tmp_path, array, change, word):
    stored = encoded()
    stored |= {array: change(stored[array])}
    np.savez(tmp_path / "cifar10.npz", **{k: v for k, v in stored.items() if v is not None})
    load_raises("cifar10", tmp_path / "cifar10.npz", word)


def test_jpeg_streams(tmp_path):
    stored = encoded()
    np.savez(tmp_path / "cifar10.npz", **stored)
    loaded = data.load("cifar10", data_dir=tmp_path)
    assert loaded.train[0].shape == (3, 32, 32, 3)
    np.testing.assert_allclose(loaded.train[0][:, 5, 5, 0] * 255, [0, 100, 255], atol=2)
    assert loaded.test[1].tolist() == [0]
    assert "JPEG" in loaded.note


def test_images_without_loss_are_preferred(tmp_path):
    np.savez(tmp_path / "cifar10.npz", **encoded())
    np.savez(tmp_path / "cifar10_lossless.npz", **encoded("png"), lossy_train=np.array([1]))
    loaded = data.load("cifar10", data_dir=tmp_path)
    np.testing.assert_array_equal(
        loaded.train[0][:, 5, 5, 0], np.float32([0, 100, 255]) / np.float32(255)
    )
    assert loaded.note == "1 of the images are lossy copies"


@pytest.mark.parametrize("mode", ["P", "1", "LA", "I;16"])
def test_an_index_of_a_palette_is_no_shade(tmp_path, mode):
    """A palette of few shades has their numbers as pixels, and so do other modes."""
    stored, stream = encoded("png"), io.BytesIO()
    Image.new(mode, (32, 32)).save(stream, "png")
    one = np.frombuffer(stream.getvalue(), np.uint8)
    whole = np.concatenate([stored["png_train"], one])
    stored |= {"png_train": whole, "y_train": np.arange(4)}
    stored["offsets_train"] = np.append(stored["offsets_train"], len(whole))
    np.savez(tmp_path / "cifar10.npz", **stored)
    words = rf"cifar10\.npz holds encoded images of modes {mode}, RGB; .*image\.convert"
    load_raises("cifar10", tmp_path / "cifar10.npz", words)


def table(name, rows):
    columns, separator = (8, ",") if name == "california_housing" else (11, ";")
    values = RNG.normal(size=(rows, columns)).round(4)
    values = np.column_stack([values, values.sum(axis=1).round(4)])
    lines = [separator.join(f'"c{i}"' for i in range(columns + 1))]
    return "\n".join([*lines, *(separator.join(map(str, row)) for row in values)]), values


@pytest.mark.parametrize(
    ("name", "file", "test_size"),
    [
        ("california_housing", "california_housing.csv", 2064),
        ("wine_quality", "wine_quality_red.csv", 320),
    ],
)
def test_tables(tmp_path, name, file, test_size):
    text, values = table(name, test_size + 50)
    (tmp_path / file).write_text(text)
    loaded = data.load(name, data_dir=tmp_path)
    (x, y), (x_test, y_test) = loaded.train, loaded.test
    assert (len(x), len(x_test)) == (50, test_size)
    assert loaded.classes is None
    assert (x.dtype, y.dtype) == (np.float32, np.float32)
    np.testing.assert_allclose(x.sum(axis=1), y, atol=1e-3)  # rows and targets stay together
    np.testing.assert_allclose(
        np.sort(np.concatenate([y, y_test])), np.sort(values[:, -1]), rtol=1e-5
    )
    assert not np.allclose(y[:20], values[:20, -1])  # shuffled


def test_standardize():
    x = np.array([[1.0, 10.0], [3.0, 30.0]])
    got = data.standardize(x, mean=[2.0, 20.0], scale=[1.0, 10.0])
    assert got.dtype == np.float32
    assert np.array_equal(got, [[-1, -1], [1, 1]])
    with pytest.raises(ValueError, match="every scale must be positive"):
        data.standardize(x, mean=0.0, scale=[1.0, 0.0])


@pytest.mark.parametrize(
    ("mean", "scale"), [(np.nan, 1), ([0, np.inf], 1), (0, np.inf), (0, np.nan)]
)
def test_a_constant_of_standardize_is_finite(mean, scale):
    with pytest.raises(ValueError, match=r"^data\.standardize.*must be .*finite"):
        data.standardize(np.ones((3, 2)), mean, scale)


@pytest.mark.parametrize("dtype", [np.uint8, np.float16, np.float32])
def test_standardize_neither_wraps_nor_overflows(dtype):
    """Also where values and constants have one narrow type."""
    x = np.array([[0, 200]], dtype)
    many = np.array([60_000, 60_000], np.float16) if dtype == np.float16 else np.array([255], dtype)
    got = data.standardize(x, many, np.array([2], dtype))
    np.testing.assert_array_equal(got, (x.astype(float) - many.astype(float)) / 2)


def test_an_unknown_name_is_answered_with_the_known_ones():
    with pytest.raises(ValueError, match=r"'minst'.*digits, mnist, fashion_mnist.*wine_quality"):
        data.load("minst")
    assert data.NAMES[0] == "digits"


@pytest.mark.usefixtures("without_tfds")
@pytest.mark.parametrize("name", data.NAMES[1:])
def test_a_missing_file_is_answered_with_what_to_do(tmp_path, name):
    with pytest.raises(FileNotFoundError, match=r"DPJAX_DATA_DIR") as error:
        data.load(name, data_dir=tmp_path)
    assert str(tmp_path) in str(error.value)
    # Not where TensorFlow Datasets has no such data set.
    installs = "pip install tensorflow-datasets" in str(error.value)
    assert installs == (SOURCES[name].tfds is not None)
    with pytest.raises(FileNotFoundError, match=r"DPJAX_DATA_DIR"):
        data.load(name)


def no_jpegs():
    """Arrays with the right names and bytes that no JPEG decoder accepts."""
    each = {"jpeg": np.zeros(9, np.uint8), "offsets": np.array([0, 9]), "y": np.zeros(1, int)}
    return {f"{name}_{part}": array for name, array in each.items() for part in ("train", "test")}


@pytest.mark.parametrize(
    ("name", "package", "install"),
    [("digits", "sklearn", "scikit-learn"), ("cifar10", "PIL", "pillow")],
)
def test_a_missing_package_is_answered_with_its_name(tmp_path, monkeypatch, name, package, install):
    real = builtins.__import__

    def refuse(module, *rest, **named):
        if module.split(".")[0] == package:
            raise ImportError(module)
        return real(module, *rest, **named)

    np.savez(tmp_path / "cifar10.npz", **no_jpegs())
    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ImportError, match=f"pip install {install}"):
        data.load(name, data_dir=tmp_path)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"x_test": None}, "another data set"),
        ({"x_train": np.full((6, 28, 28), 2.0)}, r"numbers in \[0, 1\]"),
        ({"x_train": np.full((6, 28, 28), np.nan)}, r"numbers in \[0, 1\]"),
        ({"x_train": np.zeros((6, 28, 28), np.int64)}, "expected bytes"),
        ({"x_train": np.zeros((6, 784), np.uint8)}, r"\[examples, height, width, channels\]"),
        ({"x_test": np.zeros((3, 32, 32, 3), np.uint8)}, r"\(32, 32, 3\); expected \(28, 28, 1\)"),
        ({"x_train": np.zeros((5, 28, 28), np.uint8)}, "5 inputs and 6 targets; each needs one"),
        ({"x_test": np.zeros((0, 28, 28), np.uint8), "y_test": np.zeros(0)}, "0 inputs and 0"),
        ({"x_test": np.zeros((0, 28, 28)), "y_test": np.zeros(0)}, "0 inputs and 0"),
        ({"x_train": np.zeros((6, 28, 27), np.uint8)}, r"shape \(28, 27, 1\); expected"),
        ({"y_train": np.array([0, 1, 2, 3, 4, 3.7])}, "a whole number for each example"),
        ({"y_train": np.array([0, 1, 2, 3, 4, np.nan])}, "labels of type float64"),
        *(
            ({"y_train": np.array([0, 1, 2, 3, 4, label])}, "got labels of type int64")
            for label in (2**32 + 3, -(2**63), 2**31, -(2**31) - 1)
        ),
        ({"y_train": np.array(list("abcdef"))}, "a whole number for each example"),
        ({"y_train": np.eye(10)[:6]}, r"shape \(6, 10\).*argmax"),
        ({"y_train": np.array([0, 1, 2, 3, 4, 10])}, "labels from 0 to 10; expected 0 to 9"),
        ({"y_test": np.array([-1, 0, 1])}, "labels from -1 to 1"),
        ({"y_test": np.array([None, 0, 1])}, "not a whole .npz file of plain arrays"),
    ],
)
def test_wrong_contents_are_refused_and_the_file_is_named(tmp_path, change, word):
    saved(tmp_path, **change)
    load_raises("mnist", tmp_path / "mnist.npz", word)


def test_whole_labels_may_be_stored_as_floats(tmp_path):
    stored = saved(tmp_path, y_train=np.arange(6.0))
    loaded = data.load("mnist", data_dir=tmp_path)
    assert loaded.train[1].dtype == np.int32
    assert np.array_equal(loaded.train[1], stored["y_train"])


@pytest.mark.parametrize("kept", [0, 10, 200, 0.5, -1, -400])
@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_a_file_that_was_cut_off_is_refused(tmp_path, save, kept):
    save(tmp_path / "mnist.npz", **arrays())
    whole = (tmp_path / "mnist.npz").read_bytes()
    end = kept if isinstance(kept, int) else int(len(whole) * kept)
    (tmp_path / "mnist.npz").write_bytes(whole[:end])
    with pytest.raises(ValueError, match=r"mnist\.npz is not a whole .* fetch it again"):
        data.load("mnist", data_dir=tmp_path)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_a_flipped_bit_is_reported_with_the_name_of_the_file(tmp_path, save):
    """Also with unknown compression methods, and entries flagged as encrypted."""
    x = np.zeros((2, 28, 28), np.uint8)
    save(tmp_path / "mnist.npz", x_train=x, y_train=[0, 1], x_test=x, y_test=[0, 1])
    whole = (tmp_path / "mnist.npz").read_bytes()
    draw = np.random.default_rng(0)
    places = [whole.index(b"PK\x01\x02") + at for at in (8, 10)]
    places += draw.integers(0, len(whole), 200).tolist()
    refused = []
    for place, bit in zip(places, [0, 6, *draw.integers(0, 8, 200).tolist()], strict=True):
        flipped = bytearray(whole)
        flipped[place] ^= 1 << bit
        (tmp_path / "mnist.npz").write_bytes(bytes(flipped))
        try:
            np.testing.assert_array_equal(data.load("mnist", tmp_path).train[1], [0, 1])
        except ValueError as error:
            refused.append("mnist" in str(error))
    assert len(refused) > 10
    assert all(refused)


def test_a_folder_that_is_not_there_is_refused_and_nothing_is_downloaded(tmp_path, monkeypatch):
    asked = fake_tfds(monkeypatch, {})
    for ask in (data.load, data.stream):
        with pytest.raises(FileNotFoundError, match=r"data_dir is '.*slip'.*no such folder"):
            ask("mnist", tmp_path / "slip")
    monkeypatch.setenv("DPJAX_DATA_DIR", str(tmp_path / "slip"))
    with pytest.raises(FileNotFoundError, match=r"DPJAX_DATA_DIR is '.*slip'"):
        data.load("mnist")
    assert not asked
    assert data.load("digits", tmp_path / "slip").examples == 1437, "they are in no folder"


def test_an_empty_folder_is_the_one_of_the_environment(tmp_path, monkeypatch):
    saved(tmp_path)
    monkeypatch.setenv("DPJAX_DATA_DIR", str(tmp_path))
    assert data.load("mnist", "").train[0].shape == data.load("mnist", tmp_path).train[0].shape


def test_a_single_array_is_no_data_set(tmp_path):
    np.save(tmp_path / "mnist.npy", np.zeros(3))
    (tmp_path / "mnist.npy").rename(tmp_path / "mnist.npz")
    with pytest.raises(ValueError, match="not a whole"):
        data.load("mnist", data_dir=tmp_path)


def test_a_changed_byte_is_noticed(tmp_path):
    saved(tmp_path)
    bad = bytearray((tmp_path / "mnist.npz").read_bytes())
    bad[1000] ^= 1
    (tmp_path / "mnist.npz").write_bytes(bad)
    with pytest.raises(ValueError, match="not a whole"):
        data.load("mnist", data_dir=tmp_path)


def test_what_medmnist_publishes_is_read_as_it_is(tmp_path):
    stored = {}
    for part, count in (("train", 4), ("val", 2), ("test", 3)):
        stored[f"{part}_images"] = RNG.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        stored[f"{part}_labels"] = RNG.integers(0, 11, (count, 1), dtype=np.uint8)
    np.savez(tmp_path / "organamnist.npz", **stored)
    loaded = data.load("organamnist", data_dir=tmp_path)
    assert loaded.train[0].shape == (4, 28, 28, 1)
    assert loaded.train[1].tolist() == stored["train_labels"][:, 0].tolist()
    assert (len(loaded.test[1]), loaded.classes) == (3, 11)


@kills("data/dataset.py", "held = order[size:], order[:size]", "held = order, order[:size]")
def test_a_validation_part_is_split_off_without_a_look_at_it():
    split = (np.arange(20.0).reshape(10, 2), np.arange(10))
    rest, held = data.hold_out(split, 3)
    assert (len(rest[0]), len(held[0])) == (7, 3)
    assert sorted([*rest[1], *held[1]]) == list(range(10))
    assert all(x[0] == 2 * y for part in (rest, held) for x, y in zip(*part, strict=True))
    other, _ = data.hold_out((RNG.normal(size=(10, 2)), np.arange(10)), 3)
    assert other[1].tolist() == rest[1].tolist()
    for size in (0, 10, -1, 0.2, "2"):
        with pytest.raises(ValueError, match=r"^data\.hold_out\(size=.*expected"):
            data.hold_out(split, size)
    for x in (np.zeros((20, 2)), np.zeros((5, 2)), np.zeros(10).tolist()):
        with pytest.raises(ValueError, match=r"^data\.hold_out: every leaf needs a leading axis"):
            data.hold_out((x, np.arange(10)), 2)
    assert len(data.hold_out((np.zeros((10, 2)), np.array(["a"] * 10)), 2.0)[1][1]) == 2


def test_rows_are_held_out_by_place_whatever_their_names_are():

    class Series:
        """As one of pandas: `series[rows]` selects by label, here the place from the end."""

        shape, values = (10,), np.arange(10)

        def __array__(self, dtype=None, copy=None):
            return np.array(self.values, dtype)

        def __getitem__(self, rows):
            return self.values[::-1][rows]

    for x, y in data.hold_out((np.arange(10), Series()), 3):
        np.testing.assert_array_equal(x, y)


WINES = table("wine_quality", 330)[0].encode()


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (WINES.rsplit(b";", 1)[0] + b";nan", "NaN or infinite"),
        (WINES.rsplit(b";", 1)[0] + b";eleven", "not a table of numbers"),
        (table("wine_quality", 320)[0].encode(), "got 320 rows.*cut off"),
        (b"", "got 0 rows"),
        (b"a;b\n", "got 0 rows"),
        (WINES[:-5] + b";", "not a table of numbers"),
        (WINES + b"\n1;2", "not a table of numbers"),
        (b"\xff\xfe" + WINES, "not a table of numbers"),
        (table("california_housing", 330)[0].encode(), r"shape \(8,\); expected \(11,\)"),
        (WINES.split(b"\n", 1)[1], "numbers and no names"),
        (b"\xef\xbb\xbf" + WINES.split(b"\n", 1)[1], "numbers and no names"),
        (WINES.replace(b"\n", b"\n#", 9), "could not convert"),
    ],
)
def test_a_table_that_is_not_whole_or_another_is_refused(tmp_path, content, word):
    (tmp_path / "wine_quality_red.csv").write_bytes(content)
    load_raises("wine_quality", tmp_path / "wine_quality_red.csv", word)


# --- TensorFlow Datasets ----------------------------------------------------------------------


def fake_tfds(monkeypatch, contents, *, prepared=True, random_access=True, tensorflow=False):
    """Puts a module in the place of TFDS that serves `contents`, and records its calls."""
    asked = []

    class Builder:
        def __init__(self, name, *, data_dir, file_format=None):
            self.name, self.data_dir = name.split("/")[0], data_dir
            asked.append((name, data_dir, file_format))

        def is_prepared(self):
            return prepared

        def download_and_prepare(self):
            if contents is None:
                raise AssertionError("no network")

        def as_data_source(self):
            if not random_access:
                raise NotImplementedError
            return contents

        def as_dataset(self):
            assert tensorflow
            return contents

    module = types.SimpleNamespace(builder=Builder, as_numpy=iter)
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", module)
    real, known = importlib.util.find_spec, {"tensorflow_datasets": True, "tensorflow": tensorflow}
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: known[name] or None if name in known else real(name, *rest),
    )
    return asked


def rows(count):
    x = RNG.integers(0, 256, (count, 28, 28, 1), dtype=np.uint8)
    return [{"image": image, "label": i, "id": f"{i}"} for i, image in enumerate(x)]


@pytest.mark.parametrize("prepared", [True, False])
def test_tfds_serves_what_no_file_has_and_downloads_only_if_it_must(
    tmp_path, monkeypatch, prepared
):
    contents = {"train": rows(5), "test": rows(2)}
    asked = fake_tfds(monkeypatch, contents, prepared=prepared)
    loaded = data.load("mnist", data_dir=tmp_path)
    np.testing.assert_allclose(loaded.train[0][3] * 255, contents["train"][3]["image"], rtol=1e-6)
    assert loaded.test[1].tolist() == [0, 1]
    assert loaded.test[1].dtype == np.int32
    attempts = [("mnist", str(tmp_path), None), ("mnist", str(tmp_path), "array_record")]
    assert asked == attempts[: 1 if prepared else 2]


def test_a_file_is_preferred_to_tfds(tmp_path, monkeypatch):
    asked = fake_tfds(monkeypatch, None)
    saved(tmp_path)
    data.load("mnist", data_dir=tmp_path)
    assert not asked


def test_a_format_that_only_tensorflow_reads(monkeypatch):
    contents = {"train": rows(5), "test": rows(2)}
    fake_tfds(monkeypatch, contents, random_access=False, tensorflow=True)
    assert data.load("mnist").train[1].tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="without random access"):
        data.stream("mnist")
    fake_tfds(monkeypatch, contents, random_access=False)
    with pytest.raises(ValueError, match="tfds build mnist --file_format=array_record"):
        data.load("mnist")


def test_a_stream_leaves_the_training_part_where_it_is(monkeypatch):
    class Unread(list):
        def __getitem__(self, index):
            read.append(index)
            return super().__getitem__(index)

    read = []
    contents = {"train": Unread(rows(9)), "test": rows(2)}
    fake_tfds(monkeypatch, contents)
    streamed = data.stream("mnist")
    assert read == [0]  # for the shape
    assert (len(streamed.train), streamed.classes, streamed.note) == (9, 10, "")
    x, y = streamed.train.rows(np.array([8, 2]))
    assert read[0] == 0
    assert sorted(read[1:]) == [2, 8]
    whole = data.load("mnist")
    assert np.array_equal(x, whole.train[0][[8, 2]])
    assert np.array_equal(y, whole.train[1][[8, 2]])
    assert np.array_equal(streamed.test[0], whole.test[0])
    assert (x.dtype, y.dtype, streamed.test[1].dtype) == (np.float32, np.int32, np.int32)


def test_a_stream_checks_what_it_reads(monkeypatch):
    train = rows(6)
    train[3]["label"], train[4]["label"] = 10, -1
    train[5]["image"] = np.zeros((28, 29, 1), np.uint8)
    fake_tfds(monkeypatch, {"train": train, "test": rows(2)})
    stream = data.stream("mnist").train
    stream.rows(np.array([1, 2]))
    for index, word in ((3, "label is 10; expected 0 to 9"), (4, "label is -1"), (5, "28, 29")):
        with pytest.raises((RuntimeError, ValueError), match=rf"example {index} .*{word}"):
            stream.rows(np.array([1, index]))
    fake_tfds(monkeypatch, {"train": rows(2), "test": []})
    with pytest.raises(ValueError, match="empty"):
        data.stream("mnist")
    fake_tfds(monkeypatch, {"train": rows(2), "test": train[5:]})
    with pytest.raises(ValueError, match=r"test part has examples of shape \(28, 29, 1\)"):
        data.stream("mnist")


def test_what_cannot_be_streamed_is_answered_with_what_to_do(monkeypatch):
    fake_tfds(monkeypatch, None)
    with pytest.raises(ValueError, match=r"data\.load\('digits'\)"):
        data.stream("digits")
    with pytest.raises(ValueError, match=r"data\.stream\(name='minst'\).*expected one of digits"):
        data.stream("minst")
    with pytest.raises(ValueError, match=r"table.*data\.load\('wine_quality'\)"):
        data.stream("wine_quality")
    with pytest.raises(FileNotFoundError, match="does not have it"):
        data.stream("pathmnist")


@pytest.mark.usefixtures("without_tfds")
def test_a_stream_by_name_needs_tfds_or_a_file(tmp_path):
    with pytest.raises(ImportError, match=r"stream.*found no .*mnist\.npz.*pip install tensor"):
        data.stream("mnist", data_dir=tmp_path)
    saved(tmp_path)
    streamed, loaded = (ask("mnist", data_dir=tmp_path) for ask in (data.stream, data.load))
    assert isinstance(streamed.train, data.Stream)
    for got, want in zip(streamed.rows(np.array([4, 1])), loaded.train, strict=True):
        assert np.array_equal(got, want[[4, 1]])
        assert got.dtype == want.dtype
    assert np.array_equal(streamed.test[0], loaded.test[0])
    assert streamed.classes == 10


@pytest.mark.parametrize("prepared", [True, False])
def test_a_stream_takes_what_is_on_the_disk_and_downloads_nothing(tmp_path, monkeypatch, prepared):
    asked = fake_tfds(monkeypatch, {"train": rows(9), "test": rows(2)}, prepared=prepared)
    saved(tmp_path)
    assert data.stream("mnist", data_dir=tmp_path).examples == 6
    assert not asked
    (tmp_path / "mnist").mkdir()
    assert data.stream("mnist", data_dir=tmp_path).examples == (9 if prepared else 6)
    assert "array_record" not in [file_format for *_, file_format in asked]


def test_a_stream_reads_the_file_where_tfds_has_a_format_without_random_access(
    tmp_path, monkeypatch
):
    asked = fake_tfds(monkeypatch, None, random_access=False)
    saved(tmp_path)
    (tmp_path / "mnist").mkdir()
    assert data.stream("mnist", data_dir=tmp_path).examples == 6
    assert asked == [("mnist", str(tmp_path), None)]
    (tmp_path / "mnist.npz").unlink()
    with pytest.raises(ValueError, match="without random access"):
        data.stream("mnist", data_dir=tmp_path)


@pytest.mark.parametrize("ask", [data.load, data.stream])
def test_a_download_that_fails_leaves_no_empty_folders(tmp_path, monkeypatch, ask):
    def download(self):
        (tmp_path / "mnist" / "3.0.1.incomplete").mkdir(parents=True)
        (tmp_path / "downloads").mkdir()
        (tmp_path / "downloads" / "half").touch()
        raise OSError("no network")

    fake_tfds(monkeypatch, None, prepared=False)
    monkeypatch.setattr(
        sys.modules["tensorflow_datasets"].builder, "download_and_prepare", download
    )
    (tmp_path / "own").mkdir()
    answer = rf"data.{ask.__name__}.*could neither .* \(OSError: no network\)"
    with pytest.raises(FileNotFoundError, match=answer):
        ask("mnist", data_dir=tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["downloads", "own"]


@pytest.mark.parametrize("ask", [data.load, data.stream])
def test_a_package_that_tfds_misses_is_named(tmp_path, monkeypatch, ask):
    def download(self):
        raise ImportError("No module named 'array_record'")

    fake_tfds(monkeypatch, None, prepared=False)
    monkeypatch.setattr(
        sys.modules["tensorflow_datasets"].builder, "download_and_prepare", download
    )
    answer = rf"data.{ask.__name__}.*'array_record'\).*pip install array_record"
    with pytest.raises(ImportError, match=answer):
        ask("mnist", data_dir=tmp_path)


@pytest.mark.parametrize("columns", [tuple, list])
def test_arrays_of_all_examples_are_no_records(columns):
    x, y = np.ones((6, 3)), np.arange(6)
    with pytest.raises(TypeError, match=r"taken for 2 examples.*lambda i: \(x\[i\], y\[i\]\)"):
        data.Stream(columns((x, y)))
    assert len(data.Stream(range(len(x)), example=lambda i: (x[i], y[i]))) == 6
    assert len(data.Stream(list(x))) == 6


# The columns of the wine table as its file has them.
WINE = """fixed acidity;volatile acidity;citric acid;residual sugar;chlorides;free sulfur dioxide;
total sulfur dioxide;density;pH;sulphates;alcohol""".replace("\n", "")


def test_tfds_tables_keep_the_order_of_the_columns(monkeypatch):
    def row(quality):
        features = {name: np.float64(i) for i, name in enumerate(WINE.split(";"))}
        return {"features": dict(sorted(features.items(), reverse=True)), "quality": quality}

    asked = fake_tfds(monkeypatch, {"train": [row(quality) for quality in range(400)]})
    loaded = data.load("wine_quality")
    assert asked == [("wine_quality/red", None, None)]
    assert loaded.train[0].shape == (80, 11)
    assert loaded.train[0][0].tolist() == list(range(11))
    assert sorted([*loaded.train[1], *loaded.test[1]]) == list(range(400))


def test_tfds_without_the_data_is_answered_with_what_to_do(monkeypatch):
    fake_tfds(monkeypatch, None, prepared=False)
    for ask in (data.load, data.stream):
        with pytest.raises(FileNotFoundError, match=r"mnist.*Without a network.*DPJAX_DATA_DIR"):
            ask("mnist")
    with pytest.raises(FileNotFoundError, match=r"does not have it.*california_housing\.csv"):
        data.load("california_housing")


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_a_real_tfds_data_set_on_the_disk(tmp_path, monkeypatch):
    import tensorflow_datasets as tfds  # some seconds

    stored = rows(4)

    def png(image):
        stream = io.BytesIO()
        Image.fromarray(image[..., 0]).save(stream, "png")
        stream.seek(0)
        return stream

    class Mnist(tfds.core.GeneratorBasedBuilder, skip_registration=True):
        name = "mnist"
        VERSION = tfds.core.Version("3.0.1")

        def _info(self):
            features = {
                "image": tfds.features.Image(shape=(28, 28, 1)),
                "label": tfds.features.ClassLabel(num_classes=10),
            }
            features = tfds.features.FeaturesDict(features)
            return tfds.core.DatasetInfo(builder=self, features=features)

        def _split_generators(self, manager):
            del manager
            return {part: self._generate_examples() for part in ("train", "test")}

        def _generate_examples(self):
            for row in stored:
                yield row["label"], {"image": png(row["image"]), "label": row["label"]}

    Mnist(data_dir=tmp_path, file_format="array_record").download_and_prepare()
    loaded = data.load("mnist", data_dir=tmp_path)
    for image, label in zip(*loaded.train, strict=True):
        np.testing.assert_allclose(image * 255, stored[label]["image"], rtol=1e-6)
    assert sorted(loaded.test[1]) == [0, 1, 2, 3]

    streamed = data.stream("mnist", data_dir=tmp_path)
    order = np.array([2, 0, 2, 3, 1])
    draws = [order, order[:0], order[2:]]
    for (x, y), draw in zip(streamed.train.batches(draws), draws, strict=True):
        assert np.array_equal(x, loaded.train[0][draw])
        assert np.array_equal(y, loaded.train[1][draw])

    # Training on the arrays and training on the stream give equal parameters.
    ends = []
    for dataset in (loaded, streamed):
        (image,), _ = dataset.rows(np.array([3]))
        assert image.shape == (28, 28, 1)
        algorithm = dpjax.dpsgd(
            lambda w, example: jnp.vdot(w, example[0]) * example[1],
            optax.sgd(0.1),
            mechanism_with(dataset.examples, 2, steps=5),
            dataset.train,
        )
        state = algorithm.init(jnp.zeros((28, 28, 1)), jax.random.key(0))
        ends.append(dpjax.fit(algorithm, state, progress=False)[0].params)
    np.testing.assert_allclose(*ends, rtol=1e-5, atol=1e-7)

    def no_network(self):
        raise OSError("no network")

    monkeypatch.setattr(tfds.core.DatasetBuilder, "download_and_prepare", no_network)
    (tmp_path / "empty").mkdir()
    saved(tmp_path / "empty")
    assert data.stream("mnist", data_dir=tmp_path / "empty").examples == 6
    assert os.listdir(tmp_path / "empty") == ["mnist.npz"]
    os.remove(tmp_path / "empty" / "mnist.npz")
    for folder in (tmp_path / "empty", None):
        monkeypatch.setattr("tensorflow_datasets.core.constants.DATA_DIR", str(tmp_path / "none"))
        with pytest.raises(FileNotFoundError, match="could neither find mnist"):
            data.load("mnist", data_dir=folder)
    (part,) = tmp_path.rglob("*test*")
    part.write_bytes(part.read_bytes()[: part.stat().st_size // 2])
    for ask in (data.load, data.stream):
        with pytest.raises(ValueError, match=r"in .*3\.0\.1 cannot be read whole.*prepares the"):
            ask("mnist", data_dir=tmp_path)
    (info,) = tmp_path.rglob("dataset_info.json")
    info.write_text(info.read_text().replace("array_record", "tfrecord"))
    with pytest.raises(ValueError, match=r"prepared in .*3\.0\.1 in a format without random"):
        data.stream("mnist", data_dir=tmp_path)


# --- the real sets ----------------------------------------------------------------------------

real = pytest.mark.skipif(REAL is None, reason="DPJAX_DATA_DIR is not set")


@real
@pytest.mark.parametrize(
    ("name", "mean", "deviation"), [("mnist", 0.1307, 0.3081), ("fashion_mnist", 0.2860, 0.3530)]
)
def test_real_images(name, mean, deviation):
    x, y = data.load(name, data_dir=REAL).train
    assert (x.shape, y.shape) == ((60_000, 28, 28, 1), (60_000,))
    assert x.mean(dtype=np.float64) == pytest.approx(mean, abs=1e-4)
    assert x.std(dtype=np.float64) == pytest.approx(deviation, abs=1e-4)


@real
@pytest.mark.parametrize(
    ("name", "shapes"),
    [("california_housing", ((18_576, 8), (2_064, 8))), ("wine_quality", ((1_279, 11), (320, 11)))],
)
def test_real_tables(name, shapes):
    loaded = data.load(name, data_dir=REAL)
    assert (loaded.train[0].shape, loaded.test[0].shape) == shapes
    assert all(np.isfinite(part).all() for part in (*loaded.train, *loaded.test))


@real
@pytest.mark.slow
def test_real_images_without_loss():
    loaded = data.load("cifar10", data_dir=REAL)
    assert loaded.train[0].shape == (50_000, 32, 32, 3)
    mean = loaded.train[0].mean(axis=(0, 1, 2), dtype=np.float64)
    np.testing.assert_allclose(mean, [0.4914, 0.4822, 0.4465], atol=1e-4)
    assert loaded.note == "111 of the images are lossy copies"


def own(tmp_path, content, name="own.csv"):
    """A file of the user with a text, or with arrays."""
    path = tmp_path / name
    if isinstance(content, str):
        path.write_text(content)
    else:
        np.savez(path.with_suffix(".npz"), **content)
        path = path.with_suffix(".npz")
    return data.load_file(path)


ROWS = "".join(f"{i};{i % 3};{'ab'[i % 2]}\n" for i in range(20))
X, Y = RNG.normal(size=(10, 4)), np.arange(10) % 2
BYTES = RNG.integers(0, 256, (10, 5, 5, 1), np.uint8)


def test_a_data_set_is_shown_in_a_line(tmp_path):
    found = own(tmp_path, "width;length;kind\n" + ROWS)
    assert repr(found) == (
        "Dataset(name='own', train=(float32[16, 2], int32[16]), test=(float32[4, 2], int32[4]), "
        "classes=2, class_names=('a', 'b'))"
    )
    streamed = found._replace(train=data.Stream(range(5)), class_names=())
    assert "train=a Stream of 5 examples" in repr(streamed)


class TestOwnFiles:
    def test_a_table_takes_its_label_by_name_or_from_the_last_column(self, tmp_path):
        last = own(tmp_path, "width;length;kind\n" + ROWS)
        assert own(tmp_path, "width;label;kind\n" + ROWS.translate({97: 49, 98: 48})).classes == 3
        assert last.classes == 2
        assert last.train[0].shape == (16, 2)
        assert last.train[0].dtype == np.float32
        x, y = (np.concatenate(parts) for parts in zip(last.train, last.test, strict=True))
        assert np.array_equal(x[:, 0] % 2, y), "words are numbered in alphabetical order"

    def test_the_label_may_be_any_column_and_words_are_kept(self, tmp_path):
        last = own(tmp_path, "width;length;kind\n" + ROWS)
        assert (last.class_names, last.columns) == (("a", "b"), ("width", "length"))
        path = tmp_path / "other.csv"
        path.write_text("width;kind;length\n" + ROWS.translate({97: 49, 98: 48}))
        found = data.load_file(path, label="kind")
        assert (found.classes, found.class_names, found.columns) == (3, (), ("width", "length"))
        with pytest.raises(
            ValueError, match=r"label='knid'\): the columns are width, kind, length"
        ):
            data.load_file(path, label="knid")
        np.savez(tmp_path / "own.npz", x=X, y=Y)
        with pytest.raises(ValueError, match="the labels of"):
            data.load_file(tmp_path / "own.npz", label="y")

    def test_words_are_read_whole_and_also_from_bytes(self, tmp_path):
        found = own(tmp_path, "a,b\n" + "1,x\u2028y\n2,z\n" * 9)
        assert found.class_names == ("x\u2028y", "z"), "a separator of lines within a word"
        found = own(tmp_path, {"x": X, "y": np.where(Y, b"dog", b"cat")})
        assert found.class_names == ("cat", "dog")
        found = own(tmp_path, {"x": X, "y": np.where(Y, b"1", b"0")})
        assert (found.class_names, found.classes) == ((), 2)

    def test_a_gap_in_the_numbers_of_labels_is_logged(self, tmp_path, caplog):
        found = own(tmp_path, "a,b\n" + "1,1\n2,5\n" * 9)
        assert found.classes == 6
        assert "labels are 2 different numbers from 1 to 5" in caplog.text
        caplog.clear()
        own(tmp_path, "a,b\n" + "1,0\n2,1\n" * 9)
        assert not caplog.text

    @pytest.mark.parametrize(
        ("header", "label"),
        [
            ("Label,a,smoker", "Label"),
            ("a,LABEL,smoker", "LABEL"),
            ("label,Label,a", "label"),
            ("labels,a,smoker", "smoker"),
        ],
    )
    def test_a_label_is_found_in_any_case(self, tmp_path, header, label):
        found = own(tmp_path, header + "\n" + "0,1,0\n1,0,1\n" * 6)
        assert found.columns == tuple(name for name in header.split(",") if name != label)
        assert found.note == f"(the label is column {label!r}; a fifth held out for the test)"

    def test_parts_are_taken_as_they_are(self, tmp_path):
        images = RNG.integers(0, 256, (6, 5, 5), np.uint8)
        parts = {"x_train": images[:4], "y_train": [[0], [1], [2], [0]]}
        found = own(tmp_path, {**parts, "x_test": images[4:], "y_test": [1.0, 2.0]})
        assert np.array_equal(found.train[0], images[:4, ..., None].astype(np.float32) / 255)
        assert found.test[1].tolist() == [1, 2]
        assert (found.classes, found.note) == (3, "")
        assert found.train[1].dtype == np.int32

    def test_without_a_test_part_a_fifth_is_held_out(self, tmp_path):
        found = own(tmp_path, {"x": X, "y": Y})
        assert (len(found.train[1]), len(found.test[1])) == (8, 2)
        assert "held out" in found.note
        tokens = own(tmp_path, {"x": np.arange(20).reshape(10, 2), "y": Y})
        assert tokens.train[0].dtype == np.int32
        path = tmp_path / "own.npz"
        assert data.load_file(path, classes=5).classes == 5

    @pytest.mark.parametrize(
        ("content", "words"),
        [
            ("1,2\n3,4\n", "the names of the columns"),
            ("a\n1\n", "at least two columns"),
            ("a,b\n1,2,3\n", "line 2 has 3 columns"),
            ("label,a,label\n0,1,0\n1,2,1\n", "2 columns are named 'label'; expected one"),
            ('a,label\n1,"cat\n2,dog\n3,cat\n', "Usually a quotation mark is not closed"),
            ("a,b,label\n1,x,0\n2,3,1\n", "column 'b' has 'x' in its row 1"),
            ("a,b,label\n1,,0\n2,3,1\n", "column 'b' has '' in its row 1"),
            ("a,b\n", "0 examples in one part"),
            ("a,b\n" + "1,0.5\n" * 9, r"column 'b': labels are float64 such as 0\.5\. Expected"),
            ("a,b\n" + "".join(f"1,{i}\n" for i in range(9)), "column 'b': .*far fewer classes"),
            ("a,b\n" + "1,-1\n" * 9, "labels from -1 to -1"),
            ("a,b\n" + "1,0\n2,1\n" * 9 + "nan,1\n", "column 'a' has 'nan' in its row 19"),
            ("a,b\n" + "1,0\n2,1\n" * 9 + "3,\n", "column 'b': label 19 of 19 is '', which stands"),
            ("a,b\n" + "1,0\n2,1\n" * 9 + "3, N/A\n", "label 19 of 19 is 'N/A'"),
            ("a,b\n" + "1,x\n2,?\n" * 9, r"label 2 of 18 is '\?', .* write another word for it"),
            ("a,b\n" + "1,0\n2,x\n" * 9, "such as '0', and others words, such as 'x'"),
            ("a,b\n" + "1,0\n2,1_000\n" * 9, "others words, such as '1_000'"),
            ("a,b\n1_000,0\n2,1\n", "column 'a' has '1_000' in its row 1"),
            (",a,b\n0,1,0\n1,2,1\n", r"column 1 has no name; .*df\.to_csv\(path, index=False\)"),
            ("a,b\n\n1,0\n\n1\n", "line 5 has 1 columns"),
            ({"x": X, "y": np.where(Y, np.nan, 0)}, "label 2 of 10 is 'nan'"),
            ({"x": X, "y": np.where(Y, "", "a")}, "label 2 of 10 is ''"),
            ({"x": X, "y": np.full(10, b"\xff")}, "expected labels in UTF-8"),
            (
                {"x_train": X, "y_train": Y, "x_test": X, "y_test": np.where(Y, "a", "b")},
                "such as '0', and others words, such as 'b'",
            ),
            ({"x": X, "y": Y, "x_test": X, "y_test": Y}, "and also x_test, y_test, which would be"),
            (
                {"x_train": BYTES, "y_train": Y, "x_test": BYTES.astype(int), "y_test": Y},
                "the train part are of type uint8, inputs of the test part int64. Bytes of images",
            ),
            (
                {"x_train": BYTES / 255, "y_train": Y, "x_test": BYTES, "y_test": Y},
                "the train part are of type float64, inputs of the test part uint8",
            ),
            ("a,b\n" + "1,1\n" * 9, "column 'b': all 9 labels are 1. Expected at least 2"),
            ("a,b\n" + "1,yes\n" * 9, "all 9 labels are 'yes'"),
            ({"x": np.where(np.eye(10, 4), np.nan, 0), "y": Y}, r"first at index \[0, 0\]"),
            ({"images": X, "y": Y}, "the file holds images, y"),
            ({"x": X, "y": np.eye(10)}, "argmax"),
            ({"x": X, "y": Y[:9]}, "one label for each"),
            ({"x": X[:, 0], "y": Y}, r"x\[:, None\]"),
            ({"x": X.astype(str), "y": Y}, "inputs are of type <U"),
            ({"x": np.full((10, 2), 2**40), "y": Y}, "more than 32 bits"),
            ({"x_train": X, "y_train": Y, "x_test": X[:, :3], "y_test": Y}, "expected one shape"),
            ({"x": X, "y": np.array([None] * 10)}, "not a whole .npz"),
            ({"x": np.full((10, 2), 1e300), "y": Y}, r"beyond float32.* \[0, 0\]"),
            ({"x": X[:, :0], "y": Y}, r"inputs have shape \(10, 0\)"),
            ("a,b\n" + "1," + "0" * 140_000 + "\n", "field larger than"),
        ],
        ids=lambda value: value[:20] if isinstance(value, str) else "",
    )
    def test_what_is_no_data_set_is_answered(self, tmp_path, content, words):
        with pytest.raises(ValueError, match=words):
            own(tmp_path, content)

    def test_a_file_is_named_by_its_ending_and_exists(self, tmp_path):
        with pytest.raises(ValueError, match=r"ends in \.npz or \.csv"):
            data.load_file(tmp_path / "own.parquet")
        with pytest.raises(FileNotFoundError, match="there is no such file"):
            data.load_file(tmp_path / "own.csv")
        (tmp_path / "own.csv").write_bytes(b"a,b\n\xff,1\n")
        with pytest.raises(ValueError, match="UTF-8"):
            data.load_file(tmp_path / "own.csv")
        np.savez(tmp_path / "own.npz", x=X, y=Y)
        with pytest.raises(ValueError, match="0 to 0, and far"):
            data.load_file(tmp_path / "own.npz", classes=1)
        assert type(data.load_file(tmp_path / "own.npz", classes=2.0).classes) is int
        for classes in ("2", 2.5, 0):
            with pytest.raises(
                ValueError, match=r"^data\.load_file\(classes=.*outputs of the model"
            ):
                data.load_file(tmp_path / "own.npz", classes=classes)
