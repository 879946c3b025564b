"""Reading optimized HLO, and the seconds, FLOPs and bytes that are read from it."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from jaxckpt.devices import get_device
from jaxckpt.errors import DeviceError
from jaxckpt.xla import HloError, compile_for, parse_hlo, step_seconds

# Round numbers, reached in full: seconds can be worked out by hand.
CHIP = dataclasses.replace(
    get_device("h100-80gb"),
    peak_flops_per_second=1e12,
    memory_bytes_per_second=1e9,
    host_link_bytes_per_second=1e6,
    nvlink_bytes_per_second=1e7,
    efficiency=1.0,
)
SUM = """
%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}
"""


def price(entry, *computations, chip=CHIP):
    """Price a module made of the lines of its entry and other computations' texts."""
    lines = "\n".join(f"  {line.strip()}" for line in entry.strip().splitlines())
    others = "\n".join(computations)
    text = f"HloModule m\n{others}\nENTRY %main () -> f32[] {{\n{lines}\n}}\n"
    return step_seconds(text, chip)


# --- The parser ----------------------------------------------------------------------


def test_parser_reads_tuples_layouts_and_memory_spaces():
    module = parse_hlo("""HloModule m, entry_computation_layout={(f32[2])->f32[2]}
ENTRY %main.1 (x: (s32[], bf16[2,3])) -> bf16[2,3] {
  %x = (s32[], (bf16[2,3]{1,0:T(8,128)(2,1)S(5)}, /*index=2*/pred[]{:S(1)})) \
parameter(0)
  ROOT %y.2 = bf16[2,3]{1,0} custom-call(%x, /*index=1*/%x), custom_call_target="a,b", \
metadata={op_name="jit(f)/while, calls=%nothing"}, backend_config={"k": {"n": "1,2"}}
}
""")
    x, y = module.entry.instructions.values()
    assert [s.dims for s in x.shapes] == [(), (2, 3), ()]
    assert [s.on_host for s in x.shapes] == [False, True, False]
    assert y.operands == ("x", "x")
    assert y.custom_call_target == "a,b"
    assert y.attribute("backend_config") == '{"k": {"n": "1,2"}}'
    assert module.callees(y) == []
    assert module.entry.root is y


@pytest.mark.parametrize(
    "text",
    ["", "not HLO", "ENTRY %m () -> f32[] {\n  %x = f32[] parameter(0)\n}\n"],
)
def test_text_that_is_no_module_is_refused(text):
    with pytest.raises(HloError):
        parse_hlo(text)


def test_device_without_rates_is_refused():
    with pytest.raises(DeviceError, match="rates of `attached`"):
        step_seconds("", get_device("attached"))


# --- Products ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "attributes", "rate"),
    [
        ("bf16", "", 1e12),
        ("f16", "", 1e12),
        ("f32", "", 5e11),
        ("f8e4m3fn", "", 2e12),
        ("f32", ", operand_precision={highest,highest}", 66.9e12),
    ],
)
def test_product_runs_at_the_rate_of_its_factors(dtype, attributes, rate):
    seconds = price(f"""
        %x = {dtype}[64,65536]{{1,0}} parameter(0)
        ROOT %y = f32[64,64]{{1,0}} dot(%x, %x), lhs_contracting_dims={{1}}, \
rhs_contracting_dims={{1}}{attributes}""")
    assert seconds.flops == 2 * 64 * 64 * 65536
    arithmetic = seconds.flops / rate
    memory = seconds.device_bytes / 1e9
    assert seconds.total == pytest.approx(max(arithmetic, memory), rel=1e-3)


def test_efficiency_divides_the_rates():
    text = """HloModule m
ENTRY %main (x: bf16[64,64]) -> bf16[64,64] {
  %x = bf16[64,64]{1,0} parameter(0)
  ROOT %y = bf16[64,64]{1,0} copy(%x)
}"""
    half = dataclasses.replace(CHIP, efficiency=0.5)
    assert step_seconds(text, half).total == 2 * step_seconds(text, CHIP).total


def test_library_product_is_counted_without_its_workspace_result():
    seconds = price("""
        %x = bf16[8,32,16]{2,1,0} parameter(0)
        %w = bf16[8,16,64]{2,1,0} parameter(1)
        ROOT %y = (bf16[8,32,64]{2,1,0}, s8[33554432]{0}) custom-call(%x, %w), \
custom_call_target="__cublas$gemm", backend_config={"gemm_backend_config":{\
"dot_dimension_numbers":{"lhs_contracting_dimensions":["2"],\
"rhs_contracting_dimensions":["1"],"lhs_batch_dimensions":["0"]}}}""")
    assert seconds.flops == 2 * 8 * 32 * 64 * 16
    assert seconds.device_bytes == 2 * (8 * 32 * 16 + 8 * 16 * 64 + 8 * 32 * 64)


@pytest.mark.parametrize(
    ("target", "first", "second", "result"),
    [
        ("Forward", "4,32,32,64", "96,3,3,64", "4,32,32,96"),
        ("BackwardInput", "4,32,32,96", "96,3,3,64", "4,32,32,64"),
        ("BackwardFilter", "4,32,32,64", "4,32,32,96", "96,3,3,64"),
    ],
)
def test_convolution_and_its_gradients_cost_the_same(target, first, second, result):
    seconds = price(f"""
        %x = bf16[{first}]{{3,2,1,0}} parameter(0)
        %w = bf16[{second}]{{3,2,1,0}} parameter(1)
        ROOT %y = (bf16[{result}]{{3,2,1,0}}, u8[0]{{0}}) custom-call(%x, %w), \
window={{size=3x3 pad=1_1x1_1}}, dim_labels=b01f_o01i->b01f, \
custom_call_target="__cudnn$conv{target}\"""")
    assert seconds.flops == 2 * (4 * 32 * 32 * 96) * (3 * 3 * 64)
    assert seconds.by_kind["products"] == seconds.total > 0


@pytest.mark.parametrize(("suffix", "passes"), [("", 4), ("Backward", 10)])
def test_fused_attention_counts_two_products_forward_and_five_back(suffix, passes):
    seconds = price(f"""
        %q = bf16[2,512,4,64]{{3,2,1,0}} parameter(0)
        %k = bf16[2,1024,2,64]{{3,2,1,0}} parameter(1)
        ROOT %y = (bf16[2,4,512,64]{{3,1,2,0}}, u8[0]{{0}}) custom-call(%q, %k, %k), \
custom_call_target="__cudnn$fmhaSoftmax{suffix}", backend_config={{\
"cudnn_fmha_backend_config": {{"fmha_scale": 0.125, "intermediate_tensor_shape": \
{{"element_type": "BF16", "dimensions": ["2", "4", "512", "1024"]}}}}}}""")
    assert seconds.flops == passes * 2 * 4 * 512 * 1024 * 64
    assert seconds.by_kind["attention"] == seconds.total > 0
    assert seconds.unknown == ()


def test_unknown_custom_call_is_listed_and_priced_by_its_bytes():
    seconds = price("""
        %x = f32[1000]{0} parameter(0)
        ROOT %y = f32[1000]{0} custom-call(%x), custom_call_target="mystery\"""")
    assert seconds.unknown == ("mystery",)
    assert seconds.by_kind["unknown"] == seconds.total == pytest.approx(8000 / 1e9)


def test_views_and_allocations_are_free():
    seconds = price("""
        %x = f32[1000]{0} parameter(0)
        %b = f32[10,100]{1,0} bitcast(%x)
        %a = f32[10,100]{1,0} custom-call(), custom_call_target="AllocateBuffer"
        %t = (f32[10,100]{1,0}, f32[10,100]{1,0}) tuple(%b, %a)
        ROOT %y = f32[10,100]{1,0} get-tuple-element(%t), index=0""")
    assert seconds.total == 0
    assert seconds.unknown == ()


# --- Bytes of fusions ----------------------------------------------------------------

UPDATE = """
%update (p0: f32[100,1000], p1: f32[1000], p2: s32[]) -> f32[100,1000] {
  %p0 = f32[100,1000]{1,0} parameter(0)
  %p1 = f32[1000]{0} parameter(1)
  %n = f32[1000]{0} negate(%p1)
  %b = f32[1,1000]{1,0} bitcast(%n)
  %p2 = s32[] parameter(2)
  %zero = s32[] constant(0)
  ROOT %u = f32[100,1000]{1,0} dynamic-update-slice(%p0, %b, %p2, %zero)
}
"""
SLICE = """
%slice (p0: f32[100,1000], p1: s32[]) -> f32[1000] {
  %p0 = f32[100,1000]{1,0} parameter(0)
  %c = f32[100,1000]{1,0} negate(%p0)
  %p1 = s32[] parameter(1)
  %zero = s32[] constant(0)
  %s = f32[1,1000]{1,0} dynamic-slice(%c, %p1, %zero), dynamic_slice_sizes={1,1000}
  ROOT %r = f32[1000]{0} bitcast(%s)
}
"""
REDUCE = """
%reduce (p0: f32[100,1000]) -> (f32[100], f32[100,1000]) {
  %p0 = f32[100,1000]{1,0} parameter(0)
  %zero = f32[] constant(0)
  %r = f32[100]{0} reduce(%p0, %zero), dimensions={1}, to_apply=%sum
  %e = f32[100,1000]{1,0} exponential(%p0)
  ROOT %t = (f32[100]{0}, f32[100,1000]{1,0}) tuple(%r, %e)
}
"""
STACK_LINE = "%x = f32[100,1000]{1,0} parameter(0)\n%i = s32[] parameter(1)\n"


def test_update_of_a_slice_costs_the_slice():
    seconds = price(
        STACK_LINE + "%v = f32[1000]{0} parameter(2)\n"
        "ROOT %y = f32[100,1000]{1,0} fusion(%x, %v, %i), kind=kLoop, calls=%update",
        UPDATE,
    )
    assert seconds.device_bytes == 4000 + 4000 + 4


def test_slice_of_a_stack_costs_the_slice():
    seconds = price(
        STACK_LINE + "ROOT %y = f32[1000]{0} fusion(%x, %i), kind=kLoop, calls=%slice",
        SLICE,
    )
    assert seconds.device_bytes == 4000 + 4000 + 4


def test_update_that_feeds_more_work_costs_the_stack():
    text = UPDATE.replace("ROOT %u", "%u").replace(
        "\n}", "\n  ROOT %e = f32[100,1000]{1,0} exponential(%u)\n}"
    )
    seconds = price(
        STACK_LINE + "%v = f32[1000]{0} parameter(2)\n"
        "ROOT %y = f32[100,1000]{1,0} fusion(%x, %v, %i), kind=kLoop, calls=%update",
        text,
    )
    assert seconds.device_bytes == (100_000 - 1000) * 4 + 4000 + 4 + 400_000


def test_operand_of_two_results_is_read_once():
    seconds = price(
        STACK_LINE + "ROOT %y = (f32[100]{0}, f32[100,1000]{1,0}) fusion(%x), "
        "kind=kInput, calls=%reduce",
        SUM,
        REDUCE,
    )
    assert seconds.device_bytes == 400_000 + 400 + 400_000


# --- Control flow --------------------------------------------------------------------

INNER = """
%inner (p: (f32[1000])) -> (f32[1000]) {
  %p = (f32[1000]{0}) parameter(0)
  %x = f32[1000]{0} get-tuple-element(%p), index=0
  %y = f32[1000]{0} negate(%x)
  ROOT %t = (f32[1000]{0}) tuple(%y)
}
%condition (p: (f32[1000])) -> pred[] {
  %p = (f32[1000]{0}) parameter(0)
  ROOT %c = pred[] constant(true)
}
"""
OUTER = """
%outer (p: (f32[1000])) -> (f32[1000]) {
  %p = (f32[1000]{0}) parameter(0)
  ROOT %w = (f32[1000]{0}) while(%p), condition=%condition, body=%inner, \
backend_config={"known_trip_count":{"n":"7"}}
}
"""
LOOP = "%p = (f32[1000]{0}) parameter(0)\nROOT %w = (f32[1000]{0}) while(%p), \
condition=%condition, body=%"


def test_nested_loops_multiply():
    loop = LOOP + 'outer, backend_config={"known_trip_count":{"n":"3"}}'
    assert price(loop, INNER, OUTER).device_bytes == 3 * 7 * 8000


def test_loop_of_unknown_length_is_listed():
    seconds = price(LOOP + "inner", INNER)
    assert seconds.device_bytes == 8000
    assert seconds.unknown == ("while `w` (length not known, taken as 1)",)


@pytest.mark.parametrize(
    "call",
    [
        "conditional(%i, %p, %p), branch_computations={%inner, %outer}",
        "conditional(%i, %p, %p), true_computation=%outer, false_computation=%inner",
        "call(%p), to_apply=%outer",
    ],
)
def test_calls_are_opened_and_the_dearest_branch_counts(call):
    entry = f"""
        %i = s32[] parameter(1)
        %p = (f32[1000]{{0}}) parameter(0)
        ROOT %w = (f32[1000]{{0}}) {call}"""
    assert price(entry, INNER, OUTER).device_bytes == 7 * 8000


# --- Links ---------------------------------------------------------------------------


def transfer(between):
    """A copy of 1000 bytes to the host with `between` before it is waited for."""
    return f"""
        %x = s8[1000]{{0}} parameter(0)
        %z = s8[250000]{{0}} parameter(1)
        %s = (s8[1000]{{0:S(5)}}, s8[1000]{{0}}, u32[]) copy-start(%x)
        {between}
        ROOT %d = s8[1000]{{0:S(5)}} copy-done(%s)"""


def test_transfer_to_the_host_that_is_waited_for_costs_its_whole_time():
    seconds = price(transfer(""))
    assert seconds.by_kind["host_copies"] == pytest.approx(1000 / 1e6)
    assert seconds.host_link_bytes == 1000


def test_transfer_to_the_host_hides_behind_other_work():
    seconds = price(transfer("%n = s8[250000]{0} negate(%z)"))
    assert seconds.by_kind["elementwise"] == pytest.approx(500_000 / 1e9)
    assert seconds.by_kind["host_copies"] == pytest.approx(1e-3 - 0.5e-3)
    assert seconds.total == pytest.approx(1e-3)


def copy_beside(work):
    """A copy within the memory of 1000 bytes a way, with `work` before it is needed."""
    return f"""
        %x = s8[1000]{{0}} parameter(0)
        %z = s8[1000]{{0}} parameter(1)
        %m = bf16[64,64]{{1,0}} parameter(2)
        %s = (s8[1000]{{0}}, s8[1000]{{0}}, u32[]) copy-start(%x)
        {work}
        ROOT %d = s8[1000]{{0}} copy-done(%s)"""


def test_copy_in_memory_does_not_hide_behind_work_that_memory_bounds():
    seconds = price(copy_beside("%n = s8[1000]{0} negate(%z)"))
    assert seconds.by_kind["copies"] == pytest.approx(2000 / 1e9)
    assert seconds.total == pytest.approx(4000 / 1e9)


def test_copy_in_memory_hides_behind_arithmetic():
    product = "%n = bf16[64,64]{1,0} dot(%m, %m), lhs_contracting_dims={1}"
    slow = dataclasses.replace(CHIP, peak_flops_per_second=1e10)
    seconds = price(copy_beside(product), chip=slow)
    product_seconds, memory = 2 * 64**3 / 1e10, 3 * 64 * 64 * 2 / 1e9
    assert seconds.by_kind["products"] == pytest.approx(product_seconds)
    idle = product_seconds - memory
    assert idle > 0
    assert seconds.by_kind["copies"] == pytest.approx(max(0, 2000 / 1e9 - idle))


def test_transfers_share_one_link():
    seconds = price("""
        %x = s8[1000]{0} parameter(0)
        %s = (s8[1000]{0:S(5)}, s8[1000]{0}, u32[]) copy-start(%x)
        %t = (s8[1000]{0:S(5)}, s8[1000]{0}, u32[]) copy-start(%x)
        %d = s8[1000]{0:S(5)} copy-done(%s)
        ROOT %e = s8[1000]{0:S(5)} copy-done(%t)""")
    assert seconds.total == pytest.approx(2e-3)


@pytest.mark.parametrize(
    ("line", "link_bytes"),
    [
        ("s8[4000]{0} all-gather(%x), replica_groups={{0,1,2,3}}", 3000),
        ("s8[4000]{0} all-gather(%x), replica_groups=[2,4]<=[8]", 3000),
        ("s8[250]{0} reduce-scatter(%x), replica_groups={{0,1,2,3}}", 750),
        ("s8[1000]{0} all-reduce(%x), replica_groups={{0,1,2,3}}", 1500),
        ("(s8[1000]{0}, s8[4000]{0}) all-gather-start(%x), replica_groups=[1,4]", 3000),
    ],
)
def test_collective_moves_its_bytes_over_the_link(line, link_bytes):
    seconds = price(f"%x = s8[1000]{{0}} parameter(0)\nROOT %y = {line}")
    assert seconds.by_kind["collectives"] == pytest.approx(link_bytes / 1e7)
    assert seconds.total == seconds.by_kind["collectives"]


# --- Programs that XLA:GPU compiled --------------------------------------------------


def scanned_mlp(layers, batch, width):
    """Return the gradient of a scanned two-product layer, and its arguments."""

    def loss(weights, x):
        def layer(x, w):
            return x + jnp.tanh(x @ w[0]) @ w[1], None

        y, _ = jax.lax.scan(layer, x, weights)
        return (y.astype(jnp.float32) ** 2).mean()

    weights = jax.ShapeDtypeStruct((layers, 2, width, width), jnp.bfloat16)
    x = jax.ShapeDtypeStruct((batch, width), jnp.bfloat16)
    return jax.value_and_grad(loss), (weights, x)


@pytest.mark.aot
@pytest.mark.parametrize("layers", [3, 8])
def test_scanned_gradient_has_three_products_for_each_forward_one(layers):
    fn, args = scanned_mlp(layers, batch=512, width=256)
    hlo_text = compile_for(fn, *args, device="h100-80gb").hlo_text
    seconds = step_seconds(hlo_text, get_device("h100-80gb"))
    assert seconds.flops == layers * 2 * 3 * (2 * 512 * 256 * 256)
    assert seconds.total == pytest.approx(sum(seconds.by_kind.values()))
    assert seconds.unknown == ()


@pytest.mark.aot
def test_bytes_of_scanned_layers_grow_with_their_number_only():
    """Were a whole stack moved in each turn, they would grow with its square."""

    def bytes_of(layers):
        fn, args = scanned_mlp(layers, batch=512, width=256)
        hlo_text = compile_for(fn, *args, device="h100-80gb").hlo_text
        return step_seconds(hlo_text, get_device("h100-80gb")).device_bytes

    few, some, many = (bytes_of(layers) for layers in (4, 8, 16))
    assert many - some == pytest.approx(2 * (some - few), rel=0.02)


@pytest.mark.aot
def test_attention_gradient_has_six_products():
    def loss(q, k, v):
        return jax.nn.dot_product_attention(q, k, v).astype(jnp.float32).sum()

    q = jax.ShapeDtypeStruct((2, 256, 4, 64), jnp.bfloat16)
    fn = jax.value_and_grad(loss, argnums=(0, 1, 2))
    hlo_text = compile_for(fn, q, q, q, device="h100-80gb").hlo_text
    seconds = step_seconds(hlo_text, get_device("h100-80gb"))
    assert seconds.flops == 6 * (2 * 2 * 4 * 256 * 256 * 64)
    assert seconds.by_kind["elementwise"] > 0


@pytest.mark.aot
def test_offloaded_layers_move_each_value_to_the_host_and_back():
    names = {
        "names_which_can_be_saved": [],
        "names_which_can_be_offloaded": ["x"],
        "offload_src": "device",
        "offload_dst": "pinned_host",
    }
    policies = jax.checkpoint_policies
    policy = policies.save_and_offload_only_these_names(**names)

    def loss(weights, x):
        def layer(x, w):
            x = jax.ad_checkpoint.checkpoint_name(x, "x")
            return jnp.tanh(x @ w[0]) @ w[1] + x, None

        y, _ = jax.lax.scan(jax.checkpoint(layer, policy=policy), x, weights)
        return (y.astype(jnp.float32) ** 2).mean()

    _, args = scanned_mlp(6, batch=4096, width=256)
    compiled = compile_for(jax.grad(loss), *args, device="h100-80gb")
    seconds = step_seconds(compiled.hlo_text, get_device("h100-80gb"))
    stack = 6 * 4096 * 256 * 2
    assert compiled.footprint.host_bytes == stack
    assert seconds.host_link_bytes == 2 * stack
    assert 0 < seconds.by_kind["host_copies"] <= 2 * stack / 50e9 * 1.001
