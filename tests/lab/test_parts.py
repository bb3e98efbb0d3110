"""lab/parts.py: each part has its time, and its results are kept whatever comes after."""

import contextlib
import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.lab.scripts import ROOT, load

parts = load("parts")


def _list(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "list.toml"
    path.write_text(text)
    return path


def _part(name: str, command: str, seconds: float = 5) -> str:
    return f'[{name}]\nabout = "x"\nseconds = {seconds}\ncommand = """{command}"""\n'


def _processes() -> list[list[str]]:
    """State, parent, group and more of every process."""
    found = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found.append(file.read_text().rpartition(")")[2].split())
    return found


def test_a_part_that_fails_or_hangs_does_not_take_the_others_results(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(parts, "_KILL_S", 0.5)
    monkeypatch.delenv("PYTHONPATH", raising=False)  # a part prints it
    path = _list(
        tmp_path,
        _part("good", "echo said; echo 1 > {out}/number")
        + _part("bad", "echo no >&2; exit 3")
        + _part("hangs", "echo $$ > {out}/pid; sleep 600 & trap '' INT; wait; sleep 600", 0.5)
        + _part("after", "pwd; echo $PYTHONPATH"),
    )
    packed = tmp_path / "found.tar.gz"
    began = time.monotonic()
    code = parts.main([str(path), "--pack", str(packed), "--out", str(tmp_path / "out")])
    assert code == 1
    assert time.monotonic() - began < 60
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {name: each["code"] for name, each in found.items()} == {
        "good": 0, "bad": 3, "hangs": "stopped", "after": 0,
    }  # fmt: skip
    (tmp_path / "got").mkdir()
    subprocess.run(["tar", "xzf", packed, "-C", tmp_path / "got"], check=True)
    got = tmp_path / "got" / "out"
    assert (got / "good" / "number").read_text() == "1\n"
    assert (got / "good" / "log.txt").read_text() == "said\n"
    assert (got / "bad" / "log.txt").read_text() == "no\n"
    assert (got / "after" / "log.txt").read_text() == f"{ROOT}\n{ROOT}\n"
    pid = int((got / "hangs" / "pid").read_text())
    assert not Path(f"/proc/{pid}").exists()
    states = [fields[0] for fields in _processes() if fields[2] == str(pid)]
    assert all(state == "Z" for state in states)  # ended; who adopts them has not looked


def test_results_are_packed_before_the_next_part_begins(tmp_path):
    path = _list(
        tmp_path,
        _part("first", "echo 1") + _part("second", f"tar -tzf {tmp_path}/p > {{out}}/seen"),
    )
    out = tmp_path / "out"
    assert parts.main([str(path), "--out", str(out), "--pack", str(tmp_path / "p")]) == 0
    assert "out/first/log.txt" in (out / "second" / "seen").read_text()


def test_a_part_that_cannot_end_in_time_is_left_out(tmp_path, capsys):
    path = _list(tmp_path, _part("long", "echo 1", 100) + _part("short", "echo 1", 1))
    assert parts.main([str(path), "--seconds", "20"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["long"]["code"] == "left out"
    assert found["short"]["code"] == 0


def test_constants_differ_in_a_copy_only(tmp_path):
    tree, copy = tmp_path / "tree", tmp_path / "copy"
    (tree / "package").mkdir(parents=True)
    text = "IS_ON = False\nNUMBER: int = 3  # why\nif IS_ON:\n    IS_ON = None\n"
    (tree / "package" / "a.py").write_text(text)
    values = {"package/a.py": {"IS_ON": "True", "NUMBER": "4"}}
    parts.with_constants(tree, values, copy)
    changed = (copy / "package" / "a.py").read_text()
    assert changed == "IS_ON = True\nNUMBER: int = 4\nif IS_ON:\n    IS_ON = None\n"
    assert (tree / "package" / "a.py").read_text() == text
    with pytest.raises(ValueError, match="must set OTHER once, and does so 0 times"):
        parts.with_constants(tree, {"package/a.py": {"OTHER": "1"}}, tmp_path / "again")


def test_a_part_with_constants_runs_in_the_copy(tmp_path, capsys):
    text = _part("gate", "python -c 'import lab.parts as p; print(p._KILL_S)'; pwd")
    path = _list(tmp_path, text + '[gate.constants]\n"lab/parts.py" = {_KILL_S = "1.5"}\n')
    assert parts.main([str(path), "--out", str(tmp_path / "out")]) == 0
    said = (tmp_path / "out" / "gate" / "log.txt").read_text().splitlines()
    assert said[0] == "1.5"
    assert said[1] != str(ROOT)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ('[a]\nabout = "x"\nseconds = 1\n', "part 'a'.*'command'"),
        (_part("a", "true") + "retries = 3\n", "part 'a'.*'retries'"),
    ],
)
def test_a_wrong_list_names_the_part_and_the_entry(tmp_path, text, match):
    with pytest.raises(ValueError, match=match):
        parts.read(_list(tmp_path, text))


def test_an_unknown_name_says_which_there_are(tmp_path, capsys):
    with pytest.raises(SystemExit):
        parts.main([str(_list(tmp_path, _part("a", "true"))), "b"])
    assert "no part b" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["h200.toml"])
def test_the_lists_of_this_tree_name_files_and_constants_that_exist(name):
    found = parts.read(ROOT / "lab" / name)
    assert found
    for part in found.values():
        for file in re.findall(r"(?:lab|tests|docs)/[\w./]+", part.command):
            assert (ROOT / file).exists(), (part.name, file)
        assert subprocess.run(["bash", "-n", "-c", part.command]).returncode == 0, part.name
        for file, values in part.constants.items():
            for constant in values:
                lines = re.findall(rf"^{constant}(?:: \w+)? = ", (ROOT / file).read_text(), re.M)
                assert len(lines) == 1, (part.name, file, constant)
    listed = subprocess.run(
        [sys.executable, "lab/parts.py", f"lab/{name}", "--list"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert len(listed.splitlines()) == len(found)
