"""The shape of the package: which way imports go, and what the wheel holds."""

import ast
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "jaxckpt"

# A module imports only from its own entry and those above it.
ORDER = [
    ["errors", "units", "progress"],
    ["_quiet"],
    ["_jax"],
    ["matmul"],
    ["policy"],
    ["schedule"],
    ["workload"],
    ["settings"],
    ["loading"],
    ["devices"],
    ["graph"],
    ["host"],
    ["remat"],
    ["layers"],
    ["stack"],
    ["rewrite"],
    ["plan"],
    ["executor"],
    ["training"],
    ["xla"],
    ["memory"],
    ["planner"],
    ["report"],
    ["cli"],
    ["__init__", "__main__"],
]
RANK = {name: rank for rank, names in enumerate(ORDER) for name in names}

FILES = sorted(PACKAGE.rglob("*.py"))
PRIVATE = "jax._", "jax.interpreters", "jaxlib"


def part_of(file):
    """Return the name in `ORDER` that a file belongs to: `remat_flax.py` to `remat`."""
    first = file.relative_to(PACKAGE).parts[0].removesuffix(".py")
    return first if first.startswith("_") else first.split("_")[0]


def imported_modules(file):
    """Return the absolute names of all modules that a file imports, anywhere in it."""
    package = ".".join(file.relative_to(ROOT).parts[:-1])
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package.rsplit(".", node.level - 1)[0] if node.level else ""
            module = ".".join(filter(None, [base, node.module]))
            names |= {f"{module}.{alias.name}" for alias in node.names}
    return names


def imported_parts(file):
    """Return the names in `ORDER` that a file imports from."""
    modules = [name.split(".") for name in imported_modules(file)]
    return {
        part_of(PACKAGE / name[1])
        for name in modules
        if name[0] == "jaxckpt" and len(name) > 1
    }


def name_of(file):
    return str(file.relative_to(ROOT))


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_imports_go_one_way(file):
    part = part_of(file)
    assert part in RANK, f"add `{part}` to ORDER in {Path(__file__).name}"
    later = {name for name in imported_parts(file) if RANK.get(name, 0) > RANK[part]}
    assert not later, f"{name_of(file)} imports {later}, which stand below `{part}`"


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_a_module_does_not_import_the_whole_package(file):
    if part_of(file) in ("__init__", "__main__"):
        return
    assert "jaxckpt" not in imported_modules(file)


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_private_jax_names_stay_in_one_file(file):
    private = {n for n in imported_modules(file) if n.startswith(PRIVATE)}
    assert part_of(file) == "_jax" or not private


def test_the_checks_see_a_wrong_import(tmp_path, monkeypatch):
    package = tmp_path / "jaxckpt"
    (package / "xla").mkdir(parents=True)
    file = package / "xla" / "wrong.py"
    file.write_text(
        "def f():\n    from ..cli import main\n    from jax._src import core"
    )
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    monkeypatch.setitem(globals(), "PACKAGE", package)
    assert imported_parts(file) == {"cli"}
    assert RANK["cli"] > RANK[part_of(file)]
    assert "jax._src.core" in imported_modules(file)


def test_the_wheel_ships_the_package_only():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = settings["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert wheel == {"packages": ["jaxckpt"]}


def test_the_catalogue_lies_in_the_package():
    assert (PACKAGE / "devices" / "catalog.toml").is_file()
