"""Configurations: presets, files and overrides."""

import pytest

from ropewalk.experiments.bert_positions.config import SCHEMES, Config, load_config


def test_presets():
    assert load_config("smoke") == Config()
    assert load_config("small").options_of("rerope") == {"window": 64}
    small, medium = load_config("small"), load_config("medium")
    n_tokens = [config.steps * config.batch_size * config.train_length for config in (small, medium)]
    assert n_tokens[1] >= 10 * n_tokens[0]
    assert medium.seeds == small.seeds
    assert load_config("base").longest == 4096
    assert load_config("base").schemes == list(SCHEMES)
    assert load_config("base", corpus=["a"]).dataset is None  # the later says alone where the text is from


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.yaml", "steps: 7\nlearning_rate: 1.0e-2\nschemes: [rope, rerope]\nscheme_options: {rerope: {window: 3}}\n"),
        ("a.toml", 'steps = 7\nlearning_rate = 1e-2\nschemes = ["rope", "rerope"]\nscheme_options.rerope.window = 3\n'),
    ],
)
def test_the_command_line_wins_over_a_file_and_that_over_a_preset(tmp_path, name, text):
    file = tmp_path / name
    file.write_text(text)
    config = load_config("small", file, steps=9, seeds=None)
    assert (config.steps, config.learning_rate, config.seeds) == (9, 1e-2, [0, 1, 2])
    assert config.schemes == ["rope", "rerope"]
    assert config.options_of("rerope") == {"window": 3}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"stepz": 3}, "there is no key 'stepz'; there are: schemes"),
        ({"steps": "ten"}, "Field 'steps' expected int, got str"),
        ({"steps": 0}, r"steps is 0, but must be in \[1, inf\)"),
        ({"held_out": 1.0}, r"held_out is 1.0, but must be in \(0, 1\)"),
        ({"schemes": ["rope", "rotary"]}, "'rotary'"),
        ({"seeds": [1, 1]}, "one or more values, each only once"),
        ({"seeds": [-1]}, r"seeds is \[-1\], but must be 0 or more"),
        ({"corpus": ["a"], "dataset": "b"}, "choose one of them"),
        ({"length_multiples": [1, 2, 3]}, "must rise from 1 or more, and divide the last"),
        ({"num_heads": 3}, "must be divisible by num_heads"),
        ({"checkpoint_every": 15}, "log_every is 10, but must divide checkpoint_every, 15"),
        ({"scheme_options": {"rerope": {"windo": 3}}}, "'rerope' cannot be built with .*windo"),
    ],
)
def test_values_that_cannot_be(values, message):
    with pytest.raises(ValueError, match=message):
        load_config("smoke", **values)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.ini", "", "must end in .yaml, .yml or .toml"),
        ("a.toml", "a = ", "a.toml cannot be read"),
        ("a.yaml", "[1]", "holds a list, but must hold keys and values"),
        ("a.yaml", "steps: 0", "a.yaml or the command line: steps is 0"),
    ],
)
def test_files_that_cannot_be(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        load_config("smoke", tmp_path / name)
    with pytest.raises(
        ValueError, match="preset 'large' does not exist; there are: smoke, laptop, small, medium, base"
    ):
        load_config("large")
