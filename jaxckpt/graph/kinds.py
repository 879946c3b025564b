"""Which operations are no products: what they cost is the memory they read and write.

What stands in none of the lists here, nor among the products of `jaxckpt.matmul`, is an
operation of unknown work: `jaxckpt.graph.flops.find_unknown` lists it.
"""

from __future__ import annotations

from typing import Any

from jaxckpt import _jax


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


MOVES = _names(
    """
    reshape broadcast_in_dim transpose squeeze expand_dims slice convert_element_type
    concatenate pad iota copy name gather dynamic_slice rev dynamic_update_slice
    optimization_barrier select_n stop_gradient split stack unstack tile broadcast_to
    bitcast_convert_type device_put sharding_constraint layout_constraint reshard pvary
    reduced_vary_cast reduced_vary_cast_p vary_unreduced_cast vary_unreduced_cast_p
    preduced empty empty2 zeros_like real imag complex conj call_hi_primitive
    with_memory_space_constraint scatter to_edtype from_edtype random_wrap
    random_unwrap random_clone jaxckpt_mark
    """
)
"""Operations that compute no number."""

VIEWS_IN_PLACE = _names(
    """
    convert_element_type copy name call_hi_primitive optimization_barrier select_n
    stop_gradient device_put pvary real imag complex conj jaxckpt_mark
    """
)
"""Those of them whose results have the shape of what they are given."""

ELEMENTWISE = _names(
    """
    abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e
    cbrt ceil clamp clz cos cosh digamma div eq eq_to erf erf_inv erfc exp exp2 expm1
    floor ge gt igamma igamma_grad_a igammac integer_pow is_finite le le_to lgamma log
    log1p log2 logistic lt lt_to max min mul mulhi ne neg nextafter not
    one_minus_square or polygamma polynomial population_count pow reciprocal
    reduce_precision regularized_incomplete_beta rem round rsqrt shift_left
    shift_right_arithmetic shift_right_logical sign sin sinh sqrt square sub tan tanh
    xor zeta dimension_size axis_index platform_index
    """
)

REDUCTIONS = _names(
    """
    argmax argmin cumlogsumexp cummax cummin cumprod cumsum reduce reduce_and
    reduce_max reduce_min reduce_or reduce_prod reduce_sum reduce_xor reduce_window
    reduce_window_max reduce_window_min reduce_window_sum select_and_gather_add
    select_and_scatter select_and_scatter_add scatter-add scatter-max scatter-min
    scatter-mul scatter-sub scatter_add scatter_max scatter_min scatter_mul
    """
)

RANDOM = _names(
    """
    random_bits random_fold_in random_seed random_split rng_bit_generator rng_uniform
    threefry2x32 threefry4x32 philox2x32 philox4x32 iota_2x32_shape
    """
)

COLLECTIVES = _names(
    """
    all_gather all_gather_invariant all_gather_reduced all_to_all pbroadcast pmax pmin
    ppermute psum psum_invariant reduce_scatter unreduced_psum
    unreduced_reduce_scatter ragged_all_to_all
    """
)

# What kernels do with the memory that they are handed.
REFERENCES = _names(
    """
    get swap addupdate masked_load masked_swap program_id num_programs multiple_of
    """
)

_KNOWN = MOVES | ELEMENTWISE | REDUCTIONS | RANDOM | COLLECTIVES | REFERENCES


def is_known(eqn: Any) -> bool:
    """Return whether what an operation that is no product costs is its memory traffic.

    One that makes nothing (a check, a callback that only prints) costs nothing.
    """
    makes = any(_jax.nbytes(v.aval) for v in eqn.outvars)
    return eqn.primitive.name in _KNOWN or not makes
