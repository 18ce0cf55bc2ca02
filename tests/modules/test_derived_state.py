"""Tables that modules derive from their configuration survive trainers, and no call depends on an earlier one."""

import copy
import functools
import io
import pickle

import pytest
import torch
from helpers import module_calls, processes
from helpers.modes import ON_GPU, on_gpu
from helpers.module_calls import CASES, LONG, ROWS, SHORT, call, draw, make, make_model
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint
from transformers import PretrainedConfig, PreTrainedModel

from ropewalk import RotaryEmbedding

ALL = pytest.mark.parametrize("name", CASES)
# Those whose tables grow, or are made for each call's length.
GROWING = [name for name in CASES if "rotary" in name or "dynamic" in name or name in ("longrope", "absolute")]


def assert_same(x, y):
    """To the last bit. On a GPU, where positions are not read, those past the first rows are NaN."""
    torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=ON_GPU)


def test_all_modules_are_here():
    assert module_calls.public_modules() <= {type(case.make()) for case in CASES.values()}


@ALL
def test_nothing_is_a_buffer(name):
    module = make(name)
    for tokens in (LONG, SHORT):
        call(name, module, tokens)
        assert [key for key, _ in module.named_buffers()] == []
    assert set(module.state_dict()) == {key for key, _ in module.named_parameters()}


@ALL
def test_a_call_is_that_of_a_new_module(name, device):
    module = make(name).to(device)
    for tokens in (SHORT, LONG, LONG - 9, SHORT, LONG - 1, SHORT - 1, LONG):
        assert_same(call(name, module, tokens, device), call(name, make(name).to(device), tokens, device))


def saved_by_torch(module):
    saved = io.BytesIO()
    torch.save(module, saved)
    saved.seek(0)
    return torch.load(saved, weights_only=False)


def made_without_memory(name, module):
    with torch.device("meta"):
        empty = CASES[name].make().eval()
    empty.load_state_dict(module.state_dict(), assign=True)  # as transformers: what is no parameter stays
    return empty


def filled(name, module, device):
    with torch.device("meta"):
        empty = CASES[name].make().eval()
    empty.to_empty(device=device).load_state_dict(module.state_dict())
    return empty


def replaced(module):
    """Replace every tensor that is no parameter, as loaders do for buffers that a file lacks."""
    for part in module.modules():
        for key, value in part._buffers.items():
            part._buffers[key] = torch.full_like(value, -7)
    return module


def averaged(name, module, device):
    model = nn.ModuleList((nn.Linear(1, 1), module)).to(device)
    mean = AveragedModel(nn.ModuleList((nn.Linear(1, 1), make(name))).to(device), use_buffers=True)
    for _ in range(2):
        mean.update_parameters(model)
    return mean.module[1]


def moving_average(module):
    mean = copy.deepcopy(module)
    call_of = [*mean.parameters(), *mean.buffers()], [*module.parameters(), *module.buffers()]
    with torch.no_grad():
        for x, y in zip(*call_of, strict=True):
            x.copy_(y)
    return mean


CHANGES = {
    "deepcopy": lambda name, module, device: copy.deepcopy(module),
    "pickle": lambda name, module, device: pickle.loads(pickle.dumps(module)),
    "torch.save": lambda name, module, device: saved_by_torch(module),
    "state_dict": lambda name, module, device: (
        (fresh := make(name).to(device)).load_state_dict(module.state_dict()) and fresh
    ),
    "meta": lambda name, module, device: made_without_memory(name, module),
    "meta, then a move": lambda name, module, device: made_without_memory(name, module).to(device),
    "to_empty": lambda name, module, device: filled(name, module, device),
    "other buffers": lambda name, module, device: replaced(module),
    "AveragedModel": lambda name, module, device: averaged(name, module, device),
    "EMA": lambda name, module, device: moving_average(module),
    "double": lambda name, module, device: module.double().float(),
}


@pytest.mark.parametrize("change", CHANGES)
@ALL
def test_survives(name, change, device):
    module = make(name).to(device)
    call(name, module, LONG, device)
    changed = CHANGES[change](name, module, device)
    for tokens in (SHORT, LONG):
        assert_same(call(name, changed, tokens, device), call(name, make(name).to(device), tokens, device))


class Config(PretrainedConfig):
    model_type = "ropewalk-test"

    def __init__(self, name="rotary by index", **keywords):
        super().__init__(**keywords)
        self.name = name


class Pretrained(PreTrainedModel):
    config_class = Config

    def __init__(self, config):
        super().__init__(config)
        self.model = make_model(config.name)
        self.post_init()

    def forward(self, x):
        return self.model(x)

    def _init_weights(self, module):
        pass


@ALL
def test_from_pretrained(name, tmp_path, device):
    model = Pretrained(Config(name)).eval()
    model.save_pretrained(tmp_path)
    torch.use_deterministic_algorithms(True)  # uninitialised memory is then NaN
    try:
        loaded = Pretrained.from_pretrained(tmp_path).eval().to(device)
    finally:
        torch.use_deterministic_algorithms(False)
    model.to(device)
    for tokens in (SHORT, LONG):
        assert_same(loaded(draw(tokens, device)), model(draw(tokens, device)))
    if hasattr(loaded.model.module, "cos"):
        assert loaded.model.module.cos.device.type == device.type


@pytest.mark.parametrize("use_reentrant", [True, False])
@ALL
def test_a_checkpoint_recomputes_its_own_call(name, use_reentrant, device):
    grads = []
    for run in (lambda f, x: f(x), functools.partial(checkpoint, use_reentrant=use_reentrant)):
        model = make_model(name).to(device)
        xs = [draw(tokens, device).requires_grad_() for tokens in (LONG - 9, LONG, SHORT)]
        loss = sum(run(model, x).square().sum() for x in xs)
        (loss + sum((run(model, x) * 0.5).sum() for x in xs[:2])).backward()
        grads.append([x.grad for x in (*xs, *model.parameters())])
    for mine, expected in zip(*grads, strict=True):
        assert_same(mine, expected)


@pytest.mark.parametrize("scaling", [{}, {"scaling": "dynamic", "factor": 2.0, "max_position_embeddings": ROWS}])
def test_unknown_lengths_read_what_was_reserved(scaling, monkeypatch, device):
    """A call whose positions the host does not read, as on a GPU, is not changed by others that grow the tables."""
    rotary = RotaryEmbedding(module_calls.D, max_positions=ROWS, device=device, **scaling)
    q = torch.randn(1, SHORT, 2, module_calls.D, device=device)
    positions = torch.arange(SHORT, device=device)[None] + ROWS - 2

    def of_unknown_length():
        with monkeypatch.context() as patch:
            patch.setattr("ropewalk.modules.rotary.is_readable", lambda x: False)
            return rotary(q, None, positions)

    before = of_unknown_length()
    assert before[:, 2:].isnan().all()
    alone = RotaryEmbedding(module_calls.D, max_positions=ROWS, device=device, **scaling)
    assert torch.equal(before[:, :2], alone(q[:, :2], None, ROWS - 2))
    rotary(torch.randn(1, LONG, 2, module_calls.D, device=device))
    assert torch.equal(of_unknown_length()[:, :2], before[:, :2])
    assert of_unknown_length()[:, 2:].isnan().all()
    rotary.reserve(ROWS + SHORT - 2)
    assert torch.equal(of_unknown_length(), rotary(q, None, ROWS - 2))


def test_reserved_lengths_fix_dynamic_frequencies(device):
    """Keys that were rotated in steps then fit those that are rotated at once."""
    name = "dynamic by index"
    at_once = call(name, make(name).to(device), LONG, device)
    rotary = make(name).to(device)
    x = draw(LONG, device).unflatten(-1, (module_calls.H, module_calls.D))
    rotary.reserve(LONG)
    steps = [rotary(x[:, part], None, part.start) for part in (slice(0, 5), slice(5, 20), slice(20, LONG))]
    assert torch.equal(torch.cat(steps, 1), at_once[:, :, : module_calls.H])


def test_tables_are_kept_for_each_device_and_not_of_a_mode():
    rotary, q = RotaryEmbedding(16, max_positions=4), torch.randn(1, 3, 2, 16)
    kept = rotary._tables[torch.device("cpu")]
    assert rotary(q.to("meta")).is_meta
    rotary(q)
    assert rotary._tables[torch.device("cpu")] is kept
    assert not rotary.cos.is_meta
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        rotary(mode.from_tensor(torch.randn(1, 9, 2, 16)))
    assert type(rotary.cos) is torch.Tensor
    assert torch.equal(rotary(q), RotaryEmbedding(16, max_positions=4)(q))


def test_rows_of_a_step_keep_their_kind(monkeypatch):
    """A decode step past the first rows passes tables of the shape of the step before: its plan is found again."""
    shapes = []

    def note(q, k, cos, sin, **keywords):
        shapes.append((cos.shape, keywords["positions"]))
        return q

    monkeypatch.setattr("ropewalk.modules.rotary.apply_rope", note)
    rotary, q = RotaryEmbedding(16, max_positions=4), torch.randn(1, 1, 2, 16)
    for position in (2, 3, 4, 5, 17):
        rotary(q, None, position)
    assert shapes == [((4, 8), 2), ((4, 8), 3), *[((1, 8), None)] * 3]


@pytest.mark.parametrize("name", GROWING)
def test_copies_hold_each_table_once(name):
    module = make(name)
    call(name, module, LONG)
    rotary = getattr(module, "sinusoids", module)
    for again in (copy.deepcopy(rotary), pickle.loads(pickle.dumps(rotary)), saved_by_torch(rotary)):
        (tables,) = again._tables.values()
        assert tables.cos is again.cos
        assert tables.first_cos.data_ptr() == tables.cos.data_ptr()
    assert len(pickle.dumps(rotary)) < 3 * rotary.cos.nbytes + 8000


def test_a_loaded_module_is_on_the_device_that_torch_load_maps_to():
    saved = io.BytesIO()
    torch.save(RotaryEmbedding(16, max_positions=8, device="meta"), saved)
    saved.seek(0)
    loaded = torch.load(saved, map_location="cpu", weights_only=False)
    assert loaded._device == loaded.cos.device == next(iter(loaded._tables))


def test_compiled_lengths_past_the_first_rows_are_compiled_once():
    rotary = RotaryEmbedding(16, max_positions=8)
    rotary(torch.randn(1, 64, 2, 16))
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(rotary, backend=counter, fullgraph=True)
    for tokens in (12, 13, 20, 64, 31):
        q = torch.randn(1, tokens, 2, 16)
        assert torch.equal(compiled(q), RotaryEmbedding(16)(q))
    assert counter.frame_count == 2  # the first length, then any


def test_vmap_over_positions():
    rotary, q = RotaryEmbedding(16, max_positions=32), torch.randn(3, 1, 5, 2, 16)
    positions = torch.arange(15).view(3, 1, 5)
    together = torch.func.vmap(lambda q, p: rotary(q, None, p))(q, positions)
    one_by_one = torch.stack([rotary(x, None, p) for x, p in zip(q, positions, strict=True)])
    torch.testing.assert_close(together, one_by_one)


def test_axes_on_the_meta_device_are_refused():
    with pytest.raises(ValueError, match="axes is on the meta device, but must hold values"):
        RotaryEmbedding(16, axes=torch.zeros(8, dtype=torch.int64, device="meta"))


@pytest.mark.parametrize("name", ["standard", "t5", "exposb", "RoPEAttention"])
def test_parameters_are_reset_to_what_they_begin_with(name):
    """FSDP's first kind calls this on each module that was made without memory."""
    module, fresh = make(name), make(name)
    with torch.no_grad():
        for x in module.parameters():
            x.fill_(9)
    for part in module.modules():
        if list(part.parameters(recurse=False)):
            part.reset_parameters()
    for x, y in zip(module.parameters(), fresh.parameters(), strict=True):
        assert y.std() / 2 <= x.std() <= y.std() * 2  # of drawn numbers; those that are fixed have none
        assert x.std() > 0 or torch.equal(x, y)


@on_gpu
def test_a_graph_captures_calls_and_makes_no_tables(device):
    rotary = RotaryEmbedding(16, max_positions=8, device=device)
    q = torch.randn(1, 12, 2, 16, device=device)
    positions = torch.arange(12, device=device)[None] // 2
    calls = [lambda: rotary(q), lambda: rotary(q, None, 5), lambda: rotary(q, None, positions)]
    for run in calls:
        expected = run()
        kept = dict(rotary._tables)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = run()
        graph.replay()
        assert_same(captured, expected)
        assert all(rotary._tables[key] is value for key, value in kept.items())


@pytest.mark.slow
@pytest.mark.skipif(ON_GPU, reason="gloo's processes run on the CPU")
def test_in_a_group_of_processes():
    processes.run(2, module_calls.run_all)


def test_data_parallel_replicas_share_what_they_make():
    """A replica is a copy of the module without its memory of itself: what it makes is found by the next."""
    rotary = RotaryEmbedding(16, max_positions=4)
    replica = rotary._replicate_for_data_parallel()
    assert isinstance(replica, nn.Module)
    replica(torch.randn(1, 3, 2, 16, device="meta"))
    assert torch.device("meta") in rotary._tables
