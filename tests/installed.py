# SPDX-License-Identifier: Apache-2.0
"""What a user does with an installed dpjax, outside the repository: `make dist` runs it.

It is run by the Python of an empty environment in an empty folder, first without the optional
packages and then with scikit-learn and Matplotlib. It fails at the first command that does not
end as it should.
"""

import importlib.metadata
import importlib.util
import os
import pathlib
import subprocess
import sys

DPJAX = pathlib.Path(sys.executable).parent / "dpjax"
MODEL = """
import flax.linen as nn

class Net(nn.Module):
    classes: int

    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.classes)(nn.tanh(nn.Dense(8)(x)))
"""
SHORT = ("--steps=3", "--batch_size=20", "--noise_multiplier=2", "--delta=5e-4")


def dpjax(*words, status=0, says=""):
    """Runs the command, which must end with this status and say this."""
    done = subprocess.run([DPJAX, *words], capture_output=True, text=True)
    said = done.stdout + done.stderr
    assert done.returncode == status, said
    assert says in said, said
    print("dpjax", *words, flush=True)


def own_data():
    """A model and a table of the user's, trained and verified."""
    pathlib.Path("nets.py").write_text(MODEL)
    rows = (f"{i % 7},{i % 5},{'yes' if i % 7 > 3 else 'no'}" for i in range(200))
    pathlib.Path("my.csv").write_text("\n".join(["a,b,answer", *rows]) + "\n")
    own = ("--dataset=my.csv", "--model=nets:Net", "--out=own", *SHORT)
    if importlib.util.find_spec("matplotlib") is None:
        dpjax("train", *own, status=1, says="pip install -U matplotlib")
        both = "pip install -U pyarrow matplotlib"
        dpjax("train", "--dataset=my.parquet", status=1, says=both)
    label = "my (the label is column 'answer'; 40 of 200 rows are held out for the test)\n3 steps"
    dpjax("train", *own, "--noreport", says=label)
    dpjax("verify", "own", says="holds")
    dpjax("columns", "my.parquet", status=1, says="pip install -U pyarrow")
    dpjax("export", "own", status=1, says="pip install -U flatbuffers")


def with_extras():
    """The demonstration, its page, and a page of two runs."""
    dpjax("train", "--out=demo", *SHORT, says="demo/report.html")
    dpjax("report", "own", says="own/report.html")
    dpjax("compare", "own", "demo", says="comparison.png")
    dpjax("audit", "demo", "--pairs=5", "--canaries=20", "--steps=2", says="never prove one")
    search = ("--grid=bound=0.5,1", f"--fixed={';'.join(word[2:] for word in SHORT)}")
    dpjax("sweep", *search, "--out=sweep", says="all runs together")


def main():
    import dpjax as library

    assert "site-packages" in library.__file__, library.__file__
    assert library.__version__ == importlib.metadata.version("dpjax")
    os.environ["XDG_CACHE_HOME"] = os.path.abspath("cache")
    dpjax("--version", says=library.__version__)
    dpjax("--help", says="train")
    dpjax("train", "--dataset=mnits", status=1, says="one of digits, mnist")
    own_data()
    if importlib.util.find_spec("sklearn") is None:
        dpjax("train", "--noreport", status=1, says="pip install -U scikit-learn")
    else:
        with_extras()


if __name__ == "__main__":
    main()
