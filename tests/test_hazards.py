"""Hazards from public reports: each is a thing that fails in silence elsewhere."""

import contextlib
import functools
import json

import chex
import helpers
import jax
import jax.numpy as jnp
import pytest
from helpers import LIBRARIES, named
from jax.ad_checkpoint import checkpoint_name

import jaxckpt
from jaxckpt import _jax, devices
from jaxckpt.errors import PolicyError
from jaxckpt.graph.advice import warnings_about
from models import attention as attention_module

W = jax.random.normal(jax.random.key(0), (8, 8)) / 3
X = jax.random.normal(jax.random.key(1), (4, 8))
BLOCK_X = helpers.build("function")[1][1]
LABELS = {
    "function": "`function_block`",
    "linen": "`LinenBlock`",
    "nnx": "`NNXBlock.__call__`",
}


@pytest.fixture(autouse=True, scope="module")
def _fast():
    with helpers.no_optimizations():
        yield


# --- 1, 2, 3: names without effect, and how they are given ---------------------------


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("decision", ["save", "offload", "recompute"])
def test_misspelt_name_is_refused_with_the_close_ones(library, decision):
    fn, args = helpers.build(library, policy=f"{decision}(query_prj, out_proj)")
    message = "`query_prj` matches no named value of .*Did you mean `query_proj`.*mlpwo"
    with pytest.raises(PolicyError, match=message) as raised:
        fn(*args)
    assert LABELS[library] in str(raised.value)


def test_block_without_names_is_told_how_to_name():
    wrapped = jaxckpt.remat(lambda x: jnp.sin(x @ W), policy="save(hidden)")
    with pytest.raises(PolicyError, match="no named values.*checkpoint_name"):
        wrapped(X)


@pytest.mark.parametrize("library", LIBRARIES)
def test_name_that_nothing_reads_is_refused_and_the_layer_input_suggested(library):
    fn, args = helpers.build(library, policy="save(mlpwo)")
    with pytest.raises(PolicyError, match="`mlpwo`.*saves nothing.*layer's input"):
        fn(*args)


def test_name_on_the_output_of_a_scan_body_is_refused():
    def body(x):
        return checkpoint_name(x + jnp.sin(x @ W), "carry")

    def stack(body, x):
        return jax.lax.scan(lambda x, _: (body(x), None), x, None, length=3)[0]

    with pytest.raises(PolicyError, match="`carry`.*saves nothing.*layer's input"):
        stack(jaxckpt.remat(body, policy="save(carry)"), X)


def test_unmatched_names_may_be_ignored_and_then_keep_nothing():
    fn = functools.partial(jaxckpt.remat, helpers.function_block)
    args = helpers.build("function")[1]
    wrapped = fn(policy="save(mlpwo, query_prj)", on_unmatched="ignore")
    assert helpers.residual_names(wrapped, *args) == {}


@pytest.mark.parametrize(
    "names",
    [
        (("query_proj", "mlpwi_0"),),
        (["query_proj", "mlpwi_0"],),
        (["query_proj"], "mlpwi_0"),
    ],
    ids=str,
)
@pytest.mark.parametrize("constructor", [jaxckpt.save, jaxckpt.offload])
def test_tuples_and_lists_of_names_are_names(constructor, names):
    assert constructor(*names) == constructor("query_proj", "mlpwi_0")
    fn, args = helpers.build("function", policy=constructor(*names))
    kept = helpers.residual_names(fn, *args)
    decision = constructor.__name__
    assert kept == {("query_proj", decision): 1, ("mlpwi_0", decision): 1}


# --- 4: all but the gathered weights -------------------------------------------------

GATHERED = """
import json, re
import jax, jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
import jaxckpt

L, D = 3, 32
mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
on = lambda *spec: NamedSharding(mesh, P(*spec))
w = jax.device_put(jnp.ones((L, D, D)) / D, on(None, "data"))
x = jax.device_put(jnp.ones((64, D)), on("data"))

def layer(w, x):
    full = jax.lax.with_sharding_constraint(w.astype(jnp.bfloat16), on())
    full = checkpoint_name(full, "gathered").T.astype(jnp.float32)
    return jnp.sin(jnp.tanh(x @ full))

def loss(w, x, policy):
    wrap = jax.checkpoint if callable(policy) else jaxckpt.remat
    block = wrap(layer, policy=policy, prevent_cse=False)
    return jnp.sum(jax.lax.scan(lambda x, w: (block(w, x), None), x, w)[0])

except_names = jax.checkpoint_policies.save_anything_except_these_names
found = {}
for label, policy in [
    ("none", "none"),
    ("jax", except_names("gathered")),
    ("minus", "save_everything() - save(gathered)"),
    ("recompute", "recompute(gathered)"),
]:
    fn = lambda w, x: loss(w, x, policy)
    hlo = jax.jit(jax.grad(fn)).lower(w, x).compile().as_text()
    held = jax.tree.leaves(jax.vjp(fn, w, x)[1])
    found[label] = {
        "gathers": len(re.findall(r" all-gather(?:-start)?\\(", hlo)),
        "full": sum(h.sharding.is_fully_replicated for h in held if h.shape == w.shape),
        "tanh": sum(h.shape == (L, 64, D) for h in held),
    }
print(json.dumps(found))
"""


@pytest.mark.skipif(_jax.remat3_enabled(), reason="refused: it keeps exponentials")
def test_all_but_gathered_weights_keeps_no_gathered_weight():
    flags = "--xla_force_host_platform_device_count=8"
    found = json.loads(helpers.run_python(GATHERED, XLA_FLAGS=flags))
    assert found["none"]["full"] == found["jax"]["full"] == 1  # of all layers
    for label in ("minus", "recompute"):
        assert found[label]["full"] == 0
        # Gathered once for each pass, in place of once for both.
        assert found[label]["gathers"] == found["none"]["gathers"] + 1
        # What the activations need stays: layer inputs, and the values inside.
        assert found[label]["tanh"] >= 2


# --- 5, 17: every pair has an answer; offload ----------------------------------------

ALL_DOTS = dict.fromkeys(helpers.READ_DOTS, "save")
OFFLOADED_DOTS = dict.fromkeys(ALL_DOTS, "offload")


@pytest.mark.parametrize(
    ("policy", "wanted"),
    [
        # A name is more particular than a kind of operation, on either side.
        ("dots | offload(mlpwi_0)", ALL_DOTS | {"mlpwi_0": "offload"}),
        ("offload(mlpwi_0) | dots", ALL_DOTS | {"mlpwi_0": "offload"}),
        ("offload_dots() | save(mlpwi_0)", OFFLOADED_DOTS | {"mlpwi_0": "save"}),
        ("save(mlpwi_0) | offload_dots()", OFFLOADED_DOTS | {"mlpwi_0": "save"}),
        (
            "save(mlpwi_0) | offload('mlpwi_*')",
            {"mlpwi_0": "save", "mlpwi_1": "offload"},
        ),
        ("offload('mlpwi_*') - save(mlpwi_0)", {"mlpwi_1": "offload"}),
        ("full | offload(context)", {"context": "offload"}),
        ("full - dots", {}),
        (
            "dots - offload_dots(batch_dims=False)",
            dict.fromkeys(helpers.ATTENTION_DOTS, "save"),
        ),
    ],
)
def test_every_pair_of_policies_has_an_answer(policy, wanted):
    fn, args = helpers.build("function", policy=policy)
    assert helpers.residual_names(fn, *args) == dict.fromkeys(wanted.items(), 1)


def test_offload_joined_with_everything_moves_the_named_values_alone():
    fn, args = helpers.build(
        "function", policy="offload('mlpwi_*') | save_everything()"
    )
    kept = helpers.residual_names(fn, *args)
    moved = {name for name, decision in kept if decision == "offload"}
    assert moved == {"mlpwi_0", "mlpwi_1"}
    plain = helpers.count(helpers.gradient_jaxpr(helpers.function_block, *args))
    assert helpers.count(helpers.gradient_jaxpr(fn, *args)) == plain


def test_offloaded_values_are_in_host_memory_by_their_type():
    fn, args = helpers.build("function", policy="offload(out_proj) | save(mlpwi_0)")
    program = jax.make_jaxpr(lambda *a: jax.tree.leaves(jax.vjp(fn, *a)[1]))(*args)
    on_host = [a for a in program.out_avals if "host" in str(a.memory_space).lower()]
    assert [a.shape for a in on_host] == [BLOCK_X.shape]


@pytest.mark.parametrize("keyword", ["offload_dst", "dst", "destination"])
@pytest.mark.parametrize("destination", ["unpinned_host", "pinned_hots", "device"])
def test_offload_has_no_destination_to_misspell(keyword, destination):
    with pytest.raises(TypeError, match=keyword):
        jaxckpt.offload("out_proj", **{keyword: destination})
    with pytest.raises(PolicyError, match=keyword):
        policy = jaxckpt.parse_policy(f"offload(out_proj, {keyword}={destination})")
        jaxckpt.remat(helpers.function_block, policy=policy)(helpers.weights(), BLOCK_X)


# --- 6: products of batches of matrices ----------------------------------------------


def _expert(w, x):
    return jnp.sin(named(jnp.tanh(x @ w), "hidden") @ w)


@pytest.mark.parametrize(
    ("policy", "skipped"), [("dots", 0), ("dots_no_batch", 2), ("full", 2)]
)
def test_products_over_vmapped_experts_are_batched_and_listed(policy, skipped):
    weights, x = jnp.stack([W] * 3), jnp.stack([X] * 3)
    experts = jaxckpt.remat(jax.vmap(_expert), policy=policy)
    graph = jaxckpt.trace(experts, weights, x, argnums=None)
    dots = graph.regions[0].skipped_dots
    assert [(v.primitive, v.bytes) for v in dots] == [
        ("dot_general", x.nbytes)
    ] * skipped


def test_dots_of_one_expert_stay_saved_under_vmap():
    weights, x = jnp.stack([W] * 3), jnp.stack([X] * 3)
    experts = jax.vmap(jaxckpt.remat(_expert, policy="dots_no_batch"))
    plain = helpers.count(helpers.gradient_jaxpr(jax.vmap(_expert), weights, x))
    assert helpers.count(helpers.gradient_jaxpr(experts, weights, x)) == plain


def test_explain_lists_the_skipped_products():
    experts = jaxckpt.remat(jax.vmap(_expert), policy="save(hidden) | dots_no_batch")
    weights, x = jnp.stack([W] * 3), jnp.stack([X] * 3)
    graph = jaxckpt.trace(experts, weights, x, argnums=None)
    explained = jaxckpt.explain(graph).as_json()
    skipped = explained["regions"][0]["skipped_dots"]
    assert [s["bytes"] for s in skipped] == [x.nbytes]


# --- 7, 8: names inside custom_vjp rules, and JAX's new remat engine -----------------

chunked = functools.partial(attention_module.attention, implementation="chunked")
BY_RULE = {"custom_vjp": helpers.fused_attend, "chunked": chunked}
# Plain: 9 forward, 14 backward of the dense ones, 5 backward of attention.
RULE_PRODUCTS = {
    "none": 28,
    "full": 36,
    "save(context)": 35,
    "save(context_lse)": 36,
    "save(context, context_lse)": 34,
    "dots": 28,
    "save_everything()": 28,
    "recompute(context)": 30,
}


@contextlib.contextmanager
def _may_be_refused_by_the_new_engine(policy):
    try:
        yield
    except PolicyError as error:
        assert _jax.remat3_enabled() and "JAX_REMAT3" in str(error)
        pytest.skip(f"refused under JAX_REMAT3: {policy}")


@pytest.mark.parametrize("attention", BY_RULE.values(), ids=BY_RULE)
@pytest.mark.parametrize(("policy", "products"), RULE_PRODUCTS.items())
def test_attention_runs_again_only_where_its_residuals_are_not_kept(
    attention, policy, products
):
    block = functools.partial(helpers.function_block, attention=attention)
    wrapped = jaxckpt.remat(block, policy=policy)
    args = helpers.weights(), BLOCK_X
    with _may_be_refused_by_the_new_engine(policy):
        assert helpers.count(helpers.gradient_jaxpr(wrapped, *args)) == products


@pytest.mark.parametrize("attention", BY_RULE.values(), ids=BY_RULE)
@pytest.mark.parametrize("policy", ["save(context, context_lse)", "recompute(context)"])
def test_gradients_through_a_kept_attention_equal_the_plain(attention, policy):
    block = functools.partial(helpers.function_block, attention=attention)
    args = helpers.weights(), BLOCK_X
    wanted = helpers.value_and_vjp(block, *args)[:2]
    wrapped = jaxckpt.remat(block, policy=policy)
    with _may_be_refused_by_the_new_engine(policy):
        got = helpers.value_and_vjp(wrapped, *args)[:2]
        chex.assert_trees_all_close(got, wanted, rtol=1e-5, atol=1e-6)


# Their derivatives read the result: kept under a name, it has to be the kept one.
@pytest.mark.parametrize("operation", [jnp.tanh, jnp.exp, jax.nn.sigmoid, jnp.cbrt])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.vmap], ids=["plain", "vmap"])
def test_product_before_a_kept_result_does_not_run_again(operation, wrap):
    def layer(w, x):
        return jnp.sin(checkpoint_name(operation(x @ w), "hidden") @ w)

    remat = jaxckpt.remat(wrap(layer), policy="save(hidden)")
    with _may_be_refused_by_the_new_engine("save(hidden)"):
        args = jnp.stack([W] * 3), jnp.stack([X] * 3)
        args = args if wrap is jax.vmap else (W, X)
        # Two forward, four backward, and the second one again for the sine.
        assert helpers.count(helpers.gradient_jaxpr(remat, *args)) == 7


def test_cudnn_attention_kept_runs_once_in_the_gradient(monkeypatch):
    monkeypatch.setattr(attention_module, "has_cudnn_wheels", lambda: True)
    q = jnp.ones((1, 8, 2, 8), jnp.bfloat16)

    def layer(q):
        return jnp.sin(attention_module.attention(q, q, q, implementation="cudnn"))

    def forwards(policy):
        with devices.use("h100-80gb"):
            jaxpr = helpers.gradient_jaxpr(jaxckpt.remat(layer, policy=policy), q)
        return helpers.count(jaxpr, "dot_product_attention_fwd_wrapper")

    try:
        assert forwards("full") == 2
    except RuntimeError as error:
        pytest.skip(f"JAX does not trace it without the cuDNN wheels: {error}")
    assert forwards("save(context, context_lse)") == 1


ENGINE = """
import functools, json
import jax, helpers, jaxckpt

attention = {"plain": helpers.attend, "fused": helpers.fused_attend}
found = {}
for policy in POLICIES:
    for label, attend in attention.items():
        block = functools.partial(helpers.function_block, attention=attend)
        wrapped = jaxckpt.remat(block, policy=policy, on_unmatched="ignore")
        args = helpers.weights(), helpers.build("function")[1][1]
        try:
            names = helpers.residual_names(wrapped, *args)
            found[f"{label} {policy}"] = sorted(map(str, names.items()))
        except jaxckpt.PolicyError as error:
            found[f"{label} {policy}"] = str(error)
print(json.dumps(found))
"""
ENGINE_POLICIES = (
    "full",
    "save(out_proj)",
    "dots",
    "dots_no_batch",
    "save(context, context_lse)",
    "save_everything()",
    "recompute('mlpwi_*')",
    "recompute(context, context_lse)",
    "offload(mlpwi_0) | save(mlpwi_1)",
)
# What the new engine cannot do, of the policies above: it does not look into the
# forward rules of custom_vjp calls, and has the exponential of a softmax run again for
# its derivative.
REFUSED = {
    "fused dots",
    "fused save(context, context_lse)",
    "fused recompute('mlpwi_*')",
    "fused recompute(context, context_lse)",
    "plain recompute('mlpwi_*')",
    "plain recompute(context, context_lse)",
}


def test_new_remat_engine_keeps_the_same_or_refuses():
    source = f"POLICIES = {ENGINE_POLICIES!r}\n" + ENGINE
    old = json.loads(helpers.run_python(source, JAX_REMAT3="0"))
    new = json.loads(helpers.run_python(source, JAX_REMAT3="1"))
    refused = {case for case, kept in new.items() if isinstance(kept, str)}
    assert all("JAX_REMAT3" in new[case] for case in refused)
    assert refused == (REFUSED if _jax.version() >= (0, 12) else set(old))
    assert {c: new[c] for c in old.keys() - refused} == {
        c: old[c] for c in old.keys() - refused
    }


# --- 9, 10: remat that does nothing, or harm -----------------------------------------


def _block(w, x):
    return x + jnp.sin(jnp.tanh(x @ w) @ w)


def _model(wrap_block=lambda f: f, wrap_scan=lambda f: f):
    def scan(weights, x):
        block = wrap_block(_block)
        return jax.lax.scan(lambda x, w: (block(w, x), None), x, weights)[0]

    return lambda weights, x: jnp.sum(wrap_scan(scan)(weights, x))


def _unrolled(weights, x):
    for w in weights:
        x = _block(w, x)
    return jnp.sum(x)


full = functools.partial(jaxckpt.remat, policy="full")
STACK = jnp.stack([W] * 6)


@pytest.mark.parametrize(
    ("loss", "advice"),
    [
        (_unrolled, []),
        (_model(full), []),
        (full(_unrolled), ["Remat saves nothing here"]),
        (
            _model(wrap_scan=full),
            ["Put it inside the scan", "Remat saves nothing here"],
        ),
        (
            lambda weights, x: jnp.sum(
                jnp.sin(full(lambda w, x: x @ w)(weights[0], x))
            ),
            ["Remat saves nothing here"],
        ),
    ],
    ids=["none", "per block", "whole model", "round the scan", "one dense layer"],
)
def test_remat_that_does_nothing_is_said_by_explain_and_trace(loss, advice):
    graph = jaxckpt.trace(loss, STACK, X)
    warnings = warnings_about(graph)
    assert len(warnings) == len(advice)
    assert all(a in w for a, w in zip(advice, warnings, strict=True))
    assert jaxckpt.explain(graph).as_json()["notes"] == list(warnings)


def test_remat_inside_the_scan_keeps_less_than_round_it():
    inside = jaxckpt.trace(_model(full), STACK, X)
    round_it = jaxckpt.trace(_model(wrap_scan=full), STACK, X)
    assert inside.residual_bytes == 6 * X.nbytes  # each layer's input
    assert round_it.residual_bytes == 0
    assert round_it.regions[0].transient_bytes > 2 * inside.residual_bytes
