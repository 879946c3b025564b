"""The memory model: what lies in memory, in which order, and how much at once."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import jaxckpt
from jaxckpt import _jax
from jaxckpt.devices import catalog, get_device, use
from jaxckpt.memory import predict_step
from jaxckpt.memory.chip import Chip, split_parts
from jaxckpt.memory.fuse import fuse
from jaxckpt.memory.lower import lower
from jaxckpt.memory.order import _waits, orders
from jaxckpt.memory.peak import find_peak
from jaxckpt.memory.program import Kind
from models import gpt

H100 = Chip.of(get_device("h100-80gb"))
A100 = Chip.of(get_device("a100-40gb"))
MIB = 2**20


def lowered(fn, *args, chip=H100):
    return lower(_jax.without_dead_code(jax.make_jaxpr(fn)(*args)), chip)


def fused(fn, *args, chip=H100):
    program = lowered(fn, *args, chip=chip)
    fuse(program, chip)
    return program


def kernels(program):
    return [op.primitive for op in program.ops]


def of(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def peak(fn, *args):
    return find_peak(fused(fn, *args)).worst


X = of(1024, 1024)  # 4 MiB; a product of it is not cut in parts
UNIT = 4 * MIB


def test_views_share_their_buffer():
    program = lowered(lambda x: checkpoint_name(jnp.sin(x).reshape(-1), "flat"), X)
    assert [op.primitive for op in program.ops] == ["sin"]
    assert program.outputs == program.ops[0].writes
    assert program.outputs[0].label == "flat"


def test_calls_are_opened():
    inner = jax.jit(lambda x: jax.nn.relu(jnp.sin(x)))
    program = lowered(lambda x: jax.checkpoint(inner)(x) + 1, X)
    assert not any(op.inner for op in program.ops)
    assert program.ops[0].kind is Kind.BARRIER  # a rematerialised call stands apart


def test_equal_work_is_done_once_but_not_across_a_barrier():
    def twice(x):
        return jnp.sin(x) * x + jnp.sin(x)

    def apart(x):
        first = jnp.sin(x)
        (x,) = lax.optimization_barrier((x,))
        return first + jnp.sin(x)

    assert kernels(lowered(twice, X)).count("sin") == 1
    assert kernels(lowered(apart, X)).count("sin") == 2


def test_a_loop_of_one_round_is_opened():
    def loop(x, length):
        return lax.scan(lambda c, _: (jnp.sin(c), c), x, None, length=length)

    assert kernels(lowered(lambda x: loop(x, 1), X)) == ["sin"]
    assert kernels(lowered(lambda x: loop(x, 2), X)) == ["zeros", "scan"]


def test_an_elementwise_chain_is_one_kernel():
    program = fused(lambda x: jnp.sin(x * 2) + jnp.exp(x), X)
    assert len(program.ops) == 1
    assert program.ops[0].reads == program.inputs


def test_what_a_product_reads_is_stored_and_what_follows_is_fused():
    program = fused(lambda x, w: jnp.sum(jnp.sin(jnp.cos(x) @ w)), X, X)
    assert [op.kind for op in program.ops][-1] is Kind.REDUCE
    assert kernels(program)[:2] == ["cos", "dot_general"]
    assert len([op for op in program.ops if op.kind is Kind.FUSED]) == 1


@functools.cache
def gpt_gradient(chip):
    """The gradient of a GPT without remat, whose layers stand one after another."""
    with use(get_device("h100-80gb")):
        workload = gpt.tiny(batch=64, num_layers=2, scan=False)
        params, batch = workload.params, workload.batch
        return fused(jax.grad(workload.loss_fn), params, batch, chip=chip)


def test_dear_arithmetic_that_several_kernels_read_is_stored():
    stored = kernels(gpt_gradient(H100))
    assert stored.count("tanh") == 2  # of the GELU in each layer
    assert "integer_pow" not in stored


def test_what_passes_between_kernels_is_wide_on_chips_without_bfloat16():
    for chip, size in ((H100, 2), (A100, 4)):
        program = gpt_gradient(chip)
        tanhs = [op.writes[0] for op in program.ops if op.primitive == "tanh"]
        assert [b.bytes for b in tanhs] == 2 * [size * 64 * 128 * 512]
        products = [op for op in program.ops if op.primitive == "dot_general"]
        assert not any(b in tanhs for op in products for b in op.reads)


def test_products_of_few_tiles_are_cut_and_added_up():
    program = fused(lambda x, w: x @ w, of(128, 8192), of(8192, 128))
    assert kernels(program) == ["dot_general", "reduce_sum"]
    parts = split_parts(128, 128, 8192, H100)
    assert parts == 64
    assert program.ops[0].writes[0].bytes == parts * 128 * 128 * 4
    assert kernels(fused(lambda x, w: x @ w, of(4096, 128), of(128, 4096))) == [
        "dot_general"
    ]


def test_a_scatter_into_zeros_goes_into_what_it_is_added_to():
    rows = of(16, 1024)

    def embedding_gradient(x, w, rows):
        other = x @ w
        zeros = jnp.zeros_like(other)
        return other + zeros.at[jnp.arange(16)].add(rows, mode="promise_in_bounds")

    program = fused(embedding_gradient, X, X, rows)
    (update,) = (op for op in program.ops if op.kind is Kind.UPDATE)
    assert update.target in program.ops[0].writes
    assert find_peak(program).worst.bytes < 1.01 * UNIT  # in place


def test_constants_of_one_size_are_made_together():
    def two_loops(x):
        a, ys = lax.scan(lambda c, _: (jnp.sin(c), c), x, None, length=4)
        b, zs = lax.scan(lambda c, _: (jnp.cos(c), c), x, None, length=4)
        return a, b, ys, zs

    program = fused(two_loops, X)
    (zeros,) = (op for op in program.ops if op.primitive == "zeros")
    assert len(zeros.writes) == 2


def test_slices_of_inputs_are_cut_by_their_readers_up_to_a_barrier():
    stack = of(4, 1024, 1024)

    def free(stack):
        return jnp.sin(stack[1])

    def behind(stack):
        layer = stack[1]
        first = jnp.sin(layer)
        (layer,) = lax.optimization_barrier((layer,))
        return first + jnp.sin(layer)

    assert all(op.reads[0].external for op in fused(free, stack).ops)
    assert any(op.primitive == "slice" for op in fused(behind, stack).ops)


# Peaks that one can add up by hand: of 1 MiB arrays.


def test_a_chain_of_products_holds_two():
    moment = peak(lambda x, w: x @ w @ w @ w, X, X)
    assert moment.bytes == 2 * UNIT
    assert moment.at.primitive == "dot_general"


def test_what_is_kept_is_held_to_the_end():
    assert peak(lambda x, w: (x @ w, x @ w @ w, x @ w @ w @ w), X, X).bytes == 3 * UNIT


def test_elementwise_results_are_written_over_what_they_read():
    assert peak(lambda x, w: jnp.sin(x @ w), X, X).bytes == UNIT


def test_a_loop_holds_its_stack_and_what_its_body_needs():
    def layer(x, w):
        h = x @ w
        return jnp.sin(h @ w), x

    moment = peak(lambda x, ws: lax.scan(layer, x, ws), X, of(8, 1024, 1024))
    # Carry (a copy of the argument), the stack of eight, and h, h @ w and one slice.
    assert 8 * MIB < moment.bytes <= 13 * UNIT
    assert moment.inner is not None


def test_every_order_runs_each_kernel_after_what_it_waits_for():
    def loss(params, x):
        for w in params:
            x = x + jax.checkpoint(lambda x, w: jnp.tanh(x @ w) @ w)(x, w)
        return jnp.sum(x)

    program = fused(jax.grad(loss), [X] * 5, X)
    waits, _ = _waits(program)
    found = list(orders(program, {}))
    assert len(found) == 3
    for order in found:
        place = {op: i for i, op in enumerate(order)}
        assert sorted(place.values()) == list(range(len(program.ops)))
        for op, earlier in waits.items():
            assert all(place[e] < place[op] for e in earlier)


def test_the_order_of_the_lowest_peak_is_taken():
    def wide(x, w):
        heavy = [(x @ w) * i for i in range(6)]
        return sum(jnp.sum(h @ w) for h in heavy)

    program = fused(wide, X, X)
    best = find_peak(program).worst.bytes
    assert best <= 4 * UNIT


# Whole steps.


def stack_loss(weights, x):
    def layer(x, w):
        h = checkpoint_name(jnp.tanh(x @ w), "hidden")
        return x + h @ w, None

    x, _ = lax.scan(layer, x, weights)
    return jnp.mean(x**2)


WEIGHTS = of(8, 256, 256)
BATCH = of(8192, 256)


def predicted(rule, **options):
    graph = jaxckpt.trace(stack_loss, WEIGHTS, BATCH)
    plan = rule and jaxckpt.plan_from(rule, stack_loss, WEIGHTS, BATCH)
    options = {"optimizer": optax.adam(1e-3)} | options
    return jaxckpt.predict(graph, plan, **options)


def test_arguments_are_counted_exactly():
    weights, batch = 8 * 256 * 256 * 4, 8192 * 256 * 4
    rng, count, step = 8, 4, 4  # of adam and of the train state
    assert predicted(None).argument_bytes == 3 * weights + batch + rng + count + step
    assert predicted(None, optimizer=None).argument_bytes == weights + batch


def test_plans_are_ordered_as_what_they_keep():
    none, hidden, full = (
        predicted(rule).peak_bytes for rule in (None, "save(hidden)", "full")
    )
    assert full < hidden < none
    assert hidden - full >= 7 * 8192 * 256 * 4  # a value of 8 MiB in each layer


def test_larger_groups_can_raise_the_peak_and_prediction_says_so():
    found = {n: predicted(f"every({n})").peak_bytes for n in (1, 2, 4, 8)}
    assert min(found, key=found.__getitem__) == 2
    assert found[8] > found[4] > found[2]


def test_flops_are_those_of_the_graph_under_the_plan():
    none, full = predicted(None), predicted("full")
    assert none.forward_flops == full.forward_flops == 8 * 2 * 2 * 8192 * 256 * 256
    assert (none.recompute_flops, full.recompute_flops) == (0, none.forward_flops // 2)


@pytest.mark.parametrize(("dtype", "share"), [(jnp.bfloat16, 1), (jnp.float32, 2)])
def test_seconds_of_a_large_product_are_those_of_its_arithmetic(dtype, share):
    x, device = of(8192, 8192, dtype=dtype), get_device("h100-80gb")
    rate = device.peak_flops_per_second * device.efficiency / share
    found = predict_step(lambda x: x @ x, x, device=device).step_seconds
    assert found == pytest.approx(2 * 8192**3 / rate)


def test_seconds_of_elementwise_work_are_those_of_its_traffic():
    x, device = of(8192, 8192), get_device("h100-80gb")
    rate = device.memory_bytes_per_second * device.efficiency
    found = predict_step(lambda x: jnp.sin(x) + x, x, device=device).step_seconds
    assert found == pytest.approx(2 * 4 * 8192**2 / rate)


@pytest.mark.aot
@pytest.mark.parametrize("rule", [None, "full", "every(2)"])
def test_peaks_are_those_of_the_compiler(rule):
    plan = rule and jaxckpt.plan_from(rule, stack_loss, WEIGHTS, BATCH)
    fn = plan.apply(stack_loss) if plan else stack_loss
    compiled = jaxckpt.measure(
        fn, WEIGHTS, BATCH, optimizer=optax.adam(1e-3), device="h100-80gb"
    )
    found = predicted(rule)
    assert found.peak_bytes == pytest.approx(compiled.peak_bytes, rel=0.1)
    assert found.argument_bytes == compiled.footprint.argument_bytes
    assert found.recompute_flops == compiled.recompute_flops
    assert found.step_seconds == pytest.approx(compiled.step_seconds, rel=0.5)


def test_phases_are_the_loops_of_the_step_and_holders_say_who():
    found = predicted("full")
    assert len(found.phases) == 2
    assert all(phase.bytes <= found.peak_bytes for phase in found.phases)
    held = sum(size * count for _, size, count in found.holders)
    assert found.argument_bytes + held == found.peak_bytes
    lines = str(predicted("save(hidden)")).splitlines()
    assert lines[0].startswith("peak ") and lines[0].endswith(" MiB, predicted")
    assert any("hidden" in line for line in lines)
    assert set(found.as_json()) >= {"peak_bytes", "host_bytes", "step_seconds"}


def test_a_gradient_alone_returns_its_arrays():
    found = predicted(None, optimizer=None)
    assert found.peak_bytes - found.argument_bytes > 8 * 256 * 256 * 4


def test_offloaded_values_are_host_bytes():
    device, host = predicted("save(hidden)"), predicted("offload(hidden)")
    assert host.host_bytes >= 8 * 8192 * 256 * 4
    assert device.host_bytes == 0
    assert host.peak_bytes < device.peak_bytes


def test_larger_batches_take_more():
    def step_bytes(batch):
        return predict_step(jax.grad(stack_loss), WEIGHTS, of(batch, 256)).peak_bytes

    found = [step_bytes(2**n) for n in range(6, 14)]
    assert all(one < other for one, other in itertools.pairwise(found))


def test_donated_arguments_are_written_over():
    def step(w, x):
        return w - x @ x

    kept = predict_step(step, X, X).peak_bytes
    donated = predict_step(step, X, X, donate_argnums=0).peak_bytes
    assert (kept, donated) == (3 * UNIT, 3 * UNIT)  # the product takes one either way
    assert predict_step(lambda w: w + 1, X, donate_argnums=0).peak_bytes == UNIT
    assert predict_step(lambda w: w + 1, X).peak_bytes == 2 * UNIT


def test_only_losses_of_their_first_argument_have_a_step():
    graph = jaxckpt.trace(stack_loss, WEIGHTS, BATCH, argnums=1)
    with pytest.raises(jaxckpt.WorkloadError, match="argnums=1"):
        jaxckpt.predict(graph)


def test_every_chip_of_the_catalogue_has_numbers():
    chips = {name: Chip.of(device) for name, device in catalog().items()}
    assert {name for name, chip in chips.items() if chip.widens_bfloat16} == {
        "a100-40gb",
        "a100-80gb",
    }
    assert all(3 < chip.operations_per_byte < 60 for chip in chips.values())
    assert Chip.of(get_device("attached")) == Chip()


ODD = {
    "cond": lambda x: lax.cond(x[0, 0] > 0, lambda x: x @ x @ x, lambda x: x, x),
    "while": lambda x: lax.while_loop(lambda c: c[0, 0] < 9, lambda c: c @ c + 1, x),
    "fori": lambda x: lax.fori_loop(0, 5, lambda i, c: jnp.sin(c @ c), x),
    "sort": lambda x: jnp.sort(x, axis=0) @ x,
    "keys": lambda x: x * jax.random.bernoulli(jax.random.key(0), 0.5, x.shape),
    "custom_vjp": lambda x: jax.nn.dot_product_attention(
        *[x.reshape(1, 1024, 16, 64)] * 3
    ),
    "associative_scan": lambda x: lax.associative_scan(jnp.add, x),
    "empty": lambda x: x[:0],
    "integers": lambda x: jnp.argmax(x, axis=1),
    "callback": lambda x: jax.pure_callback(np.sin, x, x),
    "constant": lambda x: x + np.ones((1024, 1024), np.float32),
    "nothing": lambda x: 3.0,
    "unchanged": lambda x: x,
}


@pytest.mark.parametrize("name", ODD)
def test_odd_programs_are_predicted(name):
    found = predict_step(ODD[name], X)
    assert found.peak_bytes >= found.argument_bytes == UNIT
    assert found.peak_bytes < 80 * MIB


def test_the_cost_of_a_scanned_stack_does_not_grow_with_depth():
    def count(layers):
        graph = fused(jax.grad(stack_loss), of(layers, 256, 256), BATCH)
        return sum(1 for _ in graph.kernels())

    assert count(4) == count(96)
