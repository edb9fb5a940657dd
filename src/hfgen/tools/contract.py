"""What hfgen uses of transformers beyond its documented interface, checked against transformers' source."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

SOURCE = Path(__file__).parents[1]  # where hfgen's own source lies

#: Names of the mixin that are hfgen's own, or of modes that transformers has moved to repositories.
OWN = frozenset(
    "stream astream session generate_batch _prepare_call _mixed_view _contrastive_search _dola_decoding "
    "_group_beam_search _constrained_beam_search".split()
)

#: Private attribute → the file of transformers that has it, and what hfgen reads it for.
PRIVATE: dict[str, tuple[str, str]] = {
    "_active_collector": ("utils/output_capturing.py", "compiled decoder layers"),
    "_attn_implementation": ("configuration_utils.py", "fingerprints of stored prefixes"),
    "_attn_implementation_internal": ("configuration_utils.py", "generate_batch; hfgen.exact"),
    "_experts_implementation_internal": ("configuration_utils.py", "hfgen.exact"),
    "_bos_token_tensor": ("generation/utils.py", "special tokens, as models read them"),
    "_can_compile_fullgraph": ("modeling_utils.py", "which models mask a static cache"),
    "_compile_all_devices": ("generation/configuration_utils.py", "compilation on the CPU"),
    "_decoder_start_token_tensor": ("generation/utils.py", "special tokens, as models read them"),
    "_eos_token_tensor": ("generation/utils.py", "special tokens, as models read them"),
    "_expand_multimodal_outputs": ("generation/utils.py", "encoded images of beams and samples"),
    "_get_candidate_generator": ("generation/utils.py", "drafters of transformers"),
    "_get_default_generation_params": ("generation/configuration_utils.py", "default values"),
    "_get_generation_parameters": ("configuration_utils.py", "fields in a model's own config"),
    "_get_static_cache_init_shape": ("generation/utils.py", "static caches of prompts in chunks"),
    "_is_stateful": ("modeling_utils.py", "models that cannot be rolled back"),
    "_is_user_defined": ("generation/utils.py", "caches of the caller"),
    "_load_model": ("cli/serving/model_manager.py", "hfgen serve"),
    "_load_processor": ("cli/serving/model_manager.py", "hfgen serve"),
    "_mask_length": ("generation/utils.py", "the length of masks, as models read it"),
    "_non_streaming": ("cli/serving/response.py", "hfgen serve"),
    "_normalize_input": ("cli/serving/response.py", "hfgen serve"),
    "_normalize_tools": ("cli/serving/response.py", "hfgen serve"),
    "_optimize_model_for_decode": ("generation/utils.py", "kernels of experts"),
    "_output_capturing_hooks_installed": ("utils/output_capturing.py", "drafts by early exit"),
    "_pad_token_tensor": ("generation/utils.py", "special tokens, as models read them"),
    "_prepare_position_ids_for_generation": ("generation/utils.py", "positions of prompts"),
    "_reorder_cache": ("generation/utils.py", "beams of models with a cache of their own"),
    "_supports_default_dynamic_cache": ("generation/utils.py", "which models take a cache"),
    "_streaming": ("cli/serving/response.py", "hfgen serve"),
    "_validate_request": ("cli/serving/utils.py", "hfgen serve"),
    "_tp_size": ("generation/utils.py", "the ranks of tensor parallelism"),
}


def hooks() -> dict[str, list[str]]:
    """The methods that take the place of transformers', and the names of their parameters."""
    from .. import mixin  # imports much of transformers, which may have moved

    functions = {n: getattr(each, "__func__", each) for n, each in mixin.OWN.items()}
    return {
        name: list(inspect.signature(function).parameters)
        for name, function in functions.items()
        if callable(function) and name not in OWN
    }


def imports() -> dict[tuple[str, str], str]:
    """Return ``(module, name)`` of transformers → the first file that imports it; without documented names."""
    places: dict[tuple[str, str], str] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        place = path.relative_to(SOURCE).as_posix()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("transformers."):
                for each in node.names:
                    places.setdefault((str(node.module), each.name), place)
    return places


def moved_names(folder: Path) -> list[str]:
    """What the transformers in ``folder`` lacks, a line each; for when hfgen cannot be imported, too."""
    lines = []
    for (module, name), place in imports().items():
        base = folder.joinpath(*module.split(".")[1:])
        files = base.with_suffix(".py"), base / "__init__.py"
        is_module = (base / f"{name}.py").exists() or (base / name).is_dir()
        if not is_module and not any(_has_name(file, name) for file in files):
            lines.append(f"{module}.{name}: is not there; hfgen/{place} imports it")
    for name, (path, purpose) in PRIVATE.items():
        if not _has_name(folder / path, name):
            lines.append(f"{name}: is not in {path}; hfgen reads it for {purpose}")
    return lines


def _has_name(file: Path, name: str) -> bool:
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    return re.search(rf"\b{name}\b", text) is not None


def moved_hooks(folder: Path) -> list[str]:
    """The methods that are not there any more, or take other parameters, a line each."""
    file = folder / "generation" / "utils.py"
    tree = ast.parse(file.read_text(encoding="utf-8")) if file.exists() else ast.Module([], [])
    classes = (node for node in tree.body if isinstance(node, ast.ClassDef))
    body = next((node.body for node in classes if node.name == "GenerationMixin"), [])
    theirs = {
        node.name: [p.arg for p in ast.iter_child_nodes(node.args) if isinstance(p, ast.arg)]
        for node in body
        if isinstance(node, ast.FunctionDef)
    }
    lines = []
    for name, ours in hooks().items():
        if name not in theirs:
            lines.append(f"GenerationMixin.{name}: is not there")
        elif theirs[name] != ours:
            takes, our = ", ".join(theirs[name]), ", ".join(ours)
            lines.append(f"GenerationMixin.{name}: takes ({takes}), and hfgen's ({our})")
    return lines
