"""Programs without their calls."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxckpt import _jax
from jaxckpt.graph.inline import flattened


def test_flattened_takes_away_what_it_is_told():
    names = "first", "second"
    layers = [
        jax.checkpoint(lambda x, n=n: jnp.sin(jax.named_scope(n)(jnp.cos)(x)))
        for n in names
    ]
    closed = jax.make_jaxpr(lambda x: layers[1](layers[0](x)))(1.0)
    seen = iter(range(2))
    chosen = flattened(closed, remat=lambda eqn: next(seen) == 0)
    primitives = [e.primitive.name for e in _jax.open_jaxpr(chosen).eqns]
    assert primitives[:2] == ["cos", "sin"] and len(primitives) == 3
    kept = _jax.open_jaxpr(flattened(closed, remat=False)).eqns
    assert all(_jax.remat_parameters(eqn) for eqn in kept)


def test_flattened_keeps_constants_and_name_stacks_of_calls():
    constant = np.arange(16.0).reshape(4, 4)

    @jax.jit
    def inner(x):
        with jax.named_scope("inner"):
            return x @ constant

    def fn(x):
        with jax.named_scope("outer"):
            return inner(inner(x)) + constant

    x = jnp.ones((4, 4))
    flat = flattened(jax.make_jaxpr(fn)(x))
    np.testing.assert_array_equal(_jax.jaxpr_function(flat)(x)[0], fn(x))
    eqns = _jax.open_jaxpr(flat).eqns
    assert "jit" not in [e.primitive.name for e in eqns]
    assert _jax.scope(eqns[0]) == "outer/inner"
