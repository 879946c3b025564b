"""For each model and policy: what is kept and what runs again, exactly as JAX does it.

The oracles know nothing of `jaxckpt.graph`. The arrays that the closure of `jax.vjp`
holds are made for real: its program is run operation by operation, and what has an
argument's values is left out. Products are counted by a walk of its own over the
gradient's jaxpr, with and without the policy.
"""

import functools
import math
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import interpret, no_optimizations

import jaxckpt
from jaxckpt import _jax
from jaxckpt.policy_text import recipe_names
from jaxckpt.schedule import combine
from models import gpt, llama, moe, vit

DECODER = {"width": 16, "num_heads": 2, "vocab_size": 32, "attention": "xla"}
LLAMA = DECODER | {"kv_heads": 1, "mlp": 24, "rope_scaling": None}
CONFIGS = {
    "gpt": (gpt, gpt.GPTConfig(**DECODER)),
    "llama": (llama, llama.LlamaConfig(**LLAMA)),
    "vit": (
        vit,
        vit.ViTConfig(
            width=16,
            num_heads=2,
            mlp=24,
            image_size=8,
            patch=4,
            classes=5,
            attention="xla",
        ),
    ),
    "moe": (moe, moe.MoEConfig(**LLAMA, experts=3)),
    "moe, dense": (moe, moe.MoEConfig(**LLAMA, experts=3, expert_matmul="dense")),
}

# One of each kind; what a model does not name has no effect in a pattern with a star.
POLICIES = (
    "full",
    "dots",
    "dots_no_batch",
    "save_everything()",
    "save(context) | save_dots(batch_dims=False)",
    "save('*mlpwi*')",
    "recompute('*mlpwi*', query_proj)",
    "dots - save(out_proj)",
    "offload(out_proj) | save(key_proj)",
    "save_larger_than(1KiB)",
    *recipe_names(),
)
SCHEDULES = "none", "every(2)", "remat_every(2)", "sqrt()", "nested(2)", "binomial(2)"


@pytest.fixture(autouse=True, scope="module")
def _quick_compiles():
    with no_optimizations():
        yield


@functools.cache
def program(model, policy=None, *, schedule=None, scan=True, **changes):
    """Return a model's loss as a function of parameters and batch, and both."""
    module, config = CONFIGS[model]
    settings = {"num_layers": 3, "dtype": "float32", "scan": scan} | changes
    config = type(config)(
        **vars(config) | settings | {"schedule": combine(policy, schedule)}
    )
    loss_fn = module.make_loss(config)
    params = jax.eval_shape(
        functools.partial(module.init_params, config), jax.random.key(0)
    )
    draw = np.random.default_rng(0).normal
    params = jax.tree.map(lambda x: jnp.asarray(draw(size=x.shape), x.dtype), params)
    rng = np.random.default_rng(1)
    if module is vit:
        images = rng.normal(size=(2, 8, 8, 3)).astype(np.float32)
        batch = {"images": images, "labels": np.array([1, -2], np.int32)}
    else:
        batch = {"tokens": rng.integers(32, size=(2, 7)).astype(np.int32)}

    def loss_alone(params, batch):
        loss = loss_fn(params, batch)
        return loss[0] if isinstance(loss, tuple) else loss

    return loss_alone, params, jax.tree.map(jnp.asarray, batch)


# --- The oracles ---------------------------------------------------------------------


def held_arrays(loss_fn, params, batch, run=interpret):
    """Return dtype and shape of the arrays that the closure holds, each once.

    Returns:
        Those with values of their own; and those with the values of an argument: views
        of it, and copies (a loop that stacks up what it has sliced from an argument).
    """

    def leaves(params, batch):
        return jax.tree.leaves(jax.vjp(lambda p: loss_fn(p, batch), params)[1])

    arguments = [_values(x) for x in jax.tree.leaves((params, batch))]
    own, copies = Counter(), Counter()
    for x in {id(x): x for x in run(leaves, params, batch)}.values():
        of_argument = any(np.array_equal(_values(x), known) for known in arguments)
        if x.shape:
            (copies if of_argument else own)[str(x.dtype), tuple(x.shape)] += 1
    return own, copies


def _values(x):
    """Return an array's values in order: a view of it has the same."""
    return np.sort(np.asarray(x).ravel())


def gradient_products(loss_fn, params, batch):
    """Return the FLOPs of all products of forward and backward pass."""
    closed = jax.make_jaxpr(jax.value_and_grad(loss_fn))(params, batch)
    return _products(_jax.without_dead_code(closed))


def _products(closed):
    total = 0
    for eqn in _jax.open_jaxpr(closed).eqns:
        inner = [_products(j) for j in _jax.inner_jaxprs(eqn).values()]
        match eqn.primitive.name:
            case "scan":
                total += eqn.params["length"] * sum(inner)
            case "cond":
                total += max(inner)
            case "dot_general" | "ragged_dot_general":
                total += _dot(eqn)
            case "conv_general_dilated":  # without padding
                kernel, spec = eqn.invars[1].aval, eqn.params["dimension_numbers"]
                total += (
                    2
                    * eqn.outvars[0].aval.size
                    * (kernel.size // kernel.shape[spec.rhs_spec[0]])
                )
            case _:
                total += sum(inner)
    return total


def _dot(eqn):
    """Each number of the result is a sum over the contracted dimensions.

    Groups of rows: with groups in the result (of weights), each contracts its rows.
    """
    numbers = eqn.params.get("dimension_numbers")
    out, groups = eqn.outvars[0].aval.size, 1
    if numbers is None:
        ragged = eqn.params["ragged_dot_dimension_numbers"]
        numbers = ragged.dot_dimension_numbers
        if not ragged.rhs_group_dimensions:
            groups = eqn.invars[2].aval.shape[0]
    (contracted, _), _ = numbers
    shape = eqn.invars[0].aval.shape
    return 2 * out * math.prod(shape[d] for d in contracted) // groups


# --- What the issue shows ------------------------------------------------------------


def check(model, policy=None, **settings):
    loss_fn, params, batch = program(model, policy, **settings)
    graph = jaxckpt.trace(loss_fn, params, batch)
    kept = [r for r in graph.residuals if not r.argument and r.shape]
    found = Counter((r.dtype, r.shape) for r in kept)
    own, copies = held_arrays(loss_fn, params, batch)
    assert own <= found <= own + copies
    assert sum(r.bytes for r in kept) == sum(map(_nbytes, found.elements()))
    assert all(r.shape[0] == r.layers for r in kept if r.layers > 1)

    with_policy = gradient_products(loss_fn, params, batch)
    assert graph.gradient_flops == with_policy
    assert graph.recompute_flops == with_policy - plain_products(model, **settings)


def _nbytes(dtype_shape):
    dtype, shape = dtype_shape
    return math.prod(shape) * jnp.dtype(dtype).itemsize


@functools.cache
def plain_products(model, *, schedule=None, loss_chunks=None, **settings):
    """Return the FLOPs of the gradient where nothing runs again."""
    return gradient_products(*program(model, **settings))


@pytest.mark.parametrize(
    ("model", "policy"),
    [
        ("gpt", "full"),
        ("llama", "offload(out_proj) | save(key_proj)"),
        ("vit", "save('*mlpwi*')"),
        ("moe", "dots_no_batch"),
        ("moe, dense", "dots_no_batch"),
    ],
)
def test_scanned_layers_keep_and_repeat_exactly_what_is_said(model, policy):
    check(model, policy)


@pytest.mark.parametrize("model", ["llama", "moe"])
def test_unrolled_layers_keep_and_repeat_exactly_what_is_said(model):
    check(model, "dots - save(out_proj)", scan=False, num_layers=2)


@pytest.mark.parametrize(
    ("schedule", "scan"), [("remat_every(2)", True), ("nested(2)", False)]
)
def test_schedules_keep_and_repeat_exactly_what_is_said(schedule, scan):
    check("gpt", schedule=schedule, scan=scan)


@pytest.mark.parametrize("policy", ["none", "save(context, context_lse)"])
@pytest.mark.parametrize("model", ["llama", "moe"])
def test_chunks_keep_and_repeat_exactly_what_is_said(model, policy):
    check(model, policy, attention="chunked", loss_chunks=2)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("scan", [True, False])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("model", CONFIGS)
def test_whole_catalogue_is_exact(model, policy, scan, dtype):
    check(model, policy, scan=scan, dtype=dtype)


@pytest.mark.slow
@pytest.mark.parametrize("scan", [True, False])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("model", CONFIGS)
def test_all_schedules_are_exact(model, schedule, scan):
    check(model, schedule=schedule, scan=scan, num_layers=5)


@pytest.mark.parametrize("scan", [True, False])
def test_the_oracle_holds_what_an_eager_closure_holds(scan):
    """Above runs what `jax.vjp` traces; here `jax.vjp` runs by itself."""
    traced = program("gpt", "save(query_proj)", scan=scan, num_layers=2)
    eager = held_arrays(*traced, run=lambda leaves, *args: leaves(*args))
    assert eager == held_arrays(*traced)


def test_the_oracle_tells_what_a_policy_keeps():
    policies = "full", "save(query_proj)", "save_everything()"
    held = [held_arrays(*program("llama", p, num_layers=2))[0] for p in policies]
    assert list((held[1] - held[0]).elements()) == [("float32", (2, 2, 6, 2, 8))]
    assert (held[2] - held[0]).total() > 10
