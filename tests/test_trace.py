"""Graphs of whole programs: what was traced, opened, moved and left unknown."""

import helpers
import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas as pl
from programs import PROGRAMS, WEIGHTS, W, X, flat, layer, of_inexact

import jaxckpt
from jaxckpt import _jax
from jaxckpt.errors import WorkloadError
from jaxckpt.graph import residuals as residuals_module
from jaxckpt.graph.flops import find_unknown
from jaxckpt.matmul import Matmul, register_matmul


def shapes(arrays):
    return sorted((str(a.dtype), tuple(a.shape)) for a in arrays if a.shape)


@pytest.mark.parametrize("name", PROGRAMS)
def test_of_odd_programs_residuals_are_what_the_vjp_closure_holds(name):
    fn, args = PROGRAMS[name]
    held = jax.tree.leaves(jax.vjp(*_with_arguments(fn, args))[1])
    graph = jaxckpt.trace(fn, *args, argnums=None)
    assert shapes(graph.residuals) == shapes({id(a): a for a in held}.values())


def _with_arguments(fn, args):
    function, inexact = of_inexact(*flat(fn, args))
    return function, *inexact


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_operation_of_odd_programs_has_a_cost(name):
    fn, args = PROGRAMS[name]
    graph = jaxckpt.trace(fn, *args, argnums=None)
    makes = (e for e in graph.equations if e.primitive not in ("empty", "empty2"))
    assert all(e.bytes > 0 for e in makes)
    assert graph.gradient_flops >= graph.forward_flops > 0 or name == "sorted_values"
    assert graph.recompute_flops >= 0


# --- What was traced -----------------------------------------------------------------


def loss(params, x, scale=1.0):
    hidden = jnp.sin(x @ params["w"]) * scale
    return jnp.sum(hidden), {"hidden": hidden}


def test_a_graph_knows_what_was_traced():
    graph = jaxckpt.trace(loss, {"w": W}, X, argnums=(0, 1), has_aux=True)
    assert graph.fn is loss and graph.has_aux and graph.argnums == (0, 1)
    assert jax.tree.structure(graph.args) == jax.tree.structure(({"w": W}, X))
    assert [a.shape for a in jax.tree.leaves(graph.args)] == [W.shape, X.shape]
    assert all(isinstance(a, jax.ShapeDtypeStruct) for a in jax.tree.leaves(graph.args))
    # So the gradient's program can be built again.
    gradient = jax.grad(graph.fn, graph.argnums, has_aux=graph.has_aux)
    assert len(jax.make_jaxpr(gradient)(*graph.args).out_avals) == 3


def test_the_plain_program_has_the_same_signature_and_results():
    remat = jax.checkpoint(loss)
    graph = jaxckpt.trace(remat, {"w": W}, X, has_aux=True)
    assert not graph.plain.has_remat and graph.plain.args == graph.args
    got, wanted = graph.plain.fn({"w": W}, X), loss({"w": W}, X)
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    assert jnp.allclose(got[0], wanted[0])
    assert graph.plain.plain is graph.plain


def test_negative_argnums_count_from_the_end():
    def count(argnums):
        return len(jaxckpt.trace(lambda a, b: a @ b, X, W, argnums=argnums).residuals)

    graph = jaxckpt.trace(lambda a, b: jnp.sin(a) @ b, X, W, argnums=-1)
    assert [r.primitive for r in graph.residuals] == ["sin"]
    assert count((-1, -2)) == count(None) == 2


@pytest.mark.parametrize("argnums", [2, -3, (0, 5)])
def test_argnums_without_an_argument_are_refused(argnums):
    with pytest.raises(ValueError, match="given 2 arguments: 0 to 1"):
        jaxckpt.trace(lambda a, b: a @ b, X, W, argnums=argnums)


def test_an_argument_that_is_no_array_is_refused_with_its_place():
    with pytest.raises(WorkloadError, match=r"Argument 0 holds .* at `\['act'\]`"):
        jaxckpt.trace(lambda p, x: p["act"](x @ p["w"]), {"w": W, "act": jnp.tanh}, X)


# --- Values of what is rematerialised ------------------------------------------------


def layers_of(graph):
    """Return how often each named value and product of the layer is made."""
    found = {"hidden": 0, "products": 0}
    for value in graph.values:
        found["hidden"] += value.times * (value.name == "hidden")
        found["products"] += value.times * (value.dot is not None)
    return found


@pytest.mark.parametrize("schedule", helpers.PLAIN_SCHEDULES)
@pytest.mark.parametrize("form", ["explicit", "scan", "unrolled"])
def test_values_of_a_stack_are_those_of_its_layers(schedule, form):
    weights = jnp.concatenate([WEIGHTS, WEIGHTS])

    def fn(weights, x):
        rule = helpers.PLAIN_SCHEDULES[schedule]
        return jaxckpt.run_layers(layer, x, weights, rule, form=form)[0]

    graph = jaxckpt.trace(fn, weights, X)
    assert layers_of(graph) == {"hidden": 6, "products": 12}


def test_values_inside_a_checkpoint_are_listed():
    fn = jax.checkpoint(lambda w, x: layer(x, w)[0])
    graph = jaxckpt.trace(lambda w, x: jnp.sin(jax.jit(fn)(w, x)), W, X)
    assert layers_of(graph) == {"hidden": 1, "products": 2}
    assert all(
        "test_trace.py" in v.source or "programs.py" in v.source for v in graph.values
    )


# --- Work that is not known ----------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "unknown"),
    [
        ("fourier", {"fft"}),
        ("factorised", {"cholesky", "triangular_solve"}),
        ("solved", {"lu", "custom_linear_solve"}),
        ("sorted_values", {"sort"}),
        ("callback", {"pure_callback"}),
        ("functions_of_jax", set()),
        ("dropout", set()),
        ("attention", set()),
        ("on_a_mesh", set()),
        ("associative", set()),
        ("cumulative", set()),
        ("gathered", set()),
        ("convolution", set()),
        ("nnx_model", set()),
    ],
)
def test_operations_of_unknown_work_are_listed(name, unknown):
    fn, args = PROGRAMS[name]
    assert set(jaxckpt.trace(fn, *args, argnums=None).unknown) == unknown


def test_unknown_operations_are_counted_with_their_loops_the_largest_first():
    def fn(x):
        step = lambda c, _: (jnp.sort(c), None)  # noqa: E731
        x = lax.scan(step, x, None, length=5)[0]
        return jnp.fft.fft(jnp.tile(x, 100))

    unknown = jaxckpt.trace(fn, X, argnums=None).unknown
    # It reads float32 as complex64, once, and sorts in five steps.
    assert list(unknown) == ["fft", "sort"]
    assert unknown["fft"].bytes == 2 * 8 * 100 * X.size
    assert (unknown["sort"].times, unknown["sort"].bytes) == (5, 5 * 2 * X.nbytes)


def test_a_registered_product_is_known(monkeypatch):
    monkeypatch.setattr("jaxckpt.matmul._MATMULS", dict(jaxckpt.matmul._MATMULS))
    closed = jax.make_jaxpr(jnp.fft.fft)(jnp.ones(8, jnp.complex64))
    assert set(find_unknown(closed)) == {"fft"}
    register_matmul(Matmul("fft", lambda *_: False, lambda *_: 120))
    assert find_unknown(closed) == {}


def doubled(kernel):
    shape = jax.ShapeDtypeStruct((8, 4), jnp.float32)
    block = pl.BlockSpec((2, 4), lambda i: (i, 0))
    return pl.pallas_call(
        kernel, grid=(4,), in_specs=[block], out_specs=block, out_shape=shape
    )


def test_a_kernel_is_one_operation_with_the_bytes_that_it_is_given():
    def kernel(x_ref, out_ref):
        out_ref[...] = x_ref[...] @ jnp.ones((4, 4))

    x = jnp.ones((8, 4))
    graph = jaxckpt.trace(lambda x: doubled(kernel)(x) * 2, x, argnums=None)
    found = {e.primitive: (e.flops, e.bytes, e.times) for e in graph.equations}
    assert found["pallas_call"] == (2 * 8 * 4 * 4, 2 * x.nbytes, 1)
    assert "swap" not in found and graph.unknown == {}


def test_a_kernel_with_unknown_work_inside_is_listed():
    def kernel(x_ref, out_ref):
        out_ref[...] = jnp.sort(x_ref[...])

    graph = jaxckpt.trace(doubled(kernel), jnp.ones((8, 4)), argnums=None)
    assert set(graph.unknown) == {"pallas_call"}


# --- Bytes that are moved, and on one device -----------------------------------------


def moved(fn, *args):
    equations = jaxckpt.trace(fn, *args, argnums=None).equations
    return {e.primitive: e.bytes for e in equations}


def test_slices_gathers_and_updates_move_what_they_touch():
    table, row, index = jnp.ones((1000, 4)), jnp.ones((1, 4)), jnp.array(3)
    at = lambda f: moved(f, table, row, index)  # noqa: E731
    sliced = at(lambda t, r, i: lax.dynamic_slice(t, (i, 0), (1, 4)))
    assert sliced["dynamic_slice"] == 2 * row.nbytes
    assert at(lambda t, r, i: t.at[i].add(r[0]))["scatter-add"] == 2 * row.nbytes + 4
    updated = at(lambda t, r, i: lax.dynamic_update_slice(t, r, (i, 0)))
    assert updated["dynamic_update_slice"] == 2 * row.nbytes
    looked_up = at(lambda t, r, i: jnp.take(t, i[None], axis=0))["gather"]
    assert looked_up == 2 * row.nbytes + 4


def test_what_scatters_and_reductions_combine_by_is_no_program_of_its_own():
    def fn(x):
        x = x.at[jnp.array([0, 2])].mul(x[1:])
        return lax.reduce(x, 0.0, lambda a, b: a + 2 * b, (0,))

    graph = jaxckpt.trace(fn, X, argnums=None)
    found = {e.primitive for e in graph.equations}
    assert {"scatter-mul", "reduce"} <= found or {"scatter_mul", "reduce"} <= found
    assert not any(v.shape == () and v.dtype == "float32" for v in graph.values)
    assert graph.unknown == {}


# --- Cost of tracing itself ----------------------------------------------------------


def test_the_work_of_a_graph_grows_linearly_with_depth(monkeypatch):
    calls = [0]
    source_line, links = _jax.source_line, residuals_module._Links

    def line_counted(eqn):
        calls[0] += 1
        return source_line(eqn)

    def links_counted(jaxpr):
        calls[0] += len(jaxpr.eqns)
        return links(jaxpr)

    monkeypatch.setattr(_jax, "source_line", line_counted)
    monkeypatch.setattr(residuals_module, "_Links", links_counted)

    def visits(depth):
        def fn(w, x):
            for _ in range(depth):
                x = jax.jit(lambda x: jnp.tanh(x @ w).T.reshape(x.shape))(x)
            return x

        calls[0] = 0
        graph = jaxckpt.trace(fn, W, X)
        assert graph.residuals and graph.values and graph.equations
        return calls[0]

    assert visits(32) < 2.1 * visits(16)
