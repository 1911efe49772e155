# SPDX-License-Identifier: Apache-2.0
"""Records of a file, and the tokens of a text.

A vocabulary that is counted in private texts is a release of its own: take a tokenizer that was
made from other texts, or bytes.
"""

from __future__ import annotations

import importlib
import json
import pathlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from experiments.llm import objective


class Record(NamedTuple):
    """A text; its prompt is read and not learnt. The author is a unit of its own if it is given."""

    prompt: str
    text: str
    author: str = ""


def records(path: str, author_column: str | None = None) -> list[Record]:
    """One record a line; a column or field of its author only if it is named.

    | suffix | a line |
    |---|---|
    | ``.jsonl`` | ``{"text": ...}`` or ``{"prompt": ..., "completion": ...}`` |
    | ``.tsv`` | columns of these names in the first line, else the first column |
    | other | a text |
    """
    lines = pathlib.Path(path).read_text("utf-8").splitlines()
    columns = ["text"]
    first = 1  # the number of the first line with a record
    if path.endswith(".tsv"):
        names = lines[0].split("\t")
        if {"text", "prompt", "completion", author_column} & set(names):
            columns = names
            first = 2
    found = []
    for number, line in enumerate(lines[first - 1 :], first):
        if path.endswith(".jsonl"):
            fields = json.loads(line)
        elif path.endswith(".tsv"):
            fields = dict(zip(columns, line.split("\t"), strict=False))
        else:
            fields = {"text": line}
        text = fields.get("completion", fields.get("text", ""))
        if not text.strip():
            raise ValueError(f"{path}, line {number}: no text. Remove the line or fill it.")
        author = ""
        if author_column is not None:
            author = str(fields.get(author_column) or "").strip()
            if not author:
                raise ValueError(
                    f"{path}, line {number}: no {author_column}. Each text needs one author, whose "
                    "texts are protected together."
                )
        found.append(Record(fields.get("prompt", ""), text, author))
    return found


def candidates(pattern: str) -> list[Record]:
    """A text with random digits in the places of #, and up to 999 others that it is ranked among.

    The digits are the same at each call, so a run that was killed resumes.
    """
    places = pattern.count("#")
    count = min(1000, 10**places)
    numbers = np.random.default_rng(0).choice(10**places, count, replace=False)
    found = []
    for number in numbers:
        text = pattern
        for digit in f"{number:0{places}}":
            text = text.replace("#", digit, 1)
        found.append(Record("", text))
    return found


class Tokenizer:
    """Tokens by a file of `tokenizers` or `sentencepiece`; bytes without any, 0 as the end.

    Args:
      path: ``tokenizer.json``, ``tokenizer.model``, a folder with one of them, or None.
      end: The token behind each text, where the file is of `tokenizers`.
    """

    def __init__(self, path: str | None, end: int | None = None) -> None:
        self._encode: Callable[[str], list[int]]
        self.text: Callable[[Sequence[int]], str]
        self.end = end
        file = _tokenizer_file(path)
        if file is None:
            self.name = "bytes"
            self.size = 257
            self.end = 0
            self._encode = lambda text: [byte + 1 for byte in text.encode()]
            self.text = _text_of_bytes
            return
        self.name = str(file)
        if file.suffix == ".json":
            model = importlib.import_module("tokenizers").Tokenizer.from_file(self.name)
            self.size = model.get_vocab_size()
            self.text = model.decode
            self._encode = lambda text: model.encode(text).ids
        else:
            processor = importlib.import_module("sentencepiece").SentencePieceProcessor
            model = processor(model_file=self.name)
            self.size = model.get_piece_size()
            self.text = model.decode
            self._encode = partial(model.encode, add_bos=model.bos_id() >= 0)
            if end is None:
                self.end = model.eos_id()

    def __call__(self, text: str) -> list[int]:
        """The tokens of a text."""
        return self._encode(text)

    def example(self, record: Record, length: int) -> tuple[Any, Any]:
        """The tokens of a record; the prompt and the first token are not predicted."""
        tokens = self(record.prompt + record.text)
        if self.end is not None:
            tokens = [*tokens, self.end]
        read = 1
        if record.prompt:
            read = max(1, _shared(self(record.prompt), tokens))
        return objective.example_of(tokens, length, read)


def _tokenizer_file(path: str | None) -> pathlib.Path | None:
    """The file of a tokenizer, which may be in a folder; None if there is none."""
    if not path:
        return None
    place = pathlib.Path(path)
    if not place.is_dir():
        return place
    for name in ("tokenizer.json", "tokenizer.model"):
        if (place / name).exists():
            return place / name
    return None


def _text_of_bytes(tokens: Sequence[int]) -> str:
    """The text of tokens that stand for bytes; 0 stands for none."""
    return bytes(token - 1 for token in tokens if token).decode(errors="replace")


def _shared(prompt: Sequence[int], tokens: Sequence[int]) -> int:
    """How many first tokens of a text are those with which its prompt begins.

    Some tokenizers end the prompt with a token of their own, or join its end to the text.
    """
    count = 0
    for one, other in zip(prompt, tokens, strict=False):
        if one != other:
            break
        count += 1
    return count
