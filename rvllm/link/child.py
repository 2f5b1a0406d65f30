"""The engine process from its first line to its exit code: load what the parent asks for, serve it, end with it.

It ends when its parent does, in whatever state either is: a thread sleeps on the parent's link and ends the process
when that is closed. An interrupt from a terminal is the parent's to act on; SIGTERM lets requests run out. What goes
wrong goes to the fronts, who can tell their users; here it is only an exit code.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from math import prod
from pathlib import Path
from types import FrameType

from rvllm.config import EngineConfig
from rvllm.engine.device import choose_device
from rvllm.engine.engine import Engine
from rvllm.engine.load import load_engine
from rvllm.engine.scheduler import Limits
from rvllm.link.messages import Facts, Malformed, Message, Note, Progress, Start, fatal
from rvllm.link.process import remove_address
from rvllm.link.server import LAST_WORDS_S, RECEIVE_BYTES, Front, Server
from rvllm.model.files import locate
from rvllm.model.source import open_source
from rvllm.program.cost import Traffic
from rvllm.program.ops import Embedding, parts
from rvllm.program.program import Program

PROGRESS_EVERY_S = 0.1

Say = Callable[[Message], None]
Load = Callable[[Start, Say], tuple[Engine, Facts]]


def main(loader: str, parent_fd: int, listener_fd: int) -> int:
    """Run the engine process; its exit code. `loader`: module:function, `load` below but in tests."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    listener = socket.socket(fileno=listener_fd)
    link = socket.socket(fileno=parent_fd)
    ending = Ending(listener)
    threading.Thread(target=ending.follow, args=(link.fileno(),), daemon=True).start()
    parent = Front(link)
    try:
        start = receive_start(parent)
        engine, facts = named(loader)(start, quiet(parent))
        # All that is here now stays: the collector need not look at it again.
        gc.collect()
        gc.freeze()
        gc.disable()
        serve(engine, facts, parent, listener, ending)
    except Exception as error:
        if not parent.closed:
            refuse(parent, error)
    ending.remove_address()
    return ending.code


def serve(engine: Engine, facts: Facts, parent: Front, listener: socket.socket, ending: Ending) -> None:
    """Serve to the end. Raises what the engine raises, once every front has its words."""
    with TerminateSignal() as terminate:
        server = Server(engine, facts, parent=parent, listener=listener, terminate=terminate.socket)
        try:
            server.run()
            ending.code = 0  # before the links are closed: the parent may then be gone at once
        finally:
            server.close()


def load(start: Start, say: Say) -> tuple[Engine, Facts]:
    """The model's engine, as in LLM. Raises StartError."""
    config = start.config

    def progress(label: str, done: int, total: int) -> None:
        say(Progress(label, done, total))

    def note(text: str) -> None:
        say(Note(text))

    begin_s = time.monotonic()
    files = locate(config.model, offline=config.offline, progress=progress)
    source = open_source(files, load_format=config.load_format, warn=note)
    device = choose_device(config.device, note)
    opened_s = time.monotonic()
    engine = load_engine(
        source,
        replace(config, device=device),
        vocab_limit=start.vocab_limit,
        eos_ids=start.eos_ids,
        progress=progress,
        warn=note,
    )
    startup = (("open_model", opened_s - begin_s), ("load_engine", time.monotonic() - opened_s))
    name = device_name(device)
    traffic = Traffic.of(engine.program, name, engine.limits.max_model_len)
    about = (("device", name), ("tier", device_tier(device)), *formats(engine.program))
    return engine, Facts(
        config.model,
        name,
        engine.limits,
        config.max_logprobs,
        startup,
        cache_settings(config, engine.limits),
        traffic,
        about,
    )


def cache_settings(config: EngineConfig, limits: Limits) -> tuple[tuple[str, str], ...]:
    """The cache's settings by vLLM's names."""
    return (
        ("block_size", str(limits.block_size)),
        ("num_gpu_blocks", str(limits.blocks)),
        ("cache_dtype", config.kv_cache_dtype),
        ("enable_prefix_caching", str(limits.prefix_caching)),
        ("gpu_memory_utilization", str(config.gpu_memory_utilization)),
        ("num_gpu_blocks_override", str(config.num_gpu_blocks_override)),
        ("kv_cache_memory_bytes", str(config.kv_cache_memory_bytes)),
    )


def device_name(device: str) -> str:
    if device == "cpu":
        return "cpu"
    from rvllm.backend.cuda.driver import devices

    return devices()[0].name


def device_tier(device: str) -> str:
    """Which builds of our kernels the device gets, such as t90a; "cpu" where there are none."""
    if device == "cpu":
        return "cpu"
    from rvllm.backend.cuda.driver import devices, driver_version
    from rvllm.backend.cuda.kernels import FORCED_TIER, chosen_tier

    return chosen_tier(devices()[0].compute_capability, driver_version(), os.environ.get(FORCED_TIER))


def formats(program: Program) -> tuple[tuple[str, str], ...]:
    """What is computed in, and the formats of the weights, that of most elements first."""
    elements: Counter[str] = Counter()
    for tensor in program.weights.values():
        elements[str(tensor.dtype)] += prod(tensor.sizes({}))
    activations = next(one.out.dtype for op in program.ops for one in parts(op) if isinstance(one, Embedding))
    return (("dtype", str(activations)), ("weights", ", ".join(name for name, _ in elements.most_common())))


def named(name: str) -> Load:
    module, _, function = name.partition(":")
    return getattr(import_module(module), function)


def receive_start(parent: Front) -> Start:
    """The parent's first message."""
    while True:
        select.select([parent.link], [], [])
        data = parent.link.recv(RECEIVE_BYTES)
        if not data:
            raise Malformed("the parent closed its link")
        for message in parent.frames.feed(data):
            if not isinstance(message, Start):
                raise Malformed(f"the first message is {type(message).__name__}")
            return message


def quiet(parent: Front) -> Say:
    """Says progress to the parent at most every PROGRESS_EVERY_S, and never waits for it to listen."""
    next_s = 0.0

    def say(message: Message) -> None:
        nonlocal next_s
        if isinstance(message, Progress):
            if message.done < message.total and time.monotonic() < next_s:
                return
            next_s = time.monotonic() + PROGRESS_EVERY_S
        parent.send(message)

    return say


def refuse(parent: Front, error: Exception) -> None:
    """Tell the parent why there will be no engine."""
    with suppress(OSError):  # it is gone
        parent.send(fatal(error))
    parent.close(LAST_WORDS_S)


class Ending:
    """How the process ends. `code` is its exit code, 1 until all went well."""

    def __init__(self, listener: socket.socket) -> None:
        self.code = 1
        self._address = Path(listener.getsockname())

    def follow(self, parent_fd: int) -> None:
        """Sleep until the parent has closed its link, or is dead, and end the process, whatever it is doing."""
        hangup = select.poll()
        hangup.register(parent_fd, 0)
        hangup.poll()
        self.remove_address()
        os._exit(self.code)

    def remove_address(self) -> None:
        """Nobody is to come any more."""
        remove_address(self._address)


class TerminateSignal:
    """SIGTERM as something to read from a socket, so that it wakes the thread and interrupts no step."""

    def __init__(self) -> None:
        self.socket, self._end = socket.socketpair()
        self._end.setblocking(False)

    def __enter__(self) -> TerminateSignal:
        self._handler = signal.signal(signal.SIGTERM, self._handle)
        self._wakeup = signal.set_wakeup_fd(self._end.fileno(), warn_on_full_buffer=False)
        return self

    def __exit__(self, *error: object) -> None:
        signal.set_wakeup_fd(self._wakeup)
        signal.signal(signal.SIGTERM, self._handler)
        self.socket.close()
        self._end.close()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Python writes the signal's number to the socket; there is nothing else to do."""
