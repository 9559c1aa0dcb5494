"""Mamba2: recurrent step, parallel scan and an independent implementation (Transformers') give the same."""

import pytest
import torch

from seqmoe.predictors.mamba2 import Mamba2, Mamba2State, chunk_scan, recurrent_scan_ref

pytestmark = pytest.mark.usefixtures("one_thread")


def block(ngroups: int = 1, chunk: int = 16, seed: int = 0) -> Mamba2:
    torch.manual_seed(seed)
    return Mamba2(64, d_state=16, headdim=16, ngroups=ngroups, chunk_size=chunk).eval()


def inputs(batch: int = 3, steps: int = 53, seed: int = 1) -> torch.Tensor:
    return torch.randn(batch, steps, 64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("ngroups", [1, 2])
@torch.inference_mode()
def test_equals_transformers_on_the_same_weights(ngroups: int) -> None:
    from transformers import Mamba2Config
    from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

    ours = block(ngroups)
    config = Mamba2Config(
        hidden_size=64,
        num_heads=8,
        head_dim=16,
        state_size=16,
        n_groups=ngroups,
        expand=2,
        chunk_size=16,
        conv_kernel=4,
        use_bias=False,
        use_conv_bias=True,
        layer_norm_epsilon=1e-5,
        num_hidden_layers=1,
    )
    theirs = Mamba2Mixer(config, 0).eval()
    theirs.load_state_dict(ours.state_dict())  # names and shapes are the same, or this raises
    u = inputs()
    torch.testing.assert_close(ours(u), theirs(u), rtol=1e-4, atol=1e-4)


def test_parameters_are_named_as_in_mamba_ssm() -> None:
    shapes = {name: tuple(value.shape) for name, value in block(ngroups=2).named_parameters()}
    assert shapes == {
        "dt_bias": (8,),
        "A_log": (8,),
        "D": (8,),
        "in_proj.weight": (2 * 128 + 2 * 2 * 16 + 8, 64),
        "conv1d.weight": (128 + 2 * 2 * 16, 1, 4),
        "conv1d.bias": (128 + 2 * 2 * 16,),
        "norm.weight": (128,),
        "out_proj.weight": (64, 128),
    }


@pytest.mark.parametrize("ngroups", [1, 2])
@pytest.mark.parametrize("steps", [1, 2, 16, 17, 53])
@torch.inference_mode()
def test_step_equals_scan(ngroups: int, steps: int) -> None:
    mixer, u = block(ngroups), inputs(steps=steps)
    state, outputs = mixer.start(3), []
    for t in range(steps):
        y, state = mixer.step(u[:, t], state)
        outputs.append(y)
    scanned, final = mixer.prefill(u)
    torch.testing.assert_close(torch.stack(outputs, dim=1), scanned, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state.ssm, final.ssm, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state.conv, final.conv, rtol=1e-4, atol=1e-5)


@torch.inference_mode()
def test_step_leaves_the_state_it_was_given() -> None:
    mixer, u = block(), inputs()
    _, state = mixer.prefill(u)
    before = Mamba2State(state.conv.clone(), state.ssm.clone())
    mixer.step(u[:, 0], state)
    assert torch.equal(state.conv, before.conv) and torch.equal(state.ssm, before.ssm)


@torch.inference_mode()
def test_prefill_goes_on_from_a_state() -> None:
    mixer, u = block(), inputs()
    first, state = mixer.prefill(u[:, :21])
    second, _ = mixer.prefill(u[:, 21:], state)
    torch.testing.assert_close(torch.cat([first, second], dim=1), mixer(u), rtol=1e-4, atol=1e-5)


@torch.inference_mode()
def test_prefill_of_mixed_lengths_stops_where_each_row_ends() -> None:
    mixer, u = block(), inputs()
    lengths = torch.tensor([2, 30, 53])
    _, state = mixer.prefill(u, lengths=lengths)
    for row, length in enumerate(lengths.tolist()):
        _, alone = mixer.prefill(u[row : row + 1, :length])
        torch.testing.assert_close(state.ssm[row], alone.ssm[0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(state.conv[row], alone.conv[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("cuts", [(20, 33), (1, 2), (15, 17), (16, 32), (31, 48)])
@torch.inference_mode()
def test_packed_sequences_do_not_see_each_other(cuts: tuple[int, int]) -> None:
    mixer, u = block(), inputs()
    segments = torch.zeros(3, 53, dtype=torch.int32)
    segments[:, cuts[0] :] += 1
    segments[:, cuts[1] :] += 1
    packed = mixer(u, segments)
    alone = torch.cat([mixer(part) for part in u.tensor_split(cuts, dim=1)], dim=1)
    torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-5)
    changed = u.clone()
    changed[:, : cuts[0]] += 1000
    torch.testing.assert_close(mixer(changed, segments)[:, cuts[0] :], packed[:, cuts[0] :], rtol=1e-4, atol=1e-4)
    assert not torch.allclose(mixer(u), packed, atol=1e-3), "without segments they do: the test would see a leak"


@torch.inference_mode()
def test_states_at_chunk_ends_are_those_of_their_sequence() -> None:
    mixer, u = block(), inputs()
    segments = torch.zeros(3, 53, dtype=torch.int32)
    segments[:, 20:] += 1
    _, boundaries = mixer.forward_with_boundaries(u, segments)
    for chunk, begin in ((1, 0), (2, 20), (3, 20)):
        _, alone = mixer.prefill(u[:, begin : chunk * 16])
        torch.testing.assert_close(boundaries.ssm[:, chunk], alone.ssm, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(boundaries.conv[:, chunk], alone.conv, rtol=1e-4, atol=1e-5)


def test_gradients_of_the_scan_are_those_of_the_definition() -> None:
    torch.manual_seed(0)
    x, b_in, c_out = torch.randn(2, 37, 4, 3), torch.randn(2, 37, 2, 5), torch.randn(2, 37, 2, 5)
    delta, a = torch.rand(2, 37, 4), -torch.rand(4) * 4
    leaves = [t.double().requires_grad_() for t in (x, delta, a, b_in, c_out)]
    ours = chunk_scan(*leaves, chunk_size=8)[0]
    reference = recurrent_scan_ref(*leaves)
    torch.testing.assert_close(ours, reference)
    weights = torch.randn_like(ours)
    for mine, theirs in zip(
        torch.autograd.grad((ours * weights).sum(), leaves),
        torch.autograd.grad((reference * weights).sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs)


@torch.inference_mode()
def test_fast_decay_does_not_overflow() -> None:
    mixer = block()
    mixer.dt_bias += 20.0  # dt 20 with a up to 16: e^-320 a step
    out = mixer(inputs() * 10)
    assert bool(torch.isfinite(out).all())


def test_a_width_that_the_heads_do_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match="must be a multiple of headdim"):
        Mamba2(24, headdim=64)
