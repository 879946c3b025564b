"""Chains under lists of actions: gradients, what runs in the program, its memory."""

import functools
import random

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from helpers_executor import random_actions

from jaxckpt import ScheduleError, WorkloadError, _jax, executor
from jaxckpt.policy import save_everything
from jaxckpt.xla.compile import compile_for

LISTS = {
    "full": lambda steps: executor.actions_from("full", steps),
    "none": lambda steps: executor.actions_from("none", steps),
    "every(3)": lambda steps: executor.actions_from("every(3)", steps),
    "nested": lambda steps: executor.actions_from("nested(2, 2)", steps),
    "remat_every": lambda steps: executor.actions_from("remat_every(2)", steps),
    "binomial": lambda steps: executor.binomial(steps, 3),
    "mixed": lambda steps: executor.mixed(steps, 3),
    "two_level": lambda steps: executor.two_level(steps, 1, 2, 2.0, 2.0),
}


def layer(weights, x):
    return jnp.sin(x @ weights)


def dropped(weights, x, *, rng, scale):
    y = x + jnp.tanh(x @ weights["in"]) @ weights["out"] * scale
    return jnp.where(jax.random.bernoulli(rng, 0.8, y.shape), y, 0.0)


def widened(weights, x, *, table):
    return jnp.concatenate([x @ weights, jnp.tanh(x) @ table.T], axis=-1)


def narrowed(weights, x, *, table, scale):
    return (x @ weights) * jnp.sum(table) * scale


def embedded(_, tokens, *, table):
    return table[tokens]


STAGES = [embedded, dropped, dropped, widened, narrowed, dropped, layer]


def mixed_chain():
    """Return parameters, tokens and keywords of `STAGES`, whose shapes differ."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape) / 2, jnp.float32)  # noqa: E731
    pair = lambda: {"in": draw(6, 8), "out": draw(8, 6)}  # noqa: E731
    params = [None, pair(), pair(), draw(6, 5), draw(10, 6), pair(), draw(6, 3)]
    tokens = jnp.asarray(rng.integers(0, 5, size=(3, 2)))
    shared = {"table": draw(5, 6), "scale": jnp.float32(0.7)}
    return params, tokens, shared


def composed(stages, params, x, rng=None, has_aux=False, **shared):
    """Run stages one after another, with what each takes by name."""
    aux = []
    for number, (stage, own) in enumerate(zip(stages, params, strict=True)):
        names = stage.__code__.co_varnames[
            : stage.__code__.co_argcount + stage.__code__.co_kwonlyargcount
        ]
        given = {k: v for k, v in shared.items() if k in names}
        if "rng" in names:
            given["rng"] = jax.random.fold_in(rng, number)
        x = stage(own, x, **given)
        if has_aux:
            x, more = x
            aux.append(more)
    return (x, aux) if has_aux else x


def gradients_of(chain, params, x, jit=True, **given):
    """Return value and gradients for parameters and shared arrays."""
    keyword = {k: v for k, v in given.items() if k != "rng"}

    def loss(params, keyword):
        y = chain(params, x, rng=given.get("rng"), **keyword)
        return jnp.sum(y**2), y

    both = jax.value_and_grad(loss, (0, 1), has_aux=True)
    return (jax.jit(both) if jit else both)(params, keyword)


@pytest.mark.parametrize("seed", range(50))
def test_gradients_of_random_lists_equal_plain_ones(seed):
    # Jitted now and then only: operation by operation nothing is compiled anew.
    params, tokens, shared = mixed_chain()
    storages = ("device", "host") if seed % 2 else ("device",)
    actions = random_actions(7, random.Random(seed), storages=storages)
    chain = executor.checkpoint_chain(STAGES, actions)
    given = {"rng": jax.random.key(seed), "jit": seed % 10 == 0, **shared}
    found = gradients_of(chain, params, tokens, **given)
    again = gradients_of(chain, params, tokens, **given)
    plain = functools.partial(composed, STAGES)
    expected = gradients_of(plain, params, tokens, **given)
    chex.assert_trees_all_close(found, expected, rtol=2e-6, atol=2e-6)
    chex.assert_trees_all_equal(found, again)


@pytest.mark.parametrize("scan", [True, False])
@pytest.mark.parametrize("name", LISTS)
def test_equal_stages_in_loops_and_straight_give_plain_gradients(name, scan):
    weights = list(jax.random.normal(jax.random.key(0), (9, 4, 4)))
    x = jax.random.normal(jax.random.key(1), (3, 4))
    chain = executor.checkpoint_chain([layer] * 9, LISTS[name](9), scan=scan)
    plain = functools.partial(composed, [layer] * 9)
    chex.assert_trees_all_close(
        gradients_of(chain, weights, x), gradients_of(plain, weights, x), rtol=1e-5
    )


@pytest.mark.parametrize("seed", range(12))
def test_random_lists_run_in_loops(seed):
    rng = np.random.default_rng(seed)
    stages = [widened_in, *[dropped] * 8, layer]
    pair = {"in": jnp.ones((6, 8)) / 9, "out": jnp.ones((8, 6)) / 8}
    params = [jnp.ones((4, 6)), *[pair] * 8, jnp.ones((6, 2))]
    shared = {"scale": jnp.float32(0.3)}
    x, key = jnp.asarray(rng.normal(size=(3, 4)), jnp.float32), jax.random.key(seed)
    actions = random_actions(10, random.Random(seed), tapes=seed % 2 == 0)
    found, expected = (
        gradients_of(fn, params, x, rng=key, **shared)
        for fn in (
            executor.checkpoint_chain(stages, actions),
            functools.partial(composed, stages),
        )
    )
    chex.assert_trees_all_close(found, expected, rtol=1e-5, atol=1e-6)


def widened_in(weights, x):
    return x @ weights


def test_a_tape_loaded_between_two_groups_is_the_one_that_is_reversed():
    keep = [executor.Keep(i, policy=save_everything()) for i in range(4)]
    load, drop, reverse = executor.Load, executor.Drop, executor.Reverse
    actions = [*keep, executor.Keep(4), executor.Advance(4, 5), load(4), reverse(4)]
    actions += [load(3), drop(4), drop(3), reverse(3)]
    actions += [a for i in (2, 1, 0) for a in (load(i), drop(i), reverse(i))]
    stages = [*[layer] * 4, lambda w, x: jnp.cos(x) * w]
    weights = [*jax.random.normal(jax.random.key(0), (4, 4, 4)), jnp.ones(4)]
    chain = executor.checkpoint_chain(stages, actions)
    found, expected = (
        gradients_of(fn, weights, jnp.ones((2, 4)))
        for fn in (chain, functools.partial(composed, stages))
    )
    chex.assert_trees_all_close(found, expected, rtol=1e-5)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
@pytest.mark.parametrize("name", ["binomial", "mixed"])
def test_random_keys_travel_in_the_state_of_loops(name, impl):
    def stage(weights, state):
        key, draw = jax.random.split(state["key"])
        noise = jax.random.normal(draw, state["x"].shape)
        return {"key": key, "x": jnp.sin(state["x"] @ weights + 0.1 * noise)}

    weights = list(jax.random.normal(jax.random.key(0), (6, 3, 3)))
    state = {"key": jax.random.key(1, impl=impl), "x": jnp.ones((2, 3))}
    chain = executor.checkpoint_chain([stage] * 6, LISTS[name](6))
    plain = functools.partial(composed, [stage] * 6)
    found, expected = (
        jax.jit(jax.grad(lambda w, fn=fn: jnp.sum(fn(w, state)["x"])))(weights)
        for fn in (chain, plain)
    )
    chex.assert_trees_all_close(found, expected, rtol=1e-5)


def test_host_slots_run_in_loops():
    sizes = []
    for steps in (24, 48):
        actions = executor.two_level(steps, 2, 3, 2.0, 2.0)
        sizes.append(_compiled_gradient(actions).as_text().count("\n"))
    assert sizes[1] < 1.7 * sizes[0]


@pytest.mark.parametrize("scan", [True, False])
def test_stacked_stages_take_and_return_stacks(scan):
    stacked = jax.random.normal(jax.random.key(0), (8, 4, 4))
    first, x = jnp.ones((3, 4)), jnp.ones((2, 3))
    stages = [widened_in, executor.repeat(layer, 8)]
    chain = executor.checkpoint_chain(stages, executor.binomial(9, 3), scan=scan)
    found = gradients_of(chain, [first, stacked], x)
    plain = lambda params, x, rng: composed(  # noqa: E731
        [widened_in, *[layer] * 8], [params[0], *params[1]], x
    )
    chex.assert_trees_all_close(found, gradients_of(plain, [first, stacked], x))
    assert found[1][0][1].shape == (8, 4, 4)


@pytest.mark.parametrize("scan", [True, False])
def test_auxiliary_outputs_are_returned_and_differentiated(scan):
    def routed(weights, x):
        y = jnp.tanh(x @ weights)
        return y, {"balance": jnp.mean(y**2), "count": jnp.int32(3)}

    weights = list(jax.random.normal(jax.random.key(0), (6, 4, 4)))
    stages, x = [routed] * 6, jnp.ones((2, 4))
    actions = executor.binomial(6, 2)
    chain = executor.checkpoint_chain(stages, actions, has_aux=True, scan=scan)

    def loss(fn, weights):
        y, aux = fn(weights, x)
        return jnp.sum(y) + sum((i + 1) * a["balance"] for i, a in enumerate(aux)), aux

    plain = functools.partial(composed, stages, has_aux=True)
    found, expected = (
        jax.jit(jax.value_and_grad(functools.partial(loss, fn), has_aux=True))(weights)
        for fn in (chain, plain)
    )
    chex.assert_trees_all_close(found, expected, rtol=1e-5)
    chex.assert_trees_all_close(chain(weights, x), plain(weights, x), rtol=1e-5)


def test_auxiliary_outputs_survive_turns_of_a_loop_that_run_nothing():
    def counted(weights, x):
        return x * weights, jnp.sum(x)

    keep, load, reverse = executor.Keep, executor.Load, executor.Reverse
    actions = [keep(0), executor.Advance(0, 2), keep(2), load(2), keep(2, "host")]
    actions += [load(2), executor.Advance(2, 5), reverse(5)]
    for i in (4, 3, 2):
        actions += [load(2), *[executor.Advance(2, i)] * (i > 2), reverse(i)]
    actions += [load(0), executor.Advance(0, 1), reverse(1), load(0), reverse(0)]
    chain = executor.checkpoint_chain([counted] * 6, actions, has_aux=True)
    plain = functools.partial(composed, [counted] * 6, has_aux=True)
    weights = [jnp.float32(i + 2) for i in range(6)]
    found, expected = (
        jax.jit(jax.value_and_grad(lambda w, fn=fn: fn(w, 1.0), has_aux=True))(weights)
        for fn in (chain, plain)
    )
    chex.assert_trees_all_close(found, expected)


def test_policies_choose_what_of_a_stage_stays():
    weights = list(jax.random.normal(jax.random.key(0), (4, 6, 6)))

    def named(weights, x):
        up = jax.ad_checkpoint.checkpoint_name(x @ weights, "up")
        return jnp.sin(jnp.sin(up) @ weights)

    x = jnp.ones((2, 6))
    plain = gradients_of(functools.partial(composed, [named] * 4), weights, x)
    counts = {}
    for rule in ("full", "uniform(save(up))", "none"):
        actions = executor.actions_from(rule, 4)
        chain = executor.checkpoint_chain([named] * 4, actions, scan=False)
        found = gradients_of(chain, weights, x)
        chex.assert_trees_all_close(found, plain, rtol=1e-5)
        loss = lambda w, chain=chain: jnp.sum(chain(w, x))  # noqa: E731
        lowered = jax.jit(jax.grad(loss)).lower(weights)
        counts[rule] = lowered.as_text().count("dot_general")
    assert counts["full"] > counts["uniform(save(up))"] > counts["none"]


def test_frozen_parameters_get_no_gradient_work():
    weights = [jnp.ones((4, 4))] * 6
    chain = executor.checkpoint_chain([layer] * 6, executor.binomial(6, 2), scan=False)

    def products(fn):
        return str(jax.make_jaxpr(fn)(weights, jnp.ones((2, 4)))).count("dot_general[")

    of_both = jax.grad(lambda w, x: jnp.sum(chain(w, x)), (0, 1))
    of_last = jax.grad(lambda w, x: jnp.sum(chain([*weights[:5], w[5]], x)))
    assert products(of_both) - products(of_last) == 5


def test_closed_over_arrays_get_gradients():
    weights, bias, x = [jnp.ones((4, 4)) / 5] * 5, jnp.ones(4), jnp.ones((2, 4))

    def loss(run, bias):
        stage = lambda w, x: jnp.tanh(x @ w + bias)  # noqa: E731
        return jnp.sum(run([stage] * 5)(weights, x))

    by_list = functools.partial(
        executor.checkpoint_chain, actions=executor.binomial(5, 2)
    )
    plain = lambda stages: functools.partial(composed, stages)  # noqa: E731
    found = jax.jit(jax.grad(functools.partial(loss, by_list)))(bias)
    expected = jax.grad(functools.partial(loss, plain))(bias)
    chex.assert_trees_all_close(found, expected, rtol=1e-5)


def test_linen_and_nnx_modules_are_stages():
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, deterministic=False):
            y = nn.Dense(4)(nn.tanh(x))
            return x + nn.Dropout(0.5, deterministic=deterministic)(y)

    linear = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    x = jnp.ones((2, 4))
    own = [Block().init(jax.random.key(i), x, True)["params"] for i in range(5)]
    params = [*own, nnx.state(linear, nnx.Param)]
    key = jax.random.key(7)
    chain = executor.checkpoint_chain([Block()] * 5 + [linear], LISTS["binomial"](6))

    def plain(params, x, rng):
        for i, tree in enumerate(params[:5]):
            rngs = {"dropout": jax.random.fold_in(rng, i)}
            x = Block().apply({"params": tree}, x, rngs=rngs)
        return nnx.merge(nnx.graphdef(linear), params[5])(x)

    found, expected = (gradients_of(f, params, x, rng=key) for f in (chain, plain))
    chex.assert_trees_all_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("scan", [True, False])
def test_hessian_vector_products_work(scan):
    weights = list(jax.random.normal(jax.random.key(0), (5, 3, 3)))
    x = jnp.ones((2, 3))
    chain = executor.checkpoint_chain([layer] * 5, executor.binomial(5, 2), scan=scan)

    def product(fn):
        gradient = jax.grad(lambda w: jnp.sum(fn(w, x) ** 2))
        return jax.jvp(gradient, (weights,), (weights,))[1]

    plain = functools.partial(composed, [layer] * 5)
    chex.assert_trees_all_close(product(chain), product(plain), rtol=1e-4)


@pytest.mark.skipif(_jax.version() < (0, 11), reason="its CPU compiler drops barriers")
@pytest.mark.parametrize("name", ["binomial", "mixed"])
@pytest.mark.parametrize(("steps", "slots"), [(10, 3), (24, 4), (32, 8), (48, 6)])
def test_compiled_program_runs_and_holds_what_the_simulator_says(name, steps, slots):
    actions = getattr(executor, name)(steps, slots)
    compiled = _compiled_gradient(actions, scan=False)
    forwards = executor.simulate(actions).forwards
    # Each stage's backward has two products but the first's: x0 has no gradient.
    assert compiled.as_text().count(" dot(") == forwards + 2 * steps - 1
    # A tape is two states here, the input and a cosine; a stage's work is two more.
    states = slots if name == "binomial" else 2 * slots
    temp_bytes = compiled.memory_analysis().temp_size_in_bytes
    assert temp_bytes <= (states + 4) * STATE_BYTES


STATE_BYTES = 1024 * 64 * 4


def _compiled_gradient(actions, **settings):
    chain = executor.checkpoint_chain([layer] * actions.steps, actions, **settings)
    weights = [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * actions.steps
    x = jax.ShapeDtypeStruct((1024, 64), jnp.float32)
    gradient = jax.grad(lambda weights, x: jnp.sum(chain(weights, x)))
    return jax.jit(gradient).lower(weights, x).compile()


@pytest.mark.parametrize("name", ["binomial", "mixed"])
def test_looped_program_does_not_grow_with_the_depth(name):
    sizes = [
        _compiled_gradient(getattr(executor, name)(steps, 6)).as_text().count("\n")
        for steps in (24, 96)
    ]
    # The stack of parameters is made of one array for each stage.
    assert sizes[1] < sizes[0] + 12 * (96 - 24)


@pytest.mark.aot
@pytest.mark.parametrize(
    ("actions", "host_states", "most"),
    [
        (executor.binomial(12, 3), 0, 7),
        (executor.two_level(12, 1, 3, 2.0, 2.0), 3, 8.01),
    ],
    ids=["binomial", "two_level"],
)
def test_absent_gpu_holds_the_slots_and_two_stages_work(actions, host_states, most):
    def stage(weights, x):
        return x + jnp.sin(x @ weights[0]) @ weights[1]

    chain = executor.checkpoint_chain([stage] * 12, actions, scan=False)
    weights = [jax.ShapeDtypeStruct((2, 256, 256), jnp.float32)] * 12
    x = jax.ShapeDtypeStruct((32768, 256), jnp.float32)
    gradient = jax.grad(lambda weights, x: jnp.sum(chain(weights, x)))
    found = compile_for(gradient, weights, x, device="h100-80gb")
    state_bytes = 32768 * 256 * 4
    assert found.footprint.host_bytes == host_states * state_bytes
    assert found.footprint.temp_bytes < most * state_bytes
    sines = found.hlo_text.count(" sine(")
    assert sines == executor.simulate(actions).forwards


def test_kept_on_the_host_is_of_the_host_memory_space():
    actions = executor.two_level(6, 1, 2, 2.0, 2.0)
    chain = executor.checkpoint_chain([layer] * 6, actions)
    weights, x = [jnp.ones((4, 4))] * 6, jnp.ones((2, 4))
    _, vjp = jax.vjp(lambda w: chain(w, x), weights)
    spaces = [_jax.memory_space(jax.typeof(leaf)) for leaf in jax.tree.leaves(vjp)]
    kept = [a for a in actions[: actions.forward_length] if "host" in str(a)]
    assert len([s for s in spaces if s != "device"]) == len(kept) > 0


def _params(count):
    return [jnp.ones((4, 4))] * count


def _called(stages, params, x=None, **given):
    chain = executor.checkpoint_chain(stages, executor.binomial(len(stages), 2))
    return chain(params, jnp.ones((2, 4)) if x is None else x, **given)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (
            lambda: executor.checkpoint_chain([], executor.binomial(1, 1)),
            WorkloadError,
            "`stages` is empty",
        ),
        (lambda: _called([layer, 3], _params(2)), WorkloadError, "stage 1 .*`int`"),
        (lambda: _called([layer] * 2, _params(3)), WorkloadError, "3 trees.*2 entries"),
        (
            lambda: _called([layer] * 2, jnp.ones(2)),
            WorkloadError,
            "list with one tree",
        ),
        (
            lambda: _called([layer] * 2, [jnp.ones((4, 3)), jnp.ones((4, 4))]),
            WorkloadError,
            r"stage 1 \(`layer`\) fails with what stage 0 returns, `float32\[2,3\]`",
        ),
        (
            lambda: _called([layer], _params(1), jnp.ones((2, 5))),
            WorkloadError,
            "stage 0 .*fails with the chain",
        ),
        (
            lambda: _called([layer], _params(1), mask=jnp.ones(2)),
            WorkloadError,
            "`mask` is a keyword of no stage",
        ),
        (
            lambda: executor.checkpoint_chain([layer] * 3, executor.binomial(4, 2)),
            ScheduleError,
            "made for 4 stages, and the chain has 3",
        ),
        (
            lambda: executor.checkpoint_chain(
                [layer], [executor.Keep(0, "disk"), executor.Reverse(0)]
            ),
            ScheduleError,
            "cannot write to disk.*ManualCheckpoint",
        ),
        (
            lambda: executor.checkpoint_chain([layer] * 2, [executor.Reverse(1)]),
            ScheduleError,
            "Action 0 of 1, `reverse 1`, is illegal",
        ),
        (
            lambda: executor.checkpoint_chain(
                [executor.repeat(layer, 3)], executor.binomial(3, 2)
            )([jnp.ones((2, 4, 4))], jnp.ones((2, 4))),
            WorkloadError,
            r"stacked: `\[3, \.\.\.\]`",
        ),
        (lambda: executor.repeat(layer, 0), WorkloadError, "`times=0`"),
        (
            lambda: executor.checkpoint_chain(layer, executor.binomial(1, 1)),
            WorkloadError,
            "`stages` is of type `function`",
        ),
        (
            lambda: _called([layer], _params(1), rng=3),
            WorkloadError,
            "`rng=3` is no random key",
        ),
        (
            lambda: _called([functools.partial(dropped)], _params(1), scale=True),
            WorkloadError,
            "`scale=True` is no array. Bind",
        ),
        (
            lambda: _called([dropped], _params(1), scale=jnp.ones(())),
            WorkloadError,
            r"and `scale`, no `rng` \(the chain got none\)",
        ),
        (
            lambda: executor.checkpoint_chain([layer] * 4, [executor.Reverse(0)]),
            ScheduleError,
            "made for 1 stages, and the chain has 4",
        ),
    ],
)
def test_wrong_input_gets_one_message(call, error, text):
    with pytest.raises(error, match=text):
        call()


def test_a_chain_runs_inside_shard_map_or_says_why_not():
    auto, spec = jax.sharding.AxisType.Auto, jax.sharding.PartitionSpec
    mesh = jax.make_mesh((1,), ("data",), axis_types=(auto,))
    weights = list(jax.random.normal(jax.random.key(0), (5, 4, 4)))
    x = jnp.ones((4, 4))

    def gradient(fn):
        def loss(weights, x):
            return jax.lax.pmean(jnp.sum(fn(weights, x) ** 2), "data")

        specs = {"in_specs": (spec(), spec("data")), "out_specs": spec()}
        mapped = jax.shard_map(loss, mesh=mesh, **specs)
        return jax.jit(jax.grad(mapped))(weights, x)

    chain = executor.checkpoint_chain([layer] * 5, executor.binomial(5, 2))
    if _jax.version() < (0, 12):
        with pytest.raises(WorkloadError, match=r"needs jax 0\.12 or newer, or `check"):
            gradient(chain)
        return
    plain = functools.partial(composed, [layer] * 5)
    chex.assert_trees_all_close(gradient(chain), gradient(plain), rtol=1e-5)
