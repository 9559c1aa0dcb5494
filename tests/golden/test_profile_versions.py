"""Every version of the profile that was released loads for ever. Never edit a fixture; add one for each new version."""

from pathlib import Path

from seqmoe.profiles.knobs import Knobs
from seqmoe.profiles.schema import API_VERSION, MIGRATIONS, read_profile

HERE = Path(__file__).parent


def test_v1alpha1():
    profile = read_profile(HERE / "profile_v1alpha1.yaml")
    assert profile.to_knobs() == Knobs(slots=230, policy="lfu", read_threads=6, queue_depth=8, read_chunk_bytes=2 << 20)
    assert profile.target.model.id == "demo-xl"
    assert profile.target.workload.memory_bytes == 4 << 30
    assert profile.evidence.status == "tuned"
    assert profile.evidence.ratio_ci95 == (1.12, 1.3)


def test_every_version_has_its_fixture():
    for version in [API_VERSION, *(old for old, _, _ in MIGRATIONS)]:
        assert (HERE / f"profile_{version.rpartition('/')[2]}.yaml").is_file(), version
