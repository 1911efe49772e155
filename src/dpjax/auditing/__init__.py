# SPDX-License-Identifier: Apache-2.0
"""Audits: measured lower bounds on what an attacker can learn.

An accountant bounds epsilon from above, by a description; an audit bounds it from below, on the
running program. If the lower bound is larger, the program is not the mechanism that was accounted.
An audit without a finding proves nothing.

| question | functions |
|---|---|
| how far does one example move one step, in units of its noise? | `audit_algorithm` |
| which canaries took part in a run? | `score_canaries`, `guess_members`, `epsilon_lower_bound` |
| which rows was a released model trained on? | `audit_membership`, `lira` |
| how well does a language model know a secret of its texts? | `exposure` |
"""

from dpjax.auditing.algorithm_step import Separation, audit_algorithm, without
from dpjax.auditing.canaries import guess_members, recording, score_canaries
from dpjax.auditing.exposure import exposure
from dpjax.auditing.membership import Membership, audit_membership, lira
from dpjax.auditing.one_run import epsilon_lower_bound

__all__ = [
    "Membership",
    "Separation",
    "audit_algorithm",
    "audit_membership",
    "epsilon_lower_bound",
    "exposure",
    "guess_members",
    "lira",
    "recording",
    "score_canaries",
    "without",
]
