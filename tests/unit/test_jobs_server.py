"""Jobs forked from a server: the same answers as jobs started one by one, and nothing left behind."""

import os
import sys
import time
from pathlib import Path

import pytest

from seqmoe.runtime.jobs_server import JobServer

# A server whose jobs do what their JSON says.
SERVER = """
import json, os, signal, socket, subprocess, sys, time
from seqmoe.runtime.jobs_server import serve
from seqmoe.runtime.jobs_process import die_with_parent

def run():
    job = json.loads(sys.stdin.read())
    if "pid_file" in job:
        open(job["pid_file"], "w").write(str(os.getpid()))
    if "child" in job:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        open(job["child"], "w").write(str(child.pid))
    time.sleep(job.get("sleep", 0))
    if "raise" in job:
        raise ValueError(job["raise"])
    if "signal" in job:
        os.kill(os.getpid(), job["signal"])
    if "kill_server" in job:
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)
    print("a line before")
    print(json.dumps({"got": job, "pid": os.getpid(), "server": os.getppid()}))
    return job.get("code", 0)

die_with_parent()
serve(socket.socket(fileno=int(sys.argv[-1])), run)
"""


@pytest.fixture
def server():
    with JobServer((sys.executable, "-c", SERVER)) as server:
        yield server


def gone(pid: int) -> bool:
    for _ in range(200):
        try:
            os.kill(pid, 0)
            if "Z" in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]:
                return True
        except (ProcessLookupError, FileNotFoundError):
            return True
        time.sleep(0.01)
    return False


def test_each_job_has_a_process_of_its_own_and_its_last_line_is_the_answer(server):
    first, second = server.run({"n": 1}, 20), server.run({"n": 2, "long": "x" * 300_000}, 20)
    assert first["got"] == {"n": 1}
    assert len(second["got"]["long"]) == 300_000
    assert first["server"] == second["server"]
    assert len({first["pid"], second["pid"], first["server"], os.getpid()}) == 4
    assert server.lost is None


def test_what_happens_to_a_job_is_an_answer_and_the_server_goes_on(server):
    assert server.run({"signal": 9}, 20)["error"]["type"] == "Killed"
    crashed = server.run({"raise": "planted"}, 20)["error"]
    assert crashed["type"] == "Crashed" and "ValueError: planted" in crashed["message"]
    assert server.run({"code": 4}, 20)["error"]["exit_code"] == 4
    assert server.run({"n": 3}, 20)["got"] == {"n": 3}
    assert server.lost is None


def test_a_job_that_takes_too_long_is_ended_with_its_children(server, tmp_path):
    job = {"sleep": 60, "pid_file": str(tmp_path / "pid"), "child": str(tmp_path / "child")}
    error = server.run(job, 1.5)["error"]
    assert error["type"] == "Timeout" and "1.5 s" in error["message"]
    assert gone(int((tmp_path / "pid").read_text())) and gone(int((tmp_path / "child").read_text()))
    assert server.run({"n": 4}, 20)["got"] == {"n": 4}


def test_an_interrupt_leaves_no_process(server, tmp_path):
    import signal

    def stop(number, frame):
        raise KeyboardInterrupt

    server.run({}, 20)
    leader = server._process.pid
    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, 1.0)
    try:
        with pytest.raises(KeyboardInterrupt):
            server.run({"sleep": 60, "pid_file": str(tmp_path / "pid")}, 60)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert gone(int((tmp_path / "pid").read_text())) and gone(leader)
    assert server.run({"n": 5}, 20)["got"] == {"n": 5}, "the next job starts a server again"


def test_without_a_server_jobs_are_started_one_by_one(monkeypatch):
    monkeypatch.setattr("seqmoe.runtime.jobs_server.run_job", lambda job, timeout_s: {"alone": job})
    with JobServer(("/no/such/program",)) as server:
        assert server.run({"n": 1}, 5) == {"alone": {"n": 1}}
        assert "/no/such/program" in server.lost
    with JobServer((sys.executable, "-c", SERVER)) as server:
        assert server.run({"kill_server": True}, 20) == {"alone": {"kill_server": True}}
        assert "ended" in server.lost


def test_closing_ends_the_server():
    with JobServer((sys.executable, "-c", SERVER)) as server:
        leader = server.run({}, 20)["server"]
        server.close()
        server.close()
    assert gone(leader)


def test_wrong_types_in_a_job_are_one_line():
    from seqmoe.profiles.errors import UsageError
    from seqmoe.runtime.measure import run

    for key, value, says in (
        ("context", "512", 'context in the measurement job must be a whole number, not "512"'),
        ("context", True, "must be a whole number, not true"),
        ("batched", 1, "must be true or false, not 1"),
        ("residency", "a", "must be a number"),
        ("prompts", "text", "must be a list"),
        ("prompts", [3], "texts or lists of token ids, not 3"),
        ("prompts", [["a"]], "texts or lists of token ids"),
        ("knobs", [], "must be an object"),
    ):
        with pytest.raises(UsageError) as caught:
            run({"model": "demo", key: value})
        assert says in str(caught.value)
