"""What the processes of side_by_side.py run is reported as one process would, whatever they do."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import transformers  # noqa: F401 - its logger

from tests import warm

ROOT = Path(__file__).parents[1]

# Each file takes the next one's turn unless it has a process of its own: all are waited for.
FILE = """
import os, pytest, time

@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made")
    yield folder
    (folder.parents[1] / f"torn-{os.getpid()}-{__name__}").touch()

def test_first(made, capfd):
    os.write(1, b"said")
    assert capfd.readouterr().out == "said"

def test_fails(made):
    print("what it said of", __name__)
    assert made is None

def test_that_may_die(made):
    %s

def test_behind_it(made):
    pass

@pytest.mark.skip(reason="not now")
def test_skipped():
    pass

@pytest.mark.xfail(strict=True)
def test_that_fails_as_it_should():
    raise ValueError
"""

# A thread of which an interpreter's end would wait.
LEAVES_A_THREAD = """
import threading, time

def test_one():
    threading.Thread(target=time.sleep, args=(600,)).start()
"""


def run_tests(folder, *arguments, count=3):
    command = [sys.executable, "-m", "pytest", "-p", "tests.side_by_side", "-p", "no:cacheprovider",
               "--processes", str(count), "--rootdir", folder, "-c", os.devnull,
               "--basetemp", folder / "made", *arguments, folder]  # fmt: skip
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        command, env=environment, cwd=folder, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )  # fmt: skip
    return done.returncode, done.stdout


@pytest.fixture
def files(tmp_path):
    for name in ("a", "b", "c", "d"):
        way = "os.kill(os.getpid(), 9)" if name == "b" else "time.sleep(0.3)"
        (tmp_path / f"test_{name}.py").write_text(FILE % way)
    return tmp_path


def test_reports_are_those_of_one_process_and_a_dead_one_fails_its_test_alone(files):
    status, said = run_tests(files, "-ra")
    assert status == 1
    assert "5 failed, 11 passed, 4 skipped, 4 xfailed" in said
    failed = sorted(re.findall(r"^FAILED (\S+)", said, re.MULTILINE))
    assert failed == sorted(
        ["test_b.py::test_that_may_die", *(f"test_{name}.py::test_fails" for name in "abcd")]
    )
    assert "the process that ran this test ended with signal 9" in said
    for name in "abcd":
        assert f"what it said of test_{name}" in said
    # One that goes on behind a test that died makes what the module shares anew.
    torn = [path.name.split("-")[1:] for path in (files / "made").glob("torn-*")]
    assert sorted(name for _, name in torn) == ["test_a", "test_b", "test_c", "test_d"]
    assert len({pid for pid, _ in torn}) > 1


def test_the_first_failure_ends_all_when_asked(files):
    status, said = run_tests(files, "-x")
    assert status == 1
    assert "stopping after" in said
    assert "passed" in said


def test_a_file_that_cannot_be_imported_is_an_error(files):
    (files / "test_e.py").write_text("import nothing_of_this_name")
    status, said = run_tests(files)
    assert status == 2
    assert "nothing_of_this_name" in said


def test_fewer_files_than_processes_are_handed_out_test_by_test(tmp_path):
    body = "import os, time\n\ndef test_{i}():\n    time.sleep(0.5)\n    print('by', os.getpid())\n"
    (tmp_path / "test_a.py").write_text("".join(body.format(i=i) for i in range(4)))
    status, said = run_tests(tmp_path, "-rP", count=4)
    assert status == 0
    assert len(set(re.findall(r"by (\d+)", said))) > 1


def test_files_are_handed_out_in_parts_when_asked(tmp_path):
    body = (
        "import os, time\n\ndef test_{f}{i}():\n    time.sleep(0.3)\n"
        "    print('{f}{i}', os.getpid())\n"
    )
    for name in "ab":
        made = "".join(body.format(i=i, f=name) for i in range(6))
        (tmp_path / f"test_{name}.py").write_text(made)
    status, said = run_tests(tmp_path, "-rP", "--at-most", "2", count=2)
    assert status == 0
    pids = dict(re.findall(r"^([ab]\d) (\d+)", said, re.MULTILINE))
    assert len(pids) == 12
    assert all(pids[f"{name}{i}"] == pids[f"{name}{i + 1}"] for name in "ab" for i in (0, 2, 4))
    assert any(len({pids[f"{name}{i}"] for i in range(6)}) == 2 for name in "ab")


def test_threads_that_tests_leave_hold_nothing_up(tmp_path):
    (tmp_path / "test_a.py").write_text(LEAVES_A_THREAD)
    (tmp_path / "test_b.py").write_text(LEAVES_A_THREAD)
    status, said = run_tests(tmp_path, count=2)
    assert (status, "2 passed" in said) == (0, True), said


# What is asked of torch before processes are forked; torch itself takes each run two seconds.
TORCH = """
import os

first = os.getpid()

class cuda:
    @staticmethod
    def init():
        if os.getpid() != first:
            {fails}

    is_initialized = staticmethod(lambda: {is_initialized})
    is_available = staticmethod(lambda: True)

def zeros(count, device):
    assert device == "cuda"
"""
NEEDS_A_GPU = """
import pytest, torch

@pytest.mark.{mark}
def test_a():
    pass
"""


@pytest.mark.parametrize(
    ("is_initialized", "fails", "why"),
    [
        (True, "pass", "collecting began to use CUDA"),
        (False, "raise RuntimeError('not behind a fork')", "said: RuntimeError: not behind a fork"),
        (False, "os.kill(os.getpid(), 9)", "the process ended with status 9"),
    ],
)
def test_a_gpu_that_forked_processes_cannot_use_is_refused(tmp_path, is_initialized, fails, why):
    (tmp_path / "torch.py").write_text(TORCH.format(is_initialized=is_initialized, fails=fails))
    (tmp_path / "test_a.py").write_text(NEEDS_A_GPU.format(mark="gpu"))
    status, said = run_tests(tmp_path)
    assert (status, why in said) == (4, True), said


def test_nobody_looks_for_a_gpu_that_no_test_needs(tmp_path):
    (tmp_path / "torch.py").write_text(TORCH.format(is_initialized=True, fails="1 / 0"))
    (tmp_path / "test_a.py").write_text(NEEDS_A_GPU.format(mark="slow"))
    status, said = run_tests(tmp_path)
    assert (status, "1 passed" in said) == (0, True), said


def test_threads_that_collecting_leaves_are_refused(tmp_path):
    (tmp_path / "test_a.py").write_text(
        "import threading, time\n"
        "threading.Thread(target=time.sleep, args=(3,), name='of-a', daemon=True).start()\n"
        "def test_a():\n    pass\n"
    )
    status, said = run_tests(tmp_path)
    assert status == pytest.ExitCode.USAGE_ERROR
    assert "collecting left threads: ['of-a']" in said
    assert "passed" not in said


def start(code, *arguments, **options):
    """Run code as an argument of a module; without a keeper subprocess starts it."""
    command = [sys.executable, "-P", "-m", "timeit", "-n", "1", "-r", "1", code, *arguments]
    return warm.Popen(command, **options)


def test_a_warm_process_is_a_child_with_its_files_environment_and_folder(tmp_path):
    reading, writing = os.pipe()
    code = (
        "import os, sys\n"
        "print(os.environ['GIVEN'], os.environ.get('HOME'), os.getcwd(), os.getpid(),\n"
        "      os.getppid(), os.getsid(0), sys.stdin.read(), sep='|', end='|')\n"
        f"os.write({writing}, b'handed over')\n"
        "print('wrong', file=sys.stderr)\n"
    )
    child = start(
        code, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        pass_fds=[writing], env={"GIVEN": "here"}, cwd=tmp_path, start_new_session=True,
    )  # fmt: skip
    os.close(writing)
    said, wrong = child.communicate("typed")
    with open(reading, "rb") as handed:
        assert handed.read() == b"handed over"
    given, home, folder, pid, parent, session, typed, _ = said.split("|")
    assert (given, home, folder, typed) == ("here", "None", str(tmp_path), "typed")
    assert int(pid) == int(session) == child.pid
    assert int(parent) == os.getpid()
    assert wrong == "wrong\n"
    assert child.returncode == 0


def test_a_warm_process_ends_as_others_do():
    with start("import os; os._exit(7)") as child:
        assert child.wait() == 7
    command = [sys.executable, "-m", "json.tool"]  # it ends with a message for a status
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with warm.Popen(command, **pipes, text=True) as child:
        assert child.communicate("no json")[1].startswith("Expecting value")
        assert child.returncode == 1
    with start("1 / 0", stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        said = b"".join(child.communicate())
        assert child.returncode == 1
        assert b"ZeroDivisionError" in said
    with start("import time; time.sleep(60)") as child:
        child.send_signal(signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL
    with pytest.raises(ChildProcessError):  # nothing stays behind
        os.waitpid(child.pid, 0)


def test_code_runs_in_a_warm_process_as_it_is():
    code = (
        "import sys\ndef f(): return __name__\nprint(f(), *sys.argv); sys.exit(len(sys.argv) - 2)"
    )
    command = [sys.executable, "-c", code]
    assert warm.run([*command, "one"], check=True).stdout == "__main__ -c one\n"
    assert warm.run([*command, "one", "two"], check=False).returncode == 1
    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        warm.run([*command[:2], "1 / 0"], check=True)


def test_a_warm_process_has_torch_where_there_is_a_keeper():
    with start("import sys; print('torch' in sys.modules)", stdout=subprocess.PIPE) as child:
        assert child.communicate()[0].split()[0] == str(warm.is_kept()).encode()


def test_processes_of_a_warm_parent_are_warm_and_its_children():
    code = (
        "import os, subprocess, sys\n"
        "code = \"import os, sys; print(os.getppid(), 'torch' in sys.modules); sys.exit(3)\"\n"
        "with subprocess.Popen([sys.executable, '-c', code], stdout=subprocess.PIPE) as child:\n"
        "    print(os.getpid(), *child.communicate()[0].decode().split(), child.returncode)"
    )
    with warm.Parent([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        said = parent.communicate()[0].split()
    assert said == [str(parent.pid), str(parent.pid), str(warm.is_kept()), "3"]
    assert parent.returncode == 0


# What it has of the process that it was forked from; then it takes numbers of files and logs.
INHERITED = r"""
import json, logging, os, socket, sys, threading
root = logging.getLogger()
links = {int(n): os.readlink(f'/proc/self/fd/{n}') for n in os.listdir('/proc/self/fd')
         if os.path.exists(f'/proc/self/fd/{n}')}
pairs = [socket.socketpair() for _ in range(200)]
logging.getLogger('of.a.server').error('a line of the log')
threading.Thread(target=lambda: 1 / 0).start()
def got(end):
    end.setblocking(False)
    try:
        return end.recv(1000).decode()
    except BlockingIOError:
        return ''
print(json.dumps({
    'handlers': len(root.handlers), 'level': root.level,
    'hooks': threading.excepthook is threading.__excepthook__
             and sys.unraisablehook is sys.__unraisablehook__,
    'links': links, 'sockets': ''.join(got(end) for pair in pairs for end in pair),
}))
"""


def test_a_warm_process_has_no_handler_hook_or_file_of_pytests(tmp_path, request):
    """Else a line of its log goes into a socket that has got the number of pytest's file."""
    given = tmp_path / "given"
    with given.open("w") as file, start(
        INHERITED, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, pass_fds=[file.fileno()],
    ) as child:  # fmt: skip
        out, wrong = child.communicate()
        number = str(file.fileno())
    told = json.loads(out.splitlines()[0])
    assert told["sockets"] == ""
    assert (told["handlers"], told["level"], told["hooks"]) == (0, logging.WARNING, True)
    assert "a line of the log" in wrong  # by the handler of last resort, which knows no file
    assert "ZeroDivisionError" in wrong
    links = {n: path for n, path in told["links"].items() if int(n) > 2}
    assert links.pop(number) == str(given)
    assert set(links.values()) <= {os.devnull}, "numbers of pytest's files lead nowhere"
    capture = request.config.pluginmanager.get_plugin("capturemanager")._global_capturing
    pytests = {str(each.tmpfile.fileno()) for each in (capture.out, capture.err) if each}
    assert pytests <= links.keys() or not warm.is_kept(), "and stay taken"
