"""What is recorded of a step: samples, losses, gradients, outputs and draws."""
import contextlib
import copy
import functools
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import FROM_ROOT, PYTHON, good, run
from made import made

from verify.comparing import compare_runs
from verify.digests import digest, find_parts, marks
from verify.draws import Draws
from verify.modules import Modules, tensors_of
from verify.precision import widened
from verify.recording import (
    CRITERIA,
    MISSING,
    REACHED,
    UNREACHED,
    Recorder,
    digest_if_known,
    from_parameters,
    options_of,
)
from verify.records import FROZEN, equal
from verify.samples import Samples, by_sample, counts_of, described, samples_of


def test_a_list_of_tensors_is_one_input_per_tensor_or_one_sample():
    a, b, long = torch.ones(2, 3), torch.zeros(2), torch.ones(5)
    assert [id(part) for part in by_sample([a, b], 2)] == [id(a), id(b)]
    assert by_sample(([a, a], b), 2) == []  # two inputs of two samples, or a tensor for each sample?
    ragged, targets = by_sample(([a, long], b), 2)
    assert [id(part) for part in ragged] == [id(a), id(long)] and targets is b
    assert by_sample([torch.ones(8), torch.ones(8)], 4) == []  # rows of all samples
    speech = torch.ones(4, 9, 2), torch.ones(4).int(), torch.ones(17).int(), torch.ones(4).int()  # labels in one row
    assert [id(part) for part in by_sample(speech, 4)] == [id(speech[number]) for number in (0, 1, 3)]
    nested = (torch.ones(9, 2), torch.ones(2).int()), b
    assert [id(part) for part in by_sample(nested, 2)] == [id(nested[0][1]), id(b)]
    texts = torch.ones(3).int(), torch.ones(11).int(), torch.zeros(3).int()  # labels, tokens in one row, offsets
    assert [id(part) for part in by_sample(texts, 3)] == [id(texts[0]), id(texts[2])]
    pictures = [torch.ones(8, 9), torch.ones(3, 8, 7), torch.ones(8, 6)]
    assert by_sample(pictures, 3) == [pictures]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_what_each_sample_has_is_no_part_of_the_batch():
    """With as many boxes as the batch has samples, an image's boxes are no row for each sample."""
    images = [torch.ones(3, 8, 8), torch.ones(3, 9, 9)]
    targets = [{"boxes": torch.ones(n, 4), "labels": torch.ones(n), "name": "cat"} for n in (2, 1)]
    for batch in ((images, targets), {"images": images, "targets": targets}):
        found = by_sample(batch, 2)
        assert found == [images, targets] and samples_of(found)[2] == 3 * 64 + 10
        assert [row[0] for row in counts_of(found)] == [6, 3, 3]  # channels, boxes and labels
    for batch in ([*zip(images, targets)], [{"image": image, **target} for image, target in zip(images, targets)]):
        found = by_sample(batch, 2)
        assert found == [batch] and samples_of(found)[2] == 3 * 64 + 10
        assert [row[0] for row in counts_of(found)] == [6, 3, 3]
    assert by_sample([{"view": torch.ones(2, 3)}, {"view": torch.ones(2, 3)}], 2) == []  # two parts of two samples?
    assert [len(part) for part in by_sample((images, [torch.ones(5), torch.ones(7)]), 2)] == [2, 2]
    assert [len(part) for part in by_sample((images, [[torch.ones(4)] * 3, [torch.ones(4)]]), 2)] == [2, 2]
    assert not by_sample([("text", torch.tensor(1)), ("other", torch.tensor(1))], 2)  # the text is not recorded
    assert not by_sample([{"ids": [1, 2]}, {"ids": [3, 4]}], 2)
    sparse = [torch.eye(2).to_sparse(), torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])]
    assert by_sample((sparse[0], images, sparse[:1] * 2, sparse[1:] * 2), 2) == [images]
    (rows,) = by_sample([{"adjacency": sparse, "x": torch.ones(5)}] * 2, 2)
    assert samples_of([rows])[2] == 5
    found = by_sample((images, [{"a": torch.ones(1)}, {"a": torch.ones(1), "b": torch.ones(3)}]), 2)
    assert len(samples_of(found)[0]) == 2 and [row[0] for row in counts_of(found)] == [6]
    before = samples_of([targets])[0]
    targets[1]["labels"] *= 2
    assert [one == two for one, two in zip(before, samples_of([targets])[0])] == [True, False]


@pytest.mark.parametrize("pad", [0, -100, -1, 255, 50256, 0.5])
def test_padding_to_the_longest_sample_adds_nothing(pad):
    """Each rank pads to its own longest sample, along two axes; the sample of rank 1 is not padded."""
    data = [torch.arange(3, 3 + 2 * length).reshape(2, length)[:1 + length % 2] + torch.tensor(0 * pad)
            for length in (2, 9, 5, 8, 6, 7)]

    def of(label, *shares):
        found = made(label, *[[("w", [2], [1.0] * 3, [1.0] * 3, [1.0] * 3)]] * len(shares))
        for state, share in zip(found.states(0), shares):
            longest = [max(data[number].shape[axis] for number in share) for axis in (0, 1)]
            padded = [torch.nn.functional.pad(data[number], (0, longest[1] - data[number].shape[1],
                                                             0, longest[0] - data[number].shape[0]), value=pad)
                      for number in share]
            state["batches"] = [described(0, [torch.stack(padded), torch.tensor(share)])[:5]]
        return found

    a = of("A", range(6))
    for shares in ([0, 3, 5], [1], [2, 4]), [[number] for number in range(6)]:
        b = of("B", *shares)
        assert compare_runs(a, b)["verdict"] == "same" and equal(a.samples(0), b.samples(0))
    b = of("B", [0, 3, 5], [1], [2, 5])
    assert compare_runs(a, b)["verdict"] == "same" and not equal(a.samples(0), b.samples(0))


LARGE = """
import resource, sys, torch
from verify.recording import Recorder
import torch._dynamo  # here, or the optimizer imports it below

Recorder(sys.argv[1])
model = torch.nn.Linear(4096, 2048, bias=False)
model(torch.ones(1, 4096)).sum().backward()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
torch.optim.SGD(model.parameters(), foreach=False).step()
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


@pytest.mark.drill
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere, ru_maxrss has another unit, or does not exist")
def test_a_digest_needs_little_memory(tmp_path):
    """In MiB. The weight and its gradient have 64 MiB each, in float64."""
    assert int(good(run(PYTHON, "-c", LARGE, tmp_path, env=FROM_ROOT)).out) < 32


def test_a_copy_of_a_part_of_the_model_is_an_average_of_it():
    teacher, student = torch.nn.Linear(2, 3), torch.nn.Linear(2, 2)
    model = torch.nn.ModuleDict({"teacher": teacher.requires_grad_(False), "student": student})
    average, other = copy.deepcopy(student), torch.nn.Linear(3, 2)
    modules, parameters = Modules(), [*student.parameters()]
    modules.find(parameters, {*map(id, parameters)})
    found = {id(item): name for name, item in modules.unoptimized}
    names = [found.get(id(part.weight)) for part in (average, other, model["teacher"])]
    assert names == ["average of weight", None, None]


def test_a_step_is_recorded_after_all_hooks_of_the_program_and_once():
    called, optimizer = [], torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 0.1)
    recorder = SimpleNamespace(last_hooks={}, before_step=lambda *_: called.append("recorded"))
    for name in ("first", "second"):
        optimizer.register_step_pre_hook(lambda *_, name=name: called.append(name))
        Recorder.before_hooks(recorder, optimizer, (), {})
    optimizer.step()
    assert called == ["first", "second", "recorded"]


def test_the_targets_of_a_loss_are_noted_without_ignored_ones():
    noted = []
    recorder = SimpleNamespace(native=True, counted=[], weights=[], shows=lambda: True, modules=SimpleNamespace(
        note=lambda *values: noted.append(values)))
    Recorder.criterion(recorder, torch.nn.functional.cross_entropy, torch.ones(3, 2), torch.tensor([1, -100, 0]))
    [[kind, name, outermost, [targets]]] = noted
    assert (kind, name, outermost, targets.tolist()) == ("targets", "cross_entropy", True, [1, 0])


def test_points_that_need_a_gradient_are_not_taken_for_the_outputs_of_another_model():
    points = torch.rand(4, 2).clone().requires_grad_()
    mixed = torch.cat([points, torch.rand(2, 2)])
    assert not from_parameters(torch.rand(2)) and not from_parameters(points) and not from_parameters(mixed)
    assert from_parameters(torch.cat([points, torch.nn.Linear(2, 2)(mixed)]))


def test_the_loss_of_a_module_is_no_output_that_must_agree():
    """It is that of each rank's share."""
    criterion, modules = torch.nn.MSELoss(), Modules()
    modules.names = {id(criterion): "MSELoss"}
    modules.passes("output", criterion, torch.tensor(1.0), True)
    modules.passes("input", criterion, torch.tensor(1.0), True)
    assert [kind for kind, *_ in modules.passed] == ["input"]


def test_gradients_after_the_backward_pass_are_known_for_all_parameters_or_none():
    ones = torch.ones(2)
    assert digest_if_known([ones, None], [None, None]) == [None, None] != digest_if_known([ones], [None])


@pytest.mark.parametrize(("name", "values", "other", "places"), [
    ("w", [3, 4], "w", (2, 3)), ("w", [3, 4], "parameter", None),  # of a vector of all tensors
    ("parameter", [3, 4], "w", (2, 3)), ("w", [5, 6, 0, 7], "w", (4, 5)),  # padding may be random
    # what surrounds these are other tensors
    ("parameter", [8, 3, 4, 9], "w", None), ("parameter", [8, 9, 1, 2], "w", None),
    ("parameter", [5, 6, 7, 8, 9], "w", None)])
def test_a_part_of_a_tensor_has_only_values_of_it_and_padding(name, values, other, places):
    whole = torch.arange(1.0, 7.0)
    part, = find_parts([name], [torch.tensor(values, dtype=torch.double)], [(other, [6], marks(whole))], 0)
    assert (part and part.places) == places


def test_a_buffer_that_gets_another_tensor_is_recorded_as_it_is_now():
    module, modules = torch.nn.BatchNorm1d(2), Modules()
    modules.find([*module.parameters()], {*map(id, module.parameters())})
    module.running_mean = torch.full((2,), 5.0)
    found = {id(item) for _, item in modules.unoptimized}
    assert {id(module.running_mean), id(module.running_var)} <= found
    module.running_var = None
    assert len(modules.unoptimized) == len(found)


def test_what_divides_a_loss_has_its_number_and_its_line():
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        x = torch.ones(3, requires_grad=True)
        first = x.sum() / torch.tensor(4)
        loss = first + (x / torch.ones(3)).sum() / 2
    modules, line = Modules(), first.grad_fn.metadata["traceback_"][-1].split("line ")[1].split(",")[0]
    modules.constants(loss)
    found = [[which, [round(value, 6) for value in sums], int(place.split(":")[1]) - int(line)]
             for which, sums, place in modules.divisors]
    assert sorted(found) == [["() 1", [4.0], 0], ["() 2", [2.0], 1], ["(3,) 1", [3.0, -1.248081], 1]], found


def test_operands_of_other_shapes_are_recorded_apart():
    x = torch.ones(2, 3, 4, requires_grad=True)
    modules = Modules()
    modules.constants((x * torch.ones(2, 1, 4)).sum() + (x * torch.full((2, 3, 4), 2.0)).sum())
    found = {name: size for kind, name, _, _, size, *_ in modules.passed if kind == "constant"}
    assert found == {"Mul 1 _saved_other (1, 4)": 8, "Mul 1 _saved_other (3, 4)": 24}, found
    assert {*modules.places} == {*found}


def test_what_a_loss_does_not_depend_on_linearly_is_recorded():
    """A product with one number, what is divided, the weights of classes and large tensors are left out."""
    x, weight = torch.ones(2, 3, requires_grad=True), torch.ones(3)
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        mean = x.mean(0)
        loss = (mean * weight).sum() + (mean * torch.tensor(2.0)).exp().sum() / torch.tensor(4.0)
        loss = loss + torch.nn.functional.nll_loss(x.expand(2, 3), torch.zeros(2).long(), weight=weight)
        loss = loss + x.expand(9000, 2, 3).square().sum()
        loss = loss + x.sum() / x.exp().sum()
    modules = Modules()
    modules.constants(loss)
    assert sorted(row[:2] for row in modules.operands) == [
        ["Div 1", "[()]"], ["Div 2", "[()]"], ["Exp 1", "[(2, 3)]"], ["Exp 1", "[(3,)]"], ["Mul 1", "[(3,)]"],
        ["NllLoss 1", "[(2, 3)]"]], modules.operands
    assert all(place.startswith("test_recording.py:") for *_, place in modules.operands), modules.operands


def test_what_a_loss_saves_of_its_own_result_is_no_operand():
    modules, lengths = Modules(), torch.full((2,), 3)
    scores = torch.randn(5, 2, 4, requires_grad=True).log_softmax(-1)
    modules.constants(torch.nn.functional.ctc_loss(scores, torch.ones(2, 3).long(), torch.full((2,), 5), lengths))
    assert not [name for _, name, *_ in modules.passed if name.startswith("Ctc")], modules.passed


def test_optimizers_are_told_apart_by_the_order_in_which_they_first_step():
    recorder, optimizers = Recorder.__new__(Recorder), [torch.optim.SGD([torch.zeros(1)], 0.1) for _ in range(2)]
    recorder.tables = {optimizers[0]: ()}
    assert recorder.title(optimizers[0]) == "SGD"
    recorder.tables[optimizers[1]] = ()
    assert [recorder.title(optimizer)[-9:] for optimizer in optimizers] == ["number 1)", "number 2)"]


def test_an_optimizer_that_wraps_another_has_the_name_of_that():
    outer = SimpleNamespace(optim=torch.optim.SGD([torch.zeros(1)], 0.1))
    assert options_of(outer, 0, {})["optimizer"] == "SGD" == options_of(outer.optim, 0, {})["optimizer"]


def test_inputs_that_are_integers_are_recorded_apart():
    modules, layer = Modules(), torch.nn.Embedding(4, 2)
    modules.names[id(layer)] = "layer"
    modules.passes("input", layer, (torch.tensor([1, 3]), torch.ones(2, 3), torch.tensor(0.5)), True)
    modules.weights(layer)
    assert [row[0] for row in modules.passed] == ["input", "input (integers)", "weights"]
    assert {row[1] for row in modules.passed} == {"layer"} and modules.passed[0][4] == 6  # without the scalar
    assert modules.passed[-1][5:] == digest([layer.weight])[0][:2]


def test_outputs_of_several_widths_are_recorded_apart():
    """If ranks split the last axis of one of them, it is not compared; an empty one says nothing."""
    modules, layer = Modules(), torch.nn.Linear(2, 2)
    modules.names[id(layer)] = "layer"
    modules.passes("output", layer, (torch.ones(2, 4, 3), torch.ones(2, 4), torch.ones(2, 0)), True)
    assert [row[3:5] for row in modules.passed] == [[3, 24], [4, 8]]


def test_an_infinite_mask_is_equal_to_itself():
    mask, passed = torch.zeros(4, 4).masked_fill(torch.ones(4, 4).triu(1) > 0, -torch.inf), []
    for _ in range(2):
        modules, layer = Modules(), torch.nn.Linear(1, 1)
        modules.names[id(layer)] = "layer"
        modules.passes("input", layer, mask, False)
        passed += modules.passed
    assert equal(passed[0][4:], passed[1][4:])


def test_both_parts_of_complex_numbers_are_recorded():
    """In parameters, samples, inputs of modules and buffers; torch would drop the imaginary part with a warning."""
    found = []
    for value in (torch.tensor([[1 + 2j, 3 - 1j], [2j, 0]]), torch.tensor([[1 - 2j, 3 + 1j], [-2j, 0]])):
        modules, layer = Modules(), torch.nn.Linear(2, 2, dtype=torch.cfloat)
        layer.register_buffer("phase", value)
        modules.find([*layer.parameters()], {*map(id, layer.parameters())})
        modules.passes("input", layer, value, True)
        assert widened(value).dtype == torch.complex128
        found += [[*digest([value])[0], *described(0, [value])[2], modules.passed[0][-1],
                   digest([item for _, item in modules.unoptimized])[0]]]
        del layer
    assert not any(one == other for one, other in list(zip(*found))[1:])


@pytest.mark.parametrize(("rows", "ignored", "tokens"), [
    ([[5, 6, 2, 2], [3, 2, 2, 2], [7, 8, 9, 4]], -100, (12, 7)), ([[1, 5, 6, 6], [6, 2, 6, 4]], -100, (8, 8)),
    ([[0, 0, 5, 6], [0, 2, 3, 4]], -100, (8, 5)), ([[5, 0, 6, 1], [0, 2, 3, 4]], -100, (8, 8)),
    ([[5, 6], [3, 4]], 3, (3, 4)),
    ([[1, 1, 0], [1, 1, 1], [0, 0, 0]], -100, (9, 5)), ([[5, 6, 0], [3, 0, 0]], -100, (6, 3)),
    ([[0, 4, 6], [1, 3, 7]], -100, (6, 6))])
def test_counts_leave_out_padding_and_ignored_labels(rows, ignored, tokens):
    assert tuple(counts_of([torch.tensor(rows)], ignored)[0][1:3]) == tokens


def test_a_loader_that_is_created_anew_is_known_by_its_dataset():
    samples, iterators = Samples(None), []
    for name, dataset, active in (("one", [1], 0), ("two", [2], 0), ("one again", [1], 1), ("beside it", [1], 0)):
        dataset = next((one._dataset for one, _ in iterators if one._dataset == dataset), dataset)
        iterators.append((SimpleNamespace(_index_sampler=[name], _dataset=dataset), active))
        loader = samples.loader(iterators[-1][0])
        loader.iterator = (lambda: True) if active else None
        iterators[-1] = iterators[-1][0], loader.number
    assert [number for _, number in iterators] == [0, 1, 0, 2]


def test_a_state_that_a_model_returns_and_takes_again_is_no_sample():
    samples, state = Samples(None), torch.zeros(2, 3)
    for _ in range(3):
        x, before, state = torch.ones(2, 4), state, torch.ones(2, 3)
        samples.follow([x, before.detach()], [torch.ones(2, 5), state])
        samples.carry([torch.ones(2, 5), state])
        assert samples.calls[-1].inputs[0] is x and samples.carries(state.detach()) and not samples.carries(x)
    assert [len(call.inputs) for call in samples.calls] == [2, 1, 1]


def test_what_a_module_without_weights_returns_is_a_sample_of_the_next():
    """Such as a normalization before the model. A loss between two calls does not hide a carried state."""
    recorder = SimpleNamespace(depth=0, native=True, resting=(), shows=lambda: False, draws=Draws(),
                               samples=Samples(None), modules=Modules())
    norm, layer, x = torch.nn.BatchNorm1d(4, affine=False), torch.nn.Linear(4, 4), torch.randn(8, 4)
    values = Recorder.call(recorder, torch.nn.BatchNorm1d.forward, norm, x)
    state = Recorder.call(recorder, torch.nn.Linear.forward, layer, values)
    Recorder.call(recorder, torch.nn.MSELoss.forward, torch.nn.MSELoss(), state, values)
    Recorder.call(recorder, torch.nn.Linear.forward, layer, state.detach())
    first, second = recorder.samples.calls
    assert first.inputs[0] is values and second.inputs == []


def test_a_state_that_the_last_call_has_returned_is_named_as_the_origin_of_an_input():
    recorder = SimpleNamespace(depth=0, native=True, resting=(), optimized=set(), shows=lambda: True, draws=Draws(),
                               samples=Samples(None), modules=Modules())
    recorder.origin = functools.partial(Recorder.origin, recorder)
    layer, found = torch.nn.RNN(4, 3), []
    _, state = Recorder.call(recorder, torch.nn.RNN.forward, layer, torch.ones(2, 4))
    for given in (torch.zeros(1, 3), state.detach()):
        recorder.modules.computed = {}
        _, state = Recorder.call(recorder, torch.nn.RNN.forward, layer, torch.ones(2, 4), given)
        found += [[*recorder.modules.computed.values()]]
    assert found == [[], []], "the state of the call before the last one"
    Recorder.call(recorder, torch.nn.RNN.forward, layer, torch.ones(2, 4), state.detach())
    assert recorder.modules.computed == {"RNN": "a part of which the last call has returned, such as a state"}


def test_a_frozen_network_in_evaluation_mode_is_recorded_with_its_weights():
    recorder = SimpleNamespace(depth=0, native=True, resting=(), optimized=set(), shows=lambda: True, draws=Draws(),
                               samples=Samples(None), modules=Modules(), origin=lambda tensors: "")
    frozen, found = torch.nn.Linear(4, 3).eval().requires_grad_(False), []
    for context in (contextlib.nullcontext(), torch.no_grad()):
        with context:
            Recorder.call(recorder, torch.nn.Linear.forward, frozen, torch.ones(2, 4))
        found.append([row[0] for row in recorder.modules.passed])
        recorder.modules.passed = []
    assert found == [["input", FROZEN, "output"], ["no_grad input", FROZEN, "no_grad output"]]
    recorder.modules.weights(frozen.requires_grad_(), "no_grad ")
    assert not recorder.modules.passed


@pytest.mark.parametrize(("backwards", "joins", "reach"), [(0, False, REACHED), (0, True, UNREACHED),
                                                           (1, False, UNREACHED)])
def test_a_gradient_that_a_program_sets_without_backward_counts_as_reached(backwards, joins, reach):
    """An optimizer that joins another one steps after the same backward pass."""
    one, two = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    one.grad = torch.ones(2)
    recorder = SimpleNamespace(parameters=[one, two], backwards=backwards, joins=joins, hooked={id(one): one},
                               reached=set())
    assert Recorder.reaches(recorder) == [reach, MISSING]


def test_gradients_that_are_taken_for_parameters_are_added_up_and_an_iterator_is_not_used_up():
    w, b = (torch.ones(2, requires_grad=True) for _ in range(2))
    recorder = SimpleNamespace(hooked={id(w): w}, graphs=0, taken=([], [], {}), shows=lambda: True, flags=set(),
                               counted=[], modules=Modules(), loss=None)
    recorder.note_losses = functools.partial(Recorder.note_losses, recorder)
    for factor in (1, 2):
        found = Recorder.grad(recorder, torch.autograd.grad, (factor * w * b).sum(), iter([w, b]))
        assert len(found) == 2
    losses, _, gradients = recorder.taken
    assert [*map(float, losses)] == [2.0, 4.0] and [gradients[id(item)].tolist() for item in (w, b)] == [[3.0, 3.0]] * 2
    Recorder.grad(recorder, torch.autograd.grad, (w * b).sum(), b)
    assert len(losses) == 2, "b is no parameter of an optimizer"


def test_the_targets_of_all_losses_are_counted_whose_second_argument_they_are():
    known = {name for name, function in vars(torch.nn.functional).items() if hasattr(function, "__code__")
             and function.__code__.co_varnames[1:2] in (("target",), ("targets",)) and "reduction" in (
                 function.__code__.co_varnames[:function.__code__.co_argcount])}
    of_margins = {"hinge_embedding_loss", "multi_margin_loss", "multilabel_margin_loss",
                  "multilabel_soft_margin_loss"}  # these are rare
    assert known - of_margins <= {*CRITERIA}


def test_the_rows_that_vmap_maps_over_are_samples():
    seen, x = [], torch.arange(12.0).reshape(3, 4)
    gradient = torch.func.grad(lambda row: (seen.extend(tensors_of([row])), row.sum())[1])
    torch.func.vmap(gradient, 1)(x)
    assert seen[0].equal(x.T)
