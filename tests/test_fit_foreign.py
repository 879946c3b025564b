"""`fit` and `auto` on programs that are not ours: they fit, or say why not."""

import contextlib
import dataclasses
import functools

import chex
import foreign
import helpers
import jax
import optax
import pytest
from foreign import PROGRAMS

import jaxckpt
from jaxckpt import BudgetError, PlanError, _jax

pytestmark = pytest.mark.aot
# Such that activations are most of what is held.
SIZES = {"BATCH": 64, "SEQ": 64, "WIDTH": 32, "HEADS": 4}
QUICK = "remat_outside", "data_parallel"
each_program = pytest.mark.parametrize(
    "name",
    [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in PROGRAMS],
)
SGD = optax.sgd(0.1)
# Reasons for which a program is refused whatever the budget.
NO_PLANS = {"data_parallel": "shard_map"}


@contextlib.contextmanager
def sized(sizes):
    """Make programs of other sizes inside."""
    with pytest.MonkeyPatch.context() as patch:
        for name, size in sizes.items():
            patch.setattr(foreign, name, size)
        yield


def as_loss(case):
    """Return a program as `loss(params, batch)`, and these."""
    params, *others = case.args
    return lambda params, batch: case.fn(params, *batch), params, tuple(others)


@functools.cache
def large(name):
    """Return a program of large sizes as a loss, its parameters and its batch."""
    with sized(SIZES):
        case = PROGRAMS[name]()
        loss, params, batch = as_loss(case)
        # Traced while the sizes are these.
        closed, shapes = jax.make_jaxpr(loss, return_shape=True)(params, batch)
    run = _jax.jaxpr_function(closed)
    tree = jax.tree.structure(shapes)

    def fn(params, batch):
        return jax.tree.unflatten(tree, run(*jax.tree.leaves((params, batch))))

    return fn, params, batch


measure = functools.partial(jaxckpt.measure, optimizer=SGD, device="h100-80gb")
fit = functools.partial(jaxckpt.fit, optimizer=SGD, device="h100-80gb")


def plain_bytes(loss, params, batch):
    """Return the peak without any remat, its own taken away."""
    plan = jaxckpt.plan_from("none", loss, params, batch)
    return measure(loss, params, batch, plan=plan).peak_bytes


def check_refusal(error, budget):
    """Raise unless an error says why, and what would work."""
    if isinstance(error, PlanError):
        assert str(error)
        return
    assert error.least_feasible_bytes > budget
    assert error.holders and all(size > 0 for _, size in error.holders)
    assert f"`budget={budget}`" in str(error)


@each_program
def test_program_fits_three_fifths_or_says_why_not(name):
    loss, params, batch = large(name)
    budget = int(0.6 * plain_bytes(loss, params, batch))
    try:
        plan = fit(loss, params, batch, budget=budget)
    except (BudgetError, PlanError) as error:
        check_refusal(error, budget)
        if name in NO_PLANS:
            assert NO_PLANS[name] in str(error)
            return
        budget = error.least_feasible_bytes
        plan = fit(loss, params, batch, budget=budget)
    assert name not in NO_PLANS
    assert plan.compiled.peak_bytes <= budget
    # The program is its own jaxpr here; its stacks and values have the same names.
    assert measure(loss, params, batch, plan=plan).peak_bytes <= budget
    check_gradients(name, plan)


def check_gradients(name, plan):
    """Raise unless a plan gives the gradients of the program, at its small sizes."""
    loss, params, batch = as_loss(PROGRAMS[name]())
    plan = dataclasses.replace(plan, fingerprint=None)
    of_loss = functools.partial(jax.value_and_grad, has_aux=PROGRAMS[name]().has_aux)
    expected = helpers.interpret(of_loss(loss), params, batch)
    found = helpers.interpret(of_loss(plan.apply(loss)), params, batch)
    chex.assert_trees_all_close(found, expected, rtol=2e-4, atol=1e-5)


def test_auto_returns_the_function_that_fits():
    loss, params, batch = large("remat_outside")
    most = measure(loss, params, batch).peak_bytes
    options = {"optimizer": SGD, "device": "h100-80gb"}
    fitted = jaxckpt.auto(loss, params, batch, budget=int(0.6 * most), **options)
    assert measure(fitted, params, batch).peak_bytes <= 0.6 * most
