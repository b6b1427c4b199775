"""verify.py on the programs of docs/your-own-loop.md: each trains the same model on one process and on two."""
import pytest
from conftest import PYTHON, ROOT, run

pytestmark = pytest.mark.long
# example: a right line, a wrong one, and the cause that verify.py names
MISTAKES = {
    "schedule.py": ("plateau.step(val_loss)", "if rank == 0: plateau.step(val_loss)", "rank-lr"),
    "tokens.py": ("dist.all_reduce(count)", "count = count * world_size", "uneven-mean"),
    "weighted_auc.py": ("generator.manual_seed(1000 * SEED + epoch)",
                        "generator.manual_seed(1000 * SEED + epoch + rank)", "samples"),
    "stream.py": ("yield from batch[self.rank::self.world_size]",
                  "yield from batch[:BATCH_SIZE // self.world_size]", "samples"),
    "two_optimizers.py": ("fake = parallel_generator(noise)", "fake = generator(noise)", "not-averaged"),
}
PAGE = " ".join((ROOT / "docs/your-own-loop.md").read_text().split())


def verify(left, right):
    return run(PYTHON, "verify.py", f"{PYTHON} {left}",
               f"{PYTHON} -m torch.distributed.run --standalone --nproc-per-node=2 {right}",
               env={"OMP_NUM_THREADS": "1"}, seconds=600)


@pytest.mark.parametrize("name", MISTAKES)
def test_an_example_trains_the_same_model_on_two_processes(name):
    said = verify(f"docs/examples/{name}", f"docs/examples/{name}")
    assert said.code == 0 and "\nsame: " in said.out, said.out + said.err


def test_the_minimal_pair_trains_the_same_model(tmp_path):
    options = f"--device cpu --output {tmp_path / 'best.pt'}"
    said = verify(f"minimal/train.py {options}", f"minimal/train_DDP.py {options}")
    assert said.code == 0 and "\nsame: " in said.out, said.out + said.err


@pytest.mark.parametrize("name", MISTAKES)
def test_the_mistake_that_an_example_avoids_has_its_cause_named(name, tmp_path):
    right, wrong, cause = MISTAKES[name]
    text = (ROOT / "docs/examples" / name).read_text()
    assert text.count(right) == 1
    answer = PAGE.split(f"on [`{name}`]")[1].split("## ")[0]
    assert f"`{wrong}`" in answer and f"`{cause}`" in answer
    (tmp_path / name).write_text(text.replace(right, wrong))
    said = verify(f"docs/examples/{name}", tmp_path / name)
    assert said.code == 1 and f"\ncause: {cause}: " in said.out, said.out + said.err
