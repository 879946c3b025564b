"""`run_layers`: what a plain scan computes, under every schedule, in every form."""

import functools
import itertools
import math

import chex
import helpers
import jax
import jax.numpy as jnp
import pytest
from helpers import FORMS, PLAIN_SCHEDULES, SCHEDULES, counting_layer, interpret, named

import jaxckpt
from jaxckpt import run_layers
from jaxckpt.errors import PolicyError, ScheduleError, WorkloadError
from jaxckpt.schedule_rules import advances

DEPTHS = 1, 2, 3, 5, 8, 13
FEW = "every(2)", "remat_every(3, save(up))", "mixed"
W = jax.random.normal(jax.random.key(0), (13, 4, 4)) / 2
X = jax.random.normal(jax.random.key(1), (2, 4))
each_schedule = pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
each_form = pytest.mark.parametrize("form", FORMS)
close = functools.partial(chex.assert_trees_all_close, rtol=1e-5, atol=1e-6)


@pytest.fixture(autouse=True, scope="module")
def _fast():
    with helpers.no_optimizations():
        yield


def under(schedule, form=None):
    """Return `run_layers` as a function like `jax.lax.scan`."""
    return functools.partial(run_layers, schedule=schedule, form=form)


def loss_of(run, body=counting_layer):
    """Return a scalar function of stacked weights and the first carry."""

    def loss(w, x):
        x, sums = run(body, x, w)
        return jnp.sum(x * jnp.cos(x)) + jnp.sum(sums * jnp.arange(sums.size))

    return loss


def gradients_of(run, body=counting_layer):
    return jax.value_and_grad(loss_of(run, body), argnums=(0, 1))


# --- Values and gradients ------------------------------------------------------------


@functools.cache
def _plain(depth):
    return interpret(gradients_of(jax.lax.scan), W[:depth], X)


@each_schedule
@pytest.mark.parametrize("depth", DEPTHS)
def test_explicit_form_computes_what_a_scan_does_at_each_depth(schedule, depth):
    got = interpret(gradients_of(under(schedule, "explicit")), W[:depth], X)
    close(got, _plain(depth))


@each_schedule
@pytest.mark.parametrize(
    ("form", "depth"),
    [("scan", 8), ("unrolled", 5)],
)
def test_other_forms_compute_what_a_scan_does(schedule, form, depth):
    got = interpret(gradients_of(under(schedule, form)), W[:depth], X)
    close(got, _plain(depth))


def _busy(run, scale, noise_key, x, layers):
    """Everything a body may take and return; differentiable but for the integers."""

    def body(carry, layer):
        step, (x, key) = carry["step"], carry["state"]
        own = jax.random.fold_in(key, step + layer["index"])
        noise = jax.random.normal(own, x.shape) + jax.random.normal(layer["key"])
        noise += jax.random.normal(noise_key, x.shape)
        up = named(jnp.tanh(x @ layer["w"]) * scale, "up")
        down = named(up * up + noise, "down")
        carry = {"step": step + 2, "state": (x + jnp.sin(down), own)}
        outputs = {
            "sum": (jnp.sum(up, axis=0), None),
            "kept": (layer["w"], layer["index"], layer["key"], scale, x),
            "step": step,
        }
        return carry, outputs

    carry = {"step": jnp.int32(3), "state": (x, jax.random.key(7))}
    carry, outputs = run(body, carry, layers)
    floats = carry["state"][0], outputs["sum"], outputs["kept"][3:]
    weighted = [jnp.sum(jnp.cos(v) * v) for v in jax.tree.leaves(floats)]
    loss = sum(weighted) + jnp.sum(outputs["kept"][0] ** 2)
    return loss, jax.tree.map(_readable, (carry, outputs))


def _readable(leaf):
    is_key = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(leaf) if is_key else leaf


def _busy_results(run, depth):
    def gradients(scale, w, x):
        layers = {
            "w": w,
            "index": jnp.arange(depth),
            "key": jax.random.split(jax.random.key(5), depth),
        }

        def fn(scale, w, x):
            key = jax.random.key(2)
            return _busy(run, scale, key, x, layers | {"w": w})

        return jax.value_and_grad(fn, argnums=(0, 1, 2), has_aux=True)(scale, w, x)

    return interpret(gradients, jnp.linspace(0.5, 1, 4), W[:depth], X)


_plain_busy = functools.cache(functools.partial(_busy_results, jax.lax.scan))


@pytest.mark.parametrize(
    ("schedule", "form", "depth"),
    [
        *((schedule, "explicit", 8) for schedule in (*FEW, "nested(2, 2)", "none")),
        *((schedule, "scan", 8) for schedule in FEW[1:]),
        *((schedule, "unrolled", 3) for schedule in FEW[1:]),
    ],
)
def test_trees_integers_keys_and_closed_over_arrays_are_as_in_a_scan(
    schedule, form, depth
):
    got = _busy_results(under(SCHEDULES[schedule], form), depth)
    wanted = _plain_busy(depth)
    close(got, wanted)
    chex.assert_trees_all_equal_shapes_and_dtypes(got, wanted)
    assert all(jnp.any(g != 0) for g in got[1])


@each_form
def test_without_a_stack_to_differentiate_the_carry_gets_its_gradient(form):
    def loss(run, x):
        body = lambda x, i: (jnp.sin(x) * (1 + i), None)  # noqa: E731
        return jnp.sum(run(body, x, jnp.arange(5))[0])

    got = jax.grad(functools.partial(loss, under("every(2)", form)))(X)
    close(got, jax.grad(functools.partial(loss, jax.lax.scan))(X))


@each_form
@pytest.mark.parametrize("schedule", ["none", "every(2)", "uniform(save(up))"])
def test_outputs_that_no_layer_changes_are_stacked_too(schedule, form):
    def body(x, w):
        x, _ = counting_layer(x, w)
        return x, (1.5, True, jnp.arange(3), X)

    def loss(w):
        x, outputs = run_layers(body, X, w, schedule, form=form)
        return jnp.sum(x), outputs

    constants = jax.make_jaxpr(jax.grad(loss, has_aux=True), return_shape=True)(W)[1][1]
    wanted = jax.eval_shape(lambda: jax.lax.scan(body, X, W)[1])
    assert constants == wanted


@each_form
def test_gradients_through_outputs_alone_and_carry_alone_are_as_in_a_scan(form):
    for part in (0, 1):

        def loss(run, w, x, part=part):
            return jnp.sum(jnp.sin(run(counting_layer, x, w)[part]))

        got, wanted = (
            interpret(jax.grad(functools.partial(loss, run), argnums=(0, 1)), W[:5], X)
            for run in (under("nested(2, 2)", form), jax.lax.scan)
        )
        close(got, wanted)


@pytest.mark.parametrize("schedule", ["every(2)", "uniform(save(up))"])
def test_bfloat16_gradients_are_those_of_a_scan(schedule):
    args = W[:5].astype(jnp.bfloat16), X.astype(jnp.bfloat16)
    got = interpret(gradients_of(under(schedule, "explicit")), *args)
    wanted = interpret(gradients_of(jax.lax.scan), *args)
    chex.assert_trees_all_equal_shapes_and_dtypes(got, wanted)
    chex.assert_trees_all_close(got, wanted, rtol=2e-2, atol=2e-2)


# --- What runs again -----------------------------------------------------------------


@each_form
@pytest.mark.parametrize("schedule", PLAIN_SCHEDULES.values(), ids=PLAIN_SCHEDULES)
def test_layers_run_as_often_as_the_schedule_says(schedule, form):
    loss = loss_of(under(schedule, form))
    depths = range(1, 14) if form == "explicit" else (2, 6, 11)
    got = [helpers.layer_forwards(loss, W[:depth], X) for depth in depths]
    assert got == [schedule.forwards(depth) for depth in depths]


@pytest.mark.parametrize(("depth", "slots"), [(10, 2), (10, 3), (13, 4), (24, 4)])
def test_binomial_takes_the_fewest_forwards_that_are_possible(depth, slots):
    # Griewank and Walther's closed form, not the code's own recursion.
    sweeps = itertools.count()
    r = next(r for r in sweeps if math.comb(slots + r, slots) >= depth)
    fewest = depth + r * depth - math.comb(slots + r, slots + 1)
    loss = loss_of(under(jaxckpt.binomial(slots), "explicit"))
    weights = jax.ShapeDtypeStruct((depth, 4, 4), "float32")
    assert helpers.layer_forwards(loss, weights, X) == fewest
    assert fewest == depth + advances(depth, slots)


@each_form
def test_the_body_is_traced_as_often_for_few_layers_as_for_many(form):
    def traces(depth):
        calls = []

        def body(x, w):
            calls.append(1)
            return counting_layer(x, w)

        loss = loss_of(under("every(3)", form), body)
        jax.make_jaxpr(jax.grad(loss))(W[:depth], X)
        return len(calls)

    assert traces(4) == traces(12) == 1


@each_schedule
def test_forward_alone_has_no_trace_of_remat(schedule):
    for form in ("explicit", "unrolled"):
        run = jax.jit(
            lambda w, x, form=form: run_layers(
                counting_layer, x, w, schedule, form=form
            )
        )
        assert "optimization_barrier" not in run.lower(W[:5], X).as_text()


# --- The form ------------------------------------------------------------------------


def test_form_is_a_plain_scan_where_nothing_is_rematerialised():
    chosen = jax.make_jaxpr(gradients_of(under("none")))(W[:5], X)
    assert str(chosen) == str(
        jax.make_jaxpr(gradients_of(under("none", "scan")))(W[:5], X)
    )
    assert helpers.count(chosen, "scan") == 2


def test_form_is_explicit_elsewhere_and_unrolled_without_scan():
    def primitives(**options):
        run = functools.partial(run_layers, schedule="every(2)", **options)
        program = jax.make_jaxpr(loss_of(run))(W[:4], X)
        return {e.primitive.name for e, _ in helpers.equations(program)}

    assert "custom_vjp_call" in primitives()
    assert not {"custom_vjp_call", "scan"} & primitives(scan=False)
    assert "scan" in primitives(form="scan")
    assert "custom_vjp_call" not in primitives(form="scan")


@each_form
def test_forward_mode_works_through_the_forms_that_jax_differentiates(form):
    loss = loss_of(under("every(2)", form))
    primals, tangents = (W[:4], X), (jnp.ones_like(W[:4]), jnp.ones_like(X))
    if form == "explicit":
        with pytest.raises(TypeError, match="forward-mode.*custom_vjp"):
            jax.jvp(loss, primals, tangents)
        return
    got = interpret(lambda p, t: jax.jvp(loss, p, t), primals, tangents)
    wanted = interpret(
        lambda p, t: jax.jvp(loss_of(jax.lax.scan), p, t), primals, tangents
    )
    close(got, wanted)


# --- Errors --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (lambda x, w: x @ w, "a layer returned `.*Tracer`.*returns a pair"),
        (lambda x, w: (x, w, w), "returned `tuple`.*a pair: the next carry"),
        (lambda x, w: ((x, x), None), "structure of the carry from.*must return"),
        (lambda x, w: (x[:1] @ w, None), r"from `float32\[2,4\]` to `float32\[1,4\]`"),
        (lambda x, w: (x.astype("bfloat16"), None), r"to `bfloat16\[2,4\]`.*cast"),
    ],
    ids=["no pair", "three", "structure", "shape", "dtype"],
)
def test_body_that_is_no_layer_is_refused(body, message):
    with pytest.raises(WorkloadError, match=message):
        run_layers(body, X, W, "every(2)")


@pytest.mark.parametrize(
    ("stacked", "message"),
    [
        ({"a": W, "b": W[:5]}, r"leading axes of \[13, 5\].*number of layers"),
        ({"a": W, "b": jnp.float32(1)}, r"leading axes of \[13, None\]"),
        ({}, r"leading axes of \[\]"),
        (W[:0], r"leading axes of \[0\]"),
    ],
    ids=["unequal", "scalar", "nothing", "no layers"],
)
def test_stacks_without_one_leading_axis_are_refused(stacked, message):
    with pytest.raises(WorkloadError, match=message):
        run_layers(lambda x, layer: (x, None), X, stacked)


@pytest.mark.parametrize(
    ("schedule", "options", "message"),
    [
        ("full", {"form": "scanned"}, "`form='scanned'` is not known.*`scan`"),
        ("full", {"form": "scan", "scan": False}, "`scan=False` and `form='scan'`"),
        ("full", {"form": "explicit", "scan": False}, "contradict each other"),
        ("Segment(Keep(2)), Keep(3)", {}, "holds 5 layers, and the stack 13"),
        ("every(0)", {}, r"`every\(layers=0\)`"),
        (3, {}, "`schedule=3` is no schedule"),
    ],
)
def test_schedules_and_forms_that_do_not_fit_are_refused(schedule, options, message):
    with pytest.raises(ScheduleError, match=message):
        run_layers(counting_layer, X, W, schedule, **options)


@each_form
@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ("uniform(save(upp))", "`upp` matches no named value of block.*Did you mean"),
        ("Keep(11), Segment(Keep(2), policy=save(upp))", "`upp`.*segment of block"),
    ],
)
def test_policy_without_effect_is_refused_and_the_layer_named(schedule, message, form):
    def loss(w, x):
        run = functools.partial(run_layers, schedule=schedule, form=form, label="block")
        return loss_of(run)(w, x)

    with pytest.raises(PolicyError, match=message):
        jax.grad(loss)(W, X)


@pytest.mark.parametrize("form", FORMS)
def test_a_layer_that_runs_again_may_not_call_io_callback(form):
    def layer(x, w):
        jax.experimental.io_callback(lambda: None, None)
        return x @ w, None

    weights, x = jnp.ones((4, 2, 2)), jnp.ones((2, 2))
    options = {"form": form, "scan": form != "unrolled"}
    with pytest.raises(jaxckpt.WorkloadError, match="io_callback"):
        run_layers(layer, x, weights, "every(2)", **options)
