# SPDX-License-Identifier: Apache-2.0
"""Tables with declared columns: what each cell becomes, and ten kinds of fault."""

import copy
import csv
import datetime
import importlib
import json
import os
import pathlib
import pickle
import random
import re
import subprocess
import sys
import tomllib
import types

import jax
import numpy as np
import pytest
from absl import app, logging
from mutation import kills

import dpjax
from dpjax import data, training
from dpjax.cli import columns as drafts
from dpjax.cli import plan, predict
from dpjax.cli.audit import audit_command, rebuilt_run
from dpjax.cli.flag_sets import audit as audit_flags
from dpjax.cli.flag_sets import plan as plan_flags
from dpjax.cli.flag_sets import sweep as sweep_flags
from dpjax.cli.flag_sets.train import FLAGS
from dpjax.cli.sweep import command as search
from dpjax.cli.train import build, command
from dpjax.types import HeldOut

ROOT = pathlib.Path(__file__).parent.parent
DECLARED = """
age = {kind = "number", low = 0, high = 100, fill = 50}
weight = {kind = "number", low = 20.0, high = 220}
sex = {kind = "category", values = ["F", "M"]}
ward = {kind = "category", values = [1, 2], other = true}
seen = {kind = "date", since = 2010-01-01, days = 1000}
note = {kind = "ignore", values = "?"}
died = {kind = "label", values = ["no", "yes"]}
"""
COLUMNS = tomllib.loads(DECLARED)
HEADER = ["patient", *COLUMNS]


def rows_of(draw, count=20):
    """Cells of a table without a fault; each patient has two rows."""

    def cells(row):
        yield from (f"p{row // 2}", f"{draw.randint(0, 100)}", f"{draw.uniform(20, 220):.1f}")
        yield from (draw.choice("FM"), draw.choice("12"))
        yield f"2011-{draw.randint(1, 12):02}-{draw.randint(1, 28):02}"
        yield from (draw.choice(["", "a, b", "c"]), draw.choice(["no", "yes"]))

    return [list(cells(row)) for row in range(count)]


def written(path, rows, header=HEADER):
    quoted = [[f'"{cell}"' if "," in cell else cell for cell in row] for row in (header, *rows)]
    path.write_text("".join(",".join(row) + "\n" for row in quoted))
    return path


def frame_of(rows):
    return {name: [row[place] for row in rows] for place, name in enumerate(HEADER)}


class Frame(dict):
    """As frames of pandas and Polars: names in `columns`; the latter iterates over columns."""

    columns = HEADER

    def __iter__(self):
        return iter(self.values())


def both(part):
    """Inputs and labels of a data set's two parts together."""
    return [np.concatenate(pair) for pair in zip(part.train, part.test, strict=True)]


# --- what a cell becomes ---


@kills("data/declared.py", "2 * (value - low)", "(value - low)")
@kills("data/declared.py", "return (*filling, 1.0)", "return (*filling, 0.0)")
def test_each_kind_becomes_its_numbers():
    frame = {
        "patient": [7, 8, 9],
        "age": [25, None, 130],
        "weight": ["20", 120.0, "1e9"],
        "sex": ["M", " F ", "M"],
        "ward": ["1.0", "3", float("nan")],
        "seen": ["2010-01-01", datetime.date(2011, 5, 16), datetime.datetime(2031, 1, 1, 12)],
        "note": [object(), None, 3],
        "died": ["yes", "no", "yes"],
    }
    found = data.table(frame, COLUMNS, "patient")
    assert found.columns == (
        *("age", "age (missing)", "weight", "sex=F", "sex=M"),
        *("ward=1", "ward=2", "ward=(other)", "seen"),
    )
    want = {
        (-0.5, 0, -1, 0, 1, 1, 0, 0, -1): 1,
        (0, 1, 0, 1, 0, 0, 0, 1, 0): 0,
        (1, 0, 1, 0, 1, 0, 0, 1, 1): 1,
    }
    assert {tuple(x): y for x, y in zip(*both(found), strict=True)} == want
    assert (found.classes, found.class_names, found.target_range) == (2, ("no", "yes"), None)


def test_a_listed_word_is_no_gap_and_a_date_may_have_a_format():
    columns = {
        "stage": {"kind": "category", "values": ["none", "late"], "fill": "late"},
        "seen": {"kind": "date", "since": "2010-01-01", "days": 2, "format": "%d.%m.%Y"},
        "cost": {"kind": "target", "low": 0, "high": 8},
    }
    frame = {"stage": ["none", "NA"], "seen": ["02.01.2010", "01.01.2010"], "cost": [2, "8"]}
    found = data.table(frame, columns)
    x, y = both(found)
    assert {tuple(row): target for row, target in zip(x, y, strict=True)} == {
        (1, 0, 0, 0): -0.5,
        (0, 1, 1, -1): 1,
    }
    assert (found.classes, found.class_names, found.target_range) == (None, (), (0, 8))
    assert found.train[1].dtype == np.float32


@kills(
    "data/encoding.py",
    "np.array(cells[name], np.float32)",
    "np.array(cells[name]) - np.mean(cells[name])",
)
def test_no_row_changes_the_numbers_of_another():
    rows, columns = rows_of(random.Random(0)), COLUMNS | {"patient": {"kind": "ignore"}}

    def numbers(rows):
        return {(*x, y) for x, y in zip(*both(data.table(frame_of(rows), columns)), strict=True)}

    assert numbers(rows[:7]) | numbers(rows[7:]) == numbers(rows)


def test_a_file_a_frame_and_a_mapping_are_one_table(tmp_path):
    rows = rows_of(random.Random(1))
    (tmp_path / "columns.toml").write_text("\ufeff" + DECLARED)
    path = written(tmp_path / "patients.csv", rows)
    found = data.table(str(path), tmp_path / "columns.toml", unit="patient")
    for frame in (frame_of(rows), Frame(frame_of(rows))):
        other = data.table(frame, COLUMNS, "patient")
        jax.tree.map(np.testing.assert_array_equal, both(other), both(found))
        assert (found.name, other.name) == ("patients", "table")
        assert other[3:7] == found[3:7]


@kills("data/tables.py", "np.isin(owners, held)", "np.isin(np.arange(len(owners)), held)")
@kills("data/tables.py", "HeldOut(len(held))", "HeldOut(in_test.sum())")
def test_all_rows_of_a_person_are_on_one_side():
    rows = rows_of(random.Random(2), 60)
    for row in rows:
        row[1] = row[0].removeprefix("p")  # who it is, as a feature
    found = data.table(frame_of(rows), COLUMNS, "patient")
    train, test = ({*x[:, 0]} for x, _ in (found.train, found.test))
    assert (len(train), len(test), train & test) == (24, 6, set())
    owners = np.asarray(found.owners)
    assert (found.units, found.examples, owners.min(), owners.max()) == (24, 48, 0, 23)
    assert found.held_out == HeldOut(units=6)
    assert found.note.endswith("6 of 30 persons are held out for the test)")
    assert len({*zip(owners.tolist(), found.train[0][:, 0].tolist(), strict=True)}) == 24
    by_row = data.table(frame_of(rows), COLUMNS | {"patient": {"kind": "ignore"}})
    assert (by_row.units, len(by_row.test[1]), by_row.owners) == (48, 12, None)


def test_no_row_is_held_out_where_all_train_or_the_test_table_is_public():
    frame, public = (frame_of(rows_of(random.Random(seed), 20)) for seed in (2, 3))
    found = data.table(frame, COLUMNS, "patient", holdout=0)
    assert (found.units, found.examples, len(found.test[1])) == (10, 20, 0)
    assert found.held_out == HeldOut(units=0)
    want = both(data.table(public, COLUMNS, "patient", holdout=0))
    for left_out in ([], ["patient"]):
        rows = {name: cells for name, cells in public.items() if name not in left_out}
        found = data.table(frame, COLUMNS, "patient", test=rows)
        assert (found.units, found.examples) == (10, 20)
        jax.tree.map(np.testing.assert_array_equal, [*found.test], want)
        assert found.held_out == HeldOut(public=True)
    with pytest.raises(ValueError, match="got test= and holdout="):
        data.table(frame, COLUMNS, "patient", test=public, holdout=0.2)
    with pytest.raises(ValueError, match="the table has 0 rows; expected one or more"):
        data.table(frame, COLUMNS, "patient", test={name: [] for name in HEADER})


# --- what is no table ---


def replaced(column, *words):
    def fault(draw, rows, header):
        row = draw.randrange(len(rows))
        rows[row][HEADER.index(column)] = draw.choice(words)
        return f"row {row + 1}, column '{column}': "

    return fault


def short(draw, rows, header):
    row = draw.randrange(len(rows))
    del rows[row][draw.randint(1, len(header) - 1) :]
    return f"row {row + 1} has {len(rows[row])} of {len(header)} columns"


def missing(draw, rows, header):
    place = draw.randrange(len(header))
    name = [row.pop(place) for row in (*rows, header)][-1]
    return f"expected '{name}' too"


def doubled(draw, rows, header):
    place = draw.randrange(len(header))
    for row in (*rows, header):
        row.append(row[place])
    return f"column '{header[place]}' occurs twice"


def undeclared(draw, rows, header):
    place = draw.randrange(len(header) + 1)
    for row in (*rows, header):
        row.insert(place, "3e")
    return "column '3e' is not declared"


def open_quote(draw, rows, header):
    row = draw.randrange(len(rows))
    place = draw.randrange(len(header))
    rows[row][place] = '"' + rows[row][place].replace(",", "")
    return f"row {row + 1}: "


def empty(draw, rows, header):
    rows.clear()
    if draw.random() < 0.5:
        header.clear()
        return "expected the names of at least two columns"
    return "0 rows or persons"


FAULTS = {
    "unknown word": replaced("sex", "X", "m", "female", "1", "FM", "-"),
    "unknown label": replaced("died", "Yes", "0", "maybe", "yes?"),
    "text in a number": replaced("weight", "80kg", "1;5", "1_0", "inf", "-", "1e999", "0x10"),
    "gap without fill": replaced("weight", "", "NA", "nan", "?", " ", "null", "None"),
    "gap in a label": replaced("died", "", "NA", "?"),
    "gap in a unit": replaced("patient", "", "NA", " "),
    "impossible date": replaced("seen", "2011-02-30", "2011-13-01", "31.12.2011", "2011-1-1", "0"),
    "missing column": missing,
    "doubled column": doubled,
    "undeclared column": undeclared,
    "short row": short,
    "open quote": open_quote,
    "empty file": empty,
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_answered_in_a_sentence_with_its_place(name, tmp_path):
    """50 files for each kind of fault."""
    for seed in range(50):
        draw = random.Random(f"{name} {seed}")
        rows, header = rows_of(draw), list(HEADER)
        place = FAULTS[name](draw, rows, header)
        path = written(tmp_path / "own.csv", rows, header)
        with pytest.raises(ValueError, match=re.escape(place)) as raised:
            data.table(path, COLUMNS, "patient")
        said = str(raised.value)
        assert "\n" not in said, seed
        assert said.endswith("."), said
        assert len(said) < 250, said


def test_a_byte_order_mark_and_foreign_ends_of_lines_are_read(tmp_path):
    for seed in range(50):
        path = written(tmp_path / "own.csv", rows_of(random.Random(seed)))
        want = both(data.table(path, COLUMNS, "patient"))
        text = path.read_text().replace("\n", ("\n", "\r\n")[seed % 2])
        path.write_bytes(("\ufeff" + text).encode())
        found = both(data.table(path, COLUMNS, "patient"))
        jax.tree.map(np.testing.assert_array_equal, found, want)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"age": 3}, r"\[age\]\(kind=None\): expected one of number, category"),
        ({"age": {"kind": "numbr"}}, r"\[age\]\(kind='numbr'\).*Did you mean number"),
        ({"age": {"kind": "number", "low": 0}}, r"\[age\]: number\(\) missing 1 .* 'high'\.$"),
        ({"age": {"kind": "number", "hgh": 0}}, r"number\(\) got an unexpected .* 'hgh'"),
        (
            {"age": {"kind": "number", "low": "?", "high": "?"}},
            r'"\?" is still in \[age\] low, \[age\] h',
        ),
        ({"age": {"kind": "number", "low": 5, "high": 5}}, r"high - low=0.0\): expected a finite"),
        ({"age": {"kind": "number", "low": 0, "high": 9, "fill": "x"}}, r"\[age\]: 'x'; expected"),
        ({"sex": {"kind": "category", "values": "F"}}, r"values are 'F'; expected a list of dif"),
        ({"sex": {"kind": "category", "values": ["1", 1]}}, "expected a list of different words"),
        (
            {"seen": {"kind": "date", "since": "soon", "days": 3}},
            r"\[seen\]: 'soon'; expected a date",
        ),
        ({"seen": {"kind": "date", "since": "2010-01-01", "days": 0}}, r"date\(days=0\)"),
        ({"died": {"kind": "ignore"}}, r"got \[\] to be learnt; expected one label or one target"),
        ({"sex": {"kind": "label", "values": ["F", "M"]}}, r"got \['sex', 'died'\] to be learnt"),
    ],
)
def test_declarations_are_checked(changes, words):
    with pytest.raises(ValueError, match=words):
        data.table(frame_of(rows_of(random.Random(0))), COLUMNS | changes, "patient")


def test_a_file_that_is_no_toml_is_named(tmp_path):
    (tmp_path / "columns.toml").write_text("[age]\nlow =\n")
    with pytest.raises(ValueError, match=r"columns\.toml: expected TOML \(.*line 2"):
        data.table({}, tmp_path / "columns.toml")


# --- the command ---


def drafted(path, capsys):
    drafts.run(FLAGS, ["dpjax columns", str(path)])
    return capsys.readouterr().out


def test_a_draft_has_names_and_kinds_and_no_value_of_a_row(tmp_path, capsys):
    rows = rows_of(random.Random(3))
    for row in rows:
        row[0] = f"secret{row[0]}"
    rows[4][1] = "NA"
    text = drafted(written(tmp_path / "own.csv", rows, [*HEADER[:-1], "Date of death.1"]), capsys)
    kinds = {name: entries["kind"] for name, entries in tomllib.loads(text).items()}
    numbers, words = dict.fromkeys(["age", "weight", "ward"], "number"), ["patient", "sex", "note"]
    others = {"seen": "date", "Date of death.1": "label"}
    assert kinds == numbers | dict.fromkeys(words, "category") | others
    other = [[f"{cell}" for cell in row] for row in rows_of(random.Random(4), 40)]
    again = written(tmp_path / "own.csv", other, [*HEADER[:-1], "Date of death.1"])
    assert drafted(again, capsys) == text, "other rows of the same kinds"
    assert "secret" not in text
    assert "a release that no epsilon covers" in text.replace("\n# ", " ")
    with pytest.raises(ValueError, match=r'"\?" is still in \[patient\] values, '):
        data.table(again, tomllib.loads(text))


def test_a_draft_is_of_one_table(tmp_path, capsys):
    with pytest.raises(app.UsageError, match=r"dpjax columns my\.csv > columns\.toml"):
        drafts.run(FLAGS, ["dpjax columns"])
    with pytest.raises(app.UsageError, match=r"own\.csv"):
        drafted(tmp_path / "own.csv", capsys)


def parsed(*words):
    given = copy.deepcopy(FLAGS)
    few = (
        "--model=linear",
        "--batch_size=8",
        "--steps=2",
        "--noise_multiplier=1",
        "--accountant=rdp",
    )
    given(["train", "--dataset=own.csv", "--columns=columns.toml", *few, *words])
    return given


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = rows_of(random.Random(5), 60)
    written(tmp_path / "own.csv", [row[1:] for row in rows], HEADER[1:])
    written(tmp_path / "visits.csv", rows)
    (tmp_path / "columns.toml").write_text(DECLARED)
    target = DECLARED.replace('"label"', '"category"').replace(
        '"number", low = 20', '"target", low = 20'
    )
    (tmp_path / "target.toml").write_text(target)
    return tmp_path


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        ("--label=died", "--label: expected without --columns"),
        ("--classes=2", "--classes: expected without --columns"),
        ("--columns= --unit_column=patient", "--columns"),
        ("--unit_column=patent --dataset=visits.csv", "expected 'patent' too"),
        ("--dataset=digits", "No such file"),
        ("--class_weights=1,2,3", "--class_weights=1,2,3: expected one for each class"),
        ("--class_weights=1,-2", r"weighted\(weight=-2.0\)"),
        ("--columns=target.toml", "--loss=cross_entropy: expected one of squared_error, absolute"),
        ("--sampling=fixed --dataset=visits.csv --unit_column=patient", "expected poisson with"),
        ("--test=own.csv --holdout=0.1", "got test= and holdout="),
        ("--delta=0.0209", r"delta=0.0209: expected less than 1/48, .*Give --delta=0.002\."),
    ],
)
def test_flags_of_tables_are_checked(folder, words, answer):
    with pytest.raises(app.UsageError, match=answer):
        command.plan(parsed(*words.split()))


def test_a_target_has_one_output_and_a_loss_of_numbers_and_classes_have_weights(folder):
    given = parsed("--columns=target.toml", "--loss=huber", "--loss_options=delta=0.5")
    planned = command.plan(given)
    assert planned.model.classes == 1
    assert planned.dataset.target_range == (20.0, 220)
    assert float(planned.loss(np.array([2.0]), np.float32(0))) == pytest.approx(0.5 * (2 - 0.25))
    loss, plain = (build.build_loss(parsed(*w), 2) for w in (["--class_weights=1,5"], []))
    ratios = [float(loss(np.zeros(2), y)) / float(plain(np.zeros(2), y)) for y in (0, 1)]
    assert ratios == pytest.approx([1, 5])


def test_a_run_is_identified_by_its_declarations(folder):
    before = command.configuration(parsed())
    (folder / "columns.toml").write_text(DECLARED.replace("220", "230"))
    assert command.configuration(parsed()) != before


@kills("cli/train/command.py", "dataset.units", "dataset.examples")
def test_persons_are_what_is_sampled_and_counted(folder):
    """Rates, steps and epochs follow from the number of persons; the number of rows is private."""
    words = ("--unit_column=patient", "--most_rows=2", "--batch_size=4", "--steps=3")
    planned = command.plan(parsed("--dataset=visits.csv", *words))
    mechanism = planned.mechanism
    assert (mechanism.unit, mechanism.sampling.examples, mechanism.batch_size) == ("patient", 24, 4)
    assert planned.dataset.examples == 48
    draw = mechanism.sampling.draw(jax.random.key(0), 0)
    assert draw.indices.shape[1] == 2
    given = parsed("--dataset=visits.csv", *words[:3])
    given["steps"].value = None
    assert command.plan(given).mechanism.steps == 40 * 24 / 4
    visits = (folder / "visits.csv").read_text()
    (folder / "visits.csv").write_text(visits.replace("patient", "Patient ID", 1))
    given["unit_column"].value = "Patient ID"
    assert command.plan(given).mechanism.unit == "patient"


SPLITS = {
    "held out": ([], "the 6 patients held out for the test: results on them are published without"),
    "public": (["--test=public.csv"], "the test file, which was declared public: results on it"),
    "all train": (["--holdout=0"], "the choice of this run among several"),
}
BOARD = {"all train": "what is true of patients in general"}


@pytest.mark.thorough
@kills("reports/statement.py", "*not_covered(held_out, mechanism.unit), ", "")
@kills("cli/train/evaluation.py", "public=self.is_public", "public=True", case="held out")
@pytest.mark.parametrize("name", SPLITS)
@pytest.mark.sample(1)
def test_statement_board_and_page_name_the_test_rows_first(name, folder, capsys):
    words, first = SPLITS[name]
    (folder / "public.csv").write_text((folder / "visits.csv").read_text())
    persons = ["--dataset=visits.csv", "--unit_column=patient", "--most_rows=2"]
    given = parsed(*persons, f"--out={folder / 'run'}", *words)
    command.execute(given, command.plan(given))
    run = folder / "run"
    _, _, uncovered = (run / "statement.txt").read_text().partition("\nNot covered\n  - ")
    assert uncovered.startswith(first)
    _, _, uncovered = (run / "board.txt").read_text().partition("What is not covered\n\n  - ")
    assert uncovered.startswith(BOARD.get(name, first))
    assert f"<ul><li>{first}" in (run / "report.html").read_text()
    file = run / "evaluation.npz"
    measured = "AUROC" in capsys.readouterr().out
    assert measured == file.exists() == (name != "all train")
    if measured:
        public = file.stat().st_mode & 0o044 > 0
        assert public == (name == "public")


def test_without_test_rows_no_search_ranks_and_no_audit_compares(folder):
    given = copy.deepcopy(sweep_flags.FLAGS)
    given(["sweep", "--grid=bound=1,2", "--fixed=holdout=0;dataset=own.csv"])
    with pytest.raises(app.UsageError, match="--holdout=0: expected test rows, by which a search"):
        search.plan(given, folder, search.candidates_of(given))
    dataset = data.table("own.csv", "columns.toml", holdout=0)
    for words in ([], ["--attacks=canaries,lira"]):
        given = copy.deepcopy(audit_flags.FLAGS)
        given(["audit", *words])
        with pytest.raises(app.UsageError, match=r"no test rows .* Give --attacks=canaries\.$"):
            audit_command.require_test_rows(given.attacks, dataset)
    given(["audit", "--attacks=canaries"])
    audit_command.require_test_rows(given.attacks, dataset)


def test_a_data_set_by_name_has_a_test_set_of_its_own(folder):
    for word in ("--test=own.csv", "--holdout=0.5"):
        with pytest.raises(app.UsageError, match=r"expected with a file of yours; this has a test"):
            command.plan(parsed("--dataset=digits", "--columns=", word))


def test_a_loss_of_the_epoch_is_not_audited_for_persons(monkeypatch, tmp_path):
    steps = {"multiplier_and_steps": [[1.0, 2]]}
    run = types.SimpleNamespace(card={}, config={"flags": {}}, mechanism=steps)
    monkeypatch.setattr(rebuilt_run, "read", lambda *_, **__: run)
    part = (np.zeros((2, 3)), np.zeros(2))
    dataset = data.Dataset("own", part, part, 2, owners=np.arange(2))
    planned = types.SimpleNamespace(dataset=dataset, per_step=len)
    monkeypatch.setattr(rebuilt_run, "plan", lambda _: planned)
    with pytest.raises(app.UsageError, match="--loss=composite is audited where the unit is one"):
        rebuilt_run.rebuild(tmp_path)


@kills("cli/audit/rebuilt_run.py", "] = order[used]", "] = numbers[used]")
def test_an_audited_person_is_one_example_with_its_first_rows():
    owners = np.array([1, 0, 1, 2, 1])
    x = np.arange(10.0).reshape(5, 2)
    part = (x, np.arange(5))
    dataset = data.Dataset("own", part, part, 5, owners=owners)
    mechanism = dpjax.Mechanism(
        sampling=dpjax.sampling.persons(owners, batch_size=2, most_rows=2),
        clipping=dpjax.clipping.flat(bound=1.0),
        noise_multiplier=1.5,
        steps=4,
    )
    fields = dict.fromkeys(command.Planned._fields[:-1])
    planned = command.Planned(**fields)._replace(mechanism=mechanism)
    planned, stacked = rebuilt_run.of_persons(planned, dataset)
    (rows, labels), real = stacked.train
    assert real.tolist() == [[True, False], [True, True], [True, False]]
    assert labels[real].tolist() == [1, 0, 2, 3]
    np.testing.assert_array_equal(rows[real], x[[1, 0, 2, 3]])
    assert (planned.persons, planned.mechanism.unit) == (True, "example")
    assert planned.mechanism.epsilon(1e-5) == mechanism.epsilon(1e-5)


@pytest.mark.thorough
def test_the_commands_of_the_page_lead_from_a_csv_to_a_statement(tmp_path):
    """In the folder that the page's code fills, with two steps and no figures."""
    page = (ROOT / "docs" / "pages" / "tutorials" / "table.md").read_text()
    write, declare, *_ = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    draft, train, verify, predict = re.findall(r"```sh\n(.*?)```", page, re.DOTALL)

    def ran(command):
        command = command.replace("dpjax ", f"{sys.executable} -m dpjax ")
        command = command.replace("python -m dpjax.", f"{sys.executable} -m dpjax.")
        options = {"cwd": tmp_path, "env": {**os.environ, "PYTHONPATH": str(ROOT / "src")}}
        done = subprocess.run(command, shell=True, capture_output=True, text=True, **options)
        assert done.returncode == 0, done.stderr
        return done.stdout

    subprocess.run([sys.executable, "-c", write], cwd=tmp_path, check=True)
    ran(draft)
    drafted = (tmp_path / "columns.toml").read_text()
    subprocess.run([sys.executable, "-c", declare], cwd=tmp_path, check=True)
    declared = tomllib.loads((tmp_path / "columns.toml").read_text())
    kinds = [[c["kind"] for c in t.values()] for t in (tomllib.loads(drafted), declared)]
    assert kinds[0] == kinds[1]
    said = ran(f"{train.strip()} --steps=2 --noreport")
    assert "on tumours (values beyond their ranges are clipped" in said
    assert "one example" in (tmp_path / "runs" / "tumours" / "statement.txt").read_text()
    assert "epsilon" in ran(verify)
    header, *answers = ran(predict).splitlines()
    assert header == "class,probability_benign,probability_malignant"
    assert len(answers) == 3


# --- rows without a label ---


@kills(
    "data/encoding.py",
    "cells[name].append(read(text(cell)))",
    "cells[name].insert(0, read(text(cell)))",
)
def test_new_rows_are_encoded_in_their_order_as_in_training():
    rows = frame_of(rows_of(random.Random(7), 9))
    rows["age"][2] = ""
    rows["ward"][4] = "9"
    columns = data.Columns.read(COLUMNS, unit="patient")
    want = data.table(rows, COLUMNS, "patient", holdout=0)
    np.testing.assert_array_equal(columns.encode(rows), want.train[0])
    np.testing.assert_array_equal(columns.encode_targets(rows), want.train[1])
    ages = [int(age or 50) for age in rows["age"]]
    np.testing.assert_allclose(want.train[0][:, 0], np.array(ages) / 50 - 1, rtol=1e-5, atol=1e-6)
    few = {name: rows[name] for name in reversed(HEADER) if name not in ("died", "note", "patient")}
    np.testing.assert_array_equal(columns.encode(few), want.train[0])
    assert (columns.features, columns.class_names) == (want.columns, ("no", "yes"))
    again = pickle.loads(pickle.dumps(columns))
    np.testing.assert_array_equal(again.encode(few), want.train[0])
    with pytest.raises(ValueError, match=r"expected 'age', 'sex' too\.$"):
        columns.encode({name: few[name] for name in few if name not in ("age", "sex")})


def test_faults_of_a_table_come_ten_at_a_time_by_row():
    rows = frame_of(rows_of(random.Random(8), 20))
    rows["weight"][:8] = ["heavy"] * 8
    rows["sex"][:4] = ["X"] * 4
    rows["patient"][0] = ""
    with pytest.raises(ValueError, match="13 faults; the first 10 are:") as raised:
        data.table(rows, COLUMNS, "patient")
    lines = str(raised.value).splitlines()[1:]
    assert [line.split(",")[0] for line in lines] == [
        f"  row {n}" for n in (1, 1, 1, 2, 2, 3, 3, 4, 4, 5)
    ]
    assert lines[2].endswith("column 'patient': a gap; expected whose row it is.")


@pytest.mark.parametrize("suffix", [".parquet", ".arrow", ".feather"])
def test_a_file_of_parquet_or_arrow_is_read_as_a_csv(tmp_path, suffix):
    pyarrow = pytest.importorskip("pyarrow")
    rows = frame_of(rows_of(random.Random(9)))
    want = data.table(rows, COLUMNS, "patient")
    rows["age"] = [int(age) for age in rows["age"]]
    rows["weight"] = [float(weight) for weight in rows["weight"]]
    rows["seen"] = [datetime.date.fromisoformat(day) for day in rows["seen"]]
    made = pyarrow.table(rows)
    path = tmp_path / f"own{suffix}"
    if suffix == ".parquet":
        importlib.import_module("pyarrow.parquet").write_table(made, path)
    else:
        importlib.import_module("pyarrow.feather").write_feather(made, str(path))
    for frame in (path, made):
        found = data.table(frame, COLUMNS, "patient")
        jax.tree.map(np.testing.assert_array_equal, both(found), both(want))
    path.write_bytes(b"no table")
    with pytest.raises(ValueError, match="expected a table of Parquet or Arrow"):
        data.table(path, COLUMNS, "patient")


def test_a_draft_follows_most_cells_and_knows_dates_with_the_day_first(tmp_path, capsys):
    rows = rows_of(random.Random(10))
    for row in rows:
        row[5] = datetime.date.fromisoformat(row[5]).strftime("%d.%m.%Y")
    rows[3][1] = "6o"
    text = drafted(written(tmp_path / "own.csv", rows), capsys)
    draft = tomllib.loads(text)
    assert (draft["age"]["kind"], draft["seen"]["kind"]) == ("number", "date")
    assert draft["seen"]["format"] == "%d.%m.%Y"
    for kind in ("number", "category", "date", "label", "target", "ignore"):
        assert f"{kind} (" in text or f"{kind}," in text, kind


@kills("cli/plan.py", "dpjax.sampling.persons(np.arange(rows), rows, most_rows)", "batches")
def test_minutes_are_planned_for_persons_with_all_rows_that_a_step_reads(
    folder, monkeypatch, capsys
):
    timed = []

    def dpsgd(loss, optimizer, mechanism, rows):
        timed.append(mechanism.sampling)
        return dpjax.training.dpsgd(loss, optimizer, mechanism, rows)

    monkeypatch.setattr(dpjax, "dpsgd", dpsgd)
    given = copy.deepcopy(plan_flags.FLAGS)
    words = "--dataset=visits.csv --columns=columns.toml --unit_column=patient --model=linear"
    given(["plan", *words.split(), "--most_rows=3", "--minutes=1"])
    plan.run(given, [])
    assert [sampling.most_rows for sampling in timed] == [3]
    units = command.load(given).units
    assert f" of {units}: noise" in capsys.readouterr().out


@pytest.mark.thorough
@pytest.mark.parametrize("declared", ["columns.toml", "target.toml"])
def test_a_run_predicts_new_rows_in_another_process_without_its_declarations(folder, declared):
    words = [
        f"--columns={declared}",
        "--dataset=own.csv",
        "--steps=3",
        "--model=linear",
        "--noreport",
    ]
    words += [
        "--batch_size=8",
        "--out=run",
        "--loss=huber" if "target" in declared else "--steps=3",
    ]
    run = [sys.executable, "-m", "dpjax"]
    subprocess.run([*run, "train", *words], check=True, capture_output=True)
    columns = data.Columns.read(declared)
    frame = frame_of(rows_of(random.Random(11), 5))
    frame["age"][1] = ""
    frame["ward"][2] = "9"
    learnt, _ = columns.learnt
    few = {
        name: frame[name] for name in reversed(HEADER) if name not in (learnt, "note", "patient")
    }
    written(folder / "new.csv", zip(*few.values(), strict=True), [*few])
    (folder / declared).rename("elsewhere.toml")
    done = subprocess.run(
        [*run, "predict", "run", "new.csv"], check=True, capture_output=True, text=True
    )
    config = json.loads(pathlib.Path("run/config.json").read_text())
    for name in ("declared", "classes"):  # as an earlier version wrote it
        config.pop(name, None)
    pathlib.Path("run/config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=f"does not hold the declared .* --columns={declared}"):
        predict.predicted(pathlib.Path("run"), "new.csv")
    again = predict.predicted(pathlib.Path("run"), "new.csv", declarations="elsewhere.toml")
    assert again == done.stdout
    header, *lines = csv.reader(done.stdout.splitlines())
    given = copy.deepcopy(FLAGS)
    given(["train", "--model=linear"])
    model = build.build_model(given, 2 if columns.class_names else 1)
    x = columns.encode(few)
    shapes = jax.eval_shape(model.init, jax.random.key(0), x[0])["params"]
    outputs = model.apply({"params": training.released_params(folder / "run", shapes)}, x)
    if columns.class_names:
        assert header == ["class", "probability_no", "probability_yes"]
        want = jax.nn.softmax(outputs)
        assert [line[0] for line in lines] == [
            columns.class_names[n] for n in outputs.argmax(axis=1)
        ]
        np.testing.assert_allclose(np.array([line[1:] for line in lines], float), want, rtol=1e-4)
    else:
        want = 20 + (np.asarray(outputs, float) + 1) / 2 * 200
        np.testing.assert_allclose(np.array(lines, float), want, rtol=1e-4)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "words",
    [
        "--unit_column=patient --dataset=visits.csv --most_rows=2",
        "--columns=target.toml --loss=huber",
    ],
)
def test_persons_and_regressions_are_audited_from_elsewhere(folder, words, monkeypatch, capsys):
    run = [sys.executable, "-m", "dpjax"]
    few = [
        "--columns=columns.toml",
        "--dataset=own.csv",
        "--steps=3",
        "--model=linear",
        "--noreport",
    ]
    subprocess.run(
        [*run, "train", *few, "--batch_size=8", "--out=run", *words.split()],
        check=True,
        capture_output=True,
    )
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    # The level of a process that ends with its command must not reach the next tests.
    monkeypatch.setattr(logging, "set_verbosity", lambda level: None)
    given = copy.deepcopy(audit_flags.FLAGS)
    given(["audit", "--canaries=10", "--steps=3", "--pairs=50", "--out=audit"])
    audit_command.run(given, ["audit", "../run"])
    assert "No audit contradicts its claim" in capsys.readouterr().out
    assert (elsewhere / "audit" / "audit.json").exists()
    for name in ("own.csv", "visits.csv"):
        (folder / name).rename(elsewhere / f"moved_{name}")
    given["out"].value = "again"
    with pytest.raises(
        app.UsageError, match=rf"in {re.escape(str(folder))}, .* Give --dataset=FILE"
    ):
        audit_command.run(given, ["audit", "../run"])
    assert not (elsewhere / "again").exists()
    name = "visits.csv" if "visits" in words else "own.csv"
    assert rebuilt_run.rebuild(
        folder / "run", moved_to=f"moved_{name}"
    ).dataset.examples == 48 - 24 * ("visits" in words)
