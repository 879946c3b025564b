"""Chains of stages, checked and run, and small programs to cut."""

import jax
import jax.numpy as jnp
import numpy as np
from helpers import no_optimizations

from jaxckpt import _jax
from jaxckpt.graph.inline import opened_at
from jaxckpt.graph.stages import stages

WIDTH = 8


TOKENS = jnp.arange(6).reshape(2, 3)


def chain_of(fn, *args, **options):
    """Return the chain of a function, checked to be the function."""
    closed = jax.make_jaxpr(fn)(*args)
    chain = stages(closed, **options)
    check_every_equation_is_in_one_stage(chain)
    return chain


def check_every_equation_is_in_one_stage(chain):
    places = {}
    for stage in chain.stages:
        places.setdefault(stage.place, []).append((stage.start, stage.stop))
    for place, spans in places.items():
        opened = {p[len(place)] for p in places if p[: len(place)] == place != p}
        spans += [(number, number + 1) for number in opened]
        numbers = [i for start, stop in sorted(spans) for i in range(start, stop)]
        assert numbers == list(range(len(opened_at(chain.closed, place).eqns)))
    names = [stage.name for stage in chain.stages]
    assert len(set(names)) == len(names)


def run_stages(chain, *args):
    """Return what the program returns, run stage by stage."""
    leaves = jax.tree.leaves(args)
    return _run_stages(chain, chain.closed, (), leaves)


def _run_stages(chain, closed, place, arguments):
    jaxpr = _jax.open_jaxpr(closed)
    env = dict(zip(jaxpr.constvars, getattr(closed, "consts", ()), strict=True))
    env |= zip(jaxpr.invars, arguments, strict=True)
    steps = {s.start: s for s in chain.stages if s.place == place}
    for stage in chain.stages:
        if stage.place[: len(place)] == place != stage.place:
            steps[stage.place[len(place)]] = stage
    for start in sorted(steps):
        _run_step(chain, jaxpr, steps[start], start, place, env)
    outs = jaxpr.outvars
    return [v.val if isinstance(v, _jax.Literal) else env[v] for v in outs]


def _run_step(chain, jaxpr, stage, start, place, env):
    eqn = jaxpr.eqns[start]
    if stage.place == place and not stage.scanned:
        results = _jax.jaxpr_function(stage.body)(*(env[v] for v in stage.inputs))
        env.update(zip(stage.outputs, results, strict=True))
        return
    if stage.place != place:
        key = stage.place[len(place) + 1]
        inside = (*place, start, key)
        inner = _jax.inner_jaxprs(eqn)[key]

        def run(*values):
            return _run_stages(chain, _jax.close_jaxpr(inner), inside, values)

        types = [_jax.abstract_array(v.aval) for v in _jax.open_jaxpr(inner).invars]
        traced = run_traced(eqn, run, types, inner)
        eqn = _jax.replace_inner(eqn, {key: traced})
    alone = _jax.cut_jaxpr(jaxpr, [eqn], variables(eqn), made(eqn))
    results = _jax.jaxpr_function(alone)(*(env[v] for v in variables(eqn)))
    env.update(zip(made(eqn), results, strict=True))


def run_traced(eqn, run, types, inner):
    if eqn.primitive.name != "shard_map":
        return _jax.with_jaxpr(inner, _jax.open_jaxpr(jax.make_jaxpr(run)(*types)))
    return inner  # its axes are known inside only


def variables(eqn):
    return list(dict.fromkeys(v for v in eqn.invars if not isinstance(v, _jax.Literal)))


def made(eqn):
    return [v for v in eqn.outvars if not _jax.is_drop(v)]


def check_same(fn, *args, **options):
    """Return a function's chain, run stage by stage with the function's results."""
    chain = chain_of(fn, *args, **options)
    leaves = jax.tree.leaves(args)
    with no_optimizations():
        expected = _jax.jaxpr_function(jax.make_jaxpr(fn)(*args))(*leaves)
        for one, other in zip(run_stages(chain, *args), expected, strict=True):
            np.testing.assert_array_equal(one, other)
    return chain


def layer(x, w):
    return x + jnp.tanh(x @ w["a"]) @ w["b"]


def layer_weights(seed, width=WIDTH, inner=16):
    one, two = jax.random.split(jax.random.key(seed))
    return {
        "a": jax.random.normal(one, (width, inner)) / 4,
        "b": jax.random.normal(two, (inner, width)) / 4,
    }


def stacked(count, **sizes):
    trees = [layer_weights(i, **sizes) for i in range(count)]
    return jax.tree.map(lambda *xs: jnp.stack(xs), *trees)


def table(rows=11, width=WIDTH):
    return jax.random.normal(jax.random.key(5), (rows, width))


def summary(chain):
    """Return name, number of layers and whether it is a loop, of each stack."""
    return [(s.name, s.num_layers, s.scanned) for s in chain.stacks]


def kinds_of(stack):
    return {stage.kind for stage in stack.stages}


def scanned_loss(params, x):
    def body(x, w):
        return (layer(x, w), None)

    return jnp.sum(jax.lax.scan(body, x @ jnp.eye(WIDTH), params)[0])


def unrolled_loss(params, x):
    x = x @ jnp.eye(WIDTH)
    for i in range(4):
        x = layer(x, jax.tree.map(lambda w, i=i: w[i], params))
    return jnp.sum(x)


def residual_block(x, w):
    return jax.nn.relu(x + jax.nn.relu(x @ w["a"]) @ w["b"])
