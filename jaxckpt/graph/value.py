"""One value of a program, and all of them with the links between the same data."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from jaxckpt.policy_algebra import Candidate

Path = tuple[Any, ...]
Place = tuple[Path, int]
"""Path of an equation, and the number of its output."""

Key = tuple[Path, Any]
"""Path of a jaxpr, and a variable in it."""


@dataclass(frozen=True)
class Value:
    """One value that could be kept.

    Attributes:
        place: Where it is made (`Place`).
        name: The name that the program gave it, if any.
        primitive: What makes it.
        dot: `"batched"`, `"unbatched"` or None (see `Candidate`).
        shape: Its shape, of one layer where it is made inside a scan.
        dtype: Its dtype's name.
        bytes: Its bytes on one device, of one layer where it is made inside a scan.
        times: How often it is made (the product of the lengths of the scans around it).
        source: `file:line (function)` that made it.
        scope: Name stack: `jax.named_scope`s and flax module path.
        in_rule: Whether it is made inside a `custom_vjp` forward rule.
        label: The name that the program gave it or a view of it; else a name made of
            the module path (or the function) and the operation, numbered from the
            second on, the same at each tracing.
    """

    place: Place
    name: str | None
    primitive: str
    dot: str | None
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    times: int
    source: str
    scope: str
    in_rule: bool
    label: str

    @property
    def candidate(self) -> Candidate:
        """What a policy is told about it."""
        return Candidate(self.name, self.dot, self.bytes, self.label)


class Values:
    """All values of a program, with the links between those that hold the same data.

    Inside, a value goes by its key: the path of its jaxpr and its variable.
    """

    def __init__(self) -> None:
        self._by_key: dict[Key, Value] = {}
        self._links: dict[Key, list[tuple[Key, str | None]]] = defaultdict(list)
        self._view_of: dict[Key, Key] = {}

    @cached_property
    def items(self) -> tuple[Value, ...]:
        """The values in the order of the program, with their labels."""
        names = _view_names(self._by_key, self._view_of)
        numbers: Counter[str] = Counter()
        labelled = []
        for key, value in self._by_key.items():
            name = names.get(key)
            if name is None:
                name = value.label
                numbers[name] += 1
                if numbers[name] > 1:
                    name = f"{name}#{numbers[name]}"
            labelled.append(replace(value, label=name))
        return tuple(labelled)

    @cached_property
    def _keys(self) -> tuple[Key, ...]:
        return tuple(self._by_key)

    @cached_property
    def _index(self) -> dict[Key, int]:
        return {key: i for i, key in enumerate(self._by_key)}

    def same_data(self, index: int) -> Iterator[int]:
        """Yield the values that hold the data of value `index`, itself included.

        Links are followed both ways, but not across a name other than its own: a value
        that the program names apart is a value of its own.
        """
        own = self.items[index].name
        seen = {self._keys[index]}
        queue = [self._keys[index]]
        while queue:
            key = queue.pop()
            if key in self._index:
                yield self._index[key]
            for other, name in self._links[key]:
                names = {None, name, self._name_at(other)}
                if other not in seen and (own is None or names <= {None, own}):
                    seen.add(other)
                    queue.append(other)

    def root(self, index: int, *, own_name: bool = False) -> int:
        """Return the value that `index` is a view of, or `index` itself.

        Args:
            index: Number of a value.
            own_name: Whether to stop before a value that has another name.
        """
        name = self.items[index].name
        found = index
        for key in self._views(self._keys[index]):
            if own_name and name is not None and self._name_at(key) not in (None, name):
                break
            found = self._index.get(key, found)
        return found

    def _name_at(self, key: Key) -> str | None:
        value = self._by_key.get(key)
        return None if value is None else value.name

    @cached_property
    def _names_of_views(self) -> dict[Key, str]:
        return _view_names(self._by_key, self._view_of)

    def name_of(self, index: int) -> str | None:
        """Return the name that the program gave to a value, or to a view of it."""
        return self._names_of_views.get(self._keys[index])

    def _views(self, key: Key) -> Iterator[Key]:
        """Yield the keys that `key` is a view of, nearest first."""
        while key in self._view_of:
            key = self._view_of[key]
            yield key

    def add(self, key: Key, value: Value) -> None:
        """Add a value."""
        self._by_key[key] = value

    def link(
        self, key: Key, to: Key, name: str | None = None, view: bool = True
    ) -> None:
        """Say that `to` holds the data of `key`, under a name if a name is given."""
        self._links[key].append((to, name))
        self._links[to].append((key, name))
        if view:
            self._view_of[to] = key

    def close_rule(
        self, first: int, outputs: Sequence[Key], times: int, dot: str | None
    ):
        """Keep, of the values of a forward rule, those that are worth keeping.

        They are its residuals and outputs (and what these are views of) and what it
        names outside its loops: the backward rule reads nothing else.

        Args:
            first: The number of values before the rule was opened.
            outputs: Keys of what the rule returns.
            times: How often the rule is run.
            dot: What kind of product the rule contains.
        """
        wanted = {k for key in outputs for k in (key, *self._views(key))}
        for key, value in list(self._by_key.items())[first:]:
            named = value.name is not None and value.times == times
            if key in wanted:
                self._by_key[key] = replace(value, in_rule=True, dot=value.dot or dot)
            elif named:
                self._by_key[key] = replace(value, in_rule=True)
            else:
                del self._by_key[key]

    def __len__(self) -> int:
        return len(self._by_key)


def _view_names(
    values: Mapping[Key, Value], view_of: Mapping[Key, Key]
) -> dict[Key, str]:
    """Return, by key, the names of values, and of the values that these are views of.

    Of several views with names the first gives its name to what they are views of.
    """
    names = {key: v.name for key, v in values.items() if v.name is not None}
    for key, name in list(names.items()):
        while (key := view_of.get(key)) is not None and key not in names:
            if key in values:
                names[key] = name
    return names
