from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn

from avgpipe import ElasticAveraging, Reference
from tests.elastic.cases import Crew, assert_bitwise, weights
from tests.elastic.emulation import Nesterov


def model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def saved(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_the_reference_is_a_copy():
    m = model()
    reference = Reference(m.parameters(), 2)
    before = copy.deepcopy(m)
    with torch.no_grad():
        for p in m.parameters():
            p.zero_()
    assert_bitwise([reference.parameters], [list(before.parameters())])
    assert all(not z.requires_grad for z in reference.parameters)


def test_applied_to_swaps_pointers_and_swaps_back():
    reference, m = Reference(model(0).parameters(), 2), model(1)
    own = [p.detach().clone() for p in m.parameters()]
    places = [p.data_ptr() for p in m.parameters()]
    x = torch.ones(1, 3)
    with reference.applied_to(m):
        assert [p.data_ptr() for p in m.parameters()] == [z.data_ptr() for z in reference.parameters]
        assert torch.equal(m(x), model(0)(x))
    assert [p.data_ptr() for p in m.parameters()] == places
    assert_bitwise([own], [list(m.parameters())])


def test_applied_to_swaps_back_after_an_error():
    reference, m = Reference(model(0).parameters(), 2), model(1)
    with pytest.raises(KeyError), reference.applied_to(m):
        raise KeyError("in the block")
    assert_bitwise([list(m.parameters())], [list(model(1).parameters())])


def test_applied_to_nests():
    first, second, m = Reference(model(0).parameters(), 1), Reference(model(1).parameters(), 1), model(2)
    with first.applied_to(m):
        with second.applied_to(m):
            assert torch.equal(m[0].weight, model(1)[0].weight)
        assert torch.equal(m[0].weight, model(0)[0].weight)
    assert torch.equal(m[0].weight, model(2)[0].weight)


def test_applied_to_another_dtype():
    reference, m = Reference(model(0).parameters(), 2), model(1).double()
    with reference.applied_to(m):
        assert torch.equal(m[0].weight, model(0)[0].weight.double())
    assert torch.equal(m[0].weight, model(1)[0].weight.double())


def test_applied_to_a_recurrent_layer():
    lstm, other = nn.LSTM(3, 4), nn.LSTM(3, 4)
    reference, x = Reference(lstm.parameters(), 1), torch.ones(2, 1, 3)
    with reference.applied_to(other):
        assert torch.equal(other(x)[0], lstm(x)[0])
    assert not torch.equal(other(x)[0], lstm(x)[0])


def test_training_inside_applied_to_is_refused():
    m = model()
    reference = Reference(m.parameters(), 1)
    opt = ElasticAveraging(torch.optim.SGD(m.parameters(), lr=0.1), reference)
    with reference.applied_to(m), pytest.raises(RuntimeError, match=r"leave reference.applied_to"):
        opt.step()
    opt.step()


def test_other_models_are_refused():
    reference = Reference(model().parameters(), 2)
    with pytest.raises(ValueError, match="parameters are 2 tensors, the reference has 4"):
        reference.applied_to(nn.Linear(3, 4)).__enter__()
    with pytest.raises(ValueError, match=r"parameters\[2\] has shape \(5, 4\) .*, the reference's \(2, 4\)"):
        reference.applied_to(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5))).__enter__()


@pytest.mark.parametrize("outer", [None, Nesterov], ids=["plain", "outer"])
@pytest.mark.parametrize("staleness", [0, 1, "asynchronous"])
@pytest.mark.parametrize("rule", ["avgpipe", "easgd"])
def test_a_run_continues_bitwise_from_the_middle_of_a_round(rule, staleness, outer):
    options = {"rule": rule, "staleness": staleness, "period": 2, "outer": outer and outer.torch}
    crew, again = Crew(3, **options), Crew(3, **options)
    for _ in range(3):
        crew.step()
    crew.step_one(1)  # arrives in round 1 before the others
    state = saved({"r": crew.reference.state_dict(), "o": [o.state_dict() for o in crew.opts], "x": crew.x})
    again.reference.load_state_dict(state["r"])
    for opt, x, sd, values in zip(again.opts, again.x, state["o"], state["x"]):
        opt.load_state_dict(sd)
        with torch.no_grad():
            for p, v in zip(x, values):
                p.copy_(v)
    assert [(o.ready, o.settled) for o in again.opts] == [(o.ready, o.settled) for o in crew.opts]
    for c in (crew, again):
        c.step_one(0, 3)
        c.step_one(2, 3)
        c.t = 4
        for _ in range(3):
            c.step()
    assert again.reference.round == crew.reference.round
    assert_bitwise(crew.state(), again.state())


def test_states_of_other_references_are_refused_and_change_nothing():
    state = Crew(2).reference.state_dict()
    before = copy.deepcopy(state["parameters"])
    crew = Crew(3)
    crew.step_one(2)
    pending = crew.reference.state_dict()
    reference = Crew(2, outer=None).reference
    for wrong, message in [
        ({**state, "parameters": state["parameters"][:2]}, "parameters are 2 tensors, the reference has 4"),
        (
            {**state, "parameters": [torch.ones(7), *state["parameters"][1:]]},
            r"shape \(7,\) .*, the reference's \(3, 4\)",
        ),
        ({**state, "outer": {}}, "the state has an outer optimizer and the reference has none"),
        (pending, "an update of replica 2, but there are 2 replicas"),
        (model().state_dict(), "the state lacks arrivals_in_round, outer, parameters, pending, round"),
    ]:
        with pytest.raises(ValueError, match=message):
            reference.load_state_dict(wrong)
        assert_bitwise([before], [reference.parameters])


def test_wrong_parameters_are_refused():
    x = weights()
    with pytest.raises(ValueError, match="parameters is empty"):
        Reference(iter(()), 2)
    with pytest.raises(TypeError, match=r"not one tensor; pass \[tensor\]"):
        Reference(x[0], 2)
    with pytest.raises(TypeError, match=r"parameters\[0\] must be a tensor, not str"):
        Reference(model().state_dict(), 2)
    with pytest.raises(ValueError, match=r"parameters\[2\] is there twice"):
        Reference([x[0], x[1], x[0]], 2)


def test_frozen_parameters_and_integers_take_no_part():
    frozen, moving = (nn.Parameter(torch.ones(2), requires_grad=flag) for flag in (False, True))
    given = [frozen, torch.ones(2), torch.ones(2, dtype=torch.int64), moving]
    assert Reference(given, 2).averaged == [1, 3]


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_what_cannot_be_averaged_is_refused():
    count = torch.ones(1, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"parameters\[1\] has layout torch.sparse_csr"):
        Reference([count, torch.eye(2).to_sparse_csr()], 2)
    with pytest.raises(TypeError, match=r"parameters\[0\] has dtype torch.float8_e4m3fn; cast it"):
        Reference([torch.ones(1).to(torch.float8_e4m3fn)], 2)


def test_replicas_are_kept_apart():
    m = model()
    reference = Reference(m.parameters(), 2)
    opt = torch.optim.SGD(m.parameters(), lr=0.1)
    ElasticAveraging(opt, reference, 0)
    for replica in (2, -1, True, "0"):
        with pytest.raises(ValueError, match="replica must be from 0 to 1"):
            ElasticAveraging(opt, reference, replica)
    with pytest.raises(ValueError, match=r"replica 0 has an optimizer already; pass replica= one of 1"):
        ElasticAveraging(torch.optim.SGD(model().parameters(), lr=0.1), reference)
    with pytest.raises(ValueError, match=r"replica 1 shares a tensor of shape \(4, 3\) with replica 0"):
        ElasticAveraging(opt, reference, 1)
    with pytest.raises(ValueError, match="with the reference: give each replica its own copy"):
        ElasticAveraging(torch.optim.SGD(reference.parameters, lr=0.1), reference, 1)


def test_repr_says_what_it_is():
    assert repr(Reference(model().parameters(), 4, staleness=1)) == (
        "Reference(4 tensors, replicas=4, alpha=0.25, rule='avgpipe', staleness=1, period=1, round=0)"
    )
