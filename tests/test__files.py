# SPDX-License-Identifier: Apache-2.0
"""Files are whole, closed to others, held by one process, and refused in words where damaged."""

import math
import os
import stat

import pytest
from mutation import kills

from dpjax import _files


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


@kills("_files.py", " | os.O_EXCL", "", slow=True)
def test_a_file_is_closed_to_others_from_its_first_byte(tmp_path, monkeypatch):
    """Whatever stands under its name, and whatever a killed process left beside it."""
    path = tmp_path / "norms.npz"
    monkeypatch.setattr("secrets.token_hex", lambda _: "0")
    for old in (path, tmp_path / "norms.npz.0.part"):
        old.write_text("older")
        old.chmod(0o644)
    with pytest.raises(FileExistsError):
        _files.replace(path, "private")
    (tmp_path / "norms.npz.0.part").unlink()
    with _files.replacing(path) as file:
        assert path.read_text() == "older", "a reader sees the whole old file meanwhile"
        assert {mode(other) for other in tmp_path.iterdir() if other != path} == {0o600}
        file.write(b"private")
    assert path.read_text() == "private"
    assert mode(path) == 0o600
    _files.replace(path, "public", public=True)
    umask = os.umask(0)
    os.umask(umask)
    assert mode(path) == 0o666 & ~umask
    assert [other.name for other in tmp_path.iterdir()] == ["norms.npz"]


def test_what_cannot_be_written_leaves_the_old_file_alone(tmp_path, monkeypatch):
    path = tmp_path / "card"
    _files.replace(path, "old")

    def fail(_):
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="no space"):
        _files.replace(path, "new")
    assert [other.read_text() for other in tmp_path.iterdir()] == ["old"]


def test_a_lock_has_one_holder_and_names_it(tmp_path):
    handle = _files.lock(tmp_path / "lock")
    assert handle is not None
    assert _files.lock(tmp_path / "lock") is None
    assert (tmp_path / "lock").read_text() == str(os.getpid())
    os.close(handle)
    again = _files.lock(tmp_path / "lock")
    assert again is not None
    os.close(again)


@pytest.mark.parametrize("content", [b"", b'{"flags": ', b"[1, 2]", b'{"a": "\xff"}'])
def test_what_is_no_json_object_is_refused(tmp_path, content):
    path = tmp_path / "run.json"
    with pytest.raises(FileNotFoundError):
        _files.read_json(path)
    path.write_text('{"a": [1, 2]}')
    assert _files.read_json(path) == {"a": [1, 2]}
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"run\.json: expected a JSON object"):
        _files.read_json(path)


def test_a_log_is_read_in_the_order_of_its_steps(tmp_path):
    log = tmp_path / "metrics.jsonl"
    assert _files.read_log(log) == []
    log.write_text('{"step": 4, "epsilon": 1}\n{"step": 2, "epsilon": null}\n{"step": 4}\n{"st')
    assert _files.read_log(log) == [{"step": 2, "epsilon": math.inf}, {"step": 4}]


@pytest.mark.parametrize("line", [b"{half", b"{}", b"[4]", b'{"step": "\xff"}'])
def test_a_line_that_no_kill_cuts_off_is_refused(tmp_path, line):
    log = tmp_path / "metrics.jsonl"
    log.write_bytes(b'{"step": 2}\n' + line + b'\n{"step": 4}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl: line 2 of 3 is not a JSON object"):
        _files.read_log(log)
