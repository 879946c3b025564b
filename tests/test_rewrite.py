"""`apply`: a function under a plan in every transformation, and what is refused."""

import functools
import inspect

import chex
import equinox as eqx
import foreign
import helpers
import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx
from helpers import interpret, layer_forwards, named
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, PartitionSpec

import jaxckpt
from jaxckpt import Stack, _jax
from jaxckpt.errors import PlanError, PolicyError, WorkloadError
from jaxckpt.graph.flops import equations
from jaxckpt.plan import Plan, plan_from
from jaxckpt.rewrite import apply, find_chain

DEPTH = 4
W = jax.random.normal(jax.random.key(0), (DEPTH, 4, 6)) / 2
X = jax.random.normal(jax.random.key(1), (2, 4))
RULE = "Segment(Keep(2)), Remat(full, 1), Keep(1)"
FORWARDS = 4 + 2 + 1
close = functools.partial(chex.assert_trees_all_close, rtol=1e-5, atol=1e-5)


@pytest.fixture(autouse=True, scope="module")
def _fast():
    with helpers.no_optimizations():
        yield


def layer_of_two(x, w):
    """A layer of two products with one tanh, by which its runs are counted."""
    up = named(jnp.tanh(x @ w), "up")
    down = named(jnp.sin(up * up) @ w.T, "down")
    return x + jnp.sin(down), jnp.sum(up)


def scanned(w, x):
    """Layers in a loop."""
    x, sums = jax.lax.scan(layer_of_two, x, w)
    return jnp.sum(x * jnp.cos(x)) + jnp.sum(sums)


def unrolled(w, x):
    """The same layers one after another."""
    total = 0.0
    for i in range(w.shape[0]):
        x, up = layer_of_two(x, w[i])
        total = total + up
    return jnp.sum(x * jnp.cos(x)) + total


LOSSES = {"scanned": scanned, "unrolled": unrolled}
each_loss = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)


def planned(fn, *args, rule=RULE, **settings):
    return plan_from(rule, fn, *args, **settings).apply(fn)


def gradients(fn, argnums=(0, 1)):
    return jax.value_and_grad(fn, argnums=argnums)


def check(fn, *args, rule=RULE, argnums=(0, 1), **settings):
    """Check the gradients of a function under a plan, and return the function."""
    got = planned(fn, *args, rule=rule, **settings)
    close(
        interpret(gradients(got, argnums), *args),
        interpret(gradients(fn, argnums), *args),
    )
    return got


def primitives(fn, *args):
    return {eqn.primitive.name for eqn, _ in equations(jax.make_jaxpr(fn)(*args))}


# --- The call ------------------------------------------------------------------------


def test_function_keeps_its_name_signature_and_text():
    def loss(w, x, scale=2.0, *, flag=True):
        """Say it."""
        return scanned(w, x) * scale

    got = planned(loss, W, X)
    assert (got.__name__, got.__doc__) == ("loss", "Say it.")
    assert inspect.signature(got) == inspect.signature(loss)


@each_loss
def test_flags_text_none_and_keywords_are_as_in_a_plain_call(loss):
    def fn(params, batch, mode, *, train=False, scale=1.0, rng=None):
        assert mode in ("a", "b") and isinstance(scale, float) and rng is None
        value = loss(params["w"], batch["x"])
        value = value * (3 if train else 1) * scale
        return value, {"mode": mode, "scale": scale, "none": None, "count": 2}

    params, batch = {"w": W, "none": None}, {"x": X, "y": None}
    got = planned(fn, params, batch, "a")
    for train in (False, True):
        value, aux = got(params, batch, "b", train=train, scale=0.5)
        wanted, wanted_aux = fn(params, batch, "b", train=train, scale=0.5)
        close(value, wanted)
        assert aux == wanted_aux


def test_numbers_that_are_differentiated_get_gradients():
    fn = lambda scale, w, x: scanned(w * scale, x)  # noqa: E731
    got = jax.grad(planned(fn, 2.0, W, X))(2.0, W, X)
    close(got, jax.grad(fn)(2.0, W, X))


@each_loss
def test_arrays_closed_over_are_those_of_each_call(loss):
    held = {"w": W}
    fn = lambda x: loss(held["w"], x)  # noqa: E731
    got = planned(fn, X)
    for w in (W, 2 * W):
        held["w"] = w
        close(got(X), loss(w, X))


@each_loss
def test_arrays_closed_over_get_gradients(loss):
    def outer(run, w, x):
        return run(lambda x: loss(w, x))(x)

    got = jax.grad(lambda w, x: outer(lambda fn: planned(fn, x), w, x), (0, 1))
    close(got(W, X), jax.grad(loss, (0, 1))(W, X))


@each_loss
def test_integer_and_key_arguments_are_as_in_the_plain_function(loss):
    def fn(w, key, number, x):
        noise = jax.random.normal(key, x.shape) + number
        return loss(w, x + noise), number + 1

    args = W, jax.random.key(3), jnp.int32(2), X
    got = jax.value_and_grad(planned(fn, *args), (0, 3), has_aux=True)(*args)
    chex.assert_trees_all_equal_shapes_and_dtypes(
        got, jax.value_and_grad(fn, (0, 3), has_aux=True)(*args)
    )
    close(got, jax.value_and_grad(fn, (0, 3), has_aux=True)(*args))
    ints = jax.grad(planned(fn, *args), 2, has_aux=True, allow_int=True)(*args)[0]
    assert ints.dtype == jax.dtypes.float0


def test_function_is_traced_once_in_each_call():
    calls = []

    def fn(w, x):
        calls.append(1)
        return unrolled(w, x)

    got = planned(fn, W, X)
    calls.clear()
    jax.make_jaxpr(jax.grad(got))(W, X)
    assert len(calls) == 1


@each_loss
def test_donated_arguments_are_used_up(loss):
    step = jax.jit(jax.value_and_grad(planned(loss, W, X)), donate_argnums=0)
    w = W + 0
    step(w, X)
    assert w.is_deleted()


# --- Transformations -----------------------------------------------------------------


@each_loss
def test_layers_run_as_often_as_the_schedule_says(loss):
    assert layer_forwards(planned(loss, W, X), W, X) == FORWARDS


@each_loss
def test_program_with_jit_and_gradient_outside_is_the_plain_one(loss):
    got = jax.jit(jax.value_and_grad(planned(loss, W, X)))(W, X)
    close(got, jax.jit(jax.value_and_grad(loss))(W, X))


@each_loss
def test_hessian_is_that_of_the_plain_function(loss):
    got = planned(loss, W, X)
    close(jax.hessian(got, 1)(W, X), jax.hessian(loss, 1)(W, X))


@each_loss
def test_hessian_vector_products_are_those_of_the_plain_function(loss):
    def forward_over_reverse(fn):
        return jax.jvp(lambda x: jax.grad(fn, 1)(W, x), (X,), (jnp.cos(X),))[1]

    def reverse_over_reverse(fn):
        dot = lambda x: jnp.vdot(jax.grad(fn, 1)(W, x), jnp.cos(X))  # noqa: E731
        return jax.grad(dot)(X)

    got = planned(loss, W, X)
    for product in (forward_over_reverse, reverse_over_reverse):
        close(product(got), product(loss))


@pytest.mark.parametrize("form", ["scan", "unrolled", "explicit"])
def test_forward_mode_works_in_the_forms_that_jax_differentiates(form):
    got = planned(scanned, W, X, form=form)
    directions = (W, X), (jnp.sin(W), jnp.cos(X))
    if form == "explicit":
        with pytest.raises(TypeError, match="forward-mode"):
            jax.jvp(got, *directions)
        return
    close(jax.jvp(got, *directions), jax.jvp(scanned, *directions))


@each_loss
@pytest.mark.parametrize("in_axes", [(None, 0), (0, 0), (0, None)])
def test_vmap_outside_is_that_of_the_plain_function(loss, in_axes):
    w = W if in_axes[0] is None else jnp.stack([W, 2 * W])
    x = X if in_axes[1] is None else jnp.stack([X, 2 * X])
    got, wanted = (
        interpret(jax.vmap(gradients(fn), in_axes), w, x)
        for fn in (planned(loss, W, X), loss)
    )
    close(got, wanted)


def test_collective_over_a_vmapped_axis_is_that_of_the_plain_function():
    def loss(w, x):
        def layer(x, w):
            return jnp.tanh(x @ w) @ w.T - jax.lax.pmean(x, "b"), None

        return jnp.sum(jax.lax.scan(layer, x, w)[0] ** 2)

    def outer(fn, w):
        return jnp.sum(jax.vmap(fn, (None, 0), axis_name="b")(w, jnp.stack([X, X + 1])))

    plan = Plan((("layers", jaxckpt.full()),))
    got = jax.grad(functools.partial(outer, plan.apply(loss)))(W)
    close(got, jax.grad(functools.partial(outer, loss))(W))


def _data_parallel(fn):
    mesh = Mesh(jax.devices()[:1], ("data",))
    everywhere, rows = PartitionSpec(), PartitionSpec("data")

    def local(w, x):
        return jax.lax.psum(fn(w, x), "data")

    return jax.shard_map(
        local, mesh=mesh, in_specs=(everywhere, rows), out_specs=everywhere
    )


@each_loss
def test_shard_map_outside_and_inside_is_that_of_the_plain_function(loss):
    wanted = gradients(loss)(W, X)
    outside = _data_parallel(planned(loss, W, X))
    inside = planned(_data_parallel(loss), W, X)
    for fn in (outside, inside):
        close(jax.jit(gradients(fn))(W, X), wanted)
        assert layer_forwards(fn, W, X) == FORWARDS


@each_loss
@pytest.mark.parametrize(
    "around",
    [
        lambda fn: lambda w, x: jax.lax.cond(x[0, 0] < 9, fn, lambda w, x: 0.0, w, x),
        lambda fn: jax.jit(fn),
        lambda fn: jax.jit(fn, inline=False, keep_unused=True),
        lambda fn: (
            lambda w, x: jax.lax.scan(
                lambda total, x: (total + fn(w, x), None), 0.0, jnp.stack([x])
            )[0]
        ),
        lambda fn: jax.checkpoint(fn),
        lambda fn: lambda w, x: jax.vmap(fn, (None, 0))(w, x[None])[0],
    ],
    ids=["cond", "jit", "jit with options", "microbatches", "remat", "vmap"],
)
def test_stacks_inside_are_found_and_follow_the_plan(loss, around):
    got = check(around(loss), W, X)
    assert layer_forwards(got, W, X) == FORWARDS


def test_loops_of_every_kind_are_those_of_the_plain_program():
    def fn(w, x, reverse, shared):
        def layer(carry, own):
            (x, key, step), (w, i, key2) = carry, own
            noise = jax.random.normal(jax.random.fold_in(key, step), x.shape)
            up = jnp.tanh(x @ w) @ w.T + shared + noise * i + jax.random.normal(key2)
            return (x + up, key, step + 2), (up, step, jnp.float32(3), w, x)

        keys = jax.random.split(jax.random.key(1), DEPTH)
        carry = x, jax.random.key(5), jnp.int32(1)
        carry, outputs = jax.lax.scan(
            layer, carry, (w, jnp.arange(DEPTH), keys), reverse=reverse, unroll=2
        )
        up, step, three, passed, inputs = outputs
        weights = jnp.arange(1.0, DEPTH + 1)[:, None, None]
        loss = jnp.sum(jnp.cos(carry[0])) + jnp.sum((up + inputs) * weights)
        return loss + jnp.sum(passed * weights), (carry[2], step, three)

    for reverse in (False, True):
        run = functools.partial(fn, reverse=reverse, shared=X)
        got, wanted = (
            jax.value_and_grad(f, (0, 1), has_aux=True)(W, X)
            for f in (planned(run, W, X), run)
        )
        close(got, wanted)
        chex.assert_trees_all_equal_shapes_and_dtypes(got, wanted)


def test_layers_that_share_their_parameters_follow_the_plan():
    def tied(w, x):
        layer = lambda x, _: layer_of_two(x, w)  # noqa: E731
        x, sums = jax.lax.scan(layer, x, length=DEPTH)
        return jnp.sum(x * jnp.cos(x)) + jnp.sum(sums)

    got = check(tied, W[0], X)
    assert layer_forwards(got, W[0], X) == FORWARDS


def test_frozen_parameters_take_no_work():
    def fn(scale, w, x):
        def layer(x, own):
            w, scale = own
            return x + jnp.sin(scale * jnp.tanh(x @ w) @ w.T), None

        return jnp.sum(jnp.cos(jax.lax.scan(layer, x, (w, scale))[0]))

    args = jnp.linspace(1, 2, DEPTH), W, X
    got = planned(fn, *args, rule="full")
    close(jax.grad(got)(*args), jax.grad(fn)(*args))
    program = _jax.without_dead_code(jax.make_jaxpr(jax.grad(got))(*args))
    # Forward, again, and back to the layer's input: none for the gradient of `w`.
    assert helpers.count(program) == 3 * 2 * DEPTH


# --- State ---------------------------------------------------------------------------


class Noisy(nn.Module):
    """Layers with dropout and batch statistics, one after another."""

    @nn.compact
    def __call__(self, x, train):
        x = nn.Dense(4)(x)
        for i in range(DEPTH):
            h = nn.BatchNorm(not train, name=f"norm_{i}")(x)
            h = nn.Dropout(0.5, deterministic=not train)(h)
            x = x + nn.Dense(4, name=f"dense_{i}")(jnp.tanh(h))
        return x


def test_mutable_collections_and_dropout_masks_are_those_of_the_program():
    module = Noisy()
    variables = module.init(jax.random.key(0), X, False)

    def loss(params, stats, x, key, train):
        x, changed = module.apply(
            {"params": params, "batch_stats": stats},
            x,
            train,
            rngs={"dropout": key},
            mutable=["batch_stats"],
        )
        return jnp.sum(jnp.cos(x)), changed

    args = variables["params"], variables["batch_stats"], X, jax.random.key(4)
    for train in (True, False):
        got = planned(loss, *args, train)
        close(
            jax.value_and_grad(got, has_aux=True)(*args, train),
            jax.value_and_grad(loss, has_aux=True)(*args, train),
        )


class NoisyNNX(nnx.Module):
    """Layers of nnx whose state changes, one after another."""

    def __init__(self, rngs):
        self.embedding = nnx.Linear(4, 4, rngs=rngs)
        self.norms = nnx.List(nnx.BatchNorm(4, rngs=rngs) for _ in range(DEPTH))
        self.denses = nnx.List(nnx.Linear(4, 4, rngs=rngs) for _ in range(DEPTH))
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        x = self.embedding(x)
        for norm, dense in zip(self.norms, self.denses, strict=True):
            x = x + dense(jnp.tanh(self.dropout(norm(x))))
        return x


def test_nnx_module_as_argument_changes_as_in_a_plain_call():
    def loss(model, x):
        return jnp.sum(jnp.cos(model(x)))

    one, two = (NoisyNNX(nnx.Rngs(0)) for _ in range(2))
    got = nnx.value_and_grad(planned(loss, NoisyNNX(nnx.Rngs(0)), X))(one, X)
    close(got[0], nnx.value_and_grad(loss)(two, X)[0])
    readable = lambda m: jax.tree.leaves(nnx.state(m, nnx.BatchStat))  # noqa: E731
    close(readable(one), readable(two))
    assert int(one.dropout.rngs.count[...]) == int(two.dropout.rngs.count[...]) == DEPTH


def test_nnx_module_closed_over_is_as_in_a_plain_call():
    model = foreign.NNXTransformer(nnx.Rngs(0))
    x = foreign.inputs()
    fn = lambda x: foreign.nnx_loss(model, x)  # noqa: E731
    close(interpret(planned(fn, x), x), interpret(fn, x))


def test_equinox_module_as_argument_is_as_in_a_plain_call():
    module, x = foreign.EquinoxTransformer(jax.random.key(0)), foreign.inputs()
    arrays, static = eqx.partition(module, eqx.is_array)

    def gradient(fn):
        of_fn = eqx.filter_value_and_grad(fn)
        return lambda arrays, x: of_fn(eqx.combine(arrays, static), x)

    loss = foreign.equinox_loss
    got, wanted = (
        interpret(gradient(fn), arrays, x) for fn in (planned(loss, module, x), loss)
    )
    close(got[0], wanted[0])
    close(jax.tree.leaves(got[1]), jax.tree.leaves(wanted[1]))


# --- Policies ------------------------------------------------------------------------


@each_loss
@pytest.mark.parametrize(
    ("rule", "kept"),
    [
        ("save(up)", {("up", "save"): DEPTH}),
        ("remat_every(2, save(up, down))", None),
        ("Segment(Keep(2), policy=save(up)), Remat(offload(up), 2)", None),
    ],
)
def test_policies_of_names_compute_what_the_program_does(loss, rule, kept):
    got = check(loss, W, X, rule=rule)
    if kept and loss is unrolled:
        found = helpers.residual_names(got, W, X)
        assert {k: n for k, n in found.items() if k[0] == "up"} == kept


@each_loss
def test_excluded_value_and_what_makes_it_run_again(loss):
    def layer(x, w):
        full = checkpoint_name((2.0 * w).astype("bfloat16"), "gathered").astype(
            "float32"
        )
        return x + jnp.sin(jnp.tanh(x @ full) @ full.T), None

    def fn(w, x):
        if loss is scanned:
            return jnp.sum(jnp.cos(jax.lax.scan(layer, x, w)[0]))
        for i in range(DEPTH):
            x, _ = layer(x, w[i])
        return jnp.sum(jnp.cos(x))

    def weights_kept(rule):
        residuals = jaxckpt.trace(planned(fn, W, X, rule=rule), W, X).residuals
        shapes = W.shape, W.shape[1:]
        return [r for r in residuals if not r.argument and r.shape in shapes]

    assert weights_kept("none") and not weights_kept("recompute(gathered)")


@each_loss
def test_forward_alone_has_no_trace_of_remat(loss):
    text = jax.jit(planned(loss, W, X)).lower(W, X).as_text()
    assert "optimization_barrier" not in text


# --- Remat that is there -------------------------------------------------------------


def rematted(loss):
    layer = jax.checkpoint(layer_of_two)

    def scanned_remat(w, x):
        x, sums = jax.lax.scan(layer, x, w)
        return jnp.sum(x * jnp.cos(x)) + jnp.sum(sums)

    def unrolled_remat(w, x):
        total = 0.0
        for i in range(DEPTH):
            x, up = layer(x, w[i])
            total = total + up
        return jnp.sum(x * jnp.cos(x)) + total

    return scanned_remat if loss is scanned else unrolled_remat


@each_loss
def test_remat_that_is_there_is_replaced_or_kept(loss):
    fn = rematted(loss)
    assert layer_forwards(check(fn, W, X, rule="none"), W, X) == DEPTH
    assert layer_forwards(check(fn, W, X), W, X) == FORWARDS
    kept = check(fn, W, X, rule="none", existing="keep")
    assert layer_forwards(kept, W, X) == 2 * DEPTH


@each_loss
def test_remat_round_the_layers_is_moved_inside(loss):
    whole = jax.checkpoint(loss)
    bytes_of = lambda fn: jaxckpt.trace(fn, W, X).residual_bytes  # noqa: E731
    assert bytes_of(planned(whole, W, X, rule="full")) == bytes_of(
        planned(loss, W, X, rule="full")
    )
    regions = jaxckpt.trace(planned(whole, W, X, rule="full"), W, X).regions
    assert regions and not any(region.whole_stack for region in regions)


@each_loss
def test_remat_round_the_layers_and_much_else_is_taken_away(loss):
    def fn(w, x):
        value = loss(w, x)
        for _ in range(60):
            value = jnp.sin(value)
        return value

    got = jax.make_jaxpr(gradients(planned(jax.checkpoint(fn), W, X)))(W, X)
    assert helpers.count(_jax.without_dead_code(got), "tanh") == FORWARDS


@pytest.mark.skipif(_jax.remat3_enabled(), reason="a plan replaces all of its remat")
@each_loss
def test_remat_of_other_parts_stays(loss):
    @jax.checkpoint
    def head(w, x):
        return jnp.sum(jnp.exp(jnp.sin(x @ w)))

    def fn(w, x):
        inside = rematted(loss)
        return inside(w, x) + head(w[0], x)

    got = check(fn, W, X, rule="none")
    assert layer_forwards(got, W, X) == DEPTH
    (region,) = jaxckpt.trace(got, W, X).regions
    assert "exp" in {e.primitive.name for e, _ in equations(region.body)}


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        up = checkpoint_name(jnp.tanh(nn.Dense(4)(x)), "up")
        return x + jnp.sin(up * up)


@pytest.mark.parametrize("scan", [True, False])
def test_plan_rules_a_stack_of_our_own(scan):
    module = Stack(Block, DEPTH, schedule="nested(2, 2)", scan=scan)
    params = module.init(jax.random.key(0), X)

    def loss(params, x):
        return jnp.sum(jnp.cos(module.apply(params, x)))

    for rule, forwards in ((RULE, FORWARDS), ("none", DEPTH)):
        got = check(loss, params, X, rule=rule)
        assert layer_forwards(got, params, X) == forwards


# --- Names, and errors ---------------------------------------------------------------


@each_loss
def test_operations_keep_their_scopes(loss):
    def fn(w, x):
        with jax.named_scope("outer"):
            return loss(w, x)

    program = jax.make_jaxpr(planned(fn, W, X, rule="every(2)"))(W, X)
    held = {"custom_vjp_call"} if loss is scanned else {"tanh"}
    found = [e for e, _ in equations(program) if e.primitive.name in {"cos", *held}]
    assert {e.primitive.name for e in found} == {"cos", *held}
    assert {_jax.scope(e) for e in found} == {"outer"}


def test_program_without_layers_is_refused():
    with pytest.raises(PlanError, match=r"No stack of layers was found in `.*lambda>`"):
        plan_from("full", lambda x: jnp.sum(jnp.sin(x)), X)
    plan = plan_from("full", scanned, W, X)
    with pytest.raises(PlanError, match="No stack of layers"):
        plan.apply(lambda w, x: jnp.sum(w) + jnp.sum(x))(W, X)


@each_loss
def test_other_depth_and_other_program_are_refused(loss):
    got = planned(loss, W, X, rule="full")
    with pytest.raises(PlanError, match="made for another program.*3 layers"):
        got(W[:3], X)

    def other(w, x):
        for i in range(DEPTH):
            x = jnp.tanh(jnp.sin(x @ w[i]) @ w[i].T @ w[i]) @ w[i].T + x
        return jnp.sum(x)

    with pytest.raises(PlanError, match="another program"):
        plan_from("full", loss, W, X).apply(other)(W, X)


@each_loss
def test_other_shapes_of_the_same_program_are_taken(loss):
    got = planned(loss, W, X, rule="full")
    x = jnp.concatenate([X, 2 * X])
    close(got(W, x), loss(W, x))


@each_loss
@pytest.mark.parametrize("rule", ["full", "nested(1)"])
def test_callback_in_a_rematerialised_layer_is_refused_and_the_stack_named(loss, rule):
    def layer(x, w):
        y = jax.experimental.io_callback(lambda a: a, X, jax.lax.stop_gradient(x))
        return jnp.tanh(x @ w) @ w.T + jax.lax.stop_gradient(y), None

    def fn(w, x):
        if loss is scanned:
            return jnp.sum(jax.lax.scan(layer, x, w)[0])
        for i in range(DEPTH):
            x, _ = layer(x, w[i])
        return jnp.sum(x)

    with pytest.raises(WorkloadError, match="ayer.* of `layers` calls `io_callback`"):
        jax.make_jaxpr(jax.grad(planned(fn, W, X, rule=rule)))(W, X)


@each_loss
def test_pattern_without_effect_is_refused(loss):
    with pytest.raises(PolicyError, match="`upp` matches no named.*Did you mean `up`"):
        plan_from("save(upp)", loss, W, X)
    chain = find_chain(loss, (W, X), existing="replace")
    plan = Plan(((chain.stacks[0].name, jaxckpt.uniform("save(upp)")),))
    with pytest.raises(PolicyError, match="`upp` matches no named"):
        jax.grad(apply(plan, loss))(W, X)
