"""Plan files: a plan as JSON that reads and compares well, and is checked when read.

    format      1
    jax         the versions of JAX that it is for: those of the series it was made with
    program     what tells the program from others, and its stacks: each with its name,
                its number of layers, and the lines of its schedule
    form, existing   as in `Plan`
    verified    what `fit` found: device, budget, predicted, compiled, ...; or null
    checksum    of all that, whatever its layout

The checksum protects against accidents and edits, not against an attacker, who can make
one as well.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from jaxckpt import _jax
from jaxckpt.errors import JaxckptError, PlanError
from jaxckpt.layers import FORMS
from jaxckpt.plan import EXISTING, Plan
from jaxckpt.plan_fields import MOST_BYTES, Field, check_size, parse_json
from jaxckpt.plan_lines import from_lines, to_lines
from jaxckpt.plan_verified import ArgumentShapes, PlanFigures, Verified
from jaxckpt.schedule import Schedule

FORMAT = 1

_KEYS = "format", "jax", "program", "form", "existing", "verified", "checksum"
_MOST_LAYERS = 100_000
_FLOPS = 10**30


def to_json(plan: Plan) -> str:
    """Return a plan as JSON (see `Plan.to_json`)."""
    document = _document(plan)
    document["checksum"] = _checksum(document)
    text = json.dumps(document, indent=2, ensure_ascii=False) + "\n"
    from_json(text, source="The plan")
    return text


def from_json(text: str, *, edited: bool = False, source: str = "The text") -> Plan:
    """Return the plan that a JSON text holds (see `Plan.from_json`)."""
    whole = parse_json(text, source)
    _check_format(whole)
    _, series, program, form, existing, verified, checksum = whole.fields(*_KEYS)
    _check_series(series)
    fingerprint, stacks = program.fields("fingerprint", "stacks")
    read = [_stack(stack) for stack in stacks.entries(least=1)]
    depths = [depth for _, depth, _ in read if depth is not None]
    if len(depths) not in (0, len(read)):
        stacks.fail("Either every stack must have a number of `layers`, or none.")
    try:
        plan = Plan(
            rules=tuple((name, schedule) for name, _, schedule in read),
            form=form.optional(lambda field: field.one_of(FORMS)),
            existing=existing.one_of(EXISTING),
            depths=tuple(depths),
            fingerprint=fingerprint.optional(Field.text),
            verified=verified.optional(_verified),
        )
    except JaxckptError as error:
        raise _of(source, error) from None
    if checksum.text() == _checksum(whole.value):
        return plan
    if not edited:
        raise PlanError(
            f"{source} was edited after it was made: its `checksum` is another. Make "
            "the plan again; or load it by `jaxckpt.load_plan(path, edited=True)`, "
            "which takes the rules as they are and leaves out what was verified."
        )
    return dataclasses.replace(plan, verified=None)


def save(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write a plan to a file (see `Plan.save`)."""
    text = to_json(plan)
    try:
        _replace(Path(path).resolve(), text)
    except (OSError, ValueError) as error:
        raise PlanError(
            f"`{os.fspath(path)}` cannot be written: {_reason(error)}. Give the name "
            "of a file in a folder that is there."
        ) from None


def load_plan(path: str | os.PathLike[str], *, edited: bool = False) -> Plan:
    """Return the plan in a file.

    Plan files are untrusted input: every field is checked. That the plan suits a
    program is checked where it is applied, before anything compiles.

    Args:
        path: A file that `plan.save` or `jaxckpt fit -o` wrote.
        edited: Whether to take a file that was edited by hand. Its figures are of
            another plan then, so `verified` is left out.

    Raises:
        PlanError: The file cannot be read, is no plan, is for another version of JAX,
            or was edited.

    Example:
        >>> import tempfile
        >>> from jaxckpt.schedule import every
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     Plan((("layers", every(4)),), depths=(8,)).save(f"{folder}/plan.json")
        ...     load_plan(f"{folder}/plan.json").rules
        (('layers', Every(layers=4)),)
    """
    source = f"`{os.fspath(path)}`"
    try:
        if not Path(path).is_file():
            raise PlanError(
                f"{source} is not a file. Give the path of a plan file, which "
                "`jaxckpt fit -o` and `plan.save` write."
            )
        with Path(path).open("rb") as file:
            content = file.read(MOST_BYTES + 1)
        check_size(len(content), source)
        text = content.decode()
    except UnicodeDecodeError as error:
        raise PlanError(
            f"{source} is not UTF-8 text (byte {error.start}). Is it a plan file?"
        ) from None
    except (OSError, ValueError) as error:
        if isinstance(error, PlanError):
            raise
        raise PlanError(f"{source} cannot be read: {_reason(error)}.") from None
    return from_json(text, edited=edited, source=source)


# --- Writing -------------------------------------------------------------------------


def _replace(file: Path, text: str) -> None:
    """Write beside a file and rename, so that there is always a whole one."""
    beside = file.with_name(f".{file.name}.{secrets.token_hex(4)}")
    try:
        with beside.open("x", encoding="utf-8") as out:
            out.write(text)
            out.flush()
            os.fsync(out.fileno())
        beside.replace(file)
    finally:
        with contextlib.suppress(OSError):
            beside.unlink()


def _reason(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error)


def _document(plan: Plan) -> dict[str, Any]:
    depths = plan.depths or (None,) * len(plan.rules)
    stacks = [
        {"name": name, "layers": depth, "schedule": to_lines(schedule, depth)}
        for (name, schedule), depth in zip(plan.rules, depths, strict=True)
    ]
    verified = plan.verified
    return {
        "format": FORMAT,
        "jax": _series(),
        "program": {"fingerprint": plan.fingerprint, "stacks": stacks},
        "form": plan.form,
        "existing": plan.existing,
        "verified": None if verified is None else _verified_document(verified),
    }


def _verified_document(verified: Verified) -> dict[str, Any]:
    document = dataclasses.asdict(verified)
    return document | {"versions": dict(verified.versions)}


def _series() -> str:
    """Return the versions of JAX for which a plan that is made now is: `0.10.*`."""
    return "{}.{}.*".format(*_jax.version())


def _checksum(document: Mapping[str, Any]) -> str:
    """Return the hash of a plan's content, its layout and the checksum left out."""
    content = {key: document[key] for key in _KEYS if key != "checksum"}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


# --- Reading -------------------------------------------------------------------------


def _check_format(whole: Field) -> None:
    """Look at the format first: a later one may have other keys."""
    given = whole.value.get("format") if isinstance(whole.value, dict) else None
    if isinstance(given, bool) or not isinstance(given, int):
        whole.fields(*_KEYS)[0].whole()
    if given != FORMAT:
        raise PlanError(
            f"{whole.source} has `format` {given}, and this version of jaxckpt reads "
            f"{FORMAT}. Use the version that wrote it, or make the plan again."
        )


def _check_series(field: Field) -> None:
    if not re.fullmatch(r"[0-9]+\.[0-9]+\.\*", field.text(most=20)):
        field.fail(f"It must be a series of JAX's versions, such as `{_series()}`.")
    if field.text() != _series():
        raise PlanError(
            f"{field.source} was made with jax {field.text()}, and this is jax "
            f"{jax.__version__}: programs and the labels of values may differ between "
            f"the two. Make the plan again, or install jax {field.text()}."
        )


def _stack(field: Field) -> tuple[str, int | None, Schedule]:
    """Return a stack's name, depth and schedule."""
    name, layers, lines = field.fields("name", "layers", "schedule")
    depth = layers.optional(lambda field: field.whole(least=1, most=_MOST_LAYERS))
    read = [line.text() for line in lines.entries(least=1)]
    try:
        schedule = from_lines(read)
        if depth is not None:
            schedule.nodes(depth)
    except JaxckptError as error:
        raise _of(f"{field.source}: `{lines.path}`", error) from None
    return name.text(), depth, schedule


def _of(source: str, error: Exception) -> PlanError:
    """Return an error as one about the file, not longer than a few lines."""
    text = str(error)
    short = text if len(text) <= 400 else f"{text[:200]} ... {text[-200:]}"
    return PlanError(short if short.startswith(source) else f"{source}: {short}")


def _verified(field: Field) -> Verified:
    names = [f.name for f in dataclasses.fields(Verified)]
    get = dict(zip(names, field.fields(*names), strict=True))
    return Verified(
        device=get["device"].text(),
        budget_bytes=get["budget_bytes"].whole(least=1),
        predicted=_figures(get["predicted"]),
        compiled=_figures(get["compiled"]),
        host_bytes=get["host_bytes"].whole(),
        forward_flops=get["forward_flops"].whole(most=_FLOPS),
        recompute_flops=get["recompute_flops"].whole(most=_FLOPS),
        lower_bound_seconds=get["lower_bound_seconds"].optional(Field.number),
        gap=get["gap"].optional(lambda gap: gap.number(least=-1)),
        solve_seconds=get["solve_seconds"].number(),
        compiles=get["compiles"].whole(),
        argument_shapes=_argument_shapes(get["argument_shapes"]),
        versions=tuple((key, one.text()) for key, one in get["versions"].pairs()),
        xla_flags=get["xla_flags"].text(most=10_000),
        cost_model=get["cost_model"].text(),
    )


def _figures(field: Field) -> PlanFigures:
    peak, seconds = field.fields("peak_bytes", "step_seconds")
    return PlanFigures(peak.whole(), seconds.optional(Field.number))


def _argument_shapes(field: Field) -> ArgumentShapes:
    batch, parameters = field.fields("batch", "parameters")
    return ArgumentShapes(
        tuple(one.text() for one in batch.entries()), parameters.text()
    )
