# SPDX-License-Identifier: Apache-2.0
"""`python -m experiments.llm`."""

from absl import app, flags

import dpjax
from experiments.common import runs
from experiments.llm import run
from experiments.llm.run import __doc__  # noqa: F401 (--help prints it)

_DEFAULTS = run.Settings("", "")._asdict()
_HELP = {
    "text": "The private texts, a record a line: .jsonl, .tsv or plain.",
    "test": "Texts that are not private, in the same format, for perplexity.",
    "weights": "Folder with config.json and safetensors, or random.",
    "model": "Of random weights: decoder, decoder_tiny, or a size of Tunix, as gemma3_270m.",
    "tokenizer": "tokenizer.json or tokenizer.model; by default that of the weights, or bytes.",
    "lora": "Rank of the adapters; 0 trains all weights.",
    "length": "The most tokens of a text; the rest of it is cut.",
    "batch_size": "Expected records of a draw.",
    "steps": "Steps.",
    "learning_rate": "Rate of Adam.",
    "bound": "Clipping bound of a record's gradient.",
    "target_epsilon": "Epsilon of one record; inf trains without privacy.",
    "delta": "Delta of the statement.",
    "mesh": "Axes of the devices, as data:4,model:2.",
}
for _name, _help in _HELP.items():
    _default = _DEFAULTS[_name] or None if _name == "text" else _DEFAULTS[_name]
    _define = {int: flags.DEFINE_integer, float: flags.DEFINE_float}.get(
        type(_default), flags.DEFINE_string
    )
    _define(_name, _default, _help)
_GENERATE = flags.DEFINE_multi_string("generate", None, "A prompt to continue after training.")


def main(argv: list[str]) -> None:
    runs.only_flags(argv)
    if not (flags.FLAGS.text and runs.OUT.value):
        raise app.UsageError("expected --text=FILE and --out=FOLDER; see --help.")
    given = {name: flags.FLAGS[name].value for name in _HELP}
    settings = run.Settings(out=runs.OUT.value, **given)
    try:
        tuned = run.tune(settings)
    except (ImportError, OSError, ValueError) as error:
        raise app.UsageError(str(error)) from error
    last = tuned.rows[-1]
    print(dpjax.statement(tuned.mechanism, settings.delta))
    print(f"\n{last['examples_per_second'] * tuned.length:,.0f} tokens a second, padding included")
    print(f"{run.gibibytes():.2f} GiB of memory")
    if "perplexity" in last:
        print(f"Perplexity {last['perplexity']:.4g} on {settings.test}")
    for prompt in _GENERATE.value or []:
        print(f"\n{tuned.writes(prompt)}")


if __name__ == "__main__":
    runs.start(main, "out")
