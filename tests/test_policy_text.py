"""The text form of policies: grammar, errors that say what is wrong, other recipes."""

import random

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

import jaxckpt
from jaxckpt import PolicyError, parse_policy
from jaxckpt.policy_algebra import Recipe

A, B, C = (jaxckpt.save(name) for name in "abc")
CATALOGUE = [
    jaxckpt.save("query_proj", "mlpwi*", "mlpwi_?", "mlp[01]"),
    jaxckpt.offload("context"),
    jaxckpt.save_dots(),
    jaxckpt.save_dots(batch_dims=False),
    jaxckpt.offload_dots(),
    jaxckpt.offload_dots(batch_dims=False),
    jaxckpt.save_everything(),
    jaxckpt.save_nothing(),
    jaxckpt.save_larger_than("1MiB"),
    jaxckpt.recompute("context", "probs*"),
    *map(jaxckpt.recipe, jaxckpt.recipe_names()),
]
AWKWARD = [
    "a b",
    " a",
    "a ",
    "a,b",
    "a(b)",
    ")",
    'a"b',
    "a'b",
    "a\\b",
    "a\nb",
    "a=b",
    "a#2",
    "a|b",
    "a-b",
    "-",
    "None",
    "True",
    "full",
    "block/attention:0",
    "größe",
    "→",
    "\N{OK HAND SIGN}",
]


def random_policy(chance, depth=4):
    if depth == 0 or chance.random() < 0.2:
        return chance.choice(
            [*CATALOGUE, *(jaxckpt.save(name) for name in AWKWARD[:-1])]
        )
    left = random_policy(chance, depth - 1)
    right = random_policy(chance, depth - 1)
    return left | right if chance.random() < 0.5 else left - right


@pytest.mark.parametrize("policy", CATALOGUE, ids=str)
def test_a_policy_is_read_back_from_its_text(policy):
    assert parse_policy(str(policy)) == policy


@pytest.mark.parametrize("name", AWKWARD)
def test_an_awkward_name_is_read_back(name):
    policy = jaxckpt.save("x", name) - jaxckpt.offload(name, "y")
    assert parse_policy(str(policy)) == policy


@pytest.mark.parametrize("seed", range(40))
def test_a_random_policy_is_read_back_from_its_text(seed):
    policy = random_policy(random.Random(seed))
    assert parse_policy(str(policy)) == policy


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("save(a) | save(b) | save(c)", (A | B) | C),
        ("save(a) | (save(b) | save(c))", A | (B | C)),
        ("save(a) | save(b) - save(c)", A | (B - C)),
        ("(save(a) | save(b)) - save(c)", (A | B) - C),
        ("save(a) - save(b) - save(c)", (A - B) - C),
        ("save(a) - (save(b) - save(c))", A - (B - C)),
        ("save(a)-save(b)|save(c)", (A - B) | C),
        ("((save( a )))", A),
        ("save('a', \"b,c\")", jaxckpt.save("a", "b,c")),
        ("save(a, b)\n  | offload(c)", jaxckpt.save("a", "b") | jaxckpt.offload("c")),
        ("recompute(a)", jaxckpt.save_everything() - A),
        ("save_dots(False)", jaxckpt.save_dots(batch_dims=False)),
        ("save_dots(batch_dims = True)", jaxckpt.save_dots()),
        ("save_larger_than(1MiB)", jaxckpt.save_larger_than(2**20)),
        ("save_larger_than(size='1 MiB')", jaxckpt.save_larger_than(2**20)),
        ("full", jaxckpt.save_nothing()),
        ("dots", jaxckpt.save_dots()),
        ("dots_no_batch | save(a)", jaxckpt.save_dots(batch_dims=False) | A),
        ("maxtext:full - save(a)", jaxckpt.recipe("maxtext:full") - A),
        (" none ", None),
    ],
)
def test_text_is_read_as_python_would_read_it(text, policy):
    assert parse_policy(text) == policy


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "expected a policy before `the end`"),
        ("save", "`save` is not a policy"),
        ("sav(a)", "Did you mean `save`"),
        ("dost", "Did you mean `dots`"),
        ("full()", "`full(...)`"),
        ("save(", "expected `,` or `)` before `the end`"),
        ("save(a", "expected `,` or `)` before `a`"),
        ("save('a)", "expected `,` or `)` before `'a)`"),
        ("save(a(b))", "expected `,` or `)` before `a(b))`"),
        ("save(a,)", "expected a name"),
        ("save(,a)", "expected a name"),
        ("save(a, , b)", "expected a name"),
        ("save(a))", "expected `|`, `-` or the end before `)`"),
        ("save(a) save(b)", "expected `|`, `-` or the end before `save(b)`"),
        ("save(a) & save(b)", "expected `|`, `-` or the end before `& save(b)`"),
        ("save(a) |", "expected a policy before `the end`"),
        ("| save(a)", "expected a policy before `| save(a)`"),
        ("save(a) - - save(b)", "expected a policy before `- save(b)`"),
        ("(save(a)", "expected `)` before `the end`"),
        ("()", "expected a policy before `)`"),
        ("none | save(a)", "`none` (no remat) stands alone"),
        ("save(a) - none", "`none` (no remat) stands alone"),
        ("save()", "`save()` needs a name"),
        ("save('')", "empty name"),
        ("save_dots(maybe)", "batch_dims"),
        ("save_dots(batch_dims=maybe)", "batch_dims"),
        ("save_dots(batch_dims=)", "batch_dims"),
        ("save_dots(bath_dims=False)", "bath_dims"),
        ("save_dots(batch_dims=False, batch_dims=True)", "batch_dims"),
        ("save_everything(a)", "save_everything(a)"),
        ("save_larger_than()", "size"),
        ("save_larger_than(70)", "`size=70` has no unit"),
        ("save_larger_than(0MiB)", "`size=0MiB` is not positive"),
        (r"save('\x')", r"'\x'"),
        ("save('a\nb')", "'a\nb'"),
        ("maxtext:minmal", "`maxtext:minimal`"),
        ("llama:full", "`llama:full` is not a policy"),
    ],
)
def test_a_text_that_is_no_policy_is_refused_with_what_is_wrong(text, said):
    with pytest.raises(PolicyError) as caught:
        parse_policy(text)
    assert said in str(caught.value)


QKV = {"query_proj", "key_proj", "value_proj", "kv_proj", "qkv_proj"}
MINIMAL = QKV | {"out_proj", "mlpwi_0", "mlpwi_1", "mlpwi", "mlpwo"}
# `Decoder.get_remat_policy` of MaxText, by its names, as of 2026.
MAXTEXT = {
    "full": set(),
    "minimal": MINIMAL,
    "minimal_with_context": MINIMAL | {"context"},
    "minimal_flash": MINIMAL | {"context"},
    "save_dot_with_context_except_mlp": QKV | {"context", "out_proj"},
    "save_dot_except_mlp": QKV | {"out_proj"},
    "save_dot_except_mlpwi": QKV | {"out_proj", "mlpwo"},
    "save_qkv_proj": QKV,
    "save_out_proj": {"out_proj"},
}
MAXTEXT_OFFLOADED = {
    "qkv_proj_offloaded": QKV - {"qkv_proj"},
    "minimal_offloaded": MINIMAL,
}


@pytest.mark.parametrize("name", MAXTEXT)
def test_a_recipe_of_maxtext_saves_its_exact_names(name):
    body = jaxckpt.recipe(f"maxtext:{name}").body
    expected = jaxckpt.save(*MAXTEXT[name]) if MAXTEXT[name] else jaxckpt.save_nothing()
    assert set(body.patterns()) == MAXTEXT[name]
    assert type(body) is type(expected)
    assert not MAXTEXT[name] or body.decision is expected.decision


@pytest.mark.parametrize("name", MAXTEXT_OFFLOADED)
def test_a_recipe_of_maxtext_offloads_its_exact_names(name):
    body = jaxckpt.recipe(f"maxtext:{name}").body
    assert set(body.patterns()) == MAXTEXT_OFFLOADED[name]
    assert body.decision is jaxckpt.Decision.OFFLOAD


def test_no_policy_of_maxtext_is_missing():
    ours = {n.partition(":")[2] for n in jaxckpt.recipe_names() if "maxtext:" in n}
    assert ours >= set(MAXTEXT) | set(MAXTEXT_OFFLOADED)
    assert all(isinstance(jaxckpt.recipe(n), Recipe) for n in jaxckpt.recipe_names())


def test_an_unknown_recipe_is_refused_with_the_close_ones():
    with pytest.raises(PolicyError, match="`maxtext:minimal`"):
        jaxckpt.recipe("maxtext:minimla")


def layer(w, x, name):
    return jnp.sin(checkpoint_name(jnp.tanh(x @ w), name) @ w)


def kept_under(policy, name):
    rematted = jaxckpt.remat(lambda w, x: layer(w, x, name), policy=policy)
    arrays = [jax.ShapeDtypeStruct((4, 4), jnp.float32)] * 2
    graph = jaxckpt.trace(rematted, *arrays, argnums=None)
    return [r.name for r in graph.residuals if not r.argument]


def test_the_names_of_a_recipe_are_optional_but_one_must_match():
    assert kept_under("maxtext:minimal", "mlpwi") == ["mlpwi"]
    with pytest.raises(PolicyError, match="None of the names of `maxtext:minimal`"):
        kept_under("maxtext:minimal", "hidden")
    assert kept_under("maxtext:full", "hidden") == []


def test_a_name_beside_a_recipe_is_not_optional():
    assert kept_under("maxtext:minimal | save(mlp*)", "mlpwi") == ["mlpwi"]
    with pytest.raises(PolicyError, match="`hidden` matches no named value"):
        kept_under("maxtext:minimal | save(hidden)", "mlpwi")
