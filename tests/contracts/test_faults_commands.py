"""Bad input to the commands: one clear line on stderr, an exit code, one JSON object with --json, nothing half-written."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.families import make_checkpoint

from seqmoe.runtime.checkpoint import Checkpoint
from seqmoe.runtime.cli import main as run_command
from seqmoe.runtime.models import DEMO_FOLDER

GOLDEN = Path(__file__).parent.parent / "golden" / "profile_v1alpha1.yaml"
DIGEST = Checkpoint.open(DEMO_FOLDER).digest
Edit = Callable[[dict[str, Any]], None]


def write_profile(path: Path, edit: Edit = lambda profile: None) -> Path:
    """A profile of the demo model, changed by hand, so without its digest."""
    profile = yaml.safe_load(GOLDEN.read_text())
    del profile["integrity"]
    profile["target"]["model"].update(id="demo", digest=DIGEST)
    profile["target"]["workload"].update(context_max=256, memory_bytes=3 << 30)
    profile["knobs"].update(slots=64, policy="lru")
    edit(profile)
    path.write_text(json.dumps(profile))  # JSON is YAML
    return path


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, dict[str, Any]]:
    """Exit code, the error's line, and the error object of --json, which must be the last line of stdout."""
    with pytest.raises(SystemExit) as caught:
        run_command.main([str(argument) for argument in (*arguments, "--json")])
    out, err = capsys.readouterr()
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and "Traceback" not in err, err
    found = json.loads(out.splitlines()[-1])["error"]
    assert found["exit_code"] == caught.value.code and f"error: {found['message']}" == errors[0]
    return found["exit_code"], errors[0], found


def set_to(*path: str, value: object) -> Edit:
    def edit(profile: dict[str, Any]) -> None:
        for name in path[:-1]:
            profile = profile[name]
        profile[path[-1]] = value

    return edit


@pytest.mark.parametrize(
    ("edit", "code", "words"),
    [
        (set_to("knobs", "polcy", value="lru"), 5, "unknown key knobs.polcy (did you mean 'policy'?)"),
        (set_to("knbs", value={}), 5, "unknown key knbs (did you mean 'knobs'?)"),
        (set_to("target", "workload", "contxt_max", value=1), 5, "(did you mean 'context_max'?)"),
        (set_to("knobs", "slots", value="64"), 5, "knobs.slots must be a valid whole number, got '64'"),
        (set_to("knobs", "slots", value=64.5), 5, "knobs.slots must be"),
        (set_to("knobs", "direct_io", value="yes"), 5, "knobs.direct_io must be"),
        (set_to("knobs", "policy", value="lur"), 5, "knobs.policy must be"),
        (set_to("knobs", "read_chunk_bytes", value=100_000), 5, "multiple of 4096"),
        (set_to("knobs", value=[]), 5, "knobs must be"),
        (set_to("target", "workload", "link", value="pigeon"), 5, "link must be disk"),
        (set_to("target", "workload", "memory_bytes", value=-1), 5, "target.workload.memory_bytes must be"),
        (set_to("target", "model", "digest", value="0" * 64), 5, "made for another model: demo with digest 0000"),
        (set_to("target", "model", "id", value="../elsewhere"), 5, "no known name here and no folder beside the profile"),
        (set_to("target", "workload", "memory_bytes", value=200 << 20), 4, "the smallest that works is"),
        (set_to("apiVersion", value="seqmoe.dev/v9"), 5, "apiVersion 'seqmoe.dev/v9' is not known here"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_profiles(capsys: pytest.CaptureFixture[str], tmp_path: Path, edit: Edit, code: int, words: str) -> None:
    path = write_profile(tmp_path / "p.yaml", edit)
    found, line, _ = run(capsys, "--profile", path, "--prompt", "hi")
    assert found == code and words in line
    assert sorted(tmp_path.iterdir()) == [path]


BOMB = "a: &a [x, x, x]\n" + "".join(f"b{n}: [*a, *a, *a, *a]\n" for n in range(20))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "Is a directory"),
        (b"", "holds nothing"),
        (b"\xff\xfe\x00", "not text in UTF-8"),
        (b"\x00" * 100, "not valid"),
        (b"- a\n- b\n", "holds a list"),
        (b"a: " + b"[" * 20_000, "nested too deeply"),
        (BOMB.encode(), "anchors and aliases are not allowed"),
        (b"kind: a\nkind: b\n", "key 'kind' is given twice"),
        (b"a: !!python/object/apply:os.system ['touch pwned']\n", "not a valid profile"),
        (b"? [a]\n: b\n", "a key is not text"),
        (b"a" * (1 << 20) + b"a", "larger than 1 MiB"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_files_that_are_no_profile(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, content: bytes | None, words: str
) -> None:
    path = tmp_path / "p.yaml"
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)
    code, line, _ = run(capsys, "--profile", path, "--prompt", "hi")
    assert code == 5 and words in line
    assert not Path("pwned").exists()


def test_a_gigabyte_is_not_read_to_find_that_it_is_no_profile(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with open(tmp_path / "p.yaml", "wb") as file:
        file.truncate(1 << 30)
    began = time.monotonic()
    code, line, _ = run(capsys, "--profile", tmp_path / "p.yaml", "--prompt", "hi")
    assert code == 5 and "larger than 1 MiB" in line and time.monotonic() - began < 2


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--prompt", ""], 2, "a prompt must have at least one token"),
        (["--prompt", "hi \udcff\udcfe"], 2, "a prompt must be text in UTF-8"),
        (["--prompt", "x " * 400], 2, "do not fit the context of 256 tokens"),
        (["--prompt", "x", "--max-new-tokens", "256"], 2, "256 new tokens do not fit the context of 256 tokens"),
        (["--prompt", "a b c", "--max-new-tokens", "255"], 2, "tuned for: take at most --max-new-tokens 25"),
        (["--bench", "--max-new-tokens", "250"], 2, "or tune with a larger --context"),
        (["--prompt", "x", "--max-new-tokens", "0"], 2, "0 is not in the range x>=1"),
        (["--prompt", "x", "--max-new-tokens", "-4"], 2, "-4 is not in the range x>=1"),
        (["--prompt", "x", "--temperature", "nan"], 2, "temperature must be from 0.0001"),
        (["--prompt", "x", "--temperature", "1e-300"], 2, "temperature must be from 0.0001"),
        (["--prompt", "x", "--top-p", "nan"], 2, "top_p must be above 0"),
        (["--prompt", "x", "--seed", "9" * 30], 2, "seed must be from 0 to 2**64 - 1"),
        (["--prompt", "x", "--model", "nowhere"], 2, "no such folder"),
        (["--prompt", "x", "--model", str(GOLDEN)], 2, "is a file; give the folder"),
        ([], 2, "--json needs --prompt or --bench"),
    ],
)
def test_requests(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: list[str], code: int, words: str
) -> None:
    found, line, _ = run(capsys, "--profile", write_profile(tmp_path / "p.yaml"), *arguments)
    assert found == code and words in line


def test_nothing_is_said_before_a_request_is_known_to_fit(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Not the machine's differences, not the experts in memory, not the prompt."""
    with pytest.raises(SystemExit) as caught:
        run_command.main(
            ["--profile", str(write_profile(tmp_path / "p.yaml")), "--prompt", "a b c", "--max-new-tokens", "255"]
        )
    out, err = capsys.readouterr()
    assert caught.value.code == 2 and out == "" and err.startswith("error: 255 new tokens after a prompt of ")
    assert err.count("\n") == 1


@pytest.fixture
def demo(tmp_path: Path) -> Path:
    """A copy of the demo model that may be damaged, beside a profile of it."""
    write_profile(tmp_path / "p.yaml", set_to("target", "model", "id", value="model"))
    return Path(shutil.copytree(DEMO_FOLDER, tmp_path / "model"))


def cut(model: Path) -> None:
    os.truncate(model / "model.safetensors", 20 << 20)


def flip(model: Path) -> None:
    """The size is right, one bit is not."""
    path = model / "model.safetensors"
    with open(path, "r+b") as file:
        file.seek(-1000, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (cut, "model.safetensors: truncated: 20971520 bytes found, 27324200 expected"),
        (lambda model: (model / "model.safetensors").unlink(), "no weights: neither model.safetensors nor"),
        (lambda model: (model / "config.json").write_text("{"), "config.json: not usable"),
        (lambda model: (model / "config.json").write_bytes(b"\xff\xff"), "config.json: not usable"),
    ],
    ids=["truncated", "missing", "bad config", "binary config"],
)
def test_damaged_checkpoints(
    capsys: pytest.CaptureFixture[str], demo: Path, damage: Callable[[Path], Any], words: str
) -> None:
    damage(demo)
    code, line, _ = run(capsys, "--profile", demo.parent / "p.yaml", "--prompt", "hi")
    assert code == 6 and words in line


def test_a_folder_without_config_and_a_dense_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    profile = write_profile(tmp_path / "p.yaml")
    (tmp_path / "empty").mkdir()
    code, line, _ = run(capsys, "--profile", profile, "--model", tmp_path / "empty", "--prompt", "hi")
    assert code == 6 and "no config.json in this folder" in line
    dense = tmp_path / "dense"
    dense.mkdir()
    (dense / "config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 1, "hidden_size": 8,
                                                    "num_attention_heads": 1, "intermediate_size": 8, "vocab_size": 16}))  # fmt: skip
    shutil.copy(DEMO_FOLDER / "model.safetensors", dense)
    code, line, _ = run(capsys, "--profile", profile, "--model", dense, "--prompt", "hi")
    assert code == 6 and "'llama' is a dense model" in line


def test_verify(
    capsys: pytest.CaptureFixture[str], demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flipped bit passes the quick check, which looks at names, sizes and headers, and not the full one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    arguments = ["--profile", tmp_path / "p.yaml", "--prompt", "hi", "--max-new-tokens", "1", "--verify"]

    def good(words: str) -> None:
        with pytest.raises(SystemExit) as caught:
            run_command.main([str(argument) for argument in arguments])
        err = capsys.readouterr().err
        assert caught.value.code == 0 and words in err, err

    good("1 files had never been verified here")
    good("verified 1 files against the first verification")
    flip(demo)
    code, line, _ = run(capsys, *arguments)
    assert code == 6 and "model.safetensors: its bytes have SHA-256" in line and "the first verification says" in line
    digest = subprocess.run(["sha256sum", demo / "model.safetensors"], capture_output=True, text=True, check=True)
    (demo / "SHA256SUMS").write_text(f"{digest.stdout.split()[0].upper()} *./model.safetensors\n")
    good("verified 1 files against SHA256SUMS")
    flip(demo)
    code, line, _ = run(capsys, *arguments)
    assert code == 6 and "SHA256SUMS says" in line
    (demo / "SHA256SUMS").write_bytes(b"\xff\xfe")
    assert run(capsys, *arguments)[0] == 6
    (demo / "SHA256SUMS").write_text("<html>\n")
    assert "not what sha256sum writes" in run(capsys, *arguments)[1]


def test_a_checkpoint_without_a_tokenizer_says_so(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = make_checkpoint("qwen3_moe", "saved", tmp_path / "model")

    def edit(profile: dict[str, Any]) -> None:
        profile["target"]["model"].update(id="model", digest=Checkpoint.open(folder).digest)
        profile["target"]["workload"].update(context_max=64)

    request = ("--prompt", "hi", "--max-new-tokens", "8")
    code, line, _ = run(capsys, "--profile", write_profile(tmp_path / "p.yaml", edit), *request)
    assert code == 2 and "there is no tokenizer" in line
    (folder / "tokenizer.json").write_text("{}")
    code, line, _ = run(capsys, "--profile", tmp_path / "p.yaml", *request)
    assert code == 2 and "tokenizer" in line


def test_a_read_only_folder_behind_a_link_is_fine(capsys: pytest.CaptureFixture[str], demo: Path, tmp_path: Path) -> None:
    demo.rename(tmp_path / "elsewhere")
    demo.symlink_to(tmp_path / "elsewhere")
    for path in [*demo.iterdir(), demo]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    with pytest.raises(SystemExit) as caught:
        run_command.main(["--profile", str(tmp_path / "p.yaml"), "--prompt", "hi", "--max-new-tokens", "2", "--json"])
    assert caught.value.code == 0, capsys.readouterr().err
    demo.chmod(0o755)


# What a shell's background job starts ignores Ctrl-C: hence the handler, which is Python's own.
COMMAND = """
import os, signal, sys
from {module} import {name} as main

sys.argv[0] = "seqmoe"
signal.signal(signal.SIGINT, signal.default_int_handler)
os.write(2, b"started\\n")
main()
"""


def start(module: str, name: str, *arguments: object, **extra: Any) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", COMMAND.format(module=module, name=name), *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **extra)


def started(process: subprocess.Popen[bytes]) -> None:
    """Waits until the command itself runs: before that a Ctrl-C is Python's own business, however slow the machine."""
    assert process.stderr is not None
    assert process.stderr.readline() == b"started\n"


@pytest.mark.slow
def test_the_smallest_budget_named_works(tmp_path: Path) -> None:
    """In processes of their own, whose sizes differ a little."""
    def answer(memory_bytes: int) -> tuple[int, str]:
        path = write_profile(tmp_path / "p.yaml", set_to("target", "workload", "memory_bytes", value=memory_bytes))
        options = ("--profile", path, "--prompt", "hi", "--max-new-tokens", "2", "--json")
        with start("seqmoe.runtime.cli", "main", *options) as process:
            out, _ = process.communicate(timeout=60)
        return process.returncode, out.decode().splitlines()[-1]

    code, text = answer(100 << 20)
    assert code == 4
    smallest = int(text.split("the smallest that works is ")[1].split("MiB")[0])
    code, text = answer(smallest << 20)
    assert code == 0 and json.loads(text)["peak_rss_bytes"] <= smallest << 20


def test_output_that_cannot_be_written(tmp_path: Path) -> None:
    """/dev/full answers every write with "no space left"."""
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-c", COMMAND.format(module="seqmoe.autotune.main", name="main"), "profile", "schema"],
            check=False, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60,
        )  # fmt: skip
    said = done.stderr.removeprefix("started\n")
    assert done.returncode == 8 and said.startswith("error: no room to write") and said.count("\n") == 1


@pytest.mark.parametrize("moment", [0.2, 0.8, 1.6, 2.6, "decode"])
def test_ctrl_c_ends_run(tmp_path: Path, moment: float | str) -> None:
    """While it imports, loads and decodes. The prompt fills half of the context."""
    options = ("--profile", write_profile(tmp_path / "p.yaml"), "--prompt", "word " * 100, "--max-new-tokens", "120")
    process = start("seqmoe.runtime.cli", "main", *options, bufsize=0)
    assert process.stdout is not None
    started(process)
    if isinstance(moment, float):
        time.sleep(moment)
    else:
        while len(process.stdout.read(1)) == 0:
            pass
        process.stdout.read(520)  # past the prompt
    process.send_signal(signal.SIGINT)
    began = time.monotonic()
    _, err = process.communicate(timeout=30)
    assert process.returncode in (130, 0 if moment == "decode" else 130), err
    assert b"Traceback" not in err and time.monotonic() - began < 10
    assert [path.name for path in tmp_path.iterdir()] == ["p.yaml"]


@pytest.mark.slow
@pytest.mark.parametrize("moment", [2.0, 6.0])
def test_ctrl_c_ends_bench_and_its_children(tmp_path: Path, moment: float) -> None:
    options = ("bench", "--model", "demo", "--repeats", "20", "--out", tmp_path / "b.json", "--json")
    process = start("seqmoe.autotune.main", "main", *options)
    started(process)
    time.sleep(moment)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130 and b"Traceback" not in err
    assert json.loads(out.splitlines()[-1])["error"]["type"] == "Interrupted"
    assert not list(tmp_path.iterdir()) and not [child for child in children if Path(f"/proc/{child}").exists()]
