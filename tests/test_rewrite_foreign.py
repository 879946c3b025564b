"""`apply` on programs that are not ours: numbers, what runs again, what is kept."""

import functools

import chex
import foreign
import helpers
import jax
import pytest
from foreign import PROGRAMS

import jaxckpt
from jaxckpt import Keep, Remat, Segment, _jax
from jaxckpt.graph.flops import equations
from jaxckpt.graph.inline import without_remat
from jaxckpt.matmul import find_matmul
from jaxckpt.plan import Plan, as_rule, plan_from
from jaxckpt.policy_algebra import Nothing
from jaxckpt.rewrite import find_chain


class Mixed(jaxckpt.Schedule):
    """Every kind of node, for any depth from three on."""

    def _nodes(self, num_layers):
        dots = jaxckpt.save_dots()
        yield Remat(dots, 1)
        yield Segment([Keep(1), Remat(jaxckpt.save_nothing(), 1)])
        if num_layers > 3:
            yield Segment(Remat(dots, num_layers - 3))

    def __str__(self):
        return "mixed"


RULES = {
    str(rule): rule
    for rule in (
        "none",
        "full",
        "every(2)",
        "remat_every(2)",
        "nested(2, 2)",
        "dots",
        Mixed(),
    )
}
each_rule = pytest.mark.parametrize("rule", RULES)
each_program = pytest.mark.parametrize("name", PROGRAMS)
close = functools.partial(chex.assert_trees_all_close, rtol=1e-5, atol=1e-5)


@pytest.fixture(autouse=True, scope="module")
def _fast():
    with helpers.no_optimizations():
        yield


program = functools.cache(lambda name: PROGRAMS[name]())


@functools.cache
def chain(name):
    """Return a program as a chain of stages, its own remat taken away."""
    case = program(name)
    return find_chain(case.fn, case.args, existing="replace")


@functools.cache
def traced(name, rule):
    """Return the gradient of a program under a rule, traced; of None, as it is."""
    case = program(name)
    fn = case.fn
    if rule is not None:
        schedule = as_rule(RULES.get(rule, rule))
        plan = Plan(tuple((stack.name, schedule) for stack in chain(name).stacks))
        fn = plan.apply(fn)
    of_fn = jax.value_and_grad(fn, has_aux=case.has_aux)
    return jax.make_jaxpr(of_fn, return_shape=True)(*case.args)


@functools.cache
def results(name, rule):
    """Return value, aux and gradients of a program under a rule."""
    closed, shapes = traced(name, rule)
    leaves = jax.tree.leaves(program(name).args)
    if program(name).one_by_one:
        return helpers.interpret_program(closed, shapes, leaves)
    flat = jax.jit(_jax.jaxpr_function(closed))(*leaves)
    return jax.tree.unflatten(jax.tree.structure(shapes), flat)


def products(closed):
    """Return how many products a program runs."""
    live = equations(_jax.without_dead_code(closed))
    return sum(n for eqn, n in live if find_matmul(eqn.primitive.name))


@functools.cache
def plain_products(name):
    """Return the products of the gradient of a program without any remat."""
    case = program(name)
    leaves, tree = jax.tree.flatten(case.args)
    closed = jax.make_jaxpr(lambda *x: case.fn(*tree.unflatten(x)))(*leaves)
    plain = without_remat(closed)
    first = len(jax.tree.leaves(case.args[0]))

    def loss(differentiated, others):
        loss, *aux = plain(*differentiated, *others)
        return loss, aux

    of_plain = jax.value_and_grad(loss, has_aux=True)
    return products(jax.make_jaxpr(of_plain)(leaves[:first], leaves[first:]))


def products_again(nodes, layers, unread):
    """Return how many products run again, of layers of so many each.

    Written down from what the nodes mean: a segment runs up to the last value that its
    children read, which a layer's last products are not.
    """
    total = 0
    for node in nodes:
        total += _again(node, layers[: node.layers], unread)
        layers = layers[node.layers :]
    return total


def _again(node, layers, unread):
    if isinstance(node, Keep):
        return 0
    if isinstance(node, Remat):
        return sum(n - unread for n in layers) if _keeps_nothing(node) else 0
    last = node.children[-1]
    run = sum(layers) - unread
    if not isinstance(last, Keep) and _keeps_nothing(last):
        skipped = 1 if isinstance(last, Remat) else last.layers
        run = sum(layers[:-skipped])
    return run + products_again(node.children, layers, unread)


def _keeps_nothing(node):
    return isinstance(node.policy, Nothing)


@each_program
def test_stacks_are_found(name):
    case = program(name)
    assert tuple(stack.num_layers for stack in chain(name).stacks) == case.depths
    assert plan_from("full", case.fn, *case.args).depths == case.depths


@each_program
@each_rule
def test_values_and_gradients_are_those_of_the_program(name, rule):
    close(results(name, rule), results(name, None))
    chex.assert_trees_all_equal_shapes_and_dtypes(
        traced(name, rule)[1], traced(name, None)[1]
    )


@each_program
@each_rule
def test_products_run_again_as_the_schedule_says(name, rule):
    case = program(name)
    again = 0
    for stack in chain(name).stacks:
        layers = [products(s.body) for s in stack.stages for _ in range(s.layers)]
        nodes = as_rule(RULES[rule]).nodes(stack.num_layers)
        again += stack.stages[0].times * products_again(nodes, layers, case.unread)
    assert products(traced(name, rule)[0]) == plain_products(name) + again


@pytest.mark.parametrize("name", [n for n in PROGRAMS if program(n).names])
def test_policy_of_names_keeps_them_and_nothing_else(name):
    policy, again = program(name).names
    close(results(name, policy), results(name, None))
    depth = sum(program(name).depths)
    assert products(traced(name, policy)[0]) == plain_products(name) + depth * again


# Programs whose layers take and return one array of these bytes.
CARRY = 4 * foreign.BATCH * foreign.SEQ * foreign.WIDTH
ONE_ARRAY = (
    "nnx_transformer",
    "mamba",
    "lora",
    "linen_loop",
    "linen_scan",
)


@pytest.mark.parametrize("name", ONE_ARRAY)
def test_layer_inputs_that_are_kept_are_those_of_the_schedule(name):
    case = program(name)

    def kept(rule):
        plan = Plan(((chain(name).stacks[0].name, as_rule(rule)),))
        planned = plan.apply(case.fn)
        graph = jaxckpt.trace(planned, *case.args, has_aux=case.has_aux)
        return graph.residual_bytes

    full = kept("full")
    assert kept("every(2)") == full - 2 * CARRY
    assert kept("Segment(Keep(4))") == full - 3 * CARRY
    assert full < kept("none")
