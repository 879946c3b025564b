"""Who holds memory at the peak: sums to the byte, kinds, names, and what is read."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import jaxckpt
from jaxckpt.errors import CompileError
from jaxckpt.xla import compile as compile_module
from jaxckpt.xla import compile_for, holders
from jaxckpt.xla.peak import place_of
from jaxckpt.xla.peak_buffers import Buffer, held_buffers, named_arguments
from jaxckpt.xla.peak_origin import Origins, phase
from jaxckpt.xla.peak_proto import (
    Allocation,
    Assignment,
    Body,
    Event,
    Made,
    Node,
    ProtoError,
    read_assignment,
)

LAYERS, ROWS, WIDTH = 4, 256, 64
WEIGHTS = jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), jnp.float32)
X = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
VALUE, STACK = ROWS * WIDTH * 4, LAYERS * WIDTH * WIDTH * 4  # bytes


def layer(w, x):
    x = checkpoint_name(x, "layer_input")
    with jax.named_scope("mlp"):
        h = checkpoint_name(jnp.sin(x @ w), "hidden")
    return x + jnp.tanh(h @ w)


def scanned(fn):
    return lambda ws, x: jnp.sum(lax.scan(lambda x, w: (fn(w, x), None), x, ws)[0] ** 2)


def unrolled(fn):
    def loss(ws, x):
        for i in range(LAYERS):
            with jax.named_scope(f"layer_{i}"):
                x = fn(ws[i], x)
        return jnp.sum(x**2)

    return loss


def step(loss):
    return lambda ws, x: ws - 0.1 * jax.grad(loss)(ws, x)


def accumulated(ws, x):
    def add(total, part):
        return total + jax.grad(scanned(layer))(ws, part), None

    parts = x.reshape(4, -1, WIDTH)
    return ws - lax.scan(add, jnp.zeros_like(ws), parts)[0]


def branches(ws, x):
    loss = lambda ws: lax.cond(  # noqa: E731
        x.sum() > 0, lambda: scanned(layer)(ws, x), lambda: jnp.sum(ws**2)
    )
    return jax.grad(loss)(ws)


def loss_of(policy):
    return scanned(jaxckpt.remat(layer, policy=policy))


PROGRAMS = {
    "plain": (step(scanned(layer)), 0),
    "not donated": (step(scanned(layer)), None),
    "remat": (step(loss_of("full")), 0),
    "offload": (step(loss_of("offload(hidden)")), 0),
    "unrolled": (step(unrolled(jax.checkpoint(layer))), 0),
    "accumulated": (accumulated, 0),
    "branches": (branches, None),
    "forward": (scanned(layer), None),
    "unused": (lambda ws, x: ws * 2, None),
}


def held(fn, *args, device="attached", donate=0, graph=None, **options):
    compiled = compile_for(
        fn, *args, device=device, donate_argnums=donate, peak=True, **options
    )
    return compiled, holders(compiled, graph)


def bytes_by_kind(found):
    kinds = {}
    for one in found:
        kinds[one.kind] = kinds.get(one.kind, 0) + one.bytes
    return kinds


def assert_sums(compiled, found):
    footprint = compiled.footprint
    assert sum(one.bytes for one in found) == footprint.peak_bytes
    kinds = bytes_by_kind(found)
    assert kinds["argument"] == footprint.argument_bytes
    assert 0 <= kinds.get("rest", 0) <= 4096 + footprint.temp_bytes // 50
    sizes = [one.bytes for one in found]
    assert sizes == sorted(sizes, reverse=True)


# --- Sums ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", PROGRAMS)
def test_holders_sum_to_the_peak(name):
    fn, donate = PROGRAMS[name]
    assert_sums(*held(fn, WEIGHTS, X, donate=donate))


@pytest.mark.aot
@pytest.mark.parametrize("name", ["remat", "offload", "not donated"])
def test_holders_sum_to_the_peak_of_an_absent_chip(name):
    fn, donate = PROGRAMS[name]
    compiled, found = held(fn, WEIGHTS, X, donate=donate, device="h100-80gb")
    assert_sums(compiled, found)
    names = {one.name for one in found if one.kind == "argument"}
    assert names == {"ws", "x"}
    kinds = bytes_by_kind(found)
    assert kinds.get("result", 0) == (STACK if name == "not donated" else 0)
    if name == "offload":  # values on the host are not memory of the device
        assert compiled.footprint.host_bytes == LAYERS * VALUE
        assert kinds["kept"] == LAYERS * VALUE
    if name == "remat":
        (kept,) = [one for one in found if one.kind == "kept"]
        assert kept.bytes == LAYERS * VALUE
        assert kinds["recomputed"] >= VALUE


@pytest.mark.aot
def test_the_record_of_buffers_is_added_to_the_cached_entry(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXCKPT_CACHE", str(tmp_path))
    fn = lambda x: jnp.sin(x) @ x.T  # noqa: E731
    plain = compile_for(fn, X, device="l40s")
    assert plain.buffers is None
    first, found = held(fn, X, device="l40s", donate=None)
    again, again_found = held(fn, X, device="l40s", donate=None)
    assert (first.from_cache, again.from_cache) == (False, True)
    assert again_found == found and again == first.__class__(
        **{**vars(first), "from_cache": True}
    )
    assert (first.footprint, first.hlo_text) == (plain.footprint, plain.hlo_text)
    late = compile_for(fn, X, device="l40s")
    assert late.from_cache and late.buffers is None
    assert len(list(tmp_path.iterdir())) == 1


# --- Kinds and names -----------------------------------------------------------------


def measured(loss):
    return jaxckpt.measure(loss, WEIGHTS, X, optimizer=optax.adam(1e-3), peak=True)


def test_measure_says_who_holds_what():
    found = {(h.kind, h.name): h for h in measured(loss_of("save(hidden)")).holders}
    assert found["argument", "state.params"].bytes == STACK
    assert found["argument", "state.opt_state[0].mu"].bytes == STACK
    assert found["argument", "batch"].bytes == VALUE
    hidden = found["kept", "hidden"]
    assert (hidden.bytes, hidden.count) == (LAYERS * VALUE, 1)
    assert "test_xla_peak.py" in hidden.source
    kept = {name for kind, name in found if kind == "kept"}
    assert kept == {"hidden", "carry (layer input)"}
    assert bytes_by_kind(found.values())["kept"] == 2 * LAYERS * VALUE


def test_measure_is_silent_unless_asked():
    found = jaxckpt.measure(loss_of("full"), WEIGHTS, X, optimizer=optax.sgd(0.1))
    assert found.holders == ()
    assert "holders" not in found.as_json()


def test_without_remat_all_is_kept_and_with_it_only_the_inputs():
    plain = bytes_by_kind(measured(scanned(layer)).holders)
    rematted = bytes_by_kind(measured(loss_of("full")).holders)
    assert plain["kept"] >= 3 * LAYERS * VALUE and "recomputed" not in plain
    assert rematted["kept"] == LAYERS * VALUE and rematted["recomputed"] >= VALUE


@pytest.mark.parametrize("name", ["plain", "remat", "accumulated"])
def test_gradients_that_wait_for_the_update_are_told(name):
    fn, donate = PROGRAMS[name]
    _, found = held(fn, WEIGHTS, X, donate=donate)
    gradients = [one for one in found if one.kind == "gradient" and one.bytes > 4]
    total = sum(one.bytes for one in gradients)
    assert total and total % STACK == 0


def test_equal_buffers_of_unrolled_layers_are_one_holder():
    graph = jaxckpt.trace(unrolled(layer), WEIGHTS, X)
    _, found = held(step(unrolled(layer)), WEIGHTS, X, graph=graph)
    several = [one for one in found if one.kind == "kept" and one.count > 1]
    assert several
    assert "hidden" in {one.name for one in several}
    assert any(one.name.startswith("layer_*") for one in several)
    assert not any("layer_0" in one.name for one in several)


def test_holders_as_json_are_plain():
    _, found = held(jnp.sin, X, donate=None)
    assert found[0].as_json().keys() == {"bytes", "kind", "name", "count", "source"}


def test_a_compilation_without_buffers_is_refused():
    with pytest.raises(ValueError, match="peak=True"):
        holders(compile_for(jnp.sin, X, device="attached"))


def test_a_compiler_that_writes_no_buffers_is_an_error(monkeypatch):
    monkeypatch.setattr(compile_module, "dumped_module", lambda folder: None)
    with pytest.raises(CompileError, match="did not write down where its buffers lie"):
        compile_for(jnp.sin, X, device="attached", peak=True)


def test_what_jax_has_compiled_before_is_compiled_again(tmp_path):
    settings = {
        "jax_compilation_cache_dir": str(tmp_path),
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    fn = lambda x: jnp.cos(x @ x.T) @ x  # noqa: E731
    try:
        for name, value in settings.items():
            jax.config.update(name, value)
        compile_for(fn, X, device="attached")
        assert_sums(*held(fn, X, donate=None))
        assert jax.config.jax_enable_compilation_cache
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


def test_arguments_have_the_function_s_names():
    def fn(state, *rest):
        return state, rest

    buffers = [Buffer(1, "argument", f"args[{i}]") for i in range(3)]
    buffers.append(Buffer(1, "backward", "args[3]"))  # a copy of one
    args = {"w": X, "b": X}, X, (X,)
    names = [b.op_name for b in named_arguments(buffers, fn, args)]
    assert names == ["state['b']", "state['w']", "rest[0]", "rest[1][0]"]


# --- What an operation is, by its name -----------------------------------------------


@pytest.mark.parametrize(
    ("op_name", "expected"),
    [
        ("jit(f)/jvp(GPT)/layers/while/body/closed_call/Block_0/mlp/mul", "forward"),
        ("jit(f)/transpose(jvp(GPT))/layers/while/body/eval_jaxpr/add_any", "backward"),
        ("jit(f)/transpose(jvp(A))/while/body/transpose(jvp(jvp()))/checkpoint/"
         "rematted_computation/Block_0/mul", "recomputed"),
        ("jit(f)/transpose(jvp(A))/while/body/transpose(jvp(jvp()))/checkpoint/mul",
         "backward"),
        ("jit(f)/transpose(jvp(A))/while/body/jvp(Block_0)/dot_general", "recomputed"),
        ("jit(f)/vmap(transpose(jvp()))/mul", "backward"),
        ("jit(f)/sub", "outside"),
        ("", "outside"),
    ],
)  # fmt: skip
def test_the_phase_of_an_operation(op_name, expected):
    assert phase(op_name) == expected


@pytest.mark.parametrize(
    ("op_name", "expected"),
    [
        ("jit(call)/call_exported/jit(flat)/jvp(GPT)/GPT._layers/layers/while/body/"
         "closed_call/Block_0/Block_0._mlp/mul", ("GPT/layers/Block_0", "mul")),
        ("jit(f)/transpose(jvp(bse,ve->bsv))/dot_general", ("", "dot_general")),
        ("jit(f)/jvp()/cond/branch_1_fun/mlp/sin", ("mlp", "sin")),
        ("jit(f)/transpose(jvp(GPT))/layers/while", ("GPT/layers", "")),
        ("", ("", "")),
    ],
)  # fmt: skip
def test_the_place_of_an_operation(op_name, expected):
    assert place_of(op_name) == expected


# --- Reading and replaying -----------------------------------------------------------


def varint(number):
    low, high = number & 127, number >> 7
    return bytes([low | 128]) + varint(high) if high else bytes([low])


def message(**fields):
    """Encode fields `f1=...`: whole numbers, texts, lists (packed), or messages."""
    encoded = b""
    for name, value in fields.items():
        number = int(name[1:].partition("_")[0])
        if isinstance(value, int):
            encoded += varint(number << 3) + varint(value)
            continue
        if isinstance(value, list):
            value = b"".join(map(varint, value))
        data = value.encode() if isinstance(value, str) else value
        encoded += varint(number << 3 | 2) + varint(len(data)) + data
    return encoded


SHAPE = message(f2=11, f3=[300, 2])  # f32[300,2]


def encoded_module():
    parameter = message(
        f1="x", f2="parameter", f3=SHAPE, f7=message(f2="args[0]"), f35=1, f9=0
    )
    negate = message(
        f1="y", f2="negate", f3=SHAPE, f7=message(f2="jit(f)/neg"), f35=2**40, f36=[1]
    )
    body = message(f1="main", f2=parameter, f2_2=negate, f5=7, f6=2**40)
    made = message(f1=3, f2=2400, f3=message(f4=2**40))
    argument = message(f1=0, f2=2400, f5=1, f9=message(f1=9))
    temp = message(f1=1, f2=4000, f9=message(f1=3, f3=2400))
    constant = message(f1=2, f2=64, f12=1)
    trace = message(f1=message(f2=3), f1_2=message(f1=1, f2=3))
    memory = message(f1=made, f3=argument, f3_2=temp, f3_3=constant, f4=trace)
    return message(f1=message(f1="m", f3=body, f6=7), f3=memory)


def test_a_module_is_read_from_its_bytes():
    module = read_assignment(encoded_module())
    assert module.parameters == (1,)
    node = module.nodes[2**40]
    assert (node.name, node.opcode, node.op_name) == ("y", "negate", "jit(f)/neg")
    assert node.operands == (1,) and node.part_text(()) == "f32[300,2]"
    assert [a.kind for a in module.allocations] == ["argument", "temp", "other"]
    assert module.traces == ((Event("begin", 3, 0), Event("end", 3, 0)),)
    assert held_buffers(module, 2400 + 4000) == (
        Buffer(2400, "argument", "args[0]", "f32[300,2]", "x"),
        Buffer(2400, "other", "jit(f)/neg", "f32[300,2]", "y"),
        Buffer(1600, "rest"),
    )


@pytest.mark.parametrize(
    "data", [b"", b"\x07\xff", encoded_module()[:60], b"HloModule"]
)
def test_other_bytes_are_refused(data):
    with pytest.raises(ProtoError, match="no HLO module with a buffer assignment"):
        read_assignment(data)


def node(name, opcode="add", op_name="", operands=(), called=(), index=0):
    shape = message(f2=11, f3=[8])
    return Node(name, opcode, op_name, operands, called, shape, index)


def assignment(nodes, events, sizes, temp):
    """Return a module of one allocation for temporaries; buffer i is made by node i."""
    bodies = {0: Body((), max(nodes), tuple(nodes))}
    made = {i: Made(i, (), size) for i, size in sizes.items()}
    allocation = Allocation(temp, "temp", 0, 0, frozenset(made))
    return Assignment(nodes, bodies, (), made, (allocation,), (tuple(events),))


def test_a_buffer_in_the_place_of_another_is_counted_once():
    nodes = {i: node(f"n{i}", op_name=f"jit(f)/jvp(a)/op{i}") for i in range(4)}
    events = [
        Event("begin", 0, 0),
        Event("begin", 1, 0),
        Event("share", 2, 0),  # written in place of buffer 0, both alive
        Event("end", 0, 0),
        Event("begin", 3, 0),  # the worst moment: 2 (where 0 was), 1 and 3
        Event("end", 1, 0),
        Event("end", 2, 0),
        Event("end", 3, 0),
    ]
    sizes = {0: 100, 1: 30, 2: 100, 3: 50}
    found = held_buffers(assignment(nodes, events, sizes, 200), 200)
    named = {buffer.op_name[-3:]: buffer.bytes for buffer in found}
    assert named == {"op2": 100, "op1": 30, "op3": 50, "": 20}


def test_a_place_that_is_left_and_taken_at_the_next_instruction_is_one():
    nodes = {i: node(f"n{i}", op_name=f"jit(f)/jvp(a)/op{i}") for i in range(3)}
    events = [
        Event("begin", 0, 0),
        Event("end", 0, 0),
        Event("share", 1, 0),
        Event("begin", 2, 0),
        Event("end", 1, 0),
        Event("end", 2, 0),
    ]
    found = held_buffers(assignment(nodes, events, {0: 10, 1: 10, 2: 5}, 15), 15)
    assert {(b.op_name[-3:], b.bytes) for b in found} == {("op1", 10), ("op2", 5)}


def test_what_a_loop_stacks_up_is_named_by_what_it_writes():
    body_parameters = node("p", "parameter")
    nodes = {
        0: node("zeros", "broadcast", "jit(f)/jvp(a)/broadcast_in_dim"),
        1: body_parameters,
        2: node("part", "get-tuple-element", operands=(1,), index=0),
        3: node("sine", "sine", "jit(f)/jvp(a)/while/body/mlp/sin"),
        4: node("wide", "convert", operands=(3,)),
        5: node("update", "dynamic-update-slice",
                "jit(f)/jvp(a)/while/body/dynamic_update_slice", (2, 4)),
        6: node("carry", "tuple", operands=(5,)),
        7: node("begin", "tuple", operands=(0,)),
        8: node("loop", "while", "jit(f)/jvp(a)/while", (7,), called=(1, 2)),
        9: node("out", "get-tuple-element", operands=(8,), index=0),
        10: node("copied", "copy", operands=(9,)),
        11: node("less", "compare", "jit(f)/jvp(a)/while/cond/lt"),
        12: node("cut", "dynamic-slice",
                 "jit(f)/transpose(jvp(a))/while/body/dynamic_slice", (10,)),
    }  # fmt: skip
    bodies = {
        0: Body((), 12, (0, 7, 8, 9, 10, 12)),
        1: Body((1,), 6, (1, 2, 3, 4, 5, 6)),
        2: Body((), 11, (11,)),
    }
    origins = Origins(Assignment(nodes, bodies, (), {}, (), ()))
    for identity in (5, 9, 10):
        found = origins.of(identity)
        assert found.op_name.endswith("mlp/sin") and found.phase == "forward"
    cut = origins.of(12)
    assert cut.op_name.endswith("mlp/sin") and cut.phase == "backward"
