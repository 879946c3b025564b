"""`Stack` of linen layers: one tree and one set of numbers under every schedule."""

import functools

import chex
import helpers
import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from helpers import SCHEDULES, interpret, named

import jaxckpt
from jaxckpt import Stack
from jaxckpt.errors import PolicyError, ScheduleError, WorkloadError

DEPTH = 5
X = jax.random.normal(jax.random.key(1), (3, 4))
KEYS = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
FEW = "none", "every(2)", "remat_every(3, save(up))", "mixed"
each_schedule = pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
each_way = pytest.mark.parametrize(
    ("schedule", "scan"),
    [*((s, True) for s in SCHEDULES), *((s, False) for s in FEW)],
)
MOST = "none", "full", "nested(2, 2)"
most_ways = pytest.mark.parametrize(
    ("schedule", "scan"), [(s, True) for s in (*MOST, *FEW[1:])] + [("mixed", False)]
)
few_ways = pytest.mark.parametrize(
    ("schedule", "scan"), [(s, scan) for s in FEW[1:] for scan in (True, False)]
)
close = functools.partial(chex.assert_trees_all_close, rtol=1e-5, atol=1e-5)


@pytest.fixture(autouse=True, scope="module")
def _fast():
    with helpers.no_optimizations():
        yield


class Plain(nn.Module):
    """A layer that only computes."""

    features: int = 6

    @nn.compact
    def __call__(self, x):
        up = named(jnp.tanh(nn.Dense(self.features, name="wi")(x)), "up")
        down = named(nn.Dense(4, name="wo")(up), "down")
        return x + jnp.sin(down)


class Busy(nn.Module):
    """All that a linen layer can do besides computing."""

    @nn.compact
    def __call__(self, x, train: bool = False, *, scale: float = 1.0):
        up = named(nn.Dense(6, name="wi")(x), "up")
        up = nn.BatchNorm(use_running_average=not train, name="norm")(up)
        up = nn.Dropout(0.5, deterministic=not train)(jnp.tanh(up))
        self.sow("intermediates", "up", up)
        calls = self.variable("counters", "calls", lambda: jnp.zeros((), jnp.int32))
        if not self.is_initializing():
            calls.value += 1
        down = named(nn.Dense(4, name="wo")(up), "down")
        return x + scale * jnp.sin(down)


def stack(schedule="none", block=Plain, depth=DEPTH, **options):
    return Stack(block, depth, schedule=SCHEDULES.get(schedule, schedule), **options)


@functools.cache
def variables_of(block=Plain, depth=DEPTH):
    """Return the initial variables without the scheduler's part in it."""
    return interpret(lambda keys: stack(block=block, depth=depth).init(keys, X), KEYS)


def layer_of(variables, i):
    return jax.tree.map(lambda v: v[i], variables)


# --- The tree ------------------------------------------------------------------------


@each_way
def test_parameters_are_one_tree_whatever_the_schedule(schedule, scan):
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return stack(schedule, Busy, scan=scan, name="layers")(x)

    variables = jax.eval_shape(Model().init, KEYS, X)
    one = jax.eval_shape(Busy().init, KEYS, X)
    stacked = {
        collection: {
            "layers": jax.tree.map(
                lambda v: jax.ShapeDtypeStruct((DEPTH, *v.shape), v.dtype), tree
            )
        }
        for collection, tree in one.items()
    }
    assert variables == stacked
    assert variables["params"]["layers"]["wi"]["kernel"].shape == (DEPTH, 4, 6)


@pytest.mark.parametrize(("schedule", "scan"), [("mixed", True), ("every(2)", False)])
def test_initial_values_do_not_depend_on_the_schedule(schedule, scan):
    module = stack(schedule, Busy, scan=scan)
    got = interpret(lambda keys: module.init(keys, X), KEYS)
    chex.assert_trees_all_equal(got, variables_of(Busy))


def test_each_layer_has_initial_values_of_its_own():
    kernel = variables_of(Busy)["params"]["wi"]["kernel"]
    assert len({float(k[0, 0]) for k in kernel}) == DEPTH


def test_unnamed_and_shared_stacks_are_named_and_shared_as_any_module():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            for _ in range(2):
                x = stack("every(2)", Busy)(x, True)
            shared = stack("every(2)", Busy, name="shared")
            return shared(shared(x, True), True)

    variables = jax.eval_shape(Model().init, KEYS, X)
    names = set(variables["params"])
    assert len(names) == 3 and "shared" in names
    variables = interpret(Model().init, KEYS, X)
    _, changed = interpret(
        lambda v, key: Model().apply(v, X, rngs={"dropout": key}, mutable=True),
        variables,
        KEYS["dropout"],
    )
    calls = {n: v["calls"].tolist() for n, v in changed["counters"].items()}
    assert calls.pop("shared") == [2] * DEPTH
    assert list(calls.values()) == [[1] * DEPTH] * 2


@pytest.mark.parametrize(
    "block",
    [
        functools.partial(Plain, features=5),
        functools.partial(Plain, 5),
        Plain(5, parent=None),
        Plain(features=5),
    ],
    ids=["keyword", "position", "instance", "with parent"],
)
def test_block_is_given_in_any_way(block):
    class Other(nn.Module):
        features: int = 5

        @nn.compact
        def __call__(self, x):
            return Plain.__call__(self, x)

    wanted = interpret(lambda: stack(block=Other).init(KEYS, X))
    assert wanted["params"]["wi"]["kernel"].shape == (DEPTH, 4, 5)
    got = interpret(lambda: stack("every(2)", block).init(KEYS, X))
    chex.assert_trees_all_equal(got, wanted)


def test_block_instance_inside_a_module_is_no_submodule_of_its_own():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return stack("every(2)", Plain(parent=None), name="layers")(x)

    class Setup(nn.Module):
        def setup(self):
            self.layers = stack("every(2)", Plain)

        def __call__(self, x):
            return self.layers(x)

    shapes = [jax.eval_shape(m.init, KEYS, X) for m in (Model(), Setup())]
    assert shapes[0] == shapes[1]
    assert set(shapes[0]["params"]) == {"layers"}


# --- The numbers ---------------------------------------------------------------------


@each_way
def test_weights_of_one_schedule_give_the_same_under_any(schedule, scan):
    variables = variables_of()

    def outputs(params):
        return jnp.sum(module.apply({"params": params}, X) ** 2)

    def by_hand(params):
        x = X
        for i in range(DEPTH):
            x = Plain().apply({"params": layer_of(params, i)}, x)
        return jnp.sum(x**2)

    module = stack(schedule, scan=scan)
    got = interpret(jax.value_and_grad(outputs), variables["params"])
    close(got, _cached(by_hand, variables["params"]))


_by_hand = {}


def _cached(fn, *args):
    if fn.__qualname__ not in _by_hand:
        _by_hand[fn.__qualname__] = interpret(jax.value_and_grad(fn), *args)
    return _by_hand[fn.__qualname__]


def _train(module, variables, key):
    """Return loss, the variables that changed, and gradients of the parameters."""
    rest = {name: v for name, v in variables.items() if name != "params"}

    def loss(params):
        out, changed = module.apply(
            {"params": params, **rest},
            X,
            True,
            scale=0.5,
            rngs={"dropout": key},
            mutable=["batch_stats", "intermediates", "counters"],
        )
        return jnp.sum(out**2), changed

    return jax.value_and_grad(loss, has_aux=True)(variables["params"])


def _trained(schedule, scan):
    variables = variables_of(Busy)
    module = stack(schedule, Busy, scan=scan)
    fn = functools.partial(_train, module, variables)
    return interpret(fn, jax.random.key(2))


_trained_plain = functools.cache(functools.partial(_trained, "none", True))


@most_ways
def test_masks_statistics_sown_values_and_counters_are_the_same(schedule, scan):
    got, wanted = _trained(schedule, scan), _trained_plain()
    close(got, wanted)
    (_, changed), _ = got
    assert changed["counters"]["calls"].tolist() == [1] * DEPTH
    mask = changed["intermediates"]["up"][0] == 0
    chex.assert_trees_all_equal(mask, wanted[0][1]["intermediates"]["up"][0] == 0)


def test_each_layer_draws_masks_and_keeps_statistics_of_its_own():
    (_, changed), _ = _trained_plain()
    masks = changed["intermediates"]["up"][0] == 0
    assert masks.shape == (DEPTH, 3, 6)
    assert 0.2 < jnp.mean(masks) < 0.8
    assert len({m.tobytes() for m in map(jax.device_get, masks)}) == DEPTH
    means = changed["batch_stats"]["norm"]["mean"]
    assert len({float(m[0]) for m in means}) == DEPTH


@pytest.mark.parametrize(("schedule", "scan"), [("every(2)", True), ("full", False)])
def test_cache_advances_as_in_layers_by_hand(schedule, scan):
    class Decoder(nn.Module):
        @nn.compact
        def __call__(self, x):
            heads = nn.MultiHeadDotProductAttention(2, decode=True, name="attention")
            return x + jnp.sin(heads(x))

    def tokens(variables, apply):
        found = []
        for step in range(2):
            out, cache = apply(variables, X[None, step : step + 1])
            variables = variables | cache
            found.append(out)
        return found, variables["cache"]

    def by_hand(variables, x):
        caches = []
        for i in range(3):
            layer = layer_of(variables, i)
            x, changed = Decoder().apply(layer, x, mutable=["cache"])
            caches.append(changed["cache"])
        return x, {"cache": jax.tree.map(lambda *c: jnp.stack(c), *caches)}

    module = stack(schedule, Decoder, 3, scan=scan)
    variables = interpret(lambda: module.init(KEYS, jnp.ones((1, 3, 4))))
    apply = functools.partial(module.apply, mutable=["cache"])
    got = interpret(lambda v: tokens(v, apply), variables)
    close(got, interpret(lambda v: tokens(v, by_hand), variables))
    assert got[1]["attention"]["cache_index"].tolist() == [2] * 3


@pytest.mark.parametrize(("schedule", "scan"), [("mixed", True), ("every(2)", False)])
def test_intermediates_are_captured_with_an_axis_of_layers(schedule, scan):
    module = stack(schedule, scan=scan)
    out, captured = interpret(
        lambda v: module.apply(v, X, capture_intermediates=True), variables_of()
    )
    found = captured["intermediates"]
    assert found["wi"]["__call__"][0].shape == (DEPTH, 3, 6)
    x = X
    for i in range(DEPTH):
        layer = layer_of(variables_of(), i)
        up = nn.Dense(6).apply({"params": layer["params"]["wi"]}, x)
        close(found["wi"]["__call__"][0][i], up)
        x = Plain().apply(layer, x)
    close(out, x)


# --- Carries, outputs and arguments --------------------------------------------------


class Trees(nn.Module):
    """A layer with a carry of a given kind, and an output or none."""

    kind: str = "dict"
    output: bool = True

    @nn.compact
    def __call__(self, carry, shift, *, sign):
        x, step = (carry["x"], carry["i"]) if self.kind == "dict" else carry
        x = x + sign * jnp.sin(nn.Dense(4)(x + shift))
        carry = {"x": x, "i": step + 1} if self.kind == "dict" else (x, step + 1)
        return (carry, {"mean": jnp.mean(x), "i": step}) if self.output else carry


@pytest.mark.parametrize("kind", ["dict", "tuple"])
@pytest.mark.parametrize("output", [True, False])
@pytest.mark.parametrize("scan", [True, False])
def test_carry_is_any_tree_and_outputs_are_stacked(kind, output, scan):
    carry = {"x": X, "i": jnp.int32(0)} if kind == "dict" else (X, jnp.int32(0))
    shift = jnp.ones(4)
    block = functools.partial(Trees, kind, output)
    module = stack("every(2)", block, scan=scan)
    variables = interpret(lambda: module.init(KEYS, carry, shift, sign=-1))

    def loss(variables, shift, module=module):
        result = module.apply(variables, carry, shift, sign=-1)
        floats = [v for v in jax.tree.leaves(result) if v.dtype == jnp.float32]
        return sum(jnp.sum(v**2) for v in floats), result

    gradient = jax.grad(loss, argnums=(0, 1), has_aux=True)
    got = interpret(gradient, variables, shift)
    plain = functools.partial(loss, module=stack("none", block))
    wanted = interpret(jax.grad(plain, argnums=(0, 1), has_aux=True), variables, shift)
    close(got, wanted)
    after, outputs = got[1] if output else (got[1], None)
    assert jax.tree.structure(after) == jax.tree.structure(carry)
    assert int(after["i"] if kind == "dict" else after[1]) == DEPTH
    if output:
        assert outputs["i"].tolist() == list(range(DEPTH))
        assert outputs["mean"].shape == (DEPTH,)


@few_ways
def test_flags_are_static_by_position_by_keyword_and_by_default(schedule, scan):
    module = stack(schedule, Busy, scan=scan)
    variables = variables_of(Busy)

    def apply(*args, **kwargs):
        program = jax.make_jaxpr(
            lambda v, key: module.apply(
                v, X, *args, **kwargs, rngs={"dropout": key}, mutable=True
            )
        )(variables, KEYS["dropout"])
        return helpers.count(program, "random_bits")

    assert apply(True) == apply(train=True) == apply(True, scale=2.0) > 0
    assert apply() == apply(False) == apply(train=False) == 0


# --- Partitioning metadata -----------------------------------------------------------


class Partitioned(nn.Module):
    """A layer whose parameters say where they go."""

    logical: bool = False

    @nn.compact
    def __call__(self, x):
        init = nn.initializers.normal(0.1)
        wrap = nn.with_logical_partitioning if self.logical else nn.with_partitioning
        w = self.param("w", wrap(init, ("embed", "mlp")), (4, 6))
        out = self.param("out", init, (6, 4))
        assert w.shape == (4, 6)
        return x + named(jnp.tanh(x @ w), "up") @ out


@pytest.mark.parametrize("logical", [False, True])
@pytest.mark.parametrize("scan", [True, False])
@pytest.mark.parametrize("name", ["layers", None])
def test_partitioning_metadata_names_the_layer_axis(logical, scan, name):
    block = functools.partial(Partitioned, logical)
    module = stack("every(2)", block, scan=scan, partition_name=name)
    variables = jax.eval_shape(module.init, KEYS, X)
    spec = nn.get_partition_spec(variables)["params"]
    assert tuple(spec["w"]) == (name, "embed", "mlp")
    assert tuple(spec["out"]) == ()
    boxed = interpret(lambda: module.init(KEYS, X))
    assert boxed["params"]["w"].value.shape == (DEPTH, 4, 6)

    def loss(variables, module):
        return jnp.sum(module.apply(variables, X) ** 2)

    got, wanted = (
        interpret(jax.grad(functools.partial(loss, module=m)), boxed)
        for m in (module, stack("none", block, partition_name=name))
    )
    close(nn.unbox(got), nn.unbox(wanted))
    assert isinstance(got["params"]["w"], nn.Partitioned)
    assert got["params"]["w"].names == (name, "embed", "mlp")


def test_tabulate_shows_the_parameters_of_all_layers():
    plain = {"force_terminal": False, "width": 200}
    table = stack("every(2)").tabulate(KEYS, X, console_kwargs=plain)
    assert f"float32[{DEPTH},4,6]" in table
    total = DEPTH * (4 * 6 + 6 + 6 * 4 + 4)
    assert f"Total Parameters: {total}" in table


# --- One schedule in place of another ------------------------------------------------


def test_use_replaces_the_schedule_also_of_a_function_traced_before():
    module = stack("none")
    compute = jax.jit(jax.grad(lambda v: jnp.sum(module.apply(v, X) ** 2)))

    def forwards():
        program = jax.make_jaxpr(compute)(variables_of())
        return helpers.count(jaxckpt._jax.without_dead_code(program), "tanh")

    plain, lowered = forwards(), compute.lower(variables_of()).as_text()
    assert plain == DEPTH
    with jaxckpt.use("every(2)") as schedule:
        assert schedule == jaxckpt.every(2)
        assert forwards() == jaxckpt.every(2).forwards(DEPTH) == 2 * DEPTH
        assert compute.lower(variables_of()).as_text() != lowered
        with jaxckpt.use(None):
            assert forwards() == plain
        assert forwards() == 2 * DEPTH
    assert forwards() == plain
    assert compute.lower(variables_of()).as_text() == lowered


@each_schedule
@pytest.mark.parametrize("scan", [True, False])
def test_forward_alone_has_no_trace_of_remat(schedule, scan):
    module = stack(schedule, scan=scan)
    shapes = jax.eval_shape(lambda variables: variables, variables_of())
    lowered = jax.jit(module.apply).lower(shapes, X).as_text()
    assert "optimization_barrier" not in lowered


@pytest.mark.parametrize("schedule", FEW)
@pytest.mark.parametrize("scan", [True, False])
def test_layer_is_traced_as_often_for_few_as_for_many(schedule, scan):
    def traces(depth):
        calls = []

        class Counted(nn.Module):
            features: int = 6

            @nn.compact
            def __call__(self, x):
                calls.append(1)
                return Plain.__call__(self, x)

        module = stack(schedule, Counted, depth, scan=scan)
        variables = jax.eval_shape(module.init, KEYS, X)
        calls.clear()
        fn = jax.grad(lambda v: jnp.sum(module.apply(v, X)))
        jax.make_jaxpr(fn)(variables)
        return len(calls)

    assert traces(4) == traces(12) == 1


# --- Errors --------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [0, -1, True])
def test_depth_that_is_no_number_of_layers_is_refused(depth):
    with pytest.raises(WorkloadError, match=f"`num_layers={depth!r}` is not"):
        Stack(Plain, depth)


@pytest.mark.parametrize("schedule", ["every(0)", "every(2", "uniform(svae(up))", 3])
def test_schedule_that_is_none_is_refused_when_the_stack_is_made(schedule):
    with pytest.raises((ScheduleError, PolicyError)):
        Stack(Plain, DEPTH, schedule=schedule)


def test_schedule_for_another_depth_is_refused():
    with pytest.raises(ScheduleError, match="holds 4 layers, and the stack 5"):
        Stack(Plain, 5, schedule=jaxckpt.Keep(4))
    with (
        jaxckpt.use("Keep(4)"),
        pytest.raises(ScheduleError, match="holds 4 layers, and the stack 5"),
    ):
        stack().apply(variables_of(), X)


def test_policy_without_effect_names_the_block():
    module = stack("uniform(save(upp))")
    with pytest.raises(PolicyError, match="`upp`.*of `Plain`.*Did you mean `up`"):
        jax.make_jaxpr(module.apply)(variables_of(), X)


@pytest.mark.parametrize(
    ("block", "options", "message"),
    [
        (3, {}, "`int`, which makes no layers.*Module"),
        (3, {"name": "layers"}, "`int`, which makes no layers"),
        (lambda rngs: None, {}, "needs an `nnx.Rngs`, for instance"),
    ],
)
def test_block_that_makes_no_layers_is_refused(block, options, message):
    with pytest.raises(WorkloadError, match=message):
        Stack(block, DEPTH, **options)


class Wrong(nn.Module):
    """A layer that returns something else than its carry."""

    kind: str

    @nn.compact
    def __call__(self, x):
        y = nn.Dense(4)(x)
        results = {"none": None, "three": (y, y, y), "dict": {"x": y}, "wide": y[:1]}
        return results[self.kind]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("none", "`Wrong` was given a carry.*returned.*next carry"),
        ("three", "`Wrong` was given a carry.*or `.carry, output.`"),
        ("dict", "`Wrong` was given a carry"),
        ("wide", r"`Wrong` changes the type of the carry from `float32\[3,4\]`"),
    ],
)
def test_layer_that_does_not_return_its_carry_is_refused(kind, message):
    module = stack("every(2)", functools.partial(Wrong, kind))
    with pytest.raises(WorkloadError, match=message):
        jax.eval_shape(module.init, KEYS, X)
