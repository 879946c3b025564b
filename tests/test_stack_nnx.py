"""`Stack` of nnx layers: one set of numbers and of states under every schedule."""

import functools

import chex
import helpers
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from helpers import SCHEDULES, interpret, named

import jaxckpt
from jaxckpt import Stack
from jaxckpt.errors import PolicyError, ScheduleError, WorkloadError

DEPTH = 5
X = jax.random.normal(jax.random.key(1), (3, 4))
FEW = "none", "every(2)", "remat_every(3, save(up))", "mixed"
each_way = pytest.mark.parametrize(
    ("schedule", "scan"),
    [*((s, True) for s in SCHEDULES), *((s, False) for s in FEW)],
)
most_ways = pytest.mark.parametrize(
    ("schedule", "scan"),
    [("none", False), ("full", True), ("nested(2, 2)", True), ("mixed", True)],
)
few_ways = pytest.mark.parametrize(
    ("schedule", "scan"), [("mixed", True), ("every(2)", False)]
)
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:flax")
close = functools.partial(chex.assert_trees_all_close, rtol=1e-5, atol=1e-5)


@pytest.fixture(autouse=True, scope="module")
def _fast():
    with helpers.no_optimizations():
        yield


class Plain(nnx.Module):
    """A layer that only computes."""

    def __init__(self, features=6, *, rngs):
        self.wi = nnx.Linear(4, features, rngs=rngs)
        self.wo = nnx.Linear(features, 4, rngs=rngs)

    def __call__(self, x):
        up = named(jnp.tanh(self.wi(x)), "up")
        return x + jnp.sin(named(self.wo(up), "down"))


class Busy(nnx.Module):
    """All that an nnx layer can do besides computing."""

    def __init__(self, *, rngs):
        self.wi = nnx.Linear(4, 6, rngs=rngs)
        self.norm = nnx.BatchNorm(6, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.wo = nnx.Linear(6, 4, rngs=rngs)
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x, *, scale=1.0):
        self.calls[...] += 1
        up = named(self.wi(x), "up")
        up = self.drop(jnp.tanh(self.norm(up)))
        self.sow(nnx.Intermediate, "dropped", up == 0)
        return x + scale * jnp.sin(named(self.wo(up), "down"))


def stack(schedule="none", block=Plain, depth=DEPTH, **options):
    rule = SCHEDULES.get(schedule, schedule)
    return Stack(block, depth, schedule=rule, rngs=nnx.Rngs(0), **options)


def train(schedule, scan, block=Busy, call=lambda stack, **_: stack(X)):
    """Return value, the state after two calls, gradients, and what was sown."""
    module = stack(schedule, block, scan=scan)
    graphdef, params, rest = nnx.split(module, nnx.Param, ...)

    def loss(params, rest):
        merged = nnx.merge(graphdef, params, rest, copy=True)
        capturing = nnx.capture(call, nnx.Intermediate)
        results, sown = zip(
            *(capturing(merged, number=i) for i in range(2)), strict=True
        )
        state = nnx.state(merged, nnx.Not(nnx.RngKey)).to_pure_dict()
        total = sum(jnp.sum(x**2) for x in results)
        return total, (state, [s.to_pure_dict() for s in sown])

    (value, (state, sown)), gradients = interpret(
        jax.value_and_grad(loss, has_aux=True), params, rest
    )
    return value, state, gradients.to_pure_dict(), sown


trained_plain = functools.cache(functools.partial(train, "none", True))


@each_way
def test_layers_are_one_module_with_a_leading_axis_whatever_the_schedule(
    schedule, scan
):
    def state_of(**options):
        return jax.eval_shape(lambda: nnx.state(stack(block=Busy, **options)))

    state = state_of(schedule=schedule, scan=scan)
    assert state == state_of()
    assert state["layers"]["wi"]["kernel"].get_value().shape == (DEPTH, 4, 6)


def test_initial_values_are_those_of_flax_own_stack_and_of_no_schedule():
    @nnx.split_rngs(splits=DEPTH)
    @nnx.vmap
    def make(rngs):
        return Plain(rngs=rngs)

    wanted = nnx.state(make(nnx.Rngs(0)), nnx.Param)
    for schedule in ("none", "mixed"):
        layers = stack(schedule).layers
        chex.assert_trees_all_equal(nnx.state(layers, nnx.Param), wanted)
    assert len({float(k[0, 0]) for k in wanted["wi"]["kernel"][...]}) == DEPTH


@most_ways
def test_masks_statistics_counters_and_rng_counts_are_the_same(schedule, scan):
    got, wanted = train(schedule, scan), trained_plain()
    close(got, wanted)
    chex.assert_trees_all_equal(got[3], wanted[3])
    layers = got[1]["layers"]
    assert layers["calls"].tolist() == [2] * DEPTH
    assert layers["drop"]["rngs"]["count"].tolist() == [2] * DEPTH


def test_states_are_those_of_layers_called_by_hand():
    def by_hand(module, **_):
        x = X
        graphdef, state = nnx.split(module.layers)
        after = []
        for i in range(DEPTH):
            own = jax.tree.map(lambda v, i=i: v[i], state)
            layer = nnx.merge(graphdef, own)
            x = layer(x)
            after.append(nnx.state(layer))
        nnx.update(module.layers, jax.tree.map(lambda *v: jnp.stack(v), *after))
        return x

    close(trained_plain()[:3], train("none", True, call=by_hand)[:3])


def test_each_layer_draws_masks_of_its_own():
    dropped = [sown["layers"]["dropped"][0] for sown in trained_plain()[3]]
    masks = [m.tobytes() for call in dropped for m in jax.device_get(call)]
    assert len(set(masks)) == len(masks) == 2 * DEPTH


@few_ways
def test_rngs_given_as_an_argument_give_each_layer_and_call_other_masks(schedule, scan):
    class Drops(nnx.Module):
        def __init__(self, *, rngs):
            self.wi = nnx.Linear(4, 4, rngs=rngs)
            self.drop = nnx.Dropout(0.5)

        def __call__(self, x, rngs):
            up = self.drop(named(jnp.tanh(self.wi(x)), "up"), rngs=rngs)
            x = x + jnp.sin(named(up * up, "down"))
            return x, up == 0

    def call(module, number):
        return module(X, nnx.Rngs(dropout=number))[0]

    close(train(schedule, scan, Drops, call), train("none", True, Drops, call))
    module, rngs = stack(schedule, Drops, scan=scan), nnx.Rngs(dropout=3)
    drawn = [jax.device_get(module(X, rngs)[1]) for _ in range(2)]
    assert len({m.tobytes() for call in drawn for m in call}) == 2 * DEPTH
    assert int(rngs.dropout.count[...]) == 2


@few_ways
def test_modules_that_a_layer_closes_over_take_part(schedule, scan):
    def loss(shared, wi, rule, way):
        class Closes(Plain):
            def __call__(self, x):
                return super().__call__(jnp.cos(shared(x)))

        module = stack(rule, Closes, scan=way)
        module.layers.wi.kernel[...] = wi
        return jnp.sum(module(X) ** 2)

    shared = nnx.Linear(4, 4, rngs=nnx.Rngs(9))
    wi = stack().layers.wi.kernel[...]
    got, wanted = (
        nnx.value_and_grad(loss, argnums=(0, 1))(shared, wi, rule, way)
        for rule, way in ((schedule, scan), ("none", True))
    )
    close(got, wanted)
    assert all(jnp.any(g != 0) for g in jax.tree.leaves(wanted[1]))


@pytest.mark.parametrize("schedule", ["every(2)"])
def test_nnx_jit_and_grad_update_the_module(schedule):
    @nnx.jit
    def step(module):
        def loss(module):
            return jnp.sum(module(X) ** 2)

        value, gradients = nnx.value_and_grad(loss)(module)
        params = nnx.state(module, nnx.Param)
        nnx.update(module, jax.tree.map(lambda p, g: p - g / 100, params, gradients))
        return value

    module = stack(schedule, Busy, 3)
    values = [float(step(module)) for _ in range(2)]
    assert module.layers.calls[...].tolist() == [2] * 3
    assert module.layers.drop.rngs.count[...].tolist() == [2] * 3
    chex.assert_trees_all_close(values, _values_after_steps(), rtol=1e-4)
    assert values[0] != values[1]


@functools.cache
def _values_after_steps():
    module, found = stack("none", Busy, 3), []
    for _ in range(2):
        value, gradients = nnx.value_and_grad(lambda m: jnp.sum(m(X) ** 2))(module)
        params = nnx.state(module, nnx.Param)
        nnx.update(module, jax.tree.map(lambda p, g: p - g / 100, params, gradients))
        found.append(float(value))
    return found


def test_use_replaces_the_schedule_also_of_a_function_traced_before():
    module = stack("none")
    graphdef, state = nnx.split(module)
    compute = jax.jit(
        jax.grad(lambda state: jnp.sum(nnx.merge(graphdef, state)(X) ** 2))
    )

    def forwards():
        program = jax.make_jaxpr(compute)(state)
        return helpers.count(jaxckpt._jax.without_dead_code(program), "tanh")

    assert forwards() == DEPTH
    with jaxckpt.use("full"):
        assert forwards() == 2 * DEPTH
    assert forwards() == DEPTH


@pytest.mark.parametrize("schedule", FEW)
@pytest.mark.parametrize("scan", [True, False])
def test_forward_alone_has_no_trace_of_remat(schedule, scan):
    graphdef, state = nnx.split(stack(schedule, scan=scan))
    run = jax.jit(lambda state: nnx.merge(graphdef, state)(X))
    assert "optimization_barrier" not in run.lower(state).as_text()


@pytest.mark.parametrize("scan", [True, False])
def test_layer_is_traced_as_often_for_few_as_for_many(scan):
    def traces(depth):
        calls = []

        class Counted(Plain):
            def __call__(self, x):
                calls.append(1)
                return super().__call__(x)

        graphdef, state = nnx.split(stack("every(2)", Counted, depth, scan=scan))
        fn = jax.grad(lambda state: jnp.sum(nnx.merge(graphdef, state)(X)))
        jax.make_jaxpr(fn)(state)
        return len(calls)

    assert traces(4) == traces(12) == 1


def test_carry_is_any_tree_and_outputs_are_stacked():
    class Trees(Plain):
        def __call__(self, carry, shift, *, sign):
            x = super().__call__(carry["x"] + shift) * sign
            return {"x": x, "i": carry["i"] + 1}, (jnp.mean(x), carry["i"])

    module = stack("every(2)", Trees)
    carry = {"x": X, "i": jnp.int32(0)}
    after, (means, numbers) = module(carry, jnp.ones(4), sign=-1)
    assert int(after["i"]) == DEPTH
    assert numbers.tolist() == list(range(DEPTH))
    close(means[-1], jnp.mean(after["x"]))


@pytest.mark.parametrize("name", ["layers", None])
@pytest.mark.parametrize("scan", [True, False])
def test_partitioning_metadata_names_the_layer_axis(name, scan):
    class Partitioned(nnx.Module):
        def __init__(self, *, rngs):
            init = nnx.with_partitioning(nnx.initializers.normal(0.1), ("a", "b"))
            self.w = nnx.Param(init(rngs.params(), (4, 4)))
            self.dense = nnx.Linear(4, 4, kernel_init=init, rngs=rngs)

        def __call__(self, x):
            return x + jnp.sin(self.dense(x) @ self.w[...])

    axes = ("layers", "a", "b")
    kinds = (jax.sharding.AxisType.Auto,) * 3
    with jax.set_mesh(jax.make_mesh((1, 1, 1), axes, axis_types=kinds)):
        module = stack("every(2)", Partitioned, scan=scan, partition_name=name)
        gradients = nnx.grad(lambda module: jnp.sum(module(X) ** 2))(module)
    spec = nnx.get_partition_spec(nnx.state(module))["layers"]["dense"]["kernel"]
    assert tuple(spec.get_value()) == (name, "a", "b")
    spec = nnx.get_partition_spec(gradients)["layers"]["dense"]["kernel"]
    assert tuple(spec.get_value()) == (name, "a", "b")


def test_layer_sees_its_own_partitioning_metadata():
    seen = []

    class Partitioned(nnx.Module):
        def __init__(self, *, rngs):
            init = nnx.initializers.normal(0.1)
            self.w = nnx.Param(init(rngs.params(), (4, 4)), out_sharding=("a", "b"))

        def __call__(self, x):
            seen.append(self.w.out_sharding)
            return x + jnp.sin(x @ self.w[...])

    axes = ("layers", "a", "b")
    kinds = (jax.sharding.AxisType.Auto,) * 3
    with jax.set_mesh(jax.make_mesh((1, 1, 1), axes, axis_types=kinds)):
        module = stack("every(2)", Partitioned, partition_name="layers")
        nnx.eval_shape(lambda module: module(X), module)
    assert seen == [("a", "b")]


@pytest.mark.parametrize("block", [functools.partial(Plain, 5), "lambda"])
def test_block_is_whatever_makes_a_layer_of_rngs(block):
    block = block if block != "lambda" else lambda rngs: Plain(5, rngs=rngs)
    assert stack("every(2)", block).layers.wi.kernel.shape == (DEPTH, 4, 5)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Stack(Plain, 2), WorkloadError, "needs an `nnx.Rngs`"),
        (
            lambda: Stack(Plain(rngs=nnx.Rngs(0)), 2, rngs=nnx.Rngs(0)),
            WorkloadError,
            "makes no layers.*callable that takes `rngs`",
        ),
        (lambda: stack(depth=0), WorkloadError, "`num_layers=0` is not"),
        (lambda: stack(name="layers"), WorkloadError, "`name` is no setting"),
        (lambda: stack("Keep(3)"), ScheduleError, "holds 3 layers, and the stack 5"),
        (lambda: stack("uniform(save(upp))")(X), PolicyError, "`upp`.*of `Plain`"),
    ],
    ids=["no rngs", "an instance", "depth", "linen's", "schedule", "policy"],
)
def test_what_makes_no_stack_is_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_layer_that_does_not_return_its_carry_is_refused():
    class Wrong(Plain):
        def __call__(self, x):
            return x, x, x

    with pytest.raises(WorkloadError, match="`Wrong` was given a carry.*next carry"):
        stack("every(2)", Wrong)(X)
