"""Warnings about remat that does nothing, or not what its policy says."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from programs import WEIGHTS, X, layer

import jaxckpt
from jaxckpt.graph.advice import warnings_about

POLICIES = jax.checkpoint_policies
OFFLOADED = POLICIES.save_and_offload_only_these_names(
    names_which_can_be_saved=["hiden"],
    names_which_can_be_offloaded=["hidden"],
    offload_src="device",
    offload_dst="pinned_host",
)


def advice_about(policy):
    block = jax.checkpoint(lambda x, w: layer(x, w)[0], policy=policy)

    def fn(weights, x):
        return jnp.sum(lax.scan(lambda x, w: (block(x, w), None), x, weights)[0])

    return warnings_about(jaxckpt.trace(fn, WEIGHTS, X))


@pytest.mark.parametrize(
    ("policy", "says"),
    [
        (POLICIES.save_only_these_names("hiden"), ["nothing", "Did you mean `hidden`"]),
        (POLICIES.save_only_these_names("hidden", "out"), ["not all", "`out`"]),
        (OFFLOADED, ["not all", "`hiden`", "Did you mean `hidden`"]),
        (jaxckpt.save("hiden*"), ["nothing", "`hiden*`"]),
        (
            POLICIES.save_from_both_policies(
                POLICIES.dots_saveable, POLICIES.save_only_these_names("hiden")
            ),
            ["nothing", "`hiden`"],
        ),
    ],
)
def test_a_name_that_nothing_carries_is_said_of_bare_policies_too(policy, says):
    (advice,) = advice_about(policy)
    assert all(part in advice for part in says)


@pytest.mark.parametrize(
    "policy",
    [
        None,
        POLICIES.save_only_these_names("hidden"),
        POLICIES.save_any_names_but_these("hidden"),
        POLICIES.nothing_saveable,
        jaxckpt.save("hid*"),
        lambda primitive, *_, **params: primitive.name == "name",
    ],
)
def test_a_policy_that_does_what_it_says_is_not_warned_about(policy):
    assert advice_about(policy) == ()


def test_regions_under_one_policy_may_each_carry_some_of_its_names():
    policy = POLICIES.save_only_these_names("one", "two")

    def block(name):
        fn = lambda x, w: jnp.sin(checkpoint_name(jnp.sin(x @ w), name) @ w)  # noqa: E731
        return jax.checkpoint(fn, policy=policy)

    def fn(ws, x):
        for w in ws:
            x = block("two")(block("one")(x, w), w)
        return jnp.sum(x)

    assert warnings_about(jaxckpt.trace(fn, WEIGHTS, X)) == ()


def test_saving_all_but_some_names_is_said_to_save_all():
    policy = POLICIES.save_anything_except_these_names("hidden")
    assert any("keeps everything" in advice for advice in advice_about(policy))


def test_remat_round_a_scan_over_cast_parameters_is_seen():
    def stack(ws, x):
        return lax.scan(lambda x, w: (layer(x, w)[0], None), x, ws)[0]

    def fn(ws, x):
        low = ws.astype(jnp.bfloat16)
        return jnp.sum(jax.jit(jax.checkpoint(stack))(low, x.astype(jnp.bfloat16)))

    advice = warnings_about(jaxckpt.trace(fn, WEIGHTS, X))
    assert "inside the scan" in advice[0]
