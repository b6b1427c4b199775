"""Code that splits work over processes, tested without processes: shards, stages, micro-batches, damaged folders."""
import enum
import functools
import json
import pickle
from concurrent.futures import Future

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.torch_version import TorchVersion

from benchmarks.memory import Storages
from common import clipping, dcp_folders, layers, models, pipeline, replay, shards
from common.errors import ProcessError, UsageError

TORCH = TorchVersion(torch.__version__)


@pytest.mark.parametrize("length", [1, 2, 5, 8, 9])
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_even_shards_have_equally_many_samples_and_own_each_once(length, count):
    parts = [shards.EvenShare(length, rank, count) for rank in range(count)]
    assert len({len(part) for part in parts}) == 1 and [len([*part]) for part in parts] == [len(part) for part in parts]
    assert sorted(index for part in parts for index in [*part][:part.own]) == [*range(length)]


@pytest.mark.parametrize(("batch_size", "wanted", "processes", "chunks", "found"), [
    (64, None, 2, 1, 4), (64, None, 3, 1, 8), (64, None, 1, 1, 2), (96, None, 3, 2, 12), (64, 16, 4, 1, 16),
    (64, 5, 2, 1, "not a multiple of the 5 micro-batches"), (64, 1, 2, 1, "fewer than the 2 pipeline stages"),
    (64, 4, 3, 2, "not a multiple of the 3 processes")])
def test_micro_batches_divide_the_batch_and_suit_the_schedule(batch_size, wanted, processes, chunks, found):
    if isinstance(found, int):
        assert pipeline.split_batch(batch_size, wanted, processes, chunks) == found
    else:
        with pytest.raises(UsageError, match=found):
            pipeline.split_batch(batch_size, wanted, processes, chunks)


@pytest.mark.parametrize("backend", ["gloo", "nccl", "nccl-lazy", "xccl"])
@pytest.mark.parametrize("device_type", ["cpu", "cuda", "xpu"])
def test_gloo_is_refused_on_a_gpu_alone(backend, device_type):
    if backend != "gloo" or device_type == "cpu":
        shards.reject_gloo(backend, device_type)
        return
    with pytest.raises(UsageError, match=f"gloo cannot split a model over {device_type} .* or use --device cpu$"):
        shards.reject_gloo(backend, device_type)


@pytest.mark.parametrize(("backend", "lazy", "found"), [
    ("gloo", True, None), ("nccl", False, None), ("nccl", True, "nccl-lazy"), ("nccl2", True, "nccl-lazy"),
    ("nccl-lazy", True, None), ("xccl", True, None)])
def test_stages_send_through_a_communicator_for_each_peer_where_torch_has_them(backend, lazy, found):
    assert pipeline.peer_backend(backend, ["gloo", "nccl", *["nccl-lazy"] * lazy]) == found


@pytest.mark.parametrize("name", ["cnn", "vit"])
@pytest.mark.parametrize("count", range(1, 7))
def test_the_stages_one_after_the_other_are_the_model(name, count):
    model = models.create_model(name, 10, (1, 28, 28))
    stages = pipeline.cut(model, count)
    images = values = torch.rand(3, 1, 28, 28)
    for stage in stages:
        assert any(True for _ in stage.parameters())
        values = stage(values)
    assert len(stages) == count and torch.equal(values, model(images))


@pytest.mark.parametrize("count", [1, 2, 3, 4, 6])
def test_stages_have_even_shares_of_the_parameters(count):
    with torch.device("meta"):
        model = models.create_model("vit_base", 10, (1, 28, 28))
    whole, *sizes = (sum(parameter.numel() for parameter in part.parameters())
                     for part in [model, *pipeline.cut(model, count)])
    assert 85e6 < whole == sum(sizes) and max(sizes) < 1.01 * whole / count


def test_stages_in_bf16_keep_weights_and_gradients_in_float32():
    model = models.create_model("vit", 10, (1, 28, 28))
    images = torch.rand(3, 1, 28, 28)
    first, last = pipeline.cut(model, 2, bf16=True)
    assert first(images).dtype == torch.bfloat16
    outputs = last(first(images))
    assert outputs.dtype == torch.float32 and 0 < (outputs - model(images)).abs().max() < 0.05
    outputs.square().sum().backward()
    assert {(part.dtype, part.grad.dtype) for part in model.parameters()} == {(torch.float32, torch.float32)}


@pytest.mark.parametrize(("model", "message"), [
    (models.create_model("cnn", 10, (1, 28, 28)), "7 pipeline stages: the model has only 6 layers"),
    (nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), "BatchNorm would see micro-batches"),
    (nn.Transformer(8, 2, 1, 1, 8), "needs a chain of layers")])
def test_what_is_no_pipeline_is_named(model, message):
    with pytest.raises(UsageError, match=message):
        pipeline.cut(model, 7)


def test_nested_values_come_apart_and_together():
    content = {"model": {"a.b": 1}, "optimizer": {"state": {0: {"momentum_buffer": 2}}, "empty": {}}, "epoch": 3}
    assert shards.nest(dict(shards.flatten(content))) == content


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("kind", ["empty", "frozen", "copy"])
def test_a_stage_may_have_no_gradient_that_counts(group, kind, sharded):
    """The other stages of a pipeline may have some, so this process must take part in the sum."""
    layer = nn.Linear(2, 2, bias=False).requires_grad_(kind == "copy")
    if sharded:
        fully_shard(layer, mesh=init_device_mesh("cpu", (1,)))
    parameters = [] if kind == "empty" else [*layer.parameters()]
    if kind == "copy":
        layer(torch.ones(2, 2)).sum().backward()
    for pipeline_group in (None, group):
        assert clipping.clip_grad_norm(parameters, 1.0, pipeline_group, parameters) == 0
    assert clipping.clip_grad_norm(parameters, None) is None


def test_a_copy_is_scaled_but_does_not_count(group):
    """As a tied embedding on the last stage: another stage counts its gradient."""
    weight, copy = (nn.Parameter(torch.zeros(2)) for _ in range(2))
    weight.grad, copy.grad = torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.0])
    assert clipping.clip_grad_norm([weight, copy], 1.0, group, [copy]) == 5
    assert weight.grad.norm() == copy.grad.norm() == pytest.approx(1)


@pytest.mark.parametrize(("options", "named"), [
    ((True, False), "--activation-checkpointing"), ((False, True), "--bf16")])
def test_batchnorm_is_refused_where_it_would_be_wrong(options, named):
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    assert len(layers.blocks(model)) == 2
    with pytest.raises(UsageError, match=f"{named}: not with BatchNorm"):
        layers.blocks(model, *options)


class Counted(nn.Linear):
    calls = 0

    def forward(self, inputs):
        self.calls += 1
        return super().forward(inputs)


@pytest.mark.parametrize("recompute", [False, True])
def test_recomputed_blocks_run_again_in_the_backward_pass(recompute):
    model = nn.Sequential(Counted(2, 2), Counted(2, 2))
    layers.blocks(model, recompute)
    model(torch.ones(1, 2)).sum().backward()
    assert [layer.calls for layer in model] == [1 + recompute] * 2


@pytest.mark.parametrize("limit", [0.1, 1e6])  # gradients below the limit stay as they are
def test_clipping_without_shards_is_torchs(limit):
    model = models.create_model("cnn", 10, (1, 28, 28))
    found = []
    for clip in (torch.nn.utils.clip_grad_norm_, clipping.clip_grad_norm):
        model.zero_grad()
        model(torch.ones(2, 1, 28, 28)).square().sum().backward()
        found.append((float(clip(model.parameters(), limit)), [part.grad.clone() for part in model.parameters()]))
    assert found[0][0] == pytest.approx(found[1][0]) and found[0][0] > 0.1
    for left, right in zip(found[0][1], found[1][1]):
        assert torch.allclose(left, right)


class Foreign(nn.Module):
    """Layers with many kinds of initialization, shared weights, a non-persistent buffer, and a layer drawn twice."""

    def __init__(self):
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, 8))
        self.attention, self.words = nn.MultiheadAttention(8, 2), nn.Embedding(5, 8, padding_idx=1)
        self.norm, self.lstm, self.head = nn.BatchNorm1d(8), nn.LSTM(8, 8), nn.Linear(8, 5)
        self.head.weight = self.words.weight
        nn.init.xavier_normal_(self.lstm.weight_hh_l0)
        with torch.no_grad():
            self.head.bias.mul_(0.5).add_(1)
        self.register_buffer("table", torch.arange(6.0).reshape(2, 3).t().contiguous(), persistent=False)


class Unknown(nn.Module):
    """Initialization that cannot be repeated: values from elsewhere, or code that does nothing without data."""

    def __init__(self, kind):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        if kind == "data":
            self.register_buffer("table", torch.tensor([1.0, 2.0]))
        elif kind == "truncated":
            nn.init.trunc_normal_(self.layer.weight, std=0.02)
        elif kind == "on the host":
            self.scale = nn.Parameter(torch.empty(3, device="cpu").normal_())


def tensors_of(model):
    """Return {name: tensor} for a model; a tensor with two names is in it twice."""
    return dict([*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)])


CREATE = {"cnn": lambda: models.create_model("cnn", 10, (1, 28, 28)), "foreign": Foreign,
          "vit": lambda: models.create_model("vit", 10, (1, 28, 28)),
          "resnet18": lambda: models.create_model("resnet18", 10, (3, 32, 32)),
          **{kind: lambda kind=kind: Unknown(kind) for kind in ("data", "truncated", "on the host")}}


@pytest.mark.parametrize("name", CREATE)
def test_a_model_is_filled_with_the_weights_of_one_device(group, name):
    """Its buffers are filled, too: to_empty() leaves arbitrary values. The weights are drawn only then."""
    torch.manual_seed(3)
    expected = {key: value.clone() for key, value in tensors_of(CREATE[name]()).items()}
    torch.manual_seed(3)
    model, weights = replay.outline(CREATE[name])
    assert all(value.is_meta for value in tensors_of(model).values())
    unknown = ["data", "on the host", *["truncated"] * (TORCH >= "2.12")]  # torch 2.11 draws it without data, too
    assert bool(weights.whole) == (name in unknown)
    shards.fill(model, weights, torch.device("cpu"))
    found = tensors_of(model)
    assert found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in expected)
    assert not weights.whole and not weights.recorder


@pytest.mark.parametrize("name", ["cnn", "data"])
def test_a_model_that_is_cast_before_it_is_filled_has_its_weights(group, name):
    torch.manual_seed(3)
    expected = {key: value.clone() for key, value in tensors_of(CREATE[name]().bfloat16()).items()}
    torch.manual_seed(3)
    model, weights = replay.outline(CREATE[name])
    shards.fill(model.bfloat16(), weights, torch.device("cpu"))
    found = tensors_of(model)
    assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_loaded_statistics_are_kept(group, capsys):
    model, weights = replay.outline(nn.BatchNorm1d, 2)
    models.load_weights(model, "weights.pt", {"running_mean": torch.full((2,), 7.0), "bias": torch.ones(3)})
    assert capsys.readouterr().out == ("weights weights.pt: loaded 1 of 5 tensors; not in the file: "
                                       "num_batches_tracked, running_var, weight; of a different shape or type: bias\n")
    shards.fill(model, weights, torch.device("cpu"))
    assert (model.running_mean == 7).all() and (model.running_var == 1).all() and (model.weight == 1).all()


def test_a_model_that_two_processes_draw_differently_is_that_of_rank_0(group, monkeypatch):
    monkeypatch.setattr(replay, "agree", lambda calls: False)
    _, weights = replay.outline(CREATE["cnn"])
    assert weights.whole and not weights.recorder


def test_a_shard_does_not_lean_on_the_file(group):
    mesh = init_device_mesh("cpu", (1,))
    own = [DTensor.from_local(torch.zeros(2), mesh, [place]) for place in (Shard(0), Replicate())]
    saved = {"0": torch.ones(2), "1": torch.ones(2)}
    model, states = nn.ParameterList(own), {"step": torch.ones(())}
    taken = shards.take(model, saved)
    kept = shards.take(torch.optim.AdamW(model), {"state": {0: states}, "param_groups": []})["state"][0]
    for tensor in [*saved.values(), *states.values()]:
        tensor.zero_()
    assert all(tensor.to_local().all() for tensor in taken.values()) and kept["step"] == 1


def test_a_layer_drawn_twice_is_held_once(group):
    """Only one tensor exists at a time."""
    model, weights = replay.outline(CREATE["resnet18"])
    names = [*tensors_of(model)]
    largest = max(value.nbytes for value in tensors_of(model).values())
    storages = Storages()
    with storages:
        assert len([name for name, _ in weights.draw(names, torch.device("cpu"))]) == len(names)
    assert largest <= sum(storages.peak.values()) < 1.1 * largest


@pytest.mark.parametrize(("name", "shape", "blocks", "units"), [
    ("cnn", (1, 28, 28), 6, 5), ("vit", (1, 28, 28), 6, 5), ("vit_base", (3, 224, 224), 14, 14),
    ("resnet18", (3, 224, 224), 11, 5), ("resnet50", (3, 224, 224), 19, 10)])
def test_small_blocks_join_the_roots_unit_and_the_last_block_keeps_its_weights(name, shape, blocks, units):
    with torch.device("meta"):
        found = layers.blocks(models.create_model(name, 1000, shape))
    each = [*shards.units(found, True)]
    assert (len(found), len(each)) == (blocks, units)
    assert [reshard for _, reshard in each] == [True] * (units - 1) + [False]
    assert not any(reshard for _, reshard in shards.units(found, False))
    small = nn.Linear(2, 2)  # joins the root's unit, so the block before it is the last one
    assert [reshard for _, reshard in shards.units([*found, small], True)] == [reshard for _, reshard in each]


def encoder_layer():
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)


class Text(nn.Module):
    """Layers in containers without forward(), of which two share a weight."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleDict({"words": nn.Embedding(50, 8), "lower": nn.ModuleList([encoder_layer()]),
                                    "upper": nn.ModuleList([encoder_layer()]), "head": nn.Linear(8, 50, bias=False)})
        self.parts["head"].weight = self.parts["words"].weight

    def forward(self, tokens):
        states = self.parts["words"](tokens)
        for layer in (*self.parts["lower"], *self.parts["upper"]):
            states = layer(states)
        return self.parts["head"](states)


class Wrapper(nn.Module):
    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, inputs):
        return self.network(inputs)


def test_the_parts_of_a_network_in_a_wrapper_become_units(group):
    """The layers that share a weight stay in the root's unit: as units, each would train a weight of its own."""
    model, tokens = Wrapper(Text()), torch.arange(12).reshape(3, 4)
    expected = model(tokens)
    blocks = layers.blocks(model)
    assert [*map(type, blocks)] == [nn.Embedding, *[nn.TransformerEncoderLayer] * 2, nn.Linear]
    mesh = init_device_mesh("cpu", (1,))
    for block, reshard in shards.units(blocks, True):
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh)
    assert shards.count_units(model) == 3
    assert model.network.parts["head"].weight is model.network.parts["words"].weight
    outputs = model(tokens)
    outputs.sum().backward()
    with torch.no_grad():  # a layer in evaluation mode reads the weights inside it
        measured = model.eval()(tokens)
    for found in (outputs, measured):
        torch.testing.assert_close(found, expected)


def test_a_layer_that_reads_the_weights_inside_it_is_one_block():
    assert [*map(type, layers.blocks(Wrapper(Wrapper(encoder_layer()))))] == [nn.TransformerEncoderLayer]


@pytest.mark.skipif(TORCH < "2.13", reason="before torch 2.13, a stager allocates new buffers for each save")
def test_a_second_save_reuses_the_memory_of_the_first():
    stager, weights = dcp_folders.create_stager("cpu"), torch.zeros(1000)
    first = stager.stage({"weights": weights})["weights"].data_ptr()
    weights += 1
    second = stager.stage({"weights": weights})["weights"]
    assert second.data_ptr() == first != weights.data_ptr() and torch.equal(second, weights)


def make_folder(path, metadata=None, values="[]"):
    path.mkdir()
    (path / "values.json").write_text(values)
    if metadata is not None:
        (path / ".metadata").write_bytes(metadata)
    return path


class Call:
    """An object whose unpickling calls a function."""

    def __reduce__(self):
        return print, ("executed",)


@pytest.mark.parametrize(("metadata", "message"), [
    (None, r"incomplete: \.metadata is missing"), (b"", "incomplete"), (b"\x80\x04\x95\xff", "incomplete|more than"),
    (pickle.dumps(Call()), r"rejected: .* \(builtins\.print\)"), (pickle.dumps([1]), "incomplete or not from")])
def test_a_folder_that_is_torn_or_unsafe_is_named(tmp_path, capsys, metadata, message):
    with pytest.raises(UsageError, match=message):
        dcp_folders.check(make_folder(tmp_path / "step-0000001", metadata))
    assert "executed" not in capsys.readouterr().out


def test_a_folder_whose_file_lacks_its_last_byte_is_incomplete(tmp_path):
    folder = tmp_path / "step-0000001"
    dcp.save({"a": torch.ones(2), "b": torch.ones(2)}, checkpoint_id=folder, no_dist=True)
    (folder / "values.json").write_text("[]")
    file, = folder.glob("*.distcp")
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(UsageError, match=f"incomplete: {file.name} is too short"):
        dcp_folders.check(folder)


def test_a_save_that_failed_ends_the_run():
    saving = Future()
    saving.set_exception(CheckpointException("", {1: (OSError(28, "No space left on device"), None)}))
    with pytest.raises(ProcessError, match="^cannot save: No space left on device; earlier folders are intact"):
        dcp_folders.wait(saving)


def test_a_folder_reads_no_file_of_another_folder(tmp_path):
    folder = tmp_path / "step-0000001"
    dcp.save({"a": torch.ones(2)}, checkpoint_id=folder, no_dist=True)
    (folder / "values.json").write_text("[]")
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = f"../step-0000001/{info.relative_path}"
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(UsageError, match="rejected: a is in another folder, \\.\\./step"):
        dcp_folders.check(folder)


def test_a_folder_keeps_the_precision_of_its_tensors(tmp_path):
    layer, folder = nn.Linear(2, 2, bias=False), tmp_path / "step-0000001"
    dcp.save({"model/weight": torch.full((2, 2), 1 / 3, dtype=torch.float64)}, checkpoint_id=folder, no_dist=True)
    (folder / "values.json").write_text("[]")
    state = {"model": layer, "optimizer": torch.optim.SGD(layer.parameters())}
    content = dcp_folders.read(folder, state, functools.partial(dcp.load, no_dist=True))
    assert content["model"]["weight"].dtype == torch.float64 and (content["model"]["weight"] == 1 / 3).all()


@pytest.mark.parametrize(("attribute", "accepted"), [("name", True), ("value", False), (None, False)])
def test_the_folders_of_every_python_are_read(tmp_path, attribute, accepted):
    """Python 3.11.2 pickles an Enum member as a getattr call; any other getattr is rejected."""
    class Old(pickle.Pickler):
        def reducer_override(self, item):
            if isinstance(item, enum.Enum):
                return getattr, (type(item), str(getattr(item, attribute)) if attribute else "mro")
            return NotImplemented

    folder = tmp_path / "step-0000001"
    dcp.save({"a": torch.ones(2)}, checkpoint_id=folder, no_dist=True)
    with open(folder / ".metadata", "rb") as file:
        metadata = pickle.load(file)
    (folder / "values.json").write_text("[]")
    with open(folder / ".metadata", "wb") as file:
        Old(file).dump(metadata)
    assert b"getattr" in (folder / ".metadata").read_bytes()
    if accepted:
        assert dcp_folders.check(folder)["a"].shape == (2,)
        return
    with pytest.raises(UsageError, match=r"rejected: .* \(builtins\.getattr\)"):
        dcp_folders.check(folder)


def test_only_committed_folders_count_and_the_best_and_the_newest_two_stay(tmp_path):
    for step, score in enumerate([0.1, 0.9, 0.3, 0.4, 0.5]):
        make_folder(tmp_path / f"step-{step:07}", b"", json.dumps([[["score"], score], [["model", "x"], None]]))
    for name in ("step-0000009", "snapshot-0000002"):
        make_folder(tmp_path / name)
    make_folder(tmp_path / "step-0000003-old", b"")
    assert [path.name[-1] for path in dcp_folders.whole_folders(tmp_path)] == [*"01234"]
    with pytest.raises(UsageError, match="contains step-0000004, newer than step 3, where this run starts; pass"):
        dcp_folders.reject_newer(tmp_path, 3)
    dcp_folders.reject_newer(tmp_path, 4)
    dcp_folders.prune(tmp_path)
    assert [path.name[-1] for path in dcp_folders.whole_folders(tmp_path)] == [*"134"]
    assert (tmp_path / "step-0000009").exists()  # torn, or being written
    assert not (tmp_path / "snapshot-0000002").exists()  # torn: nothing that old is being written


def test_a_snapshot_does_not_replace_the_best_epoch_nor_its_own(tmp_path):
    """A snapshot stores the best score of another folder. At the end of an epoch, two folders have the same steps."""
    for name, score in {"snapshot-1": 0.5, "step-2": 0.5, "snapshot-2": 0.4, "step-4": 0.3, "snapshot-5": 0.5}.items():
        make_folder(tmp_path / name, b"", json.dumps([[["score"], score]]))
    names = [path.name for path in dcp_folders.whole_folders(tmp_path)]
    assert names == ["snapshot-1", "snapshot-2", "step-2", "step-4", "snapshot-5"]
    dcp_folders.prune(tmp_path)
    assert [path.name for path in dcp_folders.whole_folders(tmp_path)] == ["step-2", "step-4", "snapshot-5"]


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_0_saves_what_is_not_sharded(tmp_path, monkeypatch, group, rank):
    """BatchNorm's statistics are equal on all ranks only between epochs; within an epoch, rank 0's are saved."""
    monkeypatch.setattr(dcp_folders, "is_main_process", lambda: rank == 0)
    for values, name in (({"step": 2}, "snapshot-0000009"), ({}, "step-0000009")):
        path, tensors = dcp_folders.create(tmp_path, 9, {"model": nn.BatchNorm1d(3, affine=False)}, epoch=1, **values)
        assert path == tmp_path / name and path.exists() == (rank == 0)
        assert sorted(tensors) == ([] if rank else [f"model/{part}" for part in (
            "num_batches_tracked", "running_mean", "running_var")])
