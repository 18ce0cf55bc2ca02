"""`use_ropewalk_rope` for every family of the installed transformers, read from its source: no model is built."""

from __future__ import annotations

import ast
import math
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from helpers.huggingface_models import transformers
from torch import nn

from ropewalk.integrations import huggingface
from ropewalk.integrations.huggingface import rotation

FILES = {
    path.stem.removeprefix("modeling_"): path
    for path in sorted((Path(transformers.__file__).parent / "models").glob("*/modeling_*.py"))
}
# Families with a rotation that apply_rope does not have, and the name of it.
REFUSED = {
    "clvp": "apply_rotary_pos_emb",  # rotates the values too
    "codegen": "apply_rotary_pos_emb",  # of one tensor, by sin and cos in this order
    "deepseek_v2": "apply_rotary_emb",  # by complex numbers
    "deepseek_v4": "apply_rotary_pos_emb",  # of the last features
    "dinov3_vit": "apply_rotary_pos_emb",  # leaves prefix tokens alone
    "edgetam_video": "apply_rotary_pos_emb_2d_cross_attn",
    "eomt_dinov3": "apply_rotary_pos_emb",
    "gptj": "apply_rotary_pos_emb",
    "llama4": "apply_rotary_emb",
    "muse_glimmer_assistant": "apply_rotary_pos_emb",  # of fewer queries than keys
    "musicflamingo": "apply_rotary_time_emb",
    "roformer": "RoFormerSelfAttention.apply_rotary_position_embeddings",
    "sam2_video": "apply_rotary_pos_emb_2d",
    "sam3": "apply_rotary_pos_emb_2d",
    "sam3_tracker_video": "apply_rotary_pos_emb_2d",
    "sapiens2": "apply_rotary_pos_emb",
    "seamless_m4t": "SeamlessM4TConformerSelfAttention._apply_rotary_embedding",
    "vjepa2": "VJEPA2RopeAttention.apply_rotary_embeddings",
    "wav2vec2_bert": "Wav2Vec2BertSelfAttention._apply_rotary_embedding",
    "wav2vec2_conformer": "Wav2Vec2ConformerSelfAttention._apply_rotary_embedding",
}


class Bare(ast.NodeTransformer):
    """Takes annotations, decorators and computed defaults from functions, which need transformers imported."""

    def visit_FunctionDef(self, node):
        self.generic_visit(node)
        node.decorator_list, node.returns = [], None
        arguments = node.args
        for argument in ast.walk(arguments):
            if isinstance(argument, ast.arg):
                argument.annotation = None
        constant = [
            default if isinstance(default, ast.Constant) else ast.Constant(None) for default in arguments.defaults
        ]
        arguments.defaults = constant
        arguments.kw_defaults = [default and ast.Constant(None) for default in arguments.kw_defaults]
        return node


def bare_model(family):
    """A model of a family's classes with their methods, and without their initialisation, bases and imports."""
    name, body = f"bare_{family}", []
    for node in ast.parse(FILES[family].read_text()).body:
        if isinstance(node, ast.FunctionDef):
            body.append(Bare().visit(node))
        elif isinstance(node, ast.ClassDef):
            methods = [Bare().visit(x) for x in node.body if isinstance(x, ast.FunctionDef) and x.name != "__init__"]
            body.append(ast.ClassDef(node.name, [ast.Name("Module", ast.Load())], [], methods or [ast.Pass()], []))
    module = ModuleType(name)
    vars(module).update(torch=torch, nn=nn, Module=nn.Module, math=math)
    exec(compile(ast.fix_missing_locations(ast.Module(body, [])), name, "exec"), vars(module))
    classes = [x for x in vars(module).values() if isinstance(x, type) and x.__module__ == name]
    return module, nn.ModuleList(each() for each in classes)


CALL = re.compile(r"(?:apply\w*(?:rotary|rope)|rotate_(?:half|quer|every|pair))\w*\(")


def rotates(source):
    """Whether a file's classes call anything whose name is a rotation's; by lines, as parsing takes seconds."""
    in_class = False
    for line in source.splitlines() if re.search("rotary|rotate_", source) else ():
        if line[:1] == "@" or line[:1].isidentifier():
            in_class = line.startswith("class ")
        elif in_class and CALL.search(line) and not line.lstrip().startswith("def "):
            return True
    return False


FAMILIES = [family for family, path in FILES.items() if rotates(path.read_text())]


def served(family):
    """The functions that are replaced, and the error."""
    module, model = bare_model(family)
    sys.modules[module.__name__] = module
    before = dict(vars(module))
    try:
        with huggingface.use_ropewalk_rope(model) as handle:
            replaced = {name for name, value in vars(module).items() if before.get(name) is not value}
            assert {f"{module.__name__}.{name}" for name in replaced} == set(handle.functions)
        return replaced, ""
    except ValueError as error:
        return set(), str(error)
    finally:
        assert dict(vars(module)) == before
        assert not rotation._ROTATIONS
        del sys.modules[module.__name__]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_served_or_refused_by_name(family):
    replaced, error = served(family)
    if not replaced:
        assert re.search(rf"bare_{family}\.[\w.]*(rot|rope).* must stay: apply_rope does not support", error)
    if transformers.__version__.startswith("5.23."):
        assert (REFUSED.get(family) is None) == bool(replaced)
        assert f"bare_{family}.{REFUSED.get(family, '')}" in error or replaced


def test_most_families_are_served():
    """Those of REFUSED are all that are not, by the test before."""
    assert len(FAMILIES) > 150
    assert len(REFUSED.keys() & set(FAMILIES)) < 0.15 * len(FAMILIES)
