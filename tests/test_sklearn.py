# SPDX-License-Identifier: Apache-2.0
"""The estimators: what they charge, what they refuse, and the checks of scikit-learn itself."""

import copy
import json
import pickle
import re
import warnings

import numpy as np
import pytest
from mutation import kills
from sklearn.base import clone
from sklearn.datasets import load_breast_cancer
from sklearn.model_selection import GridSearchCV, KFold, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.utils.estimator_checks import check_estimator
from small_mechanisms import mechanism_with

import dpjax
from dpjax.ledger import Account, Budget
from dpjax.sklearn import DPClassifier, DPRegressor

# Which checks of scikit-learn an estimator fails, and why.
EXCEPTIONS = {
    "check_classifier_data_not_an_array": "it compares two fits, and their noise differs",
    "check_regressor_data_not_an_array": "it compares two fits",
    "check_supervised_y_2d": "it compares two fits",
    "check_regressors_int": "it compares two fits",
    "check_fit_idempotent": "it compares two fits",
}
COLUMNS = {
    "size": {"kind": "number", "low": 0, "high": 10},
    "ill": {"kind": "label", "values": ["no", "yes"]},
}


def account(epsilon=3.0, path=None):
    return Account(Budget(epsilon=epsilon, delta=1e-5), path)


def planned(rows=400):
    return dpjax.plan(rows, {"w": np.zeros(3)}, epsilon=1.0, delta=1e-5).mechanism


def rows(count=400):
    x = np.random.default_rng(0).uniform(0, 10, (count, 2))
    return x, x[:, 0] > 5


@kills("ledger.py", "if cost > self.budget.epsilon", "if cost > 2 * self.budget.epsilon")
@kills("ledger.py", "charges = [*self.charges, mechanism.facts]", "charges = [mechanism.facts]")
def test_an_account_composes_its_charges_and_refuses_what_exceeds_the_budget():
    mechanism, book = planned(), account(1.5)
    book.charge(mechanism)
    assert book.epsilon == pytest.approx(mechanism.epsilon(), rel=1e-6)
    book.charge(mechanism)
    both = dpjax.accounting.compose(mechanism.event, mechanism.event)
    assert book.epsilon == pytest.approx(dpjax.accounting.epsilon(both, 1e-5, "pld"), rel=1e-6)
    with pytest.raises(dpjax.ledger.Refused, match=r"would bring epsilon to 1\.[4-9].*\.5"):
        book.charge(mechanism)
    assert len(book.charges) == 2


def test_charges_without_a_bound_or_of_another_unit_are_refused():
    unbounded = mechanism_with(400, 40, clipping=dpjax.clipping.flat(np.inf), noise_multiplier=0.0)
    with pytest.raises(dpjax.ledger.Refused, match="epsilon to inf"):
        account().charge(unbounded)
    book = account(np.inf)
    book.charge(planned())
    of_clients = mechanism_with(400, 40, unit="client")
    with pytest.raises(dpjax.ledger.Refused, match="expected one"):
        book.charge(of_clients)
    book.charge(unbounded)
    assert book.epsilon == np.inf


@kills("ledger.py", '"_process": None', '"_process": os.getpid()')
def test_copies_are_one_account_and_a_pickle_charges_the_file_or_nothing(tmp_path):
    book = account()
    assert copy.deepcopy(book) is book
    with pytest.raises(dpjax.ledger.Refused, match="another process"):
        pickle.loads(pickle.dumps(book)).charge(planned())
    book = account(path=tmp_path / "spent.json")
    other = pickle.loads(pickle.dumps(book))
    book.charge(planned())
    other.charge(planned())
    assert len(book.charges) == len(other.charges) == 2
    assert json.loads((tmp_path / "spent.json").read_text())["charges"] == book.charges
    assert str(book).count("\n") == 3


def written_card(book, folder):
    path = folder / "account.json"
    path.write_text(json.dumps(dpjax.reports.card(book.mechanism, book.budget.delta)))
    return path


@kills(
    "ledger.py", "runs += Spent.of_run(facts, planned)", "runs = [*Spent.of_run(facts, planned)]"
)
@kills("ledger.py", "largest = max(runs", "largest = min(runs")
def test_the_card_of_an_account_is_verified(tmp_path, capsys):
    book = account(path=tmp_path / "spent.json")
    for units in (400, 300, 200):
        book.charge(planned(units))
    assert book.mechanism.sampling.examples == 400, "the most, below which delta has to be"
    card = written_card(book, tmp_path)
    claimed = json.loads(card.read_text())
    assert claimed["epsilon"]["pld"]["value"] == book.epsilon
    assert [run["sampling"]["examples"] for run in claimed["mechanism"]["before"]] == [
        400,
        300,
        200,
    ]
    assert dpjax.verify.main([str(card)]) == 0
    assert "claims epsilon 1.84 for one example" in capsys.readouterr().out
    claimed["mechanism"]["before"] *= 2
    card.write_text(json.dumps(claimed))
    assert dpjax.verify.main([str(card)]) == 1


@pytest.mark.thorough
def test_verify_recomputes_what_a_search_on_breast_cancer_cost(tmp_path, capsys):
    x, y = load_breast_cancer(return_X_y=True)
    model = DPClassifier(account=account(9.0), feature_range=(0, 4000), targets=[0, 1])
    settings = {"epsilon": [1.0, 2.0]}
    GridSearchCV(model, settings, cv=KFold(2), error_score="raise").fit(x, y)
    book = model.account
    assert len(book.charges) == 2 * 2 + 1
    assert dpjax.verify.main([str(written_card(book, tmp_path))]) == 0
    headline, *_ = capsys.readouterr().out.splitlines()
    numbers = re.search(r"claims epsilon (\S+) .* recomputed (\S+) by pld", headline)
    claimed, recomputed = map(float, numbers.groups())
    assert claimed == pytest.approx(book.epsilon, abs=0.01)
    assert claimed >= max(recomputed, book.epsilon)


@kills("sklearn.py", "twin._own = self.account_", "pass")
def test_clones_share_the_account_of_their_original():
    model = DPClassifier()
    assert clone(clone(model)).account_ is model.account_
    given = DPRegressor(account=account())
    assert clone(given).account_ is given.account


@pytest.mark.thorough
def test_each_fit_of_a_search_is_charged_and_the_search_stops_at_the_budget():
    x, y = rows()
    model = DPClassifier(
        epsilon=2.0, account=account(5.4), feature_range=(0, 10), targets=[False, True]
    )
    # Each setting costs the same, so the total does not depend on the one that is fitted again.
    search = GridSearchCV(model, {"hidden_layer_sizes": [(), (4,)]}, cv=2).fit(x, y)
    book = model.account
    assert len(book.charges) == 2 * 2 + 1
    assert book.epsilon == pytest.approx(5.0, abs=0.01), "less than the sum, 10"
    assert search.score(x, y) > 0.8
    with pytest.raises(dpjax.ledger.Refused, match="this run would bring epsilon"):
        cross_val_score(model, x, y, cv=2, error_score="raise")
    with pytest.raises(ValueError, match=r"(?s)All the 2 fits failed.*the budget is 5\.4"):
        cross_val_score(model, x, y, cv=2)


@pytest.mark.slow
def test_declared_columns_of_persons_pipelines_and_targets():
    x, y = rows()
    frame = {"size": x[:, 0], "person": np.arange(400) // 4}
    model = DPClassifier(columns=COLUMNS, unit_column="person").fit(frame, np.where(y, "yes", "no"))
    assert model.mechanism_.unit == "person"
    assert model.mechanism_.sampling.examples == 100
    assert model.score({"size": x[:, 0]}, np.where(y, "yes", "no")) > 0.8
    numbers = {**COLUMNS, "ill": {"kind": "label", "values": [0, 1]}}
    model = DPClassifier(columns=numbers).fit({"size": x[:, 0]}, y.astype(int))
    assert model.score({"size": x[:, 0]}, y.astype(int)) > 0.8
    regression = DPRegressor(feature_range=(0, 1), targets=(0, 20))
    pipeline = make_pipeline(FunctionTransformer(lambda x: x / 10), regression)
    assert pipeline.fit(x, 2 * x[:, 0]).score(x, 2 * x[:, 0]) > 0.8


def test_ranges_are_declared():
    x, y = rows()
    with pytest.raises(ValueError, match="range of features is missing"):
        DPClassifier().fit(x, y)
    with pytest.raises(ValueError, match="range of targets is missing"):
        DPRegressor(feature_range=(0, 10)).fit(x, x[:, 0])
    with pytest.raises(ValueError, match="class True is not among"):
        DPClassifier(feature_range=(0, 10), targets=[False]).fit(x, y)


@pytest.mark.slow
@pytest.mark.parametrize(
    "model",
    [
        DPClassifier(epsilon=30.0, feature_range=(-4, 4)),
        DPRegressor(epsilon=30.0, feature_range=(-4, 4), targets=(-3, 3)),
    ],
    ids=["classifier", "regressor"],
)
def test_scikit_learn_checks_the_estimators(model):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # theirs, of checks that they skip
        found = check_estimator(model, on_fail=None, on_skip=None)
    failed = {check["check_name"] for check in found if check["status"] == "failed"}
    assert failed <= set(EXCEPTIONS)
