"""Imports in common/: none are circular, and train_DDP.py loads few modules."""
import ast
import graphlib

from conftest import ROOT

FILES = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
         for path in (ROOT / "common").rglob("*.py")}


def imported(path, nodes):
    """Return the modules of common/ that the imports in `nodes` name, and their parent packages."""
    here = path.relative_to(ROOT).parent.parts
    found = set()
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            base = ".".join([*here[:len(here) + 1 - node.level], *filter(None, [node.module])] if node.level else
                            [node.module])
            found |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    found |= {name.rpartition(".")[0] for name in found}
    return found & FILES.keys()


def test_imports_form_no_circle():
    """Imports within functions count, too; the packages' __init__ files import nothing."""
    graph = {name: imported(path, ast.walk(ast.parse(path.read_text()))) for name, path in FILES.items()}
    packages = {name for name, path in FILES.items() if path.name == "__init__.py"}
    assert not any(graph[name] for name in packages - {"common"})
    for _ in graphlib.TopologicalSorter({name: used - packages for name, used in graph.items()}).static_order():
        pass
    assert graph["common.errors"] <= packages
    core = {name for name in graph if name.count(".") == 1}
    assert not [(name, used) for name in core - packages for used in graph[name] - core - {"common"}]  # no wing


def test_what_train_ddp_imports_is_small():
    loaded, left = set(), imported(ROOT / "train_DDP.py", ast.parse((ROOT / "train_DDP.py").read_text()).body)
    while left:
        loaded |= left
        left = set().union(*(imported(FILES[name], ast.parse(FILES[name].read_text()).body) for name in left)) - loaded
    lines = sum(len(FILES[name].read_text().splitlines()) for name in loaded)
    assert len(loaded) <= 11 and lines <= 1700, (sorted(loaded), lines)
    assert lines > 1000  # or this test would no longer see what is imported
