"""What the source must not contain."""
import ast
import re

from conftest import ROOT


def test_nothing_is_loaded_that_could_run_code():
    """Every torch.load uses weights_only=True; folders.py unpickles only the names in its list."""
    calls = []
    folders = ("common", "benchmarks", "launch")
    for path in [*ROOT.glob("*.py"), *(path for folder in folders for path in (ROOT / folder).rglob("*.py"))]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                names = [alias.name for alias in node.names] + [getattr(node, "module", None)]
                unsafe = {"pickle", "joblib", "shelve", "dill", "cloudpickle"} & set(names)
                assert not unsafe or path.name in ("checkpoint.py", "folders.py"), f"{path.name}: imports {unsafe}"
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
