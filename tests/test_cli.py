# SPDX-License-Identifier: Apache-2.0
"""The console command: its overview, its version, its subcommands and what it refuses."""

import copy
import dataclasses
import importlib
import json
import logging
import os
import pathlib
import signal
import subprocess
import sys
import time
import tomllib
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl import app, flags
from mutation import kills
from small_mechanisms import mechanism_with

import dpjax
from dpjax import accounting, auditing, cli, data, features, ledger, models, noise, schedules
from dpjax._files import lock
from dpjax.accounting.rounding import upwards
from dpjax.cli import compilation_cache
from dpjax.cli.audit import FLAGS as AUDIT_FLAGS
from dpjax.cli.audit import audited_run
from dpjax.cli.audit import job as audit_job
from dpjax.cli.compare import job as compare_job
from dpjax.cli.flag_checks import USUAL_NAMES, cure, writable_folder
from dpjax.cli.train import FLAGS, build, inputs, job, names, run_files
from dpjax.cli.train.flags import NEEDS, settings, without_effect
from dpjax.data.sources import SOURCES

ROOT = pathlib.Path(__file__).parent.parent


def python(*words):
    done = subprocess.run([sys.executable, *words], check=True, capture_output=True, text=True)
    return done.stdout


def test_the_overview_lists_every_subcommand(capsys):
    for words in ([], ["--help"]):
        cli.main(words)
        listed = capsys.readouterr().out
        assert "usage: dpjax SUBCOMMAND" in listed
        for name, purpose in cli.COMMANDS.items():
            assert f"{name} " in listed
            assert purpose in listed


def test_the_help_of_a_subcommand_lists_its_flags(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", sys.argv)
    cli.main(["train", "--help"])
    listed = capsys.readouterr().out
    for words in ("dpjax train --out=runs/demo", "--target_epsilon\n", "--[no]report\n"):
        assert words in listed
    groups = [line for line in listed.splitlines() if line.endswith(":") and line[:1].isupper()]
    titles = ["Data", "Model and loss", "Privacy", "Optimization", "Output", "Machine"]
    assert [f"{title}:" for title in titles] == groups[-6:]


def test_an_unknown_subcommand_is_refused_with_those_there_are():
    with pytest.raises(SystemExit, match=r"dpjax trian: .* Expected one of train"):
        cli.main(["trian"])


@pytest.mark.slow
def test_flags_of_a_subcommand_are_its_own():
    """No other program finds the flags of `dpjax train` among its own, whatever it imports."""
    known = python("-c", "import dpjax.cli.train; from absl import flags; print([*flags.FLAGS])")
    assert "target_epsilon" not in known
    assert isinstance(importlib.import_module("dpjax.cli.train").FLAGS, flags.FlagValues)


def test_the_console_script_and_the_module_are_the_command():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"dpjax": "dpjax.cli:main"}
    assert python("-m", "dpjax", "--version") == f"dpjax {project['version']}\n"


def test_the_version_is_that_of_the_project():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert dpjax.__version__ == project["version"]


def test_what_another_subcommand_needs_is_not_imported():
    words = "import sys, dpjax.cli; print([m for m in sys.modules if m in ('jax', 'dpjax.data')])"
    assert python("-c", words) == "[]\n"


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["trian"], "Usually the word is misspelt: dpjax train --help"),
        (["account"], "Usually the word is misspelt: dpjax --help"),
        (["train", "--dataset=mnits"], "Did you mean mnist?"),
        (["train", "--dataset=no.csv"], "there is no such file"),
        (["train", "--model=mpl"], "Did you mean mlp?"),
        (["train", "--model=nets.py:CNN"], "Usually the file was named"),
        (["train", "--loss=hinge"], "value should be one of"),
        (["train", "--stpes=3"], "Did you mean: steps"),
        (["train", "--epsilon=3"], "(here it is --target_epsilon)"),
        (["train", "my.csv"], "A file of data: --dataset=my.csv"),
        (["train", "--out="], "--out=: Expected a path."),
        (["train", f"--seed={2**32}"], "is not an integer in the range"),
        (["train", "--seed=-1"], "is not an integer in the range"),
        (["train", "--dataset=wine_quality"], "its target is a quantity"),
        (["train", "steps=3"], "begin with two dashes"),
        (["sweep", "--gird=a=1"], "Did you mean: grid"),
        (["compare", "--uot=page.html"], "Did you mean: out"),
        (["audit", "--stpes=3"], "Did you mean: steps"),
        (["report", "--out=a"], "Unknown command line flag 'out'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_in_the_flags_is_answered_before_jax_is_imported(words, answer, monkeypatch):
    """In a process in which an import of JAX fails."""
    program = "import sys; sys.modules['jax'] = None; import dpjax.cli; dpjax.cli.main()"
    monkeypatch.setenv("PYTHONWARNINGS", "error")
    done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True)
    assert done.returncode == 1
    assert answer in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("name", [name for name in cli.COMMANDS if name != "verify"])
def test_each_subcommand_describes_itself(name, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", sys.argv)
    cli.main([name, "--help"])
    assert f"dpjax {name}" in capsys.readouterr().out


def test_names_of_flags_are_those_of_the_tables():
    assert names.DATASETS + names.QUANTITIES == data.NAMES
    assert all((name in names.DATASETS) == bool(SOURCES[name].classes) for name in SOURCES)
    assert {*names.MODELS, "regression_mlp"} == {*models.NAMES}
    assert tuple(build.LOSSES) == names.LOSSES
    assert tuple(build.OPTIMIZERS) == names.OPTIMIZERS
    assert tuple(schedules.CURRICULA) == names.CURRICULA


@pytest.mark.parametrize(
    ("target", "most", "method"), [(3.0, None, "rdp"), (0.01, None, "pld"), (3.0, 0.01, "pld")]
)
def test_a_small_epsilon_of_a_schedule_is_accounted_by_distributions(target, most, method):
    given = types.SimpleNamespace(
        accountant="tightest", target_epsilon=target, max_epsilon=most, delta=1e-8
    )
    falling = schedules.table(np.linspace(2.0, 1.0, 10), 4)
    planned = mechanism_with(1000, 20, noise_multiplier=falling, steps=40)
    assert build.accountant(given, planned) == method


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

def plain(params, x):
    return x

def passed_on(**options):
    return Net(**options)

class Flat(nn.Module):
    def __call__(self, x):
        return x

class Batch(nn.Module):
    classes: int

    @nn.compact
    def __call__(self, x):
        return nn.BatchNorm(use_running_average=False)(nn.Dense(self.classes)(x))

class Drop(nn.Module):
    classes: int
    train: bool = True

    @nn.compact
    def __call__(self, x):
        return nn.Dropout(0.5, deterministic=not self.train)(nn.Dense(self.classes)(x))
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


def planned(*words):
    given = copy.deepcopy(FLAGS)
    few = ["--dataset=my.npz", "--batch_size=20", "--steps=4", "--noise_multiplier=1"]
    given(["train", *few, "--noreport", *words])
    return job.plan(given)


def test_a_model_of_the_user_is_a_module_a_class_or_a_function(workshop):
    assert planned(f"--model={workshop}:made").model.width == 4
    assert planned(f"--model={workshop}:Net", "--model_options=width=7").model.width == 7
    plan = planned(f"--model={workshop}:make")
    assert (plan.model.classes, plan.model.width, plan.dataset.classes) == (3, 2, 3)
    assert planned(f"--model={workshop}:passed_on").model.classes == 3
    assert not planned(f"--model={workshop}:Drop", "--model_options=train=false").model.train
    assert planned(f"--model={workshop}:make", "--classes=5").model.classes == 5


@pytest.mark.parametrize(
    ("model", "more", "answer"),
    [
        ("none_of_these:Net", [], "cannot be imported from"),
        ("{}:Nte", [], "it has Batch, Drop, Flat, Net, made, make, number, passed_on, plain"),
        ("{}:Net", ["--model_options=depth=2"], "takes classes, width, .*not depth"),
        ("{}:made", ["--model_options=width=2"], "takes no options"),
        ("{}:number", [], "makes a int; expected a Flax module"),
        ("{}:plain", [], "missing 2 required positional arguments"),
        ("{}:Net", ["--hidden=3"], "--model_options=name=value"),
        ("{}:made", ["--classes=4"], "returns 3 numbers for one example; expected 4, one for"),
        ("{}:Batch", [], "batch_stats"),
        ("{}:Drop", [], "dpjax train calls model.x., without a key.*--model_options=train=false"),
        ("{}:Flat", [], "the model has no parameters"),
        ("mlp", ["--stream"], "expected one of the two"),
        ("mlp", ["--model_options=name=3"], "no field name here; all of its fields have flags"),
        ("wide_resnet", ["--model_options=dept=3"], "no field dept here; it has depth, groups, st"),
        ("wide_resnet", ["--model_options=kernel_init=zeros"], "no field kernel_init here"),
        ("{}:Net", ["--model_options=width"], "--model_options=width: 'width' has no value"),
        ("wide_resnet", ["--model_options=width"], "--model_options=width: 'width' has no value"),
        ("{}:Net", ["--model_options=width=a"], "--model_options=width=a among them, .*'a'"),
        ("mlp", ["--loss_options=gamma"], "--loss_options=gamma: 'gamma' has no value; expected"),
        ("mlp", ["--model_options=classes=3"], "=classes=3: expected a .* Give --classes"),
        ("mlp", ["--model_options=features=[4]"], r"=features=\[4\]: .* Give --hidden"),
        ("linear", ["--model_options=features=[4]"], "Give --hidden, which is for --model=mlp"),
        ("mlp", ["--model_options=torch_init=true"], "Give --torch_init"),
        ("mlp", ["--model_options=activation=relu"], "Give --activation"),
        ("mlp", ["--activation=relu", "--model_options=activation=tanh"], "Give --activation"),
    ],
)
def test_a_model_that_cannot_be_used_is_answered(workshop, model, more, answer):
    with pytest.raises(app.UsageError, match=rf"(?s){answer}"):
        planned(f"--model={model.format(workshop)}", *more)


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["--steps=1000000000000000"], "not an integer in the range"),
        (["--epochs=1e300"], "below 2.14748e\\+09"),
    ],
)
def test_more_steps_than_can_be_counted_are_refused(words, answer):
    with pytest.raises(flags.Error, match=answer):
        copy.deepcopy(FLAGS)(["train", *words])


def test_a_plan_without_a_meaning_is_refused_in_one_sentence(workshop, monkeypatch):
    scale = ["--features=scattering", "--normalization=data", "--norm_multiplier=-1"]
    with pytest.raises(app.UsageError, match=r"no private run: .*noise_multiplier=-1\.0"):
        planned(*scale)

    def full(*_):
        raise MemoryError("Unable to allocate 8 GiB")

    monkeypatch.setattr(build, "build_mechanism", full)
    with pytest.raises(app.UsageError, match="no private run: Unable to allocate 8 GiB"):
        planned()


def test_a_run_without_bound_and_noise_is_planned(workshop):
    """For comparison: no multiplier but 0 goes with an infinite bound."""
    given = copy.deepcopy(FLAGS)
    given(["train", "--dataset=my.npz", "--batch_size=20", "--steps=4", "--noreport"])
    given(["train", "--bound=inf", "--noise_multiplier=0", "--noise_schedule=linear-down"])
    assert job.plan(given).mechanism.noise_multiplier == 0


@pytest.mark.parametrize("asked", [5, 40, None])
def test_canaries_are_counted_before_an_audit(asked):
    rows = types.SimpleNamespace(dataset=types.SimpleNamespace(examples=39))
    with pytest.raises(app.UsageError, match="expected 10 or more, and fewer than the 39 rows"):
        audited_run.number_of_canaries(rows, asked)
    assert audited_run.number_of_canaries(rows, 38) == 38


def test_a_limit_that_no_number_of_steps_reaches_is_refused(workshop, monkeypatch):
    monkeypatch.setattr(build, "_MOST_STEPS", 1000)
    given = copy.deepcopy(FLAGS)
    given(["train", "--dataset=my.npz", "--batch_size=20", "--noreport", "--max_epsilon=3"])
    given(["train", "--noise_multiplier=1e8"])
    with pytest.raises(app.UsageError, match="even 1,000 steps fit"):
        job.plan(given)


@pytest.mark.parametrize("out", ["afile", "afile/deeper", "/proc"])
def test_a_folder_that_cannot_be_written_is_refused_before_any_work(out, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "afile").touch()
    with pytest.raises(app.UsageError, match=f"--out={out}: no file can be written into"):
        writable_folder(out, pathlib.Path(out))
    for name, words in {"sweep": ["--grid=bound=1"], "audit": ["run"]}.items():
        command, binary = (importlib.import_module(f"dpjax.cli.{name}{m}") for m in ("", ".job"))
        given = copy.deepcopy(command.FLAGS)
        argv = given([name, *words, f"--out={out}"])
        # Neither draws a run nor audits one.
        monkeypatch.setattr(audited_run, "rebuild", lambda *_: None)
        with pytest.raises(app.UsageError, match=f"--out={out}: "):
            binary.run(given, argv)


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["--groups=-3"], "--groups=-3 --clipping=flat: --groups has .*--clipping=grouped alone"),
        (["--clipping=psac", "--groups=8"], "--groups=8 --clipping=psac: "),
        (["--bands=4"], "--bands=4 --noise=white --sampling=poisson: "),
        (["--bands=4", "--noise=tree", "--sampling=shuffled"], "--bands=4 --noise=tree"),
        (["--optimizer=adam", "--momentum=0.9"], "--momentum=0.9 --optimizer=adam: "),
        (["--floor=1e-6"], "--floor=1e-06 --optimizer=sgd: .*--optimizer=dp_adam alone"),
        (["--model=linear", "--hidden=8,4"], "--hidden=8,4 --model=linear: "),
        (["--model=linear", "--activation=relu"], "--activation=relu --model=linear: "),
        (["--normalization=data"], "--normalization=data --features=none: "),
        (["--cache_dir=a"], "--cache_dir=a --features=none: "),
        (["--norm_groups=27"], "--norm_groups=27 --features=none: "),
        (["--norm_multiplier=8"], "--norm_multiplier=8.0 --features=none: "),
        (["--search_multiplier=8"], "--search_multiplier=8.0 --features=none: "),
        (["--features=scattering", "--search_multiplier=8"], "--search_.* --normalization=group: "),
        (
            ["--features=scattering", "--normalization=data", "--norm_groups=9"],
            "--norm_groups=9 --normalization=data: ",
        ),
        (["--model=nets:Net", "--torch_init"], "--torch_init .*by --model_options=name=value"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_flag_without_effect_is_refused(words, answer, workshop):
    with pytest.raises(app.UsageError, match=f"^{answer}"):
        planned(*words)


def test_flags_with_an_effect_are_taken():
    for words in (
        "--clipping=grouped --groups=4",
        "--sampling=cyclic_poisson --bands=4",
        "--sampling=shuffled --noise=square_root --bands=4",
        "--optimizer=nesterov --momentum=0.5",
        "--optimizer=dp_adam --floor=1e-6",
        "--model=mlp --hidden=8 --activation=relu --torch_init",
        "--features=scattering --normalization=data --norm_multiplier=2 --search_multiplier=3",
        "--features=scattering --norm_groups=9 --cache_dir=a",
    ):
        given = copy.deepcopy(FLAGS)
        given(["train", *words.split()])
        assert not list(without_effect(given)), words


def test_the_table_of_effects_names_flags_and_their_values():
    for row, needed in NEEDS:
        for name, values in needed.items():
            assert {*row, name} <= {*FLAGS}
            for value in values:
                copy.deepcopy(FLAGS)(["train", f"--{name}={value}"])


def test_a_model_of_dpjax_has_the_fields_of_flags_and_options(workshop):
    want = models.by_name("mlp", 3, features=(8, 4), activation=jax.nn.relu, torch_init=True)
    assert planned("--hidden=8,4", "--activation=relu", "--torch_init").model == want
    given = copy.deepcopy(FLAGS)
    given(["train", "--model=wide_resnet", "--model_options=depth=10,width=1"])
    assert build.build_model(given, 3) == models.by_name("wide_resnet", 3, depth=10, width=1)


def test_options_hold_lists(workshop):
    read = build.read_options
    want = {"widths": [8, 4], "depth": 2, "name": "a"}
    assert read(["widths=[8", "4]", "depth=2", "name=a"]) == want
    given = copy.deepcopy(FLAGS)
    given(["train", "--model_options=widths=[8,4],depth=2"])
    assert read(given.model_options) == read(["widths=[8,4]", "depth=2"])
    assert read([]) == {}
    assert read(["a=False", "b=false", "c=None"]) == {"a": False, "b": False, "c": None}


def test_an_audit_takes_the_flags_of_a_run_as_they_were(workshop):
    """A list within options needs quotes on a command line, and --epochs=40 is the default."""
    given = copy.deepcopy(FLAGS)
    given(["train", "--dataset=my.npz", "--batch_size=20", "--noreport", "--epochs=40"])
    given(["train", "--noise_multiplier=1", "--max_epsilon=50", "--accountant=rdp"])
    mechanism = job.plan(given).mechanism
    given["model_options"].value = ["widths=[8,4]"]
    config = json.loads(json.dumps({"flags": {**settings(given), "out": given.out}}))
    facts = json.loads(json.dumps(mechanism.facts))
    run = types.SimpleNamespace(config=config, identity={"data": "a"}, mechanism=facts)
    found = audited_run._flags(run)
    assert settings(found) == settings(given), "the flags that run.json holds"
    audited_run._fix_steps(found, run)
    assert found.model_options == ["widths=[8,4]"]
    found["model_options"].value = []
    assert job.plan(found).mechanism.facts == mechanism.facts
    assert mechanism.steps == 96, "and not as many as fit"


def trained(folder, *words):
    """A run of two steps, as the command line trains it."""
    given = copy.deepcopy(FLAGS)
    given(["train", "--dataset=my.npz", "--batch_size=20", "--steps=2", "--evaluations=1"])
    given(["train", "--noise_multiplier=1", "--accountant=rdp", "--noreport", f"--out={folder}"])
    given(["train", *words])
    job.execute(given, job.plan(given), time.time())
    return folder


@pytest.mark.slow
@kills("cli/audit/audited_run.py", "configuration_of(configured, planned.dataset)", "{}", slow=True)
def test_an_audit_is_of_the_data_and_the_program_that_ran(workshop, tmp_path, monkeypatch):
    folder = trained(tmp_path / "run", f"--model={workshop}:Net")
    assert audited_run.rebuild(folder).unseen == ""
    x, y = np.load("my.npz")["x"], np.load("my.npz")["y"]
    for rows in ({"x": x[::-1], "y": y}, {"x": x[:, ::-1], "y": y}):
        np.savez("my.npz", **rows)
        with pytest.raises(app.UsageError, match=r"another run than its run.json:\n  data: "):
            audited_run.rebuild(folder)
    np.savez("my.npz", x=x, y=y)
    with monkeypatch.context() as changed:
        changed.setattr(sys.modules[workshop].nn, "tanh", jax.nn.relu)
        with pytest.raises(app.UsageError, match=r"run\.json:\n  program\.functions: "):
            audited_run.rebuild(folder)
    with monkeypatch.context() as moved:
        moved.chdir(tmp_path / "run")
        with pytest.raises(app.UsageError, match="Usually the run was started in another folder"):
            audited_run.rebuild(folder)
    run = json.loads((folder / "run.json").read_text())
    run["numerics"]["jax"] = "0.1"
    run["program"] = {"functions": "of that version"}
    (folder / "run.json").write_text(json.dumps(run))
    (folder / "digest").write_text(run_files._digest(folder))
    assert "were not compared" in audited_run.rebuild(folder).unseen


@pytest.mark.slow
def test_a_streamed_run_is_audited_in_memory(workshop, tmp_path, monkeypatch):
    """The hash of a stream is of some rows alone."""
    whole = data.load_file("my.npz", None, None)
    rows = list(zip(*map(np.asarray, whole.train), strict=True))
    places = []
    monkeypatch.setattr(job.data, "load", lambda _, place: places.append(place) or whole)
    streamed = whole._replace(train=data.Stream(rows))
    monkeypatch.setattr(job.data, "stream", lambda *_: streamed)
    folder = trained(tmp_path / "run", "--dataset=digits", "--stream")
    assert audited_run.rebuild(folder, "there").dataset is whole
    assert places[-1] == "there"
    streamed = whole._replace(train=data.Stream([(x + 1, y) for x, y in rows]))
    with pytest.raises(app.UsageError, match=r"run\.json:\n  data: \"48 streamed"):
        audited_run.rebuild(folder)


def begun(*words):
    """A run as `audit` builds it again, whose released parameters are its first ones."""
    plan = planned(*words)
    (x,), _ = plan.dataset.rows(np.array([0]))
    params = plan.model.init(jax.random.key(0), jnp.asarray(x))["params"]
    run = types.SimpleNamespace(delta=1e-3, epsilon=plan.mechanism.epsilon(1e-3, plan.method))
    return audited_run.Rebuilt(run, plan, plan.dataset, params, params)


NOISES = {
    "white": ["--sampling=poisson"],
    "tree": ["--sampling=balls_in_bins", "--noise=tree"],
    "amplified": ["--sampling=cyclic_poisson", "--noise=banded", "--bands=2"],
}


@pytest.mark.slow
@kills("cli/audit/audited_run.py", "multipliers[:steps]", "multipliers", case="white", slow=True)
@kills(
    "cli/audit/audited_run.py",
    "        preparation=(),",
    "        preparation=(),\n        steps=steps,",
    case="tree",
    slow=True,
)
@kills("cli/audit/job.py", "noise is not None", "noise is None", case="tree", slow=True)
@pytest.mark.parametrize("name", NOISES)
def test_an_audit_runs_a_part_of_any_run(name, workshop, tmp_path, monkeypatch):
    """By default 200 steps of it: a strategy is for all of them."""
    built = begun(*NOISES[name])
    monkeypatch.setattr(audited_run, "rebuild", lambda *_: built)
    given = copy.deepcopy(AUDIT_FLAGS)
    given(["audit", "--steps=2", "--pairs=8", "--canaries=20"])
    step, canaries, _ = audit_job.audit_run(given, tmp_path, tmp_path)
    assert "2 steps" in canaries.measured
    whole, part = built.run.epsilon, built.planned.mechanism
    if name == "white":
        part = dataclasses.replace(part, steps=2).epsilon(1e-3, built.planned.method)
        assert canaries.claimed == pytest.approx(part)
        assert step.audit == "one step in which the row is drawn"
    else:
        assert step.audit == "first step of correlated noise"
        assert step.claimed < accounting.epsilon(accounting.gaussian(1.0), 1e-3, "pld")
    assert canaries.claimed == pytest.approx(whole) if name == "tree" else canaries.claimed < whole


@pytest.mark.slow
def test_canaries_among_texts_are_made_of_tokens_that_the_model_knows(workshop):
    """White noise in their place would be no tokens, and every loss NaN."""
    tokens = (np.arange(80 * 4).reshape(80, 4) % 9).astype(np.int32)
    np.savez("texts.npz", x=tokens, y=np.arange(80) % 2)
    options = "--model_options=width=4,heads=1,depth=1,length=4,vocabulary=9"
    built = begun("--dataset=texts.npz", "--model=text_transformer", options)
    found = audited_run.canaries(built, 20, 2, 0.95)
    assert found.canaries == 20
    assert found.epsilon >= 0


@pytest.mark.slow
def test_the_audit_of_one_step_takes_no_row_that_contributes_nothing(workshop, monkeypatch):
    x = np.random.default_rng(0).normal(size=(60, 3))
    x[1] = 1e30  # its gradient has no finite norm
    np.savez("my.npz", x=x, y=np.arange(60) % 3)
    asked = []
    monkeypatch.setattr(auditing, "audit_algorithm", lambda *given, **_: asked.append(given[3]))
    audited_run.step(begun(), 8, 0.95)
    assert len(asked) == 1
    assert asked != [1]


@kills("cli/audit/job.py", "refutes=False", "refutes=found.epsilon > claimed", slow=True)
@pytest.mark.slow
def test_losses_of_another_distribution_are_no_verdict(workshop, tmp_path, monkeypatch, capsys):
    """A sound run whose test rows are of another kind than its train rows."""
    built, far = begun("--sampling=poisson"), np.arange(4000) / 4000
    found = auditing.audit_membership(far + 1, far, delta=1e-3)
    monkeypatch.setattr(audited_run, "rebuild", lambda *_: built)
    monkeypatch.setattr(audited_run, "membership", lambda *_: (found, (far + 1, far)))
    given = copy.deepcopy(AUDIT_FLAGS)
    given(["audit", "--steps=2", "--pairs=8", "--canaries=20"])
    lines = audit_job.audit_run(given, tmp_path, tmp_path)
    assert lines[-1].bound > lines[-1].claimed
    assert not any(line.refutes for line in lines)
    assert audit_job.ASSUMED in lines[-1].measured
    audit_job.conclude(lines, 1.0)
    said = capsys.readouterr().out
    assert "Above the claim, and no verdict: losses of the released model." in said
    assert "No audit refutes its claim" in said


def test_the_usual_names_of_flags_are_names_of_flags_here():
    for name, here in USUAL_NAMES.items():
        assert here in FLAGS, here
        assert name not in FLAGS, name
    with pytest.raises(flags.UnrecognizedFlagError) as found:
        copy.deepcopy(FLAGS)(["train", "--lr=0.1"])
    assert cure(found.value, FLAGS) == " (here it is --learning_rate)"
    assert not cure(found.value, importlib.import_module("dpjax.cli.compare").FLAGS)
    assert not cure(ValueError("lr"), FLAGS)


@pytest.mark.parametrize(
    ("given", "takes"),
    [
        ("--target_epsilon=three", " (expected a number)"),
        ("--steps=1.5", " (expected an integer in the range [0, 2147483647])"),
        ("--sampling=uniform", ""),  # the message lists the words
        ("--target_epsilon=-1", ""),  # so does that of a range
    ],
)
def test_a_value_that_a_flag_cannot_read_is_answered_with_what_it_takes(given, takes):
    with pytest.raises(flags.Error) as found:
        copy.deepcopy(FLAGS)(["train", given])
    assert cure(found.value, FLAGS) == takes


def test_remarks_of_orbax_are_not_shown_and_its_errors_are():
    def record(level, path):
        return logging.LogRecord("absl", level, path, 1, "words", None, None)

    orbax = "site-packages/orbax/checkpoint/checkpoint_manager.py"
    assert not cli._not_of_orbax(record(logging.WARNING, orbax))
    assert cli._not_of_orbax(record(logging.ERROR, orbax))
    assert cli._not_of_orbax(record(logging.WARNING, "dpjax/training/run_folder.py"))


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("name", "words", "answer"),
    [
        ("train", "", "resumes from what was saved"),
        ("sweep", "", "resumes from what was saved"),
        ("audit", "", "the same command begins again."),
        ("report", "", "the same command begins again."),
        ("compare", "", "the same command begins again."),
        ("train", "stopped at step 2 of 3", "dpjax train: stopped at step 2 of 3\n"),
    ],
)
def test_ctrl_c_is_answered_in_one_sentence(name, words, answer, capsys, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt(*filter(None, [words]))

    monkeypatch.setattr(sys, "argv", [f"dpjax {name}"])
    monkeypatch.setattr(importlib.import_module(f"dpjax.cli.{name}.job"), "run", interrupted)
    with pytest.raises(SystemExit) as ended:
        cli.run_command(name)
    said = capsys.readouterr().err
    assert ended.value.code == 130
    assert answer in said
    assert said.count("\n") == 2


@pytest.mark.parametrize("name", ["train", "sweep", "compare", "audit"])
def test_an_empty_folder_of_results_is_refused(name):
    given = copy.deepcopy(importlib.import_module(f"dpjax.cli.{name}").FLAGS)
    with pytest.raises(flags.IllegalFlagValueError, match="Usually a variable of the shell"):
        given([name, "--out= "])


def test_a_terminal_of_ascii_shows_what_it_can():
    code = "import dpjax.cli as c; c.COMMANDS['R\\u00e9nyi'] = ''; c.main(['--help'])"
    ascii_alone = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", code], env=ascii_alone, capture_output=True)
    assert (done.returncode, b"R?nyi" in done.stdout) == (0, True), done.stderr


def test_a_process_without_standard_output_ends_well():
    code = "import sys; sys.stdout = None; import dpjax.cli as c; c.main(['--help'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_reader_that_closes_the_pipe_ends_the_process_quietly():
    command = [sys.executable, "-c", "import dpjax.cli; dpjax.cli.main(['train', '--help'])"]
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as closed:
        done = subprocess.run(command, stdout=closed, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (141, "")


@kills(
    "cli/train/run_files.py",
    'replace(folder / "digest", _digest(folder))',
    'replace(folder / "digest", _digest(folder), public=True)',
    slow=True,
)
def test_an_interrupted_run_describes_what_it_released(workshop, tmp_path, monkeypatch):
    """Another run can continue from its parameters, and finds no parameters of an earlier run."""
    given = copy.deepcopy(FLAGS)
    given(["train", "--dataset=my.npz", f"--out={tmp_path / 'run'}", "--batch_size=20"])
    given(["train", "--steps=4", "--noise_multiplier=1", "--noreport"])
    plan = job.plan(given)
    named = plan.dataset._replace(class_names=("a", "b", "c"), columns=("x", "y", "z"))

    def interrupted(*_, directory, configuration, **__):
        settings = {name: value for name, value in configuration.items() if released}
        (directory / "run.json").write_text(json.dumps({"--bound": 7, **settings}))
        (directory / "params.msgpack").write_bytes(b"parameters")
        raise KeyboardInterrupt

    monkeypatch.setattr(job, "train", interrupted)
    monkeypatch.setattr(sys, "argv", ["dpjax train", "--out=my runs"])
    for released in (False, True):
        with pytest.raises(KeyboardInterrupt):
            job.execute(given, plan._replace(dataset=named), time.time())
        assert (tmp_path / "run" / "config.json").exists() == released
    assert run_files.released(tmp_path / "run") == b"parameters"
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["class_names"] == {"0": "a", "1": "b", "2": "c"}
    assert config["columns"] == ["x", "y", "z"]
    assert config["command"] == "dpjax train '--out=my runs'", "to be copied"
    with pytest.raises(KeyboardInterrupt):
        job.execute(given, plan, time.time() - 100)
    resumed = json.loads((tmp_path / "run" / "config.json").read_text())
    assert resumed["started"] == config["started"]
    assert 100 <= resumed["seconds"] - config["seconds"] < 130
    (tmp_path / "run" / "notes.txt").touch()
    left = ["command.lock", "config.json", "digest", "params.msgpack", "run.json"]
    assert run_files.present(tmp_path / "run") == left
    assert (tmp_path / "run" / "digest").stat().st_mode & 0o077 == 0
    assert (tmp_path / "run" / "digest").read_text() not in str(config)
    (tmp_path / "run" / "params.msgpack").write_bytes(b"others")
    with pytest.raises(app.UsageError, match="or was stopped by Ctrl-C"):
        run_files.released(tmp_path / "run")


def test_a_run_that_has_ended_keeps_its_time(workshop, tmp_path):
    folder, given = tmp_path / "run", copy.deepcopy(FLAGS)
    given(["train", "--dataset=my.npz", f"--out={folder}", "--batch_size=20", "--steps=4"])
    given(["train", "--noise_multiplier=1", "--noreport"])
    folder.mkdir()
    for name in ("run.json", "params.msgpack"):
        (folder / name).write_text("{}")
    dataset = job.load(given)

    def described(**facts):
        job.describe(given, dataset, time.time() - 50, run_files.described(folder), **facts)
        return json.loads((folder / "config.json").read_text())

    assert (once := described(parameters=3))["seconds"] >= 50
    assert described(parameters=3) == once
    (folder / "params.msgpack").write_text("of another run, since the folder was forgotten")
    assert described(parameters=4)["parameters"] == 4
    (folder / "run.json").unlink()
    assert run_files.described(folder) == {}


def test_a_folder_is_locked_from_its_queries_to_its_report(workshop, tmp_path, monkeypatch):
    """Two commands that query the same data would release twice what one of them counts."""
    folder, seen = tmp_path / "run", []
    words = ["train", "--dataset=my.npz", f"--out={folder}", "--batch_size=20", "--steps=2"]
    given = copy.deepcopy(FLAGS)
    given([*words, "--noise_multiplier=1", "--noreport", "--evaluations=1"])
    plan = job.plan(given)

    def looks(name, answer):
        def look(*args, **_):
            seen.append((name, lock(folder / "command.lock")))
            if name == "train":
                (folder / "run.json").touch()
            return answer(*args)

        return look

    monkeypatch.setattr(job.inputs, "with_scale", looks("queries", lambda _, dataset, *__: dataset))
    monkeypatch.setattr(job, "train", looks("train", lambda *_: (None, None, [])))
    monkeypatch.setattr(job, "report", looks("report", lambda *_: None))
    job.execute(given, plan, time.time())
    assert seen == [("queries", None), ("train", None), ("report", None)]
    other = lock(folder / "command.lock")
    assert other is not None, "free again"
    given([*words, "--overwrite"])
    with pytest.raises(dpjax.ledger.Refused, match="is running there"):
        job.execute(given, plan, time.time())
    assert (len(seen), run_files.present(folder)) == (3, ["command.lock", "run.json"])
    os.close(other)
    (folder / "audit.json").touch()
    job.execute(given, plan, time.time())
    assert (len(seen), run_files.present(folder)) == (6, ["command.lock", "lock", "run.json"])


@kills("cli/train/job.py", "fingerprint(dataset.test)", "fingerprint(())", slow=True)
def test_a_run_is_of_one_test_part(workshop, tmp_path, monkeypatch):
    """A finished run has the accuracy of its test part; predictions of another would differ."""
    given = copy.deepcopy(FLAGS)
    words = ["train", "--dataset=my.npz", f"--out={tmp_path / 'run'}", "--batch_size=20"]
    given([*words, "--steps=2", "--noise_multiplier=1", "--noreport"])
    plan, found = job.plan(given), []
    monkeypatch.setattr(job, "train", lambda *_, configuration, **__: found.append(configuration))
    for test in ((x := plan.dataset.test)[0], x[1]), (x[0], 2 - x[1]), (1 + x[0], x[1]):
        with pytest.raises(TypeError):  # nothing was trained
            job.execute(given, plan._replace(dataset=plan.dataset._replace(test=test)), time.time())
    assert len({each["test data"] for each in found}) == 3


def test_tokens_without_a_vector_are_refused_before_a_step(workshop):
    tokens = np.arange(60 * 4).reshape(60, 4) % 9
    words = ["--dataset=texts.npz", "--model=text_transformer"]

    def plan(x, *options):
        np.savez("texts.npz", x=x.astype(np.int32), y=np.arange(60) % 2)
        options = ("width=4", "heads=1", "depth=1", "length=4", *options)
        return planned(*words, f"--model_options={','.join(options)}")

    assert plan(tokens, "vocabulary=9").model.vocabulary == 9
    with pytest.raises(app.UsageError, match=r"vocabulary=8: .* to 7, and found 0 to 8\. "):
        plan(tokens, "vocabulary=8")
    assert plan(tokens - 1, "vocabulary=8", "padding=-1")
    with pytest.raises(app.UsageError, match="found -1 to 7"):
        plan(tokens - 1, "vocabulary=8")


def test_the_price_of_a_run_that_continues_another_counts_both(workshop, caplog):
    given = copy.deepcopy(FLAGS)
    given(["train", "--dataset=my.npz", "--batch_size=20", "--noise_multiplier=1", "--delta=1e-3"])
    given(["train", "--steps=4", "--accountant=rdp", "--continue_from=before"])
    plan = planned()
    assert "together" not in job.price_in_words(given, plan)
    before = plan.mechanism.spent(plan.mechanism.multipliers)
    mechanism = dataclasses.replace(plan.mechanism, before=(before,), preparation=(2.0,))
    plan = plan._replace(mechanism=mechanism, method="rdp")
    spent = upwards(planned().mechanism.epsilon(1e-3, "rdp"))
    both = f"which spent {spent}, cost epsilon {upwards(mechanism.epsilon(1e-3, 'rdp'))} at"
    assert both in job.price_in_words(given, plan)
    assert not caplog.text
    given["noise_multiplier"].value = None
    given["target_epsilon"].value = 1.05 * float(spent)
    job.price_in_words(given, plan)
    assert "left less than a tenth of the target" in caplog.text
    caplog.clear()
    given["target_epsilon"].value = 1.2 * float(spent)
    job.price_in_words(given, plan)
    assert not caplog.text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--optimizer=dp_adam --sampling=cyclic_poisson --noise=banded", "describe no private run"),
        ("--sampling=fixed --accountant=pld", r"--accountant=pld --sampling=fixed: "),
        (
            "--sampling=fixed --accountant=pld --max_epsilon=2 --delta=1e-3",
            r"--accountant=pld --sampling=fixed: ",
        ),
    ],
)
def test_flags_that_no_accountant_or_optimizer_takes_are_told(words, message, workshop):
    with pytest.raises(app.UsageError, match=message):
        planned(*words.split())


def test_a_full_disk_is_answered_in_words(workshop, tmp_path, monkeypatch, capsys):
    given = copy.deepcopy(FLAGS)
    words = ["train", "--dataset=my.npz", f"--out={tmp_path / 'run'}", "--batch_size=20"]
    given([*words, "--steps=2", "--noise_multiplier=1", "--accountant=rdp", "--noreport"])
    full = OSError(28, "No space left on device")
    monkeypatch.setattr(compilation_cache, "switch_on", lambda: None)

    def raises(*_, **__):
        raise full

    monkeypatch.setattr(job, "train", raises)
    with pytest.raises(SystemExit, match="No space left on device\nUsually the disk is full"):
        job.run(given, [])
    full = OSError(13, "Permission denied", "weights.npz")
    with pytest.raises(SystemExit, match=r"^\[Errno 13\] Permission denied: 'weights.npz'$"):
        job.run(given, [])
    full = BrokenPipeError()
    with pytest.raises(BrokenPipeError):
        job.run(given, [])
    plan, full = job.plan(given), OSError(28, "No space left on device")
    monkeypatch.setattr(job.reports, "report", raises)
    monkeypatch.setattr(job, "describe", lambda *_, **__: None)
    given(["train", "--report"])
    state = types.SimpleNamespace(ledger=dpjax.ledger.empty())
    job.report(given, plan.mechanism, plan.dataset, ({}, state, []), time.time(), {})
    said = capsys.readouterr().out
    assert f"The report was not drawn: {full}; `dpjax report {tmp_path / 'run'}` draws it" in said
    assert "Recompute epsilon" in said


def test_data_that_cannot_be_read_are_answered(workshop, tmp_path):
    (tmp_path / "words.csv").write_text("a,b\nx,1\n")
    with pytest.raises(app.UsageError, match="expected finite numbers in every column"):
        planned("--dataset=words.csv")
    with pytest.raises(app.UsageError, match="a named data set has its own labels"):
        planned("--dataset=digits", "--classes=10")
    (tmp_path / "table.csv").write_text("a,kind,b\n" + "1,no,2\n2,yes,3\n" * 20)
    assert planned("--dataset=table.csv", "--label=kind").dataset.columns == ("a", "b")
    with pytest.raises(app.UsageError, match=r"--continue_from=none: .*found no run\.json"):
        planned("--continue_from=none")
    facts = json.loads(json.dumps(mechanism_with().identity))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text(json.dumps(facts))
    (tmp_path / "run" / "params.msgpack").touch()
    with pytest.raises(app.UsageError, match=r"by dpjax\.fit, .*training\.earlier\('run'\)\)"):
        planned("--continue_from=run")
    with pytest.raises(app.UsageError, match=r"--model=mlp: .*expected one of elu"):
        planned("--activation=foo")
    with pytest.raises(app.UsageError, match=r"--out=words\.csv.*a file has its name"):
        job.prepared(pathlib.Path("words.csv"), False).__enter__()


def test_a_missing_matplotlib_is_found_before_the_work(workshop, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # found, and not importable
    given = copy.deepcopy(FLAGS)
    given(["train", "--report"])
    with pytest.raises(app.UsageError, match="or give --noreport"):
        job.run(given, ["train"])
    with pytest.raises(app.UsageError, match=r"cannot be imported \(.*--upgrade matplotlib\)\.$"):
        audit_job.run(AUDIT_FLAGS, ["audit", "run"])
    with pytest.raises(app.UsageError, match=r"cannot be imported \(.*--upgrade matplotlib\)\.$"):
        compare_job.compare(["run"], "page.html")


@pytest.fixture
def no_cache():
    """Without the compilation cache that tests share."""
    settings = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in settings}
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def test_compiled_programs_stay_on_the_disk(no_cache, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compilation_cache.switch_on()
    (folder,) = (tmp_path / "dpjax").iterdir()
    assert jax.config.jax_compilation_cache_dir == str(folder)
    assert folder.stat().st_mode & 0o077 == 0, "programs may hold data as constants"
    jax.config.update("jax_compilation_cache_dir", "chosen")
    compilation_cache.switch_on()
    assert jax.config.jax_compilation_cache_dir == "chosen"


def test_without_a_home_nothing_is_kept(no_cache, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")
    compilation_cache.switch_on()
    assert jax.config.jax_compilation_cache_dir is None


def test_without_a_known_home_nothing_is_written_here(no_cache, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    compilation_cache.switch_on()
    assert not list(tmp_path.iterdir())
    assert jax.config.jax_compilation_cache_dir is None


def test_a_path_begins_at_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "my.npz").touch()
    given = copy.deepcopy(FLAGS)
    paths = ("out", "data_dir", "cache_dir", "continue_from", "dataset")
    given(["train", *(f"--{name}=~/my.npz" for name in paths)])
    assert {given[name].value for name in paths} == {str(tmp_path / "my.npz")}
    for name in ("sweep", "compare", "audit"):
        given = copy.deepcopy(importlib.import_module(f"dpjax.cli.{name}").FLAGS)
        given([name, "--out=~/a"])
        assert given.out == str(tmp_path / "a")


@pytest.mark.slow
def test_a_run_of_the_users_is_stopped_in_one_sentence_and_resumed_in_another(workshop, tmp_path):
    command = [sys.executable, "-m", "dpjax", "train", "--dataset=my.npz", "--out=run"]
    command += [f"--model={workshop}:Net", "--batch_size=20", "--noreport", "--seed=1"]
    command += ["--steps=60000", "--evaluations=600", "--noise_multiplier=300"]
    log = tmp_path / "run" / "metrics.jsonl"
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    for expected in ("", "The run in run resumes at step"):
        rows = log.read_text().count("\n") if log.exists() else 0
        child = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment
        )
        while not (log.exists() and log.read_text().count("\n") > rows):
            assert child.poll() is None
            time.sleep(0.01)
        child.send_signal(signal.SIGINT)
        said = child.communicate(timeout=120)[1]
        assert child.returncode == 130
        assert "Traceback" not in said
        assert "of 60,000, saved in run. The same command resumes the run." in said
        assert expected in said
    assert json.loads((tmp_path / "run" / "run.json").read_text())["--dataset"] == "my.npz"


@kills("cli/train/inputs.py", '        "seed": str(seed),\n', "", slow=True)
@kills("cli/train/inputs.py", 'kept.get(name, "unknown")', "asked[name]", slow=True)
@kills("cli/train/inputs.py", "normalization, key, x, seed))", "normalization, key, x))", slow=True)
def test_moments_with_public_noise_are_of_no_run_with_a_secret_key(tmp_path):
    """A run with a seed may be killed after its queries, before any other file names the seed."""
    x = np.random.default_rng(0).normal(size=(30, 2, 2, 3)).astype(np.float32)
    dataset = data.Dataset("mine", (x, np.zeros(30)), (x, np.zeros(30)), 2)
    normalization = features.Normalization(examples=30, noise_multiplier=8.0, thresholds=(1.0, 1.0))

    def scaled(seed):
        given = copy.deepcopy(FLAGS)
        given(["train", "--features=scattering", "--normalization=data"])
        given.seed = seed
        key = noise.secret_key() if seed is None else jax.random.key(seed)
        return inputs.with_scale(given, dataset, normalization, key, tmp_path).train[0]

    first = scaled(0)
    for seed, words in ((None, "seed: 0 there, None now"), (1, "seed: 0 there, 1 now")):
        with pytest.raises(ledger.Refused, match=words):
            scaled(seed)
    np.testing.assert_array_equal(scaled(0), first)
    (tmp_path / "moments.npz").unlink()
    first = scaled(None)
    np.testing.assert_array_equal(scaled(None), first)  # another secret key: no second query runs
    with pytest.raises(ledger.Refused, match="seed: None there, 0 now"):
        scaled(0)
    assert (tmp_path / "moments.npz").stat().st_mode & 0o077 == 0, "it has a hash of the features"
