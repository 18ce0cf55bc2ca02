"""The adapters of other attentions: those that run here are checked as they are, the others through stand-ins."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from ropewalk.bench.attention import peers as attention_peers
from ropewalk.bench.attention.candidates import PAGE_SIZES, AttentionCandidate, _paged, candidates_of
from ropewalk.bench.attention.cases import CASES, REROPE, AttentionCase, make_attention_inputs
from ropewalk.bench.attention.gate import AttentionGate
from ropewalk.bench.attention.peers import ATTENTION_PEERS, compile_rope
from ropewalk.bench.attention.settings import LEARNED, PRODUCTS
from ropewalk.bench.core.load import label
from ropewalk.bench.core.peers import find_peer
from ropewalk.ops.attention.api import attention
from ropewalk.ops.rope.api import apply_rope

SMALL = AttentionCase("small", 2, 136, 4, 4, 64)
FAR = replace(SMALL, name="far", causal=True, modes=REROPE, far_window=40)
PACKED = replace(SMALL, name="packed", batch=3, k_heads=2, causal=True, form="packed", shortest=20)
CACHE = replace(SMALL, name="cache", batch=3, k_heads=2, causal=True, form="cache", shortest=20)
FORMS = [
    SMALL,
    replace(SMALL, name="causal", causal=True),
    replace(SMALL, name="grouped", k_heads=2, causal=True),
    replace(SMALL, name="padded", padded=True),
    replace(SMALL, name="windowed", causal=True, window=30),
    PACKED,
    CACHE,
    FAR,
    replace(FAR, name="far, grouped", k_heads=2),
]


def name_of(candidate: AttentionCandidate) -> str:
    yardstick = candidate.case.name if candidate.kind == "anchor" else None
    return label({"impl": candidate.impl, "position": candidate.position, "yardstick": yardstick})


@contextmanager
def nothing_compiled(device: torch.device) -> Iterator[None]:
    """Compiling for a CPU takes minutes."""
    with torch.compiler.set_stance("force_eager" if device.type == "cpu" else "default"):
        yield


def complaints(name: str, device: torch.device, *, backward: bool = True) -> list[str]:
    """A cache has no backward, and its queries are not rotated here: peers support no positions but ReRoPE's."""
    peer = ATTENTION_PEERS[name]
    found = []
    with nothing_compiled(device):
        for case in FORMS:
            if peer.why_not(case) is None:
                torch.compiler.reset()
                inputs = make_attention_inputs(case, device)
                attend = peer.build(case, inputs)
                both = backward and case.form != "cache" and peer.why_not(case, True) is None
                setting = "rerope" if peer.rerope else "other-8bit" if peer.eight_bits else "none"
                try:
                    verdict = AttentionGate(case, inputs).check(attend, setting, backward=both)
                except RuntimeError as error:
                    if case.form == "dense" or "No available kernel" not in str(error):
                        raise
                    continue  # one backend of SDPA need not take a single query
                found += [] if verdict.complaint is None else [f"{case.name}: {verdict.complaint}"]
    return found


@pytest.mark.parametrize("name", ATTENTION_PEERS)
def test_an_installed_peer_is_right_wherever_it_says_it_serves(name: str, device: torch.device) -> None:
    _, reason = find_peer(ATTENTION_PEERS[name], device)
    if reason is not None:
        pytest.skip(reason)
    assert complaints(name, device) == []


@pytest.mark.parametrize("name", ATTENTION_PEERS)
def test_every_peer_serves_some_cases_and_says_why_not_the_others(name: str) -> None:
    reasons = [ATTENTION_PEERS[name].why_not(case) for case in CASES]
    assert None in reasons
    assert all(reason is None or len(reason) > 5 for reason in reasons)


def test_cudnns_adapter_asks_sdpa_for_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(attention_peers.BACKENDS, "cudnn", SDPBackend.MATH)
    assert complaints("cudnn", torch.device("cpu")) == []


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_gets_the_right_masks() -> None:
    """On a CPU it has no backward."""
    assert complaints("flex", torch.device("cpu"), backward=False) == []


def behind(window_size: tuple[int, int]) -> int | None:
    """A window as FlashAttention takes it, as ours."""
    left, right = window_size
    assert (left < 0) == (right < 0)
    assert right <= 0
    return None if left < 0 else left + 1


@pytest.mark.parametrize("with_lse", [False, True])
def test_flash_attention_4_is_called_as_documented(monkeypatch: pytest.MonkeyPatch, with_lse: bool) -> None:
    def flash_attn_func(
        q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, window_size: tuple[int, int] = (-1, -1)
    ) -> Any:
        out = attention(q, k, v, causal=causal, window=behind(window_size), impl="reference")
        return (out, None) if with_lse else out

    def flash_attn_varlen_func(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None,
        seqused_k: Tensor | None = None,
        causal: bool = False,
    ) -> Any:
        keywords: dict[str, Any] = {"causal": causal, "impl": "reference"}
        if cu_seqlens_q is None:
            assert causal
            assert seqused_k is not None
            out = attention(q, k, v, key_lengths=seqused_k, query_starts=seqused_k - q.shape[1], **keywords)
        else:
            assert cu_seqlens_q is cu_seqlens_k
            assert max_seqlen_q == max_seqlen_k
            assert int(cu_seqlens_q.diff().max()) <= (max_seqlen_q or 0)
            out = attention(q, k, v, layout="thd", cu_seqlens_q=cu_seqlens_q, **keywords)
        return (out, None) if with_lse else out

    package, module = ModuleType("flash_attn"), ModuleType("flash_attn.cute")
    functions = {"flash_attn_func": flash_attn_func, "flash_attn_varlen_func": flash_attn_varlen_func}
    vars(module).update(functions)
    vars(package)["cute"] = module
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setitem(sys.modules, "flash_attn.cute", module)
    assert complaints("flash_attn_4", torch.device("cpu")) == []


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str, **contents: Any) -> None:
    """A module of this name, and its packages."""
    packages = name.split(".")
    for end in range(1, len(packages) + 1):
        module = ModuleType(".".join(packages[:end]))
        monkeypatch.setitem(sys.modules, module.__name__, module)
        if end > 1:
            monkeypatch.setattr(sys.modules[".".join(packages[: end - 1])], packages[end - 1], module, raising=False)
    vars(sys.modules[name]).update(contents)


def with_kvcache(q: Tensor, k_cache: Tensor, v_cache: Tensor, *, cache_seqlens: Tensor, causal: bool = False) -> Tensor:
    assert causal
    starts = cache_seqlens - q.shape[1]
    out: Tensor = attention(
        q, k_cache, v_cache, causal=True, key_lengths=cache_seqlens, query_starts=starts, impl="reference"
    )
    return out


@pytest.mark.parametrize(
    ("name", "module"), [("flash_attn_2", "flash_attn.flash_attn_interface"), ("flash_attn_3", "flash_attn_interface")]
)
def test_flash_attention_2_and_3_are_called_as_documented(
    name: str, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    forms = set()

    def flash_attn_func(
        q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, window_size: tuple[int, int] = (-1, -1)
    ) -> Tensor:
        forms.add("dense")
        out: Tensor = attention(q, k, v, causal=causal, window=behind(window_size), impl="reference")
        return out

    def flash_attn_varlen_func(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        *,
        causal: bool = False,
    ) -> Tensor:
        forms.add("packed")
        assert cu_seqlens_q is cu_seqlens_k
        assert int(cu_seqlens_q.diff().max()) <= min(max_seqlen_q, max_seqlen_k)
        out: Tensor = attention(q, k, v, layout="thd", cu_seqlens_q=cu_seqlens_q, causal=causal, impl="reference")
        return out

    def flash_attn_with_kvcache(*arguments: Any, **keywords: Any) -> Tensor:
        forms.add("cache")
        return with_kvcache(*arguments, **keywords)

    functions = (flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache)
    stand_in(monkeypatch, module, **{function.__name__: function for function in functions})
    assert complaints(name, torch.device("cpu")) == []
    assert forms == {"dense", "packed", "cache"}
    wide = replace(SMALL, v_head_dim=32)
    assert (ATTENTION_PEERS[name].why_not(wide) is None) == (name == "flash_attn_3")


def test_xformers_is_called_as_documented(monkeypatch: pytest.MonkeyPatch) -> None:
    class LowerTriangularMask:
        pass

    def memory_efficient_attention(q: Tensor, k: Tensor, v: Tensor, attn_bias: Any = None) -> Tensor:
        assert q.shape == k.shape == v.shape
        out: Tensor = attention(q, k, v, causal=isinstance(attn_bias, LowerTriangularMask), impl="reference")
        return out

    contents = {"LowerTriangularMask": LowerTriangularMask, "memory_efficient_attention": memory_efficient_attention}
    stand_in(monkeypatch, "xformers.ops", **contents)
    assert complaints("xformers", torch.device("cpu")) == []
    assert ATTENTION_PEERS["xformers"].why_not(replace(SMALL, k_heads=2)) is not None


def test_transformer_engine_is_called_as_documented(monkeypatch: pytest.MonkeyPatch) -> None:
    class DotProductAttention:
        """The defaults: (T, B, H, D), causal."""

        def __init__(
            self,
            num_attention_heads: int,
            kv_channels: int | tuple[int, int],
            num_gqa_groups: int | None = None,
            attention_dropout: float = 0.0,
            qkv_format: str = "sbhd",
            attn_mask_type: str = "causal",
            window_size: tuple[int, int] = (-1, -1),
        ) -> None:
            assert qkv_format == "bshd"
            self.window = behind(window_size)
            self.heads, self.groups = num_attention_heads, num_gqa_groups
            self.channels = (kv_channels, kv_channels) if isinstance(kv_channels, int) else kv_channels
            self.causal = {"causal": True, "no_mask": False}[attn_mask_type]

        def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            assert (q.shape[2], k.shape[2]) == (self.heads, self.groups)
            assert (k.shape[3], v.shape[3]) == self.channels
            return attention(q, k, v, causal=self.causal, window=self.window, impl="reference").flatten(2)

    stand_in(monkeypatch, "transformer_engine.pytorch", DotProductAttention=DotProductAttention)
    assert complaints("transformer_engine", torch.device("cpu")) == []
    wide = replace(SMALL, head_dim=96, v_head_dim=64)
    inputs = make_attention_inputs(wide, torch.device("cpu"))
    attend = ATTENTION_PEERS["transformer_engine"].build(wide, inputs)
    assert AttentionGate(wide, inputs).check(attend, "none", backward=True).complaint is None


def test_flashinfer_is_called_as_documented(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrapper:
        def __init__(self, workspace: Tensor, kv_layout: str = "HND", *, use_tensor_cores: bool = False) -> None:
            assert (workspace.dtype, kv_layout) == (torch.uint8, "NHD")

    class BatchDecodeWithPagedKVCacheWrapper(Wrapper):
        def plan(
            self,
            indptr: Tensor,
            indices: Tensor,
            last_page_len: Tensor,
            num_qo_heads: int,
            num_kv_heads: int,
            head_dim: int,
            page_size: int,
            *,
            q_data_type: Any = torch.float16,
            kv_data_type: Any = None,
        ) -> None:
            assert {x.dtype for x in (indptr, indices, last_page_len)} == {torch.int32}
            assert indices.numel() == int(indptr[-1])
            assert q_data_type == kv_data_type == torch.bfloat16
            assert 1 <= int(last_page_len.min()) <= int(last_page_len.max()) <= page_size
            self.page_size, self.lengths = page_size, (indptr.diff() - 1) * page_size + last_page_len
            self.rows = torch.split(indices, indptr.diff().tolist())

        def run(self, q: Tensor, cache: tuple[Tensor, Tensor]) -> Tensor:
            assert cache[0].shape[1] == self.page_size
            outs = []
            for row, (pages, length) in enumerate(zip(self.rows, self.lengths.tolist(), strict=True)):
                k, v = (x[pages.long()].flatten(0, 1)[None, :length] for x in cache)
                outs.append(attention(q[row][None, None], k, v, impl="reference")[:, 0])
            return torch.cat(outs)

    class BatchPrefillWithRaggedKVCacheWrapper(Wrapper):
        def plan(
            self,
            qo_indptr: Tensor,
            kv_indptr: Tensor,
            num_qo_heads: int,
            num_kv_heads: int,
            head_dim_qk: int,
            *,
            causal: bool = False,
            window_left: int = -1,
            q_data_type: Any = torch.float16,
            kv_data_type: Any = None,
        ) -> None:
            assert qo_indptr.dtype == kv_indptr.dtype == torch.int32
            assert q_data_type == kv_data_type == torch.bfloat16
            window = None if window_left < 0 else window_left + 1
            self.options = {"cu_seqlens_q": qo_indptr, "causal": causal, "window": window}
            self.heads = (num_qo_heads, num_kv_heads, head_dim_qk)

        def run(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            assert (q.shape[1], k.shape[1], q.shape[2]) == self.heads
            out: Tensor = attention(q, k, v, layout="thd", impl="reference", **self.options)
            return out

    names = BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithRaggedKVCacheWrapper
    stand_in(monkeypatch, "flashinfer", **{wrapper.__name__: wrapper for wrapper in names})
    peer = ATTENTION_PEERS["flashinfer"]
    assert peer.why_not(CACHE) == "a cache that is cut into pages of 16 tokens"
    assert (peer.why_not(SMALL), peer.why_not(SMALL, True)) == (None, "no backward")
    served = [case.name for case in FORMS if peer.why_not(case) is None]
    assert served == [case.name for case in FORMS if case not in (CACHE, FORMS[3])]  # and no key lengths
    assert complaints("flashinfer", torch.device("cpu"), backward=False) == []
    case = replace(CACHE, tokens=144, batch=5)
    inputs = make_attention_inputs(case, torch.device("cpu"))
    attend = peer.build(case, inputs)
    assert AttentionGate(case, inputs).check(attend, "none", backward=False).complaint is None


class GraphTensor:
    """A tensor of cuDNN's Python graphs: dims (B, H, T, D), their strides, and offsets of packed sequences."""

    def __init__(self, **known: Any) -> None:
        self.offsets = self.dim = self.stride = None
        vars(self).update(known)

    def set_output(self, is_output: bool) -> "GraphTensor":
        assert is_output
        return self

    def set_dim(self, dim: tuple[int, ...]) -> "GraphTensor":
        self.dim = dim
        return self

    def set_stride(self, stride: tuple[int, ...]) -> "GraphTensor":
        self.stride = stride
        return self

    def set_data_type(self, kind: str) -> None:
        self.data_type = kind

    def set_ragged_offset(self, offsets: "GraphTensor") -> None:
        self.offsets = offsets


class PyGraph:
    """cuDNN's graph of one node, by the reference: it reads and writes memory by dims, strides and offsets alone."""

    io_data_type = "BFLOAT16"

    def __init__(self, *, io_data_type: str, intermediate_data_type: str, compute_data_type: str, handle: str) -> None:
        assert io_data_type == self.io_data_type
        assert intermediate_data_type == compute_data_type == "FLOAT"
        assert handle == "handle"

    def tensor(self, *, name: str, dim: Any, stride: Any, data_type: str) -> GraphTensor:
        return GraphTensor(name=name, dim=dim, stride=stride, data_type=data_type)

    def sdpa(self, *, name: str, generate_stats: bool, **node: Any) -> list[Any]:
        self.node, self.results = node, [GraphTensor(), GraphTensor() if generate_stats else None]
        return self.results

    def sdpa_backward(self, *, name: str, **node: Any) -> list[GraphTensor]:
        room = node.pop("max_total_seq_len_q", None)
        assert room == node.pop("max_total_seq_len_kv", None)
        assert (room is None) == (node["q"].offsets is None)
        self.node, self.results = node, [GraphTensor() for _ in range(3)]
        return self.results

    def build(self, heuristics: list[str]) -> None:
        assert heuristics == ["A", "FALLBACK"]

    def get_workspace_size(self) -> int:
        return 0

    def row_of(self, tensor: GraphTensor, memory: Tensor, row: int, length: int) -> Tensor:
        """View one row, (T, H, D)."""
        assert tensor.dim is not None
        assert tensor.stride is not None
        _, heads, _, features = tensor.dim
        start = row * tensor.stride[0] if tensor.offsets is None else int(self.memory[tensor.offsets].flatten()[row])
        strides = tensor.stride[2], tensor.stride[1], tensor.stride[3]
        return memory.view(-1).as_strided((length, heads, features), strides, start)

    def execute(self, memory: dict[GraphTensor, Tensor], workspace: Tensor, *, handle: str) -> None:
        self.memory, node, is_backward = memory, self.node, "dO" in self.node
        assert (node.get("use_padding_mask", False), handle) == ("seq_len_q" in node, "handle")
        known = [node.get(f"seq_len_{side}") for side in ("q", "kv")]
        lengths = [None if x is None else memory[x].flatten().tolist() for x in known]
        options = {"causal": node.get("diagonal_band_right_bound") == 0, "window": node.get("diagonal_band_left_bound")}
        assert node["attn_scale"] == node["q"].dim[-1] ** -0.5
        for row in range(node["q"].dim[0]):
            queries, keys = (node[x].dim[2] if of is None else of[row] for x, of in zip("qk", lengths, strict=True))
            sizes = {"q": queries, "k": keys, "v": keys}
            is_paged = "paged_attention_k_table" in node
            whole = (self.row_of(node[x], memory[node[x]], row, size) for x, size in sizes.items())
            leaves = [x.detach()[None].requires_grad_() for x in (self.read_pages(row, keys) if is_paged else whole)]
            with torch.enable_grad():
                out, lse = attention(*leaves, **options, return_lse=True, impl="reference")
            found = [out, lse.transpose(1, 2)[..., None]]
            if is_backward:
                grad = self.row_of(node["dO"], memory[node["dO"]], row, queries)
                stats = self.row_of(node["stats"], memory[node["stats"]], row, queries)
                torch.testing.assert_close(stats, found[1][0].detach())
                found = list(torch.autograd.grad(out, leaves, grad[None]))
            for tensor, value in zip(self.results, found, strict=True):
                if tensor is not None:
                    if tensor.offsets is None:  # keys that are not there get zeros, as its own tests demand
                        self.row_of(tensor, memory[tensor], row, tensor.dim[2]).zero_()
                    self.row_of(tensor, memory[tensor], row, value.shape[1]).copy_(value[0].detach())

    def read_pages(self, row: int, length: int) -> Iterator[Tensor]:
        """View a row's query, and gather its keys and values."""
        node = self.node
        assert node["paged_attention_max_seq_len_kv"] >= length
        yield self.row_of(node["q"], self.memory[node["q"]], row, 1)
        for name in "kv":
            pages, table = node[name], self.memory[node[f"paged_attention_{name}_table"]][row].flatten().tolist()
            size = pages.dim[2]
            assert len(table) * size == node["paged_attention_max_seq_len_kv"]
            yield torch.cat([self.row_of(pages, self.memory[pages], page, size) for page in table])[:length]


class Float8PyGraph(PyGraph):
    """Its node of e4m3 numbers: units of the operands, and of what is rounded on the way."""

    io_data_type = "FP8_E4M3"

    def sdpa_fp8(self, *, name: str, is_inference: bool, **node: Any) -> list[GraphTensor | None]:
        assert is_inference
        self.node, self.results = node, [GraphTensor(), None, GraphTensor(), GraphTensor()]
        return self.results

    def execute(self, memory: dict[GraphTensor, Tensor], workspace: Tensor, *, handle: str) -> None:
        node, names = self.node, ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")
        numbers = {name: float(memory[node[name]]) for name in names}
        assert numbers["descale_s"] * numbers["scale_s"] == 1
        read = {name: memory[node[name]].float() * numbers[f"descale_{name}"] for name in "qkv"}
        out = attention(**read, causal=node.get("right_bound") == 0, scale=node["attn_scale"], impl="reference")
        of_out, _, *largest = self.results
        memory[of_out].copy_((out * numbers["scale_o"]).to(torch.float8_e4m3fn))
        assert all(memory[one].shape == (1, 1, 1, 1) and memory[one].dtype == torch.float32 for one in largest)


def stand_in_for_cudnn(monkeypatch: pytest.MonkeyPatch, graph: type[PyGraph]) -> None:
    names = ("BFLOAT16", "HALF", "FLOAT", "FP8_E4M3", "INT32", "INT64")
    kinds, modes = SimpleNamespace(**{name: name for name in names}), SimpleNamespace(A="A", FALLBACK="FALLBACK")
    contents = {"pygraph": graph, "data_type": kinds, "heur_mode": modes, "create_handle": lambda: "handle"}
    stand_in(monkeypatch, "cudnn", **contents)


def test_cudnns_fp8_gets_scaled_numbers_and_gives_scaled_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in_for_cudnn(monkeypatch, Float8PyGraph)
    assert complaints("cudnn_fp8", torch.device("cpu")) == []


def test_both_sageattentions_are_called_on_inputs_that_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    def sageattn(
        q: Tensor, k: Tensor, v: Tensor, tensor_layout: str = "HND", is_causal: bool = False, smooth_k: bool = True
    ) -> Tensor:
        assert tensor_layout == "NHD"
        assert smooth_k == (not is_first)
        if is_first:
            assert float(k.mean(1).abs().max()) < 0.01
        out: Tensor = attention(q, k, v, causal=is_causal, impl="reference")
        return out

    stand_in(monkeypatch, "sageattention.sm90_compile")
    for is_first, name in ((False, "sageattention"), (True, "sageattention_1")):
        if is_first:
            stand_in(monkeypatch, name)
        vars(sys.modules[name])["sageattn"] = sageattn
        assert complaints("sageattention_1" if is_first else "sageattention_2", torch.device("cpu")) == []


def test_cudnns_frontend_gets_graphs_that_say_where_tensors_are(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in_for_cudnn(monkeypatch, PyGraph)
    peer, device = ATTENTION_PEERS["cudnn_frontend"], torch.device("cpu")
    assert [case.name for case in FORMS if peer.why_not(case, True) is not None] == ["cache"]  # not cut into pages
    assert complaints("cudnn_frontend", device) == []
    case = replace(CACHE, tokens=144)
    inputs = make_attention_inputs(case, device)
    assert AttentionGate(case, inputs).check(peer.build(case, inputs), "none", backward=False).complaint is None


def test_transformers_whole_matrices_are_of_short_sequences() -> None:
    by_name = {case.name: ATTENTION_PEERS["huggingface"].why_not(case) for case in CASES}
    assert by_name["bert-512"] is by_name["causal-2k-d128"] is by_name["decode-8k-d128"] is None
    assert by_name["gqa-8k-d128"] == "its whole matrices take 40 GiB, of 16 that it may take"


def test_whole_matrices_of_scores_must_fit() -> None:
    by_name = {case.name: ATTENTION_PEERS["eager"].why_not(case) for case in CASES}
    assert by_name["rerope-8k-d64"] is None
    assert by_name["rerope-8k-d64-fp16"] is None
    assert by_name["rerope-16k-d128"] == "its whole matrices do not fit: 80 GiB, of 64 that it may take"
    assert by_name["causal-8k-d64"] == "ReRoPE of dense causal tensors alone"


def test_a_copy_in_pages_is_the_same_cache(device: torch.device) -> None:
    case = CACHE
    inputs = make_attention_inputs(case, device)
    for size in PAGE_SIZES:
        keywords = _paged(inputs, size)
        q, keys, values = keywords["first"](inputs.q, inputs.k, inputs.v)
        assert q is inputs.q
        assert keys.shape[1] == size
        table = keywords["block_table"].long()
        assert not torch.equal(table.flatten().sort()[0], table.flatten())  # shuffled
        for pages, x in ((keys, inputs.k), (values, inputs.v)):
            assert torch.equal(pages[table].flatten(1, 2)[:, : case.tokens], x)


def test_the_peers_rotation_is_ours(device: torch.device) -> None:
    inputs = make_attention_inputs(SMALL, device)
    with nothing_compiled(device):
        rotated = compile_rope(SMALL, inputs)(inputs.q, inputs.k)
    expected = apply_rope(inputs.q, inputs.k, inputs.cos, inputs.sin, impl="reference")
    for actual, exact in zip(rotated, expected, strict=True):
        torch.testing.assert_close(actual, exact)


def test_every_candidate_is_judged_by_its_setting(device: torch.device) -> None:
    inputs = make_attention_inputs(SMALL, device)
    gate = AttentionGate(SMALL, inputs)
    found = candidates_of(SMALL, inputs, ("reference",), [ATTENTION_PEERS[name] for name in ("sdpa_flash", "eager")])
    labels = {mode: [name_of(candidate) for candidate in found[mode]] for mode in found}
    inside, outside = ["auto + rope", "reference + rope"], ["reference + apply_rope", "reference"]
    assert labels["fwd"] == labels["bwd"] == ["reference", "sdpa_flash"]
    assert labels["train"] == [*inside, *outside, "sdpa_flash + compiled rope"]
    assert labels["memory"] == inside
    assert labels["8bit-fwd"] == [f"reference{more}" for more in (" + rope", "", *(f" + {x}" for x in PRODUCTS))]
    assert labels["rerope-fwd"] == labels["rerope-train"] == []
    schemes = ["reference + alibi", "reference + exposb", "reference + exposb-decay", "reference + t5"]
    assert labels["schemes-fwd"] == labels["schemes-bwd"] == ["reference", *schemes]
    variants = [f"reference + {name}" for name in ("dropout", "softcap", "sinks", "deterministic")]
    assert labels["variants-fwd"] == labels["variants-bwd"] == ["reference", *variants]
    assert labels["learned-bwd"] == ["reference", *(f"reference + {name}" for name in LEARNED)]
    with nothing_compiled(device):
        for candidates in (found[mode] for mode in ("train", "schemes-fwd", "variants-fwd", "learned-bwd")):
            check_candidates(gate, candidates, backward=True)
        check_candidates(gate, found["8bit-fwd"], backward=False)


def test_8_bit_libraries_are_held_against_8_bit_products_alone() -> None:
    inputs, names = make_attention_inputs(SMALL, torch.device("cpu")), ("sageattention_1", "cudnn_frontend", "flex")
    found = candidates_of(SMALL, inputs, ("reference",), [ATTENTION_PEERS[name] for name in names])
    peers = {mode: [name_of(one) for one in of if one.kind == "peer"] for mode, of in found.items()}
    assert peers["fwd"] == ["cudnn_frontend", "flex"]
    plain = ["cudnn_frontend", "sageattention_1"]
    assert peers["8bit-fwd"] == [*plain, *(f"{name} + compiled rope" for name in plain)]
    settings = [one.setting for one in found["8bit-fwd"] if one.kind == "peer"]
    assert settings == ["none", "other-8bit", "rope", "rope-other-8bit"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_way_to_rerope_is_right(dtype: str, device: torch.device) -> None:
    case = replace(FAR, dtype=dtype)
    inputs = make_attention_inputs(case, device)
    found = candidates_of(case, inputs, ("reference",), [ATTENTION_PEERS[name] for name in ("sdpa_flash", "eager")])
    ours = [candidate for candidate in found["rerope-train"] if candidate.impl != "flash"]
    one_call = ["auto + rerope", "reference + rerope"]
    others = ["reference + rope", "reference + two calls", "reference + ready pairs", "eager + rerope"]
    assert [name_of(candidate) for candidate in ours] == [*one_call, *others]
    assert found["rerope-fwd"] == found["rerope-train"]
    memory = [name_of(candidate) for candidate in found["memory"]]
    assert memory == ["auto + rope", "reference + rope", "reference + rerope"]
    with nothing_compiled(device):
        check_candidates(AttentionGate(case, inputs), ours, backward=True)


def test_ready_pairs_are_made_before_what_is_timed(device: torch.device) -> None:
    inputs = make_attention_inputs(FAR, device)
    found = candidates_of(FAR, inputs, ("reference",), [])["rerope-train"]
    by_position = {candidate.position: candidate for candidate in found if candidate.impl == "reference"}
    plain, ready = by_position["rerope"], by_position["ready pairs"]
    assert plain.tensors() == (inputs.q, inputs.k, inputs.v)
    pairs = [x.requires_grad_() for x in ready.tensors()]
    near_q, far_q, near_k, far_k, v = pairs
    rotated = apply_rope(inputs.q, inputs.k, inputs.cos, inputs.sin, impl="reference")
    torch.testing.assert_close(near_q, rotated[0].transpose(1, 2))
    torch.testing.assert_close(near_k, rotated[1].transpose(1, 2))
    torch.testing.assert_close(far_q[:, :, 40], near_q[:, :, 40])
    assert torch.equal(far_k, inputs.k.transpose(1, 2))
    assert torch.equal(v, inputs.v.transpose(1, 2))
    out = ready.build()(*pairs)
    assert out.shape == inputs.grad.shape
    grads = torch.autograd.grad(out, pairs, inputs.grad)
    assert all(grad.any() for grad in grads)


def test_candidates_that_cannot_run_have_a_reason() -> None:
    device = torch.device("cpu")
    inputs = make_attention_inputs(FAR, device)
    found = candidates_of(FAR, inputs, ("sdpa",), [])["rerope-train"]
    reasons = {name_of(candidate): candidate.choose(True)[1] for candidate in found}
    assert "cannot run this call" in (reasons["sdpa + rerope"] or "")
    assert reasons["sdpa + ready pairs"] == reasons["sdpa + rerope"]
    assert "log-sum-exp is not supported" in (reasons["sdpa + two calls"] or "")
    assert reasons["sdpa + rope"] is reasons["auto + rerope"] is None


def test_every_candidate_of_packed_sequences_and_of_caches_is_right(device: torch.device) -> None:
    for case, mode in ((PACKED, "train"), (CACHE, "decode")):
        inputs = make_attention_inputs(case, device)
        found = candidates_of(case, inputs, ("reference",), [ATTENTION_PEERS["sdpa_default"]])[mode]
        usable = [candidate for candidate in found if candidate.choose(mode == "train")[1] is None]
        labels = [name_of(candidate) for candidate in usable]
        if mode == "train":
            assert labels == ["auto + rope", "reference + rope", "reference + apply_rope", "reference"]
        else:
            pages = [f"reference + rope, pages of {size}" for size in PAGE_SIZES]
            assert labels == ["auto + rope", "reference + rope", *pages, "sdpa_default + compiled rope"]
        with nothing_compiled(device):
            check_candidates(AttentionGate(case, inputs), usable, backward=mode == "train")


def check_candidates(gate: AttentionGate, candidates: Sequence[AttentionCandidate], *, backward: bool) -> None:
    for candidate in candidates:
        served_by, reason = candidate.choose(backward)
        assert reason is None
        assert (served_by is None) == (candidate.kind == "peer")
        verdict, _ = candidate.for_mode("train" if backward else "fwd", gate).check()
        assert verdict.complaint is None, name_of(candidate)
