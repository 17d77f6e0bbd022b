"""Questions about a GPU that only it can answer: short programs, one line each.

    python benchmarks/gpu_questions.py [--only NAME ...] [--out FILE]

Each runs in a process of its own with a limit of its own, since some may end it: what one does is of no consequence to
the others. What is printed is for people; the record has the same lines.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import multiprocessing

LIMIT_S = 20.0
_MILLISECOND = 1_500_000  # cycles of torch.cuda._sleep, about
Question = Callable[[], str]


# ---- streams and the host --------------------------------------------------------------------------------------


def queues() -> str:
    """Does CUDA_DEVICE_MAX_CONNECTIONS matter to 31 streams that are filled one after another?"""
    alone, together = _sleeps(1), _sleeps(31)
    return f"31 streams took {together / alone:.1f} times what one took ({_connections()})"


def _sleeps(count: int) -> float:
    streams = [torch.cuda.Stream() for _ in range(count)]
    best = float("inf")
    for _ in range(3):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for stream in streams:
            with torch.cuda.stream(stream):
                for _ in range(4):
                    torch.cuda._sleep(_MILLISECOND)
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - begin)
    return best


def _connections() -> str:
    return os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "by default")


def _busy(milliseconds: int) -> torch.cuda.Stream:
    """Return a stream that is held up that long."""
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for _ in range(milliseconds // 10):
            torch.cuda._sleep(10 * _MILLISECOND)
    return stream


def pinned() -> str:
    """Does an allocation of pinned memory wait for a kernel that runs?"""
    torch.empty(1 << 10, pin_memory=True)
    stream = _busy(500)
    begin = time.perf_counter()
    torch.empty(64 << 20, dtype=torch.uint8, pin_memory=True)
    took, waits = time.perf_counter() - begin, stream.query()
    return f"{'it waits' if waits else 'it does not wait'}: 64 MiB in {1e3 * took:.1f} ms"


def allocation() -> str:
    """Does an allocation of device memory that torch does not have yet wait for a kernel that runs?"""
    stream = _busy(500)
    torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    return "it waits" if stream.query() else "it does not wait"


def host_costs() -> str:
    """What does the host pay for what every action does, in microseconds?"""
    stream, device, x = torch.Stream(device="cuda"), torch.device("cuda"), torch.zeros(8, device="cuda")
    event = torch.Event(device)
    event.record(stream)

    def enter() -> None:
        with stream:
            pass

    timed = torch.Event(device, enable_timing=True)
    runs: dict[str, Callable[[], Any]] = {
        "new event and record": lambda: stream.record_event(),
        "record": lambda: event.record(stream),
        "timing record": lambda: timed.record(stream),
        "wait": lambda: stream.wait_event(event),
        "query": lambda: event.query(),
        "stream context": enter,
        "record_stream": lambda: x.record_stream(stream),
        "manual_seed": lambda: torch.cuda.default_generators[0].manual_seed(1),
        "launch of add_": lambda: x.add_(1),
    }
    found = []
    for name, run in runs.items():
        for _ in range(50):
            run()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(500):
            run()
        found.append(f"{name} {2e3 * (time.perf_counter() - begin):.1f}")
    return ", ".join(found)


def launches() -> str:
    """What does the host pay for a call of an operator, in microseconds, by a compiled kernel and through CuPy?"""
    import avgpipe_ext
    from avgpipe_ext import run_time

    x, z = torch.zeros(8, device="cuda"), torch.ones(8, device="cuda")
    found: list[str] = []
    for name in ("compiled", "CuPy") if avgpipe_ext.build_info()["cuda"] else ("CuPy",):
        if name == "CuPy":
            if not run_time.has_cupy():
                return f"{', '.join(found)}; CuPy is not installed"
            run_time.install(everywhere=True)
        for _ in range(50):
            avgpipe_ext.elastic_pull_(x, z, 0.5)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(500):
            avgpipe_ext.elastic_pull_(x, z, 0.5)
        found.append(f"{name} {2e3 * (time.perf_counter() - begin):.1f}")
        torch.cuda.synchronize()
    return ", ".join(found)


def workspace() -> str:
    """How much memory does the first matrix product on another stream take?"""
    a = torch.randn(512, 512, device="cuda")
    torch.mm(a, a)
    found = []
    for _ in range(2):
        before = torch.cuda.memory_allocated()
        with torch.cuda.stream(torch.cuda.Stream()):
            b = a @ a
        torch.cuda.synchronize()
        found.append((torch.cuda.memory_allocated() - before - b.nbytes) / 2**20)
        del b
    return ", then ".join(f"{mib:.1f} MiB" for mib in found)


def lstm() -> str:
    """What does it cost that an LSTM's weights lie in an arena, and where would cuDNN have them?"""
    from avgpipe.elastic.flat import Arena

    layer = torch.nn.LSTM(512, 512, 2, device="cuda")
    x = torch.randn(32, 16, 512, device="cuda")

    def best_ms() -> float:
        taken = []
        for _ in range(10):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            layer(x)[0].sum().backward()
            torch.cuda.synchronize()
            taken.append(1e3 * (time.perf_counter() - begin))
        return min(taken)

    own_ms, first = best_ms(), next(layer.parameters()).data_ptr()
    places = sorted(((p.data_ptr() - first) // 4, name) for name, p in layer.named_parameters())
    Arena(list(layer.parameters()))
    return f"{own_ms:.2f} ms, in an arena {best_ms():.2f}; cuDNN: " + ", ".join(
        f"{n} {at}" for at, n in places
    )


def capture() -> str:
    """Does another thread's copy to the device break the capture of a graph?"""
    found = []
    for mode in ("global", "thread_local"):
        begun, over = threading.Event(), threading.Event()
        failures: list[str] = []

        def copy(begun: Any = begun, over: Any = over, failures: Any = failures) -> None:
            begun.wait(10)
            try:
                with torch.cuda.stream(torch.cuda.Stream()):
                    torch.randn(1 << 20).to("cuda")
            except Exception as error:
                failures.append(f"the copy fails ({_short(error)})")
            over.set()

        thread = threading.Thread(target=copy)
        thread.start()
        x = torch.zeros(8, device="cuda")
        torch.cuda.synchronize()
        try:
            with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode=mode):
                x.add_(1)
                begun.set()
                over.wait(10)
        except Exception as error:
            failures.append(f"the capture fails ({_short(error)})")
        thread.join()
        found.append(f"{mode}: {'; '.join(failures) or 'both work'}")
    return ", ".join(found)


def events() -> str:
    """Are torch's generic events and streams what the checker of stream order takes them for?"""

    event, stream = torch.Event(torch.device("cuda")), torch.Stream(device="cuda")
    stream.record_event(event)
    event.synchronize()
    parts = {name: getattr(stream, name) for name in ("stream_id", "device_index", "device_type")}
    with stream:
        same = torch.cuda.current_stream().cuda_stream == torch.cuda.Stream(**parts).cuda_stream
    traces = hasattr(torch._C, "_activate_gpu_trace")
    return f"number {'known' if event.event_id else 'unknown'}, same stream {same}, trace {traces}"


# ---- several processes -----------------------------------------------------------------------------------------


def _talk(child: Callable[..., None], *arguments: Any) -> tuple[Any, Any]:
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=child, args=(theirs, *arguments), daemon=True)
    process.start()
    return mine, process


def _receive(pipe: Any) -> Any:
    if not pipe.poll(15):
        raise TimeoutError("the other process says nothing")
    return pipe.recv()


def ipc() -> str:
    """Is CUDA IPC there: memory and events of another process?"""
    from avgpipe.links.slots import slots_of

    slots = slots_of(torch.device("cuda", 0))
    offer = slots.offer()
    pipe, _ = _talk(_check, offer)
    return str(_receive(pipe))


def _check(pipe: Any, offer: dict[str, str]) -> None:
    from avgpipe.links.slots import slots_of

    try:
        slots_of(torch.device("cuda", 0)).check(offer)
        pipe.send("it is there")
    except (OSError, ValueError, RuntimeError) as error:
        pipe.send(f"it is not: {_short(error)}")


def _memory(slot: Any) -> torch.Tensor:
    memory: torch.Tensor = slot.memory  # on this device
    return memory


def two_handles() -> str:
    """Can another process open two small allocations, which may be of one block?"""
    from avgpipe.links.slots import slots_of

    slots = slots_of(torch.device("cuda", 0))
    made = [slots.make(64 << 10) for _ in range(2)]
    for n, slot in enumerate(made):
        _memory(slot).fill_(n + 1)
    torch.cuda.synchronize()
    near = abs(made[0].address - made[1].address) < 2 << 20
    pipe, _ = _talk(_open_both, [slot.record for slot in made])
    return f"{_receive(pipe)}; {'of one block of 2 MiB' if near else 'of two blocks'}"


def _open_both(pipe: Any, records: list[bytes]) -> None:
    from avgpipe.links.slots import slots_of

    try:
        slots = slots_of(torch.device("cuda", 0))
        seen = [int(_memory(slots.open(record))[0]) for record in records]
        pipe.send(f"both are open, what they hold is {'right' if seen == [1, 2] else f'wrong: {seen}'}")
    except (OSError, RuntimeError) as error:
        pipe.send(f"no: {_short(error)}")


def lost_memory() -> str:
    """What does a process read that has another one's memory open, once that one has been killed?"""
    from avgpipe.links.slots import slots_of

    slots = slots_of(torch.device("cuda", 0))
    pipe, process = _talk(_offer)
    slot = slots.open(_receive(pipe))
    before = int(_memory(slot)[0])
    process.kill()
    process.join()
    try:
        after = int(_memory(slot)[0])
    except RuntimeError as error:
        return f"an error: {_short(error)}"
    return f"{before} before, {after} after"


def _offer(pipe: Any) -> None:
    from avgpipe.links.slots import slots_of

    slot = slots_of(torch.device("cuda", 0)).make(2 << 20)
    _memory(slot).fill_(7)
    torch.cuda.synchronize()
    pipe.send(slot.record)
    time.sleep(60)


def lost_event() -> str:
    """Does an event of a process that was killed before it happened ever happen?"""
    torch.zeros(1, device="cuda")
    pipe, process = _talk(_record_late)
    event = torch.cuda.Event.from_ipc_handle(torch.device("cuda", 0), _receive(pipe))
    early = event.query()
    process.kill()
    process.join()
    begin = time.perf_counter()
    try:
        while not event.query() and time.perf_counter() - begin < 5:
            time.sleep(0.01)
        happened = event.query()
    except RuntimeError as error:
        return f"an error: {_short(error)}"
    after = f"it happens after {time.perf_counter() - begin:.1f} s" if happened else "not within 5 s"
    return f"{'it had happened before already: ask for longer' if early else after}"


def _record_late(pipe: Any) -> None:
    event = torch.cuda.Event(interprocess=True)
    for _ in range(200):
        torch.cuda._sleep(100 * _MILLISECOND)
    event.record()
    pipe.send(event.ipc_handle())
    time.sleep(60)


def context_memory() -> str:
    """How much device memory does another process take before it has any tensor to speak of?"""
    torch.zeros(1, device="cuda")
    before = torch.cuda.mem_get_info()[0]
    pipe, _ = _talk(_make_context)
    _receive(pipe)
    return f"{(before - torch.cuda.mem_get_info()[0]) / 2**20:.0f} MiB"


def _make_context(pipe: Any) -> None:
    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    pipe.send(True)
    time.sleep(60)


# By name: what is asked, and variables that it is asked with.
QUESTIONS: dict[str, tuple[Question, dict[str, str]]] = {
    "queues": (queues, {}),
    "queues, 1": (queues, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}),
    "queues, 32": (queues, {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}),
    **{
        made.__name__.replace("_", " "): (made, {})
        for made in (
            *(pinned, allocation, host_costs, launches, workspace, lstm, capture, events),
            *(ipc, two_handles, lost_memory, lost_event, context_memory),
        )
    },
}


def _short(error: BaseException) -> str:
    return " ".join(str(error).split())[:120] or type(error).__name__


def ask(name: str) -> str:
    """Ask in a process of its own; the answer, or how it failed."""
    environment = os.environ | QUESTIONS[name][1]
    command = [sys.executable, __file__, "--ask", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, env=environment)
    except subprocess.TimeoutExpired:
        return f"no answer within {LIMIT_S:g} s"
    lines = (done.stdout if done.returncode == 0 else done.stderr or done.stdout).strip().splitlines()
    last = lines[-1] if lines else "nothing was printed"
    return last if done.returncode == 0 else f"failed ({done.returncode}): {last[:200]}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=QUESTIONS, metavar="NAME")
    parser.add_argument("--ask", choices=QUESTIONS, metavar="NAME", help="answer one, in this process")
    parser.add_argument("--out", type=Path, help="a file for the record")
    options = parser.parse_args()
    if options.ask:
        print(QUESTIONS[options.ask][0]())
        return
    gpu, answers = torch.cuda.is_available(), []
    for name in options.only or QUESTIONS:
        answer = ask(name) if gpu else "no GPU here"
        asked = (QUESTIONS[name][0].__doc__ or "").strip()
        print(f"{name:15} {answer}", flush=True)
        answers.append({"name": name, "question": asked, "answer": answer})
        failed = sum(a["answer"].startswith(("failed", "no answer")) for a in answers)
        verdict = f"{len(answers)} questions, {failed} without an answer" if gpu else "no GPU here"
        if options.out:  # as it goes: what comes later may take too long
            options.out.write_text(json.dumps({"verdict": verdict, "answers": answers}, indent=1) + "\n")


if __name__ == "__main__":
    main()
