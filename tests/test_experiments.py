# SPDX-License-Identifier: Apache-2.0
"""The binaries: each runs, in another process, and what it leaves behind can be checked."""

import copy
import json
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from experiments.correlated import METHODS
from mutation import kills
from run_binary import Outcome, run

import dpjax
from dpjax.cli.flag_sets.train import FLAGS as FLAGS_OF_TRAIN
from dpjax.cli.train.build import build_mechanism


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """The one that is begun as users begin it, so that imports may not warn either."""
    folder = tmp_path_factory.mktemp("demo")
    command = [sys.executable, "-m", "dpjax", "train", "--out", folder]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder, Outcome(done.stdout, done.stderr)


@pytest.mark.thorough
def test_the_demo_keeps_its_promise(demo):
    folder, outcome = demo
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["epsilon"] <= 3.0
    assert rows[-1]["delta"] == 1e-5
    card = json.loads((folder / "privacy.json").read_text())
    assert card["mechanism"]["sampling"]["name"] == "poisson"
    assert card["mechanism"]["sampling"]["examples"] == 1437
    assert card["epsilon"]["pld"]["value"] <= 3.0
    assert card["randomness"] == "fresh"
    assert "Privacy statement" in outcome.stdout
    assert "Test accuracy" in outcome.stdout
    assert str(folder) in outcome.stdout
    printed, _, _ = (folder / "statement.txt").read_text().partition("\n\nReferences\n")
    assert printed in outcome.stdout
    assert (folder / "params.msgpack").stat().st_size > 1000
    # Progress and nothing else: no warnings, no noise of the libraries below.
    assert all(line.startswith("step ") for line in outcome.stderr.splitlines())
    assert (
        "200 steps with noise multiplier 14.05 cost epsilon 3.00 at delta=1e-05, by pld"
        in outcome.stdout
    )


@pytest.mark.thorough
def test_the_demo_learns(tmp_path):
    """With a key that repeats: 360 test rows and fresh noise scatter by a point."""
    command = [sys.executable, "-m", "dpjax", "train", "--noreport", "--seed=0", "--out", tmp_path]
    subprocess.run(command, check=True, capture_output=True)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["accuracy"] >= 0.93


@pytest.mark.thorough
def test_the_demo_ends_with_a_report_in_which_no_figure_is_missing(demo):
    folder, _ = demo
    page = (folder / "report.html").read_text()
    for title in ("Test accuracy against epsilon", "Reliability"):
        assert title in page
    assert page.count("<svg") == len(list((folder / "figures").glob("*.png"))) == 9
    assert "There is no " not in page


@pytest.mark.slow
def test_the_same_command_shows_a_finished_run_again_and_another_is_refused(demo):
    folder, outcome = demo
    before = (folder / "params.msgpack").read_bytes()
    again = run("dpjax", "train", "--out", folder, "--noreport")
    words = next(line for line in outcome.stdout.splitlines() if line.startswith("Test accuracy"))
    assert words in again.stdout
    assert (folder / "params.msgpack").read_bytes() == before
    assert again.stderr.count("\n") == 1, "no step was run"
    assert "no step runs again" in again.stderr
    refused = run("dpjax", "train", "--out", folder, "--bound=1", status=1).stderr
    for word in ("bounds: [0.5] there, [1.0] now", "--overwrite", "--continue_from"):
        assert word in refused


@pytest.mark.slow
def test_a_killed_binary_goes_on_and_ends_as_if_nothing_had_been(tmp_path):
    """SIGKILL in the middle; the private scales of the data are not asked for again."""
    flags = ["--epochs=30", "--save_every=4", "--evaluations=10", "--noreport", "--seed=1"]
    command = [sys.executable, "-m", "dpjax", "train", "--out", tmp_path / "killed", *flags]
    log = tmp_path / "killed" / "metrics.jsonl"
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, **silent) as process:
        while not (log.exists() and log.read_text().count("\n") > 2):
            assert process.poll() is None
            time.sleep(0.01)
        process.kill()
    assert process.returncode == -signal.SIGKILL
    for name in ("killed", "whole"):
        run("dpjax", "train", "--out", tmp_path / name, *flags)
    rows = [
        [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("killed", "whole")
    ]
    for one, other in zip(*rows, strict=True):
        assert {**one, "examples_per_second": 0} == {**other, "examples_per_second": 0}
    parameters = [(tmp_path / name / "params.msgpack").read_bytes() for name in ("killed", "whole")]
    assert parameters[0] == parameters[1]
    cards = [
        json.loads((tmp_path / name / "privacy.json").read_text()) for name in ("killed", "whole")
    ]
    assert cards[0] == cards[1]


@pytest.mark.slow
def test_a_run_goes_on_from_another_and_its_card_counts_both(demo, tmp_path):
    folder, _ = demo
    flags = ["--continue_from", folder, "--steps=5", "--noise_multiplier=8", "--noreport"]
    outcome = run("dpjax", "train", "--out", tmp_path, *flags)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rows[0]["accuracy"] > 0.8, "it begins where the other ended"
    assert rows[0]["epsilon"] > 3.0
    assert "112 steps of an earlier run on these data count too" in outcome.stdout
    assert run("dpjax", "verify", tmp_path / "privacy.json").stdout.count("here: holds") == 3
    wide = run("dpjax", "train", "--out", tmp_path / "next", *flags, "--hidden=16", status=1).stderr
    assert "--continue_from: found" in wide
    assert "'Dense_0/bias'" in wide


@pytest.mark.slow
def test_a_budget_without_steps_is_used_up_and_not_passed(tmp_path):
    budget = ["--max_epsilon=2", "--noise_multiplier=6", "--evaluations=1", "--noreport"]
    outcome = run("dpjax", "train", "--out", tmp_path / "used", *budget)
    card = json.loads((tmp_path / "used" / "privacy.json").read_text())
    assert 1.97 < card["epsilon"]["pld"]["value"] <= 2.0
    assert f"{card['steps']} steps with noise multiplier 6 cost epsilon" in outcome.stdout
    one_more = [*budget, f"--steps={card['steps'] + 1}"]
    refused = run("dpjax", "train", "--out", tmp_path / "refused", *one_more, status=1).stderr
    assert f"{card['steps']} of {card['steps'] + 1} steps fit" in refused


def files_of(folder):
    """What lies in a folder, but for its lock."""
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name != "lock"]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def run_and_log(folder):
    """What the run in a folder is, once it has written a row."""
    files = [folder / name for name in ("run.json", "metrics.jsonl")]
    found = [path.read_text() if path.exists() else "" for path in files]
    return found[0] if all(found) else ""


@pytest.mark.slow
def test_an_overwritten_and_killed_run_leaves_nothing_of_the_one_before(tmp_path):
    """Neither its card under the new run's accuracy, nor its parameters under the new spending."""
    folder = tmp_path / "run"
    run("dpjax", "train", "--out", folder, "--steps=2", "--hidden=8")
    (folder / "notes.txt").write_text("the user's own")
    assert {"privacy.json", "params.msgpack", "figures/confusion.png"} <= files_of(folder).keys()
    new = ["--overwrite", "--epochs=4000", "--noise_multiplier=9", "--evaluations=1000"]
    command = [sys.executable, "-m", "dpjax", "train", "--out", folder, "--hidden=8", *new]
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, **silent) as process:
        while '"--noise_multiplier": 9' not in run_and_log(folder):
            assert process.poll() is None
            time.sleep(0.01)
        process.kill()
    left = {name.partition("/")[0] for name in files_of(folder)}
    left = {re.sub(r"\.\w+\.part$", "", name) for name in left}
    known = {"run.json", "metrics.jsonl", "checkpoints", "tensorboard"}
    known |= {"config.json", "notes.txt", "privacy.json", "params.msgpack"}
    known |= {"statement.txt", "board.txt"}
    assert left <= known
    if (folder / "privacy.json").exists():
        card, now = (
            json.loads((folder / name).read_text()) for name in ("privacy.json", "run.json")
        )
        assert card["mechanism"] == now["mechanism"]
    given = ["--continue_from", folder, "--out", tmp_path / "next", "--steps=1"]
    run("dpjax", "train", *given, status=1)
    assert not (tmp_path / "next").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--model=vit", "--model_options=patch=5"], "patch 5 must divide the sides"),
        (["--clipping=grouped", "--groups=100"], "only 4 leaves"),
        (
            ["--features=scattering", "--norm_groups=10", "--model=scatter_linear"],
            "must divide 81 channels",
        ),
        (["--loss_options=gamma=2"], "unexpected keyword argument 'gamma'"),
        (["target_epsilon=0.5"], "which begin with two dashes"),
        (["--epochs=nan"], "cannot convert float NaN"),
        (["--target_epsilon=0"], "epsilon"),
        (["--dataset=mnist", "--data_dir=/proc/none"], "there is no such folder"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistaken_flag_is_told_before_a_folder_is_emptied(flags, words, demo):
    folder, _ = demo
    before = files_of(folder)
    outcome = run("dpjax", "train", "--out", folder, "--overwrite", *flags, status=1)
    assert words in outcome.stdout + outcome.stderr
    assert files_of(folder) == before


CURRICULA = [
    ([], 112, 1.0),
    (["--steps=500"], 500, 1.0),
    (["--epochs=2.5"], 7, 1.0),
    (["--epochs=0.5"], 1, 5.0),  # one epoch has one value, the first
    (["--batch_size=958", "--epochs=10"], 15, 1.0),
]


@pytest.mark.thorough
@pytest.mark.parametrize(("words", "steps", "last"), CURRICULA, ids=str)
def test_every_curriculum_arrives_where_it_goes(words, steps, last):
    given = copy.deepcopy(FLAGS_OF_TRAIN)
    given(["train", "--noise_schedule=linear-down", "--noise_multiplier=1", *words])
    multipliers = build_mechanism(given, 1437).multipliers.tolist()
    assert len(multipliers) == steps
    assert (multipliers[0], multipliers[-1]) == (5.0, last)
    assert multipliers == sorted(multipliers, reverse=True)


@pytest.mark.slow
def test_the_card_can_be_recomputed_and_a_false_one_is_caught(demo, tmp_path):
    folder, _ = demo
    assert run("dpjax", "verify", folder / "privacy.json").stdout.count("here: holds") == 3
    card = json.loads((folder / "privacy.json").read_text())
    for claim in card["epsilon"].values():
        claim["value"] *= 0.9
    (tmp_path / "false.json").write_text(json.dumps(card))
    outcome = run("dpjax", "verify", tmp_path / "false.json", status=1)
    assert "DOES NOT HOLD" in outcome.stdout


@pytest.mark.slow
def test_rates_by_score_are_recomputed_step_by_step(tmp_path):
    """Also beyond the last row, which stays, and what an earlier scorer has spent."""
    poisson, flat = dpjax.sampling.poisson(1000, 10), dpjax.clipping.flat(1.0)
    options = {"clipping": flat, "noise_multiplier": 1.5, "steps": 30}
    scorer = dpjax.Mechanism(sampling=poisson, **options)
    sampler = dpjax.sampling.scored(
        np.arange(1000) % 2, [[0.0, 0.05], [0.02, 0.01]], steps_per_row=10, batch_size=20
    )
    before = (scorer.spent(scorer.multipliers),)
    card = dpjax.reports.card(dpjax.Mechanism(sampling=sampler, before=before, **options), 1e-5)
    (tmp_path / "privacy.json").write_text(json.dumps(card))
    assert run("dpjax", "verify", tmp_path / "privacy.json").stdout.count("here: holds") == 3
    drawn = card["mechanism"]["sampling"]
    assert set(drawn) == set(card["mechanism"]["before"][0]["sampling"])
    assert sampler.fingerprint not in json.dumps(card), "it tells who is in which bin"
    drawn["rates"][0][0] = 0.06
    (tmp_path / "false.json").write_text(json.dumps(card))
    assert "DOES NOT HOLD" in run("dpjax", "verify", tmp_path / "false.json", status=1).stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        ["--clipping=grouped", "--groups=4", "--noise_schedule=linear-down"],
        ["--clipping=automatic", "--sampling=shuffled", "--noise_multiplier=1.5", "--seed=3"],
        ["--clipping=hard_threshold", "--sampling=fixed", "--noise_multiplier=4"],
        ["--clipping=flat", "--sampling=cyclic_poisson", "--noise=banded", "--bands=4"],
        ["--clipping=flat", "--sampling=balls_in_bins", "--noise=buffered"],
    ],
    ids=["grouped and scheduled", "automatic and shuffled", "threshold and fixed", "bands", "bins"],
)
def test_flags_reach_the_mechanism_and_every_card_holds(flags, tmp_path):
    short = ["--epochs=5", "--batch_size=256", "--noreport"]
    outcome = run("dpjax", "train", "--out", tmp_path, *short, *flags)
    card = json.loads((tmp_path / "privacy.json").read_text())
    given = dict(flag.removeprefix("--").split("=") for flag in flags)
    assert card["mechanism"]["clipping"]["name"] == given["clipping"]
    assert card["mechanism"]["sampling"]["name"] == given.get("sampling", "poisson")
    assert (card["mechanism"]["noise"] is None) == ("noise" not in given)
    assert card["randomness"] == ("supplied" if "seed" in given else "fresh")
    assert ("The key was supplied" in outcome.stdout) == ("seed" in given)
    verified = run("dpjax", "verify", tmp_path).stdout
    assert "DOES NOT HOLD" not in verified
    assert ("the key was supplied" in verified) == ("seed" in given)


@pytest.fixture(scope="module")
def small_mnist(tmp_path_factory):
    """The folder of a data set of MNIST's form, with 128 images of noise."""
    folder, draw = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    parts = {"train": 128, "test": 32}
    x = {f"x_{part}": draw.integers(0, 256, (n, 28, 28), np.uint8) for part, n in parts.items()}
    y = {f"y_{part}": np.arange(n) % 10 for part, n in parts.items()}
    np.savez(folder / "mnist.npz", **x, **y)
    return folder


SHORT = ["--dataset=mnist", "--epochs=1", "--batch_size=64", "--evaluations=1"]
SHORT += ["--noise_multiplier=4", "--noreport"]


@pytest.mark.slow
def test_a_published_loss_is_told_the_epoch(small_mnist, tmp_path):
    published = ["--loss=composite", "--loss_options=threshold=7,beta=11,gamma=5"]
    run("dpjax", "train", "--out", tmp_path, "--data_dir", small_mnist, *SHORT, *published)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [2]
    # In epoch 0 of threshold 7 the squared error rules: about a half while logits are small.
    assert 0.4 < rows[0]["private"]["loss"] < 1.5


@pytest.mark.slow
def test_private_scales_of_features_are_part_of_what_is_paid_for(small_mnist, tmp_path):
    scattered = ["--model=scatter_linear", "--features=scattering", "--normalization=data"]
    cache = ["--cache_dir", tmp_path / "features"]
    run("dpjax", "train", "--out", tmp_path, "--data_dir", small_mnist, *SHORT, *scattered, *cache)
    card = json.loads((tmp_path / "privacy.json").read_text())
    assert card["mechanism"]["preparation"] == [20.0, 20.0, 8.0, 8.0]
    bare = dpjax.accounting.subsampled_gaussian(4.0, 0.5, 2)
    assert card["epsilon"]["rdp"]["value"] > dpjax.accounting.epsilon(bare, 1e-5)
    assert len(list((tmp_path / "features").iterdir())) == 2
    # A resumed run does not query the private data again: the answers are kept.
    moments = (tmp_path / "moments.npz").read_bytes()
    (tmp_path / "params.msgpack").unlink()
    run("dpjax", "train", "--out", tmp_path, "--data_dir", small_mnist, *SHORT, *scattered, *cache)
    assert (tmp_path / "moments.npz").read_bytes() == moments
    # Answers with less noise than is accounted are not believed, even where no run began.
    dpjax.training.forget(tmp_path)
    quieter = [*scattered, *cache, "--norm_multiplier=9"]
    given = ["--out", tmp_path, "--data_dir", small_mnist]
    words = run("dpjax", "train", *given, *SHORT, *quieter, status=1).stderr
    assert "asked with noise" in words
    # Before the queries another run's folder is refused, and so is a budget that they alone pass.
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "run.json").write_text("{}")
    given = ["--out", tmp_path / "other", "--data_dir", small_mnist]
    run("dpjax", "train", *given, *SHORT, *scattered, *cache, status=1)
    assert not (tmp_path / "other" / "moments.npz").exists()
    given = ["--out", tmp_path / "poor", "--data_dir", small_mnist, "--max_epsilon=0.1"]
    words = run("dpjax", "train", *given, *SHORT, *scattered, *cache, status=1).stderr
    assert "0 of 2 steps fit" in words
    assert not (tmp_path / "poor").exists()


@pytest.mark.slow
def test_an_algorithm_is_audited_by_its_name(tmp_path):
    outcome = run("experiments.audit", "--algorithms=normalized", "--out", tmp_path)
    (row,) = json.loads((tmp_path / "audits.json").read_text())["rows"].values()
    assert 1.9 < row["step"]["bound"] < row["step"]["claimed"] < 2.0
    assert 0.5 < row["run"]["bound"] < row["run"]["claimed"]
    assert "may be published" in outcome.stdout


@kills("cli/train/build.py", "examples / sampler.batch_size", "examples / given.batch_size")
def test_epochs_of_random_allocation_are_whole():
    given = copy.deepcopy(FLAGS_OF_TRAIN)
    given(["train", "--sampling=random_allocation", "--noise_multiplier=1", "--epochs=3"])
    mechanism = build_mechanism(given, 1437)  # in batches of 512
    assert (mechanism.steps, mechanism.batch_size) == (3 * 2, 1437 / 2)


@pytest.mark.slow
def test_correlated_noise_is_compared_with_fresh_noise(tmp_path):
    path = tmp_path / "correlated.json"
    run("experiments.correlated", "--smoke", "--out", path)
    rows = json.loads(path.read_text())["rows"]
    assert [name.split()[2] for name in rows] == [*METHODS]
    for (found,) in (seeds.values() for seeds in rows.values()):
        assert found["epsilon"] <= 2
        assert found["accuracy"] > 80
