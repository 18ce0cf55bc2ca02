"""Compare "ropewalk" with transformers' "eager" attention in every family of models, and print a table.

python tools/families.py                  # all families, minutes; --page writes the table of docs/models.md
python tools/families.py llama nllb-moe   # these model types

Each family is built from its config class with small sizes and random weights, in a process of its own. Its first
output is compared in float32 without padding, padded on both sides, and packed. The bound is `error_budget`: eager's
own error against float64 and the roundings of the layers. A family that cannot be built so, or that cannot run "eager",
is named and not judged. Results are kept in build/families.jsonl, by the versions of both packages: a second call goes
on. Exits with 1 where outputs differ and nothing refuses.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # a test that imports this keeps its environment
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
import transformers
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import ropewalk
from ropewalk.integrations import huggingface
from ropewalk.testing import error_budget

ROOT = Path(__file__).parents[1]
KEPT, PAGE = ROOT / "build/families.jsonl", ROOT / "docs/models.md"
BATCH, TOKENS, VOCABULARY, LAYERS, PADDED = 2, 12, 64, 2, 3
STARTS = (0, 5, 6)  # of the packed documents
# In each layer and in the embedding and the head: norms, projections, rotation, scores, probabilities, sums and MLP.
ROUNDINGS = 13 * (LAYERS + 1)
LIMIT = 60  # seconds a family
# The first of these that a family has: the output with a head shows more.
HEADS = ("CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "MASKED_LM")
# Small sizes, by the names of configs' arguments.
SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "text_vocab_size"), VOCABULARY),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "emb_dim", "embed_dim", "embedding_size"), 64),
    **dict.fromkeys(("intermediate_size", "encoder_ffn_dim", "decoder_ffn_dim", "ffn_dim", "d_ff", "n_inner"), 32),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_dim"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers"), LAYERS),
    **dict.fromkeys(("decoder_layers", "num_decoder_layers", "depth", "num_encoder_layers"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "num_encoder_attention_heads", "num_decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "multi_query_group_num"), 2),
    **dict.fromkeys(("head_dim", "d_kv", "attention_head_dim"), 16),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_source_positions", "max_target_positions"), 64),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 2),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk", "num_selected_experts"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "num_shared_experts"), 1),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim"), 16),
    "qk_rope_head_dim": 16,
    "sliding_window": 5,
    "image_size": 32,
    "patch_size": 8,
    "num_channels": 3,
    **dict.fromkeys(("dropout", "attention_dropout", "hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0),
    **dict.fromkeys(("layerdrop", "encoder_layerdrop", "decoder_layerdrop", "activation_dropout"), 0.0),
    "initializer_range": 0.2,
    "init_std": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "prediction_length": 8,
    "context_length": 16,
    "num_time_features": 1,
    "lags_sequence": [1, 2],
    "decoder_start_token_id": 1,
    "attention_type": "original_full",
    "rotary_dim": 8,
    "attn_layer_indices": [1],
}
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
# What else to try where a config or a forward of "eager" fails: the first that runs is taken.
VARIANTS: list[dict[str, Any]] = [{}, {"rope_parameters": MROPE}, {"head_dim": None}, {"num_key_value_heads": 4}]
MOST_PARAMETERS = 20_000_000


# A name, both sides, of which the second is what eager attention computes, and maybe another that eager may compute.
Case = tuple[Any, ...]


class InDouble(TorchFunctionMode):
    """Compute in float64 what transformers computes in float32 whatever the model's dtype."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            func = Tensor.double
        args = [torch.float64 if x is torch.float32 else x for x in args]
        return func(*args, **{name: torch.float64 if x is torch.float32 else x for name, x in (kwargs or {}).items()})


def small_config(config_class: Any, changes: dict[str, Any]) -> Any:
    """Make a family's config with small sizes, and changes of them, None for its own."""
    defaults = {name: value for base in reversed(config_class.__mro__) for name, value in vars(base).items()}
    names = {*defaults, *(name for base in config_class.__mro__ for name in getattr(base, "__annotations__", ()))}
    code = getattr(config_class.__init__, "__wrapped__", config_class.__init__).__code__
    names |= set(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])
    sizes = {name: value for name, value in {**SIZES, **changes}.items() if name in names and value is not None}
    for name, sub in (getattr(config_class, "sub_configs", None) or {}).items():
        if sub is not transformers.AutoConfig:
            sizes[name] = small_config(sub, changes)
    config = config_class(**sizes)
    layer_types = getattr(config, "layer_types", None)
    if layer_types:  # one of each kind, in their order
        kinds = list(dict.fromkeys(layer_types))
        with contextlib.suppress(Exception):
            config = config_class(**sizes, layer_types=(kinds * LAYERS)[: max(LAYERS, len(kinds))])
    return config


def find_class(model_type: str) -> Any:
    """Return the class of a model with a head, or without one."""
    for head in (*(f"MODEL_FOR_{name}" for name in HEADS), "MODEL"):
        found = getattr(modeling_auto, f"{head}_MAPPING", {}).get(CONFIG_MAPPING[model_type], None)
        if found is not None:
            return found[0] if isinstance(found, (tuple, list)) else found
    return None


def first_tensor(output: Any) -> Tensor:
    """Return the logits, or the last hidden state."""
    found = getattr(output, "logits", None)
    if found is None:
        found = next(x for x in output.to_tuple() if isinstance(x, Tensor) and x.is_floating_point())
    return found


def text_cases(model: Any, has_images: bool) -> Iterator[Case]:
    """Yield the cases of a model of tokens."""
    ids = torch.randint(3, VOCABULARY, (BATCH, TOKENS), generator=torch.Generator().manual_seed(1))
    of_pair = {"decoder_input_ids": ids.flip(1)} if model.config.is_encoder_decoder else {}

    vision: Any = getattr(model.config, "vision_config", None)
    if has_images and isinstance(getattr(vision, "image_size", None), int):
        of_pair["pixel_values"] = torch.randn(
            BATCH, 3, vision.image_size, vision.image_size, generator=torch.Generator().manual_seed(1)
        )

    def run(**given: Any) -> Tensor:
        given = {"input_ids": ids, **of_pair, **given}
        dtype, rows = next(model.parameters()).dtype, given["input_ids"].shape[0]
        # The images of the first rows, of the model's dtype.
        return first_tensor(
            model(**{name: x[:rows].to(dtype) if name == "pixel_values" else x for name, x in given.items()})
        )

    yield "plain", run, run
    if "pixel_values" in of_pair:  # whose output may be of a token that is padding
        return
    if "decoder_input_ids" in of_pair:
        of_source = torch.ones_like(ids)
        of_source[0, -PADDED:] = 0
        yield "padded", lambda: run(attention_mask=of_source), lambda: run(attention_mask=of_source)
        return
    for name, where in (("right", slice(-PADDED, None)), ("left", slice(0, PADDED))):
        mask = torch.ones_like(ids)
        mask[0, where] = 0

        def padded(mask: Tensor = mask) -> Tensor:
            out = run(attention_mask=mask)
            return out[mask.bool()] if out.shape[:2] == mask.shape else out

        yield name, padded, padded
    row = ids[:1]
    ends = (*STARTS[1:], TOKENS)
    positions = torch.cat([torch.arange(end - start) for start, end in zip(STARTS, ends, strict=True)])[None]

    def alone() -> Tensor:
        return torch.cat([run(input_ids=row[:, a:b]) for a, b in zip(STARTS, ends, strict=True)], dim=1)

    def packed(use_cache: bool = False) -> Tensor:
        return run(input_ids=row, position_ids=positions, use_cache=use_cache)

    yield "packed", packed, alone, packed
    yield "packed, cache", lambda: packed(use_cache=True), alone, packed


def sound_cases(model: Any, *others: Any) -> Iterator[Case]:
    """Yield the cases of a model of sound: of samples, or of frames in either order of dimensions."""
    config, name, generator = model.config, model.main_input_name, torch.Generator().manual_seed(1)
    mels = next((size for x in _MELS if isinstance(size := getattr(config, x, None), int)), 80)
    shape: tuple[int, ...] = (BATCH, 4000)
    if name == "input_features":
        frames: Any = getattr(config, "max_source_positions", None)
        by_frames = frames is None or config.model_type == "speech_to_text"
        shape = (BATCH, 64, mels) if by_frames else (BATCH, mels, 2 * frames)
    sound = torch.randn(shape, generator=generator)
    given: dict[str, Any] = {}
    if config.is_encoder_decoder:
        given["decoder_input_ids"] = torch.randint(3, VOCABULARY, (BATCH, TOKENS), generator=generator)

    def run(**others: Any) -> Tensor:
        return first_tensor(model(**{name: sound.to(next(model.parameters()).dtype)}, **given, **others))

    yield "plain", run, run
    mask = torch.ones(BATCH, sound.shape[1], dtype=torch.long)
    mask[0, sound.shape[1] // 2 :] = 0

    def padded() -> Tensor:
        out = run(attention_mask=mask)
        return out[1:] if "decoder_input_ids" not in given else out  # the first row has frames of padding

    if sound.shape[1] != mels:
        yield "right", padded, padded


_MELS = ("num_mel_bins", "input_feat_per_channel", "feature_projection_input_dim", "feature_size")


def series_cases(model: Any, *others: Any) -> Iterator[Case]:
    """As of time series with a decoder."""
    config, generator = model.config, torch.Generator().manual_seed(1)
    past = config.context_length + max(config.lags_sequence)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(BATCH, *shape, generator=generator)

    given = {
        "past_values": numbers(past),
        "past_time_features": numbers(past, config.num_time_features),
        "past_observed_mask": torch.ones(BATCH, past),
        "future_values": numbers(config.prediction_length),
        "future_time_features": numbers(config.prediction_length, config.num_time_features),
    }

    def run() -> Tensor:
        dtype = next(model.parameters()).dtype
        return first_tensor(model(**{name: x.to(dtype) for name, x in given.items()}))

    yield "plain", run, run


def image_cases(model: Any, *others: Any) -> Iterator[Case]:
    """Yield the cases of a model of images."""
    size = model.config.image_size
    height, width = (size, size) if isinstance(size, int) else size
    images = torch.randn(
        BATCH, getattr(model.config, "num_channels", 3), height, width, generator=torch.Generator().manual_seed(1)
    )

    def run() -> Tensor:
        dtype = next(model.parameters()).dtype
        return first_tensor(model(pixel_values=images.to(dtype)))

    yield "plain", run, run


def build(model_type: str, changes: dict[str, Any]) -> tuple[Any, list[Any]]:
    """Build a family's model with "eager" attention, and its cases, of which the first has run."""
    torch.manual_seed(0)
    model_class = find_class(model_type)
    config = small_config(CONFIG_MAPPING[model_type], changes)
    config._experts_implementation = "eager"
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in model_class._from_config(config).parameters())
    if size > MOST_PARAMETERS:
        raise ValueError(f"{size / 1e6:.0f} million parameters: a size is not small")
    model = model_class._from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn(parameter.shape) * 0.1)
    by_input: dict[str, Callable[..., Iterator[Case]]] = {
        "input_ids": text_cases,
        "pixel_values": image_cases,
        "past_values": series_cases,
        "input_values": sound_cases,
        "input_features": sound_cases,
    }
    if model.main_input_name not in by_input:
        raise ValueError(f"its input is {model.main_input_name}")
    cases = list(by_input[model.main_input_name](model, False))
    with torch.no_grad():
        try:
            cases[0][1]()
        except Exception:
            cases = list(by_input[model.main_input_name](model, True))
            cases[0][1]()
    return model, cases


def judge(model_type: str) -> dict[str, Any]:
    """Build a family and compare its cases."""
    errors = []
    for changes in VARIANTS:
        try:
            model, cases = build(model_type, changes)
            break
        except Exception as error:
            errors.append(describe(error))
    else:
        return {"cases": {}, "unbuilt": errors[0]}
    return {"class": type(model).__name__, "cases": {name: compare(model, name, *sides) for name, *sides in cases}}


@torch.no_grad()
def compare(
    model: Any, name: str, ours: Callable[[], Tensor], theirs: Callable[[], Tensor], without_cache: Any = None
) -> str:
    """Return "agrees", "differs …", "refused …" or "eager …", which cannot run it."""

    def seeded(run: Callable[[], Tensor]) -> Tensor:
        torch.manual_seed(0)  # some mask at random
        return run()

    try:
        baseline = seeded(theirs)
        if name == "packed":  # as eager has it, which not every family tells apart
            eager_packed = seeded(ours)
            if not bool((eager_packed - baseline).abs().max() <= 1e-3 * baseline.abs().max()):
                return "eager: documents see each other"
    except Exception as error:
        return f"eager: {describe(error)}"
    truth = baseline.double()
    try:
        with InDouble():
            model.double()
            exact = seeded(theirs)
        if bool((exact - truth).abs().max() <= 1e-3 * truth.abs().max()):
            truth = exact
    except Exception:
        truth = baseline.double()  # the family knows no float64: eager itself is the truth
    finally:
        model.float()
    try:
        model.set_attn_implementation("ropewalk")
        with calls_of_door() as calls:
            actual = seeded(ours)
    except Exception as error:
        where = [Path(frame.filename) for frame in traceback.extract_tb(error.__traceback__)][-1]
        is_ours = where.is_relative_to(Path(ropewalk.__file__).parent) and isinstance(error, (ValueError, TypeError))
        return f"{'refused' if is_ours else 'died'}: {describe(error)}"
    finally:
        model.set_attn_implementation("eager")
    if actual.shape != truth.shape and name.startswith("packed"):
        return "eager: its output is of no token"
    if actual.shape != truth.shape:
        return f"differs in shape: {tuple(actual.shape)} and {tuple(truth.shape)}"
    budget = error_budget(truth, baseline, ROUNDINGS)
    distance = float((actual.double() - truth).abs().nan_to_num(nan=torch.inf).max())
    if not distance <= budget and name.startswith("packed"):
        for as_whom, theirs in (("eager", ours), ("eager without a cache", without_cache)):
            if float((actual - theirs()).abs().max()) <= budget:
                return f"as {as_whom}: documents see each other"
    if not distance <= budget:
        return f"differs by {distance / float(truth.abs().max()):.0%} (error {distance:.1e}, at most {budget:.1e})"
    return "agrees" if calls else "keeps its own"


@contextlib.contextmanager
def calls_of_door() -> Iterator[list[Any]]:
    """Collect the calls of layers that attend by Ropewalk within."""
    door: Any = importlib.import_module("ropewalk.integrations.huggingface.attention")
    plain, full = door.repeat_plain, door.attention
    calls: list[Any] = []

    def noted(function: Any) -> Any:
        def call(*given: Any, **keywords: Any) -> Any:
            calls.append(function)
            return function(*given, **keywords)

        return call

    door.repeat_plain, door.attention = noted(plain), noted(full)
    try:
        yield calls
    finally:
        door.repeat_plain, door.attention = plain, full


def describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"


def in_a_process(model_type: str, limit: int = LIMIT) -> dict[str, Any]:
    """Judge a family in a copy of this process, which may die or last."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # models print
        signal.alarm(limit)
        try:
            result = judge(model_type)
        except BaseException as error:
            result = {"cases": {}, "unbuilt": describe(error)}
        with os.fdopen(writer, "w") as pipe:
            pipe.write(json.dumps(result))
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    return json.loads(text) if text else {"cases": {}, "unbuilt": f"no result in {limit} s, status {status}"}


def verdict(result: dict[str, Any]) -> str:
    """Say in a word what became of a family."""
    if "unbuilt" in result:
        return "not built"
    words = [case.split()[0].rstrip(":") for case in result["cases"].values()]
    for word in ("died", "differs", "agrees", "refused", "keeps"):
        if word in words:
            return word
    return "not built"


def versions() -> str:
    return f"transformers {transformers.__version__}, ropewalk {ropewalk.__version__}"


def table(results: dict[str, dict[str, Any]]) -> str:
    """Describe all results in the Markdown of docs/models.md."""
    by_word: dict[str, list[str]] = {}
    for name, result in sorted(results.items()):
        by_word.setdefault(verdict(result), []).append(name)
    packed: dict[str, list[str]] = {"agrees": [], "as": []}  # of those that tell documents apart without a cache
    for name, result in sorted(results.items()):
        if result["cases"].get("packed") == "agrees":
            packed.setdefault(result["cases"]["packed, cache"].split(" ")[0], []).append(name)
    lines = [f"With {versions()}:", "", "| result | families | |", "| --- | --- | --- |"]
    texts = {
        "agrees": "attend by Ropewalk and agree with eager",
        "keeps": "keep their own attention, and agree",
        "refused": "raise, by name",
        "differs": "differ",
        "died": "die",
        "not built": "not judged: no small model of random weights could be built from the config alone",
    }
    for word, text in texts.items():
        names = by_word.get(word, [])
        listed = "" if word in ("agrees", "not built") else ", ".join(names)
        lines.append(f"| {text} | {len(names)} | {listed} |")
    apart, together = packed["agrees"], packed["as"]
    lines += [
        f"| of them, packed by position_ids: each document as alone, with a cache too | {len(apart)} | |",
        f"| each document as alone without a cache; with one they see each other | {len(together)} | "
        f"{', '.join(together)} |",
    ]
    return "\n".join(lines)


def write_page(text: str) -> None:
    """Put the table between the marks of docs/models.md."""
    start, end = "<!-- families: tools/families.py -->\n\n", "\n\n<!-- end -->"
    page = PAGE.read_text()
    before, _, rest = page.partition(start)
    _, _, after = rest.partition(end)
    PAGE.write_text(f"{before}{start}{text}{end}{after}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Judge families and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", help="model types; all by default")
    parser.add_argument("--page", action="store_true", help="write the table into docs/models.md")
    parser.add_argument("--again", action="store_true", help="forget results that are kept")
    parser.add_argument("--limit", type=int, default=LIMIT, help="seconds a family")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    huggingface.register()
    kept: dict[str, dict[str, Any]] = {}
    if KEPT.exists() and not chosen.again:
        for line in KEPT.read_text().splitlines():
            entry = json.loads(line)
            if entry["versions"] == versions():
                kept[entry["family"]] = entry
    KEPT.parent.mkdir(exist_ok=True)
    every = [name for name in CONFIG_MAPPING if find_name(name)]
    results = {}
    for family in chosen.families or every:
        if family not in kept or chosen.families:
            entry = {"family": family, "versions": versions(), **in_a_process(family, chosen.limit)}
            with KEPT.open("a") as file:
                file.write(json.dumps(entry) + "\n")
            kept[family] = entry
        results[family] = kept[family]
        cases = results[family]["cases"]
        told = results[family].get("unbuilt") or "; ".join(f"{name}: {text}" for name, text in cases.items())
        print(f"{family:32} {verdict(results[family]):10} {told}", flush=True)
    print(table(results))
    if chosen.page:
        write_page(table(results))
    return int(any(verdict(result) in ("differs", "died") for result in results.values()))


def find_name(model_type: str) -> bool:
    """Say whether a model type has a model, without importing it."""
    names = (f"MODEL_FOR_{name}_MAPPING_NAMES" for name in HEADS)
    return any(model_type in getattr(modeling_auto, name, {}) for name in (*names, "MODEL_MAPPING_NAMES"))


if __name__ == "__main__":
    sys.exit(main())
