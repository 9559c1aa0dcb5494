"""Measurement jobs without the wait for imports: a server that has imported everything forks a process for each job.

A job's process is as fresh as one that `run_job` starts: the server has imported and done nothing else, so there is no
thread, no file and no model to inherit. What it saves is the time of importing, which is most of a short run.

Client and server talk over a Unix socket pair, one message at a time. To the server: the files for a job's standard
input, output and error, as passed descriptors. Back: `{"pid"}` when the job begins, `{"returncode"}` when it ended. The
client ends a job by killing its process group.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import IO, Any, Self

from seqmoe.profiles.machine import count_as_resident, resident_files_bytes
from seqmoe.profiles.startup import quick_imports
from seqmoe.runtime.jobs_process import die_with_parent, end_group, job_result, process_error, run_job

SERVER_COMMAND = (sys.executable, "-m", "seqmoe.runtime.jobs_server")
START_S = 120.0  # for imports, on a slow and busy machine
MESSAGE_BYTES = 4096


class JobServer:
    """A server of one's own, started with the first job and ended by `close` (a context manager).

    `command` must lead to `serve` in another process; it gets the number of its socket as its last argument.
    """

    def __init__(self, command: tuple[str, ...] = SERVER_COMMAND) -> None:
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self.lost: str | None = None  # why there is no server; jobs are then started one by one

    def run(self, job: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """As `run_job`: the last line that the job printed as a dict, or `{"error": ...}` for whatever happened to it.

        `timeout_s` counts from the job's own start. Where the server cannot be started, or is lost on the way,
        `run_job` does it.
        """
        if self.lost is None:
            try:
                return self._run(job, timeout_s)
            except _Lost as error:
                self.lost = str(error)
        return run_job(job, timeout_s)

    def close(self) -> None:
        """Ends the server and whatever runs in it; may be called more than once."""
        process, self._process = self._process, None
        channel, self._socket = self._socket, None
        if channel:
            channel.close()
        if process:
            end_group(process.pid)
            process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _run(self, job: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        pid = 0
        with contextlib.ExitStack() as files:
            stdin, stdout, stderr = (files.enter_context(tempfile.TemporaryFile()) for _ in range(3))
            stdin.write(json.dumps(job).encode())
            stdin.seek(0)
            try:
                channel = self._connect()
                _send(channel, [stdin.fileno(), stdout.fileno(), stderr.fileno()])
                pid = int(_receive(channel, START_S)["pid"])
                try:
                    returncode = int(_receive(channel, timeout_s)["returncode"])
                except TimeoutError:
                    end_group(pid)
                    _receive(channel, START_S)
                    return process_error("Timeout", f"took longer than {timeout_s:g} s and was ended", 1)
            except BaseException as error:
                # Ctrl-C, or a server that died: nothing of the job may stay, nor a message that nobody reads.
                if pid:
                    end_group(pid)
                self.close()
                if isinstance(error, TimeoutError):
                    raise _Lost("the server does not answer") from None
                raise
            end_group(pid)  # what the job itself started and left
            return job_result(returncode, _contents(stdout), _contents(stderr))

    def _connect(self) -> socket.socket:
        """The socket of a server that has imported everything."""
        if self._socket is None:
            self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                command = [*self._command, str(theirs.fileno())]
                # A session of its own, as jobs have: Ctrl-C reaches only the client, which ends the others.
                try:
                    self._process = subprocess.Popen(
                        command,
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.DEVNULL,
                        stderr=subprocess.DEVNULL,
                        pass_fds=[theirs.fileno()],
                        start_new_session=True,
                    )
                except OSError as error:
                    raise _Lost(f"cannot start {command[0]}: {error.strerror}") from error
            _receive(self._socket, START_S)
        return self._socket


class _Lost(Exception):
    """There is no server to ask."""


def serve(channel: socket.socket, run: Callable[[], int]) -> None:
    """Forks a process for each message, which reads its job from standard input and exits with what `run` returns.

    Returns when the client has closed its end. The caller has no threads: a fork copies only the one that forks.
    """
    channel.send(json.dumps({"ready": True}).encode())
    files_bytes = resident_files_bytes()
    while True:
        message, files, _, _ = socket.recv_fds(channel, MESSAGE_BYTES, 3)
        if not message:
            return
        begin, go = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(go)
            channel.close()
            _job(begin, files, files_bytes, run)
        for descriptor in (begin, *files):
            os.close(descriptor)
        os.setpgid(pid, pid)  # before the client hears of it: it may want to end the group
        channel.send(json.dumps({"pid": pid}).encode())
        os.close(go)
        _, status = os.waitpid(pid, 0)
        channel.send(json.dumps({"returncode": os.waitstatus_to_exitcode(status)}).encode())


def _job(begin: int, files: list[int], parent_files_bytes: int, run: Callable[[], int]) -> None:
    """The job's process, from the fork to its end."""
    code = 1
    try:
        die_with_parent()
        count_as_resident(parent_files_bytes)
        os.read(begin, 1)  # returns when the server has named this process to the client
        for number, descriptor in enumerate(files):
            os.dup2(descriptor, number)
        for descriptor in (begin, *files):
            os.close(descriptor)
        code = run()
    except BaseException:  # noqa: BLE001 (a traceback is the answer; the process must end here)
        import traceback

        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)  # what the server has is not the job's to tidy up


def _send(channel: socket.socket, files: list[int]) -> None:
    try:
        socket.send_fds(channel, [b"job"], files)
    except OSError as error:
        raise _Lost(str(error)) from error


def _receive(channel: socket.socket, timeout_s: float) -> dict[str, Any]:
    """The server's next message. Raises TimeoutError, or _Lost when the server has gone."""
    channel.settimeout(timeout_s)
    try:
        data = channel.recv(MESSAGE_BYTES)
    except TimeoutError:
        raise
    except OSError as error:
        raise _Lost(str(error)) from error
    if not data:
        raise _Lost("the server has ended")
    message: dict[str, Any] = json.loads(data)
    return message


def _contents(file: IO[bytes]) -> bytes:
    file.seek(0)
    return file.read()


def main() -> int:
    """Entry point of the server's process; its last argument is the number of its socket."""
    die_with_parent()
    with quick_imports():
        from seqmoe.runtime import engine, measure  # noqa: F401  what no job has to wait for again

    with socket.socket(fileno=int(sys.argv[-1])) as channel:
        serve(channel, measure.main)
    return 0


if __name__ == "__main__":
    sys.exit(main())
