"""What the simulated device promises: each mistake with streams, memory or the host is seen in some order of a few."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from avgpipe.device import own_device
from avgpipe.model.context import CallerGenerators, seed_generators
from tests.simulated_device import DEVICES, POLICIES, Simulation, simulate

SIM, OTHER = "sim:0", "sim:1"  # names that the process of pytest itself does not know
HIDDEN = ("late", "random", "starved")  # policies under which mistakes are seen
SEEDS = 20


def orders(policies: tuple[str, ...] = HIDDEN) -> Iterator[tuple[str, int]]:
    yield from ((policy, seed) for policy in policies for seed in range(SEEDS))


def outcomes(run: Callable[[Simulation], Any]) -> list[Any]:
    """What a run returns in each of some orders."""
    found = []
    for policy, seed in orders():
        with simulate(policy, seed) as sim:
            found.append(run(sim))
    return found


def current(device: str = SIM) -> Any:
    return torch.accelerator.current_stream(device)


# ---- what torch sees -------------------------------------------------------------------------------------------------


def test_it_is_an_accelerator_with_four_devices():
    assert torch.accelerator.current_accelerator().type == "sim"
    assert torch.accelerator.device_count() == DEVICES
    assert own_device("sim") == torch.device(SIM)
    with pytest.raises(ValueError, match="use 'cpu' or 'sim'"):
        own_device("cuda")
    assert len(torch.get_device_module("sim").default_generators) == DEVICES


def test_current_devices_and_streams_are_the_thread_s():
    with simulate("late"):
        torch.accelerator.set_device_index(1)
        stream = torch.Stream(SIM)
        with stream:
            assert current() == stream
            seen = []
            thread = threading.Thread(
                target=lambda: seen.extend([torch.accelerator.current_device_index(), current().stream_id])
            )
            thread.start()
            thread.join()
            assert seen == [0, 0]
        assert current().stream_id == 0
        torch.accelerator.set_device_index(0)
        assert torch.zeros(2, device="sim:1").device == torch.device(OTHER)


def test_views_are_made_at_once_and_share_memory():
    with simulate("late") as sim:
        x = torch.zeros(4, 6, device=SIM)
        tasks = sim.counters.tasks
        views = [
            x[1],
            x.T,
            x.view(24),
            x.reshape(2, 12),
            x.unfold(1, 2, 2),
            x.detach(),
            x.as_strided((2,), (3,)),
        ]
        assert sim.counters.tasks == tasks == 0
        x.add_(1)
        assert all(bool((view == 1).all()) for view in views)
        y = torch.empty(0, device=SIM)
        torch.add(x, 1, out=y)  # gives y a shape
        assert torch.equal(y.cpu(), torch.full((4, 6), 2.0))


@pytest.mark.parametrize("policy", POLICIES)
def test_operators_are_the_cpu_s(policy):
    layers = [
        nn.Unflatten(1, (1, 8)),
        nn.Conv1d(1, 3, 3, padding=1),
        nn.BatchNorm1d(3),
        nn.Flatten(),
        nn.LayerNorm(24),
        nn.GELU(),
        nn.Linear(24, 5),
    ]
    model = nn.Sequential(*layers)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    results = []
    with simulate(policy, 3):
        for device in ("cpu", "sim:0"):
            model.load_state_dict(state)
            model.to(device).zero_grad()
            x = torch.arange(32.0).view(4, 8).to(device)
            loss = nn.functional.cross_entropy(model(x).tanh(), torch.tensor([0, 1, 2, 3], device=device))
            loss.backward()
            results.append([loss.detach().cpu()] + [p.grad.cpu() for p in model.parameters()])
    assert all(map(torch.equal, *results))


# ---- order -----------------------------------------------------------------------------------------------------------


def test_nothing_runs_late_before_the_host_waits_and_then_only_what_it_needs():
    with simulate("late", keeps_log=True) as sim:
        x, side = torch.ones(3, device=SIM), torch.Stream(SIM)
        with side:
            torch.zeros(3, device=SIM)
        y = x * 2
        assert sim.log == []
        assert y.tolist() == [2, 2, 2]
        assert [line.split()[0] for line in sim.log] == [
            "0/0"
        ] * 3  # fill, multiply and copy; nothing of the side


def made_on_a_side_stream(waits: bool) -> float:
    """Read, on the default stream, what another one makes in memory that held 1."""
    side = torch.Stream(SIM)
    x = torch.ones(4, device=SIM)
    side.wait_stream(current())
    with side:
        x.mul_(3)
        ready = side.record_event()
    if waits:
        current().wait_event(ready)
    return float(x.sum())


def test_a_missing_wait_reads_stale_values_in_some_order():
    assert set(outcomes(lambda sim: made_on_a_side_stream(True))) == {12.0}
    assert set(outcomes(lambda sim: made_on_a_side_stream(False))) == {4.0, 12.0}


def test_memory_that_was_never_written_is_nan():
    with simulate("late"):
        for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            assert bool(torch.empty(5, dtype=dtype, device=SIM).isnan().all())


def read_by_another_stream(records: bool) -> float:
    """Free a tensor that another stream has yet to read, and use its home stream again."""
    side = torch.Stream(SIM)
    x = torch.ones(4, device=SIM)
    side.wait_stream(current())
    with side:
        y = x * 2
        if records:
            x.record_stream(side)
    del x
    torch.zeros(4, device=SIM)
    side.synchronize()
    return float(y.sum())


def test_a_missing_record_stream_reads_poison_or_the_next_tensor_in_some_order():
    assert set(outcomes(lambda sim: read_by_another_stream(True))) == {8.0}
    assert any(value != 8.0 for value in outcomes(lambda sim: read_by_another_stream(False)))


def test_memory_is_its_home_stream_s_again_at_once_and_another_user_s_when_that_is_done():
    with simulate("late"):
        x = torch.zeros(4, device=SIM)
        place = x.data_ptr()
        del x
        x = torch.zeros(4, device=SIM)
        assert x.data_ptr() == place
        side = torch.Stream(SIM)
        with side:
            x + 1
            x.record_stream(side)
        del x
        assert torch.zeros(4, device=SIM).data_ptr() != place
        side.synchronize()
        kept = [torch.zeros(4, device=SIM) for _ in range(2)]
        assert place in [tensor.data_ptr() for tensor in kept]


def test_memory_is_counted():
    with simulate("late"):
        torch.accelerator.reset_peak_memory_stats()
        before = torch.accelerator.memory_allocated()
        x = torch.zeros(1000, device=SIM)
        del x
        assert torch.accelerator.memory_allocated() == before
        assert torch.accelerator.max_memory_allocated() == before + 4000


# ---- host and device -------------------------------------------------------------------------------------------------


def pinned_and_overwritten(waits: bool) -> float:
    host = torch.ones(4).pin_memory()
    assert host.is_pinned()
    x = host.to(SIM, non_blocking=True)
    if waits:
        torch.accelerator.synchronize()
    host.fill_(5)
    return float(x.sum())


def test_pinned_memory_that_is_overwritten_too_early_is_seen():
    assert set(outcomes(lambda sim: pinned_and_overwritten(True))) == {4.0}
    assert 20.0 in outcomes(lambda sim: pinned_and_overwritten(False))


def test_pinned_memory_lives_until_the_copy_is_done_and_other_memory_is_copied_at_once():
    def run(sim):
        x = torch.ones(4).pin_memory().to(SIM, non_blocking=True)  # dies here
        again = torch.full((4,), 7.0).pin_memory()
        plain = torch.ones(4)
        y = plain.to(SIM, non_blocking=True)
        plain.fill_(9)
        return float(x.sum() + y.sum() + again.sum() * 0)

    assert set(outcomes(run)) == {8.0}


def told_to_pinned_memory(waits: bool) -> float:
    host = torch.zeros(()).pin_memory()
    host.copy_(torch.full((), 3.0, device=SIM), non_blocking=True)
    if waits:
        torch.accelerator.synchronize()
    return float(host)


def test_a_loss_that_is_read_without_waiting_is_not_there_yet():
    assert set(outcomes(lambda sim: told_to_pinned_memory(True))) == {3.0}
    assert 0.0 in outcomes(lambda sim: told_to_pinned_memory(False))


def test_reading_a_value_waits_and_waits_can_be_counted_and_forbidden():
    with simulate("late") as sim:
        x = torch.arange(4.0, device=SIM)
        with sim.without_host_waits():
            y = x * 2  # issued
            for wait in (y.sum().item, y.cpu, y.nonzero, torch.accelerator.synchronize, lambda: y[y > 2]):
                with pytest.raises(RuntimeError, match="the host waits for the device"):
                    wait()
        assert sim.counters.host_waits == 0
        assert y.max().item() == 6
        assert y.nonzero().cpu().flatten().tolist() == [1, 2, 3]
        assert torch.equal(y, y.clone())
        assert sim.counters.host_waits == 4


def test_an_event_that_is_asked_for_again_and_again_happens():
    for policy in HIDDEN:
        with simulate(policy):
            stream = torch.Stream(SIM)
            with stream:
                torch.zeros(3, device=SIM)
            event = stream.record_event()
            assert [event.query() for _ in range(4)][-1]


def test_events_tell_the_time_between_them():
    with simulate("late"):
        first, last = (torch.Event(SIM, enable_timing=True) for _ in range(2))
        first.record()
        torch.zeros(3, device=SIM)
        last.record()
        with pytest.raises(RuntimeError, match=r"must be completed|must have happened"):
            first.elapsed_time(last)
        last.synchronize()
        assert first.elapsed_time(last) > 0
        assert torch.Event(SIM).query()  # never recorded


def test_what_a_kernel_raises_comes_out_where_the_host_waits():
    with simulate("late"):
        table, wrong = torch.zeros(3, 2, device=SIM), torch.tensor([7]).to(SIM, non_blocking=True)
        found = nn.functional.embedding(wrong, table)
        with pytest.raises(RuntimeError, match="the device has failed: aten::"):
            found.cpu()


def test_an_event_that_nothing_will_record_is_a_deadlock():
    with simulate("late"):
        stream = torch.Stream(SIM)
        with stream:
            torch.zeros(3, device=SIM)
        left = stream.record_event()
    with (
        simulate("late"),
        pytest.raises(RuntimeError, match="deadlock: the host waits for an event of stream 1"),
    ):
        left.synchronize()


def test_one_seed_is_one_order():
    def log(policy: str, seed: int) -> tuple[list[str], int]:
        with simulate(policy, seed, keeps_log=True) as sim:
            sides = [torch.Stream(SIM) for _ in range(3)]
            for _ in range(4):
                for side in sides:
                    with side:
                        torch.ones(2, device=SIM).mul_(2)
            torch.accelerator.synchronize()
            return sim.log, sim.counters.digest

    for policy in POLICIES:
        assert log(policy, 1) == log(policy, 1)
    assert len({log("random", seed)[1] for seed in range(10)}) == 10
    assert len({log("starved", seed)[1] for seed in range(20)}) == 4  # which of four streams is starved


# ---- random numbers --------------------------------------------------------------------------------------------------


def test_numbers_are_the_cpu_s_whatever_is_seeded_later():
    torch.manual_seed(5)
    expected = [torch.rand(3), torch.randn(20), torch.randperm(9)]

    def run(sim):
        torch.manual_seed(5)
        found = [torch.rand(3, device=SIM), torch.randn(20, device=SIM), torch.randperm(9, device=SIM)]
        torch.manual_seed(6)
        torch.rand(3, device=SIM)
        return [tensor.cpu() for tensor in found]

    for found in outcomes(run):
        assert all(map(torch.equal, found, expected))


def test_the_caller_s_generators_go_on_where_they_were():
    torch.manual_seed(5)
    expected = torch.rand(4)
    generator = torch.Generator(SIM).manual_seed(8)
    with simulate("late") as sim:
        torch.manual_seed(5)
        first = torch.rand(2, device=SIM)
        with CallerGenerators(torch.device(SIM)):
            seed_generators(torch.device(SIM), 9)
            torch.rand(7, device=SIM)
        second = torch.rand(2, device=SIM)
        assert sim.counters.tasks == 0  # not even states are waited for
        assert torch.equal(torch.cat([first, second]).cpu(), expected)
        generator.manual_seed(8)
        torch.rand(1, device=SIM, generator=generator)
        other = torch.Generator(SIM)
        other.set_state(generator.get_state())
        pair = [torch.rand(3, device=SIM, generator=each).cpu() for each in (generator, other)]
        assert torch.equal(*pair)


def test_operators_that_draw_out_of_order_are_seen():
    def run(sim):
        torch.manual_seed(0)
        side = torch.Stream(SIM)
        x = torch.rand(2, device=SIM)
        with side:
            torch.rand(2, device=SIM)
        try:
            side.synchronize()
        except RuntimeError as error:
            return str(error)
        return float(x.sum()) and ""

    assert any("draw from one generator run out of order" in found for found in outcomes(run))


@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("inplace", [False, True])
def test_dropout_is_the_cpu_s(p, inplace):
    results = []
    with simulate("late"):
        for device in ("cpu", SIM):
            torch.manual_seed(1)
            x = torch.linspace(-1, 1, 50).to(device).requires_grad_()
            y = nn.functional.dropout(x * 1.1, p, inplace=inplace)
            (y * y).sum().backward()
            results.append([y.detach().cpu(), x.grad.cpu()])
    assert all(map(torch.equal, *results))


# ---- autograd --------------------------------------------------------------------------------------------------------


def test_autograd_orders_streams():
    """A backward runs where its forward ran, and the caller's stream goes on after it."""

    def run(sim):
        w = torch.full((3,), 2.0, device=SIM, requires_grad=True)
        side = torch.Stream(SIM)
        x = w * w
        side.wait_stream(current())
        with side:
            y = (x * 3).sum()
        current().wait_stream(side)
        x.record_stream(side)
        (y * 2).backward()
        return w.grad.tolist()

    assert all(found == [24.0] * 3 for found in outcomes(run))


def test_autograd_crosses_devices():
    def run(sim):
        w = torch.full((3,), 2.0, device=SIM, requires_grad=True)
        v = torch.full((3,), 5.0, device=OTHER, requires_grad=True)
        loss = ((w * w).to(OTHER, non_blocking=True) * v).sum()
        loss.backward()
        return w.grad.tolist(), v.grad.tolist(), str(v.grad.device)

    assert all(found == ([20.0] * 3, [4.0] * 3, OTHER) for found in outcomes(run))


# ---- avgpipe's operators ---------------------------------------------------------------------------------------------


def test_avgpipe_s_operators_are_issued_and_can_be_unknown():
    import avgpipe_ext

    with simulate("late") as sim:
        x, z = torch.ones(5, device=SIM), torch.zeros(5, device=SIM)
        count = avgpipe_ext.elastic_pull_(x, z, 0.25, check_finite=True)
        packed = avgpipe_ext.pack([x, z])
        assert sim.counters.tasks == 0
        assert x.tolist() == [0.75] * 5
        assert int(count) == 0
        assert packed.tolist() == [0.75] * 5 + [0.0] * 5
        with sim.without_avgpipe():  # as on a device of which they know nothing: in plain torch
            assert int(avgpipe_ext.elastic_pull_(x, z, 0.5, check_finite=True)) == 0
        assert x.tolist() == [0.375] * 5
