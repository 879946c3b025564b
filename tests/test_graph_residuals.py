"""Residuals: exactly the arrays that the closure of `jax.vjp` holds, and from where."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import jaxckpt
from jaxckpt import _jax

LAYERS, BATCH, WIDTH = 3, 2, 4
STACK = jax.random.normal(jax.random.key(0), (LAYERS, WIDTH, WIDTH))
W = STACK[0]
X = jax.random.normal(jax.random.key(1), (BATCH, WIDTH))
PRODUCT = 2 * BATCH * WIDTH * WIDTH


def layer(w, x):
    x = checkpoint_name(x, "layer_input")
    h = checkpoint_name(x @ w, "hidden")
    return x + checkpoint_name(jnp.sin(h) @ w, "last")


def stack(fn):
    def scanned(ws, x):
        return lax.scan(lambda x, w: (fn(w, x), None), x, ws)[0]

    return scanned


def rematted(policy):
    return jaxckpt.remat(layer, policy=policy)


@jax.custom_vjp
def attention(w, x):
    return jnp.tanh(x @ w)


def _attention_fwd(w, x):
    context = checkpoint_name(jnp.tanh(x @ w), "context")
    return context, (w, x, context)


def _attention_bwd(residuals, g):
    w, x, context = residuals
    g = g * (1 - context * context)
    return x.T @ g, g @ w.T


attention.defvjp(_attention_fwd, _attention_bwd)


def branched(w, x):
    yes, no = (lambda x: jnp.sin(x @ w)), (lambda x: jnp.exp(x))
    return lax.cond(x.sum() > 0, yes, no, x)


def dropped_out(w, x):
    keep = jax.random.bernoulli(jax.random.key(3), 0.5, x.shape)
    return jnp.where(keep, jnp.tanh(x @ w), 0.0)


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(8)(nn.LayerNorm()(x)))
        return nn.log_softmax(nn.Dense(3)(x))


NET = Net()
PARAMS = NET.init(jax.random.key(0), X)

FUNCTIONS = {
    "product": (lambda w, x: x @ w, W),
    "layer": (layer, W),
    "jit": (jax.jit(layer), W),
    "views": (lambda w, x: jnp.sin(x.reshape(4, 2).T @ w.T.reshape(4, 4)), W),
    "scan": (stack(layer), STACK),
    "jit of scan": (jax.jit(stack(layer)), STACK),
    "scan of views": (stack(lambda w, x: layer(w.T, x)), STACK),
    "unrolled": (lambda ws, x: layer(ws[2], layer(ws[1], layer(ws[0], x))), STACK),
    "remat": (rematted("full"), W),
    "remat with names": (rematted("save(hidden)"), W),
    "remat with dots": (rematted("dots"), W),
    "scan of remat": (stack(rematted("save(hidden)")), STACK),
    "remat of scan": (jax.checkpoint(stack(layer)), STACK),
    "offload": (rematted("offload(hidden)"), W),
    "custom_vjp": (lambda w, x: jnp.sin(attention(w, jnp.exp(x))), W),
    "custom_jvp": (lambda w, x: jax.nn.relu(jax.nn.silu(x @ w)), W),
    "cond": (branched, W),
    "dropout": (dropped_out, W),
    "flax": (NET.apply, PARAMS),
}


def shapes(arrays):
    return sorted((str(a.dtype), tuple(a.shape)) for a in arrays if a.shape)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_residuals_are_the_arrays_that_the_vjp_closure_holds(name):
    fn, w = FUNCTIONS[name]
    # One of each distinct array; scalars may be literals of the program.
    held = {id(a): a for a in jax.tree.leaves(jax.vjp(fn, w, X)[1])}.values()
    residuals = jaxckpt.trace(fn, w, X, argnums=None).residuals
    assert shapes(residuals) == shapes(held)
    held_bytes = sum(a.nbytes for a in held if a.shape)
    assert sum(r.bytes for r in residuals if r.shape) == held_bytes


@pytest.mark.parametrize("name", FUNCTIONS)
def test_residuals_that_are_arguments_are_those_of_the_closure(name):
    fn, w = FUNCTIONS[name]
    leaves = jax.tree.leaves((w, X))
    arguments = {leaf.unsafe_buffer_pointer() for leaf in leaves}
    held = {id(a): a for a in jax.tree.leaves(jax.vjp(fn, w, X)[1])}.values()
    same = [a for a in held if a.unsafe_buffer_pointer() in arguments]
    graph = jaxckpt.trace(fn, w, X, argnums=None)
    marked = [r for r in graph.residuals if r.argument]
    # JAX copies what it reshapes or transposes outside `jit`: we see through that.
    assert len(marked) >= len(same)
    sizes = {leaf.nbytes for leaf in leaves}
    assert all(r.bytes in sizes for r in marked)
    rest = sum(r.bytes for r in graph.residuals if not r.argument)
    assert graph.residual_bytes + _host_bytes(graph) == rest


def _host_bytes(graph):
    return sum(r.bytes for r in graph.residuals if r.decision == "offload")


def labels(fn, *args, argnums=None):
    graph = jaxckpt.trace(fn, *args, argnums=argnums)
    return [
        (r.label, r.shape, r.layers, r.decision)
        for r in graph.residuals
        if not r.argument
    ]


@pytest.mark.parametrize(
    "view",
    [
        lambda w: w.T,
        lambda w: w.reshape(2, 8).reshape(4, 4),
        lambda w: w[None][0],
        lambda w: checkpoint_name(w, "weight").T,
        lambda w: lax.optimization_barrier(w),
        lambda w: jax.jit(lambda w: w.T.reshape(16))(w).reshape(4, 4),
    ],
)
def test_a_view_of_a_parameter_is_an_argument(view):
    found = labels(lambda w, x: x @ view(w), W, X)
    assert found == []


def test_a_parameter_that_a_loop_stacks_is_a_value():
    def fn(w, x):
        copies = lax.scan(lambda c, _: (c, w.T), 0.0, None, length=3)[1]
        return jnp.sum(copies * x[0])

    stacked = [found[:2] for found in labels(fn, W, X) if found[2] == 3]
    assert stacked == [("fn/scan", (3, WIDTH, WIDTH))]


@pytest.mark.parametrize("loop", [lax.scan, lax.fori_loop, lax.while_loop])
def test_a_parameter_that_a_loop_carries_on_is_an_argument(loop):
    def fn(w, x):
        if loop is lax.scan:
            w = lax.scan(lambda c, _: ((c[0], c[1] + 1), None), (w, 0), length=3)[0][0]
        elif loop is lax.fori_loop:
            w = lax.fori_loop(0, 3, lambda i, c: (c[0], c[1] + i), (w, 0))[0]
        else:
            step = lambda c: (c[0], c[1] + 1)  # noqa: E731
            w = lax.while_loop(lambda c: c[1] < 3, step, (w, 0))[0]
        return x @ w

    found = jaxckpt.trace(fn, W, X, argnums=1).residuals
    assert [r.argument for r in found] == [True]


def test_views_of_one_value_are_held_once():
    def fn(w, x):
        y = jnp.exp(x)
        return jax.checkpoint(lambda y: jnp.sin(y @ w))(y) + y.T.reshape(y.shape)

    graph = jaxckpt.trace(fn, W, X, argnums=None)
    held = [r for r in graph.residuals if r.held]
    assert [r.primitive for r in held] == ["exp"]
    assert graph.residual_bytes == X.nbytes


def test_a_cast_of_a_parameter_is_a_value():
    fn = lambda w, x: x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)  # noqa: E731
    cast = "test_a_cast_of_a_parameter_is_a_value/convert_element_type"
    assert sorted(labels(fn, W, X)) == [
        (cast, (BATCH, WIDTH), 1, "save"),
        (cast, (WIDTH, WIDTH), 1, "save"),
    ]


def test_what_is_not_differentiated_needs_fewer_residuals():
    def count(argnums):
        return len(jaxckpt.trace(lambda w, x: x @ w, W, X, argnums=argnums).residuals)

    assert (count(0), count(1), count(None), count((0, 1))) == (1, 1, 2, 2)


STACKED = (LAYERS, BATCH, WIDTH)


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("full", [("layer_input", STACKED, LAYERS, "save")]),
        (
            "save(hidden)",
            [
                ("hidden", STACKED, LAYERS, "save"),
                ("layer_input", STACKED, LAYERS, "save"),
            ],
        ),
        (
            "offload(hidden)",
            [
                ("hidden", STACKED, LAYERS, "offload"),
                ("layer_input", STACKED, LAYERS, "save"),
            ],
        ),
    ],
)
def test_stacked_residuals_have_the_names_of_the_body_and_its_layers(policy, expected):
    # Named outside the remat and inside the scan, as a model's block would do.
    inner = rematted(policy)
    body = lambda w, x: inner(w, checkpoint_name(x, "layer_input"))  # noqa: E731
    assert sorted(labels(stack(body), STACK, X)) == expected


def test_a_carry_without_a_name_says_that_it_is_the_layer_input():
    body = jax.checkpoint(lambda w, x: jnp.sin(x @ w))
    found = labels(stack(body), STACK, X)
    assert found == [("carry (layer input)", STACKED, LAYERS, "save")]


@pytest.mark.parametrize(
    ("fn", "label"),
    [
        (layer, "layer_input"),
        (rematted("save(layer_input)"), "layer_input"),
        # The name stands inside the remat, the carry is what goes in.
        (rematted("full"), "carry (layer input)"),
    ],
)
def test_a_name_at_the_top_of_the_body_is_the_carrys(fn, label):
    carried = [r for r in jaxckpt.trace(stack(fn), STACK, X).residuals if r.carried]
    assert [r.label for r in carried] == [label]


def test_the_layers_of_nested_scans_are_the_outer_ones():
    nested = STACK[:, None].repeat(2, axis=1)
    body = stack(rematted("save(hidden)"))
    found = {label: rest for label, *rest in labels(stack(body), nested, X)}
    assert found["hidden"] == [(LAYERS, 2, BATCH, WIDTH), LAYERS, "save"]


def test_an_offloaded_residual_is_counted_apart():
    graph = jaxckpt.trace(rematted("offload(hidden)"), W, X, argnums=None)
    (hidden,) = [r for r in graph.residuals if not r.argument]
    assert (hidden.name, hidden.decision, hidden.bytes) == ("hidden", "offload", 32)
    assert graph.residual_bytes == 0


def test_a_residual_knows_its_line_and_its_scope():
    def fn(w, x):
        with jax.named_scope("mlp"):
            return jnp.sin(x @ w)

    (cos,) = [
        r for r in jaxckpt.trace(fn, W, X, argnums=None).residuals if not r.argument
    ]
    assert (cos.scope, cos.label) == ("mlp", "mlp/cos")
    assert "test_graph_residuals.py" in cos.source and cos.source.endswith(".fn)")


# Products of one layer: x @ w, whose result the sine reads, and the last, which nothing
# reads again.
FORWARD, AGAIN = 2 * PRODUCT, PRODUCT


@pytest.mark.parametrize(
    ("fn", "w", "forward", "again"),
    [
        (layer, W, FORWARD, 0),
        (stack(layer), STACK, LAYERS * FORWARD, 0),
        (rematted("full"), W, FORWARD, AGAIN),
        (rematted("save(hidden)"), W, FORWARD, 0),
        (rematted("offload(hidden)"), W, FORWARD, 0),
        (rematted("dots"), W, FORWARD, 0),
        (rematted("save_everything()"), W, FORWARD, 0),
        (rematted("save_everything() - save(hidden)"), W, FORWARD, AGAIN),
        (stack(rematted("full")), STACK, LAYERS * FORWARD, LAYERS * AGAIN),
        (stack(rematted("save(hidden)")), STACK, LAYERS * FORWARD, 0),
        # All layers run again as one program, their last products too.
        (jax.checkpoint(stack(layer)), STACK, LAYERS * FORWARD, LAYERS * FORWARD),
        # Once for the outer remat, and in it once more for the inner one.
        (
            jax.checkpoint(stack(rematted("full"))),
            STACK,
            LAYERS * FORWARD,
            LAYERS * (FORWARD + AGAIN),
        ),
    ],
)
def test_recompute_flops_are_exact(fn, w, forward, again):
    graph = jaxckpt.trace(fn, w, X, argnums=None)
    assert graph.forward_flops == forward
    assert graph.recompute_flops == again
    # Each product has two gradients.
    assert graph.gradient_flops == 3 * forward + again
    assert graph.plain.gradient_flops == 3 * forward


def attention_layer(w, x):
    return jnp.sin(attention(w, jnp.exp(x)))


@pytest.mark.skipif(_jax.remat3_enabled(), reason="it does not see names inside rules")
def test_kept_residuals_of_a_rule_spare_its_forward():
    for policy, again in (("full", PRODUCT), ("save(context)", 0)):
        fn = jaxckpt.remat(attention_layer, policy=policy)
        graph = jaxckpt.trace(fn, W, X, argnums=None)
        assert graph.recompute_flops == again


@pytest.mark.parametrize("function", [jnp.tanh, jnp.exp, jax.nn.sigmoid])
def test_keeping_a_named_activation_spares_the_product_before_it(function):
    # The derivative reads the activation before its name: the same bytes.
    def fn(w, x):
        return checkpoint_name(function(x @ w), "activation") @ w

    kept = jaxckpt.remat(fn, policy="save(activation)")
    graph = jaxckpt.trace(kept, W, X, argnums=None)
    assert [r.name for r in graph.residuals if not r.argument] == ["activation"]
    assert graph.recompute_flops == 0
