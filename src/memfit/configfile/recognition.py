"""Which kind of configuration a file is, by what it holds."""

from __future__ import annotations

from memfit.errors import ConfigFileError

from . import kinds
from .document import Document
from .kinds import Kind
from .tree import Key, Tree, dotted

_UNKNOWN = (
    "it is no kind of configuration that memfit knows (transformers TrainingArguments, Lightning, "
    "Hydra, DeepSpeed, Accelerate, axolotl, LLaMA-Factory). Say which key holds what in a small "
    'file, such as micro_batch = "loader.size" and accumulation = "loop.every", and give it with '
    "--mapping"
)
_ARGUMENT_NAMES = {
    *("num_train_epochs", "save_strategy", "eval_strategy", "logging_steps", "lr_scheduler_type"),
    "overwrite_output_dir",
}
_STAGE_NAMES = {"anchor_level", "positive_level", "positive_relation", "n_positives", "n_negatives"}
_DEEPSPEED_NAMES = {"train_batch_size", "train_micro_batch_size_per_gpu", "zero_optimization"}


def recognise(document: Document) -> Kind:
    """Tell the kind of a file.

    Raises:
        ConfigFileError: if it is none that is known.
    """
    found = _python_kind(document.tree) if document.format == "Python" else _kind(document.tree)
    if found is None:
        raise ConfigFileError(
            _UNKNOWN,
            document.path,
        )
    return found


def has_arguments(document: Document) -> bool:
    """Return whether a file has arguments of transformers' own name for the micro-batch."""
    return any(key[-1] == "per_device_train_batch_size" for key in document.tree.entries)


def home_of(document: Document, kind: Kind) -> Key:
    """Return the group that a kind's keys are in.

    Raises:
        ConfigFileError: if there are several such groups.
    """
    if not kind.anchors:
        return ()
    for name in kind.anchors:
        homes = [key[:-1] for key in document.tree.entries if key[-1] == name]
        if len(homes) > 1:
            raise ConfigFileError(
                f"{name} is in it {len(homes)} times ("
                f"{', '.join(dotted((*home, name)) for home in homes)}), so say with --mapping "
                "which is meant",
                document.path,
            )
        if homes:
            return homes[0]
    return ()


def _kind(tree: Tree) -> Kind | None:
    """Try the kinds from the most particular to the most general."""
    top = set(tree.under(()))
    if "distributed_type" in top or {"mixed_precision", "num_processes"} <= top:
        return kinds.ACCELERATE
    if top & _DEEPSPEED_NAMES:
        return kinds.DEEPSPEED
    if "micro_batch_size" in top or {"base_model", "sequence_len"} <= top:
        return kinds.AXOLOTL
    names = {key[-1] for key in tree.entries}
    if "per_device_train_batch_size" in names or _is_like_training_arguments(top):
        return kinds.LLAMA_FACTORY if "finetuning_type" in names else kinds.TRANSFORMERS
    return _of_a_tree(tree, top)


def _of_a_tree(tree: Tree, top: set[str]) -> Kind | None:
    if _is_stage(top):
        return kinds.STAGE
    if _is_chain(tree):
        return kinds.CHAIN
    for group in (("trainer",), ("training", "trainer"), ("training",)):
        if kinds.TRAINER_NAMES & set(tree.under(group)):
            return kinds.HYDRA
    hydra_keys = (tuple(key.split(".")) for keys in kinds.HYDRA.keys.values() for key in keys)
    found = any(key in tree.entries or key in tree.groups for key in hydra_keys)
    return kinds.HYDRA if found or "defaults" in top else None


def _python_kind(tree: Tree) -> Kind | None:
    names = {key[-1] for key in tree.entries}
    if "per_device_train_batch_size" in names or _calls_training_arguments(tree):
        return kinds.TRANSFORMERS
    if set(tree.under(("Accelerator",))) & kinds.ACCELERATOR_NAMES:
        return kinds.ACCELERATE_PYTHON
    if set(tree.under(("Trainer",))) & kinds.TRAINER_NAMES:
        return kinds.LIGHTNING_PYTHON
    return None


def _calls_training_arguments(tree: Tree) -> bool:
    return any(
        key[0].endswith("TrainingArguments") and "output_dir" in tree.under(key)
        for key in tree.groups
        if len(key) == 1
    )


def _is_like_training_arguments(top: set[str]) -> bool:
    """Return whether a file that leaves the batch to its default is one of TrainingArguments."""
    has_another_batch = any("batch_size" in name for name in top)
    return "output_dir" in top and bool(top & _ARGUMENT_NAMES) and not has_another_batch


def _is_stage(top: set[str]) -> bool:
    return len(top & _STAGE_NAMES) >= 2


def _is_chain(tree: Tree) -> bool:
    """Return whether a list of stages is what the file is about."""
    for name in ("stages", "chain", "curriculum"):
        if (name, "0", "max_epochs") in tree.entries or (name, "0", "name") in tree.entries:
            return True
        if (name, "0") in tree.entries:
            return True
    return False
