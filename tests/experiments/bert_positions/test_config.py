"""The configuration: presets, files and the command line, and what is said of a wrong key or value."""

import re
import sys
from dataclasses import fields, replace

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from ropewalk.experiments.bert_positions.config import PRESETS, SCHEMES, Config, ConfigError, load_config


@pytest.fixture
def write(tmp_path):
    def write_file(text, name="run.yaml"):
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return write_file


def distinct(values, **sizes):
    return st.lists(values, min_size=1, unique=True, **sizes).map(tuple)


positive = st.integers(1, 10**6)
texts = st.text(min_size=1, max_size=20).filter(lambda text: text.isprintable())
configs = st.builds(
    Config,
    schemes=distinct(st.sampled_from(SCHEMES)),
    seeds=distinct(st.integers(0, 2**40)),
    dataset=st.none() | texts,
    dataset_column=texts,
    max_megabytes=st.floats(1e-3, 1e9),
    warmup=st.floats(0, 1, exclude_max=True),
    learning_rate=st.floats(1e-12, 1),
    scheme_options=st.fixed_dictionaries({}, optional={"rerope": st.fixed_dictionaries({"window": positive})}),
    batch_size=st.just(12),
    accumulation_steps=st.sampled_from([1, 2, 3, 4, 6, 12]),
    precision=st.sampled_from(["auto", "no", "bf16", "fp16"]),
    length_multiples=st.sampled_from([(1,), (2, 4), (1, 3, 9)]),
    steps=positive,
)


@settings(max_examples=25, deadline=None)
@given(config=configs)
def test_a_file_of_all_keys_gives_the_configuration_back(tmp_path_factory, config):
    path = tmp_path_factory.mktemp("config") / "config.yml"
    path.write_text(yaml.safe_dump(config.as_dict(), allow_unicode=True), encoding="utf-8")
    for preset in PRESETS:
        assert load_config(preset, path) == config
    assert load_config("smoke", **config.as_dict()) == config
    assert load_config("smoke", **config.as_dict()) == config


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_compare_all_schemes(preset):
    config = load_config(preset)
    assert config.schemes == SCHEMES
    assert config.length_multiples == (1, 2, 4, 8)
    assert config.longest == 8 * config.train_length


def test_the_sizes_of_bert_base():
    config = load_config("base")
    sizes = (config.num_layers, config.hidden_size, config.num_heads, config.intermediate_size, config.vocab_size)
    assert sizes == (12, 768, 12, 3072, 30522)


def test_the_command_line_wins_over_the_file_and_that_over_the_preset(write):
    file = write("steps: 7\nseeds: [3, 4]\nlearning_rate: 1e-3\nprecision: no\nscheme_options: {rerope: {window: 5}}\n")
    config = load_config("small", file, steps=9, seeds=None)
    assert (config.steps, config.seeds, config.learning_rate, config.precision) == (9, (3, 4), 1e-3, "no")
    assert config.vocab_size == PRESETS["small"]["vocab_size"]
    assert config.options_of("rerope") == {"window": 5}


def test_toml(write):
    text = 'schemes = ["rope"]\nmax_megabytes = 3\n[scheme_options.rerope]\nleak = 2.0\n'
    config = load_config("smoke", write(text, "run.toml"))
    assert config == Config(schemes=("rope",), max_megabytes=3.0, scheme_options={"rerope": {"leak": 2.0}})
    assert isinstance(config.max_megabytes, float)


def test_an_empty_file_changes_nothing(write):
    assert load_config("smoke", write("")) == load_config("smoke") == Config()


def test_where_the_text_is_from_is_said_by_the_last(write):
    assert load_config("base", corpus=["a.txt"]).dataset is None
    assert load_config("base", corpus=["a.txt"]).corpus == ("a.txt",)
    assert load_config("smoke", write("corpus: [a.txt]"), dataset="name").corpus == ()
    assert load_config("base", corpus=()).dataset == PRESETS["base"]["dataset"]
    assert load_config("base", write("dataset: null")).dataset is None


def test_rerope_has_a_window_of_half_a_training_window():
    assert Config(train_length=48).options_of("rerope") == {"window": 24}
    assert Config(scheme_options={"rerope": {"leak": 2.0}}).options_of("rerope") == {"window": 16, "leak": 2.0}
    assert Config().options_of("rope") == {}


def test_checking_draws_no_random_numbers():
    state = torch.get_rng_state()
    load_config("small")
    assert torch.equal(state, torch.get_rng_state())


WRONG = [
    ("stesp: 3", "stesp", "did you mean 'steps'"),
    ("zzz: 3", "zzz", "there are: schemes, "),
    ("3: 3", "3", "there is no key 3"),
    ("steps: many", "steps", "is 'many', but must be a whole number"),
    ("steps: 3.5", "steps", "is 3.5, but must be a whole number"),
    ("steps: true", "steps", "is True, but must be a whole number"),
    ("steps: 0", "steps", "is 0, but must be at least 1"),
    ("learning_rate: fast", "learning_rate", "is 'fast', but must be a number"),
    ("learning_rate: true", "learning_rate", "is True, but must be a number"),
    ("learning_rate: .inf", "learning_rate", "is inf, but must be a number"),
    ("learning_rate: .nan", "learning_rate", "is nan, but must be a number"),
    ("learning_rate: 0", "learning_rate", "is 0.0, but must be in (0, inf)"),
    ("dropout: 1", "dropout", "is 1.0, but must be in [0, 1)"),
    ("held_out: 1", "held_out", "is 1.0, but must be in (0, 1)"),
    ("mask_probability: 0", "mask_probability", "is 0.0, but must be in (0, 1)"),
    ("max_megabytes: -1", "max_megabytes", "is -1.0"),
    ("dataset: 3", "dataset", "is 3, but must be text, or nothing"),
    ("dataset: ''", "dataset", "is empty"),
    ("corpus: book.txt", "corpus", "is 'book.txt', but must be a list of texts"),
    ("{corpus: [a], dataset: b}", "dataset", "but corpus is given too"),
    ("seeds: [1, x]", "seeds", "is [1, 'x'], but must be a list of whole numbers"),
    ("seeds: []", "seeds", "is [], but must have one or more"),
    ("seeds: [1, 1]", "seeds", "is [1, 1]"),
    ("seeds: [-1]", "seeds", "has -1"),
    ("schemes: [rope, ropes]", "schemes", "has 'ropes', but must be of standard, absolute"),
    ("precision: fp8", "precision", "has 'fp8', but must be of auto, no, bf16, fp16"),
    ("length_multiples: [2, 1]", "length_multiples", "rising order"),
    ("length_multiples: [2, 3]", "length_multiples", "divides the last"),
    ("length_multiples: [0, 1]", "length_multiples", "positive"),
    ("accumulation_steps: 3", "accumulation_steps", "is 3, but must divide batch_size, 32"),
    ("batch_size: 33\naccumulation_steps: 2", "accumulation_steps", "33"),
    ("num_heads: 3", "num_heads", "is 3, but must divide hidden_size, 64"),
    ("hidden_size: 63", "hidden_size", "must divide hidden_size, 63"),
    ("hidden_size: 36\nnum_heads: 4\nschemes: [rope]", "hidden_size", "the scheme 'rope' cannot be made"),
    ("scheme_options: {rerope: 64}", "scheme_options", "but must be a mapping of schemes"),
    ("scheme_options: {rerop: {window: 64}}", "scheme_options", "has 'rerop', but must be of"),
    ("scheme_options: {rerope: {window: 0}}", "scheme_options", "'rerope' cannot be made with {'window': 0}"),
    ("scheme_options: {rerope: {windwo: 9}}", "scheme_options", "windwo"),
    ("train_length: 7", "train_length", "is 7, but must be at least 8"),
    ("vocab_size: 100", "vocab_size", "is 100, but must be at least 512"),
]


@pytest.mark.parametrize(("text", "key", "message"), WRONG, ids=[case[0][:30] for case in WRONG])
def test_a_wrong_key_or_value_is_named_with_its_file(write, text, key, message):
    file = write(text)
    with pytest.raises(ValueError, match=f"^{re.escape(str(file))}: ") as raised:
        load_config("smoke", file)
    said = str(raised.value)
    assert key in said.removeprefix(str(file))
    assert message in said


@pytest.mark.parametrize(
    "given", [{"steps": 0}, {"steps": "3"}, {"step": 3}, {"batch_size": 9, "accumulation_steps": 2}]
)
def test_the_command_line_is_named(write, given):
    with pytest.raises(ValueError, match=r"^the command line: .*(step|batch_size)"):
        load_config("smoke", write("log_every: 3"), **given)


def test_of_keys_that_do_not_go_together_the_changed_one_is_blamed(write):
    file = write("batch_size: 33")
    with pytest.raises(ValueError, match=r"^the command line: accumulation_steps is 2"):
        load_config("smoke", file, accumulation_steps=2)
    file = write("accumulation_steps: 5")
    with pytest.raises(ValueError, match=r"run\.yaml: accumulation_steps is 5"):
        load_config("smoke", file, steps=3)


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        ("- 1\n", "run.yaml", "holds a list, but must hold keys and values"),
        ("a: [1", "run.yaml", "is no YAML"),
        ("a: !!python/object:os.system {}", "run.yaml", "is no YAML"),
        ("a = [1", "run.toml", "is no TOML"),
        ("steps: 1", "run.json", "must end in .yaml, .yml or .toml"),
    ],
)
def test_files_that_are_no_configuration(write, text, name, message):
    file = write(text, name)
    with pytest.raises(ValueError, match=message) as raised:
        load_config("smoke", file)
    assert str(raised.value).startswith(f"{file}: ")


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ValueError, match=r"missing\.yaml: the configuration file cannot be read"):
        load_config("smoke", tmp_path / "missing.yaml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"binary\.toml: the configuration file cannot be read"):
        load_config("smoke", tmp_path / "binary.toml")


def test_an_unknown_preset():
    with pytest.raises(ValueError, match="preset 'large' does not exist; there are: smoke, small, base"):
        load_config("large")


def test_without_yaml_it_says_what_to_install(write, monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(ModuleNotFoundError, match=r"ropewalk\[train\]"):
        load_config("smoke", write("steps: 1"))
    assert load_config("smoke").steps == Config().steps


def test_a_configuration_is_checked_however_it_is_made():
    with pytest.raises(ConfigError, match="steps is 0") as raised:
        replace(Config(), steps=0)
    assert raised.value.key == "steps"
    assert {field.name for field in fields(Config)} == set(Config().as_dict())
