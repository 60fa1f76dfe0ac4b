"""What `make mutants` takes away or misplaces: single places that keep training right on an accelerator."""

from __future__ import annotations

from dataclasses import dataclass

TRAIN = "src/dovetail/train/"
LANE, BUFFERS = TRAIN + "data_parallel/wire/lane.py", TRAIN + "data_parallel/wire/buffers.py"
BACKENDS = TRAIN + "data_parallel/wire/backends.py"
EXCHANGE, ARRIVING = TRAIN + "data_parallel/sharded/exchange.py", TRAIN + "data_parallel/sharded/arriving.py"
COURIER, PLANNED = TRAIN + "partial/courier.py", TRAIN + "partial/planned.py"
STREAMS, CLOCK = TRAIN + "device_streams.py", "src/dovetail/measure/clock.py"
REDUCER, HOOKS = TRAIN + "data_parallel/reducer.py", TRAIN + "data_parallel/comm_hooks.py"
EXECUTOR = "src/dovetail/cluster/executor/device/"

SPLIT, FEWER = ("split", "split lstm"), ("bf16", "int8")
PARTIAL, GUARDED = ("partial",), ("partial, guarded",)
BURST = ("burst",)
TASKS = ("tests/cluster/executor/device/test_device_runner.py", "tests/cluster/executor/device/test_prefetch.py")


@dataclass(frozen=True)
class Mutation:
    """One place of the code, and what stands there in the mutant."""

    name: str
    file: str
    before: str
    """Occurs once in the file."""
    after: str
    ways: tuple[str, ...] = ()
    """Ways to train (`tests/train/accelerator_scenarios.py`) that should notice it."""
    tests: tuple[str, ...] = ()
    """Test files that should."""
    beside: bool = True
    """Whether training runs in a stream beside the default one. Entering it makes its device the current one."""


MUTATIONS = (
    Mutation(
        "a transfer's result is used without waiting for it",
        LANE,
        "device_streams.follow(self._event, self._device)",
        "pass",
        SPLIT,
    ),
    Mutation(
        "a transfer begins before what it sends is computed",
        LANE,
        "device_streams.follow(ready, self._device)",
        "pass",
        SPLIT,
    ),
    Mutation(
        "the event before a transfer is recorded on the current device",
        LANE,
        "self._queue.put((work, run, device_streams.mark(self._device)))",
        "self._queue.put((work, run, device_streams.mark(torch.device(self._device.type, "
        "torch.accelerator.current_device_index()))))",
        SPLIT,
        beside=False,
    ),
    Mutation(
        "the event behind a transfer is the one before it",
        LANE,
        "self._note(started, self._clock.stamp())",
        "self._note(started, started.start)",
        SPLIT,
    ),
    Mutation(
        "the end of a transfer runs outside the lane's stream",
        LANE,
        "            with self._stream or nullcontext():\n                for _ in started.transfer:",
        "            with nullcontext():\n                for _ in started.transfer:",
        SPLIT,
    ),
    Mutation(
        "stamps are recorded in the current device's stream",
        CLOCK,
        "event.record(torch.accelerator.current_stream(self._device))",
        "event.record()",
        SPLIT,
        beside=False,
    ),
    Mutation(
        "a device guard is missing where streams wait",
        STREAMS,
        "torch.accelerator.current_stream(device).wait_event(event)",
        "torch.accelerator.current_stream().wait_event(event)",
        (*SPLIT, *PARTIAL),
        beside=False,
    ),
    Mutation(
        "events are recorded in the current device's stream",
        STREAMS,
        "event.record(torch.accelerator.current_stream(device))",
        "event.record()",
        (*SPLIT, *PARTIAL),
        beside=False,
    ),
    Mutation(
        "buffers are lent to any stream at once",
        BUFFERS,
        "return self.stream == stream or self.given is None or self.given.query()",
        "return True",
        (*SPLIT, *FEWER),
    ),
    Mutation(
        "gradients are put into a bucket that is on its way",
        EXCHANGE,
        "        if bucket.reducing is not None:\n            bucket.reducing.wait()\n        bucket.open",
        "        bucket.open",
        (*SPLIT, "split, unused"),
    ),
    Mutation(
        "the optimiser reads gradients that are being reduced",
        EXCHANGE,
        "                bucket.reducing.wait()\n                if not device_streams",
        "                if not device_streams",
        SPLIT,
    ),
    Mutation(
        "memory of the last pass is used again before it has left",
        EXCHANGE,
        "        for _ in self._waited_for():\n            pass\n        self._buffers.adopt(self.device)",
        "        self._buffers.adopt(self.device)",
        SPLIT,
    ),
    Mutation(
        "a layer computes with parameters that are still on their way",
        ARRIVING,
        "        arrival.work.wait()\n        if arrival.uses is not None:",
        "        if arrival.uses is not None:",
        SPLIT,
    ),
    Mutation(
        "new buckets are not recorded for the lane's stream",
        EXCHANGE,
        "device_streams.hold_for(self.lane.stream, bucket.tensors())",
        "pass",
        (*SPLIT, *FEWER),
    ),
    Mutation(
        "old buckets are dropped while they are in use",
        EXCHANGE,
        "device_streams.hold_here(bucket.tensors())",
        "pass",
        (*SPLIT, *FEWER, "tuned"),
    ),
    Mutation(
        "memory from the pool is not recorded for who borrows it",
        BUFFERS,
        "        device_streams.hold_for(stream, [buffer])\n",
        "",
        (*SPLIT, *FEWER, "tuned"),
    ),
    Mutation(
        "one rank gathers its buckets in another order",
        EXCHANGE,
        "for bucket in reversed(self.buckets):\n            if bucket.kind",
        "for bucket in self.buckets if self.rank else reversed(self.buckets):\n            if bucket.kind",
        SPLIT,
    ),
    Mutation(
        "one rank all-reduces where the others reduce-scatter",
        BACKENDS,
        "        _finish(group._reduce_scatter_base(mine, flat, options))",
        "        own_all_reduce(group, flat) if group.rank() else "
        "_finish(group._reduce_scatter_base(mine, flat, options))",
        SPLIT,
    ),
    Mutation(
        "an accelerator's tensors take the ring of messages",
        BACKENDS,
        "return is_queued(device) or backend_of(group, device) in CPU_OWN",
        "return backend_of(group, device) in CPU_OWN",
        ("split",),
    ),
    Mutation(
        "gradients leave before they are computed (partial)",
        COURIER,
        "device_streams.follow(delivery.computed[number], self._device)",
        "pass",
        PARTIAL,
    ),
    Mutation(
        "gradients are used before they have arrived (partial)",
        COURIER,
        "device_streams.follow(delivery.delivered, self._device)",
        "pass",
        PARTIAL,
    ),
    Mutation(
        "gradients arrive while the last update reads them (partial)",
        COURIER,
        "delivery.computed = [device_streams.mark(self._device)] * len(delivery.buckets)",
        "delivery.computed = [None] * len(delivery.buckets)",
        PARTIAL,
    ),
    Mutation(
        "the courier works outside its stream (partial)",
        COURIER,
        "with torch.no_grad(), self.stream or contextlib.nullcontext():",
        "with torch.no_grad():",
        PARTIAL,
    ),
    Mutation(
        "broadcasts are not waited for (partial)",
        COURIER,
        "            assert work is not None\n            work.wait()",
        "            assert work is not None",
        PARTIAL,
    ),
    Mutation(
        "the event of arrival is recorded before the buckets (partial)",
        COURIER,
        "            squares = torch.zeros(2, delivery.segments",
        "            delivery.delivered = device_streams.mark(self._device)\n"
        "            squares = torch.zeros(2, delivery.segments",
        PARTIAL,
    ),
    Mutation(
        "buckets are not recorded for the courier's stream (partial)",
        PLANNED,
        "        hold_for(self._courier.stream, [bucket.flat for bucket in self._buckets])\n",
        "",
        (*PARTIAL, *GUARDED),
    ),
    Mutation(
        "a gradient's norm is read by the host in every step (partial)",
        COURIER,
        "return squares.sum(dtype=torch.float64)",
        "return torch.tensor(squares.sum(dtype=torch.float64).item(), device=flat.device)",
        GUARDED,
    ),
    Mutation(
        "collectives are not waited for (burst)",
        TRAIN + "burst/communicator.py",
        "            work.wait()  # only the device's queue waits; torch's own watchdog ends a job that hangs\n",
        "",
        BURST,
    ),
    Mutation(
        "a re-planned layer's memory is dropped while it is in use (burst)",
        TRAIN + "burst/state.py",
        "            hold_here([self.tensor.detach(), self.tensor.grad])\n",
        "",
        BURST,
    ),
    Mutation(
        "rows are chosen by indices that the host sends and waits for (burst)",
        STREAMS,
        "return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)",
        "return torch.tensor(values, dtype=dtype).to(device)",
        (*BURST, *PARTIAL),
    ),
    Mutation(
        "a task computes before its parameters have arrived (executor)",
        EXECUTOR + "device_tensors.py",
        "self._on.compute.wait_event(self._arrived)",
        "pass",
        tests=TASKS,
    ),
    Mutation(
        "gradients leave before they are computed (executor)",
        EXECUTOR + "leaving_gradients.py",
        "            stream.wait_event(self._computed)\n",
        "",
        tests=TASKS,
    ),
    Mutation(
        "an early group of gradients leaves before it is computed (executor)",
        EXECUTOR + "leaving_gradients.py",
        "                    stream.wait_event(event)\n",
        "                    pass\n",
        tests=TASKS,
    ),
)
