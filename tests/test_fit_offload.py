"""Kept values in host memory: chosen against the host link, proven by the compiler."""

import dataclasses
import itertools
import json
import random

import chex
import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name
from test_planner_runs import random_layers, seconds_of, sequences, walk
from typer.testing import CliRunner

import jaxckpt
from jaxckpt import BudgetError, PlanError
from jaxckpt.cli import app
from jaxckpt.devices import get_device
from jaxckpt.planner.bound import least_seconds
from jaxckpt.planner.costs import LayerCosts
from jaxckpt.planner.fit import fit_workload
from jaxckpt.planner.frontier import Point
from jaxckpt.planner.offload import HostLink, offloaded_points
from jaxckpt.planner.runs import best_runs
from jaxckpt.planner.stage import Operation, StageCosts
from jaxckpt.rewrite import apply
from models import llama

H100 = get_device("h100-80gb")
MIB, GIB = 2**20, 2**30


# --- One layer ------------------------------------------------------------------------


def costs(*sizes, seconds=1.0):
    """Return a layer that makes its values one after another, each from the last."""
    operations = [
        Operation(seconds, (i - 1,) if i else (), (i,)) for i in range(len(sizes))
    ]
    stage = StageCosts(sizes, tuple(operations), frozenset(range(len(sizes))))
    labels = {i: f"v{i}" for i in range(len(sizes))}
    return LayerCosts(stage, {}, labels, seconds * len(sizes))


def everything(layer):
    stage = layer.stage
    saved = frozenset(range(len(stage.sizes)))
    return Point(saved, stage.bytes(saved), 0.0)


def test_the_first_values_hide_and_the_last_one_is_waited_for():
    layer = costs(MIB, MIB, MIB)  # made at 1, 2 and 3 s; a copy takes 1 s
    points = offloaded_points(layer, everything(layer), HostLink(MIB, 100 * MIB))
    assert [sorted(p.offloaded) for p in points] == [[0], [0, 1], [0, 1, 2]]
    assert [p.bytes for p in points] == [2 * MIB, MIB, 0]
    assert [p.host_bytes for p in points] == [MIB, 2 * MIB, 3 * MIB]
    # Out: the third leaves from 3 to 4 s. Back: the third and the second (read by the
    # third's operation, which is reversed first) are wanted at once, and come in 2 s.
    assert [p.seconds for p in points] == [0.0, 1.0, 3.0]


def test_a_slow_link_is_exposed_but_for_what_runs_beside_it():
    layer = costs(4 * MIB)
    (point,) = offloaded_points(layer, everything(layer), HostLink(MIB, 100 * MIB))
    assert point.seconds == 4.0 + 4.0


def test_small_values_stay():
    layer = costs(MIB - 1, 10)
    assert offloaded_points(layer, everything(layer), HostLink(1e9, 100 * MIB)) == []


def test_policy_says_where_each_value_stays():
    layer = costs(MIB, MIB)
    text = str(layer.policy(frozenset({0, 1}), frozenset({0})))
    assert text == "save(v1) | offload(v0)"
    assert str(layer.policy(frozenset({0}), frozenset({0}))) == "offload(v0)"


# --- Over layers ----------------------------------------------------------------------


def with_host(rng, layers):
    choices = [
        dataclasses.replace(c, host_bytes=rng.randint(0, 4)) for c in layers.choices
    ]
    return dataclasses.replace(layers, choices=tuple(choices))


def host_of(stacks, way):
    pairs = zip(stacks, way, strict=True)
    return sum(
        t.parts * s.choices[t.choice].host_bytes for s, runs in pairs for t in runs
    )


@pytest.mark.parametrize("part", range(4))
def test_runs_within_both_budgets_equal_brute_force(part):
    rng = random.Random(part)
    for _ in range(15):
        stacks = [
            with_host(rng, random_layers(rng, 5, 3, scale=1000))
            for _ in range(1 + part % 2)
        ]
        limit = 3 if len(stacks) == 1 else 2
        ways = list(itertools.product(*(sequences(s, runs=limit) for s in stacks)))
        if not ways:
            continue
        free, host = walk(stacks, rng.choice(ways), 0) + 500, rng.randint(0, 12)
        fits = [
            seconds_of(stacks, way)
            for way in ways
            if walk(stacks, way, 0) <= free and host_of(stacks, way) <= host
        ]
        found = best_runs(stacks, free, host_bytes=host)
        if not fits:
            assert found is None
            continue
        assert found is not None
        assert host_of(stacks, found.runs) <= host
        assert found.seconds == pytest.approx(min(fits), rel=1e-3, abs=1e-9)
        assert least_seconds(stacks, free, 0, host) <= min(fits) + 1e-6


# --- Whole steps ----------------------------------------------------------------------


def workload(**more):
    return llama.llama3_1b(batch=8, seq=8192, num_layers=6, **more)


@pytest.mark.aot
def test_host_memory_makes_a_tight_budget_fast_and_its_bytes_are_as_predicted():
    here = fit_workload(workload(), budget="17GiB", device=H100).plan.verified
    found = fit_workload(workload(), budget="17GiB", device=H100, host_budget="100GiB")
    there = found.plan.verified
    assert there.compiled.peak_bytes <= 17 * GIB
    # Six layers' attention context, 8 x 8192 x 2048 in bfloat16 each.
    assert there.host_bytes == found.compiled.host_bytes == 6 * 8 * 8192 * 2048 * 2
    assert there.compiled.step_seconds < 0.85 * here.compiled.step_seconds
    link = found.compiled.exposed_seconds + found.compiled.hidden_seconds
    assert link == pytest.approx(2 * there.host_bytes / 50e9, rel=1e-3)
    assert "offload(context)" in str(found.plan.rules[0][1])


@pytest.mark.aot
def test_host_budget_is_kept_within():
    found = fit_workload(workload(), budget="17GiB", device=H100, host_budget="1GiB")
    assert 0 <= found.plan.verified.host_bytes <= GIB


def test_layers_without_a_loop_are_refused_with_the_reason():
    def loss(params, x):
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    shapes = [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 4
    batch = jax.ShapeDtypeStruct((1024, 64), jnp.float32)
    with pytest.raises(PlanError, match="layers in a loop"):
        jaxckpt.fit(
            loss, shapes, batch, budget="1KiB", device="h100-80gb", host_budget="1GiB"
        )


@pytest.mark.parametrize("given", ["much", "-1GiB"])
def test_a_host_budget_that_is_none_is_refused(given):
    with pytest.raises(BudgetError, match="host_budget"):
        jaxckpt.fit(lambda p, b: 0.0, [], [], budget="1GiB", host_budget=given)


def test_offloading_plans_give_the_gradients_of_the_program():
    def layer(x, w):
        return x + jnp.tanh(checkpoint_name(x @ w, "product")), None

    def loss(weights, x):
        return jnp.mean(jax.lax.scan(layer, x, weights)[0] ** 2)

    weights = jax.random.normal(jax.random.key(0), (4, 8, 8))
    x = jax.random.normal(jax.random.key(1), (2, 8))
    rule = "Remat(offload(product), 2), Remat(save(product), 2)"
    fitted = apply(jaxckpt.plan_from(rule, loss, weights, x), loss)
    chex.assert_trees_all_close(
        jax.grad(fitted)(weights, x), jax.grad(loss)(weights, x), rtol=1e-6
    )


@pytest.mark.aot
def test_command_line_says_what_the_link_takes():
    arguments = ["fit", "models/llama.py:llama3_1b", "--set", "batch=8", "--set"]
    arguments += ["seq=8192", "--set", "num_layers=6", "--device", "h100-80gb"]
    arguments += ["--budget", "17GiB", "--host-budget", "100GiB", "--json"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert 0 < found["host_bytes"] <= found["host_budget_bytes"] == 100 * GIB
    assert found["host_link_exposed_seconds"] > 0
    assert found["host_link_hidden_seconds"] > 0
