# SPDX-License-Identifier: Apache-2.0
"""The console command: its overview, what it refuses, and `train` and `audit` in this process."""

import copy
import importlib
import json
import logging
import os
import pathlib
import subprocess
import sys
import tomllib
import types

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from absl import app
from mutation import kills
from small_mechanisms import mechanism_with

import dpjax
from dpjax import accounting, auditing, cli, data, features, ledger, models, schedules, verify
from dpjax._files import held
from dpjax.cli import audit, compare, compilation_cache, export
from dpjax.cli.audit import audit_command, rebuilt_run
from dpjax.cli.audit import canaries as audit_canaries
from dpjax.cli.audit import lines as audit_lines
from dpjax.cli.audit import losses as audit_losses
from dpjax.cli.card import public_cards
from dpjax.cli.flag_sets import names
from dpjax.cli.flag_sets.audit import FLAGS as AUDIT_FLAGS
from dpjax.cli.flag_sets.card import FLAGS as CARD_FLAGS
from dpjax.cli.flag_sets.export import FLAGS as EXPORT_FLAGS
from dpjax.cli.flag_sets.train import FLAGS, settings
from dpjax.cli.report import html_report
from dpjax.cli.train import build, command, evaluation, inputs
from dpjax.trees import digest

ROOT = pathlib.Path(__file__).parent.parent


def python(*words, status=0):
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True)
    assert done.returncode == status, done.stderr
    return done.stdout + done.stderr


# --- the command line ---


def test_the_overview_lists_every_subcommand(capsys):
    for words in ([], ["--help"]):
        cli.main(words)
        listed = capsys.readouterr().out
        assert "usage: dpjax SUBCOMMAND" in listed
        for name, purpose in cli.COMMANDS.items():
            assert f"{name} " in listed
            assert purpose in listed


@pytest.mark.parametrize("name", [name for name in cli.COMMANDS if name != "verify"])
def test_each_subcommand_describes_itself(name, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", sys.argv)
    cli.main([name, "--help"])
    listed = capsys.readouterr().out
    assert f"dpjax {name}" in listed
    if name == "train":
        for words in ("dpjax train --out=runs/demo", "--target_epsilon\n", "--[no]report\n"):
            assert words in listed
        for title in ("Data", "Model and loss", "Privacy", "Optimization", "Output", "Machine"):
            assert f"\n{title}:\n" in listed


def test_the_console_script_and_the_module_are_the_command():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"dpjax": "dpjax.cli:main"}
    assert python("-m", "dpjax", "--version") == f"dpjax {project['version']}\n"
    assert dpjax.__version__ == project["version"]


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["trian"], "dpjax trian: expected one of train"),
        (["train", "--epsilon=3"], "Did you mean --target_epsilon?"),
        (["train", "--dataset=mnits"], "--dataset=mnits: expected my.npz, my.csv, or one of"),
        (["train", "--loss=hinge"], "value should be one of"),
        (["train", "--stpes=3"], "Did you mean: steps"),
        (["train", "steps=3"], "begin with two dashes"),
        (["sweep", "--gird=a=1"], "Did you mean: grid"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_in_the_flags_is_answered_before_jax_is_imported(words, answer):
    """In a process in which an import of JAX fails."""
    program = "import sys; sys.modules['jax'] = None; import dpjax.cli; dpjax.cli.main()"
    said = python("-c", program, *words, status=1)
    assert answer in said
    assert "Traceback" not in said


def test_a_reader_that_closes_the_pipe_ends_the_process_quietly():
    code = "import dpjax.cli; dpjax.cli.main(['train', '--help'])"
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as closed:
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, stdout=closed, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (141, "")


def test_names_of_flags_are_those_of_the_tables():
    assert (*names.DATASETS, "california_housing", "wine_quality") == data.NAMES
    assert {*names.MODELS, "regression_mlp"} == {*models.NAMES}
    assert tuple(build.LOSSES) == names.LOSSES
    assert tuple(build.OPTIMIZERS) == names.OPTIMIZERS
    assert tuple(schedules.CURRICULA) == names.CURRICULA


@pytest.mark.parametrize(("said", "shown"), [("", "interrupted."), ("stopped at 2", "stopped at")])
def test_ctrl_c_is_answered_in_one_sentence(said, shown, capsys, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt(*filter(None, [said]))

    monkeypatch.setattr(sys, "argv", ["dpjax train"])
    monkeypatch.setattr(importlib.import_module("dpjax.cli.train"), "run", interrupted)
    with pytest.raises(SystemExit) as ended:
        cli.run_command("train")
    assert ended.value.code == 130
    assert f"dpjax train: {shown}" in capsys.readouterr().err


def test_remarks_of_orbax_are_not_shown_and_its_errors_are():
    def record(level, path):
        return logging.LogRecord("absl", level, path, 1, "words", None, None)

    orbax = "site-packages/orbax/checkpoint/checkpoint_manager.py"
    assert not cli._not_of_orbax(record(logging.WARNING, orbax))
    assert cli._not_of_orbax(record(logging.ERROR, orbax))
    assert cli._not_of_orbax(record(logging.WARNING, "dpjax/training/run_folder.py"))


@pytest.mark.thorough
def test_warnings_of_a_command_are_a_plain_line_each_and_come_once(tmp_path):
    module = "from absl import logging\nfor _ in range(2): logging.warning('odd rows')\n"
    (tmp_path / "nets.py").write_text(module)
    words = ["--model=nets:Net", "--noreport", "--out=run"]
    command = [sys.executable, "-m", "dpjax", "train", *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    (said,) = [line for line in done.stderr.splitlines() if "odd rows" in line]
    assert said == "Warning: odd rows"


def test_a_path_begins_at_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    given = copy.deepcopy(FLAGS)
    paths = ("out", "data_dir", "cache_dir", "continue_from", "dataset")
    given(["train", *(f"--{name}=~/my.npz" for name in paths)])
    assert {given[name].value for name in paths} == {str(tmp_path / "my.npz")}


def test_a_missing_matplotlib_is_found_before_the_work(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # found, and not importable
    with pytest.raises(app.UsageError, match="or give --noreport"):
        command.run(parsed(), ["train"])
    with pytest.raises(
        app.UsageError, match=r"cannot be imported \(.*pip install -U matplotlib\.$"
    ):
        audit.run(AUDIT_FLAGS, ["audit", "run"])
    with pytest.raises(
        app.UsageError, match=r"cannot be imported \(.*pip install -U matplotlib\.$"
    ):
        compare.run(None, ["compare", "run"])
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(app.UsageError, match="pip install -U scikit-learn matplotlib, or give --n"):
        command.run(parsed("--dataset=digits"), ["train"])
    with pytest.raises(ImportError, match=r"'digits'\).* pip install -U scikit-learn\.$"):
        data.load("digits")
    with pytest.raises(app.UsageError, match="dpjax report: matplotlib cannot be imported"):
        html_report.run(None, ["report", "run"])


@pytest.fixture
def no_cache():
    """Without the compilation cache that tests share."""
    options = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in options}
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def test_compiled_programs_stay_on_the_disk(no_cache, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")
    compilation_cache.switch_on()
    assert jax.config.jax_compilation_cache_dir is None, "nothing can be written there"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compilation_cache.switch_on()
    (folder,) = (tmp_path / "dpjax").iterdir()
    assert jax.config.jax_compilation_cache_dir == str(folder)
    assert folder.stat().st_mode & 0o077 == 0, "programs may hold data as constants"
    jax.config.update("jax_compilation_cache_dir", "chosen")
    compilation_cache.switch_on()
    assert jax.config.jax_compilation_cache_dir == "chosen"


# --- what flags describe ---

MODULE = """
import flax.linen as nn

class Net(nn.Module):
    classes: int
    width: int = 4

    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.classes)(nn.tanh(nn.Dense(self.width)(x.ravel())))

made = Net(3)

def make(classes, width=2):
    return Net(classes, width)

def number(classes):
    return classes

def passed_on(**options):
    return Net(**options)

class Batch(nn.Module):
    classes: int

    @nn.compact
    def __call__(self, x):
        return nn.BatchNorm(use_running_average=False)(nn.Dense(self.classes)(x))
"""


@pytest.fixture
def workshop(tmp_path, monkeypatch):
    """A folder with a module and data of the user, in which commands run."""
    name = f"nets_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    x, y = np.random.default_rng(0).normal(size=(60, 3)), np.arange(60) % 3
    np.savez(tmp_path / "my.npz", x=x + 2 * y[:, None], y=y)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    return name


def parsed(*words):
    given = copy.deepcopy(FLAGS)
    given(["train", "--dataset=my.npz", "--model=linear", "--batch_size=20", *words])
    return given


def planned(*words):
    return command.plan(parsed("--steps=4", "--noise_multiplier=1", "--accountant=rdp", *words))


def test_a_model_of_the_user_is_a_module_a_class_or_a_function(workshop):
    assert planned(f"--model={workshop}:made").model.width == 4
    assert planned(f"--model={workshop}:Net", "--model_options=width=7").model.width == 7
    plan = planned(f"--model={workshop}:make", "--classes=5")
    assert (plan.model.classes, plan.model.width, plan.dataset.classes) == (5, 2, 5)
    assert planned(f"--model={workshop}:passed_on").model.classes == 3


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        ("--model=none_of_these:Net", "No module named 'none_of_these'"),
        ("--model={}:number", "expected a Flax module"),
        ("--model={}:made --classes=4", "expected 4 numbers"),
        ("--model={}:Batch", "batch_stats"),
        ("--model=wide_resnet --model_options=dept=3", "unexpected keyword argument 'dept'"),
        ("--model=linear --model_options=width", "'width': expected name=value"),
        ("--batch_size=70", "at most the number of examples"),
        ("--bound=-1", "flat.bound=-1.0.*Nothing was spent"),
        ("--steps=0", "expected a step"),
        ("--target_epsilon=2", "expected one of the two"),
        ("--risk=0.05@0.01", "expected one of the two"),
        ("--max_epsilon=1 --noise_multiplier=0.5", "0 of 4 steps fit.*Nothing was spent"),
        ("--max_epsilon=0", "At 0 no step fits"),
        ("--optimizer=dp_adam --sampling=cyclic_poisson --noise=banded --bands=2", "dp_adam"),
        ("--dataset=none.csv", "--dataset=none.csv: "),
    ],
)
def test_what_describes_no_run_is_answered_before_anything_is_touched(workshop, words, answer):
    with pytest.raises(app.UsageError, match=rf"(?s){answer}"):
        planned(*words.format(workshop).split())


def test_a_model_of_dpjax_has_the_fields_of_flags_and_options(workshop):
    want = models.by_name("mlp", 3, features=(8, 4), activation=jax.nn.relu, torch_init=True)
    words = ("--model=mlp", "--hidden=8,4", "--activation=relu", "--torch_init")
    assert planned(*words).model == want
    given = parsed("--model=wide_resnet", "--model_options=depth=10,width=1")
    assert build.build_model(given, 3) == models.by_name("wide_resnet", 3, depth=10, width=1)


def test_options_hold_lists(workshop):
    read = build.read_options
    want = {"widths": [8, 4], "depth": 2, "name": "a"}
    assert read(["widths=[8", "4]", "depth=2", "name=a"]) == want
    assert read(parsed("--model_options=widths=[8,4],depth=2").model_options)["widths"] == [8, 4]
    assert read([]) == {}
    assert read(["a=False", "b=false", "c=None"]) == {"a": False, "b": False, "c": None}


def test_as_many_steps_run_as_fit_in_a_budget(workshop):
    alone = ["--noise_multiplier=4", "--max_epsilon=3", "--delta=1e-3", "--accountant=rdp"]
    plan = command.plan(parsed(*alone))
    assert plan.epsilon <= 3
    one_more = [*alone, f"--steps={plan.mechanism.steps + 1}"]
    with pytest.raises(app.UsageError, match=f"{plan.mechanism.steps} of"):
        command.plan(parsed(*one_more))
    with pytest.raises(app.UsageError, match="not one step fits, which costs epsilon"):
        command.plan(parsed(*alone[1:], "--noise_multiplier=0.3"))
    with pytest.raises(app.UsageError, match="Give --steps or --epochs too"):
        command.plan(parsed(*alone, "--noise_schedule=linear-down"))


def test_a_run_without_bound_and_noise_is_planned(workshop):
    """For comparison: no multiplier but 0 goes with an infinite bound."""
    words = ("--bound=inf", "--noise_multiplier=0", "--noise_schedule=linear-down")
    assert planned(*words).mechanism.noise_multiplier == 0


# --- a run in this process ---


def trained(folder, *words):
    """A run of two steps, as the command line trains it."""
    few = ["--steps=2", "--evaluations=2", "--noise_multiplier=1", "--accountant=rdp"]
    given = parsed(*few, "--noreport", "--save_every=1", f"--out={folder}", *words)
    command.execute(given, command.plan(given))
    return json.loads((folder / "config.json").read_text())


@pytest.mark.thorough
def test_a_run_leaves_its_files_and_is_shown_again(workshop, tmp_path, capsys):
    config = trained(tmp_path / "run", "--seed=1")
    said = capsys.readouterr().out
    assert "2 steps with noise multiplier 1 cost epsilon" in said
    assert said.count("--seed=1 is no secret") == 1
    assert "Test accuracy" in said
    assert "dpjax verify" in said
    assert config["flags"]["batch_size"] == 20
    assert config["parameters"] == 12
    assert (tmp_path / "run" / "evaluation.npz").exists()
    assert (tmp_path / "run" / "diagnostics.npz").stat().st_mode & 0o077 == 0
    released = (tmp_path / "run" / "params.msgpack").read_bytes()
    assert trained(tmp_path / "run", "--seed=1") == config, "no step ran"
    assert (tmp_path / "run" / "params.msgpack").read_bytes() == released
    with pytest.raises(ledger.Refused, match="another run is there"):
        trained(tmp_path / "run", "--seed=1", "--bound=1")
    assert json.loads((tmp_path / "run" / "config.json").read_text()) == config
    for audit_file in ("audit.json", "audit.html"):
        (tmp_path / "run" / audit_file).touch()
    (tmp_path / "run" / "notes.txt").touch()
    assert trained(tmp_path / "run", "--bound=1", "--overwrite")["flags"]["bound"] == 1
    assert (tmp_path / "run" / "notes.txt").exists()
    assert not [*(tmp_path / "run").glob("audit.*")], "private figures of the run before"
    capsys.readouterr()
    more = trained(tmp_path / "more", f"--continue_from={tmp_path / 'run'}")
    assert "together with the earlier runs, cost epsilon" in capsys.readouterr().out
    card = json.loads((tmp_path / "more" / "privacy.json").read_text())
    (before,) = card["mechanism"]["before"]
    assert before["multiplier_and_steps"] == [[1.0, 2]]
    assert more["flags"]["continue_from"] == str(tmp_path / "run")


@pytest.mark.thorough
@kills("cli/train/evaluation.py", 'card["parameters"] = trees.digest(params)', "pass", slow=True)
def test_a_run_becomes_a_model_card_and_an_entry_of_a_registry(workshop, tmp_path, capsys):
    given = parsed("--steps=2", "--risk=0.3@0.1", "--delta=1e-3", "--noreport", "--out=run")
    command.execute(given, command.plan(given))
    assert "Noise is scaled to --risk=0.3@0.1" in capsys.readouterr().out
    assert verify.main([str(tmp_path / "run")]) == 0
    said = capsys.readouterr().out
    assert "parameters   of params.msgpack have the SHA-256 of the card: holds" in said
    assert "risk         of at most 30 % true positives at 10 % false ones" in said
    card = json.loads((tmp_path / "run" / "privacy.json").read_text())
    model_card = public_cards.model_card(tmp_path / "run")
    _, block, text = model_card.split("---\n", 2)
    assert yaml.safe_load(block)["tags"] == ["differential-privacy", "dpjax", "jax"]
    assert "limit of 30 % true alarms at 10 % false ones" in " ".join(text.split())
    entry = public_cards.registry_entry(tmp_path / "run")
    deployment = yaml.safe_load(entry)["deployment"]
    assert deployment["privacy_loss"]["privacy_unit"] == "one example"
    claimed = float(deployment["privacy_loss"]["privacy_parameters"]["epsilon"])
    assert 0 <= claimed - card["epsilon"]["pld"]["value"] < 0.01 * claimed
    assert card["parameters"] in deployment["implementation"]["additional_information"]
    given = copy.deepcopy(CARD_FLAGS)
    given(["card", "--format=registry", "--out=entry.yaml"])
    public_cards.run(given, ["card", "run"])
    assert pathlib.Path("entry.yaml").read_text() == entry
    (tmp_path / "run" / "privacy.json").write_text(json.dumps({**card, "epsilon": {}}))
    with pytest.raises(app.UsageError, match="proves no epsilon"):
        public_cards.run(given, ["card", "run"])
    for command_run in (public_cards.run, export.run):
        with pytest.raises(app.UsageError, match="expected one run"):
            command_run(given, ["card"])


LOADED = """
import sys
sys.modules["dpjax"] = None
import jax, numpy as np
from jax import export
model = export.deserialize(open("model.jax", "rb").read())
for rows in (1, 7):
    np.save(f"{rows}.npy", jax.nn.softmax(model.call(np.load("x.npy")[:rows])))
"""


@pytest.mark.thorough
def test_an_exported_model_predicts_without_dpjax(workshop, tmp_path):
    pytest.importorskip("flatbuffers")  # jax.export writes with it
    trained(tmp_path / "run")
    given = copy.deepcopy(EXPORT_FLAGS)
    given(["export", "--out=model.jax"])
    export.run(given, ["export", "run"])
    plan = planned()
    x, _ = plan.dataset.test
    np.save("x.npy", x)
    subprocess.run([sys.executable, "-c", LOADED], check=True)
    saved = np.load("run/evaluation.npz")["probabilities"]
    for rows in (1, 7):
        np.testing.assert_allclose(np.load(f"{rows}.npy"), saved[:rows], rtol=1e-5)
    (tmp_path / "run" / "config.json").write_text("{}")
    with pytest.raises(app.UsageError, match="no shape of an input"):
        export.run(given, ["export", "run"])


@kills("cli/train/evaluation.py", "low + (values + 1) / 2 * (high - low)", "values")
@kills("cli/train/evaluation.py", "outputs[:, 1] - outputs[:, 0]", "outputs[:, 1]", slow=True)
def test_two_classes_and_quantities_are_measured(tmp_path):
    """Areas by the difference of logits; errors in the units of the file."""
    rows = np.zeros((3, 2), np.float32), np.array([0, 1, 1])
    two = data.Dataset("two", rows, rows, 2)
    row = evaluation.Evaluation(None, None, None, two).measured(
        np.array([[9.0, 9.5], [0.0, 1.0], [8.0, 8.4]]), rows[1]
    )
    assert set(row) == {"accuracy", "nll", "balanced_accuracy", "auroc", "average_precision"}
    assert row["auroc"] == 0.5
    targets = np.array([0.0, -1.0, 1.0], np.float32)
    quantity = data.Dataset("q", (rows[0], targets), (rows[0], targets), None)
    for span, factor in ((None, 1), ((100.0, 300.0), 100)):
        known = evaluation.Evaluation(None, None, None, quantity._replace(target_range=span))
        row = known.measured(targets[:, None] + 0.5, targets)
        assert row["rmse"] == row["mae"] == 0.5 * factor
        assert row["r2"] == pytest.approx(1 - 0.25 * 3 / 2)
    dense = nn.Dense(1)  # whose first bias is 0, and all inputs are
    params = dense.init(jax.random.key(0), rows[0][0])["params"]
    (tmp_path / "privacy.json").write_text("{}")
    measure = evaluation.Evaluation(
        dense,
        loss=dpjax.losses.of(dense, dpjax.losses.squared_error),
        rule=dpjax.clipping.flat(1.0),
        dataset=quantity,
    )
    measure.write(tmp_path, params, 4.0)
    diagnostics = np.load(tmp_path / "diagnostics.npz")  # the bound is adapted, the norms are not
    assert (diagnostics["bounds"].tolist(), diagnostics["norms"].tolist()) == (
        [4.0],
        [[0], [1], [1]],
    )
    assert json.loads((tmp_path / "privacy.json").read_text()) == {"parameters": digest(params)}
    saved = np.load(tmp_path / "evaluation.npz")
    assert saved["predictions"].tolist() == [0, 0, 0]
    assert saved["targets"].tolist() == targets.tolist()


@pytest.mark.thorough
def test_a_stopped_run_is_described_and_resumed(workshop, tmp_path, monkeypatch):
    measured = evaluation.Evaluation.evaluate

    def interrupted(self, state):
        if state.ledger.steps == 2:
            raise KeyboardInterrupt
        return measured(self, state)

    with monkeypatch.context() as stopped:
        stopped.setattr(evaluation.Evaluation, "evaluate", interrupted)
        with pytest.raises(KeyboardInterrupt):
            trained(tmp_path / "run")
    before = json.loads((tmp_path / "run" / "config.json").read_text())
    (tmp_path / "run" / "config.json").write_text(json.dumps({**before, "seconds": 100.0}))
    after = trained(tmp_path / "run")
    assert after["started"] == before["started"]
    assert 100 < after["seconds"] < 130
    rows = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows] == [1, 2]


@kills("cli/train/inputs.py", "        if not path.exists():\n", "        if True:\n")
@kills("cli/train/inputs.py", "if multipliers != asked:", "if False:")
def test_private_scales_are_asked_for_once(tmp_path):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(30, 2, 2, 3)), jnp.float32)
    asked = features.Normalization(examples=30, noise_multiplier=8.0, thresholds=(1.0, 1.0))
    path = tmp_path / "moments.npz"
    first = inputs.release_once(path, asked, x)
    again = inputs.release_once(path, asked, x)  # another secret key: no second query runs
    np.testing.assert_array_equal(again.mean, first.mean)
    assert path.stat().st_mode & 0o077 == 0
    other = features.Normalization(examples=30, noise_multiplier=2.0, thresholds=(1.0, 1.0))
    with pytest.raises(ledger.Refused, match="Their cost is spent"):
        inputs.release_once(path, other, x)
    with held(tmp_path, "moments.lock"), pytest.raises(ledger.Refused, match="is running there"):
        inputs.release_once(path, asked, x)


# --- audits ---


def test_an_audit_takes_the_flags_of_a_run_as_they_were(workshop):
    """A list within options needs quotes on a command line, and --epochs=40 is the default."""
    given = parsed("--epochs=40", "--noise_multiplier=1", "--max_epsilon=50", "--accountant=rdp")
    mechanism = command.plan(given).mechanism
    given["model_options"].value = ["widths=[8,4]"]
    config = json.loads(json.dumps({"flags": {**settings(given), "out": given.out}}))
    facts = json.loads(json.dumps(mechanism.facts))
    rebuilt = rebuilt_run.flags_of(types.SimpleNamespace(config=config, mechanism=facts))
    assert rebuilt.model_options == ["widths=[8,4]"]
    rebuilt["model_options"].value = []
    assert command.plan(rebuilt).mechanism.facts == mechanism.facts
    assert mechanism.steps == 96, "and not as many as fit"


NOISES = {"white": ["--sampling=poisson"], "tree": ["--sampling=balls_in_bins", "--noise=tree"]}


@kills("cli/audit/shadows.py", "keys[number]", "jax.random.key(number)", case="white", slow=True)
@pytest.mark.slow
@pytest.mark.parametrize("name", NOISES)
def test_a_run_is_audited_beside_its_claims(name, workshop, tmp_path, monkeypatch):
    """By default 200 steps of it: a strategy is for all of them."""
    trained(tmp_path / "run", *NOISES[name], "--steps=4", "--delta=1e-3", "--seed=1")
    rebuilt, fit, keys = rebuilt_run.rebuild(tmp_path / "run"), dpjax.fit, [jax.random.key(1)]

    def kept(algorithm, state, **options):
        keys.append(state.key)
        return fit(algorithm, state, **options)

    monkeypatch.setattr(dpjax, "fit", kept)
    given = copy.deepcopy(AUDIT_FLAGS)
    given(["audit", "--steps=2", "--pairs=8", "--canaries=20", "--attacks=canaries,lira"])
    given["shadows"].value = 4
    step, canaries, *ratios = audit_command.audit_run(given, rebuilt, tmp_path, given.attacks)
    assert "2 steps" in canaries.measured
    claimed, part = rebuilt.run.epsilon, rebuilt.planned.mechanism
    if name == "white":
        assert step.audit == "one step in which the row is drawn"
        assert canaries.claimed == pytest.approx(part.epsilon_of(part.multipliers[:2], 1e-3))
        assert canaries.claimed < claimed
    else:
        assert step.audit == "first step of correlated noise"
        assert step.claimed < accounting.epsilon(accounting.gaussian(1.0), 1e-3, "pld")
    assert [ratio.audit[:12] for ratio in ratios] == ["LiRA, online", "LiRA, offlin"]
    assert not any(ratio.refutes for ratio in ratios)
    assert len({*map(str, keys)}) == 5, "the run and its shadows have no noise in common"
    for file in ("audit.json", "audit.html"):
        assert (tmp_path / file).stat().st_mode & 0o077 == 0, "private numbers"
    np.savez("my.npz", x=np.zeros((40, 3)), y=np.arange(40) % 3)
    with pytest.raises(app.UsageError, match=r"expected the mechanism of run\.json"):
        rebuilt_run.rebuild(tmp_path / "run")
    (tmp_path / "run" / "privacy.json").unlink()
    with pytest.raises(app.UsageError, match="of a finished `dpjax train`"):
        rebuilt_run.rebuild(tmp_path / "run")


def test_canaries_are_noise_or_known_tokens():
    """White noise in the place of tokens would be no tokens, and every loss NaN."""
    draw, x = np.random.default_rng(0), np.ones((40, 2, 2), np.float32)

    def of(x):
        part = (x, np.zeros(40, int))
        return data.Dataset("own", part, part, 3)

    places, (noisy, _) = audit_canaries.with_canaries(of(x), 10, False, draw)
    np.testing.assert_allclose(np.linalg.norm(noisy, axis=(1, 2)), 2, rtol=1e-6)
    others = np.setdiff1d(np.arange(40), places)
    np.testing.assert_array_equal(noisy[others], 1)
    tokens = (np.arange(160).reshape(40, 4) % 9).astype(np.int32)
    places, (mixed, labels) = audit_canaries.with_canaries(of(tokens), 10, False, draw)
    assert sorted(mixed[places].ravel()) == sorted(tokens[places].ravel())
    assert {*labels} <= {0, 1, 2}
    targets = (x, np.zeros(40, np.float32))
    numbers = data.Dataset("own", targets, targets, None)
    places, (_, ends) = audit_canaries.with_canaries(numbers, 10, False, draw)
    assert {*ends[places]} == {-1, 1}
    people = numbers._replace(train=((x, np.zeros((40, 2), np.float32)), np.zeros((40, 2), bool)))
    places, ((noisy, ends), real) = audit_canaries.with_canaries(people, 10, True, draw)
    np.testing.assert_array_equal(noisy[places, 0], noisy[places, 1])
    np.testing.assert_array_equal(ends[places, 0], ends[places, 1])
    assert real.sum() == real[places].sum() == 20


def test_the_losses_of_sure_rows_are_no_ties():
    """In float32 the loss of each is 0, and a threshold would find all of them or none."""
    rows = np.float32([[logit, 0, 0] for logit in range(40, 60)]), np.zeros(20, np.int32)
    rebuilt = types.SimpleNamespace(
        dataset=data.Dataset("sure", rows, rows, 3),
        planned=types.SimpleNamespace(model=types.SimpleNamespace(apply=lambda _, x: x)),
        run=types.SimpleNamespace(delta=1e-5),
        released={},
    )
    for scores in audit_losses.attack_losses(rebuilt).scores:
        assert len(set(scores.tolist())) == 20


@kills("cli/audit/losses.py", "refutes=False", "refutes=True")
def test_losses_of_another_distribution_are_no_verdict(tmp_path, monkeypatch, capsys):
    """A sound run whose test rows are of another kind than its train rows."""
    far = np.arange(4000) / 4000
    found = auditing.audit_membership(far + 1, far, delta=1e-3)
    attack = audit_losses.Attack("losses", found, (far + 1, far), (np.arange(4000) % 2,) * 2)
    sound = audit.Line("step", "measured", 0.5, 1.0, 0.95, False)
    for name in ("audit_step", "line_of_step", "audit_canaries"):
        monkeypatch.setattr(audit_command, name, lambda *_: sound)
    monkeypatch.setattr(audit_command, "attack_losses", lambda *_: attack)
    card = {"true_positive_rates": [[at, 2.718 * at] for at in auditing.membership.RATES]}
    run = types.SimpleNamespace(delta=1e-3, epsilon=1.0, path=tmp_path, card=card)
    plan = types.SimpleNamespace(mechanism=mechanism_with(), persons=False)
    rebuilt = types.SimpleNamespace(run=run, planned=plan)
    given = types.SimpleNamespace(pairs=8, canaries=20, steps=2, attacks=audit_command.ATTACKS[:2])
    lines = audit_command.audit_run(given, rebuilt, tmp_path, given.attacks)
    assert lines[-1].bound > lines[-1].claimed
    assert audit_lines.ASSUMED in lines[-1].measured
    assert "of at most 0.3% at 0.1%" in lines[-1].measured
    audit.conclude(lines, 1.0)
    said = capsys.readouterr().out
    assert "Above the claim, and no verdict: losses." in said
    page = (tmp_path / "audit.html").read_text()
    assert "do not publish" in page
    assert "1.000" in page, "every class is told apart"
    with pytest.raises(SystemExit, match=r"EXCEEDS ITS CLAIM: step$"):
        audit.conclude([sound._replace(refutes=True)], 1.0)


def test_settings_that_no_flag_gives_are_planned_and_given_ones_are_kept(workshop):
    def settings(*words):
        given = copy.deepcopy(FLAGS)
        given(["train", "--dataset=my.npz", "--model=linear", "--accountant=rdp", *words])
        command.plan(given)
        return given

    given = settings()
    assert (given.optimizer, given.clipping, given.bound) == ("paced", "automatic", 1.0)
    assert round(given.epochs) == 200  # 48 rows are one batch
    given = settings("--steps=40", "--bound=0.3", "--learning_rate=0.1", "--batch_size=20")
    assert (given.optimizer, given.clipping, given.bound) == ("sgd", "flat", 0.3)
    assert (given.steps, given.batch_size, given.average) == (40, 20, 0.75)
    assert settings("--noise_multiplier=1", "--batch_size=20").optimizer == "sgd"


@pytest.mark.parametrize("epsilon", [3.0, 100.0])  # a bound that stays, and one that follows
def test_the_command_plans_the_bounds_that_the_function_plans(epsilon, workshop):
    by_command = command.plan(parsed("--accountant=rdp", f"--target_epsilon={epsilon}")).mechanism
    by_function = dpjax.plan(48, np.zeros(1), epsilon=epsilon, delta=1e-5).mechanism
    assert by_command.adaptive == by_function.adaptive
    assert by_command.facts["clipping"] == by_function.facts["clipping"]


@pytest.mark.thorough
@kills("cli/train/command.py", "how_chosen = planning.NO_SETTING", "pass")
@kills("cli/train/unsearched.py", "is_planned(given) and not typed", "is_planned(given)")
@pytest.mark.parametrize("words", [(), ("--batch_size=20", "--steps=4")], ids=["planned", "given"])
def test_the_files_of_a_planned_run_state_that_no_setting_was_chosen(words, workshop, tmp_path):
    given = copy.deepcopy(FLAGS)
    given(
        ["train", "--dataset=my.npz", "--model=linear", "--evaluations=1", "--delta=1e-3", *words]
    )
    given.out = str(tmp_path / "run")
    command.execute(given, command.plan(given))
    for name in ("statement.txt", "board.txt", "report.html"):
        text = " ".join((tmp_path / "run" / name).read_text().split())  # the board breaks lines
        assert ("No setting was chosen on these data." in text) == (not words), name
