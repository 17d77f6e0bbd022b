"""Tensors in flat memory: where they lie, an arena of them, and how a replica's tensors get there."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from avgpipe import ElasticAveraging, Reference
from avgpipe.elastic.flat import Arena, Layout
from tests.elastic.cases import Crew, assert_bitwise, set_gradients, weights
from tests.elastic.emulation import AdamW, Momentum

# ---- layouts ---------------------------------------------------------------------------------------------------------


def test_one_aligned_buffer_per_dtype():
    given = [torch.ones(3), torch.ones(5, dtype=torch.float64), torch.ones(()), torch.ones(2, 2)]
    layout = Layout(given)
    buffers = layout.zeros()
    assert [flat.dtype for flat in buffers.flats] == [torch.float32, torch.float64]
    for region, view in zip(layout.regions, buffers.tensors()):
        assert view.data_ptr() % 64 == 0
        assert view.untyped_storage().data_ptr() == buffers.flats[region.buffer].untyped_storage().data_ptr()
    assert [t.shape for t in buffers.tensors()] == [p.shape for p in given]
    for t in buffers.tensors():
        t.fill_(1)
    assert [float(flat.sum()) for flat in buffers.flats] == [3 + 1 + 4, 5]  # the gaps stay zero


def test_strides_are_kept_where_the_memory_is_dense():
    transposed = torch.ones(3, 4).t()
    channels_last = torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last)
    gaps = torch.ones(4, 6)[:, ::2]
    kept = Layout([transposed, channels_last, gaps]).zeros().tensors()
    assert kept[0].stride() == transposed.stride()
    assert kept[1].stride() == channels_last.stride()
    assert kept[2].stride() == (3, 1)


def test_complex_is_kept_as_real():
    layout = Layout([torch.ones(2, 3, dtype=torch.complex64).t()])
    buffers = layout.zeros()
    assert buffers.flats[0].dtype == torch.float32
    (z,) = buffers.tensors()
    assert z.dtype == torch.complex64
    assert z.stride() == (1, 3)
    z.fill_(1 + 2j)
    assert float(buffers.flats[0].sum()) == 6 * 3


@pytest.mark.parametrize(
    ("t", "strides"),
    [
        (torch.ones(2, 3), (3, 1)),
        (torch.ones(2, 3).t(), (1, 3)),
        (torch.ones(()), ()),
        (torch.ones(4)[::2], (1,)),
        (torch.ones(4, 6)[:, ::2].t(), (1, 3)),
        (torch.ones(1).expand(3), (1,)),
        (torch.ones(2, 1, 3).transpose(0, 1), (3, 3, 1)),
    ],
)
def test_copies_have_the_same_places_as_the_tensor(t, strides):
    assert Layout([t]).regions[0].strides == strides
    assert Layout([copy.deepcopy(t)]).regions == Layout([t]).regions


def test_buffers_may_be_on_another_device_than_the_parameters():
    given = [torch.ones(3), torch.ones(5, device="meta")]
    assert [flat.device.type for flat in Layout(given).zeros().flats] == ["cpu", "meta"]
    (flat,) = Layout(given, torch.device("meta")).zeros().flats
    assert (flat.device.type, flat.shape) == ("meta", (32,))


def test_buffers_may_have_other_dtypes():
    layout = Layout([torch.ones(3), torch.ones(5).double()])
    buffers = layout.zeros([torch.bfloat16, torch.float64])
    assert [t.dtype for t in buffers.tensors()] == [torch.bfloat16, torch.float64]
    assert [flat.numel() for flat in buffers.flats] == layout.sizes


# ---- arenas ----------------------------------------------------------------------------------------------------------


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2).double(), nn.Linear(2, 2))


def test_parameters_keep_their_values_and_live_in_one_buffer_per_dtype() -> None:
    net, same = model(), model()
    arena = Arena(net.parameters())
    assert [w.dtype for w in arena.weights] == [torch.float32, torch.float64]
    for p, expected in zip(net.parameters(), same.parameters(), strict=True):
        assert torch.equal(p, expected)
        flat = arena.weights[int(p.dtype == torch.float64)]
        assert p.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
        assert p.data_ptr() % 64 == flat.data_ptr() % 64
    arena.weights[0].mul_(2)
    assert torch.equal(net[0].weight, 2 * same[0].weight)


def test_strides_and_complex_numbers_are_kept() -> None:
    net = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)
    net.phase = nn.Parameter(torch.tensor([1 + 2j]))
    strides = [p.stride() for p in net.parameters()]
    arena = Arena(net.parameters())
    assert [p.stride() for p in net.parameters()] == strides
    assert [w.dtype for w in arena.weights] == [torch.float32]
    assert net.phase.item() == 1 + 2j
    (net(torch.ones(1, 2, 2, 2)).sum() + net.phase.abs().sum() ** 2).backward()
    # of each filter 8 weights and a bias, and 2 x of |x|^2
    sums = [torch.view_as_real(g).sum() if g.is_complex() else g.sum() for g in arena.grads]
    assert float(sum(sums)) == pytest.approx(3 * (8 + 1) + 2 * (1 + 2))


def test_gradients_are_those_there_are() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    arena = Arena(net.parameters())
    for _ in range(2):
        net[0](torch.ones(1, 3)).sum().backward()
    assert [g is p.grad for g, p in zip(arena.grads, net[0].parameters(), strict=True)] == [True, True]
    assert torch.equal(net[0].bias.grad, torch.full((3,), 2.0))
    arena.drop_grads()
    assert arena.grads == []


def test_reading_other_buffers_moves_no_bytes_and_is_undone() -> None:
    net = model()
    arena = Arena(net.parameters())
    other = [torch.zeros_like(w) for w in arena.weights]
    own = net[0].weight.data_ptr()
    with arena.reading(other):
        assert not net[0].weight.any()
        assert net[0].weight.untyped_storage().data_ptr() == other[0].untyped_storage().data_ptr()
    assert net[0].weight.data_ptr() == own


def test_a_stage_without_parameters_has_an_empty_arena() -> None:
    arena = Arena([])
    assert arena.weights == []
    assert arena.grads == []
    assert Layout([]).sizes == []


# ---- the tensors of a replica ----------------------------------------------------------------------------------------


def flat_of(opt):
    """The storage that holds the tensors of a replica, None if they have several."""
    storages = {p.untyped_storage().data_ptr() for group in opt.param_groups for p in group["params"]}
    return storages.pop() if len(storages) == 1 else None


def test_a_replicas_parameters_become_views_of_one_buffer_and_stay_what_they_are() -> None:
    x = weights()
    before, ids = [p.detach().clone() for p in x], list(map(id, x))
    for p in x:
        p.grad = torch.ones_like(p)
    opt = ElasticAveraging(torch.optim.AdamW(x), Reference(weights(), 2), 0)
    assert flat_of(opt) is not None
    assert list(map(id, opt.param_groups[0]["params"])) == ids
    assert_bitwise([x], [before])
    assert all(p.requires_grad and p.is_leaf and p.grad is not None for p in x)
    opt.step()
    for name in ("exp_avg", "exp_avg_sq"):
        assert len({state[name].untyped_storage().data_ptr() for state in opt.state.values()}) == 1


class Apart(Crew):
    """Replicas whose weights stay where they are."""

    def __init__(self, n, inner, **options):
        super().__init__(n, inner, **options)
        for i in range(n):
            self.reference.release(i)
        self.x = [weights() for _ in range(n)]
        for p in (p for x in self.x for p in x):
            p.data.share_memory_()
        self.opts = [ElasticAveraging(inner.torch(x), self.reference, i) for i, x in enumerate(self.x)]


@pytest.mark.parametrize("inner", [Momentum, AdamW])
@pytest.mark.parametrize(
    "options", [{"staleness": 0}, {"staleness": 1}, {"rule": "easgd"}, {"period": 2}], ids=str
)
def test_weights_that_stay_where_they_are_take_the_plain_step_and_end_alike(inner, options) -> None:
    flat, apart = Crew(2, inner, fused=False, **options), Apart(2, inner, **options)
    places = [p.data_ptr() for x in apart.x for p in x]
    for _ in range(4):
        flat.step()
        apart.step()
    assert [p.data_ptr() for x in apart.x for p in x] == places
    assert_bitwise(flat.state(), apart.state())


def test_the_reason_why_weights_stay_is_named() -> None:
    def refused(params, reason):
        start = [p.detach().clone().float() for p in params]
        opt = ElasticAveraging(torch.optim.SGD(params), Reference(start, 2))
        assert opt._replica.not_flat.startswith(reason)

    refused([torch.ones(4)[::2]], "a parameter is complex, or its strides")
    refused([torch.ones(4, dtype=torch.float64)], "a parameter has another dtype or device")
    refused([torch.ones(4), torch.ones(4).bfloat16()], "parameters of several dtypes")
    whole = torch.ones(8)
    refused([whole[:4], whole[4:]], "parameters share memory")
    refused([torch.ones(4).share_memory_()], "parameters share memory")


def test_a_tensor_of_which_parameters_are_views_stays_where_it_is() -> None:
    flat, view = torch.ones(7), None
    view = flat[:4]
    view.grad = torch.ones(4)
    reference = Reference([flat], 2, staleness=1, alpha=0.0)
    ElasticAveraging(torch.optim.SGD([view], lr=1.0), reference, 0, parameters=[flat]).step()
    assert flat.tolist() == [0.0] * 4 + [1.0] * 3


def test_the_whole_of_a_buffer_is_used_where_it_is() -> None:
    arena = Arena(model()[0].parameters())
    place = arena.weights[0].data_ptr()
    opt = ElasticAveraging(
        torch.optim.SGD(arena.parameters),
        Reference(arena.weights, 2),
        0,
        parameters=arena.weights,
    )
    assert flat_of(opt) == place == arena.weights[0].data_ptr()


def test_weights_of_a_released_replica_stay_in_their_buffer() -> None:
    crew = Crew(2, AdamW)
    place = flat_of(crew.opts[0])
    crew.step()
    crew.reference.release(0)
    crew.opts[0] = ElasticAveraging(AdamW.torch(crew.x[0]), crew.reference, 0)
    assert flat_of(crew.opts[0]) == place
    crew.step()
    assert crew.reference.round == 2


def test_parameters_of_an_arena_stay_there() -> None:
    arena = Arena(model()[0].parameters())
    reference = Reference([p.detach() for p in arena.parameters], 2)
    opt = ElasticAveraging(torch.optim.SGD(arena.parameters), reference, 0)
    assert flat_of(opt) == arena.weights[0].data_ptr()


def test_bfloat16_weights_of_a_float32_reference_lie_in_a_buffer_of_their_own_dtype() -> None:
    x = [nn.Parameter(torch.ones(3).bfloat16()), nn.Parameter(torch.ones(2).bfloat16())]
    opt = ElasticAveraging(torch.optim.SGD(x), Reference([torch.ones(3), torch.ones(2)], 2))
    assert flat_of(opt) is not None
    assert x[0].dtype == torch.bfloat16


def test_weights_that_were_moved_are_pulled_all_the_same() -> None:
    """Between a replica's own step and the last one of its round."""
    moved, same = Crew(2), Crew(2)
    for crew in (moved, same):
        crew.step_one(0)
        if crew is moved:
            for p in crew.x[0]:
                p.data = p.data.clone()
        crew.step_one(1)
        crew.t = 1
        crew.step()
    assert_bitwise(moved.state(), same.state())


def test_a_round_may_end_while_a_model_holds_the_reference() -> None:
    inside, outside = Crew(2), Crew(2)
    for crew in (inside, outside):
        crew.step_one(0)
    with inside.reference.applied_to(inside.x[0]):
        inside.step_one(1)
        assert all(torch.equal(p, z) for p, z in zip(inside.x[0], inside.reference.parameters))
    outside.step_one(1)
    assert_bitwise(inside.state(), outside.state())


def test_a_backward_pass_that_needs_weights_from_before_a_pull_fails() -> None:
    crew = Crew(2)
    crew.step_one(0)
    loss = (crew.x[0][0] ** 2).sum()
    crew.step_one(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    set_gradients(crew.x[0], 0, 1)
