"""`Plan` and `plan_from`: hand-written rules for any program, and what is refused."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from helpers import layer_forwards
from jax.ad_checkpoint import checkpoint_name

import jaxckpt
from jaxckpt import Keep, Segment, Stack, _jax, every, full, none, save, uniform
from jaxckpt.errors import JaxckptError, PlanError, PolicyError, ScheduleError
from jaxckpt.plan import Plan, as_rule, plan_from

DEPTH = 4
W = jax.random.normal(jax.random.key(0), (DEPTH, 4, 6)) / 2
X = jax.random.normal(jax.random.key(1), (2, 4))


def layer(x, w):
    up = checkpoint_name(jnp.tanh(x @ w), "up")
    return x + jnp.sin(jnp.sin(up) @ w.T), None


def loss(w, x):
    return jnp.sum(jnp.cos(jax.lax.scan(layer, x, w)[0]))


def two_stacks(params, x):
    """An encoder in a loop, and a decoder in another."""
    for name in ("encoder", "decoder"):
        with jax.named_scope(name):
            x, _ = jax.lax.scan(layer, x, params[name])
        x = jnp.exp(jnp.sin(x))
    return jnp.sum(x)


PARAMS = {"encoder": W, "decoder": W[:3]}


@pytest.mark.parametrize(
    ("rule", "schedule"),
    [
        (None, none()),
        ("none", none()),
        ("full", full()),
        ("every(2)", every(2)),
        ("save(up)", uniform(save("up"))),
        ("save(up) | offload_dots()", uniform(save("up") | jaxckpt.offload_dots())),
        ("dots", uniform("dots")),
        (save("up"), uniform(save("up"))),
        (every(3), every(3)),
        (Segment(Keep(4)), jaxckpt.tree(Segment(Keep(4)))),
        ([Keep(1), Segment(Keep(3))], jaxckpt.tree(Keep(1), Segment(Keep(3)))),
    ],
    ids=str,
)
def test_rule_is_a_policy_a_schedule_or_text(rule, schedule):
    plan = plan_from(rule, loss, W, X)
    assert plan.schedule == schedule
    assert (plan.depths, plan.form, plan.existing) == ((DEPTH,), None, "replace")


def test_arrays_may_be_abstract_and_are_not_needed():
    abstract = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (W, X)]
    assert plan_from("full", loss, *abstract) == plan_from("full", loss, W, X)


def test_plan_is_hashable_data():
    one, two = (plan_from("every(2)", loss, W, X) for _ in range(2))
    assert one == two and hash(one) == hash(two)
    assert one != plan_from("every(3)", loss, W, X)
    assert one.fingerprint == plan_from("full", loss, W, X).fingerprint
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.form = "scan"  # type: ignore[misc]


def test_one_rule_rules_every_stack():
    plan = plan_from("every(2)", two_stacks, PARAMS, X)
    assert plan.rules == (("encoder", every(2)), ("decoder", every(2)))
    assert plan.depths == (4, 3) and plan.schedule == every(2)
    forwards = every(2).forwards(4) + every(2).forwards(3)
    assert layer_forwards(plan.apply(two_stacks), PARAMS, X) == forwards


def test_mapping_gives_each_stack_its_rule_and_leaves_the_others():
    plan = plan_from({"decoder": "full", "encoder": save("up")}, two_stacks, PARAMS, X)
    assert dict(plan.rules) == {"decoder": full(), "encoder": uniform(save("up"))}
    assert layer_forwards(plan.apply(two_stacks), PARAMS, X) == 4 + 2 * 3
    with pytest.raises(PlanError, match="schedule for each stack.*decoder: full"):
        plan.schedule  # noqa: B018
    plan = plan_from({"decoder": "full"}, two_stacks, PARAMS, X)
    assert plan.depths == (3,) and plan.schedule == full()
    assert layer_forwards(plan.apply(two_stacks), PARAMS, X) == 4 + 2 * 3


@pytest.mark.skipif(_jax.remat3_enabled(), reason="a plan replaces all of its remat")
def test_stack_that_is_left_out_keeps_its_own_remat():
    def fn(params, x):
        x, _ = jax.lax.scan(jax.checkpoint(layer), x, params["encoder"])
        x, _ = jax.lax.scan(jax.checkpoint(layer), jnp.sin(x), params["decoder"])
        return jnp.sum(jnp.exp(x))

    one, two = (name for name, _ in plan_from("full", fn, PARAMS, X).rules)
    for rules, forwards in (
        ({one: "none", two: "none"}, 4 + 3),
        ({one: "none"}, 4 + 2 * 3),
        ({two: "none"}, 2 * 4 + 3),
        ({two: "every(2)"}, 2 * 4 + every(2).forwards(3)),
    ):
        planned = plan_from(rules, fn, PARAMS, X).apply(fn)
        assert layer_forwards(planned, PARAMS, X) == forwards


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        up = checkpoint_name(jnp.tanh(nn.Dense(6)(x)), "up")
        return x + jnp.sin(nn.Dense(4)(up))


def test_stack_of_our_own_is_not_left_out_in_silence():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = Stack(Block, 4, schedule="full", name="encoder")(x)
            return Stack(Block, 3, schedule="full", name="decoder")(jnp.sin(x))

    module = Model()
    params = module.init(jax.random.key(0), X)
    fn = lambda params, x: jnp.sum(module.apply(params, x))  # noqa: E731
    plan = plan_from({"encoder": "none", "decoder": "full"}, fn, params, X)
    assert layer_forwards(plan.apply(fn), params, X) == 4 + 6
    with pytest.raises(PlanError, match="leaves out.*Give each stack a rule, `none`"):
        plan_from({"encoder": "none"}, fn, params, X)


def test_plan_prints_the_picture_of_each_stack():
    plan = plan_from(
        {"encoder": "every(2)", "decoder": "save(up)"},
        two_stacks,
        PARAMS,
        X,
        form="scan",
        existing="keep",
    )
    text = str(plan)
    assert "encoder: every(2) on 4 layers\n  forward   *.*." in text
    assert "decoder: uniform(save(up)) on 3 layers\n  forward   +++" in text
    assert "form: scan" in text and "remat of the program's own stays" in text
    assert str(Plan((("layers", full()),))) == "layers: full"


def test_form_is_that_of_scanned_stacks():
    def primitives(**settings):
        plan = plan_from("every(2)", loss, W, X, **settings)
        program = str(jax.make_jaxpr(plan.apply(loss))(W, X))
        return "custom_vjp" in program, "scan" in program

    assert primitives() == primitives(form="explicit") == (True, True)
    assert primitives(form="scan") == (False, True)
    assert primitives(form="unrolled") == (False, False)


def test_static_arguments_may_be_given():
    def fn(params, x, mode, scale, flag):
        assert mode == "train" and isinstance(scale, float)
        return loss(params, x) * scale * (2 if flag else 1)

    plan = plan_from("full", fn, W, X, "train", 0.5, True)
    assert (
        layer_forwards(lambda w, x: plan.apply(fn)(w, x, "train", 0.5, True), W, X) == 8
    )


@pytest.mark.parametrize(
    ("rule", "error", "message"),
    [
        ("evry(4)", PlanError, "`rule='evry.4.'` is no schedule:.*And no policy"),
        ("every(0)", JaxckptError, r"every\(layers=0\)"),
        ("save(upp)", PolicyError, "`upp` matches no named value of .*`up`"),
        ("Segment(Keep(4), policy=save(upp))", PolicyError, "`upp`.*a segment of"),
        ("save(up", JaxckptError, "save"),
        ("Keep(3)", ScheduleError, "holds 3 layers, and the stack 4"),
        (3, ScheduleError, "`schedule=3` is no schedule"),
        ({"encodr": "full"}, PlanError, "`encodr`, which is not in `loss`.*Valid: "),
        ({}, PlanError, "rules for the stacks"),
    ],
    ids=str,
)
def test_rules_that_do_not_fit_are_refused(rule, error, message):
    with pytest.raises(error, match=message):
        plan_from(rule, loss, W, X)


def test_near_names_of_stacks_are_told():
    with pytest.raises(PlanError, match="Did you mean `encoder`"):
        plan_from({"encodr": "full"}, two_stacks, PARAMS, X)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"form": "scaned"}, "`form='scaned'` is not known. Did you mean `scan`"),
        ({"existing": "remove"}, "`existing='remove'` is not known. .*keep, replace"),
    ],
)
def test_settings_that_there_are_not_are_refused(settings, message):
    with pytest.raises(JaxckptError, match=message):
        plan_from("full", loss, W, X, **settings)


def test_errors_say_what_was_found():
    def no_layers(w, x):
        return jnp.sum(jnp.tanh(x @ w))

    with pytest.raises(
        PlanError, match="No stack of layers was found in `.*no_layers`"
    ):
        plan_from("full", no_layers, W[0], X)


def test_rule_keeps_what_is_in_its_text():
    assert str(as_rule("save(a, 'b*')")) == "uniform(save(a, b*))"
    assert as_rule("remat_every(2, save(a))") == jaxckpt.remat_every(2, save("a"))


def test_fingerprint_is_of_the_layers_and_not_of_shapes_or_data():
    plan = plan_from("full", loss, W, X)
    wide = jnp.ones((DEPTH, 8, 8))
    same = plan_from("full", loss, wide, jnp.ones((7, 8)))
    assert plan.fingerprint == same.fingerprint
    other = plan_from("full", loss, W[:3], X)
    assert plan.fingerprint != other.fingerprint

    def three_products(x, w):
        return x + jnp.sin(jnp.tanh(jnp.sin(x @ w) @ w.T @ w) @ w.T), None

    deeper = lambda w, x: jnp.sum(jax.lax.scan(three_products, x, w)[0])  # noqa: E731
    assert plan.fingerprint != plan_from("full", deeper, W, X).fingerprint


@pytest.mark.parametrize(
    ("rules", "settings", "message"),
    [
        ((), {}, "rules for the stacks ..\\. Give one"),
        ((("a", full()), ("a", none())), {}, "rules for the stacks .'a', 'a'"),
        ((("a", full()),), {"depths": (1, 2)}, "not the depths of"),
    ],
)
def test_plans_that_are_none_are_refused(rules, settings, message):
    with pytest.raises(PlanError, match=message):
        Plan(rules, **settings)
