"""What users may rely on, as text: public names with their signatures, operators with their schemas, commands.

`python tests/public_api.py` writes `public_api.txt` anew, after a change that is meant.
"""

import importlib
import inspect
from pathlib import Path

import torch
import typer.main

import ropewalk
from ropewalk.cli import app

HELD = Path(__file__).with_suffix(".txt")
# What is public beside `ropewalk` itself.
MODULES = (
    "ropewalk.integrations.huggingface",
    "ropewalk.integrations.vllm_ops",
    "ropewalk.parallel",
    "ropewalk.testing",
)
OPERATORS = ("rope", "rope_", "rotary_embedding", "append_kv", "attend", "attend_backward")


def describe_api():
    """Lines in groups, the same on every machine and Python."""
    public = [getattr(ropewalk, name) for name in ropewalk.__all__]
    groups = [_describe_module(ropewalk, ropewalk.__all__, public)]
    for name in MODULES:
        module = importlib.import_module(name)
        names = getattr(module, "__all__", None) or [
            name
            for name, value in vars(module).items()
            if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
        ]
        groups.append(_describe_module(module, names, public))
    groups.append(str(getattr(torch.ops.ropewalk, name).default._schema) for name in OPERATORS)
    groups.append(_describe_command("ropewalk", typer.main.get_command(app)))
    return "\n\n".join("\n".join(group) for group in groups) + "\n"


def _describe_module(module, names, public):
    for name in sorted(names):
        value = getattr(module, name)
        path = f"{module.__name__}.{name}"
        if inspect.isclass(value):
            bases = ", ".join(base.__name__ for base in value.__bases__ if base is not object)
            yield f"class {path}{_signature(value)}" + (f", a {bases}" if bases else "")
            yield from (f"    {line}" for line in _describe_members(value, public))
        elif callable(value):
            yield f"{path}{_signature(value)}"
        elif isinstance(value, dict):
            yield f"{path}: " + ", ".join(map(repr, value))
        else:
            yield f"{path}: {type(value).__name__}"


class _Annotation(str):
    __slots__ = ()
    __repr__ = str.__str__  # as it is written, without quotation marks


def _signature(function):
    signature = inspect.signature(function)
    parameters = [
        parameter.replace(annotation=_plain(parameter.annotation)) for parameter in signature.parameters.values()
    ]
    return str(signature.replace(parameters=parameters, return_annotation=_plain(signature.return_annotation)))


def _plain(annotation):
    return _Annotation(annotation) if isinstance(annotation, str) else annotation


def _describe_members(kind, public):
    """What the class defines, and what its bases in this library do that are not public themselves."""
    members = {}
    for base in reversed(kind.__mro__):
        if base is kind or (base.__module__.startswith("ropewalk") and base not in public):
            members |= {name: value for name, value in vars(base).items() if not name.startswith("_")}
    fields = getattr(kind, "__dataclass_fields__", {})
    for name, value in sorted(members.items()):
        if isinstance(value, property):
            yield f"{name}: property"
        elif isinstance(value, classmethod | staticmethod):
            yield f"{type(value).__name__} {name}{_signature(value.__func__)}"
        elif inspect.isfunction(value):
            yield f"{name}{_signature(value)}"
        elif name not in fields:  # those are in the constructor's signature
            yield f"{name}: {type(value).__name__}"


def _describe_command(path, command):
    if hasattr(command, "commands"):
        for name, inner in sorted(command.commands.items()):
            yield from _describe_command(f"{path} {name}", inner)
        return
    names = [
        parameter.name.upper() if parameter.param_type_name == "argument" else "/".join(parameter.opts)
        for parameter in command.params
    ]
    yield " ".join([path, *names])


if __name__ == "__main__":
    HELD.write_text(describe_api(), encoding="utf-8")
