import pytest

from seqmoe.profiles.errors import UsageError
from seqmoe.profiles.sizes import format_bytes, format_duration, parse_bytes, parse_duration, parse_rate
from seqmoe.profiles.spec import LinkSpec


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("6GiB", 6 << 30), ("6G", 6 << 30), ("500MB", 500_000_000), ("1.5 gib", 3 << 29), ("4096", 4096),
        (4096, 4096), (".5KiB", 512), ("1b", 1), ("2T", 2 << 40),
    ],
)  # fmt: skip
def test_sizes_that_people_write(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    "text", ["", "GiB", "6GB/s", "-1G", "0", "1e3", "6 Gigs", "nan", "9999999999T", 0, -5, "1.2.3M"]
)
def test_sizes_that_are_none_say_how_to_write_one(text):
    with pytest.raises(UsageError, match="--memory .* 6GiB"):
        parse_bytes(text, "--memory")


@pytest.mark.parametrize(
    ("text", "seconds"), [("10m", 600), ("90s", 90), ("1h30m", 5400), ("80us", 80e-6), ("45", 45), (2, 2), ("1.5m", 90)]
)
def test_durations(text, seconds):
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "m", "10 minutes", "1h30", "-5s", "0", "inf", "5x"])
def test_durations_that_are_none(text):
    with pytest.raises(UsageError, match="10m"):
        parse_duration(text)


def test_formats_read_back():
    assert format_bytes(6 << 30) == "6.00 GiB"
    assert format_bytes(999) == "999 B"
    assert format_bytes(150 << 20) == "150 MiB"
    assert (format_duration(0.05), format_duration(245), format_duration(3720)) == ("50ms", "4m05s", "1h02m")
    assert parse_rate("1.5GB/s") == 1.5e9


@pytest.mark.parametrize(
    "text", ["disk", "buffered", "throttled:1.50GB/s,80us", "dma:7.00GB/s,20us", "dma:123456789/s"]
)
def test_links_read_back(text):
    assert str(LinkSpec.parse(text)) == text
    assert LinkSpec.parse(str(LinkSpec.parse(text))) == LinkSpec.parse(text)


def test_link_numbers():
    assert LinkSpec.parse("throttled:1.5GB/s,80us") == LinkSpec("throttled", 1.5e9, 80.0)
    assert LinkSpec.parse("dma:7GB/s").latency_us == 0


@pytest.mark.parametrize("text", ["", "nvme", "throttled", "throttled:fast", "disk:1GB/s", "dma:7GB", "dma:7GB/s,x"])
def test_links_that_are_none_show_the_forms(text):
    with pytest.raises(UsageError, match="link"):
        LinkSpec.parse(text)
