import json
import threading
from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from seqmoe.profiles import schema
from seqmoe.profiles.errors import ProfileError, UsageError
from seqmoe.profiles.fingerprint import check_model, compare_machine, fingerprint_of
from seqmoe.profiles.knobs import Knobs
from seqmoe.profiles.schema import json_schema, read_profile, write_profile
from seqmoe.profiles.spec import MachineSpec, ModelSpec, StorageSpec

GOLDEN = Path(__file__).parent.parent / "golden" / "profile_v1alpha1.yaml"


@pytest.fixture
def content():
    found = yaml.safe_load(GOLDEN.read_text())
    del found["integrity"]
    return found


def refused(tmp_path, data):
    """The one line that a profile of these contents is refused with."""
    path = tmp_path / "p.yaml"
    path.write_bytes(data if isinstance(data, bytes) else yaml.safe_dump(data, sort_keys=False).encode())
    with pytest.raises(ProfileError) as caught:
        read_profile(path)
    message = str(caught.value)
    assert "\n" not in message
    assert caught.value.exit_code == 5
    return message


def test_what_is_written_reads_back_with_its_digest_and_comments(tmp_path):
    profile = read_profile(GOLDEN)
    written = write_profile(profile, tmp_path / "sub" / "p.yaml")
    assert read_profile(tmp_path / "sub" / "p.yaml") == written == profile
    text = (tmp_path / "sub" / "p.yaml").read_text()
    assert text == GOLDEN.read_text()
    assert "# reads under way at once [reads]\n  queue_depth: 8" in text
    assert list((tmp_path / "sub").iterdir()) == [tmp_path / "sub" / "p.yaml"]


@pytest.mark.parametrize(
    ("section", "key", "value", "message"),
    [
        ("knobs", "polcy", "lru", "unknown key knobs.polcy (did you mean 'policy'?)"),
        ("knobs", "policy", "lrx", "knobs.policy must be 'lru', 'lfu' or 'static', got 'lrx'"),
        ("knobs", "read_threads", "four", "knobs.read_threads must be a valid whole number, got 'four'"),
        ("knobs", "read_threads", 4.5, "knobs.read_threads must be a valid whole number, got 4.5"),
        ("knobs", "read_threads", True, "knobs.read_threads must be a valid whole number, got True"),
        ("knobs", "queue_depth", 0, "knobs.queue_depth must be greater than or equal to 1, got 0"),
        ("knobs", "direct_io", "yes", "knobs.direct_io must be a valid boolean, got 'yes'"),
        ("evidence", "status", "tunes", "evidence.status must be"),
        ("evidence", "ratio_ci95", [1.0], "evidence.ratio_ci95"),
        ("evidence", "nonsense", {}, "unknown key evidence.nonsense; known there: status, reason"),
        ("facts", "layer_ms", float("nan"), "facts.layer_ms must be a finite number"),
        ("target", "model", "demo", "target.model"),
    ],
)
def test_a_wrong_value_says_where_and_what_would_be_right(tmp_path, content, section, key, value, message):
    content[section][key] = value
    assert message in refused(tmp_path, content)


def test_deep_paths_top_level_typos_and_missing_parts(tmp_path, content):
    content["target"]["model"]["layers"] = 8
    assert "unknown key target.model.layers (did you mean 'num_layers'?)" in refused(tmp_path, content)
    del content["target"]["model"]["layers"], content["target"]["workload"]["memory_bytes"]
    assert "target.workload.memory_bytes is missing" in refused(tmp_path, content)
    content["knob"] = content.pop("knobs")
    message = refused(tmp_path, content)
    assert "unknown key knob (did you mean 'knobs'?)" in message
    assert message.endswith("(and 2 more)")


def test_knobs_beyond_pydantic_are_checked_too(tmp_path, content):
    content["knobs"]["read_chunk_bytes"] = 100_001
    assert "knob read_chunk_bytes must be a multiple of 4096" in refused(tmp_path, content)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "holds nothing, not a profile"),
        (b"- a\n- b\n", "holds a list, not a profile"),
        (b"just text", "holds a str"),
        (b"a: [1, 2\nb: {", "line 2, column 2: not a valid profile: expected ',' or ']'"),
        (b"apiVersion: x\napiVersion: y\n", "line 2, column 1: not a valid profile: key 'apiVersion' is given twice"),
        (b"a: &x [1]\nb: *x\n", "anchors and aliases are not allowed"),
        (b"1: x\n", "a key is not text"),
        (b"<<: {a: 1}\n", "apiVersion is missing"),
        (b"\xff\xfe\x00", "not text in UTF-8"),
        (b"a: \x00", "not valid YAML"),
        (b"a: !!python/object/apply:os.system [echo]\n", "not a valid profile"),
        (b"[" * 5000, "nested too deeply"),
        (b"apiVersion: seqmoe.dev/v1alpha1\nmetadata: !!set {a}\n", "only plain values"),
        (b"a: " + b"9" * 5000, "not valid YAML"),
        (b"kind: DeploymentProfile\n", "apiVersion is missing; a profile begins with apiVersion: seqmoe.dev/v1alpha1"),
        (b"apiVersion: seqmoe.dev/v9\n", "apiVersion 'seqmoe.dev/v9' is not known here; this seqmoe reads seqmoe.dev/v1alpha1"),
        (b"# " + b"x" * (1 << 20), "larger than 1 MiB"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_profile(tmp_path, data, message):
    assert message in refused(tmp_path, data)


def test_missing_file_and_folder(tmp_path):
    with pytest.raises(ProfileError, match="cannot read profile .*none.yaml: No such file"):
        read_profile(tmp_path / "none.yaml")
    with pytest.raises(ProfileError, match="Is a directory"):
        read_profile(tmp_path)


def test_changed_by_hand_is_refused_until_integrity_is_removed(tmp_path, content):
    path = tmp_path / "p.yaml"
    path.write_text(GOLDEN.read_text().replace("read_threads: 6", "read_threads: 7"))
    with pytest.raises(ProfileError, match="changed after it was written"):
        read_profile(path)
    content["knobs"]["read_threads"] = 7
    path.write_text(yaml.safe_dump(content))
    profile = read_profile(path)
    assert profile.to_knobs().read_threads == 7
    assert (profile.evidence.status, profile.evidence.reason) == ("untested", "changed by hand")


def test_notes_are_tolerated_and_absent_knobs_take_defaults(tmp_path):
    path = tmp_path / "p.yaml"
    path.write_text(GOLDEN.read_text().replace("\nknobs:", "\nx-note: ours\nknobs:\n  x-why: [a, {b: 1}]"))
    assert read_profile(path) == read_profile(GOLDEN)
    plain = yaml.safe_load(GOLDEN.read_text())
    del plain["integrity"], plain["knobs"]["compute_threads"], plain["facts"]
    path.write_text(yaml.safe_dump(plain))
    assert read_profile(path).to_knobs() == read_profile(GOLDEN).to_knobs()


def test_a_migrated_file_keeps_its_digest(tmp_path, content, monkeypatch):
    """An old version's digest is that of what its file says, not of what migrations make of it."""
    old = {**content, "apiVersion": "seqmoe.dev/v0"}
    old["settings"] = old.pop("knobs")
    step = (
        "seqmoe.dev/v0",
        schema.API_VERSION,
        lambda c: {("knobs" if k == "settings" else k): v for k, v in c.items()},
    )
    monkeypatch.setattr(schema, "MIGRATIONS", (step,))
    old["integrity"] = {"sha256": schema.canonical_digest(old)}
    path = tmp_path / "p.yaml"
    path.write_text(yaml.safe_dump(old))
    assert read_profile(path).to_knobs() == read_profile(GOLDEN).to_knobs()


def test_writing_fails_whole(tmp_path):
    profile = read_profile(GOLDEN)
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot write"):
        write_profile(profile, tmp_path / "file" / "p.yaml")
    with pytest.raises(UsageError, match="cannot write"):
        write_profile(profile, tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_reader_never_sees_a_part(tmp_path):
    profile, path, stop = read_profile(GOLDEN), tmp_path / "p.yaml", threading.Event()
    write_profile(profile, path)

    def write() -> None:
        while not stop.is_set():
            write_profile(profile, path)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        assert all(read_profile(path) == profile for _ in range(20))
    finally:
        stop.set()
        writer.join()


def test_json_schema_describes_every_knob():
    text = json.dumps(json_schema())
    for name, value in Knobs().to_dict().items():
        assert f'"{name}"' in text, (name, value)
    assert "reads under way at once" in text


def test_the_model_is_frozen():
    with pytest.raises(ValidationError):
        read_profile(GOLDEN).metadata.name = "x"  # type: ignore[misc]


MACHINE = MachineSpec(
    cpu_model="AMD EPYC", cpu_flags=("avx2",), cores=2, physical_cores=2, cpu_quota=None, ram_total_bytes=24 << 30,
    ram_available_bytes=20 << 30, memory_limit_bytes=None, memory_limit_source="", memlock_bytes=None,
    address_space_bytes=None, os="Linux x86_64", kernel="6", python="3.11.9",
)  # fmt: skip


def test_another_machine_is_judged_by_its_worst_difference():
    profile = read_profile(GOLDEN)
    assert [check.verdict for check in compare_machine(profile, MACHINE)] == ["optimal"]
    other = MachineSpec(**{**MACHINE.__dict__, "cpu_model": "Xeon", "cores": 4, "ram_available_bytes": 1 << 30})
    checks = compare_machine(profile, other)
    assert [check.verdict for check in checks] == ["retune", "adapt", "adapt"]
    assert "cpu model differs: tuned on AMD EPYC, here Xeon" in checks[0].message


def test_a_disk_without_a_model_is_known_by_its_device():
    storage = StorageSpec("ext4", "vda", "", 1, 1, True, None, None)
    here = MachineSpec(**{**MACHINE.__dict__, "storage": storage})
    assert fingerprint_of(here, {}).identity.storage_model == "vda"
    profile = read_profile(GOLDEN)
    identity = profile.fingerprint.identity.model_copy(update={"fs_type": "ext4"})

    def verdicts(**then):
        found = profile.fingerprint.model_copy(update={"identity": identity.model_copy(update=then)})
        return [c.verdict for c in compare_machine(profile.model_copy(update={"fingerprint": found}), here)]

    assert verdicts() == ["optimal"]  # an older profile knew nothing of the disk
    assert verdicts(storage_model="vda") == ["optimal"]
    assert verdicts(storage_model="Other SSD") == ["retune"]


def test_another_model_is_refused():
    profile = read_profile(GOLDEN)
    spec = ModelSpec("other", "qwen3_moe", "ff" * 32, 8, 64, 4, 128, 9437184, 9437184, 1, 1, 0, "bfloat16", 2048)
    with pytest.raises(
        ProfileError, match="made for another model: demo-xl .*; tune this one with seqmoe-tune --model other"
    ):
        check_model(profile, spec)
    with pytest.raises(ProfileError, match="models/my model has ff.* seqmoe-tune --model 'models/my model'"):
        check_model(profile, spec, "models/my model")
    check_model(profile, ModelSpec(**{**spec.__dict__, "digest": "ab" * 32}))
