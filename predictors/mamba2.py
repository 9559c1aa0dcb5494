"""Mamba2 block in pure torch: chunked parallel scan for whole sequences, recurrent step for decode.

After "Transformers are SSMs" (Dao and Gu 2024), section 6. Parameters have the names and shapes of
`mamba_ssm.modules.mamba2.Mamba2`, so weights move both ways. Shapes: b batch, s steps, h heads, p head dimension,
n state, g groups, c chunks, q steps of a chunk. State is float32. Nothing here waits for a device.
"""

import functools
import importlib
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn


class Mamba2State(NamedTuple):
    """What a sequence has left behind. Never changed in place: whoever keeps it can go back to it."""

    conv: torch.Tensor  # [b, channels, d_conv - 1], last inputs of the convolution, oldest first
    ssm: torch.Tensor  # [b, h, p, n] float32


class Boundaries(NamedTuple):
    """States before each chunk of a scan: entry c has consumed the steps before c * chunk_size."""

    conv: torch.Tensor  # [b, c, channels, d_conv - 1]
    ssm: torch.Tensor  # [b, c, h, p, n]


class GatedRMSNorm(nn.Module):
    """RMSNorm of x * silu(gate), in groups of `group_size` features, in float32."""

    def __init__(self, size: int, group_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.group_size, self.eps = group_size, eps

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """x, gate [..., size] -> [..., size] in x's dtype."""
        gated = x.float() * F.silu(gate.float())
        groups = gated.unflatten(-1, (-1, self.group_size))
        normed = groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + self.eps)
        return (normed.flatten(-2) * self.weight.float()).to(x.dtype)


class Mamba2(nn.Module):
    """One Mamba2 mixer, [b, s, d_model] -> [b, s, d_model]."""

    def __init__(
        self,
        d_model: int,
        d_state: int = 64,
        d_conv: int = 4,
        expand: int = 2,
        headdim: int = 64,
        ngroups: int = 1,
        chunk_size: int = 64,
        dt_min: float = 0.001,
        dt_max: float = 0.1,
        eps: float = 1e-5,
    ) -> None:
        super().__init__()
        self.d_model, self.d_state, self.d_conv = d_model, d_state, d_conv
        self.headdim, self.ngroups, self.chunk_size = headdim, ngroups, chunk_size
        self.d_inner = expand * d_model
        if self.d_inner % headdim or (self.d_inner // headdim) % ngroups:
            raise ValueError(
                f"expand * d_model = {self.d_inner} must be a multiple of headdim * ngroups = {headdim * ngroups}"
            )
        self.nheads = self.d_inner // headdim
        self.channels = self.d_inner + 2 * ngroups * d_state  # x, B, C
        self.in_proj = nn.Linear(d_model, self.d_inner + self.channels + self.nheads, bias=False)
        self.conv1d = nn.Conv1d(self.channels, self.channels, d_conv, groups=self.channels, padding=d_conv - 1)
        dt = torch.exp(torch.rand(self.nheads) * (math.log(dt_max) - math.log(dt_min)) + math.log(dt_min))
        dt = dt.clamp_min(1e-4)
        self.dt_bias = nn.Parameter(dt + torch.log(-torch.expm1(-dt)))  # inverse of softplus
        self.A_log = nn.Parameter(torch.log(torch.empty(self.nheads).uniform_(1, 16)))
        self.D = nn.Parameter(torch.ones(self.nheads))
        self.norm = GatedRMSNorm(self.d_inner, self.d_inner // ngroups, eps)
        self.out_proj = nn.Linear(self.d_inner, d_model, bias=False)

    def start(self, batch: int) -> Mamba2State:
        """The state of `batch` sequences that have seen nothing."""
        device = self.D.device
        conv = torch.zeros(batch, self.channels, self.d_conv - 1, device=device, dtype=self.conv1d.weight.dtype)
        return Mamba2State(conv, torch.zeros(batch, self.nheads, self.headdim, self.d_state, device=device))

    def forward(self, u: torch.Tensor, segments: torch.Tensor | None = None) -> torch.Tensor:
        """u [b, s, d_model] -> the same. `segments` int [b, s], never falling along a row: steps of another segment are
        not seen, so sequences lie end to end in a row without leaking."""
        return self._scan(u, segments, None, False)[0]

    def prefill(
        self, u: torch.Tensor, state: Mamba2State | None = None, lengths: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, Mamba2State]:
        """u [b, s, d_model] after `state` -> (outputs [b, s, d_model], state after the last step).

        With `lengths` int [b] row i ends after lengths[i] steps; its later outputs mean nothing.
        """
        out, _, final = self._scan(u, None, state, False, lengths)
        return out, final

    def forward_with_boundaries(
        self, u: torch.Tensor, segments: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, Boundaries]:
        """`forward` and the states before each chunk, from which `step` can go on."""
        out, boundaries, _ = self._scan(u, segments, None, True)
        assert boundaries is not None
        return out, boundaries

    def step(self, u: torch.Tensor, state: Mamba2State) -> tuple[torch.Tensor, Mamba2State]:
        """One step: u [b, d_model] -> ([b, d_model], new state)."""
        z, raw, dt = self.in_proj(u).split([self.d_inner, self.channels, self.nheads], dim=-1)
        window = torch.cat([state.conv, raw.unsqueeze(-1)], dim=-1)  # [b, channels, d_conv]
        mixed = torch.linalg.vecdot(window, self.conv1d.weight.squeeze(1))
        if self.conv1d.bias is not None:
            mixed = mixed + self.conv1d.bias
        x, b_in, c_out = self._split(F.silu(mixed))
        delta = F.softplus(dt.float() + self.dt_bias.float())  # [b, h]
        a = -torch.exp(self.A_log.float())
        fused = _cuda_kernels(u)
        if fused is not None:  # needs its operands expanded, and changes the state in place
            ssm = state.ssm.clone()
            y = fused.step(
                ssm,
                x.contiguous(),
                dt.float().unsqueeze(-1).expand(-1, -1, self.headdim),
                a[:, None, None].expand(-1, self.headdim, self.d_state),
                b_in.contiguous(),
                c_out.contiguous(),
                D=self.D.float()[:, None].expand(-1, self.headdim),
                dt_bias=self.dt_bias.float()[:, None].expand(-1, self.headdim),
                dt_softplus=True,
            )
        else:
            share = self.nheads // self.ngroups
            b_heads = b_in.float().repeat_interleave(share, dim=1) if self.ngroups > 1 else b_in.float()
            c_heads = c_out.float().repeat_interleave(share, dim=1) if self.ngroups > 1 else c_out.float()
            update = (x.float() * delta.unsqueeze(-1)).unsqueeze(-1) * b_heads.unsqueeze(2)
            ssm = state.ssm * torch.exp(delta * a)[..., None, None] + update
            y = (ssm * c_heads.unsqueeze(2)).sum(-1) + x.float() * self.D.float()[:, None]
        out = self.out_proj(self.norm(y.flatten(1).to(u.dtype), z))
        return out, Mamba2State(window[..., 1:], ssm)

    def _scan(
        self,
        u: torch.Tensor,
        segments: torch.Tensor | None,
        state: Mamba2State | None,
        want_boundaries: bool,
        lengths: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, Boundaries | None, Mamba2State]:
        z, raw, dt = self.in_proj(u).split([self.d_inner, self.channels, self.nheads], dim=-1)
        before = raw.new_zeros(raw.shape[0], self.d_conv - 1, self.channels)
        if state is not None:
            before = state.conv.transpose(1, 2).to(raw.dtype)
        padded = torch.cat([before, raw], dim=1)  # [b, d_conv - 1 + s, channels]
        x, b_in, c_out = self._split(F.silu(self._convolve(padded, segments)))
        delta = F.softplus(dt.float() + self.dt_bias.float())  # [b, s, h]
        if lengths is not None:  # a step of length 0 leaves the state as it is
            inside = torch.arange(u.shape[1], device=u.device) < lengths.unsqueeze(1)
            delta = delta * inside.unsqueeze(-1)
        a = -torch.exp(self.A_log.float())
        initial = None if state is None else state.ssm
        fused = None if want_boundaries else _cuda_kernels(u)
        if fused is not None:
            seq_idx = None if segments is None else segments.to(torch.int32)
            y, final = fused.scan(
                x, delta, a, b_in, c_out, self.chunk_size, D=None, initial_states=initial, seq_idx=seq_idx,
                return_final_states=True,
            )  # fmt: skip
            chunk_states = None
        else:
            y, chunk_states, final = chunk_scan(
                x.float(), delta, a, b_in.float(), c_out.float(), self.chunk_size, segments, initial
            )
        y = y + x.float() * self.D.float()[:, None]
        out = self.out_proj(self.norm(y.flatten(2).to(u.dtype), z))
        boundaries = None
        if chunk_states is not None and want_boundaries:
            windows = self._windows(padded, segments)
            boundaries = Boundaries(windows, chunk_states)
        if lengths is None:
            conv = padded[:, padded.shape[1] - (self.d_conv - 1) :]
        else:
            at = lengths.unsqueeze(1) + torch.arange(self.d_conv - 1, device=u.device)
            conv = padded.gather(1, at.unsqueeze(-1).expand(-1, -1, self.channels))
        return out, boundaries, Mamba2State(conv.transpose(1, 2), final)

    def _split(self, mixed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        states = self.ngroups * self.d_state
        x, b_in, c_out = mixed.split([self.d_inner, states, states], dim=-1)
        shape = (self.ngroups, self.d_state)
        return (
            x.unflatten(-1, (self.nheads, self.headdim)),
            b_in.unflatten(-1, shape),
            c_out.unflatten(-1, shape),
        )

    def _convolve(self, padded: torch.Tensor, segments: torch.Tensor | None) -> torch.Tensor:
        """Causal depthwise convolution as d_conv shifted products, so that taps into another segment can be left out."""
        steps = padded.shape[1] - (self.d_conv - 1)
        weight = self.conv1d.weight.squeeze(1)  # [channels, d_conv]
        out = padded[:, self.d_conv - 1 :] * weight[:, -1]
        if self.conv1d.bias is not None:
            out = out + self.conv1d.bias
        for lag in range(1, self.d_conv):
            at = self.d_conv - 1 - lag
            tap = padded[:, at : at + steps]
            if segments is not None:
                same = torch.zeros_like(segments, dtype=torch.bool)
                same[:, lag:] = segments[:, lag:] == segments[:, :-lag]
                tap = tap * same.unsqueeze(-1)
            out = torch.addcmul(out, tap, weight[:, at])
        return out

    def _windows(self, padded: torch.Tensor, segments: torch.Tensor | None) -> torch.Tensor:
        """Convolution states before each chunk, [b, c, channels, d_conv - 1], of the segment that ends there."""
        width = self.d_conv - 1
        steps = padded.shape[1] - width
        starts = torch.arange(0, steps, self.chunk_size, device=padded.device)
        at = starts.unsqueeze(1) + torch.arange(width, device=padded.device)  # rows of `padded`: step + width
        windows = padded[:, at]  # [b, c, width, channels]
        if segments is not None:
            step = at - width
            last = segments[:, (starts - 1).clamp_min(0)]
            same = (segments[:, step.clamp_min(0)] == last.unsqueeze(-1)) & (step >= 0)
            windows = windows * same.unsqueeze(-1)
        return windows.transpose(2, 3)


def chunk_scan(
    x: torch.Tensor,
    delta: torch.Tensor,
    a: torch.Tensor,
    b_in: torch.Tensor,
    c_out: torch.Tensor,
    chunk_size: int,
    segments: torch.Tensor | None = None,
    initial: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The SSD recurrence `state = exp(delta a) state + delta x B^T`, `y = state C`, in chunks of matrix products.

    x [b, s, h, p], delta [b, s, h], a [h], b_in and c_out [b, s, g, n], all float32; segments int [b, s] or None
    -> (y [b, s, h, p], states before each chunk [b, c, h, p, n], final state [b, h, p, n]).
    """
    batch, steps, heads, dim = x.shape
    groups, n = b_in.shape[2:]
    q = chunk_size
    pad = -steps % q
    if pad:  # steps of length 0: the state passes them unchanged
        x, delta, b_in, c_out = (F.pad(t, (0,) * (2 * t.dim() - 3) + (pad,)) for t in (x, delta, b_in, c_out))
        if segments is not None:
            segments = torch.cat([segments, segments[:, -1:].expand(-1, pad)], dim=1)
    c = (steps + pad) // q
    share = heads // groups
    xd = (x * delta.unsqueeze(-1)).view(batch, c, q, heads, dim)
    decay = (delta * a).view(batch, c, q, heads).permute(0, 1, 3, 2).cumsum(-1)  # [b, c, h, q], log
    b_in, c_out = (t.view(batch, c, q, groups, n).transpose(2, 3) for t in (b_in, c_out))  # [b, c, g, q, n]

    # within a chunk
    mask = torch.ones(q, q, dtype=torch.bool, device=x.device).tril()
    seg = prev_seg = None
    if segments is not None:
        seg = segments.view(batch, c, q)
        mask = mask & (seg.unsqueeze(-1) == seg.unsqueeze(-2)).unsqueeze(2)  # [b, c, 1, q, q]
        prev_seg = torch.cat([seg[:, :1, 0], seg[:, :-1, -1]], dim=1)  # [b, c], segment of the state that comes in
    weights = (decay.unsqueeze(-1) - decay.unsqueeze(-2)).masked_fill(~mask, -torch.inf).exp()
    pairs = c_out @ b_in.transpose(-1, -2)  # [b, c, g, q, q]
    weights = (weights.unflatten(2, (groups, share)) * pairs.unsqueeze(3)).flatten(2, 3)
    y = (weights @ xd.transpose(2, 3)).transpose(2, 3)  # [b, c, q, h, p]

    # what each chunk adds to the state at its end
    to_end = (decay[..., -1:] - decay).exp()  # [b, c, h, q]
    if seg is not None:
        to_end = to_end * (seg == seg[..., -1:]).unsqueeze(2)
    ended = xd * to_end.transpose(2, 3).unsqueeze(-1)
    ended = ended.view(batch, c, q, groups, share * dim).permute(0, 1, 3, 4, 2)
    added = (ended @ b_in).view(batch, c, heads, dim, n)

    # from chunk to chunk
    carry = decay[..., -1].exp()  # [b, c, h]
    if seg is not None and prev_seg is not None:
        carry = carry * (seg[..., -1] == prev_seg).unsqueeze(-1)
    state = x.new_zeros(batch, heads, dim, n) if initial is None else initial
    before = []
    for i in range(c):
        before.append(state)
        state = state * carry[:, i, :, None, None] + added[:, i]
    states = torch.stack(before, dim=1)  # [b, c, h, p, n]

    # what the state that came in gives
    from_start = decay.exp()
    if seg is not None and prev_seg is not None:
        from_start = from_start * (seg == prev_seg.unsqueeze(-1)).unsqueeze(2)
    carried = c_out @ states.view(batch, c, groups, share * dim, n).transpose(-1, -2)  # [b, c, g, q, share * p]
    carried = carried.transpose(2, 3).reshape(batch, c, q, heads, dim)
    y = y + carried * from_start.transpose(2, 3).unsqueeze(-1)
    return y.reshape(batch, c * q, heads, dim)[:, :steps], states, state


def recurrent_scan_ref(
    x: torch.Tensor, delta: torch.Tensor, a: torch.Tensor, b_in: torch.Tensor, c_out: torch.Tensor
) -> torch.Tensor:
    """`chunk_scan`'s y by the definition, one step after another: the reference of the tests."""
    share = x.shape[2] // b_in.shape[2]
    state = x.new_zeros(x.shape[0], x.shape[2], x.shape[3], b_in.shape[-1])
    out = []
    for t in range(x.shape[1]):
        b_heads, c_heads = (m[:, t].repeat_interleave(share, dim=1) for m in (b_in, c_out))
        update = (x[:, t] * delta[:, t].unsqueeze(-1)).unsqueeze(-1) * b_heads.unsqueeze(2)
        state = state * torch.exp(delta[:, t] * a)[..., None, None] + update
        out.append((state * c_heads.unsqueeze(2)).sum(-1))
    return torch.stack(out, dim=1)


class _Kernels(NamedTuple):
    scan: Callable[..., Any]
    step: Callable[..., Any]


def _cuda_kernels(like: torch.Tensor) -> _Kernels | None:
    """mamba-ssm's kernels where they are installed and `like` is on a CUDA device."""
    return _load_kernels() if like.is_cuda else None


@functools.cache
def _load_kernels() -> _Kernels | None:
    try:
        scan = importlib.import_module("mamba_ssm.ops.triton.ssd_combined").mamba_chunk_scan_combined
        step = importlib.import_module("mamba_ssm.ops.triton.selective_state_update").selective_state_update
    except (ImportError, AttributeError, OSError):
        return None
    return _Kernels(scan, step)
