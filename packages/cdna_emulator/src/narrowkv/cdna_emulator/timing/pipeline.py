"""One compute unit, issue slot by issue slot: waves on four SIMDs, LDS, the vector cache, memory.

Every `Machine.issue` clocks each SIMD lets each of its waves issue at most one instruction, at most one of
each kind; the wave of the highest priority goes first, then the oldest. As in the hardware, a wave waits
for results at an s_waitcnt, and wait states are s_nop instructions in the code. A launch's workgroups that
one compute unit holds at a time run together and share its LDS and cache.

Not modelled: the instruction cache, sets of the vector cache, the translation of addresses, and other compute
units. The shares of loads that L2, the Infinity Cache and HBM serve are given; see `cache_shares`.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import dataclass, field

from .machine import Machine
from .trace import Trace, TracedInstruction

_UNITS = ("matrix", "vector ALU", "LDS", "vector cache", "Infinity Cache", "memory")


@dataclass(frozen=True)
class SteadyLoop:
    """The hot loop in its steady state.

    Attributes:
        passes: passes of one wave in the trace.
        clocks: clocks of a pass.
        first_pass, after: clocks of a workgroup before its first pass and after its last.
        busy: share of the clocks in which each unit is busy; ``matrix`` and ``vector ALU`` are means over
        SIMDs. stalls: share of its waves' time that they wait, by what for; ``issue`` is instructions being
        issued. flops: of matrix instructions, of one pass of all waves of one workgroup.
    """

    passes: int
    clocks: float
    first_pass: float
    after: float
    busy: dict[str, float]
    stalls: dict[str, float]
    flops: float


@dataclass(frozen=True)
class Simulation:
    """Workgroups of one compute unit from their start to their end.

    Attributes:
        workgroups: how many ran together.
        clocks: until the last ended.
        busy: clocks of each unit, summed over SIMDs.
        flops: of all matrix instructions.
        loop: the hot loop, or None without one that has three passes.
    """

    workgroups: int
    clocks: float
    busy: dict[str, float]
    flops: float
    loop: SteadyLoop | None


@dataclass
class _Wave:
    ops: tuple[TracedInstruction, ...]
    workgroup: int
    simd: int
    at: int = 0
    ready: float = 0
    priority: int = 0
    since: float = 0
    vector: deque[float] = field(default_factory=deque)
    local: deque[float] = field(default_factory=deque)
    waits: bool = False
    heads: list[float] = field(default_factory=list)


class _Unit:
    """The state of the compute unit's shared parts: times from which each is free."""

    def __init__(self, machine: Machine, hbm_share: float, l2_misses: float, units: int) -> None:
        m = self.machine = machine
        self.valu = [0.0] * m.simds
        self.matrix = [0.0] * m.simds
        self.port = [0.0] * m.simds
        self.returns = [0.0] * (m.simds // 2)
        self.queues: list[deque[float]] = [deque() for _ in range(m.simds // 2)]
        self.lds = self.cache = self.l2 = self.mall = self.hbm = 0.0
        self.hbm_rate = m.hbm_bytes_per_s / units / m.clock(0.2)
        self.mall_rate = m.mall_bytes_per_s / units / m.clock(0.2)
        self.hbm_share, self.l2_misses = hbm_share, l2_misses
        from_mall = (l2_misses - hbm_share) * (m.mall_latency - m.memory_latency)
        self.latency = m.memory_latency + from_mall + hbm_share * (m.hbm_latency - m.memory_latency)
        self.lines: OrderedDict[int, float] = OrderedDict()
        self.flight: list[tuple[float, int]] = []
        self.flying = 0
        self.log: list[tuple[float, str, float]] = []

    def use(self, now: float, unit: str, clocks: float) -> None:
        """Records that a unit was busy."""
        self.log.append((now, unit, clocks))

    def lds_access(self, op: TracedInstruction, now: float, pair: int) -> float:
        """When an LDS instruction that is issued now completes."""
        m = self.machine
        start = max(now + op.issue, self.lds)
        self.lds = start + op.clocks
        self.queues[pair].append(start)
        self.use(now, "LDS", op.clocks)
        back = max(self.returns[pair], start) + op.bytes / m.lds_return
        if op.bytes:
            self.returns[pair] = back
        return max(self.lds, back) + m.lds_latency

    def queue_opens(self, now: float, pair: int) -> float:
        """When the LDS queue of a pair of SIMDs accepts another instruction."""
        queue = self.queues[pair]
        while queue and queue[0] <= now:
            queue.popleft()
        return now if len(queue) < self.machine.lds_queue else queue[0]

    def missing(self, op: TracedInstruction, key: int) -> int:
        """Bytes of an access that the vector cache does not hold."""
        if not op.lines:
            return op.bytes
        return sum(line + key not in self.lines for line in op.lines) * self.machine.l1_line

    def flight_opens(self, now: float, size: int) -> float:
        """When that many more bytes can be in flight."""
        while self.flight and self.flight[0][0] <= now:
            self.flying -= heapq.heappop(self.flight)[1]
        if not size or not self.flight or self.flying + size <= self.machine.in_flight:
            return now
        return self.flight[0][0]

    def memory_access(self, op: TracedInstruction, now: float, key: int, size: int) -> float:
        """When a load or store that is issued now completes; ``size`` bytes of it miss the cache."""
        m = self.machine
        start = max(now + op.issue, self.cache)
        self.cache = start + op.clocks
        self.use(now, "vector cache", op.clocks)
        if op.kind == "store":
            self.hbm = max(self.hbm, start) + op.bytes * self.hbm_share / self.hbm_rate
            self.use(now, "memory", op.bytes * self.hbm_share / self.hbm_rate)
            return max(self.cache, self.hbm) + self.latency / 2
        done = self.cache + m.lds_latency * 2
        if size:
            self.l2 = max(self.l2, start) + size / m.l2
            fetched = size * self.hbm_share / self.hbm_rate
            self.hbm = max(self.hbm, start) + fetched
            self.use(now, "memory", fetched)
            passed = size * self.l2_misses / self.mall_rate
            self.mall = max(self.mall, start) + passed
            self.use(now, "Infinity Cache", passed)
            done = max(self.cache, self.l2, self.mall, self.hbm) + self.latency
            heapq.heappush(self.flight, (done, size))
            self.flying += size
        for line in op.lines:
            known = self.lines.pop(line + key, None)
            self.lines[line + key] = done if known is None else known
            if known is not None:
                done = max(done, known)
        while len(self.lines) > m.l1_bytes // m.l1_line:
            self.lines.popitem(last=False)
        if op.to_lds:
            self.lds = max(self.lds, start) + op.bytes / m.lds_write
            self.use(now, "LDS", op.bytes / m.lds_write)
        return done


class _Simulator:
    """Runs waves to their end."""

    def __init__(
        self, trace: Trace, machine: Machine, workgroups: int, hbm_share: float, l2_misses: float, units: int
    ) -> None:
        self.machine, self.unit = machine, _Unit(machine, hbm_share, l2_misses, units)
        warps = len(trace.waves)
        self.waves = [
            _Wave(ops, group, (group * warps + k) % machine.simds)
            for group in range(workgroups)
            for k, ops in enumerate(trace.waves)
        ]
        self.alive = Counter(wave.workgroup for wave in self.waves)
        self.arrived: Counter[int] = Counter()
        self.stalls: list[tuple[float, str, float]] = []
        self.flops = 0.0
        self.now = 0.0

    def run(self) -> None:
        """Run until every wave has ended."""
        step = self.machine.issue
        port = self.unit.port
        by_simd = [[w for w in self.waves if w.simd == k] for k in range(self.machine.simds)]
        while True:
            nearest = float("inf")
            # The SIMD whose last use of LDS or memory is longest ago goes first.
            for waves in [by_simd[k] for k in sorted(range(len(by_simd)), key=port.__getitem__)]:
                taken: set[str] = set()
                order = (
                    waves if not any(w.priority for w in waves) else sorted(waves, key=lambda w: -w.priority)
                )
                for wave in order:
                    if wave.waits:
                        continue
                    if wave.ready <= self.now:
                        self._try(wave, taken)
                    if not wave.waits and wave.ready < nearest:
                        nearest = wave.ready
            if nearest == float("inf"):
                break
            self.now = max(self.now + step, -(-nearest // step) * step)
            for k in range(len(by_simd)):
                if any(w.at >= len(w.ops) for w in by_simd[k]):
                    by_simd[k] = [w for w in by_simd[k] if w.at < len(w.ops)]

    def _later(self, wave: _Wave, when: float, reason: str) -> None:
        self.stalls.append((self.now, reason, when - self.now))
        wave.ready = when

    def _next(self, wave: _Wave, clocks: float) -> None:
        self.stalls.append((self.now, "issue", clocks))
        wave.ready = self.now + clocks
        wave.at += 1
        if wave.at >= len(wave.ops):
            self._end(wave)

    def _try(self, wave: _Wave, taken: set[str]) -> None:
        op, now, unit = wave.ops[wave.at], self.now, self.unit
        kind, simd = op.kind, wave.simd
        if op.head == 0 and (not wave.heads or wave.since != wave.at):
            wave.heads.append(now)
        wave.since = wave.at
        if kind in ("valu", "mfma"):
            if "vector" in taken or unit.valu[simd] > now:
                self._later(wave, max(unit.valu[simd], now + self.machine.issue), "vector ALU")
                return
            if (kind == "mfma" or op.packed) and unit.matrix[simd] > now:
                self._later(wave, unit.matrix[simd], "matrix unit")
                return
            taken.add("vector")
            if kind == "mfma":
                unit.matrix[simd] = now + op.clocks
                unit.valu[simd] = now + self.machine.matrix_shadow
                unit.use(now, "matrix", op.clocks)
                self.flops += op.flops
            else:
                unit.valu[simd] = now + op.clocks
                unit.use(now, "vector ALU", op.clocks)
            self._next(wave, self.machine.issue)
        elif kind in ("lds", "load", "store"):
            self._memory(wave, op, simd)
        elif kind == "wait":
            self._wait(wave, op)
        elif kind == "barrier":
            self._barrier(wave)
        else:
            if kind == "priority":
                wave.priority = op.level
            elif kind == "smem":
                wave.local.append(now + self.machine.scalar_load)
            self._next(wave, op.clocks)

    def _memory(self, wave: _Wave, op: TracedInstruction, simd: int) -> None:
        unit, now, pair = self.unit, self.now, simd // 2
        if unit.port[simd] > now:
            self._later(wave, unit.port[simd], "LDS and memory port")
            return
        if op.kind == "lds":
            opens = unit.queue_opens(now, pair)
            if opens > now:
                self._later(wave, opens, "LDS queue")
                return
            done = unit.lds_access(op, now, pair)
            wave.local.append(max(done, wave.local[-1]) if wave.local else done)
        else:
            key = wave.workgroup << 44
            size = unit.missing(op, key) if op.kind == "load" else 0
            opens = unit.flight_opens(now, size)
            if opens > now:
                self._later(wave, opens, "bytes in flight")
                return
            done = unit.memory_access(op, now, key, size)
            wave.vector.append(max(done, wave.vector[-1]) if wave.vector else done)
        unit.port[simd] = now + op.issue
        self._next(wave, self.machine.issue)

    def _wait(self, wave: _Wave, op: TracedInstruction) -> None:
        for queue, count, reason in ((wave.vector, op.vector, "memory"), (wave.local, op.local, "LDS")):
            if count < 0:
                continue
            while queue and queue[0] <= self.now:
                queue.popleft()
            if len(queue) > count:
                self._later(wave, queue[len(queue) - count - 1], f"{reason} results")
                return
        self._next(wave, op.clocks)

    def _barrier(self, wave: _Wave) -> None:
        wave.waits, wave.ready = True, self.now
        self.arrived[wave.workgroup] += 1
        self._pass_barrier(wave.workgroup)

    def _pass_barrier(self, workgroup: int) -> None:
        if not self.arrived[workgroup] or self.arrived[workgroup] < self.alive[workgroup]:
            return
        self.arrived[workgroup] = 0
        for wave in self.waves:
            if wave.workgroup == workgroup and wave.waits:
                wave.waits = False
                start = wave.ready
                self._next(wave, self.machine.issue)
                self.stalls.append((start, "barrier", self.now + self.machine.barrier - start))
                wave.ready = self.now + self.machine.barrier

    def _end(self, wave: _Wave) -> None:
        wave.waits, wave.ready = True, self.now
        self.alive[wave.workgroup] -= 1
        if self.alive[wave.workgroup]:
            self._pass_barrier(wave.workgroup)


def _steady(simulator: _Simulator, warps: int) -> SteadyLoop | None:
    """The hot loop between a third of its passes and its last."""
    waves = [wave for wave in simulator.waves if len(wave.heads) >= 4]
    if not waves:
        return None
    longest = max(len(wave.heads) for wave in waves)
    measured = [wave for wave in waves if len(wave.heads) == longest]
    # Waves of one SIMD may get ahead of each other, so passes are counted over all of them.
    begin = min(wave.heads[longest // 3] for wave in measured)
    end = min(wave.heads[-1] for wave in measured)
    passed = sum(_passes_until(wave.heads, end) - _passes_until(wave.heads, begin) for wave in measured)
    clocks = (end - begin) * len(measured) / passed
    m = simulator.machine
    busy = dict.fromkeys(_UNITS, 0.0)
    for when, unit, used in simulator.unit.log:
        if begin <= when < end:
            busy[unit] += used
    for unit in _UNITS:
        busy[unit] /= (end - begin) * (m.simds if unit in ("matrix", "vector ALU") else 1)
    stalls: defaultdict[str, float] = defaultdict(float)
    for when, reason, lost in simulator.stalls:
        if begin <= when < end:
            stalls[reason] += lost
    whole = sum(stalls.values()) or 1.0
    flops = float(sum(op.flops for wave in simulator.waves[:warps] for op in _one_pass(wave.ops)))
    first = min(wave.heads[0] for wave in measured)
    return SteadyLoop(
        longest, clocks, first, simulator.now - max(wave.heads[-1] for wave in measured), busy,
        {reason: lost / whole for reason, lost in sorted(stalls.items(), key=lambda i: -i[1])}, flops,
    )  # fmt: skip


def _passes_until(heads: list[float], when: float) -> float:
    """Passes of a wave that began before a time, the last one in part."""
    at = bisect_right(heads, when)
    if at == 0 or at == len(heads):
        return float(at)
    return at + (when - heads[at - 1]) / (heads[at] - heads[at - 1])


def _one_pass(ops: tuple[TracedInstruction, ...]) -> tuple[TracedInstruction, ...]:
    heads = [k for k, op in enumerate(ops) if op.head == 0]
    return ops[heads[-2] : heads[-1]] if len(heads) > 1 else ()


def simulate(
    trace: Trace, machine: Machine, *, workgroups: int = 1, hbm_share: float = 1.0,
    l2_misses: float | None = None, units: int | None = None,
) -> Simulation:  # fmt: skip
    """Run the workgroups that a compute unit holds at a time.

    Args:
        trace: what one workgroup executes; all execute the same, on other addresses.
        machine: where.
        workgroups: how many run together.
        hbm_share: share of the bytes that miss the vector cache that come from HBM rather than from a cache.
        l2_misses: share of the same bytes that L2 does not hold either, so that the Infinity Cache or HBM
            gives them. Default: ``hbm_share``.
        units: compute units that share HBM. Default: all of the machine's.
    """
    misses = hbm_share if l2_misses is None else max(l2_misses, hbm_share)
    simulator = _Simulator(trace, machine, workgroups, hbm_share, misses, units or machine.compute_units)
    simulator.run()
    busy = dict.fromkeys(_UNITS, 0.0)
    for _, unit, used in simulator.unit.log:
        busy[unit] += used
    loop = _steady(simulator, len(trace.waves))
    return Simulation(workgroups, simulator.now, busy, float(simulator.flops), loop)
