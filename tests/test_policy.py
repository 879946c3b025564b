"""Policies: constructors, the laws of their algebra, and use as bare JAX callables."""

import dataclasses
import itertools
import random

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

import jaxckpt
from jaxckpt import Decision, PolicyError, _jax
from jaxckpt.policy_algebra import Candidate

LEAVES = {
    str(policy): policy
    for policy in (
        jaxckpt.save("a"),
        jaxckpt.save("b*", "out_proj"),
        jaxckpt.offload("a", "c"),
        jaxckpt.save_dots(),
        jaxckpt.save_dots(batch_dims=False),
        jaxckpt.offload_dots(),
        jaxckpt.offload_dots(batch_dims=False),
        jaxckpt.save_everything(),
        jaxckpt.save_nothing(),
        jaxckpt.save_larger_than(100),
        jaxckpt.recipe("maxtext:save_out_proj"),
    )
}
CANDIDATES = [
    Candidate(name, dot, size)
    for name in (None, "a", "b1", "c", "out_proj")
    for dot in (None, "batched", "unbatched")
    for size in (8, 800)
]
SEEDS = range(25)
REMAT3 = _jax.remat3_enabled()


def same_data(index):
    """Take three neighbours each for one array, seen in three ways."""
    return range(index - index % 3, index - index % 3 + 3)


def decisions(policy):
    return [policy.decide(candidate) for candidate in CANDIDATES]


def choice(policy):
    return policy.choose(CANDIDATES, same_data)


def random_policy(chance, depth=3):
    if depth == 0 or chance.random() < 0.2:
        return chance.choice(list(LEAVES.values()))
    left = random_policy(chance, depth - 1)
    right = random_policy(chance, depth - 1)
    return left | right if chance.random() < 0.6 else left - right


def random_policies(seed, count):
    chance = random.Random(seed)
    return [random_policy(chance) for _ in range(count)]


def test_nested_lists_and_tuples_of_names_are_taken_apart():
    flat = jaxckpt.save("a", "b", "c")
    assert jaxckpt.save("a", [("b",), (["c"],)]) == flat
    assert jaxckpt.save(("a", "b", "c", "a")) == flat
    assert jaxckpt.save(name for name in "abc") == flat
    names = jaxckpt.save("a", "b")
    assert jaxckpt.recompute(["a", "b"]) == jaxckpt.save_everything() - names


@pytest.mark.parametrize(
    ("pattern", "name", "matched"),
    [
        ("mlpwi_*", "mlpwi_0", True),
        ("mlpwi_*", "mlpwi", False),
        ("mlpwi_?", "mlpwi_10", False),
        ("mlpwi_[01]", "mlpwi_1", True),
        ("mlpwi", "mlpwi_0", False),
        ("A", "a", False),
        ("*", "anything", True),
    ],
)
def test_a_pattern_matches_whole_names_and_case_counts(pattern, name, matched):
    decision = jaxckpt.save(pattern).decide(Candidate(name, None, 8))
    assert decision is (Decision.SAVE if matched else Decision.RECOMPUTE)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: jaxckpt.save(), "`save()` needs a name"),
        (lambda: jaxckpt.offload([]), "`offload()` needs a name"),
        (lambda: jaxckpt.recompute(()), "`recompute()` needs a name"),
        (lambda: jaxckpt.save(iter(())), "`save()` needs a name"),
        (lambda: jaxckpt.save("a", ""), "empty name"),
        (lambda: jaxckpt.save.__wrapped__("a", 3), "`3` in `save(...)` is not a name"),
        (lambda: jaxckpt.save.__wrapped__(["a", [None]]), "`None` in `save(...)`"),
        (lambda: jaxckpt.save_dots.__wrapped__("no"), "`batch_dims='no'`"),
        (lambda: jaxckpt.offload_dots.__wrapped__(0), "`batch_dims=0`"),
        (lambda: jaxckpt.save_larger_than("1"), "`size=1` has no unit"),
        (lambda: jaxckpt.save_larger_than(0), "`size=0` is not positive"),
        (lambda: jaxckpt.save_larger_than(True), "`size=True`"),
    ],
)
def test_a_bad_argument_is_refused_and_named(make, said):
    with pytest.raises(PolicyError) as caught:
        make()
    assert said in str(caught.value)


@pytest.mark.parametrize("other", [None, "save(a)", 3, len])
@pytest.mark.parametrize("operator", ["__or__", "__sub__"])
def test_a_policy_combines_with_policies_only(operator, other):
    with pytest.raises(TypeError, match="another policy only") as caught:
        getattr(jaxckpt.save("a"), operator)(other)
    assert f"`{other!r}`" in str(caught.value)


def test_equal_policies_are_equal_and_hash_equal():
    for text in map(str, LEAVES.values()):
        one, two = jaxckpt.parse_policy(text), jaxckpt.parse_policy(text)
        assert one == two
        assert hash(one | two) == hash(two | one)
    assert len(set(LEAVES.values())) == len(LEAVES)
    a, b = jaxckpt.save("a"), jaxckpt.save("b")
    assert a != jaxckpt.offload("a")
    assert a | b != a - b


def test_a_policy_cannot_be_changed():
    policy = jaxckpt.save("a")
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.names = ("b",)


@pytest.mark.parametrize("left", LEAVES)
@pytest.mark.parametrize("right", LEAVES)
def test_every_pair_has_an_answer(left, right):
    p, q = LEAVES[left], LEAVES[right]
    for one, two, either, less in zip(
        decisions(p), decisions(q), decisions(p | q), decisions(p - q), strict=True
    ):
        assert either is (two if one is Decision.RECOMPUTE else one)
        assert less is (one if two is Decision.RECOMPUTE else Decision.RECOMPUTE)


@pytest.mark.parametrize("seed", SEEDS)
def test_or_is_associative_idempotent_and_has_an_identity(seed):
    p, q, r = random_policies(seed, 3)
    nothing = jaxckpt.save_nothing()
    for view in (decisions, choice):
        assert view((p | q) | r) == view(p | (q | r))
        assert view(p | p) == view(p)
        assert view(p | nothing) == view(p) == view(nothing | p)


@pytest.mark.parametrize("seed", SEEDS)
def test_minus_never_keeps_more_and_nothing_of_what_it_excludes(seed):
    p, q = random_policies(seed, 2)
    before, excluded, after = choice(p), choice(q), choice(p - q)
    assert after.items() <= before.items()
    gone = set(itertools.chain.from_iterable(map(same_data, excluded)))
    assert set(after) == set(before) - gone
    assert choice(p - p) == {}
    assert choice(p - jaxckpt.save_nothing()) == before


def test_minus_excludes_the_unnamed_producer_of_a_name():
    candidates = [
        Candidate(None, "unbatched", 8),
        Candidate("a", None, 8),
        Candidate(None, "unbatched", 8),
    ]
    policy = jaxckpt.save_dots() - jaxckpt.save("a")
    kept = policy.choose(candidates, lambda i: [0, 1] if i < 2 else [2])
    assert kept == {2: Decision.SAVE}


def layer(w, x):
    a = checkpoint_name(jnp.tanh(x @ w), "a")
    b = checkpoint_name(jnp.sin(a @ w), "b")
    scores = jnp.einsum("bij,bkj->bik", b, b)
    c = checkpoint_name(jnp.cos(scores @ b), "c")
    return jnp.exp(c @ w)


W = jax.ShapeDtypeStruct((8, 8), jnp.float32)
X = jax.ShapeDtypeStruct((2, 4, 8), jnp.float32)


def kept(fn, *args):
    """Return name or operation, shape and place of what the backward pass reads."""
    residuals = jaxckpt.trace(fn, *args, argnums=None).residuals
    return [
        (r.name or r.primitive, r.shape, r.decision)
        for r in residuals
        if not r.argument
    ]


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("full", []),
        ("save(a)", [("a", (2, 4, 8), "save")]),
        ("save(a, b) - save(b)", [("a", (2, 4, 8), "save")]),
        (
            "save(c) | offload(a)",
            [("a", (2, 4, 8), "offload"), ("c", (2, 4, 8), "save")],
        ),
        # The products a @ w, the scores, scores @ b and c @ w, one after the other.
        (
            "dots",
            [("dot_general", (2, 4, 8), "save")] * 2
            + [("dot_general", (2, 4, 4), "save")]
            + [("dot_general", (2, 4, 8), "save")] * 2,
        ),
        ("dots_no_batch", [("dot_general", (2, 4, 8), "save")] * 3),
        ("save_larger_than(300B)", []),
    ],
)
def test_a_bare_policy_in_jax_checkpoint_keeps_exactly_what_it_says(policy, expected):
    policy = jaxckpt.parse_policy(policy)
    rematted = jax.checkpoint(layer, policy=policy)
    if REMAT3 and not policy.by_name:
        with pytest.raises(PolicyError, match="JAX_REMAT3"):
            kept(rematted, W, X)
        return
    assert kept(rematted, W, X) == expected


class Block(nn.Module):
    """Attention of one head and a gated MLP, as in other people's code."""

    @nn.compact
    def __call__(self, x):
        dense = lambda n, name: nn.Dense(n, use_bias=False, name=name)  # noqa: E731
        y = nn.LayerNorm(name="norm")(x)
        q, k, v = (dense(8, name)(y) for name in ("query", "key", "value"))
        context = nn.softmax(jnp.einsum("bsd,btd->bst", q, k)) @ v
        x = x + dense(8, "out")(context)
        y = nn.LayerNorm(name="mlp_norm")(x)
        gate = checkpoint_name(dense(16, "wi_0")(y), "mlpwi_0")
        up = checkpoint_name(dense(16, "wi_1")(y), "mlpwi_1")
        return x + checkpoint_name(dense(8, "wo")(nn.silu(gate) * up), "mlpwo")


DOTS_AND_NAMES = jaxckpt.save("mlpwi_*") | jaxckpt.save_dots(batch_dims=False)
# Without the scores (a batched product) and `mlpwo` (which nothing reads).
EXACT = [
    (name, "dot_general", (2, 4, features))
    for name, features in (("query", 8), ("key", 8), ("value", 8), ("out", 8))
    + (("mlpwi_0", 16), ("mlpwi_1", 16))
]


@pytest.mark.skipif(REMAT3, reason="JAX_REMAT3 asks a bare policy about names only")
def test_nn_remat_with_names_or_dots_keeps_the_exact_residual_list():
    block = nn.remat(Block, policy=DOTS_AND_NAMES)(name="block")
    params = jax.eval_shape(block.init, jax.random.key(0), X)
    graph = jaxckpt.trace(block.apply, params, X, argnums=None)
    found = [
        (r.name or r.scope.split("/")[-1], r.primitive, r.shape)
        for r in graph.residuals
        if not r.argument
    ]
    assert sorted(found) == sorted(EXACT)
    # Scores and their product with the values run again, and nothing else.
    assert graph.recompute_flops == 2 * (2 * 2 * 4 * 4 * 8)


@pytest.mark.skipif(not REMAT3, reason="the refusal is of JAX_REMAT3 alone")
def test_nn_remat_with_dots_is_refused_under_remat3():
    block = nn.remat(Block, policy=DOTS_AND_NAMES)(name="block")
    with pytest.raises(PolicyError, match="JAX_REMAT3"):
        params = jax.eval_shape(block.init, jax.random.key(0), X)
        jaxckpt.trace(block.apply, params, X, argnums=None).residuals  # noqa: B018


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(8, 16, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(16, 8, use_bias=False, rngs=rngs)

    def __call__(self, x):
        h = checkpoint_name(jnp.tanh(self.up(jnp.sin(x))), "hidden")
        return jnp.cos(self.down(h))


@pytest.mark.parametrize(
    ("policy", "expected"),
    [("save(hidden)", ["hidden"]), ("full", []), ("dots", ["dot_general"] * 2)],
)
def test_nnx_remat_takes_a_bare_policy(policy, expected):
    policy = jaxckpt.parse_policy(policy)
    if REMAT3 and not policy.by_name:
        pytest.skip("JAX_REMAT3 asks a bare policy about names only")
    graphdef, state = nnx.split(NnxBlock(nnx.Rngs(0)))

    def fn(state, x):
        block = nnx.merge(graphdef, state)
        return nnx.remat(NnxBlock.__call__, policy=policy)(block, x)

    assert [name for name, _, _ in kept(fn, state, X)] == expected


@pytest.mark.parametrize(
    "policy",
    [
        "dots - save(a)",
        "save(a) | (dots - save(b))",
        "save_everything() - save(a)",
        "recompute(a)",
        "save(a) - dots",
        "save_larger_than(1B) - save(a)",
    ],
)
def test_a_bare_minus_with_more_than_names_is_refused(policy):
    rematted = jax.checkpoint(layer, policy=jaxckpt.parse_policy(policy))
    with pytest.raises(PolicyError) as caught:
        jaxckpt.trace(rematted, W, X).residuals  # noqa: B018
    assert "jaxckpt.remat(target, policy=...)" in str(caught.value)


@pytest.mark.parametrize(
    "policy", [p for p in LEAVES.values() if not p.by_name], ids=str
)
def test_what_remat3_would_never_ask_about_is_refused(policy, monkeypatch):
    monkeypatch.setattr(_jax, "remat3_enabled", lambda: True)
    eqn = _jax.open_jaxpr(jax.make_jaxpr(jnp.sin)(1.0)).eqns[0]
    with pytest.raises(PolicyError, match="JAX_REMAT3"):
        policy(eqn.primitive, *(v.aval for v in eqn.invars), **eqn.params)
    names = jaxckpt.save("a") | jaxckpt.offload("b")
    names(eqn.primitive, *(v.aval for v in eqn.invars), **eqn.params)


def answers(policy, fn, *args):
    """Return a bare policy's answer about each equation of a function."""
    eqns = _jax.open_jaxpr(jax.make_jaxpr(fn)(*args)).eqns
    return [policy(e.primitive, *(v.aval for v in e.invars), **e.params) for e in eqns]


@pytest.mark.skipif(REMAT3, reason="JAX's own policies differ under JAX_REMAT3")
def test_bare_answers_are_those_of_jaxs_own_policies():
    jaxs = jax.checkpoint_policies
    pairs = [
        (jaxckpt.save("a", "c"), jaxs.save_only_these_names("a", "c")),
        (jaxckpt.save_dots(), jaxs.dots_saveable),
        (jaxckpt.save_dots(batch_dims=False), jaxs.dots_with_no_batch_dims_saveable),
        (jaxckpt.save_everything(), jaxs.everything_saveable),
        (jaxckpt.save_nothing(), jaxs.nothing_saveable),
        (
            jaxckpt.save("a") | jaxckpt.offload("c"),
            jaxs.save_and_offload_only_these_names(
                names_which_can_be_saved=["a"],
                names_which_can_be_offloaded=["c"],
                offload_src="device",
                offload_dst="pinned_host",
            ),
        ),
    ]
    for ours, theirs in pairs:
        # JAX answers with booleans too.
        expected = [
            {True: _jax.SAVEABLE, False: _jax.RECOMPUTE}.get(answer, answer)
            for answer in answers(theirs, layer, W, X)
        ]
        assert answers(ours, layer, W, X) == expected


def test_an_offloaded_residual_lies_in_host_memory():
    rematted = jax.checkpoint(layer, policy=jaxckpt.save("a") | jaxckpt.offload("b"))

    def residuals(w, x):
        return jax.tree.leaves(jax.vjp(rematted, w, x)[1])

    spaces = [v.memory_space for v in jax.make_jaxpr(residuals)(W, X).out_avals]
    assert spaces.count(jax.memory.Space.Host) == 1
    host = spaces.index(jax.memory.Space.Host)
    assert jax.eval_shape(residuals, W, X)[host].shape == X.shape


def test_equal_policies_share_one_trace():
    traces = []

    def counted(w, x):
        traces.append(None)
        return layer(w, x)

    for _ in range(3):
        rematted = jax.checkpoint(counted, policy=jaxckpt.save("a"))
        jax.make_jaxpr(jax.grad(lambda w, x, f=rematted: f(w, x).sum()))(W, X)
    assert len(traces) == 1
