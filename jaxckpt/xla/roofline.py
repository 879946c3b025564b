"""Seconds of one step from its optimized HLO, by a roofline over the device's numbers.

Each instruction takes the longer of its arithmetic and its memory traffic,

    seconds = max(flops / (efficiency * rate), bytes / (efficiency * bandwidth)),

one after the other in the schedule's order; a loop's body counts as often as it runs.
Only products are priced by arithmetic: elementwise work is bound by memory on every
chip of the catalogue. Transfers that the schedule starts early run beside the rest:
only the part that is waited for counts. Not priced: the start of a kernel (a few
microseconds each), and what the second-level cache saves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from jaxckpt.devices import Device
from jaxckpt.errors import DeviceError
from jaxckpt.xla.hlo import Computation, Instruction, Module, parse_hlo
from jaxckpt.xla.products import ATTENTION_TARGET, find_products, product_rate
from jaxckpt.xla.schedule import (
    ATTENTION,
    COLLECTIVE,
    COPY,
    ELEMENTWISE,
    HOST_COPY,
    PRODUCT,
    UNKNOWN,
    Schedule,
    Tally,
)
from jaxckpt.xla.traffic import Traffic, instruction_traffic

_FREE = frozenset(
    [
        "parameter",
        "constant",
        "bitcast",
        "tuple",
        "get-tuple-element",
        "after-all",
        "opt-barrier",
        "domain",
        "partition-id",
        "replica-id",
        "add-dependency",
    ]
)
_FREE_TARGETS = frozenset(["AllocateBuffer", "CreateBuffer", "PinBuffer", "Sharding"])
_COLLECTIVES = frozenset(
    [
        "all-gather",
        "all-reduce",
        "reduce-scatter",
        "all-to-all",
        "ragged-all-to-all",
        "collective-permute",
        "collective-broadcast",
    ]
)
_OPAQUE = frozenset(["send", "recv", "infeed", "outfeed"])
_OPENED = frozenset(["call", "async-start"])


@dataclass(frozen=True)
class StepSeconds:
    """Predicted time of one run of a program.

    Attributes:
        total: Seconds; the sum of `by_kind`.
        by_kind: Seconds of `products`, `attention`, `elementwise`, `copies`,
            `host_copies` and `collectives` (of transfers the part that is waited for);
            `unknown` is what was priced by its bytes alone.
        unknown: Custom calls and other instructions whose work is not known, and loops
            whose length is not.
        flops: Of products and fused attention; a multiply-add counts two.
        device_bytes: Read from and written to device memory.
        host_link_bytes: Moved between device and host memory.
    """

    total: float
    by_kind: Mapping[str, float]
    unknown: tuple[str, ...]
    flops: int
    device_bytes: int
    host_link_bytes: int


def step_seconds(hlo_text: str, device: Device) -> StepSeconds:
    """Predict how long one run of a compiled program takes on `device`.

    Args:
        hlo_text: The optimized module, `Compilation.hlo_text`.
        device: A device with known rates.

    Raises:
        DeviceError: The rates of the device are not known.
        HloError: The text is not a compiled module's.

    Example:
        >>> from jaxckpt.devices import get_device
        >>> step_seconds(
        ...     '''HloModule m
        ... ENTRY %main (x: bf16[64,64]) -> bf16[64,64] {
        ...   %x = bf16[64,64]{1,0} parameter(0)
        ...   ROOT %y = bf16[64,64]{1,0} dot(%x, %x), lhs_contracting_dims={1}
        ... }''',
        ...     get_device("h100-80gb"),
        ... ).flops
        524288
    """
    if not device.has_rates:
        raise DeviceError(
            f"The rates of `{device.name}` ({device.title}) are not known, so no time "
            "can be predicted for it. Use a chip of the catalogue, or run the program."
        )
    module = parse_hlo(hlo_text)
    tally = _Pricer(module, device).price(module.entry)
    return StepSeconds(
        tally.total,
        dict(tally.seconds),
        tuple(tally.unknown),
        tally.flops,
        round(tally.traffic.device_bytes),
        round(tally.traffic.host_bytes),
    )


@dataclass
class _Pricer:
    """Prices computations of one module for one device; equal ones only once."""

    module: Module
    device: Device
    priced: dict[str, Tally] = field(default_factory=dict)

    def price(self, computation: Computation) -> Tally:
        """Return what one run of `computation` costs."""
        if computation.name not in self.priced:
            schedule = Schedule()
            for instruction in computation.instructions.values():
                self._follow(schedule, computation, instruction)
            self.priced[computation.name] = schedule.finish()
        return self.priced[computation.name]

    def _follow(
        self, schedule: Schedule, computation: Computation, instruction: Instruction
    ) -> None:
        """Take the schedule one instruction further."""
        if instruction.opcode.endswith("-done"):
            schedule.wait(instruction.operands)
        elif instruction.opcode.endswith("-update"):
            schedule.rename(instruction.operands, instruction.name)
        else:
            step = self._price_instruction(computation, instruction)
            if instruction.opcode.endswith("-start"):
                schedule.start(instruction.name, step)
            else:
                schedule.do(step)

    def _price_instruction(
        self, computation: Computation, instruction: Instruction
    ) -> Tally:
        opcode = instruction.opcode
        if opcode in _FREE or instruction.custom_call_target in _FREE_TARGETS:
            return Tally()
        callees = self.module.callees(instruction)
        if opcode == "while":
            return self._price_loop(instruction, callees)
        if opcode == "conditional":
            branches = [self.price(branch) for branch in callees]
            return max(branches, key=lambda branch: branch.total)
        if opcode in _OPENED and callees:
            return self.price(callees[0])
        return self._price_work(computation, instruction)

    def _price_loop(
        self, instruction: Instruction, callees: list[Computation]
    ) -> Tally:
        tally = Tally()
        if (count := instruction.trip_count) is None:
            name = f"while `{instruction.name}` (length not known, taken as 1)"
            tally.unknown[name] = None
        for callee in callees:
            tally.add(self.price(callee), 1 if count is None else count)
        return tally

    def _price_work(self, computation: Computation, instruction: Instruction) -> Tally:
        """Price an instruction that does work itself."""
        tally = Tally()
        moved = instruction_traffic(self.module, computation, instruction)
        products = find_products(self.module, computation, instruction)
        kind = _kind(instruction, bool(products), moved)
        tally.traffic = moved
        tally.flops = sum(product.flops for product in products)
        if kind == COLLECTIVE:
            tally.seconds[kind] = self._collective_seconds(computation, instruction)
            return tally
        if kind == UNKNOWN:
            tally.unknown[instruction.custom_call_target or instruction.opcode] = None
        device = self.device
        rates = [product_rate(product, device) for product in products]
        work = sum(p.flops / rate for p, rate in zip(products, rates, strict=True))
        memory = moved.device_bytes / (device.memory_bytes_per_second or 1)
        link = moved.host_bytes / (device.host_link_bytes_per_second or 1)
        tally.memory_seconds = memory / device.efficiency
        tally.seconds[kind] = max(work / device.efficiency, tally.memory_seconds, link)
        return tally

    def _collective_seconds(
        self, computation: Computation, instruction: Instruction
    ) -> float:
        """Return `bytes * (n - 1) / n / link`, a ring; an all-reduce goes twice."""
        given = [s for o in computation.operands(instruction) for s in o.shapes]
        results = instruction.shapes
        if len(results) > len(given):  # asynchronous: the operands are repeated
            results = results[len(given) :]
        largest = max(sum(s.bytes for s in given), sum(s.bytes for s in results))
        count = _group_size(instruction)
        passes = 2 if instruction.opcode.startswith("all-reduce") else 1
        device = self.device
        if device.nvlink_bytes_per_second is not None:
            rate = device.nvlink_bytes_per_second * device.efficiency
        else:
            rate = device.host_link_bytes_per_second or 1
        return passes * largest * (count - 1) / count / rate


def _kind(instruction: Instruction, has_products: bool, moved: Traffic) -> str:
    opcode = instruction.opcode.removesuffix("-start")
    if opcode in _COLLECTIVES:
        return COLLECTIVE
    if ATTENTION_TARGET.match(instruction.custom_call_target):
        return ATTENTION if has_products else UNKNOWN
    if has_products:
        return PRODUCT
    if moved.host_bytes > 0:
        return HOST_COPY
    if opcode == "copy":
        return COPY
    if opcode == "custom-call" or opcode in _OPAQUE:
        return UNKNOWN
    return ELEMENTWISE


def _group_size(instruction: Instruction) -> int:
    """Return how many chips take part, 2 where the text does not say.

    Groups are written `{{0,1},{2,3}}` or as `[groups,members]<=[...]`.
    """
    text = instruction.attribute("replica_groups") or ""
    if text.startswith("["):
        return max(2, int(text[1:].split("]")[0].split(",")[-1]))
    first = text.lstrip("{").split("}")[0]
    return max(2, len(first.split(",")))
