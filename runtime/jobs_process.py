"""Measurement jobs in fresh processes: one JSON object in, one out, whatever happens to the process."""

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from seqmoe.profiles.errors import SeqmoeError

MEASURE_COMMAND = (sys.executable, "-m", "seqmoe.runtime.measure")
OUT_OF_MEMORY_HINT = " (out of memory, if nobody killed it by hand)"
STDERR_TAIL_BYTES = 4096
PR_SET_PDEATHSIG = 1  # of linux/prctl.h


def run_job(job: Mapping[str, Any], timeout_s: float, command: Sequence[str] | None = None) -> dict[str, Any]:
    """Runs one measurement job in a process of its own; the last line of its output, as a dict.

    Never raises for what happens in there: a job that failed, was killed or took longer than `timeout_s` gives
    `{"error": {"type", "message", "exit_code"}}`. The process and its children are gone when this returns, also
    when it is interrupted.
    """
    command = list(command or MEASURE_COMMAND)
    with tempfile.TemporaryFile() as stderr:
        # A session of its own: Ctrl-C reaches only us, and we end the whole group.
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, start_new_session=True
            )
        except OSError as error:
            return process_error("NotStarted", f"cannot start {command[0]}: {error.strerror}", 1)
        try:
            stdout, _ = process.communicate(json.dumps(job).encode(), timeout_s)
        except subprocess.TimeoutExpired:
            return process_error("Timeout", f"took longer than {timeout_s:g} s and was ended", 1)
        finally:
            _end_group(process)
        size = stderr.seek(0, os.SEEK_END)
        stderr.seek(max(0, size - STDERR_TAIL_BYTES))
        return job_result(process.returncode, stdout, stderr.read())


def die_with_parent() -> None:
    """Called by a job's process as it starts: it is ended when the one that wants its result is gone (Linux).

    `run_job` ends its process by itself, but cannot when it is killed.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def job_error(result: Mapping[str, Any]) -> str | None:
    """Why a job gave no figures, as one line; None when it gave them."""
    error = result.get("error")
    return f"{error['type']}: {error['message']}" if error else None


def raise_job_error(result: Mapping[str, Any]) -> None:
    """Raises the error of a failed job as a SeqmoeError with the job's exit code; does nothing for a job that went well."""
    if text := job_error(result):
        failure = SeqmoeError(text)
        failure.exit_code = int(result["error"]["exit_code"])
        raise failure


def job_result(returncode: int, stdout: bytes, stderr: bytes) -> dict[str, Any]:
    """What a job's process said, from its exit code (negative: the signal that ended it) and what it wrote."""
    lines = stdout.decode(errors="replace").strip().splitlines()
    try:
        result = json.loads(lines[-1]) if lines else None
    except ValueError:
        result = None
    if isinstance(result, dict) and ("error" in result or returncode == 0):
        return result
    if returncode < 0:
        hint = OUT_OF_MEMORY_HINT if returncode == -signal.SIGKILL else ""
        return process_error("Killed", f"ended by {signal.Signals(-returncode).name}{hint}", 128 - returncode)
    last = [line for line in stderr.decode(errors="replace").splitlines() if line.strip()][-1:]
    return process_error("Crashed", f"exit code {returncode}: {''.join(last) or 'no output'}", returncode or 1)


def end_group(leader: int) -> None:
    """Ends what is left of a process's group. The group outlives its leader while it has members, and not longer."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def _end_group(process: "subprocess.Popen[bytes]") -> None:
    end_group(process.pid)
    process.wait()
    if process.stdout:
        process.stdout.close()


def process_error(kind: str, message: str, exit_code: int) -> dict[str, Any]:
    """The answer of a job that could not give one itself."""
    return {"error": {"type": kind, "message": message, "exit_code": exit_code}}
