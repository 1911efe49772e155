# SPDX-License-Identifier: Apache-2.0
"""Records of a file, and the tokens of a text.

A vocabulary that is counted in private texts is a release of its own: take a tokenizer that was
made from other texts, or bytes.
"""

from __future__ import annotations

import importlib
import itertools
import json
import pathlib
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from experiments.llm import objective


class Record(NamedTuple):
    """A text; its prompt is read and not learnt."""

    prompt: str
    text: str


def records(path: str) -> list[Record]:
    """One record a line.

    | suffix | a line |
    |---|---|
    | ``.jsonl`` | ``{"text": ...}`` or ``{"prompt": ..., "completion": ...}`` |
    | ``.tsv`` | columns of these names in the first line, else the first column |
    | other | a text |
    """
    lines = pathlib.Path(path).read_text("utf-8").splitlines()
    head, begin = ["text"], 1
    if path.endswith(".tsv") and {"text", "prompt", "completion"} & {*lines[0].split("\t")}:
        head, begin, lines = lines[0].split("\t"), 2, lines[1:]
    found = []
    for number, line in enumerate(lines, begin):
        fields = {"text": line}
        if path.endswith(".jsonl"):
            fields = json.loads(line)
        elif path.endswith(".tsv"):
            fields = dict(zip(head, line.split("\t"), strict=False))
        record = Record(fields.get("prompt", ""), fields.get("completion", fields.get("text", "")))
        if not record.text.strip():
            raise ValueError(f"{path}, line {number}: no text. Remove the line or fill it.")
        found.append(record)
    return found


def candidates(pattern: str) -> list[Record]:
    """A text with random digits in the places of #, and up to 999 others that it is ranked among.

    The digits are the same at each call, so that a run that was killed resumes.
    """
    places = pattern.count("#")
    numbers = np.random.default_rng(0).choice(10**places, min(1000, 10**places), replace=False)
    digits = (iter(f"{number:0{places}}") for number in numbers)
    return [Record("", re.sub("#", lambda _: next(each), pattern)) for each in digits]  # noqa: B023


class Tokenizer:
    """Tokens by a file of `tokenizers` or `sentencepiece`; bytes without any, 0 as the end.

    Args:
      path: ``tokenizer.json``, ``tokenizer.model``, a folder with one of them, or None.
      end: The token behind each text, where the file is of `tokenizers`.
    """

    def __init__(self, path: str | None, end: int | None = None) -> None:
        self.end, self.name = end, "bytes"
        found = pathlib.Path(path or "")
        if path and found.is_dir():
            both = [found / name for name in ("tokenizer.json", "tokenizer.model")]
            found = next((file for file in both if file.exists()), found)
        self._encode: Callable[[str], list[int]]
        self.text: Callable[[Sequence[int]], str]
        if path is None or found.is_dir():
            self.size, self.end = 257, 0
            self._encode = lambda text: [byte + 1 for byte in text.encode()]
            self.text = lambda tokens: bytes(t - 1 for t in tokens if t).decode(errors="replace")
            return
        self.name = str(found)
        if found.suffix == ".json":
            model = importlib.import_module("tokenizers").Tokenizer.from_file(self.name)
            self.size, self.text = model.get_vocab_size(), model.decode
            self._encode = lambda text: model.encode(text).ids
        else:
            processor = importlib.import_module("sentencepiece").SentencePieceProcessor
            model = processor(model_file=self.name)
            self.size, self.text = model.get_piece_size(), model.decode
            self._encode = partial(model.encode, add_bos=model.bos_id() >= 0)
            self.end = model.eos_id() if end is None else end

    def __call__(self, text: str) -> list[int]:
        return self._encode(text)

    def example(self, record: Record, length: int) -> tuple[Any, Any]:
        """The tokens of a record; the prompt and the first token are not predicted."""
        prompt = self(record.prompt) if record.prompt else []
        end = [] if self.end is None else [self.end]
        tokens = self(record.prompt + record.text) + end
        # Some tokenizers end a text with a token of their own, or join it to what follows.
        pairs = zip(prompt, tokens, strict=False)
        read = len([*itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)])
        return objective.example_of(tokens, length, max(1, read))
