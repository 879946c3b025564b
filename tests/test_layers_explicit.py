"""What a stack keeps between the passes, and how it lives with JAX's transforms."""

import functools
import json
import warnings

import chex
import helpers
import jax
import jax.numpy as jnp
import pytest
from helpers import FORMS, PLAIN_SCHEDULES, SCHEDULES, counting_layer, interpret, named

import jaxckpt
from jaxckpt import Keep, Remat, Segment, _jax, run_layers, save, tree
from jaxckpt.schedule_picture import forward_marks

DEPTH = 8
W = jax.random.normal(jax.random.key(0), (DEPTH, 4, 4)) / 2
X = jax.random.normal(jax.random.key(1), (2, 4))
each_form = pytest.mark.parametrize("form", FORMS)
close = functools.partial(chex.assert_trees_all_close, rtol=1e-5, atol=1e-6)
FEW = "every(3)", "uniform(save(up))", helpers.Mixed()


@pytest.fixture(autouse=True, scope="module")
def _fast():
    with helpers.no_optimizations():
        yield


def loss_of(run, body=counting_layer):
    """Return a scalar function of stacked weights and what makes the first carry."""

    def loss(w, x):
        # Not an argument itself: arguments among the residuals cost nothing.
        return jnp.sum(run(body, 2 * x, w)[0])

    return loss


def under(schedule, form="explicit"):
    return functools.partial(run_layers, schedule=schedule, form=form)


def kept(loss, *args):
    """Return the residuals of a loss that are not arguments."""
    residuals = jaxckpt.trace(loss, *args, argnums=None).residuals
    return [r for r in residuals if not r.argument]


# --- What is kept --------------------------------------------------------------------

# Of one layer: its input, and where everything stays also `up`, whose product and
# square read it, what its tanh's derivative reads, and the cosine.
INPUT_BYTES = X.nbytes


@functools.cache
def _layer_bytes():
    """Bytes that plain JAX keeps of one layer."""
    residuals = kept(loss_of(jax.lax.scan), W[:2], X)
    return sum(r.bytes for r in residuals) // 2


@pytest.mark.parametrize("schedule", PLAIN_SCHEDULES.values(), ids=PLAIN_SCHEDULES)
@pytest.mark.parametrize("depth", [1, 5, 8, 13])
def test_kept_are_the_layer_inputs_that_the_picture_draws(schedule, depth):
    weights = jax.ShapeDtypeStruct((depth, 4, 4), "float32")
    marks = forward_marks(schedule.nodes(depth))
    assert schedule.draw(depth).count(marks)
    residuals = kept(loss_of(under(schedule)), weights, X)
    wanted = marks.count("*") * INPUT_BYTES + marks.count("=") * _layer_bytes()
    assert sum(r.bytes for r in residuals) == wanted
    if "=" not in marks:
        inputs = sum(r.bytes // INPUT_BYTES for r in residuals)
        assert inputs == marks.count("*")
        assert {r.shape[-2:] for r in residuals} == {X.shape}


UP, BOTH = save("up"), save("up", "down")


@pytest.mark.parametrize(
    ("nodes", "marks", "named_layers"),
    [
        ([Remat(UP, 3), Keep(2)], "+++==", {"up": 3}),
        ([Remat(UP, 2), Remat(BOTH, 3)], "+++++", {"up": 5, "down": 3}),
        ([Segment(Keep(3), UP), Remat(None, 2)], "+--**", {"up": 3}),
        ([Segment(Keep(2)), Segment(Keep(2), BOTH)], "*.+-", {"up": 2, "down": 2}),
        ([Segment([Remat(BOTH, 2), Keep(1)])], "*..", {}),
        ([Keep(1), Segment([Keep(1), Remat(None, 1)], UP)], "=+-", {"up": 2}),
    ],
    ids=str,
)
def test_policy_values_are_kept_in_the_layers_marked_so_alone(
    nodes, marks, named_layers
):
    schedule = tree(*nodes)
    depth = len(marks)
    assert forward_marks(schedule.nodes(depth)) == marks
    residuals = kept(loss_of(under(schedule)), W[:depth], X)
    inputs = sum(_inputs(node) for node in schedule.nodes(depth))
    count = inputs + sum(named_layers.values())
    wanted = count * INPUT_BYTES + marks.count("=") * _layer_bytes()
    assert sum(r.bytes for r in residuals) == wanted
    if "=" not in marks:
        found = dict.fromkeys(named_layers, 0)
        for r in residuals:
            if r.name in found:
                found[r.name] += r.bytes // INPUT_BYTES
        assert found == named_layers


def _inputs(node):
    """Return of how many of a node's layers the input is kept."""
    return {Keep: 0, Segment: 1}.get(type(node), node.layers)


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_other_forms_keep_as_many_bytes_as_the_explicit_one(schedule):
    explicit, scan, unrolled = (
        sum(r.bytes for r in kept(loss_of(under(schedule, form)), W, X))
        for form in FORMS
    )
    assert explicit <= scan
    assert explicit <= unrolled


@pytest.mark.parametrize("schedule", ["none", "remat_every(2)", "every(2)"])
def test_neither_parameters_nor_casts_of_consts_nor_masks_are_kept(schedule):
    table = jnp.ones((4, 4), jnp.bfloat16)

    def loss(w, x):
        def body(x, layer):
            up = jnp.tanh(x @ layer @ table.astype(x.dtype))
            mask = jnp.tril(jnp.ones((2, 2), bool))
            return x + jnp.where(mask, up @ up.T, -1e9) @ x, None

        return jnp.sum(run_layers(body, 2 * x, w, schedule, form="explicit")[0])

    residuals = kept(loss, W, X)
    assert not [r for r in residuals if r.shape[-2:] == (4, 4)]
    assert not [r for r in residuals if r.dtype == "bool"]
    assert residuals


# --- Frozen inputs -------------------------------------------------------------------


def _lora_loss(run, frozen, lora, x):
    def body(x, layer):
        frozen, lora = layer
        up = named(jnp.tanh(x @ frozen["w"] + x @ lora["a"] @ lora["b"]), "up")
        return x + jnp.sin(named(up * up, "down") @ frozen["out"]), None

    return jnp.sum(run(body, x, (frozen, lora))[0])


@pytest.mark.parametrize(
    ("schedule", "form"),
    [
        *((schedule, "explicit") for schedule in (*FEW, "none")),
        *((FEW[-1], form) for form in FORMS[1:]),
    ],
    ids=str,
)
def test_no_product_computes_a_frozen_weights_gradient(schedule, form):
    weights = W[: DEPTH // 2]
    lora = {"a": weights[:, :, :1], "b": weights[:, :1, :]}
    args = {"w": weights, "out": weights}, lora, X
    run = under(schedule, form)
    backward = {}
    for argnums in (1, (0, 1)):
        loss = functools.partial(_lora_loss, run)
        program = jax.make_jaxpr(jax.grad(loss, argnums=argnums))(*args)
        backward[argnums] = helpers.count(_jax.without_dead_code(program))
    # Of both frozen weights, in each layer.
    assert backward[0, 1] - backward[1] == 2 * len(weights)
    got = interpret(jax.grad(functools.partial(_lora_loss, run), argnums=1), *args)
    plain = functools.partial(_lora_loss, jax.lax.scan)
    close(got, interpret(jax.grad(plain, argnums=1), *args))


@each_form
def test_no_product_computes_the_gradient_of_a_frozen_closed_over_weight(form):
    def products(argnums):
        def loss(shared, w, x):
            body = lambda x, w: (x + jnp.tanh(x @ w) @ shared, None)  # noqa: E731
            return jnp.sum(under("every(2)", form)(body, x, w)[0])

        program = jax.make_jaxpr(jax.grad(loss, argnums=argnums))(W[0], W, X)
        return helpers.count(_jax.without_dead_code(program))

    assert products((0, 1)) - products(1) == DEPTH
    # Unrolled, the first layer's input needs none either.
    assert products((0, 1)) - products(0) in (DEPTH, DEPTH + 1)


# --- Transformations -----------------------------------------------------------------


def _gradient(loss, w, x):
    return jax.grad(loss, argnums=(0, 1))(w, x)


def _of_gradient(loss, w, x):
    """A scalar function of the gradient, differentiated."""

    def squares(w, x):
        return sum(jnp.sum(g**2) for g in _gradient(loss, w, x))

    return jax.grad(squares, argnums=(0, 1))(w, x)


def _hvp(loss, w, x):
    fn = functools.partial(_gradient, loss)
    return jax.jvp(fn, (w, x), (jnp.cos(w), jnp.ones_like(x)))


def _hessian(loss, w, x):
    return jax.hessian(loss, argnums=1)(w, x)


def _vmap(loss, w, x):
    gradients = functools.partial(_gradient, loss)
    ws, xs = jnp.stack([w, 2 * w]), jnp.stack([x, -x])
    every = jax.vmap(gradients)(ws, xs)
    return every, jax.vmap(gradients, in_axes=(None, 0))(w, xs)


def _in_checkpoint(loss, w, x):
    wrapped = jax.checkpoint(lambda w, x: jnp.sin(loss(w, x)))
    return _gradient(wrapped, w, x)


def _in_scan(loss, w, x):
    def twice(w, x):
        step = lambda x, _: (x + loss(w, x), None)  # noqa: E731
        return jnp.sum(jax.lax.scan(step, x, length=2)[0])

    return _gradient(twice, w, x)


def _in_cond(loss, w, x):
    def choose(w, x):
        return jax.lax.cond(x[0, 0] > 100, lambda w, x: jnp.sum(x), loss, w, x)

    return _gradient(choose, w, x)


TRANSFORMS = {
    f.__name__[1:]: f
    for f in (_of_gradient, _hvp, _hessian, _vmap, _in_checkpoint, _in_scan, _in_cond)
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
@pytest.mark.parametrize("schedule", ["every(3)", helpers.Mixed()], ids=str)
def test_transformed_gradients_are_those_of_a_scan(transform, schedule):
    def results(run):
        def loss(w, x):
            x, sums = run(counting_layer, x, w)
            return jnp.sum(x * jnp.cos(x)) + jnp.sum(sums)

        return interpret(functools.partial(transform, loss), W[:4], X)

    chex.assert_trees_all_close(
        results(under(schedule)), results(jax.lax.scan), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("schedule", FEW, ids=str)
def test_compiled_with_donated_weights_gradients_are_those_of_a_scan(schedule):
    def step(loss, w, x):
        value, gradient = jax.value_and_grad(loss)(w, x)
        return w - gradient, value

    wanted = jax.jit(functools.partial(step, loss_of(jax.lax.scan)))(W, X)
    fn = functools.partial(step, loss_of(under(schedule)))
    donated = jnp.array(W)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # donated buffers that are not usable
        got = jax.jit(fn, donate_argnums=0)(donated, X)
    chex.assert_trees_all_close(got, wanted, rtol=1e-3, atol=1e-5)
    assert donated.is_deleted()


SHARDED = """
import functools, json
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import PartitionSpec as P
import helpers, jaxckpt

mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
w = jax.random.normal(jax.random.key(0), (6, 4, 4)) / 2
x = jax.random.normal(jax.random.key(1), (4, 4))

def gradients(run, check):
    def loss(w, x):
        x, sums = run(helpers.counting_layer, x, w)
        return jax.lax.pmean(jnp.sum(x * jnp.cos(x)) + jnp.sum(sums), "data")
    specs = {"in_specs": (P(), P("data")), "out_specs": P(), "check_vma": check}
    fn = jax.shard_map(loss, mesh=mesh, **specs)
    return jax.jit(jax.value_and_grad(fn, argnums=(0, 1)))(w, x)

wanted = gradients(jax.lax.scan, True)
cases = [(None, True), ("explicit", False), ("scan", True), ("unrolled", True)]
errors = {}
for form, check in cases:
    for schedule in ("every(4)", "uniform(save(up))", helpers.Mixed()):
        run = functools.partial(jaxckpt.run_layers, schedule=schedule, form=form)
        pairs = zip(*map(jax.tree.leaves, (gradients(run, check), wanted)))
        error = max(float(abs(a - b).max()) for a, b in pairs)
        errors[f"{schedule} {form} {check}"] = error
print(json.dumps(errors))
"""


def test_inside_shard_map_gradients_are_those_of_a_scan():
    flags = "--xla_force_host_platform_device_count=2"
    errors = json.loads(helpers.run_python(SHARDED, XLA_FLAGS=flags))
    assert len(errors) == 12
    assert max(errors.values()) < 1e-5, errors


# --- Bodies --------------------------------------------------------------------------


def _attention_loss(run, stacked, x):
    body = functools.partial(helpers.function_block, attention=helpers.fused_attend)
    return jnp.sum(run(lambda x, w: (body(w, x), None), x, stacked)[0] ** 2)


RULE_SCHEDULES = {
    "every(2)": 4,
    "Segment(Keep(3), policy=save(context, context_lse)), Keep(1)": 0,
    "Remat(1), Remat(save(context, context_lse), 2), Keep(1)": 1,
}


@pytest.mark.parametrize(("schedule", "again"), RULE_SCHEDULES.items())
def test_body_with_a_backward_rule_of_its_own(schedule, again):
    keys = range(4)
    layers = [helpers.weights(seed) for seed in keys]
    stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *layers)
    x = helpers.build("function")[1][1]
    gradients = [
        jax.grad(functools.partial(_attention_loss, run), argnums=(0, 1))
        for run in (under(schedule), jax.lax.scan)
    ]
    forwards = [
        helpers.count(_jax.without_dead_code(jax.make_jaxpr(fn)(stacked, x)), "log")
        for fn in gradients
    ]
    assert forwards == [4 + again, 4]  # the log-sum-exp of attention's forward rule
    got, wanted = (interpret(fn, stacked, x) for fn in gradients)
    chex.assert_trees_all_close(got, wanted, rtol=1e-4, atol=1e-5)


@each_form
def test_debug_print_prints_once_for_each_run_of_a_layer(form, capsys):
    def body(x, w):
        jax.debug.print("layer {}", w[0])
        return jnp.sin(x * w), None

    def loss(w, x):
        return jnp.sum(run_layers(body, x, w, "every(2)", form=form)[0])

    w = jnp.arange(4.0)[:, None] + jnp.ones((4, 4))
    wanted = jax.grad(lambda w, x: jnp.sum(jax.lax.scan(body, x, w)[0]))(w, X)
    jax.effects_barrier()
    capsys.readouterr()
    close(jax.grad(loss)(w, X), wanted)
    jax.effects_barrier()
    printed = capsys.readouterr().out
    counts = [printed.count(f"layer {i}.0") for i in range(1, 5)]
    assert all(1 <= n <= 3 for n in counts), printed
