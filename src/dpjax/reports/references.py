# SPDX-License-Identifier: Apache-2.0
"""The papers behind a computation, as BibTeX: the algorithm, the accountants, the rule.

Only the works that the mechanism and its accountants use are cited.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from dpjax.mechanism import Mechanism

_REFERENCES = {
    "dpsgd": """\
@inproceedings{abadi2016deep,
  title     = {Deep Learning with Differential Privacy},
  author    = {Abadi, Martin and Chu, Andy and Goodfellow, Ian and McMahan, H. Brendan
               and Mironov, Ilya and Talwar, Kunal and Zhang, Li},
  booktitle = {ACM Conference on Computer and Communications Security},
  year      = {2016}
}""",
    "client": """\
@inproceedings{mcmahan2018learning,
  title     = {Learning Differentially Private Recurrent Language Models},
  author    = {McMahan, H. Brendan and Ramage, Daniel and Talwar, Kunal and Zhang, Li},
  booktitle = {International Conference on Learning Representations},
  year      = {2018}
}""",
    "rdp": """\
@inproceedings{mironov2017renyi,
  title     = {R{\\'e}nyi Differential Privacy},
  author    = {Mironov, Ilya},
  booktitle = {IEEE Computer Security Foundations Symposium},
  year      = {2017}
}""",
    "pld": """\
@article{doroshenko2022connect,
  title   = {Connect the Dots: Tighter Discrete Approximations of Privacy Loss Distributions},
  author  = {Doroshenko, Vadym and Ghazi, Badih and Kamath, Pritish and Kumar, Ravi
             and Manurangsi, Pasin},
  journal = {Proceedings on Privacy Enhancing Technologies},
  year    = {2022}
}""",
    "grouped": """\
@article{liu2021grouped,
  title  = {Differentially Private Learning with Grouped Gradient Clipping},
  author = {Liu, Haolin and others},
  year   = {2021}
}""",
    "adaptive": """\
@inproceedings{andrew2021differentially,
  title     = {Differentially Private Learning with Adaptive Clipping},
  author    = {Andrew, Galen and Thakkar, Om and Ramaswamy, Swaroop and McMahan, H. Brendan},
  booktitle = {Advances in Neural Information Processing Systems},
  year      = {2021}
}""",
    "preparation": """\
@inproceedings{tramer2021differentially,
  title     = {Differentially Private Learning Needs Better Features (or Much More Data)},
  author    = {Tram{\\`e}r, Florian and Boneh, Dan},
  booktitle = {International Conference on Learning Representations},
  year      = {2021}
}""",
    "psac": """\
@inproceedings{xia2023differentially,
  title     = {Differentially Private Learning with Per-Sample Adaptive Clipping},
  author    = {Xia, Tianyu and Shen, Shuheng and Yao, Su and Fu, Xinyi and Xu, Ke and Xu,
               Xiaolong and Fu, Xing},
  booktitle = {AAAI Conference on Artificial Intelligence},
  year      = {2023}
}""",
    "automatic": """\
@inproceedings{bu2023automatic,
  title     = {Automatic Clipping: Differentially Private Deep Learning Made Easier and
               Stronger},
  author    = {Bu, Zhiqi and Wang, Yu-Xiang and Zha, Sheng and Karypis, George},
  booktitle = {Advances in Neural Information Processing Systems},
  year      = {2023}
}""",
}


def references(mechanism: Mechanism, methods: Iterable[str]) -> Iterator[str]:
    """BibTeX of the works that a mechanism and these accounting methods use."""
    prepared = ["preparation"] * bool(mechanism.preparation)
    adapted = ["adaptive"] * (mechanism.adaptive is not None)
    # In the order in which a reader meets them; a rule without a paper has no row.
    for key in ("dpsgd", mechanism.unit, *methods, mechanism.clipping.name, *adapted, *prepared):
        if key in _REFERENCES:
            yield _REFERENCES[key]
