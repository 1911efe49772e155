# SPDX-License-Identifier: Apache-2.0
"""Estimators of scikit-learn that train with differential privacy, by `dpjax.plan`.

Each fit of an estimator and of its clones charges one `dpjax.ledger.Account`, so the fits of
``cross_val_score`` and ``GridSearchCV`` cost what they cost. scikit-learn is optional: dpjax
imports this file only if you do.

Experimental: the estimators follow the rules of scikit-learn.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Shaped
from scipy.special import softmax
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils.multiclass import check_classification_targets, unique_labels
from sklearn.utils.validation import check_consistent_length, check_is_fitted, validate_data

import dpjax
from dpjax.ledger import Account, Budget
from dpjax.types import PyTree

__all__ = ["DPClassifier", "DPRegressor"]

_NO_RANGE = "Declare columns=, or feature_range=(low, high) from public knowledge."


class _Private(BaseEstimator):
    """Encoding, the charge, and the run of a plan, which both estimators share."""

    def __init__(
        self,
        epsilon: float = 3.0,
        delta: float = 1e-5,
        columns: Mapping[str, Any] | str | os.PathLike[str] | None = None,
        unit_column: str | None = None,
        account: Account | None = None,
        *,
        feature_range: tuple[Any, Any] | None = None,
        targets: Sequence[Any] | None = None,
        hidden_layer_sizes: Sequence[int] = (),
        rows_per_unit: int = 1,
    ) -> None:
        self.epsilon = epsilon
        self.delta = delta
        self.columns = columns
        self.unit_column = unit_column
        self.account = account
        self.feature_range = feature_range
        self.targets = targets
        self.hidden_layer_sizes = hidden_layer_sizes
        self.rows_per_unit = rows_per_unit

    @property
    def account_(self) -> Account:
        """The account that fits of this estimator and of its clones charge."""
        if self.account is not None:
            return self.account
        if not hasattr(self, "_own"):
            self._own = Account(Budget(epsilon=math.inf, delta=self.delta))
        return self._own

    def __sklearn_clone__(self) -> Self:
        twin: Any = super().__sklearn_clone__()
        twin._own = self.account_
        return twin

    def _declared(self) -> dpjax.data.Columns:
        return dpjax.data.Columns.read(self.columns or {}, self.unit_column)

    def _rows(self, X: Any, y: Any) -> tuple[np.ndarray, Any]:
        """The features ``[rows, features]`` in float32, and the targets ``[rows]``.

        With declared columns, targets are encoded: a class as its number, a quantity in [-1, 1].
        Otherwise they are as given.
        """
        if self.columns is None:
            X, y = validate_data(self, X, y, y_numeric=isinstance(self, RegressorMixin))
            return self._scaled(X), y
        declared = self._declared()
        x = declared.encode(X)
        # The target is y; if none is given, a column of X.
        frame = X
        if y is not None:
            frame = {declared.learnt[0]: np.asarray(y)}  # by the name of the target's column
        targets = declared.encode_targets(frame)
        check_consistent_length(x, targets)
        return x, targets

    def _scaled(self, X: np.ndarray) -> Float[np.ndarray, "rows features"]:
        """Maps the declared range of each feature to [-1, 1], and clips values beyond it."""
        if self.feature_range is None:
            raise ValueError(
                f"{type(self).__name__}: the range of features is missing. {_NO_RANGE}"
            )
        low, high = map(np.asarray, self.feature_range)
        places = 2 * (X.astype(float) - low) / (high - low) - 1
        return np.clip(places, -1, 1).astype(np.float32)

    def _network(self) -> dpjax.models.MLP:
        """The model; made when it is needed, because its activation cannot be pickled."""
        return dpjax.models.MLP(self._widths[:-1], classes=self._widths[-1])

    def _train(
        self, X: Any, x: np.ndarray, targets: np.ndarray, outputs: int, loss: Any, **pace: float
    ) -> Self:
        """Plans a run on these rows, charges it to the account, and runs it.

        Args:
          X: The rows as given, with the unit column.
          x: The features that the model reads, ``[rows, features]``.
          targets: As the loss takes them, ``[rows]``.
          outputs: The number of the model's outputs.
          loss: One of `dpjax.losses`: ``(outputs of the model, target) -> number``.
          pace: The ``drift`` of `dpjax.plan`, if this loss needs another one than the default.
        """
        self._widths = (*self.hidden_layer_sizes, outputs)  # `_network` reads them
        model = self._network()
        params = model.init(dpjax.noise.secret_key(), jnp.zeros(x.shape[1]))["params"]
        # A unit is whom a guarantee protects: a row, or a person with all of its rows.
        units = len(x)
        owners = None
        if self.unit_column is not None:
            owners = self._declared().owners(X)  # the person of each row, numbered from 0
            units = int(owners.max()) + 1
        planned = dpjax.plan(units, params, epsilon=self.epsilon, delta=self.delta, **pace)
        mechanism = planned.mechanism
        if owners is not None:
            # The batches are as large as planned, and hold persons in place of examples.
            batches = dpjax.sampling.persons(owners, mechanism.batch_size, self.rows_per_unit)
            mechanism = dataclasses.replace(mechanism, sampling=batches, unit=batches.unit)
        self.account_.charge(mechanism)
        algorithm = dpjax.dpsgd(
            dpjax.losses.of(model, loss), planned.optimizer, mechanism, (x, targets)
        )
        state, _ = dpjax.fit(algorithm, algorithm.init(params), progress=False)
        # The planned optimizer averages the parameters of about the last tenth of the steps.
        self.params_: PyTree = jax.device_get(dpjax.training.averaged(state))
        self.mechanism_ = mechanism
        return self

    def _outputs(self, X: Any) -> Float[np.ndarray, "rows outputs"]:
        """The outputs of the private model for each row."""
        check_is_fitted(self, "params_")
        if self.columns is None:
            given: Any = validate_data(self, X, reset=False)
            x = self._scaled(given)
        else:
            x = self._declared().encode(X)
        return np.asarray(self._network().apply({"params": self.params_}, x), float)

    def __getstate__(self) -> dict[str, Any]:
        state: Any = super().__getstate__()
        # A sampler is a function, which cannot be pickled.
        return {name: value for name, value in state.items() if name != "mechanism_"}

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.non_deterministic = True
        tags.target_tags.required = self.columns is None
        return tags


class DPClassifier(ClassifierMixin, _Private):
    """A private classifier: a linear model or a network, trained by `dpjax.plan`.

    Args:
      epsilon: The most that one fit may cost.
      delta: Choose it below 1 / rows.
      columns: Declarations of the columns of a frame, as `dpjax.data.table` takes them: a path or
        a mapping. Cells become features by them, and the words of the label are the classes.
      unit_column: The column that names the person of each row, who is then protected with all
        rows; only with ``columns``.
      account: The `dpjax.ledger.Account` that each fit charges before it runs. By default one
        without a limit, which clones share; see ``account_``.
      feature_range: Without ``columns``: the least and the largest value, of all features or of
        each. Values beyond them are clipped. Choose them without a look at the rows.
      targets: Without ``columns``: all classes. By default all in ``y``, which are then public.
      hidden_layer_sizes: Widths of hidden layers; by default the model is linear.
      rows_per_unit: The most rows of a person in a step.

    Attributes:
      classes_: The classes, in the order of ``predict_proba``.
      params_: The private parameters.
      mechanism_: What ran; `dpjax.statement` takes it. It is not in a pickle.
      account_: What all fits have spent; `print` it.

    Privacy:
      A fit protects the rows it is given, by ``mechanism_``. The number of rows, or with
      ``unit_column`` of persons, counts as public. **Not covered**: a score on held-out rows and
      what follows from it, such as ``best_params_`` of a search, is a release of these rows
      without noise. Add noise to scores and pay for the choice by
      `dpjax.accounting.select_best`, or choose on public rows. Folds must not follow from values of
      rows: stratified ones, the default for classifiers, do. Give ``cv=KFold(...)``, and with
      ``unit_column`` folds of persons, ``GroupKFold(shuffle=True)``. A step of a pipeline that
      learns from rows, such as ``StandardScaler``, is not covered either.

    Example:
      >>> model = DPRegressor(epsilon=3.0, feature_range=(0, 1), targets=(0, 2))
      >>> model.account_.epsilon  # after ``model.fit(x, y)`` it is 3.0
      0.0
    """

    def fit(self, X: Any, y: Any = None) -> Self:
        """Trains on rows and their classes; with ``columns`` the frame may hold the label."""
        x, targets = self._rows(X, y)
        if self.columns is None:
            check_classification_targets(targets)
            self.classes_ = unique_labels(targets if self.targets is None else self.targets)
            unknown = np.setdiff1d(targets, self.classes_)
            if len(unknown):
                raise ValueError(f"DPClassifier: class {unknown[0]} is not among targets=.")
            targets = np.searchsorted(self.classes_, targets).astype(np.int32)
        else:
            # The targets are numbers of classes already. The names of classes are words, and become
            # numbers if y has numbers, because scikit-learn's scores compare predictions with y.
            names = np.array(self._declared().class_names)
            given = np.asarray(y)
            if given.dtype.kind in "iuf":  # integers and floats
                names = names.astype(given.dtype)
            self.classes_ = names
        return self._train(X, x, targets, len(self.classes_), dpjax.losses.cross_entropy)

    def predict_proba(self, X: Any) -> Float[np.ndarray, "rows classes"]:
        """The probability of each class."""
        return softmax(self._outputs(X), axis=1)

    def predict(self, X: Any) -> Shaped[np.ndarray, " rows"]:
        """The most probable class of each row."""
        places = self._outputs(X).argmax(axis=1)
        return self.classes_[places]


class DPRegressor(RegressorMixin, _Private):
    """A private regression of one number: a linear model or a network, by `dpjax.plan`.

    Args:
      epsilon: As the other arguments, of `DPClassifier`.
      delta: As there.
      columns: As there; its target has a range.
      unit_column: As there.
      account: As there.
      feature_range: As there.
      targets: Without ``columns``: the least and the largest target. Values beyond them are
        clipped. Choose them without a look at the rows.
      hidden_layer_sizes: As there.
      rows_per_unit: As there.

    Privacy:
      That of `DPClassifier`: scores on held-out rows and ``best_params_`` are not covered.

    Example:
      >>> import numpy as np
      >>> x = np.random.default_rng(0).uniform(0, 1, (500, 1))
      >>> model = DPRegressor(epsilon=3.0, feature_range=(0, 1), targets=(0, 2))
      >>> model.fit(x, 2 * x[:, 0]).predict(x).shape
      (500,)
    """

    def fit(self, X: Any, y: Any = None) -> Self:
        """Trains on rows and their targets; with ``columns`` the frame may hold the target."""
        x, targets = self._rows(X, y)
        span = self.targets
        if self.columns is not None:
            span = self._declared().target_range
        if span is None:
            raise ValueError(
                "DPRegressor: the range of targets is missing. Declare a target in columns=, or "
                "targets=(low, high) from public knowledge."
            )
        self._low, high = span
        # The model learns targets on [-1, 1], as `columns.encode_targets` has them.
        self._half = (high - self._low) / 2  # half the width of the range
        if self.columns is None:
            targets = np.clip((targets - self._low) / self._half - 1, -1, 1).astype(np.float32)
        return self._train(X, x, targets, 1, dpjax.losses.squared_error, drift=1.0)

    def predict(self, X: Any) -> Float[np.ndarray, " rows"]:
        """The predicted target of each row, in the units of the target."""
        return (self._outputs(X)[:, 0] + 1) * self._half + self._low
