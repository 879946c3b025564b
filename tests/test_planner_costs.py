"""What a layer costs by the planner, against what JAX keeps and runs again."""

import functools
import random

import foreign
import helpers
import jax
import jax.numpy as jnp
import pytest
from helpers import POLICIES
from jax.ad_checkpoint import checkpoint_name

import jaxckpt
from jaxckpt import _jax
from jaxckpt.devices import Device, get_device
from jaxckpt.memory import seconds as seconds_module
from jaxckpt.planner.costs import layer_costs
from jaxckpt.planner.frontier import frontier, worth_saving
from jaxckpt.planner.program import read_stacks
from jaxckpt.xla.measure import trace_loss
from models import gpt, llama, moe, vit

# A chip on which nothing but products takes time.
PRODUCTS_ONLY = Device(
    "products only",
    "",
    peak_flops_per_second=1.0,
    memory_bytes_per_second=1e40,
    efficiency=1.0,
)
SMALL = {"num_layers": 2, "batch": 2, "seq": 16}
MODELS = {
    "gpt": lambda: gpt.tiny(**SMALL),
    "llama": lambda: llama.tiny(**SMALL),
    "moe": lambda: moe.tiny(expert_matmul="dense", **SMALL),
    "vit": lambda: vit.tiny(num_layers=2, batch=2),
}
FOREIGN = (
    "equinox_transformer",
    "nnx_transformer",
    "encoder_decoder",
    "u_net",
    "res_net",
    "mamba",
    "lora",
    "linen_loop",
    "linen_scan",
    "microbatches",
    "remat_outside",
)
# Attention in chunks is one operation of the planner, of which JAX runs only the part
# again that is read: cheaper where one of its two results is kept.
IN_CHUNKS = "gpt", "llama", "moe", "vit"
each_layer = pytest.mark.parametrize("name", [*MODELS, *FOREIGN])


@pytest.fixture(autouse=True, scope="module")
def _fast():
    with helpers.no_optimizations():
        yield


@functools.cache
def traced(name):
    if name in MODELS:
        return trace_loss(MODELS[name]())
    case = foreign.PROGRAMS[name]()
    return jaxckpt.trace(case.fn, *case.args, has_aux=case.has_aux)


@functools.cache
def layers_of(name):
    """Return each kind of layer once, priced in FLOPs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(seconds_module, "rate_of_factors", lambda width, device: 1.0)
        stacks = read_stacks(traced(name), PRODUCTS_ONLY)
    first = {}
    for layer in (layer for stack in stacks for layer in stack.layers):
        first.setdefault(layer.kind, layer)
    return tuple(first.values())


def under(body, wrt, policy):
    """Return the trace of a layer's program under a policy."""
    fn = jaxckpt.remat(_jax.jaxpr_function(body), policy=policy)
    args = [_jax.abstract_array(v.aval) for v in _jax.open_jaxpr(body).invars]
    return jaxckpt.trace(fn, *args, argnums=wrt)


def layer_under(layer, saved):
    wrt = [i for i, flag in enumerate(layer.wrt) if flag]
    return under(layer.body, wrt, layer.costs.policy(saved))


def about(flops):
    return pytest.approx(flops, rel=1e-6, abs=1e-6)


@each_layer
def test_flops_of_the_frontier_are_those_that_jax_runs_again(name):
    for layer in layers_of(name):
        points = frontier(layer.costs.stage)
        # Values that share a name cannot be kept one by one: two contexts of a layer.
        if name != "encoder_decoder":
            assert points[-1].seconds == about(0.0)
        for point in random.Random(0).sample(points, min(3, len(points))):
            again = layer_under(layer, point.saved).recompute_flops
            assert point.seconds == about(again)


@each_layer
def test_flops_of_random_choices_are_those_that_jax_runs_again(name):
    """Never less; and no more, but for chunks of attention and views kept instead."""
    rng = random.Random(1)
    for layer in layers_of(name):
        stage = layer.costs.stage
        offered = worth_saving(stage)
        for _ in range(2):
            saved = frozenset(rng.sample(offered, rng.randint(0, len(offered))))
            again = layer_under(layer, saved).recompute_flops
            assert stage.seconds(saved) >= again * (1 - 1e-6)
            if name not in (*IN_CHUNKS, "encoder_decoder"):
                assert stage.seconds(saved) == about(again)


@each_layer
def test_nothing_saved_runs_something_again_and_everything_saved_nothing(name):
    for layer in layers_of(name):
        stage = layer.costs.stage
        assert stage.residuals
        assert stage.run_again(stage.residuals) == frozenset()
        everything = under(
            layer.body,
            [i for i, flag in enumerate(layer.wrt) if flag],
            "save_everything()",
        )
        assert everything.recompute_flops == 0
        assert stage.seconds(()) == about(layer_under(layer, ()).recompute_flops)


@each_layer
def test_policies_keep_the_bytes_that_the_planner_counts(name):
    """Labels resolve, and keep the value they stand for and no other."""
    rng = random.Random(2)
    for layer in layers_of(name):
        stage = layer.costs.stage
        least = layer_under(layer, ()).residual_bytes
        points = frontier(stage)
        for point in [points[-1], rng.choice(points)]:
            kept = layer_under(layer, point.saved).residual_bytes
            assert kept - least <= point.bytes
            # Not kept twice: the input, which is kept anyway, under another name.
            assert kept - least >= point.bytes - layer.input_bytes


# --- One layer, known to the last product --------------------------------------------


def block_costs(attention=helpers.attend, wrt=None, fn=None, device=PRODUCTS_ONLY):
    """Return costs of the layer of `helpers`, its jaxpr and what is differentiated."""
    fn = fn or functools.partial(helpers.function_block, attention=attention)
    args = helpers.weights(), helpers.build("function")[1][1]
    leaves, tree = jax.tree.flatten(args)
    closed = jax.make_jaxpr(lambda *x: fn(*jax.tree.unflatten(tree, x)))(*leaves)
    wrt = list(range(len(leaves))) if wrt is None else wrt
    return layer_costs(closed, wrt, range(len(leaves) - 1), device), closed, wrt


def numbers(costs, *labels):
    of_label = {label: value for value, label in costs.labels.items()}
    return frozenset(of_label[label] for label in labels)


@pytest.fixture
def _counted(monkeypatch):
    """Price each product at one second."""

    def one(eqn, device):
        is_product = eqn is not None and eqn.primitive.name == "dot_general"
        return float(is_product)

    monkeypatch.setattr(seconds_module, "_product_seconds", one)


NAMED = {name: case for name, case in POLICIES.items() if case.kept is not None}


@pytest.mark.parametrize("policy", [n for n, c in NAMED.items() if c.kept])
@pytest.mark.usefixtures("_counted")
def test_products_of_named_values_are_those_written_down(policy):
    costs, *_ = block_costs()
    case = POLICIES[policy]
    found = costs.stage.seconds(numbers(costs, *case.kept))
    expected = case.products
    if "attention_probs" in case.kept:
        pytest.skip("kept and not read: the numerator of the softmax is")
    assert found == pytest.approx(expected)


@pytest.mark.usefixtures("_counted")
def test_products_of_nothing_saved_are_all_but_the_last():
    costs, *_ = block_costs()
    assert costs.stage.seconds(()) == pytest.approx(POLICIES["full"].products)
    assert costs.forward_seconds == pytest.approx(9)


@pytest.mark.parametrize("attention", [helpers.attend, helpers.fused_attend])
def test_residuals_are_those_of_the_layers_vjp(attention, monkeypatch):
    # Without names, which are values of their own to the planner.
    monkeypatch.setattr(helpers, "checkpoint_name", lambda x, name: x)
    costs, closed, wrt = block_costs(attention)
    leaves = [_jax.abstract_array(v.aval) for v in _jax.open_jaxpr(closed).invars]
    graph = jaxckpt.trace(_jax.jaxpr_function(closed), *leaves, argnums=wrt)
    kept = sorted(r.bytes for r in graph.residuals if not r.argument)
    found = sorted(costs.stage.sizes[v] for v in costs.stage.residuals)
    assert found == kept


@pytest.mark.parametrize("attention", [helpers.attend, helpers.fused_attend])
def test_each_label_keeps_its_value_alone(attention):
    costs, closed, wrt = block_costs(attention)
    stage = costs.stage
    offered = worth_saving(stage)
    assert len(offered) >= 10
    for value in offered:
        graph = under(closed, wrt, costs.policy(frozenset([value])))
        kept = [r.bytes for r in graph.residuals if not r.argument]
        assert kept == [stage.sizes[value]], costs.labels[value]


@pytest.mark.usefixtures("_counted")
def test_attention_with_a_rule_of_its_own_runs_once_where_its_results_are_kept():
    costs, closed, wrt = block_costs(helpers.fused_attend)
    saved = numbers(costs, *helpers.QKV, "context", "context_lse")
    before = saved - numbers(costs, "context_lse")
    stage = costs.stage
    assert stage.seconds(before) - stage.seconds(saved) == pytest.approx(1)
    graph = under(closed, wrt, costs.policy(saved))
    assert {r.name for r in graph.residuals if not r.argument} == {
        *helpers.QKV,
        "context",
        "context_lse",
    }


def test_frozen_weights_need_fewer_residuals():
    """Of a product with a frozen weight its other factor is read by nothing."""
    everything, closed, wrt = block_costs()
    names = sorted(helpers.FEATURES)
    frozen = [i for i in wrt if i >= len(names) or names[i] not in helpers.MLP_IN]
    some, *_ = block_costs(wrt=frozen)
    inputs_alone, *_ = block_costs(wrt=wrt[-1:])
    sizes = [c.stage.bytes(c.stage.residuals) for c in (everything, some, inputs_alone)]
    assert sizes[0] > sizes[1] > sizes[2] > 0
    for costs, moving in ((some, frozen), (inputs_alone, wrt[-1:])):
        graph = under(closed, moving, costs.policy(frontier(costs.stage)[-1].saved))
        assert graph.recompute_flops == 0


@pytest.mark.parametrize("frozen", ["apart", "stopped"])
def test_frozen_base_is_read_in_a_program(frozen):
    """LoRA: the base is another argument, or behind `stop_gradient`."""
    base = {"up": jnp.ones((3, 8, 16)), "down": jnp.ones((3, 16, 8))}
    own = {"a": jnp.ones((3, 8, 2)), "b": jnp.ones((3, 2, 16))}

    def run(own, base, x):
        def layer(x, w):
            own, base = w
            up = x @ base["up"] + (x @ own["a"]) @ own["b"]
            return x + jnp.tanh(up) @ base["down"], None

        return jnp.sum(jax.lax.scan(layer, jnp.sin(x), (own, base))[0])

    def stopped(params, x):
        return run(params["own"], jax.lax.stop_gradient(params["base"]), x)

    x = jnp.ones((4, 8))
    if frozen == "apart":
        graph = jaxckpt.trace(run, own, base, x)
    else:
        graph = jaxckpt.trace(stopped, {"own": own, "base": base}, x)
    layer = read_stacks(graph, PRODUCTS_ONLY)[0].layers[0]
    assert layer.gradient_bytes == 4 * (8 * 2 + 2 * 16)
    # x (the input), x @ a and tanh are read; nothing of the second product is.
    assert layer.costs.stage.bytes(layer.costs.stage.residuals) <= 4 * 4 * (2 + 2 * 16)


# --- Labels that are hard to write ----------------------------------------------------


def check_exact(fn, *offered):
    """Raise unless each of the labels is offered and keeps its value alone."""
    costs, closed, wrt = block_costs(fn=fn)
    for label in offered:
        saved = numbers(costs, label)
        graph = under(closed, wrt, costs.policy(saved))
        kept = [r.bytes for r in graph.residuals if not r.argument]
        assert kept == [costs.stage.bytes(saved)]
    return costs


def test_names_of_pattern_characters_stand_for_themselves():
    def fn(weights, x):
        x = checkpoint_name(jnp.tanh(x @ weights["query_proj"]), "h[0]*?")
        x = checkpoint_name(jnp.tanh(x @ weights["key_proj"]), "h[0]*??")
        return jnp.sin(x @ weights["value_proj"])

    check_exact(fn, "h[0]*?", "h[0]*??")


def test_values_of_one_name_are_counted_together():
    def fn(weights, x):
        for key in helpers.QKV:
            x = checkpoint_name(jnp.tanh(x @ weights[key]), "hidden")
        return jnp.sin(x)

    costs, closed, wrt = block_costs(fn=fn)
    for point in frontier(costs.stage):
        graph = under(closed, wrt, costs.policy(point.saved))
        kept = sum(r.bytes for r in graph.residuals if not r.argument)
        assert kept == point.bytes
        assert graph.recompute_flops == pytest.approx(0.0) or point.seconds > 0


def test_complex_values_and_insides_of_loops_are_not_offered():
    def fn(weights, x):
        z = jax.lax.complex(x @ weights["query_proj"], jnp.sin(x))
        x = jnp.abs(jnp.exp(checkpoint_name(z, "complex")) * z)
        step = lambda c, _: (checkpoint_name(jnp.sin(c), "inside"), None)  # noqa: E731
        x, _ = jax.lax.scan(step, x, None, length=3)
        return jnp.tanh(x @ weights["key_proj"])

    costs, closed, wrt = block_costs(fn=fn)
    assert not {"complex", "inside"} & set(costs.labels.values())
    for point in frontier(costs.stage):
        under(closed, wrt, costs.policy(point.saved)).residuals  # noqa: B018


# --- Programs -------------------------------------------------------------------------


def test_stack_of_a_model_has_its_sizes():
    (stack,) = read_stacks(traced("gpt"), get_device("h100-80gb"))
    layer = stack.layers[0]
    workload = MODELS["gpt"]()
    width = workload.params["token_embedding"]["embedding"].shape[1]
    assert (stack.scanned, len(stack.layers), stack.equal) == (True, 2, True)
    assert layer.input_bytes == SMALL["batch"] * SMALL["seq"] * width * 2
    weights = 12 * width**2 + 13 * width
    assert layer.gradient_bytes == 4 * weights
    assert 0 < layer.costs.forward_seconds < 1e-3


def test_keeping_takes_as_long_as_moving_a_value_a_few_times():
    device = get_device("h100-80gb")
    costs, *_ = block_costs(device=device)
    stage = costs.stage
    everything = frontier(block_costs()[0].stage)[-1].saved
    rate = device.memory_bytes_per_second * device.efficiency
    once = stage.bytes(everything) / rate
    assert not block_costs()[0].stage.keeping[0] > 1e-30
    assert 2 * once <= sum(stage.keeping[v] for v in everything) <= 5 * once
    assert stage.seconds(everything) >= 2 * once


def test_equal_layers_are_read_once_and_others_apart():
    stacks = read_stacks(traced("encoder_decoder"), PRODUCTS_ONLY)
    assert [len(stack.layers) for stack in stacks] == [3, 4]
    assert [stack.scanned for stack in stacks] == [True, False]
    for stack in stacks:
        stage = stack.layers[0].costs.stage
        assert stack.equal
        assert all(layer.costs.stage is stage for layer in stack.layers)


def test_layer_that_reads_the_batch_is_no_free_layer():
    """The first of layers in a Python loop takes the batch; the others do not."""

    def loss(params, x):
        for w in params:
            x = x + jnp.tanh(x @ w["up"]) @ w["down"]
        return jnp.sum(x)

    params = [{"up": jnp.ones((8, 16)), "down": jnp.ones((16, 8))}] * 4
    x = jnp.ones((4, 8))
    (stack,) = read_stacks(jaxckpt.trace(loss, params, x), PRODUCTS_ONLY)
    for layer in stack.layers:
        assert layer.input_bytes == 4 * 4 * 8
        assert frontier(layer.costs.stage)[0].seconds > 0
