# SPDX-License-Identifier: Apache-2.0
"""Data: every format, from small files made here; the real sets where a folder has them."""

import importlib
import io
import os
import sys
import types

import jax
import numpy as np
import pytest
from mutation import kills
from PIL import Image

from dpjax import data
from dpjax.types import HeldOut

RNG = np.random.default_rng(0)
REAL = os.environ.get("DPJAX_DATA_DIR")


@pytest.fixture(autouse=True)
def _nothing_but_what_a_test_gives(monkeypatch):
    monkeypatch.delenv("DPJAX_DATA_DIR", raising=False)


@pytest.fixture
def without_tfds(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)


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


def test_digits_are_each_in_one_part_only():
    from sklearn.datasets import load_digits

    digits = data.load("digits")
    (x, y), (x_test, y_test) = digits.train, digits.test
    assert (x.shape, x_test.shape) == ((1437, 8, 8, 1), (360, 8, 8, 1))
    assert (x.dtype, y.dtype, x.min(), x.max()) == (np.float32, np.int32, 0.0, 1.0)
    assert set(y) == set(y_test) == set(range(digits.classes))
    assert np.array_equal(x, data.load("digits").train[0])
    together = np.concatenate([x, x_test]).reshape(-1, 64) * 16
    assert sorted(map(bytes, together)) == sorted(map(bytes, load_digits().data.astype(np.float32)))


@pytest.mark.parametrize(
    ("dtype", "shape"), [(np.uint8, (28, 28, 1)), (np.float64, (28, 28))], ids=["bytes", "floats"]
)
def test_npz(tmp_path, dtype, shape):
    stored = arrays(dtype, shape)
    np.savez(tmp_path / "mnist.npz", **stored)
    loaded = data.load("mnist", data_dir=tmp_path)
    x, y = loaded.train
    scale = 255 if dtype == np.uint8 else 1
    np.testing.assert_allclose(x[..., 0], stored["x_train"].reshape(6, 28, 28) / scale, rtol=1e-6)
    assert np.array_equal(y, stored["y_train"])
    assert loaded.test[0].shape == (3, 28, 28, 1)
    assert (x.dtype, y.dtype) == (np.float32, np.int32)
    assert (loaded.name, loaded.classes, loaded.note) == ("mnist", 10, "")


def test_the_folder_may_come_from_the_environment_and_exists(tmp_path, monkeypatch):
    saved(tmp_path)
    monkeypatch.setenv("DPJAX_DATA_DIR", str(tmp_path))
    assert data.load("mnist", "").train[0].shape == (6, 28, 28, 1)
    for ask in (data.load, data.stream):
        with pytest.raises(FileNotFoundError, match=r"data_dir is '.*slip'; there is no such"):
            ask("mnist", tmp_path / "slip")
    monkeypatch.setenv("DPJAX_DATA_DIR", str(tmp_path / "slip"))
    with pytest.raises(FileNotFoundError, match=r"DPJAX_DATA_DIR is '.*slip'"):
        data.load("mnist")
    assert data.load("digits").examples == 1437, "they are in no folder"


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


def test_encoded_images_and_those_without_loss_are_preferred(tmp_path):
    stored = encoded()
    np.savez(tmp_path / "cifar10.npz", **stored)
    loaded = data.load("cifar10", data_dir=tmp_path)
    np.testing.assert_allclose(loaded.train[0][:, 5, 5, 0] * 255, [0, 100, 255], atol=2)
    assert (loaded.test[1].tolist(), loaded.note) == ([0], "lossy: decoded from JPEG copies")
    np.savez(tmp_path / "cifar10_lossless.npz", **encoded("png"), lossy_train=np.array([1]))
    loaded = data.load("cifar10", data_dir=tmp_path)
    shades = np.float32([0, 100, 255]) / np.float32(255)
    np.testing.assert_array_equal(loaded.train[0][:, 5, 5, 0], shades)
    assert loaded.note == "1 of the images are lossy copies"
    stored["jpeg_train"] = stored["jpeg_train"][:-300]
    os.remove(tmp_path / "cifar10_lossless.npz")
    np.savez(tmp_path / "cifar10.npz", **stored)
    with pytest.raises(ValueError, match=r"cifar10\.npz holds encoded images that do not decode"):
        data.load("cifar10", data_dir=tmp_path)


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
    assert (loaded.classes, x.dtype, y.dtype) == (None, np.float32, np.float32)
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
    for mean, scale in ((0.0, [1.0, 0.0]), (np.nan, 1), (0, np.inf)):
        with pytest.raises(ValueError, match="expected finite numbers, and positive scales"):
            data.standardize(x, mean, scale)
    for dtype in (np.uint8, np.float16):  # which would wrap around, or overflow
        narrow = np.array([[0, 200]], dtype)
        many = np.array([60_000 if dtype == np.float16 else 255], dtype)
        got = data.standardize(narrow, many, np.array([2], dtype))
        np.testing.assert_array_equal(got, (narrow.astype(float) - many.astype(float)) / 2)


@pytest.mark.usefixtures("without_tfds")
def test_a_name_without_data_is_answered_with_what_to_do(tmp_path):
    with pytest.raises(ValueError, match=r"'minst'.*digits, mnist, fashion_mnist.*wine_quality"):
        data.load("minst")
    for name, ask in (("mnist", data.load), ("mnist", data.stream), ("pathmnist", data.load)):
        with pytest.raises(FileNotFoundError, match=rf"{tmp_path}/{name}.npz.*DPJAX_DATA_DIR"):
            ask(name, data_dir=tmp_path)
    for name in ("digits", "wine_quality"):
        with pytest.raises(ValueError, match=rf"fits into memory. Use data\.load\('{name}'\)"):
            data.stream(name)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"x_test": None}, "expected x_train, y_train, x_test, y_test"),
        ({"x_train": np.full((6, 28, 28), 2.0)}, r"numbers in \[0, 1\]"),
        ({"x_train": np.zeros((6, 784), np.uint8)}, r"\[examples, height, width, channels\]"),
        ({"x_test": np.zeros((3, 32, 32, 3), np.uint8)}, r"\(32, 32, 3\); expected \(28, 28, 1\)"),
        ({"x_train": np.zeros((5, 28, 28), np.uint8)}, "5 inputs and 6 targets"),
        ({"y_train": np.array([0, 1, 2, 3, 4, 3.7])}, "a whole number for each example"),
        ({"y_train": np.eye(10)[:6]}, r"\[6, 10\].*argmax"),
        ({"y_train": np.array([0, 1, 2, 3, 4, 10])}, "labels from 0 to 10; expected 0 to 9"),
        ({"y_test": np.array([None, 0, 1])}, "not a whole .npz file of plain arrays"),
    ],
)
def test_wrong_contents_are_refused_and_the_file_is_named(tmp_path, change, word):
    saved(tmp_path, **change)
    with pytest.raises(ValueError, match=rf"mnist\.npz.*{word}"):
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


@kills("data/dataset.py", "rest = order[size:]", "rest = order")
def test_a_validation_part_is_split_off_without_a_look_at_it():
    split = (np.arange(20.0).reshape(10, 2), np.arange(10))
    rest, held = data.hold_out(split, 3)
    assert (len(rest[0]), len(held[0])) == (7, 3)
    assert sorted([*rest[1], *held[1]]) == list(range(10))
    assert all(x[0] == 2 * y for part in (rest, held) for x, y in zip(*part, strict=True))
    other, _ = data.hold_out((RNG.normal(size=(10, 2)), np.arange(10)), 3)
    assert other[1].tolist() == rest[1].tolist()
    for size in (0, 10):
        with pytest.raises(ValueError, match=r"^data\.hold_out\(size=.*expected"):
            data.hold_out(split, size)
    with pytest.raises(ValueError, match=r"^data\.hold_out: every leaf needs a leading axis"):
        data.hold_out((np.zeros((20, 2)), np.arange(10)), 2)


# --- TensorFlow Datasets ----------------------------------------------------------------------


def fake_tfds(monkeypatch, contents, *, prepared=True, random_access=True):
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

    module = types.SimpleNamespace(builder=Builder)
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", module)
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
    assert (loaded.test[1].tolist(), loaded.test[1].dtype) == ([0, 1], np.int32)
    attempts = [("mnist", str(tmp_path), None), ("mnist", str(tmp_path), "array_record")]
    assert asked == attempts[: 1 if prepared else 2]


def test_a_file_is_preferred_to_tfds(tmp_path, monkeypatch):
    asked = fake_tfds(monkeypatch, None)
    stored = saved(tmp_path)
    streamed, loaded = (ask("mnist", data_dir=tmp_path) for ask in (data.stream, data.load))
    assert not asked
    assert isinstance(streamed.train, data.Stream)
    for got, want in zip(streamed.rows(np.array([4, 1])), loaded.train, strict=True):
        assert np.array_equal(got, want[[4, 1]])
        assert got.dtype == want.dtype
    assert np.array_equal(streamed.test[1], stored["y_test"])


def test_a_stream_leaves_the_training_part_where_it_is(monkeypatch):
    class Unread(list):
        def __getitem__(self, index):
            read.append(index)
            return super().__getitem__(index)

    read = []
    fake_tfds(monkeypatch, {"train": Unread(rows(9)), "test": rows(2)})
    streamed = data.stream("mnist")
    assert read == [0]  # for the shape
    assert (len(streamed.train), streamed.classes, streamed.note) == (9, 10, "")
    x, y = streamed.train.rows(np.array([8, 2]))
    assert sorted(read) == [0, 2, 8]
    loaded = data.load("mnist")
    assert np.array_equal(x, loaded.train[0][[8, 2]])
    assert np.array_equal(y, loaded.train[1][[8, 2]])
    assert np.array_equal(streamed.test[0], loaded.test[0])


def test_a_stream_checks_what_it_reads(monkeypatch):
    train = rows(6)
    train[3]["label"], train[4]["label"] = 10, -1
    train[5]["image"] = np.zeros((28, 29, 1), np.uint8)
    fake_tfds(monkeypatch, {"train": train, "test": rows(2)})
    stream = data.stream("mnist").train
    for index, word in ((3, "label is 10; expected 0 to 9"), (4, "label is -1"), (5, "28, 29")):
        with pytest.raises((RuntimeError, ValueError), match=rf"example {index} .*{word}"):
            stream.rows(np.array([1, index]))
    fake_tfds(monkeypatch, {"train": rows(2), "test": train[5:]})
    with pytest.raises(ValueError, match=r"test part has examples of shape \(28, 29, 1\)"):
        data.stream("mnist")


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


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_a_real_tfds_data_set_on_the_disk(tmp_path):
    tfds = importlib.import_module("tensorflow_datasets")  # some seconds
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
    order = np.array([2, 0, 2, 3, 1])
    draws = [order, order[:0], order[2:]]
    streamed = data.stream("mnist", data_dir=tmp_path).train
    for (x, y), draw in zip(streamed.batches(draws), draws, strict=True):
        assert np.array_equal(x, loaded.train[0][draw])
        assert np.array_equal(y, loaded.train[1][draw])


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


# --- files of the user ------------------------------------------------------------------------


def own(tmp_path, content, **options):
    """A file of the user with a text, or with arrays."""
    if isinstance(content, str):
        path = tmp_path / "own.csv"
        path.write_text(content)
    else:
        path = tmp_path / "own.npz"
        np.savez(path, **content)
    return data.load_file(path, **options)


ROWS = "".join(f"{i};{i % 3};{'ab'[i % 2]}\n" for i in range(20))
X, Y = RNG.normal(size=(10, 4)), np.arange(10) % 2


def test_a_data_set_is_shown_in_a_line(tmp_path):
    found = own(tmp_path, "width;length;kind\n" + ROWS)
    assert repr(found) == (
        "Dataset(name='own', train=(float32[16, 2], int32[16]), test=(float32[4, 2], int32[4]), "
        "classes=2, class_names=('a', 'b'))"
    )
    streamed = found._replace(train=data.Stream(range(5)), class_names=())
    assert "train=a Stream of 5 examples" in repr(streamed)


class TestOwnFiles:
    def test_words_are_numbered_in_alphabetical_order(self, tmp_path):
        found = own(tmp_path, "width;length;kind\n" + ROWS)
        assert (found.classes, found.class_names, found.columns) == (
            2,
            ("a", "b"),
            ("width", "length"),
        )
        x, y = (np.concatenate(parts) for parts in zip(found.train, found.test, strict=True))
        assert (x.shape, x.dtype, y.dtype) == ((20, 2), np.float32, np.int32)
        assert np.array_equal(x[:, 0] % 2, y)
        found = own(tmp_path, "a,b\n" + "1,x\u2028y\n2,z\n" * 9)
        assert found.class_names == ("x\u2028y", "z"), "a separator of lines within a word"
        found = own(tmp_path, {"x": X, "y": np.where(Y, b"dog", b"cat")})
        assert found.class_names == ("cat", "dog")

    @pytest.mark.parametrize(
        ("header", "label"),
        [("a,LABEL,b", "LABEL"), ("label,Label,a", "label"), ("labels,a,smoker", "smoker")],
    )
    def test_the_label_is_the_column_of_that_name_or_the_last(self, tmp_path, header, label):
        found = own(tmp_path, header + "\n" + "0,1,0\n1,0,1\n" * 6)
        assert found.columns == tuple(name for name in header.split(",") if name != label)
        assert (
            found.note == f"(the label is column {label!r}; 2 of 12 rows are held out for the test)"
        )
        found = own(tmp_path, header + "\n" + "0,1,0\n1,0,1\n" * 6, label=header.split(",")[0])
        assert found.columns == tuple(header.split(",")[1:])

    def test_parts_are_taken_as_they_are(self, tmp_path):
        images = RNG.integers(0, 256, (6, 5, 5), np.uint8)
        parts = {"x_train": images[:4], "y_train": [[0], [1], [2], [0]]}
        found = own(tmp_path, {**parts, "x_test": images[4:], "y_test": [1.0, 2.0]})
        assert np.array_equal(found.train[0], images[:4, ..., None].astype(np.float32) / 255)
        assert found.test[1].tolist() == [1, 2]
        assert (found.classes, found.note, found.train[1].dtype) == (3, "", np.int32)
        assert found.held_out == HeldOut(units=2)

    def test_without_a_test_part_a_fifth_is_held_out(self, tmp_path):
        found = own(tmp_path, {"x": np.arange(20).reshape(10, 2), "y": Y}, classes=5)
        assert (len(found.train[1]), len(found.test[1]), found.classes) == (8, 2, 5)
        assert found.train[0].dtype == np.int32
        assert found.held_out == HeldOut(units=2)
        rows = np.concatenate([found.train[0], found.test[0]])
        assert sorted(rows[:, 0].tolist()) == list(range(0, 20, 2)), "each row is in one part"

    def test_a_fraction_is_held_out_or_the_test_file_is_public(self, tmp_path):
        content = "a,label\n" + "0,no\n1,yes\n" * 10
        for holdout, held in ((0, 0), (0.01, 1), (0.35, 7)):
            found = own(tmp_path, content, holdout=holdout)
            assert (len(found.train[1]), len(found.test[1])) == (20 - held, held)
            assert found.held_out == HeldOut(units=held)
        public = tmp_path / "public.csv"
        public.write_text("a,label\n1,maybe\n1,yes\n")
        found = own(tmp_path, content, test=public)
        assert (len(found.train[1]), found.test[0].tolist()) == (20, [[1], [1]])
        assert found.class_names == ("maybe", "no", "yes")
        assert found.test[1].tolist() == [0, 2]
        assert found.held_out == HeldOut(public=True)
        with pytest.raises(ValueError, match="expected a test part in the file, or test=, or hold"):
            own(tmp_path, content, test=public, holdout=0.5)
        with pytest.raises(ValueError, match="holdout=1; expected a fraction from 0 to below 1"):
            own(tmp_path, content, holdout=1)
        public.write_text("b,label\n1,no\n1,yes\n")
        with pytest.raises(ValueError, match=r"public\.csv.*the columns of the private file"):
            own(tmp_path, content, test=public)

    @pytest.mark.parametrize(
        ("content", "words"),
        [
            ("1,2\n3,4\n", "expected the names of at least two columns"),
            (",a,b\n0,1,0\n1,2,1\n", r"df\.to_csv\(path, index=False\)"),
            ("a,b\n1,2,3\n", "row 1 has 3 of 2 columns"),
            ('a,label\n1,"cat\n2,dog\n3,cat\n', "unexpected end of data"),
            ("a,b,label\n1,x,0\n2,3,1\n", "finite numbers in every column; column 'b': .*'x'"),
            ("a,b\n" + "1,0\n2,1\n" * 9 + "nan,1\n", "every column; column 'a': NaN"),
            ("a,b\n" + "1,0.5\n" * 9, r"got labels float64\[9\]; expected a whole number"),
            ("a,b\n" + "".join(f"1,{i}\n" for i in range(9)), "far fewer classes"),
            ("a,b\n" + "1,-1\n" * 9, "labels from -1 to -1"),
            ("a,b\n" + "1,0\n2,1\n" * 9 + "3,\n", "label 19 of 19 is missing"),
            ({"x": X, "y": np.where(Y, np.nan, 0)}, "got labels float64"),
            ({"x": np.where(np.eye(10, 4), np.nan, 0), "y": Y}, "inputs are NaN, infinite"),
            ({"images": X, "y": Y}, r"the file holds \['images', 'y'\]"),
            ({"x": X, "y": np.eye(10)}, "argmax"),
            ({"x": X, "y": Y[:9]}, "one label for each"),
            ({"x": np.full((10, 2), 2**40), "y": Y}, "numbers that fit into int32"),
            ({"x_train": X, "y_train": Y, "x_test": X[:, :3], "y_test": Y}, "expected one"),
        ],
        ids=lambda value: value[:20] if isinstance(value, str) else "",
    )
    def test_what_is_no_data_set_is_answered(self, tmp_path, content, words):
        with pytest.raises(ValueError, match=words):
            own(tmp_path, content)

    @pytest.mark.parametrize("x64", [False, True])
    @pytest.mark.parametrize("dtype", ["int64", "uint32", "uint64"])
    def test_whole_numbers_beyond_int32_do_not_wrap(self, tmp_path, dtype, x64):
        x = np.full((10, 2), 2**32 - 1, dtype)
        with jax.enable_x64(x64), pytest.raises(ValueError, match="numbers that fit into int32"):
            own(tmp_path, {"x": x, "y": Y})
        # The largest number that fits stays as it is.
        with jax.enable_x64(x64):
            loaded = own(tmp_path, {"x": x >> 1, "y": Y})
        assert (loaded.train[0] == 2**31 - 1).all()

    def test_arguments_and_encoding_are_checked(self, tmp_path):
        (tmp_path / "own.xlsx").touch()
        with pytest.raises(ValueError, match=r"expected a \.csv or \.parquet, or an \.npz without"):
            data.load_file(tmp_path / "own.xlsx")
        with pytest.raises(FileNotFoundError, match=r"own\.csv'\): there is no such file"):
            data.load_file(tmp_path / "own.csv")
        (tmp_path / "own.csv").write_bytes(b"a,b\n\xff,1\n")
        with pytest.raises(ValueError, match=r"own\.csv.*UTF-8"):
            data.load_file(tmp_path / "own.csv")
        with pytest.raises(ValueError, match=r"label='knid'; expected one of width, length, kind"):
            own(tmp_path, "width;length;kind\n" + ROWS, label="knid")
        with pytest.raises(ValueError, match="expected 0 to 0, and far"):
            own(tmp_path, {"x": X, "y": Y}, classes=1)
