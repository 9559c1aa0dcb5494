import pytest

from seqmoe.profiles.errors import UsageError
from seqmoe.profiles.knobs import Knobs, knob_infos


def test_defaults_are_valid_and_described():
    assert Knobs.from_mapping(Knobs().to_dict()) == Knobs()
    for info in knob_infos():
        assert info.help, info.name
        assert info.type in (int, str, bool)
    assert {info.name for info in knob_infos() if info.tune} == {
        "slots", "policy", "read_threads", "queue_depth", "read_chunk_bytes",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"polcy": "lru"}, "unknown knob 'polcy' .did you mean 'policy'"),
        ({"policy": "lruu"}, "one of lru, lfu, static, got 'lruu' .did you mean 'lru'"),
        ({"read_threads": 0}, "read_threads must be a whole number from 1 to 64, got 0"),
        ({"read_threads": True}, "got True"),
        ({"read_threads": "4"}, "got '4'"),
        ({"read_threads": 4.0}, "got 4.0"),
        ({"slots": 0}, "at least 1 or null, got 0"),
        ({"read_chunk_bytes": 100_000}, "multiple of 4096"),
        ({"direct_io": 1}, "true or false, got 1"),
        ({"queue_depth": None}, "queue_depth must be"),
    ],
)
def test_wrong_values_are_named(values, message):
    with pytest.raises(UsageError, match=message):
        Knobs.from_mapping(values)
