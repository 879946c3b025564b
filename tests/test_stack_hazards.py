"""Hazards from public reports, for stacks of layers under a schedule."""

import functools

import chex
import flax.serialization
import helpers
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn
from flax import nnx
from helpers import SCHEDULES, interpret

import jaxckpt
from jaxckpt import Keep, Segment, Stack, _jax, tree
from jaxckpt.graph.advice import warnings_about
from jaxckpt.training.step import train_step_fn

DEPTH = 8
X = helpers.build("function")[1][1]
LIBRARIES = "linen", "nnx"
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:flax")
each_library = pytest.mark.parametrize("library", LIBRARIES)
close = functools.partial(chex.assert_trees_all_close, rtol=1e-4, atol=1e-5)


@pytest.fixture(autouse=True, scope="module")
def _fast():
    with helpers.no_optimizations():
        yield


@functools.cache
def stacked_weights(depth):
    layers = [helpers.weights(seed) for seed in range(depth)]
    return jax.tree.map(lambda *w: jnp.stack(w), *layers)


def build(library, schedule=None, *, depth=DEPTH, dtype="float32", **options):
    """Return `fn(params, x)` of a Stack of the suite's layer, and its parameters."""
    options["schedule"] = schedule
    weights = stacked_weights(depth)
    if library == "linen":
        block = functools.partial(helpers.LinenBlock, dtype)
        module = Stack(block, depth, **options)
        params = {"params": {name: {"kernel": w} for name, w in weights.items()}}
        return module.apply, params
    block = functools.partial(helpers.NNXBlock, dtype)
    module = nnx.eval_shape(lambda: Stack(block, depth, rngs=nnx.Rngs(0), **options))
    for name, w in weights.items():
        getattr(module.layers, name).kernel.set_value(w)
    graphdef, state = nnx.split(module)
    return lambda state, x: nnx.merge(graphdef, state)(x), state


def loss_of(library, schedule=None, **options):
    """Return a scalar function of parameters and input, and the parameters."""
    fn, params = build(library, schedule, **options)
    return lambda params, x: jnp.mean(fn(params, x).astype(jnp.float32) ** 2), params


@functools.cache
def plain_gradients(library, depth=7):
    loss, params = loss_of(library, depth=depth)
    return interpret(jax.value_and_grad(loss), params, X)


# --- 9, 10: remat that does nothing, or harm -----------------------------------------


@pytest.mark.parametrize("schedule", [tree(Segment(Keep(4))), jaxckpt.every(9)])
@pytest.mark.parametrize(("library", "scan"), [("linen", False), ("nnx", True)])
def test_one_segment_round_the_whole_stack_is_said_to_save_nothing(
    library, schedule, scan
):
    loss, params = loss_of(library, schedule, scan=scan, depth=4)
    graph = jaxckpt.trace(loss, params, X)
    notes = jaxckpt.explain(graph).as_json()["notes"]
    assert notes == list(warnings_about(graph))
    assert any("Remat saves nothing here" in note for note in notes)


@pytest.mark.parametrize(
    ("library", "schedule", "scan"),
    [
        *(("linen", s, True) for s in ("none", "every(4)", "full", "nested(4, 2)")),
        ("nnx", "every(4)", True),
        ("linen", "every(4)", False),
    ],
)
def test_schedule_that_saves_something_gets_no_note(library, schedule, scan):
    loss, params = loss_of(library, schedule, scan=scan)
    graph = jaxckpt.trace(loss, params, X)
    assert warnings_about(graph) == ()
    assert "saves nothing here" not in str(jaxckpt.explain(graph).as_json())


def kept_bytes(graph):
    """Bytes of the floating-point residuals that are not arguments."""
    kept = (r for r in graph.residuals if not r.argument and "float" in r.dtype)
    return sum(r.bytes for r in kept)


@each_library
def test_checkpoint_round_a_stack_is_told_to_go_inside(library):
    loss, params = loss_of(library)
    graph = jaxckpt.trace(jax.checkpoint(loss), params, X)
    notes = jaxckpt.explain(graph).as_json()["notes"]
    assert any("Put it inside the scan" in note for note in notes)
    assert any("Remat saves nothing here" in note for note in notes)


@each_library
def test_remat_inside_the_stack_keeps_less_than_round_it(library):
    loss, params = loss_of(library)
    outside = jaxckpt.trace(jax.checkpoint(loss), params, X)
    loss, params = loss_of(library, "full")
    inside = jaxckpt.trace(loss, params, X)
    # Each layer's input, and the output that the loss squares.
    assert kept_bytes(inside) == (DEPTH + 1) * X.nbytes
    assert outside.residual_bytes == 0
    assert outside.regions[0].transient_bytes > 2 * inside.residual_bytes


# --- 11: any remainder ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("library", "schedule"),
    [("linen", "every(3)"), ("nnx", "every(5)"), ("linen", "nested(3, 2)")],
)
def test_segments_that_do_not_divide_the_depth_work(library, schedule):
    loss, params = loss_of(library, schedule, depth=7)
    got = interpret(jax.value_and_grad(loss), params, X)
    close(got, plain_gradients(library))
    graph = jaxckpt.trace(loss, params, X)
    inputs = len(jaxckpt.parse_schedule(schedule).nodes(7))
    # The first is the argument in some; the loss squares its own input.
    assert inputs <= kept_bytes(graph) // X.nbytes <= inputs + 1


# --- 12, 13: the order of memory -----------------------------------------------------


@functools.cache
def temp_bytes(schedule):
    """Bytes that the compiled gradient needs besides its arguments and results."""
    # Before 0.11 JAX drops barriers on CPU: there only loops save anything.
    form = "scan" if _jax.version() < (0, 11) else None
    loss, params = loss_of("linen", schedule, depth=16, form=form)
    x = jax.ShapeDtypeStruct((32, 32, helpers.WIDTH), "float32")
    compiled = jax.jit(jax.grad(loss)).lower(params, x).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def test_none_per_layer_and_nested_need_less_memory_in_that_order():
    sizes = [temp_bytes(schedule) for schedule in ("none", "full", "nested(4, 4)")]
    assert sizes[0] > 2 * sizes[1]
    assert sizes[1] > sizes[2]


def test_larger_segments_keep_less_and_may_need_more():
    kept, peaks = [], []
    for schedule in ("full", "every(4)", "every(16)"):
        loss, params = loss_of("linen", schedule, depth=16)
        kept.append(jaxckpt.trace(loss, params, X).residual_bytes)
        peaks.append(temp_bytes(schedule))
    assert kept == sorted(kept, reverse=True)
    assert len(set(kept)) == 3
    assert peaks[0] < peaks[1] < peaks[2]


# --- 22: one tree, one set of numbers ------------------------------------------------


@each_library
@pytest.mark.parametrize(
    ("schedule", "scan"), [("every(3)", True), ("uniform(save(out_proj))", False)]
)
def test_weights_saved_under_one_schedule_load_under_another(library, schedule, scan):
    fn, params = build(library, "none")
    other, template = build(library, schedule, scan=scan)
    if library == "linen":
        saved = flax.serialization.to_bytes(params)
        zeros = jax.tree.map(jnp.zeros_like, template)
        loaded = flax.serialization.from_bytes(zeros, saved)
    else:
        loaded = jax.tree.map(jnp.zeros_like, template)
        nnx.replace_by_pure_dict(loaded, nnx.to_pure_dict(params))
    got = interpret(other, loaded, X)
    chex.assert_trees_all_close(got, interpret(fn, params, X), rtol=1e-6, atol=1e-6)


def test_schedule_and_form_leave_no_name_in_the_tree():
    class Model(nn.Module):
        schedule: str
        scan: bool = True

        @nn.compact
        def __call__(self, x):
            for _ in range(2):
                block = helpers.LinenBlock
                x = Stack(block, 3, schedule=self.schedule, scan=self.scan)(x)
            return x

    shapes = [
        jax.eval_shape(Model(schedule, scan).init, jax.random.key(0), X)
        for schedule, scan in (("none", True), ("full", True), ("every(2)", False))
    ]
    assert shapes[0] == shapes[1] == shapes[2]
    assert len(shapes[0]["params"]) == 2


# --- 23: once, and equal -------------------------------------------------------------


class Stateful(nn.Module):
    """A layer with a mask, statistics, a counter and a cache."""

    @nn.compact
    def __call__(self, x, train: bool = True):
        cache = self.variable("cache", "last", jnp.zeros, x.shape)
        calls = self.variable("counters", "calls", lambda: jnp.zeros((), jnp.int32))
        hidden = nn.Dense(x.shape[-1])(x + cache.value)
        hidden = nn.BatchNorm(use_running_average=not train)(hidden)
        hidden = nn.Dropout(0.5, deterministic=not train)(jnp.tanh(hidden))
        cache.value, calls.value = hidden, calls.value + 1
        return x + nn.Dense(x.shape[-1])(jnp.sin(hidden))


class StatefulNNX(nnx.Module):
    """The same for nnx."""

    def __init__(self, *, rngs):
        self.first = nnx.Linear(helpers.WIDTH, helpers.WIDTH, rngs=rngs)
        self.norm = nnx.BatchNorm(helpers.WIDTH, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.second = nnx.Linear(helpers.WIDTH, helpers.WIDTH, rngs=rngs)
        self.last = nnx.Cache(jnp.zeros(X.shape))
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        hidden = self.drop(jnp.tanh(self.norm(self.first(x + self.last[...]))))
        self.last[...] = hidden
        self.calls[...] += 1
        return x + self.second(jnp.sin(hidden))


def _two_steps_linen(schedule, scan):
    module = Stack(Stateful, 3, schedule=schedule, scan=scan)
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}

    def steps(variables):
        params, state = variables["params"], dict(variables)
        del state["params"]
        for step in range(2):

            def loss(params, state=state, step=step):
                out, state = module.apply(
                    {"params": params, **state},
                    X,
                    rngs={"dropout": jax.random.key(step)},
                    mutable=["cache", "counters", "batch_stats"],
                )
                return jnp.mean(out**2), state

            gradients, state = jax.grad(loss, has_aux=True)(params)
            params = jax.tree.map(lambda p, g: p - g / 10, params, gradients)
        return params, state

    params, state = interpret(steps, interpret(lambda: module.init(keys, X)))
    return params, state, state["counters"]["calls"] - 1  # once by init itself


def _two_steps_nnx(schedule, scan):
    module = Stack(StatefulNNX, 3, schedule=schedule, scan=scan, rngs=nnx.Rngs(0))
    graphdef, params, state = nnx.split(module, nnx.Param, ...)

    def steps(params, state):
        for _ in range(2):

            def loss(params, state=state):
                merged = nnx.merge(graphdef, params, state, copy=True)
                value = jnp.mean(merged(X) ** 2)
                return value, nnx.split(merged, nnx.Param, ...)[2]

            gradients, state = jax.grad(loss, has_aux=True)(params)
            params = jax.tree.map(lambda p, g: p - g / 10, params, gradients)
        states = nnx.merge(graphdef, params, state)
        return nnx.state(states, nnx.Not(nnx.RngKey)).to_pure_dict()

    after = interpret(steps, params, state)
    return after, None, after["layers"]["drop"]["rngs"]["count"]


TWO_STEPS = {"linen": _two_steps_linen, "nnx": _two_steps_nnx}
_plain_steps = functools.cache(lambda library: TWO_STEPS[library]("none", True))


@each_library
@pytest.mark.parametrize(
    ("schedule", "scan"),
    [("full", True), ("every(2)", True), ("every(2)", False)],
)
def test_masks_statistics_caches_and_counters_change_once_and_equally(
    library, schedule, scan
):
    got = TWO_STEPS[library](schedule, scan)
    close(got, _plain_steps(library))
    assert got[2].tolist() == [2] * 3


# --- 24: partitioning metadata -------------------------------------------------------


@pytest.mark.parametrize("schedule", ["none", "every(3)", "full", "mixed"])
def test_logical_axes_become_shardings_of_stacked_parameters(schedule):
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            init = nn.initializers.normal(0.1)
            shape = (helpers.WIDTH, helpers.WIDTH)
            wi, wo = (
                self.param(n, nn.with_logical_partitioning(init, axes), shape)
                for n, axes in (("wi", ("embed", "mlp")), ("wo", ("mlp", "embed")))
            )
            up = helpers.named(jnp.tanh(x @ wi), "up")
            x = x + jnp.sin(helpers.named(up * up, "down") @ wo)
            return nn.with_logical_constraint(x, ("batch", None, "embed"))

    rules = (("batch", "data"), ("embed", None), ("mlp", "model"), ("layers", None))
    kinds = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((1, 1), ("data", "model"), axis_types=kinds)
    module = Stack(
        Block,
        DEPTH,
        schedule=SCHEDULES.get(schedule, schedule),
        partition_name="layers",
    )
    shapes = jax.eval_shape(module.init, jax.random.key(0), X)
    logical = nn.get_partition_spec(shapes)
    assert tuple(logical["params"]["wi"]) == ("layers", "embed", "mlp")
    shardings = nn.logical_to_mesh_sharding(logical, mesh, rules)
    assert tuple(shardings["params"]["wo"].spec) == (None, "model", None)
    with jax.set_mesh(mesh), nn.logical_axis_rules(rules):
        fn = jax.grad(lambda v: jnp.sum(nn.unbox(module.apply(v, X)) ** 2))
        lowered = jax.jit(fn, in_shardings=(shardings,)).lower(shapes)
        assert lowered.out_info["params"]["wi"].value.shape == (DEPTH, 8, 8)


# --- 26: every policy, in every way --------------------------------------------------


@functools.cache
def _train(library, schedule, dtype, accumulate, scan):
    loss, params = loss_of(library, schedule, dtype=dtype, depth=2, scan=scan)
    optimizer = optax.sgd(0.1)
    step = train_step_fn(loss, optimizer, accumulate=accumulate)

    def run(params, x):
        state = jaxckpt.TrainState.create(params, optimizer, jax.random.key(0))
        state, metrics = step(state, x)
        return state.params, metrics["loss"], metrics["grad_norm"]

    return interpret(run, params, X)


ON_DEVICE = [p for p in helpers.POLICIES if "offload" not in p]


@pytest.mark.parametrize(
    ("library", "policy", "dtype", "accumulate", "scan"),
    [
        *(("linen", policy, "float32", 1, True) for policy in ON_DEVICE[1::2]),
        *(("linen", policy, "float32", 2, False) for policy in ON_DEVICE[2::5]),
        ("linen", "dots_no_batch", "bfloat16", 1, True),
        ("nnx", "save(out_proj)", "bfloat16", 2, True),
    ],
)
def test_losses_and_updates_are_those_without_remat(
    library, policy, dtype, accumulate, scan
):
    schedule = jaxckpt.schedule.combine(policy, None)
    got = _train(library, schedule, dtype, accumulate, scan)
    wanted = _train(library, None, dtype, accumulate, True)
    tolerance = 2e-2 if dtype == "bfloat16" else 1e-5
    chex.assert_trees_all_close(got, wanted, rtol=tolerance, atol=tolerance)
    chex.assert_tree_all_finite(got)
    assert got[2] > 0


@each_library
@pytest.mark.parametrize("form", [True, False], ids=["scan", "unrolled"])
def test_offloaded_values_of_each_layer_are_in_host_memory_by_their_type(library, form):
    policy = "offload(out_proj) | save(mlpwi_0)"
    loss, params = loss_of(library, jaxckpt.uniform(policy), scan=form)
    residuals = jaxckpt.trace(loss, params, X).residuals
    on_host = [r for r in residuals if r.decision == "offload"]
    assert sum(r.bytes for r in on_host) == DEPTH * X.nbytes


# --- 30: nothing leaks, nothing is traced again --------------------------------------


@each_library
def test_live_arrays_stay_constant_over_steps(library):
    loss, params = loss_of(library, "every(3)", depth=4)
    params = jax.tree.map(jnp.array, params)
    traces = []

    def counted(params, x):
        traces.append(1)
        return loss(params, x)

    optimizer = optax.adam(1e-3)
    step = jaxckpt.make_train_step(counted, optimizer)
    state = jaxckpt.TrainState.create(params, optimizer, jax.random.key(0))
    del params
    live, x = [], jnp.array(X)
    for _ in range(20):
        state, metrics = step(state, x)
        live.append(len(jax.live_arrays()))
    assert len(set(live[1:])) == 1
    assert jnp.isfinite(metrics["loss"])
    assert len(traces) == 1


@pytest.mark.parametrize("scan", [True, False])
def test_shared_stack_traces_its_block_once_for_each_call(scan):
    calls = []

    class Counted(nn.Module):
        @nn.compact
        def __call__(self, x):
            calls.append(1)
            return x + nn.Dense(helpers.WIDTH)(jnp.tanh(x))

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            shared = Stack(Counted, DEPTH, schedule="every(3)", scan=scan)
            return jnp.sum(shared(shared(x)) ** 2)

    variables = jax.eval_shape(Model().init, jax.random.key(0), X)
    calls.clear()
    jax.make_jaxpr(jax.grad(Model().apply))(variables, X)
    assert len(calls) == 2


@each_library
@pytest.mark.parametrize(
    ("schedule", "scan"), [("every(3)", True), ("full", False), ("uniform(dots)", True)]
)
def test_eval_step_carries_no_remat_cost(library, schedule, scan):
    fn, params = build(library, schedule, scan=scan)
    plain, _ = build(library, "none", scan=scan)
    lowered = jax.jit(fn).lower(params, X).as_text()
    assert "optimization_barrier" not in lowered
    programs = [jax.make_jaxpr(f)(params, X) for f in (fn, plain)]
    products = [helpers.count(p) for p in programs]
    assert products[0] == products[1] == 9 * DEPTH
