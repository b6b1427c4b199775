"""What the source may import, load and signal."""
import ast
import graphlib
import re

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
    assert len(loaded) <= 11 and lines <= 1600, (sorted(loaded), lines)
    assert lines > 1000  # or this test would no longer see what is imported


def test_nothing_is_loaded_that_could_run_code():
    """Every torch.load uses weights_only=True; dcp_folders.py unpickles only the names in its list.

    benchmarks/language.py only writes a pickle, for nanoGPT.
    """
    calls = []
    folders = ("common", "benchmarks", "launch")
    for path in [*ROOT.glob("*.py"), *(path for folder in folders for path in (ROOT / folder).rglob("*.py"))]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                names = [alias.name for alias in node.names] + [getattr(node, "module", None)]
                unsafe = {"pickle", "joblib", "shelve", "dill", "cloudpickle"} & set(names)
                known = path.name in ("checkpoint.py", "dcp_folders.py", "language.py")
                assert not unsafe or known, f"{path.name}: imports {unsafe}"
            function = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if function in ("torch.load", "np.load", "pickle.load", "pickle.loads", "torch.jit.load"):
                calls.append((path.name, function, {word.arg: ast.unparse(word.value) for word in node.keywords}))
    assert [call[:2] for call in calls if call[1] != "np.load"] == [("checkpoint.py", "torch.load")]
    assert all(call[2].get("weights_only") == "True" for call in calls if call[1] == "torch.load")
    assert all(call[2].get("allow_pickle", "False") == "False" for call in calls if call[1] == "np.load")


def test_the_signals_of_the_batch_files_are_those_that_train_elastic_takes():
    """Slurm must signal the tasks, not only the batch shell, as with "B:"; torchrun passes the signals on."""
    noted = re.findall(r'"(SIG\w+)"', re.search(r"note_signals\((.*)\)", (ROOT / "train_elastic.py").read_text())[1])
    [sent] = re.findall(r"^#SBATCH --signal=(.*)@\d+$", (ROOT / "launch/elastic.sbatch").read_text(), re.M)
    assert f"SIG{sent}" in noted
    [handled] = re.findall(r"--signals-to-handle=(\S+)", (ROOT / "launch/torchrun.sbatch").read_text())
    assert set(noted) <= set(handled.split(","))
