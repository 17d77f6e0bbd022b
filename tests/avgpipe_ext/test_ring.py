"""Rings in shared memory, within this process and between two."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import threading

import pytest
import torch

from avgpipe_ext import ring
from tests.patience import SharedMemory, limit

pytestmark = pytest.mark.skipif(not ring.supported(), reason="shared-memory rings need Linux")

LONG_S = 60


class End:
    """One side: an inbox with a bell and a ring, and what is needed to write to the other side's."""

    def __init__(self):
        self.inbox = ring.Memory.create(ring.Bell.BYTES + ring.Sender.RING_BYTES)
        self.bell = ring.Bell(self.inbox, 0)
        self.card = self.inbox.path, self.inbox.bytes, os.getpid()

    def meet(self, path, size, pid):
        other = ring.Memory.open(path, size)
        self.sender = ring.Sender(other, ring.Bell.BYTES, ring.Bell(other, 0))
        self.receiver = ring.Receiver(self.inbox, ring.Bell.BYTES, pid)

    def send(self, tensor, *words):
        size = tensor.numel() * tensor.element_size()
        if size:
            ring.copy(self.sender.reserve(size), tensor.data_ptr(), size)
        self.sender.publish(size, *words, *[0] * (4 - len(words)))

    def take(self):
        """The next message: its words, and its bytes as a tensor in the slot."""
        while True:
            seen = self.bell.count()
            message = self.receiver.take()
            if message is not None:
                size, *words, lease = message
                return words, torch.frombuffer(lease, dtype=torch.uint8, count=size) if lease else None
            assert self.bell.wait(seen, limit(LONG_S)) != seen, "nothing came"


def pattern(number, size):
    return ((torch.arange(size) * 7 + number) % 251).to(torch.uint8)


def loop():
    """An end that sends to itself."""
    end = End()
    end.meet(*end.card)
    return end


# ---- the other process --------------------------------------------------------------------------------------
def serve(connection):
    end = End()
    connection.send(end.card)
    end.meet(*connection.recv())
    while (call := connection.recv()) is not None:
        function, arguments = call
        connection.send(function(end, *arguments))


def send_patterns(end, sizes):
    for number, size in enumerate(sizes):
        end.send(pattern(number, size), number, -number, 2**63 - 1, -(2**63))
    return end.sender.slots()


def answer(end, count):
    """Sends back what comes, word a plus one."""
    for _ in range(count):
        words, data = end.take()
        end.send(data, words[0] + 1)
    return open_files()


def open_files(_=None):
    return len(os.listdir("/proc/self/fd"))


class Peer:
    """This side's end, and a process with the other."""

    def __init__(self):
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()
        self.end = End()
        self.card = self.connection.recv()
        self.connection.send(self.end.card)
        self.end.meet(*self.card)

    def start(self, function, *arguments):
        self.connection.send((function, arguments))

    def result(self):
        assert self.connection.poll(limit(LONG_S)), "the other process does not answer"
        return self.connection.recv()

    def kill(self):
        self.process.kill()
        self.process.join()


@pytest.fixture(scope="module")
def shared_peer():
    memory = SharedMemory()
    peer = Peer()
    yield peer
    memory.assert_nothing_is_left()
    peer.connection.send(None)
    peer.process.join(limit(LONG_S))
    assert peer.process.exitcode == 0


@pytest.fixture
def peer(shared_peer):
    """Both directions are empty before and after."""
    yield shared_peer
    assert shared_peer.end.receiver.take() is None


# ---- between two processes ----------------------------------------------------------------------------------
@pytest.mark.promise
def test_messages_of_growing_and_shrinking_sizes_arrive_in_order(peer):
    sizes = [0, 1, 4096, 4097, 0, 100_000, 3, 1 << 20, 5_000_001, 64]
    peer.start(send_patterns, sizes)
    for number, size in enumerate(sizes):
        words, data = peer.end.take()
        assert words == [number, -number, 2**63 - 1, -(2**63)]
        assert data is None if size == 0 else torch.equal(data, pattern(number, size))
        del data
    slots, slot_bytes = peer.result()
    assert 1 <= slots <= len(sizes)
    assert slot_bytes >= 5_000_001


@pytest.mark.promise
def test_a_retained_tensor_keeps_its_values_while_many_messages_pass(peer):
    peer.start(send_patterns, [50_000] * 500)
    retained = []
    for number in range(500):
        words, data = peer.end.take()
        assert words[0] == number
        if number % 100 == 7:
            retained.append((number, data))
        del data
    peer.result()
    for number, data in retained:
        assert torch.equal(data, pattern(number, 50_000))


@pytest.mark.ranks
def test_open_files_do_not_grow_over_10000_messages(peer):
    peer.start(answer, 200)
    for number in range(200):
        peer.end.send(pattern(number, 100 + 64 * number), number)
        assert peer.end.take()[0][0] == number + 1
    before = open_files(), peer.result()
    peer.start(answer, 10_000)
    for number in range(10_000):
        peer.end.send(pattern(number, 1024), number)
        words, data = peer.end.take()
        assert words[0] == number + 1
    assert torch.equal(data, pattern(9_999, 1024))
    after = open_files(), peer.result()
    assert after[0] <= before[0]
    assert after[1] <= before[1]


@pytest.mark.promise
def test_a_killed_sender_leaves_what_was_taken_and_nothing_else():
    memory = SharedMemory()
    peer = Peer()
    peer.start(send_patterns, [1000, 2000])
    peer.result()
    _, data = peer.end.take()
    peer.kill()
    with pytest.raises(FileNotFoundError, match=r"slot 1 of 4096 bytes cannot be mapped"):
        peer.end.receiver.take()
    assert torch.equal(data, pattern(0, 1000))
    assert not os.path.exists(peer.card[0])
    memory.assert_nothing_is_left()


@pytest.mark.ranks
def test_a_killed_receiver_leaves_nothing_once_the_sender_is_gone():
    memory, mapped = SharedMemory(), mappings()
    peer = Peer()
    peer.start(answer, 2)
    peer.end.send(pattern(0, 1000))
    peer.end.take()
    peer.kill()
    for number in range(10):
        peer.end.send(pattern(number, 1000))
    assert not os.path.exists(peer.card[0])
    del peer
    assert mappings() == mapped
    memory.assert_nothing_is_left()


def mappings():
    with open("/proc/self/maps") as lines:
        return sum("memfd:avgpipe" in line for line in lines)


FULL = """
import sys; sys.path[:0] = {path!r}
from tests.avgpipe_ext.test_ring import loop, pattern
end = loop()
end.send(pattern(1, 3_000_000))
assert (end.take()[1] == pattern(1, 3_000_000)).all()
print("arrived")
"""


@pytest.mark.ranks
@pytest.mark.root
def test_a_full_dev_shm_does_not_matter():
    fill = "mount -t tmpfs -o size=4096 none /dev/shm && head -c 4096 /dev/zero > /dev/shm/full && exec "
    inside = ["unshare", "--mount", "sh", "-c"]
    if subprocess.run([*inside, fill + "true"], capture_output=True).returncode:
        pytest.skip("needs the right to mount")
    program = [*inside, fill + '"$0" "$@"', sys.executable, "-c", FULL.format(path=sys.path)]
    assert subprocess.run(program, capture_output=True, text=True, check=True).stdout == "arrived\n"


# ---- slots and leases ---------------------------------------------------------------------------------------
def test_a_lease_is_a_writable_buffer_of_the_slots_capacity():
    end = loop()
    end.send(pattern(0, 5000), 1, 2, 3, 4)
    size, a, b, c, d, lease = end.receiver.take()
    assert (size, a, b, c, d) == (5000, 1, 2, 3, 4)
    assert isinstance(lease, ring.Lease)
    assert len(lease) == 8192
    whole = torch.frombuffer(lease, dtype=torch.float32, count=16, offset=4096)
    whole.fill_(2.0)
    assert memoryview(lease).cast("B")[4099] == 0x40
    assert whole.data_ptr() % 64 == 0


def test_a_slot_is_used_again_once_its_lease_died_in_any_thread():
    end = loop()
    addresses = set()
    for number in range(20):
        end.send(pattern(number, 100))
        _, data = end.take()
        addresses.add(data.data_ptr())
        box = [data]
        del data
        thread = threading.Thread(target=box.clear)
        thread.start()
        thread.join()
    assert end.sender.slots() == (1, 4096)
    assert len(addresses) == 1


def test_every_view_keeps_the_slot():
    end = loop()
    end.send(pattern(0, 4000))
    view = end.take()[1].view(torch.float32)[10:20]
    for number in range(1, 30):
        end.send(pattern(number, 4000))
        end.take()
    assert torch.equal(view, pattern(0, 4000).view(torch.float32)[10:20])
    assert end.sender.slots()[0] == 2


def test_what_autograd_saved_keeps_the_slot():
    end = loop()
    end.send(torch.arange(6.0))
    saved = end.take()[1].view(torch.float32)
    weight = torch.ones(6, requires_grad=True)
    loss = (weight * saved).sum()
    del saved
    end.send(torch.zeros(6))
    end.take()
    loss.backward()
    assert torch.equal(weight.grad, torch.arange(6.0))


def test_a_lease_outlives_both_ends():
    before = mappings()
    end = loop()
    end.send(pattern(3, 9000))
    _, data = end.take()
    del end
    assert torch.equal(data, pattern(3, 9000))
    del data
    assert mappings() == before


def test_the_garbage_collector_may_end_everything_at_once():
    before = mappings()
    for _ in range(20):
        end = loop()
        end.send(pattern(3, 9000))
        end.send(pattern(4, 9000))
        end.kept = [end, end.receiver.take(), end.receiver.take()]
        del end
    gc.collect()
    assert mappings() == before


def test_a_small_free_slot_gets_larger_memory_and_none_is_added():
    end = loop()
    for size in (10, 10_000, 100_000):
        end.send(pattern(0, size))
        assert torch.equal(end.take()[1], pattern(0, size))
    assert end.sender.slots() == (1, 102_400)


def test_reserving_again_gives_up_what_was_reserved():
    end = loop()
    assert end.sender.reserve(100) == end.sender.reserve(200)
    assert end.sender.slots()[0] == 1
    assert end.sender.reserve(100) % 64 == 0


def test_all_slots_lent_is_an_error_until_one_comes_back():
    end = loop()
    held = []
    for number in range(1024):
        end.send(pattern(number, 16), number)
        held.append(end.take()[1])
    with pytest.raises(BufferError, match=r"all 1024 slots are lent.*copy what is to be kept"):
        end.send(pattern(0, 16))
    assert torch.equal(held[500], pattern(500, 16))
    del held[500]
    end.send(pattern(1, 16), 77)
    assert end.take()[0][0] == 77


def test_a_full_queue_is_an_error_and_the_slot_stays_reserved():
    end = loop()
    for number in range(1024):
        end.sender.publish(0, number, 0, 0, 0)
    end.sender.reserve(8)
    with pytest.raises(BufferError, match="the receiver takes no messages"):
        end.sender.publish(8, 0, 0, 0, 0)
    assert end.receiver.take() == (0, 0, 0, 0, 0, None)
    end.sender.publish(8, 5, 0, 0, 0)
    while (message := end.receiver.take()) is not None:
        last = message
    assert last[:2] == (8, 5)


# ---- what is refused ----------------------------------------------------------------------------------------
def test_more_bytes_than_reserved_are_refused():
    end = loop()
    with pytest.raises(ValueError, match="8 bytes to publish"):
        end.sender.publish(8, 0, 0, 0, 0)
    end.sender.reserve(8)
    with pytest.raises(ValueError, match="4097 bytes to publish"):
        end.sender.publish(4097, 0, 0, 0, 0)
    with pytest.raises(ValueError, match="-1 bytes"):
        end.sender.reserve(-1)


@pytest.mark.parametrize("offset", [8, -64, 64 << 20])
def test_offsets_of_no_line_in_the_memory_are_refused(offset):
    memory = ring.Memory.create(64 << 20)
    for make in (lambda: ring.Bell(memory, offset), lambda: ring.Receiver(memory, offset, 1)):
        with pytest.raises(ValueError, match=rf"at offset {offset} of 67108864 bytes: use a multiple of 64"):
            make()


def test_memory_that_is_not_there_is_an_error():
    with pytest.raises(MemoryError, match=r"no 1125899906842624 bytes .*use smaller or fewer micro-batches"):
        ring.Memory.create(1 << 50)
    with pytest.raises(ValueError, match="a memory of 0 bytes"):
        ring.Memory.create(0)
    end = loop()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(MemoryError, match=r"no 2097152 bytes of shared memory \(File too large\)"):
            end.sender.reserve(2 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    end.send(pattern(0, 2 << 20))
    assert torch.equal(end.take()[1], pattern(0, 2 << 20))


def test_a_memory_is_shared_until_its_file_is_closed():
    memory = ring.Memory.create(5000)
    other = ring.Memory.open(memory.path, 5000)
    memoryview(memory)[4999] = 9
    assert ctypes.string_at(other.address + 4999, 1) == b"\x09"
    with pytest.raises(OSError, match="Invalid argument"):
        ring.Memory.open(memory.path, 5001)
    memory.close_file()
    with pytest.raises(OSError, match=memory.path):
        ring.Memory.open(memory.path, 5000)


def test_a_memory_cannot_be_cut_short():
    memory = ring.Memory.create(5000)
    file = os.open(memory.path, os.O_RDWR)
    try:
        for size in (0, 4999, 5001):
            with pytest.raises(PermissionError):
                os.ftruncate(file, size)
    finally:
        os.close(file)


def test_a_slot_cannot_be_cut_short():
    end = loop()
    before = memory_files()
    end.sender.reserve(100)
    (file,) = memory_files() - before
    with pytest.raises(PermissionError):
        os.ftruncate(file, 0)


def memory_files():
    paths = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    memories = [path for path in paths if os.path.lexists(path) and "memfd:avgpipe" in os.readlink(path)]
    return {int(os.path.basename(path)) for path in memories}


def test_a_memory_that_could_be_cut_short_is_not_opened():
    file = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(file, 5000)
        with pytest.raises(OSError, match="Invalid argument"):
            ring.Memory.open(f"/proc/self/fd/{file}", 5000)
    finally:
        os.close(file)


def test_a_record_with_impossible_numbers_is_refused():
    end = loop()
    end.send(pattern(0, 100))
    record = ring.Bell.BYTES + 2 * 64
    memoryview(end.inbox)[record : record + 8] = (1 << 40).to_bytes(8, sys.byteorder)
    with pytest.raises(RuntimeError, match=r"1099511627776 bytes in slot 0 of 4096 bytes; .*same version"):
        end.receiver.take()


def test_a_system_without_proc_is_not_supported(monkeypatch):
    monkeypatch.setattr(os.path, "isdir", lambda path: False)
    assert not ring.supported()


def test_ends_that_were_not_made_are_refused():
    for end in (ring.Lease, ring.Memory):
        with pytest.raises(TypeError, match="No constructor defined"):
            end()
    with pytest.raises(TypeError):
        ring.Sender(ring.Memory.create(100), 0)


# ---- bells and copies ---------------------------------------------------------------------------------------
def test_a_bell_wakes_a_thread():
    bells = [ring.Bell.local(), ring.Bell.local()]

    def reply():
        for seen in range(100):
            bells[1].wait(seen, limit(LONG_S))
            bells[0].ring()

    thread = threading.Thread(target=reply)
    thread.start()
    for seen in range(100):
        bells[1].ring()
        assert bells[0].wait(seen, limit(LONG_S), spin_s=1e-5) == seen + 1
    thread.join()
    assert [bell.count() for bell in bells] == [100, 100]


def test_a_wait_ends_at_its_timeout():
    bell = ring.Bell.local()
    assert bell.wait(0, 0.001) == 0
    assert bell.wait(0, 0.001, spin_s=1.0) == 0
    assert bell.wait(0, 0.0) == 0
    bell.ring()
    assert bell.wait(0, 0.0) == 1


def test_a_signal_ends_a_wait_and_its_handler_runs():
    bell = ring.Bell.local()
    handled = []
    old = signal.signal(signal.SIGALRM, lambda *_: handled.append(1))
    signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
    try:
        assert bell.wait(0, limit(LONG_S)) == 0
        assert handled
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)


@pytest.mark.parametrize("past_caches", [False, True])
@pytest.mark.parametrize("size", [0, 1, 65_536, 65_537, 3_000_000])
def test_copy_copies(size, past_caches):
    source, destination = pattern(1, size), torch.zeros(size + 1, dtype=torch.uint8)
    ring.copy(destination.data_ptr(), source.data_ptr(), size, past_caches)
    assert torch.equal(destination[:size], source)
    assert destination[size] == 0


def test_a_sender_knows_how_many_messages_were_not_taken():
    own = loop()
    assert own.sender.waiting() == 0
    own.send(pattern(0, 3))
    own.send(pattern(1, 70_000))
    assert own.sender.waiting() == 2
    own.take()
    assert own.sender.waiting() == 1


def test_a_sender_knows_how_many_slots_have_not_come_back():
    own = loop()
    assert own.sender.lent() == 0
    own.send(pattern(0, 3))
    own.send(pattern(1, 70_000))
    assert own.sender.lent() == 2
    kept = own.take()
    assert own.sender.lent() == 2
    del kept
    assert own.sender.lent() == 1
