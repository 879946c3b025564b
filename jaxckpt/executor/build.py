"""What generators build lists by: cut chains, and leave out what undoes itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from jaxckpt.executor.actions import Action, Advance, Drop, Keep, Load, Reverse
from jaxckpt.policy_algebra import Everything

Chain = tuple[int, ...]
"""The first stage of a chain, how many there are, and which slots are free for it."""
Parts = Sequence[Action | Chain]


def solved(chain: Chain, parts: Callable[..., Parts]) -> list[Action]:
    """Return the actions for a chain.

    Args:
        chain: What to reverse.
        parts: What makes actions and smaller chains of a chain, given as arguments.

    Example:
        >>> def parts(start, length):
        ...     last = start + length - 1
        ...     return [Reverse(last), (start, length - 1)] if length else []
        >>> [str(action) for action in solved((0, 2), parts)]
        ['reverse 1', 'reverse 0']
    """
    return simplified(_flat(chain, parts))


def _flat(chain: Chain, parts: Callable[..., Parts]) -> Iterator[Action]:
    # Not by recursion, which for one slot would be as deep as there are stages.
    todo: list[Action | Chain] = [chain]
    while todo:
        item = todo.pop()
        if isinstance(item, tuple):
            todo += reversed(parts(*item))
        else:
            yield item


def cut(start: int, first: int, behind: Chain, again: Chain) -> Parts:
    """Return a chain cut behind its first stages, its input in a slot meanwhile.

    Example:
        >>> actions = cut(0, 2, (2, 1), (0, 2))
        >>> ", ".join(map(str, actions))
        'keep 0, advance 0-1, (2, 1), load 0, drop 0, (0, 2)'
    """
    advance = Advance(start, start + first)
    return [Keep(start), advance, behind, Load(start), Drop(start), again]


def simplified(actions: Iterable[Action]) -> list[Action]:
    """Return actions that do the same with fewer slots, reads and writes.

    Args:
        actions: A legal list; what is shortened stays legal.

    Example:
        >>> [str(action) for action in simplified([Keep(0), Load(0), Drop(0)])]
        []
    """
    done: list[Action] = []
    for action in actions:
        done.append(action)
        _shorten_end(done)
    return done


def _shorten_end(done: list[Action]) -> None:
    """Shorten the last actions in place, where they can be."""
    match done[-4:]:
        case [
            Keep(policy=Everything()) as keep,
            Load() as load,
            Drop() as drop,
            Reverse() as reverse,
        ] if _one_slot(keep, load, drop) and keep.index == reverse.index:
            done[-4:] = [reverse]
        case [*_, Keep(policy=None) as keep, Load() as load, Drop() as drop] if (
            _one_slot(keep, load, drop)
        ):
            done[-3:] = []
        case [*_, Load() as load, Drop() as drop, Keep(policy=None) as keep] if (
            _one_slot(load, drop, keep)
        ):
            done[-3:] = [load]
        case [*_, Load() as load, Load() as again] if load == again:
            done[-2:] = [load]


def _one_slot(*actions: Keep | Load | Drop) -> bool:
    return len({(action.storage, action.index) for action in actions}) == 1
