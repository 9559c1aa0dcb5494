"""`seqmoe-tune` and `seqmoe` from argument to exit code; runs are made by the fake worker, in real processes."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from seqmoe.autotune import doctor
from seqmoe.autotune import probe as probing
from seqmoe.autotune.cli import Workers, tune_command
from seqmoe.autotune.main import seqmoe_group
from seqmoe.autotune.measure import outcome_of
from seqmoe.autotune.probe import Probe
from seqmoe.autotune.search import open_storage
from seqmoe.autotune.state import locked
from seqmoe.profiles.errors import UsageError
from seqmoe.profiles.schema import LinkFacts, read_profile, write_profile
from seqmoe.profiles.spec import ModelSpec
from seqmoe.runtime.cli import main as run_command
from seqmoe.runtime.models import DEMO_FOLDER, resolve_model

WORKER = str(Path(__file__).parent / "fake_tune_worker.py")
_found = importlib.util.spec_from_file_location("fake_tune_worker", WORKER)
fake = importlib.util.module_from_spec(_found)
_found.loader.exec_module(fake)
GOLDEN = Path(__file__).parent.parent / "golden" / "profile_v1alpha1.yaml"


def in_process(kind):
    """A machine that is a formula."""

    def probe(folder, link, knobs, *, link_seconds):
        found = fake.probe({"link_seconds": link_seconds})
        return Probe(
            ModelSpec(**found["spec"]),
            found["process_bytes"],
            found["packages"],
            found["link"] and LinkFacts(**found["link"]),
        )

    def measure(knobs, workload, timeout_s):
        return outcome_of(fake.answer(kind, json.loads(json.dumps(workload.job(knobs)))), knobs, 0.01)

    return Workers(measure=measure, probe=probe)


@pytest.fixture
def tune(tmp_path, capsys):
    """Runs the command; (exit code, stdout, stderr, JSON of the last line or None)."""
    (tmp_path / "model").mkdir()

    def run(*args, kind="better", memory="320MiB", trials="12", out=None):
        common = [
            "--model",
            str(tmp_path / "model"),
            "--budget",
            "120s",
            "--trials",
            trials,
            "--out",
            str(out or tmp_path / "p.yaml"),
        ]
        common += ["--state", str(tmp_path / "state")] + (["--memory", memory] if memory else [])
        with pytest.raises(SystemExit) as ended:
            tune_command.main([*common, *args], obj=in_process(kind))
        out_text, err_text = capsys.readouterr()
        last = out_text.strip().splitlines()[-1] if out_text.strip() else ""
        return ended.value.code, out_text, err_text, json.loads(last) if last.startswith("{") else None

    return run


def test_a_faster_setting_becomes_a_tuned_profile(tune, tmp_path):
    code, _, err, answer = tune("--json")
    assert (code, answer["exit_code"], answer["status"]) == (0, 0, "tuned"), err
    profile = read_profile(tmp_path / "p.yaml")
    evidence = profile.evidence
    assert profile.to_knobs().policy == "lfu"
    assert evidence.ratio_ci95[0] > 1 + evidence.aa_band >= 1.02
    assert evidence.n_pairs >= 3 and evidence.trials > 5
    assert evidence.tuned_tokens_per_s > evidence.default_tokens_per_s > 40
    assert profile.target.model.id == "model" and profile.target.model.digest == "f" * 64
    assert profile.target.workload.memory_bytes == 320 << 20
    assert profile.facts.link.bytes_per_s_p50 == 1.2e9
    assert profile.facts.layer_ms == pytest.approx(1000 / profile.facts.full_tokens_per_s / 4)
    assert answer["knobs"] == profile.to_knobs().to_dict()
    assert str(tmp_path) not in (tmp_path / "p.yaml").read_text()  # no paths in a profile


def test_where_nothing_matters_the_default_stays_and_that_is_a_result(tune, tmp_path):
    code, out, _, _ = tune(kind="flat")
    assert code == 3
    profile = read_profile(tmp_path / "p.yaml")
    assert profile.evidence.status == "default_kept"
    assert profile.to_knobs().policy == "lru" and profile.to_knobs().read_threads == 4
    assert "default kept" in out and "tokens/s" in out


def test_a_gain_on_the_searchs_prompts_alone_is_none(tune):
    code, _, _, answer = tune("--json", kind="liar")
    assert (code, answer["status"]) == (3, "default_kept")
    assert "not proven faster" in answer["evidence"]["reason"]


@pytest.mark.parametrize(
    ("kind", "memory", "code", "message"),
    [
        ("failing", "320MiB", 7, "error: the disk is gone"),
        ("better", "100MiB", 4, "the smallest that works is"),
        ("differing", "320MiB", 1, "different tokens for the same prompts"),
    ],
)
def test_errors_are_one_line_and_leave_no_profile(tune, tmp_path, kind, memory, code, message):
    found, _, err, answer = tune("--json", kind=kind, memory=memory)
    assert found == code
    lines = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and message in lines[0]
    assert answer["error"]["exit_code"] == code
    assert not (tmp_path / "p.yaml").exists()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--budget", "soon"], "--budget must be a time such as 10m"),
        (["--memory", "lots"], "--memory must be a number with a unit"),
        (["--link", "pigeon"], "link must be disk"),
        (["--model", "owner/name"], "hub names are not read yet"),
        (["--model", "nothing-here"], "known names are demo, demo-xl"),
        (["--context", "4096"], "more than the 512 tokens"),
        (["--prompts", "/no/such/file"], "cannot be read"),
        (["--nonsense"], "No such option"),
        (["--out", "/"], "is a folder"),
        (["--out", "/proc/none/p.yaml"], "cannot write"),
        (["--out", "not-there/p.yaml"], "not-there does not exist: make that folder first"),
    ],
)
def test_wrong_options_are_one_line_and_exit_2(tune, args, message):
    code, _, err, _ = tune(*args)
    lines = [line for line in err.splitlines() if line.startswith("error: ")]
    assert code == 2 and len(lines) == 1 and message in lines[0]


def test_dry_run_measures_nothing(tune, tmp_path):
    code, _, _, answer = tune("--dry-run", "--json")
    assert code == 0 and answer["dry_run"]
    assert {d["name"] for d in answer["space"]} >= {"fill", "policy", "read_threads", "queue_depth"}
    assert answer["memory_plan"]["total_bytes"] <= answer["memory_bytes"] == 320 << 20
    code, out, _, _ = tune("--dry-run")
    assert code == 0 and "predicted memory" in out and "policy: lru, lfu, static" in out
    assert "to 1 of the slots that fit" in out
    space = {d["name"]: d for d in answer["space"]}
    assert space["policy"] == {"name": "policy", "choices": ["lru", "lfu", "static"], "low": None, "high": None}
    assert space["fill"]["choices"] is None and 0 < space["fill"]["low"] < space["fill"]["high"] == 1
    assert not (tmp_path / "p.yaml").exists() and not (tmp_path / "state").exists()


def test_resume_goes_on_with_the_same_study(tune):
    _, _, _, first = tune("--json", trials="3")
    code, _, err, again = tune("--json", "--resume", trials="9")
    assert "resuming study" in err
    assert again["evidence"]["trials"] > first["evidence"]["trials"] >= 3
    assert code in (0, 3)


def test_the_time_counts_from_the_commands_start(tune, monkeypatch):
    """The probe's time is part of `elapsed_s`, and of the budget."""
    quick = fake.probe

    def slow(job):
        time.sleep(1.5)
        return quick(job)

    monkeypatch.setattr(fake, "probe", slow)
    _, _, _, answer = tune("--json", trials="1")
    assert answer["elapsed_s"] > 1.5


def test_resume_with_nothing_there_says_so(tune):
    assert "nothing to resume" in tune("--resume", trials="1")[2]


def test_a_storage_url(tune, tmp_path):
    code, _, err, _ = tune("--storage", f"sqlite:///{tmp_path}/trials.db", trials="3")
    assert code in (0, 3), err
    assert len(open_storage(f"sqlite:///{tmp_path}/trials.db").get_all_studies()) == 1
    assert (tmp_path / "trials.db").exists() and not (tmp_path / "state" / "trials.journal").exists()


def test_two_at_once_on_one_state_folder(tune, tmp_path):
    with locked(tmp_path / "state"):
        code, _, err, _ = tune()
        assert code == 2
        assert f"another seqmoe-tune (process {os.getpid()}) is at work in {tmp_path}/state" in err
    with locked(tmp_path / "state"):
        pass


SCRIPT = """
import functools, sys
from seqmoe.autotune.cli import Workers, tune_command
from seqmoe.autotune.measure import measure
from seqmoe.runtime.jobs_process import run_job
sys.path.insert(0, sys.argv[1])
from test_tune_cli import in_process
worker = (sys.executable, "-S", sys.argv[1] + "/fake_tune_worker.py", sys.argv[2])
run = functools.partial(run_job, command=worker)
tune_command.main(sys.argv[3:], obj=Workers(functools.partial(measure, run=run), in_process("better").probe))
"""


def start(tmp_path, kind, env=None):
    (tmp_path / "model").mkdir(exist_ok=True)
    args = [
        "--model",
        str(tmp_path / "model"),
        "--budget",
        "60s",
        "--out",
        str(tmp_path / "p.yaml"),
        "--memory",
        "320MiB",
        "--json",
    ]
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(Path(WORKER).parent), kind, *args, "--state", str(tmp_path / "state")],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **(env or {})},
    )  # fmt: skip


def wait_for(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)


def test_too_much_memory_at_full_context_keeps_the_default(tune, tmp_path):
    code, _, _, answer = tune("--json", kind="swelling")
    assert code == 3 and "too much memory at full context: took 328 MiB of 320 MiB" in answer["evidence"]["reason"]
    assert read_profile(tmp_path / "p.yaml").to_knobs().policy == "lru"


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_in_the_search_writes_the_best_so_far(tmp_path, how):
    process = start(tmp_path, "better")
    journal = tmp_path / "state" / "trials.journal"
    wait_for(lambda: journal.exists() and journal.read_text().count('"measurement"') >= 4)
    process.send_signal(how)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    answer = json.loads(out.strip().splitlines()[-1])
    assert (answer["status"], answer["exit_code"]) == ("untested", 130)
    profile = read_profile(tmp_path / "p.yaml")
    assert profile.evidence.status == "untested" and "interrupted before the verdict" in profile.evidence.reason
    assert "Traceback" not in err and "holds the best so far" in err and "--resume goes on" in err


def test_interrupted_in_a_run_ends_the_process_that_runs(tmp_path):
    pid_file = tmp_path / "pid"
    process = start(tmp_path, "slow", {"PID_FILE": str(pid_file)})
    wait_for(lambda: pid_file.exists() and pid_file.read_text())
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "holds the default settings" in err and "--resume" not in err  # nothing was measured that one could go on with
    wait_for(lambda: not Path(f"/proc/{pid_file.read_text()}").exists(), 5)
    assert read_profile(tmp_path / "p.yaml").evidence.reason == "interrupted before the verdict: the default settings"


def call(args, capsys):
    with pytest.raises(SystemExit) as ended:
        seqmoe_group.main(args)
    out, err = capsys.readouterr()
    return ended.value.code, out, err


def test_profile_commands(tmp_path, capsys):
    golden = str(GOLDEN)
    assert call(["profile", "show", golden], capsys)[1] == GOLDEN.read_text()
    assert json.loads(call(["profile", "show", golden, "--json"], capsys)[1])["kind"] == "DeploymentProfile"
    text = call(["profile", "explain", golden], capsys)[1]
    assert "policy = lfu (default lru)" in text and "230 of 512 experts (45%)" in text
    other = read_profile(GOLDEN)
    other = other.model_copy(update={"metadata": other.metadata.model_copy(update={"name": "b"})})
    write_profile(other, tmp_path / "b.yaml")
    assert call(["profile", "diff", golden, golden], capsys)[0] == 0
    code, out, _ = call(["profile", "diff", golden, str(tmp_path / "b.yaml"), "--json"], capsys)
    assert (code, json.loads(out)["differences"]) == (1, {"metadata.name": ["demo-xl at 4 GiB", "b"]})
    assert "read_chunk_bytes = 2.00 MiB:" in text and "compute_threads = null" in text and "direct_io = true" in text
    model = str(DEMO_FOLDER)
    _, _, err = call(["profile", "verify", golden, "--model", model], capsys)
    assert f"tune this one with seqmoe-tune --model {model}" in err
    code, out, _ = call(["profile", "verify", golden, "--json"], capsys)
    assert (code, json.loads(out)["verdict"]) == (5, "retune")  # made on another machine
    assert "properties" in json.loads(call(["profile", "schema"], capsys)[1])


def test_a_broken_profile_is_one_line_from_every_command(tmp_path, capsys):
    bad = yaml.safe_load(GOLDEN.read_text())
    bad["knobs"]["polcy"] = "lru"
    path = tmp_path / "bad.yaml"
    path.write_text(yaml.safe_dump(bad))
    for verb in ("show", "explain", "verify"):
        code, out, err = call(["profile", verb, str(path), "--json"], capsys)
        assert code == 5
        assert err.count("\n") == 1 and "unknown key knobs.polcy (did you mean 'policy'?)" in err
        assert json.loads(out)["error"]["type"] == "ProfileError"


def test_help_lists_what_is_there_with_examples(capsys):
    code, out, _ = call(["--help"], capsys)
    assert code == 0 and "seqmoe doctor --model demo" in out
    for name in ("bench", "doctor", "profile"):
        assert name in out
        code, out_of, _ = call([name, "--help"], capsys)
        assert code == 0 and "--help" in out_of
    for name in ("bench", "profile"):
        shown = call([name, "--help"], capsys)[1]
        assert "Examples:" in shown and f"    seqmoe {name} " in shown
    assert "Did you mean" in (err := call(["docto"], capsys)[2]) or "No such command" in err


@pytest.mark.parametrize("args", [[], ["profile"]])
def test_a_group_alone_shows_its_help_as_it_is(args, capsys):
    code, out, err = call(args, capsys)
    assert code == 2 and out == "" and err == call([*args, "--help"], capsys)[1] and err.count("\n") > 10


@pytest.mark.parametrize(("command", "name"), [(tune_command, "seqmoe-tune"), (run_command, "seqmoe-run")])
def test_version(command, name, capsys):
    with pytest.raises(SystemExit) as ended:
        command.main(["--version"])
    assert ended.value.code == 0 and capsys.readouterr().out.startswith(f"{name}, version ")


def test_help_is_quick_and_without_torch_or_optuna():
    script = "import sys, seqmoe.autotune.cli, seqmoe.autotune.main; print([m for m in ('torch', 'optuna', 'transformers') if m in sys.modules])"
    assert (
        subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout.strip()
        == "[]"
    )


def test_the_tuner_itself_needs_no_torch():
    script = "import sys, seqmoe.autotune.tune, seqmoe.autotune.report, seqmoe.autotune.search; print('torch' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout.strip()
        == "False"
    )


def test_doctor_answers_and_survives_what_breaks(capsys, monkeypatch):
    code, out, _ = call(["doctor", "--json"], capsys)
    found = {f["name"]: f for f in json.loads(out)["findings"]}
    assert code == 0 and {"torch", "cpu", "cores", "ram", "cache folder", "direct reads", "gpu"} <= set(found)

    def breaks():
        raise RuntimeError("strange machine")
        yield

    monkeypatch.setattr(doctor, "processor", breaks)
    monkeypatch.setitem(doctor.NEEDS, "nowhere-to-be-found", "1")
    code, out, _ = call(["doctor", "--json"], capsys)
    assert code == 1
    assert "strange machine" in out and "pip install seqmoe" in out
    assert "1 problem(s)" in call(["doctor"], capsys)[1]


def test_doctor_of_a_model_that_is_none(capsys):
    code, out, _ = call(["doctor", "--model", "nothing-here", "--json"], capsys)
    findings = json.loads(out)["findings"]
    assert code == 1 and any("known names are demo" in f["consequence"] for f in findings)


@pytest.mark.parametrize("memory", range(170, 186))
def test_doctor_says_what_the_tuner_says(tune, capsys, monkeypatch, tmp_path, memory):
    """Around the smallest budget, MiB by MiB: both refuse in the same words, or neither does."""
    monkeypatch.setattr(probing, "probe_model", in_process("better").probe)
    code, _, _, answer = tune("--dry-run", "--json", memory=f"{memory}MiB")
    _, out, _ = call(["doctor", "--model", str(tmp_path / "model"), "--memory", f"{memory}MiB", "--json"], capsys)
    found = json.loads(out)["findings"][-1]
    if code == 0:
        slots = answer["default_knobs"]["slots"]
        assert found["level"] == "ok" and found["found"].startswith(f"{slots} of 64 experts")
    else:
        assert found["level"] == "problem" and found["consequence"] == answer["error"]["message"]


def test_model_names(tmp_path):
    assert resolve_model(tmp_path) == tmp_path
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="is a file"):
        resolve_model(tmp_path / "file")
    with pytest.raises(UsageError, match="hf download Qwen/Qwen3 --local-dir DIR"):
        resolve_model("Qwen/Qwen3")
