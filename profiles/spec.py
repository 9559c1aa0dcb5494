"""What a model, a link and a machine are, in numbers: sizes in bytes and measured or given rates. No torch, no decisions."""

import dataclasses
from dataclasses import dataclass

from seqmoe.profiles.errors import UsageError
from seqmoe.profiles.sizes import format_rate, parse_duration, parse_rate

LINK_KINDS = ("disk", "buffered", "throttled", "dma")
_LINK_EXAMPLES = "disk, buffered, throttled:1.5GB/s,80us or dma:7GB/s,20us"


@dataclass(frozen=True)
class ModelSpec:
    """Sizes of one checkpoint. `record_bytes` is one expert's weights, `slot_bytes` its place in the pool (aligned reads)."""

    name: str
    model_type: str
    digest: str
    num_layers: int  # MoE layers, not the model's layers
    num_experts: int  # per MoE layer
    top_k: int
    hidden_size: int
    record_bytes: int
    slot_bytes: int
    dense_bytes: int  # every weight that is not an expert's
    kv_bytes_per_token: int  # of one sequence, where the cache grows with it
    state_bytes: int  # per sequence: recurrent states and sliding windows, which do not grow
    dtype: str
    max_context: int
    vocab_size: int = 0  # 0 = not known; the budget then leaves the logits to its margin
    window_bytes_per_token: int = 0  # of one sequence, in sliding-window layers: the captured decode step keeps all of it
    kernel_bytes: int = 0  # working memory of the expert kernels, whatever the number of tokens
    kernel_bytes_per_token: int = 0  # and for each token of a forward pass

    @property
    def total_experts(self) -> int:
        """Number of records, L * E."""
        return self.num_layers * self.num_experts

    @property
    def whole_prefill(self) -> bool:
        """A prompt goes through the model in one piece: it cannot go through recurrent or sliding-window layers in several."""
        return self.state_bytes > 0

    @property
    def experts_bytes(self) -> int:
        """Bytes of all the experts' weights."""
        return self.total_experts * self.record_bytes


@dataclass(frozen=True)
class LinkSpec:
    """The path over which records come. `bytes_per_s` None means: as fast as the storage goes."""

    kind: str = "disk"
    bytes_per_s: float | None = None
    latency_us: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in LINK_KINDS:
            raise UsageError(f"link kind must be one of {', '.join(LINK_KINDS)}, got {self.kind!r}")
        if (self.bytes_per_s is None) != (self.kind in ("disk", "buffered")):
            need = "takes no rate" if self.bytes_per_s is not None else "needs a rate"
            raise UsageError(f"link {self.kind} {need}: write {_LINK_EXAMPLES}")

    @classmethod
    def parse(cls, text: "str | LinkSpec") -> "LinkSpec":
        """From "disk", "buffered", "throttled:1.5GB/s,80us" or "dma:7GB/s,20us" (the latency may be left out)."""
        if isinstance(text, LinkSpec):
            return text
        kind, colon, rest = text.strip().partition(":")
        if kind not in LINK_KINDS:
            raise UsageError(f"link must be {_LINK_EXAMPLES}, got {text!r}")
        if not colon:
            return cls(kind)
        rate, comma, latency = rest.partition(",")
        try:
            latency_us = parse_duration(latency) * 1e6 if comma else 0.0
            return cls(kind, parse_rate(rate), latency_us)
        except UsageError as error:
            raise UsageError(f"link {text!r}: {error}") from None

    def __str__(self) -> str:
        """The text that `parse` reads back."""
        if self.bytes_per_s is None:
            return self.kind
        rate = format_rate(self.bytes_per_s).replace(" ", "")
        if parse_rate(rate) != self.bytes_per_s:
            rate = f"{self.bytes_per_s:.0f}/s"
        return f"{self.kind}:{rate},{self.latency_us:g}us" if self.latency_us else f"{self.kind}:{rate}"


@dataclass(frozen=True)
class StorageSpec:
    """The storage under one folder. None where the system does not say."""

    fs_type: str
    device: str  # kernel name such as nvme0n1, "" when the file system has no single block device
    model: str
    total_bytes: int
    free_bytes: int
    rotational: bool | None
    read_ahead_bytes: int | None
    block_bytes: int | None  # logical block: what O_DIRECT has to be aligned to


@dataclass(frozen=True)
class GpuSpec:
    """One GPU as the driver names it."""

    name: str
    pci_id: str
    memory_bytes: int
    free_bytes: int
    compute_capability: str
    driver: str


@dataclass(frozen=True)
class MachineSpec:
    """Facts of this machine as this process may use it (see `seqmoe.profiles.machine`)."""

    cpu_model: str
    cpu_flags: tuple[str, ...]  # only those that matter for kernels
    cores: int  # logical CPUs this process may use: affinity and cgroup quota
    physical_cores: int  # among those of the affinity mask
    cpu_quota: float | None  # CPUs' worth of time that the cgroup allows
    ram_total_bytes: int
    ram_available_bytes: int
    memory_limit_bytes: int | None  # the tightest cgroup limit, None = no limit
    memory_limit_source: str
    memlock_bytes: int | None  # None = unlimited
    address_space_bytes: int | None
    os: str
    kernel: str
    python: str
    gpus: tuple[GpuSpec, ...] = ()
    storage: StorageSpec | None = None

    def to_dict(self) -> dict[str, object]:
        """Plain values, for JSON."""
        return dataclasses.asdict(self)
