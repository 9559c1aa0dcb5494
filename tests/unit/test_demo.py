"""The table that `make demo` ends with; the demo itself takes minutes and is not run here."""

import importlib.util
from pathlib import Path

from seqmoe.profiles.schema import read_profile

ROOT = Path(__file__).parent.parent.parent
_found = importlib.util.spec_from_file_location("demo", ROOT / "examples" / "demo.py")
demo = importlib.util.module_from_spec(_found)
_found.loader.exec_module(demo)
GOLDEN = ROOT / "tests" / "golden" / "profile_v1alpha1.yaml"


def profile(status):
    found = read_profile(GOLDEN)
    return found.model_copy(update={"evidence": found.evidence.model_copy(update={"status": status})})


def test_a_tuned_profile_is_set_beside_the_default():
    jobs = demo.jobs_for(profile("tuned"))
    assert list(jobs) == ["default", "tuned", "all in memory"]
    assert jobs["tuned"]["knobs"]["policy"] == "lfu" and "knobs" not in jobs["default"]


def test_where_the_default_was_kept_it_is_measured_once(capsys):
    jobs = demo.jobs_for(profile("default_kept"))
    assert list(jobs) == ["default (kept)", "all in memory"]
    result = {"decode_tokens_per_s": 9.0, "residency": 0.4, "hit_rate": 0.9, "peak_rss_bytes": 1 << 20, "token_ids": [[1]]}
    demo.show({name: [result] for name in jobs}, profile("default_kept"))
    out = capsys.readouterr().out
    assert "default (kept)" in out and "tuned" not in out.replace("default_kept", "")
