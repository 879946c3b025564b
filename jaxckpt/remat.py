"""`remat`: a layer under a policy, executed exactly, whatever the policy says.

The layer is traced, the policy chooses among its values, the chosen ones get names, and
JAX is handed a policy made of those names only. A bare JAX policy is asked about one
equation at a time, cannot see what a value is made from, and is silent when a name
matches nothing; this one is exact, and says so when a pattern has no effect.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
from flax import linen, nnx

from jaxckpt import _jax
from jaxckpt.errors import PolicyError, WorkloadError
from jaxckpt.graph.choose import choose, refuse_unseen
from jaxckpt.graph.flops import equations
from jaxckpt.policy import Policy, parse_policy
from jaxckpt.policy_algebra import Everything
from jaxckpt.remat_flax import remat_linen, remat_nnx_class, with_nnx_state

Target = TypeVar("Target", bound=Callable[..., Any])

_ON_UNMATCHED = ("error", "ignore")


def remat(
    target: Target,
    *,
    policy: Policy | str | None,
    static_argnames: str | Sequence[str] = (),
    prevent_cse: bool = True,
    on_unmatched: str = "error",
) -> Target:
    """Compute a layer's values again in the backward pass, except those a policy keeps.

    Args:
        target: A function, a linen Module class or an nnx Module class. A function may
            take nnx Modules as arguments. Of a class, `__call__` is wrapped; the class
            keeps its name, so that parameters, initial values and dropout masks stay.
        policy: What to keep; None leaves the target as it is ("no remat"). Text is
            parsed (`parse_policy`).
        static_argnames: Arguments that are Python values (flags, modes), by name,
            whether they are passed by position, by keyword or by default.
        prevent_cse: Whether to keep the compiler from merging the recomputation with
            the forward pass. False is right inside a rolled scan, and only there.
        on_unmatched: `"error"` or `"ignore"`: what to do about a name pattern that
            matches no value which the backward pass reads.

    Returns:
        The wrapped target: same signature, values and gradients.

    Raises:
        PolicyError: When called, for a pattern without effect; here, for bad settings.
        WorkloadError: When called, for a layer that calls `io_callback`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jax.ad_checkpoint import checkpoint_name
        >>> import jaxckpt
        >>> def layer(w, x):
        ...     h = checkpoint_name(x @ w, "hidden")
        ...     return jnp.sin(jnp.sin(h) @ w)
        >>> wrapped = jaxckpt.remat(layer, policy=jaxckpt.save("hidden"))
        >>> w, x = jnp.ones((4, 4)), jnp.ones((2, 4))
        >>> [r.name for r in jaxckpt.trace(wrapped, w, x, argnums=(0, 1)).residuals
        ...  if not r.argument]
        ['hidden']
    """
    policy = parse_policy(policy) if isinstance(policy, str) else policy
    static = (static_argnames,) if isinstance(static_argnames, str) else static_argnames
    _check_settings(policy, on_unmatched, prevent_cse)
    if policy is None:
        return target
    options = functools.partial(
        _Rematted,
        policy=policy,
        prevent_cse=prevent_cse,
        check=on_unmatched == "error",
    )
    if inspect.isclass(target) and issubclass(target, linen.Module):
        return remat_linen(target, options, tuple(static))
    if inspect.isclass(target) and issubclass(target, nnx.Module):
        call = with_nnx_state(target.__call__, options, tuple(static))
        return remat_nnx_class(target, call)
    if isinstance(target, (linen.Module, nnx.Module)):
        raise TypeError(
            f"`target` is an instance of {type(target).__name__}. Wrap its class: "
            f"`jaxckpt.remat({type(target).__name__}, policy=...)`."
        )
    if not callable(target):
        raise TypeError(f"`target={target!r}` is no function and no Module class.")
    return with_nnx_state(target, options, tuple(static))  # type: ignore[return-value]


class _Rematted:
    """A function of arrays under a policy; traced once per argument types."""

    def __init__(
        self,
        fn: Callable[..., Any],
        label: str,
        *,
        policy: Policy,
        prevent_cse: bool,
        check: bool,
    ) -> None:
        self.fn = fn
        self.label = label
        self.policy = policy
        self.prevent_cse = prevent_cse
        self.check = check
        self._traced: dict[Any, tuple[Callable[..., list[Any]], Any]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, tree = jax.tree.flatten((args, kwargs))
        # The context holds the active device, by which models choose their attention.
        key = (tree, tuple(map(jax.typeof, leaves)), _jax.trace_context())
        traced = self._traced.get(key)
        if traced is None:
            traced, keep = self._trace(leaves, tree)
            if keep:
                self._traced[key] = traced
        run, out_tree = traced
        return jax.tree.unflatten(out_tree, run(*leaves))

    def _trace(self, leaves: Sequence[Any], tree: Any) -> tuple[Any, bool]:
        """Return the function of flat leaves, rematerialised; may it be kept?"""

        def flat(*values: Any) -> Any:
            args, kwargs = jax.tree.unflatten(tree, values)
            return self.fn(*args, **kwargs)

        closed, shapes = jax.make_jaxpr(flat, return_shape=True)(*leaves)
        run = remat_jaxpr(
            closed,
            self.policy,
            label=self.label,
            prevent_cse=self.prevent_cse,
            check=self.check,
        )
        # What the function closes over (a Module's arrays) may be another next time.
        closes_over_nothing = not closed.consts
        return (run, jax.tree.structure(shapes)), closes_over_nothing


def remat_jaxpr(
    closed: Any, policy: Policy, *, label: str, prevent_cse: bool, check: bool = True
) -> Callable[..., list[Any]]:
    """Return a closed jaxpr as a function of flat arrays, rematerialised.

    Args:
        closed: The program of one layer.
        policy: What to keep.
        label: How to call it in an error.
        prevent_cse: As for `remat`.
        check: Whether a pattern without effect is an error.
    """
    refuse_callbacks(closed, label)
    chosen = choose(closed, policy, where=label, check=check)
    refuse_unseen(chosen, policy, label)
    return jax.checkpoint(
        _jax.jaxpr_function(chosen.closed),
        prevent_cse=prevent_cse,
        policy=_jax_policy(policy, chosen.saved, chosen.offloaded),
    )


def _jax_policy(policy: Policy, saved: Sequence[str], offloaded: Sequence[str]) -> Any:
    if isinstance(policy, Everything):
        return jax.checkpoint_policies.everything_saveable
    if _jax.remat3_enabled():
        return _of_names(tuple(saved), tuple(offloaded))
    return _NamesInOperations(tuple(saved), tuple(offloaded))


def _of_names(saved: tuple[str, ...], offloaded: tuple[str, ...]) -> Any:
    """Return JAX's policy of names."""
    if not offloaded:
        return jax.checkpoint_policies.save_only_these_names(*saved)
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=list(saved),
        names_which_can_be_offloaded=list(offloaded),
        offload_src="device",
        offload_dst="pinned_host",
    )


@dataclass(frozen=True)
class _NamesInOperations:
    """JAX's policy of names, which also sees them inside an operation that is one call.

    Such a call (`graph.results.named_operation`) gives way to its derivative rule, and
    the name is seen there; but where nothing that it reads has a gradient (it stands
    over frozen parameters, or behind `stop_gradient`), the call stays as it is.
    """

    saved: tuple[str, ...]
    offloaded: tuple[str, ...]

    def __call__(self, primitive: Any, *avals: Any, **params: Any) -> Any:
        answer = _of_names(self.saved, self.offloaded)
        if primitive.name != "custom_jvp_call":
            return answer(primitive, *avals, **params)
        inside = (
            answer(eqn.primitive, *(v.aval for v in eqn.invars), **eqn.params)
            for eqn in _jax.open_jaxpr(params["call_jaxpr"]).eqns
            if _jax.bound_name(eqn) is not None
        )
        kept = (found for found in inside if found not in (False, _jax.RECOMPUTE))
        return next(kept, False)


def _check_settings(policy: Any, on_unmatched: str, prevent_cse: Any) -> None:
    if policy is not None and not isinstance(policy, Policy):
        raise PolicyError(
            f"`policy={policy!r}` is no jaxckpt policy. Build one by "
            "`jaxckpt.save(...)` and the like, or write it as text; a callable of "
            "JAX's goes to `jax.checkpoint`."
        )
    if on_unmatched not in _ON_UNMATCHED:
        raise PolicyError(
            f"`on_unmatched={on_unmatched!r}` is neither 'error' nor 'ignore'."
        )
    if not isinstance(prevent_cse, bool):
        raise PolicyError(f"`prevent_cse={prevent_cse!r}` is neither True nor False.")


def refuse_callbacks(closed: Any, label: str) -> None:
    """Raise `WorkloadError` for a program that calls `io_callback`."""
    if any(eqn.primitive.name == "io_callback" for eqn, _ in equations(closed)):
        raise WorkloadError(
            f"{label} calls `io_callback`, which would run twice under remat; JAX "
            "refuses it. Move the callback out of the rematerialised layer, or use "
            "`jax.debug.callback`, which may run twice."
        )
